"""Slots: the places where the tensors of a step's state are stored.

A slot is an item `home[key]`, such as `module._parameters["weight"]`. Its home is a dictionary, a
list, or an object of this module that gives access by item to something else, such as an
optimizer's group. A program reads inputs from slots and writes outputs to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


def is_no_tuple(value: Any) -> bool:
    """True if `value` is not a tuple.

    As `is_leaf=` of a pytree function, it makes the function flatten tuples only. The tensors of a
    tuple share a slot, but the tensors of a list have a slot each.
    """
    return not isinstance(value, tuple)


class SlotHome:
    """Gives access to parts of the object `owner` by item, as `home[key]`. A base class.

    An attribute or a closure cell is not an item of a dictionary. With this class, capture reads
    and writes them in the same form.
    """

    def __init__(self, owner: Any):
        self.owner = owner

    def identity(self, key: Any) -> tuple[int, Any]:
        """Returns an identity of the place `home[key]`, equal for homes of the same place."""
        return id(self.owner), key


class ParamGroup:
    """Gives access to the options of an optimizer's parameter group: `home["lr"]`.

    It finds the group by number, because `load_state_dict` replaces the dictionaries.
    """

    def __init__(self, optimizer: Optimizer, index: int):
        self.optimizer, self.index = optimizer, index

    @property
    def now(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.index]

    def __getitem__(self, key: str) -> Any:
        return self.now[key]


class ParamState:
    """Gives access to the optimizer state of one parameter: `home["exp_avg"]`.

    The first write creates the state. The parameter itself is found by the slot `p`, the place in
    which it is stored.
    """

    def __init__(self, optimizer: Optimizer, p: Slot):
        self.optimizer, self.p = optimizer, p

    def __getitem__(self, key: Any) -> Any:
        return self.optimizer.state[self.p.value][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.optimizer.state[self.p.value][key] = value


@dataclass(eq=False)
class Slot:
    """A place where a tensor or value of a step's state is stored.

    If a program replaces the object that holds the value, `home` is set to the new object. Captured
    programs refer to the slot, so they use the new object from then on.

    Attributes:
        name: the name in messages, such as "model.head.weight".
        kind: "parameter", "buffer", "optimizer" (optimizer state) or "value".
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
        """Returns the value in this place; None if the place no longer exists."""
        try:
            return self.value
        except (LookupError, AttributeError, ValueError):  # ValueError: an empty cell
            return None

    def put(self, value: Any) -> None:
        self.home[self.key] = value

    @property
    def identity(self) -> tuple[int, Any]:
        """An identity of the place; equal for slots of the same place."""
        if isinstance(self.home, SlotHome):
            return self.home.identity(self.key)
        return id(self.home), self.key
