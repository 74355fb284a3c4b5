"""Containers in a state: taken apart into named tensors and values to be saved, put together again as they were.

    {"h": [t, u], 0: (v,), "e": {}}                                        an optimizer's state of one parameter, say
    {"h.0": t, "h.1": u, "0.0": v}                                         leaves, under the names that DCP gives them
    {"h": ["h.0", "h.1"], 0: ("0.0",), "e": {}}                            skeleton: what names alone do not tell

DCP takes apart dicts, and lists that have tensors or dicts in them; everything else is one value to it. So it is here, but
for tuples and deques with tensors in them, which are handed to DCP as lists: as values they could not be sharded.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hsdp.checkpoint.objects import pack, unpack
from hsdp.errors import CheckpointError
from hsdp.format import listing

_DICTS: tuple[type, ...] = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
SEQUENCES: tuple[type, ...] = (list, tuple, collections.deque)
"""What has its items one behind the other, and is made again of them."""

Path = tuple[str | int, ...]
"""Dict keys and list indices on the way to a part, as DCP has them."""

_DEEPEST = 90
"""How deep containers may be nested: what packs them goes a little deeper."""


@dataclass
class Apart:
    """A value that was taken apart.

    Attributes:
        skeleton: its containers, with the names of leaves in their places.
        leaves: tensors and values by name.
        listed: the value with lists in the place of tuples and deques that were taken apart: DCP finds the same leaves.
    """

    skeleton: Any
    leaves: dict[str, Any]
    listed: Any

    @property
    def is_flat(self) -> bool:
        """Whether the names of leaves tell all there is to tell: it is a dict of tensors and values."""
        names = {name: name for name in self.leaves if "." not in name}
        return type(self.skeleton) is dict and self.skeleton == names


def take_apart(value: Any, what: str, tuples_of: type[Tensor] = Tensor) -> Apart:
    """Takes a value apart.

    Args:
        value: a dict, or whatever else.
        what: what it is called in errors.
        tuples_of: tuples and deques are taken apart if there are such tensors in them, and else are values.

    Raises:
        CheckpointError: it has a container that cannot be made again, or two leaves of one name.
    """
    leaves: dict[str, Any] = {}
    skeleton, listed = _taken_apart(value, (), what, tuples_of, leaves)
    return Apart(skeleton, leaves, listed)


def _taken_apart(
    value: Any, path: tuple[str, ...], what: str, tuples_of: type[Tensor], leaves: dict[str, Any]
) -> tuple[Any, Any]:
    """The skeleton of a value at `path`, and the value as it is `listed`; adds what it finds to `leaves`."""
    name = ".".join(path)
    if not _is_taken_apart(value, f"{what}: {name!r}" if path else what, len(path), tuples_of):
        if name in leaves:
            raise CheckpointError(
                f"{what} has two entries that would both be saved as {name!r}: keys like 1 and '1', or 'a.b' and 'b' "
                "in 'a', cannot be told apart there; rename one"
            )
        leaves[name] = value
        return name, value
    if isinstance(value, Mapping):
        both = {
            key: _taken_apart(item, (*path, _key(key, what, path)), what, tuples_of, leaves) for key, item in value.items()
        }
        listed = {key: other for key, (_, other) in both.items()}
        return dict_like(value, {key: one for key, (one, _) in both.items()}), listed
    found = [_taken_apart(item, (*path, str(place)), what, tuples_of, leaves) for place, item in enumerate(value)]
    return sequence_like(value, [one for one, _ in found]), [other for _, other in found]


def put_together(skeleton: Any, leaves: Mapping[str, Any]) -> Any:
    """The value that was taken apart, of other leaves perhaps.

    Raises:
        KeyError: a leaf is missing.
        TypeError: the skeleton is none.
    """
    if isinstance(skeleton, str):
        return leaves[skeleton]
    if type(skeleton) in _DICTS:
        return dict_like(skeleton, {key: put_together(item, leaves) for key, item in skeleton.items()})
    if type(skeleton) in SEQUENCES:
        return sequence_like(skeleton, [put_together(item, leaves) for item in skeleton])
    raise TypeError(f"a {type(skeleton).__name__} is no container of a state")


def names_of(skeleton: Any) -> list[str]:
    """The names of the leaves of a skeleton."""
    if isinstance(skeleton, str):
        return [skeleton]
    items = skeleton.values() if isinstance(skeleton, Mapping) else skeleton
    return [name for item in items for name in names_of(item)]


def leaves_of(value: Any) -> Mapping[str, Any]:
    """The leaves by name; none of what cannot be taken apart."""
    try:
        return take_apart(value, "a value").leaves
    except CheckpointError:
        return {}


def mapped(value: Any, change: Callable[[Any], Any], what: str, depth: int = 0) -> Any:
    """The value with `change` of each leaf, tensors at any depth among them; containers are new ones of the same kind.

    Raises:
        CheckpointError: it has sharded tensors where they are not found: in a container of another kind, or an object.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{what[:200]} is nested more than {_DEEPEST} deep, or within itself")
    if type(value) in _DICTS:
        items = {key: mapped(item, change, f"{what}[{key!r}]", depth + 1) for key, item in value.items()}
        return dict_like(value, items)
    if type(value) in SEQUENCES:
        changed = [mapped(item, change, f"{what}[{place}]", depth + 1) for place, item in enumerate(value)]
        return sequence_like(value, changed)
    if not isinstance(value, Tensor) and hides_shards(value):
        raise CheckpointError(
            f"{what} is a {type(value).__module__}.{type(value).__qualname__} that holds sharded tensors, which are found "
            "in dicts, lists, tuples and deques only, at any depth; keep them in one of these"
        )
    return change(value)


def owned(value: Any) -> Any:
    """A setting with copies of its tensors: a scheduler writes to the one that is a learning rate."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(owned, value)) if type(value) in (list, tuple) else value


def hides_shards(value: Any, objects: bool = True, depth: int = 5, seen: set[int] | None = None) -> bool:
    """Whether there are sharded tensors in a value: in containers of any kind, or in the attributes of `objects`."""
    if isinstance(value, DTensor):
        return True
    seen = set() if seen is None else seen
    if depth == 0 or isinstance(value, (Tensor, str, bytes, int, float, type)) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values()) if objects else []
    return any(hides_shards(one, objects, depth - 1, seen) for one in inside)


def _is_taken_apart(value: Any, what: str, depth: int, tuples_of: type[Tensor]) -> bool:
    kind = type(value)
    if depth > _DEEPEST:
        raise CheckpointError(f"{what[:200]} is nested more than {_DEEPEST} deep, or within itself")
    if (isinstance(value, Mapping) and kind not in _DICTS) or (isinstance(value, list) and kind is not list):
        raise CheckpointError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, which could not be made again at a load: keep a dict, an "
            "OrderedDict, a defaultdict or a list"
        )
    if isinstance(value, Mapping):
        return True
    if kind is list:
        return _has(value, lambda one: isinstance(one, (Tensor, Mapping)), lists_only=True) or _has(
            value, lambda one: isinstance(one, tuples_of)
        )
    return kind in SEQUENCES and _has(value, lambda one: isinstance(one, tuples_of))


def _has(values: Any, wanted: Callable[[Any], bool], lists_only: bool = False, depth: int = 0) -> bool:
    """Whether there is a wanted one among values, and in lists (and, without `lists_only`, other containers) in them."""
    kinds: tuple[type, ...] = (list,) if lists_only else (*SEQUENCES, *_DICTS)
    return depth <= _DEEPEST and any(
        wanted(one)
        or (type(one) in kinds and _has(one.values() if isinstance(one, dict) else one, wanted, lists_only, depth + 1))
        for one in values
    )


def _key(key: Any, what: str, path: tuple[str, ...]) -> str:
    if isinstance(key, Tensor):
        raise CheckpointError(f"{what}: a key of {'.'.join(path)!r} is a tensor, which would be another one after a load")
    return str(key)


def dict_like(like: Any, items: dict[Any, Any]) -> Any:
    """A dict of the kind of another."""
    if type(like) is collections.defaultdict:
        return collections.defaultdict(like.default_factory, items)
    return items if type(like) is dict else type(like)(items)


def sequence_like(like: Any, items: list[Any]) -> Any:
    """A list, tuple or deque, as another is one."""
    if type(like) is collections.deque:
        return collections.deque(items, like.maxlen)
    return items if type(like) is list else type(like)(items)


# -- in a checkpoint -----------------------------------------------------------------------------------------------


def listed(state: dict[str, Any]) -> dict[str, bytes]:
    """Makes a checkpoint's state (see `contents.py`) one that DCP takes apart whole, in place.

    Returns:
        Packed skeletons by key: of each extra state of a module, and of other values in a state dict; of a parameter's
        state, and of a group's settings, if names alone do not tell how they are nested.

    Raises:
        CheckpointError: something in it could not be made again.
    """
    structures: dict[str, bytes] = {}

    def take(key: str, value: Any, what: str, tuples_of: type[Tensor]) -> Any:
        apart = take_apart(value, what, tuples_of)
        if not apart.is_flat or _is_models(key):  # of an empty one nothing else would tell
            structures[key] = pack(apart.skeleton, what)
        return apart.listed

    model = state["model"]
    for name in [name for name, value in model.items() if not isinstance(value, Tensor)]:
        model[name] = take(f"model.{name}", model[name], f"{name!r} of the model", DTensor)
    optimizer = state.get("optimizer", {"state": {}, "param_groups": []})
    for name, entries in optimizer["state"].items():
        optimizer["state"][name] = take(f"optimizer.state.{name}", entries, f"the optimizer's state of {name!r}", Tensor)
    for index, group in enumerate(optimizer["param_groups"]):
        settings = {key: value for key, value in group.items() if key != "params"}
        what = f"group {index} of the optimizer"
        group.update(take(f"optimizer.param_groups.{index}", settings, what, DTensor))
    return structures


def agreed(held: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """The skeletons of all ranks, of an extra state that of the lowest, as with all that is no shard.

    Raises:
        CheckpointError: an optimizer's state is nested otherwise on one rank than on another.
    """
    found: dict[str, bytes] = {}
    for structures in held:
        for key, packed in structures.items():
            first = found.setdefault(key, packed)
            if first != packed and not _is_models(key) and unpack(first) != unpack(packed):
                raise CheckpointError(
                    f"what is saved as {key!r} has other containers, or of other lengths, on one rank than on another; "
                    "keep the same on all ranks"
                )
    return found


def _is_models(key: str) -> bool:
    """Whether a structure is of an extra state of the model's, or of another value in its state dict."""
    return key.startswith("model.")


def skeleton_of(packed: bytes, leaves: Mapping[str, Any], key: str) -> Any:
    """The skeleton that was saved for a key.

    Raises:
        CheckpointError: it is damaged, or of other leaves.
    """
    skeleton = unpack(packed)
    try:
        put_together(skeleton, leaves)
        missing = sorted(leaves.keys() - set(names_of(skeleton)))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the structure of {key!r} is damaged: {type(error).__name__}: {error}") from None
    if missing:
        raise CheckpointError(f"the structure of {key!r} does not have {listing(missing)}")
    return skeleton


def skeleton_by_paths(paths: Mapping[str, Path]) -> Any:
    """The skeleton of leaves whose paths DCP tells, which end with their names; None if some do not, or none is nested."""
    parts: list[tuple[Path, str]] = []
    for name, path in paths.items():
        below = [path[start:] for start in range(len(path)) if ".".join(map(str, path[start:])) == name]
        if not below:
            return None
        parts.append((below[0], name))
    return assembled(parts) if any([len(path) > 1 for path, _ in parts]) else None


def assembled(parts: Sequence[tuple[Path, Any]]) -> Any:
    """The value of which DCP made these parts, as far as their paths tell: dict keys are strings, empty containers gone.

    Raises:
        CheckpointError: two parts have one place.
    """
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    children: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in parts:
        if not path:
            raise CheckpointError("the checkpoint has a part of a module's extra state, or of the optimizer's, twice")
        children.setdefault(path[0], []).append((path[1:], value))
    if all(isinstance(key, int) for key in children):
        return [assembled(children[key]) for key in sorted(children)]
    return {key: assembled(below) for key, below in children.items()}
