"""Which ops read or write some places of a tensor?

Reading places of a split dimension is a contraction: each rank reads those that it has and gives 0
for the others, and the sum is the value. The local kernels here know where a rank's piece begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import Arg, Call, Said, rule
from ..sentence import Names


def _own(index: Any, piece: tuple[int, int, int]) -> tuple[Any, Any]:
    """`(index within this rank's piece, which of them are not here)`."""
    offset, length, size = piece
    at = torch.where(index < 0, index + size, index) - offset
    away = (at < 0) | (at >= length)
    return at.masked_fill(away, 0), away


def _nothing(input: Any, shape: Sequence[int]) -> Any:
    """Zeros that hang on `input` in the graph, so that its gradient is zeros and not None."""
    out = input.new_zeros(shape)
    return out + input.flatten()[:0].sum() if input.requires_grad else out


# -- embedding -------------------------------------------------------------------------------------


def _rows_of(weight: Any, index: Any, piece: Any, padding_idx: Any) -> Any:
    """Rows of this rank's piece of the table, 0 for what is not in it."""
    offset, length, size = piece
    at, away = _own(index, piece)
    if not length:
        return _nothing(weight, (*index.shape, weight.shape[1]))
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
def index_select(input: Arg, dim: int, index: Arg) -> Said:
    i = input.names.at(dim) if input.ndim else 0
    names, place = input.names, "i" if index.ndim else "1"
    name = f"x{i}"
    ours = names.put(i, name) if input.ndim else names
    out = names.put(i, place.replace("i", "xi")) if input.ndim else names

    def local(call: Call) -> Callable[..., Any] | None:
        def run(input: Any, dim: int, index: Any) -> Any:
            if not input.shape[i]:
                shape = [*input.shape[:i], index.numel(), *input.shape[i + 1 :]]
                return _nothing(input, shape)
            at, away = _own(index, call.pieces[name])
            away = away.view(-1, *[1] * (input.ndim - i - 1))
            return torch.index_select(input, i, at).masked_fill(away, 0)

        return run if call.is_split(name) else None

    return Said(f"{ours} * [{'xi' * index.ndim}] -> {out}", local)


def _gathered(input: Arg, dim: int, index: Arg, picked: Callable[..., Any]) -> Said | str:
    """`picked(kernel)` is the local function; the kernel takes input, index."""
    if input.ndim == 0 or index.ndim == 0:
        return f"{input.names.whole()}, {index.names.whole()} -> {index.names.whole()}"
    i = input.names.at(dim)
    # Where the index is shorter than the input it reads the beginning: those stay whole.
    same = [d == i or a == b for d, (a, b) in enumerate(zip(input.shape, index.shape, strict=True))]
    ours, theirs = input.names.put(i, "x"), input.names.put(i, "i")
    ours = Names(n if s else f"y{d}!" for d, (n, s) in enumerate(zip(ours, same, strict=True)))
    theirs = Names(n if s else f"z{d}!" for d, (n, s) in enumerate(zip(theirs, same, strict=True)))

    def local(call: Call) -> Callable[..., Any] | None:
        def run(input: Any, index: Any) -> Any:
            if not input.shape[i]:
                return _nothing(input, index.shape)
            at, away = _own(index, call.pieces["x"])
            return torch.gather(input, i, at).masked_fill(away, 0)

        return picked(run) if call.is_split("x") else None

    return Said(f"{ours} * [{theirs}] -> {theirs}", local)


@rule(torch.gather)
def gather(input: Arg, dim: int, index: Arg) -> Said | str:
    return _gathered(
        input, dim, index, lambda run: lambda input, dim, index, **_: run(input, index)
    )


@rule(torch.take_along_dim)
def take_along_dim(input: Arg, indices: Arg, dim: int | None = None) -> Said | str | None:
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
    return f"{ours} + [{where}] * {values} -> {ours}"


@rule(torch.scatter)
def scatter(
    input: Arg, dim: int, index: Arg, src: Any = None, *, value: Any = None, reduce: Any = None
) -> str | None:
    return None if reduce is not None else _scattered(input, dim, index, src, add=False)


@rule(torch.scatter_add)
def scatter_add(input: Arg, dim: int, index: Arg, src: Arg) -> str:
    return _scattered(input, dim, index, src, add=True)


@rule(torch.scatter_reduce)
def scatter_reduce(input: Arg, dim: int, index: Arg, src: Arg, _reduce: str) -> str | None:
    text = _scattered(input, dim, index, src, add=False)
    return text.replace(" + [", ", ").replace("] * ", ", ")


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
    extra = ", " * isinstance(value, Arg)
    return f"{names}, {'xi!' * index.ndim}{extra} -> {names}"


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
            return _nothing(input, call.outputs[0])

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


@rule(torch.Tensor.__getitem__)
def getitem(input: Arg, index: Any) -> Said | None:
    entries = list(index) if isinstance(index, tuple) else [index]
    used = sum(e.ndim if _is_mask(e) else 1 for e in entries if e is not None and e is not Ellipsis)
    if any(not _readable(e) for e in entries) or used > input.ndim:
        return None
    rest = [slice(None)] * (input.ndim - used)
    at = next((k for k, e in enumerate(entries) if e is Ellipsis), len(entries))
    entries[at : at + 1] = rest
    left = list(input.names)
    out: list[str] = []
    tensors: list[tuple[Arg, int, int]] = []  # the index, where its result goes, its dimension
    chosen: dict[str, int] = {}  # the dimensions that an int picks from
    contracted = set()
    d = 0
    for e in entries:
        if e is None:
            out.append("1")
        elif isinstance(e, int):
            chosen[left[d]] = e % input.shape[d]
            contracted.add(left[d])
            d += 1
        elif isinstance(e, slice):
            n = len(range(*e.indices(input.shape[d])))
            if n == input.shape[d] and e.step in (None, 1):
                out.append(left[d])
            else:
                left[d] += "!"
                out.append(f"z{d}={n}!")
            d += 1
        else:
            tensors.append((e, len(out), d))
            count = e.ndim if _is_mask(e) else 1
            for k in range(d, d + count):
                left[k] += "!"
            d += count
            out.append("@")
    text = " ".join(left)
    if not tensors:
        local = _picked(entries, [n.rstrip("!") for n in left], chosen)
        return Said(f"+ {text} -> {' '.join(out)}", local)
    if chosen:
        # An int beside tensors is taken first, as torch does; its dimension must be here for that.
        left = [f"{n}!" if n in chosen else n for n in left]
    return _by_tensors(left, out, entries, tensors)


def _is_mask(e: Any) -> bool:
    return isinstance(e, Arg) and e.dtype in (torch.bool, torch.uint8)


def _readable(e: Any) -> bool:
    if isinstance(e, Arg):
        return e.dtype is not None and (e.ndim > 0 or not _is_mask(e))
    if isinstance(e, slice):
        return all(v is None or isinstance(v, int) for v in (e.start, e.stop, e.step))
    return e is None or e is Ellipsis or (isinstance(e, int) and not isinstance(e, bool))


def _picked(entries: list[Any], names: list[str], chosen: dict[str, int]) -> Any:
    """x[..., 3] of a split dimension: the rank that has it gives it, the others zeros."""

    def local(call: Call) -> Callable[..., Any] | None:
        mine = {n: i - call.pieces[n][0] for n, i in chosen.items() if call.is_split(n)}
        if not mine:
            return None
        here = all(0 <= at < call.pieces[n][1] for n, at in mine.items())
        index, d = [], 0
        for e in entries:
            n = names[d] if e is not None else ""
            d += e is not None
            index.append(mine.get(n, e) if isinstance(e, int) else e)

        def run(input: Any, _index: Any) -> Any:
            return input[tuple(index)] if here else _nothing(input, call.outputs[0])

        return run

    return local


def _by_tensors(
    left: list[str], out: list[str], entries: list[Any], tensors: list[tuple[Arg, int, int]]
) -> Said | None:
    """The sentence of x[i, :, j]: the indices are broadcast to each other."""
    masks = [t for t, _, _ in tensors if _is_mask(t)]
    if masks and len(tensors) > 1:
        return None
    start = _start([at for _, at, _ in tensors])
    kept = [n for n in out if n != "@"]
    index, _, d = tensors[0]
    if masks:
        words = [" ".join(f"m{i}!" for i in range(index.ndim))]
        shape = ["z!"]
    elif len(tensors) > 1:
        words, shape = ["..."] * len(tensors), ["..."]
    else:
        words = [" ".join(f"i{k}" for k in range(index.ndim))]
        shape = words
        left[d] = left[d].rstrip("!")
    result = " ".join([*kept[:start], *shape, *kept[start:]])
    terms = " * ".join([" ".join(left), *(f"[{w}]" for w in words)])
    if masks or len(tensors) > 1:
        return Said(f"{terms} -> {result}")
    after = len(kept) - start
    name, where = left[d], next(k for k, e in enumerate(entries) if isinstance(e, Arg))

    def local(call: Call) -> Callable[..., Any] | None:
        def run(input: Any, index: Any) -> Any:
            if not call.pieces[name][1]:
                return _nothing(input, call.outputs[0])
            given = index if isinstance(index, tuple) else (index,)
            tensor = next(e for e in given if isinstance(e, torch.Tensor))
            at, away = _own(tensor, call.pieces[name])
            full = tuple(at if k == where else e for k, e in enumerate(filled))
            return input[full].masked_fill(away.view(*away.shape, *[1] * after), 0)

        filled = [None if isinstance(e, Arg) else e for e in entries]
        return run if call.is_split(name) else None

    return Said(f"{terms} -> {result}", local)


def _start(places: list[int]) -> int:
    """Where the dimensions of tensor indices stand: in their place if they are beside each other,
    else torch puts them first."""
    return places[0] if places == list(range(places[0], places[0] + len(places))) else 0


@rule(torch.index_put)
def index_put(
    input: Arg, indices: Sequence[Any], values: Arg, accumulate: bool = False
) -> str | None:
    tensors = [t for t in indices if isinstance(t, Arg)]
    shapes = {t.shape for t in tensors}
    if len(shapes) != 1 or any(_is_mask(t) or t.dtype is None for t in tensors):
        return None
    ours = list(input.names)
    for d, t in enumerate(indices):
        ours[d] += "!" * (t is not None)
    kept = [(n, size) for n, size in zip(ours, input.shape, strict=True) if n[-1] != "!"]
    places = [d for d, t in enumerate(indices) if t is not None]
    start = _start(places)
    (shape,) = shapes
    place = [f"i{k}" + "!" * (not accumulate) for k in range(len(shape))]
    result = [*kept[:start], *zip(place, shape, strict=True), *kept[start:]]
    result = result[len(result) - values.ndim :] if values.ndim else []
    given = [
        "1" if a == 1 != size else n for a, (n, size) in zip(values.shape, result, strict=True)
    ]
    if len(given) != len(kept) + len(place) or "1" in given:
        # A value that is broadcast over the places would be added once for each piece of them.
        place = [n.rstrip("!") + "!" for n in place]
        given = [n if n in ours or n == "1" else n.rstrip("!") + "!" for n in given]
    terms = " * ".join([*[f"[{' '.join(place)}]"] * len(tensors), " ".join(given)])
    return f"{' '.join(ours)} + {terms} -> {' '.join(ours)}"


# -- moving along a dimension ----------------------------------------------------------------------


@rule(torch.roll)
def roll(input: Arg, _shifts: Any, dims: Any = None) -> str:
    if dims is None or dims == () or dims == []:
        return f"+ {input.names.whole()} -> {input.names.whole()}"
    return f"+ {input.names.whole(dims)} -> {input.names.whole(dims)}"


@rule(torch.flip)
def flip(input: Arg, *dims: Any) -> str:
    where = [d for item in dims for d in (item if isinstance(item, list | tuple) else [item])]
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
    left = input.names.whole((i, j))
    out = list(left)
    if k % 2:
        out[i], out[j] = left[j], left[i]
    return f"+ {left} -> {' '.join(out)}"


@rule(F.pad)
def pad(input: Arg, pad: Sequence[int], mode: str = "constant", value: bool = False) -> str:
    left, out = list(input.names), list(input.names)
    for i in range(len(pad) // 2):
        before, after = pad[2 * i], pad[2 * i + 1]
        d = input.ndim - 1 - i
        if before or after:
            left[d] = f"{input.names[d]}!"
            out[d] = f"z{d}={input.shape[d] + before + after}!"
    if mode != "constant":  # such pads are for 1 to 3 last dimensions, of a batch that is not empty
        for d in range(input.ndim - len(pad) // 2):
            left[d] = out[d] = f"{input.names[d]}%"
    linear = mode != "constant" or not value
    return f"{'+ ' * linear}{' '.join(left)} -> {' '.join(out)}"


@rule(torch.constant_pad_nd)
def constant_pad_nd(input: Arg, pad_: Sequence[int], value: bool = False) -> str:
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


@rule(torch.searchsorted)
def searchsorted(sorted_sequence: Arg, input: Any, *, sorter: Any = None) -> str | None:
    if sorter is not None:
        return None
    if not isinstance(input, Arg):
        return "s! -> "
    return "s!, ... -> ..." if sorted_sequence.ndim == 1 else "... s!, ... v -> ... v"


@rule(torch.bucketize)
def bucketize(input: Any, boundaries: Arg) -> str:
    return "..., s! -> ..." if isinstance(input, Arg) else "s! -> "


@rule(torch.isin)
def isin(elements: Any, test_elements: Any) -> str:
    mine = "..." if isinstance(elements, Arg) else ""
    if not isinstance(test_elements, Arg):
        return f"{mine} -> {mine}"
    tests = " ".join(f"t{i}!" for i in range(test_elements.ndim))
    return f"{mine}, {tests} -> {mine}" if mine else f"{tests} -> "
