"""The record of what a step reads and writes while it is captured.

A *place* is an attribute, a global or an item. A value that is read is also *reached*: the places
that can be read from it are recorded (`read_record`). It is copied, so that `Snapshots.find_writes`
finds the step's changes.

A `__getattribute__` reports reads of attributes to the record of this thread. While a step is
captured, it is installed in nn.Module, optimizers, schedulers and each class of the user that is
reached (`instrument_class`). Other threads read as usual. But while fakes replace the parameters of
a module, other threads that read the module wait until they are restored (`exclusive_access`).
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn

from partita.capture.capture_context import attribute_set
from partita.capture.code_origin import is_user_module
from partita.capture.fakes import Substitutes
from partita.graph.errors import CaptureError, not_captured
from partita.layout import Fix
from partita.tensor.tensor_state import KEPT_IN_CLASS

from .arguments import is_flattened
from .values import (
    HUGE,
    INSIDE,
    MISSING,
    PLAIN,
    Place,
    base_of_container,
    cached_by_type,
    content_key,
    copy_raw_content,
    count_items,
    dict_of,
    has_type,
    is_container,
    items_of,
    may_have_attributes,
    place_in_namespace,
    place_of_dict,
    place_of_slot,
    read_raw_content,
    restore_raw_content,
    slots_of,
    variables_of,
)

_WEAK = (
    weakref.ref,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    weakref.ProxyType,
    weakref.CallableProxyType,
)


class PlaceRecord:
    """The record of the places (attributes, globals, items) that a step reads in one capture run.

    A base class: `ReadRecord` defines the methods that raise NotImplementedError here.

    Attributes:
        places: the places that were read, in order; the keys are their identities.
        huge: the containers that are not compared deeply, by their ids.
        snapshots: copies of the reached values, to find the step's writes.
        error: a CaptureError to raise at the end of the step, even if the step has caught it.
        reached_by_name: see `reaching_by_name`.
        places_by_name: identities of places whose names occur in code, but which may never have
            been read.
        hashed: the real tensors that the user's code has looked up in, or added to, a set or
            dictionary, by their ids.
    """

    def __init__(self) -> None:
        self.places: dict[tuple[int, Any], Place] = {}
        self.huge: dict[int, Any] = {}
        self.snapshots = Snapshots()
        self.error: CaptureError | None = None
        self.reached_by_name = False
        self._kept_alive: dict[int, Any] = {}  # so that no other object gets its id
        self._reached: dict[int, Any] = {}
        self.places_by_name: set[Any] = set()
        self.hashed: dict[int, torch.Tensor] = {}
        self._unread: dict[int, Any] = {}  # reached only by name, and refused if it is read
        self._is_paused = False
        self._read_by_library = False  # True while torch's code reads

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Stops the recording of attribute reads inside the `with` block."""
        # Not by `attribute_set`: the profile function would see its calls.
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def reaching_by_name(self) -> AbstractContextManager[None]:
        """Returns a context manager. Values recorded inside count as "reached only by name".

        Code contains the names of these values, but may never read them. So they raise no error,
        even if no guard can cover them.
        """
        return attribute_set(self, "reached_by_name", True)

    def ignore(self, value: Any) -> None:
        """Excludes `value` from the record: nothing that it contains is recorded."""
        self._reached[id(value)] = value

    def refuse(self, fact: str, reason: str, name: str = "", fix: Fix | None = None) -> None:
        """Raises CaptureError because the step reads something that cannot be captured.

        If the step catches the error, it is raised again after the run.

        Args:
            fact, reason: what the step reads, and why it cannot be captured.
            name: the name of the value in the default fix.
            fix: the fix that the error proposes; None for the default one.
        """
        usual = Fix(f"give {name or 'it'} as an argument", "read before the step")
        self.error = self.error or not_captured(fact, reason, fix or usual)
        raise self.error

    def read_place(self, place: Place, *before: Any, shallow: bool = False) -> Any:
        """Records that the step reads a place, and the places that can be reached from its value.

        Args:
            before: the value before the step. By default it is the current value.
            shallow: True to record the place alone.

        Returns:
            The value.
        """
        value = before[0] if before else place.value
        if place.identity in self.places:
            if not self.reached_by_name:
                self.places_by_name.discard(place.identity)
            if id(value) in self._unread and not self.reached_by_name:
                del self._unread[id(value)]
                self._reached.pop(id(value), None)
                self.reach_value(value, place.name)
            return value
        self.places[place.identity] = place
        if self.reached_by_name:
            self.places_by_name.add(place.identity)
        self._kept_alive[id(place.home)] = place.home
        if place.get is None or place.put is not None or not shallow:
            self.snapshots.snapshot_place(place, value)
        if not shallow:
            self.reach_value(value, place.name)
        return value

    def reach_value(self, value: Any, name: str) -> None:
        """Records the places that can be reached from a value, such as the items of a list.

        The value must have existed before the step.

        Args:
            name: the value's name in messages.
        """
        if type(value) in PLAIN or id(value) in self._reached:
            return
        # Not by `isinstance`, which reads an object's `__class__`: that may run user code.
        kind: Any = type(value)
        if issubclass(kind, _WEAK):
            if self.note_unread(value):
                return
            self._refuse_weak(value, name)
            return
        if _is_of_threads(kind) and self.note_unread(value):
            return
        if _has_tensor_keys(value) and not (self._read_by_library or self.note_unread(value)):
            self.refuse(
                f"the step reads {name}, which looks up tensors by identity "
                f"({type(value).__name__})",
                "during capture fakes replace tensors, and it does not contain the fakes",
                fix=Fix(
                    "for name, p in model.named_parameters(): ...",
                    "with names as keys, or use a list",
                ),
            )
        if issubclass(kind, torch.Tensor) or (
            issubclass(kind, PLAIN) and not may_have_attributes(value)
        ):
            return
        self._reached[id(value)] = value
        self.reach_by_kind(value, name)

    def note_unread(self, value: Any) -> bool:
        """True if `value` is recorded only because code contains its name ("reached by name").

        The step may never read it, so no error is raised now. If the step reads it later, the error
        is raised then.
        """
        if self.reached_by_name:
            self._unread[id(value)] = value
        return self.reached_by_name

    def _refuse_weak(self, value: Any, name: str) -> None:
        if self._read_by_library:  # recurrent layers also have weak references to their weights
            return
        self.refuse(
            f"the step reads {name}, which holds weak references ({type(value).__name__})",
            "its objects may be freed before the next call, but a graph would keep them alive",
            name,
        )

    def read_attribute(self, owner: Any, name: str) -> None:
        """Records that the step reads the attribute `name` of the object `owner`."""
        raise NotImplementedError

    def read_all_attributes(self, owner: Any) -> None:
        """Records that the step reads all attributes of the object `owner`."""
        raise NotImplementedError

    def reach_by_kind(self, value: Any, name: str) -> None:
        """Records, according to the type of a value, the places that code can reach from it.

        Called when the value is read for the first time.

        Args:
            name: the value's name in messages.
        """
        raise NotImplementedError


@cached_by_type
def _is_of_threads(kind: type) -> bool:
    """True for a thread, and for an object that threads share: an event, a queue, a pool.

    Its state changes whenever another thread runs, like that of a progress bar's monitor.
    """
    if issubclass(kind, threading.local):
        return False
    homes = {base.__module__.split(".")[0].lstrip("_") for base in kind.__mro__}
    return not homes.isdisjoint(("threading", "thread", "queue", "concurrent", "multiprocessing"))


def _has_tensor_keys(value: Any) -> bool:
    """True if `value` is a set or a dictionary with tensors as keys."""
    if not has_type(value, (dict, set, frozenset)) or count_items(value) > HUGE:
        return False
    return any(has_type(key, torch.Tensor) for key in items_of(value)[0] or ())


# -- writes ----------------------------------------------------------------------------------------

_MUTABLE = (list, dict, set, collections.deque)


@dataclass(frozen=True, eq=False)
class Write:
    """One change that a step made to a Python object.

    Attributes:
        place: the attribute, global or item that changed. If an array's content, or a list's length
            or order changed, it is a place without a key.
        before, after: the value before the step, and the value now.
        is_repeatable: True if a later call can make the same change; False if order or length
            change.
        is_of_library: True if a library has made the change, for example to its own counters. A
            library's change matters only if a tensor is stored.
        is_attribute: True if the place is a variable, or an attribute of a user's object.
    """

    place: Place
    before: Any
    after: Any
    is_repeatable: bool = True
    is_attribute: bool = False
    is_of_library: bool = False

    def undo(self) -> None:
        """Restores the value that the place had before the step."""
        self.place.write(self.before)

    def redo(self) -> None:
        """Makes the step's change again. Each call that runs the program does this."""
        self.place.write(self.after)


@dataclass(frozen=True)
class _Copied:
    """A container and a copy of it; for an object's attributes (`owner`), its `__dict__`.

    Attributes:
        is_settings: True if these are attributes of a user's object, which a graph may write.
        is_ordered: True if the order of a dictionary matters.
    """

    name: str
    value: Any
    before: Any
    owner: Any = None
    is_settings: bool = True
    is_ordered: bool = True

    def find_writes(self) -> Iterator[Write]:
        """Yields the changes that were made to the object since it was copied."""
        value, before, dotted = self.value, self.before, self.owner is not None
        if dotted and _has_other_dict(self.owner, value):
            place = place_of_dict(f"{self.name}.__dict__", self.owner)
            yield Write(place, value, place.value, is_repeatable=False)
        elif not self.is_settings:
            yield from self._find_set_names()
        elif has_type(value, dict):
            for key in dict.fromkeys([*before, *_copy(value)]):
                was, now = before.get(key, MISSING), dict.get(value, key, MISSING)
                if not _is_same_value(was, now) and not (dotted and key in INSIDE):
                    name = f"{self.name}.{key}" if dotted else f"{self.name}[{key!r}]"
                    yield Write(Place(name, value, key), was, now, is_attribute=dotted)
            if self.is_ordered and not dotted:
                yield from self._find_new_order()
        elif not self.has_content(value):
            is_set = has_type(value, set)
            now = _copy(value)
            repeatable = before <= now if is_set else len(now) == len(before)
            get, put = partial(_copy, value), partial(_refill, value)
            yield Write(Place(self.name, value, None, get, put), before, get(), repeatable)

    def _find_new_order(self) -> Iterator[Write]:
        """Yields the change of the order of keys that a dictionary had before, if there is one."""
        value = self.value
        now = list(base_of_container(value).keys(value))
        kept = [key for key in self.before if dict.__contains__(value, key)]
        if kept != now[: len(kept)]:
            put = partial(_reorder_keys, value)
            place = Place(f"the order of {self.name}", value, None, lambda: now, put)
            yield Write(place, [*self.before], now, is_repeatable=False)

    def _find_set_names(self) -> Iterator[Write]:
        """Yields the names set in a class, module or function, or in an object of a library."""
        users = _is_of_user(self.owner)
        for key in [*self.value.keys() | self.before.keys()]:
            was, now = self.before.get(key, MISSING), self.value.get(key, MISSING)
            if was is now or key in _SET_BY_PYTHON or _is_same_value(was, now):
                continue
            if Substitutes.has(was) or Substitutes.has(now) or key.startswith(KEPT_IN_CLASS):
                continue
            place = place_in_namespace(f"{self.name}.{key}", self.owner, key)
            yield Write(place, was, now, is_attribute=users, is_of_library=not users)

    def has_content(self, value: Any) -> bool:
        """True if `value` has the same content as the object had when it was copied."""
        one, other = self.before, _copy(value)
        if isinstance(one, set):
            return bool(one == other)
        if isinstance(one, dict) and [*one] != [*other]:
            return False
        values = (one.values(), other.values()) if isinstance(one, dict) else (one, other)
        return len(one) == len(other) and all(map(_is_same_value, *values))


class Snapshots:
    """Copies of the values that a step reaches, to find the step's writes afterwards.

    The copies are made before the step can change the values.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], tuple[Place, Any]] = {}
        self._containers: dict[int, _Copied] = {}
        self._raw: list[tuple[Place, Any]] = []

    def snapshot_place(self, place: Place, value: Any) -> None:
        """Stores the value that a place has now, to find out later if it was replaced."""
        self._places.setdefault(place.identity, (place, value))

    def snapshot_object(self, value: Any, name: str) -> None:
        """Copies the attributes of an object: its `__dict__`, and its slots."""
        held = dict_of(value)
        if held is not None:  # which may have been reached before, as `vars(value)`
            copied = self._containers.get(id(held))
            before = dict(held) if copied is None else copied.before
            self._containers[id(held)] = _Copied(name, held, before, value)
            for inside in INSIDE if has_type(value, nn.Module) else ():
                if inside in held:  # a module sets its submodules there without reading it by name
                    self.snapshot_container(held[inside], f"{name}.{inside}", is_ordered=False)
        for key, descriptor in slots_of(type(value)).items():
            place = place_of_slot(f"{name}.{key}", value, descriptor)
            self.snapshot_place(place, place.value)

    def snapshot_namespace(self, value: Any, name: str) -> None:
        """Copies the own attributes of a class, module or function, or a dict of variables."""
        held = variables_of(value)
        of = id(value if has_type(value, type) else held)
        if of not in self._containers:
            self._containers[of] = _Copied(name, held, dict(held), value, is_settings=False)

    def snapshot_cache(self, cache: Any, name: str) -> None:
        """Stores which results a cache has now, to detect that the step adds some.

        Args:
            cache: an `lru_cache` function or a weak dictionary.
            name: its name in messages.
        """
        before = {id(v): v for v in _list_held(cache)}

        def list_made() -> tuple[Any, ...]:
            return tuple([v for v in _list_held(cache) if id(v) not in before])

        def forget(_: Any) -> None:
            if has_type(cache, functools._lru_cache_wrapper):
                cache.cache_clear()
            else:
                cache.clear()

        place = Place(f"the cache of {name}", cache, "cache", list_made, forget)
        self.snapshot_place(place, ())

    def value_before(self, home: Any, key: Any) -> Any:
        """Returns the value that `home[key]` had before the step.

        If the dictionary was not copied, this is the current value.
        """
        copied = self._containers.get(id(home))
        return (home if copied is None else copied.before).get(key, MISSING)

    def snapshot_container(self, value: Any, name: str, is_ordered: bool = True) -> None:
        """Copies the items of a container, if it is mutable.

        Args:
            value: the container.
            name: its name in messages.
            is_ordered: True if the order of a dictionary's entries matters.
        """
        if has_type(value, types.SimpleNamespace):
            self.snapshot_object(value, name)
        elif has_type(value, _MUTABLE):
            copied = _Copied(name, value, _copy(value), is_ordered=is_ordered)
            self._containers.setdefault(id(value), copied)

    def snapshot_new(self, value: Any, name: str, known: dict[int, Any]) -> None:
        """Copies an argument that capture has rebuilt, with everything in it, to find writes to it.

        Args:
            known: objects that are not copied, by id. Copied containers are added.
        """
        if id(value) in known:
            return
        if is_flattened(value):
            self.snapshot_object(value, name)
            for key, v in (dict_of(value) or {}).items():
                self.snapshot_new(v, f"{name}.{key}", known)
        if is_container(value):
            known[id(value)] = value
            self.snapshot_container(value, name)
            keys, values = items_of(value)
            for key, v in zip(keys or range(len(values)), values, strict=False):
                self.snapshot_new(v, f"{name}[{key!r}]", known)

    def snapshot_raw(self, value: Any, name: str) -> None:
        """Copies the content of an array, a buffer or a similar object, to detect changes."""
        copy = copy_raw_content(value)
        place = Place(name, value, None, None, lambda _: restore_raw_content(value, copy))
        self._raw.append((place, read_raw_content(value)))

    def find_writes(self) -> Iterator[Write]:
        """Yields each change that the step has made to a copied object and has not undone.

        If torch has replaced a container by one with equal content, as a GradScaler does, the
        changes of the old one are undone and not yielded.
        """
        with_owner = {
            i
            for i, copied in self._containers.items()
            if copied.owner is not None and copied.is_settings
        }
        for place, before in self._places.values():
            seen = (place.get is None and id(place.home) in with_owner) or self._is_in_copy(place)
            if not seen and place.key != "__dict__" and not _is_same_value(before, place.value):
                is_global = has_type(place.home, dict) and "__builtins__" in place.home
                is_attribute = is_global or place.put is not None
                is_cache = place.key == "cache" and has_type(place.home, _CACHES)
                yield Write(
                    place,
                    before,
                    place.value,
                    is_attribute=is_attribute and not is_cache,
                    is_of_library=is_cache,
                )
        replaced = set()
        for copied in sorted(self._containers.values(), key=lambda copied: copied.owner is None):
            for write in [*copied.find_writes()]:
                if _is_of_torch(copied.owner) and self._is_replaced(write.before, write.after):
                    replaced.add(id(write.before))
                elif id(copied.value) in replaced:
                    write.undo()
                else:
                    yield write
        for place, content in self._raw:
            if read_raw_content(place.home) != content:
                yield Write(place, place.home, "another content", is_repeatable=False)

    def _is_in_copy(self, place: Place) -> bool:
        """True if `place` is an attribute that `snapshot_namespace` has copied."""
        home = place.home
        owners = home.__mro__ if has_type(home, type) else (home,)
        copies = [self._containers.get(id(o)) for o in owners]
        found = [copied for copied in copies if copied is not None and not copied.is_settings]
        return any(place.key in copied.value or place.key in copied.before for copied in found)

    def _is_replaced(self, before: Any, after: Any) -> bool:
        """True if `after` is another container, with the content of `before` when that was copied.

        A GradScaler makes a new dictionary of its optimizers after each step, so that its writes to
        the old one have no effect.
        """
        copied = self._containers.get(id(before))
        if copied is None or before is after or type(before) is not type(after):
            return False
        factories = {
            v.default_factory if isinstance(v, collections.defaultdict) else None
            for v in (before, after)
        }
        return len(factories) == 1 and copied.has_content(after)


def _is_of_user(space: Any) -> bool:
    """True if a class, module, function or dictionary of globals is the user's.

    Other builtin objects, such as exceptions, count too: only user code sets attributes on them.
    """
    if type(space) is dict:
        return is_user_module(space.get("__name__"))
    if has_type(space, types.ModuleType):
        return is_user_module(space.__name__)
    if has_type(space, (type, types.FunctionType)):
        return is_user_module(space.__module__)
    kind = type(space)
    return kind.__module__ in ("builtins", "functools", "_io") or is_user_module(kind.__module__)


_CACHES = (functools._lru_cache_wrapper, weakref.WeakKeyDictionary)


def _list_held(cache: Any) -> list[Any]:
    """Returns the results that a cache keeps, and other objects to which it refers."""
    if has_type(cache, weakref.WeakKeyDictionary):
        return [*cache.values()]
    held = [v for v in gc.get_referents(cache) if v is not vars(cache)]
    return [*held, *itertools.chain(*[v.values() for v in held if type(v) is dict])]


def _has_other_dict(owner: Any, held: Any) -> bool:
    """True if an object's `__dict__` is not `held`."""
    return owner is not held and not has_type(owner, type) and dict_of(owner) is not held


_SET_BY_PYTHON = frozenset(
    "__getattribute__ __slotnames__ __annotations__ __builtins__ _abc_impl __abstractmethods__ "
    "__warningregistry__ __wrapped__".split()
)
"""Names that Python or a capture sets itself."""


def _is_of_torch(owner: Any) -> bool:
    """True for a torch object that is not a module: nothing else refers to its containers."""
    return type(owner).__module__.startswith("torch.") and not has_type(owner, nn.Module)


def _copy(value: Any) -> Any:
    keys, values = items_of(value)
    if keys is None:
        return values
    return set(keys) if has_type(value, set) else dict(zip(keys, values, strict=True))


def _is_same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if has_type(a, types.MethodType) and has_type(b, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if type(a) is not type(b):
        return False
    if type(a) in PLAIN:
        return bool(content_key(a) == content_key(b))
    if has_type(a, tuple):
        return len(a) == len(b) and all(map(_is_same_value, a, b))
    return has_type(a, (*PLAIN, frozenset)) and bool(a == b)


def _reorder_keys(container: Any, keys: list[Any]) -> None:
    """Puts the items of a dictionary in the order of `keys`."""
    base, held = base_of_container(container), _copy(container)
    for key in keys:
        base.pop(container, key, None)
        base.__setitem__(container, key, held[key])


def _refill(container: Any, content: Any) -> None:
    base = base_of_container(container)
    base.clear(container)
    (base.update if base is set else base.extend)(container, content)


# -- instrumented classes --------------------------------------------------------------------------


class _Recording(threading.local):
    """The record to which this thread's reads are reported."""

    record: PlaceRecord | None = None


_recording = _Recording()
_LOCK = threading.RLock()
_FREED = threading.Condition(_LOCK)
_EXCHANGED: dict[int, int] = {}  # by id of a module: the thread that has replaced its tensors
_INSTALLED: dict[type, int] = {}  # by class: the number of captures that instrument it
_PATIENCE = 5.0  # seconds to wait for threads that are reading an attribute


def instrument_class(kind: type) -> bool:
    """Makes the class `kind` record reads of its instances' attributes.

    `uninstrument_classes` undoes it.

    Returns:
        True if that is possible. It is impossible for classes implemented in C.
    """
    with _LOCK:
        if kind not in _INSTALLED:
            try:
                kind.__getattribute__ = _make_recording_getter(kind)  # type: ignore[assignment]
            except TypeError:
                return False
            _INSTALLED[kind] = 0
        _INSTALLED[kind] += 1
        return True


def uninstrument_classes(kinds: Iterable[type]) -> None:
    """Undoes one call of `instrument_class` for each of the classes `kinds`."""
    with _LOCK:
        for kind in kinds:
            _INSTALLED[kind] -= 1
            if _INSTALLED[kind]:
                continue
            del _INSTALLED[kind]
            installed = kind.__dict__.get("__getattribute__")
            if installed is None or not hasattr(installed, "_partita_own"):
                continue  # the program has replaced it
            if installed._partita_own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = installed._partita_own  # type: ignore[method-assign]


def _make_recording_getter(kind: type) -> Callable[[Any, str], Any]:
    own = kind.__dict__.get("__getattribute__")
    usual: Any = own or kind.__getattribute__
    while hasattr(usual, "_partita_usual"):  # a base is instrumented, too
        usual = usual._partita_usual

    def __getattribute__(self: Any, name: str) -> Any:
        record = _recording.record
        if record is not None:
            record.read_attribute(self, name)
        elif _EXCHANGED and id(self) in _EXCHANGED:
            _wait_for((id(self),))
        return usual(self, name)

    __getattribute__._partita_own = own  # type: ignore[attr-defined]
    __getattribute__._partita_usual = usual  # type: ignore[attr-defined]
    return __getattribute__


_RecordedModule: Any = type(
    "module",
    (types.ModuleType,),
    {"__getattribute__": _make_recording_getter(types.ModuleType)},
)
_INSTALLED_IN: collections.Counter[int] = collections.Counter()  # captures by id of a module


def instrument_module(module: types.ModuleType) -> bool:
    """Makes a module record reads of its attributes, until `uninstrument_module`.

    Returns:
        True if that is possible. It is impossible for modules whose class is not the standard one.
    """
    with _LOCK:
        if type(module) is types.ModuleType:
            module.__class__ = _RecordedModule
        if type(module) is _RecordedModule:
            _INSTALLED_IN[id(module)] += 1
        return type(module) is _RecordedModule


def uninstrument_module(module: types.ModuleType) -> None:
    """Undoes one call of `instrument_module(module)`."""
    with _LOCK:
        _INSTALLED_IN[id(module)] -= 1
        if not _INSTALLED_IN[id(module)]:
            del _INSTALLED_IN[id(module)]
            module.__class__ = types.ModuleType


def count_own_attributes(kind: type) -> int:
    """Returns the number of attributes of the class `kind`, partita's not included.

    The number shows if attributes were added.
    """
    held = vars(kind)
    added = getattr(held.get("__getattribute__"), "_partita_own", 0) is None
    return len(held) - added - sum(key.startswith(KEPT_IN_CLASS) for key in held)


def has_own_getattribute(kind: type) -> bool:
    """True if the class `kind` or one of its bases defines `__getattribute__` in Python.

    If so, reading an attribute runs code of the user.
    """
    usual = kind.__getattribute__
    return hasattr(getattr(usual, "_partita_usual", usual), "__code__")


_READERS = frozenset((nn.Module.__getattr__.__code__, _make_recording_getter(nn.Module).__code__))


def recorded_by(record: PlaceRecord) -> AbstractContextManager[None]:
    """Returns a context manager. This thread's reads of attributes inside go to `record`."""
    return attribute_set(_recording, "record", record)


@contextmanager
def exclusive_access(objects: Iterable[Any]) -> Iterator[None]:
    """Makes other threads wait if they read attributes of these modules, inside the `with` block.

    Other threads that capture a step of the modules wait, too. Inside the block, fakes replace the
    modules' parameters, which other threads must not see.
    """
    ids = [id(o) for o in objects]
    with _FREED:
        _wait_for(ids)
        mine = [i for i in ids if i not in _EXCHANGED]
        _EXCHANGED.update(dict.fromkeys(mine, get_ident()))
    instrument_class(nn.Module)
    try:
        # A thread that is reading an attribute now must still get the real parameter.
        until = time.monotonic() + _PATIENCE
        while _others_read() and time.monotonic() < until:
            threading.Event().wait(0.001)
        yield
    finally:
        with _FREED:
            for i in mine:
                _EXCHANGED.pop(i, None)
            _FREED.notify_all()
        uninstrument_classes([nn.Module])


def _others_read() -> bool:
    """True if another thread is reading a module's attribute, and is not waiting there."""
    me = get_ident()
    return any(t != me and _is_reading(frame) for t, frame in sys._current_frames().items())


def _is_reading(frame: FrameType | None) -> bool:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return _wait_for.__code__ not in codes and not _READERS.isdisjoint(codes)


def _wait_for(ids: Iterable[int]) -> None:
    thread = get_ident()
    with _FREED:
        while any(_EXCHANGED.get(i, thread) != thread for i in ids):
            _FREED.wait()  # releases the lock, however often this thread has taken it
