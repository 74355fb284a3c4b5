"""Pickles read without unpickling: the opcodes that data consists of, into inert records; nothing is imported or called.

DCP's `.metadata` and what `torch.save` writes are pickles, programs that may call anything. The machine here knows the
opcodes which build plain data. A name that a pickle refers to becomes a `Name`, a call that it asks for a `Call`: notes
about what the pickle says, whose meaning `index.py` and `archive_reader.py` decide. So no class, function or module of
this process is ever handed to a pickle, and what a pickle sets on an object is set on a note.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hsdp.errors import CheckpointError

_MAX_DEPTH = 100
"""How deep values may be nested. Hashing or comparing a tuple that is nested a million times overflows the C stack."""


@dataclass(frozen=True)
class Name:
    """A global that a pickle names; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """A call that a pickle asks for, and the state that it sets on the result; never made. Equal to itself only."""

    __slots__ = ("arguments", "callee", "state")

    def __init__(self, callee: Name, arguments: tuple[Any, ...]) -> None:
        self.callee = callee
        self.arguments = arguments
        self.state: Any = None


class Reference:
    """A persistent id: what `torch.save` writes in the place of a tensor's bytes."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


def read_pickle(data: bytes) -> Any:
    """The value that a pickle describes, made of plain data, `Name`, `Call` and `Reference`.

    Args:
        data: the pickle, of any protocol from 2 on.

    Raises:
        CheckpointError: it is damaged, has an opcode that data does not need, or is nested too deep.
    """
    machine = _Machine(data)
    try:
        value = machine.run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"a pickle in it is damaged at byte {machine.at}: {type(error).__name__}: {error}") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Refuses values nested deeper than any checkpoint's.

    Each value is visited once per depth at most, level by level, so that neither depth nor sharing costs more than the
    pickle's own size times the bound.

    Raises:
        CheckpointError: it is nested too deep.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: dict[int, Any] = {}
        for one in level:
            for child in _children(one):
                if isinstance(child, (tuple, list, dict, Call, Reference)):
                    below[id(child)] = child
        if not below:
            return
        level = list(below.values())
    raise CheckpointError(f"a value in it is nested more than {_MAX_DEPTH} deep, or within itself")


def _children(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Call):
        return [value.arguments, value.state]
    return [value.content] if isinstance(value, Reference) else []


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Goes through the opcodes up to STOP."""
        data, operations = self.data, _OPERATIONS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                (value,) = self.stack
                return value
            operation = operations.get(code)
            if operation is None:
                raise CheckpointError(
                    f"a pickle in it has opcode {code:#04x} at byte {self.at - 1}, which data does not need"
                )
            operation(self)

    # -- operands --

    def take(self, count: int) -> bytes:
        """The next bytes of the pickle."""
        start, end = self.at, self.at + count
        if end > len(self.data):
            raise IndexError("the pickle ends early")
        self.at = end
        return self.data[start:end]

    def number(self, form: struct.Struct) -> Any:
        """The next operand of a fixed size."""
        (found,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return found

    def line(self) -> str:
        """The next operand that ends with a line feed."""
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return found

    def above_mark(self) -> list[Any]:
        """What is on the stack above the last mark, taken off."""
        mark = self.marks.pop()
        found = self.stack[mark:]
        del self.stack[mark:]
        return found

    # -- what opcodes do, where it is more than one line --

    def long(self) -> None:
        """A whole number of up to 8 bytes; no checkpoint has larger ones."""
        size = self.number(_U8)
        if size > 8:
            raise ValueError(f"a number of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        """The last values as a tuple."""
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        made = tuple(self.stack[-count:])
        self.stack[-count:] = [made]

    def name(self, module: Any, name: Any) -> None:
        """A global."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a global whose name is no text")
        self.stack.append(Name(module, name))

    def call(self) -> None:
        """A callable and its arguments."""
        arguments, callee = self.stack.pop(), self.stack.pop()
        if not (isinstance(callee, Name) and isinstance(arguments, tuple)):
            raise TypeError("a call of what is no global")
        self.stack.append(Call(callee, arguments))

    def build(self) -> None:
        """A state for the result of a call."""
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Call) or target.state is not None:
            raise TypeError("a state for what is not the result of a call")
        target.state = state

    def set_items(self, items: list[Any]) -> None:
        """Keys and values in turn, into the dict below them."""
        target = self.stack[-1]
        if isinstance(target, Call) and target.callee == ORDERED_DICT and target.arguments == ():
            target.state = target.state or {}  # an OrderedDict's items come after its call
            target = target.state
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError("items for what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            flat = key if isinstance(key, tuple) else (key,)
            if not all(part is None or isinstance(part, (str, int, float, bytes, Name, Call)) for part in flat):
                raise TypeError("a key that is no plain value")
            target[key] = value

    def append_items(self, items: list[Any]) -> None:
        """Values into the list below them."""
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("values for what is no list")
        target.extend(items)

    def two(self) -> list[Any]:
        """The last two values, taken off, in the order in which they were put there."""
        last = self.stack.pop()
        return [self.stack.pop(), last]


ORDERED_DICT = Name("collections", "OrderedDict")

_U8, _U16, _U32, _I32, _U64, _F64 = (struct.Struct(code) for code in ("<B", "<H", "<I", "<i", "<Q", ">d"))
_STOP = ord(".")


def _text(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(form)))


def _number(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.number(form))


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _remember(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.memo.__setitem__(m.number(form), m.stack[-1])


def _recall(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.memo[m.number(form)])


_OPERATIONS: Mapping[int, Callable[[_Machine], object]] = MappingProxyType(
    {
        ord(code): operation
        for code, operation in {
            "\x80": lambda m: m.number(_U8),  # PROTO
            "\x95": lambda m: m.number(_U64),  # FRAME: only tells how to read ahead
            "(": lambda m: m.marks.append(len(m.stack)),
            "N": _constant(None),
            "\x88": _constant(True),
            "\x89": _constant(False),
            "K": _number(_U8),
            "M": _number(_U16),
            "J": _number(_I32),
            "\x8a": _Machine.long,
            "G": _number(_F64),
            "\x8c": _text(_U8),
            "X": _text(_U32),
            "\x8d": _text(_U64),
            "C": _bytes(_U8),
            "B": _bytes(_U32),
            "\x8e": _bytes(_U64),
            ")": _constant(()),
            "\x85": lambda m: m.tuple_of(1),
            "\x86": lambda m: m.tuple_of(2),
            "\x87": lambda m: m.tuple_of(3),
            "t": lambda m: m.stack.append(tuple(m.above_mark())),
            "]": lambda m: m.stack.append([]),
            "a": lambda m: m.append_items([m.stack.pop()]),
            "e": lambda m: m.append_items(m.above_mark()),
            "}": lambda m: m.stack.append({}),
            "s": lambda m: m.set_items(m.two()),
            "u": lambda m: m.set_items(m.above_mark()),
            "\x94": lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
            "q": _remember(_U8),
            "r": _remember(_U32),
            "h": _recall(_U8),
            "j": _recall(_U32),
            "c": lambda m: m.name(m.line(), m.line()),
            "\x93": lambda m: m.name(*m.two()),
            "R": _Machine.call,
            "\x81": _Machine.call,  # NEWOBJ
            "b": _Machine.build,
            "Q": lambda m: m.stack.append(Reference(m.stack.pop())),
        }.items()
    }
)
