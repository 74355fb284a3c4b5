"""hsdp stages in `torch.distributed.pipelining`: two stages or four, each sharded over two ranks, equal to one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import checkpoint

import hsdp
from tests.support.deep import collectives, of_kind
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_rest, check_sharded
from tests.support.twin import assert_same, full_grads, full_params

DIM, LAYERS, MICRO_BATCHES, ROWS, STEPS = 6, 8, 4, 8, 3


class Stage(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def _batch(step: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    x, y = torch.randn(2, ROWS, DIM, generator=generator, dtype=torch.float64)
    return x, y


def _stages(count: int) -> list[Stage]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Linear(DIM, DIM).double() for _ in range(LAYERS)]
    per_stage = LAYERS // count
    return [Stage(layers[i * per_stage : (i + 1) * per_stage]) for i in range(count)]


def _expected(count: int) -> list[tuple[Any, Any]]:
    """Parameters and last gradients of each stage, trained on one device with the mean over both data-parallel ranks."""
    stages = _stages(count)
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for dp_rank in range(2):
            x, y = _batch(step, dp_rank)
            (_loss(model(x), y) / 2).backward()
        optimizer.step()
    return [(full_params(stage), full_grads(stage)) for stage in stages]


def _newer_than_2_11(schedule_class: Any) -> bool:
    return hasattr(schedule_class, "_initialize_pp_stages")


def _needs_sends_within_a_rank(schedule_class: Any) -> None:
    """A V of stages has two neighbours on one rank: the first step of torch 2.11 sends between them, which gloo refuses."""
    if schedule_class is ScheduleZBVZeroBubble and not _newer_than_2_11(schedule_class):
        pytest.skip("this torch cannot run ScheduleZBVZeroBubble on gloo, whatever the model")


def _mine(schedule_class: Any, pp_rank: int) -> list[int]:
    """The stages of one of two ranks."""
    if schedule_class in (ScheduleGPipe, Schedule1F1B):
        return [pp_rank]
    return [pp_rank, 3 - pp_rank] if schedule_class is ScheduleZBVZeroBubble else [pp_rank, pp_rank + 2]


def _train(env: RankEnv, schedule_class: Any, keep: bool) -> None:
    mesh = env.mesh((2, 2), ("pp", "dp"))
    pp_rank, dp_rank = mesh.get_coordinate()  # type: ignore[misc]
    mine = _mine(schedule_class, pp_rank)
    per_rank = len(mine)
    count = 2 * per_rank
    stages = {index: copy.deepcopy(stage) for index, stage in enumerate(_stages(count)) if index in mine}
    for stage in stages.values():
        for module in (*stage.layers, stage):
            hsdp.fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False if keep else None)
    group = mesh["pp"].get_group()
    pipe = [PipelineStage(stage, index, count, torch.device("cpu"), group=group) for index, stage in stages.items()]
    schedule = schedule_class(pipe if per_rank > 1 else pipe[0], MICRO_BATCHES, loss_fn=_loss)
    params = [param for stage in stages.values() for param in stage.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.3, momentum=0.9)
    for step in range(STEPS):
        x, y = _batch(step, dp_rank)
        optimizer.zero_grad()
        args = (x,) if pp_rank == 0 else ()
        target = {"target": y} if count - 1 in mine else {}
        # Behind an evaluation that comes first torch 2.11 trains nothing: its stages receive inputs that want no gradients.
        evaluates = step > 1 or (step == 0 and _newer_than_2_11(schedule_class))
        if evaluates and schedule_class is not ScheduleZBVZeroBubble:  # torch's cannot
            schedule.eval(*args, **target)  # no backward comes, though nothing says `no_grad`
        with collectives() as log:
            schedule.step(*args, **target)
        if step == 1 and keep and per_rank > 1:
            layers = LAYERS // 2
            assert len(of_kind(log, "all_gather")) == layers, "gathered once for all micro-batches"
        if step:
            assert len(of_kind(log, "reduce_scatter")) == LAYERS // 2, "reduced once for all micro-batches"
        optimizer.step()
    expected = _expected(count)
    for index, stage in stages.items():
        assert_same(dict(full_params(stage)), expected[index][0])
        assert_same(full_grads(stage), expected[index][1])
        check_sharded(stage)
        check_rest(stage)


@pytest.mark.parametrize("keep", [True, False], ids=["kept after forward", "freed"])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_training_equals_the_twin(pool4: Pool, schedule: Any, keep: bool) -> None:
    pool4.run(_train, schedule, keep)


@pytest.mark.parametrize("keep", [True, False], ids=["kept after forward", "freed"])
@pytest.mark.parametrize("schedule", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
def test_schedules_that_split_the_backward_equal_the_twin(pool4: Pool, schedule: Any, keep: bool) -> None:
    # They make gradients of inputs first, and those of what `parameters()` shows them later.
    _needs_sends_within_a_rank(schedule)
    pool4.run(_train, schedule, keep)


def _split(stage: Any, x: Tensor) -> None:
    """The backward of one micro-batch as zero-bubble schedules run it."""
    _weights(stage, _inputs(stage, x))


def _inputs(stage: Any, x: Tensor) -> Any:
    if MANUALLY:
        stage.set_manual_backward_finalization(True)
    out = stage(x)
    _no_sync(stage)
    return stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())[1]


def _weights(stage: Any, groups: Any) -> None:
    _no_sync(stage)
    stage_backward_weight(stage.parameters(), groups)


MANUALLY = False
"""Whether the functions here speak to a stage as torch's schedules do since torch 2.15."""


@pytest.fixture(params=[False, True], ids=["before torch 2.15", "since torch 2.15"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MANUALLY", request.param)


def _no_sync(stage: Any) -> None:
    if not MANUALLY:
        stage.set_is_last_backward(False)
    stage.set_reshard_after_backward(False)
    stage.set_requires_gradient_sync(False)


def _reduce(stage: Any) -> None:
    if not MANUALLY:
        stage.set_is_last_backward(True)
    stage.set_requires_gradient_sync(True)
    if MANUALLY:
        stage.set_reshard_after_backward(True)
        stage.finalize_backward(async_op=True).wait()
        stage.set_manual_backward_finalization(False)
    else:
        fsdp.fully_shard.state(stage)._root_post_backward_final_callback()
    for param in stage.parameters():
        if param.grad is not None:
            param.grad.div_(1)  # as schedules scale: nothing is pending any more


@pytest.mark.usefixtures("protocol")
@pytest.mark.parametrize("weights_last", [False, True])
def test_split_backwards_sum_in_full_precision(weights_last: bool) -> None:
    # Behind a tanh, whose node is where gradients enter: those of weights alone pass nothing that hsdp sees.
    nn.init.zeros_((linear := nn.Linear(DIM, DIM, bias=False)).weight)
    xs = [torch.full((1, DIM), value, dtype=torch.bfloat16, requires_grad=True) for value in (1, 1 / 256)]
    with fake_world(1):
        stage: Any = hsdp.fully_shard(
            nn.Sequential(linear, nn.Tanh()), mp_policy=hsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        )
        stage.unshard(async_op=True).wait()
        stage.set_reshard_after_forward(False)
        if weights_last:
            groups = [_inputs(stage, x) for x in xs]
            for each in groups:
                _weights(stage, each)
        else:
            for x in xs:
                _split(stage, x)
        _reduce(stage)
        assert torch.equal(stage[0].weight.grad.to_local(), torch.full((DIM, DIM), 1 + 1 / 256))


@pytest.mark.usefixtures("protocol")
def test_split_backwards_that_find_no_parameters_are_refused() -> None:
    # Beside a whole backward, with which the stage has gradients, though not all.
    x = torch.zeros(1, DIM, dtype=torch.float64, requires_grad=True)
    with fake_world(2):
        stage: Any = hsdp.fully_shard(_stages(2)[0], reshard_after_forward=True)
        with stage.no_sync():
            stage(x).sum().backward()
        _split(stage, x)
        with pytest.raises(hsdp.StateError, match=r"FSDPStage: gradients of this stage .*unshard\(async_op=True\)"):
            _reduce(stage)
        stage.zero_grad()
        with stage.no_sync():
            stage(x).sum().backward()
        _reduce(stage)


@pytest.mark.usefixtures("protocol")
@pytest.mark.parametrize("reshard", [True, False], ids=["freed", "kept after forward"])
def test_split_backwards_before_which_the_stage_did_not_show_its_parameters_are_refused(reshard: bool) -> None:
    x = torch.zeros(1, DIM, dtype=torch.float64, requires_grad=True)
    with fake_world(2):
        stage: Any = hsdp.fully_shard(_stages(2)[0], reshard_after_forward=reshard)
        stage.unshard(async_op=True).wait()
        _split(stage, x)
        out = stage(x)  # whose end has hidden them
        stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())
        with pytest.raises(hsdp.StateError, match="FSDPStage: gradients of this stage"):
            _reduce(stage)


def test_gradients_of_weights_behind_a_change_of_the_weights_are_refused() -> None:
    x = torch.zeros(1, DIM, dtype=torch.float64, requires_grad=True)
    with fake_world(2):
        stage: Any = hsdp.fully_shard(_stages(2)[0], reshard_after_forward=True)
        stage.unshard(async_op=True).wait()
        _inputs(stage, x)
        stage.reshard()
        with torch.no_grad():
            for param in stage.parameters():
                param.mul_(2)
        with pytest.raises(hsdp.StaleParametersError, match="changed"):
            _no_sync(stage)


class _Product(nn.Module):
    """The gradient of one weight reads the other one, behind the node at which gradients enter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.a, self.b = (nn.Parameter(torch.randn(DIM, DIM, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.a @ self.b))


def _weights_behind_another_forward(env: RankEnv) -> None:
    plain, stage = _Product(), _Product()
    sharded: Any = hsdp.fully_shard(stage, mesh=env.mesh((2,)), reshard_after_forward=True)
    xs = [_batch(step, 0)[0].requires_grad_() for step in range(2)]
    sharded.unshard(async_op=True).wait()
    outs = [sharded(x) for x in xs]
    _no_sync(sharded)
    groups = stage_backward_input([outs[0]], [torch.ones_like(outs[0])], xs[:1], sharded.parameters())[1]
    sharded.reshard()
    _weights(sharded, groups)
    sharded.reshard()
    _no_sync(sharded)
    groups = stage_backward_input([outs[1]], [torch.ones_like(outs[1])], xs[1:], sharded.parameters())[1]
    sharded(xs[0])  # whose end frees them too
    _weights(sharded, groups)
    _reduce(sharded)
    for x in xs:
        plain(x.detach()).sum().backward()
    assert_same(full_grads(sharded), full_grads(plain))
    check_rest(sharded)


def test_gradients_of_weights_read_weights_that_were_freed_since(pool2: Pool) -> None:
    pool2.run(_weights_behind_another_forward)


class _Recomputed(nn.Module):
    """Blocks, of which the second one is recomputed, and used only where the model `uses` it."""

    def __init__(self, uses: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 3), nn.Tanh(), nn.Linear(3, DIM)) for _ in range(2))
        self.double()
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return x + checkpoint(self.blocks[1], x, use_reentrant=False) if self.uses else x


def _train_splitting(env: RankEnv, unit: int, on_ranks: int) -> None:
    plain, stage = _Recomputed(), _Recomputed(env.rank < on_ranks)
    hsdp.fully_shard(stage.blocks[unit], mesh=env.mesh((2,)), reshard_after_forward=True)
    sharded: Any = hsdp.fully_shard(stage, mesh=env.mesh((2,)), reshard_after_forward=True)
    for module in sharded.modules():
        if isinstance(module, hsdp.HSDPModule):
            module.unshard(async_op=True).wait()
    xs = [_batch(step, 0)[0].requires_grad_() for step in range(2)]
    for x, out in [(x, sharded(x)) for x in xs]:
        _no_sync(sharded)
        _weights(sharded, stage_backward_input([out], [torch.ones_like(out)], [x], sharded.parameters())[1])
    _reduce(sharded)
    for plain.uses in (True, on_ranks == 2):
        for x in xs:
            (plain(x.detach()).sum() / 2).backward()
    assert_same(full_grads(sharded), full_grads(plain))
    check_rest(sharded)


def test_gradients_of_weights_recompute_a_unit(pool2: Pool) -> None:
    # The first ones once made the unit a root of its own, and those of the next forward read freed weights.
    pool2.run(_train_splitting, 1, 2)


def test_gradients_of_weights_that_one_rank_alone_has(pool2: Pool) -> None:
    # The root is reduced on both ranks, though one of them has no gradient of it.
    pool2.run(_train_splitting, 0, 1)


@pytest.mark.usefixtures("protocol")
def test_a_schedule_that_is_made_anew_behind_a_step_that_failed() -> None:
    x = torch.zeros(1, DIM, dtype=torch.float64, requires_grad=True)
    with fake_world(2):
        stage: Any = hsdp.fully_shard(_stages(2)[0], reshard_after_forward=True)
        for fails in (True, False):
            torch.autograd.grad(stage(x).sum(), x)  # by which it finds out shapes
            stage.reshard()
            stage.zero_grad()
            stage.unshard(async_op=True).wait()
            _split(stage, x)
            if fails:
                with pytest.raises(RuntimeError, match="shapes"):
                    stage(x[:, 1:])
        _reduce(stage)


@pytest.mark.usefixtures("protocol")
@pytest.mark.parametrize("what", ["this stage raised", "another one raised", "nobody told this stage"])
def test_gradients_of_a_step_that_failed_go_with_zero_grad(what: str) -> None:
    """They are on unsharded weights, which `zero_grad()` does not reach."""
    plain = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Tanh())
    x = torch.linspace(-1, 1, DIM).view(1, DIM).requires_grad_()
    plain(x).sum().backward()
    expected = plain[0].weight.grad
    plain[0].weight.grad = None
    with fake_world(1):
        stage: Any = hsdp.fully_shard(plain)
        params = list(stage.parameters())  # as an optimizer has them
        for fails in (True, False):
            stage.unshard(async_op=True).wait()
            _split(stage, x)
            if fails:
                if what == "this stage raised":
                    with pytest.raises(RuntimeError, match="shapes"):
                        stage(x[:, 1:])
                if what != "nobody told this stage":
                    stage.set_is_last_backward(True)
                stage.reshard()
                for param in params:
                    param.grad = None
        _reduce(stage)
        assert torch.equal(stage[0].weight.grad.to_local(), expected)


@pytest.mark.usefixtures("protocol")
def test_an_evaluation_behind_a_backward_outside_of_the_schedule() -> None:
    x = torch.zeros(1, DIM, dtype=torch.float64)
    with fake_world(2):
        stage: Any = hsdp.fully_shard(_stages(2)[0])
        stage(x).sum().backward()
        stage(x)  # an evaluation of torch's schedules, behind which they end a backward all the same
        _reduce(stage)
        assert stage.layers[0].weight.grad is not None


class _Chunked(nn.Module):
    """The head of the last stage, which a loss calls chunk by chunk and runs backward at once, as torchtitan's does."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.norm = nn.LayerNorm(DIM).double()
            self.head = nn.Linear(DIM, DIM).double()

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        head: Any = self.head
        is_sharded = isinstance(head, fsdp.FSDPModule)
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
        total = hidden.new_zeros(())
        if is_sharded:
            head.set_reshard_after_forward(False)
            head.set_reshard_after_backward(False)
            head.set_requires_gradient_sync(False)
            head.unshard()
        for last, chunk, wanted in zip((False, True), chunks, target.chunk(2), strict=True):
            if is_sharded and last:
                head.set_requires_gradient_sync(True)
            loss = _loss(head(chunk), wanted) / 2
            loss.backward()
            total = total + loss.detach()
        if is_sharded:
            head.set_reshard_after_forward(True)
            head.set_reshard_after_backward(True)
            head.reshard()
        out: Tensor = _Goes.apply(hidden, torch.cat([chunk.grad for chunk in chunks if chunk.grad is not None]), total)
        return out


class _Goes(torch.autograd.Function):
    """Hands a gradient that is there already on to the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grads[0], None, None


class _LastStage(Stage):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.chunked = _Chunked()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.chunked.norm(super().forward(x))
        return out


def _chunked_loss(env: RankEnv, schedule_class: Any) -> None:
    mesh = env.mesh((2, 2), ("pp", "dp"))
    pp_rank, dp_rank = mesh.get_coordinate()  # type: ignore[misc]
    mine = _mine(schedule_class, pp_rank)
    count = 2 * len(mine)
    stages = _stages(count)
    stages[-1] = _LastStage(list(stages[-1].layers))
    plain: Any = nn.Sequential(*copy.deepcopy(stages))
    sharded: list[Any] = [stages[index] for index in mine]
    for stage in sharded:
        last = [[stage.chunked.norm, stage.chunked.head]] if stage is stages[-1] else []
        for unit in (*stage.layers, *last, stage):
            hsdp.fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh["pp"].get_group()
    device = torch.device("cpu")
    pipe = [PipelineStage(stage, i, count, device, group=group) for i, stage in zip(mine, sharded, strict=True)]
    loss = stages[-1].chunked.loss if count - 1 in mine else _loss
    schedule = schedule_class(pipe if len(mine) > 1 else pipe[0], MICRO_BATCHES, loss_fn=loss)
    optimizers = [
        torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.3, momentum=0.9)
        for models in (sharded, [plain])
    ]
    for step in range(STEPS):
        x, y = _batch(step, dp_rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        schedule.step(*((x,) if 0 in mine else ()), **({"target": y} if count - 1 in mine else {}))
        for dp in range(2):
            x, y = _batch(step, dp)
            for rows, wanted in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
                (plain[-1].chunked.loss(plain(rows), wanted)).backward()
        for param in plain.parameters():  # whose head ran backward by itself
            param.grad /= 2 * MICRO_BATCHES
        for optimizer in optimizers:
            optimizer.step()
        for index, stage in zip(mine, sharded, strict=True):
            assert_same(dict(full_params(stage)), full_params(plain[index]))
    for stage in sharded:
        check_rest(stage)


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
def test_a_loss_that_calls_the_head_outside_of_the_stage(pool4: Pool, schedule: Any) -> None:
    # It frees the head with the norm beside it, whose gradients schedules that split a backward make later.
    _needs_sends_within_a_rank(schedule)
    pool4.run(_chunked_loss, schedule)
