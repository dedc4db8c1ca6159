"""The ledger, which records a rank's moves and their lines, and `strict()` and `check_ranks()`.

A move is one step of a redistribution. Open ledgers record moves (bytes, axes, op, line, reason)
and matrix products that several ranks repeat. `strict()` refuses moves that the user did not
request. `check_ranks()` compares what the ranks are about to do. A `Scope` holds all of them for a
rank.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import torch

from partita.layout import Fix, LayoutError
from partita.layout.text import format_table
from partita.layout.text import human as human

if TYPE_CHECKING:
    from partita.redistribute import Move

_WORTH_SAYING = 0.01
"""The fraction of a rank's operations above which repeated work is reported."""


@dataclass(frozen=True)
class Record:
    """One row of a ledger: a move (one step of a redistribution) that a rank made.

    Attributes:
        kind: the kind of the move, such as "all_gather".
        axes: the mesh axes that it ran over, outermost first.
        nbytes: bytes that one rank sent; with uneven shards, the rank with the largest. 0 for a
            local move.
        op: the operation that needed it, such as "matmul".
        source: the user's "file:line", or "".
        reason: why it was made.
            "explicit": the user called redistribute. "implicit": an op needed it.
            "gradient": backward. "settle": the reduction of gradients.
            "gather", "regather": a sharded weight in forward and in backward.
            "update": an optimizer's step. "recompute": a region ran again in backward.
            "padding": ranks without elements get one, so that the graph is equal on all ranks.
        rank: the rank's index in the mesh, row-major.
        before, after: the layouts, as `Layout.brief` prints them.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    op: str
    source: str
    reason: str
    rank: int = 0
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class RepeatedWork:
    """Matrix products that are repeated on all ranks along some axes.

    Attributes:
        op: the operation, such as "linear".
        source: the user's "file:line", or "".
        axes: the mesh axes along which it is repeated.
        share: these operations as a fraction of all operations that a rank did for matrix products
            in forward.
    """

    op: str
    source: str
    axes: tuple[str, ...]
    share: float


class Ledger:
    """The moves of a `pt.ledger()` block, in order. Prints as a table.

    A move is one step of a redistribution: a collective, or a local change such as a slice.
    """

    def __init__(self) -> None:
        self.moves: list[Record] = []
        self._work: defaultdict[tuple[int, str, str, tuple[str, ...]], float] = defaultdict(float)

    def note_work(
        self, rank: int, op: str, source: str, axes: tuple[str, ...], operations: float
    ) -> None:
        """Adds the flops of matrix products that a rank has computed.

        Args:
            rank: the rank's index in the mesh.
            op: the operation, such as "linear".
            source: the user's "file:line", or "".
            axes: the axes along which all ranks repeat the same products.
            operations: the number of multiplications and additions.
        """
        self._work[rank, op, source, axes] += operations

    @property
    def work(self) -> list[tuple[str, str, tuple[str, ...], float]]:
        """The flops of matrix products so far, as a list of `(op, source, axes, operations)`.

        `axes` are the mesh axes along which all ranks repeat the products. Each rank has its own
        entries.
        """
        return [(op, source, axes, n) for (_, op, source, axes), n in self._work.items()]

    @property
    def repeated(self) -> list[RepeatedWork]:
        """The matrix products that several ranks repeat, by op and line, largest first.

        Only entries of more than 1 % of a rank's operations are included.
        """
        everything: defaultdict[int, float] = defaultdict(float)
        for (rank, *_), operations in self._work.items():
            everything[rank] += operations
        shares: defaultdict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
        for (rank, op, source, axes), operations in self._work.items():
            if axes:
                name = op, source, axes
                shares[name] = max(shares[name], operations / everything[rank])
        found = [RepeatedWork(*name, share) for name, share in shares.items()]
        found = [work for work in found if work.share > _WORTH_SAYING]
        return sorted(found, key=lambda work: -work.share)

    @property
    def bytes(self) -> int:
        """The bytes of all recorded moves. Around `world.run`: summed over all ranks."""
        return sum(m.nbytes for m in self.moves)

    def count(self, kind: str | None = None, *, reason: str | None = None) -> int:
        """Returns the number of moves of the kind `kind` and with the reason `reason`.

        None matches all. `Record` lists the kinds and the reasons.
        """
        return sum(
            (kind is None or m.kind == kind) and (reason is None or m.reason == reason)
            for m in self.moves
        )

    def summary(self, *fields: str) -> str:
        """Returns a table of the moves that send something, largest sum of bytes first.

        Args:
            fields: the attributes of `Record` by which moves are grouped. By default "source",
                "kind", "axes" and "reason".
        """
        fields = fields or ("source", "kind", "axes", "reason")
        sums: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for m in self.moves:
            values = (getattr(m, name) for name in fields)
            words = (" ".join(v) if isinstance(v, tuple) else str(v) for v in values)
            if m.nbytes:
                sums[tuple(word or "-" for word in words)].append(m.nbytes)
        rows = [
            [human(sum(sent)), str(len(sent)), *words]
            for words, sent in sorted(sums.items(), key=lambda item: -sum(item[1]))
        ]
        return format_table([["bytes", "moves", *fields], *rows], {0, 1})

    def to_json(self) -> str:
        """Returns the ledger as JSON.

        `{"bytes": int, "moves": [{"kind": ..., "axes": [...], "nbytes": ..., ...}],
        "repeated": [{"op": ..., "source": ..., "axes": [...], "share": ...}]}`.
        """
        moves, repeated = ([asdict(one) for one in all] for all in (self.moves, self.repeated))
        return json.dumps({"bytes": self.bytes, "moves": moves, "repeated": repeated})

    def __str__(self) -> str:
        return "\n".join([self._table(), *map(_describe_repeated_work, self.repeated)])

    def _table(self) -> str:
        if not self.moves:
            return "no moves: nothing was carried"
        many = len({m.rank for m in self.moves}) > 1
        head = ["kind", "axes", "bytes", "op", "reason", "source"]
        rows = [
            [m.kind, " ".join(m.axes), human(m.nbytes), m.op, m.reason, m.source or "-"]
            for m in self.moves
        ]
        if many:
            head = ["rank", *head]
            rows = [[str(m.rank), *row] for m, row in zip(self.moves, rows, strict=True)]
        n = len(self.moves)
        total = f"{n} move{'s' if n > 1 else ''}, {human(self.bytes)} sent"
        total += " by all ranks together" if many else ""
        return format_table([head, *rows], {head.index("bytes")}) + f"\n{total}"

    __repr__ = __str__


def _describe_repeated_work(work: RepeatedWork) -> str:
    return (
        f"repeated by each rank along {' '.join(work.axes)}: {work.op} at {work.source or '-'}, "
        f"{work.share:.0%} of the operations"
    )


# -- the scope of a rank: the ledgers and checks that get its moves --------------------------------


class Scope:
    """The observers of one rank's moves: its open ledgers, `strict()` and `check_ranks()`."""

    __slots__ = ("busy", "captured", "check", "ledgers", "listeners", "recomputing", "strict")

    def __init__(self) -> None:
        self.ledgers: tuple[Ledger, ...] = ()
        self.captured: Ledger | None = None
        self.listeners: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.strict = False
        self.recomputing = False
        self.check: Any = None
        self.busy = False  # True if any of the above is set, so that a move reads one attribute

    def set(self, **changes: Any) -> None:
        was_recorded = bool(self.work_ledgers)
        for name, value in changes.items():
            setattr(self, name, value)
        self.busy = bool(self.ledgers) or self.strict or self.check is not None
        if was_recorded != bool(self.work_ledgers):
            for reference in self.listeners.valuerefs():  # a list: another thread may add one
                listener = reference()
                if listener is not None:
                    listener.count_flops(not was_recorded)

    @property
    def work_ledgers(self) -> tuple[Ledger, ...]:
        """The open ledgers, which record matrix products.

        During a capture it is only the capture's own ledger, from which each later run of the step
        is recorded.
        """
        return self.ledgers if self.captured is None else (self.captured,)

    def add_listener(self, listener: Any) -> None:
        """Registers an object whose `count_flops` method is called when recording starts and stops.

        The scope calls `listener.count_flops(True)` when the first ledger opens, or now if one is
        open. It calls `listener.count_flops(False)` when the last one closes. The scope keeps only
        a weak reference.
        """
        self.listeners[id(listener)] = listener
        if self.work_ledgers:
            listener.count_flops(True)

    def copy_from(self, other: Scope) -> None:
        self.set(ledgers=other.ledgers, strict=other.strict, check=other.check)


_process = Scope()
_thread = threading.local()


def scope() -> Scope:
    """Returns the `Scope` of the current rank: its open ledgers and checks.

    It belongs to the thread in `pt.ranks`, otherwise to the process.
    """
    return getattr(_thread, "scope", _process)


@contextmanager
def _set_within(**changes: Any) -> Iterator[None]:
    """Set these attributes of the running rank's scope inside the `with` block."""
    here = scope()
    before = {name: getattr(here, name) for name in changes}
    here.set(**changes)
    try:
        yield
    finally:
        here.set(**before)


def enter_rank_thread(own: Scope) -> None:
    """Make `own` the scope of this thread, which is a simulated rank of `pt.ranks` from now on."""
    _thread.scope = own


def recomputing() -> AbstractContextManager[None]:
    """Returns a context manager: moves inside it are recorded with the reason "recompute"."""
    return _set_within(recomputing=True)


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Record every move in the `with` block: collectives and local changes of redistributions.

        with pt.ledger() as log:
            loss = model(x)
        print(log)                  # a table: kind, axes, bytes, op, line, reason
        print(log.summary())        # the bytes by line, kind, axes and reason

    Ledgers nest: each records all moves inside it. In the function of a rank of `pt.ranks` it
    records that rank's moves. Around `world.run` it records the moves of all ranks.
    """
    log, here = Ledger(), scope()
    here.set(ledgers=(*here.ledgers, log))
    try:
        yield log
    finally:
        here.set(ledgers=tuple(one for one in here.ledgers if one is not log))


# -- checks of moves -------------------------------------------------------------------------------


@contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Raise LayoutError for implicit redistributions that send bytes, in the `with` block.

    Implicit means that an op needed it and the program did not request it. Local changes, such as
    slicing a Replicate value, stay allowed. An axis of one rank counts like an axis of several. So
    a program that raises nothing on one rank raises nothing on many.

    Args:
        on: False allows implicit redistributions again, inside a strict block.
    """
    with _set_within(strict=on):
        yield


def refuse_implicit(move: Move, op: str, nbytes: int) -> None:
    """Raises the error of `strict()` for the move `move`, which the program did not request.

    Args:
        op: the op that needs the move.
        nbytes: the bytes that one rank would send.
    """
    placements = ", ".join(f"{move.after.placement(a)} on {a}" for a in move.axes)
    cost = f"{move.kind} {human(nbytes)}"
    raise LayoutError(
        f"{op} needs an implicit {move.kind} over {' '.join(move.axes)}, and strict() forbids it",
        place=user_line(),
        operands=(f"{move.before.brief()}  would become  {move.after.brief()}",),
        reason="under strict() only moves that the program requests are made",
        fixes=(
            Fix(f"redistribute({placements}) before {op}", cost),
            Fix("leave the strict() block around this line", cost),
        ),
    )


# -- what ranks compare ----------------------------------------------------------------------------


class Check:
    """The state of a `check_ranks()` block, in which ranks compare texts before each collective.

    All ranks of the mesh compare, not only the group of the collective, because ranks may disagree
    about the group itself.

    Args:
        timeout: seconds to wait for the other ranks in a comparison.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        # The wires used inside: ranks compare on each of them when they leave the block. (Typed
        # Any, because `wire` imports this file.)
        self.wires: dict[int, Any] = {}
        self.broken = False  # True after a failed comparison: waiting for ranks again would hang

    def compare(self, wire: Any, text: str) -> None:
        """Raises on every rank of `wire`'s mesh unless `text` is equal on all.

        The error names two ranks.
        """
        self.wires[id(wire)] = wire
        try:
            wire.exchange(text, b"", self.timeout)
        except Exception:
            self.broken = True
            raise

    def announce_exit(self, text: str) -> None:
        """Compares `text` with the other ranks when this rank leaves its `check_ranks()` block.

        Ranks that are still in theirs raise an error, instead of waiting for this rank.

        Args:
            text: what this rank does, for the error of the others.
        """
        for wire in self.wires.values():
            if not self.broken:
                self.compare(wire, text)


ON_CHECK: list[Callable[[], AbstractContextManager[Any]]] = []
"""Context managers that `check_ranks()` enters too. `tensor/arguments` adds the comparison of
numbers that are given to ops."""


@contextmanager
def enter_check_hooks() -> Iterator[None]:
    """Enters the context managers in `ON_CHECK`, which other modules have put there.

    `check_ranks` uses it. So other modules can compare more under `check_ranks`.
    """
    with ExitStack() as entered:
        for enter in ON_CHECK:
            entered.enter_context(enter())
        yield


@contextmanager
def check_ranks(timeout: float = 60.0) -> Iterator[None]:
    """Compare the ranks before each collective on process groups, inside the `with` block.

    If ranks differ in collective, axes, shapes, dtype, op or source line, all of them raise a
    LayoutError that names two ranks. Without this they would hang or mix up data. The same error is
    raised if a rank leaves the `with` block while others continue.

    Local tensors, batches, random generators, settings of optimizers and plain tensors are normally
    compared only the first time that a line runs. Here they are compared every time. Numbers that
    are passed to ops on DTensors are compared, too.

    It costs one small collective per move (step of a redistribution), and per op that takes
    numbers. In `ranks`, moves are always compared.

    Args:
        timeout: seconds to wait for the other ranks.
    """
    check = Check(timeout)
    try:
        with _set_within(check=check), enter_check_hooks():
            yield
    except BaseException as error:
        with suppress(Exception):
            check.announce_exit(f"left check_ranks() with {type(error).__name__}: {error}")
        raise
    check.announce_exit("left check_ranks() in order")


# -- the user's line -------------------------------------------------------------------------------
# The user's line is that of the innermost frame outside partita, torch, NumPy and the standard
# library.

_PARTITA = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NUMPY = os.path.join("site-packages", "numpy", "")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# If there is no user's frame, a line of partita's own models and training loop is shown.
_OURS_TO_SHOW = (os.path.join(_PARTITA, "app") + os.sep,)
_SHOWN: ContextVar[tuple[str, ...]] = ContextVar("own lines that are shown", default=())


@contextmanager
def own_lines_shown(*files: str) -> Iterator[None]:
    """Treats partita's own models and `files` as the user's code, inside the `with` block.

    Use it if the user has given only the name of such a model: errors and ledgers show its lines.
    """
    token = _SHOWN.set((*_OURS_TO_SHOW, *files))
    try:
        yield
    finally:
        _SHOWN.reset(token)


def user_line(frame: FrameType | None = None, here: str = "") -> str:
    """Returns `"file:line"` of the user's code that is running now, for errors and ledgers.

    It is the innermost frame outside partita, torch, numpy and Python's library. This walks the
    stack, so call it only if needed.

    Args:
        frame: the frame to start from; by default the caller's.
        here: the working directory, if the caller has it. Reading it is slow.

    Returns:
        The line. If there is no user frame: the innermost line of partita's own training code, or
        "" if there is none (in an autograd thread, for example).
    """
    if frame is None:
        frame = sys._getframe(1)
    fallback, shown = "", _SHOWN.get()
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _kind_of_file(name)
        if kind == "partita":
            if shown and name.startswith(shown):
                return f"{_shorten_path(name, here)}:{frame.f_lineno}"
            if not fallback and name.startswith(_OURS_TO_SHOW):
                fallback = f"{_shorten_path(name, here)}:{frame.f_lineno}"
        elif kind == "user" or (kind == "no file" and _is_of_script(frame)):
            return f"{_shorten_path(name, here)}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback


def user_line_of_error(error: BaseException) -> str:
    """Returns the `user_line` at which an error was raised.

    It walks the traceback, because frames that C code called may have lost their callers.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, map(user_line, reversed(frames))), "")


def place_of_user() -> str:
    """Returns the file, line and bytecode offset of the user's running code, as text.

    The offset distinguishes calls on one line. Folders are omitted: they may differ between hosts.
    """
    site = call_site(sys._getframe(1))
    return f"{os.path.basename(site[0])}:{site[1]}:{site[2]}" if site else ""


def call_site(frame: FrameType | None = None) -> tuple[Any, ...]:
    """Returns an identifier of the user's current call, which is equal on all ranks.

    It distinguishes two calls on one line, and is cheaper than `user_line`, because no text is
    made.

    Returns:
        File, line and bytecode offset of two frames: the user's frame, and the innermost frame
        outside of partita.
    """
    if frame is None:
        frame = sys._getframe(1)
    inner: tuple[Any, ...] = ()
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _kind_of_file(name)
        if kind != "partita":
            here = (name, frame.f_lineno, first_instruction(frame.f_code, frame.f_lasti))
            if kind == "user" or (kind == "no file" and _is_of_script(frame)):
                return here + inner
            inner = inner or here
        frame = frame.f_back
    return inner


def find_user_frame(frame: FrameType) -> FrameType:
    """Returns the innermost frame of the user's code, from `frame` outwards.

    If there is none, returns the outermost frame.
    """
    while frame.f_back is not None:
        kind = _kind_of_file(frame.f_code.co_filename)
        if kind == "user" or (kind == "no file" and _is_of_script(frame)):
            break
        frame = frame.f_back
    return frame


def first_instruction(code: CodeType, at: int) -> int:
    """Returns the offset of a running call's first bytecode instruction, which identifies it.

    A call consists of several instructions. After the interpreter has specialized the call, it
    reports the offset of another one of these. Ranks may specialize it at different times.

    Args:
        code: the code that makes the call.
        at: the offset that the interpreter reports.
    """
    known = _begins.get((id(code), at))
    if known is None:
        places = list(code.co_positions())
        first = at // 2
        while first and None not in places[first] and places[first - 1] == places[first]:
            first -= 1
        if len(_begins) >= _KEPT:
            _begins.clear()
        known = _begins[id(code), at] = code, 2 * first
    return known[1]


_KEPT = 1 << 16
_begins: dict[tuple[int, int], tuple[CodeType, int]] = {}
"""By a code's id, which it keeps as long as it is held here."""


def _is_of_script(frame: FrameType) -> bool:
    """True if a frame whose code has no file is of `python -c` or a notebook, not of a library."""
    return frame.f_globals.get("__name__") == "__main__"


@functools.lru_cache(maxsize=4096)
def _kind_of_file(name: str) -> Literal["partita", "library", "no file", "user"]:
    """Returns the owner of a file's code: torch, numpy and Python's own count as libraries."""
    if name.startswith(_PARTITA):
        return "partita"
    if name.startswith((_TORCH, "<frozen ")) or _NUMPY in name:
        return "library"
    if name.startswith(_STDLIB) and "site-packages" not in name:
        return "library"
    return "no file" if name.startswith("<") else "user"


def _shorten_path(name: str, here: str) -> str:
    """Returns a path relative to the folder `here` if the file is in it; otherwise unchanged."""
    here = (here or os.getcwd()) + os.sep
    return name[len(here) :] if name.startswith(here) else name
