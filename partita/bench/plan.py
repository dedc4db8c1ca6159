"""A bench of plans: how much slower `pt.autoplan`'s first way to train is than the fastest one.

A way is a training configuration. This machine is calibrated at 4 ranks, and the models of the four
examples are planned for them. The plan's ten best ways, and five random others, train on as many
Gloo ranks in turns, compiled and run node by node. The first way may be at most 10 % slower than
the fastest measured one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import partita as pt
from partita.app.models import GPT, Llama
from partita.predict.autoplan import WaySearch
from partita.predict.calibrate import calibrate
from partita.predict.machine import Machine, load_machine
from partita.predict.strategy import ModelShape, Strategy, Way, make_step, ways_of

from .interleaved import in_turns, on_ranks
from .place import bench_device
from .spread_steps import ExpertModel, make_cnn, plan_experts

_RANKS, _BATCH = 4, 16
_BEST, _OTHERS, _SIMULATED = 10, 5, 40
MAY_BE_SLOWER = 0.1


def _make_gpt(layers: int, context: int) -> nn.Module:
    return GPT(layers=layers, width=128, heads=4, context=context)


def _make_llama(layers: int, context: int) -> nn.Module:
    return Llama(layers=layers, width=128, heads=8, groups=4, context=context)


def _make_experts(layers: int, context: int) -> nn.Module:
    return ExpertModel(64, context)


def _make_digits(layers: int, context: int) -> nn.Module:
    return make_cnn(32)


def _draw_digits(samples: int, context: int) -> tuple[Tensor, Tensor]:
    return torch.rand(samples, 1, 8, 8), torch.randint(0, 10, (samples,))


_ALONE = {"layers": 1, "width": 64, "vocab": 256, "has_blocks": False, "has_sequence": False}
EXAMPLES = {
    shape.name: shape
    for shape in (
        ModelShape(_make_gpt, 2, 128, 4, 4, 64, 256, pt.plans.gpt, "gpt"),
        ModelShape(_make_llama, 2, 128, 8, 4, 64, 256, pt.plans.llama, "llama"),
        ModelShape(
            _make_digits,
            heads=1,  # tp shards nothing
            groups=1,
            context=1,
            plan=dict,
            name="cnn",
            make_batch=_draw_digits,
            sums=0,
            **_ALONE,  # type: ignore[arg-type]
        ),
        ModelShape(
            _make_experts,
            heads=8,
            groups=8,
            context=16,  # short, because a graph unrolls the recurrent layer
            plan=plan_experts,
            name="moe",
            sums=0,
            **_ALONE,  # type: ignore[arg-type]
        ),
    )
}


@dataclass(frozen=True)
class PlacedWay:
    """One training configuration (way): its place in a plan, its predicted and its measured time.

    Attributes:
        way: the mesh and the strategy.
        place: its position in the plan, from 1; 0 if it is not among the best.
        simulated, measured: seconds of a step.
        failure: why it could not be measured, or "".
    """

    way: Way
    place: int
    simulated: float
    measured: float = 0.0
    failure: str = ""


def _plan_example(shape: ModelShape, machine: Machine, draw: random.Random) -> list[PlacedWay]:
    """Returns the plan's best ways, and some other simulated ways that fit, drawn at random."""
    ways = list(ways_of(shape, _RANKS, _BATCH, machine, Strategy(precision="float32")))
    search = WaySearch(shape, machine.memory_bytes, machine, prune=True, keep=_BEST)
    best = search.run(ways, most=_SIMULATED)
    planned = {choice.way for choice in best}
    left = [way for way in ways if way not in planned]
    others = draw.sample(left, min(_OTHERS, len(left)))
    print(f"\n{shape.name}: of {len(ways)} ways {len(search.found)} simulated", flush=True)
    found = [PlacedWay(c.way, i, c.seconds) for i, c in enumerate(best, 1)]
    return found + [PlacedWay(way, 0, search.price_way(way)[0]) for way in others]


def _measure_ways(
    rank: int, ranks: int, name: str, ways: Sequence[Way], rounds: int
) -> list[float | str]:
    """Returns the median seconds of each way's step, or why it does not run."""
    steps: dict[str, Any] = {}
    failures: dict[int, str] = {}
    for number, way in enumerate(ways):
        try:
            sizes = tuple(way.mesh.values())
            device = bench_device().type
            mesh = pt.init_device_mesh(device, sizes, mesh_dim_names=tuple(way.mesh))
            torch.manual_seed(0)
            step, args, _ = make_step(EXAMPLES[name], way.mesh, way.strategy, on=mesh)
            compiled = pt.compile(step, backend="graph")
            steps[str(number)] = lambda compiled=compiled, args=args: compiled(*args)
            steps[str(number)]()
        except Exception as error:
            steps.pop(str(number), None)
            failures[number] = f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = in_turns(steps, rounds, 2, dist.barrier)
    return [failures.get(i) or median(seconds[str(i)]) for i in range(len(ways))]


def _measure_example(name: str, found: Sequence[PlacedWay], rounds: int) -> list[PlacedWay]:
    results = on_ranks(_measure_ways, _RANKS, name, [one.way for one in found], rounds)
    rows = []
    for one, answers in zip(found, zip(*results, strict=True), strict=True):
        failures = [answer for answer in answers if isinstance(answer, str)]
        measured = 0.0 if failures else max(answers)
        failure = failures[0] if failures else ""
        rows.append(PlacedWay(one.way, one.place, one.simulated, measured, failure))
    return rows


def _print_rows(rows: Sequence[PlacedWay]) -> float:
    """Prints an example's ways. Returns by which fraction the plan's first is not the fastest."""
    for row in rows:
        place = f"{row.place:>3}." if row.place else "   -"
        end = row.failure or f"{row.measured * 1e3:>9.2f} ms"
        print(f"{place}  {row.way!s:<64}{row.simulated * 1e3:>9.2f} ms{end}", flush=True)
    ran = [row.measured for row in rows if not row.failure]
    if not ran or rows[0].failure:
        print("  the winner does not run")
        return float("inf")
    slower = rows[0].measured / min(ran) - 1
    print(f"  the winner is {slower:.0%} slower than the fastest measured of {len(ran)}")
    return slower


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `partita bench plan`.

    Returns 1 if a plan's first way is more than 10 % slower than the fastest measured one.

    Args:
        argv: the command line without the program's name; None for `sys.argv`.
    """
    parser = argparse.ArgumentParser(prog="partita bench plan", description=__doc__)
    parser.add_argument("--examples", nargs="+", choices=list(EXAMPLES), default=list(EXAMPLES))
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds in which each way is timed (9)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the ways that are drawn at random (0)"
    )
    parser.add_argument(
        "--machine", metavar="FILE", help="machine file for 4 ranks (default: calibrate)"
    )
    options = parser.parse_args(argv)
    draw, slower = random.Random(options.seed), []
    for name in options.examples:
        # Calibrate just before the prediction, because the load of a shared machine changes.
        machine = load_machine(options.machine) if options.machine else calibrate(_RANKS)
        planned = _plan_example(EXAMPLES[name], machine, draw)
        slower.append(_print_rows(_measure_example(name, planned, options.rounds)))
    print(f"\nthe winner furthest off: {max(slower):.0%} ({MAY_BE_SLOWER:.0%} allowed)")
    return int(max(slower) > MAY_BE_SLOWER)
