"""A sweep over torch's ops: which are right on DTensors, for each class of their arguments'
layouts.

It runs every op of torch's own list (OpInfo) with its samples, forward and backward, on a mesh of
Gloo ranks, and compares with one device. Arguments are replicated, sharded evenly, sharded
unevenly, Partial, or mixed. An op is right in a class if all its samples are. "raise" means a
LayoutError with a reason, equal on all ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import torch

from partita.report import written_file
from partita.testing import opinfo
from partita.testing.op_case import OUTCOMES, Outcome, merge_outcomes
from partita.testing.op_layouts import CLASSES
from partita.testing.op_team import FORK, Axes, Team


@dataclass
class Found:
    """The results of a sweep over ops.

    Attributes:
        results: for each op and class of layouts, the worst outcome of its samples.
        skipped: the reason for each skipped op.
        cases: the number of runs: one for each sample and class.
        refused: the number of samples that raise on one device.
    """

    results: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    cases: int = 0
    refused: int = 0

    def add(self, other: Found) -> None:
        self.results |= other.results
        self.skipped |= other.skipped
        self.cases += other.cases
        self.refused += other.refused

    def worst(self) -> dict[str, Outcome]:
        """Returns the worst outcome of each op, over all classes of layouts."""
        worst = {}
        for name, by in self.results.items():
            worst[name] = Outcome("right")
            for o in by.values():
                worst[name] = worst[name].worse(o)
        return worst


def sweep(
    names: Sequence[str],
    classes: Sequence[str],
    team: Team,
    report: Callable[[str, dict[str, Outcome]], None] = lambda name, by: None,
) -> Found:
    """Runs ops with their samples in all classes of layouts. Then ends the team of ranks.

    Args:
        names: the names of the ops.
        classes: the names of the classes of layouts.
        team: the ranks that run them.
        report: a function that is called after each op with its name and its outcomes by class.
    """
    found = Found()
    for name in names:
        count, refused, why = team.samples_of(name)
        found.refused += refused
        if why:
            found.skipped[name] = why
            report(name, {})
            continue
        by = found.results[name] = dict.fromkeys(classes, Outcome("right"))
        for klass in classes:
            for number in range(count):
                outcome = merge_outcomes(team.run((name, number, klass)))
                found.cases += 1
                if outcome.kind != "right":
                    outcome = Outcome(outcome.kind, f"sample {number}: {outcome.detail}")
                by[klass] = by[klass].worse(outcome)
        report(name, by)
    team.stop()
    return found


# -- command line ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partita bench ops", description=__doc__)
    add = parser.add_argument
    add("--ops", nargs="+", metavar="NAME", help="only these ops, with their variants")
    add(
        "--classes",
        nargs="+",
        choices=CLASSES,
        default=list(CLASSES),
        help="kinds of layouts of the arguments (all)",
    )
    add("--samples", type=int, default=3, help="samples per op, small ones first (%(default)s)")
    add(
        "--variants",
        action="store_true",
        help="also methods, operators, in-place, out= and aliases",
    )
    add(
        "--autocast",
        action="store_true",
        help="run under bf16 autocast, with bf16 and float32 inputs",
    )
    add("--mesh", type=_mesh, default=(("dp", 2),), metavar="dp=2,tp=2", help="the mesh (dp=2)")
    add(
        "--inprocess",
        action="store_true",
        help="simulate the ranks in one process, which is faster",
    )
    add("--jobs", type=int, default=1, help="number of meshes that run at once (%(default)s)")
    add(
        "--limit",
        type=float,
        default=20,
        help="seconds without an answer that count as a hang (20)",
    )
    add("--json", type=written_file, metavar="FILE", help="also write all outcomes to this file")
    return parser


def _mesh(text: str) -> Axes:
    axes = tuple((name, int(n)) for name, _, n in (part.partition("=") for part in text.split(",")))
    if len(dict(axes)) < len(axes) or any(n < 1 for _, n in axes):
        raise ValueError(text)
    return axes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `partita bench ops`. Returns the exit code.

    It is 1 if an op is wrong, hangs or crashes; 2 if there is no op of a name in the command line.

    Args:
        argv: the command line without the program's name; None for `sys.argv`.
    """
    options = _parser().parse_args(argv)
    names = opinfo.list_names(options.variants, options.autocast)
    if options.ops:
        names_by_option = {
            o: [n for n in names if re.match(rf"{re.escape(o)}($|[.:])", n)] for o in options.ops
        }
        if unknown := [o for o, meant in names_by_option.items() if not meant]:
            print(f"no such op: {' '.join(unknown)}", file=sys.stderr)
            return 2
        names = list(dict.fromkeys(n for meant in names_by_option.values() for n in meant))
    start = time.monotonic()
    found = _in_jobs(names, options)
    print(_table(found, options.classes))
    axes = ",".join(f"{a}={n}" for a, n in options.mesh)
    kind = "simulated ranks in one process" if options.inprocess else "Gloo ranks"
    seconds = time.monotonic() - start
    print(
        f"{math.prod(n for _, n in options.mesh)} {kind} ({axes}), up to {options.samples} samples "
        f"per op: {found.cases} cases in {seconds:.0f} s, torch {torch.__version__}"
    )
    if options.json:
        options.json.write_text(json.dumps(_plain(found, options, seconds), indent=1))
    bad = {o.kind for o in found.worst().values()} - {"right", "raise"}
    return 1 if bad else 0


def _plain(found: Found, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "mesh": dict(options.mesh),
        "ranks": "simulated" if options.inprocess else "processes",
        "samples": options.samples,
        "seconds": round(seconds, 1),
        "cases": found.cases,
        "refused": found.refused,
        "results": {
            name: {k: [o.kind, o.detail] for k, o in by.items()}
            for name, by in found.results.items()
        },
        "skipped": found.skipped,
    }


def _in_jobs(names: Sequence[str], options: argparse.Namespace) -> Found:
    """Sweeps the ops in several processes, which report each op and then all results."""
    jobs = []
    for i in range(max(1, options.jobs)):
        ours, theirs = FORK.Pipe(duplex=False)
        # Not a daemon: it has children of its own.
        process = FORK.Process(target=_job, args=(names[i :: options.jobs], options, theirs))
        process.start()
        theirs.close()
        jobs.append((ours, process))
    found, done = Found(), 0
    waiting = dict(jobs)
    end: Any
    while waiting:
        for end in wait(list(waiting)):
            said = end.recv()
            if isinstance(said, Found):
                found.add(said)
                waiting.pop(end).join()
            else:
                done += 1
                _show(done, len(names), *said)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    order = {name: i for i, name in enumerate(names)}
    found.results = dict(sorted(found.results.items(), key=lambda item: order[item[0]]))
    return found


def _job(names: Sequence[str], options: argparse.Namespace, end: Any) -> None:
    team = Team(options.mesh, options.samples, options.inprocess, options.limit)
    try:
        end.send(sweep(names, options.classes, team, lambda name, by: end.send((name, by))))
    finally:
        team.stop()


def _show(done: int, total: int, name: str, by: dict[str, Outcome]) -> None:
    """Prints the progress of the sweep, and each op that is not right."""
    tty = sys.stderr.isatty()
    start = "\r\033[K" if tty else ""
    for klass, o in by.items():
        if o.kind != "right":
            line = f"{o.kind:<6} {name} ({klass}): {o.detail}"
            print(f"{start}{line:.120}", file=sys.stderr, flush=True)
    if tty:
        print(f"{start}{done} of {total}  {name}", end="", file=sys.stderr, flush=True)


# -- the table -------------------------------------------------------------------------------------


def _table(found: Found, classes: Sequence[str]) -> str:
    lines = []
    for kind in reversed(OUTCOMES[1:]):
        for name, by in found.results.items():
            classes_of: dict[str, list[str]] = {}
            for klass, o in by.items():
                if o.kind == kind:
                    classes_of.setdefault(o.detail, []).append(klass)
            for detail, where in classes_of.items():
                lines.append(f"{kind:<6} {name}  ({', '.join(where)})")
                lines += textwrap.wrap(
                    detail, 96, initial_indent=" " * 7, subsequent_indent=" " * 7
                )
    lines += [""] * bool(lines)
    for why, count in Counter(found.skipped.values()).most_common():
        which = " ".join(n for n, w in found.skipped.items() if w == why)
        lines += textwrap.wrap(f"left out {count}, {why}: {which}", 96, subsequent_indent="  ")
    if found.refused:
        lines.append(f"left out {found.refused} samples that one device refuses")
    lines += [""] * bool(found.skipped or found.refused)
    lines.append(f"{'ops by class':<16}" + "".join(f"{k:>8}" for k in OUTCOMES) + f"{'right':>10}")
    worst = found.worst()
    rows = {k: [by[k] for by in found.results.values()] for k in classes}
    rows["all classes"] = list(worst.values())
    for klass, outcomes in rows.items():
        counts = Counter(o.kind for o in outcomes)
        share = 100 * counts["right"] / len(outcomes) if outcomes else 0.0
        cells = "".join(f"{counts[k]:>8}" for k in OUTCOMES)
        lines.append(f"{klass:<16}{cells}{share:>8.1f} %")
    counts = Counter(o.kind for o in worst.values())
    rest = ", ".join(f"{counts[k]} {k}" for k in OUTCOMES[1:])
    lines.append(f"\n{counts['right']} of {len(worst)} ops are right in all classes; {rest}")
    return "\n".join(lines)
