"""Keys of values: how arguments that are no tensors stand in a call's signature.

A key is a hashable tuple, equal for values of which a program reads the same: equal contents, with
the same objects shared in the same places. Containers and dataclasses are keyed by what they hold,
other objects by identity.

    {"a": 1.0}    (dict, (str, "a"), (float, b"...1.0"))
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from .c_objects import has_raw_content, read_raw_content
from .expected import (
    BY_EQUALITY,
    METHODS,
    MISSING,
    compares_by_value,
    ends_of,
    is_container,
    items_of,
)

__all__ = ["ByIdentity", "argument_key", "content_key", "text_of"]


_MET = "met before"


class ByIdentity:
    """An object as a part of a key: equal only to a `ByIdentity` of the same object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def argument_key(value: Any) -> Any:
    """The key of an argument that is no tensor; of a float, a graph input, its type."""
    if isinstance(value, float):  # what the step asks of it is in the program's conditions
        return (type(value),)
    return content_key(value)


def content_key(value: Any, known: dict[int, int] | None = None) -> Any:
    """The key of a value that is no graph input.

    Args:
        known: by id, the number of each container that was met before.
    """
    kind = type(value)
    if kind is float:
        return (kind, "nan" if value != value else struct.pack("d", value))
    if kind is complex:
        return (kind, content_key(value.real), content_key(value.imag))
    if kind is slice:
        return (kind, *map(content_key, ends_of(value)))
    if kind in BY_EQUALITY:
        return (kind, value)
    if has_raw_content(value):
        return (kind, read_raw_content(value))
    inside = _values_in(value)
    if inside is not None:
        known = {} if known is None else known
        if id(value) in known:
            return (_MET, known[id(value)])
        known[id(value)] = len(known)
        return (kind, *[content_key(v, known) for v in inside])
    if compares_by_value(value):
        return (kind, repr(value))
    if isinstance(value, METHODS) and value.__self__ is not None:
        return (kind, value.__name__, ByIdentity(value.__self__))
    return (kind, ByIdentity(value))


def _values_in(value: Any) -> list[Any] | None:
    """What a dataclass or a container holds, keys first; None for other values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name, MISSING) for f in dataclasses.fields(value)]
    if is_container(value):
        keys, values = items_of(value)
        return [*(keys or ()), *values]
    return None


def text_of(value: Any) -> str:
    """The text of an argument, for messages."""
    if isinstance(value, str):
        return repr(value)
    if _values_in(value) is None:
        return str(value)
    # Python's text of objects that refer to one another grows with the number of paths.
    key = content_key(value)
    return str(key) if _is_met(key) else str(value)


def _is_met(key: Any) -> bool:
    return isinstance(key, tuple) and (key[:1] == (_MET,) or any(map(_is_met, key[1:])))
