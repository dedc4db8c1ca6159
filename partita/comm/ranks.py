"""How do many ranks run in one process, the same way every time, without ever hanging?

Each rank is a thread, and a baton says whose turn it is: a rank runs until it needs the others or
ends, then the next one runs. The last member to arrive at a collective does it for all and goes on.
So only one rank ever runs, nothing races, and every run takes the same order. When nobody can go
on, that is known at once, and every rank is told what each of them was waiting for.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from ..layout import LayoutError, Mesh
from .handle import MeshHandle
from .ledger import Scope, enter_rank_thread, scope
from .source import user_line
from .wire import Ask, Axes, Wire

__all__ = ["RankWire", "World", "ranks", "running_wire"]

Payload = tuple[Any, ...]
Action = Callable[[Sequence[Payload]], None]
READY, WAITING, ENDED = "ready", "waiting", "ended"

_running = threading.local()


class Call:
    """What one rank brings to a collective and waits for.

    Attributes:
        everyone: the ranks of its mesh: all must come and ask for the same, in whatever groups.
        group: the ranks among them that exchange data with this one, in group order.
        key: what must be equal besides the move: the primitive, the dtype and its options.
    """

    def __init__(
        self,
        rank: int,
        everyone: tuple[int, ...],
        group: tuple[int, ...],
        key: tuple[Any, ...],
        ask: Ask,
        payload: Payload,
    ):
        self.rank, self.everyone, self.group = rank, everyone, group
        self.key, self.ask, self.payload = key, ask, payload
        self.frame: FrameType | None = sys._getframe(2)

    def agrees(self, other: Call) -> bool:
        a, b = self.ask, other.ask
        return self.key == other.key and a.kind == b.kind and (a.move is b.move or a.move == b.move)

    def describe(self) -> str:
        dtype = str(self.key[1]).removeprefix("torch.")
        at = user_line(self.frame) or "no line"
        return f"rank {self.rank}  {self.ask.describe()} ({dtype})  at {at}"


class World:
    """Ranks of one process on one mesh. Made by `ranks`."""

    def __init__(self, mesh: Mesh):
        self.mesh, n = mesh, mesh.size()
        self._scopes = [Scope() for _ in range(n)]
        numbers = torch.arange(n).view(mesh.sizes)
        self._handles = [
            MeshHandle(mesh, at, numbers, self._wire_maker(r))
            for r, at in enumerate(mesh.coordinates())
        ]
        self._active = False

    def _wire_maker(self, rank: int) -> Callable[[MeshHandle, tuple[int, ...]], Wire]:
        return lambda handle, members: RankWire(self, rank, handle, members, self._scopes[rank])

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def handle(self, rank: int) -> MeshHandle:
        """The mesh as rank `rank` gets it; the same object in each run."""
        return self._handles[rank]

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(mesh, *args)` once per rank and return the results in rank order.

        All ranks start with the caller's CPU generator state, grad mode and context variables; each
        has a generator of its own from there on, and the caller continues with that of rank 0.

        Raises:
            LayoutError: ranks asked for different things, or some waited for one that had ended;
                every rank raised it.
            Exception: what `fn` raised, of the first rank that did, with a note that names it.
        """
        if self._active or getattr(_running, "world", None) is not None:
            raise LayoutError("world.run was called by a rank; a rank cannot start ranks")
        n = self.mesh.size()
        self._active = True
        self._state = [READY] * n
        self._calls: list[Call | None] = [None] * n
        self._verdict: list[_Verdict | None] = [None] * n
        self._failures: dict[int, BaseException] = {}
        self._stopped: _Verdict | None = None
        self._go = [threading.Lock() for _ in range(n)]
        for lock in self._go:
            lock.acquire()
        self._over = threading.Event()
        self._generator = [torch.get_rng_state()] * n
        results: list[Any] = [None] * n
        outer = scope()
        for own in self._scopes:
            own.copy_from(outer)
        carried = _CallerState()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._rank, r, fn, args, results, carried),
                name=f"rank {r}",
                daemon=True,
            )
            for r in range(n)
        ]
        try:
            for thread in threads:
                thread.start()
            self._go[0].release()
            try:
                self._over.wait()
            except KeyboardInterrupt:
                self._stopped = _Verdict("interrupted")  # each rank stops at its next collective
                raise
            for thread in threads:
                thread.join()
        finally:
            self._active = False
        torch.set_rng_state(self._generator[0])
        if self._failures:
            self._raise_original()
        return results

    # -- one rank's thread -----------------------------------------------------------------------

    def _rank(
        self, r: int, fn: Callable[..., Any], args: tuple, results: list, carried: _CallerState
    ) -> None:
        self._go[r].acquire()
        _running.world, _running.rank = self, r
        enter_rank_thread(self._scopes[r])
        torch.set_rng_state(self._generator[r])
        try:
            with carried.restored():
                results[r] = fn(self._handles[r], *args)
        except BaseException as error:
            self._failures[r] = error
            if self._stopped is None and not _is_from_verdict(error):
                self._stopped = _Verdict(
                    f"rank {r} raised {_brief(error)}, so the other ranks stop", (), error
                )
        self._generator[r] = torch.get_rng_state()
        self._state[r] = ENDED
        self._next(r)

    def _next(self, r: int) -> None:
        """Hand the baton to the next rank that can run. Called by the rank that has it."""
        n = self.mesh.size()
        order = [(r + i) % n for i in range(1, n + 1)]
        waiting = [i for i in range(n) if self._state[i] == WAITING]
        if waiting and (self._stopped or not any(self._state[i] == READY for i in order)):
            verdict = self._stopped or self._nobody_can_go_on(waiting)
            for i in waiting:
                self._state[i], self._verdict[i] = READY, self._verdict[i] or verdict
        for i in order:
            if self._state[i] == READY:
                self._go[i].release()
                return
        self._over.set()

    # -- a collective ----------------------------------------------------------------------------

    def meet(self, call: Call, action: Action) -> None:
        """Wait for the ranks of the call's mesh; the last to arrive performs all their calls."""
        r = call.rank
        if getattr(_running, "world", None) is not self or _running.rank != r:
            raise LayoutError(
                f"{call.ask.describe()}: rank {r} of ranks({self.mesh}) is not running here",
                place=user_line(),
                reason="its tensors can meet the other ranks' only inside world.run, on its rank",
            )
        self._raise_verdict(r)
        if self._stopped is not None:
            raise self._stopped.error()
        self._state[r], self._calls[r] = WAITING, call
        arrived = [
            c
            for m in call.everyone
            if self._state[m] == WAITING
            and (c := self._calls[m]) is not None
            and c.everyone == call.everyone
        ]
        if len(arrived) == len(call.everyone):
            self._perform(arrived, action)
        else:
            self._generator[r] = torch.get_rng_state()
            self._next(r)
            self._go[r].acquire()
            torch.set_rng_state(self._generator[r])
        self._calls[r] = call.frame = None
        self._raise_verdict(r)

    def _perform(self, calls: list[Call], action: Action) -> None:
        first = calls[0]
        other = next((c for c in calls if not first.agrees(c)), None)
        verdict = None
        if other is not None:
            what = (first.describe(), other.describe())
            verdict = _Verdict("ranks ask for different things", what)
        else:
            by_rank = {c.rank: c.payload for c in calls}
            try:
                with torch.no_grad():
                    for group in dict.fromkeys(c.group for c in calls):
                        action([by_rank[m] for m in group])
            except Exception as error:
                what = f"{first.ask.describe()} failed: {_brief(error)}"
                verdict = _Verdict(what, (), error)
        for c in calls:
            self._state[c.rank], self._verdict[c.rank] = READY, verdict
        if verdict is not None:  # the rest would be left alone a little later
            for i, state in enumerate(self._state):
                if state != ENDED:
                    self._verdict[i], self._state[i] = verdict, READY

    def _raise_verdict(self, r: int) -> None:
        verdict, self._verdict[r] = self._verdict[r], None
        if verdict is not None:
            raise verdict.error()

    def _nobody_can_go_on(self, waiting: list[int]) -> _Verdict:
        """Each rank waits for one that waits elsewhere or has ended: name such a pair."""
        for r in waiting:
            call = self._calls[r]
            assert call is not None
            for m in call.everyone:
                other = self._calls[m]
                if self._state[m] == ENDED:
                    error = self._failures.get(m)
                    how = f"raised {_brief(error)}" if error else "returned from its function"
                    return _Verdict(
                        f"rank {r} waits for rank {m}, which has ended",
                        (call.describe(), f"rank {m}  {how}"),
                    )
                if other is not None and other.everyone != call.everyone:
                    return _Verdict(
                        "ranks wait for each other on different meshes",
                        (call.describe(), other.describe()),
                    )
        raise AssertionError("a complete group was left waiting")

    def _raise_original(self) -> None:
        ours = {r: e for r, e in self._failures.items() if not _is_from_verdict(e)}
        rank = min(ours or self._failures)
        error = self._failures[rank]
        note = f"on rank {rank} of ranks({self.mesh})"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        self._failures = {}
        raise error


class _Verdict:
    """Why ranks must stop; an error of its own for each, since each has its own traceback."""

    def __init__(self, fact: str, calls: tuple[str, ...] = (), cause: BaseException | None = None):
        self.fact, self.calls, self.cause = fact, calls, cause

    def error(self) -> LayoutError:
        reason = "every rank of a mesh must make the same moves in the same order"
        error = LayoutError(self.fact, operands=self.calls, reason="" if self.cause else reason)
        error.__cause__ = self.cause
        error._from_verdict = True  # type: ignore[attr-defined]
        return error


def _is_from_verdict(error: BaseException) -> bool:
    """Whether it is the word that the ranks must stop, or was raised because of it."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if getattr(one, "_from_verdict", False):
            return True
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return False


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class _CallerState:
    """What a thread does not inherit and a rank should: grad mode, inference mode, autocast."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.autocast_dtype = torch.get_autocast_dtype("cpu")

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as modes:
            if self.inference:
                modes.enter_context(torch.inference_mode())
            if self.autocast:
                modes.enter_context(torch.autocast("cpu", dtype=self.autocast_dtype))
            modes.enter_context(torch.enable_grad() if self.grad else torch.no_grad())
            yield


def running_wire() -> RankWire | None:
    """The wire over the whole world of the rank that runs in this thread; None where none does."""
    world = getattr(_running, "world", None)
    return None if world is None else world.handle(_running.rank).wire


class RankWire(Wire):
    """The wire of one rank of a `World`."""

    moved = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype))
    reduced = frozenset(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        + (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    )

    def __init__(
        self, world: World, number: int, handle: MeshHandle, members: tuple[int, ...], own: Scope
    ):
        super().__init__(handle._layout, handle._at, own)
        self.device_mesh, self._world, self._number = handle, world, number
        self._everyone = members
        self._number_at = dict(zip(self.mesh.coordinates(), members, strict=True))
        self._numbers: dict[Axes, tuple[int, ...]] = {}

    def _meet(self, key: tuple[Any, ...], axes: Axes, ask: Ask, payload: Payload, action: Action):
        group = self._numbers.get(axes)
        if group is None:
            group = tuple(self._number_at[m] for m in self.group(axes)[1])
            self._numbers[axes] = group
        self._world.meet(Call(self._number, self._everyone, group, key, ask, payload), action)

    def together(self, mine: Any, answer: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """This rank's share of what the first rank's `answer` makes of every rank's `mine`."""
        got: list[Any] = []

        def action(all_: Sequence[Payload]) -> None:
            answers = all_[0][2]([theirs for _, theirs, _ in all_])
            for (to, _, _), one in zip(all_, answers, strict=True):
                to.append(one)

        ask = Ask("together", None, "")
        self._meet(("together", "objects"), self.mesh.names, ask, (got, mine, answer), action)
        return got[0]

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, ask: Ask) -> None:
        def action(all_: Sequence[Payload]) -> None:
            for to, _ in all_:
                torch.cat([x.reshape(-1) for _, x in all_], out=to.view(-1))

        # Ranks of other groups may hold more or less, but numbers of the same count.
        size = x.numel() if ask.move is None else None
        self._meet(("gather", x.dtype, size), axes, ask, (out, x), action)

    def _all_reduce(self, x: torch.Tensor, axes: Axes, reduce_op: str, ask: Ask) -> None:
        def action(all_: Sequence[Payload]) -> None:
            total = _reduced([x for (x,) in all_], reduce_op)
            for (x,) in all_:
                x.copy_(total)

        self._meet(("reduce", x.dtype, reduce_op), axes, ask, (x,), action)

    def _reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, reduce_op: str, ask: Ask
    ) -> None:
        def action(all_: Sequence[Payload]) -> None:
            total = _reduced([x.reshape(-1) for _, x in all_], reduce_op)
            for (to, _), part in zip(all_, total.view(len(all_), -1), strict=True):
                to.view(-1).copy_(part)

        self._meet(("reduce_scatter", x.dtype, reduce_op), axes, ask, (out, x), action)

    def _all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        axes: Axes,
        get: list[int],
        send: list[int],
        ask: Ask,
    ) -> None:
        sizes = torch.tensor(send)

        def action(all_: Sequence[Payload]) -> None:
            sent = [x.split(counts.tolist()) for _, x, counts in all_]
            for i, (to, _, _) in enumerate(all_):
                torch.cat([parts[i] for parts in sent], out=to)

        self._meet(("all_to_all", x.dtype), axes, ask, (out, x, sizes), action)

    def _broadcast(self, x: torch.Tensor, axes: Axes, root: int, ask: Ask) -> None:
        def action(all_: Sequence[Payload]) -> None:
            (source,) = all_[root]
            for (x,) in all_:
                if x is not source:
                    x.copy_(source)

        self._meet(("from_first", x.dtype, x.shape, root), axes, ask, (x,), action)


def _reduced(shares: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """In rank order, and 16-bit floats in 32 bits until the end."""
    dtype = shares[0].dtype
    narrow = dtype in (torch.float16, torch.bfloat16)
    total = shares[0].float() if narrow else shares[0].clone()
    for share in shares[1:]:
        if reduce_op == "sum":
            total += share
        elif reduce_op == "max":
            total = torch.maximum(total, share.to(total.dtype))
        else:
            total = torch.minimum(total, share.to(total.dtype))
    return total.to(dtype)


def ranks(**axes: int) -> World:
    """Ranks of one process, `ranks(dp=2, tp=2)`: a world whose `run` calls a function on each.

    They run one at a time, in an order that never changes, and a mismatch between them is an error
    on every rank that names both calls and both lines; it never hangs.

        with pt.ranks(dp=2, tp=2) as world:
            losses = world.run(train, data)      # train(mesh, data) on each of four ranks

    Args:
        axes: the size of each mesh axis, outermost first.
    """
    if not axes:
        raise LayoutError("ranks needs at least one axis", reason="write ranks(dp=2), for one")
    return World(Mesh(tuple(axes), tuple(axes.values())))
