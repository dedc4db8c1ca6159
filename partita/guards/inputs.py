"""The state of a step: the modules, optimizers and tensors that it uses, and where each tensor is.

`find_state` searches in closures, defaults, globals that the code uses, and the object of a method.
It searches functions of the user to which these refer in the same way, places that a capture run
has read, and `state=`. Each tensor gets a *slot*, the place where it is stored. The *leaves* of a
call are the values of all slots, then the leaves of the arguments (`tensors_of_call`). Inputs of a
graph refer to them by index.

A slot is identified by its place. If an object on the way to it has been replaced, a new search
moves the slot to the place on the same path (`State.has_changed`). A slot whose own place is still
found is never moved: two places may have one name, and be found in another order. Guards check that
the step reads the same leaves as the graph.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import enum
import functools
import gc
import itertools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from partita.capture.code_origin import codes_within
from partita.graph.errors import not_captured
from partita.graph.slots import Slot, is_no_tuple
from partita.layout import Fix

from .arguments import flatten_call
from .bytecode import global_names
from .slot_homes import Arguments, Attributes, Cell, Defaults, Items, Members, PlaceAsItem
from .values import (
    INSIDE,
    MISSING,
    Place,
    count_items,
    dict_of,
    has_type,
    is_container,
    items_of,
    read_field,
    reads_like_base,
    results_of_cache,
    slots_of,
    walk_containers,
)

SlotsByPath = weakref.WeakValueDictionary[tuple[str, type, int], Slot]

_SEARCHES = 4  # the most times that runs for one call may add state


@dataclass
class State:
    """Everything that a step can reach besides its arguments: modules, optimizers and tensors.

    Attributes:
        modules, optimizers: each module and optimizer, by the first name under which it was found.
        slots: the slots of modules' tensors, and of tensors in variables, lists and dictionaries.
            The slots of optimizers, whose state comes and goes, are in `optimizer_slots`.
        values: the slots of Python floats.
        by_path: the slots that this search has found, and earlier ones to which a program refers.
        parts: each module, with all modules inside it.
        given: the modules and optimizers among the arguments of the call.
        links: (home, key, object) for each object through which a slot was found: `home[key]` is
            the object.
        lists: (container, length) of lists and dictionaries that were searched.
        reached: places with state that the search did not find, but that a run of the step has
            read.
        search: a function that repeats the search, and also searches the places passed to it.
        searches: the number of repeated searches for one call, after runs that read new state.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    values: list[Slot] = field(default_factory=list)
    by_path: SlotsByPath = field(default_factory=weakref.WeakValueDictionary)
    parts: list[nn.Module] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    links: list[tuple[Any, Any, Any]] = field(default_factory=list)
    lists: list[tuple[Any, int]] = field(default_factory=list)
    reached: list[Place] = field(default_factory=list)
    search: Callable[[Sequence[Place]], State] | None = None
    searches: int = 0

    def find_more(self, places: Iterable[Place]) -> NewStateFound | None:
        """Returns a NewStateFound if a run has read new state in `places`; otherwise None.

        New state is a module, an optimizer or a tensor. With this exception, the capture starts
        again.
        """
        if self.search is None or self.searches >= _SEARCHES:
            return None
        now = {place.identity: place for place in places}
        names = {place.name for place in now.values()}
        # A place of the same name but on another object replaces the one that was known.
        kept = [p for p in self.reached if p.identity in now or p.name not in names]
        known = self.identities_found()  # read first: a search may change the homes of slots
        found = self.search([*kept, *now.values()])
        if not found.identities_found() - known:
            return None
        found.searches = self.searches + 1
        return NewStateFound(found)

    def names_by_id(self) -> dict[int, str]:
        """Returns the names of optimizers, modules and submodules, by their ids."""
        names = {id(o): name for name, o in self.optimizers.items()}
        for name, module in self.modules.items():
            for prefix, part in module.named_modules():
                names.setdefault(id(part), f"{name}.{prefix}" if prefix else name)
        return names

    def identities_found(self) -> set[Any]:
        """Returns the identities of all slots, modules and optimizers, to compare two searches."""
        objects = (*self.modules.values(), *self.optimizers.values())
        return {slot.identity for slot in self.slots} | {id(o) for o in objects}

    def ids_searched(self) -> set[int]:
        """Returns the ids of the modules, optimizers and containers that were searched."""
        held = (v for _, _, v in self.links)
        return {id(v) for v in (*held, *self.parts, *self.optimizers.values())}

    def is_of(self, args: Any, kwargs: Any) -> bool:
        """True if the modules and optimizers among a call's arguments are those of this state.

        Otherwise the search for the step's state must be repeated.
        """
        given = _modules_among(args, kwargs)
        return len(given) == len(self.given) and all(map(operator.is_, given, self.given))

    def has_changed(self) -> bool:
        """True if an object of the state was replaced or moved: the search must be repeated."""
        try:
            collections.deque((slot.value for slot in (*self.slots, *self.values)), maxlen=0)
            if any(home[key] is not value for home, key, value in self.links):
                return True
        except (LookupError, ValueError, AttributeError):  # the place is gone
            return True
        return any(count_items(held) != count for held, count in self.lists)

    def optimizer_slots(self) -> list[Slot]:
        """Returns a slot for each tensor that the optimizers have in their `state` now."""
        names: dict[int, str] = {}  # modules' slots come first, so their names win
        for slot in self.slots:
            if slot.kind == "parameter":
                names.setdefault(id(slot.value), slot.name)
        found = []
        for name, optimizer in self.optimizers.items():
            for i, (p, state) in enumerate(optimizer.state.items()):
                of = names.get(id(p), str(i))
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        found.append(Slot(f"{name}[{of}].{key}", "optimizer", state, key))
        return found

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yields `(name, value)` of settings that must be equal for calls to share a program.

        They are `training` of all modules. For each optimizer they are how many parameters each
        group has, and how many entries the state of each parameter has.
        """
        for name, module in self.modules.items():
            yield f"{name}.training", tuple([m.training for m in module.modules()])
        for name, optimizer in self.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                yield f"{name}.params[{i}]", len(group["params"])
            yield f"{name}.state", tuple([len(s) for s in optimizer.state.values()])

    def guarded_places(self) -> Iterator[Place]:
        """Yields places that guards always compare, such as `optimizer.param_groups`.

        Reads of these places are not recorded.
        """
        for name, optimizer in self.optimizers.items():
            groups = functools.partial(getattr, optimizer, "param_groups")
            yield Place(f"{name}.param_groups", optimizer, "param_groups", groups)
        if self.has_parametrizations():
            yield Place("parametrize.cached()", vars(parametrize), "_cache_enabled")

    def has_parametrizations(self) -> bool:
        return any("parametrizations" in part._modules for part in self.parts)

    def refuse_cached_values(self) -> None:
        """Raises CaptureError if the call is inside `parametrize.cached()`."""
        if self.has_parametrizations() and parametrize._cache_enabled:
            raise not_captured(
                "the step runs within parametrize.cached()",
                "a value that was cached before the call is not an input",
                Fix("with parametrize.cached():", "inside the step, not around it"),
            )


class NewStateFound(Exception):
    """Raised if the step has read a tensor, module or optimizer that `find_state` had not found.

    The capture then starts again with the larger state.

    Attributes:
        state: the state that includes them.
    """

    def __init__(self, state: State):
        super().__init__(", ".join(place.name for place in state.reached))
        self.state = state


def _modules_among(args: Any, kwargs: Any) -> list[Any]:
    """Returns the modules and optimizers among the arguments of a call."""
    return [v for v in (*args, *kwargs.values()) if isinstance(v, (nn.Module, Optimizer))]


def tensors_of_call(slots: Sequence[Slot], args: Any, kwargs: Any) -> list[Any]:
    """Returns the leaves of a call: the values of the state's slots, followed by the arguments.

    Leaves are tensors and numbers. Inputs of a graph refer to them by index.
    """
    found: list[Any] = []
    for slot in slots:
        value = slot.value
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            found += pytree.tree_leaves(value, is_leaf=is_no_tuple)
    return found + flatten_call((args, kwargs))[0]


def names_of_call(slots: Sequence[Slot], args: Any, kwargs: Any) -> list[tuple[str, str]]:
    """Returns `(name, kind)` for each leaf of a call, in the order of `tensors_of_call`."""
    found = []
    for slot in slots:
        count = len(pytree.tree_leaves(slot.value, is_leaf=is_no_tuple))
        names = [slot.name] if count == 1 else [f"{slot.name}[{i}]" for i in range(count)]
        found += [(name, slot.kind) for name in names]
    count = len(flatten_call((args, kwargs))[0])
    return found + [(f"argument[{i}]", "argument") for i in range(count)]


# -- the search ------------------------------------------------------------------------------------

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_NOT_USERS = ("torch", "partita", "builtins")
_NAMESPACES = (
    BaseException,
    *(types.SimpleNamespace, argparse.Namespace),
    *(collections.UserDict, collections.UserList, collections.ChainMap),
)
_SEARCHED = 10_000  # entries of a container that an object holds


def find_state(
    step: Callable[..., Any],
    given: Iterable[Any],
    args: Any,
    kwargs: Any,
    reached: Sequence[Place] = (),
    before: State | None = None,
) -> State:
    """Returns all modules, optimizers and tensors of a step, in the same order on all ranks.

    Args:
        given: the objects that the user has passed as `state=`.
        args, kwargs: the arguments of the call.
        reached: places (attributes, globals, items) that runs of the step have read.
        before: the result of an earlier search. The new result uses the same slot objects, updated
            to where their tensors are stored now.
    """
    by_path: SlotsByPath = weakref.WeakValueDictionary() if before is None else before.by_path
    return _search_state(step, list(given), _modules_among(args, kwargs), by_path, reached)


def _search_state(
    step: Callable[..., Any],
    named: list[Any],
    given: list[Any],
    by_path: SlotsByPath,
    reached: Sequence[Place],
) -> State:
    """Returns the state for calls with the modules and optimizers `given` among the arguments."""
    search = _Search(step, named, by_path)
    search.state.search = functools.partial(_search_state, step, named, given, by_path)
    search.function(step)
    search.search_places(reached)
    for i, value in enumerate(named):
        search.given(f"state[{i}]", value)
    search.state.given = given
    for value in given:  # tensors among the arguments are inputs anyway
        search.value(type(value).__name__.lower(), value, None)
    search.follow_replaced_objects()
    search.name_parameters_of_optimizers()
    return search.state


class _Search:
    """One search; it adds what it finds to `state`."""

    def __init__(
        self, step: Callable[..., Any], named: Sequence[Any], by_path: SlotsByPath
    ) -> None:
        self.state = State(by_path=by_path)
        self._known = {(s.name, s.kind, s.identity): s for s in by_path.values()}
        self._paths: dict[Slot, tuple[str, type, int]] = {}  # of each slot that is found
        self._counts: collections.Counter[tuple[str, type]] = collections.Counter()
        self._named = {id(value) for value in named}  # `given` searches all that they hold
        self._step = step
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        self._of_optimizers: list[Slot] = []

    def _first_time(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)  # so that no other object gets its id
        return True

    def _slot(self, name: str, kind: str, home: Any, key: Any) -> Slot:
        """Returns the slot of the place `home[key]`; an existing one if the place is known."""
        slot = Slot(name, kind, home, key)
        slot = self._known.setdefault((name, kind, slot.identity), slot)
        if slot not in self._paths:
            owner = home.owner.home if isinstance(home, PlaceAsItem) else home
            at = name, type(owner)
            self._counts[at] += 1
            self._paths[slot] = (*at, self._counts[at])
        return slot

    def follow_replaced_objects(self) -> None:
        """Moves earlier slots whose places are gone to the new places on the same paths.

        The path is the name, the type of the home, and a number if several places have these.
        """
        by_path, there = self.state.by_path, {*self._paths}
        moved: dict[Slot, Slot] = {}
        for slot, path in self._paths.items():
            before = by_path.get(path)
            if before is not None and before not in there:
                before.kind, before.home, before.key = slot.kind, slot.home, slot.key
                there.add(before)
                moved[slot] = before
        for slot, path in self._paths.items():
            by_path[path] = moved.get(slot, slot)
        for slots in (self.state.slots, self.state.values, self._of_optimizers):
            slots[:] = dict.fromkeys(moved.get(slot, slot) for slot in slots)

    def _note_dict(self, owner: Any) -> dict[str, Any]:
        """Returns the `__dict__` of an object that is searched, and stores the link to it."""
        held = dict_of(owner)
        self.state.links.append((Attributes(owner), "__dict__", held))
        return held

    def function(self, f: Any) -> None:
        if has_type(f, functools.partial):
            self.state.lists.append((f.keywords, len(f.keywords)))
            for i, value in enumerate(f.args):
                at = self._slot(f"partial[{i}]", "value", Arguments(f), i)
                self.value(at.name, value, None if has_type(value, _SIMPLE) else at)
            for key, value in f.keywords.items():
                self.value(f"partial[{key}]", value, self._slot(key, "value", f.keywords, key))
            return self.function(f.func)
        if has_type(f, types.MethodType):
            self._search_object(f.__self__)
            return self.function(f.__func__)
        if has_type(f, functools._lru_cache_wrapper):
            if self._first_time(f):
                self._search_attributes(f"{f.__name__}.", f, lambda _, v: _may_hold_tensors(v))
                for v in results_of_cache(f):
                    if _may_hold_tensors(v) and not _is_of_run(v):
                        self.value(f"{f.__name__}()", v, None)
            return None
        if not has_type(f, types.FunctionType):
            if callable(f) and not has_type(f, type) and hasattr(type(f).__call__, "__code__"):
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
            self.value(name, value, self._slot(name, "value", Cell(cell), 0))
        for name in (n for code in codes_within(f.__code__) for n in global_names(code)):
            if name in f.__globals__:
                value = f.__globals__[name]
                self.value(name, value, self._slot(name, "value", f.__globals__, name))
        for i, value in enumerate(f.__defaults__ or ()):
            at = self._slot(f"default[{i}]", "value", Defaults(f), i)
            self.value(at.name, value, None if has_type(value, _SIMPLE) else at)
        self._search_attributes(
            f"{f.__name__}.",
            f,
            lambda key, v: _may_hold_tensors(v) and key != "__wrapped__",
        )
        self.state.links.append((Attributes(f), "__kwdefaults__", f.__kwdefaults__))
        for name, value in (f.__kwdefaults__ or {}).items():
            self.value(name, value, self._slot(name, "value", f.__kwdefaults__, name))
        return None

    def search_places(self, places: Iterable[Place]) -> None:
        """Searches places that the step has read in a run, if they may hold tensors.

        Values of cells, globals, class attributes, context variables, enums and `threading.local`
        are always searched. Other values are searched only if they are or contain tensors, modules
        or optimizers.
        """
        known = {slot.identity for slot in self.state.slots}
        for place in places:
            home, value = place.home, place.value
            if value is MISSING or place.identity in known or _is_of_run(value):
                continue
            if not _may_hold_tensors(value):
                continue
            if has_type(home, types.CellType):
                home = Cell(home)
            elif has_type(home, type):
                owner = next((base for base in home.__mro__ if place.key in vars(base)), home)
                if (id(owner), place.key) in known:
                    continue
                known.add((id(owner), place.key))
                home = Members(owner)
            elif has_type(home, (contextvars.ContextVar, threading.local, enum.Enum)):
                home = PlaceAsItem(place)
            elif not has_type(home, dict) or not {"__builtins__", "__import__"} & home.keys():
                if not _holds_state(value):
                    continue
                home = place.home if place.get is None else PlaceAsItem(place)
            known.add(place.identity)
            before, slots = self.count_found(), len(self.state.slots)
            is_written = place.get is None or place.put is not None
            slot = self._slot(place.name, "value", home, place.key) if is_written else None
            self.value(place.name, value, slot)
            if any(isinstance(slot.value, FakeTensor) for slot in self.state.slots[slots:]):
                del self.state.slots[slots:]  # an object that the run has made
            if self.count_found() > before:
                self.state.reached.append(place)

    def name_parameters_of_optimizers(self) -> None:
        """Moves optimizers' slots to the end, so that parameters are named by their modules."""
        slots = self._of_optimizers
        self.state.slots += [s for s in slots if not isinstance(s.value, FakeTensor)]

    def count_found(self) -> int:
        """Returns the number of slots, modules and optimizers that were found so far."""
        return len(self.state.slots) + len(self.state.modules) + len(self.state.optimizers)

    def _search_object(self, owner: Any) -> None:
        if has_type(owner, (nn.Module, Optimizer)):
            self.value(type(owner).__name__.lower(), owner, None)
        elif dict_of(owner) is not None and self._first_time(owner):
            self._search_attributes("", owner, lambda key, v: True)

    def _search_attributes(
        self, prefix: str, owner: Any, wanted: Callable[[str, Any], bool]
    ) -> None:
        """Searches the attributes of an object for which `wanted(name, value)` is True."""
        is_class = has_type(owner, type)  # its `__dict__` is a new view each time, and read-only
        held = dict_of(owner) if is_class else self._note_dict(owner)
        home = Members(owner) if is_class else held
        for key, v in list(held.items()):
            if wanted(key, v):
                self.value(prefix + key, v, self._slot(prefix + key, "value", home, key))

    def given(self, name: str, value: Any) -> None:
        """Searches an object that the user passes as `state=`, with a name such as "state[0]".

        Raises:
            ValueError: it is a tensor, whose place is unknown.
        """
        if has_type(value, torch.Tensor):
            raise ValueError(f"{name} is a tensor: give the object, list or dictionary it is in")
        if has_type(value, (nn.Module, Optimizer, list, dict)):
            self.value(name, value, None)
        else:
            self._search_object(value)

    def value(self, name: str, value: Any, slot: Slot | None) -> None:
        """Searches a value for tensors, modules and optimizers.

        Args:
            name: the name of the value, for messages.
            slot: the place of the value; None if it cannot be replaced there.
        """
        if slot is not None and not has_type(value, (torch.Tensor, *_SIMPLE)):
            self.state.links.append((slot.home, slot.key, value))
        if has_type(value, nn.Module):
            if self._first_time(value):
                name = _unused_name(name, self.state.modules)
                self.state.modules[name] = value
                self._module(name, value)
        elif has_type(value, Optimizer):
            if self._first_time(value):
                name = _unused_name(name, self.state.optimizers)
                self.state.optimizers[name] = value
                self._groups(name, value)
        elif has_type(value, torch.Tensor):
            if slot is not None:
                self.state.slots.append(slot)
        elif has_type(value, (list, dict, collections.deque)):
            if self._first_time(value):
                self.state.lists.append((value, count_items(value)))
                keys, values = items_of(value)
                home = value if reads_like_base(value) else Items(value)
                for key, v in zip(
                    range(len(values)) if keys is None else keys, values, strict=True
                ):
                    if not has_type(v, _SIMPLE):
                        at = self._slot(f"{name}[{key!r}]", "value", home, key)
                        self.value(at.name, v, at)
                if dict_of(value) is not None:  # of a class of the user's
                    self._search_attributes(f"{name}.", value, lambda _, v: True)
        elif has_type(value, types.MappingProxyType):
            self.value(name, gc.get_referents(value)[0], None)
        elif has_type(value, tuple):
            found = pytree.tree_leaves(value, is_leaf=is_no_tuple)
            if any(v is value for v in found):  # of a class that is not registered with pytrees
                found = items_of(value)[1]
            elif slot is not None and any(has_type(v, torch.Tensor) for v in found):
                self.state.slots.append(slot)
            for i, v in enumerate(found):
                if not has_type(v, torch.Tensor):
                    self.value(f"{name}[{i}]", v, None)
        elif has_type(value, float):
            if slot is not None and not name.startswith("__"):
                self.state.values.append(slot)
        elif has_type(value, _SIMPLE):
            return
        elif callable(value) and not has_type(value, type):
            self.function(value)
        else:
            self._search_holder(name, value)

    def _groups(self, name: str, optimizer: Optimizer) -> None:
        """Searches the groups of an optimizer, for parameters and for settings that are tensors.

        `load_state_dict` replaces the dictionaries of all groups. The defaults have the same
        settings.
        """
        links, groups = self.state.links, optimizer.param_groups
        links.append((vars(optimizer), "param_groups", groups))
        self.state.lists.append((groups, len(groups)))
        for i, group in enumerate(groups):
            links += [(groups, i, group), (group, "params", group["params"])]
            self.state.lists.append((group["params"], len(group["params"])))
            for key, v in group.items():
                if has_type(v, torch.Tensor):
                    at = f"{name}.param_groups[{i}][{key!r}]"
                    self.value(at, v, self._slot(at, "value", group, key))
            for j in range(len(group["params"])):
                at = f"{name}.params[{i}][{j}]"
                self._of_optimizers.append(self._slot(at, "parameter", group["params"], j))
        defaults: Any = vars(optimizer).get("defaults")
        if has_type(defaults, dict) and reads_like_base(defaults):
            links.append((vars(optimizer), "defaults", defaults))
            self.state.lists.append((defaults, len(defaults)))
            for key, v in defaults.items():
                if has_type(v, torch.Tensor):
                    at = f"{name}.defaults[{key!r}]"
                    self.value(at, v, self._slot(at, "value", defaults, key))

    def _search_holder(self, name: str, value: Any) -> None:
        """Searches the attributes of a user's object for tensors, modules and floats."""
        package = type(value).__module__.split(".")[0]
        if has_type(value, (type, types.ModuleType)):
            return
        library = package in _NOT_USERS or package in sys.stdlib_module_names - {"__main__"}
        if library and not has_type(value, _NAMESPACES):
            keeps_state = package == "torch" and hasattr(value, "load_state_dict")  # a GradScaler
            if keeps_state and dict_of(value) is not None and self._first_time(value):
                self._search_attributes(f"{name}.", value, lambda _, v: has_type(v, torch.Tensor))
            return
        if id(value) in self._named or not self._first_time(value):
            return

        def is_wanted(_: str, v: Any) -> bool:
            many = has_type(v, (list, dict)) and count_items(v) > _SEARCHED
            return has_type(v, float) or not (many or has_type(v, _SIMPLE))

        if dict_of(value) is not None:
            self._search_attributes(f"{name}.", value, is_wanted)
        home = Attributes(value)
        for key in slots_of(type(value)):
            v = read_field(value, key)
            if v is not MISSING and is_wanted(key, v):
                self.value(f"{name}.{key}", v, self._slot(f"{name}.{key}", "value", home, key))

    def _module(self, name: str, module: nn.Module) -> None:
        for prefix, part in module.named_modules():
            self._first_time(part)
            self.state.parts.append(part)
            attributes = self._note_dict(part)
            for within in INSIDE:
                home = attributes[within]
                self.state.links.append((attributes, within, home))
                self.state.lists.append((home, len(home)))
            self.state.links += [(part._modules, key, v) for key, v in part._modules.items()]
            where = f"{name}.{prefix}." if prefix else f"{name}."
            for kind, home in (("parameter", part._parameters), ("buffer", part._buffers)):
                for key, t in home.items():
                    if t is None:
                        self.state.links.append((home, key, t))
                    else:
                        self.state.slots.append(self._slot(where + key, kind, home, key))
            for key, held in list(attributes.items()):
                if key in ("_parameters", "_buffers"):  # whose entries are slots already
                    continue
                # Recurrent layers often rebuild a list of their own parameters.
                flat = isinstance(part, nn.RNNBase) and key == "_flat_weights"
                if has_type(held, torch.Tensor) or _holds_tensor(held, flat):
                    self.value(where + key, held, self._slot(where + key, "value", attributes, key))


def _unused_name(name: str, used: Container[str]) -> str:
    """Returns the name, with a number if another object has it."""
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
    return next(n for n in names if n not in used)


def _holds_tensor(value: Any, but_parameters: bool) -> bool:
    """True for a container with a tensor, other than parameters if `but_parameters`."""
    if not is_container(value) or count_items(value) > _SEARCHED:
        return False
    others = nn.Parameter if but_parameters else ()
    # A gathered weight is a parameter by `_is_param`, which `isinstance` reads.
    return any(
        has_type(v, torch.Tensor) and not isinstance(v, others) for v, _ in walk_containers(value)
    )


def _holds_state(value: Any) -> bool:
    """True for a tensor, a module or an optimizer, and for a container with one."""
    kinds = (torch.Tensor, nn.Module, Optimizer)
    return any(has_type(v, kinds) for v, _ in walk_containers(value))


def _may_hold_tensors(value: Any) -> bool:
    """True if the search looks into `value`. It does not look into functions and classes."""
    if has_type(value, (*_SIMPLE, type, types.ModuleType)):
        return False
    return has_type(value, (nn.Module, functools.partial)) or not callable(value)


def _is_of_run(value: Any) -> bool:
    """True if `value` was made in a capture run, so that it holds fakes."""
    if has_type(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    elif has_type(value, Optimizer):
        value = [group["params"] for group in value.param_groups]
    return any(has_type(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))
