"""Nested tensors: the tensors in tuples, lists, dicts and dataclasses that modules take and
return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value: through tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of `value` with each tensor passed through `change`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)((k, map_tensors(change, v)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        new = [map_tensors(change, v) for v in value]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        new_values = {n: map_tensors(change, getattr(value, n)) for n in names}
        return dataclasses.replace(value, **new_values)
    return value
