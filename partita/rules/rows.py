"""Rows: the legal placements of an op on one mesh axis, as they follow from a sentence.

The meaning that `sentence` states is carried out here, without regard to the size of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from partita.layout import Invariant, Partial, Placement, Replicate, Shard

from .sentence import Dim, Products, Sentence

__all__ = ["Row", "derive_rows"]

REPLICATE, INVARIANT, SHARES = Replicate(), Invariant(), Partial()
SHARD = tuple(Shard(d) for d in range(64))
"""Made once: rows are made often."""

Dims = tuple[Dim, ...]
WHOLE = -1


@dataclass(frozen=True)
class Row:
    """One legal way to place an op on one axis: `S(0), R -> S(0)`.

    Attributes:
        inputs: a placement per operand; None for an operand that is absent or a number.
        split: the name that is split, or "".
    """

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]
    split: str = ""

    def __str__(self) -> str:
        left = ", ".join("-" if p is None else str(p) for p in self.inputs)
        return f"{left} -> {', '.join(map(str, self.outputs))}"


def derive_rows(
    sentence: Sentence,
    inputs: Sequence[Dims | None],
    outputs: Sequence[Dims],
    sizes: dict[str, int],
    absent: Iterable[int] = (),
) -> Iterator[Row]:
    """Every legal row, split names first.

    Args:
        inputs: each operand's dimensions, `...` written out; None where it is absent or a number.
        outputs: the same of the results.
        sizes: elements of each name that an operand has or the sentence gives.
        absent: which operands are not there at all. (A number is there: added to shares it would
            be counted once per rank.)
    """
    missing = frozenset(absent)
    groups = [_drop_absent_operands(group, missing) for group in sentence.groups]
    able = frozenset(
        i
        for i, (dims, term) in enumerate(zip(inputs, sentence.terms, strict=True))
        if dims is not None and not term.index
    )

    def make_row(placed: Sequence[Placement], results: Sequence[Placement], name: str = "") -> Row:
        each = (None if d is None else p for d, p in zip(inputs, placed, strict=True))
        return Row(tuple(each), tuple(results), name)

    held = {n for dims in inputs if dims is not None for d in dims for n in d.names}
    for name in (n for n in sizes if n in held):
        where = [None if dims is None else _find_sharded_dim(name, dims, sizes) for dims in inputs]
        into = [_find_sharded_dim(name, dims, sizes) for dims in outputs]
        if WHOLE in where or WHOLE in into:
            continue
        results = [
            SHARD[d] if d is not None else SHARES if out.reduce == "sum" else Partial(out.reduce)
            for d, out in zip(into, sentence.outputs, strict=True)
        ]
        contracted = any(
            d is None and out.reduce == "sum" and not out.said
            for d, out in zip(into, sentence.outputs, strict=True)
        )
        for shares in (
            _find_partial_addends(groups, where, able) if contracted else [frozenset[int]()]
        ):
            placed = [
                SHARD[d] if d is not None else SHARES if i in shares else REPLICATE
                for i, d in enumerate(where)
            ]
            yield make_row(placed, results, name)
    if all(out.reduce == "sum" for out in sentence.outputs):
        for group in groups:
            for shares in _one_of_each(group.products, able) if group.linear else ():
                if shares:
                    placed = [SHARES if i in shares else REPLICATE for i in range(len(inputs))]
                    yield make_row(placed, [SHARES] * len(outputs))
    for everywhere in (REPLICATE, INVARIANT):
        yield make_row([everywhere] * len(inputs), [everywhere] * len(outputs))


def _drop_absent_operands(group: Products, absent: frozenset[int]) -> Products:
    products = (tuple(i for i in p if i not in absent) for p in group.products)
    return Products(tuple(p for p in products if p), group.linear)


def _find_partial_addends(
    groups: Sequence[Products], where: Sequence[int | None], able: frozenset[int]
) -> Iterator[frozenset[int]]:
    """Which operands must be shares when a split name is summed over.

    Just one linear group must have the name, and those of its addends that lack it would be counted
    once per rank, unless they are shares themselves. Nothing where there is no such group.
    """
    having = [
        g for g in groups if g.linear and any(where[i] is not None for p in g.products for i in p)
    ]
    if len(having) == 1:
        lacking = [p for p in having[0].products if all(where[i] is None for i in p)]
        yield from _one_of_each(lacking, able)


def _one_of_each(
    products: Sequence[tuple[int, ...]], able: frozenset[int]
) -> Iterator[frozenset[int]]:
    """Each way to take one of the operands of every product that are `able` to be shares."""
    for choice in product(*(tuple(i for i in p if i in able) for p in products)):
        yield frozenset(choice)


def _find_sharded_dim(name: str, dims: Dims, sizes: dict[str, int]) -> int | None:
    """The dimension that a split of `name` shards; None if none has it, WHOLE if it cannot be."""
    found: int | None = None
    for d, dim in enumerate(dims):
        if name in dim.names:
            outer = dim.names[: dim.names.index(name)]
            if dim.whole or found is not None or any(sizes.get(n, 2) != 1 for n in outer):
                return WHOLE
            found = d
    return found
