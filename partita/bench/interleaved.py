"""Interleaved timing of several ways to train, in one run.

Each way is a step, which all ranks of a team of processes call together. The ways take turns, in
another order in each round, and each step begins and ends with a barrier. Two ways are compared by
the ratio of their times in one round, because other load slows both steps. The result is the median
over rounds.
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

from .place import begin_ranks, bench_device, end_rank
from .rivals import CompiledRival

Step = Callable[[], Any]
Make = Callable[..., dict[str, Step]]


def on_ranks(body: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Runs `body(rank, ranks, *args)` in `ranks` processes of one thread each. Returns the results.

    Args:
        body: a function at the top level of a module. It runs after `init_process_group`.

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
        found = [end.recv() for end in ends]
        for process in processes:
            process.join()
    return found


def _rank(
    end: Any, store: str, rank: int, ranks: int, body: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    begin_ranks(rank, ranks, store=dist.FileStore(store, ranks))
    end.send(body(rank, ranks, *args))
    end.close()
    dist.barrier()
    end_rank()


def measure(
    makes: Sequence[Make], ranks: int, rounds: int, *args: Any, warm: int = 2
) -> dict[str, list[float]]:
    """Times several ways to train, in turns. Returns the slowest rank's seconds, by way and round.

    Args:
        makes: functions at the top level of a module; `make(rank, ranks, *args)` returns the steps
            of some ways by name. Each function has its own processes, so that what partita changes
            in a process with DTensors does not affect rivals.
        ranks: the number of processes of each function.
        rounds: how often each way is timed.
        warm: the number of steps of each way that are not timed.

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
                seconds[name].append(max(team.time_step(name)))
        for team in teams:
            team.end()
    return seconds


class _Team:
    """The processes of some ranks, which call the steps of their ways on request.

    Attributes:
        names: the names of the ways.
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
        self.names: list[str] = self._receive_answers()[0]

    def time_step(self, name: str) -> list[float]:
        """Runs one step of the way `name` on all ranks, and returns its seconds on each."""
        for end in self._ends:
            end.send(name)
        return self._receive_answers()

    def end(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()

    def _receive_answers(self) -> list[Any]:
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
    """The main function of a rank of a team: times a step for each name that it receives."""
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
    end_rank()


def _warm_up(steps: dict[str, Step], warm: int, prints: bool) -> None:
    """Calls each step `warm` times, and prints the number of Dynamo graphs of compiled rivals."""
    for step in steps.values():
        if isinstance(step, CompiledRival):
            step.compile()
            if prints:
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
    """Times several steps in turns, in this process. Returns the seconds of each, by round.

    Args:
        steps: functions that make a step, by name.
        rounds: the number of turns of each step.
        warm: the number of calls of each step that are not timed.
        together: a barrier: a function that waits for the other ranks.
        calls: the number of calls in a turn; their mean counts. If a small step is called once, the
            code and data of other steps fill the processor's caches.
    """
    _warm_up(steps, warm, True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(_time_calls(steps[name], calls, together))
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Returns the time of the way `name` divided by that of the way `base`: the median over rounds.

    Args:
        seconds: the seconds of each way, by round, as `measure` returns them.
    """
    return median(t / a for t, a in zip(seconds[name], seconds[base], strict=True))


def table(seconds: dict[str, list[float]], base: str) -> str:
    """Returns the results of `measure` as text: each way's milliseconds, and ratios to `base`.

    The ratios are the median over rounds, and that of the shortest times.
    """
    lines = [f"{'':<24}{'ms':>8}{'over ' + base:>20}{'best':>8}"]
    for name, times in seconds.items():
        over, best = ratio(seconds, name, base), min(times) / min(seconds[base])
        lines.append(f"{name:<24}{1e3 * median(times):>8.1f}{over:>20.2f}{best:>8.2f}")
    return "\n".join(lines)


def readme_row(what: str, ways: dict[str, str], seconds: dict[str, list[float]], base: str) -> str:
    """Returns a row of the README's table: the time of each way divided by that of `base`.

    Args:
        what: the text of the first cell.
        ways: maps the name of each way to its name in the README.
        seconds: the seconds of each way, by round, as `measure` returns them.
        base: the way to which the others are compared.
    """
    said = [f"{title} {ratio(seconds, name, base):.2f}×" for name, title in ways.items()]
    return f"| {what} | {', '.join(said)} |"
