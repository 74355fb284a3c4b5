"""What a run tells: progress lines, metrics as JSON lines and the loss picture, all from rank 0."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hsdp.examples.bar import ProgressBar
from hsdp.examples.launch import JobError
from hsdp.examples.logs import Log
from hsdp.examples.picture import Curve, Level, loss_picture


@dataclass(frozen=True)
class Baselines:
    """Cross-entropy of n-gram models on the held-out text, in nats per byte."""

    bigram: float
    trigram: float


@dataclass(frozen=True)
class Progress:
    """One line of progress. Losses are nats per byte; `train_loss` is the mean since the line before."""

    step: int
    train_loss: float
    held_out_loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    peak_memory_bytes: int


class Report:
    """Collects progress on rank 0 and writes it below `out`; silent on other ranks, where `out` is None."""

    def __init__(
        self,
        out: Path | None,
        baselines: Baselines,
        *,
        resumed_at: int = 0,
        num_steps: int = 1,
        logs: Sequence[Log] = (),
    ) -> None:
        self._out = out
        self._baselines = baselines
        self._history: list[Progress] = []
        self._logs = logs
        self._bar = ProgressBar(num_steps, resumed_at)
        if out is None:
            return
        out.mkdir(parents=True, exist_ok=True)
        if resumed_at:
            self._history = [past for past in _read_history(self._metrics(out)) if past.step <= resumed_at]
        # Written anew: steps after the checkpoint are about to happen again.
        self._metrics(out).write_text("".join(_json_line(past) for past in self._history), encoding="utf-8")

    @staticmethod
    def _metrics(out: Path) -> Path:
        return out / "metrics.jsonl"

    def say(self, text: str = "") -> None:
        """Prints on rank 0."""
        if self._out is not None:
            self._bar.clear()
            encoding = sys.stdout.encoding or "utf-8"  # of a terminal, perhaps, that knows few characters
            print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def step(self, num_done: int, loss: float) -> None:
        """Moves the progress bar, if somebody watches."""
        if self._out is not None:
            self._bar.step(num_done, f"loss {loss:.3f}")

    def close(self) -> None:
        """Takes the bar away and ends the logs."""
        if self._out is not None:
            self._bar.clear()
            for log in self._logs:
                log.close()

    def progress(self, progress: Progress, num_steps: int) -> None:
        """Prints one line, appends it to `metrics.jsonl` and redraws `loss.svg`."""
        if self._out is None:
            return
        self._history.append(progress)
        with self._metrics(self._out).open("a", encoding="utf-8") as lines:
            lines.write(_json_line(progress))
        figures = asdict(progress)
        step = figures.pop("step")
        for log in self._logs:
            log.write(step, figures)
        self._draw(self._out)
        self.say(
            f"step {progress.step:>{len(str(num_steps))}}/{num_steps}"
            f"  train {progress.train_loss:.3f}"
            f"  held-out {progress.held_out_loss:.3f}"
            f"  grad norm {progress.grad_norm:.2f}"
            f"  {progress.tokens_per_second:,.0f} tokens/s"
            f"  peak {progress.peak_memory_bytes / 2**20:,.0f} MiB"
            f"  {self._bar.remaining(progress.step)} left"
        )

    def introduce(self) -> None:
        """Prints what there is to beat."""
        self.say(
            f"held-out cross-entropy to beat: bigram {self._baselines.bigram:.3f}, "
            f"trigram {self._baselines.trigram:.3f} nats per byte"
        )

    def conclude(self, held_out_loss: float, *, num_steps: int, seconds: float) -> None:
        """Prints the loss on all held-out text beside the baselines, and writes it all to `summary.json`."""
        if self._out is None:
            return
        self.say(
            f"held-out loss {held_out_loss:.3f} nats per byte: "
            f"{_comparison(held_out_loss, self._baselines.bigram)} the bigram, "
            f"{_comparison(held_out_loss, self._baselines.trigram)} the trigram; {seconds:.0f} s"
        )
        self.say(f"metrics and picture: {self._out}")
        facts = {"held_out_loss": held_out_loss, "steps": num_steps, "seconds": round(seconds, 1)}
        text = json.dumps({**facts, **asdict(self._baselines)}, indent=1)
        (self._out / "summary.json").write_text(text + "\n", encoding="utf-8")

    def _draw(self, out: Path) -> None:
        steps = [past.step for past in self._history]
        picture = loss_picture(
            "Byte-level language model on CPython's standard library",
            curves=[
                Curve("train", steps, [past.train_loss for past in self._history]),
                Curve("held-out", steps, [past.held_out_loss for past in self._history]),
            ],
            levels=[Level("bigram", self._baselines.bigram), Level("trigram", self._baselines.trigram)],
        )
        (out / "loss.svg").write_text(picture, encoding="utf-8")


def _comparison(loss: float, baseline: float) -> str:
    return f"{abs(loss - baseline):.3f} {'below' if loss < baseline else 'above'}"


def _json_line(progress: Progress) -> str:
    return json.dumps(asdict(progress)) + "\n"


def _read_history(metrics: Path) -> list[Progress]:
    if not metrics.is_file():
        return []
    history = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        # A run that was killed may have left half a line, and what is there may be another program's.
        with suppress(ValueError, TypeError):
            history.append(Progress(**json.loads(line)))
    return history


def prepare_folder(folder: Path) -> None:
    """Makes `folder` if it is not there.

    Raises:
        JobError: if it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot make the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise JobError(f"cannot write to the folder {folder}")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: allocated on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
