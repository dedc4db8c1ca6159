"""How do bytes travel over `torch.distributed`?

Each call into torch that is not public API stands here once. Process groups are called directly:
the functional collectives cost more than the whole of `carry` (a dispatcher op, an async wrapper
and its wait), and are needed only while a graph is captured.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..layout import Coordinate, Fix, LayoutError, Mesh
from . import gloo
from .source import user_line
from .under_way import UnderWay
from .wire import Ask, Axes, Wire

__all__ = ["GroupWire"]

_COMMON = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.uint8, torch.int8, torch.int32, torch.int64)
)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class GroupWire(Wire):
    """The wire of this process on a `DeviceMesh`: Gloo, NCCL, or the fake backend.

    The group of one axis is the mesh's own. A group over several axes is made at the first move
    that joins them, by its members only, who are all at that move; so no other rank has to know.
    """

    moved = _COMMON
    reduced = _COMMON

    device_mesh: DeviceMesh

    def __init__(self, device_mesh: DeviceMesh):
        at = device_mesh.get_coordinate()
        if at is None:
            raise LayoutError(
                f"rank {dist.get_rank()} is not part of {device_mesh}",
                place=user_line(),
                reason=f"the mesh has the ranks {device_mesh.mesh.flatten().tolist()}",
                fixes=(Fix("if mesh.get_coordinate() is not None: ...", "on its ranks only"),),
            )
        sizes = tuple(device_mesh.mesh.shape)
        names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(len(sizes)))
        super().__init__(Mesh(tuple(names), sizes), tuple(at))
        self.device_mesh = device_mesh
        kind = device_mesh.device_type
        self.device = torch.device(kind)
        if kind == "cuda":
            self.device = torch.device(kind, torch.cuda.current_device())
        ranks = device_mesh.mesh.flatten().tolist()
        self._rank_at = dict(zip(self.mesh.coordinates(), ranks, strict=True))
        self._at_rank = {rank: at for at, rank in self._rank_at.items()}
        self._process_groups: dict[Axes, dist.ProcessGroup] = {}
        self.on_gloo = kind == "cpu" and "cpu:gloo" in dist.get_backend_config()

    # -- groups ----------------------------------------------------------------------------------

    def process_group(self, axes: Axes) -> dist.ProcessGroup:
        """The group over `axes` that this rank is in; `axes` in mesh order, more than one rank."""
        found = self._process_groups.get(axes)
        if found is None:
            wanted = sorted(self._rank_at[m] for m in self.mesh.group(axes, self.at))
            several = [a for a in axes if self.mesh.size(a) > 1]
            if len(several) == 1:
                found = self.device_mesh.get_group(self.mesh.index(several[0]))
            elif len(wanted) == dist.get_world_size() and self._world_serves():
                found = dist.group.WORLD
            else:
                found = dist.new_group(
                    wanted,
                    use_local_synchronization=True,
                    group_desc="partita " + " ".join(axes),
                )
            self._process_groups[axes] = found
        return found

    def _world_serves(self) -> bool:
        """Whether the default group reaches the mesh's kind of device."""
        backend = dist.get_backend()
        return (backend == "gloo") == (self.device.type == "cpu") or backend == "fake"

    def _members(self, axes: Axes) -> tuple[Coordinate, ...]:
        members = self.mesh.group(axes, self.at)
        if len(members) == 1:
            return members
        # The order within a group is the group's own to say: a mesh may list ranks in any order.
        order = dist.get_process_group_ranks(self.process_group(axes))
        return tuple(self._at_rank[rank] for rank in order)

    # -- primitives: ProcessGroup methods that torch's own public collectives end in --------------

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, ask: Ask) -> None:
        self._process_groups[axes]._allgather_base(out, x).wait()

    def _reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, reduce_op: str, ask: Ask
    ) -> None:
        group = self._process_groups[axes]
        if reduce_op == "sum" and self.on_gloo:
            gloo.start_reduce_scatter(group, out, x).wait()
            return
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[reduce_op]
        group._reduce_scatter_base(out, x, options).wait()

    def _all_reduce(self, x: torch.Tensor, axes: Axes, reduce_op: str, ask: Ask) -> None:
        group = self._process_groups[axes]
        if reduce_op == "sum" and self.on_gloo:
            gloo.start_all_reduce(group, x).wait()
            return
        group.allreduce([x], _OPS[reduce_op]).wait()

    def _start_all_gather(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, ask: Ask
    ) -> UnderWay:
        group = self._process_groups[axes]
        return (
            gloo.start_all_gather(group, out, x) if self.on_gloo else group._allgather_base(out, x)
        )

    def _start_all_reduce(self, x: torch.Tensor, axes: Axes, ask: Ask) -> UnderWay:
        group = self._process_groups[axes]
        return gloo.start_all_reduce(group, x) if self.on_gloo else group.allreduce([x])

    def _start_reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, ask: Ask
    ) -> UnderWay:
        group = self._process_groups[axes]
        if self.on_gloo or out.dtype != x.dtype:
            return gloo.start_reduce_scatter(group, out, x)
        return group._reduce_scatter_base(out, x)

    def _all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        axes: Axes,
        get: list[int],
        send: list[int],
        ask: Ask,
    ) -> None:
        self._process_groups[axes].alltoall_base(out, x, get, send).wait()

    def _broadcast(self, x: torch.Tensor, axes: Axes, root: int, ask: Ask) -> None:
        self._process_groups[axes].broadcast(x, root).wait()

    # -- for check_ranks -------------------------------------------------------------------------

    def check(self, text: str) -> None:
        if self.scope.check is not None and self.mesh.size() > 1:
            self.scope.check.compare(self, text)

    def exchange_text(self, text: str, timeout: timedelta) -> list[str]:
        """Every rank's text, in mesh order.

        Raises:
            LayoutError: a rank did not come within `timeout`.
        """
        axes, members = self.group(self.mesh.names)
        mine = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        x = torch.tensor(list(mine), dtype=torch.uint8, device=self.device)
        out = x.new_empty((len(members), _TEXT_BYTES))
        work = self._process_groups[axes]._allgather_base(out.view(-1), x)
        try:
            work.wait(timeout)
        except RuntimeError as error:
            raise LayoutError(
                f"rank {self.rank} waited {timeout.total_seconds():g} s for the other ranks",
                operands=(text,),
                reason="some rank does not make this move",
            ) from error
        rows = [bytes(row).decode(errors="replace").rstrip() for row in out.tolist()]
        by_place = dict(zip(members, rows, strict=True))
        return [by_place[m] for m in self.mesh.coordinates()]


_TEXT_BYTES = 1024  # of what a rank asks for; a longer text is compared as far as this
