"""Where the sharded side need not do what the twin does: in one place, each with its reason.

An excuse allows an error of a type ("silent": no error where the twin raises) in some actions, if one of some facts holds
about the program up to there: actions since the forward whose backward runs, tweaks of that forward, "pending" sums.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Excuse:
    """An error that may come.

    Attributes:
        error: its type, or "silent".
        actions: in which it may come.
        facts: at least one of them must hold.
        message: a pattern that the error, as "Type: message", must match.
        reason: why the program need not run as the twin's does.
    """

    error: str
    actions: tuple[str, ...]
    facts: frozenset[str]
    reason: str
    message: str = ""


def _any_of(*facts: str) -> frozenset[str]:
    return frozenset(facts)


EXCUSES: tuple[Excuse, ...] = (
    Excuse(
        "silent",
        ("backward",),
        _any_of("toggle", "toggled"),
        "a recomputation under hsdp sees the parameters as its forward did; on the twin it saves other tensors",
        "^CheckpointError",
    ),
    Excuse(
        "silent",
        ("backward",),
        _any_of("toggle", "toggled", "penalty"),
        "with everything frozen, or inside a reentrant checkpoint, losses of ranks without the penalty have no graph; the "
        "penalty's rank goes on",
        "does not require grad",
    ),
    Excuse(
        "silent",
        ("backward", "grad"),
        _any_of("copy_ renorm", "data renorm", "max_norm"),
        "a forward that writes to its weights is refused, and its write taken back; what the twin keeps is its version",
        "modified by an inplace operation",
    ),
    Excuse(
        "RuntimeError",
        ("penalty", "backward"),
        _any_of("penalty"),
        "DTensor cannot add what a penalty gives to a parameter with fewer rows than ranks",
        "in-place operations that require placement changes",
    ),
    Excuse(
        "RuntimeError",
        ("follow",),
        _any_of("unsharded"),
        "for pipelines `parameters()` gives whole ones behind an asynchronous unshard, between backwards that do not wait",
        "got mixed torch.Tensor and DTensor",
    ),
    Excuse("StateError", ("write",), _any_of("write"), "torch loses what is assigned to .data", r"\.data of parameter"),
    Excuse(
        "StaleParametersError",
        ("backward", "grad"),
        _any_of("write", "sam", "step", "load", "step in backward", "data renorm", "copy_ renorm", "max_norm"),
        "weights changed between a forward and its backward: the twin uses what autograd saved, a gather cannot",
    ),
    Excuse(
        "RuntimeError",
        ("backward", "grad"),
        _any_of("write", "sam", "step", "load", "step in backward", "data renorm", "copy_ renorm", "max_norm"),
        "the weights that a graph of gradients reads changed: they are gathered anew for others, and autograd says so",
        "modified by an inplace operation",
    ),
    Excuse(
        "StateError",
        ("step", "raw step", "clip", "peek", "full write", "load"),
        _any_of("pending"),
        "sums are pending: their gradients are not in `.grad` yet",
    ),
    Excuse(
        "StateError",
        ("backward", "flush", "grad"),
        _any_of("lost"),
        "sums went with a backward that failed",
        "they are lost",
    ),
    Excuse(
        "StateError",
        ("forward", "eval", "unshard", "toggle", "backward", "infer", "child", "distill", "transform", "sam"),
        _any_of("toggled", "toggle"),
        "requires_grad changed while sums of the parameters chosen before are pending: any forward finds it, and unshard",
        "requires_grad of parameter",
    ),
    Excuse(
        "StateError",
        ("forward", "eval", "backward", "grad", "unshard", "infer", "child", "distill", "transform", "sam"),
        _any_of("data renorm", "copy_ renorm", "max_norm"),
        "a write to a whole weight would be lost when it is freed",
    ),
    Excuse(
        "StateError",
        ("backward",),
        _any_of("write"),
        "with one shard rank, a write to a shard is one to the whole weight that a forward or its user has open",
        "wrote to parameter",
    ),
)


def excuse_for(error: str, told: str, action: str, facts: set[str]) -> Excuse | None:
    """The excuse for an error in an action, if there is one."""
    for excuse in EXCUSES:
        fits = excuse.error == error and action in excuse.actions and excuse.facts & facts
        if fits and re.search(excuse.message, told):
            return excuse
    return None
