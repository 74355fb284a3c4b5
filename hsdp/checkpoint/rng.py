"""The state of every random generator of this process, in a form that a checkpoint's `extra` takes."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """The state of Python's, NumPy's (if it is in use), the CPU's and the current accelerator device's generators.

    Each rank's own: `save(..., extra={"rng": rng_state()})`, then `set_rng_state(loaded.extra["rng"])` on as many ranks.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (str(name), keys.tolist(), *rest)
    if torch.accelerator.is_available():
        state["device"] = _device_module().get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned. Generators that this process does not have are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if torch.accelerator.is_available() and "device" in state:
        _device_module().set_rng_state(state["device"])


def _device_module() -> Any:
    device = torch.accelerator.current_accelerator()
    assert device is not None, "the caller has asked whether there is one"
    return torch.get_device_module(device.type)
