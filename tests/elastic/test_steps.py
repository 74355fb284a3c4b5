"""Steps over elastic replicas: taken by all as on a mesh of two axes, or dropped without a trace; healing; mistakes."""

from __future__ import annotations

import math
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hsdp
from hsdp import elastic
from hsdp.errors import CheckpointError, StateError
from tests.elastic.scripted import ScriptedManager
from tests.support.rig import Pool, RankEnv

WIDTH = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 14), nn.Tanh(), nn.Linear(14, WIDTH)) for _ in range(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, more: bool = True) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + self.sometimes(x) if more else x)


def _net(mesh: Any, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    net = Net()
    for module in (*net.blocks, net):
        hsdp.fully_shard(module, mesh=mesh, **options)
    return net


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def _elastic(env: RankEnv, seed: int = 0, **script: Any) -> tuple[Any, Any, Any]:
    """A net over this rank's half of the ranks, its optimizer, and the manager."""
    mesh = env.mesh((2, 2))
    manager = ScriptedManager(mesh.get_group("replicate"), mesh.get_group("shard"), **script)
    net = _net(mesh["shard"], seed)
    return net, elastic.ElasticOptimizer(manager, net, _adamw(net)), manager


def _backward(net: Any, rank: int, step: int, micros: int = 1, more: bool = True) -> None:
    for micro in range(micros):
        random = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        with net.accumulate(last=micro == micros - 1):
            net(torch.randn(4, WIDTH, generator=random), more).square().mean().backward()


def _shards(net: nn.Module, optimizer: Any = None) -> list[Tensor]:
    """Copies of this rank's part of the weights and, with an optimizer, of its states."""
    found = [param.to_local() for param in net.parameters()]  # type: ignore[attr-defined]
    for param in net.parameters() if optimizer is not None else ():
        found += [getattr(value, "_local_tensor", value) for value in optimizer.state[param].values()]
    return [value.detach().clone() for value in found]


def _check_alike(manager: Any, shards: list[Tensor]) -> None:
    """Both replicas have the same."""
    mine = torch.cat([value.double().flatten() for value in shards])
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine, group=manager.across)
    assert torch.equal(*theirs)


def _equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def _shift(net: nn.Module) -> None:
    """Has this rank hold other weights."""
    with torch.no_grad():
        for shard in (param.to_local() for param in net.parameters()):  # type: ignore[attr-defined]
            shard.add_(0.1)


# -- steps that are taken ----------------------------------------------------------------------------------------------


def _as_on_two_axes(env: RankEnv, micros: int, drains: bool) -> None:
    net, optimizer, manager = _elastic(env)
    twin = _net(env.mesh((2, 2)))
    adamw = _adamw(twin)
    for step in range(4):
        optimizer.zero_grad()
        for model in (net, twin):
            model.set_is_last_backward(drains)
            _backward(model, env.rank, step, micros)
        norms = [hsdp.clip_grad_norm_(model, 0.1) for model in (net, twin)]
        assert torch.equal(*norms), "replicas clip by the norm of the mean"
        assert optimizer.step()
        adamw.step()
        adamw.zero_grad()
        # One for each unit, whatever the number of micro-batches, and those of numbers; in the first step of weights, too.
        assert manager.calls == 1 + 4 + 1 + 2 * (step == 0)
        assert _equal(_shards(net, optimizer.optimizer), _shards(twin, adamw))


@pytest.mark.parametrize(("micros", "drains"), [(1, True), (3, True), (1, False)])
def test_steps_are_those_of_a_mesh_with_replicas(pool4: Pool, micros: int, drains: bool) -> None:
    pool4.run(_as_on_two_axes, micros, drains)


def _sums(env: RankEnv) -> None:
    mesh = env.mesh((2, 2))
    manager = ScriptedManager(mesh.get_group("replicate"), mesh.get_group("shard"))
    net, twin = _net(mesh["shard"]), _net(mesh)
    for model in (net, twin):
        model.set_reduce_op_type("sum")
    net.set_replica_reduce(elastic.replicas(manager, "sum"))
    manager.start_quorum()
    for model in (net, twin):
        _backward(model, env.rank, 0)
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())


def test_a_stage_may_sum(pool4: Pool) -> None:
    pool4.run(_sums)


def _traced(env: RankEnv) -> None:
    net, optimizer, _ = _elastic(env)
    for step in range(2):
        optimizer.zero_grad()
        with hsdp.trace(net) as traced:
            _backward(net, env.rank, step)
        optimizer.step()
    shown = traced.summary().collectives["all-reduce"]
    assert shown.started == 4 and shown.calls == 5 and shown.nbytes > 0


def test_a_trace_shows_the_managers_all_reduces(pool4: Pool) -> None:
    pool4.run(_traced)


def _planned(env: RankEnv) -> None:
    net, optimizer, manager = _elastic(env)
    plan = hsdp.plan(net, mesh=(2, 2), tokens_per_rank=4, backend="gloo")
    given: list[int] = []
    allreduce = manager.allreduce

    def counting(tensor: Tensor, **options: Any) -> Any:
        given.append(tensor.nbytes)
        return allreduce(tensor, **options)

    manager.allreduce = counting
    for step in range(2):
        given.clear()  # of the first step, in which weights are compared too
        optimizer.zero_grad()
        _backward(net, env.rank, step)
        optimizer.step()
    (over_replicas,) = (one for one in plan.collectives if one.kind == "all-reduce")
    count, of_units, compared = given[0], given[1:-1], given[-1]
    assert (count, compared) == (4, 32), "what elastic.md says of their size"
    # Of two replicas each sends as many bytes as it has.
    assert (over_replicas.calls, over_replicas.sent) == (len(of_units), sum(of_units))


def test_a_plan_of_as_many_replicas_has_the_managers_all_reduces(pool4: Pool) -> None:
    pool4.run(_planned)


# -- steps that are dropped --------------------------------------------------------------------------------------------


def _dropped(env: RankEnv, micros: int, at: int) -> None:
    """Rank 1 meets an error in the second step, so the replica of ranks 0 and 1 drops it; here the other one does, too."""
    fails = ((1, at),) if env.rank in (1, 2) else ()
    net, optimizer, manager = _elastic(env, fails=fails)
    twin = _net(env.mesh((2, 2)))
    adamw = _adamw(twin)
    for attempt in range(4):
        before = _shards(net, optimizer.optimizer)
        optimizer.zero_grad()
        # Half of the ranks leave a parameter unused: used-flags are read, of void values on one rank of a replica.
        _backward(net, env.rank, attempt, micros, more=env.rank % 2 == 0 or attempt == 1)
        assert math.isfinite(hsdp.clip_grad_norm_(net, 0.1, error_if_nonfinite=True).item())
        assert optimizer.step() == (attempt != 1)
        if attempt == 1:
            assert _equal(before, _shards(net, optimizer.optimizer)), "a dropped step changed the weights"
            assert all(param.grad is None for param in net.parameters())
            assert net.pending_gradients() == {} and net.local_gradients() == {}
            continue
        _backward(twin, env.rank, attempt, micros, more=env.rank % 2 == 0)
        hsdp.clip_grad_norm_(twin, 0.1)
        adamw.step()
        adamw.zero_grad()
        assert _equal(_shards(net, optimizer.optimizer), _shards(twin, adamw))
    assert manager.current_step() == 3 and manager.batches_committed() == 6


@pytest.mark.parametrize(("micros", "at"), [(1, 0), (1, 3), (3, 1)])
def test_a_step_with_an_error_is_dropped_without_a_trace(pool4: Pool, micros: int, at: int) -> None:
    pool4.run(_dropped, micros, at)


class _Buffered(nn.Module):
    """Its forwards write to a buffer in place, assign one, make one that was declared, and make a table longer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        for name, value in (("mean", torch.zeros(WIDTH)), ("last", None), ("table", torch.arange(2.0))):
            self.register_buffer(name, value)
        self.register_buffer("wide", torch.ones(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.last = x.detach()
        self.table.resize_(len(self.table) + 1).copy_(torch.arange(float(len(self.table))))
        return x


def _keeps_buffers(env: RankEnv, healed: bool) -> None:
    """The third step is dropped; the second replica may be healed in it, and keeps what it was given then."""
    mesh = env.mesh((2, 1))
    script: Any = {"healed": (2,) if healed else (), "fails": ((2, 1),)}
    manager = ScriptedManager(mesh.get_group("replicate"), mesh.get_group("shard"), **script)
    torch.manual_seed(0)
    net: Any = hsdp.fully_shard(_Buffered(), mesh=mesh["shard"])
    optimizer = elastic.ElasticOptimizer(manager, net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(env.rank))
    for attempt in range(4):
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        mine = dict(net.named_buffers())
        optimizer.zero_grad()
        for last in (False, True):
            with net.accumulate(last=last):
                net(batch).square().mean().backward()
            if not last:
                optimizer.zero_grad()  # begins no other step
        assert optimizer.step() == (attempt != 2)
        after = dict(net.named_buffers())
        assert len(after["table"]) == (4 + 2 * attempt if attempt < 2 else 6 if attempt == 2 else 8)
        if attempt == 2 and not (healed and env.rank == 1):
            assert {name: buffer.tolist() for name, buffer in after.items()} == {n: b.tolist() for n, b in before.items()}
            assert after["mean"] is mine["mean"]
        elif attempt != 2:
            assert after["norm.num_batches_tracked"] == before["norm.num_batches_tracked"] + 2
    if healed:
        assert net.norm.num_batches_tracked == 6


@pytest.mark.parametrize("healed", [False, True])
def test_a_dropped_step_leaves_no_trace_in_buffers(pool2: Pool, healed: bool) -> None:
    pool2.run(_keeps_buffers, healed)


def _in_other_order(env: RankEnv) -> None:
    net, optimizer, manager = _elastic(env)
    stage = net._units()[0].settings.replica_reduce
    start = stage.start

    def otherwise(owner: Any, key: int, *rest: Any) -> Any:
        return start(owner, key + (env.rank > 1 and manager.attempt == 1), *rest)

    stage.start = otherwise
    for attempt in range(3):
        optimizer.zero_grad()
        _backward(net, env.rank, attempt)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert optimizer.step() == (attempt != 1)
        assert any("another order" in str(one.message) for one in caught) == (attempt == 1)


def test_replicas_that_reduce_other_units_drop_the_step(pool4: Pool) -> None:
    pool4.run(_in_other_order)


def _fails_within(env: RankEnv) -> None:
    """A backward fails on all ranks of a replica, which catch it and go on, with a step or with another backward."""
    alone, _ = dist.new_subgroups(1)
    manager = ScriptedManager(alone, dist.group.WORLD)
    net = _net(env.mesh(4))
    optimizer = elastic.ElasticOptimizer(manager, net, _adamw(net))
    before = _shards(net)
    for moment in ("a step", "another backward", "a forward"):
        optimizer.zero_grad()
        hook = net.blocks[0].register_full_backward_pre_hook(_raise)  # those behind it have been all-reduced
        with pytest.raises(ArithmeticError):
            _backward(net, env.rank, 0)
        assert manager.calls > 1
        hook.remove()
        optimizer.zero_grad()  # the step that has begun goes on
        if moment != "a step":
            with torch.set_grad_enabled(moment == "another backward"):
                out = net(torch.ones(4, WIDTH)).sum()
            if moment == "another backward":
                out.backward()
        assert not optimizer.step() and _equal(before, _shards(net)), moment
    optimizer.zero_grad()
    _backward(net, env.rank, 0)
    assert optimizer.step() and manager.current_step() == 1


def _raise(*_: Any) -> None:
    raise ArithmeticError("not a number")


@pytest.mark.filterwarnings("ignore:hsdp. a backward pass")
def test_a_step_in_which_a_backward_failed_is_dropped(pool4: Pool) -> None:
    pool4.run(_fails_within)


def _fails_while_sums_are_pending(env: RankEnv, clips: bool) -> None:
    """The last micro-batch fails on all ranks of a replica, before or behind its first all-reduce; the loop goes on."""
    alone, _ = dist.new_subgroups(1)
    manager = ScriptedManager(alone, dist.group.WORLD)
    net = _net(env.mesh(4))
    optimizer = elastic.ElasticOptimizer(manager, net, _adamw(net))
    before = _shards(net)
    for module, sends in ((net.blocks[0], True), (net.blocks[2], False)):
        optimizer.zero_grad()
        with net.accumulate(last=False):
            _pass(net, env.rank)
        hook = module.register_full_backward_pre_hook(_raise)
        with pytest.raises(ArithmeticError), net.accumulate(last=True):
            _pass(net, env.rank)
        hook.remove()
        assert (manager.calls > 0) == sends and net.pending_gradients()
        if clips:
            assert hsdp.clip_grad_norm_(net, 0.1, error_if_nonfinite=True) == 0
        assert not optimizer.step() and _equal(before, _shards(net))
        assert net.pending_gradients() == {} and all(param.grad is None for param in net.parameters())
    # What was not communicated is still a mistake where no backward has failed.
    optimizer.zero_grad()
    with net.accumulate(last=False):
        _pass(net, env.rank)
    for call in (lambda: hsdp.clip_grad_norm_(net, 0.1), optimizer.step):
        with pytest.raises(StateError, match="not summed over all ranks"):
            call()
    with net.accumulate(last=True):
        _pass(net, env.rank)
    assert optimizer.step() and manager.current_step() == 1


def _pass(net: Any, rank: int) -> None:
    net(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))).square().mean().backward()


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.filterwarnings("ignore:hsdp. a backward pass")
def test_a_step_whose_last_micro_batch_failed_is_dropped(pool4: Pool, clips: bool) -> None:
    pool4.run(_fails_while_sums_are_pending, clips)


def _runs_again(env: RankEnv) -> None:
    """Nothing had been all-reduced when a backward failed, and the loop runs its micro-batch again: all is there."""
    net, optimizer, _ = _elastic(env)
    twin = _net(env.mesh((2, 2)))
    adamw = _adamw(twin)
    optimizer.zero_grad()
    hook = net.blocks[2].register_full_backward_pre_hook(_raise)
    if env.rank < 2:
        with pytest.raises(ArithmeticError):
            _pass(net, env.rank)
    hook.remove()
    for one in (net, twin):
        _pass(one, env.rank)
        hsdp.clip_grad_norm_(one, 0.1)
    adamw.step()
    assert optimizer.step() and _equal(_shards(net, optimizer.optimizer), _shards(twin, adamw))


@pytest.mark.filterwarnings("ignore:hsdp. a backward pass")
def test_a_backward_that_is_run_again_before_anything_was_sent_makes_the_step(pool4: Pool) -> None:
    pool4.run(_runs_again)


# -- healing -----------------------------------------------------------------------------------------------------------


def _healed(env: RankEnv) -> None:
    """The second replica begins with other weights, and other states, and joins in the third step."""
    net, optimizer, manager = _elastic(env, healed=(2,))
    other = env.rank > 1
    for attempt in range(5):
        if other and attempt == 1:  # before its first step it would be found to have other weights
            _shift(net)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + manager.current_step() + (other and attempt < 3))
        optimizer.zero_grad()
        # Those that take part leave a parameter unused, which the one that is healed uses.
        _backward(net, env.rank, attempt, more=other and attempt == 2)
        hsdp.clip_grad_norm_(net, 0.1)
        assert optimizer.step()
        mine = torch.cat([value.double().flatten() for value in _shards(net, optimizer.optimizer)])
        theirs = [torch.empty_like(mine) for _ in range(2)] if len(mine) else []
        if attempt >= 2:
            dist.all_gather(theirs, mine, group=manager.across)
            assert torch.equal(*theirs), f"replicas differ after step {attempt}"
            assert len({group["lr"] for group in optimizer.param_groups}) == 1
    assert manager.batches_committed() == 2 * 2 + 1 + 2 * 2


def test_a_replica_that_joins_is_that_of_its_counterparts(pool4: Pool) -> None:
    pool4.run(_healed)


def _first_step(env: RankEnv) -> None:
    """In the first step of all one replica is healed, and its gradients count neither above nor below the line."""
    net, optimizer, _ = _elastic(env, healed=(0,))
    twin = _net(env.mesh((2, 2))["shard"])
    adamw = _adamw(twin)
    optimizer.zero_grad()
    for model in (net, twin):
        _backward(model, env.rank % 2 if model is twin else env.rank, 0)
        hsdp.clip_grad_norm_(model, 0.01)
    assert optimizer.step()
    adamw.step()
    assert _equal(_shards(net, optimizer.optimizer), _shards(twin, adamw))
    other, optimizer, _ = _elastic(env, seed=env.rank // 2)
    optimizer.zero_grad()
    _backward(other, env.rank, 0)
    with pytest.raises(StateError, match="different weights"):
        optimizer.step()


def test_the_first_step(pool4: Pool) -> None:
    pool4.run(_first_step)


def _healed_in_the_first_step(env: RankEnv) -> None:
    """A run goes on from a checkpoint that the second replica lacks: both take their first step, and one is healed."""
    net, optimizer, manager = _elastic(env, seed=env.rank // 2, healed=(0,))
    manager.step = 5
    for step in range(2):
        optimizer.zero_grad()
        _backward(net, env.rank, step)
        assert optimizer.step()
    _check_alike(manager, _shards(net, optimizer.optimizer))


def test_a_replica_that_is_healed_in_the_first_step_of_others_may_have_other_weights(pool4: Pool) -> None:
    pool4.run(_healed_in_the_first_step)


def _joins_with_other_weights(env: RankEnv) -> None:
    """The second replica dies behind a step, and comes back with a checkpoint of the same step of another run."""
    net, optimizer, manager = _elastic(env)
    for step in range(4):
        joins = env.rank > 1 and step == 2
        if joins:
            manager.states.clear()
            optimizer = elastic.ElasticOptimizer(manager, net, optimizer.optimizer)
            _shift(net)
        optimizer.zero_grad()
        _backward(net, env.rank, step)
        if joins:
            with pytest.raises(StateError, match="different weights at step 2, and this one has just begun"):
                optimizer.step()
        elif step == 2:
            with pytest.warns(UserWarning, match="other weights than this one at step 2"):
                assert not optimizer.step()
        else:
            assert optimizer.step()
        if step == 2:
            break
    assert manager.current_step() == 2


def test_a_replica_that_joins_with_other_weights_ends(pool4: Pool) -> None:
    pool4.run(_joins_with_other_weights)


def _begin(net: Any, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    _backward(net, rank, step)


def _healed_while_others_differ(env: RankEnv) -> None:
    """Four replicas of one rank: in step 2 the last one joins with other weights, while the second one is healed."""
    mesh = env.mesh((4, 1))
    manager = ScriptedManager(mesh.get_group("replicate"), mesh.get_group("shard"), healed=(2,))
    net = _net(mesh["shard"])
    inner = _adamw(net)
    optimizer = elastic.ElasticOptimizer(manager, net, inner)
    for step in range(2):
        _begin(net, optimizer, env.rank, step)
        assert optimizer.step()
    if env.rank == 3:
        manager.states.clear()
        optimizer = elastic.ElasticOptimizer(manager, net, inner)
        _shift(net)
    _begin(net, optimizer, env.rank, 2)
    if env.rank == 3:
        with pytest.raises(StateError, match="different weights at step 2"):
            optimizer.step()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of those that see it by their own weights
            assert not optimizer.step()
    assert manager.current_step() == 2


def test_a_replica_that_is_healed_drops_the_step_in_which_others_differ(pool4: Pool) -> None:
    pool4.run(_healed_while_others_differ)


def _raises_behind_the_vote(env: RankEnv) -> None:
    """The second replica's optimizer raises in a step that the first one takes; its loop goes on."""
    net, optimizer, manager = _elastic(env)
    failing = False

    def fail(*_: Any) -> None:
        if failing:
            raise MemoryError

    optimizer.optimizer.register_step_pre_hook(fail)
    _begin(net, optimizer, env.rank, 0)
    assert optimizer.step()
    _begin(net, optimizer, env.rank, 1)
    failing = env.rank > 1
    with pytest.raises(MemoryError) if failing else nullcontext():
        optimizer.step()
    _begin(net, optimizer, env.rank, 2)
    if failing:
        with pytest.raises(StateError, match=r"different weights at step 2, and .* its optimizer raised in a step"):
            optimizer.step()
    else:
        with pytest.warns(UserWarning, match="other weights than this one at step 2"):
            assert not optimizer.step()
    assert manager.current_step() == 2


def test_a_replica_whose_optimizer_raised_in_a_step_of_others_ends(pool4: Pool) -> None:
    pool4.run(_raises_behind_the_vote)


def _scaled(env: RankEnv) -> None:
    """The second replica is started anew with a scaler of another scale, and healed before its forward."""
    net, optimizer, manager = _elastic(env, healed=(2,), waits=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    manager.register_state_dict_fn("scaler", lambda told: scaler.load_state_dict(told), lambda: scaler.state_dict())
    for step in range(4):
        if step == 2 and env.rank > 1:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            _shift(net)
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(10 * step + env.rank)
        scaler.scale(net(torch.randn(4, WIDTH, generator=random)).square().mean()).backward()
        scaler.unscale_(optimizer)
        hsdp.clip_grad_norm_(net, 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert manager.current_step() == 4 and scaler.get_scale() == 2.0**4
    _check_alike(manager, _shards(net, optimizer.optimizer))


def test_a_scaler_is_healed_before_the_forward(pool4: Pool) -> None:
    pool4.run(_scaled)


def _scaled_by_votes(env: RankEnv) -> None:
    """In the second step one replica sees infinite gradients, and the other one an error in their place: as docs/elastic.md
    has it, the scale follows from what became of the step, and not from what a replica saw."""
    net, optimizer, manager = _elastic(env, fails=((1, 1),) if env.rank > 1 else (), waits=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for attempt in range(4):
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(10 * attempt + env.rank)
        loss = net(torch.randn(4, WIDTH, generator=random)).square().mean()
        scaler.scale(loss * (math.inf if attempt == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = hsdp.clip_grad_norm_(net, 1.0)
        if not norm.isfinite():
            manager.report_error(OverflowError(f"gradients have the norm {norm.item()}"))
        assert norm.isfinite() == (attempt != 1 or env.rank > 1)
        taken = optimizer.step()
        assert taken == (attempt != 1)
        scaler.update(None if taken else scaler.get_scale() / 2)
        assert scaler.get_scale() == (2.0**9 if attempt else 2.0**10)
    _check_alike(manager, _shards(net, optimizer.optimizer))


def test_a_scale_that_follows_from_the_vote_is_the_same_on_all_replicas(pool4: Pool) -> None:
    pool4.run(_scaled_by_votes)


def _skips(env: RankEnv, healed: tuple[int, ...], waits: bool, alone: bool) -> None:
    """Gradients of a backward are zeroed without a step: on both replicas, or in the fourth step on the first one alone."""
    net, optimizer, _ = _elastic(env, healed=healed, waits=waits)
    for step in range(5):
        if step in healed and env.rank > 1:
            _shift(net)
            optimizer._skipped = 7  # as if it had been away
        optimizer.zero_grad()
        _backward(net, env.rank, step)
        if step in (0, 2) or (alone and step == 3 and env.rank < 2):
            optimizer.zero_grad()
            optimizer.zero_grad()
        _backward(net, env.rank, step)
        if alone and step == 3:
            with pytest.raises(StateError, match="has skipped"):
                optimizer.step()
            return
        assert optimizer.step()


@pytest.mark.parametrize(("healed", "waits"), [((), False), ((2,), False), ((2,), True)], ids=["", "late", "before"])
@pytest.mark.parametrize("alone", [False, True], ids=["alike", "alone"])
def test_replicas_skip_the_same_steps(pool4: Pool, healed: tuple[int, ...], waits: bool, alone: bool) -> None:
    pool4.run(_skips, healed, waits, alone)


class _Other(dict[str, Tensor]):
    """A container that hsdp cannot make again."""


def _unsendable(env: RankEnv, global_state: bool) -> None:
    net, optimizer, _ = _elastic(env)
    weight = net.head.weight
    if global_state:
        optimizer.optimizer.register_step_post_hook(lambda inner, *_: inner.state["all"].update(count=1))
        message = r"keeps state under 'all', which is no parameter"
    else:
        optimizer.optimizer.register_step_post_hook(lambda inner, *_: inner.state[weight].update(more=_Other()))
        message = r"the optimizer's state of 'head.weight': 'more' is a .*_Other"
    optimizer.zero_grad()
    _backward(net, env.rank, 0)
    with pytest.raises(CheckpointError, match=message):
        optimizer.step()


@pytest.mark.parametrize("global_state", [False, True])
def test_states_that_cannot_be_given_are_told_in_the_first_step(pool4: Pool, global_state: bool) -> None:
    pool4.run(_unsendable, global_state)


def _several_models(env: RankEnv) -> None:
    """One that is trained and its average, in a module that is none of hsdp's: both are given."""
    mesh = env.mesh((2, 2))
    manager = ScriptedManager(mesh.get_group("replicate"), mesh.get_group("shard"), healed=(2,))
    both = nn.ModuleDict({"net": _net(mesh["shard"]), "average": _net(mesh["shard"])})
    both["average"].requires_grad_(False)
    optimizer = elastic.ElasticOptimizer(manager, both, _adamw(both["net"]))
    for step in range(4):
        if step == 1 and env.rank > 1:
            _shift(both)
        optimizer.zero_grad()
        _backward(both["net"], env.rank, step)
        assert optimizer.step()
        with torch.no_grad():
            for mean, param in zip(both["average"].parameters(), both["net"].parameters(), strict=True):
                mean.lerp_(param, 0.1)
    _check_alike(manager, _shards(both))
    with pytest.raises(ValueError, match=r"has one already.*nn\.ModuleDict"):
        elastic.ElasticOptimizer(manager, both, _adamw(both["net"]))


def test_several_models_in_one_module(pool4: Pool) -> None:
    pool4.run(_several_models)


class _Marks:
    """A device's stream, as far as it is asked: what a mark's event waits for is what was done before it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.waited: list[str] = []

    def mark(self) -> Any:
        seen = list(self.done)
        return type("Event", (), {"synchronize": lambda _: self.waited.extend(seen)})()


def _sent_behind(env: RankEnv) -> None:
    net, optimizer, manager = _elastic(env)
    optimizer._streams = marks = _Marks()
    quorum = manager.start_quorum

    def start() -> None:
        manager.states["hsdp"][1]()  # from its own thread, at once
        quorum()

    manager.start_quorum = start
    optimizer.zero_grad()
    _backward(net, env.rank, 0)
    optimizer.step()
    marks.done.append("an average behind the step")
    optimizer.zero_grad()
    assert marks.waited == marks.done


def test_what_is_sent_has_all_that_was_done_before_the_step(pool4: Pool) -> None:
    pool4.run(_sent_behind)


def _given(env: RankEnv, optimizer_of: str) -> None:
    """What a rank takes of its model is given to another one, with tensor parallelism inside and with bf16 outside."""
    mesh = env.mesh((2, 2), ("shard", "tp"))
    alone, _ = dist.new_subgroups(1)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        net: Any = Net()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], plan)
        policy = hsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*net.blocks, net):
            hsdp.fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
        inner = hsdp.optim.local(_adamw(net), flat=True) if optimizer_of == "local" else _adamw(net)
        manager = ScriptedManager(alone, dist.group.WORLD)
        optimizer = elastic.ElasticOptimizer(manager, net, inner)
        found.append((net, optimizer, manager))
        for _ in range(1 + seed):
            optimizer.zero_grad()
            net(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(env.rank // 2))).square().mean().backward()
            assert optimizer.step()
    (one, its, source), (other, their, target) = found
    its.zero_grad()
    their.zero_grad()
    # Over the wire, as the transport sends it.
    state = pickle.loads(pickle.dumps(source.states["hsdp"][1]()))
    assert not _equal(_shards(one, its.optimizer), _shards(other, their.optimizer))
    target.states["hsdp"][0](state)
    for net, optimizer in ((one, its), (other, their)):
        net(torch.ones(4, WIDTH)).square().mean().backward()
        assert optimizer.step()
    assert _equal(_shards(one, its.optimizer), _shards(other, their.optimizer))


@pytest.mark.parametrize("optimizer_of", ["torch", "local"])
def test_the_state_of_a_counterpart_with_tensor_parallelism(pool4: Pool, optimizer_of: str) -> None:
    pool4.run(_given, optimizer_of)


def _misfits(env: RankEnv) -> None:
    net, optimizer, manager = _elastic(env)
    optimizer.zero_grad()
    give, take = manager.states["hsdp"]
    before = _shards(net)
    for change, error, words in (
        (lambda state: state["model"].pop("head.bias"), StateError, "head.bias"),
        (lambda state: state["model"].update({"head.bias": torch.zeros(7)}), StateError, "same model and mesh"),
        (lambda state: state["groups"][0].update(momentum=0.9), CheckpointError, "another kind"),
    ):
        state = take()
        state["model"] = {name: tensor + 1 for name, tensor in state["model"].items()}
        change(state)
        with pytest.raises(error, match=words):
            give(state)
        assert _equal(before, _shards(net)), "checked before anything is changed"


def test_the_state_of_another_model_is_refused(pool4: Pool) -> None:
    pool4.run(_misfits)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _beside_units(env: RankEnv) -> None:
    net, _, manager = _elastic(env)
    beside = nn.Linear(4, 4)
    model = nn.ModuleDict({"net": net, "beside": beside})
    with pytest.raises(ValueError, match=r"in no unit are 'beside\.weight', 'beside\.bias'"):
        elastic.ElasticOptimizer(manager, model, torch.optim.SGD(model.parameters(), lr=0.1))
    beside.requires_grad_(False)


def test_trained_parameters_in_no_unit_are_refused(pool4: Pool) -> None:
    pool4.run(_beside_units)


def _mistakes(env: RankEnv) -> None:
    net, optimizer, manager = _elastic(env)
    with pytest.raises(StateError, match="zero_grad"):
        _backward(net, env.rank, 0)
    net, optimizer, manager = _elastic(env)
    with pytest.raises(StateError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    _backward(net, env.rank, 0)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StateError, match=r"'lr' of the optimizer's group 0 changed"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    net.set_replica_reduce(hsdp.AllReduce())
    with pytest.raises(StateError, match="all-reduce stage"):
        optimizer.step()
    with pytest.raises(ValueError, match="one replica"):
        elastic.ElasticOptimizer(manager, twin := _net(env.mesh((2, 2))), _adamw(twin))
    with pytest.raises(ValueError, match="no parameter"):
        elastic.ElasticOptimizer(manager, plain := nn.Linear(2, 2), _adamw(plain))
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        elastic.ElasticOptimizer(manager, net, optimizer)
    with pytest.raises(ValueError, match="mean"):
        elastic.replicas(manager, "mean")  # type: ignore[arg-type]


def test_mistakes_are_named(pool4: Pool) -> None:
    pool4.run(_mistakes)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _saved(env: RankEnv, folder: Path) -> None:
    net, optimizer, manager = _elastic(env)
    for step in range(3):
        optimizer.zero_grad()
        _backward(net, env.rank, step)
        optimizer.step()
        dist.barrier()
        # The first one of those that take part writes; the next time the other replica is the first.
        manager.participating_rank = lambda: manager.across.rank() if step < 2 else 1 - manager.across.rank()
        path = elastic.save(folder, optimizer, {"at": step}, process_group=manager.within)
        assert (path is not None) == (manager.participating_rank() == 0)
        dist.barrier()
    again, other, fresh = _elastic(env, seed=7)
    loaded = elastic.resume(folder, other, process_group=fresh.within)
    assert loaded is not None and loaded.extra == {"at": 2}
    assert fresh.state_dict() == {"step": 3, "batches_committed": 6}
    assert _equal(_shards(net, optimizer.optimizer), _shards(again, other.optimizer))
    if env.rank < 2:
        hsdp.checkpoint.save(folder / "foreign", net, optimizer.optimizer, step=1, process_group=manager.within)
        with pytest.raises(CheckpointError, match=r"not saved by elastic\.save"):
            elastic.resume(folder / "foreign", other, process_group=fresh.within)


def test_one_replica_writes_and_all_resume(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(_saved, tmp_path)
