"""Ranks that are gone: what the others hear where a collective fails since a rank has ended.

A process group says that a connection was closed, and not whose. The ranks of one machine know one
another's processes, which they told when they made a control group, and look which of them have
ended; of those on other machines they know that it must be one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from partita.layout import Fix, LayoutError

from .backends.control import LOST, TIMED_OUT
from .source import user_line

__all__ = [
    "RankGoneError",
    "describe_process",
    "find_ended",
    "is_lost",
    "late_ranks",
    "lost_rank",
    "named",
    "rank_gone",
    "remember_processes",
]

_FORM = struct.Struct("<8sqq")
_PATIENCE, _LOOK = 0.5, 0.01
"""Seconds in which a process whose connections are closed has ended, and between two looks."""
_FIXES = (
    Fix("what that rank wrote last", "says why it ended, where it did so by an error of its own"),
    Fix("the same calls on every rank, in the same order", "where it came to its end"),
)


class RankGoneError(LayoutError, RuntimeError):
    """Another rank has ended, cannot be reached, or does not come in time.

    A RuntimeError too, as it is where torch says it.
    """


class _Process(NamedTuple):
    """A process among those of all machines; a number is given anew once a process has ended."""

    machine: bytes
    number: int
    begun: int


_processes: dict[int, _Process] = {}
"""Those of the ranks of the job, by rank, as far as they were told."""


def describe_process() -> bytes:
    """Which process this is, for other ranks to remember."""
    return _FORM.pack(*_this_process())


def remember_processes(ranks: Sequence[int], described: Sequence[bytes]) -> None:
    """Note which process each of `ranks`, numbers in the job, is."""
    for rank, text in zip(ranks, described, strict=True):
        _processes[rank] = _Process(*_FORM.unpack(text))


def find_ended(ranks: Sequence[int], patience: float = 0.0) -> list[int]:
    """Those of `ranks` that are known to have ended, looking for so many seconds for one."""
    until = time.monotonic() + patience
    machine = _this_process().machine
    here = {r: p for r in ranks if (p := _processes.get(r)) and p.machine == machine}
    while True:
        ended = [rank for rank, process in here.items() if _has_ended(process)]
        if ended or time.monotonic() >= until:
            return ended
        time.sleep(_LOOK)


def is_lost(error: BaseException | None) -> bool:
    """Was it raised since another rank is gone?"""
    while error is not None:
        if isinstance(error, RankGoneError):
            return True
        if isinstance(error, RuntimeError) and LOST.search(str(error)):
            return True
        error = error.__cause__
    return False


def lost_rank(failure: BaseException, text: str, ranks: Sequence[int]) -> RankGoneError | None:
    """What to raise for `failure` of a collective among `ranks`; None where no rank is gone.

    Args:
        text: what this rank does: "waits in all_reduce over dp: ...".
    """
    if not is_lost(failure):
        return None
    others = [r for r in ranks if r != dist.get_rank()]
    if ended := find_ended(others, _PATIENCE):
        return rank_gone(ended, text)
    machine = _this_process().machine
    elsewhere = [r for r in others if r not in _processes or _processes[r].machine != machine]
    suspects = elsewhere or others
    which = "which" if len(suspects) == 1 else "and one"
    return rank_gone(suspects, text, f"{which} has ended or cannot be reached")


def late_ranks(
    failure: BaseException, text: str, ranks: Sequence[int], waited: float
) -> RankGoneError | None:
    """What to raise where `failure` is the time limit of a collective that `ranks`, which live as
    far as is known, have not come to in `waited` seconds; None where it is another."""
    if not TIMED_OUT.search(str(failure)) or not ranks or find_ended(ranks):
        return None
    me = dist.get_rank()
    return RankGoneError(
        f"rank {me} waited {waited:.0f} s for {named(ranks)}, until the time limit of the process "
        "groups",
        place=user_line(),
        operands=(f"rank {me}  {text}",),
        reason=f"{named(ranks)} did not come there, and lives: it computes, or is elsewhere",
        fixes=(
            Fix("with pt.check_ranks(): ...", "names the first place where ranks part"),
            Fix("init_process_group(timeout=...)", "a longer limit, if a rank is only slow"),
        ),
    )


def rank_gone(ranks: Sequence[int], text: str, fate: str = "") -> RankGoneError:
    """The error of this rank, which does `text`, where `ranks` are gone: by `fate`, or ended."""
    me = dist.get_rank()
    fate = fate or f"which {'has' if len(ranks) == 1 else 'have'} ended"
    return RankGoneError(
        f"rank {me} waited for {named(ranks)}, {fate}",
        place=user_line(),
        operands=(f"rank {me}  {text}",),
        reason="a rank that ends leaves the others where they wait for it",
        fixes=_FIXES,
    )


def named(ranks: Sequence[int]) -> str:
    """`ranks 1, 2`, of at most eight."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown


def _this_process() -> _Process:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        numbers = os.readlink("/proc/self/ns/pid")  # containers count for themselves
        machine = hashlib.blake2b((boot + numbers).encode(), digest_size=8).digest()
        number = os.getpid()
        return _Process(machine, number, int(_read_process_status(number)[19]))
    return _Process(os.urandom(8), os.getpid(), 0)  # no system that tells: alike no other


def _has_ended(process: _Process) -> bool:
    try:
        status = _read_process_status(process.number)
    except OSError:
        return True
    return status[0] in "ZX" or int(status[19]) != process.begun


def _read_process_status(number: int) -> list[str]:
    """What Linux says of a process, from its state on (proc_pid_stat(5), field 3)."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
