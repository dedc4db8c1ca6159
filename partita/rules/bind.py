"""Bound sentences: a rule's sentence fitted to global shapes, with the size of each name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .rows import Row, derive_rows
from .sentence import Dim, Sentence, SentenceError, Term

__all__ = ["NUMBER", "Bound", "Operand", "bind"]


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
    rows = tuple(derive_rows(sentence, inputs, outputs, sizes, absent))
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
