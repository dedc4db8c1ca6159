"""What does a DTensor carry beside its shard?"""

from __future__ import annotations

import weakref
from functools import cached_property

import torch

from partita.comm import Wire
from partita.layout import Layout, Placement

__all__ = ["Spec", "spec_of"]


class Spec:
    """A layout and the wire of the rank that holds it: all that makes a local tensor global.

    Specs are interned (`spec_of` is their only maker), so that two of them are equal exactly if
    they are the same object, and a plan is looked up by identity.

    Attributes:
        layout: the global layout.
        wire: this rank's end of the mesh.
        shape: the global shape.
        local_shape: this rank's shape.
    """

    __slots__ = ("__dict__", "__weakref__", "layout", "local_shape", "shape", "wire")

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
    def is_pending(self) -> bool:
        return bool(self.layout.partial)

    @cached_property
    def is_sharded(self) -> bool:
        return any(self.layout.shards)

    @cached_property
    def region(self) -> tuple[tuple[int, int], ...]:
        """`(offset, length)` of this rank's piece in the global tensor, per dimension."""
        return self.layout.local_region(self.wire.mesh, self.wire.at)

    def __repr__(self) -> str:
        return f"Spec({self.layout} on {self.wire.mesh} at {self.wire.at})"


_INTERNED: weakref.WeakValueDictionary[tuple[Layout, Wire], Spec] = weakref.WeakValueDictionary()


def spec_of(layout: Layout, wire: Wire) -> Spec:
    """The one Spec of `layout` on `wire`."""
    found = _INTERNED.get((layout, wire))
    if found is None:
        found = _INTERNED.setdefault((layout, wire), Spec(layout, wire))
    return found
