"""Objects of a program: where their attributes stand, and which are looked into."""

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

from .codes import is_of_users
from .expected import MISSING

__all__ = [
    "INSIDE",
    "PLAIN",
    "WITH_FIELDS",
    "content_of",
    "dict_of",
    "dict_that_has",
    "has_settings",
    "holds_more",
    "is_iterator",
    "is_namespace",
    "is_slot",
    "may_be_hidden",
    "names_of_class",
    "runs_in_frame",
    "slots_of",
    "variables_of",
]

_OF_TORCH = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# Of Python's own, whose objects hold no settings, or are looked after by themselves.
_NOT_LOOKED_INTO = frozenset(
    """abc ast asyncio builtins contextlib contextvars copyreg decimal datetime dis enum fractions
    functools importlib inspect io numbers operator os pathlib pdb random re runpy traceback typing
    unittest uuid warnings weakref""".split()
)
PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
WITH_FIELDS = ("__dataclass_fields__",)  # attributes like others, for all their names
INSIDE = ("_parameters", "_buffers", "_modules")


@functools.lru_cache(maxsize=1024)
def names_of_class(kind: type) -> frozenset[str]:
    """What it has now; what it comes to have is seen by how many there are."""
    return frozenset().union(*(vars(base) for base in kind.__mro__ if base is not object))


def variables_of(space: Any) -> dict[str, Any]:
    return space if isinstance(space, dict) else vars(space)


def dict_of(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def dict_that_has(owner: Any, name: str) -> Any:
    """The dictionary of a module's parameters, buffers or modules that has this name."""
    if isinstance(owner, nn.Module):
        held = dict_of(owner)
        for within in INSIDE:
            if name in held.get(within, ()):
                return held[within]
    return None


def slots_of(kind: type) -> dict[str, Any]:
    return {
        key: value
        for base in reversed(kind.__mro__)
        if is_of_users(base.__module__)
        or base.__module__.startswith(("collections", "dataclasses"))
        for key, value in vars(base).items()
        if is_slot(value)
    }


def is_slot(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType)


def may_be_hidden(kind: type, name: str, found: Any) -> bool:
    """May an attribute of the object itself come to stand before that of its class?"""
    if name.startswith("__") and name.endswith("__"):
        return False
    if hasattr(type(found), "__set__"):  # a property
        return False
    return not (name != "forward" and vars(nn.Module).get(name, MISSING) is found is not MISSING)


def has_settings(kind: type) -> bool:
    """Are attributes of its instances looked into?"""
    if issubclass(kind, _OF_TORCH):
        return True
    root = kind.__module__.split(".")[0]
    if root == "torch":
        return kind.__module__.startswith(("torch.optim", "torch.amp", "torch.nn"))
    pythons = root in sys.stdlib_module_names and not root.startswith("_")
    return is_of_users(root) or (pythons and root not in _NOT_LOOKED_INTO)


def holds_more(value: Any) -> bool:
    """Is a number or a text of a class of the user's, which may have attributes?"""
    kind = type(value)
    return isinstance(value, enum.Enum) or (kind not in PLAIN and is_of_users(kind.__module__))


def is_namespace(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace)


def is_iterator(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and not isinstance(value, (io.IOBase, nn.Module))


def content_of(where: types.CellType) -> Any:
    try:
        return where.cell_contents
    except ValueError:
        return None


def runs_in_frame(f: types.FunctionType, frame: FrameType) -> bool:
    """Is it `f` that this frame runs, as far as the variables of its closure tell?"""
    local = frame.f_locals
    pairs = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return all(content_of(where) is local.get(key) for key, where in pairs)
