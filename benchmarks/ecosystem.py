"""Models of transformers, diffusers, timm and torchvision, trained by hsdp, by FSDP2 and on one device: are numbers equal?

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.ecosystem [NAME ...]
    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.ecosystem [NAME ...]

Needs the extra `ecosystem`. Weights are random and configurations tiny; nothing is downloaded. Every model is trained for
three steps of AdamW on two ranks, or on 2 x 2: in fp32, and under a bf16 policy with gradient checkpointing. Losses,
gradients and parameters of all steps are compared. The twin is the plain model on one device, which no library has touched:

    twin             working parameters in the compute dtype, masters in fp32, each unit's inputs cast as the policy says;
                     gradients of the ranks' batches are added in fp32, in pairs, as the mesh adds them
    grouped twin     the same with one node of autograd for the inputs of each unit's forward, as FSDP2 has it: what the
                     forward's uses of an input add up to is one sum, before it meets the sums of other units
    fp64             the twin in float64: how far is either from what is meant
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._pytree import tree_flatten, tree_unflatten

import hsdp
from benchmarks.ecosystem_models import MODELS, Batch

STEPS = 3
MESHES: dict[int, Callable[[], DeviceMesh]] = {
    2: lambda: init_device_mesh("cpu", (2,)),
    4: lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
}
POLICIES = {
    torch.float32: MixedPrecisionPolicy(),
    torch.bfloat16: MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
LINE = "{:<26} {:>10}  " + "{:>9}  " * 6 + "{}"
MakeBatch = Callable[[torch.Generator], Batch]
Told = list[Tensor] | str
Result = TypeVar("Result")


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What lies in the outermost lists of modules, if it can be called and has parameters."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield from (block for block in child if _can_shard(block))
        else:
            yield from _blocks(child)


def _can_shard(block: nn.Module) -> bool:
    return type(block).forward is not nn.Module.forward and any(True for _ in block.parameters())


def _recomputes(model: Any) -> None:
    """Switches the model's own gradient checkpointing on; those without do without."""
    if hasattr(model, "gradient_checkpointing_enable") and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing") and model._supports_gradient_checkpointing:
        model.enable_gradient_checkpointing()
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()


def _prepared(plain: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Module]]:
    """A copy of the model to train, and its units in the order in which they are sharded."""
    model = copy.deepcopy(plain).train()
    if dtype is torch.bfloat16:
        _recomputes(model)
    return model, [*_blocks(model), model]


def _loss(model: nn.Module, batch_of: MakeBatch, seed: int) -> Tensor:
    batch = batch_of(torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)  # masks of dropout
    out: Any = model(batch[""]) if "" in batch else model(**batch)
    if getattr(out, "loss", None) is not None:
        loss: Tensor = out.loss
        return loss
    out = out if isinstance(out, Tensor) else out[0] if not hasattr(out, "sample") else out.sample
    # At least fp32: a mean of squares in bf16 would tell little.
    found: Tensor = out.to(torch.promote_types(out.dtype, torch.float32)).square().mean()
    return found


def _copy(grad: Tensor | None) -> Tensor:
    return torch.zeros(()) if grad is None else grad.detach().clone()


# -- sharded ----------------------------------------------------------------------------------------------------------


def _train(library: Any, plain: nn.Module, batch_of: MakeBatch, mesh: DeviceMesh, dtype: torch.dtype) -> list[Tensor]:
    """Losses of all ranks, whole gradients and parameters of all steps."""
    model, units = _prepared(plain, dtype)
    for unit in units:
        library(unit, mesh=mesh, mp_policy=POLICIES[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results = []
    for step in range(STEPS):
        loss = _loss(model, batch_of, 100 * step + dist.get_rank())
        loss.backward()
        results.append(_of_all(loss.detach().float()))
        results += [_copy(None if p.grad is None else _whole(p.grad)) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return results + [_whole(param).detach().clone() for param in model.parameters()]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _of_all(loss: Tensor) -> Tensor:
    gathered = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, loss)
    return torch.stack(gathered)


# -- twins ------------------------------------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    """Hands its inputs on, as FSDP2's RegisterPostBackwardFunction does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _train_twin(
    plain: nn.Module, batch_of: MakeBatch, ranks: int, dtype: torch.dtype, grouped: bool = False
) -> list[Tensor]:
    """As `_train`, by one process without a library: what plain autograd gives in this compute dtype."""
    model, units = _prepared(plain, dtype)
    if dtype is torch.float64:
        model.double()  # buffers too; a policy leaves them as they are

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        flat = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat]
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        if grouped and places and torch.is_grad_enabled():
            passed: Any = _Node.apply(*[flat[i] for i in places])  # type: ignore[no-untyped-call]
            for i, x in zip(places, passed, strict=True):
                flat[i] = x
        return tree_unflatten(flat, spec)

    for unit in units:
        unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    working = list(model.parameters())
    masters = [nn.Parameter(param.detach().clone(), param.requires_grad) for param in working]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    results = []
    for step in range(STEPS):
        for param, master in zip(working, masters, strict=True):
            param.data = master.detach().to(dtype, copy=True)
        losses, grads = [], []
        for rank in range(ranks):
            loss = _loss(model, batch_of, 100 * step + rank)
            loss.backward()
            losses.append(loss.detach().float())
            grads.append([None if p.grad is None else p.grad.to(m.dtype) for p, m in zip(working, masters, strict=True)])
            model.zero_grad()
        for master, *parts in zip(masters, *grads, strict=True):
            master.grad = _mean(parts)
        results += [torch.stack(losses), *[_copy(master.grad) for master in masters]]
        optimizer.step()
    return results + [master.detach().clone() for master in masters]


def _mean(parts: list[Tensor | None]) -> Tensor | None:
    """In pairs: shard ranks are neighbours, and replicas add what those have summed."""
    whole = next((part for part in parts if part is not None), None)
    if whole is None:
        return None
    sums = [torch.zeros_like(whole) if part is None else part for part in parts]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0] / len(parts)


# -- the table --------------------------------------------------------------------------------------------------------


def _run(call: Callable[[], Result]) -> Result | str:
    """What `call` returns, or how it failed: on all ranks alike, as all do the same."""
    try:
        return call()
    except Exception as error:
        text = str(error).strip()
        return f"{type(error).__name__}: {text.splitlines()[0][:90] if text else ''}"


def _compare(ours: Told, theirs: Told) -> str:
    if isinstance(ours, str) or isinstance(theirs, str):
        return "both fail" if isinstance(ours, str) and isinstance(theirs, str) else "one fails"
    same, apart, size = True, 0.0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape and (a.ndim == 0 or b.ndim == 0):  # no gradient beside zeros
            a, b = torch.broadcast_tensors(a, b)
        same = same and torch.equal(a, b)
        apart += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return "equal" if same else f"{(apart / size) ** 0.5:.1e}"


def _rows(name: str, mesh: DeviceMesh) -> list[str]:
    """The lines about one model; the twins are computed by rank 0 alone, which prints."""
    build, batch_of = MODELS[name]
    torch.manual_seed(0)
    plain = _run(build)
    if isinstance(plain, str):
        return [f"{name}: {plain}"] if dist.get_rank() == 0 else []
    ranks, prints = dist.get_world_size(), dist.get_rank() == 0
    compared, failures, witnesses = [], [], []
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        theirs = _run(lambda: _train(torch_fully_shard, plain, batch_of, mesh, dtype))
        ours = _run(lambda: _train(hsdp.fully_shard, plain, batch_of, mesh, dtype))
        if not prints:
            continue
        twin = _run(lambda: _train_twin(plain, batch_of, ranks, dtype))
        content = {"FSDP2": theirs, "hsdp": ours, "twin": twin}
        failures += [f"{who}, {label}: {what}" for who, what in content.items() if isinstance(what, str)]
        compared += [_compare(theirs, twin), _compare(ours, twin), _compare(ours, theirs)]
        if compared[-1][0].isdigit():
            grouped = _run(lambda: _train_twin(plain, batch_of, ranks, dtype, grouped=True))
            meant = _run(lambda: _train_twin(plain, batch_of, ranks, torch.float64))
            witnesses.append(
                f"    {label}: FSDP2 to the grouped twin: {_compare(theirs, grouped)}; "
                f"to fp64: FSDP2 {_compare(theirs, meant)}, hsdp {_compare(ours, meant)}"
            )
    count = f"{sum(param.numel() for param in plain.parameters()):,}"
    return [LINE.format(name, count, *compared, "; ".join(failures)).rstrip(), *witnesses] if prints else []


def main(names: list[str]) -> None:
    """Prints a row for each model, all of them unless some are named; two more where hsdp and FSDP2 differ."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    assert dist.get_world_size() in MESHES, "two ranks, whose mean is the same in any order, or 2 x 2"
    mesh = MESHES[dist.get_world_size()]()
    if dist.get_rank() == 0:
        libraries = [f"torch {torch.__version__}"]
        print(f"mesh {' x '.join(map(str, mesh.shape))}")
        for library in ("transformers", "diffusers", "timm", "torchvision"):
            if importlib.util.find_spec(library):
                libraries.append(f"{library} {importlib.import_module(library).__version__}")
        print(", ".join(libraries))
        print("Relative difference of all losses, gradients and parameters of 3 steps taken together; equal: bit by bit")
        print(LINE.format("", "", *["fp32"] * 3, *["bf16"] * 3, "").rstrip())
        print(LINE.format("", "", *["FSDP2", "hsdp", "hsdp"] * 2, "").rstrip())
        print(LINE.format("model", "parameters", *["to twin", "to twin", "to FSDP2"] * 2, "failed"), flush=True)
    for name in names or MODELS:
        library = name.split()[0] if " " in name else "transformers"
        if importlib.util.find_spec(library) is None:
            continue
        for line in _rows(name, mesh):
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
