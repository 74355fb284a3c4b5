"""A sharded model that is driven through failures: what users see right behind one, and that the next iteration is that of
a fresh model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.deep import Deep, mean_grads, never_done, seeded, step
from tests.support.rig import RankEnv
from tests.support.sharded import check_rest, check_sharded, shard
from tests.support.twin import full_params


class InjectedError(Exception):
    """What is raised."""


class Hooks:
    """The user's hooks on each block; each calls its namesake, which is a point too."""

    @staticmethod
    def forward_pre(module: nn.Module, args: Any) -> None:
        """Before a block's forward, in a recomputation too."""

    @staticmethod
    def forward(module: nn.Module, args: Any, out: Tensor) -> None:
        """After a block's forward."""
        if out.requires_grad:
            out.register_hook(lambda grad: Hooks.tensor(grad))

    @staticmethod
    def tensor(grad: Tensor) -> None:
        """At the gradient of a block's output."""

    @staticmethod
    def landed(param: Tensor) -> None:
        """At the gradient of a sharded parameter."""

    @staticmethod
    def register(model: nn.Module) -> None:
        """Registers all of them."""
        for block in model.blocks:  # type: ignore[union-attr]
            block.register_forward_pre_hook(lambda *args: Hooks.forward_pre(*args))
            block.register_forward_hook(lambda *args: Hooks.forward(*args))
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: Hooks.landed(param))


class Subject:
    """A sharded model that is driven through failures, and what is right after each.

    Attributes:
        before: the whole parameters during an iteration that fails; the next one runs with other ones.
        batches: how many micro-batches an iteration has, the same one again and again.
    """

    def __init__(
        self, env: RankEnv, shape: tuple[int, ...], recompute: bool | None, batches: int = 1, **options: Any
    ) -> None:
        self.rank = env.rank
        self.batches = batches
        plain = seeded(lambda: Deep(recompute))
        self.model = shard(seeded(lambda: Deep(recompute)), env.mesh(shape), **options)
        Hooks.register(self.model)
        self.before = full_params(self.model)
        self._held = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        self._locals = {name: self._local(param) for name, param in self._held.items()}
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.75)
        self._grads = {
            name: batches * distribute_tensor(grad, param.device_mesh, param.placements).to_local()  # type: ignore
            for (name, param), grad in zip(
                self.model.named_parameters(), mean_grads(plain, step, env.world_size).values(), strict=True
            )
            if grad is not None
        }
        self.run()
        self._first = {name: self._local(param.grad).clone() for name, param in self.model.named_parameters()}

    def run(self) -> None:
        """One iteration. Nothing lands by luck of timing: the ranks' n-th calls are the same."""
        model: Any = self.model
        with never_done():
            for batch in range(self.batches):
                with model.accumulate(last=batch == self.batches - 1):
                    step(model, self.rank)

    def start(self) -> None:
        """What is there when an iteration begins that is to fail."""
        self._set(1.0)
        self.model.zero_grad()

    def fail(
        self,
        injected: AbstractContextManager[Any],
        error: type[BaseException] = InjectedError,
        act: Callable[[Any], object] | None = None,
    ) -> bool:
        """One iteration, or act on the model, inside of what makes it fail; returns whether it did, and checks what the
        user sees then."""
        self.start()
        try:
            with injected:
                self.run() if act is None else act(self.model)
        except error:
            self.check_unchanged()
            return True
        return False

    def kept(self) -> bool:
        """Whether the gradients of an iteration are there, as behind an interrupt when it was over: all, or none."""
        grads = {name: param.grad for name, param in self.model.named_parameters()}
        if all(grad is None for grad in grads.values()):
            return False
        for name, grad in grads.items():
            assert grad is not None, f"{name} has lost its gradient, others have not"
            torch.testing.assert_close(self._local(grad), self._first[name], rtol=1e-11, atol=1e-11)
        return True

    def check_unchanged(self) -> None:
        """Parameters and state_dict are the sharded ones, with the values of before; looks at this rank alone."""
        check_sharded(self.model)
        state = self.model.state_dict()
        for name, param in self.model.named_parameters():
            assert torch.equal(self._local(param), self._locals[name]), f"parameter {name} changed"
            assert torch.equal(self._local(state[name]), self._locals[name]), f"{name} of state_dict() changed"

    def check_whole(self) -> None:
        """The same of the whole parameters, which all ranks gather."""
        for name, whole in full_params(self.model).items():
            assert torch.equal(whole, self.before[name]), f"whole parameter {name} changed"

    def recover(self) -> None:
        """The next iteration, with other parameters and without zero_grad, is that of a fresh model."""
        self._set(0.75)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.run()
        assert sum("hsdp" in str(one.message) for one in caught) <= 1, [str(one.message) for one in caught]
        for name, param in self.model.named_parameters():
            assert param.grad is not None, f"{name} has no gradient"
            torch.testing.assert_close(self._local(param.grad), self._grads[name], rtol=1e-11, atol=1e-11)
        check_rest(self.model)

    def _set(self, factor: float) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self._held[name] * factor)

    @staticmethod
    def _local(tensor: Any) -> Tensor:
        assert isinstance(tensor, DTensor), type(tensor)
        return tensor.detach().to_local()
