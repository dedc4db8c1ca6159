"""External state: files, processes, sockets, clocks and counts of the interpreter.

No guard can cover what stands there, so a step that reads or writes it is refused. Whether a
function of C does is told by its module or class (`name_of_external_function`), but for a few
harmless functions that are listed here.
"""

from __future__ import annotations

import datetime
import gc
import os
import sys
import types
from types import FrameType
from typing import Any

from .codes import is_recorded

__all__ = ["find_user_frame", "is_stdlib_file", "name_of_external_function"]

_SYSTEM_MODULES = ("posix", "nt")
_PUBLIC_NAMES = {"posix": "os", "nt": "os"}
_EXTERNAL_MODULES = """posix nt io _socket select _posixsubprocess fcntl termios pwd grp resource
    _sqlite3 syslog _ssl readline _curses _uuid _signal time _queue mmap""".split()
# They compute, return what stays, or have an effect that another guard sees.
_HARMLESS_FUNCTIONS = frozenset(
    """fspath getpid getppid getuid geteuid getgid getegid cpu_count sysconf confstr uname strerror
    putenv unsetenv device_encoding sched_getaffinity get_terminal_size isatty register_at_fork
    text_encoding sleep strptime getcwd getcwdb getpagesize _path_normpath""".split()
)
_INTERPRETER_COUNTS = (  # they differ from call to call
    gc.get_objects,
    gc.get_count,
    gc.get_stats,
    gc.get_referrers,
    gc.get_freeze_count,
    sys.getrefcount,
    sys.getallocatedblocks,
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


def _name_of_module_function(function: Any) -> str:
    """The public name of a function of an external module; "" for other functions.

    Imports none of these modules.
    """
    name = function.__name__
    if not isinstance(function.__self__, types.ModuleType) or name in _HARMLESS_FUNCTIONS:
        return ""
    module = function.__self__.__name__
    if function in _INTERPRETER_COUNTS:
        return f"{module}.{name}"
    reads_status = module in _SYSTEM_MODULES and name.startswith("W")  # WIFEXITED and its like
    if module not in _EXTERNAL_MODULES or reads_status:
        return ""
    return f"{_PUBLIC_NAMES.get(module, module.lstrip('_'))}.{name}"


def name_of_external_function(function: Any) -> str:
    """The public name of a function or method of C that uses external state; "" for others."""
    if found := _name_of_module_function(function):
        return found
    owner = function.__self__
    kind = owner if isinstance(owner, type) else type(owner)
    name: str = function.__name__
    if function.__module__ == "numpy" and name in _NUMPY_FUNCTIONS:
        return f"numpy.{name}"
    bases = [] if isinstance(owner, type) else kind.__mro__
    made = next((base for base in bases if name in vars(base)), None)
    if (
        made is not None
        and made.__module__ in _CLASS_MODULES
        and made.__name__ not in _FILES_IN_MEMORY
    ):
        return f"{kind.__name__}.{name}"
    if made is not None and made.__module__ == "numpy" and name in _ARRAY_METHODS:
        return f"numpy.ndarray.{name}"
    if issubclass(kind, datetime.date) and isinstance(owner, type) and name in _CLOCK_METHODS:
        return f"{kind.__module__}.{kind.__name__}.{name}"
    return "lock.locked" if name == "locked" and kind.__module__ == "_thread" else ""


def is_stdlib_file(filename: str) -> bool:
    """Is it a file of Python's library (but not the import system) or of numpy?"""
    if _NUMPY in filename:
        return True
    if filename.startswith("<frozen"):
        return "importlib" not in filename and "zipimport" not in filename
    return filename.startswith(_STDLIB) and "site-packages" not in filename


_STDLIB = os.__file__.removesuffix("os.py")
_NUMPY = os.path.join("site-packages", "numpy", "")
_CAPTURE_FILE = "partita/compile/capture/capture.py"


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """The user's frame that called into Python's library, which runs `frame`.

    None where torch or another module called it, and while a module is imported.
    """
    while frame is not None and not is_recorded(frame.f_code.co_filename):
        name = frame.f_code.co_filename
        if not is_stdlib_file(name) or name.endswith(_FILES_OF_CODE_READERS):
            return None
        frame = frame.f_back
    found = frame
    while frame is not None and not frame.f_code.co_filename.endswith(_CAPTURE_FILE):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None
        frame = frame.f_back
    return found
