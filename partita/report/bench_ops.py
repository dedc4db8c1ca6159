"""How many of torch's ops are right on DTensors, in every class of arguments?

`partita bench ops` runs every OpInfo with float32 samples on two Gloo ranks, forward and backward,
and compares with one device (see `opinfo`). This process never computes: it forks the ranks, hands
them one case after the other and waits for both to answer. Ranks that do not answer in time are
hanging, ranks that die have crashed; either way they are replaced and the sweep goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import partita as pt

from .opinfo import CLASSES, OUTCOMES, Outcome, names_of_ops, references, run_case, why_not

__all__ = ["Team", "main", "sweep"]

_FORK = mp.get_context("fork")
Case = tuple[str, int, str]
"""An op, the number of its sample, a class."""


# -- in the ranks ----------------------------------------------------------------------------------


def _serve(end: Connection, rank: int, store: str, inprocess: bool, samples: int) -> None:
    """Answer cases until the pipe closes. `(op, -1, "")` asks how many samples an op has."""
    torch.set_num_threads(1)
    sys.stderr.flush()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # what kernels print of their own accord
    known: dict[str, Any] = {}
    if inprocess:
        world = pt.ranks(dp=2)
    else:
        mesh = _join(rank, store)
    while True:
        try:
            name, number, klass = end.recv()
        except EOFError:
            os._exit(0)
        if name not in known:
            why = why_not(name)
            known = {name: why or references(name, samples)}
        found = known[name]
        if number < 0:
            end.send(found if isinstance(found, str) else len(found))
        elif inprocess:
            outcomes: list[Any] = [Outcome("crash", "the world broke down")]
            try:
                outcomes = world.run(run_case, name, number, found[number], klass)
            except Exception as error:
                outcomes = [Outcome("crash", f"{type(error).__name__}: {error}"[:240])]
            end.send(_together(outcomes))
        else:
            end.send(run_case(mesh, name, number, found[number], klass))


def _join(rank: int, store: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=10),
    )
    return pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    """The ranks' outcomes as one: the worst. To raise on some ranks only is a hang in waiting."""
    worst = outcomes[0]
    for o in outcomes[1:]:
        worst = worst.worse(o)
    if len({o.kind == "raise" for o in outcomes}) > 1 and worst.kind in ("right", "raise"):
        return Outcome("crash", f"raised on one rank only: {worst.detail}")
    return worst


# -- the ranks, from outside -----------------------------------------------------------------------


class Team:
    """Two ranks that answer cases, started anew when they hang or die.

    Args:
        samples: per op.
        inprocess: simulated ranks (`pt.ranks`) in one process instead of Gloo's.
        limit: seconds for one answer.
    """

    def __init__(self, samples: int, inprocess: bool, limit: float):
        self.samples, self.inprocess, self.limit = samples, inprocess, limit
        self.ends: list[Connection] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(1 if self.inprocess else 2):
            ours, theirs = _FORK.Pipe()
            process = _FORK.Process(
                target=_serve,
                args=(theirs, rank, store, self.inprocess, self.samples),
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

    def ask(self, case: Case, limit: float | None = None) -> list[Any] | Outcome:
        """Each rank's answer; an Outcome if they do not answer."""
        if not self.ends:
            self.start()
        for end in self.ends:
            end.send(case)
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + (limit or self.limit)
        while len(answers) < len(self.ends):
            left = [end for end in self.ends if end not in answers]
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            try:
                answers.update((end, end.recv()) for end in ready)  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                self.stop()
                return Outcome("crash", "a rank died")
            if not ready:
                told = [a.detail for a in answers.values() if isinstance(a, Outcome)]
                self.stop()
                return Outcome("hang", "; ".join(["no answer", *told]))
        return list(answers.values())


def sweep(
    names: Sequence[str], classes: Sequence[str], team: Team, tell: Any = None
) -> tuple[dict[str, dict[str, Outcome]], dict[str, str]]:
    """Run ops in all classes: per op and class the worst outcome of its samples, and the skipped
    ops with the reason."""
    results: dict[str, dict[str, Outcome]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        answer = team.ask((name, -1, ""), limit=120)
        if isinstance(answer, Outcome):
            skipped[name] = f"its samples do not run on one device ({answer.detail})"
            continue
        if answer[0] == 0:
            skipped[name] = "no sample runs on one device"
            continue
        if isinstance(answer[0], str):
            skipped[name] = answer[0]
            continue
        results[name] = dict.fromkeys(classes, Outcome("right"))
        for klass in classes:
            for number in range(answer[0]):
                told = team.ask((name, number, klass))
                outcome = told if isinstance(told, Outcome) else _together(told)
                if outcome.kind != "right":
                    outcome = Outcome(outcome.kind, f"sample {number}: {outcome.detail}")
                results[name][klass] = results[name][klass].worse(outcome)
        if tell is not None:
            tell(name, results[name])
    team.stop()
    return results, skipped


# -- command line ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partita bench ops", description=__doc__)
    add = parser.add_argument
    add("--ops", nargs="+", metavar="NAME", help="only these (a name takes its variants along)")
    add("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    add("--samples", type=int, default=3, help="per op, small ones first (%(default)s)")
    add("--inprocess", action="store_true", help="simulated ranks in one process: faster")
    add("--jobs", type=int, default=1, help="pairs of ranks at a time (%(default)s)")
    add("--limit", type=float, default=20, help="seconds without an answer that are a hang")
    add("--json", metavar="FILE", help="write all outcomes there too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; 1 if anything is wrong, hangs or crashes."""
    options = _parser().parse_args(argv)
    names = names_of_ops()
    if options.ops:
        unknown = [o for o in options.ops if not any(o in (n, n.split(".")[0]) for n in names)]
        if unknown:
            print(f"no such op: {' '.join(unknown)}", file=sys.stderr)
            return 2
        names = [n for n in names if n in options.ops or n.split(".")[0] in options.ops]
    start = time.monotonic()
    results: dict[str, dict[str, Outcome]] = {}
    skipped: dict[str, str] = {}
    for some, left_out in _jobs(names, options):
        results |= some
        skipped |= left_out
    print(_table(results, skipped, options.classes))
    where = "simulated ranks in one process" if options.inprocess else "Gloo ranks"
    print(f"2 {where}, {options.samples} samples per op, {time.monotonic() - start:.0f} s")
    if options.json:
        with open(options.json, "w") as file:
            plain = {
                name: {k: [o.kind, o.detail] for k, o in by.items()} for name, by in results.items()
            }
            json.dump({"results": plain, "skipped": skipped}, file, indent=1)
    bad = {o.kind for by in results.values() for o in by.values()} - {"right", "raise"}
    return 1 if bad else 0


def _jobs(names: Sequence[str], options: argparse.Namespace) -> list[Any]:
    if options.jobs <= 1:
        return [_job(names, options)]
    parts = [names[i :: options.jobs] for i in range(options.jobs)]
    pipes = []
    for part in parts:
        ours, theirs = _FORK.Pipe(duplex=False)
        # Not a daemon: it has children of its own.
        process = _FORK.Process(target=lambda p, e: e.send(_job(p, options)), args=(part, theirs))
        process.start()
        pipes.append((ours, process))
    found = [(ours.recv(), process.join())[0] for ours, process in pipes]
    return found


def _job(names: Sequence[str], options: argparse.Namespace) -> Any:
    def tell(name: str, by: dict[str, Outcome]) -> None:
        for klass, o in by.items():
            if o.kind != "right":
                print(f"{o.kind:<6}{name:<40}{klass:<11}{o.detail}", file=sys.stderr, flush=True)

    team = Team(options.samples, options.inprocess, options.limit)
    try:
        return sweep(names, options.classes, team, tell)
    finally:
        team.stop()


def _table(
    results: dict[str, dict[str, Outcome]], skipped: dict[str, str], classes: Sequence[str]
) -> str:
    lines = []
    for kind in reversed(OUTCOMES[1:]):
        for name, by in results.items():
            for klass, o in by.items():
                if o.kind == kind:
                    lines.append(f"{kind:<6}{name:<40}{klass:<11}{o.detail}")
    lines.append("")
    for why, count in Counter(skipped.values()).most_common():
        which = " ".join(n for n, w in skipped.items() if w == why)
        lines.append(f"skipped {count}: {why}: {which}")
    lines.append("")
    lines.append(f"{'':<20}" + "".join(f"{k:>8}" for k in OUTCOMES))
    for klass in classes:
        counts = Counter(by[klass].kind for by in results.values())
        lines.append(f"{klass:<20}" + "".join(f"{counts[k]:>8}" for k in OUTCOMES))
    worst = {}
    for name, by in results.items():
        worst[name] = Outcome("right")
        for o in by.values():
            worst[name] = worst[name].worse(o)
    counts = Counter(o.kind for o in worst.values())
    lines.append(f"{'worst of an op':<20}" + "".join(f"{counts[k]:>8}" for k in OUTCOMES))
    n = len(results)
    share = 100 * counts["right"] / n if n else 0.0
    rest = ", ".join(f"{k} {counts[k]}" for k in OUTCOMES[1:])
    lines.append(f"\nright in all classes: {counts['right']} of {n} ops ({share:.1f} %), {rest}")
    return "\n".join(lines)
