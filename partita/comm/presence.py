"""Ranks that are gone: the error that the others raise where a collective fails because a rank has
ended.

A process group says that a connection was closed, but not whose. The ranks of one machine know one
another's processes (they exchange them when a control group is made) and look which have ended; of
ranks on other machines they can only say that it must be one of them.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from partita.layout import Fix, LayoutError

from .backends.control import LOST, TIMED_OUT
from .messages import hash_text
from .source import user_line

__all__ = [
    "RankGoneError",
    "describe_process",
    "find_ended",
    "format_ranks",
    "is_lost",
    "make_late_ranks_error",
    "make_lost_rank_error",
    "make_rank_gone_error",
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
    """A process of some machine. `begun` tells it from a later one with the same number."""

    machine: bytes
    number: int
    begun: int


_processes: dict[int, _Process] = {}
"""The process of each rank of the job, as far as ranks have exchanged them."""


def describe_process() -> bytes:
    """This process as bytes, for `remember_processes` of other ranks."""
    return _FORM.pack(*_this_process())


def remember_processes(ranks: Sequence[int], described: Sequence[bytes]) -> None:
    """Note the process of each of `ranks`, numbers in the job."""
    for rank, text in zip(ranks, described, strict=True):
        _processes[rank] = _Process(*_FORM.unpack(text))


def find_ended(ranks: Sequence[int], patience: float = 0.0) -> list[int]:
    """The `ranks` that are known to have ended; looks for up to `patience` seconds for one."""
    until = time.monotonic() + patience
    machine = _this_process().machine
    here = {r: p for r in ranks if (p := _processes.get(r)) and p.machine == machine}
    while True:
        ended = [rank for rank, process in here.items() if _has_ended(process)]
        if ended or time.monotonic() >= until:
            return ended
        time.sleep(_LOOK)


def is_lost(error: BaseException | None) -> bool:
    """Was `error` raised because another rank is gone?"""
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
    """The error for `failure` of a collective among `ranks`; None where no rank is gone.

    Args:
        text: what this rank does: "waits in all_reduce over dp: ...".
    """
    if not is_lost(failure):
        return None
    others = [r for r in ranks if r != dist.get_rank()]
    if ended := find_ended(others, _PATIENCE):
        return make_rank_gone_error(ended, text)
    machine = _this_process().machine
    elsewhere = [r for r in others if r not in _processes or _processes[r].machine != machine]
    suspects = elsewhere or others
    which = "which" if len(suspects) == 1 else "and one"
    return make_rank_gone_error(suspects, text, f"{which} has ended or cannot be reached")


def make_late_ranks_error(
    failure: BaseException, text: str, ranks: Sequence[int], waited: float
) -> RankGoneError | None:
    """The error where `failure` is the time limit of a collective that `ranks`, which live as far
    as is known, have not come to in `waited` seconds; None where `failure` is something else."""
    if not TIMED_OUT.search(str(failure)) or not ranks or find_ended(ranks):
        return None
    me = dist.get_rank()
    return RankGoneError(
        f"rank {me} waited {waited:.0f} s for {format_ranks(ranks)}, until the time limit of the "
        "process groups",
        place=user_line(),
        operands=(f"rank {me}  {text}",),
        reason=f"{format_ranks(ranks)} did not come there, and lives: it computes, or is elsewhere",
        fixes=(
            Fix("with pt.check_ranks(): ...", "names the first place where ranks part"),
            Fix("init_process_group(timeout=...)", "a longer limit, if a rank is only slow"),
        ),
    )


def make_rank_gone_error(ranks: Sequence[int], text: str, fate: str = "") -> RankGoneError:
    """The error of this rank, which does `text`, where `ranks` are gone (`fate` says how)."""
    me = dist.get_rank()
    fate = fate or f"which {'has' if len(ranks) == 1 else 'have'} ended"
    return RankGoneError(
        f"rank {me} waited for {format_ranks(ranks)}, {fate}",
        place=user_line(),
        operands=(f"rank {me}  {text}",),
        reason="a rank that ends leaves the others where they wait for it",
        fixes=_FIXES,
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """`ranks 1, 2`, of at most eight."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown


def _this_process() -> _Process:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        numbers = os.readlink("/proc/self/ns/pid")  # containers count for themselves
        machine = hash_text(boot + numbers, 8)
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
    """What Linux says of a process, from its state on (proc_pid_stat(5), field 3)."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
