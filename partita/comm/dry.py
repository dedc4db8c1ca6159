"""Dry meshes: one rank of a mesh without the others, which counts what it would send and how long
that would take.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch.utils._python_dispatch import _disable_current_modes

from partita.layout import Coordinate, Fix, LayoutError, Mesh
from partita.redistribute.move import BANDWIDTH, LATENCY, bytes_of

from .backends import backend_named
from .collective import ALL_DTYPES, Axes, PendingList, PendingWork, Request, shares_memory
from .device import HOST
from .ledger import Scope, scope
from .move_steps import unravel
from .source import user_line
from .wire import MeshHandle, Wire

_MOST_RANKS = 1 << 24


class DryWire(Wire):
    """A wire without peers: shapes and dtypes are right, values are not.

    In place of what the others would send stands this rank's own data, or zeros, so that results
    are the same in every run.

    Attributes:
        nbytes: bytes that this rank would have sent, by ring algorithms, padding included.
        seconds: the virtual time of that: `latency` for each collective, and the bytes at
            `bandwidth` (bytes per second).
    """

    moved_dtypes = reduced_dtypes = ALL_DTYPES
    gathers_in_place = True
    has_peers = False
    runs_in_streams = True
    kind = "that is dry"

    def __init__(
        self,
        mesh: Mesh,
        at: Coordinate,
        scope_of_rank: Scope,
        device_mesh: object,
        device: torch.device,
        latency: float = LATENCY,
        bandwidth: float = BANDWIDTH,
        backend: str = "",
    ):
        super().__init__(mesh, at, scope_of_rank)
        self.backend = backend_named(backend, device.type, _begin_alone)
        self.device_mesh, self.device = device_mesh, device
        self.latency, self.bandwidth = latency, bandwidth
        self.nbytes, self.seconds = 0, 0.0

    @classmethod
    def standing_for(cls, wire: Wire) -> Self:
        """A dry wire at the place of `wire` on its mesh, with no ledger."""
        return cls(wire.mesh, wire.at, Scope(), wire.device_mesh, wire.device)

    def _perform(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        self.begin_collective(out, x, axes, request).wait()
        if request.kind == "all_gather":
            _allocate(self.backend.staging_of_gather(out), x)
        elif request.kind == "reduce_scatter" and request.reduce_op != "sum":
            _allocate(self.backend.staging_of_scatter(x), x)

    def begin_collective(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> PendingWork:
        kind, n, own = request.kind, self.mesh_size(axes), self.index(axes)
        nbytes = x.nbytes if kind == "broadcast" else bytes_of(kind, n, x.nbytes)
        if request.send is not None:
            nbytes = (request.send.total - request.send.place(own)[1]) * x.element_size()
        self.nbytes += nbytes
        self.seconds += self.latency + nbytes / self.bandwidth
        if kind != "all_gather":
            return self.backend.begin(_DryGroup(n, own), out, x, request)  # type: ignore[arg-type]
        mine, rows = x.reshape(1, -1), out.view(n, -1)
        for to in (rows[:own], rows[own + shares_memory(x, out) :]):
            to.copy_(mine.expand(to.shape[0], -1))
        return PendingList()


class _DryGroup(NamedTuple):
    """Stands for the process group in what a backend does by several steps, or with memory of its
    own."""

    members: int
    number: int

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.number


def _begin_alone(
    group: _DryGroup, out: torch.Tensor, x: torch.Tensor, request: Request
) -> PendingWork:
    """Put this rank's share where it belongs; what others would send is zeros."""
    n, own, kind = group.members, group.number, request.kind
    if kind == "reduce_scatter":
        out.view(-1).copy_(x.reshape(n, -1)[own])
    elif kind == "all_gather":
        out.zero_().view(n, -1)[own].copy_(x)
    elif request.get is not None and request.send is not None:
        sent, kept = request.send.place(own), request.get.place(own)
        out.zero_().narrow(0, *kept).copy_(x.narrow(0, *sent))
    return PendingList()


def _allocate(nbytes: int, like: torch.Tensor) -> None:
    """Allocate and free so many bytes where `like` is."""
    if nbytes:
        torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def dry_mesh(
    rank: int = 0,
    *,
    device_type: str = HOST.type,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    backend: str = "",
    **axes: int,
) -> MeshHandle:
    """A mesh on which this process is one rank and nobody else is there, to plan with.

    What runs on a mesh runs on it, with the layouts, shapes and moves of that rank, and with values
    that mean nothing: what would come from other ranks is this rank's own again, or zeros. Ledgers
    count the bytes that it would have sent. No process group is begun, and on the meta device
    nothing is allocated, so that there may be any number of ranks.

        mesh = pt.dry_mesh(dp=1024, tp=8)
        with torch.device("meta"):
            model = MyModel()
        pt.zero(model, mesh["dp"], stage=3)

    Args:
        rank: which rank to be, from 0, row-major over the axes.
        device_type: where tensors are that `pt.zeros` and its like make on the mesh: "cpu", "meta".
        latency: seconds to start a collective.
        bandwidth: bytes per second that a rank can send.
        backend: of the process groups that it stands for, as torch names it: what their collectives
            hold beside their operands, as those of CPUs do, is allocated.
        axes: the size of each mesh axis, outermost first.

    Returns:
        What stands for a `DeviceMesh`: it answers `size`, `shape`, `mesh_dim_names`, `mesh["dp"]`,
        `get_coordinate`, `get_rank` and `get_local_rank`, and has no process groups.

    Raises:
        LayoutError: there is no axis, an axis without ranks, no such rank, more than 16,777,216, or
            no such backend.
    """
    if not axes:
        raise LayoutError(
            "dry_mesh needs at least one axis",
            place=user_line(),
            reason="an axis is named, and has a number of ranks",
            fixes=(Fix("pt.dry_mesh(dp=8)", "for 8 ranks"),),
        )
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    if not 0 <= rank < mesh.size():
        raise LayoutError(
            f"rank {rank} is not one of the {mesh.size()} of mesh {mesh}",
            place=user_line(),
            fixes=(Fix(f"0 <= rank < {mesh.size()}"),),
        )
    if mesh.size() > _MOST_RANKS:
        raise LayoutError(
            f"a dry mesh of {mesh.size():,} ranks is too large",
            place=user_line(),
            reason="the number of each is kept",
            fixes=(Fix(f"at most {_MOST_RANKS:,} ranks"),),
        )
    try:
        backend_named(backend, device_type)
    except ValueError as error:
        raise LayoutError(str(error), place=user_line()) from None
    with _disable_current_modes():
        numbers = torch.arange(mesh.size(), device=HOST).view(mesh.sizes)
    at = tuple(unravel(rank, mesh.sizes))

    def make_wire(handle: MeshHandle, _: tuple[int, ...]) -> DryWire:
        handle.device_type = device_type
        device = torch.device(device_type)
        where = handle._layout, handle._at, scope(), handle, device
        return DryWire(*where, latency, bandwidth, backend)

    return MeshHandle(mesh, at, numbers, make_wire)
