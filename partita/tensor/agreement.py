"""Agreement of local tensors: whether those that the ranks bring make up one global tensor.

What one rank finds only that rank knows. So the ranks first tell each other, and then all raise the
same error, or none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from partita.comm import (
    Wire,
    call_site,
    digest_of_text,
    gather_texts,
    is_agreed,
    make_disagreement_error,
    remember_agreed,
    user_line,
)
from partita.layout import Coordinate, Fix, Layout, LayoutError, Partial

from .checksum import checksum
from .spec import Spec

__all__ = ["agree_pieces", "compare_pieces", "make_no_strides_error"]


def _make_misfit_error(
    shape: Sequence[int], layout: Layout, wire: Wire, at: Coordinate, *, fix: Fix | None = None
) -> LayoutError:
    """The error to raise where the rank at `at` brings a piece of `shape`, which is not what
    `layout` has for it."""
    rank, due = wire.mesh.coordinates().index(at), layout.local_shape(wire.mesh, at)
    return LayoutError(
        f"from_local: the piece of rank {rank} does not fit the stated shape {layout.shape}",
        place=user_line(),
        operands=(
            f"local_tensor  {tuple(shape)}",
            f"layout {layout.brief()} on {wire.mesh} gives rank {rank} {due}",
        ),
        reason="pieces are cut as torch.chunk cuts: equal ones first, then the rest",
        fixes=(fix or Fix(f"a piece of shape {due}", f"on rank {rank}"),),
    )


def agree_pieces(local: torch.Tensor, spec: Spec) -> None:
    """Compare the pieces' shapes and dtypes, the first time that a place brings such ones.

    A rank that brings another piece than before comes to compare alone, and is named.

    Raises:
        LayoutError: on every rank, where they do not go together; on this rank alone where only it
            brings a piece that is not that of a stated shape which was compared before.
    """
    wire, fits = spec.wire, local.shape == spec.local_shape
    graded = local.requires_grad and torch.is_grad_enabled()
    key = (call_site(), "from_local", spec, local.dtype, graded)
    if not is_agreed(wire, key):
        description = f"{spec.layout} of {local.dtype}{' with a gradient' if graded else ''}"
        gathered = wire.gather_ints((digest_of_text(description), int(fits)))
        if len(set(gathered)) > 1:
            raise _make_disagreement_error(local, spec.layout, description, wire)
        if fits:
            remember_agreed(wire, key)
    if not fits:
        raise _make_misfit_error(local.shape, spec.layout, wire, wire.at)


def compare_pieces(local: torch.Tensor, spec: Spec) -> None:
    """Compare shapes, dtypes, values and order in memory of the ranks' pieces of one tensor.

    Raises:
        LayoutError: on all ranks alike, where they do not make up a tensor of `spec`.
    """
    wire, layout = spec.wire, spec.layout
    fits = local.shape == spec.local_shape
    description = f"{layout} of {local.dtype}"
    order = _order_of_memory(local, spec)
    gathered = wire.gather_ints((digest_of_text(description), int(fits), order, *checksum(local)))
    if len({digest for digest, *_ in gathered}) > 1 or not all(ok for _, ok, *_ in gathered):
        raise _make_disagreement_error(local, layout, description, wire)
    if {1, 2} <= {order for _, _, order, *_ in gathered}:
        raise _make_order_error([order for _, _, order, *_ in gathered])
    by_coordinate = {c: tuple(gathered[i][3:]) for i, c in enumerate(wire.mesh.coordinates())}
    for axis in wire.mesh.names:
        placement = layout.placement(axis)
        if placement.is_shard() or placement.is_partial():
            continue
        i = wire.mesh.index(axis)
        for c, summary in by_coordinate.items():
            first = by_coordinate[c[:i] + (0,) + c[i + 1 :]]
            if summary != first:
                shares = [Partial() if a == axis else layout.placement(a) for a in wire.mesh.names]
                raise LayoutError(
                    f"from_local: the ranks along {axis} do not hold the same value",
                    place=user_line(),
                    operands=(
                        f"layout {layout.brief()} on {wire.mesh}",
                        f"at {c} the checksum is {summary[-1]:x}, of the first along {axis} "
                        f"{first[-1]:x}",
                    ),
                    reason=f"{placement} on {axis} says that they do; nothing was changed",
                    fixes=(
                        Fix("pt.distribute_tensor(t, mesh, placements)", "to take rank 0's"),
                        Fix(f"placements={shares}", "if they are shares of a sum"),
                    ),
                )


def _order_of_memory(local: torch.Tensor, spec: Spec) -> int:
    """Is the piece contiguous? 1 for yes, 2 for no; 0 where a row alone does not tell."""
    if any(n < 2 <= whole for n, whole in zip(local.shape, spec.shape, strict=False)):
        return 0
    return 1 if local.is_contiguous() else 2


def _make_order_error(orders: Sequence[int]) -> LayoutError:
    ranks = (orders.index(1), orders.index(2))
    return LayoutError(
        "from_local: the ranks' pieces lie differently in memory",
        place=user_line(),
        operands=tuple(
            f"rank {rank}  {'contiguous' if orders[rank] == 1 else 'with gaps, or transposed'}"
            for rank in sorted(ranks)
        ),
        reason="strides, and what is a view or a copy of it, would be another on each rank",
        fixes=(Fix("pt.DTensor.from_local(t.contiguous(), ...)", "on every rank"),),
    )


def make_no_strides_error(what: str, t: torch.Tensor) -> LayoutError:
    """What to raise where `t`, which is sparse (or has another layout of its own), is to be global.

    Args:
        what: who takes it or makes it.
    """
    return LayoutError(
        f"{what}: a tensor of layout {t.layout} cannot be a DTensor",
        place=user_line(),
        operands=(f"t  {tuple(t.shape)}",),
        reason="placements speak of dimensions that can be cut, and a sparse tensor's cannot",
        fixes=(
            Fix("t.to_dense()"),
            Fix("pt.local_map(f, out_placements)", "where f takes or makes a sparse tensor inside"),
        ),
    )


def _make_disagreement_error(
    local: torch.Tensor, layout: Layout, description: str, wire: Wire
) -> LayoutError:
    """The error to raise where pieces do not fit. Every rank calls this: texts are gathered."""
    own_answer = [description, f"{layout.shards} {local.dtype}", list(local.shape)]
    gathered = [json.loads(t) for t in gather_texts(json.dumps(own_answer), wire)]
    texts = [text for text, _, _ in gathered]
    shapes = [tuple(shape) for _, _, shape in gathered]
    by_coordinate = dict(zip(wire.mesh.coordinates(), shapes, strict=True))
    # Only where the ranks agree on all but the shape can the pieces say which it is.
    cut_alike = len({cut for _, cut, _ in gathered}) == 1
    true = _find_shape_of_pieces(by_coordinate, layout, wire) if cut_alike else None
    fix = None if true is None else Fix(f"shape={true}", "what the pieces make together")
    if len(set(texts)) > 1:
        uneven = fix is None and cut_alike and len({len(shape) for shape in shapes}) == 1
        way = Fix("cut as torch.chunk does", "the first ranks have the larger pieces, then: shape=")
        fixes = [fix] if fix else [way] if uneven else []
        return make_disagreement_error("from_local", texts, fixes=fixes)
    wrong = next(c for c, s in by_coordinate.items() if s != layout.local_shape(wire.mesh, c))
    return _make_misfit_error(by_coordinate[wrong], layout, wire, wrong, fix=fix)


def _find_shape_of_pieces(
    by_coordinate: dict[Coordinate, tuple[int, ...]], layout: Layout, wire: Wire
) -> tuple[int, ...] | None:
    """The shape of the tensor that is cut into just these pieces, if there is one."""
    if any(len(shape) != len(layout.shape) for shape in by_coordinate.values()):
        return None
    shape = []
    for dim, axes in enumerate(layout.shards):
        first = [
            c
            for c in by_coordinate
            if all(i == 0 or a in axes for a, i in _name_coordinates(c, wire))
        ]
        shape.append(sum(by_coordinate[c][dim] for c in first))
    whole = Layout(tuple(shape), layout.shards)
    fits = all(piece == whole.local_shape(wire.mesh, c) for c, piece in by_coordinate.items())
    return tuple(shape) if fits and 0 not in shape else None


def _name_coordinates(at: Coordinate, wire: Wire) -> list[tuple[str, int]]:
    return list(zip(wire.mesh.names, at, strict=True))
