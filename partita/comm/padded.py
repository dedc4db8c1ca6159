"""Where in a padded shard is what, and what do moves do about the padding?

While a step is captured, the shard of each rank is as large as the first rank's, which no rank's
exceeds: so all ranks have one graph. Behind a smaller piece stand copies of its last element, and
in the place of an empty one copies of the element before it. What is computed of the padding is
then what is computed of elements of the value, and as finite as that. Gradients have zeros there,
so that padding adds nothing to what a rank sums over its shard in backward.

Where a rank's piece begins and ends is computed from its coordinates, which are inputs of the
graph: the arithmetic here is that of `Layout.local_region`, over numbers or tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..layout import Layout, LayoutError, Mesh
from .pieces import Step, neutral
from .source import user_line

if TYPE_CHECKING:
    from ..redistribute import Move
    from .ask import Ask
    from .trace import TraceWire

__all__ = ["Uneven", "ends_last", "is_uneven", "padded_step", "padding", "span", "uneven"]

Number = Any
"""An int, or a tensor of ints."""


def is_uneven(layout: Layout, mesh: Mesh) -> bool:
    """Do some ranks hold less of a tensor of this layout than others?"""
    return any(map(_divides_unevenly, *_dims(layout, mesh)))


def _dims(layout: Layout, mesh: Mesh) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    return layout.shape, [tuple(mesh.size(a) for a in axes) for axes in layout.shards]


def _divides_unevenly(size: int, parts: Sequence[int]) -> bool:
    return size % math.prod(parts) != 0


def span(length: Number, parts: Sequence[int], places: Sequence[Number]) -> tuple[Number, Number]:
    """`(start, length)` of the piece at `places` of what is cut into `parts`, one after another."""
    start: Number = 0
    for n, place in zip(parts, places, strict=True):
        step = _ceil(length, n)
        at = _least(place * step, length)
        start = start + at
        length = _least(step, length - at)
    return start, length


def ends_last(size: int, parts: Sequence[int]) -> bool:
    """Is all padding behind all data when the padded pieces stand in a row?"""
    step = _padded(size, parts)
    places = itertools.product(*map(range, parts))
    return all(span(size, parts, at)[0] == min(i * step, size) for i, at in enumerate(places))


def padding(wire: TraceWire, size: int, axes: Sequence[str], device: torch.device) -> torch.Tensor:
    """Which elements of a rank's piece of `size` elements, cut over `axes`, are padding?"""
    parts, places = wire.stack(axes)
    _, length = span(size, parts, places)
    return torch.arange(_padded(size, parts), device=device) >= _on(length, device)


def _padded(size: int, parts: Sequence[int]) -> int:
    """The elements of the first piece."""
    for n in parts:
        size = -(-size // n)
    return size


def _ceil(length: Number, n: int) -> Number:
    return (length + (n - 1)) // n


def _least(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.minimum(a, b)
    if isinstance(a, torch.Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, torch.Tensor) else min(a, b)


def _on(x: Number, device: torch.device) -> Number:
    return x.to(device) if isinstance(x, torch.Tensor) else x


# -- moves -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """A dimension that a move changes: which of its axes stay, and which go or come.

    Attributes:
        size: global.
        outer: the axes that split it before and after.
        inner: those that split each of its pieces on one side of the move only.
    """

    dim: int
    size: int
    outer: tuple[str, ...]
    inner: tuple[str, ...]

    def even(self, wire: TraceWire) -> bool:
        return not _divides_unevenly(self.size, wire.stack((*self.outer, *self.inner))[0])

    def outer_length(self, wire: TraceWire) -> tuple[int, Number]:
        """Padded and true length of the piece that `inner` cuts."""
        parts, places = wire.stack(self.outer)
        padded = _padded(self.size, parts)
        if not _divides_unevenly(self.size, parts):
            return padded, padded
        return padded, span(self.size, parts, places)[1]

    def piece_length(self, wire: TraceWire) -> int:
        return _padded(self.size, wire.stack((*self.outer, *self.inner))[0])


def padded_step(move: Move, wire: TraceWire) -> Step | None:
    """What carries a move that changes a dimension that is cut unevenly; None for another move.

    Raises:
        LayoutError: axes are taken off a dimension from which others were cut later.
    """
    gone, come = (
        _cuts(move.before, move.after, move, wire),
        _cuts(move.after, move.before, move, wire),
    )
    if all(cut.even(wire) for cut in (*gone, *come)):
        return None
    if move.kind == "slice":
        return lambda x, ask: _own(x, come, wire)
    if move.kind == "place":
        return lambda x, ask: _placed(x, gone, move.op, wire)
    axes, members = wire.group(move.axes)
    grid = tuple(a for a in axes if wire.mesh.size(a) > 1)
    n = len(members)

    def run(x: torch.Tensor, ask: Ask) -> torch.Tensor:
        rows = _packed(x, come, grid, wire) if come else x.contiguous()
        piece = rows.shape[len(grid) :] if come else rows.shape
        if move.kind == "reduce_scatter":
            out = x.new_empty(piece)
            wire.reduce_scatter(out, rows, axes, move.op, ask)
            return out
        sizes = tuple(wire.mesh.size(a) for a in grid)
        out = x.new_empty((*sizes, *piece))
        if move.kind == "all_gather":
            wire.gather(out, rows, axes, ask)
        else:
            each = [math.prod(piece)] * n
            wire.all_to_all(out, rows, axes, each, each, ask)
        return _unpacked(out, gone, grid, wire)

    return run


def _cuts(cut: Layout, whole: Layout, move: Move, wire: TraceWire) -> list[_Cut]:
    """The dimensions that are cut further in `cut` than in `whole`."""
    found = []
    for dim, (size, axes, outer) in enumerate(
        zip(cut.shape, cut.shards, whole.shards, strict=True)
    ):
        same = len([a for a, b in zip(axes, outer, strict=False) if a == b])
        inner = tuple(a for a in axes[same:] if wire.mesh.size(a) > 1)
        if not inner:
            continue
        if axes[:same] != outer[:same] or any(wire.mesh.size(a) > 1 for a in outer[same:]):
            raise uneven(f"{move} changes the order in which axes cut an uneven dimension")
        found.append(_Cut(dim, size, axes[:same], inner))
    return found


def _packed(
    x: torch.Tensor, cuts: Sequence[_Cut], grid: Sequence[str], wire: TraceWire
) -> torch.Tensor:
    """The padded piece of each member of `grid`, in its order: (*grid, *piece)."""
    labels: list[Any] = []
    by_dim = {cut.dim: cut for cut in cuts}
    shape: list[int] = []
    for dim in range(x.dim()):
        cut = by_dim.get(dim)
        if cut is None:
            labels, shape = [*labels, dim], [*shape, x.shape[dim]]
            continue
        parts = wire.stack(cut.inner)[0]
        if not cut.even(wire):
            x = _pieces_in_a_row(x, cut, parts, wire)
        labels = [*labels, *cut.inner, dim]
        shape = [*shape, *parts, cut.piece_length(wire)]
    order = [labels.index(a) for a in grid] + [labels.index(d) for d in range(x.dim())]
    return x.reshape(shape).permute(order).contiguous()


def _pieces_in_a_row(
    x: torch.Tensor, cut: _Cut, parts: Sequence[int], wire: TraceWire
) -> torch.Tensor:
    _, outer = cut.outer_length(wire)
    step, n = cut.piece_length(wire), math.prod(parts)
    if isinstance(outer, int) and len(parts) == 1:
        more = n * step - outer
        if wire.zeros:
            return _with_zeros(x, cut.dim, more)
        places = torch.arange(n * step, device=x.device).clamp(max=outer - 1)
        return x.index_select(cut.dim, places)
    each = [
        torch.arange(m, device=x.device).view([-1] + [1] * (len(parts) - i))
        for i, m in enumerate(parts)
    ]
    start, length = span(_on(outer, x.device), parts, each)
    return _taken(x, cut.dim, start, length, torch.arange(step, device=x.device), wire.zeros)


def _taken(
    x: torch.Tensor, dim: int, start: Number, length: Number, offsets: torch.Tensor, zeros: bool
) -> torch.Tensor:
    """The elements of pieces along `dim`, each padded to as many as there are offsets."""
    at = (start + _least(offsets, length - 1)).clamp(min=0)
    out = x.index_select(dim, at.flatten())
    return _zeroed(out, dim, (offsets >= length).expand(at.shape).flatten()) if zeros else out


def _zeroed(x: torch.Tensor, dim: int, where: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(where.view([-1] + [1] * (x.dim() - dim - 1)), 0)


def _with_zeros(x: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - dim - 1) + [0, more])


def _unpacked(
    rows: torch.Tensor, cuts: Sequence[_Cut], grid: Sequence[str], wire: TraceWire
) -> torch.Tensor:
    """`rows`, (*grid, *piece), put together along the dimensions that `cuts` says."""
    labels: list[Any] = [*grid, *range(rows.dim() - len(grid))]
    by_dim = {cut.dim: cut for cut in cuts}
    order: list[Any] = []
    shape = []
    for dim in range(rows.dim() - len(grid)):
        inner = by_dim[dim].inner if dim in by_dim else ()
        order += [*inner, dim]
        shape.append(math.prod([rows.shape[labels.index(label)] for label in (*inner, dim)]))
    x = rows.permute([labels.index(label) for label in order]).reshape(shape)
    for cut in cuts:
        if not cut.even(wire):
            x = _without_gaps(x, cut, wire)
    return x.contiguous()


def _without_gaps(x: torch.Tensor, cut: _Cut, wire: TraceWire) -> torch.Tensor:
    """`x`, in which padded pieces stand in a row along a dimension, without what padded them."""
    parts, _ = wire.stack(cut.inner)
    padded, length = cut.outer_length(wire)
    if isinstance(length, int) and ends_last(length, parts):
        return x.narrow(cut.dim, 0, length)
    at = torch.arange(padded, device=x.device)
    behind = at >= _on(length, x.device)
    rest = _least(at, _on(length, x.device) - 1).clamp(min=0)
    place, left = torch.zeros_like(rest), _on(length, x.device)
    for n in parts:
        step = _ceil(left, n)
        step = step.clamp(min=1) if isinstance(step, torch.Tensor) else max(step, 1)
        here = rest // step
        rest, place = rest - here * step, place * n + here
        left = _least(step, left - here * step)
    out = x.index_select(cut.dim, place * cut.piece_length(wire) + rest)
    return _zeroed(out, cut.dim, behind) if wire.zeros else out


def _own(x: torch.Tensor, cuts: Sequence[_Cut], wire: TraceWire) -> torch.Tensor:
    for cut in cuts:
        start, length = _place_of(cut, wire, x.device)
        offsets = torch.arange(cut.piece_length(wire), device=x.device)
        x = _taken(x, cut.dim, start, length, offsets, wire.zeros)
    return x.contiguous()


def _placed(x: torch.Tensor, cuts: Sequence[_Cut], op: str, wire: TraceWire) -> torch.Tensor:
    for cut in cuts:
        start, length = _place_of(cut, wire, x.device)
        padded, _ = cut.outer_length(wire)
        at = torch.arange(padded, device=x.device) - start
        mine = (at >= 0) & (at < length)
        out = x.index_select(cut.dim, at.clamp(0, cut.piece_length(wire) - 1))
        mine = mine.view([-1] + [1] * (x.dim() - cut.dim - 1))
        x = out.masked_fill(~mine, neutral(op, x.dtype))
    return x.contiguous()


def _place_of(cut: _Cut, wire: TraceWire, device: torch.device) -> tuple[Number, Number]:
    """`(start, length)` of this rank's piece within the piece that `inner` cuts."""
    parts, places = wire.stack(cut.inner)
    _, outer = cut.outer_length(wire)
    start, length = span(outer, parts, places)
    return _on(start, device), _on(length, device)


class Uneven(LayoutError):
    """What cannot be done with padded shards."""


def uneven(fact: str) -> Uneven:
    """What to raise where uneven pieces cannot be captured; a capture makes it its own error."""
    return Uneven(
        fact,
        place=user_line(),
        reason="while a step is captured every rank's piece is padded to the largest one",
    )
