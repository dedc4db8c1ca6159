"""Settings that a step asks for: of torch and Python by a function, of the environment by a key."""

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

from . import places
from .expected import MISSING
from .objects import PLAIN
from .places import Place

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = [
    "finds_object",
    "is_called_as_setting",
    "read_ambient",
    "read_answer",
    "read_environment",
    "read_environment_of",
    "read_found",
    "says_setting",
]


_ASKED = (os.getcwd, os.getcwdb, threading.get_ident, threading.get_native_id)
_NOT_SET = (sys.getprofile,)  # while a step is captured it is another


# Objects of the process that Python's library finds by name, or by who asks.
_FINDS = {
    f.__code__: f"{f.__module__}.{f.__name__}"
    for f in (logging.getLogger, threading.current_thread, threading.main_thread)
}


def finds_object(code: CodeType) -> bool:
    return code in _FINDS


def read_found(record: StateReader, frame: FrameType) -> None:
    """An object of the process is asked for, which is looked up once more."""
    function = frame.f_globals[frame.f_code.co_name]
    given = [frame.f_locals[key] for key in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
    name = f"{_FINDS[frame.f_code]}({', '.join(map(repr, given))})"
    get = functools.partial(function, *given)
    with record.quietly():
        key = (frame.f_code.co_name, *given)
        record.read_at(Place(name, function, key, get), get())


def is_called_as_setting(name: str) -> bool:
    begins = name.lstrip("_").startswith(("is_", "are_", "get_")) or name.endswith("_enabled")
    return begins and "rng" not in name and "seed" not in name


def says_setting(function: Any) -> bool:
    """Is it a function of C that says how torch, or Python itself, is set?"""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, types.ModuleType):
        return False
    if owner.__name__.startswith("torch._C"):
        return is_called_as_setting(function.__name__)
    own = owner in (sys, gc) and function not in _NOT_SET
    return function in _ASKED or (own and function.__name__.startswith(("get", "is")))


def read_answer(record: StateReader, name: str, function: Callable[[], Any]) -> None:
    """A function without arguments is asked for a setting."""
    with record.quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = function()
        except Exception:  # it has arguments
            return
        if value is None or callable(value) or isinstance(value, (*PLAIN, tuple, dict)):
            record.read_at(places.answer(name, function), value, alone=True)


def read_environment(record: StateReader, key: str | bytes | None) -> None:
    """A variable of the environment is read; all of them where `key` is None."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    with record.quietly():
        if key is None:
            record.read_at(Place("os.environ", os.environ, "_data", lambda: data), data)
        elif isinstance(key, (str, bytes)):
            at = os.fsencode(key)
            place = places.entry(f"os.environ[{key!r}]", data, at)
            record.read_at(place, place.value)


def read_environment_of(record: StateReader, names: Iterable[str]) -> None:
    """The variables of the environment that are called as these are, which may be read."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    record.keep(os.environ)
    for text in sorted(names):
        key = os.environ.encodekey(text)  # type: ignore[attr-defined]
        if text.isupper():
            value = data.get(key, MISSING)
            record.read_at(places.entry(f"os.environ[{text!r}]", data, key), value)


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


# What functions of these modules heed without being given it.
_AMBIENT: dict[str, list[tuple[str, Callable[[], Any]]]] = {
    "decimal": [("decimal.getcontext()", _read_decimal_context)],
    "locale": [("the locale", _read_locale)],
    "torch.utils._pytree": [("the classes known to torch.utils._pytree", _count_pytree_nodes)],
    "warnings": [("warnings.filters", _read_warning_filters)],
    "numpy": [(f"numpy.{n}()", _of_numpy(n)) for n in "geterr get_printoptions geterrcall".split()],
}


def read_ambient(record: StateReader, module: str | None) -> None:
    """Something of a module of this name is reached: settings that its functions heed are read."""
    for name, function in _AMBIENT.get(module or "", ()):
        record.read_at(places.answer(name, function), function(), alone=True)
