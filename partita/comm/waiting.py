"""Detection of deadlocks: a rank that would wait forever raises an error that says why.

The other ranks may have ended, be late, or wait for something else. A rank that has waited for
`SLICE` seconds writes a *post* to the job's store: what it waits for, and which collectives it has
begun. If all ranks that it depends on have posts and wait for different things, the first rank that
sees this writes a *verdict*, an error that every rank then raises.

A rank that computes writes no post. Other ranks wait for it until a deadline if they compare or
read a value, otherwise until the process group's timeout. Ranks on the same machine detect by its
process that a rank has ended (`RankGoneError`).

    {"text": "waits in all_reduce over dp ...", "ranks": [0, 1], "group": "2", "number": 7, ...}
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from partita.layout import Fix, LayoutError

from .backends import LOST, TIMED_OUT, timeouts_of_job
from .ledger import user_line

if TYPE_CHECKING:
    from .collective import Request

SLICE = 2.0
"""Seconds that a rank waits before it writes a post."""
STUCK = 4.0
"""Seconds without a change of posts after which waiting ranks count as deadlocked."""
PATIENCE = 20.0
"""A rank that has waited for other ranks for so many seconds warns."""
_LOOK = 0.5
"""Seconds between two looks of a rank at the others' posts."""
LEAVING = threading.Event()
"""Set if this process is about to end."""
TIME_SLICE = timedelta(seconds=SLICE)


@dataclass(frozen=True)
class Need:
    """The event that a rank waits for, and the other ranks that must take part.

    Attributes:
        text: what the rank does, for errors: "reads a value (item) at train.py:10".
        ranks: the global ranks that must take part.
        group: the process group in which it waits. Ranks count the collectives that they have begun
            in it.
        meets: True if the rank compares or reads a value. Every other rank must do the same, or an
            error is raised.
        warns: True warns if ranks are late for a long time, with their names.
        count: if there is no process group: the name of the barrier, and how often this rank has
            reached it.
        number: the collective's number in its group, from 1; 0 if unknown.
    """

    text: str
    ranks: Sequence[int]
    group: dist.ProcessGroup | None = None
    meets: bool = False
    warns: bool = True
    count: tuple[str, int] = ("", 0)
    number: int = 0


class WatchedWork:
    """A running collective whose `wait` raises an error if it detects a deadlock of the ranks.

    It is used for backends whose waits block the Python thread anyway.

    Args:
        work: torch's object for the running collective.
        group: its process group.
        request: which collective it is.
    """

    __slots__ = ("_group", "_number", "_request", "_work")

    def __init__(self, work: Any, group: dist.ProcessGroup, request: Request):
        self._work, self._group, self._request = work, group, request
        self._number = _note_begun(group, request)

    def wait(self) -> None:
        try:
            self._work.wait(TIME_SLICE)
        except RuntimeError:
            ranks = dist.get_process_group_ranks(self._group)
            line = user_line() or "no line"
            text = f"waits in {self._request.describe()}, at {line}"
            need = Need(text, ranks, self._group, number=self._number)
            wait_longer(self._work, need)


def wait_longer(work: Any, need: Need, deadline: float | None = None) -> None:
    """Continues to wait for a collective that takes over `SLICE` seconds, and looks for a deadlock.

    Args:
        work: torch's object for the running collective.
        need: what this rank waits for, and which ranks must take part.
        deadline: if `need.meets`, the seconds to wait for ranks that do not wait themselves.

    Raises:
        LayoutError: the ranks wait for one another, or the deadline has passed.
        RankGoneError: a rank has ended.
        RuntimeError: the collective failed for another reason.
    """

    def is_work_done(seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # returns if the work has completed meanwhile; raises if it has failed
        return True

    try:
        if work.is_completed():  # it has failed, or has just completed
            work.wait()
        else:
            wait_with_others(is_work_done, need, deadline)
    except LayoutError:
        raise
    except RuntimeError as failure:
        error = verdict_of_others() or make_lost_rank_error(failure, need.text, need.ranks)
        if error is None:
            raise
        raise error from failure


def wait_with_others(
    over: Callable[[float], bool], need: Need, deadline: float | None = None
) -> None:
    """Continues to wait after `SLICE` seconds, and raises an error if the ranks are in a deadlock.

    This rank writes what it waits for into the job's store (a post), and reads other ranks' posts.

    Args:
        over: a function that waits for a number of seconds, and returns True if the wait is over.
        need: what this rank waits for, and which ranks must take part.
        deadline: if `need.meets`, the seconds to wait for ranks that have no post.

    Raises:
        LayoutError: the ranks wait for one another, or the deadline has passed.
        RankGoneError: the time limit of the process groups has passed.
    """
    me, store = dist.get_rank(), _find_store()
    mine = make_post(need)
    limit = timeout_of_job().total_seconds() if deadline is None else deadline
    begun, unchanged, before, warned = time.monotonic() - SLICE, time.monotonic(), None, False
    away = [r for r in need.ranks if r != me]
    put_post(store, me, mine)
    try:
        while not over(_LOOK):
            if (verdict := _read_verdict(store, me)) is not None:
                raise verdict
            posts = collect_posts(store, me, mine)
            if posts != before:
                before, unchanged = posts, time.monotonic()
            now = time.monotonic()
            if now - unchanged >= STUCK and (fact := _describe_deadlock(posts, me)):
                raise _agree_on_error(store, fact, posts, me)
            away = [r for r in need.ranks if r != me and not _has_begun(posts.get(r), mine)]
            if not need.meets:
                continue
            if need.warns and now - begun > PATIENCE and not warned:
                warned = True
                warnings.warn(
                    f"rank {me} {need.text}; {format_ranks(away)} has not arrived yet", stacklevel=2
                )
            if now - begun > limit:
                fact = f"rank {me} waited {now - begun:.0f} s for {format_ranks(away)}"
                raise _agree_on_error(store, fact, dict.fromkeys(away) | posts, me)
    except RuntimeError as failure:  # of the group
        late = _make_late_ranks_error(failure, need.text, away, time.monotonic() - begun)
        if late is None or isinstance(failure, LayoutError):
            raise
        raise late from failure
    finally:
        with contextlib.suppress(Exception):  # the store ends with the rank that holds it
            withdraw_post(store, me, mine)


def timeout_of_job() -> timedelta:
    """Returns the timeout of the job's process groups; the longest if they differ."""
    return max(timeouts_of_job(), default=timedelta(minutes=30))


# -- waits outside Python: of graphs, and of torch's own collectives -------------------------------

_now: tuple[str, Sequence[int], tuple[str, int], float, FrameType] | None = None
_watcher: threading.Thread | None = None
_NO_COUNT = ("", 0)


def begin_graph(title: str, ranks: Sequence[int]) -> None:
    """Records that this thread runs a compiled graph with collectives among `ranks`.

    If it takes longer than `SLICE` seconds, a watcher thread writes a post (a message to other
    ranks). The post has the number of collectives so far, which shows if the graph waits or
    computes.

    Args:
        title: the name of the graph, for errors.
        ranks: global ranks.
    """
    # The caller's frame, because the code of the graph means nothing to a user.
    _begin_watch(f"runs compiled {title}", ranks, _NO_COUNT, sys._getframe(1))


def end_graph() -> None:
    """Record that the graph that `begin_graph` announced has ended or failed."""
    global _now
    _now = None


@contextlib.contextmanager
def watched_collective(name: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Detects a deadlock while a collective of torch runs inside the `with` block.

    If it takes long, this rank writes into the job's store what it waits for (a post).

    Args:
        name: the name of the collective.
        group: its process group; None: all ranks of the job.

    Raises:
        LayoutError: the collective failed because other ranks did something else, or one has ended.
    """
    global _now
    group = group or dist.group.WORLD
    is_main = threading.current_thread() is threading.main_thread()
    if group is None or not is_main or _now is not None:  # one collective may call another
        yield
        return
    ranks = dist.get_process_group_ranks(group)
    key = f"torch.distributed/{group.group_name}"
    BEGUN[key] = number = BEGUN.get(key, 0) + 1
    text = f"waits in torch.distributed.{name}"
    try:
        _begin_watch(text, ranks, (key, number), sys._getframe(2))
        yield
    except RuntimeError as failure:
        error = verdict_of_others() or make_lost_rank_error(failure, text, ranks)
        if error is None:
            raise
        raise error from failure
    finally:
        _now = None


def _begin_watch(text: str, ranks: Sequence[int], count: tuple[str, int], frame: FrameType) -> None:
    global _now, _watcher
    _now = text, ranks, count, time.monotonic(), frame
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch_for_deadlock, name="partita watch", daemon=True)
        _watcher.start()


def _watch_for_deadlock() -> None:
    posted: Any = None
    said: dict[str, Any] = {}
    while not LEAVING.wait(1.0):
        now = _now
        try:
            if posted is not None and now is not posted:
                withdraw_post(_find_store(), dist.get_rank(), said)
                posted = None
            if now is None or time.monotonic() - now[3] < SLICE:
                continue
            store, me, first = _find_store(), dist.get_rank(), now is not posted
            what, ranks, count, _, frame = now
            text = f"{what}, at {user_line(frame) or 'no line'}"
            post = make_post(Need(text, ranks, meets=bool(count[0]), count=count))
            if not first:
                post["id"] = said["id"]  # the same wait as in the last post
            if first or post["begun"] != said["begun"]:
                said, posted = post, now
                put_post(store, me, post)
            if (verdict := _read_verdict(store, me)) is not None:
                warnings.warn(str(verdict), RuntimeWarning, stacklevel=1)
                return
        except Exception:  # the groups are gone, or the rank that holds the store
            return


# -- posts of waiting ranks and deadlocks ----------------------------------------------------------

Post = dict[str, Any]
"""The message of a waiting rank in the store, made by `make_post`.

Its keys are "text", "id", "ranks", "group", "meets", "number", "numbers", "requests" and "begun".
"""
_VERDICT = "partita/waits/verdict"
_SAME_CALLS = Fix(
    "the same calls on every rank, in the same order",
    "pt.check_ranks() finds the first place where ranks part",
)
_FIXES_BY_TEXT = {
    "reads a value": Fix(
        "value = x.item()", "on every rank, and then `if rank == 0: print(value)`"
    ),
    "(torch.save)": Fix(
        "pt.save(state, path)", "on every rank; or torch.save on every rank, to its own file"
    ),
    "(pt.": Fix("that call on every rank, not within `if rank == 0:`", "each has a part"),
}
"""Fixes by a text that occurs in a line of the error."""
_post_numbers = itertools.count(1)
BEGUN: dict[str, int] = {}
"""The number of collectives that this rank has begun, by group, for groups not in torch's list."""
_REQUESTS_KEPT = 32
_is_main_thread: dict[int, bool] = {}
"""The threads that have begun collectives: True for the main one. A post may give its number only
where that is the only one: another thread might be about to begin what other ranks wait for."""
_announces_exit = False
_posts_lock = threading.Lock()
_own_posts: dict[int, Post] = {}
"""The posts of this rank's waiting threads, by id; the last of them is in the store."""


def _note_begun(group: dist.ProcessGroup, request: Request) -> int:
    """Record that this rank has begun a collective in the group. Returns its number, from 1.

    Torch's own sequence number does not serve, because it counts the user's collectives, too.
    """
    thread, begun = threading.get_ident(), _begun_in.get(group.group_name)
    if begun is None:
        begun = _begun_in.setdefault(group.group_name, _BegunCollectives(group))
    begun.number = number = begun.number + 1
    begun.last.append((number, request))
    is_main = _is_main_thread.get(thread)
    if is_main is None:
        is_main = _is_main_thread[thread] = thread == threading.main_thread().ident
    if is_main:  # others take turns with it as they like
        begun.history.new.append(request)
        if not number % _NEW_KEPT:
            begun.history.add_new()
    return number


class MoveHistory:
    """The collectives that this rank has begun among some ranks. Ranks in a deadlock compare them.

    Attributes:
        count, digest: their number, and a hash of all of them.
        last: the last ones, as pairs of number and `Request`.
        new: collectives that the other fields do not include yet; `add_new` adds them.
    """

    def __init__(self) -> None:
        self.count, self.digest = 0, 0
        self.last: deque[tuple[int, Request]] = deque(maxlen=_REQUESTS_KEPT)
        self.new: deque[Request] = deque()

    def add_new(self) -> MoveHistory:
        """Adds the collectives in `new` to the other fields. Returns `self`."""
        # Other threads may do so too, while the main one appends to `new`.
        with _adding:
            new = [self.new.popleft() for _ in range(len(self.new))]
            self.last.extend(enumerate(new, self.count + 1))
            self.count += len(new)
            for request in new:
                key = request.kind, id(request.move), request.op
                found = _digests.get(key)
                if found is None:
                    if len(_digests) >= _DIGESTS_KEPT:
                        _digests.clear()
                    text = hashlib.blake2b(request.describe().encode(), digest_size=8).digest()
                    found = _digests[key] = int.from_bytes(text, "big"), request.move
                self.digest = (self.digest * 1000003 ^ found[0]) & _64_BITS
        return self

    def describe(self) -> dict[str, str]:
        """Returns a text for each of the last collectives, by the collective's number."""
        # A copy: another thread may add to it.
        return {str(number): request.describe() for number, request in list(self.last)}


class _BegunCollectives:
    """The collectives that this rank has begun in one process group and will wait for.

    Attributes:
        number: the number of these collectives.
        last: the last of them, as (number, request).
        history: the collectives that the main thread has begun among the same ranks.
    """

    __slots__ = ("history", "last", "number")

    def __init__(self, group: dist.ProcessGroup):
        self.number = 0
        self.last: deque[tuple[int, Request]] = deque(maxlen=_REQUESTS_KEPT)
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        self.history = _histories.setdefault(ranks, MoveHistory())


_adding = threading.RLock()
"""Held while a thread sums up a history. It can be taken again: a signal handler may compare
ranks."""
_64_BITS = (1 << 64) - 1
_DIGESTS_KEPT = 1 << 14
_digests: dict[tuple[str, int, str], tuple[int, Any]] = {}
"""The keys are (kind, id of the move, op); the move is kept alive, so that its id stays its own."""
_NEW_KEPT = 256
_histories: dict[tuple[int, ...], MoveHistory] = {}
_begun_in: dict[str, _BegunCollectives] = {}
"""The keys are the names of groups."""


def history_of(ranks: Sequence[int]) -> MoveHistory:
    """Returns the history of the collectives that this rank has begun among exactly these ranks."""
    history = _histories.get(tuple(sorted(ranks)))
    return MoveHistory() if history is None else history.add_new()


def last_begun_in(group: str) -> str:
    """Returns the kind of the last collective that was begun in a process group; "" if none."""
    begun = _begun_in.get(group)
    last = None if begun is None else begun.history.add_new().last
    return last[-1][1].kind if last else ""


def forget_histories() -> None:
    """Drop the histories of process groups that have been destroyed."""
    _histories.clear()
    _begun_in.clear()


def _find_store() -> Any:
    """Returns the job's store. After the first call, this rank writes a post when it ends."""
    global _announces_exit
    if not _announces_exit:
        _announces_exit = True
        atexit.register(_announce_exit)
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def _announce_exit() -> None:
    """Write the post that this rank has ended, which is its last."""
    LEAVING.set()
    is_last = _posts_lock.acquire(timeout=_LOOK)  # another thread may be writing a post
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            me = dist.get_rank()
            post = {"text": "has ended", "ended": True, "id": -1, "ranks": []}
            _find_store().set(_key_of_rank(me), json.dumps(post))
    if is_last:
        _posts_lock.release()


def make_post(need: Need) -> Post:
    """Returns this rank's post, a message that tells other ranks that it waits for `need`."""
    # Copies: this thread may not be the one that begins collectives.
    groups = {name: (b.number, list(b.last)) for name, b in _begun_in.copy().items()}
    return {
        "text": need.text,
        "id": next(_post_numbers),
        "ranks": list(need.ranks),
        # "" for a graph, which may be waiting in any group.
        "group": need.count[0] if need.group is None else need.group.group_name,
        "meets": need.meets,
        "number": need.number if list(_is_main_thread.values()) == [True] else 0,
        "numbers": {name: number for name, (number, _) in groups.items()},
        "requests": {
            name: {str(n): str(request.move or request.kind) for n, request in last}
            for name, (_, last) in groups.items()
        },
        # Private torch: all groups, and the sequence number of each, by its name.
        "begun": BEGUN
        | dict([need.count])
        | {
            g.group_name: n
            for g in list(dist.distributed_c10d._world.pg_map)
            if (n := _count_begun_collectives(g)) is not None
        },
    }


def put_post(store: Any, rank: int, post: Post) -> None:
    """Writes a post (what this rank waits for) into the job's store, when a wait begins."""
    with _posts_lock:
        _own_posts[post["id"]] = post
        _replace_post(store, rank, post)


def withdraw_post(store: Any, rank: int, post: Post) -> None:
    """Remove a post from the job's store. Called when its thread continues.

    If another thread of this rank waits, its post is written instead. The key is overwritten and
    never deleted. The reason: another rank may have just seen the key, and reading a deleted key
    would block until the timeout of the store.
    """
    with _posts_lock:
        _own_posts.pop(post["id"], None)
        _replace_post(store, rank, next(reversed(_own_posts.values()), None))


def _replace_post(store: Any, rank: int, post: Post | None) -> None:
    if not LEAVING.is_set():  # the last post of a rank says that it has ended
        store.set(_key_of_rank(rank), json.dumps(post))


def _count_begun_collectives(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def collect_posts(store: Any, me: int, mine: Post) -> dict[int, Post | None]:
    """Returns the posts of all ranks that this rank waits for, directly or through others.

    A post says what a rank waits for. The value is None for a rank without a post: it computes.

    Args:
        store: the job's store.
        me, mine: this rank, and its post.
    """
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


def _has_begun(post: Post | None, mine: Post) -> bool:
    """True if the rank of `post` has begun the collective that `mine` waits for."""
    if post is None or "begun" not in post:
        return False
    group = mine["group"]
    if mine["number"]:
        return bool(post["numbers"].get(group, 0) >= mine["number"])
    return bool(post["begun"].get(group, -1) >= mine["begun"].get(group, 0))


def _describe_deadlock(posts: dict[int, Post | None], me: int) -> str:
    """Returns the headline of a deadlock; "" if there is none.

    In a deadlock each rank waits for one that has not begun the same collective.
    """
    if any(post is None for post in posts.values()):
        return ""
    waiting = {r: p for r, p in posts.items() if p is not None and "begun" in p}
    if any(_has_begun_other(p, other) for p in waiting.values() for other in waiting.values()):
        return "ranks ask for different things"
    known = all(p["number"] for p in waiting.values())
    if not known and not any(p["meets"] for p in waiting.values()):
        return ""  # all ranks exchange tensors: the process group's timeout applies
    for post in waiting.values():
        if not post["group"]:
            if not _waits_in_graph(post, posts):
                return ""  # this rank computes
        elif all(_has_begun(posts[r], post) for r in post["ranks"] if r in posts):
            return ""  # all ranks have begun what it waits for
    ended = [r for r, p in posts.items() if p is not None and p.get("ended")]
    if ended:
        who = me if me not in ended else "?"
        return f"rank {who} waits for {format_ranks(ended)}, which has ended"
    return "ranks wait for one another"


def _has_begun_other(post: Post, other: Post) -> bool:
    """True if the rank of `other` has begun another collective than that of `post`."""
    number = str(post["number"] or None)
    ours, theirs = (p["requests"].get(post["group"], {}).get(number) for p in (post, other))
    return ours is not None and theirs is not None and ours != theirs


def _agree_on_error(store: Any, fact: str, posts: dict[int, Post | None], me: int) -> LayoutError:
    """Write the verdict, unless another rank has written one. Returns the written one's error."""
    lines = [
        f"rank {r:<5} {'computes, or has ended' if p is None else p['text']}"
        for r, p in sorted(posts.items())
    ]
    mine = json.dumps(
        {"fact": fact, "lines": _group_equal_lines(lines, posts), "ranks": sorted(posts)}
    )
    said = store.compare_set(_VERDICT, "", mine)
    others = [r for r, p in posts.items() if r != me and p is not None and "begun" in p]
    store.set(f"{_VERDICT}/{me}", "read")
    until = time.monotonic() + 4 * _LOOK + 1
    # The rank whose process contains the store must not end before the others have read it.
    while time.monotonic() < until and not all(store.check([f"{_VERDICT}/{r}"]) for r in others):
        time.sleep(0.05)
    verdict = json.loads(said)
    return make_deadlock_error(verdict["fact"], verdict["lines"])


def _group_equal_lines(lines: list[str], posts: dict[int, Any]) -> list[str]:
    """Returns at most eight lines, one for all posts with the same text."""
    seen: dict[str, str] = {}
    for line, (_, post) in zip(lines, sorted(posts.items()), strict=True):
        seen.setdefault("" if post is None else post["text"], line)
    return list(seen.values())[:8]


def _read_verdict(store: Any, me: int) -> LayoutError | None:
    """Returns the error of a verdict of another rank that names this one; None without one."""
    if not store.check([_VERDICT]):
        return None
    said = json.loads(store.get(_VERDICT))
    if me not in said["ranks"]:
        return None
    store.set(f"{_VERDICT}/{me}", "read")
    return make_deadlock_error(said["fact"], said["lines"])


def make_deadlock_error(fact: str, lines: Sequence[str]) -> LayoutError:
    """Returns the error for a deadlock: `fact`, and `lines` that say what the ranks wait for."""
    return LayoutError(
        fact,
        place=user_line(),
        operands=tuple(lines),
        reason="every rank of a mesh must make the same moves, and read the same values, in the "
        "same order",
        fixes=(
            _SAME_CALLS,
            *(fix for text, fix in _FIXES_BY_TEXT.items() if any(text in line for line in lines)),
        ),
    )


def _waits_in_graph(post: Post, posts: dict[int, Post | None]) -> bool:
    """True if the rank of `post` runs a graph, with more collectives begun than a waiting rank."""
    others = [p for r in post["ranks"] if (p := posts.get(r)) is not None and p is not post]
    return any(
        count > other["begun"].get(group, count)
        for other in others
        if "begun" in other
        for group, count in post["begun"].items()
    )


def verdict_of_others() -> LayoutError | None:
    """Returns the deadlock error that another rank has written into the job's store, or None."""
    with contextlib.suppress(Exception):
        store, me = _find_store(), dist.get_rank()
        for _ in range(3):
            if (verdict := _read_verdict(store, me)) is not None:
                return verdict
            time.sleep(0.1)
    return None


def _key_of_rank(rank: int) -> str:
    return f"partita/waits/{rank}"


# -- ranks that are gone ---------------------------------------------------------------------------
# A process group reports that a connection was closed, but not by which rank. Ranks exchange their
# process ids when a control group is made. So a rank can check which processes on its own machine
# have ended. Otherwise it reports that one of the ranks on other machines must have ended.

_PROCESS = struct.Struct("<8sqq")
_TIME_TO_END, _LOOK_AT_PROCESSES = 0.5, 0.01
"""Seconds in which a process whose connections are closed has ended, and between two looks."""
_FIXES_OF_GONE_RANKS = (
    Fix("what that rank wrote last", "shows why it ended, if it raised an error"),
    Fix("the same calls on every rank, in the same order", "where it ended"),
)


class RankGoneError(LayoutError, RuntimeError):
    """Raised if another rank has ended, cannot be reached, or does not arrive in time.

    It is a RuntimeError, like torch's own errors for this.
    """


class _Process(NamedTuple):
    """A process of some machine. `begun` distinguishes it from a later one with the same number."""

    machine: bytes
    number: int
    begun: int


_processes: dict[int, _Process] = {}
"""The process of each rank of the job, as far as ranks have exchanged them."""


def describe_process() -> bytes:
    """Returns bytes that identify this process, by which other ranks detect that it has ended."""
    return _PROCESS.pack(*_this_process())


def remember_processes(ranks: Sequence[int], described: Sequence[bytes]) -> None:
    """Store what identifies other ranks' processes, to detect later that they have ended.

    Args:
        ranks: the global ranks.
        described: the result of `describe_process` on each.
    """
    for rank, text in zip(ranks, described, strict=True):
        _processes[rank] = _Process(*_PROCESS.unpack(text))


def find_ended(ranks: Sequence[int], timeout: float = 0.0) -> list[int]:
    """Returns the ranks whose processes have ended. Waits up to `timeout` seconds for one."""
    until = time.monotonic() + timeout
    machine = _this_process().machine
    here = {r: p for r in ranks if (p := _processes.get(r)) and p.machine == machine}
    while True:
        ended = [rank for rank, process in here.items() if _has_ended(process)]
        if ended or time.monotonic() >= until:
            return ended
        time.sleep(_LOOK_AT_PROCESSES)


def is_lost(error: BaseException | None) -> bool:
    """True if `error` was raised because another rank has ended or cannot be reached."""
    while error is not None:
        if isinstance(error, RankGoneError):
            return True
        if isinstance(error, RuntimeError) and LOST.search(str(error)):
            return True
        error = error.__cause__
    return False


def make_lost_rank_error(
    failure: BaseException, text: str, ranks: Sequence[int]
) -> RankGoneError | None:
    """Returns the error for a failed collective if a rank has ended. Otherwise returns None.

    Args:
        failure: the error of the collective.
        text: what this rank does: "waits in all_reduce over dp: ...".
        ranks: the global ranks of its group.
    """
    if not is_lost(failure):
        return None
    others = [r for r in ranks if r != dist.get_rank()]
    if ended := find_ended(others, _TIME_TO_END):
        return make_rank_gone_error(ended, text)
    machine = _this_process().machine
    elsewhere = [r for r in others if r not in _processes or _processes[r].machine != machine]
    suspects = elsewhere or others
    which = "which" if len(suspects) == 1 else "and one"
    return make_rank_gone_error(suspects, text, f"{which} has ended or cannot be reached")


def _make_late_ranks_error(
    failure: BaseException, text: str, ranks: Sequence[int], waited: float
) -> RankGoneError | None:
    """Returns the error if `failure` is a collective's time limit; None for other errors.

    The collective's `ranks`, which run as far as is known, have not arrived within `waited`
    seconds.
    """
    if not TIMED_OUT.search(str(failure)) or not ranks or find_ended(ranks):
        return None
    me = dist.get_rank()
    return RankGoneError(
        f"rank {me} waited {waited:.0f} s for {format_ranks(ranks)}, until the time limit of the "
        "process groups",
        place=user_line(),
        operands=(f"rank {me}  {text}",),
        reason=f"{format_ranks(ranks)} did not arrive, but runs: it computes, or waits elsewhere",
        fixes=(
            Fix("with pt.check_ranks(): ...", "names the first place where ranks part"),
            Fix("init_process_group(timeout=...)", "a longer limit, if a rank is only slow"),
        ),
    )


def make_rank_gone_error(ranks: Sequence[int], text: str, reason: str = "") -> RankGoneError:
    """Returns the error of a rank that waits for ranks that have ended.

    Args:
        ranks: the global ranks that have ended.
        text: what this rank does: "waits in all_reduce over dp: ...".
        reason: what happened to `ranks`; "" uses a default text.
    """
    me = dist.get_rank()
    reason = reason or f"which {'has' if len(ranks) == 1 else 'have'} ended"
    return RankGoneError(
        f"rank {me} waited for {format_ranks(ranks)}, {reason}",
        place=user_line(),
        operands=(f"rank {me}  {text}",),
        reason="the other ranks wait for a rank that has ended",
        fixes=_FIXES_OF_GONE_RANKS,
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns a text such as "ranks 1, 2", with at most eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown


def _this_process() -> _Process:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        numbers = os.readlink("/proc/self/ns/pid")  # each container numbers its own processes
        machine = hashlib.blake2b((boot + numbers).encode(), digest_size=8).digest()
        number = os.getpid()
        return _Process(machine, number, int(_read_process_status(number)[19]))
    return _Process(os.urandom(8), os.getpid(), 0)  # unknown machine: equal to no other


def _has_ended(process: _Process) -> bool:
    try:
        status = _read_process_status(process.number)
    except OSError:
        return True
    return status[0] in "ZX" or int(status[19]) != process.begun


def _read_process_status(number: int) -> list[str]:
    """Returns what Linux reports of a process, from its state on (proc_pid_stat(5), field 3)."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
