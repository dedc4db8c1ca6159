"""Reached values: what each value that a captured step reaches leads to, which it may read unseen.

A function leads to the globals, closure cells, defaults and attributes of modules that its bytecode
names, when its code runs for the first time; a class, module or function to variables
of the names that code asks for; code that reflects (`getattr(x, key)`, `vars(x)`) to all of their
names. Containers are recorded whole, a bound method leads to its owner. What no
guard can cover, as an iterator, is refused.
"""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import builtins
import collections
import contextvars
import enum
import functools
import gc
import logging
import operator
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ..capture.symbolic import Substitutes
from .calls import Calls, read_ambient, read_environment_of, refuse_if_random
from .codes import (
    dotted_names,
    global_names,
    imported_names,
    is_recorded,
    is_user_module,
    names_asked_for,
    reflects,
    strings_of,
)
from .guards import Guards, function_modes
from .places import (
    INSIDE,
    WITH_FIELDS,
    Place,
    cell_content,
    dict_of,
    find_module_dict,
    has_settings,
    is_iterator,
    may_be_hidden,
    names_of_class,
    place_of_cell,
    place_of_class_attribute,
    place_of_context_variable,
    place_of_entry,
    place_of_function_part,
    place_of_hidden_builtin,
    place_of_log_level,
    place_of_slot,
    place_of_tensor_attribute,
    runs_in_frame,
    slots_of,
    variables_of,
)
from .record import PlaceRecord, has_own_getattribute, instrument, recorded_by, uninstrument
from .values import (
    HUGE,
    MISSING,
    PLAIN,
    brief,
    dict_of_view,
    has_raw_content,
    holds_no_more,
    is_container,
    is_shared_memory,
    items_of,
)

_MODULES = vars(nn.modules.module)
_GLOBAL_HOOKS = [  # private torch: hooks of all modules, which each call of a module reads
    key for key in _MODULES if key.startswith("_global_") and key.endswith("_hooks")
]


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


class ReadRecord(PlaceRecord):
    """What one run of a step under capture reads, and the functions of it that run.

    Args:
        names: by id, the names of modules and optimizers that were found before the run.

    Attributes:
        codes: by id, the code objects that ran.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.codes: dict[int, CodeType] = {}
        self._given_names = names
        self._objects: dict[int, _ReachedObject] = {}
        self._types: dict[int, tuple[Any, type]] = {}  # objects whose type is guarded
        self._instrumented: list[type] = []
        # Whether a function's names are recorded when it is reached and not when it runs: where
        # another profiler listens, calls are not seen.
        self._reads_ahead = False
        self._constants: set[str] = set()  # the strings in the code that ran
        self._types_read = False  # whether some code names `type`, and may read any object's class
        self._users_classes: list[type] = []  # whose number of attributes is guarded
        self._waiting: dict[int, list[Any]] = {}  # by code: functions that have not run
        self._codes_of_functions: set[int] = set()
        # The user's modules and classes, and their names.
        self._namespaces: dict[int, tuple[Any, str]] = {}
        self._without_attributes: dict[int, tuple[Any, str]] = {}  # functions without attributes
        self._names_asked: set[str] = set()  # names that code may ask objects for
        self._super_names: set[str] = set()  # names in code that may call `super()`
        self._classes: dict[int, type] = {}
        self._by_operators: dict[int, tuple[type, str]] = {}  # by code: `__len__` and others
        self._substitutes = Substitutes()

    @contextmanager
    def recording(self, step: Any, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Within, what this thread reads is recorded.

        Args:
            step: what is going to run.
            arguments: name and value of what it can read without reading a place.

        Raises:
            CaptureError: the step read what no guard can cover.
        """
        calls = Calls(self, self.enter_frame, self.reach_globals)
        try:
            self._instrument_type(nn.Module)
            # Where another profiler is set, calls are not seen: functions are read when reached.
            self._reads_ahead = sys.getprofile() is not None
            with self.without_recording():
                self.read_place(Place("the step", self, "step", lambda: step), step)
                for key in _GLOBAL_HOOKS:
                    self.read_place(place_of_entry(key, _MODULES, key), _MODULES[key])
                for name, value in arguments:
                    self.reach_value(value, name)
                for mode in function_modes():
                    self.reach_value(mode, type(mode).__name__)
            try:
                with recorded_by(self), calls.listening(not self._reads_ahead):
                    yield
            except Exception as error:
                if self.error is None or self.error is error:
                    raise
            if self.error is not None:  # the step or a library may have caught it
                raise self.error
        finally:
            self._substitutes.take_away()
            uninstrument(self._instrumented)
            self._instrumented = []

    def is_reached(self, value: Any) -> bool:
        """Is it an object whose attributes are recorded?"""
        known = self._objects.get(id(value))
        return known is not None and known.value is value

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
            [*self._types.values()],
            is_number_input,
            [*self.huge.values()],
            slots,
            self._users_classes,
            [
                (name, variables_of(space), frozenset(self._names_asked))
                for space, name in (self._without_attributes | self._namespaces).values()
                if not isinstance(space, type)
            ],
        )

    def watch_new(self, value: Any, name: str) -> None:
        """Take snapshots of objects that capture has made, so that writes into them are found."""
        self.snapshots.snapshot_new(value, name, self._reached)

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
                self.reach_class(type(owner))
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

    def reach_by_kind(self, value: Any, name: str) -> None:
        """Record what `value`, which is reached for the first time, leads to.

        Raises:
            CaptureError: no guard can cover it: an iterator, shared memory, a generator.
        """
        record = self
        if isinstance(value, enum.Enum):
            self._reach_member(value, name)
        elif isinstance(value, threading.local):
            _reach_local(record, value, name)
        elif is_container(value):
            _reach_container(record, value, name)
        elif has_raw_content(value):
            read_ambient(record, type(value).__module__)
            record.snapshots.snapshot_raw(value, name)
        elif (under := dict_of_view(value)) is not None:
            record.reach_value(under, name)
        elif is_shared_memory(value):
            record.refuse(
                f"the step reads {name}, memory that others may write ({type(value).__name__})",
                "a graph would always have what was there at its capture",
                name,
            )
        elif isinstance(value, types.CellType):
            place = place_of_cell(name, value)
            record.read_place(place, place.value)
        elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
            self.note_asked_names(_names_asked_by(value))
        elif isinstance(value, types.ModuleType):
            read_ambient(record, value.__name__)
            if is_user_module(value.__name__):
                self.reach_namespace(value, name)
            elif value.__name__ == "os" and self._reads_ahead:
                read_environment_of(record, self._constants)
        elif isinstance(value, type):
            read_ambient(record, value.__module__)
            if isinstance(value, abc.ABCMeta) and not value.__module__.startswith("torch"):
                _read_registry(record, value, name)
            if is_user_module(value.__module__):
                self.reach_class(value)
                self.reach_methods(value, name)
                record.reach_value(type(value), type(value).__name__)
        elif isinstance(value, types.FunctionType):
            self.reach_function(value, name)
        elif isinstance(value, types.MethodType):
            record.reach_value(value.__self__, name)
            record.reach_value(value.__func__, name)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            read_ambient(record, getattr(value, "__module__", None))
            refuse_if_random(record, value, name)
            if not isinstance(value.__self__, (types.ModuleType, type)):
                record.reach_value(value.__self__, f"the owner of {name}")
            record.read_all_attributes(value.__self__)  # code in C reads them unseen
        elif isinstance(value, contextvars.ContextVar):
            place = place_of_context_variable(name, value)
            record.read_place(place, place.value)
        elif isinstance(value, (staticmethod, classmethod)):
            record.reach_value(value.__func__, name)
        elif is_iterator(value):
            if record.reached_by_name:
                return
            record.refuse(
                f"the step reads {name}, an iterator ({type(value).__name__})",
                "what it gives next is not the same in the next call, and a graph would always "
                "have the first",
                name,
            )
        else:
            if not record.reached_by_name:
                refuse_if_random(record, value, name)
            read_ambient(record, type(value).__module__)
            if isinstance(value, BaseException):
                place = place_of_function_part(f"{name}.args", value, "args")
                record.read_place(place, place.value)
            record.reach_object(value, name)
            if isinstance(value, functools._lru_cache_wrapper):
                self.reach_cached_function(value.__wrapped__, name)

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
        self._types[id(value)] = (value, kind)
        self.snapshots.snapshot_object(value, name, held, known.slots)
        self.reach_methods(kind, kind.__name__)
        if self._types_read:
            self.reach_class(kind)
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

    def _reach_member(self, value: enum.Enum, name: str) -> None:
        """Record the attributes of an enum's member: its value may be mutable."""
        held = dict_of(value)
        if held is not None and is_user_module(type(value).__module__):
            self.read_place(Place(name, value, "__dict__", lambda: held), held)
            self.reach_methods(type(value), type(value).__name__)

    def reach_function(self, f: types.FunctionType, name: str) -> None:
        """Note a function that the step may call; what it names is read when it runs."""
        code = f.__code__
        recorded = is_recorded(code.co_filename)
        if hasattr(f, "__wrapped__"):
            self.reach_value(f.__wrapped__, name)
        if not recorded:
            read_ambient(self, f.__module__)
            # A library's wrapper (as of torch.no_grad): what its closure has of the user's.
            for where in f.__closure__ or ():
                inner = cell_content(where)
                if isinstance(inner, (types.FunctionType, types.MethodType, functools.partial)):
                    self.reach_value(inner, name)
                elif type(inner) in (dict, list, set):  # as functools.singledispatch has them
                    self.read_place(place_of_cell(f"what {name} holds", where), inner)
            return
        if f.__dict__:
            self.reach_namespace(f, f.__name__)
        if self._reads_ahead:
            self._enter_function(f, name)
            self._enter_code(code, f.__globals__)
        else:
            self._waiting.setdefault(id(code), []).append((f, name))

    def reach_methods(self, kind: type, name: str) -> None:
        """Note the methods of a class, which are entered when they run."""
        self._classes[id(kind)] = kind
        self._read_bases(kind)
        for base in kind.__mro__:
            if id(base) in self._codes_of_functions:
                continue
            if base.__module__.startswith("torch.nn.modules") and base is not nn.Module:
                self._reach_layer(base)
            if not is_user_module(base.__module__):
                continue
            self._codes_of_functions.add(id(base))
            self._users_classes.append(base)
            for key, value in list(vars(base).items()):
                for f in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
                    if isinstance(f, types.FunctionType):
                        self.reach_value(f, f"{name}.{key}")
                        if key.startswith("__"):
                            self._by_operators[id(f.__code__)] = (base, key)

    def _reach_layer(self, kind: type) -> None:
        """Record functions that a class of torch's layers calls: a program may replace them."""
        self._codes_of_functions.add(id(kind))
        for f in list(vars(kind).values()):
            if isinstance(f, types.FunctionType):
                self._read_libraries(f.__code__, {"F": f.__globals__.get("F")})

    def reach_cached_function(self, f: Any, name: str) -> None:
        """Enter a cached function at once: results cached before the step came of its reads."""
        self.reach_value(f, name)
        waiting = self._waiting.pop(id(getattr(f, "__code__", None)), ())
        for f, called in waiting:
            self._enter_function(f, called)
            self._enter_code(f.__code__, f.__globals__)

    def reach_globals(self, variables: dict[str, Any]) -> None:
        """Record all globals: `globals()` is called."""
        with self.without_recording():
            self.reach_namespace(variables, "globals()")
            _read_all_names(self, variables, "globals()")

    def reach_namespace(self, space: Any, name: str) -> None:
        """Record variables of a module, class or function by the names used, now and later."""
        if id(space) not in self._namespaces:
            self._namespaces[id(space)] = (space, name)
            self._read_namespace(space, name, self._names_asked)

    def reach_class(self, kind: type) -> None:
        """Record the attributes of a class of the user's by the names in use."""
        if is_user_module(kind.__module__):
            self.reach_namespace(kind, kind.__name__)

    # -- what runs ---------------------------------------------------------------------------------

    def enter_frame(self, frame: FrameType) -> None:
        """Record what a function of the user's names, where its code runs for the first time."""
        code = frame.f_code
        back = frame.f_back
        if code.co_name == "<module>" and back and "importlib" in back.f_code.co_filename:
            return  # it is imported now
        operator = self._by_operators.pop(id(code), None)
        if operator is not None:  # Python looked it up in the class, without `__getattribute__`
            kind, key = operator
            place = place_of_class_attribute(f"{kind.__name__}.{key}", kind, key)
            self.read_place(place, place.value, shallow=True)
        new = id(code) not in self.codes
        waiting = self._waiting.pop(id(code), None)
        if not new and waiting is None:
            return
        with self.without_recording():
            if new:
                self._enter_code(code, frame.f_globals)
                if (
                    waiting is None
                    and code.co_freevars
                    and id(code) not in self._codes_of_functions
                ):
                    waiting = [
                        (f, f.__qualname__)
                        for f in gc.get_referrers(code)
                        if isinstance(f, types.FunctionType) and runs_in_frame(f, frame)
                    ]
            for f, name in waiting or ():
                self._enter_function(f, name)

    def _enter_code(self, code: CodeType, variables: dict[str, Any]) -> None:
        if id(code) in self.codes:
            return
        self.codes[id(code)] = code
        for const in code.co_consts:
            if isinstance(const, CodeType):  # a nested function: its cells are of this one
                self._codes_of_functions.add(id(const))
                self.ignore(const)
                if self._reads_ahead:
                    self._enter_code(const, variables)
        self._constants |= strings_of(code)
        for name in global_names(code):
            if name in Substitutes.of_builtins:
                place = place_of_hidden_builtin(variables, name)
                self.read_place(place, place.value)
                self._substitutes.put(variables, name)
            elif name != "super":  # a builtin may come to be hidden by a global
                value = variables.get(name, MISSING)
                self.read_place(place_of_entry(name, variables, name), value)
                if value is MISSING:
                    self._read_builtin(name, variables)
                elif reflects(code):
                    _read_all_names(self, value, name)
        self._read_libraries(code, variables)
        if "type" in global_names(code) and not self._types_read:
            self._types_read = True
            for known in [*self._objects.values()]:
                self.reach_class(type(known.value))
        for name in imported_names(code, variables.get("__package__")):
            _read_module(self, name)
            module = sys.modules.get(name)
            if module is not None:
                self.reach_value(module, name)
        if "__class__" in code.co_freevars:
            self._super_names |= names_asked_for(code)
            for kind in list(self._classes.values()):
                self._read_bases(kind)
        self.note_asked_names(names_asked_for(code))

    def note_asked_names(self, names: set[str]) -> None:
        """Note names that reached objects, classes and modules may be asked for."""
        new = names - self._names_asked
        self._names_asked |= new
        for key in sorted(new):
            if not key.startswith("__"):
                place = place_of_tensor_attribute(key)
                self.read_place(place, place.value, shallow=not _is_users(place.value))
        for space, name in list(self._namespaces.values()):
            self._read_namespace(space, name, new)

    def _enter_function(self, f: types.FunctionType, name: str) -> None:
        if not isinstance(name, str):
            return
        for key, where in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            place = place_of_cell(key, where)
            self.read_place(place, place.value)
            if reflects(f.__code__):
                _read_all_names(self, place.value, key)
            if isinstance(place.value, types.ModuleType):
                self._read_libraries(f.__code__, {key: place.value})
        if f.__dict__:
            self.reach_namespace(f, f.__name__)
        else:
            self._without_attributes[id(f)] = (f, f.__name__)
        self.read_place(place_of_function_part(name, f, "__code__"), f.__code__)
        for key, called in (("__defaults__", "default"), ("__kwdefaults__", "default")):
            self.read_place(
                place_of_function_part(f"{called} of {f.__name__}", f, key), getattr(f, key)
            )

    def _read_builtin(self, name: str, variables: dict[str, Any]) -> None:
        """Record a builtin, Python's own or one that a program has added."""
        held = variables.get("__builtins__", builtins)
        held = held if isinstance(held, dict) else vars(held)
        value = held.get(name, MISSING)
        own = getattr(value, "__module__", "builtins") == "builtins" and callable(value)
        self.read_place(place_of_entry(name, held, name), value, shallow=own)

    # -- by name -----------------------------------------------------------------------------------

    def _read_libraries(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Record what code reads of modules of torch and Python, which a program may replace."""
        for root, *names in dotted_names(code):
            value, called = variables.get(root), root
            for key in names:
                if not isinstance(value, types.ModuleType) or is_user_module(value.__name__):
                    break
                held, called = vars(value), f"{called}.{key}"
                value = held.get(key)
                if value is sys.modules:
                    read_modules(self, code)
                if key in held and value is not sys.modules:
                    self.read_place(place_of_entry(called, held, key), value, shallow=True)
                    if isinstance(value, abc.ABCMeta) and not value.__module__.startswith("torch"):
                        _read_registry(self, value, called)

    def _read_bases(self, kind: type) -> None:
        """Record what `super()` may return: attributes of a base that another class overrides."""
        for base in kind.__mro__[1:]:
            if is_user_module(base.__module__):
                for key in sorted(self._super_names & vars(base).keys()):
                    self.read_class_attribute(base, key)

    def _read_namespace(self, space: Any, name: str, names: set[str]) -> None:
        if isinstance(space, type):
            for key in sorted(names & names_of_class(space)):
                self.read_class_attribute(space, key)
            return
        held = variables_of(space)
        found = sorted(names & held.keys())
        if not found:  # as of most: they are asked for the names of each new code
            return
        with self.reaching_by_name():
            for key in found:
                if not key.startswith("__") and not Substitutes.has(held[key]):
                    self.read_place(place_of_entry(f"{name}.{key}", held, key), held[key])


def _is_users(value: Any) -> bool:
    """Is it the user's, set as an attribute of something of torch?"""
    return value is not MISSING and is_user_module(getattr(value, "__module__", None))


# -- containers ------------------------------------------------------------------------------------


def _reach_container(record: ReadRecord, value: Any, name: str) -> None:
    """Record what a container holds, keys too."""
    record.snapshots.snapshot_container(value, name)
    if hasattr(type(value), "__len__") and len(value) > HUGE:
        _record_entries(record, value, name)
        return
    if isinstance(value, collections.defaultdict):
        _read_factory(record, value, name)
    keys, values = items_of(value)
    for key in keys or ():
        if type(key) not in PLAIN:
            record.reach_value(key, f"a key of {name}")
    for i, v in enumerate(values):
        key = keys[i] if keys is not None else i
        if type(v) not in PLAIN:
            dotted = isinstance(value, types.SimpleNamespace)
            record.reach_value(v, f"{name}.{key}" if dotted else f"{name}[{key!r}]")
    if hasattr(type(value), "__dictoffset__") and type(value).__module__ not in (
        "builtins",
        "collections",
        "types",
        "functools",
    ):
        record.reach_object(value, name)


def _read_factory(record: ReadRecord, value: collections.defaultdict[Any, Any], name: str) -> None:
    """Record the `default_factory` of a defaultdict."""

    def set_factory(factory: Any) -> None:
        value.default_factory = factory

    called, key = f"{name}.default_factory", ("default_factory",)
    place = Place(called, value, key, lambda: value.default_factory, set_factory)
    record.read_place(place, value.default_factory)


def _record_entries(record: ReadRecord, value: Any, name: str) -> None:
    """Record a huge container by its entries, and warn where an entry may change in place."""
    record.huge[id(value)] = value
    entries = value.values() if hasattr(value, "values") else value
    inner = next((v for v in entries if not holds_no_more(v)), None)
    if inner is not None and not record.reached_by_name:
        warnings.warn(
            f"{name} has {len(value):,} entries: a compiled step sees when one is replaced, "
            f"not when something within one changes ({brief(inner)}). Give what the step needs "
            "of it as an argument",
            stacklevel=2,
        )


def _reach_local(record: ReadRecord, value: threading.local, name: str) -> None:
    """Record what this thread holds in a `threading.local`, and which thread it is."""
    record.read_place(Place("the thread", value, "thread", threading.current_thread), None, True)
    held = value.__dict__
    record.read_place(Place(name, value, "__dict__", lambda: value.__dict__), held)


# -- reflection ------------------------------------------------------------------------------------

# Special attributes of classes and functions that reflection reads.
_CLASS_ATTRIBUTES = """__annotations__ __doc__ __name__ __qualname__ __module__ __match_args__
    __dataclass_fields__""".split()
_FUNCTION_ATTRIBUTES = """__code__ __defaults__ __kwdefaults__ __annotations__ __doc__ __name__
    __qualname__ __module__ __signature__""".split()


def _read_all_names(record: ReadRecord, space: Any, name: str) -> None:
    """Record all that a class, a module or a function has, and that it has no more."""
    if isinstance(space, type):
        if not is_user_module(space.__module__):
            return
        for key in [key for key in vars(space) if not _is_special_name(key)]:
            record.read_class_attribute(space, key)
        for key in _CLASS_ATTRIBUTES:
            get = functools.partial(getattr, space, key, None)
            record.read_place(Place(f"{name}.{key}", space, key, get), get())
    elif isinstance(space, (types.ModuleType, types.FunctionType, dict)):
        held = variables_of(space)
        users = not isinstance(space, types.ModuleType) or is_user_module(space.__name__)
        for key in [key for key in held if not _is_special_name(key)]:
            record.read_place(
                place_of_entry(f"{name}.{key}", held, key), held[key], shallow=not users
            )
        if isinstance(space, types.FunctionType):
            for key in _FUNCTION_ATTRIBUTES:
                place = place_of_function_part(f"{name}.{key}", space, key)
                record.read_place(place, place.value)
    else:
        return
    names = functools.partial(_names_in_space, space)
    record.read_place(Place(f"the names in {name}", space, "()", names), names(), shallow=True)


def _is_special_name(key: Any) -> bool:
    """Is it a special name of the language? (A dictionary may have keys that are no strings.)"""
    return isinstance(key, str) and key.startswith("__")


def _names_asked_by(getter: Any) -> set[str]:
    """The names that `attrgetter("a.b")` or `methodcaller("c")` asks an object for."""
    _, given = getter.__reduce__()[:2]
    texts = given if isinstance(getter, operator.attrgetter) else given[:1]
    return {name for text in texts for name in text.split(".")}


def _names_in_space(space: Any) -> tuple[Any, ...]:
    return tuple([key for key in variables_of(space) if not _is_special_name(key)])


def read_modules(record: ReadRecord, code: CodeType) -> None:
    """Record a read of `sys.modules`: of the modules that code spells out, or of all names."""
    names = [c for c in code.co_consts if isinstance(c, str)]
    spelled = [name for name in names if name.replace(".", "_").isidentifier()]
    for key in spelled:
        _read_module(record, key)
    if not spelled:
        get = functools.partial(tuple, sys.modules)
        record.read_place(Place("sys.modules", sys.modules, "()", get), get(), shallow=True)


def _read_module(record: ReadRecord, key: str) -> None:
    """Record whether a module is imported (not what it has)."""
    get = functools.partial(sys.modules.get, key)
    record.read_place(Place(f"sys.modules[{key!r}]", sys.modules, key, get), get(), shallow=True)


def _read_registry(record: ReadRecord, kind: abc.ABCMeta, name: str) -> None:
    """Record which classes are registered as subclasses of an abstract class."""
    get = _RegisteredClasses(kind)
    record.read_place(Place(f"the classes of {name}", kind, "registered", get), get(), shallow=True)


class _RegisteredClasses:
    """Returns the classes registered with an abstract one: the same set while none is added."""

    def __init__(self, kind: abc.ABCMeta):
        self._kind, self._token, self._found = kind, -1, frozenset[Any]()

    def __call__(self) -> frozenset[Any]:
        token = abc.get_cache_token()
        if token != self._token:
            found = frozenset(_find_abc_registrations(self._kind))
            if found != self._found:
                self._found = found
            self._token = token  # type: ignore[assignment]
        return self._found


def _find_abc_registrations(kind: Any) -> list[Any]:
    # Private Python: what `ABCMeta.register` was given, which nothing else shows.
    found = list(_abc._get_dump(kind)[0]) if isinstance(kind, abc.ABCMeta) else []
    for part in type.__subclasses__(kind):
        found += _find_abc_registrations(part)
    return found
