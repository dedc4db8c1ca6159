"""The ranks of one machine: how they start and end, and messages about failures.

`launch` starts each rank as a process with the environment variables that torchrun would set, so a
rank does not depend on what started it. Two pipes connect a rank and its parent. The rank writes
events to one. The other closes when the parent ends, which ends the rank. The parent polls the
operating system for ranks that have ended or been stopped, so no lock in a rank can delay it. Other
machines cannot connect: the ranks find each other by a file that only this user may read, and
listen on the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from partita.comm import LOOPBACK, MEETING, find_ended, is_lost, join, user_line, user_line_of_error

from .logs import printable

EVENTS = "PARTITA_EVENTS_FD"
_GRACE = 1.0  # seconds in which the ranks that fail because another one died may die too
PATIENCE = 2.0  # seconds that a rank may be stopped (SIGSTOP) before the job ends
Show = Callable[[str, dict[str, Any]], None]
_START = str(Path(__file__).with_name("start_rank.py"))
_ENDING = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- the parent -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    events: int
    log: IO[bytes]
    unread: bytes = b""
    at: dict[str, Any] | None = None
    last_step: int = -1
    done: bool = False
    ended: bool = False
    failed: _Failure | None = None
    failed_when: float = 0.0
    stopped_by: int = 0
    stopped_since: float = 0.0

    def has_died(self) -> bool:
        """True if the rank's process has ended without reporting its end, as after a crash.

        Call this only after everything that it wrote has been read, because output may outlast the
        process.
        """
        return self.ended and not self.done

    def make_last_known(self) -> _LastKnown:
        """Returns what is known about the rank when the job ends, for the message to the user."""
        code = self.process.returncode if self.has_died() else None
        # If a signal ended the rank, the last lines of its log do not explain the end.
        is_explained = not self.has_died() or self.failed is not None or code in _ENDING
        log = "" if is_explained else _last_lines(self.log)
        stopped = self.stopped_by if self.has_stopped() else 0
        return _LastKnown(self.rank, self.at, code, self.failed, self.failed_when, log, stopped)

    def has_stopped(self) -> bool:
        """True if the rank's process has been stopped (SIGSTOP) for so long that the job ends."""
        return self.stopped_by != 0 and time.monotonic() - self.stopped_since > PATIENCE

    def note_stop(self) -> None:
        """Records whether the rank's process is stopped now, by which signal, and since when."""
        before = self.stopped_by
        self.stopped_by = 0 if self.ended else state_of_child(self.process.pid, os.WSTOPPED)
        if self.stopped_by and not before:
            self.stopped_since = time.monotonic()


def launch(command: list[str], ranks: int, show: Show) -> int:
    """Runs `python -m partita COMMAND` as `ranks` processes on this machine.

    All ranks end before the call returns. They also end if the parent is killed.

    Args:
        command: the arguments, the same for every rank.
        ranks: the number of ranks.
        show: a function that is called with rank 0's events, and with ("job", {"message": ...}) if
            the job ends early.

    Returns:
        The exit code: 1 if a rank failed, was killed or stayed stopped; 130 after Ctrl-C; 143 after
        SIGTERM. Otherwise the largest exit code of the ranks.
    """
    children: list[_Child] = []
    saved: dict[str, Any] | None = None

    def handle_event(event: str, facts: dict[str, Any]) -> None:
        nonlocal saved
        if event == "saved":
            saved = facts
        show(event, facts)

    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        with selectors.DefaultSelector() as selector, tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                child = _start_rank(command, rank, ranks, os.path.join(folder, "meeting"))
                children.append(child)
                selector.register(child.events, selectors.EVENT_READ, child)
            while selector.get_map():
                _read_events(selector, handle_event)
                for child in children:
                    child.note_stop()
                has_died = any(child.has_died() for child in children)
                if has_died or any(child.has_stopped() for child in children):
                    if has_died:  # the others fail too, but would wait for a stopped one
                        _gather_last_words(selector, handle_event)
                    ends = [child.make_last_known() for child in children]
                    message = _describe_end_of_job(ends, saved)
                    show("job", {"message": message})
                    return 1
        for child in children:
            _reap_child(child)
        return max(child.process.returncode for child in children)
    except (KeyboardInterrupt, _Terminated) as end:
        steps = 1 + max((child.last_step for child in children), default=-1)
        said, code = end.args if isinstance(end, _Terminated) else ("stopped", 130)
        show("job", {"message": f"{said} after {steps} step{'s' * (steps != 1)}"})
        return code
    finally:
        _end_children(children)
        signal.signal(signal.SIGTERM, before)


class _Terminated(BaseException):
    """Raised when the job must end, as by a scheduler: the message and the exit code."""


def _raise_terminated(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # while logs and ranks end
    raise _Terminated("ended by SIGTERM", 128 + signal.SIGTERM)


def _start_rank(command: list[str], rank: int, ranks: int, meeting: str) -> _Child:
    threads = str(max(1, count_cores() // ranks))
    receive, send = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115  closed in _end
    environment = {
        "OMP_NUM_THREADS": threads,
        **os.environ,
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        MEETING: meeting,
        EVENTS: str(send),
    }
    with _without_interrupts():
        process = subprocess.Popen(
            [sys.executable, "-P", _START, *command],
            env=environment,
            stdin=subprocess.PIPE,  # never written to: its end is the parent's
            stdout=log,
            stderr=log,
            pass_fds=[send],
            process_group=0,  # Ctrl-C reaches the parent alone, which ends the ranks
        )
    os.close(send)
    os.set_blocking(receive, False)
    return _Child(rank, process, receive, log)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Makes processes that are started inside the `with` block hold SIGINT until Python runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_events(selector: selectors.BaseSelector, show: Show, timeout: float = 0.2) -> None:
    ready = {key.fileobj for key, _ in selector.select(timeout)}
    for key in list(selector.get_map().values()):
        child: _Child = key.data
        # A rank's own children may have its pipe open when it has ended.
        gone = state_of_child(child.process.pid, os.WEXITED)
        if key.fileobj not in ready and not gone:
            continue
        while True:
            try:
                piece = os.read(child.events, 65536)
            except BlockingIOError:
                if not gone:
                    break
                piece = b""
            if not piece:
                selector.unregister(child.events)
                child.ended = True
                if not child.done:
                    _reap_child(child)  # its files are closed: it is about to end
                break
            child.unread += piece
            *lines, child.unread = child.unread.split(b"\n")
            for line in lines:
                _take_event(child, json.loads(line), show)


def state_of_child(pid: int, which: int) -> int:
    """Returns the exit code of process `pid`, or the signal that ended or stopped it; 0 if it runs.

    An exit code of 0 is returned as -1. Other code can still read the status afterwards.

    Args:
        which: the state to check for, as in `os.waitid`.
    """
    if not hasattr(os, "waitid"):  # macOS until Python 3.13
        return 0
    try:
        found = os.waitid(os.P_PID, pid, which | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has been waited for
        return -1 if which == os.WEXITED else 0
    return 0 if found is None else found.si_status or -1


def _reap_child(child: _Child) -> None:
    """Waits for the end of a rank, and kills processes that it has started, such as compilers."""
    if hasattr(os, "waitid"):  # until it is reaped, no other process gets its id
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()


def _take_event(child: _Child, message: dict[str, Any], show: Show) -> None:
    event = message.pop("event")
    if event == "done":
        child.done = True
    elif event == "failed":
        child.failed_when = message.pop("when")
        child.failed = _Failure(**message)
    elif event == "at":
        child.at = message
    else:
        if event == "step":
            child.last_step = message["step"]
        if child.rank == 0:
            show(event, message)


def _gather_last_words(selector: selectors.BaseSelector, show: Show) -> None:
    until = time.monotonic() + _GRACE
    while selector.get_map() and time.monotonic() < until:
        _read_events(selector, show, timeout=0.05)


def _last_lines(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - (1 << 16)))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-15:])


def _end_children(children: list[_Child]) -> None:
    for child in children:
        if child.process.returncode is None:  # until it is reaped, no other process gets its id
            # SIGKILL, because a rank may hang in a collective, where other signals have no effect.
            os.kill(child.process.pid, signal.SIGKILL)
    for child in children:
        _reap_child(child)
        if child.process.stdin is not None:
            child.process.stdin.close()
        os.close(child.events)
        child.log.close()


# -- a rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """This process as a rank of a job that `launch` or torchrun has started.

    Attributes:
        rank, world: its number, and the number of ranks.
        emit: a function `emit(event, **facts)` that reports an event, such as a step.
    """

    rank: int
    world: int
    emit: Callable[..., None]


def is_rank() -> bool:
    """True if `launch` or torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """True if `launch` started this process."""
    return EVENTS in os.environ


@contextlib.contextmanager
def joined(show: Show) -> Iterator[Rank]:
    """Joins the job that started this process as a `Rank`, and leaves it after the `with` block.

    Args:
        show: a function that gets rank 0's events if no parent reads them, as under torchrun.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    torch.set_num_threads(max(1, count_cores() // local_world))
    # Also where torchrun started it: at once, wherever it is, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    listener = os.environ.get(EVENTS)
    if listener is not None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, lambda _, frame: end_of_signal(frame))

    at: dict[str, Any] | None = None

    def end_of_signal(frame: FrameType | None) -> None:
        """Reports why this rank ends at SIGTERM, and ends the process.

        torchrun sends SIGTERM to the remaining ranks, often before they notice a rank's end.

        `frame` is the Python frame that the signal interrupted.
        """
        place = user_line(frame) or "no line"
        others = [r for r in range(world) if r != rank]
        gone = find_ended(others, _GRACE)
        said = f"another rank is gone ({place})" if gone else f"ended by SIGTERM ({place})"
        _print_error(f"rank {rank} failed {_phase_of(at)}: {said}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def emit(event: str, **facts: Any) -> None:
        nonlocal at
        if event == "at":
            at = facts
        if listener is not None:
            os.write(int(listener), json.dumps({"event": event, **facts}).encode() + b"\n")
        elif rank == 0:
            show(event, facts)

    try:
        if world > 1:
            join()
        yield Rank(rank, world, emit)
        if world > 1:
            dist.barrier()  # the store lives on rank 0, which must not leave first
            dist.destroy_process_group()
        emit("done")
    except Exception as error:
        failure = _failure_of(error)
        if listener is not None:
            emit("failed", when=time.monotonic(), **asdict(failure))
        else:
            said = f"another rank is gone ({failure.place})" if failure.lost else failure.message
            said = f"rank {rank} failed {_phase_of(at)}: {said}"
            if rank == 0:
                # torchrun sends SIGTERM as soon as another rank has ended: the logs come first.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                show("job", {"message": said})
            else:
                _print_error(said)
        os._exit(1)  # threads of a broken process group may never end


def _print_error(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


# -- failures of ranks -----------------------------------------------------------------------------

_PHASES = {
    "forward": "in forward of step {}",
    "backward": "in backward of step {}",
    "capture": "in the capture of step {}",
    "compile": "in the compilation of step {}",
    "graph": "in the compiled step {}",
    "optimizer": "in the optimizer of step {}",
    "save": "in the save after step {}",
    "sample": "at the sample after step {}",
}


def _phase_of(at: dict[str, Any] | None) -> str:
    """Returns the phase that a rank last reported: "in backward of step 12"."""
    return "before the first step" if at is None else _PHASES[at["phase"]].format(at["step"])


@dataclass(frozen=True)
class _Failure:
    """An error that ended a rank.

    Attributes:
        message: the text that is shown to the user.
        lost: True if the only reason is that another rank has ended.
        place: the user's line, and the move that the rank was in, if known.
    """

    message: str
    lost: bool
    place: str


def _failure_of(error: BaseException) -> _Failure:
    """Returns the message of an error.

    An error that a user can fix (a ValueError; LayoutError is one) is shown without a traceback.
    Other errors are faults of a program and are shown with one.
    """
    said = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, ValueError):
        said = f"{type(error).__name__}: {error}"
    return _Failure(said, is_lost(error), _place_of_error(error))


def _place_of_error(error: BaseException) -> str:
    line = user_line_of_error(error)
    return ", ".join(filter(None, [line, *getattr(error, "__notes__", [])]))


# -- seen from the parent --------------------------------------------------------------------------


@dataclass(frozen=True)
class _LastKnown:
    """The last known state of a rank.

    Attributes:
        at: the phase and step that it reported.
        code: its exit code, if it has ended.
        failed: its failure, if it reported one.
        when: the time of that failure, in seconds of the machine's clock.
        log: the last lines that it wrote.
        stopped: the signal that has stopped it, or 0.
    """

    rank: int
    at: dict[str, Any] | None
    code: int | None
    failed: _Failure | None
    when: float
    log: str
    stopped: int = 0


def _describe_end_of_job(ranks: Sequence[_LastKnown], saved: dict[str, Any] | None) -> str:
    """Returns which rank ended the job, why, and where the others were.

    A rank that fails because another one has ended is not to blame.

    Args:
        ranks: at least one has ended, or been stopped.
        saved: the last checkpoint's "step" and "path", if there is one.
    """
    ended = [r for r in ranks if r.code is not None]
    killed = [r for r in ended if r.code is not None and r.code < 0]
    own = sorted((r for r in ended if r.failed and not r.failed.lost), key=lambda r: r.when)
    unexplained = [r for r in ended if r.failed is None]
    stopped = [r for r in ranks if r.stopped]
    lost = sorted(ended, key=lambda r: r.when)
    first = (killed or own or unexplained or stopped or lost)[0]
    alike = [
        r for r in own if first.failed and r.failed and r.failed.message == first.failed.message
    ]
    if first in own and len(alike) == len(ranks) > 1:
        lines = [f"every rank failed {_phase_of(first.at)}; the job is ended"]
        others = []
    else:
        lines = [
            f"rank {first.rank} {_describe_end(first)} {_phase_of(first.at)}; the job is ended"
        ]
        others = [r for r in ranks if r is not first]
    if said := first.failed.message if first.failed else first.log:
        lines.append(said)
    lines += _list_places(others)
    if saved is not None:
        lines.append(
            f"the checkpoint {saved['path']} is that of step {saved['step']}: --resume goes on "
            "from it"
        )
    return "\n".join(lines)


def _describe_end(rank: _LastKnown) -> str:
    if rank.code is not None and rank.code < 0:
        return f"was killed by {signal.Signals(-rank.code).name}"
    if rank.stopped:
        return f"was stopped by {signal.Signals(rank.stopped).name}"
    return "failed" if rank.failed else f"ended with exit code {rank.code}"


def _list_places(others: Sequence[_LastKnown]) -> list[str]:
    """Returns where the other ranks were, with a line for each place."""
    places: dict[str, list[str]] = {}
    for r in others:
        line = f" ({r.failed.place})" if r.failed and r.failed.place else ""
        places.setdefault(_phase_of(r.at) + line, []).append(str(r.rank))
    return [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'were' if len(ranks) > 1 else 'was'} "
        + place
        for place, ranks in places.items()
    ]
