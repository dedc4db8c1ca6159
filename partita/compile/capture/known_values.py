"""Known values: what nodes of the traced graph hold that are computed from constants alone.

A value depends on constants alone where factories (`arange`, `full`), metadata and arithmetic make
it, and no input of the graph, no number that may change, no generator and no operator of others has
a part in it: it is then the same in every call of the program. `KnownNode.find_value` computes it
on the CPU, whatever the device of the step.

    places = arange(8)                                            Stored
    mask = places <= unsqueeze(places, 1)                         Stored, or if it is large
    mask = expand(mask, [4, 1, 8, 8])                             Elementwise, LedBy, ...

Numbers are stored with size 1 along dimensions along which they are equal. A matrix that is large
all the same is not computed as a whole: `part` computes some rows and columns of it, and `bounds`
says between which numbers they lie, mostly without computing them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm import read_autocast_state, switch_off, use_autocast_state
from partita.comm.device import HOST
from partita.tensor.op_facts import facts_of

_aten = torch.ops.aten

LARGE = 2**18
"""Elements: a value of more is not stored."""
_MOST_NODES = 256
"""A value that depends on more nodes is not known."""
_MOST_CALLS = 64
"""A large value of which a part takes more calls is not known: what two calls read is computed for
each of them."""

Bounds = tuple[Any, Any]


class NotKnown(Exception):
    """A value is not computed from constants alone, or not in a way that is understood here."""


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KnownValue:
    """A tensor whose elements can be computed.

    Attributes:
        shape, dtype: of the tensor.
        sizes: the shape, with 1 for a dimension along which its elements are known to be equal.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def calls(self) -> int:
        """How many calls compute a part of it."""
        return 0

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        """Its elements in some rows and columns, of as many dimensions, of which some have size 1
        in place of elements that are equal."""
        raise NotImplementedError

    def bounds(self, rows: slice, columns: slice) -> Bounds | None:
        """Two numbers between which these elements lie; None where that is not known."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Stored(KnownValue):
    """A value that is stored."""

    values: torch.Tensor

    @cached_property
    def _is_sorted(self) -> bool:
        """Is it a row or a column of whole numbers that do not fall, as places do not?"""
        found = self.values.flatten()
        in_line = found.numel() == max(self.sizes, default=1)
        return in_line and found.dtype is torch.int64 and bool((found[1:] >= found[:-1]).all())

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        found = self.values
        if found.ndim > 0 and found.shape[-1] > 1:
            found = found[..., columns]
        if found.ndim > 1 and found.shape[-2] > 1:
            found = found[..., rows, :]
        return found

    def bounds(self, rows: slice, columns: slice) -> Bounds | None:
        part = self.part(rows, columns)
        if not part.numel() or part.is_complex():
            return None
        if self._is_sorted:
            part = part.flatten()
            return part[0].item(), part[-1].item()
        low, high = (x.item() for x in torch.aminmax(part))
        return None if math.isnan(low) else (low, high)


@dataclass(frozen=True, eq=False)
class Elementwise(KnownValue):
    """A large value that an operator computes element by element of others.

    Attributes:
        func, args, kwargs: the call; operands are values.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def calls(self) -> int:  # type: ignore[override]
        return 1 + sum(v.calls for v in self.args if isinstance(v, KnownValue))

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        args, kwargs = _map_values(lambda v: v.part(rows, columns), (self.args, self.kwargs))
        found: torch.Tensor = self.func(*args, **kwargs)
        if found.dtype is not self.dtype:
            raise NotKnown
        return found

    def bounds(self, rows: slice, columns: slice) -> Bounds | None:
        def bounds_of(operand: Any) -> Bounds | None:
            if isinstance(operand, KnownValue):
                return operand.bounds(rows, columns)
            return (operand, operand)

        operands = [*map(bounds_of, (*self.args, *self.kwargs.values()))]
        find = _BOUNDS.get(self.func._opname)
        if find is not None and not self.kwargs and (found := find(self, operands)) is not None:
            return found
        if any(b is None or b[0] != b[1] for b in operands):
            return None
        # Each operand is one number there: so is the result.
        one = self.part(slice(rows.start, rows.start + 1), slice(columns.start, columns.start + 1))
        return Stored(tuple(one.shape), one.dtype, tuple(one.shape), one).bounds(rows, columns)


@dataclass(frozen=True, eq=False)
class LedBy(KnownValue):
    """A large value as rows and columns of which other dimensions come before.

    Attributes:
        places: for each of these the dimension of `of` that it is; None for one of equal elements.
    """

    of: KnownValue
    places: tuple[int | None, ...]

    @property
    def calls(self) -> int:
        return self.of.calls

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        part = self.of.part(rows, columns)
        lead = [1 if i is None else part.shape[i] for i in self.places]
        return part.reshape(*lead, *part.shape[-2:])

    def bounds(self, rows: slice, columns: slice) -> Bounds | None:
        return self.of.bounds(rows, columns)


@dataclass(frozen=True, eq=False)
class Swapped(KnownValue):
    """A large value with rows as columns."""

    of: KnownValue

    @property
    def calls(self) -> int:
        return self.of.calls

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.of.part(columns, rows).mT

    def bounds(self, rows: slice, columns: slice) -> Bounds | None:
        return self.of.bounds(columns, rows)


@dataclass(frozen=True, eq=False)
class Window(KnownValue):
    """Some rows and columns of a large value, from a first row and a first column on."""

    of: KnownValue
    first_row: int
    first_column: int

    @property
    def calls(self) -> int:
        return self.of.calls

    def _within(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        firsts = (self.first_row, self.first_column)
        asked = zip((rows, columns), firsts, self.shape[-2:], strict=True)
        # One row or column stands for all where it is broadcast.
        down, right = (
            slice(first, first + 1) if size == 1 else slice(first + a.start, first + a.stop)
            for a, first, size in asked
        )
        return down, right

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        return self.of.part(*self._within(rows, columns))

    def bounds(self, rows: slice, columns: slice) -> Bounds | None:
        return self.of.bounds(*self._within(rows, columns))


def _map_values(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments of a call with `change(v)` for each known value among them."""
    if isinstance(value, KnownValue):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_values(change, v) for v in value)
    if isinstance(value, Mapping):
        return {k: _map_values(change, v) for k, v in value.items()}
    return value


# -- bounds of elementwise calls -------------------------------------------------------------------

_FindBounds = Callable[[Elementwise, list[Any]], Bounds | None]
_SURE = 2**62
"""Sums of whole numbers below it do not overflow."""


def _compare(holds: Callable[[Any, Any], bool], fails: Callable[[Any, Any], bool]) -> _FindBounds:
    """Bounds of a comparison.

    Args:
        holds, fails: does it hold, or fail, for all numbers between these bounds and those?
    """

    def find(call: Elementwise, operands: list[Any]) -> Bounds | None:
        one, other = operands
        if one is None or other is None or not _are_whole(call):
            return None
        return holds(one, other), not fails(one, other)

    return find


def _are_whole(call: Elementwise) -> bool:
    """Does a call compute with whole numbers or truth values alone, as Python does?"""
    return all(
        v.dtype in (torch.int64, torch.bool) if isinstance(v, KnownValue) else type(v) is int
        for v in call.args
    )


def _are_true(call: Elementwise) -> bool:
    """Are all operands of a call truth values?"""
    return all(isinstance(v, KnownValue) and v.dtype is torch.bool for v in call.args)


def _are_equal(one: Any, other: Any) -> bool:
    return bool(one[0] == one[1] == other[0] == other[1])


def _are_apart(one: Any, other: Any) -> bool:
    return bool(one[1] < other[0] or other[1] < one[0])


def _bound_both(call: Elementwise, operands: list[Any]) -> Bounds | None:
    if not _are_true(call):
        return None
    one, other = (b or (False, True) for b in operands)
    return one[0] and other[0], one[1] and other[1]


def _bound_either(call: Elementwise, operands: list[Any]) -> Bounds | None:
    if not _are_true(call):
        return None
    one, other = (b or (False, True) for b in operands)
    return one[0] or other[0], one[1] or other[1]


def _bound_negation(call: Elementwise, operands: list[Any]) -> Bounds | None:
    (one,) = operands
    return (not one[1], not one[0]) if one is not None and _are_true(call) else None


def _bound_where(call: Elementwise, operands: list[Any]) -> Bounds | None:
    condition, one, other = operands
    if condition is not None and condition[0] == condition[1]:
        one = other = one if condition[0] else other
    if one is None or other is None:
        return None
    return _convert_bounds((min(one[0], other[0]), max(one[1], other[1])), call.dtype)


def _bound_masked_fill(call: Elementwise, operands: list[Any]) -> Bounds | None:
    value, condition, number = operands
    return _bound_where(call, [condition, number, value])


def _bound_sum(call: Elementwise, operands: list[Any]) -> Bounds | None:
    one, other = operands
    if one is None or other is None or not _are_whole(call):
        return None
    return _bound_whole(call, one[0] + other[0], one[1] + other[1])


def _bound_difference(call: Elementwise, operands: list[Any]) -> Bounds | None:
    one, other = operands
    if one is None or other is None or not _are_whole(call):
        return None
    return _bound_whole(call, one[0] - other[1], one[1] - other[0])


def _bound_whole(call: Elementwise, low: int, high: int) -> Bounds | None:
    sure = call.dtype is torch.int64 and max(abs(low), abs(high)) < _SURE
    return (low, high) if sure else None


def _bound_conversion(call: Elementwise, operands: list[Any]) -> Bounds | None:
    (one,) = operands
    return None if one is None else _convert_bounds(one, call.dtype)


def _convert_bounds(bounds: Bounds, dtype: torch.dtype) -> Bounds | None:
    """Bounds of what lies between these in another dtype: rounding keeps the order."""
    low, high = bounds
    if dtype is torch.bool:
        nonzero = bool(low > 0 or high < 0)
        return nonzero, nonzero or bool(low != 0 or high != 0)
    if (not dtype.is_floating_point and dtype is not torch.int64) or isinstance(low, complex):
        return None
    if not dtype.is_floating_point and not (low > -_SURE and high < _SURE):
        return None
    low, high = (torch.tensor(end).to(dtype).item() for end in bounds)
    return None if math.isnan(low) or math.isnan(high) else (low, high)


_BOUNDS: dict[str, _FindBounds] = {
    "ge": _compare(lambda a, b: a[0] >= b[1], lambda a, b: a[1] < b[0]),
    "gt": _compare(lambda a, b: a[0] > b[1], lambda a, b: a[1] <= b[0]),
    "le": _compare(lambda a, b: a[1] <= b[0], lambda a, b: a[0] > b[1]),
    "lt": _compare(lambda a, b: a[1] < b[0], lambda a, b: a[0] >= b[1]),
    "eq": _compare(_are_equal, _are_apart),
    "ne": _compare(_are_apart, _are_equal),
    "bitwise_and": _bound_both,
    "logical_and": _bound_both,
    "bitwise_or": _bound_either,
    "logical_or": _bound_either,
    "bitwise_not": _bound_negation,
    "logical_not": _bound_negation,
    "where": _bound_where,
    "masked_fill": _bound_masked_fill,
    "add": _bound_sum,
    "sub": _bound_difference,
    "_to_copy": _bound_conversion,
}
"""By the name of an operator, how the bounds of its result follow from those of its operands."""


# -- values of nodes -------------------------------------------------------------------------------


class KnownNode:
    """A node whose value depends on constants alone, as far as its graph tells.

    Args:
        node: of the graph that is being traced.
        entered: by the node that stands in a traced block for a tensor from outside, the node of
            that tensor in the block that follows the trace.

    Raises:
        NotKnown: something else has a part in it, or it is written in a way that is not followed.
    """

    def __init__(self, node: fx.Node, entered: Mapping[fx.Node, fx.Node]):
        self._entered = entered
        self._end = self._resolve(node)
        self._order: list[fx.Node] = []
        self._collect()

    @property
    def key(self) -> tuple[fx.Node, ...]:
        """Equal for nodes of one value."""
        return (*self._order,)

    def find_value(self) -> KnownValue:
        """The value. Raises NotKnown where it cannot be computed."""
        mode = get_proxy_mode()
        root = getattr(mode and mode.tracer, "root", None)
        known: dict[fx.Node, Any] = {}
        reads = {n: [self._resolve(x) for x in _operands_of(n)] for n in self._order}
        last_reader = {x: n for n in self._order for x in reads[n]}
        with computing():
            for node in self._order:
                known[node] = _compute_node(node, lambda n: known[self._resolve(n)], root)
                for read in {*reads[node]}:
                    if last_reader[read] is node:
                        del known[read]
        found = known[self._end]
        if not isinstance(found, KnownValue):
            raise NotKnown
        return found

    def _resolve(self, node: fx.Node) -> fx.Node:
        return self._entered.get(node, node)

    def _collect(self) -> None:
        """Order the nodes that the value depends on, operands first."""
        done: set[fx.Node] = set()
        writes: dict[fx.Node, list[fx.Node]] = {}
        ahead = [(self._end, False)]
        self._refuse_later_writes(self._end, None, writes)
        while ahead:
            node, has_operands = ahead.pop()
            if has_operands:
                self._order.append(node)
            elif node not in done:
                done.add(node)
                if len(done) > _MOST_NODES:
                    raise NotKnown
                ahead.append((node, True))
                for operand in _operands_of(node):
                    read = self._resolve(operand)
                    self._refuse_later_writes(read, node if read is operand else None, writes)
                    ahead.append((read, False))

    def _refuse_later_writes(
        self, node: fx.Node, reader: fx.Node | None, writes: dict[fx.Node, list[fx.Node]]
    ) -> None:
        """Raise NotKnown where the memory of `node` is written between it and its reader, by way
        of a view or of what it is a view of: it stands for what that memory held before.

        Args:
            reader: the call that reads it; None if that has no node yet.
            writes: by the node that makes some memory, the calls that write it; is added to.
        """
        root = node
        while (shown := _shown_by(root)) is not None:
            root = self._resolve(shown)
        if root not in writes:
            writes[root] = [*_find_writes(root)]
        for write in writes[root]:
            if node < write and (reader is None or write < reader):
                raise NotKnown


def _find_writes(root: fx.Node) -> Iterator[fx.Node]:
    """The calls that write the memory that `root` makes."""
    ahead, done = [root], {root}
    while ahead:
        shows = ahead.pop()
        for user in shows.users:
            if user.op != "call_function" or user in done:
                continue
            facts = facts_of(user.target)
            is_write = bool(facts.writes) and _writes(user, shows)
            if is_write:
                yield user
            if is_write or (facts.is_view and user.args[0] is shows):
                done.add(user)
                ahead.append(user)


def _operands_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose values that of `node` depends on. Raises NotKnown for a node that is no call
    whose result its operands decide."""
    if node.op == "get_attr":
        return iter(())
    target: Any = node.target
    facts = facts_of(target)
    is_operator = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    if node.op != "call_function" or not (is_operator or target is operator.getitem):
        raise NotKnown
    if is_operator:
        if facts.draws or facts.changes_metadata:
            raise NotKnown
        if (facts.writes and not _writes_first(node)) or "empty" in target._opname:
            raise NotKnown
        if target._opname in _OF_METADATA:
            return iter([n for n in node.all_input_nodes if n is not node.args[0]])
    return iter(node.all_input_nodes)


_OF_METADATA = frozenset(
    """zeros_like ones_like full_like new_zeros new_ones new_full fill fill_ zero_ copy
    copy_""".split()
)
"""Operators that take the shape, and no element, of their first operand."""


def _shown_by(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result of a call shows; None of one in new memory."""
    if node.op != "call_function":
        return None
    facts = facts_of(node.target)
    shows = node.args[0] if (facts.is_view or facts.writes) and node.args else None
    return shows if isinstance(shows, fx.Node) else None


def _writes(user: fx.Node, node: fx.Node) -> bool:
    """Does a call write `node`, which it takes?"""
    for operand in facts_of(user.target).writes:
        given = (
            user.args[operand.place]
            if operand.place < len(user.args)
            else user.kwargs.get(operand.name)
        )
        if given is node or (isinstance(given, (list, tuple)) and node in given):
            return True
    return False


def _writes_first(node: fx.Node) -> bool:
    """Does a call write its first operand alone, and gives that one: `x.add_(y)`?"""
    writes = facts_of(node.target).writes
    name = getattr(node.target, "_opname", "")
    return (
        len(writes) == 1 and writes[0].place == 0 and not writes[0].is_list and name.endswith("_")
    )


# -- computing a node ------------------------------------------------------------------------------


@contextmanager
def computing() -> Iterator[None]:
    """Within, torch computes as it is called: nothing is traced, heard of, cast or kept."""
    casts_off = use_autocast_state(switch_off(read_autocast_state()))
    with _disable_current_modes(), Unheard(), torch.no_grad(), casts_off:
        yield


def _compute_node(node: fx.Node, value_of: Callable[[fx.Node], Any], root: Any) -> Any:
    if node.op == "get_attr":
        return _store_constant(functools.reduce(getattr, str(node.target).split("."), root))
    like = node.meta.get("val")
    if node.target is operator.getitem:
        return value_of(node.args[0])[node.args[1]]  # type: ignore[arg-type,index]
    target: Any = node.target
    name = target._opname
    if name in _OF_METADATA:
        return _fill(name, node, like, value_of)
    if name.endswith("_") and facts_of(target).writes:
        name = name.removesuffix("_")
        target = getattr(getattr(_aten, name), target._overloadname)
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    kwargs = {k: v for k, v in kwargs.items() if k not in _ABOUT_MEMORY}
    if name in _AS_IT_IS and isinstance(args[0], KnownValue):
        return _convert(args[0], like.dtype)
    if torch.Tag.pointwise in target.tags or name == "masked_fill":
        return _compute_elementwise(target, args, kwargs, like)
    if (shown := _compute_without_repeats(name, args, kwargs, like)) is not None:
        return _check(shown, like)
    if (isinstance(like, torch.Tensor) and like.numel() > LARGE) or _has_large(args):
        return _show_large(name, args, kwargs, like)
    args, kwargs = _map_values(_whole_of, (args, kwargs))
    found = target(*args, **kwargs)
    if isinstance(found, (list, tuple)):
        return [_store(t, tuple(t.shape)) for t in found]
    return _check(_store(found, tuple(found.shape)), like)


_ABOUT_MEMORY = frozenset("device layout pin_memory non_blocking memory_format".split())
_AS_IT_IS = frozenset("alias detach clone lift_fresh_copy lift_fresh contiguous _to_copy".split())
"""Operators that give the elements of their operand, perhaps in another dtype."""


def _store_constant(value: Any) -> Stored:
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        raise NotKnown
    if value.numel() > LARGE or value.is_meta:
        raise NotKnown
    return _store(value.to(HOST), tuple(value.shape))


def _store(values: torch.Tensor, shape: tuple[int, ...]) -> Stored:
    """A stored value. Whole numbers and truth values that are equal along a dimension are stored
    once."""
    if not values.is_floating_point() and not values.is_complex() and values.numel():
        for dim in range(values.ndim):
            first = values.narrow(dim, 0, 1)
            if values.shape[dim] > 1 and bool((values == first).all()):
                values = first
    return Stored(shape, values.dtype, tuple(values.shape), values.clone())


def _whole_of(value: KnownValue) -> torch.Tensor:
    assert isinstance(value, Stored)
    return value.values.expand(value.shape)


def _check(value: KnownValue, like: Any) -> KnownValue:
    """`value`; raises NotKnown where it is not of the shape and dtype of the traced tensor."""
    if not isinstance(like, torch.Tensor):
        raise NotKnown
    if value.dtype is not like.dtype or value.shape != tuple(like.shape):
        raise NotKnown
    return value


def _has_large(args: Any) -> bool:
    large: list[bool] = []
    _map_values(
        lambda v: large.append(not isinstance(v, Stored) or math.prod(v.shape) > LARGE), args
    )
    return any(large)


def _fill(name: str, node: fx.Node, like: Any, value_of: Callable[[fx.Node], Any]) -> KnownValue:
    """The value of a call that gives all elements of its result one number, or copies another."""
    shape, dtype = tuple(like.shape), like.dtype
    given: Any = node.args[1] if len(node.args) > 1 else None
    if name.startswith("copy"):
        return _expand(_convert(value_of(given), dtype), shape)
    if name.startswith(("zero", "new_zeros")):
        number: Any = 0
    elif name in ("ones_like", "new_ones"):
        number = 1
    else:
        number = node.args[2] if name == "new_full" else given
    if isinstance(number, fx.Node):
        number = _whole_of(value_of(number)).item()
    values = torch.full((1,) * len(shape), number, dtype=dtype)
    return Stored(shape, dtype, tuple(values.shape), values)


def _convert(value: KnownValue, dtype: torch.dtype) -> KnownValue:
    if value.dtype is dtype:
        return value
    if isinstance(value, Stored):
        return _store(value.values.to(dtype), value.shape)
    call = _aten._to_copy.default
    return _Conversion(value.shape, dtype, value.sizes, call, (value,), {})


class _Conversion(Elementwise):
    """A large value in another dtype."""

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        found: torch.Tensor = self.args[0].part(rows, columns).to(self.dtype)
        return found


def _compute_elementwise(func: Any, args: Any, kwargs: Any, like: Any) -> KnownValue:
    operands: list[KnownValue] = []
    _map_values(operands.append, (args, kwargs))
    if not isinstance(like, torch.Tensor):
        raise NotKnown
    shape = tuple(like.shape)
    sizes = tuple(torch.broadcast_shapes(*(v.sizes for v in operands)))
    if torch.broadcast_shapes(*(v.shape for v in operands)) != like.shape:
        raise NotKnown
    if all(isinstance(v, Stored) for v in operands) and math.prod(sizes) <= LARGE:
        args, kwargs = _map_values(lambda v: v.values, (args, kwargs))
        return _check(_store(func(*args, **kwargs), shape), like)
    found = Elementwise(shape, like.dtype, sizes, func, tuple(args), kwargs)
    if len(shape) < 2 or found.calls > _MOST_CALLS:
        raise NotKnown
    return _computed(found)


def _computed(value: KnownValue) -> KnownValue:
    """`value`, stored if it is not large."""
    if math.prod(value.sizes) > LARGE:
        return value
    *_, rows, columns = value.shape
    return _store(value.part(slice(0, rows), slice(0, columns)), value.shape)


# -- along dimensions of equal elements ------------------------------------------------------------


def _compute_without_repeats(name: str, args: Any, kwargs: Any, like: Any) -> KnownValue | None:
    """The result of a call on stored values, of which what is equal stays stored once, as of the
    rows of a batch; None of a call that is not among these."""
    if kwargs or not isinstance(like, torch.Tensor):
        return None
    shape = tuple(like.shape)
    if name == "cat" and all(isinstance(v, Stored) and v.values.ndim for v in args[0]):
        return _join(shape, *args)
    value, *rest = args
    if not isinstance(value, Stored) or not value.shape:
        return None
    if name == "cumsum":
        dim = rest[0]
        repeats = [-1] * len(shape)
        repeats[dim] = shape[dim]
        return _store(torch.cumsum(value.values.expand(repeats), dim), shape)
    if name == "slice" and value.sizes[rest[0] if rest else 0] > 1:
        return _store(_aten.slice.Tensor(value.values, *rest), shape)
    if name == "slice":
        return Stored(shape, value.dtype, value.sizes, value.values)
    if name == "unsqueeze":
        return _store(value.values.unsqueeze(*rest), shape)
    if name == "index" and all(isinstance(i, Stored) for i in rest[0]):
        return _pick(value, rest[0], shape)
    return None


def _join(shape: tuple[int, ...], parts: list[Stored], dim: int = 0) -> Stored:
    """`torch.cat` of stored values."""
    sizes = [max(ns) for ns in zip(*(v.sizes for v in parts), strict=True)]

    def whole_along(v: Stored) -> torch.Tensor:
        repeats = [*sizes]
        repeats[dim] = v.shape[dim]
        return v.values.expand(repeats)

    return _store(torch.cat([*map(whole_along, parts)], dim), shape)


def _pick(value: Stored, indices: list[Stored], shape: tuple[int, ...]) -> Stored:
    """`value[indices]`: which element is taken does not matter where all are equal."""
    if any(i.dtype is not torch.int64 for i in indices):
        raise NotKnown
    lead = len(shape) - (len(value.shape) - len(indices))  # of the indices together
    none = torch.zeros((1,) * lead, dtype=torch.int64)
    taken = (i.values if n > 1 else none for i, n in zip(indices, value.sizes, strict=False))
    return _store(value.values[tuple(taken)], shape)


# -- large values, otherwise shown -----------------------------------------------------------------


def _show_large(name: str, args: Any, kwargs: Any, like: Any) -> KnownValue:
    """The result of a call that shows a large value, or part of it, otherwise."""
    if name in ("full", "ones", "zeros"):
        number = args[1] if name == "full" else float(name == "ones")
        values = torch.full((1,) * like.ndim, number, dtype=like.dtype)
        return Stored(tuple(like.shape), like.dtype, tuple(values.shape), values)
    if not isinstance(args[0], KnownValue) or kwargs:
        raise NotKnown
    value, shape = args[0], tuple(like.shape)
    if name == "expand":
        return _check(_expand(value, shape), like)
    if len(value.shape) < 2 or len(shape) < 2:
        raise NotKnown
    if name in ("unsqueeze", "squeeze", "view", "_unsafe_view", "reshape"):
        return _check(_lead(value, shape), like)
    if name in ("t", "transpose", "permute"):
        return _check(_swap(name, value, args[1:]), like)
    if name == "slice":
        return _check(_cut(value, shape, *args[1:]), like)
    if name in ("triu", "tril"):
        return _check(_keep_triangle(name, value, *args[1:]), like)
    raise NotKnown


def _expand(value: KnownValue, shape: tuple[int, ...]) -> KnownValue:
    new = len(shape) - len(value.shape)
    if new < 0:
        raise NotKnown
    if isinstance(value, Stored):
        values = value.values.reshape((1,) * new + value.values.shape)
        return Stored(shape, value.dtype, tuple(values.shape), values)
    places = (None,) * new + tuple(range(len(value.shape) - 2))
    return LedBy(shape, value.dtype, (1,) * new + value.sizes, value, places)


def _lead(value: KnownValue, shape: tuple[int, ...]) -> KnownValue:
    """`value` with dimensions of size 1 put before its rows, or taken away there."""
    before = [i for i, n in enumerate(value.shape[:-2]) if n != 1]
    after = [n for n in shape[:-2] if n != 1]
    if value.shape[-2:] != shape[-2:] or [value.shape[i] for i in before] != after:
        raise NotKnown
    left = iter(before)
    places = tuple(None if n == 1 else next(left) for n in shape[:-2])
    sizes = tuple(1 if i is None else value.sizes[i] for i in places) + value.sizes[-2:]
    return LedBy(shape, value.dtype, sizes, value, places)


def _swap(name: str, value: KnownValue, args: Any) -> KnownValue:
    order = [*range(len(value.shape))]
    if name == "permute":
        order = [i % len(order) for i in args[0]]
    else:
        one, other = (i % len(order) for i in (args or (0, 1)))
        order[one], order[other] = order[other], order[one]
    if order != [*range(len(order) - 2), len(order) - 1, len(order) - 2]:
        raise NotKnown

    def swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sizes[i] for i in order)

    return Swapped(swapped(value.shape), value.dtype, swapped(value.sizes), value)


def _cut(
    value: KnownValue,
    shape: tuple[int, ...],
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> KnownValue:
    if shape == value.shape and step == 1:
        return value
    dim = dim % len(shape) - len(shape)
    if step != 1 or dim < -2:
        raise NotKnown
    first = slice(start, end).indices(value.shape[dim])[0]
    sizes = (*shape[:-2], *(min(n, m) for n, m in zip(shape[-2:], value.sizes[-2:], strict=True)))
    sizes = (*value.sizes[:-2], *sizes[-2:])
    at = (first, 0) if dim == -2 else (0, first)
    return _computed(Window(shape, value.dtype, sizes, value, *at))


def _keep_triangle(name: str, value: KnownValue, diagonal: int = 0) -> KnownValue:
    """`torch.triu` or `torch.tril` of a value."""
    rows, columns = value.shape[-2:]
    lead = (1,) * (len(value.shape) - 2)
    below = torch.arange(rows).reshape(*lead, rows, 1) + diagonal
    across = torch.arange(columns).reshape(*lead, 1, columns)
    ends = [Stored(tuple(t.shape), t.dtype, tuple(t.shape), t) for t in (across, below)]
    inside = _aten.ge.Tensor if name == "triu" else _aten.le.Tensor
    square = (*lead, rows, columns)
    kept = Elementwise(square, torch.bool, square, inside, tuple(ends), {})
    zero = torch.zeros((1,) * len(value.shape), dtype=value.dtype)
    none = Stored(value.shape, value.dtype, tuple(zero.shape), zero)
    sizes = (*value.sizes[:-2], rows, columns)
    return Elementwise(value.shape, value.dtype, sizes, _aten.where.self, (kept, value, none), {})
