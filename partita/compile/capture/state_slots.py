"""Slots: the places of a step's state, in which capture puts other values for a while.

A place is in a dictionary, a list, a closure's cell, a function's defaults or a class; all of them
are read and written as `home[key]`.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "Defaults", "Members", "Slot"]


class Cell:
    """A closure's cell, read and written as a dictionary of one entry."""

    def __init__(self, cell: types.CellType):
        self.cell = cell

    def __getitem__(self, _: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, _: Any, value: Any) -> None:
        self.cell.cell_contents = value


class Defaults:
    """The defaults of a function, read and written as a list."""

    def __init__(self, function: types.FunctionType):
        self.function = function

    def __getitem__(self, i: int) -> Any:
        return (self.function.__defaults__ or ())[i]

    def __setitem__(self, i: int, value: Any) -> None:
        found = list(self.function.__defaults__ or ())
        found[i] = value
        self.function.__defaults__ = tuple(found)


class Members:
    """The attributes of a class, read and written as a dictionary."""

    def __init__(self, kind: type):
        self.kind = kind

    def __getitem__(self, name: str) -> Any:
        return inspect.getattr_static(self.kind, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(next(k for k in self.kind.__mro__ if name in vars(k)), name, value)


@dataclass(frozen=True, eq=False)
class Slot:
    """Where a value stands.

    Attributes:
        name: for people, as "model.head.weight".
        kind: "parameter", "buffer", "optimizer" (its state) or "value".
        home, key: `home[key]` is the value.
    """

    name: str
    kind: str
    home: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.home[self.key]

    def put(self, value: Any) -> None:
        self.home[self.key] = value

    @property
    def identity(self) -> tuple[int, Any]:
        """Equal for slots of one place; as `Place.identity`."""
        home = self.home
        home = home.cell if isinstance(home, Cell) else home
        return id(home.kind if isinstance(home, Members) else home), self.key
