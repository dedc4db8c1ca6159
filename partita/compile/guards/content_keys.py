"""Keys of contents: what arguments that are no tensors are in a call's signature.

Keys are equal where a program reads the same of both: the same contents, and the same object in the
same places.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from .c_objects import content_of, is_held_in_c
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
    """An object as a part of a signature: equal to itself alone."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def argument_key(value: Any) -> Any:
    """What a graph is made for, of an argument that is no tensor: equal for alike ones."""
    if isinstance(value, float):  # an input of the graph: conditions see to it
        return (type(value),)
    return content_key(value)


def content_key(value: Any, known: dict[int, int] | None = None) -> Any:
    """What a value that is no input is, to be compared by what a program can read of it.

    Args:
        known: the containers that were met before, by id, and how many there were before each.
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
    if is_held_in_c(value):
        return (kind, content_of(value))
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
    """What a dataclass or a container holds, keys first; None of anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name, MISSING) for f in dataclasses.fields(value)]
    if is_container(value):
        keys, values = items_of(value)
        return [*(keys or ()), *values]
    return None


def text_of(value: Any) -> str:
    """What a person would write for an argument."""
    if isinstance(value, str):
        return repr(value)
    if _values_in(value) is None:
        return str(value)
    # Where objects know one another, what Python writes names each once a path.
    key = content_key(value)
    return str(key) if _is_met(key) else str(value)


def _is_met(key: Any) -> bool:
    return isinstance(key, tuple) and (key[:1] == (_MET,) or any(map(_is_met, key[1:])))
