"""Repeats in a sequence of calls: where it does again what it has just done.

A model of equal layers is a graph that repeats itself, and so is its update. Calls are compared by
what they do, not by their operands. The distance to a call's last occurrence suggests periods; for
each of the most frequent ones the longest run of calls equal to those one period later is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = ["repeats_of"]

_PERIODS = 16
"""How many of the most frequent distances between equal calls are tried as periods."""


def repeats_of(calls: Sequence[Hashable], least: int) -> tuple[range, int] | None:
    """The longest part of `calls` that repeats itself, and its period.

    Args:
        calls: equal where they do the same.
        least: the shortest period; of shorter ones a multiple is taken.

    Returns:
        The range of the part, at least two periods long; None where there is none.
    """
    before: dict[Hashable, int] = {}
    often: Counter[int] = Counter()
    seen: set[tuple[Hashable, int]] = set()
    for i, call in enumerate(calls):
        if call in before:
            often[i - before[call]] += 1
            seen.add((call, i - before[call]))
        before[call] = i
    of_many = Counter(distance for _, distance in seen)  # by how many different calls have it
    common = [d for count in (often, of_many) for d, _ in count.most_common(_PERIODS)]
    # A call that stands several times in each repeat is met again after a part of the period.
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
    """The longest part of which each call equals the one a period later."""
    best, begin = range(0), 0
    for i in range(len(calls) - period + 1):
        if i == len(calls) - period or calls[i] != calls[i + period]:
            if i > begin and i + period - begin > len(best):
                best = range(begin, i + period)
            begin = i + 1
    return best
