"""docs/planned_runs.md: plans are near published runs, or the page says why not; its table is what the command prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.planned_runs import MOST_MEMORY, MOST_RATE, RUNS, table

PAGE = Path(__file__).parents[2] / "docs" / "planned_runs.md"


def test_plans_are_near_published_runs_or_say_why_not() -> None:
    for run in RUNS:
        plan = run.plan()
        rate = plan.tokens_per_second / (plan.replicas * plan.shards)
        near = abs(rate / run.rate - 1) <= MOST_RATE
        assert near != bool(run.rate_reason), f"{run}: {rate:.0f} tokens/s"
        if run.memory is not None:
            near = abs(plan.memory.total / 2**30 / run.memory - 1) <= MOST_MEMORY
            assert near != bool(run.memory_reason), f"{run}: {plan.memory.total / 2**30:.1f} GiB"


def test_the_page_has_what_the_command_prints_and_every_source() -> None:
    page = PAGE.read_text()
    assert table() in page, "run python -m benchmarks.planned_runs, and put its table there"
    assert all(f"**[{run.source}]**" in page for run in RUNS)
