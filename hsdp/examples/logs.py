"""Where the figures of a run go beside `metrics.jsonl`: one small protocol, and a class for each service.

    log = open_log("tensorboard", folder, {"lr": 5e-3}, resumed=False)
    log.write(20, {"train_loss": 2.5})
    log.close()

Another service is another class with these two methods and an entry in `LOGS`. A run that is resumed goes on in the log
that it finds; any other begins a new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hsdp.examples.launch import JobError

Figures = Mapping[str, float]


class Log(Protocol):
    """Takes figures of steps."""

    def write(self, step: int, figures: Figures) -> None:
        """The figures after `step` steps."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class JsonLines:
    """`log.jsonl`: an object per line, with "step" and the figures."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: bool) -> None:
        self._file = (folder / "log.jsonl").open("a" if resumed else "w", encoding="utf-8")

    def write(self, step: int, figures: Figures) -> None:
        """See `Log`."""
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Log`."""
        self._file.close()


class TensorBoard:
    """Event files in `tensorboard/`, for `tensorboard --logdir`, which shows none of an earlier run's behind a new one."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: bool) -> None:
        package = _package("tensorboard", "torch.utils.tensorboard")
        self._writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=None if resumed else 0)
        self._writer.add_text("config", json.dumps(dict(config), indent=1, default=str))

    def write(self, step: int, figures: Figures) -> None:
        """See `Log`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `Log`."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, which its own variables (WANDB_MODE, WANDB_PROJECT, ...) steer; it goes on when
    resumed.

    A new run must not go on in an old one: wandb drops figures of steps that it has seen.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: bool) -> None:
        name = folder / "wandb_run_id"
        before = name.read_text(encoding="utf-8").strip() if resumed and name.is_file() else None
        self._run = _package("wandb", "wandb").init(dir=str(folder), config=dict(config), id=before, resume="allow")
        name.write_text(self._run.id, encoding="utf-8")

    def write(self, step: int, figures: Figures) -> None:
        """See `Log`."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """See `Log`."""
        self._run.finish()


def _package(name: str, module: str) -> Any:
    """A module that comes with an optional extra of that name."""
    try:
        return import_module(module)
    except ImportError:
        raise JobError(f"--log {name} needs the package of that name: pip install 'hsdp[{name}]'") from None


LOGS: dict[str, Callable[[Path, Mapping[str, Any], bool], Log]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "jsonl": JsonLines,
}
"""Services by the names that `--log` knows."""


def open_log(name: str, folder: Path, config: Mapping[str, Any], *, resumed: bool) -> Log:
    """Begins to log below `folder`, which exists; a run that is `resumed` goes on in what was logged before.

    Raises:
        JobError: the service's package is not installed.
    """
    return LOGS[name](folder, config, resumed)
