"""The price of a row on one mesh axis: seconds of its moves, and of the work that a rank then does.

Work counts where an operand is split, for then somebody spread it: a row which gathers all and has
each rank do everything loses against one which gathers less and has each do a part. What is whole
on all ranks stays so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partita.layout import Layout, Mesh, Partial, Placement, Replicate
from partita.redistribute import price, seconds_of_work
from partita.redistribute.cost import LATENCY, local_numel, seconds
from partita.rules import Bound, Row, Work
from partita.rules.sentence import Dim

__all__ = ["RowPrice"]

_CUT = 1e-8
"""Seconds, so that of two rows the one that leaves a plain tensor whole wins, all else equal."""
_WHOLE = 4 * LATENCY
"""Seconds for work that each rank repeats although a factor was split: what follows from its result
is repeated as well, but not seen from here. As long as two collectives with their transposes, so
that small products are spread too, where all else costs less than to start a collective."""


@dataclass(frozen=True)
class RowPrice:
    """What rows cost on `axis`, where `before` are the rows of the axes before it.

    Attributes:
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
        """Seconds, forward and backward."""
        moves = self._of_moves(row)
        if not self.work or not self._is_spread():
            return moves
        if self._has_exchanges(row) and not self._is_pending():
            moves += self._of_shares(row)
        work = sum(self._on_a_rank(work, row) for work in self.work)
        repeated = sum(work.operations for work in self.work if row.split not in work.names)
        whole = _WHOLE * repeated / sum(work.operations for work in self.work)
        return moves + seconds_of_work(work) + whole

    # -- moves -------------------------------------------------------------------------------------

    def _of_moves(self, row: Row) -> float:
        total = 0.0
        for i, (layout, wanted) in enumerate(zip(self.layouts, row.inputs, strict=False)):
            held = self._placement_of_layout(layout)
            if layout is None or wanted is None or wanted == held:
                continue
            if self.plain[i]:
                total += _CUT
                continue
            moved = layout.put(self.axis, wanted)
            total += price(layout, moved, self.mesh, self.itemsizes[i])
            if isinstance(wanted, Partial) and _is_split(held) and not self._is_pending():
                # A piece among zeros is a share of what nobody had to reduce before: somebody has
                # to now, and sends twice what a gather of the pieces sends.
                whole = layout.put(self.axis, Replicate())
                total += price(moved, whole, self.mesh, self.itemsizes[i])
        return total

    def _has_exchanges(self, row: Row) -> bool:
        """Are pieces of an operand exchanged for those of another dimension?"""
        held = [self._placement_of_layout(x) for x in self.layouts]
        return any(
            _is_split(before) and _is_split(after) and before != after
            for before, after in zip(held, row.inputs, strict=False)
        )

    def _of_shares(self, row: Row) -> float:
        """Somebody has to reduce shares that an exchange led to: to pieces, at the least."""
        n, total = self.mesh.size(self.axis), 0.0
        for out, placed in zip(self.bound.outputs, row.outputs, strict=True):
            if isinstance(placed, Partial):
                size = max(self.itemsizes) * self._local_numel_of_dims(out) / n
                total += seconds("PS", n, n * size, size, placed.reduce_op)
        return total

    def _local_numel_of_dims(self, dims: Sequence[Dim]) -> float:
        """Elements of a result on a rank; if only the kernel tells how many, of an operand."""
        names = {name for dim in dims for name in dim.names}
        if not names <= self.bound.sizes.keys():
            return max(local_numel(x.shape, x.shards, self.mesh) for x in self.layouts if x)
        return math.prod([self.bound.sizes[name] for name in names]) / self._count_parts(names)

    def _placement_of_layout(self, layout: Layout | None) -> Placement | None:
        return None if layout is None else layout.placement(self.axis)

    def _is_pending(self) -> bool:
        return any(isinstance(self._placement_of_layout(x), Partial) for x in self.layouts)

    def _is_spread(self) -> bool:
        """Does this axis split a factor that is no plain tensor?"""
        factors = {i for work in self.work for i in work.factors if not self.plain[i]}
        return self.mesh.size(self.axis) > 1 and any(
            _is_split(self._placement_of_layout(self.layouts[i])) for i in factors
        )

    # -- work --------------------------------------------------------------------------------------

    def _on_a_rank(self, work: Work, row: Row) -> float:
        n = self.mesh.size(self.axis) if row.split in work.names else 1
        return work.operations / (n * self._count_parts(work.names))

    def _count_parts(self, names: set[str] | frozenset[str]) -> int:
        """Over how many ranks of other axes something with these names is spread: as the axes
        before do it by their rows, and as those behind may by what they split."""
        known = dict(zip(self.mesh.names, self.before, strict=False))
        parts = [self.mesh.size(a) for a, row in known.items() if row.split in names]
        ahead = {a for x in self.layouts if x is not None for axes in x.shards for a in axes}
        parts += [self.mesh.size(a) for a in ahead - {self.axis, *known}]
        return math.prod(parts)


def _is_split(placement: Placement | None) -> bool:
    return placement is not None and placement.is_shard()
