"""Sentences of views: a tensor of one shape is read as another shape.

    view_sentence((12, 4), (3, 4, 4))      "+ (a=3 b) c -> a b c"

The dimensions of both shapes are cut at every place where either has a boundary. What lies between
two cuts is a name, and a dimension is the names it is made of. Where the cuts do not nest (6 x 4
read as 4 x 6) the dimensions between the nearest common boundaries stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from .sentence import Names

__all__ = ["resolve_shape", "view_sentence"]


def resolve_shape(numel: int, shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` with its `-1`, if it has one, worked out for `numel` elements.

    Raises:
        ValueError: more than one -1, a size below -1, or sizes that do not give `numel`.
    """
    known = math.prod(n for n in shape if n != -1)
    if any(n < -1 for n in shape) or list(shape).count(-1) > 1:
        raise ValueError(f"only one size of shape {tuple(shape)} can be inferred")
    if -1 in shape and known and numel % known == 0:
        return tuple(numel // known if n == -1 else n for n in shape)
    if -1 in shape or known != numel:
        raise ValueError(f"shape {tuple(shape)} is invalid for input of {numel} elements")
    return tuple(shape)


def view_sentence(before: Sequence[int], after: Sequence[int]) -> str:
    """The sentence for reading a tensor of shape `before` as shape `after` (no -1), both global.

    Raises:
        ValueError: the shapes have different numbers of elements.
    """
    if math.prod(before) != math.prod(after):
        raise ValueError(f"shape {tuple(before)} cannot be viewed as {tuple(after)}")
    names = iter(Names.of(len(before) + len(after)))
    left: list[str] = []
    right: list[str] = []
    for ins, outs in _split_into_sections(before, after):
        cuts = _find_common_cuts(ins, outs)
        if cuts is None:
            left += [f"{next(names)}!" for _ in ins]
            right += [f"{next(names)}={n}!" for n in outs]
            continue
        factors = [(next(names), b // a) for a, b in zip((1, *cuts), cuts, strict=False)]
        left += _made_of(ins, factors, given=True)
        right += _made_of(outs, factors, given=False)
    return f"+ {' '.join(left)} -> {' '.join(right)}"


def _split_into_sections(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shortest runs of dimensions of both shapes that hold as many elements as each other."""
    if 0 in before:
        yield tuple(before), tuple(after)
        return
    i = j = 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        a = b = 1
        while True:
            if a <= b and i < len(before) and (a < b or i == start_i):
                a, i = a * before[i], i + 1
            elif b < a or (j == start_j and j < len(after)):
                b, j = b * after[j], j + 1
            if a == b:
                break
        yield tuple(before[start_i:i]), tuple(after[start_j:j])


def _find_common_cuts(ins: tuple[int, ...], outs: tuple[int, ...]) -> tuple[int, ...] | None:
    """How many steps lie outside each boundary, rising; None where the boundaries do not nest."""
    if 0 in ins or 0 in outs:
        return None
    found = set()
    for shape in (ins, outs):
        at = 1
        for n in shape:
            at *= n
            found.add(at)
    cuts = sorted(found - {1})
    nested = all(b % a == 0 for a, b in pairwise(cuts))
    return tuple(cuts) if nested else None


def _made_of(shape: tuple[int, ...], factors: list[tuple[str, int]], given: bool) -> list[str]:
    """Each dimension of `shape` as the next of `factors`; `given` writes sizes that are needed."""
    rest = iter(factors)
    dims = []
    for size in shape:
        mine, held = [], 1
        while held < size:
            name, n = next(rest)
            held *= n
            mine.append((name, n))
        words = (
            [f"{name}={n}" for name, n in mine[:-1]] if given else [name for name, _ in mine[:-1]]
        )
        words += [name for name, _ in mine[-1:]]
        dims.append("1" if not words else words[0] if len(words) == 1 else f"({' '.join(words)})")
    return dims
