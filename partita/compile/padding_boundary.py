"""The padding boundary: how a rank with a smaller piece runs the graph made for the largest.

A graph is made for the pieces of the first rank, the largest. Where a tensor enters, a smaller
piece is padded with copies of its last element, so that what is computed of the padding is as
finite as what is computed of the value; a gradient with zeros. A rank whose piece is empty takes
the copies from the rank before it. If the piece has room behind it (`tensor/uneven_pieces.py`), it
is padded in place, and written there. Where a tensor leaves, the padding is cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from partita.comm import Request, TraceWire, Wire, is_uneven
from partita.comm.cuts import has_empty, places_of, span
from partita.comm.device import Device
from partita.redistribute.cost import bytes_of
from partita.tensor.autograd import holders
from partita.tensor.spec import Spec, spec_of
from partita.tensor.uneven_pieces import find_padded, show_front

__all__ = ["Border", "border_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Lender:
    """For a dimension in which some ranks are empty: the rank with the element before each.

    Attributes:
        axes: the mesh axes that split the dimension.
        members: the number of ranks along them.
        place: in the group's order, the rank that lends to this one; None if it is not empty.
    """

    axes: tuple[str, ...]
    members: int
    place: int | None


@dataclass(frozen=True)
class Border:
    """How one tensor of uneven pieces is padded into a graph, and cut when it leaves.

    Attributes:
        true, padded: the local shape of this rank, and of the first rank.
        behind: does the padding lie behind the piece in memory, so that there may be room for it?
        stays: is the tensor there between calls, so that it is given room?
        zeros: is it padded with zeros?
        read: does the graph read the padding?
        lenders: by dimension in which some ranks are empty.
    """

    wire: Wire
    true: Shape
    padded: Shape
    behind: bool
    stays: bool
    zeros: bool
    read: bool
    lenders: dict[int, _Lender]

    @property
    def in_place(self) -> bool:
        """Is the tensor padded where it is, and not in a copy?"""
        return self.behind and self.stays

    def enter(self, local: torch.Tensor) -> torch.Tensor:
        """`local`, contiguous and padded: in its own memory, or a copy where that has no room."""
        local = local.data  # so that padding it is no write of the tensor
        whole = local.contiguous() if self.true == self.padded else None
        if whole is None and self.in_place:
            whole = find_padded(local, self.padded)
        if whole is None:
            whole = local.new_zeros(self.padded)
            self.cut(whole).copy_(local)
        if self.read:
            self._fill_padding(whole)
        return whole

    def _fill_padding(self, whole: torch.Tensor) -> None:
        for dim, (have, want) in enumerate(zip(self.true, self.padded, strict=True)):
            if have == want and dim not in self.lenders:
                continue
            here = whole  # padded in earlier dimensions, not yet in later ones
            for later in range(dim + 1, whole.dim()):
                here = here.narrow(later, 0, self.true[later])
            padding = here.narrow(dim, have, want - have)
            if self.zeros:
                padding.zero_()
            elif 0 < have < want:
                padding.copy_(here.narrow(dim, have - 1, 1))
            if dim in self.lenders:
                self._borrow_padding(here, dim, self.lenders[dim])

    def _borrow_padding(self, here: torch.Tensor, dim: int, lender: _Lender) -> None:
        last = here.narrow(dim, here.shape[dim] - 1, 1).contiguous()
        all_last = last.new_empty((lender.members, *last.shape))
        ask = Request("all_gather of padding", None, "pad")
        self.wire.gather(all_last.view(-1), last.view(-1), lender.axes, ask)
        if lender.place is not None:
            here.copy_(all_last[lender.place])

    def moves(self, itemsize: int) -> list[tuple[tuple[str, ...], int]]:
        """For each collective that serves empty ranks: its axes, and the bytes a rank sends."""
        found = []
        for dim, lender in self.lenders.items():
            last = math.prod(n for d, n in enumerate(self.padded) if d != dim)
            found.append((lender.axes, bytes_of("all_gather", lender.members, last * itemsize)))
        return found

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of `value`, an output of the graph, in memory of its own."""
        if self.true == self.padded:
            return value
        if self.behind and _fills_its_own(value):
            return show_front(value, self.true)
        return self.cut(value).clone(memory_format=torch.contiguous_format)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """A view of this rank's piece of `value`."""
        for dim, n in enumerate(self.true):
            value = value.narrow(dim, 0, n)
        return value


def border_of(
    spec: Spec | None, *, stays: bool = True, zeros: bool = False, read: bool = True
) -> Border | None:
    """The border of a tensor of `spec`; None where its pieces are even.

    Args:
        stays: is it there between calls?
        zeros: is it padded with zeros, as a gradient?
        read: does the graph read its padding, which then must be like the value?
    """
    if spec is None or not is_uneven(spec.layout, spec.wire.mesh):
        return None
    if isinstance(spec.wire, TraceWire):
        spec = spec_of(spec.layout, spec.wire.real)
    lenders = {} if zeros or not read else _find_lenders(spec)
    shapes = tuple(spec.local_shape), spec.padded_shape
    return Border(spec.wire, *shapes, spec.is_padded_behind, stays, zeros, read, lenders)


def _fills_its_own(value: torch.Tensor) -> bool:
    """Does it fill a storage that nothing else refers to?"""
    # On a device others may have it in hand on another stream, of which `record_stream` tells the
    # allocator, and not through memory that is shown.
    at_once = Device(value.device.type).runs_at_once
    if not at_once or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    storage = value.untyped_storage()
    return holders(storage) == 2 and storage.nbytes() == value.nbytes


def _find_lenders(spec: Spec) -> dict[int, _Lender]:
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
