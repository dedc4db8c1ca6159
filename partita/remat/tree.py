"""Nested values: what is in a value, and what is the same value with that changed?"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["parts", "rebuilt"]


def parts(value: Any, kind: type) -> Iterator[Any]:
    """The instances of `kind` in tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from parts(v, kind)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from parts(v, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name), kind)


def rebuilt(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of `value` in which each instance of `kind` is changed, in the order of `parts`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        new = copy.copy(value)
        for k, v in value.items():
            new[k] = rebuilt(v, kind, change)
        return new
    if isinstance(value, (tuple, list)):
        each = [rebuilt(v, kind, change) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*each)
        return (
            type(value)(each) if type(value) in (tuple, list) else _find_container_type(value)(each)
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)  # type: ignore[arg-type]
        for field in dataclasses.fields(value):
            # Not `replace`: what a dataclass checks of a tensor need not hold of what stands for it
            v = rebuilt(getattr(value, field.name), kind, change)
            object.__setattr__(new, field.name, v)
        return new
    return value


def _find_container_type(value: Any) -> type:
    """torch.Size, torch.return_types and the like are made by nobody else."""
    return list if isinstance(value, list) else tuple
