"""Simulated ranks: threads of one process that take turns in a fixed order, and their wires.

Only one rank runs at a time. It lets the next one run when it needs other ranks, or ends. The last
rank to arrive at a collective runs it for all ranks, group by group and in rank order, and
continues. So there are no races, and sums are the same in every run. If no rank can continue, every
rank raises an error that says what two of them wait for.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._C import DisableTorchFunction  # also disables modes
from torch.utils._python_dispatch import _disable_current_modes

from partita.layout import LayoutError, Mesh

from .collective import ALL_DTYPES, Axes, Request, reduce_in_rank_order
from .device import AutocastState, read_autocast_state, use_autocast_state
from .ledger import Scope, enter_check_hooks, enter_rank_thread, place_of_user, scope, user_line
from .wire import MeshHandle, Wire

Payload = tuple[Any, ...]
Action = Callable[[Sequence[Payload]], None]
READY, WAITING, ENDED = "ready", "waiting", "ended"

_running = threading.local()


class World:
    """The simulated ranks of a mesh, which run as threads of one process. `pt.ranks` makes it."""

    def __init__(self, mesh: Mesh):
        self.mesh, n = mesh, mesh.size()
        self._scopes = [Scope() for _ in range(n)]
        numbers = torch.arange(n).view(mesh.sizes)
        self._handles = [
            MeshHandle(mesh, at, numbers, partial(RankWire, self, r, self._scopes[r]))
            for r, at in enumerate(mesh.coordinates())
        ]
        self._active = False

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def handle(self, rank: int) -> MeshHandle:
        """Returns the mesh object that a rank's function gets. It is the same in each run."""
        return self._handles[rank]

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(mesh, *args, **kwargs)` once per rank and return the results in rank order.

        All ranks start with the caller's CPU generator state, grad mode and context variables. Each
        rank has its own generator. After the call, the caller continues with the generator state of
        rank 0.

        Args:
            fn: the function of each rank; its first argument is the rank's mesh.

        Raises:
            LayoutError: ranks made different calls, or waited for a rank that had ended. Every rank
                raised it.
            Exception: the exception of the first rank whose `fn` raised, with a note that names it.
        """
        if self._active or getattr(_running, "world", None) is not None:
            raise LayoutError("world.run was called by a rank; a rank cannot start ranks")
        outer, generator = scope(), torch.get_rng_state()
        for own in self._scopes:
            own.copy_from(outer)
        self._turns = [_Turn(generator) for _ in self._handles]
        self._stopped: _Verdict | None = None
        self._over = threading.Event()
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), read_autocast_state()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_rank, r, lambda mesh: fn(mesh, *args, **kwargs), *modes),
                name=f"rank {r}",
                daemon=True,
            )
            for r in range(len(self._turns))
        ]
        self._active = True
        try:
            for thread in threads:
                thread.start()
            self._turns[0].go.release()
            try:
                self._over.wait()
            except KeyboardInterrupt:
                self._stopped = _Verdict("interrupted")  # each rank stops at its next collective
                raise
            for thread in threads:
                thread.join()
        finally:
            self._active = False
        turns, self._turns = self._turns, []  # so that the world does not keep results alive
        torch.set_rng_state(turns[0].generator)
        self._raise_original([turn.failure for turn in turns])
        return [turn.result for turn in turns]

    # -- one rank's thread -----------------------------------------------------------------------

    def _run_rank(
        self,
        r: int,
        call: Callable[[MeshHandle], Any],
        inference: bool,
        grad: bool,
        casting: AutocastState,
    ) -> None:
        turn = self._turns[r]
        turn.go.acquire()
        _running.world, _running.rank = self, r
        enter_rank_thread(self._scopes[r])
        torch.set_rng_state(turn.generator)
        try:
            with (  # modes that a thread does not inherit
                torch.inference_mode(inference),
                use_autocast_state(casting),
                torch.set_grad_enabled(grad),
                nullcontext() if self._scopes[r].check is None else enter_check_hooks(),
            ):
                turn.result = call(self._handles[r])
        except BaseException as error:
            turn.failure = error
            if self._stopped is None and not _is_from_verdict(error):
                self._stopped = _Verdict(
                    f"rank {r} raised {_describe_error(error)}, so the other ranks stop", (), error
                )
        turn.generator = torch.get_rng_state()
        turn.state = ENDED
        self._resume_next_rank(r)

    def _resume_next_rank(self, r: int) -> None:
        """Let the next rank run that can. Called by the running rank."""
        waiting = [i for i, turn in enumerate(self._turns) if turn.state == WAITING]
        ready = any(turn.state == READY for turn in self._turns)
        if waiting and (self._stopped or not ready):
            verdict = self._stopped or self._make_deadlock_verdict(waiting)
            for i in waiting:
                self._turns[i].stop(verdict)
        for turn in self._turns[r + 1 :] + self._turns[: r + 1]:
            if turn.state == READY:
                turn.go.release()
                return
        self._over.set()

    # -- a collective ----------------------------------------------------------------------------

    def meet(self, call: MeetingCall, action: Action) -> None:
        """Waits until all ranks of a mesh make the same call. The last one runs `action`.

        Args:
            call: this rank's call, which is compared with those of the others.
            action: a function, such as the collective itself.
        """
        r = call.rank
        if getattr(_running, "world", None) is not self or _running.rank != r:
            raise LayoutError(
                f"{call.request.describe()}: rank {r} of ranks({self.mesh}) is not running here",
                place=user_line(),
                reason="its tensors can be exchanged with other ranks only inside world.run",
            )
        turn = self._turns[r]
        turn.raise_verdict()
        if self._stopped is not None:
            raise self._stopped.error()
        turn.state, turn.call = WAITING, call
        arrived = [
            c
            for m in call.mesh_ranks
            if self._turns[m].state == WAITING
            and (c := self._turns[m].call) is not None
            and c.mesh_ranks == call.mesh_ranks
        ]
        if len(arrived) == len(call.mesh_ranks):
            self._perform_meeting(arrived, action)
        else:
            turn.generator = torch.get_rng_state()
            self._resume_next_rank(r)
            turn.go.acquire()
            torch.set_rng_state(turn.generator)
        turn.call = call.frame = None
        turn.raise_verdict()

    def _perform_meeting(self, calls: list[MeetingCall], action: Action) -> None:
        differing = _find_differing(calls)
        verdict = None
        if differing is not None:
            one, other = differing
            alike = one.shown == other.shown and one.compared != other.compared
            what = tuple(call.describe(alike) for call in differing)
            verdict = _Verdict("ranks ask for different things", what)
        else:
            by_rank = {c.rank: c.payload for c in calls}
            try:
                with torch.no_grad():
                    for group in dict.fromkeys(c.group for c in calls):
                        # The last rank runs the move for all ranks, so its own modes (such as a
                        # checkpoint's, which counts ops) must not see it.
                        with _disable_current_modes(), DisableTorchFunction():
                            action([by_rank[m] for m in group])
            except Exception as error:
                verdict = _Verdict(
                    f"{calls[0].request.describe()} failed: {_describe_error(error)}", (), error
                )
            by_rank.clear()
        for c in calls:
            c.payload = ()  # frees the tensors: its rank may run much later than the others
            self._turns[c.rank].state = READY
        if verdict is not None:  # ranks that arrive later would wait forever
            for turn in self._turns:
                if turn.state != ENDED:
                    turn.stop(verdict)

    def _make_deadlock_verdict(self, waiting: list[int]) -> _Verdict:
        """Returns the verdict of a deadlock. It names two ranks that wait for different calls."""
        for r in waiting:
            call = self._turns[r].call
            assert call is not None
            for m in call.mesh_ranks:
                other = self._turns[m]
                if other.state == ENDED:
                    how = "returned from its function"
                    if other.failure is not None:
                        how = f"raised {_describe_error(other.failure)}"
                    return _Verdict(
                        f"rank {r} waits for rank {m}, which has ended",
                        (call.describe(), f"rank {m}  {how}"),
                    )
                if other.call is not None and other.call.mesh_ranks != call.mesh_ranks:
                    return _Verdict(
                        "ranks wait for each other on different meshes",
                        (call.describe(), other.call.describe()),
                    )
        raise AssertionError("a complete group was left waiting")

    def _raise_original(self, failures: Sequence[BaseException | None]) -> None:
        """Raise the error of the first rank that failed by itself, if any has failed."""
        failed = {r: e for r, e in enumerate(failures) if e is not None}
        if not failed:
            return
        rank = min([r for r, e in failed.items() if not _is_from_verdict(e)] or failed)
        note = f"on rank {rank} of ranks({self.mesh})"
        if note not in getattr(failed[rank], "__notes__", ()):
            failed[rank].add_note(note)
        raise failed[rank]


@dataclass(eq=False)
class _Turn:
    """The state of one rank in a run.

    Attributes:
        generator: the state of the CPU's generator when the rank last stopped.
        go: a lock that is released when it is this rank's turn.
        call: the call in which it waits.
        verdict: the reason why it must stop, or None.
        failure, result: the exception or the result of its function.
    """

    generator: torch.Tensor
    state: str = READY
    go: Any = field(default_factory=threading.Lock)
    call: MeetingCall | None = None
    verdict: _Verdict | None = None
    failure: BaseException | None = None
    result: Any = None

    def __post_init__(self) -> None:
        self.go.acquire()

    def stop(self, verdict: _Verdict) -> None:
        """Makes the rank raise `verdict` when it continues, unless it has an earlier error."""
        self.state, self.verdict = READY, self.verdict or verdict

    def raise_verdict(self) -> None:
        verdict, self.verdict = self.verdict, None
        if verdict is not None:
            raise verdict.error()


# -- meetings of ranks, and verdicts ---------------------------------------------------------------


@dataclass(eq=False)
class MeetingCall:
    """A call of a simulated rank that needs other ranks, such as a collective.

    Attributes:
        rank: the calling rank.
        mesh_ranks: the ranks of its mesh. All must make an equal call, in their own groups.
        group: the ranks among them that exchange data with this one, in group order.
        request: must be equal on all ranks, except for the op that needs it.
        dtype: the dtype of its tensor; must be equal on all ranks.
        amount: the size of its tensor, which must be equal within its group. Groups may differ,
            because pieces may be uneven. None if sizes may differ within a group, too.
        payload: the data of the rank.
        frame: the caller's frame, for errors.
        compared: other text that must be equal on all ranks.
        shown: details of what the rank does, for errors.
    """

    rank: int
    mesh_ranks: tuple[int, ...]
    group: tuple[int, ...]
    request: Request
    dtype: torch.dtype | str
    amount: int | None
    payload: Payload
    frame: FrameType | None
    compared: str = ""
    shown: str = ""

    def agrees(self, other: MeetingCall) -> bool:
        a, b = self.request, other.request
        return (
            (self.group != other.group or self.amount == other.amount)
            and (self.dtype, self.compared, a.kind, a.reduce_op, a.root)
            == (other.dtype, other.compared, b.kind, b.reduce_op, b.root)
            and (a.move is b.move or a.move == b.move)
        )

    def describe(self, with_compared: bool = False) -> str:
        text = self.request.describe() + self.shown
        if with_compared:
            text += f" (compared: {self.compared})"
        if self.dtype:
            amount = "" if self.amount is None else f", numel {self.amount}"
            text += f" ({str(self.dtype).removeprefix('torch.')}{amount})"
        return f"rank {self.rank}  {text}  at {user_line(self.frame) or 'no line'}"


def _find_differing(calls: list[MeetingCall]) -> tuple[MeetingCall, MeetingCall] | None:
    """Returns two calls that differ, or None. Each is compared with the first, and its group's
    first.
    """
    first_of: dict[tuple[int, ...], MeetingCall] = {}
    for call in calls:
        for first in (calls[0], first_of.setdefault(call.group, call)):
            if not first.agrees(call):
                return first, call
    return None


class _Verdict:
    """The reason why ranks must stop. Each rank gets its own error, with its own traceback."""

    def __init__(self, fact: str, calls: tuple[str, ...] = (), cause: BaseException | None = None):
        self.fact, self.calls, self.cause = fact, calls, cause

    def error(self) -> LayoutError:
        reason = "every rank of a mesh must make the same moves in the same order"
        error = LayoutError(self.fact, operands=self.calls, reason="" if self.cause else reason)
        error.__cause__ = self.cause
        error._from_verdict = True  # type: ignore[attr-defined]
        return error


def _is_from_verdict(error: BaseException) -> bool:
    """True if the error was raised by a `_Verdict`, or because of such an error."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if getattr(one, "_from_verdict", False):
            return True
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return False


def _describe_error(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# -- the wire of a rank ----------------------------------------------------------------------------


def running_wire() -> RankWire | None:
    """Returns the wire of the simulated rank in this thread; None outside `World.run`."""
    world = getattr(_running, "world", None)
    return None if world is None else world.handle(_running.rank).wire


class RankWire(Wire):
    """The connection of one simulated rank to the others.

    Args:
        world: the simulated ranks.
        number: this rank's number in `world`.
        own: the rank's ledgers and checks.
        handle: the rank's mesh object, which may be a sub-mesh.
        members: the numbers of the mesh's ranks, in mesh order.
    """

    moved_dtypes = ALL_DTYPES
    reduced_dtypes = frozenset(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        + (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    )
    kind = "of pt.ranks"

    def __init__(
        self, world: World, number: int, own: Scope, handle: MeshHandle, members: tuple[int, ...]
    ):
        super().__init__(handle._layout, handle._at, own)
        self.device_mesh, self._world, self._number = handle, world, number
        self._mesh_ranks = members
        self._number_at = dict(zip(self.mesh.coordinates(), members, strict=True))
        self._numbers: dict[Axes, tuple[int, ...]] = {}

    def _perform(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        # A move may gather pieces as they are.
        fixed = request.kind == "broadcast" or (request.kind == "all_gather" and not request.move)
        amount = x.numel() if fixed else None
        payload = out, x, request
        read: tuple[str, ...] = ()
        if self._reading is not None:
            compared, shown = self._reading.at(place_of_user())
            read = compared, f", {self._reading.why}{shown}"
        self._meet(axes, request, x.dtype, amount, payload, _PERFORM[request.kind], *read)

    def _meet(
        self,
        axes: Axes,
        request: Request,
        dtype: torch.dtype | str,
        amount: int | None,
        payload: Payload,
        action: Action,
        compared: str = "",
        shown: str = "",
    ) -> None:
        group = self._numbers.get(axes)
        if group is None:
            group = tuple(self._number_at[m] for m in self.group(axes)[1])
            self._numbers[axes] = group
        who = self._number, self._mesh_ranks, group
        frame = sys._getframe(1)
        call = MeetingCall(*who, request, dtype, amount, payload, frame, compared, shown)
        self._world.meet(call, action)

    def exchange(
        self,
        why: str,
        mine: bytes,
        deadline: float | None = None,
        compared: str = "",
        shown: str = "",
    ) -> list[bytes]:
        def answer_with_all(gathered: list[bytes]) -> list[list[bytes]]:
            return [gathered] * len(gathered)

        return self.decide(mine, answer_with_all, why, compared, shown)  # type: ignore[no-any-return]

    def decide(
        self,
        mine: Any,
        answer: Callable[[list[Any]], Sequence[Any]],
        why: str,
        compared: str = "",
        shown: str = "",
    ) -> Any:
        """Lets the first rank compute an answer for each rank, from every rank's `mine`.

        Returns this rank's answer. Only the first rank's `answer` is called.

        Args:
            answer: a function of every rank's `mine`, in mesh order. It returns the answer for each
                rank.
            why: what the ranks do, which must be equal on all ranks.
            compared: other text that must be equal on all ranks.
            shown: details of what this rank does, for errors.
        """
        got: list[Any] = []

        def perform_answer(all_: Sequence[Payload]) -> None:
            answers = all_[0][2]([theirs for _, theirs, _ in all_])
            for (to, _, _), one in zip(all_, answers, strict=True):
                to.append(one)

        gathered = got, mine, answer
        request = Request(why, None, "")
        self._meet(self.mesh.names, request, "", None, gathered, perform_answer, compared, shown)
        return got[0]


# -- collectives of all members of a group, each `(out, x, request)` -------------------------------


def _perform_all_gather(calls: Sequence[Payload]) -> None:
    for out, _, _ in calls:
        torch.cat([x.reshape(-1) for _, x, _ in calls], out=out.view(-1))


def _perform_reduction(calls: Sequence[Payload]) -> None:
    first, _, request = calls[0]
    shares = [x.reshape(-1) for _, x, _ in calls]
    total = torch.empty_like(shares[0], dtype=first.dtype)
    reduce_in_rank_order(shares, total, request.reduce_op)
    parts = total.view(len(calls), -1) if request.kind == "reduce_scatter" else [total] * len(calls)
    for (out, _, _), part in zip(calls, parts, strict=True):
        out.view(-1).copy_(part)


def _perform_all_to_all(calls: Sequence[Payload]) -> None:
    sent = [x.split(request.send.sizes) for _, x, request in calls]
    for i, (out, _, _) in enumerate(calls):
        torch.cat([parts[i] for parts in sent], out=out)


def _perform_broadcast(calls: Sequence[Payload]) -> None:
    _, source, _ = calls[calls[0][2].root]
    for out, _, _ in calls:
        if out is not source:
            out.copy_(source)


_PERFORM: dict[str, Action] = {
    "all_gather": _perform_all_gather,
    "reduce_scatter": _perform_reduction,
    "all_reduce": _perform_reduction,
    "all_to_all": _perform_all_to_all,
    "broadcast": _perform_broadcast,
}


def run_in_one_process(
    request: Request, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> None:
    """Runs a collective on the tensors of all its members, which are in this process.

    Args:
        request: which collective it is.
        xs, outs: the input and the output of each member, contiguous, in the group's order.
    """
    flat = [(out.view(-1), x.view(-1), request) for x, out in zip(xs, outs, strict=True)]
    _PERFORM[request.kind](flat)


def ranks(**axes: int) -> World:
    """Simulate the ranks of a mesh in one process. `world.run` calls a function on each rank.

    The ranks take turns in a fixed order. If their calls do not match, every rank raises an error
    that names both calls and both lines. It never hangs.

        with pt.ranks(dp=2, tp=2) as world:
            losses = world.run(train, data)      # train(mesh, data) on each of four ranks

    Args:
        axes: the size of each mesh axis, outermost first.
    """
    if not axes:
        raise LayoutError("ranks needs at least one axis", reason="write ranks(dp=2), for one")
    return World(Mesh(tuple(axes), tuple(axes.values())))
