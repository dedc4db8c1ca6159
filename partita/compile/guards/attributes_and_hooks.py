"""Attributes and hooks that a program has set on tensors, guarded for all tensors at once.

Each parameter of a step has places for both (`places_of_attributes_and_hooks`), which guards
compare and report like others. They hardly ever change, so `AttributesAndHooks` first compares the
dictionaries that torch keeps, of all tensors together, in a few passes that run in C; only where
one of these has changed are the places compared one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.tensor.tensor_state import OURS

from ..capture.fakes import users_hooks
from .places import Place

__all__ = [
    "OWN_ATTRIBUTES",
    "AttributesAndHooks",
    "is_attributes_or_hooks",
    "places_of_attributes_and_hooks",
    "user_attributes_of",
    "user_hooks_of",
]

# Attributes that partita sets, and that torch sets on a parameter.
OWN_ATTRIBUTES = OURS | {"_is_param"}

_ATTRIBUTES, _HOOKS = "attributes", "hooks"

# Private torch: the dictionaries of a tensor's hooks, which no public function returns.
_base: Any = torch._C.TensorBase
_hooks_of_backward = _base._backward_hooks.__get__
_hooks_of_gradient = _base._post_accumulate_grad_hooks.__get__


def user_attributes_of(t: torch.Tensor) -> tuple[str, ...]:
    """The names of the attributes that a program has set on a tensor, as `_no_weight_decay`."""
    return _names_of_user(tuple(t.__dict__))


@functools.lru_cache(maxsize=4096)  # most tensors have the attributes of others
def _names_of_user(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([n for n in names if n not in OWN_ATTRIBUTES and not n.startswith("_dynamo")])


def user_hooks_of(t: torch.Tensor) -> tuple[Any, ...]:
    """The hooks that the user has registered on a tensor, and on its gradient's accumulation."""
    with Local():
        one, other = _hooks_of_backward(t), _hooks_of_gradient(t)
    if not one and not other:
        return ()
    return (*users_hooks(one), *users_hooks(other))


def places_of_attributes_and_hooks(name: str, t: torch.Tensor) -> Iterator[Place]:
    """The places of the attributes and of the hooks of the tensor that is called `name`."""
    attributes = functools.partial(user_attributes_of, t)
    yield Place(f"the attributes of {name}", t, _ATTRIBUTES, attributes)
    if t.is_leaf and t.requires_grad:
        yield Place(f"the hooks of {name}", t, _HOOKS, functools.partial(user_hooks_of, t))


def is_attributes_or_hooks(place: Place) -> bool:
    """Is it one of the places of `places_of_attributes_and_hooks`?"""
    return isinstance(place.home, torch.Tensor) and place.key in (_ATTRIBUTES, _HOOKS)


class AttributesAndHooks:
    """What torch's dictionaries hold now for some places of attributes and hooks.

    If they hold something else later, the places may have changed: each is then compared itself.
    """

    def __init__(self, places: Sequence[Place]):
        self._attributed = [place.home for place in places if place.key == _ATTRIBUTES]
        self._hooked = [place.home for place in places if place.key == _HOOKS]
        held = [*map(vars, self._attributed)]
        self._counts = [*map(len, held)]
        # Nobody deletes our own attributes, so where all are ours an equal number is the same ones.
        self._others = [t for t in self._attributed if not OWN_ATTRIBUTES.issuperset(vars(t))]
        self._names = [*chain.from_iterable(map(vars, self._others))]
        self._tables = self._tables_now()
        self._sizes, self._hooks = _hooks_in_tables(self._tables)

    def unchanged(self) -> bool:
        """Do torch's dictionaries hold the same?"""
        if [*map(len, map(vars, self._attributed))] != self._counts:
            return False
        if [*chain.from_iterable(map(vars, self._others))] != self._names:
            return False
        tables = self._tables_now()
        if not all(map(is_, tables, self._tables)):
            return False
        sizes, hooks = _hooks_in_tables(tables)
        return sizes == self._sizes and all(map(is_, hooks, self._hooks))

    def _tables_now(self) -> list[Any]:
        with Local():
            return [*map(_hooks_of_backward, self._hooked), *map(_hooks_of_gradient, self._hooked)]


def _hooks_in_tables(tables: Iterable[Any]) -> tuple[list[int], list[Any]]:
    """The number of hooks in each table, and the hooks."""
    there = [table for table in tables if table is not None]
    return [*map(len, there)], [*chain.from_iterable([table.values() for table in there])]
