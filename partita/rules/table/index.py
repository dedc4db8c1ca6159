"""Gathers and scatters: ops that read or write the places of a tensor that another tensor names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..rule import Arg, Kernel, KernelCall, KernelRule, connected_zeros, index_in_piece
from ..rule import table_rule as rule
from ..sentence import Names

# -- one dimension by an index ---------------------------------------------------------------------


@rule(torch.index_select)
def index_select(input: Arg, dim: int, index: Arg) -> KernelRule | None:
    if input.ndim == 0:
        return None
    i = input.names.at(dim)
    name = f"x{i}"
    ours, out = input.names.put(i, name), input.names.put(i, "xi" if index.ndim else "1")

    def make_select_kernel(call: KernelCall) -> Kernel | None:
        def run(input: Any, dim: int, index: Any) -> Any:
            if not input.shape[i]:
                shape = [*input.shape[:i], index.numel(), *input.shape[i + 1 :]]
                return connected_zeros(input, shape)
            at, away = index_in_piece(index, call.pieces[name])
            away = away.view(-1, *[1] * (input.ndim - i - 1))
            return torch.index_select(input, i, at).masked_fill(away, 0)

        return run if call.is_split(name) else None

    return KernelRule(f"{ours} * [{'xi' * index.ndim}] -> {out}", make_select_kernel)


def _derive_gather(
    input: Arg, dim: int, index: Arg, picked: Callable[..., Any]
) -> KernelRule | None:
    """`picked(kernel)` is the local function; the kernel takes input, index."""
    if input.ndim == 0 or index.ndim != input.ndim:
        return None
    i = input.names.at(dim)
    # Where the index is shorter than the input it reads the beginning: those stay whole.
    same = [d == i or a == b for d, (a, b) in enumerate(zip(input.shape, index.shape, strict=True))]
    ours, theirs = input.names.put(i, "x"), input.names.put(i, "i")
    ours = Names(n if s else f"y{d}!" for d, (n, s) in enumerate(zip(ours, same, strict=True)))
    theirs = Names(n if s else f"z{d}!" for d, (n, s) in enumerate(zip(theirs, same, strict=True)))

    def local(call: KernelCall) -> Kernel | None:
        def read_own_elements(input: Any, index: Any) -> Any:
            if not input.shape[i]:
                return connected_zeros(input, index.shape)
            at, away = index_in_piece(index, call.pieces["x"])
            return torch.gather(input, i, at).masked_fill(away, 0)

        return picked(read_own_elements) if call.is_split("x") else None

    return KernelRule(f"{ours} * [{theirs}] -> {theirs}", local)


@rule(torch.gather)
def gather(input: Arg, dim: int, index: Arg) -> KernelRule | None:
    return _derive_gather(
        input, dim, index, lambda run: lambda input, dim, index, **_: run(input, index)
    )


@rule(torch.take)
def take(input: Arg, index: Arg) -> str:
    return f"{input.names.whole()} * [...] -> ..."


@rule(torch.take_along_dim)
def take_along_dim(input: Arg, indices: Arg, dim: int | None = None) -> KernelRule | None:
    if dim is None or input.ndim != indices.ndim:
        return None
    i = input.names.at(dim)
    sizes = zip(input.shape, indices.shape, strict=True)
    if any(a != b for d, (a, b) in enumerate(sizes) if d != i):
        return None
    size = input.shape[dim]

    def counting_from_the_end(run: Kernel) -> Kernel:  # which gather does not know
        return lambda x, at, dim: run(x, at.where(at >= 0, at + size))

    return _derive_gather(input, dim, indices, counting_from_the_end)


def _derive_scatter(input: Arg, dim: int, index: Arg, src: Any, add: bool) -> str:
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
    return None if reduce is not None else _derive_scatter(input, dim, index, src, add=False)


@rule(torch.scatter_add)
def scatter_add(input: Arg, dim: int, index: Arg, src: Arg) -> str:
    return _derive_scatter(input, dim, index, src, add=True)


@rule(torch.scatter_reduce)
def scatter_reduce(input: Arg, dim: int, index: Arg, src: Arg, _reduce: Any = None) -> str | None:
    # Not linear: the same dimensions, but each operand by itself.
    text = _derive_scatter(input, dim, index, src, add=False)
    return text[2:].replace(" + [", ", ").replace("] * ", ", ")


def _derive_index_update(input: Arg, dim: int, index: Arg, source: Arg, add: bool) -> str | None:
    if input.ndim == 0 or source.ndim != input.ndim or index.ndim != 1:
        return None
    i = input.names.at(dim)
    place = "xi" if add else "xi!"
    ours = input.names.whole(i)
    return f"{ours} + [{place}] * {input.names.put(i, place)} -> {ours}"


@rule(torch.index_add)
def index_add(input: Arg, dim: int, index: Arg, source: Arg) -> str | None:
    return _derive_index_update(input, dim, index, source, add=True)


@rule(torch.index_copy)
def index_copy(input: Arg, dim: int, index: Arg, source: Arg) -> str | None:
    return _derive_index_update(input, dim, index, source, add=False)


@rule(torch.index_fill)
def index_fill(input: Arg, dim: int, index: Arg, value: Any = None) -> str:
    names = input.names.whole(dim) if input.ndim else input.names
    place = "xi!" * index.ndim
    if isinstance(value, Arg):
        return f"+ {names} + [{place}] * -> {names}"
    return f"{names}, {place} -> {names}"


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
