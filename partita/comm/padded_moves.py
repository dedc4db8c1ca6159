"""Padded moves: moves between pieces that are padded to equal size, as nodes of a graph that is the
same on all ranks.

While a step is captured, the shard of each rank is as large as the first rank's, which no rank's
exceeds. Behind a smaller piece stand copies of its last element, and in the place of an empty one
copies of the element before it, so that kernels compute finite values there. Gradients are padded
with zeros, so that padding adds nothing to what a rank sums over its shard in backward.

    7 rows over 4 ranks:    0 1 | 2 3 | 4 5 | 6 6

Where a rank's piece begins and ends is computed from its coordinates, which are inputs of the
graph: the arithmetic is that of `Layout.local_region`, over ints or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from partita.layout import Layout, LayoutError, Mesh

from .cuts import Cut, Number, ends_last, find_cuts, least, padded_length, places_of, span
from .move_steps import Step, identity_of_reduction
from .source import user_line
from .splits import Splits
from .transport import Transport

if TYPE_CHECKING:
    from partita.redistribute import Move

    from .collective_request import Request

__all__ = ["PaddedTransport", "Uneven", "is_uneven", "padded_step", "padding", "uneven"]


class PaddedTransport(Transport):
    """A transport on which every rank's pieces are as large as the first rank's.

    Attributes:
        coordinate: for each axis of more than one rank, this rank's place on it, as a tensor.
        zeros: the current move pads with zeros, as moves of gradients do.
    """

    coordinate: dict[str, torch.Tensor]
    zeros: bool

    def place(self, axes: Sequence[str]) -> torch.Tensor:
        """The rank's position along `axes` together, first slowest: a 0-d int64 tensor."""
        places = [self.coordinate[a] for a in axes if self.mesh.size(a) > 1]
        sizes = [self.mesh.size(a) for a in axes if self.mesh.size(a) > 1]
        if not places:
            return torch.zeros((), dtype=torch.int64)
        place = places[0]
        for size, inner in zip(sizes[1:], places[1:], strict=True):
            place = place * size + inner
        return place

    def stack(self, axes: Sequence[str]) -> tuple[list[int], list[torch.Tensor]]:
        """The sizes of `axes` and the rank's places on them, but for axes of one rank."""
        cut = [a for a in axes if self.mesh.size(a) > 1]
        return [self.mesh.size(a) for a in cut], [self.coordinate[a] for a in cut]


def is_uneven(layout: Layout, mesh: Mesh) -> bool:
    """Do some ranks hold less of a tensor of this layout than others?"""
    return any(map(_divides_unevenly, *_shape_and_shard_sizes(layout, mesh)))


def _shape_and_shard_sizes(
    layout: Layout, mesh: Mesh
) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    return layout.shape, [tuple(mesh.size(a) for a in axes) for axes in layout.shards]


def _divides_unevenly(size: int, parts: Sequence[int]) -> bool:
    return size % math.prod(parts) != 0


def padding(
    transport: PaddedTransport, size: int, axes: Sequence[str], device: torch.device
) -> torch.Tensor:
    """A mask of the padding in a rank's piece of `size` elements that are cut over `axes`."""
    parts, places = transport.stack(axes)
    _, length = span(size, parts, places)
    return torch.arange(padded_length(size, parts), device=device) >= _move_to_device(
        length, device
    )


def _move_to_device(x: Number, device: torch.device) -> Number:
    return x.to(device) if isinstance(x, torch.Tensor) else x


# -- moves -----------------------------------------------------------------------------------------


def padded_step(move: Move, transport: PaddedTransport) -> Step | None:
    """The step of a move between padded pieces, of equally many nodes for any number of ranks.

    None for a move that neither exchanges pieces nor changes a dimension that is cut unevenly.

    Raises:
        LayoutError: one move of its kind cannot make what it is to make.
    """
    if move.kind not in ("all_gather", "reduce_scatter", "all_to_all", "slice", "place"):
        return None
    joined, divided = find_cuts(move, transport.mesh)
    if not joined and not divided:
        return None
    if move.kind in ("slice", "place"):
        if all(cut.even for cut in (*joined, *divided)):
            return None
        if move.kind == "slice":
            return lambda x, request: _slice_own_piece(x, divided, transport)
        return lambda x, request: _place_own_piece(x, joined, move.op, transport)
    axes, _ = transport.group_order(move.axes)
    grid = tuple(a for a in axes if transport.mesh.size(a) > 1)
    n = transport.mesh_size(axes)

    def run_padded_step(x: torch.Tensor, request: Request) -> torch.Tensor:
        piece = list(x.shape)
        for cut in divided:
            piece[cut.dim] = cut.first_length
        rows = _pack_padded_pieces(x, divided, grid, transport)
        if move.kind == "reduce_scatter":
            out = x.new_empty(piece)
            transport.reduce_scatter(out, rows, axes, move.op, request)
            return out
        if _in_order(joined, grid):
            out = x.new_empty([n * piece[0], *piece[1:]])
        else:
            out = x.new_empty([*(transport.mesh.size(a) for a in grid), *piece])
        if move.kind == "all_gather":
            transport.gather(out, rows, axes, request)
        else:
            each = Splits.evenly(n, math.prod(piece))
            transport.all_to_all(out, rows, axes, each, each, request)
        return _unpack_pieces(out, joined, grid, transport)

    return run_padded_step


def _outer_length(cut: Cut, transport: PaddedTransport) -> tuple[int, Number]:
    """Padded and true length of what the inner axes of `cut` cut."""
    padded = padded_length(cut.size, cut.outer_parts)
    if not _divides_unevenly(cut.size, cut.outer_parts):
        return padded, padded
    return padded, span(cut.size, *transport.stack(cut.outer))[1]


def _pack_padded_pieces(
    x: torch.Tensor, cuts: Sequence[Cut], grid: Sequence[str], transport: PaddedTransport
) -> torch.Tensor:
    """A buffer of the padded piece of each member of `grid`, in the grid's order."""
    labels: list[Any] = []
    by_dim = {cut.dim: cut for cut in cuts}
    shape: list[int] = []
    for dim in range(x.dim()):
        cut = by_dim.get(dim)
        if cut is None:
            labels, shape = [*labels, dim], [*shape, x.shape[dim]]
            continue
        if not cut.even:
            x = _pieces_in_a_row(x, cut, cut.parts, transport)
        labels = [*labels, *cut.inner, dim]
        shape = [*shape, *cut.parts, cut.first_length]
    if not cuts or _in_order(cuts, grid):
        return x.contiguous()
    order = [labels.index(a) for a in grid] + [labels.index(d) for d in range(x.dim())]
    return x.reshape(shape).permute(order).contiguous()


def _pieces_in_a_row(
    x: torch.Tensor, cut: Cut, parts: Sequence[int], transport: PaddedTransport
) -> torch.Tensor:
    _, outer = _outer_length(cut, transport)
    step, n = cut.first_length, math.prod(parts)
    if isinstance(outer, int) and len(parts) == 1:
        more = n * step - outer
        if transport.zeros:
            return _with_zeros(x, cut.dim, more)
        places = torch.arange(n * step, device=x.device).clamp(max=outer - 1)
        return x.index_select(cut.dim, places)
    each = [
        torch.arange(m, device=x.device).view([-1] + [1] * (len(parts) - i))
        for i, m in enumerate(parts)
    ]
    start, length = span(_move_to_device(outer, x.device), parts, each)
    return _take_padded_piece(
        x, cut.dim, start, length, torch.arange(step, device=x.device), transport.zeros
    )


def _take_padded_piece(
    x: torch.Tensor, dim: int, start: Number, length: Number, offsets: torch.Tensor, zeros: bool
) -> torch.Tensor:
    """The elements of pieces along `dim`, each padded to as many as there are offsets."""
    at = (start + least(offsets, length - 1)).clamp(min=0)
    out = x.index_select(dim, at.flatten())
    return _zero_where(out, dim, (offsets >= length).expand(at.shape).flatten()) if zeros else out


def _zero_where(x: torch.Tensor, dim: int, where: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(where.view([-1] + [1] * (x.dim() - dim - 1)), 0)


def _with_zeros(x: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - dim - 1) + [0, more])


def _unpack_pieces(
    rows: torch.Tensor, cuts: Sequence[Cut], grid: Sequence[str], transport: PaddedTransport
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


def _side_by_side(rows: torch.Tensor, cuts: Sequence[Cut], grid: Sequence[str]) -> torch.Tensor:
    labels: list[Any] = [*grid, *range(rows.dim() - len(grid))]
    by_dim = {cut.dim: cut for cut in cuts}
    order: list[Any] = []
    shape = []
    for dim in range(rows.dim() - len(grid)):
        inner = by_dim[dim].inner if dim in by_dim else ()
        order += [*inner, dim]
        shape.append(math.prod([rows.shape[labels.index(label)] for label in (*inner, dim)]))
    # Not `reshape`, whose `_unsafe_view` of a copy no pass recognises as a mere copy.
    return rows.permute([labels.index(label) for label in order]).contiguous().view(shape)


def _in_order(cuts: Sequence[Cut], grid: Sequence[str]) -> bool:
    """Do the pieces follow each other along dimension 0, in the order of the ranks?"""
    return len(cuts) == 1 and cuts[0].dim == 0 and cuts[0].inner == tuple(grid)


def _without_gaps(x: torch.Tensor, cut: Cut, transport: PaddedTransport) -> torch.Tensor:
    """`x`, in which padded pieces stand end to end along a dimension, without their padding."""
    padded, length = _outer_length(cut, transport)
    if isinstance(length, int) and ends_last(length, cut.parts):
        return x.narrow(cut.dim, 0, length)
    at, length = torch.arange(padded, device=x.device), _move_to_device(length, x.device)
    behind = at >= length
    places, rest = places_of(least(at, length - 1).clamp(min=0), length, cut.parts)
    place: Number = 0
    for n, here in zip(cut.parts, places, strict=True):
        place = place * n + here
    out = x.index_select(cut.dim, place * cut.first_length + rest)
    return _zero_where(out, cut.dim, behind) if transport.zeros else out


def _slice_own_piece(
    x: torch.Tensor, cuts: Sequence[Cut], transport: PaddedTransport
) -> torch.Tensor:
    for cut in cuts:
        start, length = _place_of(cut, transport, x.device)
        offsets = torch.arange(cut.first_length, device=x.device)
        x = _take_padded_piece(x, cut.dim, start, length, offsets, transport.zeros)
    return x.contiguous()


def _place_own_piece(
    x: torch.Tensor, cuts: Sequence[Cut], op: str, transport: PaddedTransport
) -> torch.Tensor:
    for cut in cuts:
        start, length = _place_of(cut, transport, x.device)
        padded, _ = _outer_length(cut, transport)
        at = torch.arange(padded, device=x.device) - start
        mine = (at >= 0) & (at < length)
        out = x.index_select(cut.dim, at.clamp(0, cut.first_length - 1))
        mine = mine.view([-1] + [1] * (x.dim() - cut.dim - 1))
        x = out.masked_fill(~mine, identity_of_reduction(op, x.dtype))
    return x.contiguous()


def _place_of(cut: Cut, transport: PaddedTransport, device: torch.device) -> tuple[Number, Number]:
    """`(start, length)` of this rank's piece within the piece that `inner` cuts."""
    parts, places = transport.stack(cut.inner)
    _, outer = _outer_length(cut, transport)
    start, length = span(outer, parts, places)
    return _move_to_device(start, device), _move_to_device(length, device)


class Uneven(LayoutError):
    """Raised for what cannot be done with padded shards."""


def uneven(fact: str) -> Uneven:
    """The error where uneven pieces cannot be captured; a capture turns it into its own error."""
    return Uneven(
        fact,
        place=user_line(),
        reason="while a step is captured every rank's piece is padded to the largest one",
    )
