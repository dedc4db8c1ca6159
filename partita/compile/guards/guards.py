"""Guards: what a captured step read of Python, to be looked at before each later call.

One flat list of places and of what stood there. It is compared by identity first, in few passes
that run in C. Where something is another object, all is compared by type and content; if it is
as it was, what is there now is what the next call is compared to.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from types import MappingProxyType, SimpleNamespace
from typing import Any

from .attributes_and_hooks import Marks, is_mark
from .expected import MISSING, AnyTensor, Contents, Expected, Identity, Many, OnlyType, as_expected
from .instrument import own_attributes
from .places import Place, item

__all__ = ["Guards"]

_get = dict.get


@dataclass(frozen=True, eq=False)
class _Guard:
    place: Place
    expected: Expected


class Guards:
    """What must be as it was.

    Args:
        places: what was read. What stands there now is what is expected.
        types: objects, and of which type each is.
        numbers: whether a number that stands at a place is an input of the graph.
        huge: names of containers that are not looked into, and these.
        slots: places whose tensors are inputs, which are looked at for themselves.
        classes: of which the number of attributes is part of it: one may hide another.
        spaces: variables by name, what they are called, and the names that must come to be there
            as little as they must go.
    """

    def __init__(
        self,
        places: Sequence[Place],
        types: Sequence[tuple[Any, type]] = (),
        numbers: Callable[[Any, Any], bool] = lambda home, key: False,
        huge: Sequence[tuple[str, Any]] = (),
        slots: frozenset[tuple[int, Any]] = frozenset(),
        classes: Sequence[type] = (),
        spaces: Sequence[tuple[str, dict[str, Any], frozenset[str]]] = (),
    ):
        self._given = (places, types, numbers, huge, slots, classes, spaces)
        known: dict[int, Expected] = {id(value): Many(name, value) for name, value in huge}
        self._guards = []
        for place in places:
            value, taken = place.value, numbers(place.home, place.key)
            expected = OnlyType(value) if taken else as_expected(value, known, numbers)
            self._guards.append(_Guard(place, expected))
        self._objects = [o for o, _ in types]
        self._types = [t for _, t in types]
        self._slots, self._classes = slots, classes
        self._spaces = [(name, held, names, names & held.keys()) for name, held, names in spaces]
        self._variables = [held for _, held, _ in spaces]
        self._named = [vars(kind) for kind in classes]
        self._counts = [*map(own_attributes, classes)]
        self._arm_guards()

    def __len__(self) -> int:
        return len(self._guards)

    def as_now(self) -> Guards:
        """The same, of what is there now."""
        places, types = self._given[:2]
        return Guards(places, [(o, type(o)) for o, _ in types], *self._given[2:])

    def hold(self) -> bool:
        """Is all as it was?"""
        if self.hold_by_identity():
            return True
        if self.differences(1):
            return False
        self._arm_guards()
        return True

    def differences(self, most: int = 3) -> list[str]:
        """What is not as it was, in words: "cfg['k']: 1 became 4"."""
        found = []
        for owner, kind in zip(self._objects, self._types, strict=True):
            if type(owner) is not kind:
                found.append(f"a {kind.__name__} became a {type(owner).__name__}")
        for kind, count in zip(self._classes, self._counts, strict=True):
            if (now := own_attributes(kind)) != count:
                found.append(f"{kind.__name__}: {count} attributes became {now}")
        for name, held, names, there in self._spaces:
            found += [f"{name}.{key} is new" for key in sorted((names & held.keys()) - there)]
        for guard in self._guards:
            if len(found) >= most:
                break
            differs = guard.expected.difference(guard.place.value)
            if differs is not None:
                found.append(f"{guard.place.name}{differs[0]}: {differs[1]} became {differs[2]}")
        return found[:most]

    def hold_by_identity(self) -> bool:
        """Is all the very objects that were there? What `hold` asks first, since it is fast."""
        return (
            not any(self._empty)
            and all(map(is_, map(_get, self._homes, self._keys, repeat(MISSING)), self._values))
            and all(map(is_, map(type, self._objects), self._types))
            and self._marks.same()
            and all(map(is_, [get() for get in self._gets], self._got))
            and [*map(len, self._named)] == self._counts
            and [*map(len, self._variables)] == self._sizes
            and [*map(len, self._containers)] == self._lengths
            and all(map(is_, chain.from_iterable(self._iterate_containers()), self._contents))
            and all(was.difference(value) is None for was, value in self._contained)
            and all(was.difference(place.value) is None for was, place in self._loose)
            and all(len(value) == length for value, length in self._sized)
        )

    def _iterate_containers(self) -> Any:
        return chain(self._containers, map(dict.values, self._dicts))

    def _arm_guards(self) -> None:
        """Note which objects are there now."""
        self._homes, self._keys, self._values = [], [], []
        self._sized: list[tuple[Any, int]] = []
        self._gets, self._got = [], []
        self._containers: list[Any] = []
        self._dicts: list[Any] = []
        self._empty: list[Any] = []
        self._contained: list[tuple[Expected, Any]] = []
        self._loose: list[tuple[Expected, Place]] = []
        self._marks = Marks([guard.place for guard in self._guards if is_mark(guard.place)])
        seen: set[int] = set()
        for guard in self._guards:
            if is_mark(guard.place):
                continue
            value = guard.place.value
            if isinstance(guard.expected, (AnyTensor, OnlyType)):
                if guard.place.identity not in self._slots:
                    self._loose.append((guard.expected, guard.place))
            elif guard.place.get is None:
                self._homes.append(guard.place.home)
                self._keys.append(guard.place.key)
                self._values.append(value)
            elif guard.place.key == "()" and not isinstance(guard.expected, Identity):
                self._loose.append((guard.expected, guard.place))  # made anew in each answer
                continue
            else:
                self._gets.append(guard.place.get)
                self._got.append(guard.place.get())
            for expected, part in guard.expected.parts(value):
                if id(part) not in seen:
                    seen.add(id(part))
                    self._watch_contents(expected, part)
        self._sizes = [*map(len, self._variables)]
        self._lengths = [*map(len, self._containers)]
        self._contents = [*chain.from_iterable(self._iterate_containers())]

    def _watch_contents(self, expected: Expected, part: Any) -> None:
        if isinstance(part, SimpleNamespace):
            part = vars(part)
        one_by_one = isinstance(part, (MappingProxyType, functools.partial))
        if one_by_one or not isinstance(expected, (Contents, Many)):
            self._contained.append((expected, part))
        elif isinstance(part, (tuple, frozenset)):
            return  # it cannot change
        elif not len(part):
            self._empty.append(part)
        elif isinstance(expected, Contents) and any(
            isinstance(e, OnlyType) for e in expected.values
        ):
            self._watch_items(expected, part)
        else:
            self._containers.append(part)
            if isinstance(part, dict):
                self._dicts.append(part)

    def _watch_items(self, expected: Contents, part: Any) -> None:
        """Of a container with numbers that are inputs, the other items."""
        self._sized.append((part, len(part)))
        keys = range(len(part)) if expected.keys is None else expected.keys
        for key, was in zip(keys, expected.values, strict=True):
            if isinstance(was, OnlyType):
                self._loose.append((was, item("", part, key)))
            elif isinstance(part, dict):
                self._homes.append(part)
                self._keys.append(key)
                self._values.append(part[key])
            else:
                get = functools.partial(operator.getitem, part, key)
                self._gets.append(get)
                self._got.append(get())
