"""Operators that DTensor refuses or does wrong: writes to parts and by index; numbers that are a rank's part of one."""

from __future__ import annotations

import copy
import io
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hsdp
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import mesh_id, pool_for
from tests.support.share import dealt
from tests.support.twin import assert_same, full_grads, full_params


def _counted(*shape: int) -> Tensor:
    """A plain tensor whose elements differ."""
    return torch.arange(1.0, 1.0 + math.prod(shape), dtype=torch.float64).view(shape)


WRITES: dict[str, Callable[[Any], object]] = {
    "row": lambda t: t[0].fill_(3.0),
    "last row": lambda t: t[-1].mul_(2.0),
    "rows": lambda t: t[1:4].zero_(),
    "set rows": lambda t: t.__setitem__(slice(0, 3), 0.0),
    "set an element": lambda t: t.__setitem__((2, 1), 7.0),
    "set a column": lambda t: t.__setitem__((slice(None), 0), 5.0),
    "plain rows": lambda t: t.__setitem__(slice(1, 4), _counted(3, t.shape[1])),
    "a plain row": lambda t: t.__setitem__(4, _counted(t.shape[1])),
    "plain columns": lambda t: t.__setitem__((slice(None), slice(1, 3)), _counted(t.shape[0], 2)),
    "a plain block": lambda t: t.__setitem__((slice(0, 4, 2), slice(0, 3)), _counted(2, 3)),
    "one plain row for several": lambda t: t.__setitem__(slice(1, None), _counted(t.shape[1]).float()),
    "a plain copy": lambda t: t.data.narrow(1, 1, 2).t().copy_(_counted(2, 1)),
    "steps": lambda t: t[::2].add_(1.0),
    "rows of rows": lambda t: t[1:5][1:3].mul_(-1.0),
    "a row of rows": lambda t: t[1:5][2].sub_(4.0),
    "chunks": lambda t: [piece.mul_(at) for at, piece in enumerate(t.chunk(3))],
    "foreach": lambda t: torch._foreach_mul_(list(t.split(2)), 3.0),
    "foreach of a row": lambda t: torch._foreach_mul_(list(t[1].split(2)), 3.0),
    "split by sizes": lambda t: t.split([1, t.shape[0] - 1])[1].clamp_(-0.1, 0.1),
    "narrow": lambda t: t.narrow(0, 1, 2).copy_(t.narrow(0, 2, 2) * 2.0),
    "diagonal": lambda t: t.diagonal().fill_(1.0),
    "the unit matrix": lambda t: torch.nn.init.eye_(t),
    "the unit matrix, square": lambda t: torch.eye(t.shape[0], out=t) if t.shape[0] == t.shape[1] else None,
    "flat": lambda t: t.view(-1)[:7].zero_(),
    "data": lambda t: t.data[2:].mul_(0.5),
    "detached": lambda t: t.detach()[:2].detach().zero_(),
    "transposed": lambda t: t.t()[1].zero_(),
    "twice": lambda t: (rows := t[:3], rows.add_(1.0), rows.mul_(2.0)),
    "parts of parts, twice": lambda t: (rows := t[:4], rows[0].zero_(), rows[3].add_(1.0), rows.mul_(2.0)),
    "a list of rows": lambda t: t.__setitem__([3, 1], 2.0),
    "a mask of rows": lambda t: t.__setitem__(torch.arange(t.shape[0]) % 2 == 0, 0.0),
    "rows, each its own": lambda t: t.__setitem__(torch.tensor([4, 0]), torch.ones(2, 1).double()),
    "elements": lambda t: t.__setitem__(([0, -1, 2], [1, 0, 1]), 7.0),
    "where it is large": lambda t: t.__setitem__(t > 0.1, 0.1),
    "a list of columns": lambda t: t.__setitem__((slice(None), [1, 0]), 5.0),
    "rows read and written": lambda t: t.__setitem__([1, 2], t[[3, 0]] * 2.0),
    "rows multiplied": lambda t: operator.setitem(t, [1, 4], t[[1, 4]].mul_(3.0)),
    "rows added to": lambda t: t.index_put_((torch.tensor([1, 1, 3]),), t.new_ones(()), accumulate=True),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0, 3]), 1.5),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([2]), torch.ones(1, t.shape[1]).double()),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([2, 2]), torch.ones(2, t.shape[1]).double(), alpha=0.5),
    "masked_fill_": lambda t: t.masked_fill_(t > 0.1, t.new_full((), 2.5)),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([[3, 1], [0, 4]]), 2.5),
    "scatter_ of a tensor": lambda t: t.scatter_(0, torch.tensor([[3, 1], [0, 4]]), _counted(2, 2)),
    "scatter_add_": lambda t: t.scatter_add_(0, torch.tensor([[3, 3], [0, 4]]), _counted(2, 2)),
    "scatter_add_ of itself": lambda t: t.scatter_add_(1, torch.zeros(2, 2, dtype=torch.int64), t.detach().clone()),
    "scatter_reduce_": lambda t: t.scatter_reduce_(0, torch.tensor([[3, 1], [3, 4]]), _counted(2, 2), "amax"),
    "scatter_add": lambda t: t.copy_(t.scatter_add(0, torch.tensor([[3, 3], [0, 4]]), _counted(2, 2))),
    "some of the rows": lambda t: t[1:4].__setitem__([0, 2], 0.0),
    "a row, flat": lambda t: t[0].view(-1).fill_(3.0),
    "rows as rows": lambda t: t[:2].view_as(t[:2]).mul_(2.0),
    "a row of a row": lambda t: t[1].reshape(-1)[:2].zero_(),
    "rows in their shape": lambda t: t[1:3].view(2, -1).mul_(5.0),
    "rows, flattened": lambda t: t[:2].flatten().unflatten(0, (2, -1)).sub_(1.0),
    "rows, expanded": lambda t: t[1:3].expand_as(t[1:3]).contiguous().add_(1.0),
    "normal": lambda t: t[:2].masked_fill_(t[:2] > 0, 0.0),
}


def _on_columns(param: nn.Parameter) -> Shard:
    return Shard(1) if param.ndim > 1 else Shard(0)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 5)).double()


def _write_all(env: RankEnv, shape: tuple[int, ...], columns: bool) -> None:
    options: dict[str, Any] = {"mesh": env.mesh(shape), "shard_placement_fn": _on_columns if columns else None}
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, write in dealt(WRITES.items(), shape == (4,), 2):
        flat = name == "flat"
        if flat and (columns or shape[-1] == 4):
            continue  # torch flattens none that is uneven, and hsdp refuses what lies in stripes
        plain, model = _model(), _model()
        hsdp.fully_shard(model[2], **options)
        hsdp.fully_shard(model, **options)
        for m in (plain, model):
            m(x).square().mean().backward()
            with torch.no_grad():
                write(m[2].weight)
                write(m[2 if flat else 4].weight)  # which has an uneven number of rows
            write(m[2].weight.grad)
            write(m[0].weight.grad)
        try:
            assert_same(full_params(model), dict(plain.named_parameters()))
            assert_same(full_grads(model), {name: param.grad for name, param in plain.named_parameters()})
            torch.testing.assert_close(model(x), plain(x))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=mesh_id)
def test_writes_are_those_of_one_device(request: pytest.FixtureRequest, shape: tuple[int, ...], columns: bool) -> None:
    pool_for(request, shape).run(_write_all, shape, columns)


def _beside(env: RankEnv, whose: str) -> None:
    """DTensor gives what it computes the first of equal meshes that it saw, and copies of tensors have copies of theirs."""
    # Of names that no other test uses: ranks run one test behind the other, and DTensor remembers meshes for good.
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(whose,)) for _ in range(2)]
    if whose == "torch":
        fsdp.fully_shard(_model(), mesh=meshes[0])(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    else:
        hsdp.fully_shard(_model(), mesh=meshes[0])
    del meshes[0]
    plain, model = _model(), _model()
    hsdp.fully_shard(model, mesh=meshes[0])
    for m in (plain, model):
        m(torch.ones(4, 4, dtype=torch.float64)).square().sum().backward()
        weight: Any = m[2].weight
        weight.grad.data[:2] = 1.0
        with torch.no_grad():
            for one in (weight, weight.data, weight.detach()):
                one[1:3].mul_(2.0)
        copies = [torch.zeros_like(weight), weight.detach().clone(), weight.detach() * 2.0, copy.deepcopy(weight.detach())]
        for one in copies:
            one[1:3].fill_(7.0)
        m.copies = copies
    assert_same(full_params(model), dict(plain.named_parameters()))
    assert_same(full_grads(model), {name: param.grad for name, param in plain.named_parameters()})
    for mine, expected in zip(model.copies, plain.copies, strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected)


@pytest.mark.parametrize("whose", ["torch", "hsdp"])
def test_equal_meshes_are_one(pool2: Pool, whose: str) -> None:
    pool2.run(_beside, whose)


BETWEEN: dict[str, Callable[[Any], object]] = {
    "a row": lambda model: model[0].weight[0].zero_(),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "foreach, by a list": lambda model: torch._foreach_lerp_([model[0].weight], [model[0].weight.detach() * 2.0], 0.5),
}


def _between(env: RankEnv, write: str, reshard: bool) -> None:
    """A write between a forward and its backward is one like others, whatever the units kept whole."""
    model = _model()
    hsdp.fully_shard(model, mesh=env.mesh(2), reshard_after_forward=reshard)
    loss = model(torch.ones(2, 4, dtype=torch.float64)).sum()
    versions = [param._version for param in model.parameters()]
    with torch.no_grad():
        BETWEEN[write](model)
    if write == "foreach":  # counted as plain tensors' are, which is all that a device has
        assert all(param._version == before + 1 for param, before in zip(model.parameters(), versions, strict=True))
    with pytest.raises(hsdp.StaleParametersError):
        loss.backward()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("write", list(BETWEEN))
def test_writes_between_forward_and_backward_are_seen(pool2: Pool, write: str, reshard: bool) -> None:
    pool2.run(_between, write, reshard)


def _stale(env: RankEnv, write: str) -> None:
    """A part is a copy: who writes to the tensor meanwhile writes past it. All ranks say so, whoever has the rows."""
    model: Any = _model()
    hsdp.fully_shard(model, mesh=env.mesh(env.world_size))
    weight = model[2].weight
    before = weight.full_tensor()
    with torch.no_grad():
        for rows in (weight[0], weight[-2:], weight.t()[:, 0], weight[1:5][3]):
            if write == "whole":
                weight.mul_(2.0)
            elif write == "data":
                weight.data.mul_(2.0)
            elif write == "foreach":
                torch._foreach_mul_([weight], 2.0)
            elif write == "to_local":
                weight.to_local().mul_(2.0)
            else:
                for row in (0, 4, 5):
                    weight[row].mul_(2.0)
            with pytest.raises(hsdp.StateError, match=r"^a write to a part of parameter '2\.weight' .*take it anew"):
                rows.add_(1.0)
            del rows
        after = weight.full_tensor()
        assert torch.equal(after[0], before[0] * 16.0) and torch.equal(after[-2:], before[-2:] * 16.0)
        assert torch.equal(weight[1:5][1:3].add_(1.0).full_tensor(), weight.full_tensor()[2:4])


@pytest.mark.parametrize("write", ["whole", "another part", "data", "foreach", "to_local"])
@pytest.mark.parametrize("world", [2, 4])
def test_writes_to_parts_that_are_stale_are_refused(request: pytest.FixtureRequest, world: int, write: str) -> None:
    pool_for(request, (world,)).run(_stale, write)


def _stale_grad(env: RankEnv) -> None:
    model: Any = _model()
    hsdp.fully_shard(model, mesh=env.mesh((2, 2)))
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    grad = model[2].weight.grad
    row = grad[0]
    grad.mul_(2.0)
    with pytest.raises(
        hsdp.StateError, match=r"^a write to a part of the gradient of parameter '2\.weight' .*take it anew"
    ):
        row.zero_()


def test_writes_to_parts_of_gradients_that_are_stale_are_refused(pool4: Pool) -> None:
    pool4.run(_stale_grad)


OVERLAPS: dict[str, Callable[[Any], list[Any]]] = {
    "whole and row": lambda t: [t, t[0]],
    "row and whole": lambda t: [t[0], t],
    "a row twice": lambda t: [t[5], t[5]],
    "a row of rows": lambda t: [t[0], t[0:2]],
    "row and column": lambda t: [t[3], t[:, 1]],
    "turned": lambda t: [t.t()[:, 2], t[1:3]],
    "data": lambda t: [t.data[4], t[4]],
    "blocks of the same rows": lambda t: [t[:3, :2], t[:3, 2:]],
}
APART: dict[str, Callable[[Any], list[Any]]] = {
    "rows": lambda t: [t[0], t[2:4], t[5]],
    "rows of steps": lambda t: [t[::2], t[1::2]],
    "columns": lambda t: [t[:, 0], t[:, 2:4]],
    "rows of one copy": lambda t: list(t[1:4].unbind()),
    "one copy and a row of it": lambda t: [rows := t[1:4], rows[1]],
}


def _foreach(env: RankEnv, shape: tuple[int, ...], columns: bool) -> None:
    """One operator that writes to several parts: each is a copy of its own, and what they share would be lost."""
    options: dict[str, Any] = {"mesh": env.mesh(shape), "shard_placement_fn": _on_columns if columns else None}
    plain, model = _model(), _model()
    hsdp.fully_shard(model, **options)
    weight: Any = model[2].weight
    with torch.no_grad():
        for name, parts in APART.items():
            for m in (plain, model):
                torch._foreach_mul_([m[4].weight[1], *parts(m[2].weight)], 3.0)
            torch.testing.assert_close(weight.full_tensor(), plain[2].weight, msg=name)
        for name, parts in OVERLAPS.items():
            if not columns or name == "row and column":
                with pytest.raises(hsdp.StateError, match="only then take the next"):
                    torch._foreach_mul_([model[4].weight[1], *parts(weight)], 2.0)
            else:  # rows are views there, and columns two copies that do not overlap
                for m in (plain, model):
                    torch._foreach_mul_([m[4].weight[1], *parts(m[2].weight)], 2.0)
            torch.testing.assert_close(weight.full_tensor(), plain[2].weight, msg=name)
    torch.testing.assert_close(model[4].weight.full_tensor(), plain[4].weight)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=mesh_id)
def test_lists_of_parts_that_overlap_are_refused(
    request: pytest.FixtureRequest, shape: tuple[int, ...], columns: bool
) -> None:
    pool_for(request, shape).run(_foreach, shape, columns)


def _whole(env: RankEnv) -> None:
    """To a tensor itself, which torch takes `weight[:]` for, no plain one is copied: loads have checks of their own."""
    model: Any = _model()
    hsdp.fully_shard(model, mesh=env.mesh(2))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="mixed"):
            model[2].weight.copy_(torch.zeros(6, 6))
        with pytest.raises(RuntimeError, match="mixed"):
            model[2].weight[:] = torch.zeros(6, 6)


def test_plain_tensors_are_copied_to_parts_only(pool2: Pool) -> None:
    pool2.run(_whole)


def _pending(env: RankEnv) -> None:
    model: Any = _model()
    hsdp.fully_shard(model, mesh=env.mesh(2))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(hsdp.StateError, match="weight"):
        model[0].weight.grad[:2].zero_()
    with pytest.raises(hsdp.StateError, match="weight"):
        model[0].weight.grad[[1, 0]] = 0.0


def test_writes_to_parts_of_pending_sums_are_refused(pool2: Pool) -> None:
    pool2.run(_pending)


def _read(env: RankEnv) -> None:
    plain, model = _model(), _model()
    hsdp.fully_shard(model, mesh=env.mesh(2))
    rows: Any = model[0].weight[1:4]
    expected = plain[0].weight[1:4]
    assert isinstance(rows, DTensor)
    whole = rows.full_tensor()
    assert type(whole) is Tensor and type(rows.to_local()) is Tensor
    assert whole.tolist() == expected.tolist() and whole.detach().numpy().shape == (3, 4)
    assert str(rows[0, 0].item()) == str(expected[0, 0].item())
    assert "tensor" in repr(rows)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(rows.detach()._local_tensor), whole)
        copied = rows.clone()
        copied.zero_()
    file = io.BytesIO()
    torch.save(rows.detach().full_tensor(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), expected)
    # A penalty on some rows, on each rank.
    for m in (plain, model):
        m[0].weight[1:4].square().sum().backward()
        m[0].weight[[0, 2, 2]].pow(3).sum().backward()
        m[0].weight[torch.arange(6) % 3 == 1].square().sum().backward()
    assert_same({"grad": model[0].weight.grad.full_tensor()}, {"grad": plain[0].weight.grad})  # type: ignore[union-attr,operator]
    assert_same(full_params(model), dict(plain.named_parameters()), 0.0, 0.0)


def test_parts_can_be_read_as_before(pool2: Pool) -> None:
    pool2.run(_read)


def _frozen_rows(env: RankEnv, by_mask: bool) -> None:
    """An embedding of which the rows of old tokens do not train."""
    torch.manual_seed(0)
    plain, model = nn.Embedding(10, 4, padding_idx=0).double(), nn.Embedding(10, 4, padding_idx=0).double()
    model.load_state_dict(plain.state_dict())
    hsdp.fully_shard(model, mesh=env.mesh(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    for _ in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(torch.arange(10)).square().sum().backward()
            if by_mask:
                m.weight.grad[torch.arange(10) < 7] = 0  # type: ignore[index]
            else:
                m.weight.grad[:7] = 0  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_params(model), dict(plain.named_parameters()))
    model.reset_parameters()
    assert not full_params(model)["weight"][0].any()


@pytest.mark.parametrize("by_mask", [False, True])
def test_rows_of_an_embedding_are_frozen(pool2: Pool, by_mask: bool) -> None:
    pool2.run(_frozen_rows, by_mask)


def _filled(env: RankEnv) -> None:
    """Each rank would fill its addend: sums would be so many times the number."""
    model: Any = _model()
    hsdp.fully_shard(model, mesh=env.mesh(2))
    weight = model[2].weight.detach()
    for total in (weight.sum(0), weight.norm(dim=0), weight.sum(0)[0]):
        with pytest.raises(hsdp.StateError, match=r"^fill_ of a DTensor .*over 2 ranks.*full_like"):
            total.fill_(5.0)
        assert torch.equal(total.fill_(0.0).full_tensor(), torch.zeros(total.shape, dtype=total.dtype))
    assert torch.equal(weight.amax(0).fill_(5.0).full_tensor(), torch.full_like(weight.amax(0).full_tensor(), 5.0))


def test_what_is_to_be_added_up_is_not_filled(pool2: Pool) -> None:
    pool2.run(_filled)


def _asked(env: RankEnv) -> None:
    model: Any = _model()
    hsdp.fully_shard(model, mesh=env.mesh(2))
    model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    grad = model[0].weight.grad
    for made, ask in ((grad.norm(), Tensor.item), (grad.sum(), float), (grad.isnan().any(), bool)):
        if ask is not bool or made.placements[0].is_partial():  # from torch 2.14 on `any` is whole
            with pytest.warns(UserWarning, match="gives this rank's part of it"):
                ask(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grad.norm().full_tensor().item() > 0 and not bool(grad.isnan().any().full_tensor())
        assert grad[0, 0].item() == grad.full_tensor()[0, 0].item()
        hsdp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True).item()


def test_a_rank_s_part_of_a_number_is_warned_of(pool2: Pool) -> None:
    pool2.run(_asked)
