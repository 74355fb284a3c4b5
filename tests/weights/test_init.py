"""`init_sharded` and `sync_module_states`: the values of one process on every mesh, and nothing left uninitialised."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.errors import StateError
from hsdp.params.local import local_of
from hsdp.weights.full_params import full_params
from hsdp.weights.init import init_sharded, sync_module_states
from tests.support.counting import CollectiveCounter
from tests.support.models import MLP, ConvNet, Transformer
from tests.support.rig import Pool, RankEnv
from tests.support.sharded import check_sharded, mesh_id, pool_for, shard
from tests.support.twin import adamw, assert_same, full
from tests.support.twin import full_params as whole_values


class Positions(nn.Module):
    """A parameter, buffers of three dtypes, one that no checkpoint has."""

    def __init__(self, length: int = 5, dim: int = 4) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.empty(length, dim))
        self.register_buffer("ids", torch.empty(length, dtype=torch.int64))
        self.register_buffer("angles", torch.empty(length, dtype=torch.complex64), persistent=False)
        self.register_buffer("mask", torch.empty(length, length, dtype=torch.bool))
        self.codes = nn.Parameter(torch.empty(length, dtype=torch.int8), requires_grad=False)
        self.register_buffer("order", torch.empty(length, dtype=torch.int16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.offset)
        self.ids.copy_(torch.arange(len(self.ids), device=self.ids.device))
        self.angles = torch.polar(torch.ones(len(self.ids)), torch.rand(len(self.ids)))  # in place of the old one
        self.mask.copy_(torch.ones_like(self.mask).triu())
        self.codes.data.fill_(3)
        self.order.data.fill_(4)  # version counters do not tell

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset[self.ids] * self.angles.real[:, None] * self.mask[0, :, None]


class Mixed(nn.Module):
    """All kinds of things that are initialised; draws random numbers in the order in which it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.BatchNorm1d(5), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(2)
        )
        self.positions = Positions()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.rnn = nn.LSTM(4, 3)
        self.head = nn.Linear(3, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embed(tokens))
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](block["norm"](x))))
        x = x + self.attention(x, x, x)[0]
        return self.head(self.rnn(x)[0])


MODELS: dict[str, Callable[[], nn.Module]] = {"mixed": Mixed, "transformer": Transformer, "conv": ConvNet}


def _on_meta(build: Callable[[], nn.Module], mesh: Any) -> nn.Module:
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.Linear, Positions)) and not isinstance(
            module, nn.modules.linear.NonDynamicallyQuantizableLinear
        ):
            hsdp.fully_shard(module, mesh=mesh)
    kept = [p for name, p in model.named_parameters() if "norm" in name]
    return hsdp.fully_shard(model, mesh=mesh, replicate_params=kept)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: torch.view_as_real(b) if b.is_complex() else b for name, b in model.named_buffers()}
    return {**whole_values(model), **buffers}


def _init(env: RankEnv, shape: tuple[int, ...], names: list[str]) -> None:
    for name in names:
        model = _on_meta(MODELS[name], env.mesh(shape))
        before = dict(model.named_parameters())
        optimizer = adamw(model.parameters())
        for param in model.parameters():
            param.mark = name  # type: ignore[attr-defined]
        torch.manual_seed(3 + env.rank)
        mine = torch.get_rng_state()
        assert init_sharded(model) is model
        theirs = torch.get_rng_state()

        torch.manual_seed(3)  # what one process draws
        plain = MODELS[name]()
        assert_same(dict(_tensors(model)), dict(_tensors(plain)), 0.0, 0.0)
        # The first rank's numbers go on, the others keep theirs.
        assert torch.equal(theirs, torch.get_rng_state() if env.rank == 0 else mine)
        check_sharded(model)
        for key, param in model.named_parameters():
            assert param is before[key]
            assert param.mark == name  # type: ignore[attr-defined]
            assert not param.is_meta
        if name != "conv":
            optimizer.zero_grad()
            model(torch.arange(10).view(2, 5) % 7).sum().backward()
            optimizer.step()
            check_sharded(model)


@pytest.mark.parametrize("shape", [(2,), (2, 2), (4,), (4, 1)], ids=mesh_id)
def test_rule_5_values_are_those_of_one_process_on_every_mesh(
    request: pytest.FixtureRequest, shape: tuple[int, ...]
) -> None:
    pool_for(request, shape).run(_init, shape, ["mixed"] if shape == (4, 1) else list(MODELS))


def _equal_states_stay_equal(env: RankEnv) -> None:
    model = _on_meta(MLP, env.mesh(2))
    torch.manual_seed(1)
    init_sharded(model)
    numbers = torch.rand(4)
    told = [torch.empty(4) for _ in range(2)]
    dist.all_gather(told, numbers)
    assert torch.equal(told[0], told[1])
    again = _on_meta(MLP, env.mesh(2))
    torch.manual_seed(env.rank)
    with CollectiveCounter() as counter:
        init_sharded(again)
    assert len(counter.select("broadcast")) == 1, "more than the random state was sent"
    assert not torch.equal(full(next(model.parameters())), full(next(again.parameters())))


def test_ranks_in_one_random_state_stay_in_one(pool2: Pool) -> None:
    pool2.run(_equal_states_stay_equal)


def _one_unit_at_a_time(env: RankEnv) -> None:
    with torch.device("meta"):
        model = MLP((8, 8, 8, 8, 8))
    shard(model, env.mesh(2))
    whole: list[int] = []

    def look(module: nn.Module) -> None:
        real = [p for p in model.parameters() if not isinstance(p, DTensor)]
        assert not any(p.is_meta for p in real)
        whole.append(len(real))
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 2.0)

    init_sharded(model, look)
    assert max(whole) == 2, "more than one unit's parameters were whole at a time"
    assert all(bool((full(p) == 2.0).all()) for p in model.parameters())


def test_units_are_whole_one_at_a_time(pool2: Pool) -> None:
    pool2.run(_one_unit_at_a_time)


def _own_numbers(env: RankEnv) -> None:
    def init(module: nn.Module) -> None:  # not of torch's generators: it differs between ranks
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(env.rank + 1.0)

    with torch.device("meta"):
        model = MLP()
        model.register_buffer("seen", torch.zeros(3))
    ignored = model.blocks[0].bias
    model = shard(model, env.mesh((2, 2)), ignored_params=[ignored])
    init_sharded(model, init)
    assert model.blocks[0].bias is ignored  # type: ignore[union-attr,index]
    assert type(ignored) is nn.Parameter
    values = {**whole_values(model), "seen": model.seen}
    for name, value in values.items():
        assert bool((value == 1.0).all()), f"{name} differs from the first rank's"  # type: ignore[operator,union-attr]


def test_rule_5_functions_that_differ_between_ranks_are_overruled(pool4: Pool) -> None:
    pool4.run(_own_numbers)


def _forgotten(env: RankEnv) -> None:
    mesh = env.mesh(2)

    def forgets(what: str, module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            with torch.no_grad():
                if name != what:
                    tensor.fill_(1)
                elif tensor.dtype == torch.complex64:
                    tensor[1:].fill_(1)  # all but one element

    for what in ("offset", "codes", "angles", "ids", "mask"):
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(4, 4), Positions())
        shard(model, mesh)
        with pytest.raises(StateError, match=rf"init_sharded: .*{what}'\] were not initialised, or not wholly"):
            init_sharded(model, partial(forgets, what))
        done = what not in ("offset", "codes")  # then the parameters are there, and the buffers still missing
        assert {p.is_meta for p in model.parameters()} == {not done}
        assert all(buffer.is_meta for buffer in model.buffers())
        check_sharded(model)
        init_sharded(model)
        assert bool((full(model[1].offset.detach()) == 1.0).all()) == done, "the second call changed what was there"
        assert math.isfinite(model(torch.ones(5, 4)).sum().item())

    def fails(module: nn.Module) -> None:
        raise LookupError

    with torch.device("meta"):
        model = MLP()
    shard(model, mesh)
    with pytest.raises(LookupError):
        init_sharded(model, fails)
    check_sharded(model)
    assert all(p.is_meta for p in model.parameters())


def test_what_was_not_initialised_is_named(pool2: Pool) -> None:
    pool2.run(_forgotten)


class Bare(nn.Module):
    """Has a parameter and nothing that sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def _refused(env: RankEnv) -> None:
    mesh = env.mesh(2)
    with torch.device("meta"):
        bare, pair = Bare(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for model in (bare, pair):
        hsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"\(root\) \(FSDPBare\) have parameters .* no reset_parameters\(\); pass fn="):
        init_sharded(bare)
    with pytest.raises(ValueError, match="lies outside of it"):
        init_sharded(pair[0])
    with pytest.raises(TypeError, match="expected a function of a module"):
        init_sharded(bare, 3)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="on the meta device; call hsdp"):
        sync_module_states(bare)
    for asynchronous in (False, True):
        with pytest.raises(StateError, match="on the meta device; call hsdp"):
            bare.unshard(async_op=asynchronous)  # type: ignore[operator]
    with pytest.raises(StateError, match="on the meta device; call hsdp"), full_params(bare):
        pass
    real = hsdp.fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ValueError, match=r"nothing of it is on the meta device; .*gathered_apply"):
        init_sharded(real)
    with pytest.raises(ValueError, match="no parameter of it is sharded"):
        init_sharded(nn.Linear(2, 2, device="meta"))
    # A real unit beside one on the meta device is left alone.
    both = nn.Sequential(real, hsdp.fully_shard(nn.Linear(2, 2, device="meta"), mesh=mesh))
    before = full(real.weight.detach()).clone()
    init_sharded(both, lambda module: [p.data.fill_(9.0) for p in module.parameters(recurse=False)])
    assert torch.equal(full(real.weight.detach()), before)
    assert bool((full(both[1].weight.detach()) == 9.0).all())


def test_what_makes_no_sense_is_refused(pool2: Pool) -> None:
    pool2.run(_refused)


def _sync(env: RankEnv) -> None:
    mesh = env.mesh((2, 2))
    model: Any = ConvNet()
    model.batch = nn.BatchNorm1d(4)
    model.gain = nn.Parameter(torch.tensor(1.0))
    ignored = model.last.bias
    shard(model, mesh, ignored_params=[ignored])
    x = torch.ones(2, 3, 5, 5)
    model(x)  # has gathered the old values
    with torch.no_grad():
        for at, param in enumerate(model.parameters()):
            local = local_of(param)
            local.fill_(at + 100.0 * env.rank)
        for buffer in model.buffers():
            buffer.fill_(env.rank + 5)
    assert sync_module_states(model) is model
    row = env.rank % 2  # this rank's place in its shard group
    for at, (name, param) in enumerate(model.named_parameters()):
        if isinstance(param, DTensor) and name != "gain":
            assert bool((param._local_tensor == at + 100.0 * row).all()), name
        else:
            local = local_of(param)
            assert bool((local == at).all()), name
    assert all(bool((buffer == 5).all()) for buffer in model.buffers())
    with torch.no_grad():
        told = [torch.empty_like(model(x)) for _ in range(4)]
        dist.all_gather(told, model(x))
    assert all(torch.equal(other, told[0]) for other in told)


def test_rule_5_sync_makes_replicas_equal(pool4: Pool) -> None:
    pool4.run(_sync)


class Experts(nn.Module):
    """Experts that each rank has by itself, in front of what all ranks have; the module itself is no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.dense = nn.Linear(4, 4), nn.Linear(4, 4)
        self.free = nn.Parameter(torch.empty(3))
        self.register_buffer("scale", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.free)
        nn.init.normal_(self.scale)


def _experts_first(env: RankEnv) -> None:
    meshes = env.mesh((2, 1), ("ep", "one"))
    for policy in ("trust", "broadcast"):
        with torch.device("meta"):
            model = Experts()
        hsdp.fully_shard(model.experts, mesh=meshes["one"], replica_policy=policy)
        hsdp.fully_shard(model.dense, mesh=meshes["ep"], replica_policy=policy)
        torch.manual_seed(7 + env.rank)
        init_sharded(model)
        expected = Experts()
        torch.manual_seed(7)
        for module in (expected.dense, expected):  # experts of ranks in other states have numbers of their own
            module.reset_parameters()
        for name in ("dense.weight", "dense.bias", "free"):
            assert torch.equal(full(model.get_parameter(name)), expected.get_parameter(name)), f"{policy}: {name}"
        assert torch.equal(model.scale, expected.scale), policy
    for tensor in (model.free.detach(), model.scale):
        tensor.fill_(env.rank)
    with pytest.raises(hsdp.DivergenceError, match="scale"):
        hsdp.check_replicas(model, buffers=True)
    sync_module_states(model)
    assert model.free.tolist() == model.scale.tolist() == [0.0] * 3
    hsdp.check_replicas(model, buffers=True)


def test_what_no_unit_has_is_equal_beyond_the_ranks_of_experts(pool2: Pool) -> None:
    pool2.run(_experts_first)
