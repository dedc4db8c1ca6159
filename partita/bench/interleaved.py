"""Interleaved timing of several ways to train, in one run.

Each way is a step that is ready to run on every rank of one set of Gloo ranks. All take turns, in
another order in each round, and a step begins and ends with a barrier. What counts is the ratio of
two steps of the same round, and of these ratios the median: what else the machine does slows both.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from .place import begin_ranks, bench_device

Step = Callable[[], Any]
Make = Callable[..., dict[str, Step]]


def on_ranks(body: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What `body(rank, ranks, *args)` returns on each of so many ranks of one thread.

    Args:
        body: at the top level of a module; the default process group is there when it is called.

    Raises:
        EOFError: a rank died; its traceback is on stderr.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ends, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, store, rank, ranks, body, args), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        told = [end.recv() for end in ends]
        for process in processes:
            process.join()
    return told


def _rank(
    end: Any, store: str, rank: int, ranks: int, body: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    begin_ranks(rank, ranks, store=dist.FileStore(store, ranks))
    end.send(body(rank, ranks, *args))
    end.close()
    dist.barrier()
    os._exit(0)


def measure(make: Make, ranks: int, rounds: int, *args: Any, warm: int = 2) -> dict[str, list[Any]]:
    """Seconds per step of each way, round by round, as the slowest rank had it.

    Args:
        make: at the top level of a module; `make(rank, ranks, *args)` gives each way's step.
        warm: steps of each way that are not timed.
    """
    told = on_ranks(_timed, ranks, make, rounds, warm, args)
    return {name: [max(t) for t in zip(*(s[name] for s in told), strict=True)] for name in told[0]}


def _timed(
    rank: int, ranks: int, make: Make, rounds: int, warm: int, args: Sequence[Any]
) -> dict[str, list[float]]:
    return in_turns(make(rank, ranks, *args), rounds, warm, dist.barrier)


def in_turns(
    steps: dict[str, Step],
    rounds: int,
    warm: int,
    together: Callable[[], Any] = lambda: None,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each step, round by round.

    Args:
        warm: steps of each that are not timed.
        together: waits for the other ranks.
        calls: how often each is called in its turn, whose mean counts. Called once, a small step
            finds the processor's caches full of the others' code and data.
    """
    for step in steps.values():
        for _ in range(warm):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    finish = bench_device().finish
    for i in range(rounds):
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            finish()
            together()
            step, start = steps[name], time.perf_counter()
            for _ in range(calls):
                step()
            finish()
            together()
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def table(seconds: dict[str, list[float]], base: str) -> str:
    """A line for each way: milliseconds, and how many times as long as `base` it takes."""
    lines = [f"{'':<24}{'ms':>8}{'over ' + base:>20}{'best':>8}"]
    for name, times in seconds.items():
        ratios = [t / a for t, a in zip(times, seconds[base], strict=True)]
        best = min(times) / min(seconds[base])
        lines.append(f"{name:<24}{1e3 * median(times):>8.1f}{median(ratios):>20.2f}{best:>8.2f}")
    return "\n".join(lines)
