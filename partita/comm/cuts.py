"""Cuts: the dimensions that a move cuts into pieces or puts together, and where the pieces are.

The pieces of a dimension are found by arithmetic on the sizes of the axes that cut it, never by
asking each rank: all full pieces come first (as `torch.chunk` has it), so that along each axis they
are a run of equal pieces at equal distances, then at most one that is shorter, then empty ones. A
`PieceBlock` is what such runs of all dimensions make together: one strided view of a tensor,
however many ranks there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from partita.layout import Coordinate, Layout, LayoutError, Mesh, chunk

if TYPE_CHECKING:
    from partita.redistribute import Move

__all__ = [
    "Cut",
    "Number",
    "PieceBlock",
    "blocks_of",
    "cuts_of",
    "ends_last",
    "has_empty",
    "is_restack",
    "least",
    "no_such_move",
    "padded_length",
    "places_of",
    "span",
    "unravel",
]

Number = Any
"""An int, or a tensor of ints."""


@dataclass(frozen=True)
class Cut:
    """A dimension that a move changes: which of its axes stay, and which go or come.

    Only axes of more than one rank are named.

    Attributes:
        size: global.
        outer: the axes that split it before and after, outermost first.
        inner: those that split each of its pieces on one side of the move only.
        outer_parts, parts: how many ranks are along each of them.
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

    def length_at(self, mesh: Mesh, at: Coordinate) -> int:
        """How much of it, before `inner` cuts that, the rank at `at` has."""
        length = self.size
        for axis, n in zip(self.outer, self.outer_parts, strict=True):
            length = chunk(length, n, at[mesh.index(axis)])[1]
        return length


def cuts_of(move: Move, mesh: Mesh) -> tuple[list[Cut], list[Cut]]:
    """The dimensions that `move` puts together, and those that it cuts.

    Raises:
        LayoutError: one move of its kind cannot make what it is to make.
    """
    gone = _cut_further(move.before, move.after, mesh)
    come = _cut_further(move.after, move.before, mesh)
    leave, enter = ({a for cut in cuts for a in cut.inner} for cuts in (gone, come))
    moved = {a for a in move.axes if mesh.size(a) > 1}
    fits = {
        "all_gather": leave == moved and not enter,
        "place": leave == moved and not enter,
        "reduce_scatter": enter == moved and not leave,
        "slice": enter == moved and not leave,
        "all_to_all": leave == enter <= moved,
    }
    if move.before.shape != move.after.shape or not fits[move.kind]:
        raise no_such_move(move)
    return gone, come


def is_restack(gone: Sequence[Cut], come: Sequence[Cut], axes: Sequence[str], mesh: Mesh) -> bool:
    """Does an all_to_all over `axes` change which axes cut a dimension, or in which order they do?

    Then the pieces that two ranks have in common are no grid.
    """
    moved = {a for a in axes if mesh.size(a) > 1}
    both = {cut.dim for cut in gone} & {cut.dim for cut in come}
    return bool(both) or {a for cut in gone for a in cut.inner} != moved


def _cut_further(cut: Layout, whole: Layout, mesh: Mesh) -> list[Cut]:
    """The dimensions that are cut further in `cut` than in `whole`."""
    found = []
    for dim, (size, have, want) in enumerate(zip(cut.shape, cut.shards, whole.shards, strict=True)):
        if have == want:
            continue
        axes, kept = ([a for a in stack if mesh.size(a) > 1] for stack in (have, want))
        same = 0
        while same < min(len(axes), len(kept)) and axes[same] == kept[same]:
            same += 1
        if same < len(axes):
            outer, inner = tuple(axes[:same]), tuple(axes[same:])
            parts = [tuple(mesh.size(a) for a in stack) for stack in (outer, inner)]
            found.append(Cut(dim, size, outer, inner, *parts))
    return found


def no_such_move(move: Move) -> LayoutError:
    return LayoutError(
        f"one {move.kind} over {' '.join(move.axes)} cannot make "
        f"{move.after.brief()} of {move.before.brief()}",
        reason="the pieces that its ranks hold do not tile what they are to hold",
    )


# -- where pieces are, as numbers or tensors -------------------------------------------------------


def span(length: Number, parts: Sequence[int], places: Sequence[Number]) -> tuple[Number, Number]:
    """`(start, length)` of the piece at `places` of what is cut into `parts`, one after another."""
    start: Number = 0
    for n, place in zip(parts, places, strict=True):
        step = _ceil_div(length, n)
        at = least(place * step, length)
        start = start + at
        length = least(step, length - at)
    return start, length


def places_of(at: Number, length: Number, parts: Sequence[int]) -> tuple[list[Number], Number]:
    """Which pieces the elements `at` are in, by axis, and where in them: `span` the other way.

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


def padded_length(size: int, parts: Sequence[int]) -> int:
    """The elements of the first piece."""
    for n in parts:
        size = -(-size // n)
    return size


def ends_last(size: int, parts: Sequence[int]) -> bool:
    """Is all padding behind all data when the padded pieces stand in a row?"""
    return _in_row(size, tuple(parts), padded_length(size, parts))


def _in_row(length: int, parts: tuple[int, ...], step: int) -> bool:
    """Does each piece begin where as many pieces of `step` end, or at the end of all?"""
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
    """Is any piece of what is cut into `parts`, one after another, empty?"""
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


# -- where pieces are, as views --------------------------------------------------------------------


@dataclass(frozen=True)
class _PieceRun:
    """Pieces of one length at equal distances: `counts` of them along each axis, from `first`."""

    start: int
    length: int
    first: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


def _find_piece_runs(length: int, parts: tuple[int, ...]) -> Iterator[_PieceRun]:
    """All pieces that are not empty: at most two runs for each axis."""
    if not length:
        return
    if not parts:
        yield _PieceRun(0, length)
        return
    step = -(-length // parts[0])
    full, rest = divmod(length, step)
    for first, count, each in ((0, full, step), (full, 1, rest)):
        for run in _find_piece_runs(each, parts[1:]):
            yield _PieceRun(
                first * step + run.start,
                run.length,
                (first, *run.first),
                (count, *run.counts),
                (step, *run.steps),
            )


@dataclass(frozen=True)
class PieceBlock:
    """The pieces, all of one shape, that some ranks hold of what one rank holds.

    Attributes:
        first, counts: along each axis, in the order of the grid of ranks, which they are.
        dims, steps: for each axis the dimension in which they lie, and how far from each other.
        start: where the first one begins, for each dimension.
        piece: the shape of each.
    """

    first: tuple[int, ...]
    counts: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]
    start: tuple[int, ...]
    piece: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.counts, *self.piece)

    def strided(self, strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Strides and offset of the pieces, (*counts, *piece), in a tensor of `strides`."""
        outer = [step * strides[d] for d, step in zip(self.dims, self.steps, strict=True)]
        return (*outer, *strides), sum(map(int.__mul__, self.start, strides))


def blocks_of(
    cuts: Sequence[Cut], lengths: Sequence[int], shape: Sequence[int], grid: Sequence[str]
) -> list[PieceBlock]:
    """The pieces of a tensor of `shape` for each rank of `grid`, but for empty ones.

    Args:
        lengths: how long each cut dimension is here.
    """
    if math.prod(shape) == 0:
        return []
    found = []
    runs = [list(_find_piece_runs(n, cut.parts)) for n, cut in zip(lengths, cuts, strict=True)]
    for chosen in itertools.product(*runs):
        along: dict[str, tuple[int, int, int, int]] = {}
        start, piece = [0] * len(shape), list(shape)
        for cut, run in zip(cuts, chosen, strict=True):
            start[cut.dim], piece[cut.dim] = run.start, run.length
            for axis, *one in zip(cut.inner, run.first, run.counts, run.steps, strict=True):
                along[axis] = (one[0], one[1], cut.dim, one[2])
        first, counts, dims, steps = zip(*(along[a] for a in grid), strict=True)
        found.append(PieceBlock(first, counts, dims, steps, tuple(start), tuple(piece)))
    return found
