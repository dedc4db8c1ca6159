"""Measured curves: seconds of a kernel or a collective by its amount, at a few amounts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MeasuredCurve", "fit_curve"]


@dataclass(frozen=True)
class MeasuredCurve:
    """What was measured, joined by straight lines.

    Attributes:
        amounts: bytes or operations, rising.
        seconds: of each.

    Raises:
        ValueError: there is no point, the amounts do not rise, or a time is not above 0.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.amounts or len(self.amounts) != len(self.seconds):
            raise ValueError("has as many amounts as seconds, one or more")
        if self.amounts[0] < 0 or [*self.amounts] != sorted({*self.amounts}):
            raise ValueError("has amounts that do not rise from 0 or above")
        if min(self.seconds) <= 0:
            raise ValueError("has seconds that are not above 0")

    def seconds_of(self, amount: float) -> float:
        """Seconds of an amount; beyond what was measured, as between the last two amounts."""
        last = len(self.amounts) - 1
        if amount <= self.amounts[0] or not last:
            return self.seconds[0]
        right = min(bisect_left(self.amounts, amount), last)
        (a, b), (s, t) = self.amounts[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        # A larger amount is never quicker, whatever noise the last two have.
        return max(s + (t - s) * (amount - a) / (b - a), s)


def fit_curve(points: Sequence[tuple[float, float]]) -> MeasuredCurve:
    """The curve through points (amount, seconds) in any order, made to rise.

    A point that is quicker than one of a smaller amount is noise: it gets the other's seconds.
    """
    amounts: list[float] = []
    seconds: list[float] = []
    for amount, taken in sorted(points):
        amounts.append(amount)
        seconds.append(max(taken, seconds[-1] if seconds else 0.0))
    return MeasuredCurve(tuple(amounts), tuple(seconds))
