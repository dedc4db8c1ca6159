"""Arguments of a step: the leaves of a call, in any containers and objects; lengths of batches.

torch's pytrees support lists, tuples and dictionaries. Other objects that hold a batch (a
dataclass, a UserDict, a SimpleNamespace, a user's class) are flattened as well, if they have only
tensors and plain data. `unflatten_call` makes new objects from other leaves.

`pad_to_bucket` pads batches of many lengths to a few lengths, so that few programs are captured.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from partita.graph.errors import not_captured
from partita.layout import Fix
from partita.tensor.dtensor import DTensor

_NUMBERS = (int, float, bool, str, bytes, complex, type(None))
_DATA = (*_NUMBERS, torch.Tensor, torch.dtype, torch.device, torch.Size, range, slice)
_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)  # replacements of numbers
_LIVE = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, type)
_SIMPLE = frozenset(_NUMBERS)
LEAVES = _SIMPLE | {torch.Tensor, torch.nn.Parameter, DTensor}
"""Types whose values are leaves."""
_WITHOUT_IDENTITY = LEAVES | {*_DATA}
_BASES = (OrderedDict, dict, list, SimpleNamespace, object)
"""Bases whose `__new__` makes an object of a class that does not define `__new__`."""
_DEPTH = 32  # the most nested objects; each level takes frames of Python's stack


def flatten_call(
    call: Any, stays: Callable[[Any], bool] | None = None
) -> tuple[list[Any], pytree.TreeSpec]:
    """Splits arguments or results into their leaves (tensors and plain values) and their structure.

    It is like `pytree.tree_flatten`, but also flattens objects such as dataclasses.

    Args:
        call: the arguments, usually (args, kwargs), or the results.
        stays: a predicate: True for an object that is kept as a leaf.
    """
    leaves, structure = pytree.tree_flatten(call)
    if LEAVES.issuperset(map(type, leaves)):
        return leaves, structure
    flattener = _ObjectFlattener()
    opened = [leaf if stays and stays(leaf) else flattener.open(leaf) for leaf in leaves]
    if all(now is before for now, before in zip(opened, leaves, strict=True)):
        return leaves, structure
    numbers: dict[int, int] = {}
    opened = [_number_parts(leaf, numbers) for leaf in opened]
    return pytree.tree_flatten(pytree.tree_unflatten(opened, structure))


def unflatten_call(leaves: list[Any], structure: pytree.TreeSpec) -> Any:
    """Returns arguments or results made of leaves and a structure: the inverse of `flatten_call`.

    An object that occurs several times is created once.
    """
    try:
        return pytree.tree_unflatten(leaves, structure)
    finally:
        _HERE.made.clear()


def objects_of_call(call: Any, kinds: Set[type]) -> list[Any]:
    """Returns all containers and objects in the arguments of a call.

    One that occurs several times is listed several times.

    Args:
        call: the (args, kwargs).
        kinds: the classes of the objects that `flatten_call` has flattened.
    """
    found: list[Any] = []
    inside, opened = [call], set[int]()  # values to visit; ids of objects that may hold themselves
    for value in inside:
        kind: type = type(value)
        parts: Iterable[Any] = ()
        if kind is dict:
            parts = value.values()
        elif kind is list or kind is tuple:
            parts = value
        elif kind in kinds:
            if id(value) not in opened:
                items = (v for _, v in _items_of_object(value)[1])
                parts = *items, *_attributes_of_object(value).values()
            opened.add(id(value))
        elif not pytree.tree_is_leaf(value):
            parts = _flatten_container(value)[0]
        found.append(value)
        inside += [v for v in parts if type(v) not in _WITHOUT_IDENTITY]
    return found[3:]  # without the call, its args and its kwargs


def share_repeated(call: Any, made: Any, known: dict[int, Any]) -> Any:
    """Returns rebuilt arguments in which a container that was passed twice is one object.

    `unflatten_call` makes two lists of a list that is passed twice. But code that writes one of
    them must see the change in the other.

    Args:
        call: the original arguments.
        made: the arguments that `unflatten_call` has rebuilt.
        known: maps the id of each container of the call to the rebuilt container; entries are
            added.
    """
    if pytree.tree_is_leaf(call):
        if type(call) not in LEAVES and id(call) not in known and is_flattened(call):
            known[id(call)] = made
            base, items = _items_of_object(call)
            for key, value in items:
                found = share_repeated(value, base.__getitem__(made, key), known)
                base.__setitem__(made, key, found)
            for name, value in _attributes_of_object(call).items():
                object.__setattr__(made, name, share_repeated(value, getattr(made, name), known))
        return made
    if id(call) not in known:
        (parts, structure), were = _flatten_container(call), _flatten_container(made)[0]
        now = [share_repeated(v, m, known) for v, m in zip(parts, were, strict=True)]
        is_made = all(m is n for m, n in zip(were, now, strict=True))
        known[id(call)] = made if is_made else pytree.tree_unflatten(now, structure)
    return known[id(call)]


def classes_of_call(structure: pytree.TreeSpec) -> list[type]:
    """Returns the classes of the objects that `flatten_call` has flattened into `structure`."""
    within = [kind for child in structure.children() for kind in classes_of_call(child)]
    return [structure.context[0], *within] if structure.type is _Parts else within


def is_flattened(value: Any) -> bool:
    """True if `flatten_call` splits the object `value` into its tensors and plain values."""
    return _ObjectFlattener().open(value) is not value


def refuse_unflattenable(name: str, leaf: Any) -> None:
    """Raises CaptureError if an argument is an object that holds tensors but cannot be flattened.

    Its tensors could not become inputs of the graph. `leaf` is the argument, a leaf of
    `flatten_call`.
    """
    if isinstance(leaf, (*_DATA, *_LIVE)):
        return
    inside = list(leaf) if isinstance(leaf, Set) else [_attributes_of_object(leaf)]
    inside += leaf.values() if isinstance(leaf, Mapping) else ()
    found = pytree.tree_leaves(inside)
    if any(isinstance(v, torch.Tensor) for v in found) and not _has_live(found):
        raise not_captured(
            f"{name} is a {type(leaf).__name__} that holds tensors",
            "the inputs of a graph are the tensors in tuples, lists, dictionaries, and plain "
            "Python objects that contain only tensors, numbers and text",
            Fix("step(dict(batch))", "or pass a list of its tensors, or a dataclass"),
        )


class _MadeHere(threading.local):
    """The objects that `unflatten_call` has made so far in this thread, by number."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}


_HERE = _MadeHere()


@dataclass(frozen=True)
class _Parts:
    """An object taken apart: its items as a dictionary or list, and its attributes by name."""

    kind: type
    items: Any
    attributes: dict[str, Any]
    number: int = 0


@dataclass(frozen=True)
class _Same:
    """A further occurrence of an object in the arguments, by the number of its `_Parts`."""

    number: int


def _is_parts(value: Any) -> bool:
    return isinstance(value, _Parts)


class _ObjectFlattener:
    """Flattens the objects of one call, each once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: the object, and its parts

    def open(self, value: Any, depth: int = 0) -> Any:
        """Returns the flattened parts of `value` if it is an object with tensors and plain data.

        Other values are returned unchanged.

        Args:
            depth: the number of objects around `value`. Objects at the depth `_DEPTH` are not
                flattened.
        """
        if isinstance(value, (*_DATA, *_LIVE)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, value  # an object that holds itself stays whole
            if depth < _DEPTH:
                self._known[id(value)] = value, self._open_value(value, depth + 1)
        return self._known[id(value)][1]

    def _open_value(self, value: Any, depth: int) -> Any:
        base = _base_of(type(value))
        if base is None:
            return value
        items: Any = dict(_items_of_object(value)[1])
        if base is list:
            items = [*items.values()]
        attributes = _attributes_of_object(value)
        if not items and _SIMPLE.issuperset(map(type, attributes.values())):
            return value  # it holds only settings, as most objects do
        inside = items, attributes
        if _has_live(pytree.tree_leaves(inside)):
            return value
        items, attributes = pytree.tree_map(lambda v: self.open(v, depth), inside)
        found = pytree.tree_leaves((items, attributes), is_leaf=_is_parts)
        has_tensors = any(isinstance(v, (torch.Tensor, _Parts)) for v in found)
        if has_tensors and all(isinstance(v, (*_DATA, *_SYMBOLIC, _Parts)) for v in found):
            return _Parts(type(value), items, attributes)
        return value


def _number_parts(value: Any, numbers: dict[int, int]) -> Any:
    """Returns the parts with a number for each object; later occurrences become `_Same`."""
    if not isinstance(value, _Parts):
        return value
    if id(value) in numbers:
        return _Same(numbers[id(value)])
    numbers[id(value)] = number = len(numbers)
    inside = value.items, value.attributes
    items, attributes = pytree.tree_map(
        lambda v: _number_parts(v, numbers), inside, is_leaf=_is_parts
    )
    return _Parts(value.kind, items, attributes, number)


def _base_of(kind: type) -> type | None:
    """Returns the base whose `__new__` makes an object of `kind`; None if there is none."""
    if kind.__module__ == "builtins":
        return None
    base = next(b for b in _BASES if issubclass(kind, b))
    return base if kind.__new__ is base.__new__ else None  # type: ignore[comparison-overlap]


def _flatten_container(container: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Returns the items of a container, and the structure to make another one of them."""
    own = id(container)  # the function lives until the garbage collection, the container need not
    return pytree.tree_flatten(container, is_leaf=lambda v: id(v) != own)


def _items_of_object(value: Any) -> tuple[Any, Iterable[tuple[Any, Any]]]:
    """Returns the base of an object that is taken apart, and its items as (key, value)."""
    base: Any = _base_of(type(value))
    if issubclass(base, dict):
        return base, base.items(value)
    return base, enumerate(base.__iter__(value)) if base is list else ()


def _attributes_of_object(value: Any) -> dict[str, Any]:
    slots = [
        name  # as mangled by Python within its class
        for kind in type(value).__mro__
        if "__slots__" in vars(kind)
        for name, member in vars(kind).items()
        if isinstance(member, MemberDescriptorType) and hasattr(value, name)
    ]
    return {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})


def _has_live(values: list[Any]) -> bool:
    return any(isinstance(v, _LIVE) or callable(v) for v in values)


def _make_object(children: Any, context: tuple[type, int]) -> Any:
    items, attributes = children
    kind, number = context
    base: Any = _base_of(kind)
    made = base.__new__(kind)
    if issubclass(base, dict):
        for key, v in items.items():
            base.__setitem__(made, key, v)
    elif base is list:
        base.extend(made, items)
    for name, v in attributes.items():
        object.__setattr__(made, name, v)
    _HERE.made[number] = made
    return made


pytree.register_pytree_node(
    _Parts,
    lambda parts: ([parts.items, parts.attributes], (parts.kind, parts.number)),
    _make_object,
)
pytree.register_pytree_node(
    _Same, lambda same: ([], same.number), lambda _, number: _HERE.made[number]
)

# -- batches of many lengths -----------------------------------------------------------------------

T = TypeVar("T", bound=torch.Tensor)


def pad_to_bucket(x: T, lengths: Iterable[int], *, value: float, dim: int = -1) -> T:
    """Pads `x` at the end of dimension `dim`, to the smallest of `lengths` that is long enough.

        lengths = (64, 128, 256)
        tokens = pt.pad_to_bucket(tokens, lengths, value=0)
        targets = pt.pad_to_bucket(targets, lengths, value=-100)    # cross_entropy's ignore_index
        loss = step(tokens, targets)

    A step is then captured once for each length. The mean loss does not change if two conditions
    hold: targets are padded with a value that the loss ignores, and no position of the model reads
    later ones (a causal transformer). If positions read all others (attention without a mask, a
    mean or a batch norm over the length), pass the model a mask, padded with `value=False`.

    Args:
        x: a tensor, or a DTensor that is not sharded along `dim`.
        lengths: the lengths in elements, in any order.
        value: the value of the padding.

    Returns:
        The padded tensor; `x` itself if it has one of the lengths.

    Raises:
        ValueError: `x` is longer than all of `lengths`, or has no dimension `dim`.
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"pad_to_bucket: a tensor of shape {tuple(x.shape)} has no dimension {dim}"
        )
    have, sizes = x.shape[dim], sorted(lengths)
    fitting = [n for n in sizes if n >= have]
    if not fitting:
        raise ValueError(f"pad_to_bucket: {have} elements are more than the longest of {sizes}")
    more = fitting[0] - have
    if not more:
        return x
    behind = x.dim() - 1 - dim % x.dim()  # dimensions after it, which F.pad takes first
    padded: Any = F.pad(x, (0, 0) * behind + (0, more), value=value)
    return padded
