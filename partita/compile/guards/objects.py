"""Attributes of the user's objects: where they stand, and of which objects they are guarded.

An attribute may stand in an object's `__dict__`, in a slot, in a module's `_parameters`, `_buffers`
or `_modules`, or in a class.
"""

from __future__ import annotations

import enum
import functools
import io
import sys
import types
from types import FrameType
from typing import Any

import torch
from torch import nn

from .codes import is_user_module
from .expected import MISSING

__all__ = [
    "INSIDE",
    "PLAIN",
    "WITH_FIELDS",
    "cell_content",
    "dict_of",
    "find_module_dict",
    "has_settings",
    "is_iterator",
    "is_namespace",
    "is_slot",
    "may_be_hidden",
    "may_have_attributes",
    "names_of_class",
    "runs_in_frame",
    "slots_of",
    "variables_of",
]

_OF_TORCH = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# Modules of Python whose objects hold no settings, or have guards of another kind.
_WITHOUT_SETTINGS = frozenset(
    """abc ast asyncio builtins contextlib contextvars copyreg decimal datetime dis enum fractions
    functools importlib inspect io numbers operator os pathlib pdb random re runpy traceback typing
    unittest uuid warnings weakref""".split()
)
PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
WITH_FIELDS = ("__dataclass_fields__",)  # special names that are guarded like other attributes
INSIDE = ("_parameters", "_buffers", "_modules")  # dictionaries of an nn.Module


@functools.lru_cache(maxsize=1024)
def names_of_class(kind: type) -> frozenset[str]:
    """The names that a class and its bases have now. (New ones change their number.)"""
    return frozenset().union(*(vars(base) for base in kind.__mro__ if base is not object))


def variables_of(space: Any) -> dict[str, Any]:
    """The variables of a namespace: a dictionary of globals, or what has a `__dict__`."""
    return space if isinstance(space, dict) else vars(space)


def dict_of(value: Any) -> Any:
    """The `__dict__` of an object, past its `__getattribute__`; None where it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def find_module_dict(owner: Any, name: str) -> Any:
    """The dictionary of parameters, buffers or modules of an nn.Module that has a name, or None."""
    if isinstance(owner, nn.Module):
        held = dict_of(owner)
        for within in INSIDE:
            if name in held.get(within, ()):
                return held[within]
    return None


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the `__slots__` of a class, by name."""
    return {
        key: value
        for base in reversed(kind.__mro__)
        if is_user_module(base.__module__)
        or base.__module__.startswith(("collections", "dataclasses"))
        for key, value in vars(base).items()
        if is_slot(value)
    }


def is_slot(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType)


def may_be_hidden(name: str, found: Any) -> bool:
    """May an attribute `found` in a class come to be hidden by one of the object itself?"""
    if name.startswith("__") and name.endswith("__"):
        return False
    if hasattr(type(found), "__set__"):  # a data descriptor, as a property, comes first
        return False
    return not (name != "forward" and vars(nn.Module).get(name, MISSING) is found is not MISSING)


def has_settings(kind: type) -> bool:
    """Are the attributes of the instances of a class guarded?"""
    if issubclass(kind, _OF_TORCH):
        return True
    root = kind.__module__.split(".")[0]
    if root == "torch":
        return kind.__module__.startswith(("torch.optim", "torch.amp", "torch.nn"))
    pythons = root in sys.stdlib_module_names and not root.startswith("_")
    return is_user_module(root) or (pythons and root not in _WITHOUT_SETTINGS)


def may_have_attributes(value: Any) -> bool:
    """Is a plain value of a class of the user's (or an enum), which may have attributes?"""
    kind = type(value)
    return isinstance(value, enum.Enum) or (kind not in PLAIN and is_user_module(kind.__module__))


def is_namespace(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace)


def is_iterator(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and not isinstance(value, (io.IOBase, nn.Module))


def cell_content(where: types.CellType) -> Any:
    """The content of a closure cell; None where it is empty."""
    try:
        return where.cell_contents
    except ValueError:
        return None


def runs_in_frame(f: types.FunctionType, frame: FrameType) -> bool:
    """Does the frame run `f`, as far as the variables of its closure tell?"""
    local = frame.f_locals
    pairs = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return all(cell_content(where) is local.get(key) for key, where in pairs)
