"""Deadlocks: ranks that wait for one another for ever, found through the job's store.

A rank that waits writes a post to the store: what it waits for, and which collectives it has begun.
Where all ranks that it depends on wait too, and for different things, none can go on: the first
rank that finds this writes a verdict, which each of them raises as an error. A rank that computes
writes no post, so a rank that is only slow is never taken for lost.

    {"text": "waits in all_reduce over dp ...", "ranks": [0, 1], "group": "2", "number": 7, ...}

Which ranks wait, and when they look, is in `waiting`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from partita.layout import Fix, LayoutError

from .presence import format_ranks
from .source import user_line

if TYPE_CHECKING:
    from .collective_request import Request

__all__ = [
    "BEGUN",
    "LEAVING",
    "LOOK",
    "Need",
    "Post",
    "agree_on_error",
    "collect_posts",
    "describe_deadlock",
    "find_store",
    "has_begun",
    "make_post",
    "note_begun",
    "put_post",
    "read_verdict",
    "verdict_of_others",
    "withdraw_post",
]

LOOK = 0.5
"""Seconds between two looks of a rank at the others' posts."""
LEAVING = threading.Event()
"""Is this process about to end?"""
Post = dict[str, Any]
"""What a waiting rank writes to the store, made by `make_post`."""
_VERDICT = "partita/waits/verdict"
_ONE_WAY = (
    Fix("the same calls on every rank, in the same order"),
    Fix("value = x.item()", "on every rank, and then `if rank == 0: print(value)`"),
)


@dataclass(frozen=True)
class Need:
    """What a rank waits for.

    Attributes:
        text: what it does, for errors: "reads a value (item) at train.py:10". ranks: the ranks that
            it needs, by their numbers in the job. group: the process group that it waits in; ranks
            count the collectives that they began in it. meets: it compares or reads a value, where
            a rank that stays away is an error. count: without a group: the name of the meeting, and
            how many there have been. number: of the collective among those of its group, from 1; 0
            where that is not known.
    """

    text: str
    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None
    meets: bool = False
    count: tuple[str, int] = ("", 0)
    number: int = 0


# -- posts -------------------------------------------------------------------

_post_numbers = itertools.count(1)
BEGUN: dict[str, int] = {}
"""How many collectives this rank has begun, by the name of a group that torch does not list."""
_NUMBERS: dict[str, int] = {}
"""How many collectives this rank has begun and will wait for, by the group's name."""
_ASKED: dict[str, deque[tuple[int, Request]]] = {}
"""The last collectives that this rank has begun, as (number, request), by the group's name."""
_ASKS_KEPT = 32
_THREADS: set[int] = set()
"""The threads that have begun collectives. A post may give its number only where that is the main
thread alone: another thread might be about to begin what other ranks wait for."""
_announces_exit = False
_telling = threading.Lock()
_told: dict[int, Post] = {}
"""The posts of this rank's waiting threads, by id; the last of them stands in the store."""


def note_begun(group: str, request: Request) -> int:
    """Note that this rank has begun a collective in the group of this name; its number, from 1.

    Not torch's sequence number, which counts the user's own collectives, too.
    """
    number = _NUMBERS[group] = _NUMBERS.get(group, 0) + 1
    asked = _ASKED.get(group) or _ASKED.setdefault(group, deque(maxlen=_ASKS_KEPT))
    asked.append((number, request))
    _THREADS.add(threading.get_ident())
    return number


def find_store() -> Any:
    """The job's store. From the first call on, this rank writes a post there when it ends."""
    global _announces_exit
    if not _announces_exit:
        _announces_exit = True
        atexit.register(_announce_exit)
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def _announce_exit() -> None:
    """Write the post that this rank has ended, which is its last."""
    LEAVING.set()
    is_last = _telling.acquire(timeout=LOOK)  # another thread may be writing a post
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            me = dist.get_rank()
            post = {"text": "has ended", "ended": True, "id": -1, "ranks": []}
            find_store().set(_key_of_rank(me), json.dumps(post))
    if is_last:
        _telling.release()


def make_post(need: Need) -> Post:
    """The post of a rank that waits for `need`."""
    return {
        "text": need.text,
        "id": next(_post_numbers),
        "ranks": list(need.ranks),
        # "" for a graph, which may be waiting in any group.
        "group": need.count[0] if need.group is None else need.group.group_name,
        "meets": need.meets,
        "number": need.number if {threading.main_thread().ident} == _THREADS else 0,
        "numbers": _NUMBERS,
        "asked": {
            name: {str(n): str(request.move or request.kind) for n, request in asks}
            for name, asks in _ASKED.items()
        },
        # Private torch: the sequence number of each group, by its name.
        "begun": BEGUN
        | dict([need.count])
        | {
            g.group_name: n
            for g in _list_process_groups()
            if (n := _count_begun_collectives(g)) is not None
        },
    }


def put_post(store: Any, rank: int, post: Post) -> None:
    """Write the post of a thread that begins to wait."""
    with _telling:
        _told[post["id"]] = post
        _replace_post(store, rank, post)


def withdraw_post(store: Any, rank: int, post: Post) -> None:
    """Withdraw the post of a thread that goes on; the post of another waiting thread takes its
    place.

    The key is overwritten, never deleted: a rank that has just seen it would read it, and a read of
    a missing key blocks for the timeout of the store.
    """
    with _telling:
        _told.pop(post["id"], None)
        _replace_post(store, rank, next(reversed(_told.values()), None))


def _replace_post(store: Any, rank: int, post: Post | None) -> None:
    if not LEAVING.is_set():  # that it has ended is a rank's last post
        store.set(_key_of_rank(rank), json.dumps(post))


def _list_process_groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)


def _count_begun_collectives(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def collect_posts(store: Any, me: int, mine: Post) -> dict[int, Post | None]:
    """The posts of all ranks that this rank depends on, directly or not; None of one without."""
    found: dict[int, Post | None] = {me: mine}
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


def has_begun(post: Post | None, mine: Post) -> bool:
    """Has the rank of `post` begun what `mine` waits for?"""
    if post is None or "begun" not in post:
        return False
    group = mine["group"]
    if mine["number"]:
        return bool(post["numbers"].get(group, 0) >= mine["number"])
    return bool(post["begun"].get(group, -1) >= mine["begun"].get(group, 0))


def describe_deadlock(posts: dict[int, Post | None], me: int) -> str:
    """The headline of the deadlock, where each rank waits for one that has not begun the same
    collective; "" where there is none."""
    if any(post is None for post in posts.values()):
        return ""
    waiting = {r: p for r, p in posts.items() if p is not None and "begun" in p}
    if any(_asks_otherwise(p, other) for p in waiting.values() for other in waiting.values()):
        return "ranks ask for different things"
    known = all(p["number"] for p in waiting.values())
    if not known and not any(p["meets"] for p in waiting.values()):
        return ""  # all exchange tensors: the timeouts of the process groups apply
    for post in waiting.values():
        if not post["group"]:
            if not _waits_in_graph(post, posts):
                return ""  # it computes
        elif all(has_begun(posts[r], post) for r in post["ranks"] if r in posts):
            return ""  # all ranks have begun what it waits for
    ended = [r for r, p in posts.items() if p is not None and p.get("ended")]
    if ended:
        who = me if me not in ended else "?"
        return f"rank {who} waits for {format_ranks(ended)}, which has ended"
    return "ranks wait for one another"


def _asks_otherwise(post: Post, other: Post) -> bool:
    """Has the rank of `other` begun another collective in place of the one that `post` waits
    for?"""
    number = str(post["number"] or None)
    ours, theirs = (p["asked"].get(post["group"], {}).get(number) for p in (post, other))
    return ours is not None and theirs is not None and ours != theirs


def agree_on_error(store: Any, fact: str, posts: dict[int, Post | None], me: int) -> LayoutError:
    """Write the verdict, unless another rank has; the error of the verdict that stands."""
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
    until = time.monotonic() + 4 * LOOK + 1
    # The rank that holds the store must not end before the others have read the verdict.
    while time.monotonic() < until and not all(store.check([f"{_VERDICT}/{r}"]) for r in others):
        time.sleep(0.05)
    return _make_deadlock_error(json.loads(said))


def _group_equal_lines(lines: list[str], posts: dict[int, Any]) -> list[str]:
    """The lines without those whose post has the same text as an earlier one; at most eight."""
    seen: dict[str, str] = {}
    for line, (_, post) in zip(lines, sorted(posts.items()), strict=True):
        seen.setdefault("" if post is None else post["text"], line)
    return list(seen.values())[:8]


def read_verdict(store: Any, me: int) -> LayoutError | None:
    """The error of a verdict of another rank that names this one; None without one."""
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


def _waits_in_graph(post: Post, posts: dict[int, Post | None]) -> bool:
    """Has the rank of `post`, which runs a graph, begun a collective that another waiting rank has
    not?"""
    others = [p for r in post["ranks"] if (p := posts.get(r)) is not None and p is not post]
    return any(
        count > other["begun"].get(group, count)
        for other in others
        if "begun" in other
        for group, count in post["begun"].items()
    )


def verdict_of_others() -> LayoutError | None:
    """The verdict of other ranks, after a collective of this rank has failed; None without one."""
    with contextlib.suppress(Exception):
        store, me = find_store(), dist.get_rank()
        for _ in range(3):
            if (told := read_verdict(store, me)) is not None:
                return told
            time.sleep(0.1)
    return None


def _key_of_rank(rank: int) -> str:
    return f"partita/waits/{rank}"
