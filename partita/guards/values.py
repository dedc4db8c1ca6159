"""Values and places: how a guard compares a Python value with the one at capture, and finds it.

`content_key` makes a hashable key of a value. Keys are equal if a program cannot distinguish the
values. Numbers and strings are compared by type and bits (0.0 is not -0.0, True is not 1, NaN is
NaN), containers by their contents, arrays and buffers by their bytes, other objects by identity. A
tensor is an input of the graph. `find_difference` says how two keys differ:

    find_difference(content_key([1, 2]), content_key([1, 3]))    # ("[1]", "2", "3")

A `Place` is where a value is stored: an attribute, a global, an item, a setting. It has a home and
a key, which identify it, a name for messages, and functions that read and write its value.

    Place("cfg.scale", vars(cfg), "scale").value    # the current value of `cfg.scale`
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import decimal
import enum
import functools
import gc
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import is_
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.capture.code_origin import is_user_module
from partita.capture.fakes import Substitutes
from partita.capture.graph_inputs import OWN_ATTRIBUTES
from partita.graph.graph_nodes import ByIdentity
from partita.tensor.dtensor_gradients import (
    hooks_of_backward,
    hooks_of_gradient,
)


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()
"""The value of a place that has no value."""

_BY_REPR = (float, complex)  # whose text has all bits, the sign of a zero too
_BY_EQUALITY = (bool, int, str, bytes, type(None), torch.dtype, torch.device, range)
PLAIN = (*_BY_REPR, *_BY_EQUALITY, slice)
_SIMPLE = frozenset(PLAIN) - {slice}
_DICTS = (dict, types.MappingProxyType)
_SETS = (set, frozenset)
_CONTAINERS = (
    *(list, tuple, collections.deque, *_DICTS, *_SETS),
    *(functools.partial, types.SimpleNamespace),
)
_BASES_OF_CONTAINERS = (collections.OrderedDict, *_CONTAINERS)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)

_T = TypeVar("_T")


def cached_by_type(find: Callable[[type], _T]) -> Callable[[type], _T]:
    """Returns `find` with a cache that does not keep types alive.

    A class that is defined in a function may keep its closure alive, and so a whole model.
    """
    known: dict[int, _T] = {}
    alive: dict[int, Any] = {}

    def find_cached(kind: type) -> _T:
        at = id(kind)
        if at not in known:
            known[at] = find(kind)
            alive[at] = weakref.ref(kind, lambda _: (known.pop(at), alive.pop(at)))
        return known[at]

    return find_cached


# -- keys ------------------------------------------------------------------------------------------


class ByType(ByIdentity):
    """The comparison key of a number that is a graph input: its index and type, not its value."""

    def __init__(self, value: Any, number: int):
        super().__init__(value)
        self.number = number

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByType) or other.number != self.number:
            return False
        return type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class LeafKey(NamedTuple):
    """The comparison key of a tensor that is a graph input.

    Attributes:
        number: its index among the leaves (tensors and numbers) of the call.
    """

    number: int


class ContainerKey(NamedTuple):
    """The comparison key of a container.

    Attributes:
        kind: the container's type.
        keys: the container's keys; None for lists and tuples.
        parts: the comparison keys of its items, or of its values.
        own: the comparison key of the container's attributes, and its identity if the program
            writes it.
    """

    kind: type
    keys: tuple[Any, ...] | frozenset[Any] | None
    parts: tuple[Any, ...]
    own: Any = None


class EntriesKey:
    """The key of a container with more than `HUGE` entries, compared by identity or bits."""

    def __init__(self, value: Any):
        self.kind = type(value)
        self.keys, self.values = items_of(value)

    def expand(self) -> ContainerKey:
        """Returns a key with one part for each entry, to find the entry that differs."""
        parts = tuple(map(_key_of_entry, self.values))
        return ContainerKey(self.kind, _keys_of_members(self.kind, self.keys), parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EntriesKey):
            return False
        mine, others = (k.values if k.keys is None else k.keys + k.values for k in (self, other))
        if self.kind is other.kind and len(mine) == len(others) and all(map(is_, mine, others)):
            return True
        return self.expand() == other.expand()

    def __hash__(self) -> int:
        return hash((self.kind, len(self.values)))


def _key_of_entry(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_key_of_entry, value))
    is_known = type(value) in PLAIN or has_type(value, torch.Tensor)
    return content_key(value) if is_known else ByIdentity(value)


def key_of_member(key: Any, by_fields: bool = False) -> Any:
    """Returns the comparison key of a dictionary's key or a set's member; calls no `__eq__`.

    Args:
        by_fields: True compares dataclasses by their fields.
    """
    if type(key) in PLAIN:
        return content_key(key)
    if type(key) is tuple:
        return tuple([key_of_member(part, by_fields) for part in key])
    if has_type(key, torch.Tensor):
        return ByIdentity(key)
    return ContentWalk(by_fields).make_key(key)


def key_of_argument_key(key: Any) -> Any:
    """Returns the comparison key of a dictionary's key in the arguments of a call.

    An object of a user's class is compared by its attributes, because each call may make a new one.
    """
    if type(key) in PLAIN or has_type(key, (type, types.FunctionType, types.ModuleType)):
        return key_of_member(key)
    if _sort_of_type(type(key)) != "object" or dataclasses.is_dataclass(type(key)):
        return key_of_member(key, by_fields=True)
    fields = {name: read_field(key, name) for name in slots_of(type(key))}
    return (type(key), key_by_fields({**(dict_of(key) or {}), **fields}))


def _keys_of_members(kind: type, keys: list[Any] | None, by_fields: bool = False) -> Any:
    if keys is None:
        return None
    found = [key_of_member(key, by_fields) for key in keys]
    return frozenset(found) if issubclass(kind, _SETS) else tuple(found)


def argument_key(value: Any) -> Any:
    """Returns the comparison key of a non-tensor argument. For a float it is only the type.

    Floats are inputs of the graph, so their values do not matter.
    """
    if isinstance(value, float):  # branches on it are in the program's conditions
        return (type(value),)
    return key_by_fields(value)


def key_by_fields(value: Any) -> Any:
    """Returns the comparison key of `value`: dataclasses by their fields, tensors by identity."""
    return content_key(value) if type(value) in PLAIN else ContentWalk(True).make_key(value)


def content_key(value: Any, walk: ContentWalk | None = None) -> Any:
    """Returns a hashable key of `value`, to compare it later with the key at capture.

    Keys are equal if a program cannot distinguish the values.

    Args:
        walk: the walk of the object that contains the value; None for a new one. The key of a
            number always has its value, even if `walk.numbers` has the number.
    """
    kind = type(value)
    if kind in _BY_REPR:
        return (kind, repr(value))
    if kind in _BY_EQUALITY:
        return (kind, value)
    if kind is slice:
        return (kind, *[content_key(v, walk) for v in (value.start, value.stop, value.step)])
    return (ContentWalk() if walk is None else walk).make_key(value)


@dataclass
class ContentWalk:
    """Makes comparison keys of nested values, in which an object may occur several times.

    Attributes:
        by_fields: True for a stricter comparison: dataclasses by their fields, tensors by identity.
            Two equal objects also differ from one object that occurs twice.
        numbers: maps the identity of a number's place to the number's index as a graph input.
        leaves: maps the id of each tensor to its first index among the leaves (tensors and numbers)
            of the call.
        huge: maps the ids of containers whose entries are compared by identity to the containers.
        written: the ids of containers that the program writes. They are compared by identity, too.
        changeable: (object, key) for each visit of an object that may change in place.
        shared: the ids of changeable objects that were visited more than once.
        others: the ids of visited tensors that are not leaves.
        compared: the ids of all visited values, except number inputs, bools and None; None if not
            needed.
    """

    by_fields: bool = False
    numbers: Mapping[tuple[int, Any], int] = field(default_factory=dict)
    leaves: Mapping[int, int] = field(default_factory=dict)
    huge: Mapping[int, Any] = field(default_factory=dict)
    written: Set[int] = frozenset()
    changeable: list[tuple[Any, Any]] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    others: list[int] = field(default_factory=list)
    compared: list[int] | None = None
    # By id: values whose visit has not ended, with their numbers; and visited values, with their
    # keys, whether they are changeable, and what their visit added to `others` and `compared`.
    _open: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _met: dict[int, tuple[Any, Any, bool, list[int], list[int]]] = field(default_factory=dict)

    def make_key(self, value: Any) -> Any:
        """Returns the comparison key of a value that is not of a plain type such as int or str."""
        kind: type = type(value)
        sort = _sort_of_type(kind)
        if sort == "object" and not self.by_fields:
            return (kind, ByIdentity(value))
        if sort == "tensor":
            if self.by_fields:
                return (kind, ByIdentity(value))
            at = self.leaves.get(id(value))
            if at is not None:
                return LeafKey(at)
            self.others.append(id(value))
            return torch.Tensor
        if id(value) in self._open:  # it holds itself, or `by_fields` and something holds it twice
            key = (_MET, self._open[id(value)][1])
            self.changeable.append((value, key))  # so that what holds it counts as changeable
            return key
        if id(value) in self._met:
            _, key, parts, others, compared = self._met[id(value)]
            self.others += others
            if self.compared is not None:
                self.compared += compared
            if parts:
                self.shared.add(id(value))
                self.changeable.append((value, key))
            return key
        if sort in ("container", "raw") or (sort == "object" and dataclasses.is_dataclass(kind)):
            self._open[id(value)] = value, len(self._open)
            before, others_before = len(self.changeable), len(self.others)
            compared_before = len(self.compared or ())
            key = self._make_changeable_key(value, sort)
            if not issubclass(kind, (tuple, frozenset)) or len(self.changeable) > before:
                self.changeable.append((value, key))
            if not self.by_fields:
                del self._open[id(value)]
                others = self.others[others_before:]
                compared = (self.compared or [])[compared_before:]
                self._met[id(value)] = value, key, len(self.changeable) > before, others, compared
            return key
        if sort == "view" and (under := dict_of_view(value)) is not None:
            return (kind, ByIdentity(value), self.make_key(under))
        if sort == "method" and value.__self__ is not None:
            # Each read makes a new method object; a container's method reads its contents.
            owner, function = value.__self__, getattr(value, "__func__", None)
            holds = is_container(owner) or has_raw_content(owner)
            held = self.make_key(owner) if holds else None
            return (kind, value.__name__, ByIdentity(owner), ByIdentity(function), held)
        return (kind, repr(value) if sort == "value" else ByIdentity(value))

    def make_part(self, value: Any, home: Any, key: Any) -> Any:
        """Returns the comparison key of `value`, which is inside another value.

        Args:
            home, key: the container, and the key or index of `value` in it.
        """
        number = self.numbers.get((id(home), key)) if self.numbers else None
        if number is not None:
            return ByType(value, number)
        if self.compared is not None and type(value) not in (bool, types.NoneType):
            self.compared.append(id(value))
        return content_key(value, self)

    def _make_changeable_key(self, value: Any, sort: str) -> Any:
        """Returns the key of a container, a dataclass, or an array or similar object."""
        if id(value) in self.huge:
            return EntriesKey(value)
        if sort == "raw":
            return (type(value), read_raw_content(value))
        if sort == "object":
            keys: Any = [f.name for f in dataclasses.fields(value)]
            values = [read_field(value, key) for key in keys]
        else:
            keys, values = items_of(value)
        is_namespace = has_type(value, types.SimpleNamespace)
        home = dict_of(value) if is_namespace else value
        places = range(len(values)) if keys is None else keys
        # A set has keys alone.
        parts = [self.make_part(v, home, key) for key, v in zip(places, values, strict=False)]
        own = self._key_of_attributes(value)
        if id(home) in self.written:
            own = (own, ByIdentity(home))
        members = _keys_of_members(type(value), keys, self.by_fields)
        if self.compared is not None and keys:
            ids = [id(key) for key in keys if type(key) not in PLAIN]
            self.compared += sorted(ids) if issubclass(type(value), _SETS) else ids
        return ContainerKey(type(value), members, tuple(parts), own)

    def _key_of_attributes(self, value: Any) -> Any:
        """Returns the key of the attributes of a container with a user's class."""
        if not is_user_module(type(value).__module__):
            return None
        held = dict_of(value)
        if not held:
            return None
        return tuple([(key, self.make_part(v, held, key)) for key, v in held.items()])


def read_field(value: Any, key: str) -> Any:
    """Returns the attribute `key` of the object `value` without calling a user's `__getattr__`.

    Returns MISSING if the object does not have it.
    """
    try:
        return object.__getattribute__(value, key)
    except AttributeError:
        return MISSING


_MET = "met before"


def forget_leaves(key: Any) -> Any:
    """Returns a copy of the comparison key `key` in which all tensors count as equal."""
    if isinstance(key, LeafKey):
        return torch.Tensor
    if isinstance(key, ContainerKey):
        return ContainerKey(key.kind, key.keys, *map(forget_leaves, (key.parts, key.own)))
    return tuple(map(forget_leaves, key)) if type(key) is tuple else key


def find_last_leaf(key: Any) -> int:
    """Returns the highest index of a leaf (tensor of the call) in the comparison key; else -1."""
    if isinstance(key, LeafKey):
        return key.number
    return max(map(find_last_leaf, key), default=-1) if isinstance(key, tuple) else -1


HUGE = 100_000  # the most entries of a container whose entries are compared by content


def is_deeply_immutable(value: Any) -> bool:
    """True if nothing inside a value can change in place: all of it is immutable, or tensors."""
    if type(value) is tuple:
        return all(map(is_deeply_immutable, value))
    return type(value) in PLAIN or has_type(value, (torch.Tensor, enum.Enum))


def has_type(value: Any, kinds: Any) -> bool:
    """True if the class of `value` is, or inherits from, `kinds` (a class or a tuple of classes).

    Unlike `isinstance`, it runs no code of the user (a `__class__` property).
    """
    return issubclass(type(value), kinds)


def base_of_container(value: Any) -> Any:
    """Returns the builtin class, such as dict, from which the class of a container is derived.

    Its methods, called as `base.__getitem__(x, key)`, run no override in the user's class.
    """
    kind: type = type(value)
    return _find_base(kind)[0]


def reads_like_base(value: Any) -> bool:
    """True if the class of a container reads items as its builtin base (such as dict) does."""
    kind: type = type(value)
    return _find_base(kind)[1]


@cached_by_type
def _find_base(kind: type) -> tuple[Any, bool]:
    base = next(base for base in _BASES_OF_CONTAINERS if issubclass(kind, base))
    names = ("__len__", "__iter__", "__bool__", "__getitem__", "__setitem__", "__missing__")
    return base, all(getattr(kind, name, None) is getattr(base, name, None) for name in names)


def items_of(value: Any) -> tuple[list[Any] | None, list[Any]]:
    """Returns the keys and the values of the container `value`, as two lists.

    The keys are None for lists and similar containers. A set has keys and no values.
    """
    base = base_of_container(value)
    if base is types.MappingProxyType:
        under = gc.get_referents(value)[0]  # which may be a mapping of the user's
        return items_of(under) if is_container(under) else (None, [under])
    if issubclass(base, dict):
        return list(base.__iter__(value)), list(base.values(value))
    if base in _SETS:
        return list(base.__iter__(value)), []
    if base is functools.partial:
        held = dict_of(value)
        own = [read_field(value, key) for key in ("func", "args", "keywords")]
        return ["func", "args", "keywords", *held], [*own, *held.values()]
    if base is types.SimpleNamespace:
        return list(dict_of(value)), list(dict_of(value).values())
    return None, list(base.__iter__(value))


def walk_containers(value: Any, name: str = "") -> Iterator[tuple[Any, str]]:
    """Yields (value, path) of the values in nested containers, except containers and plain values.

    The path leads to the value, such as "x['a'][0]" if `name` is "x". Items of sets, keys, and
    containers with more than `HUGE` items are skipped.
    """
    ahead, seen = [(value, name)], set[int]()
    while ahead:
        value, name = ahead.pop()
        if has_type(value, slice):
            held = value.start, value.stop, value.step
            ahead += [(v, f"a bound of {name}") for v in held]
        elif is_container(value):
            if id(value) not in seen and count_items(value) <= HUGE:
                seen.add(id(value))
                keys, values = items_of(value)
                named = zip(range(len(values)) if keys is None else keys, values, strict=False)
                ahead += [(v, f"{name}[{k!r}]") for k, v in named if type(v) not in _SIMPLE]
        elif type(value) not in _SIMPLE:
            yield value, name


def count_items(value: Any) -> int:
    """Returns the number of items of the container `value`; 0 if it has no length (a namespace)."""
    base = base_of_container(value)
    return int(base.__len__(value)) if hasattr(base, "__len__") else 0


def is_container(value: Any) -> bool:
    """True if guards compare `value` by its contents: a list, dict, set or similar object."""
    kind: type = type(value)
    return _sort_of_type(kind) == "container"


@cached_by_type
def _sort_of_type(kind: type) -> str:
    """Returns how values of a type are compared.

    One of "container", "raw", "view", "method", "value", "tensor", "object".
    """
    if issubclass(kind, torch.Tensor):
        return "tensor"
    if issubclass(kind, _CONTAINERS) and not issubclass(kind, nn.Module):
        return "container"
    if _has_raw_content(kind):
        return "raw"
    if issubclass(kind, _VIEWS):
        return "view"
    if issubclass(kind, _METHODS):
        return "method"
    # An immutable value with `==`: of numpy, a path, a fraction, a date, a UUID.
    root = kind.__module__.split(".")[0]
    of_numpy = root == "numpy" and (hasattr(kind, "tobytes") or kind.__name__.endswith("DType"))
    is_value = of_numpy or root in ("pathlib", "fractions", "decimal", "datetime", "uuid")
    return "value" if is_value else "object"


# -- differences -----------------------------------------------------------------------------------


def find_difference(was: Any, now: Any) -> tuple[str, str, str] | None:
    """Returns the first difference between two comparison keys, or None if they are equal.

    Args:
        was, now: the key at capture, and the key now.

    Returns:
        The path to the difference, such as "['k'][0]", and the text of both values.
    """
    if was == now:
        return None
    if isinstance(was, EntriesKey) and isinstance(now, EntriesKey):
        was, now = was.expand(), now.expand()
    if isinstance(was, ContainerKey) and isinstance(now, ContainerKey) and was.kind is now.kind:
        if was.keys != now.keys:
            return _find_other_key(was.keys or (), now.keys or ())
        if len(was.parts) == len(now.parts):
            keys: Any = range(len(was.parts)) if was.keys is None else was.keys
            for key, before, after in zip(keys, was.parts, now.parts, strict=True):
                if (found := find_difference(before, after)) is not None:
                    at = key if was.keys is None else _text_of_key(key)
                    return (f"[{at}]{found[0]}", found[1], found[2])
    before, after = _text_of_key(was), _text_of_key(now)
    return ("", before, f"another {after.removeprefix('a ')}" if after == before else after)


def _find_other_key(was: Any, now: Any) -> tuple[str, str, str]:
    before, after = {*was}, {*now}
    for key in was:
        if key not in after:
            return (f"[{_text_of_key(key)}]", "there", "gone")
    for key in now:
        if key not in before:
            return (f"[{_text_of_key(key)}]", "not there", "there")
    return ("", "in one order", "in another")


def _text_of_key(key: Any) -> str:
    """Returns the text of a value with this key, in at most 60 characters."""
    if isinstance(key, EntriesKey):
        key = key.expand()
    if isinstance(key, ByIdentity):
        return brief(key.value)
    if isinstance(key, ContainerKey):
        return f"a {key.kind.__name__} of {len(key.parts) or len(key.keys or ())}"
    if key is torch.Tensor or isinstance(key, LeafKey):
        return "a tensor"
    if not isinstance(key, tuple):
        return str(key)
    if not key or not isinstance(key[0], type):
        return shorten_text(f"({', '.join(map(_text_of_key, key))})")
    kind, content = key[0], key[-1]
    if kind in _BY_REPR:
        return str(content)
    if kind is slice:
        return f"slice({', '.join(map(_text_of_key, key[1:]))})"
    if kind in _METHODS:
        return f"a method {key[1]}"
    if isinstance(content, ByIdentity):
        return brief(content.value)
    if isinstance(content, kind):
        return shorten_text(repr(content))
    # The key of a path, a date or a numpy number contains its text.
    return shorten_text(content) if _sort_of_type(kind) == "value" else f"a {kind.__name__}"


def brief(value: Any) -> str:
    """Returns the text of `value` for messages, in at most 60 characters."""
    if value is MISSING:
        return "nothing"
    kind: type = type(value)
    if issubclass(kind, torch.Tensor):
        return "a tensor"
    if issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType)):
        return shorten_text(getattr(value, "__qualname__", repr(value)))
    if issubclass(kind, PLAIN):
        return shorten_text(repr(value))
    has_length = is_container(value) and hasattr(base_of_container(value), "__len__")
    size = f" of {count_items(value)}" if has_length else ""
    return shorten_text(f"a {type(value).__name__}{size}")


def shorten_text(text: str) -> str:
    """Returns `text` in at most 60 characters: a longer text loses its middle."""
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


def text_of(value: Any) -> str:
    """Returns the text of `value`, an argument of the step, for messages."""
    if isinstance(value, str):
        return repr(value)
    # `str` of objects that refer to one another grows with the number of paths between them.
    key = argument_key(value)
    return str(key) if _has_met(key) else str(value)


def _has_met(key: Any) -> bool:
    return isinstance(key, tuple) and (key[:1] == (_MET,) or any(map(_has_met, key[1:])))


# -- objects implemented in C ----------------------------------------------------------------------

_BUFFERS = (bytearray, memoryview)
_FILES = (io.StringIO, io.BytesIO)
_ORDERED: Any = collections.OrderedDict()
_VIEWS = tuple(
    type(view())
    for empty in (dict[Any, Any](), _ORDERED)
    for view in (empty.keys, empty.values, empty.items)
)


def has_raw_content(value: Any) -> bool:
    """True if `value` is an object implemented in C whose content guards compare.

    It is an array, a buffer, a file in memory or a decimal context.
    """
    kind: type = type(value)
    return _sort_of_type(kind) == "raw"


def _has_raw_content(kind: type) -> bool:
    if issubclass(kind, (*_BUFFERS, *_FILES, decimal.Context)):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return True
    if kind.__module__ == "array":
        return kind.__name__ == "array"
    is_of_ctypes = any(base.__module__ == "_ctypes" for base in kind.__mro__)
    return is_of_ctypes and not (issubclass(kind, type) or _is_shared_memory(kind))


def is_shared_memory(value: Any) -> bool:
    """True if `value` is memory that other programs may write (`mmap`), or a ctypes pointer."""
    return _is_shared_memory(type(value))


def _is_shared_memory(kind: type) -> bool:
    kinds = [(base.__module__, base.__name__) for base in kind.__mro__]
    return ("mmap", "mmap") in kinds or ("_ctypes", "_Pointer") in kinds


def read_raw_content(value: Any) -> Any:
    """Returns the content of an array, buffer or similar object, to be compared by `==` later."""
    if isinstance(value, _FILES):
        return "closed" if value.closed else (value.getvalue(), value.tell())
    if isinstance(value, decimal.Context):
        return repr(value)
    if hasattr(value, "dtype"):
        shape, flags = value.shape, value.flags.writeable
        if value.dtype.hasobject:
            return shape, flags, repr(value.tolist())
        return shape, flags, str(value.dtype), value.tobytes()
    view = memoryview(value)
    return view.shape, view.format, view.tobytes()


def copy_raw_content(value: Any) -> Any:
    """Returns a copy of the content of an array, buffer or similar object; None for a closed file.

    `restore_raw_content` writes it back.
    """
    if isinstance(value, _FILES):
        return None if value.closed else value.__getstate__()  # type: ignore[union-attr]
    if isinstance(value, decimal.Context) or hasattr(value, "dtype"):
        return value.copy()
    return value[:] if _is_of_items(value) else bytes(value)


def restore_raw_content(value: Any, copy: Any) -> None:
    """Writes `copy`, the result of `copy_raw_content(value)`, back into `value`."""
    if isinstance(value, _FILES):
        if copy is not None and not value.closed:  # it cannot be opened again
            value.__setstate__(copy)  # type: ignore[union-attr]
    elif isinstance(value, decimal.Context):
        for key in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "flags", "traps"):
            setattr(value, key, getattr(copy, key))
    elif hasattr(value, "dtype"):
        if value.shape != copy.shape:
            value.resize(copy.shape, refcheck=False)
        value[...] = copy
    elif _is_of_items(value):
        value[:] = copy
    elif not memoryview(value).readonly:
        memoryview(value).cast("B")[:] = copy


def _is_of_items(value: Any) -> bool:
    """True for a `bytearray` or an `array`, which may change its length."""
    return isinstance(value, bytearray) or type(value).__module__ == "array"


def dict_of_view(value: Any) -> Any:
    """Returns the dictionary that `value` is a view of, such as `d` for `d.keys()`.

    Returns None for other objects.
    """
    if not has_type(value, _VIEWS):
        return None
    found = gc.get_referents(value)
    return found[0] if found and has_type(found[0], dict) else None


# -- places ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is stored that a step reads: an attribute, a global, an item or a setting.

    Attributes:
        name: the name in messages, such as "cfg.scale".
        home, key: the object and the key that identify the place. For an entry of a dictionary, the
            value is `home[key]`.
        get: a function that returns the value, or MISSING if there is none. It is None for entries
            of dictionaries, which guards read all at once.
        put: a function that writes the value. It is None if the value cannot be written, and for
            entries of dictionaries.
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
        """Writes `value` into this place; MISSING deletes the current value."""
        if self.put is not None:
            self.put(value)
        elif value is MISSING:
            base_of_container(self.home).pop(self.home, self.key, None)
        else:
            base_of_container(self.home).__setitem__(self.home, self.key, value)


def _writer(put: Callable[[Any], object], delete: Callable[[], object]) -> Callable[[Any], object]:
    """Returns a function that writes a value by `put`, and calls `delete` for MISSING."""
    return lambda value: delete() if value is MISSING else put(value)


def _write_attribute(owner: Any, key: str, value: Any) -> None:
    """Sets an attribute of an object or class; deletes it if `value` is MISSING."""
    if value is not MISSING:
        setattr(owner, key, value)
    elif key in dict_of(owner):
        delattr(owner, key)


def place_of_cell(name: str, where: types.CellType) -> Place:
    """Returns the `Place` of the variable in the closure cell `where`."""
    at = where, "cell_contents"
    put = _writer(partial(setattr, *at), partial(delattr, *at))
    return Place(name, where, 0, partial(cell_content, where, MISSING), put)


def place_of_slot(name: str, owner: Any, descriptor: Any) -> Place:
    """Returns the `Place` of an attribute of `owner` that is stored in `__slots__`.

    Args:
        name: the attribute's name in messages.
        descriptor: the descriptor of the attribute, from the class.
    """

    def get_slot() -> Any:
        try:
            return descriptor.__get__(owner, type(owner))
        except AttributeError:
            return MISSING

    put = _writer(partial(descriptor.__set__, owner), partial(descriptor.__delete__, owner))
    return Place(name, owner, descriptor.__name__, get_slot, put)


def place_of_class_attribute(kind: type, key: str) -> Place:
    """Returns the `Place` of the attribute `key` of the class `kind` or its bases.

    Descriptors (such as a property) are read themselves and not called.
    """

    def get_class_attribute() -> Any:
        for base in kind.__mro__:  # not by a generator, which takes longer
            if key in base.__dict__:
                return base.__dict__[key]
        return MISSING

    put = partial(_write_attribute, kind, key)
    return Place(f"{kind.__name__}.{key}", kind, key, get_class_attribute, put)


def place_in_namespace(name: str, space: Any, key: str) -> Place:
    """Returns the `Place` of an attribute that `space` itself stores, and does not inherit.

    Args:
        name, key: the attribute's name in messages, and in `space`.
        space: a class, a module, a function, or the dict of one of these.
    """
    if type(space) is dict:
        return Place(name, space, key)
    home = space if isinstance(space, type) else dict_of(space)

    def get_attribute() -> Any:
        return dict_of(space).get(key, MISSING)

    return Place(name, home, key, get_attribute, partial(_write_attribute, space, key))


_OF_TENSOR: dict[str, Any] = gc.get_referents(vars(torch.Tensor))[0]


def place_of_tensor_attribute(key: str) -> Place:
    """Returns the `Place` of the attribute `key` of torch.Tensor, which users may replace."""
    at = torch.Tensor, key
    put = _writer(partial(setattr, *at), partial(delattr, *at))
    return Place(f"torch.Tensor.{key}", _OF_TENSOR, key, None, put)


def place_of_special_attribute(name: str, owner: Any, key: str) -> Place:
    """Returns the `Place` of a special attribute of a function or class, such as `__code__`.

    Args:
        name: the attribute's name in messages.
        owner, key: the function or class, and the attribute's name in it.
    """
    put = _writer(partial(setattr, owner, key), partial(delattr, owner, key))
    return Place(name, owner, key, partial(getattr, owner, key, MISSING), put)


def place_of_dict(name: str, owner: Any) -> Place:
    """Returns the `Place` of the `__dict__` of `owner`, for code that reads all attributes."""
    put = partial(object.__setattr__, owner, "__dict__")
    return Place(name, owner, "__dict__", partial(dict_of, owner), put)


def place_of_context_variable(name: str, variable: contextvars.ContextVar[Any]) -> Place:
    """Returns the `Place` of the value of a `contextvars.ContextVar`."""

    def get_context_variable() -> Any:
        try:
            return variable.get()  # without an argument, which would override its default
        except LookupError:
            return MISSING

    return Place(name, variable, "value", get_context_variable, variable.set)


def place_of_answer(name: str, function: Callable[[], Any], about: Any = None) -> Place:
    """Returns the `Place` of a setting whose value is the result of `function()`.

    Args:
        name: the setting's name in messages.
        about: an object that identifies the place. By default the function identifies it.
    """
    return Place(name, function if about is None else about, "()", function)


class CacheEpoch:
    """Counts how often an `lru_cache` function has lost results that a captured step may use.

    Call it to get the count, which a guard compares. A result is lost if it is dropped or replaced.
    Call it before the step and after it. From the second call on, it watches the results that the
    step may have used. A full cache may drop a result that the step itself has stored. This does
    not count, unless `cache_clear()` was called.
    """

    def __init__(self, function: Any):
        self._function, self._epoch = function, 0
        self._before: frozenset[Any] | None = None  # the keys
        self._watched: dict[Any, Any] | None = None
        self._calls = self._misses = 0

    def __call__(self) -> int:
        info = self._function.cache_info()
        if self._watched is None:
            found = self._find_results()
            if self._before is None:
                self._before, self._calls = frozenset(found), info.hits + info.misses
            else:
                # Each call moves the entry that it uses to the end of a bounded cache.
                used = len(found) if info.maxsize is None else info.hits + info.misses - self._calls
                first = len(found) - used if 0 <= used < len(found) else 0
                self._watched = dict([*found.items()][first:])
                self._before &= self._watched.keys()
        elif self._watched and not self._has_watched(info.misses < self._misses):
            self._epoch += 1
            self._watched = {}  # the results that the step used are gone
        self._misses = info.misses
        return self._epoch

    def _has_watched(self, is_cleared: bool) -> bool:
        assert self._watched is not None and self._before is not None
        table = _find_table(self._function)
        if self._most == float("inf"):  # it keeps all entries, which are all watched
            now = map(table.get, self._watched, repeat(MISSING))
            if all(map(is_, now, self._watched.values())):
                return True
        there = self._find_results() if any(key in table for key in self._watched) else {}
        for key, value in self._watched.items():
            now = there.get(key, MISSING)
            if now is MISSING:
                if is_cleared or key in self._before or len(table) < self._most:
                    return False
            elif now is not value and not (
                type(value) in PLAIN and content_key(now) == content_key(value)
            ):
                return False
        return True

    @property
    def _most(self) -> float:
        most = self._function.cache_info().maxsize
        return float("inf") if most is None else most

    def _find_results(self) -> dict[Any, Any]:
        """Returns the results by key; for a bounded cache those used last at the end."""
        table = _find_table(self._function)
        if self._most == float("inf") or not table:
            return {**table}
        # Private Python: keys and results in order, each pair followed by the type of its entry.
        held = gc.get_referents(self._function)
        held = held[: next(i for i, value in enumerate(held) if value is table)]
        entry = type(next(iter(table.values())))
        flat = [value for value in held if value is not entry][-2 * len(table) :]
        return dict(zip(flat[::2], flat[1::2], strict=True))


def results_of_cache(function: Any) -> list[Any]:
    """Returns the results that an `lru_cache` function keeps now."""
    return [*CacheEpoch(function)._find_results().values()]


def _find_table(function: Any) -> dict[Any, Any]:
    """Returns the dictionary of an `lru_cache` function: results by key, or entries in C."""
    held = vars(function)
    tables = [d for d in gc.get_referents(function) if type(d) is dict and d is not held]
    return tables[-1]  # the results, which may be dictionaries, come before it


def place_of_log_level(name: str, logger: logging.Logger) -> Place:
    """Returns the `Place` of a logger's effective level.

    It depends on the levels of the logger, its parents and the logging module.
    """

    def get_logger_level() -> tuple[int, bool, int]:
        return logger.manager.disable, logger.disabled, logger.getEffectiveLevel()

    return place_of_answer(f"the level of {name}", get_logger_level, logger)


def place_of_hidden_builtin(variables: dict[str, Any], name: str) -> Place:
    """Returns the `Place` of a global `name` that does not exist now, and would hide a builtin.

    A guard fails if the program defines the global later. The replacements that capture itself puts
    into `variables`, a module's globals, do not count (`Substitutes`).
    """

    def get_hiding_variable() -> Any:
        found = variables.get(name, MISSING)
        return MISSING if Substitutes.has(found) else found

    return Place(name, variables, name, get_hiding_variable)


# -- attributes of objects -------------------------------------------------------------------------

_OF_TORCH = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# Modules of Python whose objects hold no settings, or are guarded in another way.
_WITHOUT_SETTINGS = frozenset(
    """abc ast asyncio builtins contextvars copyreg decimal datetime dis enum fractions
    functools importlib inspect io numbers operator os pathlib pdb random re runpy traceback typing
    uuid warnings weakref""".split()
)
_TORCH_WITH_SETTINGS = tuple(
    f"torch.{name}" for name in ("optim", "amp", "nn", "distributions", "utils.data")
)
WITH_FIELDS = ("__dataclass_fields__",)  # special names that are guarded like other attributes
INSIDE = ("_parameters", "_buffers", "_modules")  # dictionaries of an nn.Module


def names_of_class(kind: type) -> frozenset[str]:
    """Returns the names of all attributes that the class `kind` and its bases define now."""
    counts = [len(vars(base)) for base in kind.__mro__]
    known: Any = _NAMES_OF_CLASSES.get(kind, ([], None))
    if known[0] != counts:
        names = frozenset().union(*(vars(base) for base in kind.__mro__ if base is not object))
        known = _NAMES_OF_CLASSES[kind] = counts, names
    return known[1]  # type: ignore[no-any-return]


_NAMES_OF_CLASSES = weakref.WeakKeyDictionary[type, tuple[list[int], frozenset[str]]]()


def functions_of_descriptor(value: Any) -> list[Any]:
    """Returns the functions that the descriptor `value` (such as a property) calls; else []."""
    for kind, names in _FUNCTIONS_OF_DESCRIPTORS.items():
        if has_type(value, kind):
            return [f for name in names if (f := object.__getattribute__(value, name)) is not None]
    return []


_FUNCTIONS_OF_DESCRIPTORS: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func",),
    functools.singledispatchmethod: ("func", "dispatcher"),
}


def variables_of(space: Any) -> dict[str, Any]:
    """Returns the variables of a namespace: `space` itself if it is a dict, else its `__dict__`."""
    return space if type(space) is dict else dict_of(space)


def dict_of(value: Any) -> Any:
    """Returns the `__dict__` of `value`, or None, without calling a user's `__getattribute__`."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:  # a `threading.local` has one dictionary for each thread
        return value.__dict__ if has_type(value, threading.local) else None


def find_module_dict(owner: Any, name: str) -> Any:
    """Returns the dictionary in which an nn.Module stores the attribute `name`, or None.

    It is the module's dictionary of parameters, buffers or submodules. None if `owner` is no
    module.
    """
    if has_type(owner, nn.Module):
        held = dict_of(owner)
        for within in INSIDE:
            if name in held.get(within, ()):
                return held[within]
    return None


def slots_of(kind: type) -> dict[str, Any]:
    """Returns the descriptors of the `__slots__` of the class `kind`, by name."""
    return {
        key: value
        for base in reversed(kind.__mro__)
        if is_user_module(base.__module__)
        or base.__module__.startswith(("collections", "dataclasses"))
        for key, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }


def may_be_hidden(name: str, found: Any) -> bool:
    """True if an instance attribute of this name would hide the class attribute `found`."""
    if name.startswith("__") and name.endswith("__"):
        return False
    if hasattr(type(found), "__set__"):  # a data descriptor, as a property, comes first
        return False
    return not (name != "forward" and vars(nn.Module).get(name, MISSING) is found is not MISSING)


def has_settings(kind: type) -> bool:
    """True if guards compare the attributes of instances of the class `kind`."""
    if issubclass(kind, _OF_TORCH):
        return True
    root = kind.__module__.split(".")[0]
    if root == "torch":
        return kind.__module__.startswith(_TORCH_WITH_SETTINGS)
    pythons = root in sys.stdlib_module_names and not root.startswith("_")
    return is_user_module(root) or (pythons and root not in _WITHOUT_SETTINGS)


def may_have_attributes(value: Any) -> bool:
    """True if a plain value is an enum or of a user's class, so that it may have attributes."""
    kind = type(value)
    return issubclass(kind, enum.Enum) or (kind not in PLAIN and is_user_module(kind.__module__))


def is_iterator(value: Any) -> bool:
    kind: type = type(value)
    # Not by `hasattr`, which runs the `__getattr__` of a metaclass.
    has_next = any("__next__" in vars(base) for base in kind.__mro__)
    return has_next and not issubclass(kind, (io.IOBase, nn.Module))


def cell_content(where: types.CellType, otherwise: Any = None) -> Any:
    """Returns the content of the closure cell `where`; `otherwise` if it is not assigned yet."""
    try:
        return where.cell_contents
    except ValueError:
        return otherwise


def runs_in_frame(f: types.FunctionType, frame: FrameType) -> bool:
    """True if a stack frame is a call of `f`, and not of another closure with the same code."""
    local = frame.f_locals
    pairs = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return all(cell_content(where) is local.get(key) for key, where in pairs)


# -- attributes and hooks of tensors ---------------------------------------------------------------


class AttributesAndHooks:
    """The Python attributes and hooks that some tensors have now, to detect later changes."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._attributed = tensors
        with local_ops():
            self._hooked = [t for t in tensors if t.requires_grad]
        # Nobody deletes partita's attributes, so if all are partita's, an equal count suffices.
        self._others = [t for t in self._attributed if not OWN_ATTRIBUTES.issuperset(vars(t))]
        self._state, self._objects = self._read_state()

    def may_change_within(self, known: Container[int]) -> bool:
        """True if a tensor has an attribute that can be changed in place, such as a list.

        Tensors whose ids are in `known` do not count.
        """
        others = [vars(t).values() for t in self._others if id(t) not in known]
        return not all(isinstance(v, (*PLAIN, torch.Tensor)) for v in chain(*others))

    def unchanged(self) -> bool:
        """True if the tensors still have the same attributes and hooks."""
        state, objects = self._read_state()
        return state == self._state and all(map(is_, objects, self._objects))

    def _read_state(self) -> tuple[Any, list[Any]]:
        """Returns counts and names of attributes, and counts of hooks; and all of these objects."""
        with local_ops():
            tables = [
                *map(hooks_of_backward, self._hooked),
                *map(hooks_of_gradient, self._hooked),
            ]
        there = [table for table in tables if table is not None]
        counts = [*map(len, map(vars, self._attributed))], [*map(len, there)]
        others = [*map(vars, self._others)]
        names, values = [*chain(*others)], chain(*map(dict.values, others))
        hooks = chain.from_iterable(map(dict.values, there))
        return (counts, names), [*tables, *hooks, *values]
