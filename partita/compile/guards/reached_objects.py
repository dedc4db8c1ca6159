"""Objects that a captured step reaches: what each leads to, by its kind."""

from __future__ import annotations

import abc
import collections
import contextvars
import enum
import functools
import operator
import threading
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch

from . import places
from .c_objects import dict_under, is_held_in_c, is_shared_memory
from .codes import is_of_users
from .expected import brief, holds_no_more, is_container, items_of
from .objects import PLAIN, dict_of, is_iterator, is_namespace
from .places import Place
from .reflection import names_asked_by, read_registry
from .settings import read_ambient, read_environment_of

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["has_tensor_keys", "reach_by_kind"]

_HUGE = 100_000  # entries of a container; into those of a larger one it is not looked


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
        _reach_container(record, value, name)
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


# -- containers ------------------------------------------------------------------------------------


def has_tensor_keys(value: Any) -> bool:
    """Is it a set of tensors, or a dictionary by tensors?"""
    if not isinstance(value, (dict, set, frozenset)) or len(value) > _HUGE:
        return False
    return any(isinstance(key, torch.Tensor) for key in value)


def _reach_container(record: StateReader, value: Any, name: str) -> None:
    record.snapshots.container(value, name)
    if hasattr(type(value), "__len__") and len(value) > _HUGE:
        _take_entries(record, value, name)
        return
    if isinstance(value, collections.defaultdict):
        _read_factory(record, value, name)
    keys, values = items_of(value)
    if isinstance(value, (set, frozenset)):
        keys, values = None, list(value)
    for key in keys or ():
        if type(key) not in PLAIN:
            record.reach(key, f"a key of {name}")
    for i, v in enumerate(values):
        key = keys[i] if keys is not None else i
        if type(v) is float and isinstance(value, (dict, list)):
            record.offer(places.item(f"{name}[{key!r}]", value, key), v, item=True)
        elif type(v) not in PLAIN:
            record.reach(v, f"{name}.{key}" if is_namespace(value) else f"{name}[{key!r}]")
    if hasattr(type(value), "__dictoffset__") and type(value).__module__ not in (
        "builtins",
        "collections",
        "types",
        "functools",
    ):
        record.reach_object(value, name)


def _read_factory(record: StateReader, value: collections.defaultdict[Any, Any], name: str) -> None:
    def set_factory(factory: Any) -> None:
        value.default_factory = factory

    called, key = f"{name}.default_factory", ("default_factory",)
    place = Place(called, value, key, lambda: value.default_factory, set_factory)
    record.read_at(place, value.default_factory)


def _take_entries(record: StateReader, value: Any, name: str) -> None:
    """Take a huge container by its entries, and say so where these may change themselves."""
    record.huge[id(value)] = (name, value)
    entries = value.values() if hasattr(value, "values") else value
    inner = next((v for v in entries if not holds_no_more(v)), None)
    if inner is not None and not record.by_name:
        warnings.warn(
            f"{name} has {len(value):,} entries: a compiled step sees when one is replaced, "
            f"not when something within one changes ({brief(inner)}). Give what the step needs "
            "of it as an argument",
            stacklevel=2,
        )
