"""Published training runs beside what `hsdp.plan` says of them: tokens per second and GPU, and memory.

python -m benchmarks.planned_runs            # the tables of docs/planned_runs.md
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace

from hsdp.planning import MACHINES, Assumptions, Plan, preset
from hsdp.planning.activations import Recompute

TITAN_H100 = "titan-h100"
TITAN_A100 = "titan-a100"
IBM = "ibm"
OLMO = "olmo2"
LLAMA3 = "llama3"
DEEPSEEK = "deepseek"

MOST_RATE, MOST_MEMORY = 0.25, 0.15
"""How far a plan may be off without a reason beside it."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        model: a preset.
        mesh: replicas and shards that the plan takes.
        tokens, seq_len, recompute, micro_batches: as published.
        rate: tokens per second and GPU, as published.
        source: where.
        memory: GiB per GPU, if it was published.
        machine: one of `MACHINES`.
        slow: bytes per second between nodes and GPU, where the cluster's are not the machine's.
        rate_reason, memory_reason: why the plan is further off than it may be.
        how: what was published of the run that a plan does not show.
    """

    model: str
    mesh: tuple[int, int]
    tokens: int
    seq_len: int
    recompute: Recompute
    rate: float
    source: str
    memory: float | None = None
    machine: str = "h100"
    slow: float | None = None
    micro_batches: int = 1
    how: str = "FSDP"
    rate_reason: str = ""
    memory_reason: str = ""

    @functools.cache  # noqa: B019  # the runs are constants
    def plan(self) -> Plan:
        """What `hsdp.plan` says."""
        machine = MACHINES[self.machine]
        link = machine.link if self.slow is None else replace(machine.link, slow=self.slow)
        assumed = Assumptions(
            self.tokens,
            self.micro_batches,
            seq_len=self.seq_len,
            machine=machine.title,
            link=link,
            flops=machine.flops,
            bandwidth=machine.bandwidth,
            recompute=self.recompute,
        )
        return Plan.of(self.model, preset(self.model), *self.mesh, assumed)


EAGER = "not compiled: norms, rotary embeddings and the loss are plain operations that keep more than fused ones"
FOUR_D = (
    "tensor and pipeline parallelism leave each GPU a part of a few layers; with data parallelism alone blocks must be "
    "recomputed, a quarter of the plan's flops, and it still does not fit in 80 GiB"
)
EXPERTS = (
    "experts stay where they are and tokens travel, in FP8; sharded data parallelism alone gathers all 671 B weights in "
    "every step, which the plan shows as exposed communication"
)

RUNS = (
    Run("llama3-8b", (1, 8), 16384, 8192, "selective", 6667, TITAN_H100, 77.0, how="FSDP, torch.compile"),
    Run("llama3-8b", (1, 8), 16384, 8192, "selective", 5762, TITAN_H100, 82.4, memory_reason=EAGER),
    Run("llama3-8b", (1, 128), 16384, 8192, "selective", 6514, TITAN_H100, 62.0, how="FSDP, torch.compile"),
    Run("llama3-8b", (1, 128), 16384, 8192, "selective", 5605, TITAN_H100, 67.0, memory_reason=EAGER),
    Run("llama3-8b", (1, 64), 8192, 8192, "selective", 2973, TITAN_A100, machine="a100"),
    Run("llama3-70b", (1, 64), 8192, 8192, True, 331, TITAN_A100, machine="a100"),
    Run("llama2-7b", (12, 8), 8192, 4096, False, 7500, IBM, slow=90e9, how="HSDP"),
    Run("llama2-70b", (1, 96), 8192, 4096, True, 800, IBM, slow=90e9),
    Run("llama2-7b", (16, 8), 8192, 4096, False, 3700, IBM, machine="a100", slow=45e9, how="HSDP"),
    Run("llama2-70b", (1, 128), 8192, 4096, True, 370, IBM, machine="a100", slow=45e9),
    Run("olmo2-32b", (16, 64), 8192, 4096, "selective", 1800, OLMO, how="HSDP, feed-forwards recomputed"),
    Run(
        "llama3-405b", (16, 512), 8192, 8192, True, 170, LLAMA3, how="8 tensor x 16 pipeline x 64 data", rate_reason=FOUR_D
    ),
    Run(
        "deepseek-v3",
        (1, 2048),
        4096,
        4096,
        True,
        1475,
        DEEPSEEK,
        how="pipeline and expert parallelism, FP8",
        rate_reason=EXPERTS,
    ),
)


def _off(planned: float, published: float) -> str:
    return f"{planned / published - 1:+.0%}"


def _recomputed(run: Run) -> str:
    return {False: "no", True: "full"}.get(run.recompute, "selective")  # type: ignore[call-overload,no-any-return]


def table() -> str:
    """The runs as a Markdown table, and the reasons under it."""
    heads = ("model", "published as", "GPUs", "tokens per GPU", "recomputed", "tokens/s/GPU", "planned", "off")
    lines = ["| " + " | ".join((*heads, "GiB", "planned", "off", "source")) + " |", "|" + "---|" * 12]
    reasons: dict[str, int] = {}
    for run in RUNS:
        plan = run.plan()
        world = plan.replicas * plan.shards
        rate, memory = plan.tokens_per_second / world, plan.memory.total / 2**30
        notes = {"rate": "", "memory": ""}
        for what, reason in (("rate", run.rate_reason), ("memory", run.memory_reason)):
            if reason:
                notes[what] = f" ({reasons.setdefault(reason, len(reasons) + 1)})"
        published = "" if run.memory is None else f"{run.memory:.1f}"
        told = "" if run.memory is None else _off(memory, run.memory) + notes["memory"]
        gpus = f"{world:,} {MACHINES[run.machine].title}"
        cells = (run.model, run.how, gpus, f"{run.tokens:,}", _recomputed(run), f"{run.rate:,.0f}", f"{rate:,.0f}")
        cells += (_off(rate, run.rate) + notes["rate"], published, f"{memory:.1f}", told, f"[{run.source}]")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- ({at}) {reason}." for reason, at in reasons.items())])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
