"""State dicts of objects in the form that a checkpoint stores: nested dicts and lists.

A name in a checkpoint is a path of strings and indices. Such a path cannot express every container:
a deque, a tuple of tensors, an empty dict, a dict with numbers as keys. These are packed into a
dict of their items, with the container's kind under `KIND`.

Some entries are created only when an object runs, such as an optimizer's state.
`grow_from_checkpoint` adds them to a new object.
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
    """The description of one entry in the metadata of a checkpoint.

    Attributes:
        path: the keys that lead to the entry.
        size, dtype: the tensor's shape and dtype; None if the entry is not a tensor.
    """

    path: KeyPath = ()
    size: tuple[int, ...] | None = None
    dtype: Any = None

    @classmethod
    def of(cls, value: Any, path: KeyPath = ()) -> Stored:
        """Returns the metadata that a checkpoint would have for an entry `value` at `path`."""
        if isinstance(value, torch.Tensor):
            return cls(path, tuple(value.shape), value.dtype)
        return cls(path)

    def __str__(self) -> str:
        if self.size is None:
            return "no tensor"
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.size)}"


# -- containers ------------------------------------------------------------------------------------


def pack_containers(value: Any) -> Any:
    """Returns a nested value in a form that a checkpoint can store, without copying tensors.

    That form has dicts with string keys, lists, tensors, and values. `unpack_containers` is the
    inverse.

    Raises:
        ValueError: a key of a dict is neither a number nor a string, or two keys are equal as
            strings.
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
    """Returns the value that `pack_containers` packed, in new lists and dicts.

    Args:
        like: the value that the object has now. A checkpoint stores no classes, so a subclass of
            dict, such as Counter, is taken from it.
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
    """True if a checkpoint stores `value` as one entry, not as several below it.

    A list is one entry if it contains no tensor, dict or stateful object.
    """
    if isinstance(value, list):
        return all(map(is_one_value, value))
    return not (isinstance(value, (torch.Tensor, Mapping)) or is_stateful(value))


def _is_packed(value: Any) -> bool:
    """True if `pack_containers` returns `value` itself."""
    if isinstance(value, list) or type(value) is tuple:
        return all(map(_is_packed, value))
    return is_one_value(value) and not isinstance(value, deque)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (Mapping, list)) or is_one_value(value)


def is_stateful(value: Any) -> bool:
    """True if `value` is an object with `state_dict` and `load_state_dict`."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


# -- entries that a new object lacks ---------------------------------------------------------------

Allocate = Callable[[KeyPath, Stored], "torch.Tensor | None"]
"""`(path within the object, metadata)`: allocates a tensor for an entry of the checkpoint."""


def find_stored_tree(stored: Mapping[str, Stored] | None, path: KeyPath) -> Any:
    """Returns the part of a checkpoint below `path`, as nested dicts and lists of `Stored` objects.

    Returns {} if there are no entries.

    Args:
        stored: the metadata of all entries, by name.
        path: keys that lead to a part of the state.
    """
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
    """Adds to an object's state dict the entries that only the checkpoint has.

    An example is the state of an optimizer that has not stepped yet.

    Args:
        live: the packed state dict of the object.
        there: the entries of the checkpoint (`find_stored_tree`).
        allocate: a function that makes the tensors that `live` lacks.
        replace: True drops entries that only `live` has, and allocates tensors of another size or
            dtype again. False keeps them.
        path: the keys that lead to `live` in the state.
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
    old = live if isinstance(live, Mapping) and set(live) != {KIND} else {}  # only KIND: empty
    grown = {k: grow(old.get(k), one, k) for k, one in there.items()}
    return grown if replace else {**old, **grown}
