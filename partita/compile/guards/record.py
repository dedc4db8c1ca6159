"""Records of what a step reads of Python while it is captured.

Functions are entered as they are called: the globals, cells and defaults that they name are read
then. Attributes are recorded as they are read (see `instrument`). A container is taken whole when
it is first reached. What is read is settled, as the guards of a program, when capture is over and
everything stands again where it was.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import gc
import io
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..symbolic import TypeOfNumbers
from . import places
from .calls import Calls, unguarded
from .codes import (
    constants_of,
    dotted_names,
    global_names,
    is_of_users,
    is_recorded,
    names_of,
)
from .expected import MISSING, brief, holds_no_more, is_array, is_container, items_of
from .guards import Guards
from .instrument import instrument, reads_by_itself, recorded_by, release
from .places import Place
from .writes import Snapshots

__all__ = ["Record"]

_OF_TORCH = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_OF_PYTHON = ("argparse", "collections", "configparser", "types")  # whose objects hold settings
_INSIDE = ("_parameters", "_buffers", "_modules")
_MODULES = vars(nn.modules.module)
_HOOKS_OF_ALL = [  # private torch: hooks of all modules, which each call of a module looks at
    key for key in _MODULES if key.startswith("_global_") and key.endswith("_hooks")
]
_HUGE = 100_000  # entries of a container; into those of a larger one it is not looked
_WEAK = (
    weakref.ref,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    weakref.ProxyType,
    weakref.CallableProxyType,
)
_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)


@dataclass(eq=False)
class _Known:
    """An object that was there before the step.

    Attributes:
        names: the attributes that were read.
        held: what its `__dict__` held when it was reached.
        slots: the descriptors of its `__slots__`.
        whole: whether all of its attributes are taken as read.
    """

    value: Any
    name: str
    held: dict[str, Any]
    slots: dict[str, Any]
    whole: bool = False
    names: dict[str, None] = field(default_factory=dict)


class Record:
    """What one run of a step under capture reads.

    Args:
        names: of modules and optimizers that are found beforehand: by identity, their names.
        apart: attributes of optimizers that are exchanged while the step runs.

    Attributes:
        stand_in_for_float: called for each float that is reached, before the step reads it, with
            its name, its home, its key and itself; gives what stands there while the step runs, or
            None. What has a stand-in is guarded by its type alone.
        places: what was read, in order.
        snapshots: of what was reached, to see what the step writes.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.stand_in_for_float: Callable[[str, Any, Any, float], Any] = lambda *_: None
        self.places: dict[tuple[int, Any], Place] = {}
        self.types: dict[int, tuple[Any, type]] = {}
        self.numbers: dict[tuple[int, Any], tuple[Place, float]] = {}
        self.huge: dict[int, tuple[str, Any]] = {}
        self.classes: list[type] = []  # of the user's, which may come to have what they have not
        self.snapshots = Snapshots()
        self.codes: dict[int, CodeType] = {}
        self.error: CaptureError | None = None
        self._names = names
        self._known: dict[int, _Known] = {}
        self._kept: dict[int, Any] = {}
        self._waiting: dict[int, list[Any]] = {}  # functions that are entered when their code runs
        self._codes_of_functions: set[int] = set()
        self._spaces: dict[int, tuple[Any, str]] = {}  # modules of Python and classes
        self._bare: dict[int, tuple[Any, str]] = {}  # functions that have no attributes yet
        self._used: set[str] = set()
        self._supers: set[str] = set()  # names that code which may say `super()` uses
        self._classes: dict[int, type] = {}
        self._constants: set[str] = set()
        self._instrumented: list[type] = []
        self._types_read = False  # is it asked for the types of objects?
        self._by_operators: dict[int, tuple[type, str]] = {}  # `__len__` and others, by their code
        self._busy = False
        self._by_name = False  # what is reached now is perhaps not what the step reads
        self._all_at_once = False
        self._calls = Calls(self)
        self._types = TypeOfNumbers()

    @contextmanager
    def recording(self, step: Any, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Within, what this thread reads is recorded; `step` is what is going to run."""
        try:
            self._instrument(nn.Module)
            # Where a profiler listens to calls, what functions name is read before they run.
            self._all_at_once = sys.getprofile() is not None
            with self._quietly():
                self.read_at(Place("the step", self, "step", lambda: step), step)
                for key in _HOOKS_OF_ALL:
                    self.read_at(places.entry(key, _MODULES, key), _MODULES[key])
                for name, value in arguments:
                    self.reach(value, name)
            with recorded_by(self), self._calls.heard(not self._all_at_once):
                yield
            if self.error is not None:
                raise self.error
        finally:
            self._types.take_away()
            release(self._instrumented)
            self._instrumented = []

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def guards(self, floats: Callable[[Any, Any], bool], slots: Any, extra: Any) -> Guards:
        """What was read, as it is now.

        Args:
            floats: whether the number at a place is an input, beside those with a stand-in.
            slots: the places of the graph's tensors.
            extra: places to be guarded beside those that were read.
        """

        def number(home: Any, key: Any) -> bool:
            try:
                return (id(home), key) in self.numbers or floats(home, key)
            except TypeError:  # an unhashable key
                return False

        return Guards(
            [*self.places.values(), *extra],
            [*self.types.values()],
            number,
            [*self.huge.values()],
            slots,
            self.classes,
            [
                (name, _variables_of(space), frozenset(self._used))
                for space, name in (self._bare | self._spaces).values()
                if not isinstance(space, type)
            ],
        )

    def watch(self, value: Any, name: str) -> None:
        """See what the step writes into a container of the capture's own, and those in it."""
        if is_container(value) and id(value) not in self._kept:
            self._kept[id(value)] = value
            self.snapshots.container(value, name)
            keys, values = items_of(value)
            for key, v in zip(keys or range(len(values)), values, strict=False):
                self.watch(v, f"{name}[{key!r}]")

    def put_back(self) -> None:
        """Put the floats back that have a stand-in."""
        for place, value in self.numbers.values():
            place.write(value)

    def refuse(self, fact: str, reason: str, name: str = "") -> None:
        """Note that the step reads what no guard can hold, and raise it."""
        self.error = self.error or unguarded(fact, reason, name)
        raise self.error

    # -- attributes --------------------------------------------------------------------------------

    def read(self, owner: Any, name: str) -> None:
        """An attribute is read."""
        known = self._known.get(id(owner))
        if known is None or self._busy or name in known.names:
            return
        known.names[name] = None
        if name == "__class__" and is_recorded(sys._getframe(2).f_code.co_filename):
            with self._quietly():
                self._reach_class(type(owner))
            return
        if name == "__dict__":
            # Of torch's own code, which looks its modules' parameters up there.
            if is_recorded(sys._getframe(2).f_code.co_filename):
                with self._quietly():
                    self._take_whole(known)
            else:
                del known.names[name]
            return
        with self._quietly():
            self._read(known, name)

    def _read(self, known: _Known, name: str) -> None:
        owner, called = known.value, f"{known.name}.{name}"
        if isinstance(owner, torch.optim.Optimizer) and name in ("state", "param_groups"):
            return
        if name in known.held:
            self.read_at(places.entry(called, _dict_of(owner), name), known.held[name])
            return
        if name in known.slots:
            place = places.slot(called, owner, known.slots[name])
            self.read_at(place, place.value)
            return
        inside = _inside(owner, name)
        if inside is not None:
            self.read_at(places.entry(called, inside, name), inside[name])
            return
        found = self._read_of_class(type(owner), name)
        if found is MISSING and not name.startswith("__"):  # a class may come to have it
            kind = type(owner)
            self.read_at(places.attribute_of_class(f"{kind.__name__}.{name}", kind, name), MISSING)
        if _may_be_hidden(type(owner), name, found) and known.held is not None:
            home = _dict_of(owner)
            if home is not None:
                self.read_at(places.entry(called, home, name), MISSING)
            if found is MISSING and isinstance(owner, nn.Module):
                for within in _INSIDE:
                    self.read_at(places.entry(called, home[within], name), MISSING)

    def _take_whole(self, known: _Known) -> None:
        known.whole = True
        home = _dict_of(known.value)
        if home is not None:
            self.read_at(places.Place(known.name, known.value, "__dict__", lambda: home), home)

    def _read_of_class(self, kind: type, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return MISSING
        place = places.attribute_of_class(f"{kind.__name__}.{name}", kind, name)
        value = place.value
        if place.identity in self.places:
            return value
        if value is not MISSING and not _is_slot(value):
            self.read_at(place, value)
            inner = ("fget", "__func__", "func", "dispatcher")
            for function in (getattr(value, a, None) for a in inner):
                if function is not None:
                    self.reach(function, place.name)
        return value

    # -- what is reached ---------------------------------------------------------------------------

    def read_at(self, place: Place, value: Any, alone: bool = False) -> None:
        """The value of a place is read, which was `value` before the step.

        Args:
            alone: whether what it holds is no concern, nor can anything stand for it: a library's.
        """
        if place.identity in self.places:
            return
        self.places[place.identity] = place
        self._kept[id(place.home)] = place.home
        if place.get is None or place.put is not None or not alone:
            self.snapshots.place(place, value)
        if alone:
            return
        if type(value) is float:
            self._offer(place, value)
        else:
            self.reach(value, place.name)

    def _offer(self, place: Place, value: float) -> None:
        stands = self.stand_in_for_float(place.name, place.home, place.key, value)
        if stands is not None:
            self.numbers[place.identity] = (place, value)
            place.write(stands)
            self.snapshots.place(place, stands, again=True)

    def reach(self, value: Any, name: str) -> None:
        """`value`, which was there before the step, is reached."""
        if type(value) in _PLAIN or id(value) in self._kept:
            return
        if issubclass(type(value), _WEAK):
            if not self._by_name:
                self._refuse_weak(value, name)
            return
        if isinstance(value, (*_PLAIN, torch.Tensor)):
            return
        self._kept[id(value)] = value
        if isinstance(value, enum.Enum):
            self._reach_member(value, name)
        elif isinstance(value, threading.local):
            self._reach_local(value, name)
        elif is_container(value):
            self._reach_container(value, name)
        elif is_array(value):
            self.snapshots.array(value, name)
        elif isinstance(value, types.ModuleType):
            if is_of_users(value.__name__):
                self._reach_space(value, name)
            elif value.__name__ == "os" and self._all_at_once:
                self._reach_environment()
        elif isinstance(value, type):
            if is_of_users(value.__module__):
                self._reach_class(value)
                self._reach_functions(value, name)
                self.reach(type(value), type(value).__name__)
        elif isinstance(value, types.FunctionType):
            self._reach_function(value, name)
        elif isinstance(value, types.MethodType):
            self.reach(value.__self__, name)
            self.reach(value.__func__, name)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            self._calls.reached(value, name)
            if not isinstance(value.__self__, (types.ModuleType, type)):
                self.reach(value.__self__, f"the owner of {name}")
            known = self._known.get(id(value.__self__))
            if known is not None and not known.whole:  # it reads past what is instrumented
                self._take_whole(known)
        elif isinstance(value, contextvars.ContextVar):
            place = places.context(name, value)
            self.read_at(place, place.value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.reach(value.__func__, name)
        elif _is_iterator(value):
            if self._by_name:
                return
            self.refuse(
                f"the step reads {name}, an iterator ({type(value).__name__})",
                "what it gives next is not the same in the next call, and a graph would always "
                "have the first",
                name,
            )
        else:
            if not self._by_name:
                self._calls.reached(value, name)
            self._reach_object(value, name)
            if isinstance(value, functools._lru_cache_wrapper):
                self._reach_cached(value.__wrapped__, name)

    def _refuse_weak(self, value: Any, name: str) -> None:
        self.refuse(
            f"the step reads {name}, which holds weakly ({type(value).__name__})",
            "what only it refers to may be gone before the next call, and a graph would keep it",
            name,
        )

    def _reach_member(self, value: enum.Enum, name: str) -> None:
        """A member of an enum: attributes that it has been given, and a value that can change."""
        held = _dict_of(value)
        if held is not None and is_of_users(type(value).__module__):
            self.read_at(Place(name, value, "__dict__", lambda: held), held)
            self._reach_functions(type(value), type(value).__name__)

    def _reach_local(self, value: threading.local, name: str) -> None:
        """What this thread holds in a `threading.local`: another's is another program."""
        self.read_at(Place("the thread", value, "thread", threading.current_thread), None, True)
        held = value.__dict__
        self.read_at(Place(name, value, "__dict__", lambda: value.__dict__), held)

    def _reach_cached(self, f: Any, name: str) -> None:
        """What a result was computed from that was remembered before this step ran."""
        self.reach(f, name)
        waiting = self._waiting.pop(id(getattr(f, "__code__", None)), ())
        for f, called in waiting:
            self._enter_function(f, called)
            self._enter_code(f.__code__, f.__globals__)

    def _reach_container(self, value: Any, name: str) -> None:
        self.snapshots.container(value, name)
        if hasattr(type(value), "__len__") and len(value) > _HUGE:
            self._take_entries(value, name)
            return
        if isinstance(value, collections.defaultdict):
            self._read_factory(value, name)
        keys, values = items_of(value)
        if isinstance(value, (set, frozenset)):
            keys, values = None, list(value)
        for i, v in enumerate(values):
            key = keys[i] if keys is not None else i
            if type(v) is float and isinstance(value, (dict, list)):
                place = places.item(f"{name}[{key!r}]", value, key)
                self._offer_item(place, v)
            elif not isinstance(v, _PLAIN):
                self.reach(v, f"{name}.{key}" if _is_namespace(value) else f"{name}[{key!r}]")
        if hasattr(type(value), "__dictoffset__") and type(value).__module__ not in (
            "builtins",
            "collections",
            "types",
            "functools",
        ):
            self._reach_object(value, name)

    def _read_factory(self, value: collections.defaultdict[Any, Any], name: str) -> None:
        def put(factory: Any) -> None:
            value.default_factory = factory

        called, key = f"{name}.default_factory", ("default_factory",)
        place = Place(called, value, key, lambda: value.default_factory, put)
        self.read_at(place, value.default_factory)

    def _take_entries(self, value: Any, name: str) -> None:
        """Take a huge container by its entries, and say so where these may change themselves."""
        self.huge[id(value)] = (name, value)
        entries = value.values() if hasattr(value, "values") else value
        inner = next((v for v in entries if not holds_no_more(v)), None)
        if inner is not None and not self._by_name:
            warnings.warn(
                f"{name} has {len(value):,} entries: a compiled step sees when one is replaced, "
                f"not when something within one changes ({brief(inner)}). Give what the step needs "
                "of it as an argument",
                stacklevel=2,
            )

    def _offer_item(self, place: Place, value: float) -> None:
        stands = self.stand_in_for_float(place.name, place.home, place.key, value)
        if stands is not None:
            self.numbers[place.identity] = (place, value)
            place.write(stands)
            self.snapshots.item(place, stands)

    def _reach_object(self, value: Any, name: str) -> None:
        kind = type(value)
        if not kind.__flags__ & (1 << 9) or not _has_settings(
            kind
        ):  # made in C, or not looked into
            return
        if not self._instrument(kind):
            return
        held = _dict_of(value)
        name = self._names.get(id(value), name)
        known = _Known(value, name, dict(held or {}), _slots_of(kind))
        self._known[id(value)] = known
        self.types[id(value)] = (value, kind)
        self.snapshots.owner(value, name, held, known.slots)
        self._reach_functions(kind, kind.__name__)
        if self._types_read:
            self._reach_class(kind)
        if reads_by_itself(kind):
            self._take_whole(known)
            for key, v in known.held.items():
                self.reach(v, f"{name}.{key}")

    def _reach_functions(self, kind: type, name: str) -> None:
        """The functions of a class, which are entered when they run."""
        self._classes[id(kind)] = kind
        self._read_of_bases(kind)
        for base in kind.__mro__:
            if id(base) in self._codes_of_functions or not is_of_users(base.__module__):
                continue
            self._codes_of_functions.add(id(base))
            self.classes.append(base)
            for key, value in list(vars(base).items()):
                for f in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
                    if isinstance(f, types.FunctionType):
                        self.reach(f, f"{name}.{key}")
                        if key.startswith("__"):
                            self._by_operators[id(f.__code__)] = (base, key)

    def _reach_function(self, f: types.FunctionType, name: str) -> None:
        code = f.__code__
        recorded = is_recorded(code.co_filename)
        if hasattr(f, "__wrapped__"):
            self.reach(f.__wrapped__, name)
        if not recorded:
            # A decorator of a library's, as torch.no_grad: what it holds of the user's.
            for where in f.__closure__ or ():
                inner = _content(where)
                if isinstance(inner, (types.FunctionType, types.MethodType, functools.partial)):
                    self.reach(inner, name)
                elif type(inner) in (dict, list, set):  # as functools.singledispatch has them
                    self.read_at(places.cell(f"what {name} holds", where), inner)
            return
        if f.__dict__:
            self._reach_space(f, f.__name__)
        if self._all_at_once:
            self._enter_function(f, name)
            self._enter_code(code, f.__globals__)
        else:
            self._waiting.setdefault(id(code), []).append((f, name))

    # -- what runs ---------------------------------------------------------------------------------

    def entered(self, frame: FrameType) -> None:
        """A function of the user's is called."""
        code = frame.f_code
        if code.co_name == "<module>":  # it is imported now
            return
        operator = self._by_operators.pop(id(code), None)
        if operator is not None:  # Python asks the class for it, past what is instrumented
            kind, key = operator
            place = places.attribute_of_class(f"{kind.__name__}.{key}", kind, key)
            self.read_at(place, place.value, alone=True)
        new = id(code) not in self.codes
        waiting = self._waiting.pop(id(code), None)
        if not new and waiting is None:
            return
        with self._quietly():
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
                        if isinstance(f, types.FunctionType) and _runs(f, frame)
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
                self._kept[id(const)] = const
                if self._all_at_once:
                    self._enter_code(const, variables)
        self._constants |= constants_of(code)
        for name in global_names(code):
            if name == "type":
                self.read_at(place := places.type_of(variables), place.value)
                self._types.put(variables)
            elif name != "super":  # one of Python's own may come to be hidden by a global
                self.read_at(places.entry(name, variables, name), variables.get(name, MISSING))
        self._read_of_libraries(code, variables)
        if "type" in global_names(code) and not self._types_read:
            self._types_read = True
            for known in list(self._known.values()):
                self._reach_class(type(known.value))
        for name in _imported(code):
            module = sys.modules.get(name)
            if module is not None:
                self.reach(module, name)
        new = names_of(code) - self._used
        self._used |= new
        if "__class__" in code.co_freevars:
            self._supers |= names_of(code)
            for kind in list(self._classes.values()):
                self._read_of_bases(kind)
        for space, name in list(self._spaces.values()):
            self._read_of_space(space, name, new)

    def _enter_function(self, f: types.FunctionType, name: str) -> None:
        if not isinstance(name, str):
            return
        for key, where in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            place = places.cell(key, where)
            self.read_at(place, place.value)
            if isinstance(place.value, types.ModuleType):
                self._read_of_libraries(f.__code__, {key: place.value})
        if f.__dict__:
            self._reach_space(f, f.__name__)
        else:
            self._bare[id(f)] = (f, f.__name__)
        self.read_at(places.function_part(name, f, "__code__"), f.__code__)
        for key, called in (("__defaults__", "default"), ("__kwdefaults__", "default")):
            self.read_at(places.function_part(f"{called} of {f.__name__}", f, key), getattr(f, key))

    def reach_globals(self, variables: dict[str, Any]) -> None:
        """`globals()` is called."""
        with self._quietly():
            self._reach_space(variables, "globals()")

    def _reach_space(self, space: Any, name: str) -> None:
        """Variables that are read by the names used: of a module of Python, a class, a function."""
        if id(space) not in self._spaces:
            self._spaces[id(space)] = (space, name)
            self._read_of_space(space, name, self._used)

    def _reach_class(self, kind: type) -> None:
        if is_of_users(kind.__module__):
            self._reach_space(kind, kind.__name__)

    def _read_of_libraries(self, code: CodeType, variables: dict[str, Any]) -> None:
        """What code asks modules of torch's and Python's for, which a program may replace."""
        for root, *names in dotted_names(code):
            value, called = variables.get(root), root
            for key in names:
                if not isinstance(value, types.ModuleType) or is_of_users(value.__name__):
                    break
                held, called = vars(value), f"{called}.{key}"
                value = held.get(key)
                if key in held and value is not sys.modules:
                    self.read_at(places.entry(called, held, key), value, alone=True)

    def answered(self, name: str, function: Callable[[], Any]) -> None:
        """A function without arguments is asked for a setting."""
        with self._quietly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = function()
            except Exception:  # it has arguments
                return
            if isinstance(value, _PLAIN):
                self.read_at(places.answer(name, function), value, alone=True)

    def environment_read(self, key: str | None) -> None:
        """A variable of the environment is read; all of them where `key` is None."""
        data: Any = os.environ._data  # type: ignore[attr-defined]
        with self._quietly():
            if key is None:
                self.read_at(Place("os.environ", os.environ, "_data", lambda: data), data)
            elif isinstance(key, str):
                at = os.environ.encodekey(key)  # type: ignore[attr-defined]
                place = places.entry(f"os.environ[{key!r}]", data, at)
                self.read_at(place, place.value)

    def _read_of_bases(self, kind: type) -> None:
        """What `super()` may give: what a base has, though another class stands before it."""
        for base in kind.__mro__[1:]:
            if is_of_users(base.__module__):
                for key in sorted(self._supers & vars(base).keys()):
                    self._read_of_class(base, key)

    def _read_of_space(self, space: Any, name: str, names: set[str]) -> None:
        if isinstance(space, type):
            for key in sorted(names & _names_of_class(space)):
                self._read_of_class(space, key)
            return
        held = _variables_of(space)
        before, self._by_name = self._by_name, True
        for key in sorted(names & held.keys()):
            if not key.startswith("__") and held[key] is not TypeOfNumbers.kind:
                self.read_at(places.entry(f"{name}.{key}", held, key), held[key])
        self._by_name = before

    def _reach_environment(self) -> None:
        data: Any = os.environ._data  # type: ignore[attr-defined]
        self._kept[id(os.environ)] = os.environ
        for text in sorted(self._constants):
            key = os.environ.encodekey(text)  # type: ignore[attr-defined]
            if text.isupper():
                value = data.get(key, MISSING)
                self.read_at(places.entry(f"os.environ[{text!r}]", data, key), value)

    def _instrument(self, kind: type) -> bool:
        if kind in self._instrumented:
            return True
        if instrument(kind):
            self._instrumented.append(kind)
            return True
        return False


@functools.lru_cache(maxsize=1024)
def _names_of_class(kind: type) -> frozenset[str]:
    """What it has now; what it comes to have is seen by how many there are."""
    return frozenset().union(*(vars(base) for base in kind.__mro__ if base is not object))


def _variables_of(space: Any) -> dict[str, Any]:
    return space if isinstance(space, dict) else vars(space)


def _dict_of(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _inside(owner: Any, name: str) -> Any:
    """The dictionary of a module's parameters, buffers or modules that has this name."""
    if isinstance(owner, nn.Module):
        held = _dict_of(owner)
        for within in _INSIDE:
            if name in held.get(within, ()):
                return held[within]
    return None


def _slots_of(kind: type) -> dict[str, Any]:
    return {
        key: value
        for base in reversed(kind.__mro__)
        if is_of_users(base.__module__)
        for key, value in vars(base).items()
        if _is_slot(value)
    }


def _is_slot(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType)


def _may_be_hidden(kind: type, name: str, found: Any) -> bool:
    """May an attribute of the object itself come to stand before that of its class?"""
    if name.startswith("__") and name.endswith("__"):
        return False
    if hasattr(type(found), "__set__"):  # a property
        return False
    return not (name != "forward" and vars(nn.Module).get(name) is found is not MISSING)


def _has_settings(kind: type) -> bool:
    """Are attributes of its instances looked into?"""
    if issubclass(kind, _OF_TORCH):
        return True
    root = kind.__module__.split(".")[0]
    if root == "torch":
        return kind.__module__.startswith(("torch.optim", "torch.amp", "torch.nn"))
    return is_of_users(root) or root in _OF_PYTHON


def _is_namespace(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace)


def _is_iterator(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and not isinstance(value, (io.IOBase, nn.Module))


def _content(where: types.CellType) -> Any:
    try:
        return where.cell_contents
    except ValueError:
        return None


@functools.lru_cache(maxsize=4096)
def _imported(code: CodeType) -> tuple[str, ...]:
    import dis

    return tuple(i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME")


def _runs(f: types.FunctionType, frame: FrameType) -> bool:
    """Is it `f` that this frame runs, as far as the variables of its closure tell?"""
    local = frame.f_locals
    pairs = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return all(_content(where) is local.get(key) for key, where in pairs)
