"""Guards: what a captured step read of Python, checked before each later call.

Guards are one flat list of places with what was expected there. `Guards.hold` first compares object
identities, in a few passes that run in C. Where some object is another one, every place is compared
by type and content; if nothing differs, the objects of now are what the next call is compared with.
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

from .attributes_and_hooks import AttributesAndHooks, is_attributes_or_hooks
from .content_keys import content_key
from .expected import (
    MISSING,
    AnyTensor,
    ContainerContents,
    Expected,
    HugeContainer,
    Identity,
    OnlyType,
    as_expected,
)
from .instrument import count_own_attributes
from .places import Place, place_of_item

__all__ = ["Guards"]

_get = dict.get


@dataclass(frozen=True, eq=False)
class _Guard:
    """A place, and what is expected there."""

    place: Place
    expected: Expected


def _key_of(guard: _Guard) -> Any:
    """What is expected, to be compared while it is still what stands there."""
    if isinstance(guard.expected, AnyTensor):
        return None
    value = guard.place.value
    if isinstance(guard.expected, OnlyType):
        return type(value)
    return id(value) if isinstance(guard.expected, HugeContainer) else content_key(value)


class Guards:
    """What must be unchanged for a program to run again.

    Args:
        places: what the step read; the values of now are expected there.
        types: objects whose type was read, with the type.
        is_number_input: given home and key of a place, whether the number there is a graph input.
        huge: containers that are not compared deeply, with their names.
        slots: identities of the places whose tensors are graph inputs, which `TensorGuard` checks.
        classes: classes whose number of attributes is guarded: a new one may hide another.
        namespaces: name, variables and read names of modules, classes and functions: of the read
            names none may be added or removed.
    """

    def __init__(
        self,
        places: Sequence[Place],
        types: Sequence[tuple[Any, type]] = (),
        is_number_input: Callable[[Any, Any], bool] = lambda home, key: False,
        huge: Sequence[tuple[str, Any]] = (),
        slots: frozenset[tuple[int, Any]] = frozenset(),
        classes: Sequence[type] = (),
        namespaces: Sequence[tuple[str, dict[str, Any], frozenset[str]]] = (),
    ):
        self._arguments = (places, types, is_number_input, huge, slots, classes, namespaces)
        known: dict[int, Expected] = {id(value): HugeContainer(name, value) for name, value in huge}
        self._guards = []
        for place in places:
            value = place.value
            if is_number_input(place.home, place.key):
                expected: Expected = OnlyType(value)
            else:
                expected = as_expected(value, known, is_number_input)
            self._guards.append(_Guard(place, expected))
        self._objects = [o for o, _ in types]
        self._types = [t for _, t in types]
        self._slots, self._classes = slots, classes
        self._namespaces = [
            (name, held, names, names & held.keys()) for name, held, names in namespaces
        ]
        self._namespace_dicts = [held for _, held, _ in namespaces]
        self._class_dicts = [vars(kind) for kind in classes]
        self._class_sizes = [*map(count_own_attributes, classes)]
        self._arm_guards()

    def __len__(self) -> int:
        return len(self._guards)

    def as_of_now(self) -> Guards:
        """Guards of the same places, which expect the values of now."""
        places, types = self._arguments[:2]
        return Guards(places, [(o, type(o)) for o, _ in types], *self._arguments[2:])

    def digest(self) -> int:
        """A hash of what is expected: equal for captures that have read the same of Python."""
        return hash(tuple((g.place.name, _key_of(g)) for g in self._guards))

    def hold(self) -> bool:
        """Is everything as expected?"""
        if self.hold_by_identity():
            return True
        if self.differences(1):
            return False
        self._arm_guards()
        return True

    def differences(self, most: int = 3) -> list[str]:
        """Up to `most` differences, as text: "cfg['k']: 1 became 4"."""
        found = []
        for owner, kind in zip(self._objects, self._types, strict=True):
            if type(owner) is not kind:
                found.append(f"a {kind.__name__} became a {type(owner).__name__}")
        for kind, count in zip(self._classes, self._class_sizes, strict=True):
            if (now := count_own_attributes(kind)) != count:
                found.append(f"{kind.__name__}: {count} attributes became {now}")
        for name, held, names, there in self._namespaces:
            found += [f"{name}.{key} is new" for key in sorted((names & held.keys()) - there)]
        for guard in self._guards:
            if len(found) >= most:
                break
            differs = guard.expected.difference(guard.place.value)
            if differs is not None:
                found.append(f"{guard.place.name}{differs[0]}: {differs[1]} became {differs[2]}")
        return found[:most]

    def hold_by_identity(self) -> bool:
        """Is everything the same objects? `hold` asks this first, since it is fast."""
        return (
            not any(self._empty_containers)
            and all(
                map(
                    is_,
                    map(_get, self._entry_homes, self._entry_keys, repeat(MISSING)),
                    self._entry_values,
                )
            )
            and all(map(is_, map(type, self._objects), self._types))
            and self._tensor_extras.unchanged()
            and all(map(is_, [get() for get in self._getters], self._got_values))
            and [*map(len, self._class_dicts)] == self._class_sizes
            and [*map(len, self._namespace_dicts)] == self._namespace_sizes
            and [*map(len, self._containers)] == self._container_lengths
            and all(
                map(is_, chain.from_iterable(self._iterate_containers()), self._container_items)
            )
            and all(was.difference(value) is None for was, value in self._compared_parts)
            and all(was.difference(place.value) is None for was, place in self._compared_places)
            and all(len(value) == length for value, length in self._container_sizes)
        )

    def _iterate_containers(self) -> Any:
        return chain(self._containers, map(dict.values, self._dict_containers))

    def _arm_guards(self) -> None:
        """Store the objects of now, for `hold_by_identity`."""
        # Entries of dictionaries; places with a getter; and containers, by identity of their items.
        self._entry_homes, self._entry_keys, self._entry_values = [], [], []
        self._getters, self._got_values = [], []
        self._containers: list[Any] = []
        self._dict_containers: list[Any] = []
        self._empty_containers: list[Any] = []
        self._container_sizes: list[tuple[Any, int]] = []
        # What has no lasting identity is compared by type or content each time.
        self._compared_parts: list[tuple[Expected, Any]] = []
        self._compared_places: list[tuple[Expected, Place]] = []
        self._tensor_extras = AttributesAndHooks(
            [guard.place for guard in self._guards if is_attributes_or_hooks(guard.place)]
        )
        seen: set[int] = set()
        for guard in self._guards:
            if is_attributes_or_hooks(guard.place):
                continue
            value = guard.place.value
            if isinstance(guard.expected, (AnyTensor, OnlyType)):
                if guard.place.identity not in self._slots:
                    self._compared_places.append((guard.expected, guard.place))
            elif guard.place.get is None:
                self._entry_homes.append(guard.place.home)
                self._entry_keys.append(guard.place.key)
                self._entry_values.append(value)
            elif guard.place.key == "()" and not isinstance(guard.expected, Identity):
                # Each answer is a new object.
                self._compared_places.append((guard.expected, guard.place))
                continue
            else:
                self._getters.append(guard.place.get)
                self._got_values.append(guard.place.get())
            for expected, part in guard.expected.parts(value):
                if id(part) not in seen:
                    seen.add(id(part))
                    self._watch_contents(expected, part)
        self._namespace_sizes = [*map(len, self._namespace_dicts)]
        self._container_lengths = [*map(len, self._containers)]
        self._container_items = [*chain.from_iterable(self._iterate_containers())]

    def _watch_contents(self, expected: Expected, part: Any) -> None:
        """Store what a part of a value contains now."""
        if isinstance(part, SimpleNamespace):
            part = vars(part)
        one_by_one = isinstance(part, (MappingProxyType, functools.partial))
        if one_by_one or not isinstance(expected, (ContainerContents, HugeContainer)):
            self._compared_parts.append((expected, part))
        elif isinstance(part, (tuple, frozenset)):
            return  # it cannot change
        elif not len(part):
            self._empty_containers.append(part)
        elif isinstance(expected, ContainerContents) and any(
            isinstance(e, OnlyType) for e in expected.values
        ):
            self._watch_items(expected, part)
        else:
            self._containers.append(part)
            if isinstance(part, dict):
                self._dict_containers.append(part)

    def _watch_items(self, expected: ContainerContents, part: Any) -> None:
        """Store the items of a container that holds numbers that are graph inputs."""
        self._container_sizes.append((part, len(part)))
        keys = range(len(part)) if expected.keys is None else expected.keys
        for key, was in zip(keys, expected.values, strict=True):
            if isinstance(was, OnlyType):
                self._compared_places.append((was, place_of_item("", part, key)))
            elif isinstance(part, dict):
                self._entry_homes.append(part)
                self._entry_keys.append(key)
                self._entry_values.append(part[key])
            else:
                get = functools.partial(operator.getitem, part, key)
                self._getters.append(get)
                self._got_values.append(get())
