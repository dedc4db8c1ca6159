"""Topological order: in which order can things run that need each other?"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

__all__ = ["behind_needs"]

N = TypeVar("N", bound=Hashable)


def behind_needs(wanted: Iterable[N], needs: Mapping[N, Sequence[N]], done: set[N]) -> Iterator[N]:
    """`wanted` in order, each behind what it needs; nothing that is done.

    Args:
        needs: what each needs, without cycles. What is not in it is there already.
        done: grows by what is given.
    """
    stack = list(wanted)[::-1]
    while stack:
        node = stack[-1]
        waiting = [n for n in needs[node] if n in needs and n not in done]
        if waiting and node not in done:
            stack += reversed(waiting)
            continue
        stack.pop()
        if node not in done:
            done.add(node)
            yield node
