"""Objects that a captured step reaches: what each leads to, by its kind."""

from __future__ import annotations

import abc
import contextvars
import enum
import functools
import operator
import threading
import types
from typing import TYPE_CHECKING, Any

from . import places
from .codes import is_of_users
from .containers import reach_container
from .expected import is_container
from .in_c import dict_under, is_held_in_c, is_shared_memory
from .objects import dict_of, is_iterator
from .places import Place
from .reflection import names_asked_by, read_registry
from .settings import read_ambient, read_environment_of

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["reach_by_kind"]


def reach_by_kind(record: StateReader, value: Any, name: str) -> None:
    """Note what `value`, which is reached for the first time, leads to.

    Raises:
        CaptureError: no guard can hold what it is.
    """
    if isinstance(value, enum.Enum):
        _reach_member(record, value, name)
    elif isinstance(value, threading.local):
        _reach_local(record, value, name)
    elif is_container(value):
        reach_container(record, value, name)
    elif is_held_in_c(value):
        read_ambient(record, type(value).__module__)
        record.snapshots.array(value, name)
    elif (under := dict_under(value)) is not None:
        record.reach(under, name)
    elif is_shared_memory(value):
        record.refuse(
            f"the step reads {name}, memory that others may write ({type(value).__name__})",
            "a graph would always have what was there at its capture",
            name,
        )
    elif isinstance(value, types.CellType):
        place = places.cell(name, value)
        record.read_at(place, place.value)
    elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
        record.functions.note_asked_names(names_asked_by(value))
    elif isinstance(value, types.ModuleType):
        read_ambient(record, value.__name__)
        if is_of_users(value.__name__):
            record.functions.reach_space(value, name)
        elif value.__name__ == "os" and record.functions.all_at_once:
            read_environment_of(record, record.functions.constants)
    elif isinstance(value, type):
        read_ambient(record, value.__module__)
        if isinstance(value, abc.ABCMeta) and not value.__module__.startswith("torch"):
            read_registry(record, value, name)
        if is_of_users(value.__module__):
            record.functions.reach_class(value)
            record.functions.reach_functions(value, name)
            record.reach(type(value), type(value).__name__)
    elif isinstance(value, types.FunctionType):
        record.functions.reach_function(value, name)
    elif isinstance(value, types.MethodType):
        record.reach(value.__self__, name)
        record.reach(value.__func__, name)
    elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        read_ambient(record, getattr(value, "__module__", None))
        record.calls.refuse_if_random(value, name)
        if not isinstance(value.__self__, (types.ModuleType, type)):
            record.reach(value.__self__, f"the owner of {name}")
        record.take_whole(value.__self__)  # it reads past what is instrumented
    elif isinstance(value, contextvars.ContextVar):
        place = places.context(name, value)
        record.read_at(place, place.value)
    elif isinstance(value, (staticmethod, classmethod)):
        record.reach(value.__func__, name)
    elif is_iterator(value):
        if record.by_name:
            return
        record.refuse(
            f"the step reads {name}, an iterator ({type(value).__name__})",
            "what it gives next is not the same in the next call, and a graph would always "
            "have the first",
            name,
        )
    else:
        if not record.by_name:
            record.calls.refuse_if_random(value, name)
        read_ambient(record, type(value).__module__)
        if isinstance(value, BaseException):
            place = places.function_part(f"{name}.args", value, "args")
            record.read_at(place, place.value)
        record.reach_object(value, name)
        if isinstance(value, functools._lru_cache_wrapper):
            record.functions.reach_cached(value.__wrapped__, name)


def _reach_member(record: StateReader, value: enum.Enum, name: str) -> None:
    """A member of an enum: attributes that it has been given, and a value that can change."""
    held = dict_of(value)
    if held is not None and is_of_users(type(value).__module__):
        record.read_at(Place(name, value, "__dict__", lambda: held), held)
        record.functions.reach_functions(type(value), type(value).__name__)


def _reach_local(record: StateReader, value: threading.local, name: str) -> None:
    """What this thread holds in a `threading.local`: another's is another program."""
    record.read_at(Place("the thread", value, "thread", threading.current_thread), None, True)
    held = value.__dict__
    record.read_at(Place(name, value, "__dict__", lambda: value.__dict__), held)
