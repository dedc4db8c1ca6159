"""The knapsack of kept results: which to keep within some bytes, so that the least is recomputed.

A candidate weighs the bytes of its result, and is worth the operations that its recompute costs.
The eager `pt.remat` and the pass of captured graphs choose by it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partita.comm.ledger import human
from partita.layout import Fix, LayoutError

__all__ = ["Candidate", "choose_kept", "make_budget_error"]

_STEPS = 8192
"""Bytes are rounded to a step: the bytes of all candidates, divided by this many."""


@dataclass
class Candidate:
    """A call whose result could be kept.

    Attributes:
        nbytes: of its result.
        flops: floating-point operations of its recompute.
        written: bytes that its recompute writes: its cost where it has no operations to count.
    """

    nbytes: int = 0
    flops: int = 0
    written: int = 0


def choose_kept(candidates: Sequence[Candidate], room: int) -> list[int]:
    """The indices of the candidates to keep within `room` bytes.

    Those that save the most operations, and then those that save the most bytes written. More room
    never means more recomputed operations nor, of as many operations, more bytes written: the first
    of two knapsacks, over operations, is solved exactly, in steps of bytes that do not depend on
    the room, and of equal solutions takes the one that leaves the second knapsack the most room.
    """
    heavy = [i for i, c in enumerate(candidates) if c.flops]
    light = [i for i, c in enumerate(candidates) if not c.flops and c.written]
    step = max(1, -(-sum(c.nbytes for c in candidates) // _STEPS))
    taken = _solve_knapsack(
        [(candidates[i].nbytes, candidates[i].flops) for i in heavy], room, step
    )
    kept = [heavy[i] for i in taken]
    room -= sum(candidates[i].nbytes for i in kept)
    taken = _solve_knapsack(
        [(candidates[i].nbytes, candidates[i].written) for i in light], room, step
    )
    return sorted(kept + [light[i] for i in taken])


def make_budget_error(error: type[LayoutError], budget: int, title: str, peak: int) -> LayoutError:
    """The error to raise where `title` needs `peak` bytes when it keeps nothing, over `budget`."""
    return error(
        f"a budget of {budget} bytes ({human(budget)}) cannot be kept: {title} needs {peak} bytes "
        f"({human(peak)}) when it keeps nothing",
        reason="inputs of regions, what lies between them, and the recompute of one region",
        fixes=(
            Fix(f"policy={peak}", "the minimum"),
            Fix("smaller regions, by blocks=", "less is there at once"),
        ),
    )


def _solve_knapsack(items: list[tuple[int, int]], room: int, step: int) -> list[int]:
    """Of items (bytes, worth), the indices of those that fit and are worth the most together."""
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
    # Of equal solutions the one that needs the least room, which is the same for any larger room.
    found, left = [], int(torch.searchsorted(best, best[-1:]))
    for i in reversed(range(len(items))):
        if takes[i][left]:
            found.append(i)
            left -= -(-items[i][0] // step)
    return found[::-1]
