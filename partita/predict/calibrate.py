"""Calibration: what this machine's ranks reach, measured while all of them work at once.

Every rank (`calibrate_rank`) makes the calls of a deck of kernels in turns, and meets the others in
collectives between them, as in a step. Of a kernel what the processor works for the median call
counts, times what passes in all calls over what is worked in them. Of a collective the time counts
from when the last rank begins to when the first has ended; what passes between two beyond that work
is `straggling`. Nothing of a model is run.
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

__all__ = ["calibrate", "machine_toml", "make_machine"]

_TIMEOUT = 120.0


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
    return make_machine([json.loads(out.strip().splitlines()[-1]) for out, _ in told], ranks)


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


def make_machine(told: Sequence[Mapping[str, Any]], ranks: int) -> Machine:
    """The machine by what its ranks have told of their calls and collectives."""
    slower = _compare_clocks(told)
    kernels = _fit_kernels(told, slower)
    bfloat16 = kernels.pop("matmul_bfloat16")
    collectives, straggling = _fit_collectives(told, slower)
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


def _compare_clocks(told: Sequence[Mapping[str, Any]]) -> float:
    """By what calls are slower than a processor works for them: ranks may share processors."""
    calls = [call for one in told for call in one["kernels"]]
    return max(sum(sum(c["passed"]) for c in calls) / sum(sum(c["worked"]) for c in calls), 1.0)


def _fit_kernels(told: Sequence[Mapping[str, Any]], slower: float) -> dict[str, MeasuredCurve]:
    """For each rate its curve: at each amount the mean of the calls and the ranks.

    Of a call the median of the seconds in which a processor worked for it counts, in which nothing
    else that ran meanwhile is; and it takes so many times as long.
    """
    points: dict[tuple[str, float], list[float]] = {}
    for call in (call for one in told for call in one["kernels"]):
        seconds = median(call["worked"]) * slower
        points.setdefault((call["rate"], call["amount"]), []).append(seconds)
    return {
        rate: fit_curve([(a, fmean(s)) for (name, a), s in points.items() if name == rate])
        for rate in dict.fromkeys(name for name, _ in points)
    }


# -- collectives -----------------------------------------------------------------------------------


def _fit_collectives(
    told: Sequence[Mapping[str, Any]], slower: float
) -> tuple[dict[str, MeasuredCurve], float]:
    """The curve of each kind and number of ranks, and how far behind the slowest rank is.

    All ranks tell when they began and ended each collective, by the clock that they share. It takes
    from when the last rank begins to when the first one has ended: what another waits for a
    processor after that is computing that goes on meanwhile, and is not counted twice. From the
    first end of one collective to the last beginning of the next the slowest computes: a line
    through what passed and what a rank worked then. Its slope is how far behind the slowest is; and
    what passes even where nothing is computed, until ranks that slept are awake, is added to each
    collective.

    Args:
        slower: by what a rank is slower than the processor works for it.
    """
    points: dict[tuple[str, float], list[float]] = {}
    phases: dict[int, list[tuple[float, float]]] = {}
    rows = zip(*(one["collectives"] for one in told), strict=True)
    for before, now in pairwise([(), *rows]):
        ranks = now[0]["ranks"]
        # Neighbours are a group; each group has its own beginning and end.
        for group in range(0, len(now), ranks):
            those = slice(group, group + ranks)
            begun = max(row["start"] for row in now[those])
            taken = min(row["end"] for row in now[those]) - begun
            points.setdefault((f"{now[0]['kind']}-{ranks}", now[0]["nbytes"]), []).append(taken)
            if before and before[0]["ranks"] == ranks:  # else they do not begin together
                passed = begun - min(row["end"] for row in before[those])
                works = zip(before[those], now[those], strict=True)
                worked = fmean(b["worked"][0] - a["worked"][1] for a, b in works)
                phases.setdefault(ranks, []).append((worked, passed))
    slope, awaking = _fit_lines(phases) if phases else (slower, {})
    curves: dict[str, list[tuple[float, float]]] = {}
    for (key, nbytes), taken in points.items():
        beside = awaking.get(int(key.rpartition("-")[2]), 0.0)
        curves.setdefault(key, []).append((nbytes, max(median(taken), 1e-7) + beside))
    fitted = {key: fit_curve(found) for key, found in curves.items()}
    return fitted, max(slope / slower - 1, 0.0)


def _fit_lines(
    points: Mapping[int, Sequence[tuple[float, float]]],
) -> tuple[float, dict[int, float]]:
    """Parallel lines through several sets of points: their slope, and the intercept of each.

    None of these is below 0: where one would be, the slope is that of a line through 0.
    """
    means = {key: tuple(map(fmean, zip(*each, strict=True))) for key, each in points.items()}
    apart = [(x - means[k][0], y - means[k][1]) for k, each in points.items() for x, y in each]
    slope = sum(x * y for x, y in apart) / sum(x * x for x, _ in apart)
    if any(y < slope * x for x, y in means.values()):
        xs, ys = zip(*(pair for each in points.values() for pair in each), strict=True)
        slope = sum(ys) / sum(xs)
    return slope, {key: max(y - slope * x, 0.0) for key, (x, y) in means.items()}


def _fit_link(collectives: Mapping[str, MeasuredCurve], ranks: int) -> Link:
    """Latency and bandwidth at which the ring formulas give what was measured of all-reduces."""
    curve = collectives.get(f"all_reduce-{ranks}")
    if curve is None:
        return Link(1e-6, 1e12)
    (few, *_, many), (short, *_, long) = curve.amounts, curve.seconds
    return Link(short / messages_of("all_reduce", ranks), (many - few) / max(long - short, 1e-9))
