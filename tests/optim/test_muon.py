"""`hsdp.optim.Muon`: torch.optim.Muon on one device is the oracle; each matrix is computed once, and travels once."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hsdp
from hsdp.comm.collectives import Comm
from hsdp.optim import Muon, whole_matrix
from tests.params.test_tensor_parallel import CASE as TP_CASE
from tests.params.test_tensor_parallel import NAMES as TP_NAMES
from tests.params.test_tensor_parallel import parallelize
from tests.support.models import Case, regression
from tests.support.rig import Pool, RankEnv, fake_world
from tests.support.sharded import check_sharded, mesh_id, pool_for
from tests.support.twin import assert_same, full_params

SPLIT = (8, 8, 5)
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW = {"lr": 0.01, "weight_decay": 0.02}
STEPS, ACCUMULATE, NORM = 3, 2, 0.7


class Zoo(nn.Module):
    """Matrices of every kind: odd and equal shapes, fewer rows than ranks, fused, experts, convolutions, tied, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.fused = nn.Linear(8, sum(SPLIT), bias=False)
        self.experts = nn.Parameter(torch.randn(3, 21, 8) / 5)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.few = nn.Linear(6, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(3, 8, bias=False)
        self.again = nn.Linear(3, 8, bias=False)
        self.again.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = torch.tanh(self.fused(x) @ self.experts.mean(0))
        x = self.conv(x.unsqueeze(-1).expand(-1, -1, 3)).mean(-1)
        x = self.frozen(torch.tanh(self.few(x)))
        return self.last(x) + self.again(torch.sin(x))


CASE = regression("zoo", Zoo)


def kind(param: Tensor) -> str:
    """How a parameter is to be stepped, told by its shape."""
    if param.ndim == 2:
        return "fused" if param.shape[0] == sum(SPLIT) else "one"
    return "adamw" if param.ndim < 2 else "stacked" if param.shape[-2:] == (21, 8) else "flattened"


OPTIONS: dict[str, dict[str, Any]] = {
    "one": {},
    "fused": {"split_sizes": SPLIT},
    "stacked": {"matrices": "stacked", "split_sizes": [7, 14]},
    "flattened": {"matrices": "flattened"},
    "adamw": {"algorithm": "adamw", **ADAMW},
}


def groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Every parameter in the group of its kind."""
    params = list(params)
    found = [{"params": [p for p in params if kind(p) == name], **options} for name, options in OPTIONS.items()]
    return [group for group in found if group["params"]]


def muon(params: Iterable[Any], **options: Any) -> Muon:
    """Ours, in the parameters' dtype, with many buckets."""
    return Muon(groups(params), **{"ns_dtype": None, "bucket_bytes": 500, **MUON, **options})


@contextmanager
def in_full_precision() -> Iterator[None]:
    """torch.optim.Muon iterates in bfloat16 always; inside of this it keeps the dtype that it is given."""
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        yield


def parts(param: Tensor) -> list[Tensor]:
    """The 2-D matrices of a whole parameter, as views."""
    if kind(param) == "flattened":
        return [param.flatten(1)]
    stack = param if param.ndim == 3 else param.unsqueeze(0)
    split = {"fused": list(SPLIT), "stacked": [7, 14]}.get(kind(param), [stack.shape[1]])
    return [part for matrix in stack for part in matrix.split(split)]


class TorchMuon:
    """torch.optim.Muon on copies of the matrices, and torch.optim.AdamW on what is none: the oracle."""

    def __init__(self, params: Iterable[Tensor], **options: Any) -> None:
        self.whole = [p for p in params if kind(p) != "adamw"]
        self.pieces = [[part.detach().clone() for part in parts(p)] for p in self.whole]
        self.muon = torch.optim.Muon([piece for pieces in self.pieces for piece in pieces], **{**MUON, **options})
        self.adamw = torch.optim.AdamW([p for p in params if kind(p) == "adamw"], **ADAMW)

    @torch.no_grad()
    def step(self) -> None:
        for param, pieces in zip(self.whole, self.pieces, strict=True):
            for grad, piece in zip(parts(param.grad) if param.grad is not None else [None] * 9, pieces, strict=False):
                piece.grad = None if grad is None else grad.clone()
        self.muon.step()
        self.adamw.step()
        for param, pieces in zip(self.whole, self.pieces, strict=True):
            for part, piece in zip(parts(param), pieces, strict=True):
                part.copy_(piece)


def expected(world: int, case: Case = CASE, **options: Any) -> dict[str, Tensor]:
    """What one device trains, with the gradients of all ranks."""
    model = case.model()
    optimizer = TorchMuon(list(model.parameters()), **options)
    with in_full_precision():
        for step in range(STEPS):
            model.zero_grad()
            for rank in range(world):
                for micro in range(ACCUMULATE):
                    (case.loss(model, case.batch(step, rank, micro)) / (ACCUMULATE * world)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
    return full_params(model)


def shard(model: Any, mesh: Any, **options: Any) -> Any:
    for block in model.blocks:
        hsdp.fully_shard(block, mesh=mesh, **options)
    return hsdp.fully_shard(model, mesh=mesh, replicate_params={model.last.weight}, **options)


def steps(model: Any, case: Case, optimizer: torch.optim.Optimizer, rank: int, first: int = 0, count: int = STEPS) -> None:
    for step in range(first, first + count):
        model.zero_grad()
        for micro in range(ACCUMULATE):
            with model.accumulate(last=micro == ACCUMULATE - 1):
                (case.loss(model, case.batch(step, rank, micro)) / ACCUMULATE).backward()
        hsdp.clip_grad_norm_(model, NORM)
        optimizer.step()
        same_on_replicas(model)


def same_on_replicas(model: nn.Module) -> None:
    """What this rank holds is, bit for bit, what its replicas hold."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        if param.device_mesh.ndim > 1 and param.placements[0].is_replicate():
            local = param.to_local().detach().contiguous()
            others = [torch.empty_like(local) for _ in range(param.device_mesh.size(0))]
            dist.all_gather(others, local, group=param.device_mesh.get_group(0))
            assert all(torch.equal(other, local) for other in others), f"{name} differs between replicas"


def _trains(env: RankEnv, shape: tuple[int, ...], twin: dict[str, Tensor], options: dict[str, Any]) -> None:
    model = shard(CASE.model(), env.mesh(shape))
    optimizer = muon(model.parameters(), **options)
    sent: list[tuple[int, list[int]]] = []
    computed: list[int] = []
    exchange, transform = Comm.exchange_parts, Muon.transform

    def watched(comm: Comm, owner: Any, key: int, out: Tensor, counts: list[int], given: Tensor, sizes: list[int]) -> Any:
        sent.append((comm.rank, sizes))
        return exchange(comm, owner, key, out, counts, given, sizes)

    def counted(one: Muon, matrices: Tensor, group: dict[str, Any]) -> Tensor:
        computed.append(len(matrices))
        return transform(one, matrices, group)

    with mock.patch.object(Comm, "exchange_parts", watched), mock.patch.object(Muon, "transform", counted):
        steps(model, CASE, optimizer, env.rank)
    assert_same(dict(full_params(model)), dict(twin), 1e-12, 1e-12)
    check_sharded(model)
    # Each matrix is computed once in all ranks; its elements travel once to each other replica, and no further.
    stepped = [p for p in model.parameters() if p.grad is not None and kind(p) != "adamw"]
    replicas, shards = (1, *shape)[-2:]
    across = sum(n for rank, sizes in sent for to, n in enumerate(sizes) if rank // shards != to // shards)
    replicated = next(p for p in stepped if p is model.last.weight).numel() * (shards - 1)  # every shard rank needs it
    found = torch.tensor([sum(computed), across])
    dist.all_reduce(found)
    wanted = sum(p.numel() for p in stepped) + replicated
    assert found.tolist() == [
        STEPS * sum(len(parts(p)) for p in map(whole_shape, stepped)),
        STEPS * (replicas - 1) * wanted,
    ]
    if len(sent) >= 4:  # several buckets: the second one leaves before the first one's way back
        assert len(sent) > 2 * STEPS


def whole_shape(param: Tensor) -> Tensor:
    return torch.empty(param.shape, device="meta")


SETTINGS: list[dict[str, Any]] = [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}]


@pytest.mark.parametrize("shape", [(2,), (2, 1), (4,), (1, 4), (2, 2), (4, 1)], ids=mesh_id)
def test_equals_torch_on_one_device(request: pytest.FixtureRequest, shape: tuple[int, ...]) -> None:
    pool = pool_for(request, shape)
    options = SETTINGS[len(shape) % 2]
    pool.run(_trains, shape, expected(pool.world_size, **options), options)


def _trains_tensor_parallel(env: RankEnv, shape: tuple[int, ...], twin: dict[str, Tensor]) -> None:
    model: Any = TP_CASE.model()
    mesh = env.mesh(shape, TP_NAMES)
    parallelize(model, mesh["tp"], "tensor")
    for block in model.blocks:
        hsdp.fully_shard(block, mesh=mesh["replicate", "shard"])
    hsdp.fully_shard(model, mesh=mesh["replicate", "shard"])
    steps(model, TP_CASE, muon(model.parameters()), mesh["replicate", "shard"].get_rank() // shape[2])
    assert_same(dict(full_params(model)), dict(twin), 1e-12, 1e-12)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=mesh_id)
def test_tensor_parallel_matrices_are_whole_on_their_owner(pool4: Pool, shape: tuple[int, ...]) -> None:
    pool4.run(_trains_tensor_parallel, shape, expected(2, TP_CASE))


def _iterates_in_bfloat16(env: RankEnv) -> None:
    models = [shard(CASE.model(), env.mesh((2,))) for _ in range(2)]
    ones = [[p for p in model.parameters() if kind(p) == "one"] for model in models]
    stock, ours = torch.optim.Muon(ones[0], **MUON), Muon(ones[1], **MUON)
    for model, optimizer in zip(models, (stock, ours), strict=True):
        steps(model, CASE, optimizer, env.rank, count=2)
    mine = full_params(models[1])
    for name, value in full_params(models[0]).items():
        # The update has singular values around 1; bfloat16 keeps 8 bits of them.
        torch.testing.assert_close(mine[name], value, rtol=0, atol=2 * 2 * MUON["lr"] * 2**-6, msg=name)


def test_bfloat16_iterations_are_near_those_of_torch(pool2: Pool) -> None:
    pool2.run(_iterates_in_bfloat16)


def _steps_in_16_bits(env: RankEnv, shape: tuple[int, ...], dtype: torch.dtype, over_replicas: bool) -> None:
    sizes = ((24, 64), (64, 24), (24, 130))
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).to(dtype)
    hsdp.fully_shard(model, mesh=env.mesh(shape))
    optimizer = Muon(model.parameters(), lr=0.013, ns_dtype=None, over_replicas=over_replicas)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + env.rank)
        model(torch.randn(8, 24, generator=generator).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        same_on_replicas(model)


@pytest.mark.parametrize("over_replicas", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=mesh_id)
def test_replicas_of_tall_matrices_in_16_bits_stay_equal(
    pool4: Pool, shape: tuple[int, ...], dtype: torch.dtype, over_replicas: bool
) -> None:
    """The owner iterates with a tall matrix transposed, and adds its own piece to the weights as it lies."""
    pool4.run(_steps_in_16_bits, shape, dtype, over_replicas)


def _round_trips(env: RankEnv, folder: str) -> None:
    def fresh(shape: tuple[int, ...]) -> tuple[Any, Muon]:
        model = shard(CASE.model(), env.mesh(shape))
        return model, muon(model.parameters())

    model, optimizer = fresh((2, 2))
    steps(model, CASE, optimizer, env.rank, count=1)
    own = copy.deepcopy(optimizer.state_dict())
    theirs = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    hsdp.checkpoint.save(folder, model, optimizer, step=1)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    steps(model, CASE, optimizer, env.rank, first=1, count=1)
    wanted = full_params(model)
    for how in ("own", "torch", "hsdp"):
        other, loaded = fresh((4, 1) if how == "hsdp" else (2, 2))
        if how == "own":
            loaded.load_state_dict(copy.deepcopy(own))
        elif how == "torch":
            options = StateDictOptions(strict=False)  # a parameter that was never stepped has no state
            set_optimizer_state_dict(other, loaded, copy.deepcopy(theirs), options=options)
        if how == "hsdp":
            hsdp.checkpoint.load(Path(folder, "step-000001"), other, loaded)
        else:
            with torch.no_grad():
                for name, param in other.named_parameters():
                    param.copy_(weights[name])
        steps(other, CASE, loaded, env.rank, first=1, count=1)
        assert_same(dict(full_params(other)), dict(wanted), 1e-12, 1e-12)


def test_checkpoints_round_trip_onto_other_meshes(pool4: Pool, tmp_path: Path) -> None:
    pool4.run(_round_trips, str(tmp_path))


def _takes_over_from_torch(env: RankEnv, folder: str) -> None:
    def train(model: Any, optimizer: torch.optim.Optimizer, first: int) -> dict[str, Tensor]:
        with in_full_precision():
            steps(model, CASE, optimizer, env.rank, first=first, count=1)
        return full_params(model)

    def ones(model: Any) -> list[Any]:
        return [p for p in model.parameters() if kind(p) == "one"]

    model = shard(CASE.model(), env.mesh((2,)))
    stock = torch.optim.Muon(ones(model), **MUON)
    train(model, stock, 0)
    hsdp.checkpoint.save(folder, model, stock, step=1)
    state = copy.deepcopy(stock.state_dict())
    wanted = train(model, stock, 1)
    for how in ("state dict", "checkpoint"):
        other = shard(CASE.model(), env.mesh((2,)))
        ours = Muon(ones(other), ns_dtype=None)
        where = Path(folder, "step-000001")
        if how == "checkpoint":
            hsdp.checkpoint.load(where, other, ours)
        else:
            hsdp.checkpoint.load(where, other)
            ours.load_state_dict(copy.deepcopy(state))
        assert ours.param_groups[0]["lr"] == MUON["lr"]
        assert [{k: v for k, v in g.items() if k != "params"} for g in ours.param_groups] == [
            {k: v for k, v in g.items() if k != "params"} for g in stock.param_groups
        ]
        assert_same(dict(train(other, ours, 1)), dict(wanted), 1e-12, 1e-12)


def test_goes_on_from_checkpoints_of_torch_muon(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(_takes_over_from_torch, str(tmp_path))


def _refuses(env: RankEnv) -> None:
    model = shard(CASE.model(), env.mesh((2,)))
    optimizer = muon(model.parameters())
    model.set_requires_grad_sync(False)
    CASE.loss(model, CASE.batch(0, env.rank)).backward()
    before = full_params(model)
    with pytest.raises(hsdp.StateError, match="the optimizer's step"):
        optimizer.step()
    model.set_requires_grad_sync(True)
    CASE.loss(model, CASE.batch(0, env.rank)).backward()
    weight = model.fused.weight
    grad, weight.grad = weight.grad, torch.zeros(weight.shape, dtype=weight.dtype)
    with pytest.raises(hsdp.StateError, match=r"'fused.weight'.*not sharded as the parameter"):
        optimizer.step()
    weight.grad = grad
    assert_same(dict(full_params(model)), dict(before), 0, 0)
    assert not optimizer.state, "a step that was refused has changed nothing"


def test_refuses_what_is_no_gradient(pool2: Pool) -> None:
    pool2.run(_refuses)


def _disagrees(env: RankEnv, everything: bool) -> None:
    model = shard(CASE.model(), env.mesh((2,)))
    optimizer = muon(model.parameters())
    for step in range(2):
        CASE.loss(model, CASE.batch(step, env.rank)).backward()
        if step == 1 and env.rank == 1:
            for param in model.parameters() if everything else [model.fused.weight]:
                param.grad = None
        if step == 0:
            optimizer.step()
    with pytest.raises(hsdp.DivergenceError, match=r"Muon, \d+ of 10 matrix parameters"):
        optimizer.step()


@pytest.mark.parametrize("everything", [False, True])
def test_ranks_with_gradients_for_other_parameters_are_told(everything: bool) -> None:
    with Pool(2) as pool:  # its groups are of no use afterwards
        pool.run(_disagrees, everything)


@whole_matrix
def Polar(matrices: Tensor, *, least: float = 1e-9) -> Tensor:
    """The nearest orthogonal matrix, by its singular values."""
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    return (u * (s > least).unsqueeze(-2)) @ vh


def _polar(env: RankEnv, twin: dict[str, Tensor]) -> None:
    model = shard(CASE.model(), env.mesh((2, 2)))
    steps(model, CASE, Polar(groups(model.parameters()), lr=0.02, momentum=0.9, nesterov=False), env.rank)
    assert_same(dict(full_params(model)), dict(twin), 1e-9, 1e-9)


def test_whole_matrix_makes_an_optimizer_of_a_function(pool4: Pool) -> None:
    options = {"nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    torch_muon = "torch.optim._muon"

    def polar(grad: Tensor, *settings: Any) -> Tensor:
        return Polar.transform(None, grad.unsqueeze(0), {"least": 1e-9})[0]

    with (
        mock.patch(f"{torch_muon}._zeropower_via_newtonschulz", polar),
        mock.patch(f"{torch_muon}._adjust_lr", lambda lr, rule, shape: lr),
    ):
        twin = expected(4, **options)
    pool4.run(_polar, twin)
    assert issubclass(Polar, hsdp.optim.WholeMatrix) and Polar.__name__ == "Polar"
    with pytest.raises(TypeError, match="no setting 'leest'"):
        Polar([nn.Parameter(torch.zeros(2, 2))], leest=1.0)
    with pytest.raises(TypeError, match="give the setting 'a' a default"):
        whole_matrix(lambda matrices, *, a: matrices)


def test_a_step_that_fails_holds_no_whole_matrices() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def fails(matrices: Tensor) -> Tensor:
        seen.append(weakref.ref(matrices))
        raise MemoryError

    weight = nn.Parameter(torch.eye(3))
    weight.grad = torch.ones(3, 3)
    optimizer = whole_matrix(fails)([weight])
    with pytest.raises(MemoryError):
        optimizer.step()
    gc.collect()
    assert seen[0]() is None


def test_a_closure_a_scheduler_and_copies() -> None:
    weight = nn.Parameter(torch.eye(3))
    optimizer = Muon([weight], ns_dtype=None)
    assert isinstance(optimizer, torch.optim.Muon)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    other = copy.deepcopy(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(weight, torch.ones(3, 3))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    copied = other.param_groups[0]["params"][0]
    copied.grad = weight.grad
    other.step()
    torch.testing.assert_close(copied, weight, rtol=0, atol=0)


def test_settings_of_groups_may_change_between_steps() -> None:
    """How a matrix is cut is a setting as the learning rate is."""
    torch.manual_seed(0)
    value, grads = torch.randn(6, 4), torch.randn(2, 6, 4)
    found = []
    for changes in (True, False):
        param = nn.Parameter(value.clone())
        optimizer = Muon([{"params": [param]}], lr=0.1)
        for k, grad in enumerate(grads):
            param.grad = grad.clone()
            if k and changes:
                optimizer.param_groups[0]["split_sizes"] = (2, 4)
            elif k:  # another optimizer, made with it
                state = optimizer.state_dict()
                optimizer = Muon([{"params": [param], "split_sizes": (2, 4)}], lr=0.1)
                optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
            optimizer.step()
        found.append(param.detach())
    assert torch.equal(*found)
    plain = nn.Parameter(value.clone())
    stepped = Muon([plain], lr=0.1)
    for grad in grads:
        plain.grad = grad.clone()
        stepped.step()
    assert not torch.equal(plain, found[0])


CHANGES: dict[str, Callable[[Any], None]] = {
    "its data": lambda p: setattr(p, "data", 2 * p.data),
    "from a vector": lambda p: nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector([p]), [p]),
    "in columns": lambda p: setattr(p, "data", p.data.t().contiguous().t()),
    "another dtype": lambda p: setattr(p, "data", p.data.double()),
    "the local tensor": lambda p: setattr(p, "_local_tensor", 2 * p._local_tensor.detach()),
    "its memory": lambda p: setattr(p._local_tensor, "data", 2 * p._local_tensor.detach()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_is_stepped_in_the_memory_that_it_has_now(change: str) -> None:
    """Moving averages swap weights in and out again: the parameter stays the same object."""
    distributed = change in ("the local tensor", "its memory")
    torch.manual_seed(0)
    value, grads = torch.randn(6, 6), torch.randn(6, 6, 6)
    with in_full_precision(), fake_world(1) as env:
        mesh = env.mesh((1,))
        plain, mine = nn.Parameter(value.clone()), nn.Parameter(value.clone())
        ours: Any = nn.Parameter(distribute_tensor(mine, mesh, [Shard(0)])) if distributed else mine
        stock, optimizer = torch.optim.Muon([plain], lr=0.1), Muon([ours], lr=0.1, ns_dtype=None)
        for k, grad in enumerate(grads):
            if k in (2, 3):
                for param in (plain, ours):
                    named = CHANGES["its data" if distributed and param is plain else change]
                    named(param)
                if change == "another dtype":  # momenta of the old one are refused by torch, too
                    stock.state.clear()
                    optimizer.state.clear()
            plain.grad, own = grad.to(plain.dtype), grad.to(ours.dtype)
            ours.grad = distribute_tensor(own, mesh, [Shard(0)]) if distributed else own
            stock.step()
            optimizer.step()
            torch.testing.assert_close(ours.full_tensor() if distributed else ours, plain, rtol=1e-5, atol=1e-5)


def test_an_ignored_parameter_is_stepped_in_its_memory_and_no_plan_keeps_the_old_one() -> None:
    with fake_world(1) as env:
        model: Any = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        weight = model[1].weight
        hsdp.fully_shard(model, mesh=env.mesh((1,)), ignored_params=[weight])
        optimizer = Muon(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            old = weakref.ref(weight.data.untyped_storage())
            weight.data = before = weight.data.clone()
            before = before.clone()
            gc.collect()
            assert old() is None
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            assert not torch.equal(weight, before)


@pytest.mark.parametrize("sizes", [3, [3, 3]])
def test_split_sizes_may_be_one_number_for_all_or_a_list(sizes: int | list[int]) -> None:
    """Heads of equal size: an integer is that of each."""
    torch.manual_seed(0)
    value, grad = torch.randn(6, 4), torch.randn(6, 4)
    found = []
    for split in (sizes, (3, 3)):
        param = nn.Parameter(value.clone())
        param.grad = grad.clone()
        Muon([{"params": [param], "split_sizes": split}], lr=0.1).step()
        found.append(param.detach())
    assert torch.equal(*found)


def test_mistakes_are_refused_with_the_remedy() -> None:
    matrix, vector, stack = (nn.Parameter(torch.zeros(shape)) for shape in ((4, 4), (4,), (2, 4, 4)))
    for params, match in [
        ([vector], "shape \\(4,\\), which is no matrix.*algorithm='adamw'"),
        ([stack], "matrices='stacked'"),
        ([{"params": [matrix], "matrices": "rows"}], "expected one of 'one'"),
        ([{"params": [matrix], "split_sizes": (1, 2)}], "does not add up to the 4 rows"),
        ([{"params": [matrix], "split_sizes": 3}], "does not add up to the 4 rows"),
        ([{"params": [matrix], "algorithm": "sgd"}], "algorithm='sgd'"),
    ]:
        with pytest.raises(ValueError, match=match):
            Muon(params)
    for options, match in [
        ({"lr": -1.0}, "lr=-1"),
        ({"momentum": -1.0}, "momentum"),
        ({"adjust_lr_fn": "no"}, "'no'"),
        ({"ns_steps": 100}, "fewer than 100"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ]:
        with pytest.raises(ValueError, match=match):
            Muon([matrix], **options)
    with fake_world(2) as env:
        model = hsdp.fully_shard(nn.Linear(4, 4), mesh=env.mesh((2,)))
        with pytest.raises(ValueError, match="'bias' of unit"):
            Muon(model.parameters())
