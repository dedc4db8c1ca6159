"""The world outside of a step: files, processes, sockets, clocks and the interpreter's own counts.

What a function of C reads is told by the module that it is of. The functions of these modules read
and write what no guard can hold; a few that do not are named.
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

__all__ = ["is_of_world", "is_pythons", "user_of"]

_OF_SYSTEM = ("posix", "nt")
_CALLED = {"posix": "os", "nt": "os"}
_MODULES = """posix nt io _socket select _posixsubprocess fcntl termios pwd grp resource _sqlite3
    syslog _ssl readline _curses _uuid _signal time _queue mmap""".split()
_HARMLESS = frozenset(  # they only reckon, say what stays, or have an effect that is seen elsewhere
    """fspath getpid getppid getuid geteuid getgid getegid cpu_count sysconf confstr uname strerror
    putenv unsetenv device_encoding sched_getaffinity get_terminal_size isatty register_at_fork
    text_encoding sleep strptime getcwd getcwdb getpagesize _path_normpath""".split()
)
_COUNTS = (  # of the interpreter, another in each call
    gc.get_objects,
    gc.get_count,
    gc.get_stats,
    gc.get_referrers,
    gc.get_freeze_count,
    sys.getrefcount,
    sys.getallocatedblocks,
)
_CLASSES = ("_io", "_socket", "select", "sqlite3", "_ssl", "_queue", "posix")
_IN_MEMORY = ("StringIO", "BytesIO")
_OF_NUMPY, _OF_ARRAYS = ("fromfile",), ("tofile", "dump")
_NOW = ("now", "utcnow", "today")
# What these read is to find and show code, or to tell of it, and none of a step's results.
_ASIDE = tuple(
    name + end
    for name in "logging importlib warnings linecache traceback tokenize inspect pkgutil platform "
    "threading _threading_local weakref".split()
    for end in ("/__init__.py", ".py", "/_bootstrap.py", "/metadata/__init__.py", "/machinery.py")
)


def _name_of_world_function(function: Any) -> str:
    """What a function of one of these modules is called; "" of any other. None is imported."""
    name = function.__name__
    if not isinstance(function.__self__, types.ModuleType) or name in _HARMLESS:
        return ""
    module = function.__self__.__name__
    if function in _COUNTS:
        return f"{module}.{name}"
    if module not in _MODULES or (module in _OF_SYSTEM and name.startswith("W")):  # WIFEXITED
        return ""
    return f"{_CALLED.get(module, module.lstrip('_'))}.{name}"


def is_of_world(function: Any) -> str:
    """What a function of C, or a method of C, that reads or writes the world is called; else ""."""
    if found := _name_of_world_function(function):
        return found
    owner = function.__self__
    kind = owner if isinstance(owner, type) else type(owner)
    name: str = function.__name__
    if function.__module__ == "numpy" and name in _OF_NUMPY:
        return f"numpy.{name}"
    bases = [] if isinstance(owner, type) else kind.__mro__
    made = next((base for base in bases if name in vars(base)), None)
    if made is not None and made.__module__ in _CLASSES and made.__name__ not in _IN_MEMORY:
        return f"{kind.__name__}.{name}"
    if made is not None and made.__module__ == "numpy" and name in _OF_ARRAYS:
        return f"numpy.ndarray.{name}"
    if issubclass(kind, datetime.date) and isinstance(owner, type) and name in _NOW:
        return f"{kind.__module__}.{kind.__name__}.{name}"
    return "lock.locked" if name == "locked" and kind.__module__ == "_thread" else ""


def is_pythons(filename: str) -> bool:
    """Is it code of Python's own library, but for what imports modules, or of numpy?"""
    if _NUMPY in filename:
        return True
    if filename.startswith("<frozen"):
        return "importlib" not in filename and "zipimport" not in filename
    return filename.startswith(_STDLIB) and "site-packages" not in filename


_STDLIB = os.__file__.removesuffix("os.py")
_NUMPY = os.path.join("site-packages", "numpy", "")
_CAPTURE = "partita/compile/capture/capture.py"


def user_of(frame: FrameType | None) -> FrameType | None:
    """The user's frame that has Python's own library do what `frame` does; None of others.

    Not where torch asks, nor while a module is imported.
    """
    while frame is not None and not is_recorded(frame.f_code.co_filename):
        name = frame.f_code.co_filename
        if not is_pythons(name) or name.endswith(_ASIDE):
            return None
        frame = frame.f_back
    found = frame
    while frame is not None and not frame.f_code.co_filename.endswith(_CAPTURE):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None
        frame = frame.f_back
    return found
