"""Layouts: how a tensor of a global shape is distributed over the axes of a mesh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .placement import (
    Coordinate,
    Invariant,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    own_placement,
    own_placements,
)
from .text import Fix, LayoutError


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns `(offset, length)` of one chunk of a dimension, as `torch.chunk` cuts it.

    If `torch.chunk` returns fewer than `parts` chunks, the missing chunks are empty.

    Args:
        size: the length of the dimension, in elements.
        parts: the number of chunks.
        index: the number of the chunk.
    """
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


@dataclass(frozen=True)
class Layout:
    """How a tensor of a global shape is distributed over the named axes of a mesh.

    An axis that no field names is Replicate.

    Attributes:
        shape: the global shape, in elements.
        shards: for each dimension the axes that split it, outermost first: `(("dp", "tp"), ())`
            shards dimension 0 over dp and each of these pieces over tp. The order is part of
            the layout.
        partial: `(axis, reduce_op)` for each Partial axis, sorted by axis.
        invariant: the Invariant axes, sorted.
        dtype: a short name such as "f32", or "" if no dtype is given.
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[str, ...], ...] = ()
    partial: tuple[tuple[str, str], ...] = ()
    invariant: tuple[str, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        if not self.shards and self.shape:
            object.__setattr__(self, "shards", ((),) * len(self.shape))
        if len(self.shards) != len(self.shape):
            raise LayoutError(f"{len(self.shards)} dimensions of shards for shape {self.shape}")
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        object.__setattr__(self, "invariant", tuple(sorted(self.invariant)))
        axes = self.axes
        if len(set(axes)) != len(axes):
            raise LayoutError(f"one mesh axis has two roles in layout {self}")

    # -- from and to placements ---------------------------------------------------------------

    @staticmethod
    def of(
        mesh: Mesh,
        shape: Sequence[int],
        placements: Sequence[Placement],
        order: Sequence[str] = (),
        dtype: str = "",
    ) -> Layout:
        """Returns the layout in which axis i of `mesh` has `placements[i]`.

        Args:
            shape: the global shape, in elements.
            placements: one for each axis of `mesh`.
            order: the names of axes that shard one dimension together, outermost first. Other axes
                follow in mesh order.
            dtype: a short name such as "f32", or "".

        Raises:
            LayoutError: wrong number of placements, or a shard dimension out of range.
        """
        if isinstance(own_placement(placements), Placement):
            placements = (own_placement(placements),)
        if len(placements) != mesh.ndim:
            n, axes = len(placements), "axis" if mesh.ndim == 1 else "axes"
            raise LayoutError(
                f"{n} placement{'s' * (n != 1)} for mesh {mesh}, which has {mesh.ndim} {axes}",
                operands=(f"placements  {list(placements)}",),
                reason="give one placement for each axis of the mesh, in its order",
                fixes=(_fix_of_placements([*placements, *[Replicate()] * mesh.ndim][: mesh.ndim]),),
            )
        given = placements
        placements, order = own_placements(mesh, placements, order)
        shards: list[list[str]] = [[] for _ in shape]
        partial, invariant = [], []
        for axis in dict.fromkeys((*order, *mesh.names)):
            p = placements[mesh.index(axis)]
            if isinstance(p, Shard):
                dim = p.dim + len(shape) if p.dim < 0 else p.dim
                if not 0 <= dim < len(shape):
                    raise LayoutError(
                        f"Shard({p.dim}) on axis {axis} is out of range for shape {tuple(shape)}",
                        operands=(f"placements  {list(placements)} on mesh {mesh}",),
                        reason=f"a tensor of {len(shape)} dimensions has "
                        + (f"dimensions 0 to {len(shape) - 1}" if shape else "none to shard"),
                        fixes=(_fix_of_placements([_in_range(q, len(shape)) for q in placements]),),
                    )
                shards[dim].append(axis)
            elif isinstance(p, Partial):
                partial.append((axis, p.reduce_op))
            elif isinstance(p, Invariant):
                invariant.append(axis)
            elif not isinstance(p, Replicate):
                raise LayoutError(
                    f"{p!r} on axis {axis} is not a placement",
                    operands=(f"placements  {list(given)} on mesh {mesh}",),
                    fixes=(_fix_of_placements([_in_range(q, len(shape)) for q in placements]),),
                )
        return Layout(
            tuple(shape), tuple(map(tuple, shards)), tuple(partial), tuple(invariant), dtype
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes that are not Replicate."""
        split = [axis for dim in self.shards for axis in dim]
        return (*split, *(axis for axis, _ in self.partial), *self.invariant)

    def placement(self, axis: str) -> Placement:
        """Returns the placement of this layout on `axis`."""
        for dim, axes in enumerate(self.shards):
            if axis in axes:
                return Shard(dim)
        for name, op in self.partial:
            if name == axis:
                return Partial(op)
        return Invariant() if axis in self.invariant else Replicate()

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """Returns one placement for each axis of `mesh`, in its order."""
        return tuple(self.placement(a) for a in mesh.names)

    def put(self, axis: str, placement: Placement) -> Layout:
        """Returns a copy of this layout with `placement` on `axis`.

        If other axes shard the same dimension already, `axis` splits the pieces of these axes
        further.
        """
        placement = own_placement(placement)
        shards = tuple(tuple(a for a in dim if a != axis) for dim in self.shards)
        partial = tuple(p for p in self.partial if p[0] != axis)
        invariant = tuple(a for a in self.invariant if a != axis)
        if isinstance(placement, Shard):
            d = placement.dim
            shards = shards[:d] + (shards[d] + (axis,),) + shards[d + 1 :]
        elif isinstance(placement, Partial):
            partial += ((axis, placement.reduce_op),)
        elif isinstance(placement, Invariant):
            invariant += (axis,)
        return replace(self, shards=shards, partial=partial, invariant=invariant)

    def gradient(self, mesh: Mesh) -> Layout:
        """Returns the layout of the gradient of a value that has this layout on `mesh`."""
        out = self
        for axis in mesh.names:
            before = self.placement(axis)
            after = before.dual()
            if after != before:
                out = out.put(axis, after)
        return out

    def check_axes(self, mesh: Mesh) -> None:
        """Raise LayoutError if the layout names an axis that the mesh lacks."""
        for axis in self.axes:
            if axis not in mesh.names:
                raise LayoutError(
                    f"no axis {axis!r} on mesh {mesh}",
                    operands=(f"layout  {self}",),
                    fixes=tuple(Fix(f"@{name}") for name in mesh.names),
                )

    # -- what one rank holds -------------------------------------------------------------------

    def local_shape(self, mesh: Mesh, at: Coordinate) -> tuple[int, ...]:
        """Returns the local shape on one rank, in elements.

        Args:
            at: the rank's coordinate, one index for each axis of the mesh.
        """
        return tuple(length for _, length in self.local_region(mesh, at))

    def is_empty_at(self, mesh: Mesh, at: Coordinate) -> bool:
        """True if the rank of `mesh` at coordinate `at` holds no element of a nonempty tensor.

        This happens if a dimension has fewer elements than there are ranks to shard it.
        """
        return 0 not in self.shape and 0 in self.local_shape(mesh, at)

    def local_region(self, mesh: Mesh, at: Coordinate) -> tuple[tuple[int, int], ...]:
        """Returns the slice of the global tensor that the rank of `mesh` at coordinate `at` holds.

        Returns:
            `(offset, length)` in elements, for each dimension.
        """
        region = []
        for size, axes in zip(self.shape, self.shards, strict=True):
            start, length = 0, size
            for axis in axes:
                step, length = chunk(length, mesh.size(axis), at[mesh.index(axis)])
                start += step
            region.append((start, length))
        return tuple(region)

    # -- text ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        """`f32[8@dp, 16, 64@(dp tp)] {sum tp}`; what prints also parses."""
        return f"{self.dtype}[{', '.join(self._dims())}]{self._rest()}"

    def brief(self) -> str:
        """Returns the layout without its dtype, as errors show it: `8@dp 16 64 {sum tp}`."""
        return (" ".join(self._dims()) or "scalar") + self._rest()

    def _dims(self) -> list[str]:
        return [f"{n}{_format_axes(a)}" for n, a in zip(self.shape, self.shards, strict=True)]

    def _rest(self) -> str:
        notes = [f"{op} {axis}" for axis, op in self.partial] + [f"inv {a}" for a in self.invariant]
        return f" {{{', '.join(notes)}}}" if notes else ""

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> Layout:
        """Returns the layout that a text describes. `text` has the form that `str(layout)` returns.

        Raises:
            LayoutError: the text is not a layout. The error shows the part that is wrong.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise LayoutError(
                f"cannot read the layout {text!r}",
                reason='a layout looks like "f32[8@dp, 16, 64@tp] {sum tp}"',
            )
        dtype, dims, rest = match["dtype"], match["dims"].strip(), match["rest"] or ""
        shape, shards = [], []
        for part in dims.split(",") if dims else []:
            dim = _DIM.fullmatch(part.strip())
            if dim is None:
                raise LayoutError(f"cannot read {part.strip()!r} in the layout {text!r}")
            shape.append(int(dim["size"]))
            shards.append(tuple((dim["one"] or dim["many"] or "").split()))
        partial, invariant = [], []
        for part in filter(None, (p.strip() for p in rest.split(","))):
            what, _, axis = part.partition(" ")
            if what == "inv":
                invariant.append(axis)
            elif what in ("sum", "max", "min"):
                partial.append((axis, what))
            else:
                raise LayoutError(f"cannot read {part!r} in the layout {text!r}")
        return Layout(tuple(shape), tuple(shards), tuple(partial), tuple(invariant), dtype)


def _fix_of_placements(placements: Sequence[Placement]) -> Fix:
    return Fix(f"placements={list(placements)}")


def _in_range(given: object, ndim: int) -> Placement:
    """Returns `given` with its dimension clamped to what a tensor of `ndim` dimensions allows."""
    if isinstance(given, Shard):
        dim = given.dim + ndim if given.dim < 0 else given.dim
        return Shard(max(0, min(dim, ndim - 1))) if ndim else Replicate()
    return given if isinstance(given, Placement) else Replicate()


_TEXT = re.compile(r"(?P<dtype>\w*)\[(?P<dims>[^\]]*)\](?:\s*\{(?P<rest>[^}]*)\})?")
_AXIS = r"[^\s,@()\[\]{}]+"  # a mesh names its axes as it likes: data-parallel, fsdp.0
_DIM = re.compile(rf"(?P<size>\d+)(?:@(?:(?P<one>{_AXIS})|\((?P<many>{_AXIS}(?: +{_AXIS})*)\)))?")


def _format_axes(axes: tuple[str, ...]) -> str:
    return "" if not axes else f"@{axes[0]}" if len(axes) == 1 else f"@({' '.join(axes)})"
