"""A bench of predicted memory.

Is the peak of memory that a compiled step predicts the one that is counted?

Six models train on Gloo ranks by AdamW, data parallel and with ZeRO of each stage, as they are and
with remat. Of each the predicted peak (`step.memory.peak`) stands beside the counted one: every
byte that torch's CPU allocator has out above what is held between steps. With --budgets one of them
is given ten budgets besides, from the least that can be kept to what it takes without one. The exit
code is 1 where a prediction is further off than it may be, or a budget is not kept.
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
class Asked:
    """How a model trains.

    Attributes:
        model: its name, among `MODELS`.
        stage: of ZeRO; 0 is data parallel.
        remat: are its blocks made again in backward?
        wide: how many times as wide as the smallest.
        samples: of the batch of all ranks.
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
    """Bytes above what is held between steps: the most at once, as predicted and as counted."""

    predicted: int
    counted: int

    def __str__(self) -> str:
        return f"{self.predicted:>14,}{self.counted:>14,}{100 * off(self):>+9.2f} %"


def off(found: Peaks) -> float:
    """By how much of what is counted the prediction is too high."""
    return (found.predicted - found.counted) / found.counted


def ready(mesh: Any, asked: Asked, make: Any = torch.optim.AdamW, **options: Any) -> Any:
    """A compiled step that has run twice, and what runs it again.

    Args:
        make: the optimizer's class.
        options: of `pt.compile`.
    """
    torch.manual_seed(0)
    case = MODELS[asked.model]
    kind = mesh.device_type
    model = case.make(asked.wide).to(kind)
    batch = [b.to(kind) for b in case.batch(asked.wide, asked.samples)]
    if asked.remat:
        pt.remat(model, blocks=case.blocks or None)
    pt.zero(model, mesh, stage=asked.stage)
    rows = [pt.distribute_tensor(b, mesh, [pt.Shard(0)]) for b in batch]
    optimizer = make(model.parameters(), lr=1e-3)

    def train(*batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss

    step = pt.compile(train, **options)
    for _ in range(2):
        step(*rows)
    return step, lambda: step(*rows)


def peaks(mesh: Any, asked: Asked, **options: Any) -> Peaks:
    """Of one way to train. All ranks of the mesh call this."""
    step, again = ready(mesh, asked, **options)
    return Peaks(step.memory.peak, counted(again, device=mesh.device_type))


def budgets_kept(mesh: Any, asked: Asked, many: int, **options: Any) -> Iterator[tuple[int, Peaks]]:
    """So many budgets, smallest first, and what a step takes that is given each.

    From the least that can be kept to what is taken without any.
    """
    most = peaks(mesh, asked, **options).predicted
    least = _least(mesh, asked, **options)
    for i in range(many):
        budget = least + (most - least) * i // max(1, many - 1)
        yield budget, peaks(mesh, asked, budget=budget, **options)


def _least(mesh: Any, asked: Asked, **options: Any) -> int:
    """The least budget that can be kept, as the errors of those that cannot be tell."""
    least = 1
    while True:
        try:
            ready(mesh, asked, budget=least, **options)
        except pt.CaptureError as error:
            least = int(error.fixes[0].write.removeprefix("budget="))
        else:
            return least


def kept(found: Iterable[tuple[int, Peaks]]) -> bool:
    """Is no budget exceeded, and takes none less than a smaller one?"""
    before = 0
    for budget, taken in found:
        if taken.counted > budget or taken.counted < before:
            return False
        before = taken.counted
    return True


# -- the command -----------------------------------------------------------------------------------


def _each(rank: int, ranks: int, cases: Sequence[Asked], backend: str) -> list[Peaks | str]:
    mesh = make_dp_mesh(ranks)
    found: list[Peaks | str] = []
    for asked in cases:
        try:
            found.append(peaks(mesh, asked, backend=backend))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])
        if rank == 0:
            print(f"{asked}{found[-1]}", flush=True)
    return found


def _budgets(rank: int, ranks: int, asked: Asked, backend: str) -> list[tuple[int, Peaks]]:
    mesh = make_dp_mesh(ranks)
    found = []
    for budget, taken in budgets_kept(mesh, asked, BUDGETS, backend=backend):
        found.append((budget, taken))
        if rank == 0:
            print(f"{budget:>14,}{taken}", flush=True)
    return found


def _swept(options: argparse.Namespace) -> bool:
    cases = [
        Asked(name, stage, remat, options.wide, options.samples)
        for name in options.models
        for stage in options.stages
        for remat in (False, True)
    ]
    print(f"{'':<10}{'ZeRO':>4}   {'':<8}{'predicted':>14}{'counted':>14}{'off by':>11}")
    told = on_ranks(_each, options.ranks, cases, options.backend)
    worst = 0.0
    for found in told:
        for one in found:
            worst = max(worst, float("inf") if isinstance(one, str) else abs(off(one)))
    print(f"the furthest off on any rank: {100 * worst:.2f} %, of {len(cases)} ways to train")
    return worst <= MAY_BE_OFF


def _given_budgets(options: argparse.Namespace) -> bool:
    asked = Asked(options.budgets, 3, False, options.wide, options.samples)
    print(f"\n{BUDGETS} budgets of {options.budgets}, ZeRO-3")
    print(f"{'budget':>14}{'predicted':>14}{'counted':>14}{'off by':>11}")
    good = all(kept(found) for found in on_ranks(_budgets, options.ranks, asked, options.backend))
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
    parser.add_argument("--samples", type=int, default=64, help="of all ranks together")
    options = parser.parse_args(argv)
    checks: list[Callable[[argparse.Namespace], bool]] = []
    if options.models:
        checks.append(_swept)
    if options.budgets:
        checks.append(_given_budgets)
    good = [check(options) for check in checks]  # all run, whatever the first one finds
    return 0 if all(good) else 1
