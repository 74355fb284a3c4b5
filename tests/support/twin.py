"""The naive twin: data-parallel training on one device, in float64, as the oracle of equality tests.

It computes each rank's gradient by itself, one after the other, and adds them in rank order. No collectives,
no sharding, nothing clever: what it says is right. `train` is the same loop for one rank of a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.models import Batch, Case, Loss, mse

MakeBatch = Callable[[int, int, int], Batch]  # (step, rank, micro) -> batch
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

sgd: MakeOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw: MakeOptimizer = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Twin:
    """What the right training gives; picklable, so compute it in pytest's process and send it to the ranks.

    losses: [steps, world, accumulate]. params: after the last step, by name. grads: those of the last step.
    """

    losses: Tensor
    params: dict[str, Tensor]
    grads: dict[str, Tensor | None]


def train_twin(
    make_model: Callable[[], nn.Module],
    make_batch: MakeBatch,
    world: int,
    steps: int,
    make_optimizer: MakeOptimizer,
    accumulate: int = 1,
    *,
    loss: Loss = mse,
    reduce: Literal["mean", "sum"] = "mean",
    dtype: torch.dtype | None = torch.float64,
) -> Twin:
    """Train as `world` data-parallel ranks would, their gradients averaged or summed.

    Each rank's gradient is the sum over its `accumulate` micro-batches, as `backward` leaves it. `dtype` is
    that of all parameters and float inputs; None keeps them as they are made.
    """
    model = make_model()
    if dtype is not None:
        model = model.to(dtype)
    optimizer = make_optimizer(model.parameters())
    losses = torch.zeros(steps, world, accumulate, dtype=torch.float64)
    for step in range(steps):
        totals: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
        for rank in range(world):
            optimizer.zero_grad()
            for micro in range(accumulate):
                value = loss(model, _cast(make_batch(step, rank, micro), dtype))
                value.backward()
                losses[step, rank, micro] = value.detach()
            for name, param in model.named_parameters():
                totals[name] = _add(totals[name], param.grad)
        for name, param in model.named_parameters():
            total = totals[name]
            param.grad = total / world if total is not None and reduce == "mean" else total
        optimizer.step()
    return Twin(losses, full_params(model), full_grads(model))


def twin_of(
    case: Case,
    world: int,
    steps: int,
    make_optimizer: MakeOptimizer = sgd,
    accumulate: int = 1,
    reduce: Literal["mean", "sum"] = "mean",
) -> Twin:
    """`train_twin` of a case of `tests.support.models`, in float64 (or the case's own mixed dtypes)."""
    dtype = None if case.dtype is None else torch.float64
    return train_twin(
        case.model,
        case.batch,
        world,
        steps,
        make_optimizer,
        accumulate,
        loss=case.loss,
        reduce=reduce,
        dtype=dtype,
    )


def train(
    model: nn.Module,
    case: Case,
    rank: int,
    steps: int,
    optimizer: torch.optim.Optimizer,
    accumulate: int = 1,
    *,
    first_step: int = 0,
    before_micro: Callable[[nn.Module, bool], Any] | None = None,
    device: str = "cpu",
) -> Tensor:
    """Train `model` on this rank's batches, moved to `device`; returns the losses, float64 [steps, accumulate].

    `before_micro(model, is_last)` is called before each micro-batch's forward, for instance to set gradient
    sync. Gradients of the last step are left in place.
    """
    values = []  # read at the end: a device runs behind the host meanwhile
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            if before_micro is not None:
                before_micro(model, micro == accumulate - 1)
            value = case.loss(model, tuple(x.to(device) for x in case.batch(first_step + step, rank, micro)))
            value.backward()
            values.append(value.detach())
        optimizer.step()
    return torch.stack(values).double().cpu().view(steps, accumulate)


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU; of a DTensor it is gathered, so every rank of its mesh must call."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


def full_params(model: nn.Module) -> dict[str, Tensor]:
    """Every whole parameter by name."""
    return whole(dict(model.named_parameters()))


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Every whole gradient by its parameter's name; None where there is none."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    held = whole({name: grad for name, grad in grads.items() if grad is not None})
    return {name: held.get(name) for name in grads}


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `full`, of many: those that the same axis of a mesh shards travel together, which takes a tenth of the time."""
    together: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if (axis := _sharded_by(tensor)) is not None:
            together.setdefault((tensor.device_mesh, axis, tensor.dtype), []).append(name)  # type: ignore[attr-defined]
    gathered: dict[str, Tensor] = {}
    for (mesh, axis, _), names in together.items():
        gathered.update(zip(names, _gather([tensors[name] for name in names], mesh, axis), strict=True))
    return {name: gathered[name] if name in gathered else full(tensor) for name, tensor in tensors.items()}


def _sharded_by(tensor: Tensor) -> int | None:
    """The only axis of its mesh over which a DTensor on the CPU is cut, each rank's part being a plain tensor."""
    if not isinstance(tensor, DTensor) or not tensor.numel() or tensor.device_mesh.get_coordinate() is None:
        return None
    local, placements = tensor._local_tensor.detach(), tensor.placements  # detached: what is on its way has arrived
    if local.device.type != "cpu" or type(local) is not Tensor:
        return None
    axes = [axis for axis, placement in enumerate(placements) if type(placement) is not Replicate]
    return axes[0] if len(axes) == 1 and type(placements[axes[0]]) is Shard else None


def _gather(tensors: list[Any], mesh: DeviceMesh, axis: int) -> list[Tensor]:
    """The whole of each tensor, of one dtype; each rank holds rows as `torch.chunk` cuts them, perhaps none."""
    ranks, at = mesh.size(axis), mesh.get_local_rank(axis)
    shapes: list[list[torch.Size]] = []  # [tensor][rank]
    for tensor in tensors:
        dim, size = tensor.placements[axis].dim, list(tensor.shape)
        rows, each = size[dim], -(-size[dim] // ranks)
        held = [max(0, min(each, rows - rank * each)) for rank in range(ranks)]
        shapes.append([torch.Size((*size[:dim], part, *size[dim + 1 :])) for part in held])
        assert tensor._local_tensor.shape == shapes[-1][at], f"{tensor._local_tensor.shape}, but {tensor._spec}"
    mine = torch.cat([tensor._local_tensor.detach().reshape(-1) for tensor in tensors])
    sent = mine.new_zeros(sum(of_ranks[0].numel() for of_ranks in shapes))  # the first rank holds most
    sent[: mine.numel()] = mine
    everyone = sent.new_empty(ranks, sent.numel())
    dist.all_gather([row.view(torch.uint8) for row in everyone], sent.view(torch.uint8), group=mesh.get_group(axis))
    parts = [everyone[rank].split_with_sizes(_sizes(shapes, rank, sent.numel()))[:-1] for rank in range(ranks)]
    return [
        torch.cat([part[k].view(of_ranks[rank]) for rank, part in enumerate(parts)], tensor.placements[axis].dim)
        for k, (tensor, of_ranks) in enumerate(zip(tensors, shapes, strict=True))
    ]


def _sizes(shapes: list[list[torch.Size]], rank: int, total: int) -> list[int]:
    """How many elements each tensor has on a rank, and the padding behind them."""
    sizes = [of_ranks[rank].numel() for of_ranks in shapes]
    return [*sizes, total - sum(sizes)]


def assert_same(
    actual: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    rtol: float = 1e-11,
    atol: float = 1e-11,
) -> None:
    """The same names and, compared in float64, values; tells all that differ, not only the first."""
    assert actual.keys() == expected.keys(), f"names differ: {sorted(actual.keys() ^ expected.keys())}"
    whys = {name: _difference(actual[name], expected[name], rtol, atol) for name in actual}
    wrong = [f"{name}: {why}" for name, why in whys.items() if why]
    assert not wrong, f"{len(wrong)} of {len(actual)} differ\n" + "\n".join(wrong)


def assert_close_to_twin(
    model: nn.Module, twin: Twin, rtol: float = 1e-11, atol: float = 1e-11, *, grads: bool = False
) -> None:
    """The whole parameters (and gradients of the last step) equal the twin's; every rank must call."""
    params, last_grads = full_params(model), full_grads(model) if grads else None
    assert_same(dict(params), dict(twin.params), rtol, atol)
    if last_grads is not None:
        assert_same(last_grads, twin.grads, rtol, atol)


def _add(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return more.clone() if more is not None else total
    return total + more


def _cast(batch: Batch, dtype: torch.dtype | None) -> Batch:
    return tuple(x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in batch)


def _difference(actual: Tensor | None, expected: Tensor | None, rtol: float, atol: float) -> str:
    """What is wrong, or an empty string."""
    if actual is None or expected is None:
        return "" if actual is expected else f"{'None' if actual is None else 'a tensor'}, and should not be"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    if torch.allclose(actual, expected, rtol=rtol, atol=atol):
        return ""
    error = (actual - expected).abs()
    largest = expected.abs().max()
    return f"off by up to {error.max():.3g}, {error.mean():.3g} in the mean (values up to {largest:.3g})"
