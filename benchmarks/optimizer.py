"""`python -m benchmarks.optimizer`: the optimizer's step over sharded parameters, beside the step over plain tensors.

288 parameters (32 units of 9, as many as a 7B Llama has in 32 layers), sharded over 8 fake ranks: nothing is communicated
in a step. Contenders step the same shapes and values, each with AdamW's for-loop, `foreach` and `fused` implementation:

    plain     the local tensors themselves, as an optimizer on one device would see them
    local     the DTensors, by `hsdp.optim.local`
    flat      the same with flat=True: a tensor per unit
    dtensor   the DTensors, by the stock optimizer

All take turns, and each round gives a ratio of CPU time over the plain one's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from benchmarks import optimizer_ranks
from benchmarks.harness import Plan, Spread, Step, positive, progress, publish
from benchmarks.host import Meter, cpu_time, fake_meshes
from tests.support.rig import fake_world

CONTENDERS = ("plain", "local", "flat", "dtensor")
KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
UNITS, PER_UNIT = 32, 9


@dataclass(frozen=True)
class Row:
    """One implementation: CPU seconds of a step of each contender, round by round."""

    kind: str
    spent: dict[str, list[float]]

    def ratio(self, name: str) -> Spread:
        """A contender over the plain one."""
        return Spread.of([a / b for a, b in zip(self.spent[name], self.spent["plain"], strict=True)])


class Weights(nn.Module):
    """The parameters of a unit, all of which get gradients."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(dim, dim)) for _ in range(PER_UNIT))

    def forward(self) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()


def make(contender: str, kind: str, dim: int, mesh: DeviceMesh) -> tuple[Step, Callable[[], list[Tensor]]]:
    """A step, and a look at the local values that it changes."""
    torch.manual_seed(0)
    model = nn.ModuleList(Weights(dim) for _ in range(UNITS))
    for module in model:
        hsdp.fully_shard(module, mesh=mesh)
        module().backward()
    params: list[Any] = list(model.parameters())
    for param in params:
        param.grad.to_local().fill_(1.0)
    if contender == "plain":
        locals_ = [nn.Parameter(param.to_local().detach().clone()) for param in params]
        for mine, param in zip(locals_, params, strict=True):
            mine.grad = param.grad.to_local().clone()
        params = locals_
    optimizer = torch.optim.AdamW(params, lr=1e-3, **KINDS[kind])  # type: ignore[arg-type]
    if contender in ("local", "flat"):
        hsdp.optim.local(optimizer, flat=contender == "flat")

    def look() -> list[Tensor]:
        if contender == "plain":
            return [param.detach() for param in params]
        return [param.to_local().detach() for param in model.parameters()]  # and so the model lives on

    return optimizer.step, look


def measure(kind: str, dim: int, mesh: DeviceMesh, rounds: int, steps: int, meter: Meter) -> Row:
    """The contenders in turns, once it is sure that they compute the same."""
    made = {name: make(name, kind, dim, mesh) for name in CONTENDERS}
    for step, _ in made.values():
        for _ in range(3):
            step()
    expected = made["plain"][1]()
    for name, (_, look) in made.items():
        for a, b in zip(look(), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=f"{name} computes something else than plain")
    spent: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, (step, _) in made.items():
            gc.collect()
            spent[name].append(meter(step, steps))
    return Row(kind, spent)


def table(rows: Sequence[Row]) -> str:
    """The ratios as text."""
    lines = [
        f"AdamW's step over {UNITS * PER_UNIT} parameters: CPU time over plain tensors' (min median max; ms)",
        f"{'':10}{'plain':>10}" + "".join(f"{name:>32}" for name in CONTENDERS[1:]),
    ]
    for row in rows:
        ms = {name: 1e3 * statistics.median(row.spent[name]) for name in CONTENDERS}
        others = "".join(f"{f'{row.ratio(name)} ({ms[name]:.2f})':>32}" for name in CONTENDERS[1:])
        lines.append(f"{row.kind:10}{ms['plain']:10.2f}{others}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer", description=__doc__)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dim", type=positive, default=256, help="parameters are DIM x DIM (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=9, help="turns (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=5, help="steps a turn (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured here")
    parser.add_argument("--what", choices=("host", "ranks"), default="host", help="ranks: what optimizer_ranks.py says")
    parser.add_argument("--mesh", nargs="+", choices=optimizer_ranks.MESHES, default=list(optimizer_ranks.MESHES))
    parser.add_argument("--layers", type=positive, default=6, help="of the model that ranks step (default %(default)s)")
    parser.add_argument("--dion", metavar="PATH", help="ranks: a copy of dion's repository, to compare with its Muon")
    args = parser.parse_args(argv)
    if args.what == "ranks":
        plan = Plan(args.rounds, args.steps, warmup=2)
        size = optimizer_ranks.Size(args.dim, args.layers)
        found, held = optimizer_ranks.run(args.mesh, size, plan, args.dion, fake_world)
        measured = [{"mesh": mesh, **asdict(row)} for mesh, row in found]
        publish("optimizer", optimizer_ranks.table(found, held), vars(args), args.json, rows=measured, bytes=held)
        return
    rows = []
    with fake_meshes() as meshes:
        for kind in args.kind:
            progress(f"{kind} ...")
            rows.append(measure(kind, args.dim, meshes["8"], args.rounds, args.steps, cpu_time))
    publish("optimizer", table(rows), vars(args), args.json, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
