"""Torch's own placements (`torch.distributed.tensor.Shard` and its kin), taken as ours.

They are read by their class's name and what they hold: nothing here knows of torch, and to import
torch's classes takes half a second. What torch has and we have not (a pending average, a product)
stays what it is, and is refused as no placement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .mesh import Mesh
from .placement import Partial, Placement, Replicate, Shard

__all__ = ["own_placement", "own_placements", "split_factors"]


def own_placement(given: Any) -> Any:
    """Our placement for one of torch's that means the same; anything else as it is."""
    kind = type(given)
    if isinstance(given, Placement) or not kind.__module__.startswith("torch."):
        return given
    if kind.__name__ == "Shard":
        return Shard(given.dim)
    if kind.__name__ == "Replicate":
        return Replicate()
    if kind.__name__ == "Partial" and given.reduce_op in ("sum", "max", "min"):
        return Partial(given.reduce_op)
    return given


def own_placements(
    mesh: Mesh, given: Sequence[Any], order: Sequence[str]
) -> tuple[list[Any], Sequence[str]]:
    """Our placements for those that a user gave, and the order in which axes split a dimension.

    torch says by a `_StridedShard` that axes after this one in the mesh split the dimension before
    it: its split factor is the number of their pieces.

    Args:
        order: as given; returned as it is where nothing is strided.
    """
    out = [own_placement(p) for p in given]
    strided = {a: p for a, p in zip(mesh.names, out, strict=True) if _is_strided(p)}
    if not strided or order:
        return out, order
    found: list[str] = []  # from the last axis on, each put behind those that split before it
    for axis, p in reversed(list(zip(mesh.names, out, strict=True))):
        factor = p.split_factor if axis in strided else 1
        dim = getattr(p, "dim", None)
        for i in range(len(found) + 1):
            before = [
                a
                for a in found[:i]
                if getattr(_placement_of_axis(mesh, out, a), "dim", None) == dim
            ]
            if math.prod(map(mesh.size, before)) == factor:
                found.insert(i, axis)
                break
        else:
            return out, order  # no order of ours says this: it is refused as no placement
    return [Shard(p.dim) if _is_strided(p) else p for p in out], found


def split_factors(mesh: Mesh, stacks: Sequence[Sequence[str]]) -> dict[str, int]:
    """By axis, the pieces that later axes of the mesh have cut its dimension into before it."""
    factors = {}
    for axes in stacks:
        for i, axis in enumerate(axes):
            later = [a for a in axes[:i] if mesh.index(a) > mesh.index(axis)]
            factors[axis] = math.prod(map(mesh.size, later))
    return factors


def _is_strided(p: Any) -> bool:
    return type(p).__name__ == "_StridedShard" and type(p).__module__.startswith("torch.")


def _placement_of_axis(mesh: Mesh, placements: Sequence[Any], axis: str) -> Any:
    return placements[mesh.index(axis)]
