"""Bound sentences: what a rule's sentence means for given shapes.

`bind` fits a sentence to global shapes and finds the size of each name. From that follow, without
regard to the size of a mesh axis, the rows, each a legal way to place the op on one axis
(`_derive_rows`), and the operations of its matrix products (`work_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from partita.layout import Invariant, Partial, Placement, Replicate, Shard

from .sentence import Dim, Products, Sentence, SentenceError, Term

# -- rows ------------------------------------------------------------------------------------------

REPLICATE, INVARIANT, SHARES = Replicate(), Invariant(), Partial()
SHARD = tuple(Shard(d) for d in range(64))
"""Made once: rows are made often."""

_Dims = tuple[Dim, ...]
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


def _derive_rows(
    sentence: Sentence,
    inputs: Sequence[_Dims | None],
    outputs: Sequence[_Dims],
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


def _find_sharded_dim(name: str, dims: _Dims, sizes: dict[str, int]) -> int | None:
    """The dimension that a split of `name` shards; None if none has it, WHOLE if it cannot be."""
    found: int | None = None
    for d, dim in enumerate(dims):
        if name in dim.names:
            outer = dim.names[: dim.names.index(name)]
            if dim.whole or found is not None or any(sizes.get(n, 2) != 1 for n in outer):
                return WHOLE
            found = d
    return found


# -- a sentence and shapes -------------------------------------------------------------------------


class _Number:
    """Stands for an operand that is a Python number: whole everywhere, never a share."""

    def __repr__(self) -> str:
        return "NUMBER"


NUMBER = _Number()
Operand = tuple[int, ...] | _Number | None
"""What a sentence is bound to, per term: a global shape in elements, a number, or nothing."""


@dataclass(frozen=True)
class Bound:
    """A sentence and the sizes of its names.

    Attributes:
        operands: what each term is bound to.
        inputs: each operand's dimensions; None where it is absent or a number.
        outputs: each output's dimensions.
        sizes: elements of each name that an operand has or the sentence gives. Another that only
            an output has is not in here: its size is whatever the local op returns.
        rows: every legal row, without regard to the size of the axis (see `can_split`).
    """

    sentence: Sentence
    operands: tuple[Operand, ...]
    inputs: tuple[tuple[Dim, ...] | None, ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: dict[str, int]
    rows: tuple[Row, ...]
    even: frozenset[str]

    def can_split(self, name: str, parts: int) -> bool:
        """May `name` be cut into `parts` pieces (the product of all axes that split it)?

        A name that is joined with others into one dimension, or marked `%`, is cut evenly only.
        """
        return name not in self.even or self.sizes[name] % parts == 0

    def output_shape(self, i: int, local: tuple[int, ...]) -> tuple[int, ...]:
        """Output i's global shape; sizes that no name tells come from the `local` result."""
        return tuple(
            math.prod([self.sizes[n] for n in dim.names])
            if all(n in self.sizes for n in dim.names)
            else local[d]
            for d, dim in enumerate(self.outputs[i])
        )


def bind(sentence: Sentence, operands: Sequence[Operand]) -> Bound:
    """Fit a sentence to global shapes.

    Args:
        operands: one per term, in order; missing ones at the end count as None.

    Raises:
        SentenceError: a wrong number of operands or dimensions, or sizes that disagree.
    """
    return _bind_operands(sentence, tuple(operands))


@lru_cache(maxsize=8192)
def _bind_operands(sentence: Sentence, operands: tuple[Operand, ...]) -> Bound:
    if len(operands) > len(sentence.terms):
        raise SentenceError(f"{len(operands)} operands for the rule {sentence.text!r}")
    operands += (None,) * (len(sentence.terms) - len(operands))
    leading = _find_broadcast_sizes(sentence, operands)
    sizes: dict[str, int] = dict(sentence.sizes)
    joined: list[tuple[tuple[str, ...], int]] = []
    inputs: list[tuple[Dim, ...] | None] = []
    for term, operand in zip(sentence.terms, operands, strict=True):
        if operand is None or isinstance(operand, _Number):
            inputs.append(None)
            continue
        dims = _expand_ellipsis(term, operand, leading, sentence)
        for dim, size in zip(dims, operand, strict=True):
            if len(dim.names) == 1:
                if sizes.setdefault(dim.names[0], size) != size:
                    raise SentenceError(
                        f"{dim.names[0]} is both {sizes[dim.names[0]]} and {size} "
                        f"in the rule {sentence.text!r} for shapes {_format_shapes(operands)}"
                    )
            elif dim.names:
                joined.append((dim.names, size))
            elif size != 1:
                raise SentenceError(f"a 1 of size {size} in the rule {sentence.text!r}")
        inputs.append(dims)
    for names, size in joined:
        known = math.prod([sizes[n] for n in names if n in sizes])
        unknown = [n for n in names if n not in sizes]
        if len(unknown) == 1 and known:
            sizes[unknown[0]] = size // known
        if any(n not in sizes for n in names) or math.prod([sizes[n] for n in names]) != size:
            raise SentenceError(f"({' '.join(names)}) is not {size} in the rule {sentence.text!r}")
    outputs = tuple(_spread_output(t, leading) for t in sentence.outputs)
    everything = [d for t in (*inputs, *outputs) if t is not None for d in t]
    even = {n for d in everything if d.even for n in d.names}
    for dim in everything:
        for n in dim.names:
            others = math.prod([sizes.get(other, 2) for other in dim.names if other != n])
            if others != 1 or (len(dim.names) > 1 and sizes.get(n, 2) == 1):
                even.add(n)  # a piece of the dimension is a piece of n only if all are alike
    absent = [i for i, operand in enumerate(operands) if operand is None]
    rows = tuple(_derive_rows(sentence, inputs, outputs, sizes, absent))
    return Bound(sentence, operands, tuple(inputs), outputs, sizes, rows, frozenset(even))


def _find_broadcast_sizes(sentence: Sentence, operands: tuple[Operand, ...]) -> tuple[int, ...]:
    """The broadcast sizes that `...` stands for."""
    longest: tuple[int, ...] = ()
    for term, operand in zip(sentence.terms, operands, strict=True):
        if operand is None or isinstance(operand, _Number):
            continue
        if not any(d.names == ("...",) for d in term.dims):
            continue
        at = next(i for i, d in enumerate(term.dims) if d.names == ("...",))
        count = len(operand) - len(term.dims) + 1
        if count < 0:
            raise SentenceError(
                f"shape {operand} has too few dimensions for the rule {sentence.text!r}"
            )
        own = operand[at : at + count]
        n = max(len(own), len(longest))
        wide = []
        for a, b in zip(
            (1,) * (n - len(own)) + own, (1,) * (n - len(longest)) + longest, strict=True
        ):
            if a != b and 1 not in (a, b):
                raise SentenceError(
                    f"sizes {a} and {b} do not broadcast in the rule {sentence.text!r} "
                    f"for shapes {_format_shapes(operands)}"
                )
            wide.append(b if a == 1 else a)
        longest = tuple(wide)
    return longest


def _expand_ellipsis(
    term: Term, shape: tuple[int, ...], leading: tuple[int, ...], sentence: Sentence
) -> tuple[Dim, ...]:
    """A term's dimensions with `...` written out; a dimension that is stretched counts as a 1."""
    at = next((i for i, d in enumerate(term.dims) if d.names == ("...",)), None)
    if at is None:
        if len(shape) != len(term.dims):
            raise SentenceError(
                f"shape {shape} does not fit {' '.join(map(str, term.dims))!r} "
                f"in the rule {sentence.text!r}"
            )
        return term.dims
    dots = term.dims[at]
    count = len(shape) - len(term.dims) + 1
    middle = []
    for i in range(count):
        back = count - i  # ... is aligned at its right end, as broadcasting is
        wide = leading[len(leading) - back]
        stretched = shape[at + i] == 1 and wide != 1
        middle.append(Dim(() if stretched else (f".{back}",), dots.whole, dots.even))
    return term.dims[:at] + tuple(middle) + term.dims[at + 1 :]


def _spread_output(term: Term, leading: tuple[int, ...]) -> tuple[Dim, ...]:
    out: list[Dim] = []
    for dim in term.dims:
        if dim.names == ("...",):
            n = len(leading)
            out += [Dim((f".{n - i}",), dim.whole, dim.even) for i in range(n)]
        else:
            out.append(dim)
    return tuple(out)


def _format_shapes(operands: tuple[Operand, ...]) -> str:
    return ", ".join("-" if o is None else str(o) for o in operands)


# -- work ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One product.

    A product that sums over a name is one: a matrix product, a convolution. What other ops compute
    is little beside the memory that they read, and is not counted.

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
    for multiplied in shown if not said else ():
        there = [dims for i in multiplied if (dims := bound.inputs[i]) is not None]
        names = {n for dims in there for dim in dims for n in dim.names}
        if len(there) > 1 and not names <= kept:
            found.append(_count_operations(names, bound, multiplied))
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
