"""Rule 31: a failed backward leaves nothing, whatever had landed; user hooks and errors come at fixed points; replicas are
equal to the bit after every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hsdp
from tests.rules.test_rule_20_failures import BoomError, failing_backward
from tests.support.deep import Deep, loss_of, mean_grads, only_sharded, seeded, step
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_rest, mesh_id, shard
from tests.support.twin import assert_same, full_grads, full_params

MESHES: list[tuple[int, ...]] = [(4,), (2, 2)]
LEVELS = {"full": (True, True), "local": (False, True), "scatter": (True, False)}


def _level(model: nn.Module, name: str) -> None:
    only_sharded(model, "set_requires_grad_sync", LEVELS[name][0])
    only_sharded(model, "set_requires_all_reduce", LEVELS[name][1])


def _play(model: nn.Module, rank: int, words: str) -> None:
    for k, word in enumerate(words.split()):
        _level(model, word)
        step(model, rank, k)


def _fail(model: nn.Module, rank: int, word: str, at: int) -> None:
    _level(model, word)
    with failing_backward(model, at), pytest.raises(BoomError):
        step(model, rank, 9)


def _locals(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]


def _same_bits(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    for name, value in one.items():
        mine = other[name]
        assert (value is None) == (mine is None), name
        assert value is None or mine is None or torch.equal(value, mine), name


def _replicas_equal(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        for tensor in (param.detach(), param.grad):
            if tensor is not None:
                whole: Any = tensor.full_tensor()  # type: ignore[attr-defined]
                mine = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
                dist.all_gather(mine, whole)
                assert all(torch.equal(mine[0], one) for one in mine), name


NEXT: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "pending": lambda model: model.pending_gradients(),  # type: ignore[operator]
    "clip": lambda model: hsdp.clip_grad_norm_(model, float("inf")),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.0).step(),
    "flush": lambda model: model.flush(),  # type: ignore[operator]
}


def check_restored(env: RankEnv, shape: tuple[int, ...], before: str, failing: str, then: str) -> None:
    """Gradients are those before, at once and to the bit; so are pending sums, and the next backward adds to them."""
    run: Callable[[nn.Module, int], None] = lambda model, rank: _play(model, rank, f"{before} full")  # noqa: E731
    expected = mean_grads(seeded(Deep), run, env.world_size)
    for at in (3, 0):
        model = shard(seeded(Deep), env.mesh(shape))
        _play(model, env.rank, before)
        was = _locals(model)
        kept = dict(model.pending_gradients())  # type: ignore[operator]
        _fail(model, env.rank, failing, at)
        _same_bits(was, _locals(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            NEXT[then](model)
            if then != "flush":
                _same_bits(was, _locals(model))
                assert dict(model.pending_gradients()) == kept  # type: ignore[operator]
            _level(model, "full")
            step(model, env.rank, len(before.split()))
        assert_same(full_grads(model), expected)
        _replicas_equal(model)
        check_rest(model)


@pytest.mark.parametrize("failing", LEVELS)
@pytest.mark.parametrize(
    ("before", "then"),
    [("full", "nothing"), ("full", "clip"), ("full", "optimizer"), ("scatter", "flush"), ("full scatter", "pending")],
)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_31_a_failed_backward_leaves_what_was_before(
    pool4: Pool, before: str, failing: str, then: str, shape: tuple[int, ...]
) -> None:
    pool4.run(check_restored, shape, before, failing, then)


def check_lost(env: RankEnv, shape: tuple[int, ...], failing: str, zeros: bool) -> None:
    """Whole sums are added in place: lost with the backward that had them in hand, and told until zeroed."""
    model = shard(seeded(Deep), env.mesh(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _play(model, env.rank, "full local")
    _fail(model, env.rank, failing, 1)
    _level(model, "full")
    acts: list[Callable[[], object]] = [
        optimizer.step,
        model.flush,  # type: ignore[list-item]
        lambda: hsdp.clip_grad_norm_(model, 1.0),
        lambda: step(model, env.rank, 2),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for act in acts:
            with pytest.raises(hsdp.StateError, match=r"unit 'blocks\.\d'|unit 'Deep.*lost"):
                act()
    optimizer.zero_grad(set_to_none=not zeros)
    step(model, env.rank, 3)
    assert_same(full_grads(model), mean_grads(seeded(Deep), lambda m, r: step(m, r, 3), env.world_size))
    optimizer.step()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("failing", LEVELS)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_31_lost_sums_are_told(pool4: Pool, failing: str, zeros: bool, shape: tuple[int, ...]) -> None:
    pool4.run(check_lost, shape, failing, zeros)


def check_hook(env: RankEnv, shape: tuple[int, ...], kind: str, words: str) -> None:
    """A hook that raises: told at the end of the backward, which leaves nothing; the group is whole."""
    model = shard(seeded(Deep), env.mesh(shape))
    _play(model, env.rank, words)
    was = _locals(model)

    def explode(*_: object) -> None:
        raise BoomError

    block: Any = model.blocks[2]  # type: ignore[index]
    if kind == "all_reduce":
        block.set_all_reduce_hook(explode)
    else:
        register = "register_hook" if kind == "gradient" else "register_post_accumulate_grad_hook"
        handle = getattr(block.weight, register)(explode)
    _level(model, "full")
    with pytest.raises(BoomError):
        step(model, env.rank, 8)
    _same_bits(was, _locals(model))
    if kind == "all_reduce":
        block.set_all_reduce_hook(None)
    else:
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, env.rank, len(words.split()))
    run: Callable[[nn.Module, int], None] = lambda m, r: _play(m, r, f"{words} full".strip())  # noqa: E731
    assert_same(full_grads(model), mean_grads(seeded(Deep), run, env.world_size))
    _replicas_equal(model)
    check_rest(model)


@pytest.mark.parametrize("words", ["", "full"])
@pytest.mark.parametrize("kind", ["gradient", "post-accumulate", "all_reduce"])
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_31_a_hook_that_raises_breaks_nothing(pool4: Pool, kind: str, words: str, shape: tuple[int, ...]) -> None:
    pool4.run(check_hook, shape, kind, words)


def check_optimizer_in_backward(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Which parameters an optimizer in backward has stepped when a later layer fails is the same on all ranks."""
    model = shard(seeded(lambda: Deep(layers=8)), env.mesh(shape))
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)

        def update(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(update)
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(10):
            if k % 2:
                at = int(torch.randint(8, (), generator=generator))
                with failing_backward(model, at), pytest.raises(BoomError):
                    step(model, env.rank, k)
            else:
                step(model, env.rank, k)
    _replicas_equal(model)


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_31_replicas_stay_equal_with_an_optimizer_in_backward(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_optimizer_in_backward, shape)


def check_drift(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Failures without zero_grad, and gradients from elsewhere in the same backward, over steps."""
    model = shard(seeded(lambda: Deep(layers=8)), env.mesh(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(10):
            if int(torch.randint(2, (), generator=generator)):
                with failing_backward(model, k % 8), pytest.raises(BoomError):
                    step(model, env.rank, k)
            step(model, env.rank, k)
            optimizer.step()
            if k % 3 == 0:
                optimizer.zero_grad()
            _replicas_equal(model)
    assert all(torch.isfinite(whole).all() for whole in full_params(model).values())


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_31_replicas_stay_equal(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_drift, shape)


def check_runs_on(env: RankEnv, shape: tuple[int, ...]) -> None:
    """What an earlier backward left running lands, though the next one fails."""
    model = shard(seeded(Deep), env.mesh(shape))
    model.set_is_last_backward(False)  # type: ignore[operator]
    step(model, env.rank, 0)
    with failing_backward(model, 1), pytest.raises(BoomError):
        step(model, env.rank, 9)
    model.set_is_last_backward(True)  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, env.rank, 1)
    run: Callable[[nn.Module, int], None] = lambda m, r: _play(m, r, "full full")  # noqa: E731
    assert_same(full_grads(model), mean_grads(seeded(Deep), run, env.world_size))
    check_rest(model)


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_31_earlier_reductions_land(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_runs_on, shape)


def check_second_backward(env: RankEnv, shape: tuple[int, ...], levels: str, then: str) -> None:
    """Rule 33: two backwards of one forward, the second without communication: what is pending decides."""
    first, second = levels.split()

    def run(model: nn.Module, rank: int) -> None:
        loss = loss_of(model, rank)
        _level(model, first)
        loss.backward(retain_graph=True)
        _level(model, second)
        loss.backward()

    model = shard(seeded(Deep), env.mesh(shape))
    run(model, env.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for act in (optimizer.step, lambda: hsdp.clip_grad_norm_(model, 1.0)):
        with pytest.raises(hsdp.StateError, match="not summed over all ranks"):
            act()
    _level(model, "full")
    if then == "flush":
        model.flush()  # type: ignore[operator]
        expected = mean_grads(seeded(Deep), run, env.world_size)
    else:
        step(model, env.rank, 3)

        def more(model: nn.Module, rank: int) -> None:
            run(model, rank)
            step(model, rank, 3)

        expected = mean_grads(seeded(Deep), more, env.world_size)
    assert not model.pending_gradients()  # type: ignore[operator]
    assert_same(full_grads(model), expected)
    optimizer.step()


@pytest.mark.parametrize("then", ["flush", "step"])
@pytest.mark.parametrize("levels", ["full local", "full scatter", "scatter local", "local scatter"])
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_33_what_is_pending_decides(pool4: Pool, levels: str, then: str, shape: tuple[int, ...]) -> None:
    pool4.run(check_second_backward, shape, levels, then)


def check_nothing_stands_behind(env: RankEnv, shape: tuple[int, ...]) -> None:
    """Sums that were zeroed do not come back with a backward that fails: gradients may be changed, and stepped."""
    model = shard(seeded(Deep), env.mesh(shape))
    _play(model, env.rank, "scatter")
    for param in model.parameters():
        assert param.grad is not None
        param.grad.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fail(model, env.rank, "local", 0)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
    assert model.pending_gradients() == {}  # type: ignore[operator]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same(full_params(model), dict(seeded(Deep).named_parameters()), 0.0, 0.0)
    check_rest(model)


@pytest.mark.parametrize("shape", MESHES)
def test_rule_31_sums_that_were_zeroed_stay_zero(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_nothing_stands_behind, shape)


class Heads(nn.Module):
    """Heads, of which each rank uses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.tanh(self.blocks[0](x))
        return self.blocks[1](x), self.blocks[2](x)


def check_other_heads(env: RankEnv, shape: tuple[int, ...]) -> None:
    """A unit of which this rank holds nothing, but others do: refused on all ranks, and flushed by all."""

    def run(model: nn.Module, rank: int) -> None:
        from tests.support.deep import floats

        model(floats(rank))[rank % 2].square().sum().backward()

    model = shard(seeded(Heads), env.mesh(shape), reshard_after_forward=False)
    _level(model, "local")
    run(model, env.rank)
    with pytest.raises(hsdp.StateError, match="not summed over all ranks"):
        torch.optim.SGD(model.blocks[1].parameters(), lr=0.1).step()  # type: ignore[index,union-attr]
    model.flush()  # type: ignore[operator]
    assert_same(full_grads(model), mean_grads(seeded(Heads), run, env.world_size))


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_rule_33_ranks_agree_about_what_is_pending(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(check_other_heads, shape)
