"""Writes of a captured step: which of the user's objects it has changed, and how to undo that.

`Snapshots` copies each place, object, container and array when the record reaches it. At the end
`find_writes` compares what is there with the copies. A value that the step changes and puts back is
no write.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..arguments import is_taken_apart
from .c_objects import make_restorer, read_raw_content
from .expected import MISSING, is_container, items_of, same_bits
from .objects import INSIDE, dict_of, slots_of
from .places import Place, place_of_entry, place_of_slot

__all__ = ["Snapshots", "Write"]

_PLAIN = (bool, int, float, str, bytes, complex, type(None))
_MUTABLE = (list, dict, set, collections.deque, types.SimpleNamespace)


@dataclass(frozen=True, eq=False)
class Write:
    """One change that a step made.

    Attributes:
        name: of what was changed.
        identity: equal for a change of the same place in another run.
        before, after: the value before the step, and the value now.
        undo, redo: write the value before; write the value of now.
        is_repeatable: whether a later call can make the same change: not where an order or a length
            is.
        home, key: of the place; None where a whole container or array was changed.
        attribute: whether the place is an attribute of a user's object.
    """

    name: str
    identity: tuple[int, Any]
    before: Any
    after: Any
    undo: Callable[[], None]
    redo: Callable[[], None]
    is_repeatable: bool = True
    home: Any = None
    key: Any = None
    attribute: bool = False


class Snapshots:
    """Copies of what the step reached, made when it was reached."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self._owners: dict[int, tuple[Any, str, dict[str, Any], Any, dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Any, str, Any]] = {}
        self._arrays: dict[int, tuple[Any, str, Any, Callable[[], None]]] = {}
        self._by_dict: dict[int, dict[str, Any]] = {}  # by id of a `__dict__`, its copy

    def snapshot_place(self, place: Place, value: Any, replace: bool = False) -> None:
        """Copy the value of a place; anew where the capture itself has written it (`replace`)."""
        if replace or place.identity not in self._places:
            self._places[place.identity] = (place, value)
        if replace and id(place.home) in self._by_dict:
            self._by_dict[id(place.home)][place.key] = value

    def snapshot_object(self, value: Any, name: str, held: Any, slots: dict[str, Any]) -> None:
        """Copy the attributes of an object: its `__dict__` `held`, and its slots."""
        before = dict(held or {})
        self._owners[id(value)] = (value, name, before, held, slots)
        self._by_dict[id(held)] = before
        for key, descriptor in slots.items():
            place = place_of_slot(f"{name}.{key}", value, descriptor)
            self.snapshot_place(place, place.value)

    def snapshot_container(self, value: Any, name: str) -> None:
        """Copy the items of a container, if it is mutable."""
        if isinstance(value, _MUTABLE):
            self._containers[id(value)] = (value, name, _copy(value))

    def snapshot_new(self, value: Any, name: str, known: dict[int, Any]) -> None:
        """Copy a container or object that capture has made, and those in it, not in `known`."""
        if id(value) in known:
            return
        if is_taken_apart(value):
            held = dict_of(value)
            self.snapshot_object(value, name, held, slots_of(type(value)))
            for key, v in (held or {}).items():
                self.snapshot_new(v, f"{name}.{key}", known)
        if is_container(value):
            known[id(value)] = value
            self.snapshot_container(value, name)
            keys, values = items_of(value)
            for key, v in zip(keys or range(len(values)), values, strict=False):
                self.snapshot_new(v, f"{name}[{key!r}]", known)

    def update_item(self, place: Place, value: Any) -> None:
        """Note a value that the capture itself has put into a container."""
        self._containers[id(place.home)][2][place.key] = value

    def snapshot_raw(self, value: Any, name: str) -> None:
        """Copy the content of an object implemented in C."""
        self._arrays[id(value)] = (value, name, read_raw_content(value), make_restorer(value))

    def find_writes(self) -> Iterator[Write]:
        """The changes since the snapshots."""
        dicts = {id(held) for *_, held, _ in self._owners.values()}
        for place, before in self._places.values():
            if place.get is None and id(place.home) in dicts:
                continue  # seen with its owner
            if place.key == "__dict__":
                continue
            after = place.value
            if not _is_same_value(before, after):
                yield _make_place_write(place, before, after)
        replaced = set()
        for owner, name, before, held, _ in self._owners.values():
            if held is not None:
                for write in _find_dict_writes(name, held, before, dotted=True):
                    if _is_of_torch(owner) and self._is_replaced(write.before, write.after):
                        replaced.add(id(write.before))
                    else:
                        yield write
        for value, name, before in self._containers.values():
            for write in [*_find_container_writes(value, name, before)]:
                if id(value) in replaced:
                    write.undo()
                else:
                    yield write
        for value, name, before, restore in self._arrays.values():
            if read_raw_content(value) != before:
                texts = f"a {type(value).__name__}", "another content"
                yield Write(
                    name, (id(value), "content"), *texts, restore, _do_nothing, is_repeatable=False
                )

    def _is_replaced(self, before: Any, after: Any) -> bool:
        """Is `after` another container, with the content that `before` had when it was copied?

        A GradScaler makes a new dictionary of its optimizers after each step, so that what it wrote
        into the one before has no effect.
        """
        copied = self._containers.get(id(before))
        if copied is None or before is after or type(before) is not type(after):
            return False
        if getattr(before, "default_factory", None) is not getattr(after, "default_factory", None):
            return False
        one, other = copied[2], _copy(after)
        if isinstance(one, dict):
            same = list(one) == list(other)
            return same and all(map(_is_same_value, one.values(), other.values()))
        if isinstance(one, set):
            return bool(one == other)
        return len(one) == len(other) and all(map(_is_same_value, one, other))


def _is_of_torch(owner: Any) -> bool:
    """Is it an object of a class of torch (no module), whose containers nobody else holds?"""
    return type(owner).__module__.startswith("torch.") and not isinstance(owner, torch.nn.Module)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(dict.items(value))  # past overrides of the user's class
    if isinstance(value, types.SimpleNamespace):
        return dict(vars(value))
    return value.copy() if isinstance(value, set) else list(value)


def _is_same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is type(b) and isinstance(a, _PLAIN):
        return same_bits(a, b)
    if isinstance(a, types.MethodType) and isinstance(b, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if type(a) is type(b) and isinstance(a, (tuple, frozenset)):
        (keys, values), (other_keys, other_values) = items_of(a), items_of(b)
        return (
            len(values) == len(other_values)
            and all(map(_is_same_value, values, other_values))
            and keys == other_keys
        )
    return False


def _make_place_write(place: Place, before: Any, after: Any, attribute: bool = False) -> Write:
    def undo_write() -> None:
        place.write(before)

    def redo_write() -> None:
        place.write(after)

    return Write(
        place.name,
        place.identity,
        before,
        after,
        undo_write,
        redo_write,
        home=place.home,
        key=place.key,
        attribute=attribute,
    )


def _find_dict_writes(
    name: str, held: Any, before: dict[Any, Any], dotted: bool
) -> Iterator[Write]:
    for key in dict.fromkeys([*before, *held]):
        was, now = before.get(key, MISSING), dict.get(held, key, MISSING)
        if not _is_same_value(was, now) and not (dotted and key in INSIDE):
            called = f"{name}.{key}" if dotted else f"{name}[{key!r}]"
            yield _make_place_write(place_of_entry(called, held, key), was, now, attribute=dotted)


def _find_container_writes(value: Any, name: str, before: Any) -> Iterator[Write]:
    if isinstance(value, dict):
        yield from _find_dict_writes(name, value, before, dotted=False)
    elif isinstance(value, types.SimpleNamespace):
        yield from _find_dict_writes(name, vars(value), before, dotted=True)
    elif isinstance(value, set):
        if value != before:
            yield _make_container_write(name, value, before, is_repeatable=before <= value)
    elif len(value) != len(before) or not all(map(_is_same_value, before, value)):
        yield _make_container_write(name, value, before, is_repeatable=len(value) == len(before))


def _make_container_write(name: str, value: Any, before: Any, is_repeatable: bool) -> Write:
    after = _copy(value)

    def make_refill(content: Any) -> Callable[[], None]:
        def run() -> None:
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(content)

        return run

    return Write(
        name,
        (id(value), "content"),
        before,
        after,
        make_refill(before),
        make_refill(after),
        is_repeatable,
    )


def _do_nothing() -> None:
    pass
