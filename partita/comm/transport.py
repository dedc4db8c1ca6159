"""Transports: a rank's place in a mesh, and the collectives with the ranks that differ from it
along some axes.

A subclass performs them on contiguous memory (process groups in `groups`, ranks of one process in
`ranks`, none at all in `dry`); this class makes them take any dtype. A transport does not know what
a collective is for: moves are built on it in `move_steps`, and run by `Wire.carry`.
"""

from __future__ import annotations

import torch

from partita.layout import Coordinate, LayoutError, Mesh

from .backends.backend import Backend
from .collective import PendingList, PendingWork, Request

Axes = tuple[str, ...]
ALL_DTYPES = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype))

# Summed or compared in a type that holds all their values, where a backend lacks the type itself.
_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


class Transport:
    """A rank's place in a mesh, and its collectives.

    Attributes:
        mesh: the axes and their sizes.
        at: this rank's coordinate.
    """

    moved_dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes that the backend moves as they are; others travel as bytes."""
    reduced_dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes that the backend reduces as they are; others are widened."""
    backend = Backend()
    """How its collectives are done, which passes over graphs ask."""

    def __init__(self, mesh: Mesh, at: Coordinate):
        self.mesh, self.at = mesh, at
        self._groups: dict[Axes, tuple[Axes, tuple[Coordinate, ...]]] = {}
        self._orders: dict[Axes, tuple[Axes, list[int] | None]] = {}

    # -- where this rank stands ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number along the mesh, row-major."""
        return self.index(self.mesh.names)

    def index(self, axes: Axes | str) -> int:
        """This rank's position among the ranks that differ from it along `axes`, first slowest."""
        n = 0
        for axis in (axes,) if isinstance(axes, str) else axes:
            n = n * self.mesh.size(axis) + self.at[self.mesh.index(axis)]
        return n

    def mesh_size(self, axes: Axes) -> int:
        """The number of ranks along `axes` together."""
        n = 1
        for axis in axes:
            n *= self.mesh.size(axis)
        return n

    def group(self, axes: Axes) -> tuple[Axes, tuple[Coordinate, ...]]:
        """`axes` in mesh order (one group serves all orders), and its members in group order."""
        found = self._groups.get(axes)
        if found is None:
            key = tuple(a for a in self.mesh.names if a in axes)
            found = self._groups[axes] = (key, self._members(key))
        return found

    def group_order(self, axes: Axes) -> tuple[Axes, list[int] | None]:
        """`axes` in mesh order, and for each member of their process group its number along them;
        None where the members ascend."""
        found = self._orders.get(axes)
        if found is None:
            key = tuple(a for a in self.mesh.names if a in axes)
            found = self._orders[axes] = (key, self._order(key))
        return found

    # -- collectives -----------------------------------------------------------------------------

    def run_collective(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> None:
        """Fill `out` with what `request` makes of the group's `x`; both are contiguous.

        Any dtype, by way of those that the backend has. Members of the group are in its order:
        `all_gather` joins their `x`, `reduce_scatter` gives each its piece of the reduction, and
        `all_to_all` its segment of each `x`. Of `all_reduce` and `broadcast` `out` is `x`.
        """
        x = without_lazy_bits(x)
        if request.kind in ("all_reduce", "reduce_scatter"):
            if x.dtype in self.reduced_dtypes:
                self._perform(out, x, axes, request)
                return
            wide = self._widen_for_reduction(x, request.reduce_op).reshape(-1)
            total = wide
            if request.kind == "reduce_scatter":
                total = wide.new_empty(wide.numel() // self.mesh_size(axes))
            self._perform(total, wide, axes, request)
            out.view(-1).copy_(_narrow_to_dtype(total, out.view(-1)))
        elif x.dtype in self.moved_dtypes:
            if request.kind == "all_to_all":
                out, x = out.view(-1), x.view(-1)
            self._perform(out, x, axes, request)
        else:
            n = x.element_size()
            if request.get is not None and request.send is not None:
                request = request._replace(get=request.get.times(n), send=request.send.times(n))
            self._perform(_view_as_bytes(out), _view_as_bytes(x), axes, request)

    def _widen_for_reduction(self, x: torch.Tensor, reduce_op: str) -> torch.Tensor:
        if x.is_complex():
            if reduce_op != "sum":
                raise LayoutError(f"complex numbers have no {reduce_op}")
            return torch.view_as_real(x)
        if x.dtype not in _WIDER:
            raise LayoutError(f"cannot reduce {x.dtype} over ranks")
        return x.to(_WIDER[x.dtype])

    # -- what a subclass implements; `axes` in mesh order, groups of more than one rank ------------

    def _members(self, axes: Axes) -> tuple[Coordinate, ...]:
        return self.mesh.group(axes, self.at)

    def _order(self, axes: Axes) -> list[int] | None:
        return None

    def _perform(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        """`run_collective`, of a dtype that the backend has."""
        raise NotImplementedError

    def begin_collective(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> PendingWork:
        """Begin what `run_collective` does, of a dtype that the backend has; `x` may lie in `out`.

        A reduce_scatter may add up in the dtype of `out`, where that is wider.
        """
        self._perform(out, x, axes, request)
        return PendingList()


def without_lazy_bits(x: torch.Tensor) -> torch.Tensor:
    """`x` with a pending conjugation or negation applied: a collective reads memory."""
    if x.is_complex():
        return x.resolve_conj()
    return x.resolve_neg() if x.is_neg() else x


def _view_as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _narrow_to_dtype(wide: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_complex():
        return torch.view_as_complex(wide.view(*like.shape, 2))
    return wide.to(like.dtype)
