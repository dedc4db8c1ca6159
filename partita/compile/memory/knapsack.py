"""The knapsack of kept results.

Which results are worth keeping within a number of bytes, so that the least is recomputed?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partita.comm.ledger import human
from partita.layout import Fix, LayoutError

__all__ = ["Candidate", "chosen", "too_small"]

_STEPS = 8192
"""The knapsack counts bytes in this many steps of all candidates' bytes together."""


@dataclass
class Candidate:
    """A call whose result could be kept.

    Attributes:
        nbytes: what it weighs, rounded up when it is chosen.
        flops: floating-point operations that its recompute costs.
        written: bytes that its recompute writes: its cost where there are no operations to count.
    """

    nbytes: int = 0
    flops: int = 0
    written: int = 0


def chosen(candidates: Sequence[Candidate], room: int) -> list[int]:
    """Which to keep within `room` bytes: the most operations, and then the most bytes written.

    More room never means more recomputed operations, nor, of as many, more bytes written: the first
    of two knapsacks, over operations alone, is solved exactly, in steps of bytes that do not depend
    on the room, and of what is worth the same takes what leaves the second the most.
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


def too_small(error: type[LayoutError], budget: int, title: str, peak: int) -> LayoutError:
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
    """Of `(bytes, worth)`, the numbers of those that fit and are worth the most together."""
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
    # Of those worth as much, what needs the least room: the same for any that has more.
    found, left = [], int(torch.searchsorted(best, best[-1:]))
    for i in reversed(range(len(items))):
        if takes[i][left]:
            found.append(i)
            left -= -(-items[i][0] // step)
    return found[::-1]
