"""Cuts: the dimensions that a move divides into pieces or joins, and where the pieces lie.

Pieces are found by arithmetic on the sizes of the axes, never by asking each rank: all full pieces
come first (as `torch.chunk` has it), so that along each axis they are a run of equal pieces at
equal distances, then at most one that is shorter, then empty ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from partita.layout import Layout, LayoutError, Mesh
from partita.redistribute.move import count_common_axes

if TYPE_CHECKING:
    from partita.redistribute import Move

Number = Any
"""An int, or a tensor of ints."""


@dataclass(frozen=True)
class Cut:
    """A dimension that a move changes: which axes go on splitting it, and which begin or cease to.

    Only axes of more than one rank are named.

    Attributes:
        dim, size: the dimension, and its global size.
        outer: the axes that split it before and after, outermost first.
        inner: the axes that split it further on one side of the move.
        outer_parts, parts: the number of ranks along each axis of `outer`, of `inner`.
    """

    dim: int
    size: int
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    outer_parts: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def even(self) -> bool:
        return self.size % math.prod(self.outer_parts + self.parts) == 0

    @property
    def first_length(self) -> int:
        """The elements of the first rank's piece, which no rank's exceeds."""
        return padded_length(self.size, self.outer_parts + self.parts)


def find_cuts(move: Move, mesh: Mesh) -> tuple[list[Cut], list[Cut]]:
    """The dimensions whose pieces `move` joins, and those that it divides.

    Raises:
        LayoutError: one move of its kind cannot lead from `before` to `after`.
    """
    joined = _cut_further(move.before, move.after, mesh)
    divided = _cut_further(move.after, move.before, mesh)
    leave, enter = ({a for cut in cuts for a in cut.inner} for cuts in (joined, divided))
    moved = {a for a in move.axes if mesh.size(a) > 1}
    fits = {
        "all_gather": leave == moved and not enter,
        "place": leave == moved and not enter,
        "reduce_scatter": enter == moved and not leave,
        "slice": enter == moved and not leave,
        "all_to_all": leave == enter <= moved,
    }
    if move.before.shape != move.after.shape or not fits[move.kind]:
        raise LayoutError(
            f"one {move.kind} over {' '.join(move.axes)} cannot make "
            f"{move.after.brief()} of {move.before.brief()}",
            reason="the pieces that its ranks hold do not tile what they are to hold",
        )
    return joined, divided


def is_restack(
    joined: Sequence[Cut], divided: Sequence[Cut], axes: Sequence[str], mesh: Mesh
) -> bool:
    """Does an all_to_all over `axes` change which axes cut a dimension, or in which order they do?

    Then the overlaps of two ranks' pieces form no grid.
    """
    moved = {a for a in axes if mesh.size(a) > 1}
    both = {cut.dim for cut in joined} & {cut.dim for cut in divided}
    return bool(both) or {a for cut in joined for a in cut.inner} != moved


def _cut_further(cut: Layout, whole: Layout, mesh: Mesh) -> list[Cut]:
    """The dimensions that are cut further in `cut` than in `whole`."""
    found = []
    for dim, (size, have, want) in enumerate(zip(cut.shape, cut.shards, whole.shards, strict=True)):
        if have == want:
            continue
        axes, kept = (tuple(a for a in stack if mesh.size(a) > 1) for stack in (have, want))
        same = count_common_axes(axes, kept)
        if same < len(axes):
            outer, inner = axes[:same], axes[same:]
            parts = [tuple(mesh.size(a) for a in stack) for stack in (outer, inner)]
            found.append(Cut(dim, size, outer, inner, *parts))
    return found


# -- where pieces are, as numbers or tensors -------------------------------------------------------


def span(length: Number, parts: Sequence[int], places: Sequence[Number]) -> tuple[Number, Number]:
    """`(start, length)` of the piece at `places`, where `length` elements are cut into `parts[0]`
    pieces, each of these into `parts[1]`, and so on."""
    start: Number = 0
    for n, place in zip(parts, places, strict=True):
        step = _ceil_div(length, n)
        at = least(place * step, length)
        start = start + at
        length = least(step, length - at)
    return start, length


def places_of(at: Number, length: Number, parts: Sequence[int]) -> tuple[list[Number], Number]:
    """The inverse of `span`: the place on each axis of the piece that the elements `at` are in, and
    where in it they are.

    Args:
        at: indices from 0 to `length`.
    """
    places: list[Number] = []
    left = length
    for n in parts:
        step = _ceil_div(left, n)
        step = step.clamp(min=1) if isinstance(step, torch.Tensor) else max(step, 1)
        here = at // step
        places.append(here)
        at = at - here * step
        left = least(step, left - here * step)
    return places, at


def unravel(i: int, sizes: Sequence[int]) -> list[int]:
    """The place along each axis of rank `i`, the last axis fastest."""
    places = []
    for n in reversed(sizes):
        i, place = divmod(i, n)
        places.append(place)
    return places[::-1]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch has them: an empty dimension counts as one."""
    return tuple(math.prod([max(n, 1) for n in shape[i + 1 :]]) for i in range(len(shape)))


def padded_length(size: int, parts: Sequence[int]) -> int:
    """The elements of the first piece."""
    for n in parts:
        size = -(-size // n)
    return size


def ends_last(size: int, parts: Sequence[int]) -> bool:
    """Is all padding behind all data where the padded pieces stand end to end?"""
    return _in_row(size, tuple(parts), padded_length(size, parts))


def _in_row(length: int, parts: tuple[int, ...], step: int) -> bool:
    """Does piece i begin at `i * step`, or at the end of the data?"""
    if not parts or not length:
        return True
    outer = -(-length // parts[0])
    inside = math.prod(parts[1:]) * step
    if length > outer and inside != outer:
        return False
    rest = length % outer
    return (
        inside >= min(outer, length)
        and _in_row(outer, parts[1:], step)
        and (not rest or _in_row(rest, parts[1:], step))
    )


def has_empty(size: int, parts: Sequence[int]) -> bool:
    """Is any piece empty, where `size` elements are cut into `parts` as in `span`?"""
    if not parts or not size:
        return not size
    step = -(-size // parts[0])
    rest = size % step
    if -(-size // step) < parts[0] or has_empty(step, parts[1:]):
        return True
    return rest > 0 and has_empty(rest, parts[1:])


def _ceil_div(length: Number, n: int) -> Number:
    return (length + (n - 1)) // n


def least(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.minimum(a, b)
    if isinstance(a, torch.Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, torch.Tensor) else min(a, b)
