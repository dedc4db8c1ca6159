"""Places: where a value that a step reads stands, with the means to read and write it again.

A place has a home and a key, which identify it, and a name for messages. There is a constructor for
each kind: entries of dictionaries, items, cells, slots, attributes of classes, settings.

    place_of_entry("cfg.scale", vars(cfg), "scale").value    what `cfg.scale` is now
"""

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
    "place_of_answer",
    "place_of_cell",
    "place_of_class_attribute",
    "place_of_context_variable",
    "place_of_entry",
    "place_of_function_part",
    "place_of_item",
    "place_of_log_level",
    "place_of_slot",
    "place_of_tensor_attribute",
]


def _builtin_kind_of(home: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The builtin class whose methods write a dictionary, past overrides of the user's class."""
    return collections.OrderedDict if isinstance(home, collections.OrderedDict) else dict


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value stands.

    Attributes:
        name: in messages: "cfg.scale".
        home, key: identify the place; for an entry of a dictionary, `home[key]` is the value.
        get: returns the value, or MISSING. None for entries, of which guards read many at a time.
        put: writes the value; None where it cannot be written.
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
        """Write `value` there; where it is MISSING, delete what is there."""
        if self.put is not None:
            self.put(value)
        elif value is MISSING:
            _builtin_kind_of(self.home).pop(self.home, self.key, None)
        else:
            _builtin_kind_of(self.home).__setitem__(self.home, self.key, value)


def place_of_entry(name: str, home: dict[Any, Any], key: Any) -> Place:
    """An entry of a dictionary: a global, an attribute in a `__dict__`."""
    return Place(name, home, key)


def place_of_item(name: str, home: Any, key: Any) -> Place:
    """An item of a list or a dictionary."""
    if isinstance(home, dict):
        return place_of_entry(name, home, key)

    def set_item(value: Any) -> None:
        home[key] = value

    return Place(name, home, key, lambda: home[key], set_item)


def place_of_cell(name: str, where: types.CellType) -> Place:
    """A closure cell."""

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


def place_of_slot(name: str, owner: Any, descriptor: Any) -> Place:
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


def place_of_class_attribute(name: str, kind: type, key: str) -> Place:
    """An attribute of a class or its bases, as it stands there (descriptors are not called)."""

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


def place_of_tensor_attribute(key: str) -> Place:
    """An attribute of torch.Tensor, as a method, which a program may replace."""

    def set_tensor_attribute(value: Any) -> None:
        if value is MISSING:
            delattr(torch.Tensor, key)
        else:
            setattr(torch.Tensor, key, value)

    return Place(f"torch.Tensor.{key}", _OF_TENSOR, key, None, set_tensor_attribute)


def place_of_function_part(name: str, function: Any, key: str) -> Place:
    """An attribute of a function: its code, its defaults."""
    return Place(name, function, key, lambda: getattr(function, key, MISSING))


def place_of_context_variable(name: str, variable: contextvars.ContextVar[Any]) -> Place:
    """The value of a context variable."""

    def get_context_variable() -> Any:
        try:
            return variable.get()  # without an argument, which would override its default
        except LookupError:
            return MISSING

    return Place(name, variable, "value", get_context_variable, variable.set)


def place_of_answer(name: str, function: Callable[[], Any]) -> Place:
    """The answer of a function without arguments: a setting of torch or of the system."""
    return Place(name, function, "()", function)


def place_of_log_level(name: str, logger: logging.Logger) -> Place:
    """What a logger lets through: by its own level, its parents' and the global one."""

    def get_logger_level() -> tuple[int, bool, int]:
        return logger.manager.disable, logger.disabled, logger.getEffectiveLevel()

    return Place(f"the level of {name}", logger, "()", get_logger_level)


def place_of_hidden_builtin(variables: dict[str, Any], name: str) -> Place:
    """A global that hides a builtin; a stand-in that capture has put there counts as none."""

    def get_hiding_variable() -> Any:
        found = variables.get(name, MISSING)
        return MISSING if Substitutes.has(found) else found

    return Place(name, variables, name, get_hiding_variable)
