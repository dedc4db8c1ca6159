"""Containers that a captured step reaches: each is taken whole, with all that it holds."""

from __future__ import annotations

import collections
import warnings
from typing import TYPE_CHECKING, Any

import torch

from . import places
from .expected import brief, holds_no_more, items_of
from .objects import PLAIN, is_namespace
from .places import Place

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["has_tensor_keys", "reach_container"]

_HUGE = 100_000  # entries of a container; into those of a larger one it is not looked


def has_tensor_keys(value: Any) -> bool:
    """Is it a set of tensors, or a dictionary by tensors?"""
    if not isinstance(value, (dict, set, frozenset)) or len(value) > _HUGE:
        return False
    return any(isinstance(key, torch.Tensor) for key in value)


def reach_container(record: StateReader, value: Any, name: str) -> None:
    record.snapshots.container(value, name)
    if hasattr(type(value), "__len__") and len(value) > _HUGE:
        _take_entries(record, value, name)
        return
    if isinstance(value, collections.defaultdict):
        _read_factory(record, value, name)
    keys, values = items_of(value)
    if isinstance(value, (set, frozenset)):
        keys, values = None, list(value)
    for key in keys or ():
        if type(key) not in PLAIN:
            record.reach(key, f"a key of {name}")
    for i, v in enumerate(values):
        key = keys[i] if keys is not None else i
        if type(v) is float and isinstance(value, (dict, list)):
            record.offer(places.item(f"{name}[{key!r}]", value, key), v, item=True)
        elif type(v) not in PLAIN:
            record.reach(v, f"{name}.{key}" if is_namespace(value) else f"{name}[{key!r}]")
    if hasattr(type(value), "__dictoffset__") and type(value).__module__ not in (
        "builtins",
        "collections",
        "types",
        "functools",
    ):
        record.reach_object(value, name)


def _read_factory(record: StateReader, value: collections.defaultdict[Any, Any], name: str) -> None:
    def set_factory(factory: Any) -> None:
        value.default_factory = factory

    called, key = f"{name}.default_factory", ("default_factory",)
    place = Place(called, value, key, lambda: value.default_factory, set_factory)
    record.read_at(place, value.default_factory)


def _take_entries(record: StateReader, value: Any, name: str) -> None:
    """Take a huge container by its entries, and say so where these may change themselves."""
    record.huge[id(value)] = (name, value)
    entries = value.values() if hasattr(value, "values") else value
    inner = next((v for v in entries if not holds_no_more(v)), None)
    if inner is not None and not record.by_name:
        warnings.warn(
            f"{name} has {len(value):,} entries: a compiled step sees when one is replaced, "
            f"not when something within one changes ({brief(inner)}). Give what the step needs "
            "of it as an argument",
            stacklevel=2,
        )
