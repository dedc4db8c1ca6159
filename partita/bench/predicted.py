"""A bench of predicted memory: compares the predicted peak of compiled steps with the counted one.

Six models train on Gloo ranks by AdamW, data parallel and with each ZeRO stage, with and without
remat. The bench prints the predicted peak of each (`step.memory.peak`) and the counted one: all
bytes that torch's CPU allocator has allocated above those held between steps. With --budgets, one
model also trains with ten budgets, from the smallest possible to its peak without a budget. The
exit code is 1 if a prediction is off by more than allowed, or a budget is exceeded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import partita as pt
from partita.testing.allocated_bytes import counted

from .interleaved import on_ranks
from .models import MODELS
from .place import make_dp_mesh

MAY_BE_OFF = 0.05
BUDGETS = 10


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained: one case in which predicted and counted memory are compared.

    Attributes:
        model: its name in `MODELS`.
        stage: the ZeRO stage; 0 is data parallel.
        remat: True recomputes its blocks in backward.
        wide: its width, as a multiple of the smallest.
        samples: the number of samples in the batch of all ranks.
    """

    model: str
    stage: int
    remat: bool = False
    wide: int = 1
    samples: int = 8

    def __str__(self) -> str:
        return f"{self.model:<10}{self.stage:>4}   {'remat' if self.remat else '':<8}"


@dataclass(frozen=True)
class Peaks:
    """The peak memory of a step, as predicted and as counted.

    Both are the most bytes allocated at one time, minus the bytes that are held between steps.
    """

    predicted: int
    counted: int

    def __str__(self) -> str:
        return f"{self.predicted:>14,}{self.counted:>14,}{100 * relative_error(self):>+9.2f} %"


def relative_error(found: Peaks) -> float:
    """Returns (predicted - counted) / counted for the peak memory of a step."""
    return (found.predicted - found.counted) / found.counted


def make_warm_step(mesh: Any, setup: Setup, make: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Returns a compiled training step that has run twice, and a function that runs it once more.

    Args:
        mesh: the mesh over which the model and the batch are sharded.
        setup: the model, and how it is trained.
        make: the optimizer's class.
        options: options of `pt.compile`.
    """
    torch.manual_seed(0)
    case = MODELS[setup.model]
    kind = mesh.device_type
    model = case.make(setup.wide).to(kind)
    batch = [b.to(kind) for b in case.batch(setup.wide, setup.samples)]
    if setup.remat:
        pt.remat(model, blocks=case.blocks or None)
    pt.zero(model, mesh, stage=setup.stage)
    rows = [pt.distribute_tensor(b, mesh, [pt.Shard(0)]) for b in batch]
    optimizer = make(model.parameters(), lr=1e-3)

    def train(*batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss

    step = pt.compile(train, cuda_graphs=False, **options)
    for _ in range(2):
        step(*rows)
    return step, lambda: step(*rows)


def measure_peaks(mesh: Any, setup: Setup, **options: Any) -> Peaks:
    """Returns the predicted and the counted peak, in bytes, of the step of one setup.

    Must be called on all ranks of the mesh.

    Args:
        options: `make`, the optimizer's class, and options of `pt.compile`, such as `budget`.
    """
    step, again = make_warm_step(mesh, setup, **options)
    return Peaks(step.memory.peak, counted(again, device=mesh.device_type))


def measure_budgets(
    mesh: Any, setup: Setup, many: int, **options: Any
) -> Iterator[tuple[int, Peaks]]:
    """Yields (budget, peaks) in bytes for several memory budgets of one setup, smallest first.

    The budgets range from the smallest possible one to the peak without a budget. Must be called on
    all ranks of the mesh.

    Args:
        mesh: the mesh over which the model and the batch are sharded.
        many: the number of budgets.
        options: `make`, the optimizer's class, and options of `pt.compile`.
    """
    most = measure_peaks(mesh, setup, **options).predicted
    least = _least(mesh, setup, **options)
    for i in range(many):
        budget = least + (most - least) * i // max(1, many - 1)
        yield budget, measure_peaks(mesh, setup, budget=budget, **options)


def _least(mesh: Any, setup: Setup, **options: Any) -> int:
    """Returns the smallest possible budget, which is in the error of a budget that is too small."""
    least = 1
    while True:
        try:
            make_warm_step(mesh, setup, budget=least, **options)
        except pt.CaptureError as error:
            least = int(error.fixes[0].write.removeprefix("budget="))
        else:
            return least


def are_budgets_kept(found: Iterable[tuple[int, Peaks]]) -> bool:
    """True if counted peaks are within their budgets, and a larger budget has no smaller peak.

    Args:
        found: each budget with its peaks, sorted by budget.
    """
    before = 0
    for budget, taken in found:
        if taken.counted > budget or taken.counted < before:
            return False
        before = taken.counted
    return True


# -- the command -----------------------------------------------------------------------------------


def _each(rank: int, ranks: int, cases: Sequence[Setup], backend: str) -> list[Peaks | str]:
    mesh = make_dp_mesh(ranks)
    found: list[Peaks | str] = []
    for setup in cases:
        try:
            found.append(measure_peaks(mesh, setup, backend=backend))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])
        if rank == 0:
            print(f"{setup}{found[-1]}", flush=True)
    return found


def _budgets(rank: int, ranks: int, setup: Setup, backend: str) -> list[tuple[int, Peaks]]:
    mesh = make_dp_mesh(ranks)
    found = []
    for budget, taken in measure_budgets(mesh, setup, BUDGETS, backend=backend):
        found.append((budget, taken))
        if rank == 0:
            print(f"{budget:>14,}{taken}", flush=True)
    return found


def _swept(options: argparse.Namespace) -> bool:
    cases = [
        Setup(name, stage, remat, options.wide, options.samples)
        for name in options.models
        for stage in options.stages
        for remat in (False, True)
    ]
    print(f"{'':<10}{'ZeRO':>4}   {'':<8}{'predicted':>14}{'counted':>14}{'off by':>11}")
    results = on_ranks(_each, options.ranks, cases, options.backend)
    worst = 0.0
    for found in results:
        for one in found:
            worst = max(worst, float("inf") if isinstance(one, str) else abs(relative_error(one)))
    print(f"the furthest off on any rank: {100 * worst:.2f} %, of {len(cases)} ways to train")
    return worst <= MAY_BE_OFF


def _given_budgets(options: argparse.Namespace) -> bool:
    setup = Setup(options.budgets, 3, False, options.wide, options.samples)
    print(f"\n{BUDGETS} budgets of {options.budgets}, ZeRO-3")
    print(f"{'budget':>14}{'predicted':>14}{'counted':>14}{'off by':>11}")
    good = all(
        are_budgets_kept(found)
        for found in on_ranks(_budgets, options.ranks, setup, options.backend)
    )
    print("each is kept, and a smaller one takes no more" if good else "not all are kept")
    return good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="partita bench memory predicted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--backend", choices=("graph", "inductor"), default="graph")
    parser.add_argument("--budgets", metavar="MODEL", choices=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wide", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64, help="samples on all ranks together")
    options = parser.parse_args(argv)
    checks: list[Callable[[argparse.Namespace], bool]] = []
    if options.models:
        checks.append(_swept)
    if options.budgets:
        checks.append(_given_budgets)
    good = [check(options) for check in checks]  # all run, whatever the first one finds
    return 0 if all(good) else 1
