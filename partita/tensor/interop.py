"""Conversion to and from torch's own DTensor, without a copy: `to_torch` and `from_torch`."""

from __future__ import annotations

import math
from typing import Any

import torch

from partita.comm import (
    local_of_torch_dtensor,
    make_torch_dtensor,
    read_torch_dtensor,
    torch_mesh,
    user_line,
)
from partita.layout import Fix, LayoutError, Partial, split_factors

from .aliasing import global_strides
from .autograd import moved
from .dtensor import DTensor, tagged
from .spec import Spec, spec_on_mesh, spec_on_wire

__all__ = ["from_torch", "to_torch"]


def to_torch(x: DTensor) -> Any:
    """`x` as a `torch.distributed.tensor.DTensor` on the same mesh, sharing its memory.

    Differentiable: the gradient comes back in whatever placements torch gives it, and is taken as
    the gradient of the value. Invariant becomes Replicate; an order of axes that is not the mesh's
    becomes torch's `_StridedShard`.

    Raises:
        LayoutError: the mesh is not one of torch's (ranks in one process, a dry mesh); axes that
            split a dimension in another order than the mesh's and do not divide it evenly.
    """
    spec = x._spec
    mesh = torch_mesh(spec.wire.device_mesh)
    if mesh is None:
        raise LayoutError(
            f"to_torch: the mesh {spec.wire.mesh} is not one of torch's",
            place=user_line(),
            reason="torch's DTensor needs process groups, which these ranks have not",
            fixes=(
                Fix("pt.init_device_mesh(...)", "under torchrun or partita train"),
                Fix("x.full_tensor()", "the whole value, plain"),
            ),
        )

    def gradient(local: torch.Tensor, placements: Any) -> torch.Tensor:
        given = spec_on_wire(spec.wire, spec.shape, placements)
        return moved(local, given, spec.gradient, "to_torch", "gradient")

    return make_torch_dtensor(
        x._piece(), mesh, _torch_placements(spec), spec.shape, global_strides(x), gradient
    )


def _torch_placements(spec: Spec) -> list[tuple[str, Any]]:
    """For each axis of the mesh torch's placement: its name, and its dimension, factor or
    reduction."""
    mesh, layout = spec.wire.mesh, spec.layout
    factors = split_factors(mesh, layout.shards)
    for size, axes in zip(layout.shape, layout.shards, strict=True):
        pieces = math.prod(map(mesh.size, axes))
        if size % pieces and any(factors[a] > 1 for a in axes):
            raise LayoutError(
                f"to_torch: {size} elements in uneven pieces, over {' then '.join(axes)}",
                place=user_line(),
                operands=(f"x  {layout.brief()} on {mesh}",),
                reason="torch cuts such a dimension in other places",
                fixes=(Fix(f"x.redistribute(placements={list(spec.placements)})", "mesh order"),),
            )
    placements_of_axes: list[tuple[str, Any]] = []
    for axis, p in spec.by_axis():
        if p.is_shard():
            dim, factor = p.dim, factors[axis]  # type: ignore[attr-defined]
            placements_of_axes.append(("Shard", dim) if factor == 1 else ("Strided", (dim, factor)))
        elif isinstance(p, Partial):
            placements_of_axes.append(("Partial", p.reduce_op))
        else:
            placements_of_axes.append(("Replicate", None))
    return placements_of_axes


def from_torch(x: Any) -> DTensor:
    """A `torch.distributed.tensor.DTensor` as one of ours, on its mesh, sharing its memory.

    Differentiable: `x` gets its gradient as torch's own functions give it, whole where `x` is whole
    or pending. A pending average becomes a pending sum, of shares that are divided once.

    Raises:
        LayoutError: a placement that has no meaning here (a pending product); uneven pieces of a
            `_StridedShard`.
        TypeError: `x` is no DTensor of torch's.
    """
    mesh, placements, shape, _ = read_torch_dtensor(x)
    divisor, summed = 1, []
    for i, p in enumerate(placements):
        if p.is_partial() and getattr(p, "reduce_op", "") == "avg":
            divisor *= mesh.size(i)
            p = Partial()
        summed.append(p)
    spec = spec_on_mesh(mesh, shape, summed)
    given = spec.reduced

    def gradient(local: torch.Tensor) -> torch.Tensor:
        return moved(local, spec.gradient, given, "from_torch", "gradient")

    local = local_of_torch_dtensor(x, _torch_placements(given), gradient, divisor)
    if local.shape != spec.local_shape:
        raise LayoutError(
            "from_torch: torch has cut this tensor in other places",
            place=user_line(),
            operands=(
                f"x  {x.placements} of {tuple(shape)}",
                f"this rank's piece  {tuple(local.shape)}, here {tuple(spec.local_shape)}",
            ),
            reason="a strided shard of uneven pieces is cut by another rule",
            fixes=(Fix("from_torch(x.redistribute(placements=[Shard(0), Shard(0)]))"),),
        )
    return tagged(local, spec)
