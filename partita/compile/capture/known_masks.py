"""Known masks: attention whose mask is the causal one, or hides nothing, takes none in the graph.

Models make masks of places. One that hides from each query the keys after it says what `is_causal`
says; but with a mask torch takes a slower kernel than flash attention, which reads (queries, keys)
numbers more and keeps them for backward. Libraries know, and leave such masks out in eager; where
they see that they are traced they make one all the same (transformers does, as it asks of positions
whether several texts lie in a row). So where a mask is computed from constants alone
(`known_values`) it is computed once, at capture, and left out of the call:

    scaled_dot_product_attention(q, k, v, mask)  ->  ...(q, k, v, is_causal=True), or no mask at all

Every element is looked at. A mask that an input or a draw has a part in stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from .known_values import (
    KnownNode,
    KnownValue,
    NotKnown,
    compute_part,
    computing,
    count_calls,
    find_bounds,
    shape_without_repeats,
)

ATTENTION: Any = F.scaled_dot_product_attention
"""The function whose masks are left out."""

HIDDEN = -1e30
"""A number that is added to a score hides its key if it is no greater: the weight is 0 then, unless
scores are of that size themselves. Of float16, whose numbers are smaller, only -inf does."""

ROWS = 256
"""Rows that are looked at together, at most."""
_AT_ONCE = 2**22
"""Elements that are computed together, at most."""
MOST = 2**30
"""Numbers that are computed to look at one mask: two seconds of a core. The causal mask of 2^18
tokens takes a quarter of them, one of four times as many stays."""

FindNode = Callable[[torch.Tensor], tuple[fx.Node, Mapping[fx.Node, fx.Node]] | None]
"""Gives the node that makes a mask, and the nodes that others stand for (see `KnownNode`)."""


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
    """Query, key, value, mask and the other arguments; None of a call whose mask stays.

    With dropout it does: which weights are dropped is the kernel's own choice.
    """
    if type(attn_mask) is not FakeTensor or is_causal is not False:
        return None
    if type(dropout_p) not in (int, float) or dropout_p:
        return None
    return query, key, value, attn_mask, {"dropout_p": dropout_p, **more}


def _shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a tensor, of a DTensor the global one."""
    spec = getattr(x, "_spec", None)
    with Unheard():
        return tuple(x.shape if spec is None else spec.shape)


def _is_of_scores(mask: torch.Tensor, query: Any, scores: tuple[int, ...]) -> bool:
    """Is it a mask that attention takes for scores of this shape, which it does not make larger?"""
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
    """What a mask hides, whose elements are all looked at.

    Returns:
        "nothing"; "later keys": from each query those of a greater number; "" if something else,
        or if it takes too long to tell.
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
        """All rows, some at a time."""
        step = max(1, min(ROWS, math.isqrt(_AT_ONCE // max(1, self._times))))
        for first in range(0, self._queries, step):
            yield slice(first, min(first + step, self._queries))

    def shown(self, x: Any) -> Any:
        """Does an element show its key?"""
        return x if self._is_bool else x == 0

    def hidden(self, x: Any) -> Any:
        """Does an element hide its key?"""
        return x == 0 if self._is_bool else x <= self._least

    def shows_all(self, rows: slice) -> bool:
        """Are all keys shown in these rows?"""
        return self.holds(rows, slice(0, self._keys), self.shown)

    def shows_earlier(self, rows: slice) -> bool:
        """Is the key of a row's own number, with all before it, shown in these rows, and no other?

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
        """Does a test hold for all elements in some rows and columns?"""
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
