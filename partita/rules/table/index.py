"""Which ops read or write some places of a tensor?

Reading places of a split dimension is a contraction: each rank reads those that it has and gives 0
for the others, and the sum is the value. The local kernels here know where a rank's piece begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..exceptions import nothing, own
from ..names import Names
from ..rule import Arg, Call, Said, rule

# -- embedding -------------------------------------------------------------------------------------


def _rows_of(weight: Any, index: Any, piece: Any, padding_idx: Any) -> Any:
    """Rows of this rank's piece of the table, 0 for what is not in it."""
    offset, length, size = piece
    at, away = own(index, piece)
    if not length:
        return nothing(weight, (*index.shape, weight.shape[1]))
    if padding_idx is not None:
        padding_idx = padding_idx % size - offset
        padding_idx = padding_idx if 0 <= padding_idx < length else None
    return F.embedding(at, weight, padding_idx).masked_fill(away.unsqueeze(-1), 0)


@rule(F.embedding)
def embedding(
    input: Arg,
    weight: Arg,
    padding_idx: int | None = None,
    max_norm: bool | None = None,
    _norm_type: Any = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Said | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None

    def local(call: Call) -> Callable[..., Any] | None:
        def run(input: Any, weight: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Any:
            return _rows_of(weight, input, call.pieces["v"], padding_idx)

        return run if call.is_split("v") else None

    return Said("[...] * v d -> ... d", local)


@rule(torch.embedding)
def embedding_builtin(
    weight: Arg,
    indices: Arg,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Said | None:
    if scale_grad_by_freq or sparse:
        return None

    def local(call: Call) -> Callable[..., Any] | None:
        def run(weight: Any, indices: Any, padding_idx: int = -1, *_: Any, **__: Any) -> Any:
            padding = None if padding_idx < 0 else padding_idx
            return _rows_of(weight, indices, call.pieces["v"], padding)

        return run if call.is_split("v") else None

    return Said("v d * [...] -> ... d", local)


@rule(F.embedding_bag)
def embedding_bag(
    input: Arg,
    weight: Arg,
    offsets: Any = None,
    max_norm: bool | None = None,
    _norm_type: Any = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
) -> str | None:
    plain = offsets is None and max_norm is None and per_sample_weights is None
    if input.ndim != 2 or not plain or scale_grad_by_freq or sparse:
        return None
    return "b% n!, v! d% -> b% d%" if mode == "max" else "[b% n!] * v! d% -> b% d%"


# -- one dimension by an index ---------------------------------------------------------------------


@rule(torch.index_select)
def index_select(input: Arg, dim: int, index: Arg) -> Said | None:
    if input.ndim == 0:
        return None
    i = input.names.at(dim)
    name = f"x{i}"
    ours, out = input.names.put(i, name), input.names.put(i, "xi" if index.ndim else "1")

    def local(call: Call) -> Callable[..., Any] | None:
        def run(input: Any, dim: int, index: Any) -> Any:
            if not input.shape[i]:
                shape = [*input.shape[:i], index.numel(), *input.shape[i + 1 :]]
                return nothing(input, shape)
            at, away = own(index, call.pieces[name])
            away = away.view(-1, *[1] * (input.ndim - i - 1))
            return torch.index_select(input, i, at).masked_fill(away, 0)

        return run if call.is_split(name) else None

    return Said(f"{ours} * [{'xi' * index.ndim}] -> {out}", local)


def _gathered(input: Arg, dim: int, index: Arg, picked: Callable[..., Any]) -> Said | None:
    """`picked(kernel)` is the local function; the kernel takes input, index."""
    if input.ndim == 0 or index.ndim != input.ndim:
        return None
    i = input.names.at(dim)
    # Where the index is shorter than the input it reads the beginning: those stay whole.
    same = [d == i or a == b for d, (a, b) in enumerate(zip(input.shape, index.shape, strict=True))]
    ours, theirs = input.names.put(i, "x"), input.names.put(i, "i")
    ours = Names(n if s else f"y{d}!" for d, (n, s) in enumerate(zip(ours, same, strict=True)))
    theirs = Names(n if s else f"z{d}!" for d, (n, s) in enumerate(zip(theirs, same, strict=True)))

    def local(call: Call) -> Callable[..., Any] | None:
        def run(input: Any, index: Any) -> Any:
            if not input.shape[i]:
                return nothing(input, index.shape)
            at, away = own(index, call.pieces["x"])
            return torch.gather(input, i, at).masked_fill(away, 0)

        return picked(run) if call.is_split("x") else None

    return Said(f"{ours} * [{theirs}] -> {theirs}", local)


@rule(torch.gather)
def gather(input: Arg, dim: int, index: Arg) -> Said | None:
    return _gathered(
        input, dim, index, lambda run: lambda input, dim, index, **_: run(input, index)
    )


@rule(torch.take)
def take(input: Arg, index: Arg) -> str:
    return f"{input.names.whole()} * [...] -> ..."


@rule(torch.take_along_dim)
def take_along_dim(input: Arg, indices: Arg, dim: int | None = None) -> Said | None:
    if dim is None or input.ndim != indices.ndim:
        return None
    i = input.names.at(dim)
    sizes = zip(input.shape, indices.shape, strict=True)
    if any(a != b for d, (a, b) in enumerate(sizes) if d != i):
        return None
    return _gathered(input, dim, indices, lambda run: lambda x, indices, dim: run(x, indices))


def _scattered(input: Arg, dim: int, index: Arg, src: Any, add: bool) -> str:
    tensors = [input, index, src] if isinstance(src, Arg) else [input, index]
    i = input.names.at(dim)
    terms: list[list[str]] = [[], [], []]
    for d in range(max(t.ndim for t in tensors)):
        sizes = [t.shape[d] if t.ndim else 1 for t in tensors]
        if d != i and len(set(sizes)) == 1:
            words = [input.names[d]] * 3
        elif d == i and add and sizes[1] == sizes[2]:  # what is added may come in any order
            words = [f"{input.names[d]}!", "xi", "xi"]
        else:
            words = [f"a{d}!", f"i{d}!", f"j{d}!"]
        for term, word, t in zip(terms, words, tensors, strict=False):
            term += [word] * (t.ndim > 0)
    ours, where, values = map(" ".join, terms)
    if not isinstance(src, Arg):
        return f"{ours}, {where} -> {ours}"
    return f"+ {ours} + [{where}] * {values} -> {ours}"


@rule(torch.scatter)
def scatter(
    input: Arg, dim: int, index: Arg, src: Any = None, *, value: Any = None, reduce: Any = None
) -> str | None:
    return None if reduce is not None else _scattered(input, dim, index, src, add=False)


@rule(torch.scatter_add)
def scatter_add(input: Arg, dim: int, index: Arg, src: Arg) -> str:
    return _scattered(input, dim, index, src, add=True)


@rule(torch.scatter_reduce)
def scatter_reduce(input: Arg, dim: int, index: Arg, src: Arg, _reduce: Any = None) -> str | None:
    # Not linear: the same dimensions, but each operand by itself.
    text = _scattered(input, dim, index, src, add=False)
    return text[2:].replace(" + [", ", ").replace("] * ", ", ")


def _onto(input: Arg, dim: int, index: Arg, source: Arg, add: bool) -> str | None:
    if input.ndim == 0 or source.ndim != input.ndim or index.ndim != 1:
        return None
    i = input.names.at(dim)
    place = "xi" if add else "xi!"
    ours = input.names.whole(i)
    return f"{ours} + [{place}] * {input.names.put(i, place)} -> {ours}"


@rule(torch.index_add)
def index_add(input: Arg, dim: int, index: Arg, source: Arg) -> str | None:
    return _onto(input, dim, index, source, add=True)


@rule(torch.index_copy)
def index_copy(input: Arg, dim: int, index: Arg, source: Arg) -> str | None:
    return _onto(input, dim, index, source, add=False)


@rule(torch.index_fill)
def index_fill(input: Arg, dim: int, index: Arg, value: Any = None) -> str:
    names = input.names.whole(dim) if input.ndim else input.names
    place = "xi!" * index.ndim
    if isinstance(value, Arg):
        return f"+ {names} + [{place}] * -> {names}"
    return f"{names}, {place} -> {names}"


# -- parts of a dimension --------------------------------------------------------------------------


@rule(torch.select)
def select(input: Arg, dim: int, index: int) -> Said | None:
    if not isinstance(index, int):
        return None
    i = input.names.at(dim)
    name = input.names[i]

    def local(call: Call) -> Callable[..., Any] | None:
        def run(input: Any, dim: int, index: int) -> Any:
            offset, length, size = call.pieces[name]
            at = index % size - offset
            if 0 <= at < length:
                return torch.select(input, i, at)
            return nothing(input, call.outputs[0])

        return run if call.is_split(name) else None

    return Said(f"+ {input.names} -> {input.names.without(i)}", local)


@rule(torch.narrow)
def narrow(input: Arg, dim: int, start: Any, length: int) -> str | None:
    if not isinstance(start, int):
        return None
    i = input.names.at(dim)
    if length == input.shape[i]:
        return f"+ {input.names.whole(i)} -> {input.names.whole(i)}"
    return f"+ {input.names.whole(i)} -> {input.names.put(i, f'z={length}!')}"


@rule(torch.index_put)
def index_put(
    input: Arg, indices: Sequence[Any], values: Arg, accumulate: bool = False
) -> str | None:
    tensors = [t for t in indices if isinstance(t, Arg)]
    # One dimension of each index: whether it is a mask or not, it stands for one of the input's.
    if any(t.ndim != 1 for t in tensors) or not tensors:
        return None
    chosen = [d for d, t in enumerate(indices) if t is not None]
    ours = [f"{n}!" if d in chosen else n for d, n in enumerate(input.names)]
    kept = [(n, input.shape[d]) for d, n in enumerate(ours) if d not in chosen]
    beside = chosen == list(range(chosen[0], chosen[0] + len(chosen)))
    start = chosen[0] if beside else 0  # torch puts them first where they are not beside each other
    result = [*kept[:start], ("j!", 0), *kept[start:]]
    if values.ndim > len(result):
        return None
    given = [
        "1" if have == 1 != want and n != "j!" else n
        for have, (n, want) in zip(values.shape, result[len(result) - values.ndim :], strict=True)
    ]
    terms = [*(f"[i{k}!]" for k in range(len(tensors))), " ".join(given)]
    return f"{' '.join(ours)} + {' * '.join(terms)} -> {' '.join(ours)}"


# -- moving along a dimension ----------------------------------------------------------------------


@rule(torch.roll)
def roll(input: Arg, _shifts: Any = None, dims: Any = None) -> str:
    if dims is None or dims == () or dims == []:
        return f"+ {input.names.whole()} -> {input.names.whole()}"
    return f"+ {input.names.whole(dims)} -> {input.names.whole(dims)}"


@rule(torch.flip)
def flip(input: Arg, *order: Any, dims: Any = None) -> str:
    where = [
        d
        for item in (*order, dims or ())
        for d in (item if isinstance(item, list | tuple) else [item])
    ]
    names = input.names.whole(where) if where else input.names
    return f"+ {names} -> {names}"


@rule(torch.fliplr)
def fliplr(input: Arg) -> str:
    return flip(input, 1)


@rule(torch.flipud)
def flipud(input: Arg) -> str:
    return flip(input, 0)


@rule(torch.rot90)
def rot90(input: Arg, k: int = 1, dims: Sequence[int] = (0, 1)) -> str:
    i, j = (input.names.at(d) for d in dims)
    if k % 4 == 0:
        return f"+ {input.names} -> {input.names}"
    # A quarter turn exchanges two dimensions and turns one of them round.
    turned = (i, j) if k % 2 == 0 else (j,) if k % 4 == 1 else (i,)
    left = list(input.names.whole(turned))
    out = [f"y{d}={input.shape[d]}!" if d in turned else n for d, n in enumerate(left)]
    if k % 2:
        out[i], out[j] = out[j], out[i]
    return f"+ {' '.join(left)} -> {' '.join(out)}"


@rule(F.pad)
def pad(input: Arg, pad: Sequence[int], mode: str = "constant", value: Any = None) -> str:
    left, out = list(input.names), list(input.names)
    for i in range(len(pad) // 2):
        before, after = pad[2 * i], pad[2 * i + 1]
        d = input.ndim - 1 - i
        if before or after:
            left[d] = f"{input.names[d]}!"
            out[d] = f"z{d}={input.shape[d] + before + after}!"
    if mode != "constant":  # such pads are for 1 to 3 last dimensions, of a batch that is not empty
        for d, name in enumerate(input.names):
            if left[d] == name:
                left[d] = out[d] = f"{name}%"
    # The value of a float is not in the key, so 0.0 cannot be told from another.
    linear = mode != "constant" or value is None or (isinstance(value, int) and value == 0)
    return f"{'+ ' * linear}{' '.join(left)} -> {' '.join(out)}"


@rule(torch.constant_pad_nd)
def constant_pad_nd(input: Arg, pad_: Sequence[int], value: Any = None) -> str:
    return pad(input, pad_, "constant", value)


# -- triangles and diagonals -----------------------------------------------------------------------


def _triangle(run: Callable[..., Any]) -> None:
    def derive(input: Arg) -> Said:
        rows, columns = input.names[-2:]

        def local(call: Call) -> Callable[..., Any] | None:
            # Row i of this rank's piece is row i + offset of the whole: the diagonal is shifted.
            shift = call.pieces.get(rows, (0,))[0] - call.pieces.get(columns, (0,))[0]
            return (lambda input, diagonal=0: run(input, diagonal + shift)) if shift else None

        return Said(f"+ {input.names} -> {input.names}", local)

    rule(run)(derive)


_triangle(torch.tril)
_triangle(torch.triu)


def _length(a: int, b: int, offset: int) -> int:
    return max(min(a, b - offset) if offset >= 0 else min(a + offset, b), 0)


@rule(torch.diagonal)
def diagonal(input: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    i, j = input.names.at(dim1), input.names.at(dim2)
    n = _length(input.shape[i], input.shape[j], offset)
    left = input.names.whole((i, j))
    return f"+ {left} -> {Names(input.names.without((i, j))).insert(-1, f'z={n}!')}"


@rule(torch.linalg.diagonal)
def linalg_diagonal(input: Arg, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    return diagonal(input, offset, dim1, dim2)


@rule(torch.diag_embed)
def diag_embed(input: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    n = input.shape[-1] + abs(offset)
    i, j = sorted(d % (input.ndim + 1) for d in (dim1, dim2))
    out = input.names.without(-1).insert(i, f"y={n}!").insert(j, f"z={n}!")
    return f"+ {input.names.whole(-1)} -> {out}"


@rule(torch.diag)
def diag(input: Arg, diagonal_: int = 0) -> str:
    return diag_embed(input, diagonal_) if input.ndim == 1 else diagonal(input, diagonal_)


@rule(torch.Tensor.unfold)
def unfold(input: Arg, dimension: int, size: int, step: int) -> str:
    i = input.names.at(dimension) if input.ndim else 0
    if input.ndim == 0:
        return f"+  -> z={size}!"
    count = (input.shape[i] - size) // step + 1
    out = input.names.put(i, f"y={count}!").insert(-1, f"z={size}!")
    return f"+ {input.names.whole(i)} -> {out}"


# -- search ----------------------------------------------------------------------------------------
# A place in sorted values is the number of values before it: a sum over the pieces.


@rule(torch.searchsorted)
def searchsorted(sorted_sequence: Arg, input: Any, *, sorter: Any = None) -> str | None:
    if sorter is not None:
        return None
    if not isinstance(input, Arg):
        return "s -> sum"
    return "s, ... -> sum ..." if sorted_sequence.ndim == 1 else "... s, ... v -> sum ... v"


@rule(torch.bucketize)
def bucketize(input: Any, boundaries: Arg) -> str:
    return "..., s -> sum ..." if isinstance(input, Arg) else "s -> sum"


@rule(torch.isin)
def isin(elements: Any, test_elements: Any, *, invert: bool = False) -> str:
    found = "min" if invert else "max"
    mine = "..." if isinstance(elements, Arg) else ""
    if not isinstance(test_elements, Arg):
        return f"{mine} -> {mine}"
    tests = " ".join(f"t{i}" for i in range(test_elements.ndim))
    return f"{mine}, {tests} -> {found} {mine}" if mine else f"{tests} -> {found}"
