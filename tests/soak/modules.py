"""A sweep of torch's own modules, each sharded and trained beside its plain twin.

    python -m tests.soak.modules --log modules.log          (benchmarks/results/modules.txt)
    python -m tests.soak.modules --ranks 4 --mesh 2 2 --units leaves

Torch lists its modules with arguments and inputs of many kinds. Each is a unit below a root with a weight of its own, and
takes three steps, in training and in evaluation mode, on inputs that differ by rank. Outputs, losses, gradients of inputs
and of weights, buffers and the trained weights are those of the twin, or that is a failure.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import hsdp
from tests.soak.operators import stub_expecttest
from tests.support.facts import header
from tests.support.rig import Pool, RankEnv

STEPS, RATE, TOLERANCE = 3, 0.01, 1e-9
BATCH = 8
"""Modules per run of the workers, which start anew where one of them took the ranks apart."""


@dataclass
class Tally:
    """On this rank: how many cases were equal, do not run without hsdp, or differ no more than the twin does from itself
    with weights that were rounded otherwise (gradients of millions, say); and which others differ or raise."""

    equal: int = 0
    not_run: int = 0
    unstable: int = 0
    wrong: list[str] = field(default_factory=list)


class Below(nn.Module):
    """A root with one weight, which scales what `inner` takes: gradients go on behind the module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.1, 0.9, 1.0], dtype=torch.float64))
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        scaled = tree_map(lambda x: x * self.scale.mean() if _is_real(x) else x, (args, kwargs))
        return self.inner(*scaled[0], **scaled[1])


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


@functools.cache
def _modules() -> list[Any]:
    stub_expecttest()
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def count(env: RankEnv) -> int:
    """On a worker: how many modules there are."""
    return len(_modules())


@dataclass(frozen=True)
class Steps:
    """What steps of training gave: of each its outputs and the gradients of inputs; at the end weights and buffers."""

    outputs: list[Any]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    grads: dict[str, Tensor | None]


def sweep(env: RankEnv, shape: tuple[int, ...], units: str, reshard: bool | None, first: int, most: int) -> Tally:
    """On a worker: compares modules from number `first` on, with up to `most` of each one's kinds of arguments."""
    warnings.simplefilter("ignore")
    tally = Tally()
    for info in _modules()[first : first + BATCH]:
        for training in (True, False):
            torch.manual_seed(0)
            try:
                inputs = info.module_inputs_func(info, "cpu", torch.float64, True, training)
            except Exception:
                continue
            for at, one in enumerate(inputs[:most]):
                name = f"{info.name} {at} {one.desc} {'training' if training else 'evaluation'}"
                _compare(env, tally, name, functools.partial(_make, info, one, training), one, shape, units, reshard)
    return tally


def _make(info: Any, one: Any, training: bool) -> nn.Module:
    torch.manual_seed(1)
    model = Below(info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).double())
    if any(nn.parameter.is_lazy(param) for param in model.parameters()):
        model(*one.forward_input.args, **one.forward_input.kwargs)
    return model.train(training)


def _inputs(one: Any, rank: int) -> tuple[Any, Any]:
    def of_rank(value: Any) -> Any:
        if _is_real(value):
            return (value.detach() * (1 + 0.01 * rank)).requires_grad_()
        return value

    args, kwargs = copy.copy(one.forward_input.args), copy.copy(one.forward_input.kwargs)
    return tree_map(of_rank, (args, kwargs))


def _loss(outputs: Any) -> Tensor | None:
    found = [x.square().sum() for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum((x for x in found if x.requires_grad), torch.zeros((), dtype=torch.float64)) if found else None


def _pass(model: nn.Module, one: Any, step: int, rank: int) -> Any:
    """A forward and a backward; returns the outputs and the gradients of inputs."""
    args, kwargs = _inputs(one, rank)
    torch.manual_seed(100 * step + rank)
    outputs = model(*args, **kwargs)
    if (loss := _loss(outputs)) is not None and loss.requires_grad:
        loss.backward()
    leaves = [x for x in tree_leaves((args, kwargs)) if _is_real(x)]
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (outputs, [x.grad for x in leaves]))


def _train_twin(make: Callable[[], nn.Module], one: Any, rank: int, world: int, factor: float = 1.0) -> Steps:
    """As this rank sees it; each rank has a copy, with buffers of its own, and equal weights: a model's times `factor`."""
    models = [make() for _ in range(world)]
    with torch.no_grad():
        for param in models[0].parameters():
            param.mul_(factor)
    for replica in models[1:]:
        replica.load_state_dict(models[0].state_dict())
    results, grads = [], {}
    for step in range(STEPS):
        found = [_pass(model, one, step, at) for at, model in enumerate(models)]
        results.append(found[rank])
        named = [dict(model.named_parameters()) for model in models]
        with torch.no_grad():
            grads = {
                name: None
                if all(of[name].grad is None for of in named)
                else sum(torch.zeros_like(of[name]) if (g := of[name].grad) is None else g for of in named) / world
                for name in named[0]
            }
            for of in named:
                for name, grad in grads.items():
                    of[name].grad = None
                    if grad is not None:
                        of[name].sub_(grad, alpha=RATE)
    mine = models[rank]
    weights = {name: param.detach() for name, param in mine.named_parameters()}
    return Steps(results, weights, dict(mine.named_buffers()), grads)


def _train(model: nn.Module, one: Any, rank: int) -> Steps:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    results, grads = [], {}
    for step in range(STEPS):
        results.append(_pass(model, one, step, rank))
        grads = {name: _whole(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: _whole(param) for name, param in model.named_parameters()}
    return Steps(results, weights, dict(model.named_buffers()), grads)


def _leaves_called(model: nn.Module, one: Any) -> list[str]:
    """The modules without children that a forward calls: some weights are read by code of the module above."""
    found: list[str] = []
    for name, module in model.named_modules():
        if name and not list(module.children()):
            module.register_forward_pre_hook(lambda *_, name=name: found.append(name))
    _pass(model, one, 0, 0)
    return list(dict.fromkeys(found))


def _whole(value: Any) -> Any:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


def _compare(
    env: RankEnv,
    tally: Tally,
    name: str,
    make: Callable[[], nn.Module],
    one: Any,
    shape: tuple[int, ...],
    units: str,
    reshard: bool | None,
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        expected = _train_twin(make, one, rank, world)
    except Exception:
        tally.not_run += 1
        return
    try:
        model, mesh = make(), env.mesh(shape)
        policy = {} if reshard is None else {"reshard_after_forward": reshard}
        for path in ["inner"] if units == "module" else _leaves_called(make(), one):
            if next((module := model.get_submodule(path)).parameters(), None) is not None:
                hsdp.fully_shard(module, mesh=mesh, **policy)
        hsdp.fully_shard(model, mesh=mesh, **policy)
        found = _train(model, one, rank)
    except Exception as error:
        tally.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        return
    for part in ("outputs", "buffers", "grads", "weights"):
        if differs := _differs(getattr(found, part), getattr(expected, part)):
            rounded = _train_twin(make, one, rank, world, factor=1 + 1e-15)
            if _differs(getattr(rounded, part), getattr(expected, part)):
                tally.unstable += 1
            else:
                tally.wrong.append(f"{name}: {part} {differs}")
            return
    tally.equal += 1


def _differs(found: Any, expected: Any) -> str:
    mine, theirs = tree_leaves(found), tree_leaves(expected)
    if len(mine) != len(theirs):
        return f"{len(mine)} values for {len(theirs)}"
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(other, Tensor) and isinstance(one, Tensor):
            if one.shape != other.shape:
                return f"{tuple(one.shape)} for {tuple(other.shape)}"
            least = TOLERANCE * max(1.0, other.double().abs().nan_to_num().max().item()) if other.numel() else 0.0
            if not torch.allclose(one.double(), other.double(), 0.0, least, equal_nan=True):
                return f"off by {(one.double() - other.double()).abs().max().item():.3g}"
        elif isinstance(lone := one if isinstance(one, Tensor) else other, Tensor) and lone.count_nonzero():
            return f"{one} for {other}"  # a gradient of zeros may be None, as on ranks whose losses do not use a weight
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Sweeps, and tells what differs; returns how many cases do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--mesh", type=int, nargs="+", default=[2])
    parser.add_argument("--units", choices=("module", "leaves"), default="module")
    parser.add_argument("--reshard", choices=("yes", "no"), help="after the forward; default: as fully_shard's")
    parser.add_argument("--cases", type=int, default=40, help="of each module, at most")
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    reshard = None if args.reshard is None else args.reshard == "yes"
    total = Tally()
    with Pool(args.ranks) as pool:
        for first in range(0, pool.run(count, timeout=300)[0], BATCH):
            try:
                found = pool.run(sweep, tuple(args.mesh), args.units, reshard, first, args.cases, timeout=900)
            except Exception as error:
                total.wrong.append(f"modules from number {first} on: {str(error)[:600]}")
                continue
            total.equal, total.not_run = total.equal + found[0].equal, total.not_run + found[0].not_run
            total.unstable += found[0].unstable
            total.wrong += list(dict.fromkeys(line for tally in found for line in tally.wrong))
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log)
    others = f"{total.not_run} not run, {total.unstable} unstable, {len(total.wrong)} wrong"
    print(f"{total.equal} equal, {others}", file=args.log)
    for line in total.wrong:
        print(f"    {line}", file=args.log)
    return len(total.wrong)


if __name__ == "__main__":
    from tests.soak import modules  # under its own name, by which the workers find what is sent to them

    sys.exit(min(modules.main(), 100))
