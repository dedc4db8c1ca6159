"""The work of an op: the operations of its matrix products, and over which names they are spread.

A product that sums over a name is one: a matrix product, a convolution. What other ops compute is
little beside the memory that they read, and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .bind import Bound

__all__ = ["Work", "work_of"]


@dataclass(frozen=True)
class Work:
    """One product.

    Attributes:
        operations: multiplications and additions, of all ranks together if none repeats another's.
        names: a rank does its part of them where one of these is split, and else all.
        factors: which operands are multiplied.
    """

    operations: int
    names: frozenset[str]
    factors: frozenset[int]


def work_of(bound: Bound, said: Sequence[str] = ()) -> tuple[Work, ...]:
    """The products of an op; none if it is no such op, or has nothing to multiply.

    Args:
        said: the names of each product, and numbers, with which it is as large as they are together
            (`"... q k d"`; a name in `[ ]` spreads it, but makes it no larger); if there are none
            they are read from the sentence.
    """
    terms = bound.sentence.terms
    products = [p for group in bound.sentence.groups for p in group.products if len(p) > 1]
    shown = [p for p in products if not any(terms[i].index for i in p)]  # else: looked up
    factors = [i for p in shown for i in p] or range(len(bound.inputs))
    found = [_count_operations(text.split(), bound, factors) for text in said]
    kept = {n for out in bound.outputs for dim in out for n in dim.names}
    for product in shown if not said else ():
        there = [dims for i in product if (dims := bound.inputs[i]) is not None]
        names = {n for dims in there for dim in dims for n in dim.names}
        if len(there) > 1 and not names <= kept:
            found.append(_count_operations(names, bound, product))
    return tuple(work for work in found if work.operations)


def _count_operations(words: Iterable[str], bound: Bound, factors: Iterable[int]) -> Work:
    numbers, names, spread = [], set[str](), set[str]()
    for word in words:
        if word.startswith("["):
            spread.add(word[1:-1])
        elif word.isdigit():
            numbers.append(int(word))
        elif word == "...":
            names |= {n for n in bound.sizes if n.startswith(".")}
        else:
            names.add(word)
    size = math.prod(numbers) * math.prod([bound.sizes[n] for n in names])
    return Work(2 * size, frozenset(names | spread), frozenset(factors))
