"""Functions of the user's: what they name is read as they run.

A function is entered when its code runs for the first time: the globals, cells, defaults and
attributes that it names are read then, and so are names of classes, modules and functions that are
asked for by what it spells out.
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
from . import places
from .codes import (
    constants_of,
    dotted_names,
    global_names,
    imported_names,
    is_of_users,
    is_recorded,
    names_of,
)
from .expected import MISSING
from .objects import content_of, names_of_class, runs_in_frame, variables_of
from .reflection import read_module, read_modules, read_registry, reflects, take_whole
from .settings import read_ambient

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["Functions"]


class Functions:
    """The functions that a captured step calls, and the variables that they may read.

    Args:
        record: where what they read is noted.

    Attributes:
        all_at_once: where a profiler listens to calls, what functions name is read before they run.
        classes: of the user's, which may come to have what they have not.
        codes: what ran, by identity.
        constants: strings that stand in the code.
        types_read: is it asked for the types of objects?
    """

    def __init__(self, record: StateReader) -> None:
        self.all_at_once = False
        self.classes: list[type] = []
        self.codes: dict[int, CodeType] = {}
        self.constants: set[str] = set()
        self.types_read = False
        self._record = record
        self._waiting: dict[int, list[Any]] = {}  # functions that are entered when their code runs
        self._codes_of_functions: set[int] = set()
        self._spaces: dict[int, tuple[Any, str]] = {}  # modules of Python and classes
        self._bare: dict[int, tuple[Any, str]] = {}  # functions that have no attributes yet
        self._used: set[str] = set()
        self._supers: set[str] = set()  # names that code which may say `super()` uses
        self._classes: dict[int, type] = {}
        self._by_operators: dict[int, tuple[type, str]] = {}  # `__len__` and others, by their code
        self._substitutes = Substitutes()

    def spaces(self) -> list[tuple[str, dict[str, Any], frozenset[str]]]:
        """Variables by name, what they are called, and the names of them that may be read."""
        return [
            (name, variables_of(space), frozenset(self._used))
            for space, name in (self._bare | self._spaces).values()
            if not isinstance(space, type)
        ]

    def put_back(self) -> None:
        """Take from the globals of functions what stands there while a step is captured."""
        self._substitutes.take_away()

    # -- what is reached ---------------------------------------------------------------------------

    def reach_function(self, f: types.FunctionType, name: str) -> None:
        code = f.__code__
        recorded = is_recorded(code.co_filename)
        if hasattr(f, "__wrapped__"):
            self._record.reach(f.__wrapped__, name)
        if not recorded:
            read_ambient(self._record, f.__module__)
            # A decorator of a library's, as torch.no_grad: what it holds of the user's.
            for where in f.__closure__ or ():
                inner = content_of(where)
                if isinstance(inner, (types.FunctionType, types.MethodType, functools.partial)):
                    self._record.reach(inner, name)
                elif type(inner) in (dict, list, set):  # as functools.singledispatch has them
                    self._record.read_at(places.cell(f"what {name} holds", where), inner)
            return
        if f.__dict__:
            self.reach_space(f, f.__name__)
        if self.all_at_once:
            self._enter_function(f, name)
            self._enter_code(code, f.__globals__)
        else:
            self._waiting.setdefault(id(code), []).append((f, name))

    def reach_functions(self, kind: type, name: str) -> None:
        """The functions of a class, which are entered when they run."""
        self._classes[id(kind)] = kind
        self._read_of_bases(kind)
        for base in kind.__mro__:
            if id(base) in self._codes_of_functions:
                continue
            if base.__module__.startswith("torch.nn.modules") and base is not nn.Module:
                self._reach_layer(base)
            if not is_of_users(base.__module__):
                continue
            self._codes_of_functions.add(id(base))
            self.classes.append(base)
            for key, value in list(vars(base).items()):
                for f in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
                    if isinstance(f, types.FunctionType):
                        self._record.reach(f, f"{name}.{key}")
                        if key.startswith("__"):
                            self._by_operators[id(f.__code__)] = (base, key)

    def _reach_layer(self, kind: type) -> None:
        """A class of torch's layers: the functions it calls, which a program may replace."""
        self._codes_of_functions.add(id(kind))
        for f in list(vars(kind).values()):
            if isinstance(f, types.FunctionType):
                self._read_of_libraries(f.__code__, {"F": f.__globals__.get("F")})

    def reach_cached(self, f: Any, name: str) -> None:
        """What a result was computed from that was remembered before this step ran."""
        self._record.reach(f, name)
        waiting = self._waiting.pop(id(getattr(f, "__code__", None)), ())
        for f, called in waiting:
            self._enter_function(f, called)
            self._enter_code(f.__code__, f.__globals__)

    def reach_globals(self, variables: dict[str, Any]) -> None:
        """`globals()` is called."""
        with self._record.quietly():
            self.reach_space(variables, "globals()")
            take_whole(self._record, variables, "globals()")

    def reach_space(self, space: Any, name: str) -> None:
        """Variables that are read by the names used: of a module of Python, a class, a function."""
        if id(space) not in self._spaces:
            self._spaces[id(space)] = (space, name)
            self._read_of_space(space, name, self._used)

    def reach_class(self, kind: type) -> None:
        if is_of_users(kind.__module__):
            self.reach_space(kind, kind.__name__)

    # -- what runs ---------------------------------------------------------------------------------

    def entered(self, frame: FrameType) -> None:
        """A function of the user's is called."""
        code = frame.f_code
        back = frame.f_back
        if code.co_name == "<module>" and back and "importlib" in back.f_code.co_filename:
            return  # it is imported now
        operator = self._by_operators.pop(id(code), None)
        if operator is not None:  # Python asks the class for it, past what is instrumented
            kind, key = operator
            place = places.attribute_of_class(f"{kind.__name__}.{key}", kind, key)
            self._record.read_at(place, place.value, alone=True)
        new = id(code) not in self.codes
        waiting = self._waiting.pop(id(code), None)
        if not new and waiting is None:
            return
        with self._record.quietly():
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
            if isinstance(const, CodeType):  # made within: its cells are those of this one
                self._codes_of_functions.add(id(const))
                self._record.keep(const)
                if self.all_at_once:
                    self._enter_code(const, variables)
        self.constants |= constants_of(code)
        for name in global_names(code):
            if name in Substitutes.of_builtins:
                place = places.hidden_builtin(variables, name)
                self._record.read_at(place, place.value)
                self._substitutes.put(variables, name)
            elif name != "super":  # one of Python's own may come to be hidden by a global
                value = variables.get(name, MISSING)
                self._record.read_at(places.entry(name, variables, name), value)
                if value is MISSING:
                    self._read_builtin(name, variables)
                elif reflects(code):
                    take_whole(self._record, value, name)
        self._read_of_libraries(code, variables)
        if "type" in global_names(code) and not self.types_read:
            self.types_read = True
            for kind in self._record.kinds():
                self.reach_class(kind)
        for name in imported_names(code, variables.get("__package__")):
            read_module(self._record, name)
            module = sys.modules.get(name)
            if module is not None:
                self._record.reach(module, name)
        if "__class__" in code.co_freevars:
            self._supers |= names_of(code)
            for kind in list(self._classes.values()):
                self._read_of_bases(kind)
        self.note_asked_names(names_of(code))

    def note_asked_names(self, names: set[str]) -> None:
        """Objects, classes and modules that are reached may be asked for these."""
        new = names - self._used
        self._used |= new
        for key in sorted(new):
            if not key.startswith("__"):
                place = places.of_tensor(key)
                self._record.read_at(place, place.value, alone=not _is_users(place.value))
        for space, name in list(self._spaces.values()):
            self._read_of_space(space, name, new)

    def _enter_function(self, f: types.FunctionType, name: str) -> None:
        if not isinstance(name, str):
            return
        for key, where in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            place = places.cell(key, where)
            self._record.read_at(place, place.value)
            if reflects(f.__code__):
                take_whole(self._record, place.value, key)
            if isinstance(place.value, types.ModuleType):
                self._read_of_libraries(f.__code__, {key: place.value})
        if f.__dict__:
            self.reach_space(f, f.__name__)
        else:
            self._bare[id(f)] = (f, f.__name__)
        self._record.read_at(places.function_part(name, f, "__code__"), f.__code__)
        for key, called in (("__defaults__", "default"), ("__kwdefaults__", "default")):
            self._record.read_at(
                places.function_part(f"{called} of {f.__name__}", f, key), getattr(f, key)
            )

    def _read_builtin(self, name: str, variables: dict[str, Any]) -> None:
        """A name of Python's own, or one that a program has put among these."""
        held = variables.get("__builtins__", builtins)
        held = held if isinstance(held, dict) else vars(held)
        value = held.get(name, MISSING)
        own = getattr(value, "__module__", "builtins") == "builtins" and callable(value)
        self._record.read_at(places.entry(name, held, name), value, alone=own)

    # -- by name -----------------------------------------------------------------------------------

    def _read_of_libraries(self, code: CodeType, variables: dict[str, Any]) -> None:
        """What code asks modules of torch's and Python's for, which a program may replace."""
        for root, *names in dotted_names(code):
            value, called = variables.get(root), root
            for key in names:
                if not isinstance(value, types.ModuleType) or is_of_users(value.__name__):
                    break
                held, called = vars(value), f"{called}.{key}"
                value = held.get(key)
                if value is sys.modules:
                    read_modules(self._record, code)
                if key in held and value is not sys.modules:
                    self._record.read_at(places.entry(called, held, key), value, alone=True)
                    if isinstance(value, abc.ABCMeta) and not value.__module__.startswith("torch"):
                        read_registry(self._record, value, called)

    def _read_of_bases(self, kind: type) -> None:
        """What `super()` may give: what a base has, though another class stands before it."""
        for base in kind.__mro__[1:]:
            if is_of_users(base.__module__):
                for key in sorted(self._supers & vars(base).keys()):
                    self._record.read_of_class(base, key)

    def _read_of_space(self, space: Any, name: str, names: set[str]) -> None:
        if isinstance(space, type):
            for key in sorted(names & names_of_class(space)):
                self._record.read_of_class(space, key)
            return
        held = variables_of(space)
        with self._record.found_by_name():
            for key in sorted(names & held.keys()):
                if not key.startswith("__") and not Substitutes.has(held[key]):
                    self._record.read_at(places.entry(f"{name}.{key}", held, key), held[key])


def _is_users(value: Any) -> bool:
    """Is it something that a program has put among what torch has?"""
    return value is not MISSING and is_of_users(getattr(value, "__module__", None))
