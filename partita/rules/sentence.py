"""What does one sentence about an op say that its operands may be, on one mesh axis?

    "... i * o i + o -> ... o"

`...` is any number of leading dimensions, `( )` joins names into one dimension (the first is the
outermost), `1` is a dimension of one. Terms are multiplied `*`, added `+`, or neither `,`; a
leading `+` says that the op is linear in a single term. After a name, `!` keeps the dimension
whole and `%` allows only even splits; `a=3` gives a name its size where the shapes do not tell it.
A term in `[ ]` is an index or a divisor: multiplied or added like any other, but never a share. An
output may begin with `max` or `min`: then the names that it lacks are reduced by that and not by a
sum; or with `sum`: then they are summed although the op is not linear (a loss, a norm).

Its meaning, one axis at a time:

1. *split a name*: tensors that have it are sharded there, the others are whole; an output that
   lacks it is a share; a term that lacks it, added to terms that have it, must itself be shares.
2. *shares*: in a sum all terms may be shares together, in a product one factor may be.
3. *whole* is always legal.
4. *dual*: the gradient's row is the row with Replicate and Partial exchanged. So nothing here
   speaks of gradients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from partita.layout import Invariant, Partial, Placement, Replicate, Shard

__all__ = [
    "NUMBER",
    "Bound",
    "Dim",
    "Names",
    "Operand",
    "Row",
    "Sentence",
    "SentenceError",
    "parse",
]

REPLICATE, INVARIANT, SHARES = Replicate(), Invariant(), Partial()
SHARD = tuple(Shard(d) for d in range(64))


class SentenceError(ValueError):
    """A sentence that cannot be read, or that does not fit the shapes it is bound to."""


class _Number:
    """Stands for an operand that is a Python number: whole everywhere, never a share."""

    def __repr__(self) -> str:
        return "NUMBER"


NUMBER = _Number()
Operand = tuple[int, ...] | _Number | None
"""What a sentence is bound to, per term: a global shape in elements, a number, or nothing."""


@dataclass(frozen=True)
class Dim:
    """One dimension: the names whose product it is; `()` is a dimension of one."""

    names: tuple[str, ...]
    whole: bool = False
    even: bool = False

    def __str__(self) -> str:
        text = " ".join(self.names) or "1"
        if len(self.names) > 1:
            text = f"({text})"
        return text + "!" * self.whole + "%" * self.even


@dataclass(frozen=True)
class Term:
    """One tensor's dimensions.

    Attributes:
        reduce: how an output takes the names that it lacks.
        said: did the sentence say `sum`, so that it holds of an op that is not linear too?
        index: may this operand never be shares?
    """

    dims: tuple[Dim, ...]
    reduce: str = "sum"
    said: bool = False
    index: bool = False


@dataclass(frozen=True)
class Group:
    """A sum of products of terms (indices into `Sentence.terms`)."""

    products: tuple[tuple[int, ...], ...]
    linear: bool


@dataclass(frozen=True)
class Sentence:
    """A parsed sentence; `str` gives back its text."""

    text: str
    terms: tuple[Term, ...]
    groups: tuple[Group, ...]
    outputs: tuple[Term, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return self.text

    def bind(self, operands: Sequence[Operand]) -> Bound:
        """Fit the sentence to global shapes.

        Args:
            operands: one per term, in order; missing ones at the end count as None.

        Raises:
            SentenceError: a wrong number of operands or dimensions, or sizes that disagree.
        """
        return _bind(self, tuple(operands))


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


class Names(tuple[str, ...]):
    """The names of one operand's dimensions, for rules that build their sentence from arguments."""

    def __str__(self) -> str:
        return " ".join(self)

    def __add__(self, other: object) -> Names:
        return Names(tuple(self) + tuple(other))  # type: ignore[arg-type]

    def at(self, dim: int) -> int:
        """`dim` as a non-negative index. Raises IndexError as torch does."""
        n = max(len(self), 1)
        if not -n <= dim < n:
            raise IndexError(f"Dimension out of range (expected [{-n}, {n - 1}], but got {dim})")
        return dim % n

    def dims(self, dim: int | Sequence[int] | None) -> tuple[int, ...]:
        """The dimensions that a `dim` argument means; None and `()` mean all."""
        if dim is None or (not isinstance(dim, int) and len(dim) == 0):
            return tuple(range(len(self)))
        found = tuple(self.at(d) for d in ((dim,) if isinstance(dim, int) else dim))
        return found if self else ()  # torch lets a tensor of no dimensions have dim 0

    def without(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Names:
        """What is left when `dim` is reduced; with `keepdim` a `1` stands in its place."""
        gone = self.dims(dim)
        if keepdim:
            return Names("1" if i in gone else n for i, n in enumerate(self))
        return Names(n for i, n in enumerate(self) if i not in gone)

    def whole(self, dim: int | Sequence[int] | None = None) -> Names:
        """The same names, those of `dim` marked `!`."""
        kept = self.dims(dim)
        return Names(f"{n}!" if i in kept and n[-1] not in "!1" else n for i, n in enumerate(self))

    def put(self, dim: int, text: str) -> Names:
        """The same names with `text` in the place of dimension `dim`."""
        i = self.at(dim)
        return Names((*self[:i], text, *self[i + 1 :]))

    def insert(self, dim: int, text: str) -> Names:
        """One more name: `text` becomes dimension `dim`."""
        i = dim if dim >= 0 else dim + len(self) + 1
        return Names((*self[:i], text, *self[i:]))

    @staticmethod
    @lru_cache(maxsize=256)
    def of(ndim: int, start: str = "a") -> Names:
        """`ndim` names: a b c ...; beyond z: a1 b1 ..."""
        first, out = ord(start) - 97, []
        for i in range(first, first + ndim):
            out.append(chr(97 + i % 26) + (str(i // 26) if i >= 26 else ""))
        return Names(out)


# -- text -> Sentence ------------------------------------------------------------------------------

_NAME = r"[A-Za-z_]\w*(?:=\d+)?"
_TOKEN = re.compile(
    rf"\s*(?:(\.\.\.|{_NAME}|1)(!?)(%?)"
    rf"|\(\s*((?:(?:{_NAME}|1)(?:\s+(?:{_NAME}|1))*)?)\s*\)(!?)(%?)|(\S))"
)


@lru_cache(maxsize=8192)
def parse(text: str) -> Sentence:
    """Read a sentence. Raises SentenceError with the place that cannot be read."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise SentenceError(f'no "->" in the rule {text!r}')
    terms: list[Term] = []
    groups: list[Group] = []
    sizes: dict[str, int] = {}
    for part in left.split(","):
        linear = part.lstrip().startswith("+")
        body = part.lstrip()[1:] if linear else part
        sums = body.split("+")
        products = []
        for addend in sums:
            factors = addend.split("*")
            linear = linear or len(factors) > 1 or len(sums) > 1
            products.append(tuple(range(len(terms), len(terms) + len(factors))))
            for factor in map(str.strip, factors):
                index = factor.startswith("[") and factor.endswith("]")
                dims = _dims(factor[1:-1] if index else factor, text, sizes)
                terms.append(Term(dims, index=index))
        groups.append(Group(tuple(products), linear))
    outputs = []
    for part in right.split(","):
        words = part.split(None, 1)
        said = bool(words) and words[0] in ("max", "min", "sum")
        if said:
            part = words[1] if len(words) > 1 else ""
        outputs.append(Term(_dims(part, text, sizes), words[0] if said else "sum", said))
    return Sentence(text, tuple(terms), tuple(groups), tuple(outputs), tuple(sizes.items()))


def _dims(text: str, sentence: str, sizes: dict[str, int]) -> tuple[Dim, ...]:
    """A term's dimensions; the sizes that it gives go into `sizes`."""

    def plain(name: str) -> str:
        name, given, size = name.partition("=")
        if given and sizes.setdefault(name, int(size)) != int(size):
            raise SentenceError(f"{name} is both {sizes[name]} and {size} in the rule {sentence!r}")
        return name

    dims = []
    for match in _TOKEN.finditer(text.strip()):
        name, whole, even, joined, joined_whole, joined_even, bad = match.groups()
        if bad:
            raise SentenceError(f"cannot read {bad!r} in {text.strip()!r} of the rule {sentence!r}")
        if name == "1":
            dims.append(Dim(()))
        elif name:
            dims.append(Dim((plain(name),), bool(whole), bool(even)))
        else:
            inner = tuple(plain(n) for n in joined.split() if n != "1")
            dims.append(Dim(inner, bool(joined_whole), bool(joined_even)))
    return tuple(dims)


# -- Sentence + shapes -> Bound --------------------------------------------------------------------


@lru_cache(maxsize=8192)
def _bind(sentence: Sentence, operands: tuple[Operand, ...]) -> Bound:
    if len(operands) > len(sentence.terms):
        raise SentenceError(f"{len(operands)} operands for the rule {sentence.text!r}")
    operands += (None,) * (len(sentence.terms) - len(operands))
    leading = _leading(sentence, operands)
    sizes: dict[str, int] = dict(sentence.sizes)
    joined: list[tuple[tuple[str, ...], int]] = []
    inputs: list[tuple[Dim, ...] | None] = []
    for term, operand in zip(sentence.terms, operands, strict=True):
        if operand is None or isinstance(operand, _Number):
            inputs.append(None)
            continue
        dims = _spread(term, operand, leading, sentence)
        for dim, size in zip(dims, operand, strict=True):
            if len(dim.names) == 1:
                if sizes.setdefault(dim.names[0], size) != size:
                    raise SentenceError(
                        f"{dim.names[0]} is both {sizes[dim.names[0]]} and {size} "
                        f"in the rule {sentence.text!r} for shapes {_shapes(operands)}"
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
    even = {d.names[0] for d in everything if d.even and d.names}
    for dim in everything:
        for n in dim.names:
            others = math.prod([sizes.get(other, 2) for other in dim.names if other != n])
            if others != 1 or (len(dim.names) > 1 and sizes.get(n, 2) == 1):
                even.add(n)  # a piece of the dimension is a piece of n only if all are alike
    rows = tuple(_rows(sentence, operands, tuple(inputs), outputs, sizes))
    return Bound(sentence, operands, tuple(inputs), outputs, sizes, rows, frozenset(even))


def _leading(sentence: Sentence, operands: tuple[Operand, ...]) -> tuple[int, ...]:
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
                    f"for shapes {_shapes(operands)}"
                )
            wide.append(b if a == 1 else a)
        longest = tuple(wide)
    return longest


def _spread(
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


def _shapes(operands: tuple[Operand, ...]) -> str:
    return ", ".join("-" if o is None else str(o) for o in operands)


# -- the rows --------------------------------------------------------------------------------------


def _rows(
    sentence: Sentence,
    operands: tuple[Operand, ...],
    inputs: tuple[tuple[Dim, ...] | None, ...],
    outputs: tuple[tuple[Dim, ...], ...],
    sizes: dict[str, int],
) -> Iterator[Row]:
    def everywhere(p: Placement) -> tuple[Placement | None, ...]:
        return tuple(None if dims is None else p for dims in inputs)

    present = [
        Group(
            tuple(
                tuple(i for i in factors if operands[i] is not None)
                for factors in group.products
                if any(operands[i] is not None for i in factors)
            ),
            group.linear,
        )
        for group in sentence.groups
    ]
    held = {n for dims in inputs if dims is not None for d in dims for n in d.names}
    for name in (n for n in sizes if n in held):
        yield from _split(name, sentence, present, inputs, outputs, sizes)
    for group in present:
        for shares in _share_choices(group.products, inputs, sentence) if group.linear else ():
            if shares and all(out.reduce == "sum" for out in sentence.outputs):
                yield Row(
                    tuple(
                        None if dims is None else SHARES if i in shares else REPLICATE
                        for i, dims in enumerate(inputs)
                    ),
                    (SHARES,) * len(outputs),
                )
    yield Row(everywhere(REPLICATE), (REPLICATE,) * len(outputs))
    yield Row(everywhere(INVARIANT), (INVARIANT,) * len(outputs))


def _share_choices(
    products: Sequence[tuple[int, ...]],
    inputs: tuple[tuple[Dim, ...] | None, ...],
    sentence: Sentence,
) -> Iterator[frozenset[int]]:
    """Each way to take one tensor of every product as shares."""

    def able(p: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in p if inputs[i] is not None and not sentence.terms[i].index)

    for choice in product(*map(able, products)):
        yield frozenset(choice)


def _split(
    name: str,
    sentence: Sentence,
    groups: list[Group],
    inputs: tuple[tuple[Dim, ...] | None, ...],
    outputs: tuple[tuple[Dim, ...], ...],
    sizes: dict[str, int],
) -> Iterator[Row]:
    """The rows in which `name` is split; none if a tensor must have it whole."""
    where = [None if dims is None else _find(name, dims, sizes) for dims in inputs]
    into = [_find(name, dims, sizes) for dims in outputs]
    if any(d == WHOLE for d in (*where, *into)):
        return
    placed: list[Placement] = []
    summed = False
    for d, out in zip(into, sentence.outputs, strict=True):
        if d is not None:
            placed.append(SHARD[d])
        elif out.reduce != "sum":
            placed.append(Partial(out.reduce))
        else:
            placed.append(SHARES)
            summed = summed or not out.said
    choices: Iterator[frozenset[int]] = iter((frozenset(),))
    if summed:
        # The name is contracted: some linear group must have it, and the addends of that group
        # that lack it would be counted once per rank, unless they are shares themselves.
        having = [
            g
            for g in groups
            if g.linear and any(where[i] is not None for p in g.products for i in p)
        ]
        if len(having) != 1:
            return
        lacking = [p for p in having[0].products if all(where[i] is None for i in p)]
        choices = _share_choices(lacking, inputs, sentence)
    for shares in choices:
        yield Row(
            tuple(
                None
                if dims is None
                else SHARD[d]
                if (d := where[i]) is not None
                else SHARES
                if i in shares
                else REPLICATE
                for i, dims in enumerate(inputs)
            ),
            tuple(placed),
            name,
        )


WHOLE = -1


def _find(name: str, dims: tuple[Dim, ...], sizes: dict[str, int]) -> int | None:
    """The dimension that a split of `name` shards; None if none has it, WHOLE if it cannot be."""
    found: int | None = None
    for d, dim in enumerate(dims):
        if name in dim.names:
            outer = dim.names[: dim.names.index(name)]
            if dim.whole or found is not None or any(sizes.get(n, 2) != 1 for n in outer):
                return WHOLE
            found = d
    return found
