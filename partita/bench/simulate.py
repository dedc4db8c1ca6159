"""A bench of simulations.

How near to measured are simulated seconds of a step? After `partita calibrate` at the same number
of ranks, small GPTs train on Gloo ranks, compiled and run node by node; each is simulated and timed
in the same processes.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import partita as pt
from partita.app.models import GPT
from partita.predict.calibrate import calibrate
from partita.predict.machine import Machine

from .interleaved import on_ranks

__all__ = ["main"]

CONFIGS: dict[str, dict[str, Any]] = {
    "zero 0": {"mesh": {"dp": 2}, "zero": 0},
    "zero 1": {"mesh": {"dp": 2}, "zero": 1},
    "zero 2": {"mesh": {"dp": 2}, "zero": 2},
    "zero 3": {"mesh": {"dp": 2}, "zero": 3},
    "zero 3, remat": {"mesh": {"dp": 2}, "zero": 3, "remat": True},
    "zero 3, wide": {"mesh": {"dp": 2}, "zero": 3, "width": 512},
    "zero 0, long": {"mesh": {"dp": 2}, "zero": 0, "context": 256},
    "tp": {"mesh": {"tp": 2}, "zero": 0},
    "tp, wide": {"mesh": {"tp": 2}, "zero": 0, "width": 512},
    "tp, remat": {"mesh": {"tp": 2}, "zero": 0, "remat": True},
}


def _compare(rank: int, ranks: int, machine: Machine, steps: int) -> list[tuple[float, float]]:
    """Of each configuration its simulated and its measured seconds."""
    return [_one(machine, steps, **config) for config in CONFIGS.values()]


def _one(
    machine: Machine,
    steps: int,
    mesh: dict[str, int],
    zero: int,
    remat: bool = False,
    width: int = 256,
    context: int = 128,
) -> tuple[float, float]:
    names = tuple(mesh)
    real = pt.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=names)
    torch.manual_seed(0)
    model = GPT(layers=2, width=width, heads=4, context=context)
    pt.parallelize(model, real, pt.plans.gpt() if "tp" in mesh else None)
    if "dp" in mesh:
        pt.zero(model, real, "dp", stage=zero)
    if remat:
        pt.remat(model, blocks=list(model.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    placements = [pt.Shard(0) if name == "dp" else pt.Replicate() for name in names]
    x = pt.distribute_tensor(torch.randint(0, 256, (4, context)), real, placements)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        return loss

    compiled = pt.compile(step, backend="graph")
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        compiled(x)
        seconds.append(time.perf_counter() - start)
    return pt.simulate(compiled, real, machine).seconds, median(seconds[2:])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench; print each configuration, the median error and the pairs in right order."""
    parser = argparse.ArgumentParser(prog="partita bench simulate", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="that are timed (10)")
    options = parser.parse_args(argv)
    machine = calibrate(2)
    told = on_ranks(_compare, 2, machine, options.steps)
    rows = [(name, told[0][i][0], max(one[i][1] for one in told)) for i, name in enumerate(CONFIGS)]
    print(f"{'configuration':<16}{'simulated':>12}{'measured':>12}{'off by':>9}")
    for name, simulated, measured in rows:
        off = simulated / measured - 1
        print(f"{name:<16}{simulated * 1e3:>9.2f} ms{measured * 1e3:>9.2f} ms{off:>+9.0%}")
    errors = [abs(simulated / measured - 1) for _, simulated, measured in rows]
    print(f"median error {median(errors):.0%}, worst {max(errors):.0%}")
    apart = [(a, b) for a, b in itertools.combinations(rows, 2) if abs(a[2] / b[2] - 1) > 0.1]
    right = sum((a[1] < b[1]) == (a[2] < b[2]) for a, b in apart)
    print(f"of {len(apart)} pairs more than 10 % apart {right} are in the right order")
