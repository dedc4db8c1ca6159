"""How do all ranks of the job agree on something that is no tensor of the program?

Rank 0 sees what every rank brings and answers each; an error of any of them is raised by all. The
ranks are those of the process groups, of `pt.ranks`, or this process alone.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist

from ..layout import LayoutError
from .ranks import RankWire, running_wire

__all__ = ["Aside", "Decide", "Everyone", "everyone"]

Answer = Callable[[list[Any]], Sequence[Any]]
Decide = Callable[[Any, Answer], Any]
PATIENCE = 1800.0  # seconds that a rank's thread waits for those of other ranks of one process


class Aside(Future[Any]):
    """The outcome of work that goes on beside the program: `result()`, `done()`, `exception()`.

    An error that nobody asks for is warned of when the object is dropped.
    """

    _asked = False

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the work, at most `timeout` seconds; return its result or raise its error."""
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the work, at most `timeout` seconds, and return its error or None."""
        self._asked = True
        return super().exception(timeout)

    def __del__(self) -> None:
        if self.done() and not self._asked and (error := super().exception()) is not None:
            warnings.warn(f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


class Everyone:
    """All ranks of the job, as one of them sees it.

    Attributes:
        rank: this rank's number.
        size: how many ranks there are.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._aside: Aside | None = None
        self._worker: tuple[int, ThreadPoolExecutor] | None = None  # of which process, and it

    def decide(self, mine: Any, answer: Answer) -> Any:
        """Rank 0's answer to what all ranks bring. Every rank calls this.

        Args:
            mine: what this rank brings, or an exception where it has failed.
            answer: called on rank 0 with every rank's `mine`, in rank order; returns what each
                rank gets, in rank order.

        Raises:
            Exception: what `answer` raised, or what the first failed rank brought; on every rank.
        """
        self.wait()
        return _opened(self._decide(mine, answer))

    def aside(self, run: Callable[[Decide], Any]) -> Aside:
        """Start `run(decide)` in another thread of every rank, after the last one has ended.

        Every rank calls this. Within `run`, only the given `decide` reaches the other ranks.
        The thread is the same each time: to start a new one is to wait until it has run.
        """
        self.wait()
        decide = self._decide_aside()
        self._aside = outcome = Aside()
        if self._worker is None or self._worker[0] != os.getpid():
            name = f"partita, beside rank {self.rank}"
            self._worker = os.getpid(), ThreadPoolExecutor(1, name)
        self._worker[1].submit(
            _work, run, lambda mine, answer: _opened(decide(mine, answer)), [outcome]
        )
        self._all_have_started()
        return outcome

    def wait(self) -> None:
        """Until what was started aside has ended on this rank."""
        if self._aside is not None:
            wait([self._aside])
            self._aside = None

    # -- what differs ----------------------------------------------------------------------------

    def _decide(self, mine: Any, answer: Answer) -> Any:
        return _outcomes([mine], answer)[0]

    def _decide_aside(self) -> Decide:
        return self._decide

    def _all_have_started(self) -> None:
        """A rank may now block until its thread ends, though ranks take turns."""


def _work(run: Callable[[Decide], Any], decide: Decide, outcomes: list[Aside]) -> None:
    # An error's traceback has this frame and its callers', none of which must have the error.
    outcome: Aside | None = outcomes.pop()
    assert outcome is not None
    try:
        with torch.no_grad():
            result = run(decide)
    except BaseException as error:
        outcome.set_exception(error)
        outcome = None
    else:
        outcome.set_result(result)


class _OfGroups(Everyone):
    """The ranks of the default process group, over a Gloo group of their own.

    Of its own, so that a thread may use it while the program's collectives run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Groups are torch's to keep: one that lived on would hold its threads until the very end.
        self._world = weakref.ref(dist.group.WORLD)
        self._group = weakref.ref(dist.new_group(backend="gloo", group_desc="partita everyone"))

    @property
    def stands(self) -> bool:
        """Are the process groups still those for which this was made?"""
        return self._world() is dist.group.WORLD

    def _decide(self, mine: Any, answer: Answer) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError("the process groups were destroyed before all ranks had agreed")
        brought: list[Any] | None = [None] * self.size if self.rank == 0 else None
        answers, got = None, [None]
        try:
            dist.gather_object(_portable(mine), brought, dst=0, group=group)
            if brought is not None:
                answers = [_portable(a) for a in _outcomes(brought, answer)]
            dist.scatter_object_list(got, answers, src=0, group=group)
        except RuntimeError as error:  # of Gloo: `answer`'s own are outcomes
            raise RuntimeError("another rank has ended, or cannot be reached") from error
        return got[0]


class _OfOneProcess(Everyone):
    """The ranks of a running `pt.ranks` world."""

    def __init__(self, wire: RankWire):
        super().__init__()
        self._wire, self.rank, self.size = wire, wire.rank, wire.mesh.size()

    def _decide(self, mine: Any, answer: Answer) -> Any:
        return self._wire.together(mine, lambda brought: _outcomes(brought, answer))

    def _decide_aside(self) -> Decide:
        board: _Board = self.decide(None, lambda brought: [_Board(self.size)] * self.size)
        return lambda mine, answer: board.decide(self.rank, mine, answer)

    def _all_have_started(self) -> None:
        self._decide(None, lambda brought: brought)


class _Board:
    """Where threads that stand beside the ranks of one process meet."""

    def __init__(self, size: int):
        self._brought: list[Any] = [None] * size
        self._outcomes: Sequence[Any] = ()
        self._answer: Answer | None = None
        self._meeting = threading.Barrier(size, self._perform, PATIENCE)

    def decide(self, rank: int, mine: Any, answer: Answer) -> Any:
        self._brought[rank] = mine
        if rank == 0:
            self._answer = answer
        self._meeting.wait()
        return self._outcomes[rank]

    def _perform(self) -> None:
        assert self._answer is not None
        self._outcomes = _outcomes(self._brought, self._answer)


# -- outcomes --------------------------------------------------------------------------------------


class _Failed:
    """An error on its way to all ranks."""

    def __init__(self, error: BaseException):
        self.error = error


def _outcomes(brought: list[Any], answer: Answer) -> Sequence[Any]:
    for rank, one in enumerate(brought):
        if isinstance(one, BaseException):
            if len(brought) > 1:
                one.add_note(f"on rank {rank} of {len(brought)}")
            return [_Failed(one)] * len(brought)
    try:
        return answer(brought)
    except Exception as error:
        return [_Failed(error)] * len(brought)


def _opened(outcome: Any) -> Any:
    if isinstance(outcome, _Failed):
        error, line = outcome.error, outcome.error.__traceback__
        with contextlib.suppress(Exception):  # some errors cannot be copied
            error = copy.copy(error)  # each rank adds its own lines to the traceback
        raise error.with_traceback(line) from None
    return outcome


def _portable(thing: Any) -> Any:
    """The same, or what says as much where an error does not pickle."""
    error = thing.error if isinstance(thing, _Failed) else thing
    if isinstance(error, BaseException):
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _Failed(error) if isinstance(thing, _Failed) else error
    return thing


# -- who is everyone here --------------------------------------------------------------------------

_alone = Everyone()
_of_groups: _OfGroups | None = None


def everyone() -> Everyone:
    """All ranks of the job that this code runs in. The first time, every rank must call it."""
    global _of_groups
    wire = running_wire()
    if wire is not None:
        found: Everyone = wire.__dict__.setdefault("everyone", None) or _OfOneProcess(wire)
        wire.__dict__["everyone"] = found
        return found
    if not (dist.is_available() and dist.is_initialized()):
        return _alone
    if dist.get_backend() == "fake":
        raise LayoutError("the ranks of the fake backend cannot agree: there is only this one")
    if _of_groups is None or not _of_groups.stands:
        _of_groups = _OfGroups()
    return _of_groups
