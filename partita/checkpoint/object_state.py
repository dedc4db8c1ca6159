"""State dicts of objects as trees of dicts and lists, and their growth from a checkpoint.

A name in a checkpoint is a path of text and indices. A container that such a path cannot express (a
deque, a tuple of tensors, a dict whose keys are numbers or that is empty) is packed into a dict of
its items, with its kind under `KIND`. What an object makes only as it runs, such as an optimizer's
state, is absent from a fresh object: `grow_from_checkpoint` adds it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from partita.comm import message

KeyPath = tuple[str | int, ...]

KIND = "__kind__"
"""The key of a packed container's kind, among its items."""


@message
@dataclass(frozen=True)
class Stored:
    """What a checkpoint has by some name, without its values.

    Attributes:
        path: the keys on the way to it.
        size, dtype: of a tensor; None of a value.
    """

    path: KeyPath = ()
    size: tuple[int, ...] | None = None
    dtype: Any = None

    @classmethod
    def of(cls, value: Any, path: KeyPath = ()) -> Stored:
        """How `value` would be stored."""
        if isinstance(value, torch.Tensor):
            return cls(path, tuple(value.shape), value.dtype)
        return cls(path)

    def __str__(self) -> str:
        if self.size is None:
            return "no tensor"
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.size)}"


# -- containers ------------------------------------------------------------------------------------


def pack_containers(value: Any) -> Any:
    """`value` as dicts with text as keys, lists, and leaves, which are the objects that they were.

    Raises:
        ValueError: a dict with a key that is no number or text, or with two that read alike.
    """
    if isinstance(value, Mapping):
        packed = {str(k): pack_containers(v) for k, v in value.items()}
        if value and all(isinstance(k, str) for k in value):
            return packed
        keys = list(value)
        if len(packed) < len(keys) or KIND in packed or not all(map(_is_plain_key, keys)):
            raise ValueError(f"a dict with the keys {keys} cannot be saved: use text or numbers")
        return {KIND: ["dict", *keys], **packed}
    if isinstance(value, deque):
        return {KIND: ["deque", value.maxlen], **_pack_items(value)}
    if type(value) is tuple and not _is_packed(value):
        return {KIND: ["tuple"], **_pack_items(value)}
    if isinstance(value, list) and not _is_packed(value):
        return [pack_containers(v) for v in value]
    return value


def _pack_items(items: Any) -> dict[str, Any]:
    return {str(i): pack_containers(v) for i, v in enumerate(items)}


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_plain_key, key))
    return isinstance(key, (str, int, float, bool, type(None)))


def unpack_containers(packed: Any, like: Any = None) -> Any:
    """What `pack_containers` packed; a list or dict is a new one.

    Args:
        like: what an object has at this place. A dict of another class, such as a Counter, is
            copied from it, since a checkpoint names no classes.
    """
    if isinstance(packed, list):
        likes = like[: len(packed)] if isinstance(like, list) else []
        return [unpack_containers(a, b) for a, b in zip_longest(packed, likes)]
    if not isinstance(packed, Mapping):
        return packed
    kind, *rest = packed.get(KIND, ["dict", *packed])
    if kind == "dict":
        old: Any = like if isinstance(like, dict) else {}
        items = {k: unpack_containers(packed[str(k)], old.get(k)) for k in rest}
        if type(old) is dict:
            return items
        made = copy.copy(old)
        made.clear()
        made.update(items)
        return made
    listed = [unpack_containers(packed[str(i)]) for i in range(len(packed) - 1)]
    return deque(listed, maxlen=rest[0]) if kind == "deque" else tuple(listed)


def is_one_value(value: Any) -> bool:
    """True of what a state holds as one value; of a list, if it has no tensor, dict or object."""
    if isinstance(value, list):
        return all(map(is_one_value, value))
    return not (isinstance(value, (torch.Tensor, Mapping)) or is_stateful(value))


def _is_packed(value: Any) -> bool:
    """True of what `pack_containers` leaves as it is."""
    if isinstance(value, list) or type(value) is tuple:
        return all(map(_is_packed, value))
    return is_one_value(value) and not isinstance(value, deque)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (Mapping, list)) or is_one_value(value)


def is_stateful(value: Any) -> bool:
    """True of an object with `state_dict` and `load_state_dict`."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


# -- what a fresh object lacks ---------------------------------------------------------------------

Allocate = Callable[[KeyPath, Stored], "torch.Tensor | None"]
"""Makes memory for what the checkpoint has by a path within the object."""


def find_stored_tree(stored: Mapping[str, Stored] | None, path: KeyPath) -> Any:
    """What the checkpoint has below `path`, as dicts and lists of `Stored`; {} if nothing."""
    root: dict[str | int, Any] = {}
    for one in (stored or {}).values():
        if len(one.path) > len(path) and one.path[: len(path)] == path:
            *way, last = one.path[len(path) :]
            node = root
            for key in way:
                node = node.setdefault(key, {})
            node[last] = one
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(k, int) for k in node):
        return [_with_lists(node[k]) for k in sorted(node)]
    return {k: _with_lists(v) for k, v in node.items()}


def grow_from_checkpoint(
    live: Any, there: Any, allocate: Allocate, replace: bool = False, path: KeyPath = ()
) -> Any:
    """A packed state dict with all that the checkpoint has; tensors that fit are those of `live`.

    Args:
        live: the packed state dict as it is.
        there: what the checkpoint has (`find_stored_tree`).
        replace: drop what only `live` has, and what has another size or dtype.
    """

    def grow(part: Any, one: Any, key: str | int) -> Any:
        return grow_from_checkpoint(part, one, allocate, replace, (*path, key))

    if is_stateful(live):
        return live
    if isinstance(there, Stored):
        fits = not replace or (_is_leaf(live) and str(Stored.of(live)) == str(there))
        return live if live is not None and fits else allocate(path, there)
    if isinstance(there, list):
        items = live if isinstance(live, list) else []
        pairs = list(zip_longest(items, there))[: len(there) if replace else None]
        return [
            live_one if one is None else grow(live_one, one, i)
            for i, (live_one, one) in enumerate(pairs)
        ]
    old = live if isinstance(live, Mapping) and set(live) != {KIND} else {}  # empty: of any kind
    grown = {k: grow(old.get(k), one, k) for k, one in there.items()}
    return grown if replace else {**old, **grown}
