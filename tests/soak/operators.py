"""A sweep of torch's operators over sharded tensors, against plain ones: what users compute with weights and gradients.

    python -m tests.soak.operators --log operators.log          (benchmarks/results/operators.txt)
    python -m tests.soak.operators --ranks 4 --mesh 2 2 --dim 1 --samples 4

Each operator of torch's own list of them, with its samples, whose sizes go unevenly over ranks: its result, its gradients
and what it does in place. It may raise, as DTensor refuses many; another value is a failure. `KNOWN` has those that are
DTensor's, and that no program of weights is known to need.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import hsdp
from tests.support.facts import header
from tests.support.rig import Pool, RankEnv

BATCH = 40
"""Operators per run of the workers, which start anew where one of them took the ranks apart."""
RANDOM = ("rand", "normal", "bernoulli", "dropout", "empty", "multinomial", "cauchy", "exponential", "geometric", "uniform")
DRAWING = ("poisson", "rrelu", "scaled_dot_product", "multi_head", "svd_lowrank", "pca_lowrank")
KNOWN = {
    "nn.functional.conv": "convolutions of sharded inputs or weights",
    "nn.functional.conv_transpose": "the same",
    "amin": "NaN gradients (limits)",
    "amax": "NaN gradients (limits)",
    "cov": "gradients of two numbers",
    "trapezoid": "shapes of slices",
    "trapz": "shapes of slices",
    "nn.functional.adaptive_avg_pool": "gradients of images whose channels are sharded",
    "nn.functional.cosine_embedding_loss": "of embeddings whose features are sharded",
    "nn.functional.embedding": "gradients scaled by counts of a rank's own indices",
}


@dataclass
class Tally:
    """Of comparisons on this rank: how many were equal, how many operators DTensor refused, and what differs."""

    equal: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def stub_expecttest() -> None:
    """Stands in for a package that torch's lists of operators and modules want, of which they use one class of tests."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub


@functools.cache
def _operators() -> list[Any]:
    """Torch's list of its operators with samples, by name."""
    stub_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    drawn = (*RANDOM, *DRAWING)
    chosen = [op for op in op_db if torch.float64 in op.supported_dtypes("cpu") and not any(k in op.name for k in drawn)]
    return sorted(chosen, key=_name_of)


def _name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def count(env: RankEnv) -> int:
    """On a worker: how many operators there are."""
    return len(_operators())


def sweep(env: RankEnv, shape: tuple[int, ...], dim: int, first: int, most: int) -> Tally:
    """On a worker: compares operators from number `first` on, with up to `most` samples of each, sharded along `dim`."""
    warnings.simplefilter("ignore")
    mesh = env.mesh(shape)
    hsdp.fully_shard(nn.Linear(4, 4), mesh=mesh)  # from here on hsdp does some operators its own way on this mesh
    tally = Tally()
    for op in _operators()[first : first + BATCH]:
        torch.manual_seed(0)
        try:
            samples = list(op.sample_inputs("cpu", torch.float64))[:most]
        except Exception:
            continue
        for at, sample in enumerate(samples):
            for which in ("the first", "all"):
                for kind, run in _ways(op, sample):
                    _compare(tally, f"{_name_of(op)}: {kind}, sample {at}, {which} sharded", run, mesh, dim, which == "all")
    return tally


def _ways(op: Any, sample: Any) -> Iterator[tuple[str, Callable[[Callable[[Tensor, bool], Tensor]], Any]]]:
    """What to run, given how to make an argument of each of the sample's tensors (and whether it is the first)."""

    def made(make: Callable[[Tensor, bool], Tensor]) -> tuple[Any, Any, Any]:
        others = tree_map(lambda one: make(one, False) if isinstance(one, Tensor) else one, (sample.args, sample.kwargs))
        return tree_map(lambda one: make(one, True) if isinstance(one, Tensor) else one, sample.input), *others

    def result(make: Callable[[Tensor, bool], Tensor]) -> Any:
        first, args, kwargs = made(make)
        return op(first, *args, **kwargs)

    def gradients(make: Callable[[Tensor, bool], Tensor]) -> Any:
        first, args, kwargs = made(make)
        leaves = [one for one in tree_leaves((first, args, kwargs)) if isinstance(one, Tensor) and one.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_()
        found = [one for one in tree_leaves(op(first, *args, **kwargs)) if isinstance(one, Tensor) and one.requires_grad]
        total = sum((_whole(one.square().sum()) for one in found if one.is_floating_point()), torch.zeros(()).double())
        return torch.autograd.grad(total, leaves, allow_unused=True)

    def in_place(make: Callable[[Tensor, bool], Tensor]) -> Any:
        first, args, kwargs = made(make)
        return first, op.inplace_variant(first, *args, **kwargs)

    yield "result", result
    yield "gradients", gradients
    if op.inplace_variant is not None and isinstance(sample.input, Tensor):
        yield "in place", in_place


def _compare(tally: Tally, what: str, run: Any, mesh: DeviceMesh, dim: int, shards_all: bool) -> None:
    def sharded(tensor: Tensor, is_first: bool) -> Tensor:
        shards = (is_first or shards_all) and tensor.ndim > dim
        placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(dim) if shards else Replicate()]
        return distribute_tensor(tensor.detach().clone(), mesh, placements, src_data_rank=None)

    try:
        torch.manual_seed(1)
        expected = run(lambda tensor, _: tensor.detach().clone())
    except Exception:  # the sample is one of an operator that raises so
        return
    try:
        torch.manual_seed(1)
        found = tree_map(_whole, run(sharded))
    except Exception:
        tally.refused += 1
        return
    if differs := _differs(found, expected):
        tally.wrong.append(f"{what}: {differs}")
    else:
        tally.equal += 1


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _differs(found: Any, expected: Any) -> str:
    (mine, _), (theirs, _) = tree_flatten(found), tree_flatten(expected)
    if len(mine) != len(theirs):
        return f"{len(mine)} values for {len(theirs)}"
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(other, Tensor):
            if not isinstance(one, Tensor) or one.shape != other.shape:
                return f"{tuple(one.shape) if isinstance(one, Tensor) else one} for {tuple(other.shape)}"
            close = torch.allclose(one.detach().to(other.dtype), other.detach(), 1e-8, 1e-8, equal_nan=True)
            if not close:
                return f"off by {(one.detach() - other.detach()).abs().max().item():.3g}" if one.numel() else "values"
        elif one != other and not (one != one and other != other):
            return f"{one} for {other}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Sweeps, and tells what differs; returns how many operators do that are not known to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--mesh", type=int, nargs="+", default=[2])
    parser.add_argument("--dim", type=int, default=0, help="the dim that is sharded")
    parser.add_argument("--samples", type=int, default=10, help="of each operator, at most")
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    args = parser.parse_args(argv)
    total, parted = Tally(), 0
    with Pool(args.ranks) as pool:
        for first in range(0, pool.run(count, timeout=300)[0], BATCH):
            try:
                found = pool.run(sweep, tuple(args.mesh), args.dim, first, args.samples, timeout=900)[0]
            except Exception as error:
                parted += 1
                print(f"operators from number {first} on: {str(error)[:300]}", file=args.log, flush=True)
                continue
            total.equal, total.refused = total.equal + found.equal, total.refused + found.refused
            total.wrong += found.wrong
    known = [line for line in total.wrong if line.split(":")[0].rstrip("0123456789d") in KNOWN]
    new = [line for line in total.wrong if line not in known]
    print(json.dumps({"command": " ".join(sys.argv[1:]), **header()}), file=args.log)
    print(f"{total.equal} equal, {total.refused} refused, {len(known)} known to differ, {len(new)} others", file=args.log)
    for line in (*(f"known: {name}" for name in Counter(line.split(":")[0] for line in known)), *new):
        print(f"    {line}", file=args.log)
    return len({line.split(":")[0] for line in new}) + parted


if __name__ == "__main__":
    from tests.soak import operators  # under its own name, by which the workers find what is sent to them

    sys.exit(min(operators.main(), 100))
