"""Interleaved timing of several ways to train, in one run.

Each way is a step that is ready to run on every rank of a set of Gloo ranks. All take turns, in
another order in each round, and a step begins and ends with a barrier. What counts is the ratio of
two steps of the same round, and of these ratios the median: what else the machine does slows both.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from .place import begin_ranks, bench_device
from .rivals import CompiledRival

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


def measure(
    makes: Sequence[Make], ranks: int, rounds: int, *args: Any, warm: int = 2
) -> dict[str, list[float]]:
    """Seconds per step of each way, round by round, as the slowest rank had it.

    Args:
        makes: each at the top level of a module; `make(rank, ranks, *args)` gives each way's step.
            The ways of each have ranks of their own: what partita changes in a process that has
            DTensors is not there for the ways of others.
        warm: steps of each way that are not timed.

    Raises:
        SystemExit: a rank failed; its traceback is the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        teams = [
            _Team(make, ranks, warm, args, os.path.join(folder, str(i)))
            for i, make in enumerate(makes)
        ]
        seconds: dict[str, list[float]] = {name: [] for team in teams for name in team.names}
        ways = [(name, team) for team in teams for name in team.names]
        for i in range(rounds):
            for name, team in ways[i % len(ways) :] + ways[: i % len(ways)]:
                seconds[name].append(max(team.ask(name)))
        for team in teams:
            team.end()
    return seconds


class _Team:
    """Ranks, each a process, that call the steps of some ways when they are told to.

    Attributes:
        names: of the ways.
    """

    def __init__(self, make: Make, ranks: int, warm: int, args: Sequence[Any], store: str):
        context = mp.get_context("spawn")
        self._ends, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, store, rank, ranks, make, warm, args), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        self.names: list[str] = self._hear()[0]

    def ask(self, name: str) -> list[float]:
        """The seconds that a step of one way takes on each rank."""
        for end in self._ends:
            end.send(name)
        return self._hear()

    def end(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()

    def _hear(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._ends):
            left = {end: i for i, end in enumerate(self._ends) if i not in answers}
            for end in wait(list(left)):
                rank = left[end]  # type: ignore[index]
                answers[rank], failure = self._ends[rank].recv()
                if failure:
                    raise SystemExit(f"rank {rank} failed\n{failure}")
        return [answers[rank] for rank in range(len(self._ends))]


def _serve(
    end: Any, store: str, rank: int, ranks: int, make: Make, warm: int, args: Sequence[Any]
) -> None:
    """A rank of a team."""
    torch.set_num_threads(1)
    try:
        begin_ranks(rank, ranks, store=dist.FileStore(store, ranks))
        steps = make(rank, ranks, *args)
        _warm_up(steps, warm, rank == 0)
        end.send((list(steps), ""))
        while (name := end.recv()) is not None:
            end.send((_time_calls(steps[name], 1, dist.barrier), ""))
        dist.barrier()
    except BaseException:
        end.send((None, traceback.format_exc()))
    end.close()
    os._exit(0)


def _warm_up(steps: dict[str, Step], warm: int, tells: bool) -> None:
    """Call each step so many times; of a rival that is compiled, say what Dynamo made of it."""
    for step in steps.values():
        if isinstance(step, CompiledRival):
            step.compile()
            if tells:
                print(step, flush=True)
        for _ in range(warm):
            step()


def _time_calls(step: Step, calls: int, together: Callable[[], Any]) -> float:
    finish = bench_device().finish
    finish()
    together()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    finish()
    together()
    return (time.perf_counter() - start) / calls


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
    _warm_up(steps, warm, True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(_time_calls(steps[name], calls, together))
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """The median over rounds of how many times as long as `base` a way takes."""
    return median(t / a for t, a in zip(seconds[name], seconds[base], strict=True))


def table(seconds: dict[str, list[float]], base: str) -> str:
    """A line for each way: milliseconds, and how many times as long as `base` it takes."""
    lines = [f"{'':<24}{'ms':>8}{'over ' + base:>20}{'best':>8}"]
    for name, times in seconds.items():
        over, best = ratio(seconds, name, base), min(times) / min(seconds[base])
        lines.append(f"{name:<24}{1e3 * median(times):>8.1f}{over:>20.2f}{best:>8.2f}")
    return "\n".join(lines)


def readme_row(what: str, ways: dict[str, str], seconds: dict[str, list[float]], base: str) -> str:
    """A row of the README's table, without its command.

    Args:
        ways: what the README calls each.
    """
    said = [f"{title} {ratio(seconds, name, base):.2f}×" for name, title in ways.items()]
    return f"| {what} | {', '.join(said)} |"
