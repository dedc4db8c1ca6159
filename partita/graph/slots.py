"""Slots: the places of a step's state.

A slot is an item of a home: a dictionary, a list, or an object that is read and written in the same
way (`home[key]`). A program reads its inputs from slots and writes outputs into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


def is_no_tuple(value: Any) -> bool:
    """True for what a slot's tuple holds as one: tuples within it are exchanged with it."""
    return not isinstance(value, tuple)


class SlotHome:
    """An object's parts, read and written as the items of a dictionary or list."""

    def __init__(self, owner: Any):
        self.owner = owner

    def identity(self, key: Any) -> tuple[int, Any]:
        """Returns an identifier that is equal for one place, whichever home returns it."""
        return id(self.owner), key


class ParamGroup:
    """A parameter group, by number: `load_state_dict` replaces the dictionaries of all groups."""

    def __init__(self, optimizer: Optimizer, index: int):
        self.optimizer, self.index = optimizer, index

    @property
    def now(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.index]

    def __getitem__(self, key: str) -> Any:
        return self.now[key]


class ParamState:
    """The state of the parameter in a slot, as a dictionary that is created at its first write."""

    def __init__(self, optimizer: Optimizer, p: Slot):
        self.optimizer, self.p = optimizer, p

    def __getitem__(self, key: Any) -> Any:
        return self.optimizer.state[self.p.value][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.optimizer.state[self.p.value][key] = value


@dataclass(eq=False)
class Slot:
    """A place of a value.

    A search may find another object on the path to it. Then the slot gets another home, so that
    programs that read or write the slot follow.

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

    def find_value(self) -> Any:
        """Returns the value; None if the place has none any more."""
        try:
            return self.value
        except (LookupError, AttributeError, ValueError):  # of a cell the last
            return None

    def put(self, value: Any) -> None:
        self.home[self.key] = value

    @property
    def identity(self) -> tuple[int, Any]:
        """Equal for slots of one place; as `Place.identity`."""
        if isinstance(self.home, SlotHome):
            return self.home.identity(self.key)
        return id(self.home), self.key
