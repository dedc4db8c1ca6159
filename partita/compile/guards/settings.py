"""Settings that a step asks for: of torch and Python by a function, of the environment by a key."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import places
from .expected import MISSING
from .objects import PLAIN
from .places import Place

if TYPE_CHECKING:
    from .record import Record

__all__ = ["read_answer", "read_environment", "read_environment_of"]


def read_answer(record: Record, name: str, function: Callable[[], Any]) -> None:
    """A function without arguments is asked for a setting."""
    with record.quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = function()
        except Exception:  # it has arguments
            return
        if isinstance(value, PLAIN):
            record.read_at(places.answer(name, function), value, alone=True)


def read_environment(record: Record, key: str | None) -> None:
    """A variable of the environment is read; all of them where `key` is None."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    with record.quietly():
        if key is None:
            record.read_at(Place("os.environ", os.environ, "_data", lambda: data), data)
        elif isinstance(key, str):
            at = os.environ.encodekey(key)  # type: ignore[attr-defined]
            place = places.entry(f"os.environ[{key!r}]", data, at)
            record.read_at(place, place.value)


def read_environment_of(record: Record, names: Iterable[str]) -> None:
    """The variables of the environment that are called as these are, which may be read."""
    data: Any = os.environ._data  # type: ignore[attr-defined]
    record.keep(os.environ)
    for text in sorted(names):
        key = os.environ.encodekey(text)  # type: ignore[attr-defined]
        if text.isupper():
            value = data.get(key, MISSING)
            record.read_at(places.entry(f"os.environ[{text!r}]", data, key), value)
