"""The choice of an op's row: the cheapest of the legal ones, axis by axis.

Pure: layouts in, layouts out. The cache stands around it and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.layout import Layout, Mesh, Partial, Placement
from partita.rules import Bound, Row, Work

from .row_price import RowPrice

__all__ = ["Choice", "Considered", "choose"]


@dataclass(frozen=True)
class Considered:
    """A row of one axis and its price in seconds, forward and backward together."""

    axis: str
    row: Row
    price: float
    taken: bool


@dataclass(frozen=True)
class Choice:
    """How an op is run.

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
    """The rows that split `name`, where `axis` splits it in the first operand; else none."""
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
