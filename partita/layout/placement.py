"""Meshes and placements: named axes of ranks, and how one axis holds one tensor and its gradient.

Placements of `torch.distributed.tensor` (`Shard` and the others) are accepted and converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from numbers import Integral
from typing import Any

from .text import Fix, LayoutError

# -- meshes ----------------------------------------------------------------------------------------

Coordinate = tuple[int, ...]
"""One rank's place: its index along each mesh axis, in the order of `Mesh.names`."""


@dataclass(frozen=True)
class Mesh:
    """A mesh: named axes of ranks. `Mesh(names=("dp", "tp"), sizes=(2, 4))` has eight ranks.

    Ranks are numbered in row-major order: the last axis varies fastest.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise LayoutError(f"a mesh needs a name for each axis: {self.names} for {self.sizes}")
        if len(set(self.names)) != len(self.names):
            raise LayoutError(f"the axes of a mesh need different names, not {self.names}")
        if not all(isinstance(n, Integral) for n in self.sizes):
            raise LayoutError(f"the size of a mesh axis is an integer: {self}")
        if any(n < 1 for n in self.sizes):
            raise LayoutError(f"each axis of a mesh needs at least one rank: {self}")

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @cached_property
    def _size_of(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    def size(self, axis: str | None = None) -> int:
        """Returns the number of ranks along `axis`. Without `axis`: of all ranks."""
        if axis is None:
            return math.prod(self.sizes)
        try:
            return self._size_of[axis]
        except KeyError:
            raise self._no_axis(axis) from None

    def index(self, axis: str) -> int:
        """Returns the position of `axis` among the axes."""
        if axis not in self._size_of:
            raise self._no_axis(axis)
        return self.names.index(axis)

    def _no_axis(self, axis: object) -> LayoutError:
        return LayoutError(
            f"no axis {axis!r} on mesh {self}",
            reason="an axis has the name that the mesh was made with",
            fixes=tuple(Fix(repr(name), f"{n} ranks") for name, n in self._size_of.items()),
        )

    def coordinates(self) -> tuple[Coordinate, ...]:
        """Returns the coordinate of every rank (one index for each axis), in rank order."""
        return tuple(product(*(range(n) for n in self.sizes)))

    def group(self, axes: tuple[str, ...], at: Coordinate) -> tuple[Coordinate, ...]:
        """Returns the ranks that differ from the one at `at` only along `axes`, as coordinates.

        The first of `axes` varies slowest.
        """
        where = [self.index(a) for a in axes]
        members = []
        for steps in product(*(range(self.sizes[i]) for i in where)):
            member = list(at)
            for i, step in zip(where, steps, strict=True):
                member[i] = step
            members.append(tuple(member))
        return tuple(members)

    def __str__(self) -> str:
        return " ".join(f"{a}={n}" for a, n in zip(self.names, self.sizes, strict=True))


# -- placements ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The placement of a tensor on one mesh axis: Shard, Replicate, Partial or Invariant."""

    def dual(self) -> Placement:
        """Returns the placement of the gradient: Shard for Shard, Partial for Replicate, and so on.

        A gradient's placement depends only on its value's placement. Only this method defines it.
        """
        raise NotImplementedError

    def is_shard(self, dim: int | None = None) -> bool:
        """True if every rank holds a slice; if `dim` is given, a slice of that dimension."""
        return False

    def is_replicate(self) -> bool:
        """True if every rank holds the whole value and may use it differently."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True if every rank holds one addend of the value, or for a max or min one candidate.

        If `reduce_op` is given, True only for a Partial of that operation.
        """
        return False

    def is_invariant(self) -> bool:
        """True if every rank holds the whole value and does the same computation with it.

        So its gradient is whole and equal on every rank. A Replicate value's gradient is Partial.
        """
        return False


@dataclass(frozen=True)
class Shard(Placement):
    """Every rank of the axis holds a slice of tensor dimension `dim`. The gradient is Shard."""

    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int and (
            isinstance(self.dim, bool) or not isinstance(self.dim, Integral)
        ):
            raise TypeError(
                f"Shard takes a dimension of the tensor, not {self.dim!r}: write Shard(0); the "
                'mesh axis is its place in a list of placements, or the key in {"dp": Shard(0)}'
            )

    def dual(self) -> Placement:
        return self

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank holds the whole value and may use it differently. The gradient is Partial."""

    def dual(self) -> Placement:
        return Partial()

    def is_replicate(self) -> bool:
        return True

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank holds one addend; the value is the sum over ranks (`reduce_op`: or max, min).

    Only a Partial sum has a gradient, which is Replicate. There is no "avg": a mean is a sum
    divided by the global number of elements.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in ("sum", "max", "min"):
            raise ValueError(
                f'Partial reduces with "sum", "max" or "min", not {self.reduce_op!r}: '
                "write a mean as a sum divided by the global count"
            )

    def dual(self) -> Placement:
        if self.reduce_op != "sum":
            raise ValueError(f"a pending {self.reduce_op} has no gradient until it is reduced")
        return Replicate()

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"


NEUTRAL_SHARE = -0.0
"""The share of a sum that changes no value: 0.0 would turn -0.0 into 0.0."""


@dataclass(frozen=True)
class Invariant(Placement):
    """Every rank holds the whole value and computes the same with it. The gradient is Invariant."""

    def dual(self) -> Placement:
        return self

    def is_invariant(self) -> bool:
        return True

    def __str__(self) -> str:
        return "I"


# -- torch's placements ----------------------------------------------------------------------------
# Recognized by the name of their class, because importing torch's classes takes half a second. A
# Partial average or product, which partita lacks, is returned unchanged, and refused later.


def own_placement(given: Any) -> Any:
    """Converts `given`, a placement of torch.distributed.tensor, to partita's.

    Any other object is returned unchanged.
    """
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
    """Converts `given`, a user's placements, to partita's. Also returns the order of axes.

    If several axes split a dimension, the first in this order is the outermost. In torch, a
    `_StridedShard` on an axis says that later axes of the mesh split the dimension first. Its split
    factor is the number of shards that these axes make.

    Args:
        order: the order of axes that the user gave, or (). It is returned unchanged if it is not
            empty, or if there is no `_StridedShard`.
    """
    out = [own_placement(p) for p in given]
    strided = {a: p for a, p in zip(mesh.names, out, strict=True) if _is_strided(p)}
    if not strided or order:
        return out, order
    found: list[str] = []  # each axis, from the last one on, comes after those that split before it
    for axis, p in reversed(list(zip(mesh.names, out, strict=True))):
        factor = p.split_factor if axis in strided else 1
        dim = getattr(p, "dim", None)
        for i in range(len(found) + 1):
            before = [a for a in found[:i] if getattr(out[mesh.index(a)], "dim", None) == dim]
            if math.prod(map(mesh.size, before)) == factor:
                found.insert(i, axis)
                break
        else:
            return out, order  # no order is equivalent: refused later
    return [Shard(p.dim) if _is_strided(p) else p for p in out], found


def split_factors(mesh: Mesh, stacks: Sequence[Sequence[str]]) -> dict[str, int]:
    """Returns the `split_factor` of each axis for torch's `_StridedShard`.

    It is the number of shards into which later mesh axes have cut the dimension, before this axis
    splits it.

    Args:
        stacks: for each dimension, the axes that split it, outermost first.
    """
    factors = {}
    for axes in stacks:
        for i, axis in enumerate(axes):
            later = [a for a in axes[:i] if mesh.index(a) > mesh.index(axis)]
            factors[axis] = math.prod(map(mesh.size, later))
    return factors


def _is_strided(p: Any) -> bool:
    return type(p).__name__ == "_StridedShard" and type(p).__module__.startswith("torch.")
