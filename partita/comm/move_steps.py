"""Move steps: turns a move (step of a redistribution) into a function of this rank's local tensor.

The function is made once for each move and rank. Positions of shards are computed from the sizes of
the axes, without communication. As in `torch.chunk`, all full shards come first, then at most one
shorter shard, then empty ones (`DimChange`, `span`).

A collective's buffer holds one shard for each rank of the group, end to end, each padded to the
size of the largest. A move packs its tensor into such a buffer, or unpacks it, in a number of steps
that is the same for any number of ranks. Even shards of dimension 0 need no copy. Eager code pads
the true shard, and cuts the padding off the result. In a captured graph all shards are padded
already, and this rank's coordinate is a tensor (`trace`). The steps are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from partita.layout import NEUTRAL_SHARE, Layout, LayoutError, Mesh
from partita.redistribute.move import count_common_axes

from .collective import Axes, Request, Splits, Transport
from .device import empty_like, new_empty

if TYPE_CHECKING:
    from partita.redistribute import Move

Step = Callable[[torch.Tensor, str], torch.Tensor]
"""`step(x, op)`: runs a move on the local tensor `x`, and returns the new local tensor. `op` is the
name of the op that needs the move.
"""

_CONTIGUOUS = torch.contiguous_format


def prepare(move: Move, transport: Transport) -> Step:
    """Returns the function `step(x, op)` that runs one move (step of a redistribution) on this
    rank.

    It takes the local tensor, which it does not modify, and the name of the op that needs the move.
    It returns the new local tensor.

    Args:
        move: the move: its kind, its axes, and the layouts before and after it.
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


def _make_all_reduce_step(move: Move, transport: Transport) -> Step:
    axes, _ = transport.group_order(move.axes)
    run, requests = transport.run_collective, _Requests(move)

    def run_all_reduce(x: torch.Tensor, op: str) -> torch.Tensor:
        out = x.clone(memory_format=_CONTIGUOUS)
        run(out, out, axes, requests[op])
        return out

    return run_all_reduce


def _make_exchange_step(move: Move, transport: Transport) -> Step:
    """Returns the step of an all_gather, a reduce_scatter or an all_to_all."""
    axes, order = transport.group_order(move.axes)
    mesh, n, run = transport.mesh, transport.mesh_size(axes), transport.run_collective
    joined, divided = (_cuts_of_rank(cuts, transport) for cuts in find_cuts(move, mesh))
    exchanges = move.kind == "all_to_all"
    if exchanges and not transport.padded and is_restack(joined, divided, axes, mesh):
        return _make_restack_step(move, transport)
    grid = tuple(a for a in axes if mesh.size(a) > 1)
    largest = [*move.before.local_shape(mesh, transport.at)]
    for cut in joined:
        largest[cut.dim] = cut.first_length
    given = tuple(largest)
    for cut in divided:
        largest[cut.dim] = cut.first_length
    if move.kind == "reduce_scatter":
        got = largest
    elif _in_order(joined, grid):
        got = [n * largest[0], *largest[1:]]
    else:
        got = [*(mesh.size(a) for a in grid), *largest]
    each = Splits.evenly(n, math.prod(largest)) if exchanges else None
    shape, requests = move.after.local_shape(mesh, transport.at), _Requests(move, each, each)

    def run_exchange(x: torch.Tensor, op: str) -> torch.Tensor:
        rows = _pack_pieces(_pad_to_shape(x, given), divided, grid, transport)
        if order is not None and divided:
            rows = rows.view(n, rows.numel() // n)[order]
        out = new_empty(rows, got)
        run(out, rows, axes, requests[op])
        if order is not None and joined:
            ordered = empty_like(out)
            ordered.view(n, out.numel() // n)[order] = out.view(n, out.numel() // n)
            out = ordered
        if joined:
            out = _unpack_pieces(out, joined, grid, transport)
        return _cut_to_shape(out, shape, transport)

    return run_exchange


def _cuts_of_rank(cuts: Sequence[DimChange], transport: Transport) -> list[DimChange]:
    """Returns `cuts` with the true size of this rank's outer piece. In a graph it stays padded.

    All ranks of a group have the same outer pieces.
    """
    if transport.padded:
        return [*cuts]
    found = []
    for cut in cuts:
        _, size = span(cut.size, *transport.stack(cut.outer))
        found.append(replace(cut, size=size, outer=(), outer_parts=()))
    return found


def _make_restack_step(move: Move, transport: Transport) -> Step:
    """Returns the step of an all_to_all in which the exchanged parts are irregular (`is_restack`).

    A graph gathers and slices instead (`trace`).
    """
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

    Returns the sizes, in group order, and the slices in this rank's piece that are not empty.

    It depends on layouts alone, and runs with the caller's modes disabled.
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
    """The step of any move in a group of one rank: returns a copy of `x`."""
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
    """Returns zeros (0.0 or -0.0) that can be added to `x` without changing any of its bits.

    The bits also stay equal if all addends are multiplied by the same number.
    """
    if x.is_complex():
        return torch.view_as_complex(zeros_signed_as(torch.view_as_real(x.resolve_conj())))
    if not x.is_floating_point() or x.itemsize == 1:  # 8-bit floats have no kernel
        return torch.zeros_like(x)
    return torch.copysign(x.new_zeros(()), x)


def identity_of_reduction(reduce_op: str, dtype: torch.dtype) -> float | int | bool:
    """Returns the neutral value of the reduction `reduce_op`: -0.0 for a sum, -inf for a max.

    If `dtype` has no infinity, it returns the least or largest value of the dtype.
    """
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
    "all_gather": _make_exchange_step,
    "reduce_scatter": _make_exchange_step,
    "all_reduce": _make_all_reduce_step,
    "all_to_all": _make_exchange_step,
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
    """Returns `x` padded with zeros at the end of each dimension."""
    if x.shape == shape:
        return x
    out = x.new_zeros(shape)
    out[tuple(map(slice, x.shape))] = x
    return out


def _cut_to_shape(x: torch.Tensor, shape: tuple[int, ...], transport: Transport) -> torch.Tensor:
    """Returns contiguous `x` without the padding at the end of each dimension.

    In eager the result is no view, and has its own storage: in-place ops and autograd would fail on
    a view.
    """
    alone = not transport.padded and not x._is_view()
    if alone and x.shape[1:] == shape[1:]:
        return x if x.shape == shape else x.resize_(shape)
    for dim, n in enumerate(shape):
        if x.shape[dim] != n:
            x = x.narrow(dim, 0, n)
    if transport.padded:
        return x.contiguous()
    fills = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x.detach() if fills else x.clone(memory_format=_CONTIGUOUS)


# -- pieces and collective buffers -----------------------------------------------------------------


def outer_length(cut: DimChange, transport: Transport) -> tuple[int, Number]:
    """Returns the padded and the true length of the piece that the inner axes of `cut` split."""
    padded = padded_length(cut.size, cut.outer_parts)
    if cut.size % math.prod(cut.outer_parts) == 0:
        return padded, padded
    return padded, span(cut.size, *transport.stack(cut.outer))[1]


def _pack_pieces(
    x: torch.Tensor, cuts: Sequence[DimChange], grid: Sequence[str], transport: Transport
) -> torch.Tensor:
    """Returns a buffer of the padded piece of each member of `grid`, in the grid's order."""
    for cut in cuts:
        if not cut.even:
            x = _pieces_in_a_row(x, cut, transport)
    if not cuts or _in_order(cuts, grid):
        return x.contiguous()
    labels: list[Any] = []
    by_dim = {cut.dim: cut for cut in cuts}
    shape: list[int] = []
    for dim in range(x.dim()):
        if dim in by_dim:
            cut = by_dim[dim]
            labels, shape = [*labels, *cut.inner, dim], [*shape, *cut.parts, cut.first_length]
        else:
            labels, shape = [*labels, dim], [*shape, x.shape[dim]]
    order = [labels.index(a) for a in grid] + [labels.index(d) for d in range(x.dim())]
    return x.reshape(shape).permute(order).contiguous()


def _pieces_in_a_row(x: torch.Tensor, cut: DimChange, transport: Transport) -> torch.Tensor:
    _, outer = outer_length(cut, transport)
    parts, step, n = cut.parts, cut.first_length, math.prod(cut.parts)
    if isinstance(outer, int) and len(parts) == 1:
        if transport.zeros or not transport.padded:
            behind = [0, 0] * (x.dim() - cut.dim - 1) + [0, n * step - outer]
            return torch.constant_pad_nd(x, behind)
        places = torch.arange(n * step, device=x.device).clamp(max=outer - 1)
        return x.index_select(cut.dim, places)
    each = [
        torch.arange(m, device=x.device).view([-1] + [1] * (len(parts) - i))
        for i, m in enumerate(parts)
    ]
    start, length = span(move_to_device(outer, x.device), parts, each)
    return take_padded_piece(
        x, cut.dim, start, length, torch.arange(step, device=x.device), transport.zeros
    )


def take_padded_piece(
    x: torch.Tensor, dim: int, start: Number, length: Number, offsets: torch.Tensor, zeros: bool
) -> torch.Tensor:
    """Returns the elements `start + offsets` of `x` along `dim`, with padding behind a piece.

    Offsets from `length` on are padding. They are copies of the piece's last element, or zeros.

    Args:
        offsets: positions in the piece, an integer tensor.
        zeros: True fills padding with zeros.
    """
    at = (start + least(offsets, length - 1)).clamp(min=0)
    out = x.index_select(dim, at.flatten())
    return fill_where(out, dim, (offsets >= length).expand(at.shape).flatten()) if zeros else out


def fill_where(x: torch.Tensor, dim: int, where: torch.Tensor, value: Any = 0) -> torch.Tensor:
    """Returns `x` with `value` where the mask `where` is True along `dim`."""
    return x.masked_fill(where.view([-1] + [1] * (x.dim() - dim - 1)), value)


def _unpack_pieces(
    rows: torch.Tensor, cuts: Sequence[DimChange], grid: Sequence[str], transport: Transport
) -> torch.Tensor:
    """Join the pieces in `rows`, (*grid, *piece), along the dimensions of `cuts`.

    Pieces in order along dimension 0 are joined already.
    """
    if not _in_order(cuts, grid):
        rows = _side_by_side(rows, cuts, grid)
    for cut in cuts:
        if not cut.even:
            rows = _without_gaps(rows, cut, transport)
    return rows.contiguous()


def _side_by_side(
    rows: torch.Tensor, cuts: Sequence[DimChange], grid: Sequence[str]
) -> torch.Tensor:
    labels: list[Any] = [*grid, *range(rows.dim() - len(grid))]
    by_dim = {cut.dim: cut for cut in cuts}
    order: list[Any] = []
    shape = []
    for dim in range(rows.dim() - len(grid)):
        inner = by_dim[dim].inner if dim in by_dim else ()
        order += [*inner, dim]
        shape.append(math.prod([rows.shape[labels.index(label)] for label in (*inner, dim)]))
    # Not `reshape`: it makes an `_unsafe_view` of a copy, which passes do not recognize as a copy.
    return rows.permute([labels.index(label) for label in order]).contiguous().view(shape)


def _in_order(cuts: Sequence[DimChange], grid: Sequence[str]) -> bool:
    """True if the pieces follow each other along dimension 0, in the order of the ranks."""
    return len(cuts) == 1 and cuts[0].dim == 0 and cuts[0].inner == tuple(grid)


def _without_gaps(x: torch.Tensor, cut: DimChange, transport: Transport) -> torch.Tensor:
    """Returns padded pieces that are end to end along a dimension, without their padding."""
    padded, length = outer_length(cut, transport)
    if isinstance(length, int) and ends_last(length, cut.parts):
        return x  # all padding is at the end
    at, length = torch.arange(padded, device=x.device), move_to_device(length, x.device)
    places, rest = places_of(least(at, length - 1).clamp(min=0), length, cut.parts)
    place: Number = 0
    for n, here in zip(cut.parts, places, strict=True):
        place = place * n + here
    out = x.index_select(cut.dim, place * cut.first_length + rest)
    return fill_where(out, cut.dim, at >= length) if transport.zeros else out


def move_to_device(x: Number, device: torch.device) -> Number:
    return x.to(device) if isinstance(x, torch.Tensor) else x


# -- cuts: which dimensions a move divides into pieces or joins ------------------------------------

Number = Any
"""An int, or a tensor of ints."""


@dataclass(frozen=True)
class DimChange:
    """The change of one dimension's sharding by a move. Axes of one rank are not listed.

    Attributes:
        dim, size: the dimension, and its global size.
        outer: the axes that split it before the move and after it, outermost first.
        inner: the axes that split it further, either before the move or after it.
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
    """Returns how a move changes the sharding of each dimension on `mesh`.

    Returns:
        The dimensions along which the move concatenates shards, and the dimensions that it splits.

    Raises:
        LayoutError: a single move cannot change the layout `move.before` into `move.after`.
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

    In this case the elements that one rank sends to another are not a regular block.

    Args:
        joined, divided: the dimensions that the move concatenates and splits (`find_cuts`).
        axes: the axes of the move.
        mesh: the mesh of the move.
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
    """Returns `(start, length)` of one shard of a dimension that several axes split in turn.

    The first axis cuts `length` elements into `parts[0]` shards, the second cuts each of these into
    `parts[1]`, and so on. `places` has the index of the shard at each of these levels.
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
    """Returns the strides of a contiguous tensor of `shape`. An empty dimension counts as 1."""
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
    """True if all padding is at the very end, when padded shards are concatenated.

    Args:
        size: the length of the dimension.
        parts: the number of shards along each axis that splits it.
    """
    return _in_row(size, tuple(parts), padded_length(size, parts))


def _in_row(length: int, parts: tuple[int, ...], step: int) -> bool:
    """True if the pieces are adjacent: piece i begins at `i * step`, or at the end of the data."""
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
