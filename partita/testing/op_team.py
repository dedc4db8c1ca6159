"""Teams of ranks for a sweep that survives ops which hang or kill their ranks.

The parent process never computes. It forks the ranks, passes them one case after the other and
waits for all results. If a rank returns no result in time, the outcome is "hang"; if a rank ends,
it is "crash". In both cases the ranks are replaced and the sweep continues.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import partita as pt

from .op_case import Outcome, references, run_case
from .opinfo import reason_to_skip

FORK = mp.get_context("fork")
Axes = tuple[tuple[str, int], ...]
"""The names and sizes of a mesh's axes."""
Case = tuple[str, int, str]
"""An op, the number of its sample, and a class of layouts."""


# -- in the ranks ----------------------------------------------------------------------------------


def _serve_cases(
    end: Connection, rank: int, store: str, axes: Axes, inprocess: bool, samples: int
) -> None:
    """Runs cases until the pipe closes.

    `(op, -1, "")` requests how many samples an op has, and how many one device refused. The result
    is a text if the op is not in the sweep.
    """
    torch.set_num_threads(1)
    sys.stderr.flush()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # what kernels print of their own accord
    known: dict[str, Any] = {}
    mesh: Any = pt.ranks(**dict(axes)) if inprocess else _join_group(rank, store, axes)
    while True:
        try:
            name, number, klass = end.recv()
        except EOFError:
            os._exit(0)
        if name not in known:
            why = reason_to_skip(name)
            known = {name: (why, 0) if why else references(name, samples)}
        found, refused = known[name]
        if number < 0:
            end.send((found if isinstance(found, str) else len(found), refused))
        elif inprocess:
            try:
                end.send(mesh.run(run_case, name, number, found[number], klass))
            except Exception as error:
                end.send([Outcome("crash", f"{type(error).__name__}: {error}"[:240])])
        else:
            end.send([run_case(mesh, name, number, found[number], klass)])


def _join_group(rank: int, store: str, axes: Axes) -> Any:
    import torch.distributed as dist

    size = math.prod(n for _, n in axes)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=10),
    )
    return pt.init_device_mesh(
        "cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes)
    )


# -- the ranks, from outside -----------------------------------------------------------------------


class Team:
    """A team of ranks that run cases, and are started again when one hangs or ends.

    Args:
        axes: the sizes of the axes of their mesh.
        samples: the number of samples per op.
        inprocess: True uses simulated ranks (`pt.ranks`) in one process instead of Gloo ranks.
        limit: the most seconds for one case.
    """

    def __init__(self, axes: Axes, samples: int, inprocess: bool, limit: float):
        self.axes, self.samples, self.inprocess, self.limit = axes, samples, inprocess, limit
        self.ends: list[Connection] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(1 if self.inprocess else math.prod(n for _, n in self.axes)):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(
                target=_serve_cases,
                args=(theirs, rank, store, self.axes, self.inprocess, self.samples),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def stop(self) -> None:
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.ends, self.processes = [], []
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def samples_of(self, name: str) -> tuple[int, int, str]:
        """Counts the samples of the op `name`.

        Returns:
            Three values: the number of samples that run on one device, the number of samples that
            raise, and the reason why the op is skipped, or "".
        """
        answers = self._ask_ranks((name, -1, ""), 120)
        if isinstance(answers, Outcome):
            return 0, 0, f"its samples do not run on one device ({answers.detail})"
        count, refused = answers[0]
        if isinstance(count, str):
            return 0, 0, count
        return count, refused, "" if count else "no sample runs on one device"

    def run(self, case: Case) -> list[Outcome]:
        """Runs one case. Returns each rank's outcome; a single one if a rank does not answer."""
        answers = self._ask_ranks(case, self.limit)
        return [answers] if isinstance(answers, Outcome) else [o for some in answers for o in some]

    def _ask_ranks(self, case: Case, limit: float) -> list[Any] | Outcome:
        """Returns each rank's answer; an Outcome if they do not answer."""
        if not self.ends:
            self.start()
        for end in self.ends:
            end.send(case)
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + limit
        while len(answers) < len(self.ends):
            left = [end for end in self.ends if end not in answers]
            ready: Any = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:  # if the whole machine slept, the ranks get to finish what they began
                ready = wait(left, min(limit, 5.0))
            try:
                answers.update((end, end.recv()) for end in ready)
            except (EOFError, ConnectionError):
                self.stop()
                return Outcome("crash", "a rank died")
            if not ready:
                details = [o.detail for some in answers.values() for o in some]
                self.stop()
                return Outcome("hang", "; ".join(["no answer", *details]))
        return [answers[end] for end in self.ends]
