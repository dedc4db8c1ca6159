"""The choice of results that regions keep instead of recomputing, so that they fit a memory
budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partita.comm.ledger import human
from partita.layout import Fix

from .watched_calls import RematError

_STEPS = 8192
"""Bytes are rounded to a step: the bytes of all candidates, divided by this many."""


@dataclass
class Candidate:
    """A call whose result could be kept in forward instead of recomputed in backward.

    Attributes:
        nbytes: the bytes of its result.
        flops: floating-point operations of its recompute.
        written: the bytes that its recompute writes. They count as its cost if `flops` is 0.
    """

    nbytes: int = 0
    flops: int = 0
    written: int = 0


def choose_kept(candidates: Sequence[Candidate], room: int) -> list[int]:
    """Chooses the results to keep, so that they fit into `room` bytes. Returns their indices.

    First it keeps the results whose recomputation takes the most operations (a knapsack). With the
    rest of the bytes it keeps those whose recomputation writes the most bytes. More room never
    leads to more recomputation. To guarantee this, the knapsack is solved exactly, in steps of
    bytes that do not depend on `room`. Of equal solutions the smallest is taken.

    Args:
        candidates: the results that could be kept. The returned indices refer to them.
    """
    heavy = [i for i, c in enumerate(candidates) if c.flops]
    light = [i for i, c in enumerate(candidates) if not c.flops and c.written]
    step = max(1, -(-sum(c.nbytes for c in candidates) // _STEPS))
    kept: list[int] = []
    for some, worth in ((heavy, "flops"), (light, "written")):
        items = [(candidates[i].nbytes, getattr(candidates[i], worth)) for i in some]
        room_left = room - sum(candidates[i].nbytes for i in kept)
        kept += [some[i] for i in _solve_knapsack(items, room_left, step)]
    return sorted(kept)


def make_budget_error(budget: int, title: str, peak: int) -> RematError:
    """Returns the error for a memory budget that is too small.

    Args:
        budget: the budget in bytes.
        title: the name of the region.
        peak: the bytes that it needs even if no result is kept.
    """
    return RematError(
        f"a budget of {budget} bytes ({human(budget)}) cannot be kept: {title} needs {peak} bytes "
        f"({human(peak)}) when it keeps nothing",
        reason="always needed: inputs of regions, values between regions, and the recompute of "
        "one region",
        fixes=(
            Fix(f"policy={peak}", "the minimum"),
            Fix("smaller regions, by blocks=", "so that less memory is live at once"),
        ),
    )


def _solve_knapsack(items: list[tuple[int, int]], room: int, step: int) -> list[int]:
    """Returns the indices of the items (bytes, worth) that fit and have the most total worth."""
    if sum(size for size, _ in items) <= room:
        return list(range(len(items)))
    capacity = max(0, room) // step
    best = torch.zeros(capacity + 1, dtype=torch.int64)
    takes = []
    for size, worth in items:
        need = -(-size // step)
        without, best = best, best.clone()
        if need <= capacity:
            torch.maximum(without[need:], without[: capacity + 1 - need] + worth, out=best[need:])
        takes.append(best > without)
    # Of equal solutions take the smallest, which is the same for any larger room.
    found, left = [], int(torch.searchsorted(best, best[-1:]))
    for i in reversed(range(len(items))):
        if takes[i][left]:
            found.append(i)
            left -= -(-items[i][0] // step)
    return found[::-1]
