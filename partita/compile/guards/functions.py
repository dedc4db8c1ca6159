"""Reads of functions: what the user's functions may read by the names in their code.

When a function's code runs for the first time (`Functions.enter_frame`), the globals, closure
cells, defaults and attributes of modules that its bytecode names are recorded as read. Names that
it may ask objects for are collected: of each class, module and function that the step reaches,
variables of these names are recorded, whichever came first.
"""

from __future__ import annotations

import abc
import builtins
import functools
import gc
import sys
import types
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from ..capture.symbolic import Substitutes
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
from .expected import MISSING
from .objects import cell_content, names_of_class, runs_in_frame, variables_of
from .places import (
    place_of_cell,
    place_of_class_attribute,
    place_of_entry,
    place_of_function_part,
    place_of_hidden_builtin,
    place_of_tensor_attribute,
)
from .reflection import read_all_names, read_module, read_modules, read_registry
from .settings import read_ambient

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["Functions"]


class Functions:
    """The functions that a captured step reaches and runs.

    Args:
        record: notes what they read.

    Attributes:
        reads_ahead: whether a function's names are recorded when it is reached and not when it
            runs: where another profiler listens, calls are not seen.
        classes: the user's classes that were reached, whose number of attributes is guarded.
        codes: by id, the code objects that ran.
        constants: the strings in their code.
        types_read: whether some code names `type`, and so may read any reached object's class.
    """

    def __init__(self, record: StateReader) -> None:
        self.reads_ahead = False
        self.classes: list[type] = []
        self.codes: dict[int, CodeType] = {}
        self.constants: set[str] = set()
        self.types_read = False
        self._record = record
        self._waiting: dict[int, list[Any]] = {}  # by code: functions that have not run
        self._codes_of_functions: set[int] = set()
        self._namespaces: dict[
            int, tuple[Any, str]
        ] = {}  # the user's modules and classes, and names
        self._without_attributes: dict[int, tuple[Any, str]] = {}  # functions without attributes
        self._names_asked: set[str] = set()  # names that code may ask objects for
        self._super_names: set[str] = set()  # names in code that may call `super()`
        self._classes: dict[int, type] = {}
        self._by_operators: dict[int, tuple[type, str]] = {}  # by code: `__len__` and others
        self._substitutes = Substitutes()

    def namespaces(self) -> list[tuple[str, dict[str, Any], frozenset[str]]]:
        """The reached namespaces: name, variables, and the names that may be read of each."""
        return [
            (name, variables_of(space), frozenset(self._names_asked))
            for space, name in (self._without_attributes | self._namespaces).values()
            if not isinstance(space, type)
        ]

    def remove_substitutes(self) -> None:
        """Remove the stand-ins for builtins from the globals of functions."""
        self._substitutes.take_away()

    # -- what is reached ---------------------------------------------------------------------------

    def reach_function(self, f: types.FunctionType, name: str) -> None:
        """Note a function that the step may call; what it names is read when it runs."""
        code = f.__code__
        recorded = is_recorded(code.co_filename)
        if hasattr(f, "__wrapped__"):
            self._record.reach_value(f.__wrapped__, name)
        if not recorded:
            read_ambient(self._record, f.__module__)
            # A library's wrapper (as of torch.no_grad): what its closure has of the user's.
            for where in f.__closure__ or ():
                inner = cell_content(where)
                if isinstance(inner, (types.FunctionType, types.MethodType, functools.partial)):
                    self._record.reach_value(inner, name)
                elif type(inner) in (dict, list, set):  # as functools.singledispatch has them
                    self._record.read_place(place_of_cell(f"what {name} holds", where), inner)
            return
        if f.__dict__:
            self.reach_namespace(f, f.__name__)
        if self.reads_ahead:
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
            self.classes.append(base)
            for key, value in list(vars(base).items()):
                for f in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
                    if isinstance(f, types.FunctionType):
                        self._record.reach_value(f, f"{name}.{key}")
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
        self._record.reach_value(f, name)
        waiting = self._waiting.pop(id(getattr(f, "__code__", None)), ())
        for f, called in waiting:
            self._enter_function(f, called)
            self._enter_code(f.__code__, f.__globals__)

    def reach_globals(self, variables: dict[str, Any]) -> None:
        """Record all globals: `globals()` is called."""
        with self._record.without_recording():
            self.reach_namespace(variables, "globals()")
            read_all_names(self._record, variables, "globals()")

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
            self._record.read_place(place, place.value, shallow=True)
        new = id(code) not in self.codes
        waiting = self._waiting.pop(id(code), None)
        if not new and waiting is None:
            return
        with self._record.without_recording():
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
                self._record.ignore(const)
                if self.reads_ahead:
                    self._enter_code(const, variables)
        self.constants |= strings_of(code)
        for name in global_names(code):
            if name in Substitutes.of_builtins:
                place = place_of_hidden_builtin(variables, name)
                self._record.read_place(place, place.value)
                self._substitutes.put(variables, name)
            elif name != "super":  # a builtin may come to be hidden by a global
                value = variables.get(name, MISSING)
                self._record.read_place(place_of_entry(name, variables, name), value)
                if value is MISSING:
                    self._read_builtin(name, variables)
                elif reflects(code):
                    read_all_names(self._record, value, name)
        self._read_libraries(code, variables)
        if "type" in global_names(code) and not self.types_read:
            self.types_read = True
            for kind in self._record.reached_types():
                self.reach_class(kind)
        for name in imported_names(code, variables.get("__package__")):
            read_module(self._record, name)
            module = sys.modules.get(name)
            if module is not None:
                self._record.reach_value(module, name)
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
                self._record.read_place(place, place.value, shallow=not _is_users(place.value))
        for space, name in list(self._namespaces.values()):
            self._read_namespace(space, name, new)

    def _enter_function(self, f: types.FunctionType, name: str) -> None:
        if not isinstance(name, str):
            return
        for key, where in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            place = place_of_cell(key, where)
            self._record.read_place(place, place.value)
            if reflects(f.__code__):
                read_all_names(self._record, place.value, key)
            if isinstance(place.value, types.ModuleType):
                self._read_libraries(f.__code__, {key: place.value})
        if f.__dict__:
            self.reach_namespace(f, f.__name__)
        else:
            self._without_attributes[id(f)] = (f, f.__name__)
        self._record.read_place(place_of_function_part(name, f, "__code__"), f.__code__)
        for key, called in (("__defaults__", "default"), ("__kwdefaults__", "default")):
            self._record.read_place(
                place_of_function_part(f"{called} of {f.__name__}", f, key), getattr(f, key)
            )

    def _read_builtin(self, name: str, variables: dict[str, Any]) -> None:
        """Record a builtin, Python's own or one that a program has added."""
        held = variables.get("__builtins__", builtins)
        held = held if isinstance(held, dict) else vars(held)
        value = held.get(name, MISSING)
        own = getattr(value, "__module__", "builtins") == "builtins" and callable(value)
        self._record.read_place(place_of_entry(name, held, name), value, shallow=own)

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
                    read_modules(self._record, code)
                if key in held and value is not sys.modules:
                    self._record.read_place(place_of_entry(called, held, key), value, shallow=True)
                    if isinstance(value, abc.ABCMeta) and not value.__module__.startswith("torch"):
                        read_registry(self._record, value, called)

    def _read_bases(self, kind: type) -> None:
        """Record what `super()` may return: attributes of a base that another class overrides."""
        for base in kind.__mro__[1:]:
            if is_user_module(base.__module__):
                for key in sorted(self._super_names & vars(base).keys()):
                    self._record.read_class_attribute(base, key)

    def _read_namespace(self, space: Any, name: str, names: set[str]) -> None:
        if isinstance(space, type):
            for key in sorted(names & names_of_class(space)):
                self._record.read_class_attribute(space, key)
            return
        held = variables_of(space)
        with self._record.reaching_by_name():
            for key in sorted(names & held.keys()):
                if not key.startswith("__") and not Substitutes.has(held[key]):
                    self._record.read_place(place_of_entry(f"{name}.{key}", held, key), held[key])


def _is_users(value: Any) -> bool:
    """Is it the user's, set as an attribute of something of torch?"""
    return value is not MISSING and is_user_module(getattr(value, "__module__", None))
