"""Error types. One idea: every message says what went wrong, where (unit, parameter, ranks) and what to do instead.

Users' mistakes in arguments stay plain `ValueError` / `TypeError`; what goes wrong while a model runs is one of these,
all of them `RuntimeError`, so that existing handlers keep working.
"""

from __future__ import annotations


class HSDPError(RuntimeError):
    """Base class of hsdp's run-time errors."""


class StateError(HSDPError):
    """A call came at a moment at which it cannot be carried out (a unit in another state than the call expects)."""


class StaleParametersError(HSDPError):
    """Parameters changed between a forward pass and its backward pass, so that its gradients would be wrong."""


class DivergenceError(HSDPError):
    """Ranks disagree: they built different models or took different branches."""


class CollectiveError(HSDPError):
    """A collective failed or timed out; the message lists what this rank was waiting for."""


class ExtensionError(HSDPError):
    """A tensor subclass's gather extension raised, or returned what cannot be gathered; the message names the parameter."""


class CheckpointError(HSDPError):
    """A checkpoint could not be written or read; the message names the file, the tensor or the ranks, and the cause."""
