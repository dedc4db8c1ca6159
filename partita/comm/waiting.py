"""Waits that end: a rank that waits for others writes what it waits for, and raises in a deadlock.

After `SLICE` seconds the rank writes a post to the job's store and looks from then on whether all
ranks wait for one another (`deadlock`); if so, each raises one error. A wait for a rank that
computes lasts until a deadline where ranks compare or read a value; where they exchange tensors, it
lasts as long as the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from partita.layout import LayoutError

from .backends.control import timeouts_of_job
from .deadlock import (
    LEAVING,
    LOOK,
    Need,
    agree_on_error,
    collect_posts,
    describe_deadlock,
    find_store,
    has_begun,
    make_post,
    note_begun,
    put_post,
    read_verdict,
    verdict_of_others,
    withdraw_post,
)
from .presence import format_ranks, make_late_ranks_error, make_lost_rank_error
from .source import user_line

if TYPE_CHECKING:
    from .collective_request import Request

__all__ = [
    "SLICE",
    "STUCK",
    "WatchedWork",
    "begin_graph",
    "end_graph",
    "timeout_of_job",
    "wait_longer",
    "wait_with_others",
]

SLICE = 2.0
"""Seconds that a rank waits before it writes a post."""
STUCK = 4.0
"""Seconds without a change of posts after which waiting ranks count as deadlocked."""
WARN = 20.0
"""Seconds after which a rank that waits for others warns."""
_slice = timedelta(seconds=SLICE)


class WatchedWork:
    """A collective under way, whose wait raises in a deadlock.

    Only for backends whose waits block the processor anyhow.
    """

    __slots__ = ("_group", "_number", "_request", "_work")

    def __init__(self, work: Any, group: dist.ProcessGroup, request: Request):
        self._work, self._group, self._request = work, group, request
        self._number = note_begun(group.group_name, request)

    def wait(self) -> None:
        try:
            self._work.wait(_slice)
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(self._group)
            line = user_line() or "no line"
            text = f"waits in {self._request.describe()}, at {line}"
            need = Need(text, ranks, self._group, number=self._number)
            wait_longer(self._work, need, error)


def wait_longer(work: Any, need: Need, error: RuntimeError, deadline: float | None = None) -> None:
    """Go on waiting for `work`, whose wait of `SLICE` seconds raised `error`.

    Raises:
        LayoutError: as `wait_with_others`.
        RankGoneError: a rank has ended.
        RuntimeError: the collective failed for another reason.
    """

    def is_work_done(seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises if it has failed: it may have ended just after its time was up
        return True

    try:
        if work.is_completed():  # it has failed, or has ended just now
            work.wait()
        else:
            wait_with_others(is_work_done, need, deadline)
    except LayoutError:
        raise
    except RuntimeError as failure:
        told = verdict_of_others() or make_lost_rank_error(failure, need.text, need.ranks)
        if told is None:
            raise
        raise told from failure


def wait_with_others(
    over: Callable[[float], bool], need: Need, deadline: float | None = None
) -> None:
    """Go on waiting after `SLICE` seconds: write a post, and look at those of the others.

    Args:
        over: waits for so many seconds, and returns whether the wait is over.
        deadline: seconds to wait, where `need.meets`, for ranks of which nothing is known.

    Raises:
        LayoutError: the ranks wait for one another, or the deadline has passed.
        RankGoneError: the time limit of the process groups has passed.
    """
    me, store = dist.get_rank(), find_store()
    mine = make_post(need)
    limit = timeout_of_job().total_seconds() if deadline is None else deadline
    begun, unchanged, before, warned = time.monotonic() - SLICE, time.monotonic(), None, False
    away = [r for r in need.ranks if r != me]
    put_post(store, me, mine)
    try:
        while not over(LOOK):
            if (told := read_verdict(store, me)) is not None:
                raise told
            posts = collect_posts(store, me, mine)
            if posts != before:
                before, unchanged = posts, time.monotonic()
            now = time.monotonic()
            if now - unchanged >= STUCK and (fact := describe_deadlock(posts, me)):
                raise agree_on_error(store, fact, posts, me)
            away = [r for r in need.ranks if r != me and not has_begun(posts.get(r), mine)]
            if not need.meets:
                continue
            if now - begun > WARN and not warned:
                warned = True
                warnings.warn(
                    f"rank {me} {need.text}; {format_ranks(away)} has not come yet", stacklevel=2
                )
            if now - begun > limit:
                fact = f"rank {me} waited {now - begun:.0f} s for {format_ranks(away)}"
                raise agree_on_error(store, fact, dict.fromkeys(away) | posts, me)
    except RuntimeError as failure:  # of the group
        late = make_late_ranks_error(failure, need.text, away, time.monotonic() - begun)
        if late is None or isinstance(failure, LayoutError):
            raise
        raise late from failure
    finally:
        with contextlib.suppress(Exception):  # the store ends with the rank that holds it
            withdraw_post(store, me, mine)


def timeout_of_job() -> timedelta:
    """The timeout of the job's process groups: the longest, where those of its devices differ."""
    return max(timeouts_of_job(), default=timedelta(minutes=30))


# -- graphs, whose collectives are not waited for by Python -----------------------------------

_now: tuple[str, Sequence[int], float, FrameType] | None = None
_watcher: threading.Thread | None = None


def begin_graph(title: str, ranks: Sequence[int]) -> None:
    """Note that this thread runs a graph with collectives among `ranks` from now on.

    If it takes longer than `SLICE`, a thread that looks once in a second writes a post. Whether the
    graph waits or computes, other ranks find by how many collectives each rank has begun.
    """
    global _now, _watcher
    # The caller's frame: the graph's own code means nothing to a user.
    _now = title, ranks, time.monotonic(), sys._getframe(1)
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch_for_deadlock, name="partita watch", daemon=True)
        _watcher.start()


def end_graph() -> None:
    """The graph has run, or failed."""
    global _now
    _now = None


def _watch_for_deadlock() -> None:
    posted: Any = None
    said: dict[str, Any] = {}
    while not LEAVING.wait(1.0):
        now = _now
        try:
            if posted is not None and now is not posted:
                withdraw_post(find_store(), dist.get_rank(), said)
                posted = None
            if now is None or time.monotonic() - now[2] < SLICE:
                continue
            store, me, first = find_store(), dist.get_rank(), now is not posted
            text = f"runs compiled {now[0]}, at {user_line(now[3]) or 'no line'}"
            post = make_post(Need(text, now[1]))
            if not first:
                post["id"] = said["id"]  # it is the same wait
            if first or post["begun"] != said["begun"]:
                said, posted = post, now
                put_post(store, me, post)
            if (told := read_verdict(store, me)) is not None:
                warnings.warn(str(told), RuntimeWarning, stacklevel=1)
                return
        except Exception:  # the groups are gone, or the rank that holds the store
            return
