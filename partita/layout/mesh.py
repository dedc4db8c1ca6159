"""Meshes: ranks, arranged along named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from numbers import Integral

from .errors import Fix, LayoutError

Coordinate = tuple[int, ...]
"""One rank's place: its index along each mesh axis, in the order of `Mesh.names`."""


@dataclass(frozen=True)
class Mesh:
    """Named axes of ranks, row-major: `Mesh(("dp", "tp"), (2, 4))` arranges eight."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise LayoutError(f"a mesh needs a name for each axis: {self.names} for {self.sizes}")
        if len(set(self.names)) != len(self.names):
            raise LayoutError(f"the axes of a mesh need different names, not {self.names}")
        if not all(isinstance(n, Integral) for n in self.sizes):
            raise LayoutError(f"the size of a mesh's axis is a whole number: {self}")
        if any(n < 1 for n in self.sizes):
            raise LayoutError(f"each axis of a mesh needs at least one rank: {self}")

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @cached_property
    def _size_of(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    def size(self, axis: str | None = None) -> int:
        """The number of ranks along `axis`, or of all ranks."""
        if axis is None:
            return math.prod(self.sizes)
        try:
            return self._size_of[axis]
        except KeyError:
            raise self._no_axis(axis) from None

    def index(self, axis: str) -> int:
        """The position of `axis` among the axes."""
        if axis not in self._size_of:
            raise self._no_axis(axis)
        return self.names.index(axis)

    def _no_axis(self, axis: object) -> LayoutError:
        return LayoutError(
            f"no axis {axis!r} on mesh {self}",
            reason="an axis is called by the name that the mesh was made with",
            fixes=tuple(Fix(repr(name), f"{n} ranks") for name, n in self._size_of.items()),
        )

    def coordinates(self) -> tuple[Coordinate, ...]:
        """Every rank's coordinate, in rank order."""
        return tuple(product(*(range(n) for n in self.sizes)))

    def group(self, axes: tuple[str, ...], at: Coordinate) -> tuple[Coordinate, ...]:
        """The coordinates of the ranks that share all but `axes` with `at`, first axis slowest."""
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
