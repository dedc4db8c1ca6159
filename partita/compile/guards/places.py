"""Places: where a value that a step reads stands, with the means to read and write it again.

A place has a home and a key, which identify it, and a name for messages. There is a constructor for
each kind: entries of dictionaries, items, cells, slots, attributes of classes, settings. An
attribute of an object may stand in its `__dict__`, in a slot, in a dictionary of an nn.Module, or
in a class; those of tensors, and their hooks, are compared for all tensors at once.

    Place("cfg.scale", vars(cfg), "scale").value    what `cfg.scale` is now
"""

from __future__ import annotations

import collections
import contextvars
import enum
import gc
import io
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from operator import is_
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.tensor.tensor_state import OURS

from ..capture.fakes import Substitutes
from .codes import is_user_module
from .values import MISSING, PLAIN


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


def _writer(put: Callable[[Any], object], delete: Callable[[], object]) -> Callable[[Any], object]:
    """A function that writes a value by `put`; where it is MISSING, calls `delete`."""
    return lambda value: delete() if value is MISSING else put(value)


def place_of_cell(name: str, where: types.CellType) -> Place:
    """A closure cell."""
    at = where, "cell_contents"
    put = _writer(partial(setattr, *at), partial(delattr, *at))
    return Place(name, where, 0, partial(cell_content, where, MISSING), put)


def place_of_slot(name: str, owner: Any, descriptor: Any) -> Place:
    """An attribute in a `__slots__`."""

    def get_slot() -> Any:
        try:
            return descriptor.__get__(owner, type(owner))
        except AttributeError:
            return MISSING

    put = _writer(partial(descriptor.__set__, owner), partial(descriptor.__delete__, owner))
    return Place(name, owner, descriptor.__name__, get_slot, put)


def place_of_class_attribute(kind: type, key: str) -> Place:
    """An attribute of a class or its bases, as it stands there (descriptors are not called)."""

    def get_class_attribute() -> Any:
        return next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), MISSING)

    put = _writer(partial(type.__setattr__, kind, key), partial(type.__delattr__, kind, key))
    return Place(f"{kind.__name__}.{key}", kind, key, get_class_attribute, put)


_OF_TENSOR: dict[str, Any] = gc.get_referents(vars(torch.Tensor))[0]


def place_of_tensor_attribute(key: str) -> Place:
    """An attribute of torch.Tensor, as a method, which a program may replace."""
    at = torch.Tensor, key
    put = _writer(partial(setattr, *at), partial(delattr, *at))
    return Place(f"torch.Tensor.{key}", _OF_TENSOR, key, None, put)


def place_of_special_attribute(name: str, owner: Any, key: str) -> Place:
    """An attribute of a function or class that stands in no dictionary: its code, its defaults."""
    return Place(name, owner, key, partial(getattr, owner, key, MISSING))


def place_of_dict(name: str, owner: Any) -> Place:
    """The `__dict__` of an object, which stands for all of its attributes."""
    return Place(name, owner, "__dict__", partial(dict_of, owner))


def place_of_context_variable(name: str, variable: contextvars.ContextVar[Any]) -> Place:
    """The value of a context variable."""

    def get_context_variable() -> Any:
        try:
            return variable.get()  # without an argument, which would override its default
        except LookupError:
            return MISSING

    return Place(name, variable, "value", get_context_variable, variable.set)


def place_of_answer(name: str, function: Callable[[], Any], about: Any = None) -> Place:
    """The answer of a function without arguments (one about `about`): a setting of torch, say."""
    return Place(name, function if about is None else about, "()", function)


def place_of_log_level(name: str, logger: logging.Logger) -> Place:
    """What a logger lets through: by its own level, its parents' and the global one."""

    def get_logger_level() -> tuple[int, bool, int]:
        return logger.manager.disable, logger.disabled, logger.getEffectiveLevel()

    return place_of_answer(f"the level of {name}", get_logger_level, logger)


def place_of_hidden_builtin(variables: dict[str, Any], name: str) -> Place:
    """A global that hides a builtin; a stand-in that capture has put there counts as none."""

    def get_hiding_variable() -> Any:
        found = variables.get(name, MISSING)
        return MISSING if Substitutes.has(found) else found

    return Place(name, variables, name, get_hiding_variable)


# -- attributes of objects -------------------------------------------------------------------------

_OF_TORCH = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# Modules of Python whose objects hold no settings, or have guards of another kind.
_WITHOUT_SETTINGS = frozenset(
    """abc ast asyncio builtins contextlib contextvars copyreg decimal datetime dis enum fractions
    functools importlib inspect io numbers operator os pathlib pdb random re runpy traceback typing
    unittest uuid warnings weakref""".split()
)
WITH_FIELDS = ("__dataclass_fields__",)  # special names that are guarded like other attributes
INSIDE = ("_parameters", "_buffers", "_modules")  # dictionaries of an nn.Module


@lru_cache(maxsize=1024)
def names_of_class(kind: type) -> frozenset[str]:
    """The names that a class and its bases have now. (New ones change their number.)"""
    return frozenset().union(*(vars(base) for base in kind.__mro__ if base is not object))


def variables_of(space: Any) -> dict[str, Any]:
    """The variables of a namespace: a dictionary of globals, or what has a `__dict__`."""
    return space if isinstance(space, dict) else vars(space)


def dict_of(value: Any) -> Any:
    """The `__dict__` of an object, past its `__getattribute__`; None where it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def find_module_dict(owner: Any, name: str) -> Any:
    """The dictionary of parameters, buffers or modules of an nn.Module that has a name, or None."""
    if isinstance(owner, nn.Module):
        held = dict_of(owner)
        for within in INSIDE:
            if name in held.get(within, ()):
                return held[within]
    return None


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the `__slots__` of a class, by name."""
    return {
        key: value
        for base in reversed(kind.__mro__)
        if is_user_module(base.__module__)
        or base.__module__.startswith(("collections", "dataclasses"))
        for key, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }


def may_be_hidden(name: str, found: Any) -> bool:
    """May an attribute `found` in a class come to be hidden by one of the object itself?"""
    if name.startswith("__") and name.endswith("__"):
        return False
    if hasattr(type(found), "__set__"):  # a data descriptor, as a property, comes first
        return False
    return not (name != "forward" and vars(nn.Module).get(name, MISSING) is found is not MISSING)


def has_settings(kind: type) -> bool:
    """Are the attributes of the instances of a class guarded?"""
    if issubclass(kind, _OF_TORCH):
        return True
    root = kind.__module__.split(".")[0]
    if root == "torch":
        return kind.__module__.startswith(("torch.optim", "torch.amp", "torch.nn"))
    pythons = root in sys.stdlib_module_names and not root.startswith("_")
    return is_user_module(root) or (pythons and root not in _WITHOUT_SETTINGS)


def may_have_attributes(value: Any) -> bool:
    """Is a plain value of a class of the user's (or an enum), which may have attributes?"""
    kind = type(value)
    return isinstance(value, enum.Enum) or (kind not in PLAIN and is_user_module(kind.__module__))


def is_iterator(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and not isinstance(value, (io.IOBase, nn.Module))


def cell_content(where: types.CellType, otherwise: Any = None) -> Any:
    """The content of a closure cell; `otherwise` where nothing was assigned to it yet."""
    try:
        return where.cell_contents
    except ValueError:
        return otherwise


def runs_in_frame(f: types.FunctionType, frame: FrameType) -> bool:
    """Does the frame run `f`, as far as the variables of its closure tell?"""
    local = frame.f_locals
    pairs = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return all(cell_content(where) is local.get(key) for key, where in pairs)


# -- attributes and hooks of tensors ---------------------------------------------------------------

# Attributes that partita sets, and that torch sets on a parameter.
OWN_ATTRIBUTES = OURS | {"_is_param"}

_ATTRIBUTES, _HOOKS = "attributes", "hooks"

# Private torch: the dictionaries of a tensor's hooks, which no public function returns.
_base: Any = torch._C.TensorBase
_hooks_of_backward = _base._backward_hooks.__get__
_hooks_of_gradient = _base._post_accumulate_grad_hooks.__get__


def user_attributes_of(t: torch.Tensor) -> tuple[str, ...]:
    """The names of the attributes that a program has set on a tensor, as `_no_weight_decay`."""
    return _names_of_user(tuple(t.__dict__))


@lru_cache(maxsize=4096)  # most tensors have the attributes of others
def _names_of_user(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([n for n in names if n not in OWN_ATTRIBUTES and not n.startswith("_dynamo")])


def user_hooks_of(t: torch.Tensor) -> tuple[Any, ...]:
    """The hooks that the user has registered on a tensor, and on its gradient's accumulation."""
    with Local():
        one, other = _hooks_of_backward(t), _hooks_of_gradient(t)
    if not one and not other:
        return ()
    return (*_users_hooks(one), *_users_hooks(other))


def hang_hooks(tensor: torch.Tensor, fake: torch.Tensor) -> list[Any]:
    """Register the user's hooks of a leaf on its fake, so that they are traced; the handles."""
    if not tensor.is_leaf:  # autograd calls them outside the graph, when it goes on from there
        return []
    found = [fake.register_hook(hook) for hook in _users_hooks(tensor._backward_hooks)]
    for hook in _users_hooks(getattr(tensor, "_post_accumulate_grad_hooks", None)):
        found.append(fake.register_post_accumulate_grad_hook(hook))
    return found


def _users_hooks(hooks: Any) -> list[Any]:
    """The hooks that are not partita's own, which do in eager what the graph does by itself."""
    found = [getattr(hook, "hook", hook) for hook in (hooks or {}).values()]
    return [h for h in found if not str(getattr(h, "__module__", "")).startswith("partita.")]


def places_of_attributes_and_hooks(name: str, t: torch.Tensor) -> Iterator[Place]:
    """The places of the attributes and of the hooks of the tensor that is called `name`."""
    attributes = partial(user_attributes_of, t)
    yield Place(f"the attributes of {name}", t, _ATTRIBUTES, attributes)
    if t.is_leaf and t.requires_grad:
        yield Place(f"the hooks of {name}", t, _HOOKS, partial(user_hooks_of, t))


def is_attributes_or_hooks(place: Place) -> bool:
    """Is it one of the places of `places_of_attributes_and_hooks`?"""
    return isinstance(place.home, torch.Tensor) and place.key in (_ATTRIBUTES, _HOOKS)


class AttributesAndHooks:
    """What torch's dictionaries hold now for some places of attributes and hooks.

    If they hold something else later, the places may have changed: each is then compared itself.
    """

    def __init__(self, places: Sequence[Place]):
        self._attributed = [place.home for place in places if place.key == _ATTRIBUTES]
        self._hooked = [place.home for place in places if place.key == _HOOKS]
        held = [*map(vars, self._attributed)]
        self._counts = [*map(len, held)]
        # Nobody deletes our own attributes, so where all are ours an equal number is the same ones.
        self._others = [t for t in self._attributed if not OWN_ATTRIBUTES.issuperset(vars(t))]
        self._names = [*chain.from_iterable(map(vars, self._others))]
        self._tables = self._tables_now()
        self._sizes, self._hooks = _hooks_in_tables(self._tables)

    def unchanged(self) -> bool:
        """Do torch's dictionaries hold the same?"""
        if [*map(len, map(vars, self._attributed))] != self._counts:
            return False
        if [*chain.from_iterable(map(vars, self._others))] != self._names:
            return False
        tables = self._tables_now()
        if not all(map(is_, tables, self._tables)):
            return False
        sizes, hooks = _hooks_in_tables(tables)
        return sizes == self._sizes and all(map(is_, hooks, self._hooks))

    def _tables_now(self) -> list[Any]:
        with Local():
            return [*map(_hooks_of_backward, self._hooked), *map(_hooks_of_gradient, self._hooked)]


def _hooks_in_tables(tables: Iterable[Any]) -> tuple[list[int], list[Any]]:
    """The number of hooks in each table, and the hooks."""
    there = [table for table in tables if table is not None]
    return [*map(len, there)], [*chain.from_iterable([table.values() for table in there])]
