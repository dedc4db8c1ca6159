"""The search for a step's state: what its function can reach by name.

It follows closures, defaults, globals that the code uses, and the object of a method; functions of
the user that are reached so, likewise; places that functions were seen to read in a run; and what
is given as `state=`. The order is the same on every rank.
"""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..guards.places import Place
from .state import State, contents_of_module, group_lists_of, modules_among
from .state_slots import Cell, Defaults, Members, Slot

__all__ = ["state_of"]

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")
_NOT_USERS = ("torch", "partita", "builtins")
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_SEARCHED = 10_000  # entries of a container that an object holds


def state_of(
    step: Callable[..., Any],
    given: Iterable[Any],
    args: Any,
    kwargs: Any,
    reached: Sequence[Place] = (),
) -> State:
    """All that `step` can reach.

    Args:
        given: the objects of `state=`.
        reached: places that runs of it were seen to read.
    """
    return _search_state(step, list(given), modules_among(args, kwargs), reached)


def _search_state(
    step: Callable[..., Any], named: list[Any], given: list[Any], reached: Sequence[Place]
) -> State:
    """The state of a step for calls with these modules and optimizers among the arguments."""
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


class _Search:
    """One search; what it finds is added to `state`."""

    def __init__(self, step: Callable[..., Any], named: Sequence[Any]) -> None:
        self.state = State()
        self._named = {id(value) for value in named}  # `given` searches all that they hold
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
        """Search the cells, globals and class attributes that functions were seen to read."""
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
        """How many slots, modules and optimizers were found."""
        return len(self.state.slots) + len(self.state.modules) + len(self.state.optimizers)

    def _search_object(self, owner: Any) -> None:
        if isinstance(owner, (nn.Module, Optimizer)):
            self.value(type(owner).__name__.lower(), owner, None)
        elif hasattr(owner, "__dict__") and self._first_time(owner):
            for name, value in list(vars(owner).items()):
                self.value(name, value, Slot(name, "value", vars(owner), name))

    def given(self, name: str, value: Any) -> None:
        """Search an object that the user gives as `state=`.

        Raises:
            ValueError: it is a tensor, whose place is not known.
        """
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a tensor: give the object, list or dictionary it is in")
        if isinstance(value, (nn.Module, Optimizer, list, dict)):
            self.value(name, value, None)
        else:
            self._search_object(value)

    def value(self, name: str, value: Any, slot: Slot | None) -> None:
        """Search a value; `slot` is its place, None where it cannot be exchanged there."""
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
                self.state.groups.append((value, group_lists_of(value)))
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
        """Search the attributes of an object of the user's, for tensors, modules and floats."""
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
        """Add the tensors of an object of torch's that has state, as a GradScaler."""
        if self._first_time(value):
            for key, held in list(vars(value).items()):
                if isinstance(held, torch.Tensor):
                    at = Slot(f"{name}.{key}", "value", vars(value), key)
                    self.value(at.name, held, at)

    def _module(self, name: str, module: nn.Module) -> None:
        for prefix, part in module.named_modules():
            self._first_time(part)
            self.state.parts.append((part, contents_of_module(part)))
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
    """Is it a list or dictionary with a tensor, other than parameters if `but_parameters`?"""
    if not isinstance(value, (list, dict)) or len(value) > _SEARCHED:
        return False
    held = value.values() if isinstance(value, dict) else value
    others = nn.Parameter if but_parameters else ()
    return any(isinstance(v, torch.Tensor) and not isinstance(v, others) for v in held)


def _may_hold_tensors(value: Any) -> bool:
    """Is it worth searching? Not functions and classes: what they read is seen when they run."""
    if isinstance(value, (*_SIMPLE, type, types.ModuleType)):
        return False
    return isinstance(value, nn.Module) or not callable(value)


def _is_of_run(value: Any) -> bool:
    """Was it made in a capture run, so that it holds fakes?"""
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    elif isinstance(value, Optimizer):
        value = [group["params"] for group in value.param_groups]
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> list[str]:
    """The globals that a code uses. (`co_names` has names of attributes too.)"""
    used = [i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS]
    names = list(dict.fromkeys(used))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names += _global_names(const)
    return names


def _has_tensor(value: tuple[Any, ...]) -> bool:
    return any(isinstance(v, torch.Tensor) for v in value)
