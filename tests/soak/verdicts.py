"""What comes of random programs on a rank, whatever they are of: what the soaks share."""

from __future__ import annotations

import io
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tests.support.rig import RankEnv

P = TypeVar("P")


@dataclass
class Verdict:
    """What came of a program on this rank.

    Attributes:
        named: errors that were owed, by type and action.
        planned: how many actions raised on both sides.
        failure: a class of failures ("" if it went well), with `told` about it.
    """

    named: Counter[str] = field(default_factory=Counter)
    planned: int = 0
    failure: str = ""
    told: str = ""


class Failed(Exception):  # noqa: N818  (what the rig shows is this name)
    """A program failed; the message is JSON: its place among those of the job, the class of failure, what was told."""


class Wrong(Exception):  # noqa: N818
    """The program failed here."""

    def __init__(self, failure: str, told: str) -> None:
        super().__init__(failure)
        self.failure, self.told = failure, told


class Over(Exception):  # noqa: N818
    """The program ends here, as it may."""


@contextmanager
def judging(verdict: Verdict) -> Iterator[None]:
    """Writes down in a verdict what the body, which plays a program, raised."""
    try:
        yield
    except Wrong as wrong:
        verdict.failure, verdict.told = wrong.failure, wrong.told
    except Exception as error:
        verdict.failure, verdict.told = f"unexpected {type(error).__name__}", traceback.format_exc()[-3000:]


def play_each(programs: Sequence[P], play: Callable[[P], Verdict]) -> list[Verdict]:
    """Plays programs, and stops at the first that fails, as ranks may be out of step behind it.

    Raises:
        Failed: one failed.
    """
    verdicts = []
    for index, program in enumerate(programs):
        verdict = play(program)
        if verdict.failure:
            done = [[dict(one.named), one.planned] for one in verdicts]
            raise Failed(json.dumps({"at": index, "failure": verdict.failure, "told": verdict.told, "done": done}))
        verdicts.append(verdict)
    return verdicts


def run_each(env: RankEnv, play: Callable[[RankEnv, P], Verdict], programs: list[P], system: str = "hsdp") -> list[Verdict]:
    """On a worker: plays programs up to the first that fails, see `play_each`; on hsdp, whatever the `system`."""
    return play_each(programs, lambda program: play(env, program))


def to_bytes(state: Any) -> bytes:
    """As `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """What `to_bytes` was given."""
    return torch.load(io.BytesIO(data), weights_only=False)
