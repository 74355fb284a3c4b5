"""Other methods of a sharded module than its forward as entry points: `register_forward_method`, and FSDP2's name of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from typing import Any

from torch import nn

from hsdp.api.module import HSDPModule
from hsdp.schedule.module_hooks import own_state


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes another method of a sharded module an entry point, as its forward is: unsharded parameters, watched outputs.

    Args:
        module: a sharded module.
        method_name: the method, "generate" say. Calls of it on this instance are entries from then on.

    Raises:
        ValueError: the module is not sharded, or has no such method.
    """
    if not isinstance(module, HSDPModule):
        raise ValueError(f"register_forward_method: {type(module).__name__} is not sharded; call fully_shard on it first")
    method = getattr(module, method_name, None) if isinstance(method_name, str) else None
    if not callable(method):
        raise ValueError(f"register_forward_method: {type(module).__name__} has no method {method_name!r}")
    # The module's own bound method would keep it alive from inside: that one is bound anew at each call. A method of
    # another object, which stands in its place, stays what it is, and so does one of the class.
    this = weakref.ref(module)
    bound = getattr(method, "__self__", None) is module
    function: Any = method.__func__ if bound else method

    @functools.wraps(method)
    def entry(*args: Any, **kwargs: Any) -> Any:
        owner = this()
        assert owner is not None, "a module whose method runs is alive"
        call = functools.partial(function, owner) if bound else function
        state = own_state(owner)
        return call(*args, **kwargs) if state.is_inside() else state.run_method(owner, call, args, kwargs)

    # `wraps` keeps the bound method, and by it the module: its signature is all that is asked of it.
    with contextlib.suppress(TypeError, ValueError):
        entry.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    del entry.__wrapped__
    setattr(module, method_name, entry)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """FSDP2's name of `register_forward_method`: `method_name` becomes an entry point, if `module` is sharded at all."""
    if isinstance(module, HSDPModule):
        register_forward_method(module, method_name)
