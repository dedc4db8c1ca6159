"""A bench of simulations: compares the simulated seconds of training steps with measured ones.

This machine is calibrated at 2 and at 4 ranks, without running any model. Then models of the
examples train on as many Gloo ranks, compiled and run node by node: in twelve configurations with
ZeRO, tensor parallelism and remat, and in eight more with other widths and lengths. Each is
simulated, and timed in the same processes. Failures are printed, too.

With --peaks the bench prints predicted and counted memory peaks of the twelve instead: those of the
compiled step, and of the same step run eagerly.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch import distributed as dist

import partita as pt
from partita.predict.calibrate import calibrate
from partita.predict.machine import Machine, load_machine
from partita.testing.allocated_bytes import counted

from .interleaved import on_ranks
from .place import bench_device
from .spread_steps import SpreadStep

_DP, _TP = {"dp": 2}, {"tp": 2}
_FOUR, _BOTH = {"dp": 4}, {"dp": 2, "tp": 2}
TWELVE = (
    SpreadStep("gpt", _DP, 0, width=256, context=128),
    SpreadStep("gpt", _DP, 1),
    SpreadStep("gpt", _DP, 3, remat=True, width=256, context=128),
    SpreadStep("gpt", _TP, width=256),
    SpreadStep("llama", _DP, 3),
    SpreadStep("llama", _TP, remat=True),
    SpreadStep("cnn", _DP, 0, width=32, samples=64),
    SpreadStep("gpt", _FOUR, 1),
    SpreadStep("gpt", _FOUR, 3, width=256),
    SpreadStep("gpt", _BOTH, 2, remat=True),
    SpreadStep("llama", _BOTH, 3, remat=True),
    SpreadStep("cnn", _FOUR, 0, width=32, samples=64),
)
EIGHT = (
    SpreadStep("gpt", _DP, 2, width=512, context=128),
    SpreadStep("gpt", _DP, 0, width=192, context=256, samples=8),
    SpreadStep("llama", _TP, width=384, samples=4),
    SpreadStep("cnn", _DP, 3, width=64, samples=128),
    SpreadStep("gpt", {"tp": 4}, remat=True, width=256),
    SpreadStep("llama", _FOUR, 2, width=256),
    SpreadStep("llama", _BOTH, 1, width=320, context=32),
    SpreadStep("gpt", _FOUR, 0, remat=True, width=192, context=96),
)


@dataclass(frozen=True)
class _Row:
    """A way, and its simulated and measured seconds, or its error."""

    way: SpreadStep
    simulated: float = 0.0
    measured: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def compare(ways: Sequence[SpreadStep], machine: Machine, steps: int) -> list[_Row]:
    """Returns the simulated and the measured seconds of training configurations, or the error.

    Args:
        ways: the configurations. All must have the same number of ranks.
        machine: the machine for the simulation.
        steps: the number of steps that are timed.
    """
    results = on_ranks(_measure_steps, ways[0].ranks, ways, machine, steps)
    rows = []
    for way, found in zip(ways, zip(*results, strict=True), strict=True):
        failures = [one for one in found if isinstance(one, str)]
        if failures:
            rows.append(_Row(way, failure=failures[0]))
        else:
            rows.append(_Row(way, found[0][0], max(measured for _, measured in found)))
    return rows


def _measure_steps(
    rank: int, ranks: int, ways: Sequence[SpreadStep], machine: Machine, steps: int
) -> list[tuple[float, float] | str]:
    found: list[tuple[float, float] | str] = []
    for way in ways:
        try:
            found.append(_measure_step(way, machine, steps))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return found


def _measure_step(way: SpreadStep, machine: Machine, steps: int) -> tuple[float, float]:
    """Returns the simulated and the measured seconds of a step, which begins with a barrier."""
    step, args, mesh = way.make()
    seconds = []
    for _ in range(steps + 3):
        dist.barrier()
        start = time.perf_counter()
        step(*args)
        seconds.append(time.perf_counter() - start)
    return pt.simulate(step, mesh, machine).seconds, median(seconds[3:])


@dataclass(frozen=True)
class _Peaks:
    """The peak bytes of a rank above those held between steps, compiled and run eagerly."""

    compiled: int
    compiled_counted: int
    eager: int
    eager_counted: int


def _count_peaks(rank: int, ranks: int, ways: Sequence[SpreadStep]) -> list[_Peaks]:
    """Returns the predicted and the counted peaks of each way."""
    found = []
    for way in ways:
        backend, device = dist.get_backend(), bench_device().type
        make_dry = partial(pt.dry_mesh, rank, backend=backend, device_type=device, **way.mesh)
        eager = pt.eager_memory(lambda: way.make_on(make_dry())[:2]).peak  # noqa: B023
        step, args, _ = way.make()
        for _ in range(2):
            step(*args)
        compiled = counted(partial(step, *args), device=device)
        predicted = step.memory.peak
        del step
        step, args, optimizer = way.make_on(_mesh_of(way))
        for _ in range(2):
            step(*args)
        count = counted(partial(step, *args), device=device, before=optimizer.zero_grad)
        found.append(_Peaks(predicted, compiled, eager, count))
    return found


def _mesh_of(way: SpreadStep) -> Any:
    sizes = tuple(way.mesh.values())
    return pt.init_device_mesh(bench_device().type, sizes, mesh_dim_names=tuple(way.mesh))


def _print_peaks() -> None:
    print(f"\n{'bytes of a rank above what is held':<40}", end="")
    for what in ("compiled", "eager"):
        print(f"{what:>12}{'counted':>12}{'off by':>9}", end="")
    print()
    worst = [0.0, 0.0]
    for ranks in (2, 4):
        ways = [way for way in TWELVE if way.ranks == ranks]
        for way, found in zip(ways, on_ranks(_count_peaks, ranks, ways)[0], strict=True):
            pairs = (
                (found.compiled, found.compiled_counted),
                (found.eager, found.eager_counted),
            )
            errors = [predicted / count - 1 for predicted, count in pairs]
            cells = "".join(
                f"{predicted:>12,}{count:>12,}{error:>+9.2%}"
                for (predicted, count), error in zip(pairs, errors, strict=True)
            )
            print(f"{way!s:<40}{cells}")
            worst = [max(before, abs(error)) for before, error in zip(worst, errors, strict=True)]
    print(f"the furthest off: {worst[0]:.2%} compiled, {worst[1]:.2%} eager")


def _print_rows(title: str, rows: Sequence[_Row]) -> None:
    print(f"\n{title:<34}{'simulated':>12}{'measured':>12}{'off by':>9}")
    for row in rows:
        if row.failure:
            print(f"{row.way!s:<34}  {row.failure}")
            continue
        times = f"{row.simulated * 1e3:>9.2f} ms{row.measured * 1e3:>9.2f} ms"
        print(f"{row.way!s:<34}{times}{row.error:>+9.0%}")
    errors = [abs(row.error) for row in rows if not row.failure]
    if errors:
        print(f"median error {median(errors):.0%}, worst {max(errors):.0%}")


def _count_ordered(rows: Sequence[_Row]) -> tuple[int, int]:
    """Returns (pairs in the right order, all pairs), of ways whose times differ by over 10 %."""
    pairs = itertools.combinations([row for row in rows if not row.failure], 2)
    apart = [(a, b) for a, b in pairs if abs(a.measured / b.measured - 1) > 0.1]
    right = sum((a.simulated < b.simulated) == (a.measured < b.measured) for a, b in apart)
    return right, len(apart)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `partita bench simulate`.

    It prints each way, the errors, and the number of pairs in the right order.

    Args:
        argv: the command line without the program's name; None for `sys.argv`.
    """
    parser = argparse.ArgumentParser(prog="partita bench simulate", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="number of steps that are timed (20)")
    each = "a machine file of so many ranks, such as 2=machine.toml (calibrates)"
    parser.add_argument("--machine", action="append", default=[], metavar="RANKS=FILE", help=each)
    parser.add_argument(
        "--peaks", action="store_true", help="compare peaks of memory instead of seconds"
    )
    options = parser.parse_args(argv)
    if options.peaks:
        return _print_peaks()
    given = dict(one.split("=", 1) for one in options.machine)
    found: dict[SpreadStep, _Row] = {}
    for ranks in (2, 4):
        # Calibrate just before the measurement, because the load of a shared machine changes.
        machine = load_machine(given[str(ranks)]) if str(ranks) in given else calibrate(ranks)
        ways = [way for way in (*TWELVE, *EIGHT) if way.ranks == ranks]
        found.update(zip(ways, compare(ways, machine, options.steps), strict=True))
    rows = [[found[way] for way in part] for part in (TWELVE, EIGHT)]
    _print_rows("twelve ways", rows[0])
    _print_rows("eight more", rows[1])
    right, all_pairs = _count_ordered([*rows[0], *rows[1]])
    share = f" ({right / all_pairs:.0%})" if all_pairs else ""
    print(f"\nof {all_pairs} pairs more than 10 % apart {right}{share} are in the right order")
