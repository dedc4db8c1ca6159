"""The choice of rows: for each axis of the mesh, the cheapest legal way to spread an op over it.

A pure function of layouts, which gives layouts; the plan cache stands around it.

A row's price is in seconds: of its moves, forward and backward, and of the work that a rank then
does. Work counts only where an operand is sharded, for then somebody wanted it spread: a row which
gathers all and has each rank do everything loses against one which gathers less and has each rank
do a part. What is whole on all ranks stays so.

    x[8, 16@tp] @ w[16@tp, 4] on tp    S(1), S(0) -> P    moves nothing    is taken
                                       R,    R    -> R    gathers both
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partita.layout import Layout, Mesh, Partial, Placement, Replicate
from partita.redistribute import estimate_price, seconds_of_work
from partita.redistribute.cost import LATENCY, local_numel, seconds_both_ways
from partita.rules import Bound, Row, Work
from partita.rules.sentence import Dim

__all__ = ["Choice", "Considered", "choose"]


@dataclass(frozen=True)
class Considered:
    """A row that was looked at for an axis, with its price in seconds, forward and backward
    together, and whether it was taken."""

    axis: str
    row: Row
    price: float
    taken: bool


@dataclass(frozen=True)
class Choice:
    """How an op is spread over the mesh.

    Attributes:
        inputs: the layout that each operand must have; None where it is absent or a number.
        outputs: for each output and dimension the axes that split it, outermost first.
        partial, invariant: for each output, as in `Layout`.
        splits: for each split name its axes, outermost first.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[tuple[tuple[str, ...], ...], ...]
    partial: tuple[tuple[tuple[str, str], ...], ...]
    invariant: tuple[tuple[str, ...], ...]
    splits: dict[str, tuple[str, ...]]


def choose(
    bound: Bound,
    layouts: Sequence[Layout | None],
    plain: Sequence[bool],
    itemsizes: Sequence[int],
    mesh: Mesh,
    inplace: bool = False,
    keeps: str = "",
    work: Sequence[Work] = (),
    considered: list[Considered] | None = None,
) -> Choice | None:
    """The cheapest legal way to run an op on operands laid out like this.

    Args:
        layouts: the operands' layouts; None where one is absent or a number.
        plain: which operands are plain tensors: whole on every rank and without a gradient, so
            that each placement of them is free.
        itemsizes: bytes per element of each operand.
        inplace: operand 0 must keep its layout, and output 0 must have it too.
        keeps: a name that stays split by each axis that splits it in operand 0.
        work: the op's matrix products.
        considered: if given, every row looked at is appended.

    Returns:
        None if no legal row leaves operand 0 as `inplace` demands.
    """
    rows: list[Row] = []
    parts: dict[str, int] = {}
    for axis in mesh.names:
        n = mesh.size(axis)
        current = [None if x is None else x.placement(axis) for x in layouts]
        best, best_price = None, float("inf")
        price = RowPrice(axis, rows, bound, layouts, plain, itemsizes, mesh, work)
        for row in _find_rows_splitting(bound, layouts[0], keeps, axis) or bound.rows:
            if inplace and not (row.inputs[0] == current[0] == row.outputs[0]):
                continue
            if row.split and not bound.can_split(row.split, parts.get(row.split, 1) * n):
                continue
            cost = price(row)
            if considered is not None:
                considered.append(Considered(axis, row, cost, False))
            if cost < best_price:
                best, best_price = row, cost
                if cost == 0.0 and considered is None:
                    break
        if best is None:
            return None
        if considered is not None:
            considered[:] = [
                Considered(c.axis, c.row, c.price, c.taken or (c.axis == axis and c.row is best))
                for c in considered
            ]
        rows.append(best)
        if best.split:
            parts[best.split] = parts.get(best.split, 1) * n
    return _choose_layouts(bound, rows, layouts, mesh, inplace)


def _find_rows_splitting(bound: Bound, first: Layout | None, name: str, axis: str) -> list[Row]:
    """The rows that split `name`, if `axis` splits it in the first operand; else none."""
    dims = bound.inputs[0]
    if not name or first is None or dims is None:
        return []
    held = any(axis in axes and name in d.names for axes, d in zip(first.shards, dims, strict=True))
    return [row for row in bound.rows if held and row.split == name]


def _choose_layouts(
    bound: Bound,
    rows: Sequence[Row],
    layouts: Sequence[Layout | None],
    mesh: Mesh,
    inplace: bool,
) -> Choice:
    splits: dict[str, tuple[str, ...]] = {}
    for axis, row in zip(mesh.names, rows, strict=True):
        if row.split:
            splits[row.split] = (*splits.get(row.split, ()), axis)
    for name, axes in splits.items():
        if len(axes) > 1:
            splits[name] = _choose_axis_order(
                name, axes, bound, layouts[:1] if inplace else layouts
            )
    by_axis = dict(zip(mesh.names, rows, strict=True))
    inputs: list[Layout | None] = []
    for i, layout in enumerate(layouts):
        dims = bound.inputs[i]
        if layout is None or dims is None:
            inputs.append(None)
            continue
        held = {a: by_axis[a].inputs[i] for a in mesh.names}
        stacks = _assign_axes_to_dims([d.names for d in dims], splits)
        inputs.append(
            Layout(layout.shape, stacks, _find_partial_axes(held), _find_invariant_axes(held))
        )
    outputs, partial, invariant = [], [], []
    for j, out in enumerate(bound.outputs):
        held = {a: by_axis[a].outputs[j] for a in mesh.names}
        outputs.append(_assign_axes_to_dims([d.names for d in out], splits))
        partial.append(_find_partial_axes(held))
        invariant.append(_find_invariant_axes(held))
    return Choice(tuple(inputs), tuple(outputs), tuple(partial), tuple(invariant), splits)


def _choose_axis_order(
    name: str, axes: tuple[str, ...], bound: Bound, layouts: Sequence[Layout | None]
) -> tuple[str, ...]:
    """The order in which several axes split one name: that of the largest operand split by them."""
    best: tuple[str, ...] = ()
    best_size = -1
    for layout, dims in zip(layouts, bound.inputs, strict=False):
        if layout is None or dims is None:
            continue
        for shards, dim in zip(layout.shards, dims, strict=True):
            if name in dim.names:
                kept = tuple(a for a in shards if a in axes)
                size = 1
                for n in layout.shape:
                    size *= n
                if (len(kept), size) > (len(best), best_size):
                    best, best_size = kept, size
    return best + tuple(a for a in axes if a not in best)


def _assign_axes_to_dims(
    dims: Sequence[tuple[str, ...]], splits: dict[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(a for n in names for a in splits.get(n, ())) for names in dims)


def _find_partial_axes(held: dict[str, Placement | None]) -> tuple[tuple[str, str], ...]:
    return tuple((a, p.reduce_op) for a, p in held.items() if isinstance(p, Partial))


def _find_invariant_axes(held: dict[str, Placement | None]) -> tuple[str, ...]:
    return tuple(a for a, p in held.items() if p is not None and p.is_invariant())


# -- the price of a row ----------------------------------------------------------------------------

_SECONDS_TO_CUT_PLAIN = 1e-8
"""Seconds for a plain tensor that is cut: of two rows that cost the same otherwise, the one that
leaves it whole is taken."""
_SECONDS_OF_REPEATED_WORK = 4 * LATENCY
"""Seconds for work that each rank repeats although a factor is sharded: what follows from its
result is repeated as well, which is not known here. As long as two collectives with their
transposes take to start, so that small products, whose work costs less than that, are spread
too."""


@dataclass(frozen=True)
class RowPrice:
    """The price of rows on `axis`.

    Attributes:
        before: the rows that were taken for the axes before it.
        layouts, plain, itemsizes: of each operand, as for `choose`.
        work: the op's matrix products.
    """

    axis: str
    before: Sequence[Row]
    bound: Bound
    layouts: Sequence[Layout | None]
    plain: Sequence[bool]
    itemsizes: Sequence[int]
    mesh: Mesh
    work: Sequence[Work]

    def __call__(self, row: Row) -> float:
        """The price of a row in seconds, forward and backward."""
        moves = self._price_moves(row)
        if not self.work or not self._is_spread():
            return moves
        if self._has_exchanges(row) and not self._is_pending():
            moves += self._price_reductions(row)
        work = sum(self._operations_on_rank(work, row) for work in self.work)
        repeated = sum(work.operations for work in self.work if row.split not in work.names)
        whole = _SECONDS_OF_REPEATED_WORK * repeated / sum(work.operations for work in self.work)
        return moves + seconds_of_work(work) + whole

    # -- moves -------------------------------------------------------------------------------------

    def _price_moves(self, row: Row) -> float:
        total = 0.0
        for i, (layout, wanted) in enumerate(zip(self.layouts, row.inputs, strict=False)):
            held = self._placement_of_layout(layout)
            if layout is None or wanted is None or wanted == held:
                continue
            if self.plain[i]:
                total += _SECONDS_TO_CUT_PLAIN
                continue
            moved = layout.put(self.axis, wanted)
            total += estimate_price(layout, moved, self.mesh, self.itemsizes[i])
            if isinstance(wanted, Partial) and _is_split(held) and not self._is_pending():
                # A piece among zeros is a share of what nobody had to reduce before: somebody has
                # to now, and sends twice what a gather of the pieces sends.
                whole = layout.put(self.axis, Replicate())
                total += estimate_price(moved, whole, self.mesh, self.itemsizes[i])
        return total

    def _has_exchanges(self, row: Row) -> bool:
        """Does the row move an operand from one sharded dimension to another (all-to-all)?"""
        held = [self._placement_of_layout(x) for x in self.layouts]
        return any(
            _is_split(before) and _is_split(after) and before != after
            for before, after in zip(held, row.inputs, strict=False)
        )

    def _price_reductions(self, row: Row) -> float:
        """Seconds to reduce the row's Partial results, at the least by a reduce-scatter: who takes
        them has to."""
        n, total = self.mesh.size(self.axis), 0.0
        for out, placed in zip(self.bound.outputs, row.outputs, strict=True):
            if isinstance(placed, Partial):
                size = max(self.itemsizes) * self._local_numel_of_dims(out) / n
                total += seconds_both_ways("PS", n, n * size, size, placed.reduce_op)
        return total

    def _local_numel_of_dims(self, dims: Sequence[Dim]) -> float:
        """Elements of a result on a rank; of the largest operand, if only the kernel tells a
        size."""
        names = {name for dim in dims for name in dim.names}
        if not names <= self.bound.sizes.keys():
            return max(local_numel(x.shape, x.shards, self.mesh) for x in self.layouts if x)
        return math.prod([self.bound.sizes[name] for name in names]) / self._count_parts(names)

    def _placement_of_layout(self, layout: Layout | None) -> Placement | None:
        return None if layout is None else layout.placement(self.axis)

    def _is_pending(self) -> bool:
        return any(isinstance(self._placement_of_layout(x), Partial) for x in self.layouts)

    def _is_spread(self) -> bool:
        """Does this axis shard a factor of a product that is a DTensor?"""
        factors = {i for work in self.work for i in work.factors if not self.plain[i]}
        return self.mesh.size(self.axis) > 1 and any(
            _is_split(self._placement_of_layout(self.layouts[i])) for i in factors
        )

    # -- work --------------------------------------------------------------------------------------

    def _operations_on_rank(self, work: Work, row: Row) -> float:
        """Operations on one rank."""
        n = self.mesh.size(self.axis) if row.split in work.names else 1
        return work.operations / (n * self._count_parts(work.names))

    def _count_parts(self, names: set[str] | frozenset[str]) -> int:
        """The number of parts into which other axes split these names: the axes before by their
        rows; of an axis behind, each that shards an operand is counted."""
        rows_by_axis = dict(zip(self.mesh.names, self.before, strict=False))
        parts = [self.mesh.size(a) for a, row in rows_by_axis.items() if row.split in names]
        ahead = {a for x in self.layouts if x is not None for axes in x.shards for a in axes}
        parts += [self.mesh.size(a) for a in ahead - {self.axis, *rows_by_axis}]
        return math.prod(parts)


def _is_split(placement: Placement | None) -> bool:
    return placement is not None and placement.is_shard()
