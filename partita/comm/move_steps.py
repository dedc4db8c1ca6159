"""Move steps: turns a move (step of a redistribution) into a function of this rank's local tensor.

The function is made once for each move and rank. Positions of shards are computed from the sizes of
the axes, without communication. As in `torch.chunk`, all full shards come first, then at most one
shorter shard, then empty ones (`DimChange`, `span`). So a move takes the same few steps for any
number of ranks.

A collective's buffer holds the shards end to end, in the order of the ranks. One strided copy (a
few for uneven shards) moves them there or back (`PieceLayout`). Even shards of dimension 0 need no
copy. Shards of different sizes are sent padded to the largest. `resize_` cuts the padding off, so
that no result is a view of a larger tensor: in-place ops and autograd would fail on such a view.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from partita.layout import NEUTRAL_SHARE, Layout, LayoutError, Mesh
from partita.redistribute.move import count_common_axes

from .collective import Axes, Request, Splits, Transport
from .device import empty_like, new_empty

if TYPE_CHECKING:
    from partita.redistribute import Move

Step = Callable[[torch.Tensor, str], torch.Tensor]
"""A function of the local tensor and the op that needs the move; returns the new local tensor."""

_CONTIGUOUS = torch.contiguous_format


def prepare(move: Move, transport: Transport) -> Step:
    """Returns a function that runs one move (step of a redistribution) on this rank.

    The function takes the local tensor, which it does not modify, and returns the new one.

    Args:
        transport: this rank's connection to the mesh, which runs collectives.

    Raises:
        LayoutError: a move of this kind cannot lead from `before` to `after`.
    """
    try:
        build = _BUILD[move.kind]
    except KeyError:
        raise LayoutError(
            f"there is no move called {move.kind!r}", reason=f"there are {', '.join(_BUILD)}"
        ) from None
    if not move.sends or transport.mesh_size(move.axes) > 1:
        return build(move, transport)
    return _copy_alone


class _Requests(dict[str, Request]):
    """The requests of a move, one for each op that needs it."""

    def __init__(self, move: Move, get: Splits | None = None, send: Splits | None = None):
        self._move, self._segments = move, (get, send)

    def __missing__(self, op: str) -> Request:
        move = self._move
        made = self[op] = Request(move.kind, move, op, move.op, *self._segments)
        return made


# -- moves that send -------------------------------------------------------------------------------


def _make_all_gather_step(move: Move, transport: Transport) -> Step:
    axes, _ = transport.group_order(move.axes)
    joined, _ = find_cuts(move, transport.mesh)
    side = PieceLayout(joined, move.after, transport, axes)
    shape, run, requests = side.shape, transport.run_collective, _Requests(move)
    if side.rows_in_memory:
        mine, gathered = side.piece, side.padded_shape
    else:
        mine, gathered = (side.pad,), (side.ranks * side.pad,)
    unpack, whole = side.make_unpacker(side.pad), side.rows_in_memory and gathered == shape

    def run_all_gather(x: torch.Tensor, op: str) -> torch.Tensor:
        out = new_empty(x, gathered)
        run(out, _pad_to_shape(x, mine), axes, requests[op])
        if whole:
            return out
        return out.resize_(shape) if side.rows_in_memory else unpack(out)

    return run_all_gather


def _make_reduce_scatter_step(move: Move, transport: Transport) -> Step:
    axes, _ = transport.group_order(move.axes)
    _, divided = find_cuts(move, transport.mesh)
    mine = move.after.local_shape(transport.mesh, transport.at)
    side = PieceLayout(divided, move.before, transport, axes)
    as_it_is, rows_shape = side.rows_in_memory and side.even, (side.ranks * side.pad,)
    pack, run, requests = side.make_packer(side.pad), transport.run_collective, _Requests(move)

    def run_reduce_scatter(x: torch.Tensor, op: str) -> torch.Tensor:
        if as_it_is:
            out = new_empty(x, mine)
            run(out, x.contiguous(), axes, requests[op])
            return out
        out = new_empty(x, side.pad)
        rows = _pad_to_shape(x, rows_shape) if side.rows_in_memory else pack(x)
        run(out, rows, axes, requests[op])
        return out.resize_(mine)

    return run_reduce_scatter


def _make_all_reduce_step(move: Move, transport: Transport) -> Step:
    axes, _ = transport.group_order(move.axes)
    run, requests = transport.run_collective, _Requests(move)

    def run_all_reduce(x: torch.Tensor, op: str) -> torch.Tensor:
        out = x.clone(memory_format=_CONTIGUOUS)
        run(out, out, axes, requests[op])
        return out

    return run_all_reduce


def _make_all_to_all_step(move: Move, transport: Transport) -> Step:
    axes, _ = transport.group_order(move.axes)
    joined, divided = find_cuts(move, transport.mesh)
    if is_restack(joined, divided, axes, transport.mesh):
        return _make_restack_step(move, transport)
    sent = PieceLayout(divided, move.before, transport, axes)
    got = PieceLayout(joined, move.after, transport, axes)
    shape, run = got.shape, transport.run_collective
    if sent.in_order and got.in_order:
        pad, send, get = None, sent.splits(), got.splits()
    else:  # each message is padded to the size of the largest
        pad = math.prod(map(max, sent.piece, got.piece))
        send = get = Splits.evenly(sent.ranks, pad)
    pack = None if pad is None and sent.in_memory else sent.make_packer(pad)
    unpack = None if pad is None and got.in_memory else got.make_unpacker(pad)
    requests = _Requests(move, get, send)

    def run_all_to_all(x: torch.Tensor, op: str) -> torch.Tensor:
        source = x.contiguous() if pack is None else pack(x)
        out = new_empty(x, shape if unpack is None else get.total)
        run(out, source, axes, requests[op])
        return out if unpack is None else unpack(out)

    return run_all_to_all


def _make_restack_step(move: Move, transport: Transport) -> Step:
    """Returns an all_to_all between pieces whose overlaps form no grid (see `is_restack`)."""
    axes, _ = transport.group_order(move.axes)
    shape, run = move.after.local_shape(transport.mesh, transport.at), transport.run_collective
    send, sent = _find_overlaps(move.before, move.after, transport, axes)
    get, got = _find_overlaps(move.after, move.before, transport, axes)
    requests = _Requests(move, get, send)

    def run_restack(x: torch.Tensor, op: str) -> torch.Tensor:
        parts = [x[where].reshape(-1) for where in sent]
        source = torch.cat(parts) if parts else new_empty(x, 0)
        flat = new_empty(x, get.total)
        run(flat, source, axes, requests[op])
        out = new_empty(x, shape)
        at = 0
        for where in got:
            to = out[where]
            to.copy_(flat[at : at + to.numel()].view(to.shape))
            at += to.numel()
        return out

    return run_restack


def _find_overlaps(
    here: Layout, there: Layout, transport: Transport, axes: Axes
) -> tuple[Splits, list[tuple[slice, ...]]]:
    """Returns the overlaps of this rank's piece under `here` with each rank's piece under `there`.

    They are the sizes, in group order, and the slices in this rank's piece that are not empty.

    All of this depends on layouts alone. So no dispatch mode of the caller intercepts it, and no
    fake tensors are made.
    """
    with _disable_current_modes():
        mesh, n = transport.mesh, transport.mesh_size(axes)
        _, order = transport.group_order(axes)
        members = torch.arange(n) if order is None else torch.tensor(order)
        places: dict[str, Any] = dict(zip(mesh.names, transport.at, strict=True))
        for axis in reversed(axes):
            places[axis] = members % mesh.size(axis)
            members = members // mesh.size(axis)
        firsts, lasts, sizes = [], [], torch.ones(n, dtype=torch.int64)
        region = here.local_region(mesh, transport.at)
        for size, stack, (start, length) in zip(there.shape, there.shards, region, strict=True):
            begin, many = span(size, [mesh.size(a) for a in stack], [places[a] for a in stack])
            bounds = [torch.as_tensor(x).expand(n) - start for x in (begin, begin + many)]
            first, last = (x.clamp(0, length) for x in bounds)
            firsts.append(first)
            lasts.append(last)
            sizes = sizes * (last - first)
        (some,) = sizes.nonzero(as_tuple=True)
        ends: Any = [torch.stack(x, -1)[some].tolist() for x in (firsts, lasts)]
        slices = [tuple(map(slice, first, last)) for first, last in zip(*ends, strict=True)]
        return Splits.of(sizes.tolist()), slices


def _copy_alone(x: torch.Tensor, op: str) -> torch.Tensor:
    """Returns the step of any move that sends, in a group of one rank."""
    return x.clone(memory_format=_CONTIGUOUS)


# -- moves that stay on the rank -------------------------------------------------------------------


def _make_slice_step(move: Move, transport: Transport) -> Step:
    find_cuts(move, transport.mesh)
    source = move.before.local_region(transport.mesh, transport.at)
    where = _slices_within(move.after.local_region(transport.mesh, transport.at), source)
    # Cloned, not viewed: an in-place op on the slice must not write into the whole.
    return lambda x, op: x[where].clone(memory_format=_CONTIGUOUS)


def _make_place_step(move: Move, transport: Transport) -> Step:
    find_cuts(move, transport.mesh)
    target = move.after.local_region(transport.mesh, transport.at)
    where = _slices_within(move.before.local_region(transport.mesh, transport.at), target)
    shape, reduce_op = [length for _, length in target], move.op

    def run_place(x: torch.Tensor, op: str) -> torch.Tensor:
        out = x.new_full(shape, identity_of_reduction(reduce_op, x.dtype))
        out[where] = x
        return out

    return run_place


def _make_mask_step(move: Move, transport: Transport) -> Step:
    first = all(transport.at[transport.mesh.index(a)] == 0 for a in move.axes)
    # The max and the min of equal values are the value itself: only a sum needs the zeros.
    if first or move.op != "sum":
        return lambda x, op: x.clone(memory_format=_CONTIGUOUS)
    return lambda x, op: zeros_signed_as(x).contiguous()


def _make_retype_step(move: Move, transport: Transport) -> Step:
    return lambda x, op: x.view_as(x)


def zeros_signed_as(x: torch.Tensor) -> torch.Tensor:
    """Returns zeros with the signs of `x`, whose addition changes no bit of `x`.

    They stay neutral if all addends are multiplied by a number, whatever its sign.
    """
    if x.is_complex():
        return torch.view_as_complex(zeros_signed_as(torch.view_as_real(x.resolve_conj())))
    if not x.is_floating_point() or x.itemsize == 1:  # 8-bit floats have no kernel
        return torch.zeros_like(x)
    return torch.copysign(x.new_zeros(()), x)


def identity_of_reduction(reduce_op: str, dtype: torch.dtype) -> float | int | bool:
    """Returns the neutral value of a reduction: -0.0 for a sum, -inf for a max."""
    if reduce_op == "sum":
        return NEUTRAL_SHARE if dtype.is_floating_point or dtype.is_complex else 0
    least = reduce_op == "max"
    if dtype == torch.bool:
        return not least
    if dtype.is_floating_point:
        # The 8-bit floats have no infinity that all of them share.
        limit: torch.finfo | torch.iinfo = torch.finfo(dtype)
        if dtype.itemsize > 1:
            return -math.inf if least else math.inf
    else:
        limit = torch.iinfo(dtype)
    return limit.min if least else limit.max


_BUILD = {
    "all_gather": _make_all_gather_step,
    "reduce_scatter": _make_reduce_scatter_step,
    "all_reduce": _make_all_reduce_step,
    "all_to_all": _make_all_to_all_step,
    "slice": _make_slice_step,
    "place": _make_place_step,
    "mask": _make_mask_step,
    "retype": _make_retype_step,
}

# -- regions and padding ---------------------------------------------------------------------------


def _slices_within(
    inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]
) -> tuple[slice, ...]:
    """Returns the position of the region `inner` of a tensor inside its region `outer`."""
    return tuple(slice(i - j, i - j + n) for (i, n), (j, _) in zip(inner, outer, strict=True))


def _pad_to_shape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns contiguous `x` padded with zeros at its end to `shape`."""
    if x.shape == shape:
        return x.contiguous()
    n = x.numel()
    if n == math.prod(shape):
        return x.reshape(shape)
    buffer = new_empty(x, shape)
    flat = buffer.view(-1)
    flat[:n] = x.reshape(-1)
    flat[n:] = 0
    return buffer


# -- pieces and collective buffers -----------------------------------------------------------------
# All pieces of one shape are one strided view of a tensor, however many ranks there are.


_Run = tuple[int, int, tuple[tuple[int, int, int], ...]]
"""`(start, length, axes)` of the first of some pieces of one length at equal distances; for each
axis the first rank, how many ranks, and the distance."""


def _find_piece_runs(length: int, parts: tuple[int, ...]) -> Iterator[_Run]:
    """Yields all pieces that are not empty, as at most two runs for each axis."""
    if not length:
        return
    if not parts:
        yield 0, length, ()
        return
    step = -(-length // parts[0])
    full, rest = divmod(length, step)
    for first, count, each in ((0, full, step), (full, 1, rest)):
        for start, size, axes in _find_piece_runs(each, parts[1:]):
            yield first * step + start, size, ((first, count, step), *axes)


class _PieceBlock(NamedTuple):
    """A block of pieces of one shape, each for another rank, in one rank's local tensor.

    Attributes:
        axes: for each axis of the grid of ranks: the first rank, the number of ranks, the distance
            of two pieces, and the dimension that it splits.
        start: for each dimension, the offset of the first piece.
        piece: the shape of each piece.
    """

    axes: tuple[tuple[int, int, int, int], ...]
    start: tuple[int, ...]
    piece: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*(count for _, count, _, _ in self.axes), *self.piece)

    def find_in(self, strides: Sequence[int]) -> _View:
        """Returns where the pieces are in a tensor with these strides: shape, strides and
        offset.
        """
        outer = [step * strides[dim] for _, _, step, dim in self.axes]
        return self.shape, (*outer, *strides), sum(map(int.__mul__, self.start, strides))


_View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset."""


class PieceLayout:
    """The positions in a local tensor of the pieces that a collective sends to, or gets from, each
    rank.

    A collective needs the pieces end to end in a buffer, in the group's order. If the local tensor
    has them in another order, they are copied.

    Attributes:
        shape: the shape of the local tensor.
        piece: the shape of the largest piece.
        pad: its number of elements, to which smaller pieces are padded.
        ranks: the size of the group.
        even: True if all pieces have the same shape.
        in_order: True if the pieces follow each other along one dimension, in the order of the
            ranks.
        in_memory: True if they also follow each other in memory.
        rows_in_memory: True if they are also in order in memory when each is padded to the largest,
            because all padding is at the end.
    """

    def __init__(self, cuts: Sequence[DimChange], layout: Layout, transport: Transport, axes: Axes):
        self._cuts, (_, self._order) = cuts, transport.group_order(axes)
        self.shape = layout.local_shape(transport.mesh, transport.at)
        self._grid = [a for a in axes if transport.mesh.size(a) > 1]
        self._sizes = [transport.mesh.size(a) for a in self._grid]
        self._lengths = [
            span(cut.size, cut.outer_parts, [transport.index(a) for a in cut.outer])[1]
            for cut in cuts
        ]
        piece = list(self.shape)
        for cut, length in zip(cuts, self._lengths, strict=True):
            piece[cut.dim] = padded_length(length, cut.parts)
        self.piece, self.pad, self.ranks = tuple(piece), math.prod(piece), math.prod(self._sizes)
        self.even = self.ranks * self.pad == math.prod(self.shape)
        in_order = len(cuts) == 1 and list(cuts[0].inner) == self._grid
        self.in_order = in_order and self._order is None
        self.in_memory = self.in_order and math.prod(self.shape[: cuts[0].dim]) == 1
        self.rows_in_memory = self.in_memory and ends_last(self._lengths[0], cuts[0].parts)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of a tensor of all pieces in order, each padded to the largest one."""
        (cut,) = self._cuts
        length = self.ranks * self.piece[cut.dim]
        return (*self.shape[: cut.dim], length, *self.shape[cut.dim + 1 :])

    def splits(self) -> Splits:
        """Returns the segment of each rank's piece in a flat buffer without padding."""
        (length,), (cut,) = self._lengths, self._cuts
        if self.even:
            return Splits.evenly(self.ranks, self.pad)
        rest = math.prod(self.shape) // length if length else 0

        def place_of_part(i: int) -> tuple[int, int]:
            start, size = span(length, cut.parts, unravel(i, cut.parts))
            return rest * start, rest * size

        return Splits(self.ranks, math.prod(self.shape), False, place_of_part)

    # -- copies to and from a collective's buffer --------------------------------------------------

    def make_packer(self, pad: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that copies the pieces of a tensor end to end into a flat buffer.

        Args:
            pad: the number of elements to which each piece is padded with zeros. None: pieces that
                are in order are packed without padding, as in `splits`.
        """
        numel, blocks, order = math.prod(self.shape), self._find_blocks(), self._order
        total = numel if pad is None else self.ranks * pad
        own = contiguous_strides(self.shape)
        sources = [block.find_in(own) for block in blocks]
        places = [self._find_in_buffer(block, pad) for block in blocks]
        alone = len(blocks) == 1 and total == numel

        def pack_pieces(x: torch.Tensor) -> torch.Tensor:
            views, first = sources, x.storage_offset()
            if not x.is_contiguous():
                views = [block.find_in(x.stride()) for block in blocks]
            if alone:
                ((size, strides, offset),) = views
                flat = x.as_strided(size, strides, first + offset).contiguous().view(-1)
            else:
                flat = new_empty(x, total) if total == numel else x.new_zeros(total)
                for (size, strides, offset), place in zip(views, places, strict=True):
                    flat.as_strided(*place).copy_(x.as_strided(size, strides, first + offset))
            return flat if order is None else flat.view(len(order), -1)[order].view(-1)

        return pack_pieces

    def make_unpacker(self, pad: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that copies pieces from a flat buffer back into a tensor.

        Args:
            pad: the same as for `make_packer`.
        """
        own, order = contiguous_strides(self.shape), self._order
        views = [(b.find_in(own), self._find_in_buffer(b, pad)) for b in self._find_blocks()]

        def unpack_pieces(flat: torch.Tensor) -> torch.Tensor:
            if order is not None:
                rows = empty_like(flat)
                rows.view(len(order), -1)[order] = flat.view(len(order), -1)
                flat = rows
            out = new_empty(flat, self.shape)
            for there, here in views:
                out.as_strided(*there).copy_(flat.as_strided(*here))
            return out

        return unpack_pieces

    def _find_blocks(self) -> list[_PieceBlock]:
        """Returns the pieces for each rank of the grid, except empty ones."""
        if math.prod(self.shape) == 0:
            return []
        found = []
        pairs = zip(self._lengths, self._cuts, strict=True)
        for chosen in itertools.product(*(list(_find_piece_runs(n, c.parts)) for n, c in pairs)):
            along: dict[str, tuple[int, int, int, int]] = {}
            start, piece = [0] * len(self.shape), list(self.shape)
            for cut, (first_start, length, axes) in zip(self._cuts, chosen, strict=True):
                start[cut.dim], piece[cut.dim] = first_start, length
                for axis, one in zip(cut.inner, axes, strict=True):
                    along[axis] = (*one, cut.dim)
            axes_of_grid = tuple(along[a] for a in self._grid)
            found.append(_PieceBlock(axes_of_grid, tuple(start), tuple(piece)))
        return found

    def _find_in_buffer(self, block: _PieceBlock, pad: int | None) -> _View:
        if pad is None:
            (cut,), (length,) = self._cuts, self._lengths
            rest = math.prod(self.shape) // length
            outer = [rest * step for _, _, step, _ in block.axes]
            offset = rest * block.start[cut.dim]
        else:
            outer = [pad * math.prod(self._sizes[i + 1 :]) for i in range(len(self._sizes))]
            offset = sum(first * one for (first, *_), one in zip(block.axes, outer, strict=True))
        return block.shape, (*outer, *contiguous_strides(block.piece)), offset


# -- cuts: which dimensions a move divides into pieces or joins ------------------------------------

Number = Any
"""An int, or a tensor of ints."""


@dataclass(frozen=True)
class DimChange:
    """How a move changes the sharding of one dimension. Axes of one rank are left out.

    Attributes:
        dim, size: the dimension, and its global size.
        outer: the axes that split it before and after the move, outermost first.
        inner: the axes that split it further, either before or after the move.
        outer_parts, parts: the number of ranks along each axis of `outer`, and of `inner`.
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
        """The length of the first rank's piece in this dimension. It is the largest."""
        return padded_length(self.size, self.outer_parts + self.parts)


def find_cuts(move: Move, mesh: Mesh) -> tuple[list[DimChange], list[DimChange]]:
    """Returns how a move changes the sharding of each dimension.

    Returns:
        The dimensions along which it concatenates shards, and those that it splits.

    Raises:
        LayoutError: one such move cannot change the layout `move.before` into `move.after`.
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
            reason="the pieces that its ranks hold do not tile the pieces that they need",
        )
    return joined, divided


def is_restack(
    joined: Sequence[DimChange], divided: Sequence[DimChange], axes: Sequence[str], mesh: Mesh
) -> bool:
    """True if an all-to-all only changes which axes split a dimension, or their order.

    The elements that one rank sends to another are then not a regular block.

    Args:
        joined, divided: the results of `find_cuts`.
        axes: the axes of the move.
    """
    moved = {a for a in axes if mesh.size(a) > 1}
    both = {cut.dim for cut in joined} & {cut.dim for cut in divided}
    return bool(both) or {a for cut in joined for a in cut.inner} != moved


def _cut_further(cut: Layout, whole: Layout, mesh: Mesh) -> list[DimChange]:
    """Returns the dimensions that are cut further in `cut` than in `whole`."""
    found = []
    for dim, (size, have, want) in enumerate(zip(cut.shape, cut.shards, whole.shards, strict=True)):
        if have == want:
            continue
        axes, kept = (tuple(a for a in stack if mesh.size(a) > 1) for stack in (have, want))
        same = count_common_axes(axes, kept)
        if same < len(axes):
            outer, inner = axes[:same], axes[same:]
            parts = [tuple(mesh.size(a) for a in stack) for stack in (outer, inner)]
            found.append(DimChange(dim, size, outer, inner, *parts))
    return found


# -- where pieces are, as numbers or tensors -------------------------------------------------------


def span(length: Number, parts: Sequence[int], places: Sequence[Number]) -> tuple[Number, Number]:
    """Returns `(start, length)` of one shard of a dimension that several axes split, one after
    another.

    `length` elements are cut into `parts[0]` shards, each of these into `parts[1]`, and so on.
    `places` has the index of the shard on each level.
    """
    start: Number = 0
    for n, place in zip(parts, places, strict=True):
        step = _ceil_div(length, n)
        at = least(place * step, length)
        start = start + at
        length = least(step, length - at)
    return start, length


def places_of(at: Number, length: Number, parts: Sequence[int]) -> tuple[list[Number], Number]:
    """Returns which shard of a dimension contains the element `at`. The inverse of `span`.

    Args:
        at: an index, or a tensor of indices, below `length`.
        length: the length of the dimension.
        parts: the number of shards on each level.

    Returns:
        The index of the shard on each level, and the offset in it.
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
    """Returns the coordinate of rank `i` in a row-major mesh with these axis sizes."""
    places = []
    for n in reversed(sizes):
        i, place = divmod(i, n)
        places.append(place)
    return places[::-1]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor. As in torch, an empty dimension counts as 1."""
    return tuple(math.prod([max(n, 1) for n in shape[i + 1 :]]) for i in range(len(shape)))


def padded_length(size: int, parts: Sequence[int]) -> int:
    """Returns the length of the first and largest shard of a dimension, to which others are padded.

    Args:
        size: the length of the dimension.
        parts: the number of shards along each axis that splits it.
    """
    for n in parts:
        size = -(-size // n)
    return size


def ends_last(size: int, parts: Sequence[int]) -> bool:
    """True if padding comes only at the very end when padded shards are concatenated.

    Args:
        size: the length of the dimension.
        parts: the number of shards along each axis that splits it.
    """
    return _in_row(size, tuple(parts), padded_length(size, parts))


def _in_row(length: int, parts: tuple[int, ...], step: int) -> bool:
    """True if each piece i begins at `i * step`, or at the end of the data."""
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
    """True if some shard of a dimension of `size` elements is empty.

    Args:
        parts: the number of shards along each axis that splits it, as in `span`.
    """
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
