"""Nested tensors: the tensors in tuples, lists, dicts and dataclasses that modules take and
return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["find_instances", "map_tensors", "replace_instances", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value: through tuples, lists, dicts and dataclasses."""
    return find_instances(value, torch.Tensor)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of `value` with each tensor passed through `change`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        new = copy.copy(value)  # what makes a dictionary of its class may ask for more than items
        for k, v in value.items():
            new[k] = map_tensors(change, v)
        return new
    if isinstance(value, (tuple, list)):
        each = [map_tensors(change, v) for v in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        new_values = {n: map_tensors(change, getattr(value, n)) for n in names}
        return dataclasses.replace(value, **new_values)
    return value


def find_instances(value: Any, kind: type) -> Iterator[Any]:
    """The instances of `kind` in tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from find_instances(v, kind)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from find_instances(v, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from find_instances(getattr(value, field.name), kind)


def replace_instances(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of `value` in which each instance of `kind` is changed, in order.

    As `map_tensors`, but for what stands for tensors, too: classes are not called, so that what
    they check of a tensor need not hold.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        new = copy.copy(value)
        for k, v in value.items():
            new[k] = replace_instances(v, kind, change)
        return new
    if isinstance(value, (tuple, list)):
        each = [replace_instances(v, kind, change) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*each)
        return (
            type(value)(each) if type(value) in (tuple, list) else _find_container_type(value)(each)
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)  # type: ignore[arg-type]
        for field in dataclasses.fields(value):
            v = replace_instances(getattr(value, field.name), kind, change)
            object.__setattr__(new, field.name, v)
        return new
    return value


def _find_container_type(value: Any) -> type:
    """A plain type in place of torch.Size, torch.return_types and the like, which torch alone
    makes."""
    return list if isinstance(value, list) else tuple
