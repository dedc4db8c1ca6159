"""Sentences: the notation of a rule, which says what an op's operands may be on one mesh axis.

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
from itertools import pairwise


class SentenceError(ValueError):
    """A sentence that cannot be read, or that does not fit the shapes it is bound to."""


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
class Products:
    """A sum of products of terms (indices into `Sentence.terms`)."""

    products: tuple[tuple[int, ...], ...]
    linear: bool


@dataclass(frozen=True)
class Sentence:
    """A parsed sentence; `str` gives back its text."""

    text: str
    terms: tuple[Term, ...]
    groups: tuple[Products, ...]
    outputs: tuple[Term, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return self.text


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
    groups: list[Products] = []
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
                dims = _parse_dims(factor[1:-1] if index else factor, text, sizes)
                terms.append(Term(dims, index=index))
        groups.append(Products(tuple(products), linear))
    outputs = []
    for part in right.split(","):
        words = part.split(None, 1)
        said = bool(words) and words[0] in ("max", "min", "sum")
        if said:
            part = words[1] if len(words) > 1 else ""
        outputs.append(Term(_parse_dims(part, text, sizes), words[0] if said else "sum", said))
    return Sentence(text, tuple(terms), tuple(groups), tuple(outputs), tuple(sizes.items()))


def _parse_dims(text: str, sentence: str, sizes: dict[str, int]) -> tuple[Dim, ...]:
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


# -- names, for a rule that writes its sentence ----------------------------------------------------


class Names(tuple[str, ...]):
    """The names of one operand's dimensions, outermost first; `str` is a term of a sentence."""

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


# -- sentences of views ----------------------------------------------------------------------------


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

    The dimensions of both shapes are cut at every place where either has a boundary. What lies
    between two cuts is a name, and a dimension is the names it is made of. Where the cuts do not
    nest (6 x 4 read as 4 x 6) the dimensions between the nearest common boundaries stay whole.

        view_sentence((12, 4), (3, 4, 4))      "+ (a=3 b) c -> a b c"

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
