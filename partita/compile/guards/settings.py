"""Settings that a step asks for: of torch and Python by a function, of the environment by a key.

The answer is guarded: before a later call the function is asked again. Settings that functions of
a module heed without being asked (`decimal`'s context, the locale) are guarded when something of
that module is reached.
"""

from __future__ import annotations

import decimal
import functools
import gc
import locale
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from .expected import MISSING
from .objects import PLAIN
from .places import Place, place_of_answer, place_of_entry

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = [
    "finds_process_object",
    "is_called_as_setting",
    "is_setting_of_c",
    "read_ambient",
    "read_environment",
    "read_environment_of",
    "read_process_object",
    "read_setting",
]


_SETTING_FUNCTIONS = (os.getcwd, os.getcwdb, threading.get_ident, threading.get_native_id)
_CHANGED_BY_CAPTURE = (sys.getprofile,)


# Functions that look up an object of the process: by name, or for the thread that asks.
_PROCESS_OBJECTS = {
    f.__code__: f"{f.__module__}.{f.__name__}"
    for f in (logging.getLogger, threading.current_thread, threading.main_thread)
}


def finds_process_object(code: CodeType) -> bool:
    """Does code look up an object of the process, as `logging.getLogger`?"""
    return code in _PROCESS_OBJECTS


def read_process_object(record: StateReader, frame: FrameType) -> None:
    """Record which object a call of a lookup function finds, by looking it up once more."""
    function = frame.f_globals[frame.f_code.co_name]
    given = [frame.f_locals[key] for key in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
    name = f"{_PROCESS_OBJECTS[frame.f_code]}({', '.join(map(repr, given))})"
    get = functools.partial(function, *given)
    with record.without_recording():
        key = (frame.f_code.co_name, *given)
        record.read_place(Place(name, function, key, get), get())


def is_called_as_setting(name: str) -> bool:
    """Is it the name of a function that returns a setting, as `get_num_threads`?"""
    begins = name.lstrip("_").startswith(("is_", "are_", "get_")) or name.endswith("_enabled")
    return begins and "rng" not in name and "seed" not in name


def is_setting_of_c(function: Any) -> bool:
    """Is it a function of C that returns a setting of torch or of Python?"""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, types.ModuleType):
        return False
    if owner.__name__.startswith("torch._C"):
        return is_called_as_setting(function.__name__)
    own = owner in (sys, gc) and function not in _CHANGED_BY_CAPTURE
    return function in _SETTING_FUNCTIONS or (own and function.__name__.startswith(("get", "is")))


def read_setting(record: StateReader, name: str, function: Callable[[], Any]) -> None:
    """Record the answer of a function without arguments, if it is a plain value."""
    with record.without_recording(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = function()
        except Exception:  # it has arguments
            return
        if value is None or callable(value) or isinstance(value, (*PLAIN, tuple, dict)):
            record.read_place(place_of_answer(name, function), value, shallow=True)


def read_environment(record: StateReader, key: str | bytes | None) -> None:
    """Record an environment variable; all of them where `key` is None."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    with record.without_recording():
        if key is None:
            record.read_place(Place("os.environ", os.environ, "_data", lambda: data), data)
        elif isinstance(key, (str, bytes)):
            at = os.fsencode(key)
            place = place_of_entry(f"os.environ[{key!r}]", data, at)
            record.read_place(place, place.value)


def read_environment_of(record: StateReader, names: Iterable[str]) -> None:
    """Record the environment variables of these names, where they are in capitals."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    record.ignore(os.environ)
    for text in sorted(names):
        key = os.environ.encodekey(text)  # type: ignore[attr-defined]
        if text.isupper():
            value = data.get(key, MISSING)
            record.read_place(place_of_entry(f"os.environ[{text!r}]", data, key), value)


def _read_decimal_context() -> str:
    return repr(decimal.getcontext())


def _read_locale() -> str:
    return locale.setlocale(locale.LC_ALL)


def _read_warning_filters() -> list[Any]:
    return warnings.filters  # type: ignore[return-value]


def _count_pytree_nodes() -> int:
    return len(pytree.SUPPORTED_NODES)


def _of_numpy(name: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["numpy"], name)()


# By module: settings that its functions heed without an argument.
_AMBIENT: dict[str, list[tuple[str, Callable[[], Any]]]] = {
    "decimal": [("decimal.getcontext()", _read_decimal_context)],
    "locale": [("the locale", _read_locale)],
    "torch.utils._pytree": [("the classes known to torch.utils._pytree", _count_pytree_nodes)],
    "warnings": [("warnings.filters", _read_warning_filters)],
    "numpy": [(f"numpy.{n}()", _of_numpy(n)) for n in "geterr get_printoptions geterrcall".split()],
}


def read_ambient(record: StateReader, module: str | None) -> None:
    """Record the settings that functions of a module heed: something of it is reached."""
    for name, function in _AMBIENT.get(module or "", ()):
        record.read_place(place_of_answer(name, function), function(), shallow=True)
