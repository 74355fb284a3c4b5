"""The ranks that save or load together: what they tell each other, and how an error on one becomes an error on all.

These are small Python objects about files, not collectives of tensors: they travel over a CPU group, a few per checkpoint.
Whatever a rank does on its own (reading, writing, checking) happens inside one of the methods below, so that no rank
goes on while another has failed, and all raise the same text.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, SupportsIndex, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hsdp.checkpoint.memory import buffer_of
from hsdp.comm.divergence import DivergenceGuard
from hsdp.comm.groups import new_group, own_rank
from hsdp.errors import CheckpointError, HSDPError
from hsdp.torch_private import backend_of, compares_arguments, timeout_of_backend
from hsdp.unit.lookup import units_below

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_CPU = torch.device("cpu")
_TAG = 0x68736470  # "hsdp"


@dataclass(frozen=True)
class _Failure:
    """What went wrong on one rank; `lost`: rank 0 lost contact with another, and there is no use in asking it again."""

    text: str
    lost: bool = False


def meet_all(what: str, model: object, process_group: ProcessGroup | None = None) -> None:
    """Asks the ranks of a model's meshes whether they all make the call `what`.

    So a call on some ranks only is told at once: over the groups that checkpoints use, nobody hears of it before the
    time-out. Whoever calls with another kind of model is told later, by what these ranks exchange.

    Args:
        what: the function.
        model: what it is called with; nobody is asked about what has no units.
        process_group: the ranks that make the call; None: all.

    Raises:
        DivergenceError: on all ranks that ask or wait for these: some do something else, or nothing.
    """
    if not isinstance(model, nn.Module) or not dist.is_available() or not dist.is_initialized():
        return
    within: set[int] | None = None
    if isinstance(process_group, ProcessGroup):
        within = set(dist.get_process_group_ranks(process_group))
    groups = [comm.group for unit in units_below(model) for comm in (unit.shard_comm, unit.replicate_comm)]
    for group in dict.fromkeys(group for group in groups if group is not None):
        guard = DivergenceGuard.among(group)
        if guard is not None and (within is None or within.issuperset(dist.get_process_group_ranks(group))):
            guard.meet(what)


def carried(call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls one of torch's collectives, or sends or receives.

    Raises:
        CheckpointError: the backend failed.
    """
    try:
        return call(*args, **kwargs)
    except HSDPError:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f"tensors did not go from rank to rank ({getattr(call, '__name__', call)} on rank {own_rank()}): {error}. "
            "Another rank may have stopped, raised, or not made this call: see its log"
        ) from error


class Ranks:
    """The ranks of a process group, or this process alone where there is none.

    Attributes:
        group: the group whose ranks they are; None if there is none.
        rank, size: this rank's number in the group, and how many there are.
        talk: a CPU group of them, for collectives beside the messages; None for a process alone.
        lost_contact: a rank could not be reached any more.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        """Finds (or, once per group, makes: a collective) a CPU group to talk over.

        Args:
            process_group: the ranks that take part; None: the default group, or this process alone without one.
        """
        self.group: ProcessGroup | None = None
        self.talk: ProcessGroup | None = None
        self._messages: ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self.lost_contact = False
        if dist.is_available() and dist.is_initialized():
            self.group = process_group if process_group is not None else dist.group.WORLD
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ValueError("process_group=...: this process is not one of its ranks; call on its ranks only")
            if self.size > 1:
                assert self.group is not None, "a group of several ranks exists"
                self.talk = _cpu_group(self.group)
                self._messages = for_messages(self.talk)
        elif process_group is not None:
            raise ValueError("process_group=...: torch.distributed is not initialised in this process")

    def rank_of(self, global_rank: int) -> int:
        """The number in this group of a rank of the default group.

        Raises:
            ValueError: it is none of the group's ranks.
        """
        return global_rank if self.group is None else dist.get_group_rank(self.group, global_rank)

    def agree(self, what: str, action: Callable[[], T], arguments: Mapping[str, object]) -> T:
        """Does `action`, which checks a call's arguments, and compares those that all ranks must give alike.

        Raises:
            CheckpointError: on every rank: ranks were called with different arguments; names each, with who gave what. Or
                another rank's `action` raised.
            Exception: what `action` raised here.
        """
        outcome = _attempt(action)
        given = {name: _shown(value) for name, value in arguments.items()}
        mine = (outcome.value if isinstance(outcome.value, _Failure) else None, given)
        answers = self.each(what, lambda: mine)
        if outcome.error is not None:
            raise outcome.error
        if self.talk is not None:
            failure = _describe([failure for failure, _ in answers])
            if failure is not None:
                raise CheckpointError(f"{what}: {failure}")
            differing = [
                f"{name}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
                for name in given
                if len(by_value := _grouped(values[name] for _, values in answers)) > 1
            ]
            if differing:
                raise CheckpointError(f"{what}: ranks were called with different arguments: {'; '.join(differing)}")
        return cast(T, outcome.value)

    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Does `action` on every rank; every rank gets all results, in rank order.

        Raises:
            CheckpointError: on every rank, if `action` raised on any; `what` says what was being done.
        """
        everything: list[T] = self.meet(what, action, lambda answers: [answers] * self.size)
        return everything

    def one(self, what: str, action: Callable[[], T], rank: int = 0) -> T:
        """Does `action` on one rank; every rank gets its result, or its error as `CheckpointError`."""
        outcome = _attempt(action) if self.rank == rank else _Outcome(None, None)
        (answer,) = self.meet(what, lambda: (outcome.value,), lambda answers: [answers[rank]] * self.size)
        if isinstance(answer, _Failure):
            raise CheckpointError(f"{what}: {answer.text}") from outcome.error
        return cast(T, answer)

    def meet(self, what: str, action: Callable[[], T], combine: Callable[[list[T]], list[R]]) -> R:
        """Does `action` on every rank, then `combine` on rank 0 with all results; each rank gets its own item of that.

        All of it goes through rank 0, which hears at once of a rank that is gone, and tells the others: in a collective
        they would wait until its timeout. A thread may do it beside the main thread's collectives: these are messages
        from one rank to another, with a tag of their own. A group of its own for the thread would have to be made while
        the run is under way, and a rank that dies at that moment makes gloo wait for it several times as long as the
        timeout.

        Raises:
            CheckpointError: on every rank, if either raised anywhere.
        """
        outcome = _attempt(action)
        if self.rank > 0:
            sent = _attempt(lambda: _message(outcome.value))
            outcome = outcome if sent.error is None else sent
            message = sent.value if sent.error is None else pickle.dumps(sent.value)
            self._contact(what, lambda: self._post(message, 0))
            reply = self._contact(what, lambda: _read(self._receive(0)))
        else:
            answers = [outcome.value, *map(self._heard, range(1, self.size))]
            failure = _describe(answers)
            if failure is None:
                combined = _attempt(lambda: _replies(combine(answers)))
            else:
                combined = _Outcome(_Failure(failure, self.lost_contact), outcome.error)
            outcome = _Outcome(outcome.value, outcome.error or combined.error)
            if isinstance(combined.value, _Failure):
                reply, messages = combined.value, [pickle.dumps(combined.value)] * (self.size - 1)
            else:
                reply, messages = combined.value
            # Who is gone by now is missed at the next meeting, where the others hear of it. An error here would be rank 0's
            # alone: they have their replies, go on, and would wait at that meeting for a rank that has left.
            for rank, message in enumerate(messages, 1):
                self._post_if_there(message, rank)
        if isinstance(reply, _Failure):
            self.lost_contact |= reply.lost
            raise CheckpointError(f"{what}: {reply.text}") from outcome.error
        return cast(R, reply)

    def _heard(self, rank: int) -> Any:
        """What a rank says, or that it is gone, or not understood."""
        try:
            message = self._receive(rank)
        except (RuntimeError, ValueError) as error:
            self.lost_contact = True
            return _Failure(
                f"rank 0 of {self.size} lost contact with it: it may have died or raised (see its log): {error}"
            )
        return _attempt(lambda: _read(message)).value

    def _post_if_there(self, message: bytes, rank: int) -> None:
        """Tells a rank, if it can be told."""
        with suppress(RuntimeError, ValueError):
            self._post(message, rank)

    def _post(self, message: bytes, rank: int) -> None:
        # By the group itself: torch.distributed's functions refuse one that was destroyed while the save was under way,
        # though its connections last as long as somebody holds it.
        assert self._messages is not None, "there is another rank"
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for tensor in (torch.tensor([data.numel()], device=_CPU), data):
            self._messages.send([tensor], rank, _TAG).wait()

    def _receive(self, rank: int) -> Tensor:
        assert self._messages is not None, "there is another rank"
        size = torch.zeros(1, dtype=torch.int64, device=_CPU)
        self._messages.recv([size], rank, _TAG).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=_CPU)
        self._messages.recv([data], rank, _TAG).wait()
        return data

    def _contact(self, what: str, exchange: Callable[[], T]) -> T:
        try:
            return exchange()
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            self.lost_contact = True  # there is no use in asking anything else
            raise CheckpointError(
                f"{what}: rank {self.rank} of {self.size} lost contact with rank 0, which may have died or raised (see its "
                f"log): {error}"
            ) from error


def _message(value: object) -> bytes:
    """A value as it travels; read once here, where an error can still be told to all.

    Raises:
        CheckpointError: no other rank could read it.
    """
    try:
        message = pickle.dumps(value)
        pickle.loads(message)
    except Exception as error:  # of objects of users, which raise what they like
        raise CheckpointError(f"a value cannot go from rank to rank: {type(error).__name__}: {error}") from error
    return message


def _replies(replies: Sequence[R]) -> tuple[R, list[bytes]]:
    """Rank 0's own reply, and those of the others as they travel; one that several get is pickled once."""
    messages = {key: _message(value) for key, value in {id(one): one for one in replies[1:]}.items()}
    return replies[0], [messages[id(one)] for one in replies[1:]]


def _read(message: Tensor) -> Any:
    """The value that came.

    Raises:
        CheckpointError: it cannot be read here: its class is not found, say.
    """
    try:
        return pickle.loads(buffer_of(message))
    except Exception as error:
        raise CheckpointError(f"a value from another rank cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Outcome:
    value: Any
    error: BaseException | None


def _attempt(action: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(action(), None)
    except (Exception, SystemExit) as error:  # who waits for this rank must hear of its end
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return _Outcome(_Failure(text), error)


def _describe(answers: list[Any]) -> str | None:
    """What failed and where, each text once; None if nothing did."""
    texts = _grouped(answer.text if isinstance(answer, _Failure) else None for answer in answers)
    fine = texts.pop(None, [])
    if len(texts) == 1 and not fine:
        return next(iter(texts))
    return "; ".join(f"on {_ranks(ranks)}: {text}" for text, ranks in texts.items()) or None


def _grouped(values: Iterable[T]) -> dict[T, list[int]]:
    """Each value with the ranks that gave it."""
    found: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def _ranks(ranks: list[int], limit: int = 16) -> str:
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:limit]))}{more}"


def _shown(value: object) -> str:
    """An argument as it is compared and told; whole numbers of any type alike."""
    return repr(int(value)) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else repr(value)[:200]


_made: list[tuple[weakref.ref[ProcessGroup], str, weakref.ref[ProcessGroup]]] = []
"""Groups made here: the group they stand for, the backend, and the group. torch itself keeps them alive."""


def _cpu_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks that carries CPU objects: `group` itself where that will do."""
    return group if _CPU in group._device_types else _another(group, "gloo")


def for_messages(group: ProcessGroup) -> ProcessGroup:
    """The group over which ranks of `group` send one another as many messages as they like: all of them come here first.

    `group` itself, unless torch compares what ranks pass to collectives: then it counts messages as well, and the next
    collective of a group in which one rank sent more than another would not match.
    """
    return _another(group, str(dist.get_backend_config(group))) if compares_arguments() else group


def _another(group: ProcessGroup, backend: str) -> ProcessGroup:
    """A group of the same ranks; made once."""
    _made[:] = [entry for entry in _made if entry[0]() is not None and entry[2]() is not None]
    for stands_for, kind, made in _made:
        if stands_for() is group and kind == backend and (found := made()) is not None:
            return found
    new = new_group("messages", dist.get_process_group_ranks(group), _timeout_of(group), backend)
    _made.append((weakref.ref(group), backend, weakref.ref(new)))
    return new


def _timeout_of(group: ProcessGroup) -> Any:
    """The timeout that the user gave the group, so that a lost rank ends a checkpoint as soon as it ends a step."""
    for device in group._device_types:
        with suppress(RuntimeError):  # no backend for that device
            if (timeout := timeout_of_backend(backend_of(group, device))) is not None:
                return timeout
    return None
