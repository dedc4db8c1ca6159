"""Calibration: what this machine's ranks reach, measured while all of them work at once.

Every rank (`calibrate_rank`) makes the calls of a deck of kernels in turns, and meets the others in
collectives between them, as in a step. Of a kernel the median call counts, times what interruptions
add to all calls. Of a collective the time counts from when the last rank begins; how long the
others wait for it, over what was computed meanwhile, is `straggling`. Nothing of a model is run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from partita.comm import MEETING

from .collective_time import messages_of
from .machine import Link, Machine, MeasuredCurve, fit_curve

__all__ = ["calibrate", "machine_toml"]

_TIMEOUT = 120.0
_SLICE = 1e-3  # seconds: a call that takes less is interrupted seldom, and then for long


def calibrate(ranks: int) -> Machine:
    """Measure this machine with so many ranks at work, each a process of one thread.

    Takes about 25 seconds, and the starting of the ranks.

    Raises:
        RuntimeError: a rank ended without an answer; what it wrote is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            mine = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environment = {**os.environ, **mine, MEETING: str(Path(folder) / "meeting")}
            called = [sys.executable, "-m", f"{__package__}.calibrate_rank"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(called, env=environment, **pipes))  # type: ignore[call-overload]
        try:
            told = [process.communicate(timeout=_TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for rank, (process, (_, error)) in enumerate(zip(processes, told, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} ended with {process.returncode}: {error.strip()}")
    return _make_machine([json.loads(out.strip().splitlines()[-1]) for out, _ in told], ranks)


def machine_toml(machine: Machine) -> str:
    """A machine as the text of a file that `load_machine` reads."""
    lines = [
        f"name = {json.dumps(machine.name)}",
        f"source = {json.dumps(machine.source)}",
        f"memory_bytes = {machine.memory_bytes:.6g}",
        f"memory_bandwidth = {machine.memory_bandwidth:.6g}",
        f"kernel_seconds = {machine.kernel_seconds:.4g}",
        f"fuses = {str(machine.fuses).lower()}",
        f"overlaps = {str(machine.overlaps).lower()}",
        f"ranks_per_host = {machine.ranks_per_host}",
    ]
    if machine.straggling:
        lines += [f"straggling = {machine.straggling:.4g}"]
    for name, table in (("flops", machine.flops), ("efficiency", machine.efficiency)):
        lines += ["", f"[{name}]", *(f"{key} = {value:.6g}" for key, value in table.items())]
    given = {f"links.{json.dumps(axes)}": link for axes, link in machine.links.items()}
    for name, link in {"host": machine.host, "network": machine.network, **given}.items():
        lines += ["", f"[{name}]", f"latency = {link.latency:.4g}"]
        lines += [f"bandwidth = {link.bandwidth:.6g}"]
    for name, curves in (("kernels", machine.kernels), ("collectives", machine.collectives)):
        for key, curve in curves.items():
            lines += ["", f"[{name}.{key}]", f"amounts = {_format_row(curve.amounts)}"]
            lines += [f"seconds = {_format_row(curve.seconds)}"]
    return "\n".join(lines) + "\n"


def _format_row(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:.6g}' for value in values)}]"


def _make_machine(told: Sequence[Mapping[str, Any]], ranks: int) -> Machine:
    kernels = _fit_kernels(told)
    bfloat16 = kernels.pop("matmul_bfloat16")
    collectives, straggling = _fit_collectives(told)
    best = _find_best_rate(kernels["matmul"])
    same = kernels["matmul"].seconds_of(bfloat16.amounts[0])
    link = _fit_link(collectives, ranks)
    return Machine(
        name=f"this machine, {ranks} ranks",
        source=f"partita calibrate --ranks {ranks}",
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks,
        memory_bandwidth=_find_best_rate(kernels["arithmetic"]),
        kernel_seconds=kernels["arithmetic"].seconds[0],
        fuses=False,
        overlaps=False,  # what carries bytes takes the processors that compute
        ranks_per_host=ranks,
        flops={"float32": best, "bfloat16": best * same / bfloat16.seconds[0]},
        efficiency=dict.fromkeys(("matmul", "attention", "memory", "link"), 1.0),
        host=link,
        network=link,
        straggling=straggling,
        kernels=kernels,
        collectives=collectives,
    )


def _find_best_rate(curve: MeasuredCurve) -> float:
    return max(a / s for a, s in zip(curve.amounts, curve.seconds, strict=True))


# -- kernels ---------------------------------------------------------------------------------------


def _fit_kernels(told: Sequence[Mapping[str, Any]]) -> dict[str, MeasuredCurve]:
    """For each rate its curve: at each amount the mean of the calls and the ranks."""
    short = [c for one in told for c in one["kernels"] if median(c["seconds"]) < _SLICE]
    slower = sum(sum(c["seconds"]) for c in short)
    slower /= sum(median(c["seconds"]) * len(c["seconds"]) for c in short)
    points: dict[tuple[str, float], list[float]] = {}
    for one in told:
        for call in one["kernels"]:
            middle = median(call["seconds"])
            seconds = middle * slower if middle < _SLICE else fmean(call["seconds"])
            points.setdefault((call["rate"], call["amount"]), []).append(seconds)
    return {
        rate: fit_curve([(a, fmean(s)) for (name, a), s in points.items() if name == rate])
        for rate in dict.fromkeys(name for name, _ in points)
    }


# -- collectives -----------------------------------------------------------------------------------


def _fit_collectives(told: Sequence[Mapping[str, Any]]) -> tuple[dict[str, MeasuredCurve], float]:
    """The curve of each kind and number of ranks, and how far behind the slowest rank is.

    All ranks tell when they began and ended each collective, by the clock that they share. From the
    mean of the ends of one to the mean of those of the next it is what is said here: computing,
    waiting for the slowest, and what remains.
    """
    points: dict[tuple[str, float], list[float]] = {}
    computed = waited = 0.0
    for rows in zip(*(one["collectives"] for one in told), strict=True):
        begun = max(row["start"] for row in rows)
        first = rows[0]
        taken = fmean(row["end"] for row in rows) - begun
        points.setdefault((f"{first['kind']}-{first['ranks']}", first["nbytes"]), []).append(taken)
    for before, after in pairwise(zip(*(one["collectives"] for one in told), strict=True)):
        work = fmean(b["start"] - a["end"] for a, b in zip(before, after, strict=True))
        computed += work
        waited += max(b["start"] for b in after) - fmean(b["start"] for b in after)
    curves = {
        key: fit_curve([(n, max(median(s), 1e-7)) for (k, n), s in points.items() if k == key])
        for key in dict.fromkeys(key for key, _ in points)
    }
    return curves, waited / computed if computed else 0.0


def _fit_link(collectives: Mapping[str, MeasuredCurve], ranks: int) -> Link:
    """Latency and bandwidth at which the ring formulas give what was measured of all-reduces."""
    curve = collectives.get(f"all_reduce-{ranks}")
    if curve is None:
        return Link(1e-6, 1e12)
    (few, *_, many), (short, *_, long) = curve.amounts, curve.seconds
    return Link(short / messages_of("all_reduce", ranks), (many - few) / max(long - short, 1e-9))
