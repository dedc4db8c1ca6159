"""The read record: which attributes, globals and items a captured step reads, and may read.

Not every read can be seen when it happens. So when a value is read, the *places* to which its code
can go from there are recorded in advance:
- a function, when it first runs: the globals, closure cells, defaults and attributes that it names
- a class, module or function as an object: its variables whose names occur in code; all of them if
  code uses `getattr(x, key)` or `vars(x)`
- a container: all of its items; a bound method: its object

A value that no guard can cover, such as an iterator, raises an error.

To *reach* a value is to record these places, once (`reach_*`). `read_*` record that a place is
read, and reach its value. A value is reached *by name* if code contains the name of its place, but
possibly never reads it.
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
import importlib
import itertools
import logging
import operator
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from partita.capture.capture_context import function_modes
from partita.capture.code_origin import is_recorded_file, is_user_module
from partita.capture.fakes import Substitutes
from partita.tensor.dtensor_gradients import select_user_hooks

from .bytecode import (
    attribute_names_in,
    compares_identities,
    dotted_names,
    global_names,
    imported_names,
    may_read_any_name,
    strings_of,
)
from .calls import (
    Calls,
    is_called_by_user,
    is_random_generator,
    read_ambient,
    read_environment_of,
    refuse_if_random,
)
from .guards import Guards, ReadInputs
from .record import (
    PlaceRecord,
    has_own_getattribute,
    instrument_class,
    instrument_module,
    recorded_by,
    uninstrument_classes,
    uninstrument_module,
)
from .values import (
    HUGE,
    INSIDE,
    MISSING,
    PLAIN,
    WITH_FIELDS,
    CacheEpoch,
    Place,
    brief,
    cached_by_type,
    cell_content,
    count_items,
    dict_of,
    dict_of_view,
    find_module_dict,
    functions_of_descriptor,
    has_raw_content,
    has_settings,
    has_type,
    is_container,
    is_deeply_immutable,
    is_iterator,
    is_shared_memory,
    items_of,
    may_be_hidden,
    names_of_class,
    place_in_namespace,
    place_of_answer,
    place_of_cell,
    place_of_class_attribute,
    place_of_context_variable,
    place_of_dict,
    place_of_hidden_builtin,
    place_of_log_level,
    place_of_slot,
    place_of_special_attribute,
    place_of_tensor_attribute,
    runs_in_frame,
    slots_of,
    variables_of,
)

_OPTIMIZERS = vars(sys.modules[torch.optim.Optimizer.__module__])
_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_MODULES = vars(nn.modules.module)
_GLOBAL_HOOKS = [  # private torch: hooks of all modules, which each call of a module reads
    key for key in _MODULES if key.startswith("_global_") and key.endswith("_hooks")
]


@dataclass(eq=False)
class _ReachedObject:
    """An object that existed before the step, and whose attributes are recorded.

    Attributes:
        attributes: its `__dict__` as it was when it was reached.
        slots: the descriptors of its `__slots__`.
        names: the attributes that were read. The value is True if the user's code has read it.
    """

    value: Any
    name: str
    attributes: dict[str, Any]
    slots: dict[str, Any]
    names: dict[str, bool] = field(default_factory=dict)


class ReadRecord(PlaceRecord):
    """The record of what one run of a captured step reads from Python, and which functions it runs.

    Args:
        names: maps the ids of modules and optimizers found before the run to their names.

    Attributes:
        codes: the code objects that ran, by their ids.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.codes: dict[int, CodeType] = {}
        self._given_names = names
        self._objects: dict[int, _ReachedObject] = {}
        self._modules: dict[int, tuple[types.ModuleType, str]] = {}  # instrumented, with names
        self._finds_modules = False  # True if code looks up modules in `sys.modules`
        self._made_anew: set[int] = set()  # ids of objects that capture has made
        self._types: dict[int, tuple[Any, type]] = {}  # objects whose type is guarded
        self._instrumented: list[type] = []
        # True if another profiler is active, so that calls are not seen: a function's names are
        # then recorded when it is reached, not when it runs.
        self._reads_ahead = False
        self._constants: set[str] = set()  # the strings in the code that ran
        self._types_read = False  # True if code names `type`, and may read any object's class
        self._users_classes: list[type] = []  # whose number of attributes is guarded
        self._waiting: dict[int, list[Any]] = {}  # by code: functions that have not run
        self._codes_of_functions: set[int] = set()
        # (space, name) of modules, classes, functions, and objects whose class cannot be
        # instrumented. Their reads are not seen: they are recorded by the names in code.
        self._namespaces: dict[int, tuple[Any, str]] = {}
        self._unread_methods: dict[int, types.FunctionType] = {}  # reached only by their class
        self._reads_methods = False
        # True if code reads attributes past the `__getattribute__` of a class.
        self._reads_unseen = False
        self._all_names_asked = False  # True if code may read names that do not occur in it
        self._names_asked: set[str] = set()  # names that code may read from objects
        self._super_names: set[str] = set()  # names in code that may call `super()`
        self._classes: dict[int, type] = {}
        self._by_operators: dict[int, tuple[type, str]] = {}  # by code: `__len__` and others
        # Functions and classes of the user, and other objects with attributes in C structures.
        self._described: dict[int, tuple[Any, str]] = {}
        self._substitutes = Substitutes()

    @contextmanager
    def recording(self, step: Any, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Records what this thread reads inside the `with` block, in which the step runs.

        Args:
            step: the function that is going to run.
            arguments: (name, value) of the step's arguments, and of other values that the step gets
                without a recorded read.

        Raises:
            CaptureError: the step read a value that no guard can cover.
        """
        calls = Calls(self, self.enter_frame, self.reach_globals)
        try:
            self._instrument_type(nn.Module)
            self._reads_ahead = sys.getprofile() is not None
            with self.without_recording():
                self.read_place(Place("the step", self, "step", lambda: step), step)
                for key in _GLOBAL_HOOKS:
                    self.read_place(Place(key, _MODULES, key), _MODULES[key])
                for key in _OPTIMIZER_HOOKS:
                    get = functools.partial(select_user_hooks, _OPTIMIZERS[key])
                    self.read_place(Place(key, _OPTIMIZERS, key, get), shallow=True)
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
            uninstrument_classes(self._instrumented)
            self._instrumented = []
            for module, _ in self._modules.values():
                uninstrument_module(module)

    def ids_reached(self) -> set[int]:
        """Returns the ids of all objects that the step could read and that existed before it."""
        return {*self._reached, *self._classes, *self._namespaces}

    def is_reached(self, value: Any) -> bool:
        """True if the step has reached `value`, whose attribute reads are then recorded."""
        known = self._objects.get(id(value))
        return known is not None and known.value is value

    def reaches_optimizers(self) -> bool:
        """True if the step has reached an optimizer that was not found before the run."""
        owners = [known.value for known in self._objects.values()]
        return any(
            has_type(o, torch.optim.Optimizer) for o in owners if id(o) not in self._given_names
        )

    @property
    def sees_calls(self) -> bool:
        """True if functions are recorded when they run, not as soon as they may be called.

        It is False if another profiler was active when the recording began, because partita cannot
        watch calls in this case.
        """
        return not self._reads_ahead

    def values_reached(self) -> Iterator[tuple[Any, str]]:
        """Yields `(value, name)` for everything that the step may have read.

        They are the values of places, what these contain, and the entries of containers with more
        than `HUGE` entries.
        """
        for place in self.places.values():
            yield place.value, place.name
        for value in [v for i, v in self._reached.items() if i not in self._made_anew]:
            yield value, f"a {type(value).__name__} that the step reaches"
        for huge in self.huge.values():
            for value in items_of(huge)[1]:
                yield value, f"an entry of a {type(huge).__name__}"

    def make_guards(self, inputs: ReadInputs, extra: Iterable[Place], call: Any) -> Guards:
        """Returns guards that expect every place that was read to have its current value.

        Args:
            inputs: the values that are inputs of the graph.
            extra: more places to guard.
            call: the (args, kwargs) of the captured call; None if the step has no program.
        """
        spaces = [(o, name) for o, name in self._namespaces.values() if not has_type(o, type)]
        asked = frozenset(self._names_asked | {"__getattr__"})
        objects = [(known.name, known.value) for known in self._objects.values()]
        objects += [(name, o) for o, name in spaces if not _is_of_globals(o)]
        return Guards(
            [*self.places.values(), *extra],
            [*self._types.values()],
            inputs,
            [*self.huge.values()],
            self._users_classes,
            [
                (name, variables_of(o), self._names_asked_of(o, asked))
                for o, name in spaces
                if type(o) is dict or dict_of(o) is not None  # slots are places
            ],
            [(name, o) for name, o in objects if dict_of(o) is not None],
            self._list_compared(),
            call,
        )

    @property
    def compares_identities(self) -> bool:
        """True if code that ran may compare objects by identity, by `is` or `id`."""
        return any(map(compares_identities, self.codes.values()))

    def _list_compared(self) -> frozenset[tuple[int, Any]] | None:
        """Returns the identities of the places that code may compare by `is`; None if no code does.

        A library's own reads of the defaults of its optimizers compare nothing.
        """
        if not self.compares_identities:
            return None
        defaults = {
            (id(dict_of(known.value)), "defaults")
            for known in self._objects.values()
            if has_type(known.value, torch.optim.Optimizer) and not known.names.get("defaults")
        }
        return frozenset(self.places.keys() - defaults)

    def _names_asked_of(self, space: Any, asked: frozenset[str]) -> frozenset[str] | None:
        """Returns the names that code may read from a namespace; None for all."""
        is_library = has_type(space, types.ModuleType) and not is_user_module(space.__name__)
        return asked if is_library or not self._all_names_asked else None

    def watch_new(self, value: Any, name: str) -> None:
        """Stores a copy of `value`, to find later what the step writes to it.

        Args:
            value: arguments that capture has rebuilt, or a list of an optimizer's groups.
            name: its name in messages.
        """
        before = self._reached.keys() | ()
        self.snapshots.snapshot_new(value, name, self._reached)
        self._made_anew |= self._reached.keys() - before

    # -- attributes --------------------------------------------------------------------------------

    def read_attribute(self, owner: Any, name: str) -> None:
        """Records that the attribute `name` of `owner` was read. Later reads are not recorded.

        Does nothing if `owner` was not reached and is no module.
        """
        if self._is_paused:
            return
        if id(owner) not in self._objects:
            if id(owner) in self._modules:
                with self.without_recording():
                    self._read_of_module(owner, name)
            return
        known = self._objects[id(owner)]
        if known.names.get(name):
            return
        frame = sys._getframe(2)
        by_user = is_recorded_file(frame.f_code.co_filename)
        if name in known.names and not by_user:
            return
        known.names[name] = by_user
        if name == "__dict__" and not by_user and not is_called_by_user(frame):
            # Torch looks up parameters in it, which does not read all attributes.
            del known.names[name]
            return
        before, self._read_by_library = self._read_by_library, not by_user
        try:
            with self.without_recording():
                if name == "__class__" and by_user:
                    self.reach_class(type(owner))
                elif name == "__dict__":
                    self.read_all_attributes(owner)
                else:
                    self._record_read(known, name)
        finally:
            self._read_by_library = before

    def _read_of_module(self, module: types.ModuleType, name: str) -> None:
        """Records that an attribute of a user's module is read."""
        held, called = dict_of(module), self._modules[id(module)][1]
        key = held.get("__name__")
        if self._finds_modules and sys.modules.get(key) is module:
            _read_module(self, key)
        if name == "__dict__":
            _read_all_names(self, module, called)
        elif not name.startswith("__") and not Substitutes.has(held.get(name)):
            value = self.snapshots.value_before(held, name)
            self.read_place(Place(f"{called}.{name}", held, name), value)

    def instrument_module(self, module: Any, name: str) -> None:
        """Makes `module`, if it is the user's, record reads of its attributes from now on.

        Args:
            name: the module's name, for messages.
        """
        if not has_type(module, types.ModuleType) or id(module) in self._modules:
            return
        if is_user_module(dict_of(module).get("__name__")) and instrument_module(module):
            self._modules[id(module)] = module, name
            self.snapshots.snapshot_namespace(module, name)
            if self._reads_unseen:
                self._read_module_unseen(module, name)

    def _read_module_unseen(self, module: types.ModuleType, name: str) -> None:
        """Records all names of a module, because code may read them past `__getattribute__`."""
        with self.reaching_by_name():
            _read_all_names(self, module, name)

    def find_modules(self) -> None:
        """Makes all of the user's Python modules record reads of their attributes.

        Code may get a module by its name, from `sys.modules`.
        """
        if not self._finds_modules:
            self._finds_modules = True
            for name, module in [*sys.modules.items()]:
                self.instrument_module(module, f"sys.modules[{name!r}]")

    def _record_read(self, known: _ReachedObject, name: str) -> None:
        owner, called, held = known.value, f"{known.name}.{name}", dict_of(known.value)
        known_optimizer = has_type(owner, torch.optim.Optimizer) and id(owner) in self._given_names
        if known_optimizer and name in ("state", "param_groups"):  # entries of these are inputs
            return
        if has_type(owner, logging.Logger) and name in _CHANGED_BY_LOGGING:
            self.read_place(place_of_log_level(known.name, owner), shallow=True)
        elif name in known.attributes:
            self.read_place(Place(called, held, name), known.attributes[name])
        elif name in known.slots:
            self.read_place(place_of_slot(called, owner, known.slots[name]))
        elif (inside := find_module_dict(owner, name)) is not None:
            # If the step itself has put it there, the value before is recorded.
            self.read_place(Place(called, inside, name), self.snapshots.value_before(inside, name))
        else:
            found = self.read_class_attribute(type(owner), name)
            if found is MISSING and not name.startswith("__"):  # the class may get it later
                self.read_place(place_of_class_attribute(type(owner), name), MISSING)
            if held is not None and may_be_hidden(name, found):
                of_module = found is MISSING and has_type(owner, nn.Module)
                for home in (held, *(held[within] for within in INSIDE if of_module)):
                    self.read_place(Place(called, home, name), MISSING)

    def read_all_attributes(self, owner: Any) -> None:
        """Records that the step may read every attribute of `owner`, for example by `vars(owner)`.

        Does nothing if the object was not reached.
        """
        known = self._objects.get(id(owner))
        if known is not None and dict_of(owner) is not None:
            self.read_place(place_of_dict(known.name, owner))

    def read_class_attribute(self, kind: type, name: str) -> Any:
        """Records a read of the attribute `name` of the class `kind`, and returns its value.

        Returns MISSING, and records nothing, if the class lacks it. The same holds for special
        names that are not in `WITH_FIELDS`.
        """
        if name.startswith("__") and name.endswith("__") and name not in WITH_FIELDS:
            return MISSING
        mro = kind.__mro__
        at = next((i for i, base in enumerate(mro) if name in base.__dict__), None)
        if at is None:
            return MISSING
        # Where a later attribute would hide this one.
        for base in (base for base in mro[:at] if is_user_module(base.__module__)):
            self.read_place(place_in_namespace(f"{base.__name__}.{name}", base, name), MISSING)
        place = place_of_class_attribute(mro[at], name)
        value = place.value
        if place.identity in self.places:
            return value
        if not has_type(value, types.MemberDescriptorType):
            self.read_place(place, value)
            for function in functions_of_descriptor(value):
                self.reach_value(function, place.name)
        return value

    # -- what is reached ---------------------------------------------------------------------------

    def reach_value(self, value: Any, name: str) -> None:
        if (f := self._unread_methods.pop(id(value), None)) is not None and not self._reads_methods:
            self.reach_namespace(f, f.__name__)
        super().reach_value(value, name)

    def reach_by_kind(self, value: Any, name: str) -> None:
        """Records, according to the type of a value, the places that code can reach from it.

        Called when the value is read for the first time.

        Args:
            name: the value's name in messages.

        Raises:
            CaptureError: no guard can cover the value: an iterator, shared memory, a generator.
        """
        kind: Any = type(value)
        if issubclass(kind, enum.Enum):
            if dict_of(value) is not None and is_user_module(kind.__module__):
                self.read_place(place_of_dict(name, value))  # its value may be mutable
                self.snapshots.snapshot_object(value, name)
                self.reach_methods(kind, kind.__name__)
        elif issubclass(kind, threading.local):
            _reach_local(self, value, name)
        elif is_container(value):
            _reach_container(self, value, name)
        elif has_raw_content(value):
            read_ambient(self, kind.__module__)
            self.snapshots.snapshot_raw(value, name)
            self.reach_object(value, name)
        elif (under := dict_of_view(value)) is not None:
            self.reach_value(under, name)
        elif is_shared_memory(value):
            self.refuse(
                f"the step reads {name}, memory that other processes may write ({kind.__name__})",
                "a graph would always use the contents at capture",
                name,
            )
        elif issubclass(kind, types.CellType):
            self.read_place(place_of_cell(name, value))
        elif issubclass(kind, contextvars.ContextVar):
            self.read_place(place_of_context_variable(name, value))
        elif issubclass(kind, (operator.attrgetter, operator.methodcaller)):
            self.record_attribute_names(_attribute_names_in(value))
        elif issubclass(kind, types.MemberDescriptorType):  # which reads a slot of any instance
            self.record_attribute_names({value.__name__})
        elif issubclass(kind, types.ModuleType):
            read_ambient(self, value.__name__)
            self.snapshots.snapshot_namespace(value, name)
            self.instrument_module(value, name)
            self.reach_namespace(value, name)
            if value.__name__ == "os" and self._reads_ahead:
                read_environment_of(self, self._constants)
        elif issubclass(kind, type):
            read_ambient(self, value.__module__)
            self.snapshots.snapshot_namespace(value, name)
            _read_registry(self, value, name)
            if is_user_module(value.__module__):
                if any(base.__name__ == "Protocol" for base in value.__bases__):
                    # `isinstance` reads its members from objects.
                    annotations = vars(value).get("__annotations__", {})
                    self.record_attribute_names({*annotations, *vars(value)})
                self.reach_class(value)
                self.reach_methods(value, name)
                self.reach_value(kind, kind.__name__)
        elif issubclass(kind, types.FunctionType):
            self.reach_function(value, name)
        elif issubclass(kind, types.MethodType):
            self.reach_value(value.__self__, name)
            self.reach_value(value.__func__, name)
        elif issubclass(kind, (types.BuiltinMethodType, types.MethodWrapperType)):
            read_ambient(self, getattr(value, "__module__", None))
            if value in _READERS:
                self._ask_all_names()
            refuse_if_random(self, value, name)
            if not isinstance(value.__self__, (types.ModuleType, type)):
                self.reach_value(value.__self__, f"the owner of {name}")
            self.read_all_attributes(value.__self__)  # code in C reads them unseen
        elif issubclass(kind, (staticmethod, classmethod)):
            self.reach_value(value.__func__, name)
        elif is_iterator(value):
            if not self.note_unread(value):
                self.refuse(
                    f"the step reads {name}, an iterator ({kind.__name__})",
                    "its next item differs in the next call, and a graph would always "
                    "use the first",
                    name,
                )
        else:
            if not self.reached_by_name:
                refuse_if_random(self, value, name)
            elif is_random_generator(value):
                self.note_unread(value)
            read_ambient(self, kind.__module__)
            if issubclass(kind, BaseException):
                self.read_place(place_of_special_attribute(f"{name}.args", value, "args"))
            self.reach_object(value, name)
            if issubclass(kind, functools._lru_cache_wrapper):
                self.snapshots.snapshot_cache(value, name)
                place = place_of_answer(f"the cache of {name}", CacheEpoch(value), value)
                self.read_place(place, shallow=True)
                self._reach_cached_function(value.__wrapped__, name)

    def reach_object(self, value: Any, name: str) -> None:
        """Makes the class of a user's object record reads of the object's attributes from now on.

        If the class cannot be changed, attributes are recorded whose names occur in code.
        """
        kind = type(value)
        is_heap_type = kind.__flags__ & (1 << 9)
        if not is_heap_type or not has_settings(kind) or not self._instrument_type(kind):
            self._reach_by_names(value, name)
            return
        name = self._given_names.get(id(value), name)
        known = _ReachedObject(value, name, dict(dict_of(value) or {}), slots_of(kind))
        self._objects[id(value)] = known
        self._types[id(value)] = (value, kind)
        self.snapshots.snapshot_object(value, name)
        if self._reads_unseen:
            self._reach_unseen(known)
        self.reach_methods(kind, kind.__name__)
        if self._types_read:
            self.reach_class(kind)
        if has_own_getattribute(kind):
            self.read_all_attributes(value)
            for key, v in known.attributes.items():
                self.reach_value(v, f"{name}.{key}")

    def _reach_by_names(self, value: Any, name: str) -> None:
        """Records the attributes of an object by the names that code may read.

        partita's own objects are skipped, because no step reads them.
        """
        if type(value).__module__.split(".")[0] == "partita":
            return
        self._describe(value, name)
        if dict_of(value) is not None:
            self.snapshots.snapshot_namespace(value, name)
            self.reach_namespace(value, name)

    def _instrument_type(self, kind: type) -> bool:
        if kind not in self._instrumented and instrument_class(kind):
            self._instrumented.append(kind)
        return kind in self._instrumented

    def reach_function(self, f: types.FunctionType, name: str) -> None:
        """Registers a function, so that the names in its code are recorded when it runs."""
        self.snapshots.snapshot_namespace(f, name)
        if self._reads_methods:
            self._unread_methods[id(f)] = f
        else:
            self.reach_namespace(f, f.__name__)
        if "__wrapped__" in vars(f):
            self.reach_value(vars(f)["__wrapped__"], name)
        if not is_recorded_file(f.__code__.co_filename):
            read_ambient(self, f.__module__)
            # A library's wrapper (as of torch.no_grad): its closure may hold the user's function.
            for where in f.__closure__ or ():
                inner = cell_content(where)
                if issubclass(
                    type(inner), (types.FunctionType, types.MethodType, functools.partial)
                ):
                    self.reach_value(inner, name)
                elif type(inner) in (dict, list, set):  # as functools.singledispatch has them
                    self.read_place(place_of_cell(f"what {name} holds", where))
                elif has_type(inner, weakref.WeakKeyDictionary):
                    self.snapshots.snapshot_cache(inner, name)
            return
        self._describe(f, f.__name__)
        if self._reads_ahead:
            self._enter_function(f, name)
        else:
            self._waiting.setdefault(id(f.__code__), []).append((f, name))

    def reach_methods(self, kind: type, name: str) -> None:
        """Registers the methods of a class. When one runs, the names in its code are recorded."""
        self._classes[id(kind)] = kind
        if is_user_module(kind.__module__):
            self._describe(kind, kind.__name__)
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
            self.snapshots.snapshot_namespace(base, base.__name__)
            for key, value in list(vars(base).items()):
                for f in (value, *functions_of_descriptor(value)):
                    if isinstance(f, types.FunctionType):
                        self._reach_method(f, f"{name}.{key}")
                        if key.startswith("__"):
                            self._by_operators[id(f.__code__)] = (base, key)

    def _reach_method(self, f: types.FunctionType, name: str) -> None:
        """Records a method. Its own attributes are recorded only if it is read itself."""
        before, self._reads_methods = self._reads_methods, True
        try:
            self.reach_value(f, name)
        finally:
            self._reads_methods = before

    def _reach_layer(self, kind: type) -> None:
        """Records functions that a torch layer's class calls: the user may replace them."""
        self._codes_of_functions.add(id(kind))
        for f in list(vars(kind).values()):
            if isinstance(f, types.FunctionType):
                self._read_libraries(f.__code__, {"F": f.__globals__.get("F")})

    def _reach_cached_function(self, f: Any, name: str) -> None:
        """Records at once what an `lru_cache` function reads: a call may return a cached result."""
        self.reach_value(f, name)
        for waiting in self._waiting.pop(id(getattr(f, "__code__", None)), ()):
            self._enter_function(*waiting)

    def reach_globals(self, variables: dict[str, Any]) -> None:
        """Records all globals of a module, `variables`, because the step calls `globals()`."""
        with self.without_recording():
            self.snapshots.snapshot_namespace(variables, "globals()")
            self.reach_namespace(variables, "globals()")
            _read_all_names(self, variables, "globals()")

    def reach_namespace(self, space: Any, name: str) -> None:
        """Records the variables of a namespace whose names occur in code that runs.

        Args:
            space: a module, class or function, or a dictionary of variables.
            name: its name in messages.
        """
        if id(space) not in self._namespaces:
            self._namespaces[id(space)] = (space, name)
            self._read_namespace(space, name, self._names_asked)
            if self._all_names_asked:
                self._read_whole_namespace(space, name)

    def reach_class(self, kind: type) -> None:
        """Records those attributes of a user's class whose names occur in code that runs."""
        if is_user_module(kind.__module__):
            self.reach_namespace(kind, kind.__name__)

    # -- what runs ---------------------------------------------------------------------------------

    def enter_frame(self, frame: FrameType) -> None:
        """Records what the code of a function names, at its first call: globals, cells, attributes.

        Args:
            frame: the stack frame of the function's call.
        """
        code = frame.f_code
        back = frame.f_back
        if code.co_name == "<module>" and back and "importlib" in back.f_code.co_filename:
            return  # a module is being imported
        operator = self._by_operators.pop(id(code), None)
        if operator is not None:  # Python looked it up in the class, without `__getattribute__`
            self.read_place(place_of_class_attribute(*operator), shallow=True)
        new = id(code) not in self.codes
        waiting = self._waiting.pop(id(code), None)
        if not new and waiting is None:
            return
        with self.without_recording():
            self._enter_code(code, frame.f_globals)
            # The cell of a method that calls `super()` holds its class, which never changes. So its
            # function need not be found. The search visits each object of the process.
            has_cells = bool({*code.co_freevars} - {"__class__"})
            if waiting is None and has_cells and id(code) not in self._codes_of_functions:
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
                self.read_place(place_of_hidden_builtin(variables, name))
                self._substitutes.put(variables, name)
            elif name != "super":  # a global may hide the builtin later
                value = self.read_place(Place(name, variables, name))
                if value is MISSING:
                    self._read_builtin(name, variables)
                elif may_read_any_name(code):
                    _read_all_names(self, value, name)
                if value is importlib.import_module:
                    _read_modules(self, code)
        self._read_libraries(code, variables)
        if "type" in global_names(code) and not self._types_read:
            self._types_read = True
            for _, kind in [*self._types.values()]:
                self.reach_class(kind)
        for name in imported_names(code, variables.get("__package__")):
            _read_module(self, name)
            if name in sys.modules:
                self.reach_value(sys.modules[name], name)
        if "__class__" in code.co_freevars:
            self._super_names |= attribute_names_in(code)
            for kind in list(self._classes.values()):
                self._read_bases(kind)
        if may_read_any_name(code):
            self._ask_all_names()
        if not _UNSEEN_READS.isdisjoint(attribute_names_in(code)):
            self._read_objects_unseen()
        self.record_attribute_names(attribute_names_in(code))

    def record_attribute_names(self, names: set[str]) -> None:
        """Records, for each object and class that is reached, its attributes with these names.

        The names occur in code that ran. It is unknown from which object the code reads them.
        """
        new = names - self._names_asked
        self._names_asked |= new
        for value, name in [*self._described.values()]:
            self._read_special(value, name, new)
        for key in sorted(new):
            if not key.startswith("__"):
                place = place_of_tensor_attribute(key)
                self.read_place(place, shallow=not _is_users(place.value))
        for space, name in list(self._namespaces.values()):
            self._read_namespace(space, name, new)

    def _describe(self, value: Any, name: str) -> None:
        """Records special attributes of a function or class if code names them, now or later."""
        if id(value) not in self._described:
            self._described[id(value)] = value, name
            self._read_special(value, name, self._names_asked)

    def _read_special(self, value: Any, name: str, keys: set[str]) -> None:
        kind: Any = type(value)
        for key in sorted(keys & _names_in_c(kind)):
            if key == "__subclasses__" and has_type(value, type):
                at = f"{name}.{key}()"
                get = functools.partial(type.__subclasses__, value)  # a new list each time
                for kind in self.read_place(Place(at, value, key, get), shallow=True):
                    self.reach_value(kind, at)
            elif key != "__subclasses__":
                place = place_of_special_attribute(f"{name}.{key}", value, key)
                with self.reaching_by_name():
                    self.read_place(place, shallow=key in _BASES)

    def _enter_function(self, f: types.FunctionType, name: str) -> None:
        self._enter_code(f.__code__, f.__globals__)
        for key, where in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            value = self.read_place(place_of_cell(key, where))
            if may_read_any_name(f.__code__):
                _read_all_names(self, value, key)
            if has_type(value, types.ModuleType):
                self._read_libraries(f.__code__, {key: value})
        self.reach_namespace(f, f.__name__)
        self.read_place(place_of_special_attribute(name, f, "__code__"))
        for key in ("__defaults__", "__kwdefaults__"):
            self.read_place(place_of_special_attribute(f"default of {f.__name__}", f, key))

    def _read_builtin(self, name: str, variables: dict[str, Any]) -> None:
        """Records a builtin: Python's own, or one that the user has added."""
        held = variables.get("__builtins__", builtins)
        held = held if isinstance(held, dict) else vars(held)
        value = held.get(name, MISSING)
        own = getattr(value, "__module__", "builtins") == "builtins" and callable(value)
        self.read_place(Place(name, held, name), value, shallow=own)

    # -- by name -----------------------------------------------------------------------------------

    def _read_libraries(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Records the attributes of library modules that code reads, which the user may replace."""
        for root, *names in dotted_names(code):
            value: Any = variables.get(root)
            called = root
            for key in names:
                if not has_type(value, types.ModuleType) or is_user_module(value.__name__):
                    break
                held, called = vars(value), f"{called}.{key}"
                value = held.get(key)
                if has_type(value, (type, types.ModuleType, types.FunctionType)):
                    self.snapshots.snapshot_namespace(value, called)
                if value is sys.modules or value is importlib.import_module:
                    _read_modules(self, code)
                if key in held and value is not sys.modules:
                    self.read_place(Place(called, held, key), value, shallow=True)
                    _read_registry(self, value, called)

    def _read_bases(self, kind: type) -> None:
        """Records what `super()` may find: attributes of a base that another class overrides."""
        for base in kind.__mro__[1:]:
            if is_user_module(base.__module__):
                for key in sorted(self._super_names & vars(base).keys()):
                    self.read_class_attribute(base, key)

    def _read_namespace(self, space: Any, name: str, names: set[str]) -> None:
        if has_type(space, type):
            for key in sorted(names & names_of_class(space)):
                self.read_class_attribute(space, key)
            return
        for key in sorted(names & slots_of(type(space)).keys()):
            self.read_place(place_of_slot(f"{name}.{key}", space, slots_of(type(space))[key]))
        held = space if type(space) is dict else dict_of(space)
        if has_type(space, logging.Logger):
            names = names.difference(_CHANGED_BY_LOGGING)
        found = sorted(names & held.keys()) if held else ()
        if not found:  # the usual case
            return
        of_globals = _is_of_globals(space)
        of_library = has_type(space, types.ModuleType) and not is_user_module(space.__name__)
        with self.reaching_by_name():
            for key in found:
                value = self.snapshots.value_before(held, key)
                if value is MISSING or value is sys.modules or Substitutes.has(held[key]):
                    continue  # the step has set it, or it is recorded in another way
                if not key.startswith("_" if of_library else "__" if of_globals else "__dict__"):
                    self.read_place(Place(f"{name}.{key}", held, key), value, shallow=of_library)

    def _read_whole_namespace(self, space: Any, name: str) -> None:
        """Records all variables of a function, a class or an object."""
        if has_type(space, type):
            users = [base for base in space.__mro__ if is_user_module(base.__module__)]
            self._read_namespace(space, name, {*itertools.chain(*map(vars, users))})
        elif not _is_of_globals(space):
            self._read_namespace(space, name, {*(dict_of(space) or ())})

    def _ask_all_names(self) -> None:
        """Records all names from now on, because code may read any of them."""
        if not self._all_names_asked:
            self._all_names_asked = True
            for space, name in list(self._namespaces.values()):
                self._read_whole_namespace(space, name)

    def _read_objects_unseen(self) -> None:
        """Records attributes by name, because code reads past the `__getattribute__` of classes."""
        if not self._reads_unseen:
            self._reads_unseen = True
            for known in list(self._objects.values()):
                self._reach_unseen(known)
            for module, name in list(self._modules.values()):
                self._read_module_unseen(module, name)

    def _reach_unseen(self, known: _ReachedObject) -> None:
        self.reach_class(type(known.value))
        self.reach_namespace(known.value, known.name)


_CHANGED_BY_LOGGING = ("_cache", "handlers", "manager")
"""Attributes of a logger that change when other code logs. A step reads only its level."""

_READERS = (getattr, hasattr, vars, dir)
"""Functions that may read any name, if code passes them as values."""

_UNSEEN_READS = frozenset(("__getattribute__", "getattr_static", "__get__"))
"""Names of functions that read an attribute past the `__getattribute__` of a class."""


def _is_of_globals(space: Any) -> bool:
    """True if a namespace is a module or its dictionary, which has special names of Python."""
    return has_type(space, types.ModuleType) or type(space) is dict


def _is_users(value: Any) -> bool:
    """True if `value`, an attribute of a torch class, is the user's."""
    return value is not MISSING and is_user_module(getattr(value, "__module__", None))


# -- containers ------------------------------------------------------------------------------------


def _reach_container(record: ReadRecord, value: Any, name: str) -> None:
    """Records the items of a container, and its keys."""
    record.snapshots.snapshot_container(value, name)
    if has_type(value, functools.partial):
        record.snapshots.snapshot_namespace(value, name)
    if count_items(value) > HUGE:
        _record_entries(record, value, name)
        return
    if has_type(value, collections.defaultdict):
        _read_factory(record, value, name)
    keys, values = items_of(value)
    dotted = has_type(value, types.SimpleNamespace)
    for key in keys or ():
        record.reach_value(key, f"a key of {name}")
    for key, v in zip(range(len(values)) if keys is None else keys, values, strict=False):
        if type(v) not in PLAIN:
            record.reach_value(v, f"{name}.{key}" if dotted else f"{name}[{key!r}]")
    library = type(value).__module__ in ("builtins", "collections", "types", "functools")
    if hasattr(type(value), "__dictoffset__") and not library:
        record.reach_object(value, name)


def _read_factory(record: ReadRecord, value: collections.defaultdict[Any, Any], name: str) -> None:
    """Records the `default_factory` of a defaultdict."""
    at = value, "default_factory"
    get, put = functools.partial(getattr, *at), functools.partial(setattr, *at)
    record.read_place(Place(f"{name}.default_factory", value, at[1:], get, put))


def _record_entries(record: ReadRecord, value: Any, name: str) -> None:
    """Records a huge container by its entries; warns if an entry may change in place."""
    record.huge[id(value)] = value
    keys, values = items_of(value)
    inner = next((v for v in (values or keys or ()) if not is_deeply_immutable(v)), None)
    if inner is not None and not record.reached_by_name:
        warnings.warn(
            f"{name} has {len(value):,} entries: a compiled step detects when one is replaced, "
            f"not when its contents change ({brief(inner)}). Pass the entries that the step "
            f"needs as arguments",
            stacklevel=2,
        )


def _reach_local(record: ReadRecord, value: threading.local, name: str) -> None:
    """Records this thread's attributes of a `threading.local`, and which thread it is."""
    record.read_place(Place("the thread", value, "thread", threading.current_thread), shallow=True)
    record.read_place(Place(name, value, "__dict__", lambda: value.__dict__))
    record.snapshots.snapshot_object(value, name)


# -- reflection ------------------------------------------------------------------------------------

# Special attributes of classes and functions that reflection reads.
_CLASS_ATTRIBUTES = """__annotations__ __doc__ __name__ __qualname__ __module__ __match_args__
    __dataclass_fields__""".split()
_FUNCTION_ATTRIBUTES = """__code__ __defaults__ __kwdefaults__ __annotations__ __doc__ __name__
    __qualname__ __module__ __signature__""".split()


_BASES = frozenset(("__mro__", "__bases__", "__base__"))
_SPECIAL_ATTRIBUTES = _BASES.union(
    (*_CLASS_ATTRIBUTES, *_FUNCTION_ATTRIBUTES, "__subclasses__", "__wrapped__", "__closure__")
)


@cached_by_type
def _names_in_c(kind: type) -> frozenset[str]:
    """Returns the names of attributes that instances of a class have outside any dictionary.

    Only functions, classes and exceptions have such attributes that code may set.
    """
    if issubclass(kind, (type, types.FunctionType)):
        return _SPECIAL_ATTRIBUTES
    if not issubclass(kind, BaseException):
        return frozenset()
    in_c = (types.MemberDescriptorType, types.GetSetDescriptorType)
    found = {key for base in kind.__mro__ for key, v in vars(base).items() if isinstance(v, in_c)}
    return frozenset(found - {"__dict__", "__weakref__", "__class__"})


def _read_all_names(record: ReadRecord, space: Any, name: str) -> None:
    """Records all names in a class, a module or a function, and that there are no others."""
    special: list[str] = []
    if has_type(space, type):
        if not is_user_module(space.__module__):
            return
        special = _CLASS_ATTRIBUTES
        for key in _names_in_space(space):
            record.read_class_attribute(space, key)
    elif has_type(space, (types.ModuleType, types.FunctionType, dict)):
        special = _FUNCTION_ATTRIBUTES if has_type(space, types.FunctionType) else []
        held = variables_of(space)
        shallow = has_type(space, types.ModuleType) and not is_user_module(space.__name__)
        for key in _names_in_space(space):
            value = record.snapshots.value_before(held, key)
            if value is not MISSING:  # else the step has set it
                record.read_place(Place(f"{name}.{key}", held, key), value, shallow=shallow)
    else:
        return
    for key in special:
        record.read_place(place_of_special_attribute(f"{name}.{key}", space, key))
    names = functools.partial(_names_in_space, space)
    record.read_place(place_of_answer(f"the names in {name}", names, space), shallow=True)


def _is_special_name(key: Any) -> bool:
    """True for a string such as "__len__", a special name of Python. Other keys may occur."""
    return isinstance(key, str) and key.startswith("__")


def _attribute_names_in(getter: Any) -> set[str]:
    """Returns the names that `attrgetter("a.b")` or `methodcaller("c")` reads from an object."""
    _, given = getter.__reduce__()[:2]
    texts = given if isinstance(getter, operator.attrgetter) else given[:1]
    return {name for text in texts for name in text.split(".")}


def _names_in_space(space: Any) -> tuple[Any, ...]:
    return tuple([key for key in variables_of(space) if not _is_special_name(key)])


def _read_modules(record: ReadRecord, code: CodeType) -> None:
    """Records a read of `sys.modules`: the modules that code names as strings, or all names."""
    spelled = [name for name in strings_of(code) if name.replace(".", "_").isidentifier()]
    for key in sorted(spelled):
        _read_module(record, key)
    if not spelled:
        names = functools.partial(tuple, sys.modules)
        record.read_place(place_of_answer("sys.modules", names, sys.modules), shallow=True)
    # The name may come from anywhere, so each module reports what is read from it.
    record.find_modules()


def _read_module(record: ReadRecord, key: str) -> None:
    """Records whether a module is imported, not what is in it."""
    get = functools.partial(sys.modules.get, key)
    record.read_place(Place(f"sys.modules[{key!r}]", sys.modules, key, get), shallow=True)


def _read_registry(record: ReadRecord, kind: Any, name: str) -> None:
    """Records which classes are registered as subclasses of `kind`, if it is an abstract class."""
    if isinstance(kind, abc.ABCMeta) and not kind.__module__.startswith("torch"):
        known: list[Any] = [None, None]  # the token, which changes at any registration

        def find_registered() -> frozenset[Any]:
            if known[0] != (token := abc.get_cache_token()):
                known[:] = token, frozenset(_find_abc_registrations(kind))
            return known[1]  # type: ignore[no-any-return]

        place = Place(f"the classes of {name}", kind, "registered", find_registered)
        record.read_place(place, shallow=True)


def _find_abc_registrations(kind: Any) -> list[Any]:
    # Private Python: what `ABCMeta.register` was given, which nothing else shows.
    found = list(_abc._get_dump(kind)[0]) if isinstance(kind, abc.ABCMeta) else []
    for part in type.__subclasses__(kind):
        found += _find_abc_registrations(part)
    return found
