"""Values: what a program can read of a Python value, compared with what it was at capture.

`as_expected` makes an `Expected` of a value, which a later one is compared with; `content_key`
makes a hashable key, equal for values of which a program reads the same. Both compare numbers and
strings by type and bits (0.0 is not -0.0, True is not 1, NaN is NaN), containers by what they hold,
arrays and buffers by their bytes, other objects by identity. A tensor is an input of the graph.

    as_expected([1, 2]).difference([1, 3])    ("[1]", "2", "3")
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import functools
import gc
import io
import struct
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

# -- expected values -------------------------------------------------------------------------------


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()
"""The value of a place where nothing stands."""

Difference = tuple[str, str, str]
"""The path within a value, as "['k'][0]"; the text of what was there, and of what is there now."""

_BY_EQUALITY = (bool, int, str, bytes, type(None), torch.dtype, torch.device, range, slice)
_PLAIN = (*_BY_EQUALITY, float, complex)
_LISTS = (list, tuple, collections.deque)
_DICTS = (dict, types.MappingProxyType)
_SETS = (set, frozenset)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def same_bits(a: Any, b: Any) -> bool:
    """Have two plain values the same type and bits?"""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float:
        return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
    if kind is complex:
        return same_bits(a.real, b.real) and same_bits(a.imag, b.imag)
    if kind is slice:
        return all(map(same_bits, _ends_of(a), _ends_of(b)))
    return bool(a == b)


def _ends_of(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


class Expected:
    """What a value was at capture."""

    def difference(self, now: Any) -> Difference | None:
        """How the value `now` differs; None where a program reads the same of it."""
        raise NotImplementedError

    def parts(self, now: Any) -> Iterator[tuple[Expected, Any]]:
        """The parts that may change in place: for each what it was, and what it is now."""
        return iter(())


@dataclass(frozen=True, eq=False)
class Identity(Expected):
    """An object that must be the same object."""

    value: Any

    def difference(self, now: Any) -> Difference | None:
        return None if now is self.value else ("", brief(self.value), brief(now, self.value))


@dataclass(frozen=True, eq=False)
class PlainValue(Expected):
    """A plain value, compared by type and bits."""

    value: Any

    def difference(self, now: Any) -> Difference | None:
        if now is self.value or same_bits(self.value, now):
            return None
        return ("", brief(self.value), brief(now))


@dataclass(frozen=True, eq=False)
class OnlyType(Expected):
    """A number that is an input of the graph: only its type must stay."""

    value: Any

    def difference(self, now: Any) -> Difference | None:
        if type(now) is type(self.value):
            return None
        return ("", brief(self.value), brief(now))


class AnyTensor(Expected):
    """A tensor; its shape and layout are in the call's signature."""

    def difference(self, now: Any) -> Difference | None:
        return None if isinstance(now, torch.Tensor) else ("", "a tensor", brief(now))


@dataclass(frozen=True, eq=False)
class BoundMethod(Expected):
    """A bound method, which Python makes anew at each read.

    Attributes:
        inner: what its owner was, if that is a container, whose methods read its contents.
    """

    kind: type[Any]
    name: str
    function: Any
    owner: Any
    inner: Expected | None = None

    def difference(self, now: Any) -> Difference | None:
        if type(now) is self.kind and now.__self__ is self.owner:
            function = getattr(now, "__func__", None)
            if now.__name__ == self.name and function is self.function:
                return None if self.inner is None else self.inner.difference(self.owner)
        return ("", f"the method {self.name}", brief(now))

    def parts(self, now: Any) -> Iterator[tuple[Expected, Any]]:
        if self.inner is not None:
            yield from self.inner.parts(self.owner)


@dataclass(frozen=True, eq=False)
class RawContent(Expected):
    """An array, a buffer or a file in memory, compared by its content."""

    kind: type
    content: Any

    def difference(self, now: Any) -> Difference | None:
        if type(now) is not self.kind:
            return ("", _name(self.kind), brief(now))
        same = read_raw_content(now) == self.content
        return None if same else ("", _name(self.kind), "another content")

    def parts(self, now: Any) -> Iterator[tuple[Expected, Any]]:
        yield self, now


@dataclass(frozen=True, eq=False)
class DictView(Expected):
    """A view of a dictionary (`d.items()`), compared by the dictionary."""

    view: Any
    inner: Expected

    def difference(self, now: Any) -> Difference | None:
        if now is not self.view:
            return ("", brief(self.view), brief(now, self.view))
        return self.inner.difference(dict_of_view(now))

    def parts(self, now: Any) -> Iterator[tuple[Expected, Any]]:
        yield from self.inner.parts(dict_of_view(now))


@dataclass(eq=False)
class ContainerContents(Expected):
    """A container, compared by type, keys and items.

    Attributes:
        kind: its type.
        value: the container itself, kept alive so that its id stays its own.
        keys: its keys; None for lists and tuples.
        values: what each item was.
    """

    kind: type
    value: Any
    keys: list[Any] | None = None
    values: list[Expected] = field(default_factory=list)
    _busy: bool = False

    def difference(self, now: Any) -> Difference | None:
        if type(now) is not self.kind:
            return ("", brief(self.value), brief(now))
        if self._busy:  # the container holds itself
            return None
        keys, values = items_of(now)
        if self.keys is not None:
            if (found := _other_keys(self.keys, keys)) is not None:
                return found
        elif len(values) != len(self.values):
            kind = _name(self.kind)
            return ("", f"{kind} of {len(self.values)}", f"{kind} of {len(values)}")
        self._busy = True
        try:
            for i, (expected, value) in enumerate(zip(self.values, values, strict=True)):
                if (found := expected.difference(value)) is not None:
                    at = f"[{keys[i]!r}]" if keys is not None else f"[{i}]"
                    return (at + found[0], found[1], found[2])
        finally:
            self._busy = False
        return None

    def parts(self, now: Any) -> Iterator[tuple[Expected, Any]]:
        yield self, now
        if not self._busy:
            self._busy = True
            try:
                for expected, value in zip(self.values, items_of(now)[1], strict=True):
                    yield from expected.parts(value)
            finally:
                self._busy = False


@dataclass(eq=False)
class HugeContainer(Expected):
    """A container of very many entries, which are compared by identity or bits, not by content.

    Attributes:
        name: the container's, in messages.
        value: the container itself.
    """

    name: str
    value: Any
    keys: list[Any] | None = field(init=False, default=None)
    values: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.values = _entries_of(self.value)

    def difference(self, now: Any) -> Difference | None:
        kind = type(self.value)
        if type(now) is not kind:
            return ("", brief(self.value), brief(now))
        keys, values = _entries_of(now)
        if len(values) != len(self.values):
            name = _name(kind)
            return ("", f"{name} of {len(self.values)}", f"{name} of {len(values)}")
        if isinstance(now, _SETS):
            known = {v: v for v in self.values}
            if all(_same_entry(known.get(v, MISSING), v) for v in values):
                return None
            return ("", f"{_name(kind)} of {len(values)}", "one of others")
        if self.keys is not None and (found := _other_key(self.keys, keys or [])) is not None:
            return found
        if all(map(is_, self.values, values)):
            return None
        for i, (was, value) in enumerate(zip(self.values, values, strict=True)):
            if not _same_entry(was, value):
                return (f"[{keys[i]!r}]" if keys else f"[{i}]", brief(was), brief(value))
        return None

    def parts(self, now: Any) -> Iterator[tuple[Expected, Any]]:
        yield self, now


def _entries_of(value: Any) -> tuple[list[Any] | None, list[Any]]:
    return (None, list(value)) if isinstance(value, _SETS) else items_of(value)


def _other_key(was: list[Any], now: list[Any]) -> Difference | None:
    if all(map(is_, was, now)) or all(map(_same_key, was, now)):
        return None
    i = next(i for i, (a, b) in enumerate(zip(was, now, strict=True)) if not _same_key(a, b))
    return ("", f"{brief(was[i])} there", f"{brief(now[i])}")


def _same_entry(a: Any, b: Any) -> bool:
    if a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same_entry, a, b))
    return type(a) in _PLAIN and same_bits(a, b)


def holds_no_more(value: Any) -> bool:
    """Is an entry immutable, all that it holds included? (Tensors count: they are inputs.)"""
    if type(value) is tuple:
        return all(map(holds_no_more, value))
    return type(value) in _PLAIN or isinstance(value, (torch.Tensor, enum.Enum))


def _other_keys(was: list[Any], now: Any) -> Difference | None:
    if len(was) == len(now) and all(map(_same_key, was, now)):
        return None
    for key in was:
        if not any(_same_key(key, k) for k in now):
            return (f"[{brief(key)}]", "there", "gone")
    for key in now:
        if not any(_same_key(key, k) for k in was):
            return (f"[{brief(key)}]", "not there", "there")
    return ("", "in one order", "in another")


def _same_key(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return type(a) is type(b) and bool(a == b)


def items_of(value: Any) -> tuple[list[Any] | None, list[Any]]:
    """The keys of a container, None where it has none, and its values."""
    if isinstance(value, dict):
        return list(value), list(dict.values(value))
    if isinstance(value, types.MappingProxyType):
        return list(value), list(value.values())
    if isinstance(value, _SETS):
        # Sets of equal members may iterate in different orders.
        return sorted(value, key=_sort_key_of_member), []
    if isinstance(value, functools.partial):
        held = vars(value)
        own = [value.func, value.args, value.keywords]
        return ["func", "args", "keywords", *held], [*own, *held.values()]
    if isinstance(value, types.SimpleNamespace):
        return list(vars(value)), list(vars(value).values())
    return None, list(value)


def _sort_key_of_member(member: Any) -> Any:
    is_plain = isinstance(member, (*_PLAIN, tuple, frozenset))
    return (type(member).__name__, repr(member) if is_plain else id(member))


def is_container(value: Any) -> bool:
    """Is it a container, compared by its contents?"""
    kinds = (*_LISTS, *_DICTS, *_SETS, functools.partial, types.SimpleNamespace)
    return isinstance(value, kinds) and not isinstance(value, (torch.Tensor, torch.nn.Module))


def as_expected(
    value: Any,
    known: dict[int, Expected] | None = None,
    is_number_input: Callable[[Any, Any], bool] = lambda home, key: False,
) -> Expected:
    """What `value` is now, to compare later values with.

    Args:
        known: by id, what was made of containers that were met before.
        is_number_input: given a container and a key, whether the number there is a graph input.
    """
    if isinstance(value, torch.Tensor):
        return AnyTensor()
    if type(value) in _PLAIN:
        return PlainValue(value)
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if is_container(value):
        keys, values = items_of(value)
        found = known[id(value)] = ContainerContents(type(value), value, keys)
        places = range(len(values)) if keys is None else keys
        for key, v in zip(places, values, strict=False):
            is_input = is_number_input(value, key)
            found.values.append(OnlyType(v) if is_input else as_expected(v, known, is_number_input))
        return found
    if has_raw_content(value):
        return RawContent(type(value), read_raw_content(value))
    if (under := dict_of_view(value)) is not None:
        return DictView(value, as_expected(under, known, is_number_input))
    if isinstance(value, _METHODS) and value.__self__ is not None:
        function = getattr(value, "__func__", None)
        owner = value.__self__
        held = is_container(owner) or has_raw_content(owner)
        inner = as_expected(owner, known, is_number_input) if held else None
        return BoundMethod(type(value), value.__name__, function, owner, inner)
    if _compares_by_value(value):
        return PlainValue(value)
    return Identity(value)


def _compares_by_value(value: Any) -> bool:
    """Is it an immutable value with `==`: of numpy, a path, a fraction, a date, a UUID?"""
    kind = type(value)
    root = kind.__module__.split(".")[0]
    if root == "numpy":
        return hasattr(value, "tobytes") or kind.__name__.endswith("DType")
    return root in ("pathlib", "fractions", "decimal", "datetime", "uuid")


def _name(kind: type) -> str:
    return f"a {kind.__name__}"


def brief(value: Any, beside: Any = None) -> str:
    """The text of a value in at most 60 characters; "another X" where it reads like `beside`."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        text = getattr(value, "__qualname__", repr(value))
    elif isinstance(value, _PLAIN):
        text = repr(value)
    elif is_container(value):
        text = _name(type(value)) + (f" of {len(value)}" if hasattr(value, "__len__") else "")
    else:
        text = f"a {type(value).__name__}"
    if beside is not None and type(beside) is type(value) and text == brief(beside):
        text = f"another {text.removeprefix('a ')}"
    return shorten_text(text)


def shorten_text(text: str) -> str:
    """The text, or its two ends where it is longer than 60 characters."""
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


# -- keys of values --------------------------------------------------------------------------------

_MET = "met before"


class ByIdentity:
    """An object as a part of a key: equal only to a `ByIdentity` of the same object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def argument_key(value: Any) -> Any:
    """The key of an argument that is no tensor; of a float, a graph input, its type."""
    if isinstance(value, float):  # what the step asks of it is in the program's conditions
        return (type(value),)
    return content_key(value)


def content_key(value: Any, known: dict[int, int] | None = None) -> Any:
    """The key of a value that is no graph input.

    Args:
        known: by id, the number of each container that was met before.
    """
    kind = type(value)
    if kind is float:
        return (kind, "nan" if value != value else struct.pack("d", value))
    if kind is complex:
        return (kind, content_key(value.real), content_key(value.imag))
    if kind is slice:
        return (kind, *map(content_key, _ends_of(value)))
    if kind in _BY_EQUALITY:
        return (kind, value)
    if has_raw_content(value):
        return (kind, read_raw_content(value))
    inside = _values_in(value)
    if inside is not None:
        known = {} if known is None else known
        if id(value) in known:
            return (_MET, known[id(value)])
        known[id(value)] = len(known)
        return (kind, *[content_key(v, known) for v in inside])
    if _compares_by_value(value):
        return (kind, repr(value))
    if isinstance(value, _METHODS) and value.__self__ is not None:
        return (kind, value.__name__, ByIdentity(value.__self__))
    return (kind, ByIdentity(value))


def _values_in(value: Any) -> list[Any] | None:
    """What a dataclass or a container holds, keys first; None for other values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name, MISSING) for f in dataclasses.fields(value)]
    if is_container(value):
        keys, values = items_of(value)
        return [*(keys or ()), *values]
    return None


def text_of(value: Any) -> str:
    """The text of an argument, for messages."""
    if isinstance(value, str):
        return repr(value)
    if _values_in(value) is None:
        return str(value)
    # Python's text of objects that refer to one another grows with the number of paths.
    key = content_key(value)
    return str(key) if _is_met(key) else str(value)


def _is_met(key: Any) -> bool:
    return isinstance(key, tuple) and (key[:1] == (_MET,) or any(map(_is_met, key[1:])))


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
    """Is it an array, a buffer, a file in memory or a decimal context, mutable in place?"""
    if isinstance(value, (*_BUFFERS, *_FILES, decimal.Context)):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    kind = type(value)
    if kind.__module__ == "array":
        return kind.__name__ == "array"
    return any(base.__module__ == "_ctypes" for base in kind.__mro__) and not is_shared_memory(
        value
    )


def is_shared_memory(value: Any) -> bool:
    """Is it memory that other programs may write (`mmap`), or a pointer of ctypes?"""
    kinds = [(base.__module__, base.__name__) for base in type(value).__mro__]
    return ("mmap", "mmap") in kinds or ("_ctypes", "_Pointer") in kinds


def read_raw_content(value: Any) -> Any:
    """The content of an object now, to be compared with `==`."""
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


def make_restorer(value: Any) -> Any:
    """A function that restores the content that an object has now."""
    if isinstance(value, _FILES) and value.closed:
        return lambda: None
    if isinstance(value, _FILES):
        text, at = value.getvalue(), value.tell()

        def restore_stream() -> None:
            if value.closed:  # it cannot be opened again
                return
            value.seek(0)
            value.truncate()
            value.write(text)  # type: ignore[arg-type]
            value.seek(at)

        return restore_stream
    if isinstance(value, decimal.Context):
        before = value.copy()

        def restore_decimal_context() -> None:
            for key in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "flags", "traps"):
                setattr(value, key, getattr(before, key))

        return restore_decimal_context
    if hasattr(value, "dtype"):
        array, shape = value.copy(), value.shape

        def restore_array() -> None:
            if value.shape != shape:
                value.resize(shape, refcheck=False)
            value[...] = array

        return restore_array
    if isinstance(value, bytearray) or type(value).__module__ == "array":
        items = value[:]

        def restore_items() -> None:
            value[:] = items

        return restore_items
    if memoryview(value).readonly:
        return lambda: None
    held = bytes(value)

    def restore_bytes() -> None:
        memoryview(value).cast("B")[:] = held

    return restore_bytes


def dict_of_view(value: Any) -> Any:
    """The dictionary of a dictionary view; None for other objects."""
    if not isinstance(value, _VIEWS):
        return None
    found = gc.get_referents(value)
    return found[0] if found and isinstance(found[0], dict) else None
