"""The record of what a step reads of Python while it is captured, and of what it writes.

- Functions: the globals, cells and defaults that a function names are recorded when it is called.
- Attributes of objects: recorded as they are read (`instrument`).
- Containers: recorded whole when they are first reached.

A value read may lead to others: it is *reached*, and what hangs on it is recorded by its kind
(`reached`). It is copied, too, so that `Snapshots.find_writes` finds what the step has changed.
When capture is over, and everything stands again where it was, `make_guards` turns the places that
were read into the guards of a program.
"""

from __future__ import annotations

import collections
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from partita.layout import Fix

from ..arguments import is_taken_apart
from ..capture.capture_context import attribute_set
from ..errors import CaptureError, not_captured
from .calls import Calls
from .codes import is_recorded
from .guards import Guards, function_modes
from .instrument import has_own_getattribute, instrument, recorded_by, uninstrument
from .places import (
    INSIDE,
    WITH_FIELDS,
    Place,
    dict_of,
    find_module_dict,
    has_settings,
    may_be_hidden,
    may_have_attributes,
    place_of_class_attribute,
    place_of_entry,
    place_of_log_level,
    place_of_slot,
    slots_of,
)
from .reached import ReachedValues, has_tensor_keys
from .values import (
    MISSING,
    PLAIN,
    content_key,
    is_container,
    items_of,
    make_restorer,
    read_raw_content,
)

_MODULES = vars(nn.modules.module)
_GLOBAL_HOOKS = [  # private torch: hooks of all modules, which each call of a module reads
    key for key in _MODULES if key.startswith("_global_") and key.endswith("_hooks")
]
_WEAK = (
    weakref.ref,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    weakref.ProxyType,
    weakref.CallableProxyType,
)


@dataclass(eq=False)
class _ReachedObject:
    """An object of before the step whose attributes are recorded.

    Attributes:
        attributes: its `__dict__` as it was when it was reached.
        slots: the descriptors of its `__slots__`.
        is_read_whole: whether all of its attributes count as read.
        names: the attributes that were read.
    """

    value: Any
    name: str
    attributes: dict[str, Any]
    slots: dict[str, Any]
    is_read_whole: bool = False
    names: dict[str, None] = field(default_factory=dict)


class ReadRecord:
    """What one run of a step under capture reads.

    Args:
        names: by id, the names of modules and optimizers that were found before the run.

    Attributes:
        before_backward: called where a backward begins, with the `inputs` whose gradients it asks:
            one tensor, several or None.
        places: by identity, the places that were read, in order.
        types: by id, objects whose type is guarded, with the type.
        huge: by id, containers that are not compared deeply.
        snapshots: of what was reached, to find what the step writes.
        error: the first refusal.
        reached_by_name: see `reaching_by_name`.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.before_backward: Callable[[Any], None] = lambda _: None
        self.places: dict[tuple[int, Any], Place] = {}
        self.types: dict[int, tuple[Any, type]] = {}
        self.huge: dict[int, Any] = {}
        self.snapshots = Snapshots()
        self.error: CaptureError | None = None
        self._given_names = names
        self._objects: dict[int, _ReachedObject] = {}
        self._kept_alive: dict[int, Any] = {}  # so that no other object gets its id
        self._reached: dict[int, Any] = {}
        self._instrumented: list[type] = []
        self._is_paused = False
        self._read_by_library = False  # whether torch's code reads now
        self.reached_by_name = False
        self.reached = ReachedValues(self)
        self.calls = Calls(self, self.reached.enter_frame, self.reached.reach_globals)

    @contextmanager
    def recording(self, step: Any, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Within, what this thread reads is recorded.

        Args:
            step: what is going to run.
            arguments: name and value of what it can read without reading a place.

        Raises:
            CaptureError: the step read what no guard can cover.
        """
        try:
            self._instrument_type(nn.Module)
            # Where another profiler is set, calls are not seen: functions are read when reached.
            self.reached.reads_ahead = sys.getprofile() is not None
            with self.without_recording():
                self.read_place(Place("the step", self, "step", lambda: step), step)
                for key in _GLOBAL_HOOKS:
                    self.read_place(place_of_entry(key, _MODULES, key), _MODULES[key])
                for name, value in arguments:
                    self.reach_value(value, name)
                for mode in function_modes():
                    self.reach_value(mode, type(mode).__name__)
            try:
                with recorded_by(self), self.calls.listening(not self.reached.reads_ahead):
                    yield
            except Exception as error:
                if self.error is None or self.error is error:
                    raise
            if self.error is not None:  # the step or a library may have caught it
                raise self.error
        finally:
            self.reached.remove_substitutes()
            uninstrument(self._instrumented)
            self._instrumented = []

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Within, reads of attributes are not recorded."""
        # Not by `attribute_set`: the profile function would hear of what it calls.
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def reaching_by_name(self) -> AbstractContextManager[None]:
        """Within, values are reached since code uses their names: the step may not read them."""
        return attribute_set(self, "reached_by_name", True)

    def ignore(self, value: Any) -> None:
        """Do not record what `value` leads to."""
        self._reached[id(value)] = value

    def is_reached(self, value: Any) -> bool:
        """Is it an object whose attributes are recorded?"""
        known = self._objects.get(id(value))
        return known is not None and known.value is value

    def reached_types(self) -> list[type]:
        """The types of the objects that were reached."""
        return [type(known.value) for known in self._objects.values()]

    def make_guards(
        self, is_number_input: Callable[[Any, Any], bool], slots: Any, extra: Any
    ) -> Guards:
        """The guards of what was read, which expect the values of now.

        Args:
            is_number_input: given home and key, whether a number there is a graph input.
            slots: identities of the places of the graph's tensors.
            extra: places to be guarded beside those that were read.
        """
        return Guards(
            [*self.places.values(), *extra],
            [*self.types.values()],
            is_number_input,
            [*self.huge.values()],
            slots,
            self.reached.classes,
            self.reached.namespaces(),
        )

    def watch_new(self, value: Any, name: str) -> None:
        """Take snapshots of objects that capture has made, so that writes into them are found."""
        self.snapshots.snapshot_new(value, name, self._reached)

    def refuse(self, fact: str, reason: str, name: str = "", fix: Fix | None = None) -> None:
        """Raise CaptureError, now and at the end: no guard can cover what the step reads."""
        usual = Fix(f"give {name or 'it'} as an argument", "read before the step")
        self.error = self.error or not_captured(fact, reason, fix or usual)
        raise self.error

    # -- attributes --------------------------------------------------------------------------------

    def read_attribute(self, owner: Any, name: str) -> None:
        """Record that an attribute is read, the first time."""
        if self._is_paused or id(owner) not in self._objects:
            return
        known = self._objects[id(owner)]
        if name in known.names:
            return
        known.names[name] = None
        by_user = is_recorded(sys._getframe(2).f_code.co_filename)
        if name == "__class__" and by_user:
            with self.without_recording():
                self.reached.reach_class(type(owner))
            return
        if name == "__dict__":
            # Torch's own code looks parameters up there, which is no read of all attributes.
            if by_user:
                with self.without_recording():
                    self._read_all(known)
            else:
                del known.names[name]
            return
        before, self._read_by_library = self._read_by_library, not by_user
        try:
            with self.without_recording():
                self._record_read(known, name)
        finally:
            self._read_by_library = before

    def _record_read(self, known: _ReachedObject, name: str) -> None:
        owner, called = known.value, f"{known.name}.{name}"
        if isinstance(owner, torch.optim.Optimizer) and name in ("state", "param_groups"):
            return
        if isinstance(owner, logging.Logger) and name == "_cache":  # it fills as it is asked
            self.read_place(place_of_log_level(known.name, owner), None, shallow=True)
            return
        if name in known.attributes:
            self.read_place(place_of_entry(called, dict_of(owner), name), known.attributes[name])
            return
        if name in known.slots:
            place = place_of_slot(called, owner, known.slots[name])
            self.read_place(place, place.value)
            return
        inside = find_module_dict(owner, name)
        if inside is not None:
            self.read_place(place_of_entry(called, inside, name), inside[name])
            return
        found = self.read_class_attribute(type(owner), name)
        if found is MISSING and not name.startswith("__"):  # a class may come to have it
            kind = type(owner)
            self.read_place(
                place_of_class_attribute(f"{kind.__name__}.{name}", kind, name), MISSING
            )
        if may_be_hidden(name, found) and known.attributes is not None:
            home = dict_of(owner)
            if home is not None:
                self.read_place(place_of_entry(called, home, name), MISSING)
            if found is MISSING and isinstance(owner, nn.Module):
                for within in INSIDE:
                    self.read_place(place_of_entry(called, home[within], name), MISSING)

    def read_all_attributes(self, owner: Any) -> None:
        """Record all attributes of `owner`, if it is an object that was reached."""
        known = self._objects.get(id(owner))
        if known is not None and not known.is_read_whole:
            self._read_all(known)

    def _read_all(self, known: _ReachedObject) -> None:
        known.is_read_whole = True
        home = dict_of(known.value)
        if home is not None:
            self.read_place(Place(known.name, known.value, "__dict__", lambda: home), home)

    def read_class_attribute(self, kind: type, name: str) -> Any:
        """Record that an attribute of a class is read; its value, or MISSING."""
        if name.startswith("__") and name.endswith("__") and name not in WITH_FIELDS:
            return MISSING
        place = place_of_class_attribute(f"{kind.__name__}.{name}", kind, name)
        value = place.value
        if place.identity in self.places:
            return value
        if value is not MISSING and not isinstance(value, types.MemberDescriptorType):
            self.read_place(place, value)
            inner = ("fget", "__func__", "func", "dispatcher")
            for function in (getattr(value, a, None) for a in inner):
                if function is not None:
                    self.reach_value(function, place.name)
        return value

    # -- what is reached ---------------------------------------------------------------------------

    def read_place(self, place: Place, value: Any, shallow: bool = False) -> None:
        """Record that a place is read, where `value` stood before the step.

        Args:
            shallow: record the place alone, not what its value leads to.
        """
        if place.identity in self.places:
            return
        self.places[place.identity] = place
        self._kept_alive[id(place.home)] = place.home
        if place.get is None or place.put is not None or not shallow:
            self.snapshots.snapshot_place(place, value)
        if not shallow:
            self.reach_value(value, place.name)

    def reach_value(self, value: Any, name: str) -> None:
        """Record what `value`, which was there before the step, leads to."""
        if type(value) in PLAIN or id(value) in self._reached:
            return
        if issubclass(type(value), _WEAK):
            if not self.reached_by_name:
                self._refuse_weak(value, name)
            return
        if has_tensor_keys(value) and not self.reached_by_name and not self._read_by_library:
            self.refuse(
                f"the step reads {name}, which finds tensors by identity ({type(value).__name__})",
                "while it is captured others stand for its tensors, which are not found there",
                fix=Fix("names instead", "as named_parameters() gives them, or tensors in a list"),
            )
        if isinstance(value, torch.Tensor) or (
            isinstance(value, PLAIN) and not may_have_attributes(value)
        ):
            return
        self._reached[id(value)] = value
        self.reached.reach_by_kind(value, name)

    def _refuse_weak(self, value: Any, name: str) -> None:
        if self._read_by_library:  # as recurrent layers refer to their weights, which they hold too
            return
        self.refuse(
            f"the step reads {name}, which holds weakly ({type(value).__name__})",
            "what only it refers to may be gone before the next call, and a graph would keep it",
            name,
        )

    def reach_object(self, value: Any, name: str) -> None:
        """Have an object's class tell what is read of it from now on."""
        kind = type(value)
        is_heap_type = kind.__flags__ & (1 << 9)
        if not is_heap_type or not has_settings(kind):
            return
        if not self._instrument_type(kind):
            return
        held = dict_of(value)
        name = self._given_names.get(id(value), name)
        known = _ReachedObject(value, name, dict(held or {}), slots_of(kind))
        self._objects[id(value)] = known
        self.types[id(value)] = (value, kind)
        self.snapshots.snapshot_object(value, name, held, known.slots)
        self.reached.reach_methods(kind, kind.__name__)
        if self.reached.types_read:
            self.reached.reach_class(kind)
        if has_own_getattribute(kind):
            self._read_all(known)
            for key, v in known.attributes.items():
                self.reach_value(v, f"{name}.{key}")

    def _instrument_type(self, kind: type) -> bool:
        if kind in self._instrumented:
            return True
        if instrument(kind):
            self._instrumented.append(kind)
            return True
        return False


# -- writes ----------------------------------------------------------------------------------------

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
        self._owners: dict[int, tuple[Any, str, dict[str, Any], Any]] = {}
        self._containers: dict[int, tuple[Any, str, Any]] = {}
        self._arrays: dict[int, tuple[Any, str, Any, Callable[[], None]]] = {}

    def snapshot_place(self, place: Place, value: Any) -> None:
        """Copy the value of a place."""
        self._places.setdefault(place.identity, (place, value))

    def snapshot_object(self, value: Any, name: str, held: Any, slots: dict[str, Any]) -> None:
        """Copy the attributes of an object: its `__dict__` `held`, and its slots."""
        self._owners[id(value)] = (value, name, dict(held or {}), held)
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

    def snapshot_raw(self, value: Any, name: str) -> None:
        """Copy the content of an object implemented in C."""
        self._arrays[id(value)] = (value, name, read_raw_content(value), make_restorer(value))

    def find_writes(self) -> Iterator[Write]:
        """The changes since the snapshots. What the step changes and puts back is none."""
        dicts = {id(held) for *_, held in self._owners.values()}
        for place, before in self._places.values():
            if place.get is None and id(place.home) in dicts:
                continue  # seen with its owner
            if place.key == "__dict__":
                continue
            after = place.value
            if not _is_same_value(before, after):
                yield _make_place_write(place, before, after)
        replaced = set()
        for owner, name, before, held in self._owners.values():
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
                identity = id(value), "content"
                yield Write(name, identity, *texts, restore, lambda: None, is_repeatable=False)

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
    if type(a) is type(b) and isinstance(a, PLAIN):
        return bool(content_key(a) == content_key(b) if type(a) in PLAIN else a == b)
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
    return Write(
        place.name,
        place.identity,
        before,
        after,
        partial(place.write, before),
        partial(place.write, after),
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
    undo, redo = partial(_refill, value, before), partial(_refill, value, after)
    return Write(name, (id(value), "content"), before, after, undo, redo, is_repeatable)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(content)
