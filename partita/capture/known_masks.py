"""Known masks: attention with a causal mask, or one that hides nothing, needs no mask in the graph.

Models compute masks from positions. A mask that hides from each query the later keys means the same
as `is_causal`. But with a mask torch uses a slower kernel than flash attention. It reads (queries,
keys) numbers more, and keeps them for backward. Libraries know this, and omit such masks in eager.
When they are traced they make one all the same (transformers does, because it checks positions for
packed sequences). So a mask that depends only on constants is computed once, at capture, and
removed from the call:

    scaled_dot_product_attention(q, k, v, mask)  ->  ...(q, k, v, is_causal=True), or no mask at all

Every element is checked. A mask that depends on an input or on random numbers stays.

A value depends on constants alone if factories (`arange`, `full`), metadata and arithmetic make it,
and no input of the graph, no number that may change, no generator and no custom operator affects
it. It is then the same in every call of the program. `KnownNode.find_value` computes it on the CPU,
whatever the device of the step.

    places = arange(8)                                            a tensor
    mask = places <= unsqueeze(places, 1)                         a tensor, or if large a LargeValue
    mask = expand(mask, [4, 1, 8, 8])                             shows that one

Elements that are equal along a dimension are computed once, and shown with stride 0. A value that
is still large is not computed as a whole: `compute_part` computes a box of it, and `find_bounds`
returns numbers between which that box lies, mostly without computing it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm import read_autocast_state, switch_off, use_autocast_state
from partita.comm.device import HOST
from partita.graph.shared_memory import operands_written, shown_operand
from partita.tensor.op_facts import facts_of

from .fakes import is_symbolic

ATTENTION: Any = F.scaled_dot_product_attention
"""The function whose masks are left out."""

HIDDEN = -1e30
"""A number that is added to a score hides its key if it is no greater: the weight is 0 then, unless
scores are of that size themselves. Of float16, whose numbers are smaller, only -inf does."""

ROWS = 256
"""The most rows that are compared at once."""
_AT_ONCE = 2**22
"""Elements that are computed together, at most."""
MOST = 2**30
"""Numbers that are computed to look at one mask: two seconds of a core. The causal mask of 2^18
tokens takes a quarter of them, one of four times as many stays."""

FindNode = Callable[[torch.Tensor], tuple[fx.Node, Mapping[fx.Node, fx.Node]] | None]
"""Returns the node that makes a mask, and the nodes that others represent (see `KnownNode`)."""


class KnownMasks:
    """The masks of one capture run, and what was found of each."""

    def __init__(self) -> None:
        self._found: dict[Any, str] = {}

    def leave_out(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], find_node: FindNode
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call of attention, without its mask where that need not be there."""
        bound = _bind(*args, **kwargs)
        if bound is None:
            return args, kwargs
        query, key, value, mask, rest = bound
        shape = _shape_of(query)
        scores = (*shape[:-1], _shape_of(key)[-2])
        if not _is_of_scores(mask, query, scores):
            return args, kwargs
        place = find_node(mask)
        found = "" if place is None else self._what_is_hidden(*place, scores[-2:])
        if not found:
            return args, kwargs
        return (query, key, value), {**rest, "is_causal": found == "later keys"}

    def _what_is_hidden(
        self, node: fx.Node, entered: Mapping[fx.Node, fx.Node], scores: tuple[int, ...]
    ) -> str:
        """ "later keys", "nothing", or "" where that is not known, or it is something else."""
        try:
            known = KnownNode(node, entered)
        except NotKnown:
            return ""
        name = (known.key, scores)
        if name not in self._found:
            try:
                self._found[name] = what_is_hidden(known.find_value(), *scores)
            except Exception:  # a kernel that the CPU does not have, too: the mask stays
                self._found[name] = ""
        return self._found[name]


def _bind(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    **more: Any,
) -> Any:
    """Returns query, key, value, mask and the other arguments; None for a call whose mask stays.

    A call with dropout keeps its mask, because the kernel decides which weights are dropped.
    """
    if type(attn_mask) is not FakeTensor or is_causal is not False:
        return None
    if type(dropout_p) not in (int, float) or dropout_p:
        return None
    return query, key, value, attn_mask, {"dropout_p": dropout_p, **more}


def _shape_of(x: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor, of a DTensor the global one."""
    spec = getattr(x, "_spec", None)
    with Unheard():
        return tuple(x.shape if spec is None else spec.shape)


def _is_of_scores(mask: torch.Tensor, query: Any, scores: tuple[int, ...]) -> bool:
    """True for a mask that attention accepts for scores of this shape without broadcasting them."""
    with Unheard():
        shape, dtype = tuple(mask.shape), mask.dtype
        kinds = (torch.bool, query.dtype)
        casts = torch.is_autocast_enabled(mask.device.type) and dtype.is_floating_point
        alike = (dtype in kinds or casts) and mask.device.type == query.device.type
        if mask.requires_grad or not alike or not 2 <= len(shape) <= len(scores):
            return False
    pairs = zip(shape[::-1], scores[::-1], strict=False)
    return math.prod(scores) > 0 and all(n in (1, m) for n, m in pairs)


# -- what a mask hides -----------------------------------------------------------------------------


def what_is_hidden(mask: KnownValue, queries: int, keys: int) -> str:
    """Returns what a mask hides; every element is checked.

    Returns:
        "nothing"; "later keys": from each query those with a greater number; "" for anything else,
        or if the check would take too long.
    """
    look = _Look(mask, queries, keys)
    with computing():
        if look.holds(slice(0, 1), slice(keys - 1, keys), look.shown):
            return "nothing" if all(map(look.shows_all, look.chunks())) else ""
        return "later keys" if all(map(look.shows_earlier, look.chunks())) else ""


class _Look:
    """Looks at the elements of a mask, within a bound.

    Raises:
        NotKnown: there are too many.
    """

    def __init__(self, mask: KnownValue, queries: int, keys: int):
        self._mask, self._queries, self._keys = mask, queries, keys
        self._lead = [slice(0, n) for n in mask.shape[:-2]]
        self._times = math.prod(shape_without_repeats(mask)[:-2])
        self._left = MOST
        self._is_bool = mask.dtype is torch.bool
        self._least = -math.inf if mask.dtype is torch.float16 else HIDDEN

    def chunks(self) -> Iterator[slice]:
        """Yields all rows, some at a time."""
        step = max(1, min(ROWS, math.isqrt(_AT_ONCE // max(1, self._times))))
        for first in range(0, self._queries, step):
            yield slice(first, min(first + step, self._queries))

    def shown(self, x: Any) -> Any:
        """True for an element that shows its key."""
        return x if self._is_bool else x == 0

    def hidden(self, x: Any) -> Any:
        """True for an element that hides its key."""
        return x == 0 if self._is_bool else x <= self._least

    def shows_all(self, rows: slice) -> bool:
        """True if all keys are shown in these rows."""
        return self.holds(rows, slice(0, self._keys), self.shown)

    def shows_earlier(self, rows: slice) -> bool:
        """True if each of these rows shows the key of its own number, all before it, and no other.

        Before these rows' own keys all are shown, and after them all are hidden.
        """
        first, last = min(rows.start, self._keys), min(rows.stop, self._keys)
        if not self.holds(rows, slice(0, first), self.shown):
            return False
        if not self.holds(rows, slice(last, self._keys), self.hidden):
            return False
        part = self._compute(rows, slice(first, last))
        later = torch.arange(first, last) > torch.arange(rows.start, rows.stop).unsqueeze(-1)
        return bool(torch.where(later, self.hidden(part), self.shown(part)).all())

    def holds(self, rows: slice, columns: slice, test: Callable[[Any], Any]) -> bool:
        """True if a test holds for all elements in some rows and columns."""
        count = columns.stop - columns.start
        if not count:
            return True
        self._count((count + rows.stop - rows.start) // 16)
        bounds = find_bounds(self._mask, (*self._lead, rows, columns))
        if bounds is not None and all(map(test, bounds)):
            return True  # what lies between two numbers of which it holds
        step = max(1, _AT_ONCE // max(1, self._times * (rows.stop - rows.start)))
        return all(
            bool(test(self._compute(rows, slice(i, min(i + step, columns.stop)))).all())
            for i in range(columns.start, columns.stop, step)
        )

    def _compute(self, rows: slice, columns: slice) -> torch.Tensor:
        self._count(self._times * (rows.stop - rows.start) * (columns.stop - columns.start))
        return compute_part(self._mask, (*self._lead, rows, columns))

    def _count(self, elements: int) -> None:
        self._left -= elements * (1 + count_calls(self._mask))
        if self._left < 0:
            raise NotKnown


_aten = torch.ops.aten

LARGE = 2**20
"""Elements: a value of more is not computed as a whole."""
_MOST_NODES = 256
"""A value that depends on more nodes is not known."""
_MOST_CALLS = 64
"""A large value is unknown if a part of it takes more calls. Shared operands are computed again for
each call.
"""
_SURE = 2**31
"""Sums and differences of whole numbers below it do not overflow."""

Box = Sequence[slice]
"""For each dimension the places of some elements."""
Bounds = tuple[Any, Any]


class NotKnown(Exception):
    """A value is not computed from constants alone, or not in a way that is understood here."""


# -- large values ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LargeValue:
    """A tensor that an operator computes element by element of others, too large to be stored.

    Attributes:
        func, args, kwargs: the call. Operands are tensors, large values and numbers.
        sizes: the shape of the call's result.
        shown: a meta tensor that lies in memory as this value does, if that result is contiguous.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: tuple[int, ...]
    shown: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.shown.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.shown.dtype

    @cached_property
    def calls(self) -> int:
        """The number of calls that compute a part of it."""
        return 1 + sum(map(count_calls, self.args))

    def compute_part(self, box: Box) -> torch.Tensor:
        at, dims = self._locate(box)
        args = [compute_part(v, at) if _is_value(v) else v for v in self.args]
        found: torch.Tensor = self.func(*args, **self.kwargs)
        if found.dtype is not self.dtype:
            raise NotKnown
        kept = [dim for dim in dims if dim is not None]
        found = found.permute([*kept, *(i for i in range(found.ndim) if i not in kept)])
        sizes = iter(found.shape)
        return found.reshape([1 if dim is None else next(sizes) for dim in dims])

    def find_bounds(self, box: Box) -> Bounds | None:
        at, _ = self._locate(box)
        bounds = [find_bounds(v, at) if _is_value(v) else (v, v) for v in self.args]
        if None in bounds:
            return None
        # Where each operand is one number, so is the result, whatever computes it.
        if not (all(b[0] == b[1] for b in bounds if b) or self._is_monotone(bounds)):
            return None
        name = self.func._opname
        if name in ("eq", "ne"):  # as two comparisons, which are monotone
            pair = (_aten.le, _aten.ge) if name == "eq" else (_aten.lt, _aten.gt)
            join = all if name == "eq" else any
            lows, highs = zip(*(self._call_at_ends(func, bounds) for func in pair), strict=True)
            return join(lows), join(highs)
        found = self._call_at_ends(self.func, bounds)
        return None if math.isnan(found[0]) else found

    def _locate(self, box: Box) -> tuple[list[slice], list[int | None]]:
        """Returns where the elements of a box are in the result of the call.

        For each dimension of this value it also returns the dimension of the result, or None if its
        elements are equal.
        """
        strides = torch.empty(self.sizes, device="meta").stride()
        offset, firsts = int(self.shown.storage_offset()), list[int]()
        for size, stride in zip(self.sizes, strides, strict=True):
            first, offset = divmod(offset, stride) if size > 1 else (0, offset)
            firsts.append(first)
        at, dims = [slice(first, first + 1) for first in firsts], list[int | None]()
        dim_of = {stride: i for i, stride in enumerate(strides) if self.sizes[i] > 1}
        for asked, size, stride in zip(box, self.shape, self.shown.stride(), strict=True):
            if size == 1 or stride == 0:
                dims.append(None)
                continue
            dim = dim_of.pop(stride, None)
            if dim is None or firsts[dim] + size > self.sizes[dim]:
                raise NotKnown  # several dimensions as one, or not each of its elements
            at[dim] = slice(firsts[dim] + asked.start, firsts[dim] + asked.stop)
            dims.append(dim)
        return at, dims

    def _is_monotone(self, bounds: Sequence[Any]) -> bool:
        """True if the result is monotone in each operand, between their bounds."""
        name, is_truth = self.func._opname, self.dtype is torch.bool
        of_truths = all(not _is_value(v) or v.dtype is torch.bool for v in self.args)
        if not facts_of(self.func).is_monotone or (self.kwargs and name != "_to_copy"):
            return False
        if name.startswith(("bitwise", "logical")) or (name == "_to_copy" and is_truth):
            return of_truths
        if is_truth or self.dtype.is_floating_point:
            return True
        is_sure = all(low > -_SURE and high < _SURE for low, high in bounds)
        return self.dtype is torch.int64 and is_sure

    def _call_at_ends(self, func: Any, bounds: Sequence[Any]) -> Bounds:
        """Returns the least and the greatest result where each operand is one of its bounds."""
        args = [*self.args]
        for i, value in enumerate(args):
            if _is_value(value):
                ends = torch.tensor(bounds[i]).to(value.dtype)
                shape = [2 if i == n else 1 for n in range(len(args))]
                args[i] = ends.reshape(shape) if len(value.shape) else ends[0]
        low, high = torch.aminmax(func(*args, **self.kwargs))
        return low.item(), high.item()


KnownValue = torch.Tensor | LargeValue


def _is_value(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, LargeValue))


def count_calls(value: Any) -> int:
    """Returns the number of calls that compute a part of a value."""
    return value.calls if isinstance(value, LargeValue) else 0


def shape_without_repeats(value: KnownValue) -> tuple[int, ...]:
    """The shape of a value, with 1 for dimensions of stride 0, along which elements are equal."""
    shown = value.shown if isinstance(value, LargeValue) else value
    pairs = zip(shown.shape, shown.stride(), strict=True)
    return tuple(size if stride else 1 for size, stride in pairs)


def compute_part(value: KnownValue, box: Box) -> torch.Tensor:
    """The elements of a value in a box: of its last dimensions where that has more. Dimensions of
    equal elements have size 1."""
    box = box[len(box) - len(value.shape) :]
    if isinstance(value, LargeValue):
        return value.compute_part(box)
    sizes = shape_without_repeats(value)
    return value[tuple(slice(0, 1) if n == 1 else at for n, at in zip(sizes, box, strict=True))]


def find_bounds(value: KnownValue, box: Box) -> Bounds | None:
    """Two numbers between which the elements in a box lie; None where that is not known."""
    found: Bounds | None = None
    if isinstance(value, LargeValue):
        found = value.find_bounds(box[len(box) - len(value.shape) :])
    elif (part := compute_part(value, box)).numel() and not part.is_complex():
        low, high = (x.item() for x in torch.aminmax(part))
        found = None if math.isnan(low) else (low, high)
    return (False, True) if found is None and value.dtype is torch.bool else found


# -- values of nodes -------------------------------------------------------------------------------


class KnownNode:
    """A node whose value depends on constants alone, as far as its graph shows.

    Args:
        node: of the graph that is being traced.
        entered: by the node in a traced block that represents a tensor from outside, the node of
            that tensor in the block that follows the trace.

    Raises:
        NotKnown: something else affects it, or it is written in a way that is not tracked.
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

    def find_value(self) -> Any:
        """The value: a `KnownValue`, or a number. Raises NotKnown where it cannot be computed."""
        mode = get_proxy_mode()
        root = getattr(mode and mode.tracer, "root", None)
        known: dict[fx.Node, Any] = {}
        reads = {node: {*map(self._resolve, node.all_input_nodes)} for node in self._order}
        last_reader = {read: node for node in self._order for read in reads[node]}
        with computing():
            for node in self._order:
                known[node] = _compute_node(node, lambda n: known.get(self._resolve(n)), root)
                for read in reads[node]:
                    if last_reader[read] is node:  # values may be large
                        known.pop(read, None)
        return known[self._end]

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
        """Raise NotKnown if the memory of `node` is written between it and its reader.

        The write may go through a view, or through what it is a view of. The reader would get the
        older content.

        Args:
            reader: the call that reads it; None if that has no node yet.
            writes: by the node that makes some memory, the calls that write it; is added to.
        """
        root = node
        while (shown := shown_operand(root)[0]) is not None:
            root = self._resolve(shown)
        if root not in writes:
            writes[root] = [*_find_writes(root)]
        for write in writes[root]:
            if node < write and (reader is None or write < reader):
                raise NotKnown


def _find_writes(root: fx.Node) -> Iterator[fx.Node]:
    """Yields the calls that write the memory that `root` makes."""
    ahead, done = [root], {root}
    while ahead:
        shows = ahead.pop()
        for user in shows.users:
            if user not in done and shows in operands_written(user):
                yield user
            if user not in done and shown_operand(user)[0] is shows:
                done.add(user)
                ahead.append(user)


def _operands_of(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values that of `node` depends on. Raises NotKnown for a node that is no call
    whose result its operands decide."""
    target: Any = node.target
    is_python = not isinstance(target, torch._ops.OpOverload) and node.op == "call_function"
    reckons = is_python and is_symbolic(node.meta.get("val"))
    if node.op == "get_attr" or target is operator.getitem or reckons:
        return node.all_input_nodes
    if node.op != "call_function" or getattr(target, "namespace", "") != "aten":
        raise NotKnown
    facts, writes = facts_of(target), facts_of(target).writes
    if facts.draws or facts.changes_metadata or facts.by_storage or "empty" in target._opname:
        raise NotKnown
    if writes and not _writes_first(target):
        raise NotKnown
    return [n for n in node.all_input_nodes if n is not node.args[0] or not facts.overwrites]


def _writes_first(target: Any) -> bool:
    """True if an operator writes only its first operand, and returns it: `x.add_(y)`."""
    first, *more = facts_of(target).writes
    return not more and first.place == 0 and not first.is_list and target._opname.endswith("_")


# -- computing a node ------------------------------------------------------------------------------


@contextmanager
def computing() -> Iterator[None]:
    """Compute inside the block as torch normally does: nothing is traced, intercepted, cast or
    saved.
    """
    casts_off = use_autocast_state(switch_off(read_autocast_state()))
    with _disable_current_modes(), Unheard(), torch.no_grad(), casts_off:
        yield


def _compute_node(node: fx.Node, value_of: Callable[[fx.Node], Any], root: Any) -> Any:
    if node.op == "get_attr":
        return _check_constant(functools.reduce(getattr, str(node.target).split("."), root))
    if node.target is operator.getitem:
        return value_of(node.args[0])[node.args[1]]  # type: ignore[arg-type,index]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    kwargs = {k: HOST if k == "device" else v for k, v in kwargs.items()}
    like = node.meta.get("val")
    if is_symbolic(like):
        return node.target(*args, **kwargs)  # type: ignore[operator]
    found = _call(_without_writing(node.target), node, args, kwargs, like)
    if isinstance(found, (list, tuple)):
        return found
    if not isinstance(like, torch.Tensor) or (found.shape, found.dtype) != (like.shape, like.dtype):
        raise NotKnown
    return found


def _without_writing(target: Any) -> Any:
    """Returns the operator that gives what `target` writes."""
    if not facts_of(target).writes:
        return target
    return getattr(getattr(_aten, target._opname.removesuffix("_")), target._overloadname)


def _call(target: Any, node: fx.Node, args: Any, kwargs: Any, like: Any) -> Any:
    facts, name = facts_of(target), target._opname
    names = [a.name for a in target._schema.arguments]
    if facts.overwrites or ("size" in names and not node.all_input_nodes):
        return _fill(target, node, args, kwargs, like)
    if facts.is_alias or facts.lifts or facts.casts or name == "clone":
        return args[0] if args[0].dtype is like.dtype else _convert(args[0], like)
    if torch.Tag.pointwise in target.tags or name == "masked_fill":
        return _compute_elementwise(target, args, kwargs, like)
    if facts.is_view and "stride" not in names:
        return _view(target, args, kwargs)
    if name in ("triu", "tril"):
        return _keep_triangle(target, *args, like=like)
    is_large = isinstance(like, torch.Tensor) and like.numel() > LARGE
    if is_large or facts.is_view or any(map(count_calls, pytree.tree_leaves(args))):
        raise NotKnown
    found = target(*args, **kwargs)
    return [*found] if isinstance(found, (list, tuple)) else _without_repeats(found)


def _check_constant(value: Any) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        raise NotKnown
    if value.numel() > LARGE or value.is_meta:
        raise NotKnown
    return value.to(HOST).clone()


def _without_repeats(found: torch.Tensor) -> torch.Tensor:
    """Returns a computed value; integers and bools that are equal along a dimension are stored
    once.
    """
    if found.is_floating_point() or found.is_complex() or not found.numel():
        return found
    values = found
    for dim in range(values.ndim):
        first = values.narrow(dim, 0, 1)
        if values.shape[dim] > 1 and bool((values == first).all()):
            values = first
    return values.clone().expand(found.shape)


def _fill(target: Any, node: fx.Node, args: Any, kwargs: Any, like: Any) -> torch.Tensor:
    """The value of a call that gives all elements of its result one number, or copies another."""
    if target._opname == "copy":
        value = args[1]
        value = value if value.dtype is like.dtype else _convert(value, like)
        return _view(_aten.expand.default, (value, like.shape), {})  # type: ignore[no-any-return]
    names = (a.name for a in target._schema.arguments)
    given = [[] if name == "size" else a for name, a in zip(names, args, strict=False)]
    if facts_of(target).overwrites:
        first: Any = node.args[0]
        given[0] = torch.empty((), dtype=first.meta["val"].dtype)
    found: torch.Tensor = target(*given, **kwargs)
    return found.expand(like.shape)


def _convert(value: KnownValue, like: Any) -> KnownValue:
    shown = torch.empty(value.shape, dtype=like.dtype, device="meta")
    return _compute_elementwise(_aten._to_copy.default, (value,), {"dtype": like.dtype}, shown)


def _compute_elementwise(func: Any, args: Any, kwargs: Any, like: Any) -> KnownValue:
    operands = [v for v in args if _is_value(v)]
    if torch.broadcast_shapes(*(v.shape for v in operands)) != like.shape:
        raise NotKnown
    sizes = tuple(torch.broadcast_shapes(*map(shape_without_repeats, operands)))
    shown = torch.empty(sizes, dtype=like.dtype, device="meta")
    found = LargeValue(func, tuple(args), kwargs, sizes, shown)
    if found.calls > _MOST_CALLS:
        raise NotKnown
    return _store_small(replace(found, shown=shown.expand(like.shape)))


def _store_small(value: LargeValue) -> KnownValue:
    """Returns a value, computed if it is not large."""
    if math.prod(shape_without_repeats(value)) > LARGE:
        return value
    part = value.compute_part([slice(0, n) for n in value.shape])
    return _without_repeats(part).expand(value.shape)


def _view(target: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of a call that shows a value otherwise, or each of its results."""
    value, *rest = args
    if not isinstance(value, LargeValue):
        try:
            return target(value, *rest, **kwargs)
        except RuntimeError:  # what is stored once is a view only in memory of its own
            if value.numel() > LARGE:
                raise NotKnown from None
            return target(value.contiguous(), *rest, **kwargs)
    if not facts_of(target).moves:
        raise NotKnown
    try:
        shown = target(value.shown, *rest, **kwargs)
    except RuntimeError:
        raise NotKnown from None
    if isinstance(shown, (list, tuple)):
        return [_store_small(replace(value, shown=one)) for one in shown]
    return _store_small(replace(value, shown=shown))


def _keep_triangle(target: Any, value: KnownValue, diagonal: int = 0, *, like: Any) -> KnownValue:
    """`torch.triu` or `torch.tril` of a value."""
    rows, columns = value.shape[-2:]
    below = torch.arange(rows).unsqueeze(1) + diagonal
    square = torch.empty(rows, columns, dtype=torch.bool, device="meta")
    inside = _aten.ge.Tensor if target._opname == "triu" else _aten.le.Tensor
    kept = _compute_elementwise(inside, (torch.arange(columns), below), {}, square)
    none = torch.zeros((), dtype=value.dtype)
    return _compute_elementwise(_aten.where.self, (kept, value, none), {}, like)
