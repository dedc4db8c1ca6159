"""Places: where a value that a step reads stands, how it is read again, and what it is called."""

from __future__ import annotations

import collections
import contextvars
import gc
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.symbolic import Substitutes
from .expected import MISSING

__all__ = [
    "Place",
    "answer",
    "attribute_of_class",
    "cell",
    "context",
    "entry",
    "function_part",
    "item",
    "level",
    "of_tensor",
    "slot",
]


def _builtin_kind_of(home: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Whose methods change it, whatever a class of the user's makes of them: an order is kept."""
    return collections.OrderedDict if isinstance(home, collections.OrderedDict) else dict


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value stands.

    Attributes:
        name: as a person would say it: "cfg.scale".
        home, key: what identifies it; of an entry of a dictionary `home[key]` is the value.
        get: gives the value, or MISSING. None of entries, which are read many at a time.
        put: writes it; None where that cannot be.
    """

    name: str
    home: Any
    key: Any
    get: Callable[[], Any] | None = None
    put: Callable[[Any], object] | None = None

    @property
    def value(self) -> Any:
        return dict.get(self.home, self.key, MISSING) if self.get is None else self.get()

    @property
    def identity(self) -> tuple[int, Any]:
        return id(self.home), self.key

    def write(self, value: Any) -> None:
        """Put `value` there, or take away what is there where it is MISSING."""
        if self.put is not None:
            self.put(value)
        elif value is MISSING:
            _builtin_kind_of(self.home).pop(self.home, self.key, None)
        else:
            _builtin_kind_of(self.home).__setitem__(self.home, self.key, value)


def entry(name: str, home: dict[Any, Any], key: Any) -> Place:
    return Place(name, home, key)


def item(name: str, home: Any, key: Any) -> Place:
    """An item of a list or a dictionary."""
    if isinstance(home, dict):
        return entry(name, home, key)

    def set_item(value: Any) -> None:
        home[key] = value

    return Place(name, home, key, lambda: home[key], set_item)


def cell(name: str, where: types.CellType) -> Place:
    def get_cell() -> Any:
        try:
            return where.cell_contents
        except ValueError:  # not assigned yet
            return MISSING

    def set_cell(value: Any) -> None:
        if value is MISSING:
            del where.cell_contents
        else:
            where.cell_contents = value

    return Place(name, where, 0, get_cell, set_cell)


def slot(name: str, owner: Any, descriptor: Any) -> Place:
    """An attribute in a `__slots__`."""

    def get_slot() -> Any:
        try:
            return descriptor.__get__(owner, type(owner))
        except AttributeError:
            return MISSING

    def set_slot(value: Any) -> None:
        if value is MISSING:
            descriptor.__delete__(owner)
        else:
            descriptor.__set__(owner, value)

    return Place(name, owner, descriptor.__name__, get_slot, set_slot)


def attribute_of_class(name: str, kind: type, key: str) -> Place:
    """What a class or its bases have under a name, as it stands there."""

    def get_class_attribute() -> Any:
        for base in kind.__mro__:
            if key in base.__dict__:
                return base.__dict__[key]
        return MISSING

    def set_class_attribute(value: Any) -> None:
        if value is MISSING:
            type.__delattr__(kind, key)
        else:
            type.__setattr__(kind, key, value)

    return Place(name, kind, key, get_class_attribute, set_class_attribute)


_OF_TENSOR: dict[str, Any] = gc.get_referents(vars(torch.Tensor))[0]


def of_tensor(key: str) -> Place:
    """What torch.Tensor has under a name, a method say: a program may put its own there."""

    def set_tensor_attribute(value: Any) -> None:
        if value is MISSING:
            delattr(torch.Tensor, key)
        else:
            setattr(torch.Tensor, key, value)

    return Place(f"torch.Tensor.{key}", _OF_TENSOR, key, None, set_tensor_attribute)


def function_part(name: str, function: Any, key: str) -> Place:
    """Its code, or its defaults."""
    return Place(name, function, key, lambda: getattr(function, key, MISSING))


def context(name: str, variable: contextvars.ContextVar[Any]) -> Place:
    def get_context_variable() -> Any:
        try:
            return variable.get()  # given another default, it would not tell of its own
        except LookupError:
            return MISSING

    return Place(name, variable, "value", get_context_variable, variable.set)


def answer(name: str, function: Callable[[], Any]) -> Place:
    """What a function without arguments says: a setting of torch or of the system."""
    return Place(name, function, "()", function)


def level(name: str, logger: logging.Logger) -> Place:
    """What a logger tells of: by its own level, those above it and that of all."""

    def get_logger_level() -> tuple[int, bool, int]:
        return logger.manager.disable, logger.disabled, logger.getEffectiveLevel()

    return Place(f"the level of {name}", logger, "()", get_logger_level)


def hidden_builtin(variables: dict[str, Any], name: str) -> Place:
    """A global of the user's that hides one of Python's, beside which one of ours is none."""

    def get_hiding_variable() -> Any:
        found = variables.get(name, MISSING)
        return MISSING if Substitutes.has(found) else found

    return Place(name, variables, name, get_hiding_variable)
