"""The wire over process groups: which group serves which axes, and what ranks compare.

How a kind of process group does a collective is told by its `Backend` (`backends`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from partita.layout import Coordinate, Fix, LayoutError, Mesh

from .backends.choose import backend_of
from .capture_barrier import wait_for_all_ranks
from .collective_request import Request
from .control_group import ControlGroup
from .device import HOST, Device
from .pending_work import PendingWork, sum_in_rank_order
from .source import place_of_user, user_line
from .splits import Splits
from .tensor_bytes import copy_bytes
from .transport import Axes
from .waiting import timeout_of_job
from .wire import Wire

__all__ = ["GroupWire"]

_SMALL = 1 << 13
"""Bytes up to which a value that the program reads is sent over the control group."""
_COMMON = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.uint8, torch.int8, torch.int32, torch.int64)
)


class GroupWire(Wire):
    """The wire of this process on a `DeviceMesh`.

    The group of one axis is the mesh's own. A group over several axes is made at the first move
    that joins them, by its members only, who are all at that move; so no other rank has to know.
    """

    moved_dtypes = _COMMON
    reduced_dtypes = _COMMON
    gathers_in_place = True

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
        self.device = Device(kind).current()
        ranks = device_mesh.mesh.flatten().tolist()
        self._rank_at = dict(zip(self.mesh.coordinates(), ranks, strict=True))
        self._at_rank = {rank: at for at, rank in self._rank_at.items()}
        self._process_groups: dict[Axes, dist.ProcessGroup] = {}
        self.backend = backend_of(kind)
        self.runs_in_streams = self.backend.runs_in_streams
        self._control: ControlGroup | None = None
        self._reading_op: str | None = None  # the op that reads the value being moved

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
            self._process_groups[axes] = found  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def _world_serves(self) -> bool:
        """Whether the default group reaches the mesh's kind of device."""
        backend = dist.get_backend()
        return backend in ("fake", dist.get_default_backend_for_device(self.device.type))

    def _members(self, axes: Axes) -> tuple[Coordinate, ...]:
        members = self.mesh.group(axes, self.at)
        if len(members) == 1:
            return members
        # The order within a group is the group's own to say: a mesh may list ranks in any order.
        order = dist.get_process_group_ranks(self.process_group(axes))
        return tuple(self._at_rank[rank] for rank in order)

    def _order(self, axes: Axes) -> list[int] | None:
        members = self.mesh.group(axes, self.at)
        if len(members) == 1:
            return None
        number = {self._rank_at[m]: i for i, m in enumerate(members)}
        order = [number[rank] for rank in dist.get_process_group_ranks(self.process_group(axes))]
        return None if order == sorted(order) else order

    # -- collectives -------------------------------------------------------------------------------

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        if self._reading_op is not None and (rows := self._gather_read_value(x, axes)) is not None:
            torch.cat([row.view(-1) for row in rows], out=out.view(-1))
            return
        if out.shape[:1] == x.shape[:1]:  # in front are dimensions of one: a group cuts the first
            out, x = out.view(-1), x.view(-1)
        self.backend.all_gather(self._process_groups[axes], out, x, request)

    def _reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, reduce_op: str, request: Request
    ) -> None:
        self.backend.reduce_scatter(self._process_groups[axes], out, x, reduce_op, request)

    def _all_reduce(self, x: torch.Tensor, axes: Axes, reduce_op: str, request: Request) -> None:
        if self._reading_op is not None and (rows := self._gather_read_value(x, axes)) is not None:
            if reduce_op == "sum":
                sum_in_rank_order(rows, x)
            else:
                stacked = torch.stack(rows)
                x.copy_(stacked.amax(0) if reduce_op == "max" else stacked.amin(0))
            return
        self.backend.all_reduce(self._process_groups[axes], x, reduce_op, request)

    def _start_all_gather(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> PendingWork:
        return self.backend.start_all_gather(self._process_groups[axes], out, x, request)

    def _start_all_reduce(self, x: torch.Tensor, axes: Axes, request: Request) -> PendingWork:
        return self.backend.start_all_reduce(self._process_groups[axes], x, request)

    def _start_reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> PendingWork:
        return self.backend.start_reduce_scatter(self._process_groups[axes], out, x, request)

    def _all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        axes: Axes,
        get: Splits,
        send: Splits,
        request: Request,
    ) -> None:
        self.backend.all_to_all(self._process_groups[axes], out, x, get, send, request)

    def _broadcast(self, x: torch.Tensor, axes: Axes, root: int, request: Request) -> None:
        self.backend.broadcast(self._process_groups[axes], x, root, request)

    # -- the control group --------------------------------------

    @property
    def control(self) -> ControlGroup:
        """The control group of this mesh; at first every rank of the mesh must read this."""
        if self._control is None:
            wait_for_all_ranks(self, f"is at {user_line() or 'no line'}, where ranks first compare")
            self.make_control()
        assert self._control is not None
        return self._control

    def make_control(self) -> None:
        """Make the control group, where every rank of the mesh is known to be here."""
        if self._control is None and self._others_exist():
            ranks = [self._rank_at[at] for at in self.mesh.coordinates()]
            self._control = ControlGroup(f"{self.device.type}/{self.mesh}/{ranks}", ranks)

    def group_of_all(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the mesh; other meshes of the same ranks may share its
        store."""
        if not self._others_exist():
            return None
        axes, _ = self.group(self.mesh.names)
        return self.process_group(axes)

    def _others_exist(self) -> bool:
        return self.mesh.size() > 1 and dist.get_backend() != "fake"

    def exchange(
        self, why: str, mine: bytes, deadline: float | None = None, place: str = ""
    ) -> list[bytes]:
        if not self._others_exist():
            return [mine] * self.mesh.size()
        return self.control.exchange(why, mine, deadline, place)

    @property
    def ranks_to_wait_for(self) -> list[int]:
        waits = self._others_exist() and self.backend.waits_on_host
        return list(self._rank_at.values()) if waits else []

    @contextmanager
    def reading(self, op: str) -> Iterator[None]:
        before, self._reading_op = self._reading_op, op
        try:
            yield
        finally:
            self._reading_op = before

    def meet_readers(self, op: str, mine: bytes) -> list[bytes]:
        limit = timeout_of_job().total_seconds() / 2
        return self.exchange(f"reads a value ({op})", mine, limit, place_of_user())

    def _gather_read_value(self, x: torch.Tensor, axes: Axes) -> list[torch.Tensor] | None:
        """Each rank's `x` of a value that the program reads, in group order, sent over the control
        group; None where it is too large for that, when all ranks of the mesh are known to be
        here."""
        assert self._reading_op is not None
        mine = b""
        if x.nbytes <= _SMALL:
            mine = copy_bytes(x.detach().to(HOST).contiguous())
        told = self.meet_readers(self._reading_op, mine)
        if not mine:
            return None
        by_place = dict(zip(self.mesh.coordinates(), told, strict=True))
        return [
            torch.frombuffer(bytearray(by_place[at]), dtype=x.dtype).view(x.shape).to(x.device)
            for at in self.group(axes)[1]
        ]

    def gather_ints(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        form = struct.Struct(f"<{len(values)}q")
        why = f"compares {len(values)} numbers"
        if self.scope.check is not None:
            self.check(f"{why} at {user_line()}")
        return [form.unpack(row) for row in self.exchange(why, form.pack(*values))]

    def check(self, text: str) -> None:
        if self.scope.check is not None and self.mesh.size() > 1:
            self.scope.check.compare(self, text)
