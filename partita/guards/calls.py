"""Function calls of a captured step, watched with `sys.setprofile` in this thread.

`Calls` gets each call of a Python or C function. Once per code object, it decides how its calls are
handled (`_kind_of`). A user's function is recorded. If the step reads a setting (of torch, Python,
the environment), each later call reads it again and compares. Calls that no guard can cover raise a
CaptureError: random numbers, clocks, seeds, files and locks. `print` and logging run only at
capture, with a warning.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import decimal
import functools
import gc
import inspect
import locale
import logging
import os
import queue
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from partita.capture.capture_context import profiled_by
from partita.capture.code_origin import is_recorded_file, is_user_module
from partita.comm import user_line
from partita.graph.errors import make_anomaly_mode_error
from partita.layout import Fix

from .record import PlaceRecord
from .values import PLAIN, Place, has_type, place_of_answer

# -- calls -----------------------------------------------------------------------------------------

# What no guard can cover: what the step does, why it is refused, what to pass as an argument.
_SEEDS = (
    "seeds ({})",
    "a graph uses the generator's current state: it would be seeded only once, at capture",
    "",
)
_DRAWS = (
    "draws a number of Python's or numpy's ({})",
    "a graph would always use the number drawn at capture",
    "",
)
_READS_CLOCK = (
    "reads the clock ({})",
    "a graph would always use the time of its capture",
    "",
)
_COUNTS_CALLS = (
    "reads the statistics of a cache ({}())",
    "a graph does not call the cached function: the counts would be those of its capture",
    "its answer",
)
_SET_FOR_CAPTURE = (
    "calls {}()",
    "during capture it returns another value than when the step runs",
    "its answer",
)
_SHARES = (
    "calls {}",
    "other threads and files are not part of a graph: they would be read or written once, "
    "at capture, and not in each call",
    "what it reads",
)


def _refuse(record: PlaceRecord, what: tuple[str, str, str], name: str) -> None:
    does, reason, argument = what
    record.refuse(f"the step {does.format(name)}", reason, argument)


# Files of decorators and base classes that forward the user's call to the function.
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
# Functions by which a step communicates with other threads or programs.
_SHARING_FUNCTIONS = (
    *(threading.Thread.start, threading.Event.set, threading.Event.clear, threading.Event.is_set),
    *(threading.Event.wait, queue.Queue.put, queue.Queue.get, queue.Queue.qsize),
    *(concurrent.futures.ThreadPoolExecutor.submit, *_FILE_FUNCTIONS),
)
_SEED_SETTERS = [
    (f"torch.{name}", function)
    for module in (torch.random, torch.cuda.random)
    for name, function in vars(module).items()
    if ("seed" in name or "rng" in name) and not name.startswith(("_", "initial_", "get_"))
]
_REFUSED = {
    **{
        f.__code__: (_DRAWS, f"random.{f.__name__}")
        for f in vars(random.Random).values()
        if inspect.isfunction(f) and not f.__name__.startswith("__")
    },
    **{inspect.unwrap(f).__code__: (_SEEDS, name) for name, f in _SEED_SETTERS},
    **{f.__code__: (_SHARES, f"{f.__module__}.{f.__qualname__}") for f in _SHARING_FUNCTIONS},
}
_WHOLE_READS = ("__reduce_ex__", "__reduce__", "__getstate__")
"""Methods of C that read all attributes of their object."""
_BACKWARD = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_HASH = torch.Tensor.__hash__.__code__  # called when a set or dictionary looks up a tensor
_ENVIRONMENT = {getattr(os._Environ, f"__{name}__").__code__ for name in ("getitem", "iter", "len")}
_PROPERTY = torch.backends.ContextProp.__get__.__code__  # torch.backends.cudnn.benchmark
_SETTINGS = (
    _PROPERTY,
    *(inspect.unwrap(home.initial_seed).__code__ for home in (torch.random, torch.cuda.random)),
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_GENERATOR_METHODS = {
    name for name in vars(torch._C.Generator) if "seed" in name or "_state" in name
}


def _kind_of(frame: FrameType) -> str:
    """Returns how calls of a frame's code are handled.

    "recorded" is the user's code; "special" may have to be refused; "setting" reads a setting of
    torch or the process; "hash" is `__hash__` of a tensor; "stdlib" is Python's own library;
    "library" is ignored.
    """
    code = frame.f_code
    if is_recorded_file(code.co_filename) and not _is_made_by_library(frame):
        return "recorded"
    logs = code.co_name == "_log" and code.co_filename.endswith("logging/__init__.py")
    if logs or code in _REFUSED or code in _ENVIRONMENT or code in _BACKWARD:
        return "special"
    if code in _SETTINGS or code in _PROCESS_OBJECTS or _is_setting(code):
        return "setting"
    if code is _HASH:
        return "hash"
    return "stdlib" if _is_stdlib_file(code.co_filename) else "library"


def _is_setting(code: CodeType) -> bool:
    """True for a function of torch without arguments that returns a setting, judged by its name."""
    of_torch = code.co_argcount == 0 and code.co_filename.startswith(_TORCH)
    return of_torch and _is_called_as_setting(code.co_name)


def _is_made_by_library(frame: FrameType) -> bool:
    """True for generated code (as by `dataclass`) in a module of a library."""
    made = frame.f_code.co_filename.startswith("<")
    return made and not is_user_module(frame.f_globals.get("__name__"))


def _forwards_call(code: CodeType, called: CodeType) -> bool:
    """True if `code` only forwards the user's call to the code `called`."""
    return code.co_filename == called.co_filename or code.co_filename.endswith(_FORWARDING_FILES)


def _find_generator_states() -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """Returns (state, setter) of the global generator of Python, and of numpy if it is imported."""
    found: dict[str, tuple[Any, Callable[[Any], None]]] = {
        "random": (random.getstate(), random.setstate)
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *more = numpy.random.get_state()
        found["numpy.random"] = ((name, tuple(keys.tolist()), *more), numpy.random.set_state)
    return found


class Calls:
    """Watches the functions that a step calls during capture, with `sys.setprofile` in this thread.

    Args:
        record: stores the settings that are read, and raises CaptureErrors.
        enter_frame: a function that is called with the frame when a function of the user runs.
        reach_globals: a function that is called with the globals when the step calls `globals()`.
    """

    def __init__(
        self,
        record: PlaceRecord,
        enter_frame: Callable[[FrameType], None],
        reach_globals: Callable[[dict[str, Any]], None],
    ):
        self._record, self._enter_frame, self._reach_globals = record, enter_frame, reach_globals
        self._kinds: dict[int, str] = {}
        self._codes: dict[int, CodeType] = {}
        self._warned_of: set[str] = set()
        self._collecting = False

    @contextmanager
    def listening(self, enabled: bool) -> Iterator[None]:
        """Watches this thread's function calls inside the `with` block, if `enabled` is True."""
        if not enabled:
            yield
            return
        states = _find_generator_states()
        with self._ignoring_garbage_collection(), profiled_by(self._handle_event):
            yield
        for name, (state, put) in states.items():
            if _find_generator_states()[name][0] != state and self._record.error is None:
                put(state)
                _refuse(self._record, _DRAWS, name)

    @contextmanager
    def _ignoring_garbage_collection(self) -> Iterator[None]:
        """Ignores the garbage collector's calls (finalizers, callbacks) inside the `with` block.

        It runs at any time, in whichever thread allocates, and is not part of the step.
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
                self._enter_frame(frame)
            elif kind == "setting":  # ignored if torch reads it, which happens all the time
                caller = frame.f_back
                if caller is not None and self._kinds.get(id(caller.f_code)) == "recorded":
                    self._handle_setting(frame.f_code, frame)
            elif kind == "hash":
                self._note_hash(frame)
            elif kind == "special":
                self._handle_library_call(frame.f_code, frame)
        elif what == "c_call" and kind == "recorded":
            self._handle_c_call(argument, frame)
        elif what == "c_call" and kind == "stdlib":
            self._handle_stdlib_call(argument, frame)

    def _handle_library_call(self, code: CodeType, frame: FrameType) -> None:
        if code in _BACKWARD:
            if torch.is_anomaly_enabled():
                self._record.error = self._record.error or make_anomaly_mode_error()
                raise self._record.error
            return
        caller = frame.f_back
        while caller is not None and _forwards_call(caller.f_code, code):
            caller = caller.f_back
        if code in _ENVIRONMENT:
            caller = _find_user_frame(caller)  # the step may read it through Python's library
        if caller is None or not is_recorded_file(caller.f_code.co_filename):
            return  # torch itself calls it
        if code.co_name == "_log":
            self._warn_not_repeated("logging", caller)
            return
        if code in _ENVIRONMENT:
            _read_environment(self._record, frame.f_locals.get("key"))
        else:
            _refuse(self._record, *_REFUSED[code])

    def _note_hash(self, frame: FrameType) -> None:
        t, caller = frame.f_locals["self"], frame.f_back
        kind = None if caller is None else self._kinds.get(id(caller.f_code))
        if kind in ("recorded", "stdlib") and not has_type(t, FakeTensor):
            self._record.hashed[id(t)] = t

    def _handle_setting(self, code: CodeType, frame: FrameType) -> None:
        if code is _PROPERTY:
            function: Any = frame.f_locals["self"].getter
            _read_setting(self._record, getattr(function, "__name__", "a setting"), function)
            return
        if code in _PROCESS_OBJECTS:
            _read_process_object(self._record, frame)
            return
        function = frame.f_globals.get(code.co_name)
        if getattr(function, "__code__", None) is code:
            _read_setting(self._record, f"{function.__module__}.{code.co_name}()", function)

    def _handle_c_call(self, function: Any, frame: FrameType) -> None:
        if function is print:
            self._warn_not_repeated("print", frame)
            return
        if name := _name_of_external_function(function):
            self._refuse_external(function, name, frame)
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if function is globals:
            self._reach_globals(frame.f_globals)
        if function in _CHANGED_BY_CAPTURE:
            _refuse(self._record, _SET_FOR_CAPTURE, f"{owner.__name__}.{name}")  # type: ignore[union-attr]
        if isinstance(owner, functools._lru_cache_wrapper) and name == "cache_info":
            _refuse(self._record, _COUNTS_CALLS, name)
        if name in _WHOLE_READS:
            self._record.read_all_attributes(owner)
        if _is_setting_of_c(function):
            _read_setting(self._record, f"{name}()", function)
        if isinstance(owner, torch._C.Generator) and name in _GENERATOR_METHODS:
            _refuse(self._record, _SEEDS, f"torch.Generator.{name}")
        if isinstance(owner, random.Random):
            _refuse(self._record, _DRAWS, f"random.{name}")
        if type(owner).__module__.startswith("numpy.random"):
            _refuse(self._record, _DRAWS, f"numpy.random.{name}")

    def _handle_stdlib_call(self, function: Any, frame: FrameType) -> None:
        """Handles a C function that Python's library calls. Only calls made for the user matter."""
        if function.__name__ in _WHOLE_READS:  # as copies and pickles do
            self._record.read_all_attributes(function.__self__)
        name, is_setting = _name_of_external_function(function), _is_setting_of_c(function)
        if not (name or is_setting) or (caller := _find_user_frame(frame)) is None:
            return
        if name:
            self._refuse_external(function, name, caller)
        else:
            _read_setting(self._record, f"{function.__name__}()", function)

    def _refuse_external(self, function: Any, name: str, frame: FrameType) -> None:
        if getattr(function, "__self__", None) in (sys.stdout, sys.stderr):
            self._warn_not_repeated("print", frame)
        elif name.startswith(("time.", "datetime.")):
            _refuse(self._record, _READS_CLOCK, name)
        else:
            _refuse(self._record, _SHARES, name.removeprefix("io."))

    def _warn_not_repeated(self, name: str, frame: FrameType) -> None:
        if name not in self._warned_of:
            self._warned_of.add(name)
            warnings.warn(
                f"{name} at {user_line(frame)} runs only during capture, not in later calls",
                stacklevel=2,
            )


def is_random_generator(value: Any) -> bool:
    """True if `value` is a random generator of torch, Python or numpy."""
    numpy = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return has_type(value, (torch._C.Generator, random.Random, *kinds))


def refuse_if_random(record: PlaceRecord, value: Any, name: str) -> None:
    """Raises CaptureError if `value` is a random generator, or an object that uses one.

    C code may call the generator unseen by the profile function, so no guard can cover it.

    Args:
        record: the record that raises the error.
        name: the name of `value` in the error.
    """
    if has_type(value, torch._C.Generator):
        record.refuse(
            f"the step reads {name}, a torch.Generator",
            "a graph draws from the generator of its own device alone",
            fix=Fix("torch.manual_seed(...)", "before the step, which draws without generator="),
        )
    if is_random_generator(value):
        _refuse(record, _DRAWS, f"{name}, a generator")
    bound = type(value).__name__ == "cython_function_or_method"
    if bound and is_random_generator(value.__self__):
        _refuse(record, _DRAWS, f"numpy.random.{value.__name__}")


# -- settings --------------------------------------------------------------------------------------

_SETTING_FUNCTIONS = (os.getcwd, os.getcwdb, threading.get_ident, threading.get_native_id)
# Functions of C whose answers differ while a step is captured.
_CHANGED_BY_CAPTURE = (
    *(sys.getprofile, gc.isenabled, torch._C._is_multithreading_enabled),
    *(torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack),
)


# Functions that look up an object of the process: by name, or for the calling thread.
_PROCESS_OBJECTS = {
    f.__code__: f"{f.__module__}.{f.__name__}"
    for f in (logging.getLogger, threading.current_thread, threading.main_thread)
}


def _read_process_object(record: PlaceRecord, frame: FrameType) -> None:
    """Records which object a lookup function returns to the step, by calling it once more."""
    function = frame.f_globals[frame.f_code.co_name]
    given = [frame.f_locals[key] for key in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
    name = f"{_PROCESS_OBJECTS[frame.f_code]}({', '.join(map(repr, given))})"
    get = functools.partial(function, *given)
    with record.without_recording():
        key = (frame.f_code.co_name, *given)
        record.read_place(Place(name, function, key, get))


def _is_called_as_setting(name: str) -> bool:
    """True for the name of a function that returns a setting, such as `get_num_threads`."""
    begins = name.lstrip("_").startswith(("is_", "are_", "get_")) or name.endswith("_enabled")
    return begins and "rng" not in name and "seed" not in name


def _is_setting_of_c(function: Any) -> bool:
    """True for a function in C that returns a setting of torch or of Python."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, types.ModuleType):
        return False
    if owner.__name__.startswith("torch._C"):
        return _is_called_as_setting(function.__name__)
    own = owner in (sys, gc) and function not in _CHANGED_BY_CAPTURE
    return function in _SETTING_FUNCTIONS or (own and function.__name__.startswith(("get", "is")))


def _read_setting(record: PlaceRecord, name: str, function: Callable[[], Any]) -> None:
    """Records the result of a function without arguments, if it is a plain value."""
    with record.without_recording(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = function()
        except Exception:  # it has arguments
            return
        if value is None or callable(value) or isinstance(value, (*PLAIN, tuple, dict)):
            record.read_place(place_of_answer(name, function), value, shallow=True)


def _read_environment(record: PlaceRecord, key: str | bytes | None) -> None:
    """Records an environment variable; all of them if `key` is None."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    with record.without_recording():
        if key is None:
            record.read_place(Place("os.environ", os.environ, "_data", lambda: data))
        elif isinstance(key, (str, bytes)):
            record.read_place(Place(f"os.environ[{key!r}]", data, os.fsencode(key)))


def read_environment_of(record: PlaceRecord, names: Iterable[str]) -> None:
    """Records the environment variables that a step may read, so that guards compare them.

    Args:
        record: the record to which they are added.
        names: the string constants in the step's code. Those in capital letters are taken for names
            of variables.
    """
    data: Any = os.environ._data  # type: ignore[attr-defined]
    record.ignore(os.environ)
    for text in sorted(names):
        key = os.environ.encodekey(text)  # type: ignore[attr-defined]
        if text.isupper():
            record.read_place(Place(f"os.environ[{text!r}]", data, key))


def _of_numpy(name: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["numpy"], name)()


# By module: settings that its functions use implicitly.
_AMBIENT: dict[str, list[tuple[str, Callable[[], Any]]]] = {
    "decimal": [("decimal.getcontext()", decimal.getcontext)],
    "locale": [("the locale", functools.partial(locale.setlocale, locale.LC_ALL))],
    "torch.utils._pytree": [
        ("the classes known to torch.utils._pytree", functools.partial(len, pytree.SUPPORTED_NODES))
    ],
    "warnings": [("warnings.filters", functools.partial(getattr, warnings, "filters"))],
    "numpy": [(f"numpy.{n}()", _of_numpy(n)) for n in "geterr get_printoptions geterrcall".split()],
}


def read_ambient(record: PlaceRecord, module: str | None) -> None:
    """Records settings that functions of a module use without an argument, such as the locale.

    Args:
        module: the module's name; None records nothing.
    """
    for name, function in _AMBIENT.get(module or "", ()):
        record.read_place(place_of_answer(name, function), shallow=True)


# -- external state --------------------------------------------------------------------------------

_SYSTEM_MODULES = ("posix", "nt")
_EXTERNAL_MODULES = """posix nt io _socket select _posixsubprocess fcntl termios pwd grp resource
    _sqlite3 syslog _ssl readline _curses _uuid _signal time _queue mmap""".split()
# They compute, return constants, or have an effect that another guard covers.
_HARMLESS_FUNCTIONS = frozenset(
    """fspath getpid getppid getuid geteuid getgid getegid cpu_count sysconf confstr uname strerror
    putenv unsetenv device_encoding sched_getaffinity get_terminal_size isatty register_at_fork
    text_encoding sleep strptime getcwd getcwdb getpagesize _path_normpath
    _path_splitroot_ex""".split()
)
_INTERPRETER_COUNTS = (  # they differ from call to call
    *(gc.get_objects, gc.get_count, gc.get_stats, gc.get_referrers, gc.get_freeze_count),
    *(sys.getrefcount, sys.getallocatedblocks),
)
_CLASS_MODULES = ("_io", "_socket", "select", "sqlite3", "_ssl", "_queue", "posix")
_FILES_IN_MEMORY = ("StringIO", "BytesIO")
_NUMPY_FUNCTIONS, _ARRAY_METHODS = ("fromfile",), ("tofile", "dump")
_CLOCK_METHODS = ("now", "utcnow", "today")
# Modules that read files to find or show code, which has no effect on a step's results.
_FILES_OF_CODE_READERS = tuple(
    name + end
    for name in "logging importlib warnings linecache traceback tokenize inspect pkgutil platform "
    "threading _threading_local weakref".split()
    for end in ("/__init__.py", ".py", "/_bootstrap.py", "/metadata/__init__.py", "/machinery.py")
)


def _name_of_external_function(function: Any) -> str:
    """Returns the public name of a C function or method that uses external state; "" for others.

    Imports none of these modules.
    """
    owner, name = function.__self__, function.__name__
    if function.__module__ == "numpy" and name in _NUMPY_FUNCTIONS:
        return f"numpy.{name}"
    if isinstance(owner, types.ModuleType) and name not in _HARMLESS_FUNCTIONS:
        module = owner.__name__
        if function in _INTERPRETER_COUNTS:
            return f"{module}.{name}"
        reads_status = module in _SYSTEM_MODULES and name.startswith("W")  # WIFEXITED and its like
        if module in _EXTERNAL_MODULES and not reads_status:
            return f"{'os' if module in _SYSTEM_MODULES else module.lstrip('_')}.{name}"
    if isinstance(owner, type):
        is_clock = issubclass(owner, datetime.date) and name in _CLOCK_METHODS
        return f"{owner.__module__}.{owner.__name__}.{name}" if is_clock else ""
    kind = type(owner)
    made = next((base for base in kind.__mro__ if name in vars(base)), object)
    if made.__module__ in _CLASS_MODULES and made.__name__ not in _FILES_IN_MEMORY:
        return f"{kind.__name__}.{name}"
    if made.__module__ == "numpy" and name in _ARRAY_METHODS:
        return f"numpy.ndarray.{name}"
    return "lock.locked" if name == "locked" and kind.__module__ == "_thread" else ""


def _is_stdlib_file(filename: str) -> bool:
    """True for a file of Python's library (but not the import system) or of numpy."""
    if _NUMPY in filename:
        return True
    if filename.startswith("<frozen"):
        return "importlib" not in filename and "zipimport" not in filename
    return filename.startswith(_STDLIB) and "site-packages" not in filename


_STDLIB = os.__file__.removesuffix("os.py")
_NUMPY = os.path.join("site-packages", "numpy", "")
_CAPTURE_FILE = "partita/guards/capture_run.py"


def _find_user_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the user's frame that called into Python's library, which runs `frame`.

    None if torch or another module called it, or while a module is imported.
    """
    while frame is not None and not is_recorded_file(frame.f_code.co_filename):
        name = frame.f_code.co_filename
        if not _is_stdlib_file(name) or name.endswith(_FILES_OF_CODE_READERS):
            return None
        frame = frame.f_back
    found = frame
    while frame is not None and not frame.f_code.co_filename.endswith(_CAPTURE_FILE):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None
        frame = frame.f_back
    return found


def is_called_by_user(frame: FrameType | None) -> bool:
    """True if `frame`, of Python's standard library, runs because the user's code has called it."""
    while frame is not None and not is_recorded_file(frame.f_code.co_filename):
        if frame.f_code is not _DIR and not _is_stdlib_file(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return frame is not None


_DIR = torch.nn.Module.__dir__.__code__
