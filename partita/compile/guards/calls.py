"""Calls that a captured step makes, watched by a profile function of this thread.

`Calls` sees each call, of Python functions and of functions of C, classified once per code object
(`_kind_of`). The user's functions are entered by the record (`Functions.enter_frame`), settings
that they ask for are guarded, and calls that no guard can cover raise a CaptureError: random
numbers, clocks, seeds, files and locks. `print` and logging run at capture alone, of which a
warning tells.
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
from .codes import is_recorded, is_user_module
from .external_state import find_user_frame, is_stdlib_file, name_of_external_function
from .settings import (
    finds_process_object,
    is_called_as_setting,
    is_setting_of_c,
    read_environment,
    read_process_object,
    read_setting,
)

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["Calls", "unguarded"]

_FUNCTIONS_OF_SEEDS = {  # of torch, by code
    inspect.unwrap(function).__code__: f"torch.{name}"
    for module in (torch.random, torch.cuda.random)
    for name, function in vars(module).items()
    if not name.startswith("_") and ("seed" in name or "rng" in name)
}
_SEED_GETTERS = {code for code, name in _FUNCTIONS_OF_SEEDS.items() if name == "torch.initial_seed"}
_SEED_SETTERS = {
    code: name
    for code, name in _FUNCTIONS_OF_SEEDS.items()
    if not name.startswith(("torch.initial_", "torch.get_"))
}
# Files of decorators and base classes that stand between the user's call and the function called.
_FORWARDING_FILES = (
    "contextlib.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "_collections_abc.py",
    "<frozen _collections_abc>",
)
_FILE_FUNCTIONS: list[Any] = [  # of torch: load, save
    f
    for name in torch.serialization.__all__
    if inspect.isfunction(f := vars(torch.serialization)[name])
    and "f" in inspect.signature(f).parameters
]
# Functions by which a step reads or writes what other threads or programs do.
_SHARED_STATE = {
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
        *_FILE_FUNCTIONS,
    )
}
_BACKWARD = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_ENVIRONMENT = {getattr(os._Environ, f"__{name}__").__code__ for name in ("getitem", "iter", "len")}
_SETTING = torch.backends.ContextProp.__get__.__code__  # torch.backends.cudnn.benchmark
_TORCH = os.path.dirname(torch.__file__) + os.sep
_GENERATOR_METHODS = {
    name for name in vars(torch._C.Generator) if "seed" in name or "_state" in name
}
_RANDOM_CODES = {
    f.__code__
    for f in vars(random.Random).values()
    if hasattr(f, "__code__") and not f.__name__.startswith("__")
}


def _kind_of(frame: FrameType) -> str:
    """How calls of a frame's code are handled.

    "recorded" is the user's code; "special" may have to be refused; "setting" reads how torch or
    the process is set; "stdlib" is Python's own library; "library" is not looked at.
    """
    code = frame.f_code
    if is_recorded(code.co_filename) and not _is_made_by_library(frame):
        return "recorded"
    logs = code.co_name == "_log" and code.co_filename.endswith("logging/__init__.py")
    special = logs or code in _SEED_SETTERS or code in _RANDOM_CODES or code in _SHARED_STATE
    if special or code in _ENVIRONMENT or code in _BACKWARD:
        return "special"
    if code is _SETTING or code in _SEED_GETTERS or finds_process_object(code) or _is_setting(code):
        return "setting"
    return "stdlib" if is_stdlib_file(code.co_filename) else "library"


def _is_setting(code: CodeType) -> bool:
    """Is it a function of torch without arguments that returns a setting, by its name?"""
    of_torch = code.co_argcount == 0 and code.co_filename.startswith(_TORCH)
    return of_torch and is_called_as_setting(code.co_name)


def _is_made_by_library(frame: FrameType) -> bool:
    """Is it generated code (as `dataclass` makes) in a module of a library?"""
    made = frame.f_code.co_filename.startswith("<")
    return made and not is_user_module(frame.f_globals.get("__name__"))


def _forwards_call(code: CodeType, called: CodeType) -> bool:
    """Does `code` only forward the user's call to the code `called`?"""
    return code.co_filename == called.co_filename or code.co_filename.endswith(_FORWARDING_FILES)


def _find_generator_states() -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """The state of each global generator, of Python and of numpy, and the function that sets it."""
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
    """Watches what a step calls while it is captured, for a record.

    Args:
        record: is told of functions that run and of settings that are read, and raises refusals.
    """

    def __init__(self, record: StateReader):
        self._record = record
        self._kinds: dict[int, str] = {}
        self._codes: dict[int, CodeType] = {}
        self._warned_of: set[str] = set()
        self._collecting = False

    @contextmanager
    def listening(self, enabled: bool) -> Iterator[None]:
        """Within, calls of this thread are handled; nothing is where not `enabled`."""
        if not enabled:
            yield
            return
        states = _find_generator_states()
        with self._ignoring_garbage_collection(), profiled_by(self._handle_event):
            yield
        for name, (state, put) in states.items():
            if _find_generator_states()[name][0] != state and self._record.error is None:
                put(state)
                self._refuse_random_draw(name)

    @contextmanager
    def _ignoring_garbage_collection(self) -> Iterator[None]:
        """Within, calls made by the garbage collector (finalizers, callbacks) are not handled.

        It runs at any time, in whichever thread allocates, and is no part of the step.
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
        if what == "return" or what == "c_return" or self._collecting:
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
                self._record.functions.enter_frame(frame)
            elif kind == "setting":  # of interest only where the user asks: torch does all the time
                caller = frame.f_back
                if caller is not None and self._kinds.get(id(caller.f_code)) == "recorded":
                    self._handle_setting(frame.f_code, frame)
            elif kind == "special":
                self._handle_library_call(frame.f_code, frame)
        elif what == "c_call" and kind == "recorded":
            self._handle_c_call(argument, frame)
        elif what == "c_call" and kind == "stdlib":
            self._handle_stdlib_call(argument, frame)

    def _handle_library_call(self, code: CodeType, frame: FrameType) -> None:
        if code in _BACKWARD:
            if torch.is_anomaly_enabled():
                self._record.error = self._record.error or of_anomalies()
                raise self._record.error
            self._record.before_backward(frame.f_locals.get("inputs"))
            return
        caller = frame.f_back
        while caller is not None and _forwards_call(caller.f_code, code):
            caller = caller.f_back
        if code in _ENVIRONMENT:
            caller = find_user_frame(caller)  # the step may ask through Python's library
        if caller is None or not is_recorded(caller.f_code.co_filename):
            return  # torch calls it for itself
        if code.co_name == "_log":
            self._warn_not_repeated("logging", caller)
            return
        if code in _ENVIRONMENT:
            read_environment(self._record, frame.f_locals.get("key"))
        elif code in _SHARED_STATE:
            self._refuse_shared_state(_SHARED_STATE[code])
        elif code in _SEED_SETTERS:
            self._refuse_seeding(_SEED_SETTERS[code])
        else:
            self._refuse_random_draw(f"random.{code.co_name}")

    def _handle_setting(self, code: CodeType, frame: FrameType) -> None:
        if code is _SETTING:
            function: Any = frame.f_locals["self"].getter
            read_setting(self._record, getattr(function, "__name__", "a setting"), function)
            return
        if finds_process_object(code):
            read_process_object(self._record, frame)
            return
        function = frame.f_globals.get(code.co_name)
        if getattr(function, "__code__", None) is code:
            read_setting(self._record, f"{function.__module__}.{code.co_name}()", function)

    def _handle_c_call(self, function: Any, frame: FrameType) -> None:
        if function is print:
            self._warn_not_repeated("print", frame)
            return
        if name := name_of_external_function(function):
            self._refuse_external(function, name, frame)
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if function is globals:
            self._record.functions.reach_globals(frame.f_globals)
        if is_setting_of_c(function):
            read_setting(self._record, f"{name}()", function)
        if owner is None:
            return
        if isinstance(owner, torch._C.Generator) and name in _GENERATOR_METHODS:
            self._refuse_seeding(f"torch.Generator.{name}")
        if isinstance(owner, random.Random):
            self._refuse_random_draw(f"random.{name}")
        if type(owner).__module__.startswith("numpy.random"):
            self._refuse_random_draw(f"numpy.random.{name}")

    def _handle_stdlib_call(self, function: Any, frame: FrameType) -> None:
        """Handle a function of C that Python's library calls, if it does so for the user."""
        name, is_setting = name_of_external_function(function), is_setting_of_c(function)
        if not (name or is_setting) or (caller := find_user_frame(frame)) is None:
            return
        if name:
            self._refuse_external(function, name, caller)
        else:
            read_setting(self._record, f"{function.__name__}()", function)

    def _refuse_external(self, function: Any, name: str, frame: FrameType) -> None:
        if getattr(function, "__self__", None) in (sys.stdout, sys.stderr):
            self._warn_not_repeated("print", frame)
        elif name.startswith(("time.", "datetime.")):
            self._record.refuse(
                f"the step reads the clock ({name})",
                "a graph would always have the time of its capture",
            )
        else:
            self._refuse_shared_state(name.removeprefix("io."))

    def refuse_if_random(self, value: Any, name: str) -> None:
        """Raise CaptureError if `value` is a random generator, whose calls may not be seen."""
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

    def _warn_not_repeated(self, name: str, frame: FrameType) -> None:
        if name not in self._warned_of:
            self._warned_of.add(name)
            warnings.warn(
                f"{name} at {user_line(frame)} runs while the step is captured, not in later calls",
                stacklevel=2,
            )
