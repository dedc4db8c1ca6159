"""Calls that a captured step makes: which functions of the user's run, and what no graph can hold.

A profile function hears of each call of this thread, of Python's functions and of those made in C.
Numbers that are random, clocks and seeds are refused where the user asks for them. What is printed
and logged is printed and logged while a step is captured, and that is said once.
"""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import os
import queue
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from partita.comm import user_line
from partita.layout import Fix

from ..capture.capture_context import profiled_by
from ..errors import CaptureError, not_captured, of_anomalies
from .codes import is_of_users, is_recorded
from .external_state import is_of_world, is_pythons, user_of
from .settings import (
    finds_object,
    is_called_as_setting,
    read_answer,
    read_environment,
    read_found,
    says_setting,
)

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["Calls", "unguarded"]

_OF_SEEDS = {
    inspect.unwrap(function).__code__: f"torch.{name}"
    for module in (torch.random, torch.cuda.random)
    for name, function in vars(module).items()
    if not name.startswith("_") and ("seed" in name or "rng" in name)
}
_SEEDS_ASKED = {code for code, name in _OF_SEEDS.items() if name == "torch.initial_seed"}
_SEEDS = {
    code: name
    for code, name in _OF_SEEDS.items()
    if not name.startswith(("torch.initial_", "torch.get_"))
}
# Decorators, through which what the user calls comes to what it names.
_BETWEEN = (
    "contextlib.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "_collections_abc.py",
    "<frozen _collections_abc>",
)
# What other threads, or other programs, see of a step and a step of them.
_SHARED = {
    f.__code__: f"{f.__module__}.{f.__qualname__}"
    for f in (
        threading.Thread.start,
        threading.Event.set,
        threading.Event.clear,
        threading.Event.is_set,
        threading.Event.wait,
        queue.Queue.put,
        queue.Queue.get,
        queue.Queue.qsize,
        concurrent.futures.ThreadPoolExecutor.submit,
        torch.load,
        torch.save,
    )
}
_BACKWARD = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_ENVIRONMENT = {getattr(os._Environ, f"__{name}__").__code__ for name in ("getitem", "iter", "len")}
_SETTING = torch.backends.ContextProp.__get__.__code__  # torch.backends.cudnn.benchmark
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SEEDS_OF_C = frozenset("manual_seed seed set_state initial_seed get_state".split())
_RANDOM_CODES = {
    f.__code__
    for f in vars(random.Random).values()
    if hasattr(f, "__code__") and not f.__name__.startswith("__")
}


def _kind_of(frame: FrameType) -> str:
    code = frame.f_code
    if is_recorded(code.co_filename) and not _is_made_by_library(frame):
        return "recorded"
    logs = code.co_name == "_log" and code.co_filename.endswith("logging/__init__.py")
    special = logs or code in _SEEDS or code in _RANDOM_CODES or code in _SHARED
    if special or code in _ENVIRONMENT or code in _BACKWARD:
        return "special"
    if code is _SETTING or code in _SEEDS_ASKED or finds_object(code) or _is_setting(code):
        return "setting"
    return "pythons" if is_pythons(code.co_filename) else "library"


def _is_setting(code: CodeType) -> bool:
    """Is it a function of torch that says how something is set?"""
    of_torch = code.co_argcount == 0 and code.co_filename.startswith(_TORCH)
    return of_torch and is_called_as_setting(code.co_name)


def _is_made_by_library(frame: FrameType) -> bool:
    """Is it of no file, as what `dataclass` makes, in a module of a library's?"""
    made = frame.f_code.co_filename.startswith("<")
    return made and not is_of_users(frame.f_globals.get("__name__"))


def _is_between(code: CodeType, called: CodeType) -> bool:
    """Is it code through which what the user calls comes to `called`?"""
    return code.co_filename == called.co_filename or code.co_filename.endswith(_BETWEEN)


def _find_generator_states() -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """The state of each generator that a program has by itself, and what sets it."""
    found: dict[str, tuple[Any, Callable[[Any], None]]] = {
        "random": (random.getstate(), random.setstate)
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *more = numpy.random.get_state()
        found["numpy.random"] = ((name, tuple(keys.tolist()), *more), numpy.random.set_state)
    return found


def unguarded(fact: str, reason: str, name: str = "", fix: Fix | None = None) -> CaptureError:
    """The error to raise where a step reads what no guard can hold."""
    usual = Fix(f"give {name or 'it'} as an argument", "read before the step")
    return not_captured(fact, reason, fix or usual)


class Calls:
    """What a step calls while it is captured."""

    def __init__(self, record: StateReader):
        self._record = record
        self._kinds: dict[int, str] = {}
        self._codes: dict[int, CodeType] = {}
        self._told: set[str] = set()
        self._collecting = False

    @contextmanager
    def heard(self, listen: bool) -> Iterator[None]:
        """Within, `entered` of the record is told of calls; nothing where not `listen`."""
        if not listen:
            yield
            return
        states = _find_generator_states()
        with self._collections_unheard(), profiled_by(self._handle_event):
            yield
        for name, (state, put) in states.items():
            if _find_generator_states()[name][0] != state and self._record.error is None:
                put(state)
                self._refuse_random_draw(name)

    @contextmanager
    def _collections_unheard(self) -> Iterator[None]:
        """Within, what a collection of garbage runs (finalizers, callbacks) is none of the step's.

        It comes at any time, in whichever thread allocates.
        """
        thread = threading.get_ident()

        def begins(phase: str, _: Any) -> None:
            if phase == "start" and threading.get_ident() == thread:
                self._collecting = True

        def ends(phase: str, _: Any) -> None:
            if phase == "stop" and threading.get_ident() == thread:
                self._collecting = False

        gc.callbacks.insert(0, begins)
        gc.callbacks.append(ends)
        try:
            yield
        finally:
            gc.callbacks.remove(begins)
            gc.callbacks.remove(ends)

    def _handle_event(self, frame: FrameType, what: str, argument: Any) -> None:
        if self._collecting:
            return
        kind = self._kinds.get(id(frame.f_code))
        if kind == "library":  # most calls by far
            return
        if kind is None:
            code = frame.f_code
            kind = self._kinds[id(code)] = _kind_of(frame)
            self._codes[id(code)] = code
        if what == "call":
            if kind == "recorded":
                self._record.functions.entered(frame)
            elif kind == "setting":  # torch itself asks for these all the time
                caller = frame.f_back
                if caller is not None and self._kinds.get(id(caller.f_code)) == "recorded":
                    self._of_setting(frame.f_code, frame)
            elif kind == "special":
                self._of_library(frame.f_code, frame)
        elif what == "c_call" and kind == "recorded":
            self._of_c(argument, frame)
        elif what == "c_call" and kind == "pythons":
            self._of_pythons(argument, frame)

    def _of_library(self, code: CodeType, frame: FrameType) -> None:
        if code in _BACKWARD:
            if torch.is_anomaly_enabled():
                self._record.error = self._record.error or of_anomalies()
                raise self._record.error
            self._record.before_backward(frame.f_locals.get("inputs"))
            return
        caller = frame.f_back
        while caller is not None and _is_between(caller.f_code, code):
            caller = caller.f_back
        if code in _ENVIRONMENT:
            caller = user_of(caller)  # Python's own library may ask for the step
        if caller is None or not is_recorded(caller.f_code.co_filename):
            return  # of torch's own
        if code.co_name == "_log":
            self._tell("logging", caller)
            return
        if code in _ENVIRONMENT:
            read_environment(self._record, frame.f_locals.get("key"))
        elif code in _SHARED:
            self._refuse_shared_state(_SHARED[code])
        elif code in _SEEDS:
            self._refuse_seeding(_SEEDS[code])
        else:
            self._refuse_random_draw(f"random.{code.co_name}")

    def _of_setting(self, code: CodeType, frame: FrameType) -> None:
        if code is _SETTING:
            function: Any = frame.f_locals["self"].getter
            read_answer(self._record, getattr(function, "__name__", "a setting"), function)
            return
        if finds_object(code):
            read_found(self._record, frame)
            return
        function = frame.f_globals.get(code.co_name)
        if getattr(function, "__code__", None) is code:
            read_answer(self._record, f"{function.__module__}.{code.co_name}()", function)

    def _of_c(self, function: Any, frame: FrameType) -> None:
        if function is print:
            self._tell("print", frame)
            return
        if name := is_of_world(function):
            self._of_world(function, name, frame)
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if function is globals:
            self._record.functions.reach_globals(frame.f_globals)
        if says_setting(function):
            read_answer(self._record, f"{name}()", function)
        if owner is None:
            return
        if isinstance(owner, torch._C.Generator) and name in _SEEDS_OF_C:
            self._refuse_seeding(f"torch.Generator.{name}")
        if isinstance(owner, random.Random):
            self._refuse_random_draw(f"random.{name}")
        if type(owner).__module__.startswith("numpy.random"):
            self._refuse_random_draw(f"numpy.random.{name}")

    def _of_pythons(self, function: Any, frame: FrameType) -> None:
        """Python's own library calls a function of C, perhaps since the step asks it to."""
        name, asked = is_of_world(function), says_setting(function)
        if not (name or asked) or (caller := user_of(frame)) is None:
            return
        if name:
            self._of_world(function, name, caller)
        else:
            read_answer(self._record, f"{function.__name__}()", function)

    def _of_world(self, function: Any, name: str, frame: FrameType) -> None:
        if getattr(function, "__self__", None) in (sys.stdout, sys.stderr):
            self._tell("print", frame)
        elif name.startswith(("time.", "datetime.")):
            self._record.refuse(
                f"the step reads the clock ({name})",
                "a graph would always have the time of its capture",
            )
        else:
            self._refuse_shared_state(name.removeprefix("io."))

    def refuse_if_random(self, value: Any, name: str) -> None:
        """`value` is reached, of which the calls may not be heard."""
        if isinstance(value, torch._C.Generator):
            self._record.refuse(
                f"the step reads {name}, a torch.Generator",
                "a graph draws from the generator of its own device alone",
                fix=Fix(
                    "torch.manual_seed(...)", "before the step, which draws without generator="
                ),
            )
        numpy = sys.modules.get("numpy")
        kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
        if isinstance(value, random.Random) or (kinds and isinstance(value, kinds)):
            self._refuse_random_draw(f"{name}, a generator")
        bound = type(value).__name__ == "cython_function_or_method"
        if bound and kinds and isinstance(value.__self__, kinds):
            self._refuse_random_draw(f"numpy.random.{value.__name__}")

    def _refuse_seeding(self, name: str) -> None:
        self._record.refuse(
            f"the step seeds ({name})",
            "a graph draws from the generator as it finds it: it would be seeded once, at capture",
        )

    def _refuse_random_draw(self, name: str) -> None:
        self._record.refuse(
            f"the step draws a number of Python's or numpy's ({name})",
            "a graph would always have the number of its capture",
        )

    def _refuse_shared_state(self, name: str) -> None:
        self._record.refuse(
            f"the step calls {name}",
            "what other threads and files hold is no part of a graph: it would be read or written "
            "once, at capture, and not in each call",
            "what it reads",
        )

    def _tell(self, name: str, frame: FrameType) -> None:
        if name not in self._told:
            self._told.add(name)
            warnings.warn(
                f"{name} at {user_line(frame)} runs while the step is captured, not in later calls",
                stacklevel=2,
            )
