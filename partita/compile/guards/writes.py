"""Writes of a captured step: what of the user's objects is not as it was before the step ran.

What was reached is held against what it was when it was reached. Only that is changed which still
differs at the end: a value that the step puts back is none.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..arguments import is_taken_apart
from . import places
from .c_objects import content_of, copier
from .expected import MISSING, is_container, items_of, same_bits
from .objects import dict_of, slots_of
from .places import Place

__all__ = ["Snapshots", "Write"]

_PLAIN = (bool, int, float, str, bytes, complex, type(None))
_MUTABLE = (list, dict, set, collections.deque, types.SimpleNamespace)
_INSIDE = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, eq=False)
class Write:
    """One change.

    Attributes:
        name: of what is changed.
        identity: the same for a change of the same place in another run.
        before, after: what was there, and is there now.
        undo, redo: put back what was there; put what is there now.
        again: whether a later call can make the same change: not where an order or a length is.
        home, key: where it is, of an entry of a dictionary.
        attribute: whether that is an attribute of an object of the user's.
    """

    name: str
    identity: tuple[int, Any]
    before: Any
    after: Any
    undo: Callable[[], None]
    redo: Callable[[], None]
    again: bool = True
    home: Any = None
    key: Any = None
    attribute: bool = False


class Snapshots:
    """What was reached, as it was then."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self._owners: dict[int, tuple[Any, str, dict[str, Any], Any, dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Any, str, Any]] = {}
        self._arrays: dict[int, tuple[Any, str, Any, Callable[[], None]]] = {}
        self._by_dict: dict[int, dict[str, Any]] = {}

    def place(self, place: Place, value: Any, again: bool = False) -> None:
        if again or place.identity not in self._places:
            self._places[place.identity] = (place, value)
        if again and id(place.home) in self._by_dict:
            self._by_dict[id(place.home)][place.key] = value

    def owner(self, value: Any, name: str, held: Any, slots: dict[str, Any]) -> None:
        before = dict(held or {})
        self._owners[id(value)] = (value, name, before, held, slots)
        self._by_dict[id(held)] = before
        for key, descriptor in slots.items():
            place = places.slot(f"{name}.{key}", value, descriptor)
            self.place(place, place.value)

    def container(self, value: Any, name: str) -> None:
        if isinstance(value, _MUTABLE):
            self._containers[id(value)] = (value, name, _copy(value))

    def made_anew(self, value: Any, name: str, kept: dict[int, Any]) -> None:
        """What the capture has made, a container or object, and those in it; but what is `kept`."""
        if id(value) in kept:
            return
        if is_taken_apart(value):
            held = dict_of(value)
            self.owner(value, name, held, slots_of(type(value)))
            for key, v in (held or {}).items():
                self.made_anew(v, f"{name}.{key}", kept)
        if is_container(value):
            kept[id(value)] = value
            self.container(value, name)
            keys, values = items_of(value)
            for key, v in zip(keys or range(len(values)), values, strict=False):
                self.made_anew(v, f"{name}[{key!r}]", kept)

    def item(self, place: Place, value: Any) -> None:
        """What stands in a container is exchanged by the capture itself."""
        self._containers[id(place.home)][2][place.key] = value

    def array(self, value: Any, name: str) -> None:
        self._arrays[id(value)] = (value, name, content_of(value), copier(value))

    def writes(self) -> Iterator[Write]:
        """What is not as it was."""
        dicts = {id(held) for *_, held, _ in self._owners.values()}
        for place, before in self._places.values():
            if place.get is None and id(place.home) in dicts:
                continue  # seen with its owner
            if place.key == "__dict__":
                continue
            after = place.value
            if not _is_same_value(before, after):
                yield _of_place(place, before, after)
        replaced = set()
        for owner, name, before, held, _ in self._owners.values():
            if held is not None:
                for write in _of_dict(name, held, before, dotted=True):
                    if _is_of_torch(owner) and self._is_replaced(write.before, write.after):
                        replaced.add(id(write.before))
                    else:
                        yield write
        for value, name, before in self._containers.values():
            for write in [*_of_container(value, name, before)]:
                if id(value) in replaced:
                    write.undo()
                else:
                    yield write
        for value, name, before, put_back in self._arrays.values():
            if content_of(value) != before:
                said = f"a {type(value).__name__}", "another content"
                yield Write(name, (id(value), "content"), *said, put_back, _do_nothing, again=False)

    def _is_replaced(self, before: Any, after: Any) -> bool:
        """Is it another container with the content that the one before it had?

        As a GradScaler has a new dictionary of its optimizers after each step: what it wrote into
        the one before is gone.
        """
        known = self._containers.get(id(before))
        if known is None or before is after or type(before) is not type(after):
            return False
        if getattr(before, "default_factory", None) is not getattr(after, "default_factory", None):
            return False
        one, other = known[2], _copy(after)
        if isinstance(one, dict):
            same = list(one) == list(other)
            return same and all(map(_is_same_value, one.values(), other.values()))
        if isinstance(one, set):
            return bool(one == other)
        return len(one) == len(other) and all(map(_is_same_value, one, other))


def _is_of_torch(owner: Any) -> bool:
    """Is it an object of a class of torch's, whose containers are its own?"""
    return type(owner).__module__.startswith("torch.") and not isinstance(owner, torch.nn.Module)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(dict.items(value))  # not as a class of its own looks them up
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
        one, other = items_of(a), items_of(b)
        return (
            len(one[1]) == len(other[1])
            and all(map(_is_same_value, one[1], other[1]))
            and (one[0] == other[0])
        )
    return False


def _of_place(place: Place, before: Any, after: Any, attribute: bool = False) -> Write:
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


def _of_dict(name: str, held: Any, before: dict[Any, Any], dotted: bool) -> Iterator[Write]:
    for key in dict.fromkeys([*before, *held]):
        was, now = before.get(key, MISSING), dict.get(held, key, MISSING)
        if not _is_same_value(was, now) and not (dotted and key in _INSIDE):
            called = f"{name}.{key}" if dotted else f"{name}[{key!r}]"
            yield _of_place(places.entry(called, held, key), was, now, attribute=dotted)


def _of_container(value: Any, name: str, before: Any) -> Iterator[Write]:
    if isinstance(value, dict):
        yield from _of_dict(name, value, before, dotted=False)
    elif isinstance(value, types.SimpleNamespace):
        yield from _of_dict(name, vars(value), before, dotted=True)
    elif isinstance(value, set):
        if value != before:
            yield _of_whole(name, value, before, again=before <= value)
    elif len(value) != len(before) or not all(map(_is_same_value, before, value)):
        yield _of_whole(name, value, before, again=len(value) == len(before))


def _of_whole(name: str, value: Any, before: Any, again: bool) -> Write:
    after = _copy(value)

    def make_refill(content: Any) -> Callable[[], None]:
        def run() -> None:
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(content)

        return run

    return Write(
        name, (id(value), "content"), before, after, make_refill(before), make_refill(after), again
    )


def _do_nothing() -> None:
    pass
