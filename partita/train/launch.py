"""How do the ranks of one machine start, stay together and end?

`launch` starts each rank as a process that gets what torchrun would give it, so a rank started here
and one started by torchrun are the same program. Two pipes tie a rank to its parent: it writes
events to one, and the end of the other tells it that the parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch
import torch.distributed as dist

from partita.comm import join

from .failures import Failure, Last, failure_of, obituary, phase_of

__all__ = ["Rank", "cores", "is_rank", "joined", "launch"]

EVENTS = "PARTITA_EVENTS_FD"
GRACE = 1.0  # seconds in which the ranks that fail because another one died may die too
Show = Callable[[str, dict[str, Any]], None]


def cores() -> int:
    """The cores that this process may use."""
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
    failed: Failure | None = None
    failed_when: float = 0.0

    def died(self) -> bool:
        """Ended without a word: asked only of what it wrote, which may outlast the process."""
        return self.ended and not self.done

    def last(self) -> Last:
        """What is known of it when the job ends."""
        code = self.process.returncode if self.died() else None
        log = "" if self.failed or not self.died() else _last_lines(self.log)
        return Last(self.rank, self.at, code, self.failed, self.failed_when, log)


def launch(command: list[str], ranks: int, show: Show) -> int:
    """Run `python -m partita COMMAND` as `ranks` ranks of this machine until all have ended.

    Args:
        command: the arguments, the same for every rank.
        ranks: how many.
        show: is told rank 0's events, and ("job", {"message": ...}) when the job ends early.

    Returns:
        The exit code: 0, a rank's own, 1 if a rank died, 130 after Ctrl-C. No rank outlives the
        call, nor a parent that is killed.
    """
    children: list[_Child] = []
    saved: dict[str, Any] | None = None

    def told(event: str, facts: dict[str, Any]) -> None:
        nonlocal saved
        if event == "saved":
            saved = facts
        show(event, facts)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with selectors.DefaultSelector() as selector:
            port = _free_port()
            for rank in range(ranks):
                child = _start(command, rank, ranks, port)
                children.append(child)
                selector.register(child.events, selectors.EVENT_READ, child)
            while selector.get_map():
                _listen(selector, told)
                if any(child.died() for child in children):
                    _gather_last_words(selector, told)
                    message = obituary([child.last() for child in children], saved)
                    show("job", {"message": message})
                    return 1
        return max(child.process.wait() for child in children)
    except KeyboardInterrupt:
        steps = 1 + max((child.last_step for child in children), default=-1)
        show("job", {"message": f"stopped after {steps} step{'s' * (steps != 1)}"})
        return 130
    finally:
        _end(children)
        signal.signal(signal.SIGTERM, before)


def _start(command: list[str], rank: int, ranks: int, port: int) -> _Child:
    threads = str(max(1, cores() // ranks))
    receive, send = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115  closed in _end
    environment = {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": threads,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        EVENTS: str(send),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", *command],
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listen(selector: selectors.BaseSelector, show: Show, timeout: float = 0.2) -> None:
    for key, _ in selector.select(timeout):
        child: _Child = key.data
        while True:
            try:
                piece = os.read(child.events, 65536)
            except BlockingIOError:
                break
            if not piece:
                selector.unregister(child.events)
                child.ended = True
                if not child.done:
                    child.process.wait()  # its files are closed: it is about to end
                break
            child.unread += piece
            *lines, child.unread = child.unread.split(b"\n")
            for line in lines:
                _take(child, json.loads(line), show)


def _take(child: _Child, message: dict[str, Any], show: Show) -> None:
    event = message.pop("event")
    if event == "done":
        child.done = True
    elif event == "failed":
        child.failed_when = message.pop("when")
        child.failed = Failure(**message)
    elif event == "at":
        child.at = message
    else:
        if event == "step":
            child.last_step = message["step"]
        if child.rank == 0:
            show(event, message)


def _gather_last_words(selector: selectors.BaseSelector, show: Show) -> None:
    until = time.monotonic() + GRACE
    while selector.get_map() and time.monotonic() < until:
        _listen(selector, show, timeout=0.05)


def _last_lines(log: IO[bytes], count: int = 15) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-count:])


def _end(children: list[_Child]) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.kill()  # a rank may hang in a collective, where it heeds nothing milder
    for child in children:
        child.process.wait()
        if child.process.stdin is not None:
            child.process.stdin.close()
        os.close(child.events)
        child.log.close()


# -- a rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """This process as one of `world` ranks."""

    rank: int
    world: int
    tell: Callable[..., None]


def is_rank() -> bool:
    """Whether `launch` or torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined(show: Show) -> Iterator[Rank]:
    """Join the job that the environment describes; leave it when all ranks are here again.

    Args:
        show: is told rank 0's events where no parent listens, as under torchrun.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    torch.set_num_threads(max(1, cores() // local_world))
    listener = os.environ.get(EVENTS)
    if listener is not None:
        threading.Thread(target=_end_with_parent, daemon=True).start()

    at: dict[str, Any] | None = None

    def tell(event: str, **facts: Any) -> None:
        nonlocal at
        if event == "at":
            at = facts
        if listener is not None:
            os.write(int(listener), json.dumps({"event": event, **facts}).encode() + b"\n")
        elif rank == 0:
            show(event, facts)

    try:
        if world > 1:
            join("gloo")
        yield Rank(rank, world, tell)
        if world > 1:
            dist.barrier()  # the store lives on rank 0, which must not leave first
            dist.destroy_process_group()
        tell("done")
    except Exception as error:
        failure = failure_of(error)
        if listener is not None:
            tell("failed", when=time.monotonic(), **asdict(failure))
        else:
            said = f"another rank is gone ({failure.place})" if failure.lost else failure.said
            print(f"rank {rank} failed {phase_of(at)}: {said}", file=sys.stderr, flush=True)
        os._exit(1)  # threads of a broken process group may never end


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)
