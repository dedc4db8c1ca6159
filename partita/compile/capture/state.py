"""The state of a step: what does a step read and write that is not one of its arguments?

What its function can reach by name: modules, optimizers, tensors, and lists and dictionaries of
them, in its closure, its defaults, the globals that it uses, and the object that it is a method of;
what other functions of the user that it reaches can reach; what the functions name that are seen to
run while it is captured; and what is given as `state=`. Each tensor is in a slot: a place in a
dictionary, a list or a cell, where capture puts another in its stead for a while.
"""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from partita.tensor import tensor_state

from ..arguments import flatten_call
from ..guards.marks import attributes_of, marks_of
from ..guards.places import Place

__all__ = [
    "ReachedMore",
    "Slot",
    "State",
    "attributes_of",
    "names_of_call",
    "state_of",
    "tensors_of_call",
]

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")
_NOT_USERS = ("torch", "partita", "builtins")
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_SEARCHES = 4  # runs of a step that may find more of its state, before one that fails is believed
_SEARCHED = 10_000  # entries of a container that an object holds


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
    """What a class has, read and written as a dictionary."""

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
        name: as a person would say it: "model.head.weight".
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
        """As `Place.identity` has it."""
        home = self.home
        home = home.cell if isinstance(home, Cell) else home
        return id(home.kind if isinstance(home, Members) else home), self.key


@dataclass
class State:
    """What a step can reach.

    Attributes:
        modules, optimizers: each once, under the name by which it was found first.
        slots: of the tensors of modules, and of tensors by themselves or in lists and dictionaries.
            Not of optimizers, whose state comes and goes: see `optimizer_slots`.
        values: of plain Python values, which are part of the program: another value, another
            capture.
        found: of modules and optimizers: where they were, and what was there.
        parts: of each module, with all within it, what was in it.
        given: the modules and optimizers among the arguments of the call.
        lists: lists and dictionaries in which tensors were looked for, and how long each was.
        groups: of each optimizer, the list of its groups, these and their lists of parameters.
        reached: where something stood that only a run of the step is seen to name.
        search: gives the state with what stands at other such places, too.
        searches: how often more was found so for one call.
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
        """What to raise where there is state at one of these, which a run of the step has read."""
        if self.search is None or self.searches >= _SEARCHES:
            return None
        found = self.search([*self.reached, *places])
        if not found.identities_found() - self.identities_found():
            return None
        found.searches = self.searches + 1
        return ReachedMore(found)

    def identities_found(self) -> set[Any]:
        """What tells the places and objects that were found from others."""
        objects = (*self.modules.values(), *self.optimizers.values())
        return {slot.identity for slot in self.slots} | {id(o) for o in objects}

    def is_of(self, args: Any, kwargs: Any) -> bool:
        """Are the modules and optimizers among these arguments those that it was made for?"""
        given = _given_by(args, kwargs)
        return len(given) == len(self.given) and all(map(operator.is_, given, self.given))

    def moved(self) -> bool:
        """Is another module or optimizer where one was found, or in a module what was not there?"""
        try:
            if any(slot.value is not value for slot, value in self.found):
                return True
        except LookupError:  # a list or a dictionary that has become shorter
            return True
        if self.regrouped():
            return True
        if any(len(held) != count for held, count in self.lists):
            return True
        return any(_contents_of_module(module) != inside for module, inside in self.parts)

    def regrouped(self) -> bool:
        """Has an optimizer other groups, as `load_state_dict` gives it?"""
        return any(
            len(now := _parts_of(o)) != len(parts) or not all(map(operator.is_, now, parts))
            for o, parts in self.groups
        )

    def optimizer_slots(self) -> list[Slot]:
        """The tensors that optimizers hold now."""
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
        """What is no tensor and is part of the program, beside what guards hold."""
        for name, module in self.modules.items():
            yield f"{name}.training", tuple([m.training for m in module.modules()])
        for name, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                yield f"{name}.params[{i}]", len(group["params"])
            yield f"{name}.state", tuple([len(s) for s in optimizer.state.values()])

    def guarded(self) -> Iterator[Place]:
        """What is part of a program though the step is not seen to read it: optimizers' groups."""
        for name, optimizer in self.optimizers.items():
            yield Place(f"{name}.param_groups", optimizer, "param_groups", _groups_of(optimizer))
        seen: set[int] = set()
        for slot in self.slots:
            t = slot.value
            if isinstance(t, torch.Tensor):
                if (rest := tensor_state.state_of(t).gathered_from) is not None:
                    t, _ = rest  # what is gathered is another one in each step, and has what it has
                if id(t) not in seen:
                    seen.add(id(t))
                    yield from marks_of(slot.name, t)


class ReachedMore(Exception):
    """A step was seen to name tensors, modules or optimizers that had not been found.

    Attributes:
        state: what it reaches, with these.
    """

    def __init__(self, state: State):
        super().__init__(", ".join(place.name for place in state.reached))
        self.state = state


def _parts_of(optimizer: Optimizer) -> list[Any]:
    groups = optimizer.param_groups
    return [groups, *groups, *[group["params"] for group in groups]]


def _groups_of(optimizer: Optimizer) -> Callable[[], Any]:
    return lambda: optimizer.param_groups


def state_of(
    step: Callable[..., Any],
    given: Iterable[Any],
    args: Any,
    kwargs: Any,
    reached: Sequence[Place] = (),
) -> State:
    """All that `step` can reach, in an order that is the same on every rank.

    Args:
        reached: what runs of it were seen to name.
    """
    return _search_state(step, list(given), _given_by(args, kwargs), reached)


def _search_state(
    step: Callable[..., Any], named: list[Any], given: list[Any], reached: Sequence[Place]
) -> State:
    """The state of a step for calls with these modules and optimizers, without the rest of one."""
    search = _Search(step, named)
    search.state.search = functools.partial(_search_state, step, named, given)
    search.function(step)
    search.search_places(reached)
    for i, value in enumerate(named):
        search.given(f"state[{i}]", value)
    search.state.given = given
    for value in given:  # tensors among the arguments are inputs anyway
        search.value(type(value).__name__.lower(), value, None)
    return search.state


def _given_by(args: Any, kwargs: Any) -> list[Any]:
    return [v for v in (*args, *kwargs.values()) if isinstance(v, (nn.Module, Optimizer))]


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


class _Search:
    def __init__(self, step: Callable[..., Any], named: Sequence[Any]) -> None:
        self.state = State()
        self._named = {id(value) for value in named}  # of which every value counts
        self._step = step
        self._seen: set[int] = set()
        self._kept: list[Any] = []

    def _first_time(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)  # an id is one object's as long as that lives
        return True

    def function(self, f: Any) -> None:
        if isinstance(f, functools.partial):
            for i, value in enumerate((*f.args, *f.keywords.values())):
                self.value(f"partial[{i}]", value, None)
            return self.function(f.func)
        if isinstance(f, types.MethodType):
            self._search_object(f.__self__)
            return self.function(f.__func__)
        if not isinstance(f, types.FunctionType):
            if callable(f) and not isinstance(f, type) and hasattr(type(f).__call__, "__code__"):
                self._search_object(f)
                return self.function(type(f).__call__)
            return None
        library = (f.__module__ or "").split(".")[0] in _NOT_USERS
        if not self._first_time(f) or (library and f is not self._step):
            return None
        if hasattr(f, "__wrapped__"):
            self.function(f.__wrapped__)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.value(name, value, Slot(name, "value", Cell(cell), 0))
        for name in _global_names(f.__code__):
            if name in f.__globals__:
                self.value(name, f.__globals__[name], Slot(name, "value", f.__globals__, name))
        for i, value in enumerate(f.__defaults__ or ()):
            at = Slot(f"default[{i}]", "value", Defaults(f), i)
            self.value(at.name, value, at if isinstance(value, torch.Tensor) else None)
        for name, value in vars(f).items():
            if isinstance(value, (torch.Tensor, list, dict)) and name != "__wrapped__":
                at = Slot(f"{f.__name__}.{name}", "value", vars(f), name)
                self.value(at.name, value, at)
        for name, value in (f.__kwdefaults__ or {}).items():
            self.value(name, value, Slot(name, "value", f.__kwdefaults__, name))
        return None

    def search_places(self, places: Iterable[Place]) -> None:
        """What stands where functions name it: in cells, globals and classes."""
        known = {slot.identity for slot in self.state.slots}
        for place in places:
            home, value = place.home, place.value
            if place.identity in known or not _may_hold_tensors(value) or _is_of_run(value):
                continue
            if isinstance(home, types.CellType):
                home = Cell(home)
            elif isinstance(home, type):
                home = Members(home)
            elif not isinstance(home, dict) or "__builtins__" not in home:
                continue
            known.add(place.identity)
            before, slots = self.count_found(), len(self.state.slots)
            self.value(place.name, value, Slot(place.name, "value", home, place.key))
            if any(isinstance(slot.value, FakeTensor) for slot in self.state.slots[slots:]):
                del self.state.slots[slots:]  # an object that the run has made
            if self.count_found() > before:
                self.state.reached.append(place)

    def count_found(self) -> int:
        """How much was found."""
        return len(self.state.slots) + len(self.state.modules) + len(self.state.optimizers)

    def _search_object(self, owner: Any) -> None:
        if isinstance(owner, (nn.Module, Optimizer)):
            self.value(type(owner).__name__.lower(), owner, None)
        elif hasattr(owner, "__dict__") and self._first_time(owner):
            for name, value in list(vars(owner).items()):
                self.value(name, value, Slot(name, "value", vars(owner), name))

    def given(self, name: str, value: Any) -> None:
        """What the user names: a module, an optimizer, or something that holds such or tensors.

        Raises:
            ValueError: a tensor by itself: where it stands cannot be told.
        """
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a tensor: give the object, list or dictionary it is in")
        if isinstance(value, (nn.Module, Optimizer, list, dict)):
            self.value(name, value, None)
        else:
            self._search_object(value)

    def value(self, name: str, value: Any, slot: Slot | None) -> None:
        """`slot` is where it stands, where it can be exchanged."""
        if slot is not None and isinstance(value, (nn.Module, Optimizer)):
            self.state.found.append((slot, value))
        if isinstance(value, nn.Module):
            if self._first_time(value):
                self.state.modules[name] = value
                self._module(name, value)
        elif isinstance(value, Optimizer):
            if self._first_time(value):
                self.state.optimizers[name] = value
                self.state.lists.append((value.param_groups, len(value.param_groups)))
                self.state.groups.append((value, _parts_of(value)))
                for i, group in enumerate(value.param_groups):
                    self.state.lists.append((group["params"], len(group["params"])))
                    for key, v in group.items():  # a rate that is a tensor
                        if isinstance(v, torch.Tensor):
                            at = Slot(f"{name}.param_groups[{i}][{key!r}]", "value", group, key)
                            self.value(at.name, v, at)
                    for j, p in enumerate(group["params"]):
                        at = Slot(f"{name}.params[{i}][{j}]", "parameter", group["params"], j)
                        self.value(at.name, p, at)
        elif isinstance(value, torch.Tensor):
            if slot is not None:
                self.state.slots.append(slot)
        elif isinstance(value, (list, dict, collections.deque)):
            if self._first_time(value):
                self.state.lists.append((value, len(value)))
                entries: Any = value.items() if isinstance(value, dict) else enumerate(value)
                for key, v in entries:
                    at = Slot(f"{name}[{key!r}]", "value", value, key)
                    if not isinstance(v, _SIMPLE):
                        self.value(at.name, v, at)
        elif isinstance(value, tuple) and _has_tensor(value):
            if slot is not None:
                self.state.slots.append(slot)
        elif isinstance(value, _SIMPLE):
            if slot is not None and not name.startswith("__"):
                self.state.values.append(slot)
        elif callable(value) and not isinstance(value, type):
            self.function(value)
        else:
            self._search_holder(name, value)

    def _search_holder(self, name: str, value: Any) -> None:
        """An object of the user's, for what it holds of tensors, modules and floats."""
        package = type(value).__module__.split(".")[0]
        if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
            return
        library = package in _NOT_USERS or package in sys.stdlib_module_names - {"__main__"}
        if library and not isinstance(value, _NAMESPACES):
            if package == "torch" and hasattr(value, "load_state_dict"):
                self._search_state_keeper(name, value)
            return
        if id(value) in self._named or not self._first_time(value):
            return
        for key, v in list(vars(value).items()):
            at = Slot(f"{name}.{key}", "value", vars(value), key)
            many = isinstance(v, (list, dict)) and len(v) > _SEARCHED
            if isinstance(v, float) or not (many or isinstance(v, _SIMPLE)):
                self.value(at.name, v, at)

    def _search_state_keeper(self, name: str, value: Any) -> None:
        """The tensors of an object of torch's that keeps a state: a GradScaler, say."""
        if self._first_time(value):
            for key, held in list(vars(value).items()):
                if isinstance(held, torch.Tensor):
                    at = Slot(f"{name}.{key}", "value", vars(value), key)
                    self.value(at.name, held, at)

    def _module(self, name: str, module: nn.Module) -> None:
        for prefix, part in module.named_modules():
            self._first_time(part)
            self.state.parts.append((part, _contents_of_module(part)))
            where = f"{name}.{prefix}." if prefix else f"{name}."
            for kind, home in (("parameter", part._parameters), ("buffer", part._buffers)):
                for key, t in home.items():
                    if t is not None:
                        self.state.slots.append(Slot(where + key, kind, home, key))
            for key, held in list(vars(part).items()):
                if key in ("_parameters", "_buffers"):  # whose entries are slots already
                    continue
                # Recurrent layers put their parameters into a list of theirs again and again.
                flat = isinstance(part, nn.RNNBase) and key == "_flat_weights"
                if isinstance(held, torch.Tensor) or _holds_tensor(held, flat):
                    self.value(where + key, held, Slot(where + key, "value", vars(part), key))


def _holds_tensor(value: Any, but_parameters: bool) -> bool:
    """Is it a list or a dictionary with a tensor, or with one that is no parameter?"""
    if not isinstance(value, (list, dict)) or len(value) > _SEARCHED:
        return False
    held = value.values() if isinstance(value, dict) else value
    others = nn.Parameter if but_parameters else ()
    return any(isinstance(v, torch.Tensor) and not isinstance(v, others) for v in held)


def _contents_of_module(module: nn.Module) -> tuple[Any, ...]:
    """Its modules, and how many tensors it has; where these are, a slot knows."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return (*module._modules.values(), sum(t is not None for t in tensors))


def _may_hold_tensors(value: Any) -> bool:
    """Not functions and classes: what they name themselves is seen when they run."""
    if isinstance(value, (*_SIMPLE, type, types.ModuleType)):
        return False
    return isinstance(value, nn.Module) or not callable(value)


def _is_of_run(value: Any) -> bool:
    """Was it made while a step was captured, or does it hold what was?"""
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    elif isinstance(value, Optimizer):
        value = [group["params"] for group in value.param_groups]
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> list[str]:
    """The globals that it uses. `co_names` has the names of attributes and methods too."""
    used = [i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS]
    names = list(dict.fromkeys(used))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names += _global_names(const)
    return names


def _has_tensor(value: tuple[Any, ...]) -> bool:
    return any(isinstance(v, torch.Tensor) for v in value)
