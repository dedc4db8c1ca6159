"""Specs: what a DTensor has beside its piece, a layout and the wire of the rank that holds it.

Specs are interned: `spec_of` makes one for each layout and wire, so that two of them are equal
exactly if they are the same object, and a plan is looked up by the identity of its operands' specs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from partita.comm import Wire, user_line, wire_of
from partita.layout import Fix, Layout, LayoutError, Placement, Replicate


class Spec:
    """A layout and the wire of the rank that holds a piece: all that makes a local tensor global.

    Made by `spec_of` alone (and, for view copies, by `as_copy`).

    Attributes:
        layout: the global layout.
        wire: this rank's access to the other ranks of the mesh.
        shape: the global shape, in elements.
        local_shape: the shape of this rank's piece.
    """

    __slots__ = ("__dict__", "__weakref__", "layout", "local_shape", "shape", "wire")

    is_copy = False
    """Is a tensor of this spec a view copy: a copy of what would be a view on one device? See
    `aliasing`."""

    def __init__(self, layout: Layout, wire: Wire):
        self.layout, self.wire = layout, wire
        self.shape = torch.Size(layout.shape)
        self.local_shape = torch.Size(layout.local_shape(wire.mesh, wire.at))

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self.layout.placements(self.wire.mesh)

    @cached_property
    def gradient(self) -> Spec:
        """The spec of the gradient of a value of this spec. Raises ValueError for a pending max."""
        return spec_of(self.layout.gradient(self.wire.mesh), self.wire)

    @cached_property
    def whole(self) -> Spec:
        """The spec of the same value, whole on every rank (Invariant on every axis)."""
        return spec_of(Layout(self.layout.shape, invariant=self.wire.mesh.names), self.wire)

    @cached_property
    def reduced(self) -> Spec:
        """The spec of the same value once it is reduced: Replicate where this one is Partial."""
        layout = self.layout
        return spec_of(Layout(layout.shape, layout.shards, (), layout.invariant), self.wire)

    def invariant_of(self, shape: Sequence[int]) -> Spec:
        """The spec of a whole value of `shape`: Invariant where this one is not Replicate."""
        axes = tuple(a for a, p in self.by_axis() if not p.is_replicate())
        return spec_of(Layout(tuple(shape), invariant=axes), self.wire)

    @cached_property
    def is_pending(self) -> bool:
        """Is it Partial on any axis?"""
        return bool(self.layout.partial)

    @cached_property
    def is_sharded(self) -> bool:
        """Does any axis split a dimension?"""
        return any(self.layout.shards)

    @cached_property
    def is_whole(self) -> bool:
        """Does every rank hold the whole value? Answered alike on all of them."""
        mesh = self.wire.mesh
        parted = (a for a in mesh.names if mesh.size(a) > 1)
        return not any(p.is_shard() or p.is_partial() for p in map(self.layout.placement, parted))

    @cached_property
    def used_differently(self) -> tuple[str, ...]:
        """The axes of several ranks on which the value is Replicate."""
        return tuple(
            a for a, p in self.by_axis() if p.is_replicate() and self.wire.mesh.size(a) > 1
        )

    def by_axis(self) -> list[tuple[str, Placement]]:
        """Each axis of the mesh with its placement."""
        return list(zip(self.wire.mesh.names, self.placements, strict=True))

    @cached_property
    def largest(self) -> int:
        """The elements of the first rank's piece, which no rank's exceeds."""
        return math.prod(self.padded_shape)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of the first rank's piece, to which smaller ones are padded."""
        mesh = self.wire.mesh
        return self.layout.local_shape(mesh, (0,) * mesh.ndim)

    @cached_property
    def is_padded_behind(self) -> bool:
        """Where pieces are uneven: are all elements of one before all of its padding, on every
        rank?"""
        mesh, layout = self.wire.mesh, self.layout
        uneven = [
            dim
            for dim, axes in enumerate(layout.shards)
            if layout.shape[dim] % math.prod([mesh.size(a) for a in axes])
        ]
        return len(uneven) == 1 and math.prod(self.padded_shape[: uneven[0]]) == 1

    @cached_property
    def as_copy(self) -> Spec:
        """The spec of view copies in the same layout: another object, whose `is_copy` is True."""
        if self.is_copy:
            return self
        copy = Spec(self.layout, self.wire)
        copy.__dict__["is_copy"] = True
        return copy

    @cached_property
    def region(self) -> tuple[tuple[int, int], ...]:
        """`(offset, length)` of this rank's piece in the global tensor, per dimension."""
        return self.wire.region(self.layout)

    def __repr__(self) -> str:
        return f"Spec({self.layout} on {self.wire.mesh} at {self.wire.at})"


_INTERNED: weakref.WeakValueDictionary[tuple[Layout, Wire], Spec] = weakref.WeakValueDictionary()


ON_NEW_SPEC: list[Callable[[Spec], None]] = []
"""What is called with each spec that is made."""


def spec_of(layout: Layout, wire: Wire) -> Spec:
    """The one Spec of `layout` on `wire`."""
    spec = _INTERNED.get((layout, wire))
    if spec is None:
        spec = _INTERNED.setdefault((layout, wire), Spec(layout, wire))
        for on_new_spec in list(ON_NEW_SPEC):
            on_new_spec(spec)
    return spec


def spec_on_mesh(mesh: Any, shape: Sequence[int], placements: Sequence[Placement] | None) -> Spec:
    """The Spec of a global `shape` on a user's mesh; all Replicate where no placements are given.

    Raises:
        LayoutError: placements that do not fit the mesh or the shape, naming the user's line.
    """
    try:
        wire = wire_of(mesh)
    except LayoutError as error:
        raise error.located(user_line()) from None
    if placements is None:
        placements = [Replicate()] * wire.mesh.ndim
    return spec_on_wire(wire, shape, placements)


def spec_on_wire(wire: Wire, shape: Sequence[int], placements: Sequence[Placement]) -> Spec:
    """The Spec of a global `shape` in `placements` that a user gave. Raises as `spec_on_mesh`."""
    try:
        return spec_of(Layout.of(wire.mesh, shape, placements), wire)
    except LayoutError as error:
        raise error.located(user_line()) from None


def spec_for_write_into(spec: Spec) -> Spec:
    """The spec in which a value is written into memory of `spec`. That is `spec`, but for a pending
    maximum or minimum: of one value it is that value, which each rank takes whole."""
    return spec if all(op == "sum" for _, op in spec.layout.partial) else spec.reduced


def make_two_meshes_error(op: str, one: Wire, other: Wire) -> LayoutError:
    """The error to raise where `op` is called with tensors of two meshes."""
    shown = [f"mesh {one.mesh}", f"mesh {other.mesh}"]
    if len(set(shown)) == 1:  # they differ in what they are made for
        shown = [f"mesh {one.mesh} {one.kind}", f"mesh {other.mesh} {other.kind}"]
        if one.kind == other.kind:
            shown[1] += ", made by another call"
    return LayoutError(
        f"{op}: two meshes in one operation",
        place=user_line(),
        operands=tuple(shown),
        reason="moves are planned along the axes of one mesh",
        fixes=(
            Fix("pt.distribute_tensor(x.full_tensor(), mesh, placements)"),
            Fix("build both tensors on one mesh with all the axes"),
        ),
    )
