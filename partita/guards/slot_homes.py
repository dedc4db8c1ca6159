"""Homes of slots: wrappers that give access by `home[key]` to values outside of dictionaries.

Capture reads and replaces each tensor of a step as `home[key]`. These wrappers do this for default
arguments of a function, closure cells and attributes.
"""

from __future__ import annotations

from typing import Any

from partita.graph.slots import SlotHome

from .values import base_of_container


class Cell(SlotHome):
    """Wraps a closure cell, so that `cell[key]` reads and writes its content, for any key."""

    def __getitem__(self, _: Any) -> Any:
        return self.owner.cell_contents

    def __setitem__(self, _: Any, value: Any) -> None:
        self.owner.cell_contents = value


class Items(SlotHome):
    """Wraps a dictionary, list or deque: `[key]` does not call overrides of a user's class."""

    def __getitem__(self, key: Any) -> Any:
        base = base_of_container(self.owner)
        if issubclass(base, dict) and not base.__contains__(self.owner, key):
            raise KeyError(key)  # else `__missing__` may make it
        return base.__getitem__(self.owner, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        base_of_container(self.owner).__setitem__(self.owner, key, value)


class Defaults(SlotHome):
    """Wraps a function, so that `[i]` reads and writes its default arguments."""

    def __getitem__(self, i: int) -> Any:
        return (self.owner.__defaults__ or ())[i]

    def __setitem__(self, i: int, value: Any) -> None:
        found = list(self.owner.__defaults__ or ())
        found[i] = value
        self.owner.__defaults__ = tuple(found)


class Members(SlotHome):
    """Wraps a class, so that `[name]` reads and writes the attributes that it defines itself."""

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)


class Arguments(SlotHome):
    """Wraps a `functools.partial`, so that `[i]` reads and writes its positional arguments."""

    def __getitem__(self, i: int) -> Any:
        return self.owner.args[i]

    def __setitem__(self, i: int, value: Any) -> None:
        function, args, *rest = self.owner.__reduce__()[2]
        args = (*args[:i], value, *args[i + 1 :])
        self.owner.__setstate__((function, args, *rest))


class PlaceAsItem(SlotHome):
    """Wraps a `Place`, so that `[key]` reads and writes its value, for any key."""

    def __getitem__(self, _: Any) -> Any:
        return self.owner.value

    def __setitem__(self, _: Any, value: Any) -> None:
        self.owner.write(value)

    def identity(self, key: Any) -> tuple[int, Any]:
        return self.owner.identity  # type: ignore[no-any-return]


class Attributes(SlotHome):
    """Wraps an object, so that `[name]` reads and writes its attributes."""

    def __getitem__(self, name: str) -> Any:
        return object.__getattribute__(self.owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)
