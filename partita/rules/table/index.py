"""Indexing: ops that read or write positions of a tensor, given by numbers or by another tensor.

A dimension that is not indexed may stay sharded. If an int, a tensor of integers or an embedding
selects from a sharded dimension, the rank that has the position returns its value, and the others
return zeros: the result is Partial. A mask is first converted to integers, because the number of
its positions depends on its values and cannot be part of a plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from partita.layout import NEUTRAL_SHARE

from ..rule import (
    Arg,
    Decomposition,
    Kernel,
    KernelCall,
    KernelRule,
    decomposed,
    index_in_piece,
    make_connected_shares,
    own_op,
)
from ..rule import builtin_rule as rule
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
                return make_connected_shares(input, shape)
            at, away = index_in_piece(index, call.pieces[name])
            away = away.view(-1, *[1] * (input.ndim - i - 1))
            return torch.index_select(input, i, at).masked_fill(away, NEUTRAL_SHARE)

        return run if call.is_split(name) else None

    return KernelRule(f"{ours} * [{'xi' * index.ndim}] -> {out}", make_select_kernel)


def _derive_gather(
    input: Arg, dim: int, index: Arg, picked: Callable[..., Any]
) -> KernelRule | None:
    """Returns the rule of torch.gather and similar functions.

    Args:
        picked: a function from a kernel `(input, index)` to the local kernel. The given kernel
            reads the elements that this rank has, and returns zeros for others.
    """
    if input.ndim == 0 or index.ndim != input.ndim:
        return None
    i = input.names.at(dim)
    # An index that is shorter in a dimension reads only the beginning: this dimension stays whole.
    same = [d == i or a == b for d, (a, b) in enumerate(zip(input.shape, index.shape, strict=True))]
    ours, theirs = input.names.put(i, "x"), input.names.put(i, "i")
    ours = Names(n if s else f"y{d}!" for d, (n, s) in enumerate(zip(ours, same, strict=True)))
    theirs = Names(n if s else f"z{d}!" for d, (n, s) in enumerate(zip(theirs, same, strict=True)))

    def local(call: KernelCall) -> Kernel | None:
        def read_own_elements(input: Any, index: Any) -> Any:
            if not input.shape[i]:
                return make_connected_shares(input, index.shape)
            at, away = index_in_piece(index, call.pieces["x"])
            return torch.gather(input, i, at).masked_fill(away, NEUTRAL_SHARE)

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

    def counting_from_the_end(run: Kernel) -> Kernel:  # gather refuses negative ones
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
        elif d == i and add and sizes[1] == sizes[2]:  # elements may be added in any order
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
    # The dimensions are those of scatter_add, but the op is not linear: "," replaces "+" and "*".
    text = _derive_scatter(input, dim, index, src, add=False)
    return text[2:].replace(" + [", ", ").replace("] * ", ", ")


def _register_index_update(function: Any, add: bool) -> None:
    @rule(function)
    def derive_index_update(input: Arg, dim: int, index: Arg, source: Arg) -> str | None:
        if input.ndim == 0 or source.ndim != input.ndim or index.ndim != 1:
            return None
        place = "xi" if add else "xi!"
        ours = input.names.whole(dim)
        return f"{ours} + [{place}] * {input.names.put(dim, place)} -> {ours}"


_register_index_update(torch.index_add, add=True)
_register_index_update(torch.index_copy, add=False)


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
    # Each index has one dimension: as a mask or not, it indexes one dimension of the input.
    if any(t.ndim != 1 for t in tensors) or not tensors:
        return None
    chosen = [d for d, t in enumerate(indices) if t is not None]
    ours = [f"{n}!" if d in chosen else n for d, n in enumerate(input.names)]
    kept = [(n, input.shape[d]) for d, n in enumerate(ours) if d not in chosen]
    beside = chosen == list(range(chosen[0], chosen[0] + len(chosen)))
    start = chosen[0] if beside else 0  # otherwise torch puts their dimension first
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


# -- x[...] ----------------------------------------------------------------------------------------

INDEX = "index"
"""The entry of a pattern for a tensor of integers."""


@dataclass
class _ParsedIndex:
    """The result of reading the index in `x[index]`, entry by entry.

    Attributes:
        left: the names of the input's dimensions in the sentence.
        out: the names of the result's dimensions; None for a tensor of indices.
        chosen: the index that an int selects, by the name of the dimension.
        tensors: for each tensor of indices, the first dimension of the input to which it applies.
    """

    left: list[str]
    out: list[str | None] = field(default_factory=list)
    chosen: dict[str, int] = field(default_factory=dict)
    tensors: list[int] = field(default_factory=list)


def _fill_ellipsis(entries: Sequence[Any], ndim: int) -> list[Any] | None:
    """Returns the entries with `...` written out; None if there are too many."""
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > ndim:
        return None
    at = next((k for k, e in enumerate(entries) if e is Ellipsis), len(entries))
    return [*entries[:at], *[slice(None)] * (ndim - used), *entries[at + 1 :]]


def _read_entries(input: Arg, entries: Sequence[Any]) -> _ParsedIndex:
    read = _ParsedIndex(list(input.names))
    d = 0
    for e in entries:
        if e is None:
            read.out.append("1")
            continue
        name, size = read.left[d], input.shape[d]
        if isinstance(e, int):
            if not -size <= e < size:
                raise IndexError(f"index {e} is out of bounds for dimension {d} with size {size}")
            read.chosen[name] = e % size
        elif isinstance(e, slice):
            n = len(range(*e.indices(size)))
            kept = n == size and e.step in (None, 1)
            read.left[d] += "" if kept else "!"
            read.out.append(name if kept else f"z{d}={n}!")
        else:
            read.tensors.append(d)
            read.out.append(None)
            read.left[d] += "!"
        d += 1
    return read


# -- without tensors -------------------------------------------------------------------------------


@rule(torch.Tensor.__getitem__)
def getitem(input: Arg, index: Any) -> KernelRule | Decomposition | None:
    entries = _entries_of_index(index)
    if any(_is_tensor(e) for e in entries):
        return Decomposition(_convert_index)
    full = _fill_ellipsis(entries, input.ndim) if all(map(_is_basic_entry, entries)) else None
    if full is None:
        return None
    read = _read_entries(input, full)
    text = f"+ {' '.join(read.left)} -> {' '.join(n for n in read.out if n)}"
    return KernelRule(text, lambda call: make_pick_kernel(call, full, input.names, read.chosen))


def _entries_of_index(index: Any) -> list[Any]:
    """Returns the entries of an index as a list.

    As in torch, a list that contains other things than numbers counts as a tuple. (The dispatcher
    converts a tuple that contains tensors to a list.)
    """
    mixed = isinstance(index, list) and any(
        isinstance(e, Arg | torch.Tensor | slice) or e is None for e in index
    )
    return list(index) if isinstance(index, tuple) or mixed else [index]


def _is_tensor(e: Any) -> bool:
    return isinstance(e, Arg | torch.Tensor) or (
        isinstance(e, list) and len(e) > 0 and all(type(v) is int for v in e)
    )


def _is_basic_entry(e: Any) -> bool:
    if isinstance(e, slice):
        return all(v is None or isinstance(v, int) for v in (e.start, e.stop, e.step))
    return e is None or e is Ellipsis or (isinstance(e, int) and not isinstance(e, bool))


def make_pick_kernel(
    call: KernelCall, entries: Sequence[Any], names: Sequence[str], chosen: dict[str, int]
) -> Kernel | None:
    """Returns a kernel for `input[entries]` if an int indexes a sharded dimension; else None.

    Args:
        call: the call: shapes, and this rank's shard.
        entries: an index for each dimension, and a None for each new one.
        names: the names of the dimensions.
        chosen: the index that an int selects, by the name of the dimension.
    """
    mine = {n: i - call.pieces[n][0] for n, i in chosen.items() if call.is_split(n)}
    if not mine:
        return None
    # In a captured step the position of a piece is a tensor, not a number.
    traced = any(isinstance(at, torch.Tensor) for at in mine.values())
    index, rest = [], iter(enumerate(names))
    places: list[tuple[int, Any, int]] = []
    for e in entries:
        dim, name = (0, "") if e is None else next(rest)
        if isinstance(e, int) and name in mine:
            places.append((dim, mine[name], call.pieces[name][1]))
            e = 0 if traced else mine[name]
        index.append(e)
    here = not traced and all(0 <= at < length for _, at, length in places)

    def pick(input: Any, *_: Any, **__: Any) -> Any:
        return input[tuple(index)] if here else make_connected_shares(input, call.outputs[0])

    def pick_traced(input: Any, *_: Any, **__: Any) -> Any:
        away: Any = None
        for dim, at, length in places:
            at = at.to(input.device)
            other = (at < 0) | (at >= length)
            away = other if away is None else away | other
            input = input.index_select(dim, at.clamp(0, length - 1).reshape(1))
        return input[tuple(index)].masked_fill(away, NEUTRAL_SHARE)

    return pick_traced if traced else pick


# -- with tensors ----------------------------------------------------------------------------------


def _convert_index(input: Any, index: Any) -> Any:
    """Returns `x[index]` with masks converted to integers and 0-d tensors applied first."""
    entries = _entries_of_index(index)
    input, entries = _apply_0d_tensors(input, entries)
    pattern: list[Any] = []
    tensors: list[Any] = []
    for e in entries:
        if isinstance(e, list):
            e = torch.tensor(e, device=input.device)
        if not isinstance(e, torch.Tensor):
            pattern.append(e)
            continue
        masked = e.dtype in (torch.bool, torch.uint8)
        if masked and e.ndim == 0:
            if len(entries) > 1:
                raise NotImplementedError("a mask without dimensions beside other indices")
            input, e = input.unsqueeze(0), e.reshape(1)
        found = e.nonzero(as_tuple=True) if masked else (e,)
        tensors += found
        pattern += [INDEX] * len(found)
    if not tensors:
        return input[tuple(pattern)] if pattern else input
    return picked(input, tuple(pattern), *tensors)


def _apply_0d_tensors(input: Any, entries: list[Any]) -> tuple[Any, list[Any]]:
    """Returns the input indexed by the 0-d integer tensors among `entries`, and the other entries.

    The values of these tensors are not read, so that this works in a captured step.
    """
    used = [_dims_used(e) for e in entries]
    left, d, end = [], 0, input.ndim - sum(used)
    for e, n in zip(entries, used, strict=True):
        if isinstance(e, torch.Tensor) and n == 1 and not e.ndim:
            input = input.index_select(d, e.reshape(1)).squeeze(d)
            continue
        left.append(e)
        d += end if e is Ellipsis else n
    return input, left


def _dims_used(e: Any) -> int:
    if e is None or e is Ellipsis:
        return 0
    masked = isinstance(e, torch.Tensor) and e.dtype in (torch.bool, torch.uint8)
    return e.ndim if masked else 1


@own_op
def picked(input: torch.Tensor, pattern: tuple[Any, ...], *tensors: torch.Tensor) -> torch.Tensor:
    """Returns `input[pattern]`. It is a function, because only a named function can have a rule.

    Args:
        pattern: indices, with "index" in place of each tensor.
        tensors: the tensors, in order.
    """
    rest = iter(tensors)
    return input[tuple(next(rest) if isinstance(e, str) else e for e in pattern)]


@rule(picked)
def _picked_rule(input: Arg, pattern: Any, *tensors: Any) -> KernelRule | None:
    args = [x for t in tensors for x in (t if isinstance(t, list | tuple) else [t])]
    full = _fill_ellipsis(pattern, input.ndim)
    if full is None or not all(_is_basic_entry(e) for e in pattern if not isinstance(e, str)):
        return None
    read = _read_entries(input, full)
    left = list(read.left)
    # As in torch, ints are applied first: the rank must have the whole of their dimensions.
    left = [f"{n}!" if n in read.chosen else n for n in left]
    places = [k for k, n in enumerate(read.out) if n is None]
    beside = places == list(range(places[0], places[0] + len(places)))
    start = places[0] if beside else 0  # else torch puts them first
    kept = [n for n in read.out if n is not None]
    d = read.tensors[0]
    if len(args) > 1:
        words, shape = ["..."] * len(args), "..."
    else:
        words = [" ".join(f"i{k}" for k in range(args[0].ndim))]
        shape = words[0]
        left[d] = left[d].rstrip("!")  # split: each rank reads the elements that it has
    terms = " * ".join([" ".join(left), *(f"[{w}]" for w in words)])
    text = f"{terms} -> {' '.join([*kept[:start], shape, *kept[start:]])}"
    if len(args) > 1:
        return KernelRule(text)
    name, after = left[d], len(kept) - start

    def make_tensor_index_kernel(call: KernelCall) -> Kernel | None:
        def run(input: Any, _pattern: Any, index: Any) -> Any:
            if not call.pieces[name][1]:
                return make_connected_shares(input, call.outputs[0])
            at, away = index_in_piece(index, call.pieces[name], from_end=True)
            out = input[tuple(at if isinstance(e, str) else e for e in full)]
            return out.masked_fill(away.view([*away.shape, *[1] * after]), NEUTRAL_SHARE)

        return run if call.is_split(name) else None

    return KernelRule(text, make_tensor_index_kernel)


# -- rows of a table -------------------------------------------------------------------------------


def _look_up(weight: Any, index: Any, padding_idx: Any = None) -> Any:
    """Returns rows of the table, with a second derivative even if there are no rows."""
    if index.numel():
        return F.embedding(index, weight, padding_idx)
    one = F.embedding(index.new_zeros(1), weight, padding_idx)
    return one[:0].view(*index.shape, weight.shape[1])


def _rows_of(weight: Any, index: Any, piece: Any, padding_idx: Any) -> Any:
    """Returns rows of this rank's piece of the table; 0 for rows of other ranks."""
    offset, length, size = piece
    at, away = index_in_piece(index, piece)
    if not length:
        return make_connected_shares(weight, (*index.shape, weight.shape[1]))
    if padding_idx is None:
        rows = _look_up(weight, at)
    elif isinstance(offset, torch.Tensor):
        # All ranks have one graph: it cannot depend on which rank has the row without gradient.
        rows = _look_up(weight, at)
        rows = torch.where((index == padding_idx % size).unsqueeze(-1), rows.detach(), rows)
    else:
        row = padding_idx % size - offset
        rows = _look_up(weight, at, row if 0 <= row < length else None)
    return rows.masked_fill(away.unsqueeze(-1), NEUTRAL_SHARE)


def _renormalize_first(lookup: Kernel) -> Decomposition:
    """Returns a decomposition that scales rows to `max_norm` in the table, then calls `lookup`."""
    takes = inspect.signature(lookup)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = takes.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        with torch.no_grad():
            weight, input = call["weight"].detach(), call["input"]
            torch.embedding_renorm_(weight, input, call["max_norm"], call["norm_type"])
        call["max_norm"] = None
        return lookup(**call)

    return Decomposition(run)


@rule(F.embedding)
def embedding(
    input: Arg,
    weight: Arg,
    padding_idx: int | None = None,
    max_norm: bool | None = None,
    _norm_type: Any = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> KernelRule | Decomposition | None:
    if max_norm is not None:
        return _renormalize_first(F.embedding)
    if scale_grad_by_freq:
        return None

    def make_embedding_kernel(call: KernelCall) -> Kernel | None:
        def run(input: Any, weight: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Any:
            return _rows_of(weight, input, call.pieces["v"], padding_idx)

        def dense(input: Any, weight: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Any:
            return _look_up(weight, input, padding_idx)

        if call.is_split("v"):
            return run
        # A layout describes tensors with strides: a gradient is dense, even with `sparse=True`.
        return dense if sparse or 0 in call.outputs[0] else None

    return KernelRule("[...] * v d -> ... d", make_embedding_kernel)


@decomposed("weight indices", torch.embedding)
def embedding_builtin(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


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
) -> str | Decomposition | None:
    if max_norm is not None:
        return _renormalize_first(F.embedding_bag)
    plain = offsets is None and per_sample_weights is None
    if input.ndim != 2 or not plain or scale_grad_by_freq or sparse:
        return None
    return "b% n!, v! d% -> b% d%" if mode == "max" else "[b% n!] * v! d% -> b% d%"


@rule(F.one_hot)
def one_hot(tensor: Arg, num_classes: int = -1) -> str | None:
    return f"... -> ... z={num_classes}!" if num_classes > 0 else None
