"""The state of a step: what it reads and writes that is not one of its arguments.

Modules, optimizers, tensors, and lists and dictionaries of them, found by `state_search`. Each
tensor stands in a slot (`state_slots`). The leaves of a call are those of all slots, then those of
the arguments (`tensors_of_call`); inputs of a graph refer to them by index.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from partita.tensor import tensor_state

from ..arguments import flatten_call
from ..guards.attributes_and_hooks import places_of_attributes_and_hooks
from ..guards.places import Place
from .state_slots import Slot

__all__ = [
    "ReachedMore",
    "State",
    "contents_of_module",
    "group_lists_of",
    "modules_among",
    "names_of_call",
    "tensors_of_call",
]

_SEARCHES = 4  # how often runs of a step may find more state, before a failing run is final


@dataclass
class State:
    """What a step can reach.

    Attributes:
        modules, optimizers: by the name under which each was found first.
        slots: of the tensors of modules, and of tensors by themselves or in lists and dictionaries.
            Not of optimizers, whose state comes and goes: see `optimizer_slots`.
        values: the slots of plain Python values: another value is another program.
        found: for modules and optimizers, the slot and what was there.
        parts: each module, with all within it, and its `contents_of_module`.
        given: the modules and optimizers among the arguments of the call.
        lists: lists and dictionaries that were searched, and the length of each.
        groups: each optimizer, and its `group_lists_of`.
        reached: places with state that only a run of the step has shown.
        search: searches again, with more such places.
        searches: how often that was done for one call.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    values: list[Slot] = field(default_factory=list)
    found: list[tuple[Slot, Any]] = field(default_factory=list)
    parts: list[tuple[nn.Module, tuple[Any, ...]]] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    lists: list[tuple[Any, int]] = field(default_factory=list)
    groups: list[tuple[Optimizer, list[Any]]] = field(default_factory=list)
    reached: list[Place] = field(default_factory=list)
    search: Callable[[Sequence[Place]], State] | None = None
    searches: int = 0

    def find_more(self, places: Iterable[Place]) -> ReachedMore | None:
        """The exception to raise where new state is at places that a run has read; else None."""
        if self.search is None or self.searches >= _SEARCHES:
            return None
        found = self.search([*self.reached, *places])
        if not found.identities_found() - self.identities_found():
            return None
        found.searches = self.searches + 1
        return ReachedMore(found)

    def names_by_id(self) -> dict[int, str]:
        """By id, the names of modules, of the modules within them, and of optimizers."""
        names = {id(o): name for name, o in self.optimizers.items()}
        for name, module in self.modules.items():
            for prefix, part in module.named_modules():
                names.setdefault(id(part), f"{name}.{prefix}" if prefix else name)
        return names

    def identities_found(self) -> set[Any]:
        """The identities of the slots, modules and optimizers that were found."""
        objects = (*self.modules.values(), *self.optimizers.values())
        return {slot.identity for slot in self.slots} | {id(o) for o in objects}

    def is_of(self, args: Any, kwargs: Any) -> bool:
        """Are the modules and optimizers among these arguments those of the search?"""
        given = modules_among(args, kwargs)
        return len(given) == len(self.given) and all(map(operator.is_, given, self.given))

    def has_changed(self) -> bool:
        """Has a module or optimizer been exchanged, or the contents of a module or list changed?"""
        try:
            if any(slot.value is not value for slot, value in self.found):
                return True
        except LookupError:  # a list or a dictionary that has become shorter
            return True
        if self.has_other_groups():
            return True
        if any(len(held) != count for held, count in self.lists):
            return True
        return any(contents_of_module(module) != inside for module, inside in self.parts)

    def has_other_groups(self) -> bool:
        """Has an optimizer got other group dictionaries, as by `load_state_dict`?"""
        return any(
            len(now := group_lists_of(o)) != len(parts) or not all(map(operator.is_, now, parts))
            for o, parts in self.groups
        )

    def optimizer_slots(self) -> list[Slot]:
        """The slots of the tensors in optimizers' state now."""
        names = {id(s.value): s.name for s in self.slots if s.kind == "parameter"}
        found = []
        for name, optimizer in self.optimizers.items():
            for i, (p, state) in enumerate(optimizer.state.items()):
                of = names.get(id(p), str(i))
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        found.append(Slot(f"{name}[{of}].{key}", "optimizer", state, key))
        return found

    def settings(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of what else decides the program and is not among the guards."""
        for name, module in self.modules.items():
            yield f"{name}.training", tuple([m.training for m in module.modules()])
        for name, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                yield f"{name}.params[{i}]", len(group["params"])
            yield f"{name}.state", tuple([len(s) for s in optimizer.state.values()])

    def guarded_places(self) -> Iterator[Place]:
        """Places that are guarded even if no read of them was seen: groups, marks of tensors."""
        for name, optimizer in self.optimizers.items():
            yield Place(f"{name}.param_groups", optimizer, "param_groups", _groups_of(optimizer))
        seen: set[int] = set()
        for slot in self.slots:
            t = slot.value
            if isinstance(t, torch.Tensor):
                if (rest := tensor_state.state_of(t).gathered_from) is not None:
                    t, _ = rest  # a gathered tensor is another object in each step
                if id(t) not in seen:
                    seen.add(id(t))
                    yield from places_of_attributes_and_hooks(slot.name, t)


class ReachedMore(Exception):
    """A run has read tensors, modules or optimizers that were not found before.

    Attributes:
        state: with these.
    """

    def __init__(self, state: State):
        super().__init__(", ".join(place.name for place in state.reached))
        self.state = state


def group_lists_of(optimizer: Optimizer) -> list[Any]:
    """An optimizer's list of groups, the groups, and their lists of parameters."""
    groups = optimizer.param_groups
    return [groups, *groups, *[group["params"] for group in groups]]


def _groups_of(optimizer: Optimizer) -> Callable[[], Any]:
    return lambda: optimizer.param_groups


def modules_among(args: Any, kwargs: Any) -> list[Any]:
    """The modules and optimizers that a call is given."""
    return [v for v in (*args, *kwargs.values()) if isinstance(v, (nn.Module, Optimizer))]


def contents_of_module(module: nn.Module) -> tuple[Any, ...]:
    """A module's children, and how many parameters and buffers it has, which slots locate."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return (*module._modules.values(), sum(t is not None for t in tensors))


def tensors_of_call(slots: Sequence[Slot], args: Any, kwargs: Any) -> list[Any]:
    """The leaves of all slots and arguments, in order: among them all tensors of a call."""
    found: list[Any] = []
    for slot in slots:
        value = slot.value
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            found += pytree.tree_leaves(value)
    return found + flatten_call((args, kwargs))[0]


def names_of_call(slots: Sequence[Slot], args: Any, kwargs: Any) -> list[tuple[str, str]]:
    """Name and kind of each that `tensors_of_call` finds."""
    found = []
    for slot in slots:
        count = 1 if isinstance(slot.value, torch.Tensor) else len(pytree.tree_leaves(slot.value))
        names = [slot.name] if count == 1 else [f"{slot.name}[{i}]" for i in range(count)]
        found += [(name, slot.kind) for name in names]
    count = len(flatten_call((args, kwargs))[0])
    return found + [(f"argument[{i}]", "argument") for i in range(count)]
