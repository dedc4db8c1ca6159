"""Repeats: where does a sequence of calls do again what it has just done?

A model of many equal layers is a graph that repeats itself, and so is the update of its parameters.
Calls are compared by what they are, not by what they read: where they begin is all that is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = ["repeats_of"]

_PERIODS = 16
"""How many of the distances at which calls are met again most often are tried."""


def repeats_of(calls: Sequence[Hashable], least: int) -> tuple[range, int] | None:
    """The longest part of `calls` that repeats itself, and the length of what it repeats.

    Args:
        calls: equal where they do the same.
        least: the shortest that a repeat may be; what is shorter is taken several at once.

    Returns:
        The places of the part, at least two repeats long; None where there is no such part.
    """
    before: dict[Hashable, int] = {}
    often: Counter[int] = Counter()
    seen: set[tuple[Hashable, int]] = set()
    for i, call in enumerate(calls):
        if call in before:
            often[i - before[call]] += 1
            seen.add((call, i - before[call]))
        before[call] = i
    of_many = Counter(distance for _, distance in seen)  # of calls that are not alike
    common = [d for count in (often, of_many) for d, _ in count.most_common(_PERIODS)]
    # What stands several times in each repeat is met again at a part of the period.
    periods = {d * -(-least // d) for d in common} | {
        a + b for a in common for b in common if a + b >= least
    }
    found: tuple[range, int] | None = None
    for period in sorted(periods):
        part = _find_longest_repeat(calls, period)
        if len(part) >= 2 * period and (found is None or len(part) > len(found[0])):
            found = part, period
    return found


def _find_longest_repeat(calls: Sequence[Hashable], period: int) -> range:
    """The longest part whose calls are all equal to those a period later, with these."""
    best, begin = range(0), 0
    for i in range(len(calls) - period + 1):
        if i == len(calls) - period or calls[i] != calls[i + period]:
            if i > begin and i + period - begin > len(best):
                best = range(begin, i + period)
            begin = i + 1
    return best
