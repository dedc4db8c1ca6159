"""Process groups: the wire that sends tensors over them, and control groups for messages.

Each `Backend` (`backends`) defines how its kind of process group runs collectives. Messages, such
as texts to compare, use the mesh's `ControlGroup`, a separate process group. Each message begins
with a digest of its reason, so a rank never mistakes it for another message or for a tensor.

Before the control group exists, ranks wait for one another with keys in the job's store
(`barrier_in_store`), because a collective could be mixed up with another one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from partita.layout import Coordinate, Fix, LayoutError, Mesh

from .backends import backend_of, rendezvous_group
from .backends.backend import begin_in_group
from .collective import Axes, PendingWork, Request, reduce_in_rank_order
from .device import HOST, Device, copy_bytes, new_empty
from .ledger import user_line
from .waiting import (
    BEGUN,
    SLICE,
    TIME_SLICE,
    Need,
    WatchedWork,
    describe_process,
    find_ended,
    history_of,
    last_begun_in,
    make_deadlock_error,
    make_lost_rank_error,
    make_rank_gone_error,
    remember_processes,
    timeout_of_job,
    verdict_of_others,
    wait_longer,
    wait_with_others,
)
from .wire import Wire, hidden_from_modes

_SMALL_READ = 1 << 13
"""Bytes up to which a value that the program reads is sent over the control group."""
_COMMON = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.uint8, torch.int8, torch.int32, torch.int64)
)


_GRACE_OF_THREADS = 0.2  # seconds


@functools.cache
def _give_threads_time_at_exit() -> None:
    """Let the threads of process groups end what they do before Python shuts down.

    Such a thread may free the last reference to a tensor, which needs the interpreter. If Python
    is shutting down at that moment, the process aborts.
    """
    atexit.register(time.sleep, _GRACE_OF_THREADS)


class GroupWire(Wire):
    """A wire over torch's process groups: a process's connection to the others of a mesh.

    The process group of one axis is the mesh's. A group over several axes is made at the first
    redistribution over these axes. Only its members make it, because all of them take part.
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
        _give_threads_time_at_exit()
        kind = device_mesh.device_type
        self.device = Device(kind).current()
        ranks = device_mesh.mesh.flatten().tolist()
        self._rank_at = dict(zip(self.mesh.coordinates(), ranks, strict=True))
        self._at_rank = {rank: at for at, rank in self._rank_at.items()}
        self._process_groups: dict[Axes, dist.ProcessGroup] = {}
        self.backend = backend_of(kind, _begin_watched)
        self.runs_in_streams = self.backend.runs_in_streams
        self._control: ControlGroup | None = None

    # -- groups ----------------------------------------------------------------------------------

    def process_group(self, axes: Axes) -> dist.ProcessGroup:
        """Returns the process group of this rank along `axes`, which are in mesh order.

        The group has more than one rank.
        """
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
        """True if the default group supports the mesh's kind of device."""
        backend = dist.get_backend()
        return backend in ("fake", dist.get_default_backend_for_device(self.device.type))

    def _members(self, axes: Axes) -> tuple[Coordinate, ...]:
        members = self.mesh.group(axes, self.at)
        if len(members) == 1:
            return members
        # The members' order is that of the group, because a mesh may list ranks in any order.
        order = dist.get_process_group_ranks(self.process_group(axes))
        return tuple(self._at_rank[rank] for rank in order)

    def _order(self, axes: Axes) -> list[int] | None:
        number = {m: i for i, m in enumerate(self.mesh.group(axes, self.at))}
        order = [number[m] for m in self._members(axes)]
        return None if order == sorted(order) else order

    # -- collectives -------------------------------------------------------------------------------

    def _perform(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        if self._reading is not None and self._bring_read_value(out, x, axes, request):
            return
        group = self._process_groups[axes]
        if request.kind not in ("all_reduce", "broadcast"):
            # A group cuts a tensor along dimension 0, where pieces need not follow each other here.
            out, x = out.view(-1), x.view(-1)
        begin = self.backend.native if request.kind == "all_gather" else self.backend.begin
        begin(group, out, x, request).wait()

    def begin_collective(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> PendingWork:
        return self.backend.begin(self._process_groups[axes], out, x, request)

    # -- comparison of ranks ---------------------------------------------------------------------

    @property
    def control(self) -> ControlGroup:
        """The process group for messages between the ranks of this mesh.

        It is made at the first read, which must happen on every rank of the mesh.
        """
        if self._control is None:
            if (group := self.group_of_all()) is not None:
                why = "compares something for the first time"
                barrier_in_store(group, "first comparison", _append_user_line(why))
            self.make_control()
        assert self._control is not None
        return self._control

    def make_control(self) -> None:
        """Make the process group for messages. Every rank of the mesh must call this."""
        if self._control is None and self._others_exist():
            ranks = [self._rank_at[at] for at in self.mesh.coordinates()]
            self._control = ControlGroup(f"{self.device.type}/{self.mesh}/{ranks}", ranks)

    def group_of_all(self) -> dist.ProcessGroup | None:
        """Returns a process group of all ranks of the mesh; None if there are no other ranks.

        Meshes with the same ranks may share the store of this group.
        """
        if not self._others_exist():
            return None
        return self.process_group(self.mesh.names)

    def _others_exist(self) -> bool:
        return self.mesh.size() > 1 and dist.get_backend() != "fake"

    def exchange(
        self,
        why: str,
        mine: bytes,
        deadline: float | None = None,
        compared: str = "",
        shown: str = "",
    ) -> list[bytes]:
        if not self._others_exist():
            return [mine] * self.mesh.size()
        return self.control.exchange(why, mine, deadline, compared, shown)

    @property
    def ranks_to_wait_for(self) -> list[int]:
        waits = self._others_exist() and self.backend.waits_on_host
        return list(self._rank_at.values()) if waits else []

    def last_begun(self, axes: Axes) -> str:
        group = self._process_groups.get(axes)
        return "" if group is None else last_begun_in(group.group_name)

    @property
    def read_timeout(self) -> float:
        return timeout_of_job().total_seconds() / 2

    def _bring_read_value(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> bool:
        """Run the collective of a value that the program reads over the control group, if it is
        small.

        Returns False, and writes nothing to `out`, for other collectives than all_gather and
        all_reduce, and for large values. For the latter, all ranks of the mesh have arrived.
        """
        if request.kind not in ("all_gather", "all_reduce"):
            return False
        assert self._reading is not None
        mine = b""
        if x.nbytes <= _SMALL_READ:
            mine = copy_bytes(x.detach().to(HOST).contiguous())
        gathered = self.meet_readers(self._reading, mine)
        if not mine:
            return False
        by_place = dict(zip(self.mesh.coordinates(), gathered, strict=True))
        rows = [
            torch.frombuffer(bytearray(by_place[at]), dtype=x.dtype).view(x.shape).to(x.device)
            for at in self.group(axes)[1]
        ]
        if request.kind == "all_gather":
            torch.cat([row.view(-1) for row in rows], out=out.view(-1))
        else:
            reduce_in_rank_order(rows, out, request.reduce_op)
        return True


def _begin_watched(
    group: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, request: Request
) -> WatchedWork:
    return WatchedWork(begin_in_group(group, out, x, request), group, request)


# -- the control group -----------------------------------------------------------------------------

_MESSAGE_HEAD = struct.Struct("<8sq")
"""The digest of the reason, and the length of the payload in bytes."""
_PAYLOAD_INLINE = 112
"""Bytes of the payload that fit in the first message; a longer payload takes a second one."""
_MESSAGE_BYTES = _MESSAGE_HEAD.size + _PAYLOAD_INLINE
_LENGTH = struct.Struct("<q")


class ControlGroup:
    """A process group for messages, separate from the groups that send tensors.

    Its ranks are the ranks of a mesh, or all ranks of the job.

    All its ranks make it together: in `init_device_mesh`, or after they have met in the store.

    Args:
        name: the group's name, which is equal on all ranks, and of no other group.
        ranks: the global ranks, at least two, in the order of the group.
    """

    def __init__(self, name: str, ranks: Sequence[int]):
        self._name, self._ranks = f"partita/control/{name}", list(ranks)
        why = "makes the control group of a mesh"
        try:
            self._group = rendezvous_group(self._name, self._ranks, timeout_of_job())
        except RuntimeError as error:
            if (gone := make_lost_rank_error(error, _append_user_line(why), self._ranks)) is None:
                raise
            raise gone from error
        BEGUN[self._name] = 0
        # A rank that ends now would close connections that slower ranks have not accepted yet.
        remember_processes(self._ranks, self.exchange(why, describe_process()))

    def exchange(
        self,
        why: str,
        mine: bytes,
        deadline: float | None = None,
        compared: str = "",
        shown: str = "",
        *,
        warns: bool = True,
    ) -> list[bytes]:
        """Sends the bytes `mine` to all ranks, and returns every rank's bytes, in group order.

        An error names two ranks with different reasons, or the ranks that did not arrive in time.

        Args:
            why: the reason, which must be equal on all ranks.
            deadline: seconds to wait for ranks that still compute; by default the timeout of
                `init_process_group`.
            compared: other text that must be equal on all ranks.
            shown: details of what this rank does, for errors.
            warns: True warns if other ranks are late for a long time.
        """
        text = why + shown
        wait = functools.partial(self._wait, text, deadline, warns)
        begun = history_of(self._ranks).digest
        head = _MESSAGE_HEAD.pack(hash_text(f"{why}{compared} {begun}", 8), len(mine))
        rows = self._gather((head + mine).ljust(_MESSAGE_BYTES)[:_MESSAGE_BYTES], wait)
        heads = [_MESSAGE_HEAD.unpack_from(row) for row in rows]
        if any(digest != heads[0][0] for digest, _ in heads):
            raise self._make_divergence_error(text, deadline, compared)
        longest = max(length for _, length in heads)
        if longest > _PAYLOAD_INLINE:
            rows = self._gather(mine.ljust(longest), wait)
        else:
            rows = [row[_MESSAGE_HEAD.size :] for row in rows]
        return [row[:n] for row, (_, n) in zip(rows, heads, strict=True)]

    def decide(
        self,
        why: str,
        mine: bytes,
        answer: Callable[[list[bytes]], list[bytes]],
        shown: str = "",
        *,
        watched: bool = True,
    ) -> bytes:
        """Lets the first rank compute an answer for each rank, from every rank's `mine`.

        Args:
            why: what the ranks do, which must be equal on all ranks.
            answer: a function that the first rank calls with every rank's `mine`. It returns an
                answer for each rank.
            shown: details of what this rank does, for errors.
            watched: True shows other ranks what this rank waits for. False in a background thread,
                because its rank continues meanwhile.

        Returns:
            This rank's answer.
        """
        wait: Callable[[Any], None] = _wait_unwatched
        if watched:
            wait = functools.partial(self._wait, why + shown, None, False)
        size = _LENGTH.pack(len(mine))
        if watched:
            sizes = self.exchange(why, size, shown=shown, warns=False)
        else:
            sizes = self._gather(size, wait)
        gathered = self._gather_to_first(mine, [n for (n,) in map(_LENGTH.unpack, sizes)], wait)
        answers = None if gathered is None else answer(gathered)
        return self._scatter_from_first(answers, wait)

    @hidden_from_modes
    def _gather(self, mine: bytes, wait: Callable[[Any], None]) -> list[bytes]:
        x = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        out = new_empty(x, (len(self._ranks), len(mine)))
        wait(self._group._allgather_base(out.view(-1), x))
        return [copy_bytes(row) for row in out.unbind()]

    @hidden_from_modes
    def _gather_to_first(
        self, mine: bytes, sizes: list[int], wait: Callable[[Any], None]
    ) -> list[bytes] | None:
        """Returns every rank's bytes, of these sizes, on the first rank; None on the others."""
        longest, rows = max(sizes), []
        if self._group.rank() == 0:
            rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        options = dist.GatherOptions()
        options.rootRank = 0
        wait(self._group.gather([rows] if rows else [], [_bytes_tensor(mine, longest)], options))
        return [copy_bytes(r[:n]) for r, n in zip(rows, sizes, strict=True)] if rows else None

    @hidden_from_modes
    def _scatter_from_first(self, rows: list[bytes] | None, wait: Callable[[Any], None]) -> bytes:
        """Returns the bytes that the first rank has for this rank."""
        longest = max(map(len, rows or [b""])) + _LENGTH.size
        length = torch.tensor([longest])
        wait(self._group.broadcast(length, 0))
        row, sent = torch.empty(int(length), dtype=torch.uint8), []
        if rows is not None:
            sent = [[_bytes_tensor(_LENGTH.pack(len(one)) + one, longest) for one in rows]]
        options = dist.ScatterOptions()
        options.rootRank = 0
        wait(self._group.scatter([row], sent, options))
        (size,) = _LENGTH.unpack(copy_bytes(row[: _LENGTH.size]))
        return copy_bytes(row[_LENGTH.size : _LENGTH.size + size])

    def _wait(self, text: str, deadline: float | None, warns: bool, work: Any) -> None:
        BEGUN[self._name] += 1
        try:
            work.wait(TIME_SLICE)
        except RuntimeError:
            count = self._name, BEGUN[self._name]
            need = Need(_append_user_line(text), self._ranks, None, True, warns, count)
            wait_longer(work, need, deadline)

    def _make_divergence_error(
        self, text: str, deadline: float | None, compared: str
    ) -> LayoutError:
        """Returns the error for ranks with different reasons, or with different earlier moves.

        All ranks call this.
        """
        parts = [_append_user_line(text), history_of(self._ranks).describe(), compared]
        mine = json.dumps(parts).encode()
        wait = functools.partial(self._wait, text, deadline, True)
        sizes = self._gather(_LENGTH.pack(len(mine)), wait)
        longest = max(n for (n,) in map(_LENGTH.unpack, sizes))
        rows = [json.loads(row) for row in self._gather(mine.ljust(longest), wait)]
        first, theirs, of_first = rows[0]
        for i, (other, ours, of_other) in enumerate(rows):
            if rows[i] == rows[0]:
                continue
            lines = [first, other]
            if first == other and of_first != of_other:
                lines = [f"{first} (compared:{of_first})", f"{other} (compared:{of_other})"]
            if ours != theirs:
                lines = _describe_parting(lines, [theirs, ours])
            ranks = self._ranks[0], self._ranks[i]
            lines = [f"rank {r:<5} {line}" for r, line in zip(ranks, lines, strict=True)]
            return make_deadlock_error("ranks ask for different things", lines)
        return make_deadlock_error("ranks ask for different things", [f"all ranks  {first}"])


def _describe_parting(texts: list[str], begun: list[dict[str, str]]) -> list[str]:
    """Returns what two ranks do now, each with the first collective that differs between them."""
    numbers = sorted({int(n) for one in begun for n in one})
    oldest = max(min(map(int, one), default=0) for one in begun)
    parted = next(
        (n for n in numbers if n >= oldest and begun[0].get(str(n)) != begun[1].get(str(n))), None
    )
    if parted is None:
        return texts
    made = [one.get(str(parted), "none") for one in begun]
    return [f"{t}; its move {parted} was: {m}" for t, m in zip(texts, made, strict=True)]


def _wait_unwatched(work: Any) -> None:
    work.wait()


def _bytes_tensor(data: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def hash_text(text: str, nbytes: int = 16) -> bytes:
    """Returns a hash of a text, of `nbytes` bytes, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=nbytes).digest()


def _append_user_line(why: str) -> str:
    """Returns the reason with the user's line: "compares from_local, at train.py:10"."""
    return f"{why}, at {user_line() or 'no line'}"


# -- meetings in the store -------------------------------------------------------------------------

_LOOK = 0.002, 0.1  # seconds between two reads of the store: at first, and at most
_CAPTURE = "capture"
_meetings: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()
"""The number of times that this rank has taken part in each kind of meeting of a group."""
_FIX_OF_PARTED_RANKS = Fix(
    "the same shapes, layouts, modes and Python values on every rank",
    "in each call; pt.check_ranks() finds at once which differ",
)


def wait_for_all_ranks(wire: Wire, why: str) -> None:
    """Waits until all ranks of `wire`'s mesh have called this equally often, before a capture.

    It is a barrier without a collective (see `barrier_in_store`).

    Args:
        why: what this rank does, for errors of other ranks.

    Raises:
        LayoutError: other ranks wait for this rank in another call, or did not arrive in time.
    """
    group = wire.group_of_all()
    if group is not None:
        barrier_in_store(group, _CAPTURE, why)


def barrier_in_store(group: dist.ProcessGroup, kind: str, why: str) -> None:
    """Wait until all ranks of `group` have called this equally often, without a collective.

    The ranks write keys into the job's store.

    Args:
        kind: the name of the barrier. Calls are counted separately for each name.
        why: what this rank does, for errors of other ranks.

    Raises:
        LayoutError: other ranks wait for this rank in another call, or did not arrive within the
            timeout of `init_process_group`.
        RankGoneError: a rank has ended.
    """
    me = dist.get_rank()
    store: Any = group.get_group_store()
    counts = _meetings.setdefault(group, {})
    number = counts[kind] = counts.get(kind, 0) + 1
    store.set(_key_of_meeting(kind, number, me), why)
    ranks, nap = dist.get_process_group_ranks(group), _LOOK[0]
    away = [r for r in ranks if r != me]

    def look_for(seconds: float) -> bool:
        """Looks into the store for at most `seconds` seconds. True if all ranks have arrived."""
        nonlocal away, nap
        until = time.monotonic() + seconds
        while away := [r for r in away if not store.check([_key_of_meeting(kind, number, r)])]:
            if nap == _LOOK[1] and (ended := find_ended(away)):
                raise make_rank_gone_error(ended, why)
            if time.monotonic() >= until:
                return False
            time.sleep(nap)
            nap = min(2 * nap, _LOOK[1])
        return True

    count = f"partita/{kind}/{group.group_name}", number
    BEGUN[count[0]] = number
    if not look_for(SLICE):
        need = Need(why, ranks, meets=True, count=count)
        wait_with_others(look_for, need, store.timeout.total_seconds())
    if number > 1:
        store.delete_key(_key_of_meeting(kind, number - 1, me))


def explain_failed_collective(wire: Wire, failure: RuntimeError) -> LayoutError | None:
    """Returns an error that says why a captured step's collective failed; None if unknown.

    Possible causes: other ranks wait in `barrier_in_store`, they have found a deadlock, or a rank
    has ended.

    Args:
        wire: the wire of the step's mesh.
        failure: the error of the collective.
    """
    group = wire.group_of_all()
    if group is None:
        return None
    if (verdict := verdict_of_others()) is not None:
        return verdict
    ranks = dist.get_process_group_ranks(group)
    with contextlib.suppress(Exception):  # the store ends with the rank that holds it
        me, store = dist.get_rank(), group.get_group_store()
        number = _meetings.get(group, {}).get(_CAPTURE, 0) + 1
        for r in ranks:
            key = _key_of_meeting(_CAPTURE, number, r)
            if store.check([key]):
                why = store.get(key).decode()
                return LayoutError(
                    f"rank {r} does not make the same moves as rank {me}",
                    place=user_line(),
                    operands=(f"rank {r}  {why}",),
                    reason=f"rank {me} runs a captured step",
                    fixes=(_FIX_OF_PARTED_RANKS,),
                )
    return make_lost_rank_error(failure, "runs a captured step", ranks)


def _key_of_meeting(kind: str, number: int, rank: int) -> str:
    return f"partita/{kind} {number}/{rank}"
