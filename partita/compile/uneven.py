"""How does a rank whose pieces are smaller than the first rank's run the same graph?

The graph is made for the first rank's pieces, the largest. Where a tensor enters, a smaller piece
is padded with copies of its last element (so what is computed of the padding is as finite as what
is computed of the value), a gradient with zeros; a rank whose piece is empty takes the copies from
the rank before it. The padding is behind the piece in its own memory, where that can be: what
enters is then not copied, and what is written is written in its place. Where a tensor leaves, the
padding is cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from partita.comm import Ask, TraceWire, Wire, is_uneven
from partita.comm.cuts import has_empty, places_of, span
from partita.redistribute.cost import bytes_of
from partita.tensor.spec import Spec, spec_of

from .room import with_room

__all__ = ["Border", "border_of", "padded_shape"]

Shape = tuple[int, ...]


def padded_shape(spec: Spec) -> Shape:
    """The shape of the first rank's piece."""
    return spec.layout.local_shape(spec.wire.mesh, (0,) * spec.wire.mesh.ndim)


@dataclass(frozen=True)
class _Lender:
    """For a dimension in which ranks are empty: who has the element before each of them.

    Attributes:
        axes: those that split the dimension.
        members: how many ranks they are.
        place: which of them, in the group's order, lends to this rank; None where it has its own.
    """

    axes: tuple[str, ...]
    members: int
    place: int | None


@dataclass(frozen=True)
class Border:
    """What happens to one tensor of uneven pieces on its way into a graph and out of it.

    Attributes:
        true, padded: this rank's shape, and that of the first rank.
        in_place: may the padding lie behind the piece, in its own memory?
        zeros: is it padded with zeros?
        read: does anybody read the padding?
        lenders: by dimension.
    """

    wire: Wire
    true: Shape
    padded: Shape
    in_place: bool
    zeros: bool
    read: bool
    lenders: dict[int, _Lender]

    def enter(self, local: torch.Tensor) -> torch.Tensor:
        """`local`, contiguous and padded: in its own memory, or a copy where that has no room."""
        local = local.data  # what happens to the padding is no change of the tensor
        whole = local.contiguous() if self.true == self.padded else None
        if whole is None and self.in_place:
            whole = with_room(local, self.padded)
        if whole is None:
            whole = local.new_zeros(self.padded)
            self.cut(whole).copy_(local)
        if self.read:
            self._fill(whole)
        return whole

    def _fill(self, whole: torch.Tensor) -> None:
        for dim, (have, want) in enumerate(zip(self.true, self.padded, strict=True)):
            if have == want and dim not in self.lenders:
                continue
            here = whole  # padded in the dimensions before this one, not yet in those behind it
            for later in range(dim + 1, whole.dim()):
                here = here.narrow(later, 0, self.true[later])
            padding = here.narrow(dim, have, want - have)
            if self.zeros:
                padding.zero_()
            elif 0 < have < want:
                padding.copy_(here.narrow(dim, have - 1, 1))
            if dim in self.lenders:
                self._borrow(here, dim, self.lenders[dim])

    def _borrow(self, here: torch.Tensor, dim: int, lender: _Lender) -> None:
        last = here.narrow(dim, here.shape[dim] - 1, 1).contiguous()
        all_last = last.new_empty((lender.members, *last.shape))
        ask = Ask("all_gather of padding", None, "pad")
        self.wire.gather(all_last.view(-1), last.view(-1), lender.axes, ask)
        if lender.place is not None:
            here.copy_(all_last[lender.place])

    def moves(self, itemsize: int) -> list[tuple[tuple[str, ...], int]]:
        """What is carried for ranks without an element: the axes, and the bytes a rank sends."""
        found = []
        for dim, lender in self.lenders.items():
            last = math.prod(n for d, n in enumerate(self.padded) if d != dim)
            found.append((lender.axes, bytes_of("all_gather", lender.members, last * itemsize)))
        return found

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """What of `value` is this rank's own, in memory of its own."""
        if self.true == self.padded:
            return value
        return self.cut(value).clone(memory_format=torch.contiguous_format)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """A view of what of `value` is this rank's own."""
        for dim, n in enumerate(self.true):
            value = value.narrow(dim, 0, n)
        return value


def border_of(
    spec: Spec | None, *, grows: bool = True, zeros: bool = False, read: bool = True
) -> Border | None:
    """What a tensor of `spec` passes; None where all ranks hold equally much.

    Args:
        grows: may its memory become larger?
        zeros: it is a gradient.
        read: does anybody read its padding, which is then like the value?
    """
    if spec is None or not is_uneven(spec.layout, spec.wire.mesh):
        return None
    if isinstance(spec.wire, TraceWire):
        spec = spec_of(spec.layout, spec.wire.real)
    lenders = {} if zeros or not read else _lenders(spec)
    padded = padded_shape(spec)
    in_place = grows and _in_front(spec, padded)
    return Border(spec.wire, tuple(spec.local_shape), padded, in_place, zeros, read, lenders)


def _in_front(spec: Spec, padded: Shape) -> bool:
    """Are all elements of a piece before all of its padding, on every rank?"""
    mesh, layout = spec.wire.mesh, spec.layout
    uneven = [
        dim
        for dim, axes in enumerate(layout.shards)
        if layout.shape[dim] % math.prod([mesh.size(a) for a in axes])
    ]
    return len(uneven) == 1 and math.prod(padded[: uneven[0]]) == 1


def _lenders(spec: Spec) -> dict[int, _Lender]:
    mesh, at = spec.wire.mesh, spec.wire.at
    found = {}
    for dim, (size, axes) in enumerate(zip(spec.layout.shape, spec.layout.shards, strict=True)):
        parts = [mesh.size(a) for a in axes]
        if not size or not has_empty(size, parts):
            continue
        key, order = spec.wire.group_order(axes)
        start, length = span(size, parts, [at[mesh.index(a)] for a in axes])
        place = None
        if not length:  # the first piece is not empty, so that something is before this one
            where = dict(zip(axes, places_of(start - 1, size, parts)[0], strict=True))
            place = 0
            for axis in key:
                place = place * mesh.size(axis) + where[axis]
            place = place if order is None else order.index(place)
        found[dim] = _Lender(key, spec.wire.mesh_size(key), place)
    return found
