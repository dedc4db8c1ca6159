"""What would be sent, and how long would it take, if there were peers?"""

from __future__ import annotations

import torch

from ..layout import LayoutError, Mesh
from ..redistribute.cost import BANDWIDTH, LATENCY
from .ask import Ask
from .handle import MeshHandle
from .ledger import scope
from .splits import Splits
from .wire import Axes, Wire

__all__ = ["DryWire", "dry_mesh"]


class DryWire(Wire):
    """A wire without peers: right shapes and dtypes, and no value from any other rank.

    What would come from the others is this rank's own data again, or zeros, so that results are
    the same on every run.

    Attributes:
        nbytes: bytes that this rank would have sent, by ring algorithms, padding included.
        seconds: the virtual time of that: `latency` for each collective, and the bytes at
            `bandwidth` (bytes per second).
    """

    moved = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype))
    reduced = moved
    has_peers = False

    def __init__(self, handle: MeshHandle, latency: float, bandwidth: float):
        super().__init__(handle._layout, handle._at, scope())
        self.device_mesh = handle
        self.latency, self.bandwidth = latency, bandwidth
        self.nbytes, self.seconds = 0, 0.0

    def _spend(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.seconds += self.latency + nbytes / self.bandwidth

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, ask: Ask) -> None:
        n = self.mesh_size(axes)
        self._spend((n - 1) * x.nbytes)
        out.view(n, -1).copy_(x.reshape(1, -1).expand(n, -1))

    def _reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, reduce_op: str, ask: Ask
    ) -> None:
        n = self.mesh_size(axes)
        self._spend((n - 1) * out.nbytes)
        out.view(-1).copy_(x.reshape(n, -1)[self.index(axes)])

    def _all_reduce(self, x: torch.Tensor, axes: Axes, reduce_op: str, ask: Ask) -> None:
        n = self.mesh_size(axes)
        self._spend(2 * (n - 1) * x.nbytes // n)

    def _all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        axes: Axes,
        get: Splits,
        send: Splits,
        ask: Ask,
    ) -> None:
        mine, kept = send.place(self.index(axes)), get.place(self.index(axes))
        self._spend((send.total - mine[1]) * x.element_size())
        out.zero_()
        out.narrow(0, *kept).copy_(x.narrow(0, *mine))

    def gather_ints(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tuple(values)] * self.mesh.size()

    def exchange(self, why: str, mine: bytes) -> list[bytes]:
        return [mine] * self.mesh.size()

    def _broadcast(self, x: torch.Tensor, axes: Axes, root: int, ask: Ask) -> None:
        self._spend(x.nbytes)


def dry_mesh(
    rank: int = 0, *, latency: float = LATENCY, bandwidth: float = BANDWIDTH, **axes: int
) -> MeshHandle:
    """A mesh on which this process is `rank` and nobody else is there: `dry_mesh(dp=8, tp=4)`.

    Everything runs, with right shapes and counted bytes, and with values that mean nothing.

    Args:
        rank: which rank to be, row-major over the axes.
        latency: seconds to start a collective.
        bandwidth: bytes per second that a rank can send.
        axes: the size of each mesh axis, outermost first.
    """
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    if not 0 <= rank < mesh.size():
        raise LayoutError(f"rank {rank} is not one of the {mesh.size()} of mesh {mesh}")
    numbers = torch.arange(mesh.size()).view(mesh.sizes)
    at = mesh.coordinates()[rank]
    return MeshHandle(mesh, at, numbers, lambda handle, _: DryWire(handle, latency, bandwidth))
