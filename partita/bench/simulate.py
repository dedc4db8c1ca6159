"""A bench of simulations.

How near to measured are simulated seconds of a step? This machine is calibrated at 2 and at 4
ranks. Then models of the examples train on as many Gloo ranks, compiled and run node by node:
twelve ways, of ZeRO, tensor parallelism and remat, and eight more of other widths and lengths.
Calibration sees none of them. Each is simulated, and timed in the same processes; what fails is
printed too. With --peaks the twelve's predicted peaks of memory stand beside the counted ones
instead: of the compiled step, and of the same step run eagerly.
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
    """A way, its simulated and its measured seconds; or what went wrong."""

    asked: SpreadStep
    simulated: float = 0.0
    measured: float = 0.0
    failure: str = ""

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def compare(ways: Sequence[SpreadStep], machine: Machine, steps: int) -> list[_Row]:
    """Of ways of equally many ranks the simulated and the measured seconds."""
    told = on_ranks(_measure_steps, ways[0].ranks, ways, machine, steps)
    rows = []
    for asked, found in zip(ways, zip(*told, strict=True), strict=True):
        failures = [one for one in found if isinstance(one, str)]
        if failures:
            rows.append(_Row(asked, failure=failures[0]))
        else:
            rows.append(_Row(asked, found[0][0], max(measured for _, measured in found)))
    return rows


def _measure_steps(
    rank: int, ranks: int, ways: Sequence[SpreadStep], machine: Machine, steps: int
) -> list[tuple[float, float] | str]:
    found: list[tuple[float, float] | str] = []
    for asked in ways:
        try:
            found.append(_measure_step(asked, machine, steps))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return found


def _measure_step(asked: SpreadStep, machine: Machine, steps: int) -> tuple[float, float]:
    """The simulated and the measured seconds of a step, which begins when all ranks are there."""
    step, args, mesh = asked.make()
    seconds = []
    for _ in range(steps + 3):
        dist.barrier()
        start = time.perf_counter()
        step(*args)
        seconds.append(time.perf_counter() - start)
    return pt.simulate(step, mesh, machine).seconds, median(seconds[3:])


@dataclass(frozen=True)
class _Peaks:
    """Bytes of a rank above what is held, of a compiled step and of the same step run eagerly."""

    compiled: int
    compiled_counted: int
    eager: int
    eager_counted: int


def _count_peaks(rank: int, ranks: int, ways: Sequence[SpreadStep]) -> list[_Peaks]:
    """Of ways the predicted and the counted peaks."""
    found = []
    for asked in ways:
        backend, device = dist.get_backend(), bench_device().type
        make_dry = partial(pt.dry_mesh, rank, backend=backend, device_type=device, **asked.mesh)
        eager = pt.eager_memory(lambda: asked.make_on(make_dry())[:2]).peak  # noqa: B023
        step, args, _ = asked.make()
        for _ in range(2):
            step(*args)
        compiled = counted(partial(step, *args), device=device)
        predicted = step.memory.peak
        del step
        step, args, optimizer = asked.make_on(_mesh_of(asked))
        for _ in range(2):
            step(*args)
        count = counted(partial(step, *args), device=device, before=optimizer.zero_grad)
        found.append(_Peaks(predicted, compiled, eager, count))
    return found


def _mesh_of(asked: SpreadStep) -> Any:
    sizes = tuple(asked.mesh.values())
    return pt.init_device_mesh(bench_device().type, sizes, mesh_dim_names=tuple(asked.mesh))


def _print_peaks() -> None:
    print(f"\n{'bytes of a rank above what is held':<40}", end="")
    for what in ("compiled", "eager"):
        print(f"{what:>12}{'counted':>12}{'off by':>9}", end="")
    print()
    worst = [0.0, 0.0]
    for ranks in (2, 4):
        ways = [asked for asked in TWELVE if asked.ranks == ranks]
        for asked, found in zip(ways, on_ranks(_count_peaks, ranks, ways)[0], strict=True):
            pairs = (
                (found.compiled, found.compiled_counted),
                (found.eager, found.eager_counted),
            )
            errors = [predicted / count - 1 for predicted, count in pairs]
            cells = "".join(
                f"{predicted:>12,}{count:>12,}{error:>+9.2%}"
                for (predicted, count), error in zip(pairs, errors, strict=True)
            )
            print(f"{asked!s:<40}{cells}")
            worst = [max(before, abs(error)) for before, error in zip(worst, errors, strict=True)]
    print(f"the furthest off: {worst[0]:.2%} compiled, {worst[1]:.2%} eager")


def _print_rows(title: str, rows: Sequence[_Row]) -> None:
    print(f"\n{title:<34}{'simulated':>12}{'measured':>12}{'off by':>9}")
    for row in rows:
        if row.failure:
            print(f"{row.asked!s:<34}  {row.failure}")
            continue
        times = f"{row.simulated * 1e3:>9.2f} ms{row.measured * 1e3:>9.2f} ms"
        print(f"{row.asked!s:<34}{times}{row.error:>+9.0%}")
    errors = [abs(row.error) for row in rows if not row.failure]
    if errors:
        print(f"median error {median(errors):.0%}, worst {max(errors):.0%}")


def _count_ordered(rows: Sequence[_Row]) -> tuple[int, int]:
    """Of pairs whose measured seconds are more than 10 % apart: in the right order, and all."""
    pairs = itertools.combinations([row for row in rows if not row.failure], 2)
    apart = [(a, b) for a, b in pairs if abs(a.measured / b.measured - 1) > 0.1]
    right = sum((a.simulated < b.simulated) == (a.measured < b.measured) for a, b in apart)
    return right, len(apart)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench; print each way, the errors, and how many pairs are in the right order."""
    parser = argparse.ArgumentParser(prog="partita bench simulate", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="that are timed (20)")
    each = "a machine file of so many ranks, such as 2=machine.toml (calibrates)"
    parser.add_argument("--machine", action="append", default=[], metavar="RANKS=FILE", help=each)
    parser.add_argument("--peaks", action="store_true", help="peaks of memory in place of seconds")
    options = parser.parse_args(argv)
    if options.peaks:
        return _print_peaks()
    given = dict(one.split("=", 1) for one in options.machine)
    found: dict[SpreadStep, _Row] = {}
    for ranks in (2, 4):
        # Right before what it predicts: a machine that others use is not the same an hour later.
        machine = load_machine(given[str(ranks)]) if str(ranks) in given else calibrate(ranks)
        ways = [asked for asked in (*TWELVE, *EIGHT) if asked.ranks == ranks]
        found.update(zip(ways, compare(ways, machine, options.steps), strict=True))
    rows = [[found[asked] for asked in part] for part in (TWELVE, EIGHT)]
    _print_rows("twelve ways", rows[0])
    _print_rows("eight more", rows[1])
    right, all_pairs = _count_ordered([*rows[0], *rows[1]])
    share = f" ({right / all_pairs:.0%})" if all_pairs else ""
    print(f"\nof {all_pairs} pairs more than 10 % apart {right}{share} are in the right order")
