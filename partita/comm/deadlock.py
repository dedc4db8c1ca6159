"""Ranks that wait for one another for ever: found, and told to all, through the job's store.

A rank that has waited for `SLICE` seconds leaves in the store what it waits for. Where all that it
depends on wait too, and for different things, nobody can go on: each of them raises one error. A
rank that computes leaves nothing, so nobody is called lost that is only slow; whoever waits for it
where ranks agree or read a value waits until a deadline, and whoever exchanges tensors with it for
as long as the process group does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from partita.layout import Fix, LayoutError

from .backends.control import timeouts_of_job
from .presence import late_ranks, lost_rank, named
from .source import user_line

if TYPE_CHECKING:
    from .collective_request import Ask

__all__ = [
    "BEGUN",
    "Need",
    "Pending",
    "begin_graph",
    "end_graph",
    "timeout_of_job",
    "verdict_of_others",
    "wait_longer",
    "wait_with_others",
]

SLICE = 2.0
"""Seconds that a rank waits before it tells the others."""
STUCK = 4.0
"""Seconds for which nothing may have changed before ranks are said to wait for ever."""
WARN = 20.0
"""Seconds after which a rank that waits for others to come says so."""
_LOOK = 0.5
_slice = timedelta(seconds=SLICE)
_VERDICT = "partita/waits/verdict"
_ONE_WAY = (
    Fix("the same calls on every rank, in the same order"),
    Fix("value = x.item()", "on every rank, and then `if rank == 0: print(value)`"),
)


@dataclass(frozen=True)
class Need:
    """What a rank waits for.

    Attributes:
        text: what it does, for the other ranks: "reads a value (item) at train.py:10".
        ranks: whom it needs, numbers in the job.
        group: over which it waits, of which each rank counts what it has begun.
        meets: it comes to compare or to read, where a rank that stays away is an error.
        count: for a meeting that no group serves, its name and how many there have been.
        number: of the collective among those of its group, from 1; 0 where that is not known.
    """

    text: str
    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None
    meets: bool = False
    count: tuple[str, int] = ("", 0)
    number: int = 0


class Pending:
    """A collective that is under way: its wait ends where ranks wait for ever.

    Only of a backend whose waits block the processor anyhow.
    """

    __slots__ = ("_ask", "_group", "_number", "_work")

    def __init__(self, work: Any, group: dist.ProcessGroup, ask: Ask):
        self._work, self._group, self._ask = work, group, ask
        name = group.group_name
        # Not torch's number, which counts what a user sends through the group, too.
        self._number = _NUMBERS[name] = _NUMBERS.get(name, 0) + 1
        asked = _ASKED.get(name) or _ASKED.setdefault(name, deque(maxlen=_ASKS_KEPT))
        asked.append((self._number, ask))
        _THREADS.add(threading.get_ident())

    def wait(self) -> None:
        try:
            self._work.wait(_slice)
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(self._group)
            line = user_line() or "no line"
            text = f"waits in {self._ask.describe()}, at {line}"
            need = Need(text, ranks, self._group, number=self._number)
            wait_longer(self._work, need, error)


def wait_longer(work: Any, need: Need, error: RuntimeError, deadline: float | None = None) -> None:
    """Go on waiting for `work` of such a backend, whose wait of `SLICE` seconds raised `error`.

    Raises:
        LayoutError: as `wait_with_others`.
        RankGoneError: a rank has ended.
        RuntimeError: what else the collective failed of.
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
        told = verdict_of_others() or lost_rank(failure, need.text, need.ranks)
        if told is None:
            raise
        raise told from failure


def wait_with_others(
    over: Callable[[float], bool], need: Need, deadline: float | None = None
) -> None:
    """Wait on, as one who has waited for `SLICE` seconds: tell the others, and see what they say.

    Args:
        over: waits for so many seconds and says whether what is needed has come.
        deadline: seconds that one who needs ranks to come waits for some of which nothing is known.

    Raises:
        LayoutError: the ranks wait for one another, or the deadline has passed.
        RankGoneError: so has the time limit of the process groups.
    """
    me, store = dist.get_rank(), _find_store()
    mine = _make_post(need)
    limit = timeout_of_job().total_seconds() if deadline is None else deadline
    begun, unchanged, before, warned = time.monotonic() - SLICE, time.monotonic(), None, False
    away = [r for r in need.ranks if r != me]
    store.set(_key_of_rank(me), json.dumps(mine))
    try:
        while not over(_LOOK):
            if (told := _read_verdict(store, me)) is not None:
                raise told
            posts = _collect_posts(store, me, mine)
            if posts != before:
                before, unchanged = posts, time.monotonic()
            now = time.monotonic()
            if now - unchanged >= STUCK and (fact := _describe_deadlock(posts, me)):
                raise _agree_on_error(store, fact, posts, me)
            away = [r for r in need.ranks if r != me and not _is_at(posts.get(r), mine)]
            if not need.meets:
                continue
            if now - begun > WARN and not warned:
                warned = True
                warnings.warn(
                    f"rank {me} {need.text}; {named(away)} has not come yet", stacklevel=2
                )
            if now - begun > limit:
                fact = f"rank {me} waited {now - begun:.0f} s for {named(away)}"
                raise _agree_on_error(store, fact, dict.fromkeys(away) | posts, me)
    except RuntimeError as failure:  # of the group
        late = late_ranks(failure, need.text, away, time.monotonic() - begun)
        if late is None or isinstance(failure, LayoutError):
            raise
        raise late from failure
    finally:
        with contextlib.suppress(Exception):  # whoever has ended may have taken the store along
            _withdraw_post(store, me)


def timeout_of_job() -> timedelta:
    """The timeout of the job's process groups: the longest, where those of its devices differ."""
    return max(timeouts_of_job(), default=timedelta(minutes=30))


# -- graphs, whose collectives wait where no Python of ours does -----------------------------------

_now: tuple[str, Sequence[int], float, FrameType] | None = None
_watcher: threading.Thread | None = None
_over = threading.Event()


def begin_graph(title: str, ranks: Sequence[int]) -> None:
    """From now on this thread runs a graph with collectives among `ranks`.

    One that takes longer than `SLICE` is told to the other ranks by a thread that looks once in a
    second. Whether it waits or computes they find by how many collectives each rank has begun.
    """
    global _now, _watcher
    # Its frame, since that of the graph's own code says nothing to a user.
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
    while not _over.wait(1.0):
        now = _now
        try:
            if posted is not None and now is not posted:
                _withdraw_post(_find_store(), dist.get_rank())
                posted = None
            if now is None or time.monotonic() - now[2] < SLICE:
                continue
            store, me, first = _find_store(), dist.get_rank(), now is not posted
            text = f"runs compiled {now[0]}, at {user_line(now[3]) or 'no line'}"
            post = _make_post(Need(text, now[1]))
            if first or post["begun"] != said["begun"]:
                said, posted = post, now
                store.set(_key_of_rank(me), json.dumps(post))
            if (told := _read_verdict(store, me)) is not None:
                warnings.warn(str(told), RuntimeWarning, stacklevel=1)
                return
        except Exception:  # the groups are gone, or whoever holds the store
            return


def _waits_in_graph(post: dict[str, Any], posts: dict[int, dict[str, Any] | None]) -> bool:
    """Has this rank begun a collective that one which waits elsewhere has not?"""
    others = [p for r in post["ranks"] if (p := posts.get(r)) is not None and p is not post]
    return any(
        count > other["begun"].get(group, count)
        for other in others
        if "begun" in other
        for group, count in post["begun"].items()
    )


# -- what ranks tell one another -------------------------------------------------------------------

_number = 0
BEGUN: dict[str, int] = {}
"""By its name, how many collectives of a group that torch does not list this rank has begun."""
_NUMBERS: dict[str, int] = {}
"""By a group's name, how many collectives this rank has begun that it is going to wait for."""
_ASKED: dict[str, deque[tuple[int, Ask]]] = {}
"""By a group's name, the collectives that this rank has begun last, by their numbers."""
_ASKS_KEPT = 32
_THREADS: set[int] = set()
"""Those that have begun one. What one waits for is all that a rank does where it is the main one
alone: another might be about to begin what other ranks wait for."""
_leaving = False


def _find_store() -> Any:
    global _leaving
    if not _leaving:
        _leaving = True
        atexit.register(_announce_exit)
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def _announce_exit() -> None:
    """Say that this rank has ended."""
    _over.set()
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            me = dist.get_rank()
            post = {"text": "has ended", "ended": True, "id": -1, "ranks": []}
            _find_store().set(_key_of_rank(me), json.dumps(post))


def _make_post(need: Need) -> dict[str, Any]:
    global _number
    _number += 1
    return {
        "text": need.text,
        "id": _number,
        "ranks": list(need.ranks),
        # Of a graph no group: it may be waiting for any.
        "group": need.count[0] if need.group is None else need.group.group_name,
        "meets": need.meets,
        "number": need.number if {threading.main_thread().ident} == _THREADS else 0,
        "numbers": _NUMBERS,
        "asked": {
            name: {str(n): str(ask.move or ask.kind) for n, ask in asks}
            for name, asks in _ASKED.items()
        },
        # Private torch: how many collectives of its groups a rank has begun, by the group's name.
        "begun": BEGUN
        | dict([need.count])
        | {
            g.group_name: n
            for g in _list_process_groups()
            if (n := _count_begun_collectives(g)) is not None
        },
    }


def _withdraw_post(store: Any, rank: int) -> None:
    """Say that this rank waits no more.

    What it has told is replaced and never deleted: whoever has just seen that it is there reads it,
    and reading what is gone waits for as long as the store does.
    """
    store.set(_key_of_rank(rank), json.dumps(None))


def _list_process_groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)


def _count_begun_collectives(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def _collect_posts(store: Any, me: int, mine: dict[str, Any]) -> dict[int, dict[str, Any] | None]:
    """What all those wait for on whom this rank depends, directly or not; of one that does not wait
    None."""
    found: dict[int, dict[str, Any] | None] = {me: mine}
    ahead = list(mine["ranks"])
    while ahead:
        rank = ahead.pop()
        if rank in found:
            continue
        key = _key_of_rank(rank)
        post = json.loads(store.get(key)) if store.check([key]) else None
        found[rank] = post
        ahead += post["ranks"] if post else []
    return found


def _is_at(post: dict[str, Any] | None, mine: dict[str, Any]) -> bool:
    """Has the rank of `post` begun what `mine` waits for?"""
    if post is None or "begun" not in post:
        return False
    group = mine["group"]
    if mine["number"]:
        return bool(post["numbers"].get(group, 0) >= mine["number"])
    return bool(post["begun"].get(group, -1) >= mine["begun"].get(group, 0))


def _describe_deadlock(posts: dict[int, dict[str, Any] | None], me: int) -> str:
    """The fact, where all wait and each for one that has not begun the same; "" otherwise."""
    if any(post is None for post in posts.values()):
        return ""
    waiting = {r: p for r, p in posts.items() if p is not None and "begun" in p}
    if any(_asks_otherwise(p, other) for p in waiting.values() for other in waiting.values()):
        return "ranks ask for different things"
    known = all(p["number"] for p in waiting.values())
    if not known and not any(p["meets"] for p in waiting.values()):
        return ""  # nobody is where ranks agree or read: the process groups' own limits hold
    for post in waiting.values():
        if not post["group"]:
            if not _waits_in_graph(post, posts):
                return ""  # it computes
        elif all(_is_at(posts[r], post) for r in post["ranks"] if r in posts):
            return ""  # it has all that it needs, which is on its way
    ended = [r for r, p in posts.items() if p is not None and p.get("ended")]
    if ended:
        return f"rank {me if me not in ended else '?'} waits for {named(ended)}, which has ended"
    return "ranks wait for one another"


def _asks_otherwise(post: dict[str, Any], other: dict[str, Any]) -> bool:
    """Was another collective begun there, in place of the one that is waited for here?"""
    number = str(post["number"] or None)
    ours, theirs = (p["asked"].get(post["group"], {}).get(number) for p in (post, other))
    return ours is not None and theirs is not None and ours != theirs


def _agree_on_error(
    store: Any, fact: str, posts: dict[int, dict[str, Any] | None], me: int
) -> LayoutError:
    """The error that all of these ranks raise, of whichever of them finds it first."""
    lines = [
        f"rank {r:<5} {'computes, or has ended' if p is None else p['text']}"
        for r, p in sorted(posts.items())
    ]
    mine = json.dumps(
        {"fact": fact, "lines": _group_equal_lines(lines, posts), "ranks": sorted(posts)}
    )
    said = store.compare_set(_VERDICT, "", mine)
    others = [r for r, p in posts.items() if r != me and p is not None and "begun" in p]
    store.set(f"{_VERDICT}/{me}", "heard")
    until = time.monotonic() + 4 * _LOOK + 1
    # Whoever holds the store must not end before the others have read what it says.
    while time.monotonic() < until and not all(store.check([f"{_VERDICT}/{r}"]) for r in others):
        time.sleep(0.05)
    return _make_deadlock_error(json.loads(said))


def _group_equal_lines(lines: list[str], posts: dict[int, Any]) -> list[str]:
    """One line for each thing that ranks wait for, of the first that does."""
    seen: dict[str, str] = {}
    for line, (_, post) in zip(lines, sorted(posts.items()), strict=True):
        seen.setdefault("" if post is None else post["text"], line)
    return list(seen.values())[:8]


def _read_verdict(store: Any, me: int) -> LayoutError | None:
    if not store.check([_VERDICT]):
        return None
    said = json.loads(store.get(_VERDICT))
    if me not in said["ranks"]:
        return None
    store.set(f"{_VERDICT}/{me}", "heard")
    return _make_deadlock_error(said)


def _make_deadlock_error(said: dict[str, Any]) -> LayoutError:
    return LayoutError(
        said["fact"],
        place=user_line(),
        operands=tuple(said["lines"]),
        reason="every rank of a mesh must make the same moves, and read the same values, in the "
        "same order",
        fixes=_ONE_WAY,
    )


def verdict_of_others() -> LayoutError | None:
    """What other ranks have found, where a collective of this rank failed."""
    with contextlib.suppress(Exception):
        store, me = _find_store(), dist.get_rank()
        for _ in range(3):
            if (told := _read_verdict(store, me)) is not None:
                return told
            time.sleep(0.1)
    return None


def _key_of_rank(rank: int) -> str:
    return f"partita/waits/{rank}"
