"""Rule 2: weights tied inside a unit are one DTensor under all names; tied across units they are refused by both names."""

from __future__ import annotations

import gc
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

import hsdp
from tests.support.deep import DIM, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_grads, check_rest, check_sharded


class Tied(nn.Module):
    """Two blocks with one weight, and a block of their own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def check_tied(env: RankEnv) -> None:
    """The common ancestor owns what is tied, though a nested unit lies between the two names."""
    plain, model = seeded(Tied), seeded(Tied)
    hsdp.fully_shard(model.middle, mesh=env.mesh(2))  # type: ignore[type-var]
    hsdp.fully_shard(model, mesh=env.mesh(2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for _ in range(2):
        assert model.first.weight is model.last.weight, "untied"
        check_sharded(model)
        check_grads(model, plain, step, env.rank, env.world_size)
        for param in plain.parameters():
            assert param.grad is not None
            param.grad /= env.world_size
        for optimizer in optimizers:
            optimizer.step()
    check_rest(model)


def test_rule_02_weights_tied_in_a_unit_stay_tied(pool2: Pool) -> None:
    pool2.run(check_tied)


def check_across(env: RankEnv) -> None:
    model = seeded(Tied)
    hsdp.fully_shard(model.first, mesh=env.mesh(2))  # type: ignore[type-var]
    for module in (model.last, model):
        with pytest.raises(ValueError, match=r"'(last\.)?weight'.* is tied to 'weight' of unit 'Linear'"):
            hsdp.fully_shard(module, mesh=env.mesh(2))  # type: ignore[type-var]
        assert not isinstance(module, hsdp.HSDPModule)


def test_rule_02_weights_tied_across_units_are_refused_by_both_names(pool2: Pool) -> None:
    pool2.run(check_across)


def check_replaced(env: RankEnv) -> None:
    """A value under one of two names is not put under the other one, too, without a word; nor is one of two lost."""
    model: Any = seeded(Tied)
    hsdp.fully_shard(model, mesh=env.mesh(2))
    held, x = model.first.weight, torch.ones(2, DIM, dtype=torch.float64)
    expected = model(x).detach()
    for factors in ((2.0, None), (None, 2.0), (2.0, 3.0)):
        for layer, factor in zip((model.first, model.last), factors, strict=True):
            layer.weight = held if factor is None else nn.Parameter(held.detach() * factor)
        with pytest.raises(hsdp.StateError, match=r"has the names 'first.weight', 'last.weight', which were tied"):
            model(x)
    model.first.weight = model.last.weight = held
    assert torch.equal(model(x), expected)
    model.first.weight = nn.Parameter(held.detach().clone())  # of the same value, and the tie stays
    assert torch.equal(model(x), expected)
    assert model.first.weight is model.last.weight


def test_rule_02_replacing_one_of_two_tied_names_is_refused(pool2: Pool) -> None:
    pool2.run(check_replaced)


def check_loaded_from_meta(env: RankEnv) -> None:
    """Files that have tied weights once load into a model on the meta device: the other name has no value to lose."""
    plain = seeded(Tied)
    with torch.device("meta"):
        model: Any = Tied()
    hsdp.fully_shard(model, mesh=env.mesh(2))
    state = {
        name: distribute_tensor(plain.get_parameter(name).detach(), p.device_mesh, p.placements)
        for name, p in model.named_parameters()
    }
    assert "last.weight" not in state
    model.load_state_dict(state, strict=False, assign=True)
    torch.testing.assert_close(
        model(torch.ones(2, DIM, dtype=torch.float64)), plain(torch.ones(2, DIM, dtype=torch.float64))
    )


def test_rule_02_a_tied_weight_is_loaded_under_one_name(pool2: Pool) -> None:
    pool2.run(check_loaded_from_meta)


def check_one_memory(env: RankEnv) -> None:
    """Two parameters in one memory, of which a step of one steps the other, are refused; parts side by side are not."""
    mesh = env.mesh(2)
    plain: Any = seeded(Tied)
    untied: Any = seeded(Tied)
    untied.load_state_dict(plain.state_dict(), assign=True)  # as torch does it
    assert untied.first.weight is not untied.last.weight
    views, rows, ends = (nn.Linear(4, 4) for _ in range(3)), torch.zeros(8, 4), torch.zeros(4, 8)
    view, row, end = (nn.Sequential(layer, nn.Linear(4, 4)) for layer in views)
    view[1].weight = nn.Parameter(view[0].weight.detach().t())
    row[0].weight, row[1].weight = nn.Parameter(rows[:4]), nn.Parameter(rows[2:6])
    for model, one, other in (
        (untied, "first.weight", "last.weight"),
        (view, "0.weight", "1.weight"),
        (row, "0.weight", "1.weight"),
    ):
        with pytest.raises(ValueError, match=f"parameters '{one}' and '{other}' share memory and are not one parameter"):
            hsdp.fully_shard(model, mesh=mesh)
        assert not isinstance(model, hsdp.HSDPModule)
    row[1].weight = nn.Parameter(rows[4:])
    end[0].weight, end[1].weight = nn.Parameter(ends[:, :4]), nn.Parameter(ends[:, 4:])
    untied.requires_grad_(False)  # no optimizer steps them
    for model in (row, end, untied):
        hsdp.fully_shard(model, mesh=mesh)


def test_rule_02_parameters_that_share_memory_are_refused_by_both_names(pool2: Pool) -> None:
    pool2.run(check_one_memory)


class Book(nn.Module):
    """Reads rows of a weight by their numbers, and the whole of it by a buffer in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(DIM, DIM)
        self.register_buffer("book", self.rows.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.book + self.rows.weight


def check_buffer_in_memory(env: RankEnv) -> None:
    mesh = env.mesh(2)
    for inner_first in (False, True):
        model = nn.Sequential(Book())
        if inner_first:
            hsdp.fully_shard(model[0].rows, mesh=mesh)
        with pytest.raises(ValueError, match=r"buffer '0.book' lies in the memory of parameter '(0.rows.)?weight' of "):
            hsdp.fully_shard(model, mesh=mesh)
        model[0].book = model[0].book.clone()
        hsdp.fully_shard(model, mesh=mesh)
    frozen = Book().requires_grad_(False)
    hsdp.fully_shard(frozen, mesh=mesh)
    flat = torch.zeros(2 * DIM * DIM)
    apart = Book()
    apart.rows.weight, apart.book = nn.Parameter(flat[: DIM * DIM].view(DIM, DIM)), flat[DIM * DIM :].view(DIM, DIM)
    hsdp.fully_shard(apart, mesh=mesh)


def test_rule_02_a_buffer_in_the_memory_of_a_trained_parameter_is_refused(pool2: Pool) -> None:
    pool2.run(check_buffer_in_memory)


class Notes(nn.Module):
    """Keeps the first row of a weight in an attribute."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.rows = nn.Linear(DIM, DIM)
        row = self.rows.weight.detach()[0]
        self.kept = {
            "attribute": row,
            "list": [row],
            "dict": {"first": row},
            "clone": [row.clone()],
            "weight": [self.rows.weight],
        }[kept]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rows(x)
        return out


def check_attribute_in_memory(env: RankEnv) -> None:
    """Also of a unit inside: its parameter is sharded before anybody looks at the attribute."""
    mesh = env.mesh(2)
    for kept, inner_first in product(("attribute", "list", "dict"), (False, True)):
        model = nn.Sequential(Notes(kept))
        if inner_first:
            hsdp.fully_shard(model[0].rows, mesh=mesh)
        with pytest.raises(ValueError, match=r"attribute '0.kept' lies in the memory of parameter '(0.rows.)?weight' of "):
            hsdp.fully_shard(model, mesh=mesh)
    for kept in ("clone", "weight"):
        hsdp.fully_shard(Notes(kept), mesh=mesh)
    hsdp.fully_shard(Notes("list").requires_grad_(False), mesh=mesh)
    normed = nn.Sequential(nn.utils.spectral_norm(nn.Linear(DIM, DIM)), nn.LSTM(DIM, DIM))
    normed[0].eval()(torch.zeros(1, DIM))
    for one in (*normed, normed):
        hsdp.fully_shard(one, mesh=mesh)


def test_rule_02_an_attribute_in_the_memory_of_a_trained_parameter_is_refused(pool2: Pool) -> None:
    pool2.run(check_attribute_in_memory)


def _of_one_dict(state: dict[str, Tensor]) -> Any:
    model: Any = seeded(Tied)
    model.load_state_dict(state, assign=True)
    model.last.weight = model.first.weight
    return model


def check_one_memory_across_calls(env: RankEnv) -> None:
    """The other one may be sharded by another call, or be another model's: it is told, as nobody knows what was meant."""
    mesh = env.mesh(2)
    plain: Any = seeded(Tied)
    untied: Any = seeded(Tied)
    untied.load_state_dict(plain.state_dict(), assign=True)
    hsdp.fully_shard(untied.first, mesh=mesh)
    with pytest.warns(
        UserWarning, match=r"'last.weight' shares memory with 'weight' of Linear, which is sharded"
    ) as caught:
        hsdp.fully_shard(untied, mesh=mesh)
    assert caught[0].filename == __file__
    del plain, untied
    alone: Any = seeded(Tied)
    alone.last.weight = nn.Parameter(alone.first.weight.data)  # which nobody else holds
    hsdp.fully_shard(alone.first, mesh=mesh)
    with pytest.warns(UserWarning, match=r"'last.weight' shares memory with 'weight' of Linear, which is sharded"):
        hsdp.fully_shard(alone, mesh=mesh)
    del alone
    # A student and a teacher of one dict: one warning for each call, and none once the student is gone.
    state = {name: value.detach() for name, value in seeded(Tied).state_dict().items()}
    student, teacher, again = (_of_one_dict(state) for _ in range(3))
    hsdp.fully_shard(student, mesh=mesh)
    with pytest.warns(UserWarning, match="'first.weight' shares memory with 'first.weight' .* 4 more: ") as caught:
        hsdp.fully_shard(teacher, mesh=mesh)
    assert len(caught) == 1
    del student, teacher
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hsdp.fully_shard(again, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = seeded(Tied), seeded(Tied)
        state = first.state_dict()
        second.load_state_dict(state)  # copies
        hsdp.fully_shard(first, mesh=mesh)
        hsdp.fully_shard(second, mesh=mesh)


def test_rule_02_parameters_of_several_calls_that_share_memory_are_told(pool2: Pool) -> None:
    pool2.run(check_one_memory_across_calls)
