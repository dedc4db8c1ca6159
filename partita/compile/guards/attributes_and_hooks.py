"""Marks of tensors: attributes that a program has given one, and hooks that it has hung on one.

Each parameter of a step has both, and they hardly ever change. So they are named one by one, as
places that are compared and told of like others, but looked at for all tensors at once: a few
passes that run in C, over what torch keeps, whoever has put it there.
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

__all__ = ["OF_TENSORS", "Marks", "attributes_of", "hooks_of", "is_mark", "marks_of"]

# Partita's, and those of a parameter that torch gives it.
OF_TENSORS = OURS | {"_is_param"}

_ATTRIBUTES, _HOOKS = "attributes", "hooks"

# Private torch: the dictionaries of a tensor's hooks, which nothing public tells.
_base: Any = torch._C.TensorBase
_hooks_of_backward = _base._backward_hooks.__get__
_hooks_of_gradient = _base._post_accumulate_grad_hooks.__get__


def attributes_of(t: torch.Tensor) -> tuple[str, ...]:
    """The names of the attributes that a program has given a tensor, `_no_weight_decay` too."""
    return tuple([n for n in t.__dict__ if n not in OF_TENSORS and not n.startswith("_dynamo")])


def hooks_of(t: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's own hooks and those of its gradient, as the user has hung them there."""
    with Local():
        one, other = _hooks_of_backward(t), _hooks_of_gradient(t)
    if not one and not other:
        return ()
    return (*users_hooks(one), *users_hooks(other))


def marks_of(name: str, t: torch.Tensor) -> Iterator[Place]:
    """The places of the marks of a tensor that is called `name`."""
    attributes = functools.partial(attributes_of, t)
    yield Place(f"the attributes of {name}", t, _ATTRIBUTES, attributes)
    if t.is_leaf and t.requires_grad:
        yield Place(f"the hooks of {name}", t, _HOOKS, functools.partial(hooks_of, t))


def is_mark(place: Place) -> bool:
    """Is it one of `marks_of`?"""
    return isinstance(place.home, torch.Tensor) and place.key in (_ATTRIBUTES, _HOOKS)


class Marks:
    """What torch keeps now of the marks at some places; another answer later says no more than
    that it may be time to look at each."""

    def __init__(self, places: Sequence[Place]):
        self._attributed = [place.home for place in places if place.key == _ATTRIBUTES]
        self._hooked = [place.home for place in places if place.key == _HOOKS]
        held = [*map(vars, self._attributed)]
        self._counts = [*map(len, held)]
        # Nobody takes away what we have given a tensor: as many are the same where all are ours.
        self._others = [t for t in self._attributed if not OF_TENSORS.issuperset(vars(t))]
        self._names = [*chain.from_iterable(map(vars, self._others))]
        self._tables = self._tables_now()
        self._sizes, self._hooks = _hooks_in_tables(self._tables)

    def same(self) -> bool:
        """Does torch keep the same?"""
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
    """How many hooks are in each table, and these."""
    there = [table for table in tables if table is not None]
    return [*map(len, there)], [*chain.from_iterable([table.values() for table in there])]
