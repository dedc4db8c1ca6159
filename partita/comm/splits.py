"""Splits: how a flat buffer is divided among the ranks of a group, segment by segment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property

__all__ = ["Splits"]


class Splits:
    """Segments of a flat buffer, one for each rank of a group, end to end, in the group's order.

    A list of all sizes is made only where a backend asks for it.

    Attributes:
        count: the number of segments.
        total: elements of all of them.
        even: all are of one size.
        place: gives `(start, length)` of the i-th one.
    """

    def __init__(self, count: int, total: int, even: bool, place: Callable[[int], tuple[int, int]]):
        self.count, self.total, self.even, self.place = count, total, even, place

    @classmethod
    def evenly(cls, count: int, each: int) -> Splits:
        return cls(count, count * each, True, lambda i: (i * each, each))

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Splits:
        starts = [0, *itertools.accumulate(sizes)]
        return cls(len(sizes), starts[-1], False, lambda i: (starts[i], sizes[i]))

    @cached_property
    def sizes(self) -> list[int]:
        return [self.place(i)[1] for i in range(self.count)]

    def times(self, k: int) -> Splits:
        """These splits counted in units of which `k` make an element: bytes, say."""

        def scale_place(i: int) -> tuple[int, int]:
            start, length = self.place(i)
            return k * start, k * length

        return Splits(self.count, k * self.total, self.even, scale_place)
