"""Access by item (`home[key]`) to values that are not in a dictionary or list, such as the default
arguments of a function, cells of closures and attributes.
"""

from __future__ import annotations

import types
from typing import Any

from partita.graph.slots import SlotHome

from .values import base_of_container


class Cell(SlotHome):
    """A closure cell, with item access: it has one item."""

    def __getitem__(self, _: Any) -> Any:
        return self.owner.cell_contents

    def __setitem__(self, _: Any, value: Any) -> None:
        self.owner.cell_contents = value


class Items(SlotHome):
    """The items of a dictionary, list or deque, without calling overrides of a user's class."""

    def __getitem__(self, key: Any) -> Any:
        base = base_of_container(self.owner)
        if issubclass(base, dict) and not base.__contains__(self.owner, key):
            raise KeyError(key)  # else `__missing__` may make it
        return base.__getitem__(self.owner, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        base_of_container(self.owner).__setitem__(self.owner, key, value)


class Defaults:
    """The default arguments of a function, with item access like a list."""

    def __init__(self, function: types.FunctionType):
        self.function = function

    def __getitem__(self, i: int) -> Any:
        return (self.function.__defaults__ or ())[i]

    def __setitem__(self, i: int, value: Any) -> None:
        found = list(self.function.__defaults__ or ())
        found[i] = value
        self.function.__defaults__ = tuple(found)


class Members(SlotHome):
    """The attributes that a class defines itself, with item access like a dictionary."""

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)


class Arguments:
    """The positional arguments of a `functools.partial`, with item access like a list."""

    def __init__(self, function: Any):
        self.function = function

    def __getitem__(self, i: int) -> Any:
        return self.function.args[i]

    def __setitem__(self, i: int, value: Any) -> None:
        function, args, *rest = self.function.__reduce__()[2]
        args = (*args[:i], value, *args[i + 1 :])
        self.function.__setstate__((function, args, *rest))


class PlaceAsItem(SlotHome):
    """The value of a `Place` as a container with one item: every key gives that value."""

    def __getitem__(self, _: Any) -> Any:
        return self.owner.value

    def __setitem__(self, _: Any, value: Any) -> None:
        self.owner.write(value)

    def identity(self, key: Any) -> tuple[int, Any]:
        return self.owner.identity  # type: ignore[no-any-return]


class Attributes(SlotHome):
    """The attributes of an object, with item access like a dictionary.

    They are in its `__slots__` or its `__dict__`.
    """

    def __getitem__(self, name: str) -> Any:
        return object.__getattribute__(self.owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)
