"""Arguments of a step: the leaves of a call, whatever holds them.

torch's pytrees know lists, tuples and dictionaries. What a library makes of a batch (a dataclass, a
UserDict, a SimpleNamespace, a class of one's own) is taken apart as well, where it has tensors and
beside them nothing but data, and is made anew of what stands for its leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from partita.layout import Fix

from .errors import not_captured

__all__ = ["flatten_call", "is_taken_apart", "refuse_closed"]

_NUMBERS = (int, float, bool, str, bytes, complex, type(None))
_DATA = (*_NUMBERS, torch.Tensor, torch.dtype, torch.device, torch.Size, range, slice)
_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)  # what stands for numbers
_LIVE = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, type)
_LEAVES = frozenset((*_NUMBERS, torch.Tensor))
_BASES = (OrderedDict, dict, list, SimpleNamespace, object)
"""What an object is made as, that has no `__new__` of its own."""


def flatten_call(
    call: Any, stays: Callable[[Any], bool] | None = None
) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of arguments or results, and what `pytree.tree_unflatten` makes them again by.

    Args:
        stays: of which objects none is made anew.
    """
    leaves, structure = pytree.tree_flatten(call)
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, structure
    opened = [leaf if stays and stays(leaf) else _open_object(leaf) for leaf in leaves]
    if all(now is before for now, before in zip(opened, leaves, strict=True)):
        return leaves, structure
    return pytree.tree_flatten(pytree.tree_unflatten(opened, structure))


def is_taken_apart(value: Any) -> bool:
    """Is it an object of which `flatten_call` gives what it holds?"""
    return _open_object(value) is not value


def refuse_closed(name: str, leaf: Any) -> None:
    """Raise if a leaf holds tensors that a captured step would not know for its inputs."""
    if isinstance(leaf, (*_DATA, *_LIVE)):
        return
    inside = list(leaf) if isinstance(leaf, Set) else [_attributes(leaf)]
    inside += leaf.values() if isinstance(leaf, Mapping) else ()
    found = pytree.tree_leaves(inside)
    if any(isinstance(v, torch.Tensor) for v in found) and not _has_live(found):
        raise not_captured(
            f"{name} is a {type(leaf).__name__} that holds tensors",
            "the inputs of a graph are the tensors in tuples, lists, dictionaries, and objects of "
            "a class of Python's that have tensors, numbers and text alone",
            Fix("step(dict(batch))", "or a list of its tensors, or a dataclass"),
        )


@dataclass(frozen=True)
class _Parts:
    """An object taken apart: what it has as a dictionary or list, and its attributes by name."""

    kind: type
    items: Any
    attributes: dict[str, Any]


def _open_object(value: Any, within: tuple[int, ...] = ()) -> Any:
    """`value`, or its parts where it is an object of data with tensors.

    Args:
        within: the ids of the objects that hold it: one that holds itself stays closed.
    """
    if isinstance(value, (*_DATA, *_LIVE)) or id(value) in within:
        return value
    base = _base_of(type(value))
    if base is None:
        return value
    items: Any = ()
    if issubclass(base, dict):
        items = dict(base.items(value))
    elif base is list:
        items = list(base.__iter__(value))
    inside = items, _attributes(value)
    if _has_live(pytree.tree_leaves(inside)):
        return value
    within = (*within, id(value))
    items, attributes = pytree.tree_map(lambda v: _open_object(v, within), inside)
    found = pytree.tree_leaves((items, attributes))
    has_tensors = any(isinstance(v, torch.Tensor) for v in found)
    if has_tensors and all(isinstance(v, (*_DATA, *_SYMBOLIC)) for v in found):
        return _Parts(type(value), items, attributes)
    return value


def _base_of(kind: type) -> type | None:
    """As what an object of `kind` is made; None where Python cannot make one without its class."""
    if kind.__module__ == "builtins":
        return None
    base = next(b for b in _BASES if issubclass(kind, b))
    return base if kind.__new__ is base.__new__ else None


def _attributes(value: Any) -> dict[str, Any]:
    slots = (s for k in type(value).__mro__ for s in _names(k.__dict__.get("__slots__", ())))
    found = {s: getattr(value, s) for s in slots if s[:2] != "__" and hasattr(value, s)}
    return found | getattr(value, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _has_live(values: list[Any]) -> bool:
    return any(isinstance(v, _LIVE) or callable(v) for v in values)


def _make_object(children: Any, kind: type) -> Any:
    items, attributes = children
    base = _base_of(kind)
    assert base is not None
    made = base.__new__(kind)
    if issubclass(base, dict):
        for key, v in items.items():
            base.__setitem__(made, key, v)
    elif base is list:
        base.extend(made, items)
    for name, v in attributes.items():
        object.__setattr__(made, name, v)
    return made


pytree.register_pytree_node(
    _Parts, lambda parts: ([parts.items, parts.attributes], parts.kind), _make_object
)
