"""Sentences: the notation of a rule, which gives the legal placements of an op's operands.

    "... i * o i + o -> ... o"

Each operand and each output is a *term*: a list of *names*, one for each dimension. `...` is any
number of leading dimensions. `( )` joins names into one dimension (the first is the outermost). `1`
is a dimension of size 1. Terms are multiplied `*`, added `+`, or neither `,`. A leading `+` means
that the op is linear in its single term. After a name, `!` keeps the dimension whole, and `%`
allows only even splits. `a=3` gives a name its size, if the shapes do not determine it. A term in
`[ ]` is an index or a divisor: it is multiplied or added like any other, but must not be Partial.
Names that an output lacks are summed. If the output begins with `max` or `min`, they are reduced by
max or min. With `sum` they are summed although the op is not linear (a loss, a norm).

A *row* places the op on one mesh axis. These rows are legal:

1. *Split a name*: tensors that have the name are sharded there, and the others are whole. An output
   that lacks it is Partial. A term that lacks it, added to terms that have it, must be Partial.
2. *Partial*: in a sum all terms may be Partial together, in a product one factor may be.
3. *Whole*: all tensors are whole.

The row of the gradients follows: it is the row with Replicate and Partial exchanged (the dual).

`bind` fits a sentence to global shapes and finds the size of each name, the rows, and the
operations of the op's matrix products (`work_of`). They do not depend on the sizes of mesh axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product, zip_longest

from partita.layout import Invariant, Partial, Placement, Replicate, Shard


class SentenceError(ValueError):
    """Raised if a sentence cannot be read, or does not fit the shapes of a call."""


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor in a sentence: a name, or joined names such as `(a b)`.

    Attributes:
        names: the names. The size of the dimension is the product of their sizes.
        whole: True if it is marked `!`: it must not be sharded.
        even: True if it is marked `%`: it is sharded only into equal pieces.
    """

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
    """One operand or output in a sentence.

    Attributes:
        dims: its dimensions.
        reduce: how an output reduces the names that it lacks: "sum", "max" or "min".
        explicit: True if an output begins with `max`, `min` or `sum`. Its op need not be linear.
        index: True if this operand must not be Partial.
    """

    dims: tuple[Dim, ...]
    reduce: str = "sum"
    explicit: bool = False
    index: bool = False


@dataclass(frozen=True)
class Products:
    """How some operands of a sentence are combined: a sum of products, such as `a * b + c`.

    Attributes:
        products: the factors of each addend, as indices into the sentence's terms.
        linear: True if the op is linear in each factor.
    """

    products: tuple[tuple[int, ...], ...]
    linear: bool


@dataclass(frozen=True)
class Sentence:
    """A parsed sentence, such as "... i * o i -> ... o". `str` returns its text.

    Attributes:
        terms, outputs: the operands and the outputs.
        groups: how the operands are combined; one `Products` for each part between commas.
        sizes: the sizes that the sentence gives (`a=3`), as `(name, size)`.
    """

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
    """Parses a sentence.

    Args:
        text: the sentence, such as "... i * o i -> ... o".

    Raises:
        SentenceError: the sentence cannot be read. The error shows the part.
    """
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
    """Returns the dimensions of a term. Adds the sizes that the term gives to `sizes`."""

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
    """The names of a tensor's dimensions, for writing a sentence. `str(names)` is "a b"."""

    def __str__(self) -> str:
        return " ".join(self)

    def __add__(self, other: object) -> Names:
        return Names(tuple(self) + tuple(other))  # type: ignore[arg-type]

    def at(self, dim: int) -> int:
        """Returns the index of a dimension, counted from 0. `dim` may be negative.

        Raises:
            IndexError: out of range, as in torch.
        """
        n = max(len(self), 1)
        if not -n <= dim < n:
            raise IndexError(f"Dimension out of range (expected [{-n}, {n - 1}], but got {dim})")
        return dim % n

    def dims(self, dim: int | Sequence[int] | None) -> tuple[int, ...]:
        """Returns a `dim` argument as a tuple of indices. None and `()` mean all dimensions."""
        if dim is None or (not isinstance(dim, int) and len(dim) == 0):
            return tuple(range(len(self)))
        found = tuple(self.at(d) for d in ((dim,) if isinstance(dim, int) else dim))
        return found if self else ()  # torch accepts dim=0 for a 0-d tensor

    def without(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Names:
        """Returns the names that are left after a reduction over `dim`.

        Args:
            keepdim: True replaces the removed names by `1`.
        """
        gone = self.dims(dim)
        if keepdim:
            return Names("1" if i in gone else n for i, n in enumerate(self))
        return Names(n for i, n in enumerate(self) if i not in gone)

    def whole(self, dim: int | Sequence[int] | None = None) -> Names:
        """Returns the names, with `!` after each name of `dim`. It keeps these dimensions whole."""
        kept = self.dims(dim)
        return Names(f"{n}!" if i in kept and n[-1] not in "!1" else n for i, n in enumerate(self))

    def put(self, dim: int, text: str) -> Names:
        """Returns the names with `text` in place of the name of dimension `dim`."""
        i = self.at(dim)
        return Names((*self[:i], text, *self[i + 1 :]))

    def insert(self, dim: int, text: str) -> Names:
        """Returns the names with `text` inserted as a new dimension at index `dim`."""
        i = dim if dim >= 0 else dim + len(self) + 1
        return Names((*self[:i], text, *self[i:]))

    @staticmethod
    @lru_cache(maxsize=256)
    def of(ndim: int) -> Names:
        """Returns names for `ndim` dimensions: a b c ... z a1 b1 ..."""
        return Names(chr(97 + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(ndim))


# -- sentences of views ----------------------------------------------------------------------------


def resolve_shape(numel: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns `shape` with `-1` replaced by the size that gives `numel` elements.

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
    """Returns the rule (sentence) of a view from one global shape to another, neither with -1.

    Dimensions are split into factors that both shapes have in common, and each factor gets a name.
    Where there are none (6 x 4 viewed as 4 x 6), the dimensions stay whole.

        view_sentence((12, 4), (3, 4, 4))      "+ (a=3 b) c -> a b c"

    The `+` says that a view is linear. `(a=3 b)` is the dimension of 12, as 3 x 4.

    Args:
        before, after: the shapes.

    Raises:
        ValueError: the shapes have different numbers of elements.
    """
    if math.prod(before) != math.prod(after):
        raise ValueError(f"shape {tuple(before)} cannot be viewed as {tuple(after)}")
    if tuple(before) == tuple(after):  # no change, even if a dimension of size 1 is split
        same = " ".join(Names.of(len(before)))
        return f"+ {same} -> {same}"
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
    """Yields the shortest runs of dimensions of both shapes that have equally many elements."""
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
    """Returns the products of the leading sizes of both shapes, in rising order.

    Returns None if one of them does not divide the next, so that no common factors exist.
    """
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
    """Returns the text of each dimension of `shape` as a product of the next `factors`.

    Args:
        given: True to write sizes: `(a=3 b)`.
    """
    rest = iter(factors)
    dims = []
    for size in shape:
        mine, held = [], 1
        while held < size:
            name, n = next(rest)
            held *= n
            mine.append((name, n))
        words = [f"{name}={n}" if given else name for name, n in mine[:-1]]
        words += [name for name, _ in mine[-1:]]
        dims.append("1" if not words else words[0] if len(words) == 1 else f"({' '.join(words)})")
    return dims


# -- rows ------------------------------------------------------------------------------------------

REPLICATE, INVARIANT, SHARES = Replicate(), Invariant(), Partial()
SHARD = tuple(Shard(d) for d in range(64))
_REDUCED = {"sum": SHARES, "max": Partial("max"), "min": Partial("min")}
"""Made once: rows are made often."""

_Dims = tuple[Dim, ...]
WHOLE = -1
"""The result of `_find_sharded_dim` for a name that must not be split."""


@dataclass(frozen=True)
class Row:
    """One legal way to place an op on one mesh axis, such as `S(0), R -> S(0)`.

    Attributes:
        inputs: a placement for each operand; None if it is absent or a number.
        outputs: a placement for each output.
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
    """Yields every legal row: first those that split a name.

    Args:
        inputs: each operand's dimensions, `...` written out; None where it is absent or a number.
        outputs: the same for the results.
        sizes: elements of each name that an operand has or the sentence gives.
        absent: the operands that are not passed. A number is passed: added to a Partial value, it
            would be counted once per rank.
    """
    missing = frozenset(absent)
    groups = [_drop_absent_operands(group, missing) for group in sentence.groups]
    there = [i for i, dims in enumerate(inputs) if dims is not None]
    able = frozenset(i for i in there if not sentence.terms[i].index)

    def make_row(placed: Sequence[Placement], results: Sequence[Placement], name: str = "") -> Row:
        each = (None if d is None else p for d, p in zip(inputs, placed, strict=True))
        return Row(tuple(each), tuple(results), name)

    held = {n for dims in inputs if dims is not None for d in dims for n in d.names}
    for name in (n for n in sizes if n in held):
        where = [None if dims is None else _find_sharded_dim(name, dims, sizes) for dims in inputs]
        into = [_find_sharded_dim(name, dims, sizes) for dims in outputs]
        if WHOLE in where or WHOLE in into:
            continue
        outs = [*zip(into, sentence.outputs, strict=True)]
        results = [_REDUCED[out.reduce] if d is None else SHARD[d] for d, out in outs]
        contracted = any(d is None and out.reduce == "sum" and not out.explicit for d, out in outs)
        ways = _find_partial_addends(groups, where, able) if contracted else [frozenset[int]()]
        for shares in ways:
            whole = [SHARES if i in shares else REPLICATE for i in range(len(where))]
            placed = [p if d is None else SHARD[d] for d, p in zip(where, whole, strict=True)]
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
    """Yields the sets of operands that must be Partial if a split name is summed over.

    Exactly one linear group must have the name. Addends of it that lack the name would be counted
    once per rank unless they are Partial. If there is no such group, nothing is yielded.
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
    """Yields each way to take one operand of every product, among the operands in `able`."""
    for choice in product(*(tuple(i for i in p if i in able) for p in products)):
        yield frozenset(choice)


def _find_sharded_dim(name: str, dims: _Dims, sizes: dict[str, int]) -> int | None:
    """Returns the dimension that a split of `name` shards; None if none, WHOLE if impossible."""
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
    """An operand that is a Python number: whole on all ranks, never Partial."""

    def __repr__(self) -> str:
        return "NUMBER"


NUMBER = _Number()
Operand = tuple[int, ...] | _Number | None
"""The operand of a term: a global shape in elements, a number, or nothing."""


@dataclass(frozen=True)
class Bound:
    """A rule's sentence, applied to the shapes of a call: sizes of its names, and its legal rows.

    Attributes:
        operands: each term's global shape; `NUMBER` for a Python number; None if absent.
        inputs: the `Dim`s of each term's operand, which name its dimensions; None if the operand is
            absent or a number.
        outputs: the dimensions of each output.
        sizes: the size of each name whose size is known from an operand or from the sentence. Names
            that occur only in an output are missing.
        rows: every legal row. `can_split` says if the sizes allow an axis to split a name.
        even: the names that may only be split into equal pieces.
    """

    sentence: Sentence
    operands: tuple[Operand, ...]
    inputs: tuple[tuple[Dim, ...] | None, ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: dict[str, int]
    rows: tuple[Row, ...]
    even: frozenset[str]

    def can_split(self, name: str, parts: int) -> bool:
        """True if the dimension called `name` can be sharded over `parts` ranks.

        A name that is joined with others into one dimension, or marked `%`, must be split evenly.

        Args:
            parts: the product of the sizes of the mesh axes that split it.
        """
        return name not in self.even or self.sizes[name] % parts == 0

    def output_shape(self, i: int, local: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the global shape of output `i`.

        Args:
            local: the shape of the local result, for sizes that only the kernel knows.
        """
        shape = []
        for d, dim in enumerate(self.outputs[i]):
            known = all(n in self.sizes for n in dim.names)
            shape.append(math.prod([self.sizes[n] for n in dim.names]) if known else local[d])
        return tuple(shape)


def bind(sentence: Sentence, operands: Sequence[Operand]) -> Bound:
    """Applies a sentence to the global shapes of operands, and finds the legal rows (placements).

    Args:
        operands: one per term, in order; those missing at the end count as None.

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
                even.add(n)  # a piece of the dimension is a piece of n only if all pieces are equal
    absent = [i for i, operand in enumerate(operands) if operand is None]
    rows = tuple(_derive_rows(sentence, inputs, outputs, sizes, absent))
    return Bound(sentence, operands, tuple(inputs), outputs, sizes, rows, frozenset(even))


def _find_ellipsis(term: Term) -> int | None:
    return next((i for i, dim in enumerate(term.dims) if dim.names == ("...",)), None)


def _find_broadcast_sizes(sentence: Sentence, operands: tuple[Operand, ...]) -> tuple[int, ...]:
    """Returns the broadcast sizes of the dimensions that `...` matches."""
    longest: tuple[int, ...] = ()
    for term, operand in zip(sentence.terms, operands, strict=True):
        if operand is None or isinstance(operand, _Number):
            continue
        at = _find_ellipsis(term)
        if at is None:
            continue
        count = len(operand) - len(term.dims) + 1
        if count < 0:
            said = f"shape {operand} has too few dimensions"
            raise SentenceError(f"{said} for the rule {sentence.text!r}")
        own = operand[at : at + count]
        wide = []
        for a, b in zip_longest(reversed(own), reversed(longest), fillvalue=1):
            if a != b and 1 not in (a, b):
                said = f"sizes {a} and {b} do not broadcast in the rule {sentence.text!r}"
                raise SentenceError(f"{said} for shapes {_format_shapes(operands)}")
            wide.append(b if a == 1 else a)
        longest = tuple(reversed(wide))
    return longest


def _expand_ellipsis(
    term: Term, shape: tuple[int, ...], leading: tuple[int, ...], sentence: Sentence
) -> tuple[Dim, ...]:
    """Returns a term's dimensions with `...` expanded; a broadcast dimension counts as 1."""
    at = _find_ellipsis(term)
    if at is None:
        if len(shape) != len(term.dims):
            wanted = " ".join(map(str, term.dims))
            raise SentenceError(
                f"shape {shape} does not fit {wanted!r} in the rule {sentence.text!r}"
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
    at, n = _find_ellipsis(term), len(leading)
    if at is None:
        return term.dims
    dots = term.dims[at]
    spread = tuple(Dim((f".{n - i}",), dots.whole, dots.even) for i in range(n))
    return term.dims[:at] + spread + term.dims[at + 1 :]


def _format_shapes(operands: tuple[Operand, ...]) -> str:
    return ", ".join("-" if o is None else str(o) for o in operands)


# -- work ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The flops of a matrix product or convolution, and the dimensions that distribute them.

    Other ops are not counted, because their time depends on memory and not on operations.

    Attributes:
        operations: multiplications and additions of the whole product.
        names: the names of dimensions that distribute the work. If a mesh axis splits such a
            dimension, each rank of the axis does a part of the operations. Otherwise each rank does
            all.
        factors: the indices of the operands that are multiplied.
    """

    operations: int
    names: frozenset[str]
    factors: frozenset[int]


def work_of(bound: Bound, said: Sequence[str] = ()) -> tuple[Work, ...]:
    """Returns the flops of the matrix products in an op; empty if it has none.

    Args:
        bound: the op's sentence, applied to the shapes of a call.
        said: for each product, a text with the names of its dimensions, and numbers: `"... q k d"`.
            The operations are the product of the sizes and numbers. A name in `[ ]` distributes the
            work, but is not a factor. If empty, the products in the sentence are used.
    """
    terms = bound.sentence.terms
    products = [p for group in bound.sentence.groups for p in group.products if len(p) > 1]
    shown = [p for p in products if not any(terms[i].index for i in p)]  # no table look-ups
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
