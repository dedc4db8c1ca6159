"""Known masks: removes attention masks that are causal or hide nothing, so that fast kernels can
run.

With a mask torch uses a slower kernel than flash attention, and saves one more tensor of shape
(queries, keys) for backward. Libraries omit such masks in eager, but make them when they are
traced. So a mask that depends only on constants is computed once, at capture, and removed from the
call:

    scaled_dot_product_attention(q, k, v, mask)  ->  ...(q, k, v, is_causal=True), or no mask at all

Every element is checked. A mask that depends on an input or on random numbers stays.

A value depends on constants alone if factories (`arange`, `full`), metadata and arithmetic make it,
and no input of the graph, no number that may change, no generator and no custom operator affects
it. It is then the same in every call of the program. It is computed on the CPU, whatever the device
of the step: in one piece if it is small, otherwise one block of rows and columns after another.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm import read_autocast_state, switch_off, use_autocast_state
from partita.comm.device import HOST
from partita.graph.shared_memory import operands_written, shown_operand
from partita.tensor.op_facts import facts_of

from .fakes import is_symbolic

ATTENTION: Any = F.scaled_dot_product_attention
"""The function whose masks are removed."""

HIDDEN = -1e30
"""A mask element that is at most this hides its key: added to the key's score, it makes the weight
0, unless scores are as large. In float16, whose numbers are smaller, only -inf hides a key."""

ROWS = 256
"""The most rows that are computed at once."""
AT_ONCE = 2**22
"""The most elements that are computed at once."""
MOST = 2**33
"""The most numbers that are computed for one mask: some seconds of a core. That suffices for a
causal mask of 2^16 tokens."""
LARGE = 2**20
"""The most elements of a value that is computed in one piece."""
_MOST_NODES = 256
"""The most nodes that a known value may depend on."""

_aten = torch.ops.aten


class NotKnown(Exception):
    """Raised if a value cannot be computed at capture.

    It depends on more than constants, or computing it is not supported.
    """


class KnownMasks:
    """The attention masks that one capture has found, and what each of them hides."""

    def __init__(self) -> None:
        self._found: dict[Any, str] = {}

    def leave_out(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        find_node: Callable[[torch.Tensor], fx.Node | None],
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns the arguments of an attention call, without a mask that is not needed.

        A mask that hides nothing is left out. A causal mask is replaced by `is_causal=True`.

        Args:
            args, kwargs: the arguments of `scaled_dot_product_attention`.
            find_node: a function from a mask to the node that makes it, or None.
        """
        bound = _bind(*args, **kwargs)
        if bound is None:
            return args, kwargs
        query, key, value, mask, rest = bound
        shape = _shape_of(query)
        scores = (*shape[:-1], _shape_of(key)[-2])
        if not _is_of_scores(mask, query, scores):
            return args, kwargs
        node = find_node(mask)
        found = "" if node is None else self._find_hidden(node, scores[-2:])
        if not found:
            return args, kwargs
        return (query, key, value), {**rest, "is_causal": found == "later keys"}

    def _find_hidden(self, node: fx.Node, scores: tuple[int, ...]) -> str:
        """Returns `find_hidden` of the mask that a node makes; "" also if it cannot be computed."""
        try:
            known = KnownNode(node)
        except NotKnown:
            return ""
        name = (known.key, scores)
        if name not in self._found:
            try:
                self._found[name] = find_hidden(known, *scores)
            except Exception:  # for example, the CPU lacks a kernel; then the mask stays
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
    """Returns (query, key, value, mask, other arguments) of a call; None if the mask stays.

    A call with dropout keeps its mask, because the kernel decides which weights are dropped.
    """
    if type(attn_mask) is not FakeTensor or is_causal is not False:
        return None
    if type(dropout_p) not in (int, float) or dropout_p:
        return None
    return query, key, value, attn_mask, {"dropout_p": dropout_p, **more}


def _shape_of(x: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor; for a DTensor the global one."""
    spec = getattr(x, "_spec", None)
    with DisableTorchFunction():
        return tuple(x.shape if spec is None else spec.shape)


def _is_of_scores(mask: torch.Tensor, query: Any, scores: tuple[int, ...]) -> bool:
    """True if a mask can be broadcast to scores of this shape, and attention accepts its dtype."""
    with DisableTorchFunction():
        shape, dtype = tuple(mask.shape), mask.dtype
        kinds = (torch.bool, query.dtype)
        casts = torch.is_autocast_enabled(mask.device.type) and dtype.is_floating_point
        alike = (dtype in kinds or casts) and mask.device.type == query.device.type
        if mask.requires_grad or not alike or not 2 <= len(shape) <= len(scores):
            return False
    pairs = zip(shape[::-1], scores[::-1], strict=False)
    return math.prod(scores) > 0 and all(n in (1, m) for n, m in pairs)


# -- keys that a mask hides ------------------------------------------------------------------------


def find_hidden(mask: KnownNode, queries: int, keys: int) -> str:
    """Computes which keys a mask hides from the queries. Every element is checked.

    Args:
        mask: the mask, with `queries` rows and `keys` columns.

    Returns:
        "nothing"; "later keys" if it hides from each query the keys of greater index; "" otherwise.

    Raises:
        NotKnown: the mask cannot be computed, or that would take too long.
    """
    with computing_on_host():
        mask.compute()
        corner = _without_repeats(mask.compute_block(slice(0, 1), slice(keys - 1, keys)))
        times = corner.numel()
        if queries * keys * times * (1 + mask.large_count) > MOST:
            raise NotKnown
        is_bool = corner.dtype is torch.bool
        least = -math.inf if corner.dtype is torch.float16 else HIDDEN

        def are_shown(x: torch.Tensor) -> torch.Tensor:
            return x if is_bool else x == 0

        def are_hidden(x: torch.Tensor) -> torch.Tensor:
            return ~x if is_bool else x <= least

        hides_later = not are_shown(corner).all()
        for rows, columns in _blocks_of(queries, keys, times):
            block = _without_repeats(mask.compute_block(rows, columns))
            if not hides_later or columns.stop <= rows.start + 1:
                is_right = are_shown(block)
            elif columns.start >= rows.stop:
                is_right = are_hidden(block)
            else:
                earlier = torch.ones(1, 1, dtype=torch.bool).expand(_sizes_of(rows, columns))
                earlier = earlier.tril(rows.start - columns.start)
                is_right = torch.where(earlier, are_shown(block), are_hidden(block))
            if not is_right.all():
                return ""
    return "later keys" if hides_later else "nothing"


def _blocks_of(queries: int, keys: int, times: int) -> Iterator[tuple[slice, slice]]:
    """Yields the rows and columns of blocks that cover all elements once.

    Args:
        times: the product of the leading dimensions, which each block has in full.
    """
    height = max(1, min(ROWS, math.isqrt(AT_ONCE // max(1, times))))
    width = max(1, AT_ONCE // max(1, times * height))
    for row in range(0, queries, height):
        for column in range(0, keys, width):
            yield slice(row, min(row + height, queries)), slice(column, min(column + width, keys))


def _sizes_of(rows: slice, columns: slice) -> tuple[int, int]:
    return rows.stop - rows.start, columns.stop - columns.start


# -- known values ----------------------------------------------------------------------------------


class KnownNode:
    """A node of a graph whose value is known at capture, because it depends on constants alone.

    Args:
        node: a node of the graph that is being traced.

    Raises:
        NotKnown: something other than constants affects it, or a write to it is not tracked.
    """

    def __init__(self, node: fx.Node):
        mode = get_proxy_mode()
        self._holder = getattr(mode and mode.tracer, "root", None)
        self._end = node
        self._order: list[fx.Node] = []
        self._values: dict[fx.Node, Any] = {}  # of nodes that are computed in one piece
        self._collect()

    @property
    def key(self) -> tuple[fx.Node, ...]:
        """The nodes from which the value is computed. Nodes with the same value have equal keys."""
        return (*self._order,)

    @property
    def large_count(self) -> int:
        """The number of nodes that are too large to be computed in one piece."""
        return sum(node not in self._values for node in self._order)

    def compute(self) -> None:
        """Computes the values of all nodes that are small enough. Keeps the values needed later."""
        values = self._values
        last_reader = {read: n for n in self._order for read in n.all_input_nodes}
        needed, large = {self._end}, set[fx.Node]()
        for node in self._order:
            reads = node.all_input_nodes
            if large.isdisjoint(reads) and _has_small_memory(node):
                values[node] = _compute_node(node, values.get, self._holder)
            else:
                large.add(node)
                needed.update(reads)
            for read in reads:
                if last_reader[read] is node and read not in needed and read in values:
                    values[read] = None

    def compute_block(self, rows: slice, columns: slice) -> torch.Tensor:
        """Computes a block of the value: some rows and columns (of the last two dimensions).

        Dimensions of size 1 are kept.

        Raises:
            NotKnown: a part of the value cannot be computed without the rest.
        """
        return self._compute_block(self._end, rows, columns, {})

    def _compute_block(self, node: fx.Node, rows: slice, columns: slice, done: Any) -> torch.Tensor:
        key = node, rows.start, columns.start, rows.stop, columns.stop
        if key not in done:
            if node in self._values:
                done[key] = _take_block(self._values[node], rows, columns)
            else:
                done[key] = self._compute_block_of_call(node, rows, columns, done)
        found: torch.Tensor = done[key]
        return found

    def _compute_block_of_call(
        self, node: fx.Node, rows: slice, columns: slice, done: Any
    ) -> torch.Tensor:
        like: Any = node.meta.get("val")
        target: Any = node.target
        operand: Any = node.args[0] if node.args else None
        if not isinstance(like, torch.Tensor) or not isinstance(operand, fx.Node):
            raise NotKnown

        def block_of(read: fx.Node) -> Any:
            value = self._values.get(read)
            if value is not None and not isinstance(value, torch.Tensor):
                return value
            return self._compute_block(read, rows, columns, done)

        facts, name = facts_of(target), target._opname.removesuffix("_")
        size = tuple(_block_size(like.shape, rows, columns))
        if name == "copy":
            value: Any = node.args[1]
            return block_of(value).to(like.dtype).expand(size)  # type: ignore[no-any-return]
        if torch.Tag.pointwise in target.tags or name == "masked_fill" or facts.casts:
            mapped: Any = fx.node.map_arg((node.args, dict(node.kwargs)), block_of)
            args, kwargs = mapped
            args = [_without_repeats(a) if isinstance(a, torch.Tensor) else a for a in args]
            found: torch.Tensor = _without_writing(target)(*args, **_on_host(kwargs))
            if found.dtype is not like.dtype:
                raise NotKnown
            return found.expand(size)
        if facts.is_alias or facts.lifts or name == "clone":
            return block_of(operand)  # type: ignore[no-any-return]
        if name in ("triu", "tril"):
            given: Any = (*node.args[1:], node.kwargs.get("diagonal", 0))
            down, right = (
                0 if n == 1 else at.start
                for n, at in zip(like.shape[-2:], (rows, columns), strict=True)
            )
            return _without_writing(target)(block_of(operand), given[0] + down - right)  # type: ignore[no-any-return]
        shape = operand.meta["val"].shape
        if _swaps_last_two(name, node.args[1:], len(shape)):
            return self._compute_block(operand, columns, rows, done).mT
        if name in _LEADING_VIEWS and shape[-2:] == like.shape[-2:]:
            block = block_of(operand)
            if name == "expand":
                return block.expand(size)  # type: ignore[no-any-return]
            if math.prod(shape) == like.numel():
                return block.reshape(size)  # type: ignore[no-any-return]
        raise NotKnown

    def _collect(self) -> None:
        """Orders the nodes that the value depends on, operands first."""
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
                for read in _operands_of(node):
                    self._refuse_later_writes(read, node, writes)
                    ahead.append((read, False))

    def _refuse_later_writes(
        self, node: fx.Node, reader: fx.Node | None, writes: dict[fx.Node, list[fx.Node]]
    ) -> None:
        """Raises NotKnown if the memory of `node` is written between it and its reader.

        The write may go through a view, or through the base of a view, which the values here do not
        follow.

        Args:
            reader: the call that reads it; None if that has no node yet.
            writes: a cache: by the node that makes some memory, the calls that write it.
        """
        root = node
        while (shown := shown_operand(root)[0]) is not None:
            root = shown
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
    """Returns the nodes that decide the value of `node`; raises NotKnown if more than these do."""
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
def computing_on_host() -> Iterator[None]:
    """Makes torch compute real values inside the `with` block, without tracing or modes."""
    casts_off = use_autocast_state(switch_off(read_autocast_state()))
    with _disable_current_modes(), DisableTorchFunction(), torch.no_grad(), casts_off:
        yield


def _has_small_memory(node: fx.Node) -> bool:
    """True if a node's value needs little memory: it is small, a view, or expanded."""
    like, target = node.meta.get("val"), node.target
    if not isinstance(like, torch.Tensor) or like.numel() <= LARGE:
        return True
    is_call = isinstance(target, torch._ops.OpOverload)
    return is_call and (_is_fill(node) or facts_of(target).is_view)


def _is_fill(node: fx.Node) -> bool:
    """True for a call that gives all elements of its result one number."""
    target: Any = node.target
    if target._opname in ("copy", "copy_"):
        return False
    names = (a.name for a in target._schema.arguments)
    return facts_of(target).overwrites or ("size" in names and not node.all_input_nodes)


def _compute_node(node: fx.Node, value_of: Callable[[fx.Node], Any], root: Any) -> Any:
    """Returns the value of a node: a tensor, a list or a number.

    Integers and bools that are equal along a dimension are stored once, by a stride of 0.
    """
    if node.op == "get_attr":
        return _check_constant(functools.reduce(getattr, str(node.target).split("."), root))
    given: Any = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    args, kwargs = [*given[0]], _on_host(given[1])
    target, like = _without_writing(node.target), node.meta.get("val")
    if node.target is operator.getitem or is_symbolic(like):
        return target(*args, **kwargs)
    if target._opname == "copy":
        return args[1].to(like.dtype).expand(like.shape)  # type: ignore[union-attr]
    if _is_fill(node):
        names = (a.name for a in target._schema.arguments)
        args = [[] if name == "size" else a for name, a in zip(names, args, strict=False)]
        if facts_of(node.target).overwrites:
            args[0] = torch.empty((), dtype=like.dtype)  # type: ignore[union-attr]
        found = target(*args, **kwargs).expand(like.shape)  # type: ignore[union-attr]
    elif facts_of(target).is_view:
        try:
            found = target(*args, **kwargs)
        except RuntimeError:  # an expanded tensor lacks some views that the original has
            if args[0].numel() > LARGE:
                raise NotKnown from None
            found = target(args[0].contiguous(), *args[1:], **kwargs)
    else:
        found = target(*args, **kwargs)
    if isinstance(found, (list, tuple)):
        return [*found]
    if not isinstance(like, torch.Tensor) or (found.shape, found.dtype) != (like.shape, like.dtype):
        raise NotKnown
    return found if found.numel() > LARGE else _store_once(found)


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: HOST if k == "device" else v for k, v in kwargs.items()}


def _without_writing(target: Any) -> Any:
    """Returns the operator that returns what `target` writes."""
    if not facts_of(target).writes:
        return target
    return getattr(getattr(_aten, target._opname.removesuffix("_")), target._overloadname)


def _check_constant(value: Any) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        raise NotKnown
    if value.numel() > LARGE or value.is_meta:
        raise NotKnown
    return value.to(HOST).clone()


def _store_once(found: torch.Tensor) -> torch.Tensor:
    if found.is_floating_point() or found.is_complex() or not found.numel():
        return found
    values = found
    for dim in range(values.ndim):
        first = values.narrow(dim, 0, 1)
        if values.shape[dim] > 1 and bool((values == first).all()):
            values = first
    return values.clone().expand(found.shape)


# -- blocks of a value -----------------------------------------------------------------------------

_LEADING_VIEWS = ("expand", "view", "_unsafe_view", "unsqueeze", "squeeze", "slice")
"""Views that keep the matrices in the last two dimensions, in order, if these keep their sizes
and the number of elements is equal, or grows by `expand`."""


def _block_size(shape: Sequence[int], rows: slice, columns: slice) -> Iterator[int]:
    """Yields the sizes of a block of a value, dimension by dimension."""
    cut = (*(slice(0, n) for n in shape[:-2]), rows, columns)[-len(shape) :] if shape else ()
    for size, at in zip(shape, cut, strict=True):
        yield 1 if size == 1 else at.stop - at.start


def _take_block(value: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    sizes = zip(value.shape[::-1], (columns, rows), strict=False)
    last = [slice(0, 1) if n == 1 else at for n, at in sizes]
    return value[(..., *last[::-1])]


def _without_repeats(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of size 1 in each dimension of stride 0."""
    return x[tuple(slice(None) if step else slice(0, 1) for step in x.stride())]


def _swaps_last_two(name: str, dims: Sequence[Any], ndim: int) -> bool:
    """True if a view call of `ndim` dimensions swaps the last two, and no other."""
    if name == "permute":
        places = [dim % ndim for dim in dims[0]]
        return ndim > 1 and places == [*range(ndim - 2), ndim - 1, ndim - 2]
    swapped = name == "transpose" and {dim % ndim for dim in dims} == {ndim - 2, ndim - 1}
    return name == "t" or swapped
