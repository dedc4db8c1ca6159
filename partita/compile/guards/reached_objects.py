"""Objects that a captured step reaches: what each leads to, by its kind.

A step that has read an object may go on to read what hangs on it without an instrumented attribute:
the items of a container, the functions of a class, the owner of a bound method. `reach_by_kind`
tells the record of these, and refuses what no guard can cover. Containers are recorded whole, with
all that they hold; of those with more than `_HUGE` entries only the entries themselves.
"""

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

from .c_objects import dict_of_view, has_raw_content, is_shared_memory
from .codes import is_user_module
from .expected import brief, holds_no_more, is_container, items_of
from .objects import PLAIN, dict_of, is_iterator, is_namespace
from .places import (
    Place,
    place_of_cell,
    place_of_context_variable,
    place_of_function_part,
    place_of_item,
)
from .reflection import names_asked_by, read_registry
from .settings import read_ambient, read_environment_of

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["has_tensor_keys", "reach_by_kind"]

_HUGE = 100_000  # entries above which a container's entries are not looked into


def reach_by_kind(record: StateReader, value: Any, name: str) -> None:
    """Record what `value`, which is reached for the first time, leads to.

    Raises:
        CaptureError: no guard can cover it: an iterator, shared memory, a generator.
    """
    if isinstance(value, enum.Enum):
        _reach_member(record, value, name)
    elif isinstance(value, threading.local):
        _reach_local(record, value, name)
    elif is_container(value):
        _reach_container(record, value, name)
    elif has_raw_content(value):
        read_ambient(record, type(value).__module__)
        record.snapshots.snapshot_raw(value, name)
    elif (under := dict_of_view(value)) is not None:
        record.reach_value(under, name)
    elif is_shared_memory(value):
        record.refuse(
            f"the step reads {name}, memory that others may write ({type(value).__name__})",
            "a graph would always have what was there at its capture",
            name,
        )
    elif isinstance(value, types.CellType):
        place = place_of_cell(name, value)
        record.read_place(place, place.value)
    elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
        record.functions.note_asked_names(names_asked_by(value))
    elif isinstance(value, types.ModuleType):
        read_ambient(record, value.__name__)
        if is_user_module(value.__name__):
            record.functions.reach_namespace(value, name)
        elif value.__name__ == "os" and record.functions.reads_ahead:
            read_environment_of(record, record.functions.constants)
    elif isinstance(value, type):
        read_ambient(record, value.__module__)
        if isinstance(value, abc.ABCMeta) and not value.__module__.startswith("torch"):
            read_registry(record, value, name)
        if is_user_module(value.__module__):
            record.functions.reach_class(value)
            record.functions.reach_methods(value, name)
            record.reach_value(type(value), type(value).__name__)
    elif isinstance(value, types.FunctionType):
        record.functions.reach_function(value, name)
    elif isinstance(value, types.MethodType):
        record.reach_value(value.__self__, name)
        record.reach_value(value.__func__, name)
    elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        read_ambient(record, getattr(value, "__module__", None))
        record.calls.refuse_if_random(value, name)
        if not isinstance(value.__self__, (types.ModuleType, type)):
            record.reach_value(value.__self__, f"the owner of {name}")
        record.read_all_attributes(value.__self__)  # code in C reads them unseen
    elif isinstance(value, contextvars.ContextVar):
        place = place_of_context_variable(name, value)
        record.read_place(place, place.value)
    elif isinstance(value, (staticmethod, classmethod)):
        record.reach_value(value.__func__, name)
    elif is_iterator(value):
        if record.reached_by_name:
            return
        record.refuse(
            f"the step reads {name}, an iterator ({type(value).__name__})",
            "what it gives next is not the same in the next call, and a graph would always "
            "have the first",
            name,
        )
    else:
        if not record.reached_by_name:
            record.calls.refuse_if_random(value, name)
        read_ambient(record, type(value).__module__)
        if isinstance(value, BaseException):
            place = place_of_function_part(f"{name}.args", value, "args")
            record.read_place(place, place.value)
        record.reach_object(value, name)
        if isinstance(value, functools._lru_cache_wrapper):
            record.functions.reach_cached_function(value.__wrapped__, name)


def _reach_member(record: StateReader, value: enum.Enum, name: str) -> None:
    """Record the attributes of an enum's member: its value may be mutable."""
    held = dict_of(value)
    if held is not None and is_user_module(type(value).__module__):
        record.read_place(Place(name, value, "__dict__", lambda: held), held)
        record.functions.reach_methods(type(value), type(value).__name__)


def _reach_local(record: StateReader, value: threading.local, name: str) -> None:
    """Record what this thread holds in a `threading.local`, and which thread it is."""
    record.read_place(Place("the thread", value, "thread", threading.current_thread), None, True)
    held = value.__dict__
    record.read_place(Place(name, value, "__dict__", lambda: value.__dict__), held)


# -- containers ------------------------------------------------------------------------------------


def has_tensor_keys(value: Any) -> bool:
    """Is it a set or a dictionary with tensors as keys?"""
    if not isinstance(value, (dict, set, frozenset)) or len(value) > _HUGE:
        return False
    return any(isinstance(key, torch.Tensor) for key in value)


def _reach_container(record: StateReader, value: Any, name: str) -> None:
    """Record what a container holds, keys too."""
    record.snapshots.snapshot_container(value, name)
    if hasattr(type(value), "__len__") and len(value) > _HUGE:
        _record_entries(record, value, name)
        return
    if isinstance(value, collections.defaultdict):
        _read_factory(record, value, name)
    keys, values = items_of(value)
    if isinstance(value, (set, frozenset)):
        keys, values = None, list(value)
    for key in keys or ():
        if type(key) not in PLAIN:
            record.reach_value(key, f"a key of {name}")
    for i, v in enumerate(values):
        key = keys[i] if keys is not None else i
        if type(v) is float and isinstance(value, (dict, list)):
            record.offer_float(place_of_item(f"{name}[{key!r}]", value, key), v, item=True)
        elif type(v) not in PLAIN:
            record.reach_value(v, f"{name}.{key}" if is_namespace(value) else f"{name}[{key!r}]")
    if hasattr(type(value), "__dictoffset__") and type(value).__module__ not in (
        "builtins",
        "collections",
        "types",
        "functools",
    ):
        record.reach_object(value, name)


def _read_factory(record: StateReader, value: collections.defaultdict[Any, Any], name: str) -> None:
    """Record the `default_factory` of a defaultdict."""

    def set_factory(factory: Any) -> None:
        value.default_factory = factory

    called, key = f"{name}.default_factory", ("default_factory",)
    place = Place(called, value, key, lambda: value.default_factory, set_factory)
    record.read_place(place, value.default_factory)


def _record_entries(record: StateReader, value: Any, name: str) -> None:
    """Record a huge container by its entries, and warn where an entry may change in place."""
    record.huge[id(value)] = (name, value)
    entries = value.values() if hasattr(value, "values") else value
    inner = next((v for v in entries if not holds_no_more(v)), None)
    if inner is not None and not record.reached_by_name:
        warnings.warn(
            f"{name} has {len(value):,} entries: a compiled step sees when one is replaced, "
            f"not when something within one changes ({brief(inner)}). Give what the step needs "
            "of it as an argument",
            stacklevel=2,
        )
