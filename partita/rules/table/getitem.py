"""Indexing: the sentences of x[...].

What is not indexed may stay split. An int picks from a split dimension as a contraction does: the
rank that has the place gives it, the others zeros. So does one tensor of integers. A mask is first
made integers (its dtype, which no rule sees, tells that it is one): how many places it has depends
on its values, and so must not be part of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..rule import (
    Arg,
    Decomposition,
    Kernel,
    KernelCall,
    KernelRule,
    connected_zeros,
    index_in_piece,
    own_op,
)
from ..rule import table_rule as rule

INDEX = "index"
"""Stands for a tensor of integers in a pattern."""


@dataclass
class _Read:
    """An index, read entry by entry.

    Attributes:
        left: the input's dimensions as the sentence has them.
        out: the result's; a tensor of indices is a None.
        chosen: for each name that an int picks from, the place.
        tensors: for each tensor of indices its first dimension.
    """

    left: list[str]
    out: list[str | None] = field(default_factory=list)
    chosen: dict[str, int] = field(default_factory=dict)
    tensors: list[int] = field(default_factory=list)


def _fill_ellipsis(entries: Sequence[Any], ndim: int) -> list[Any] | None:
    """The entries with `...` written out; None if there are too many."""
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > ndim:
        return None
    at = next((k for k, e in enumerate(entries) if e is Ellipsis), len(entries))
    return [*entries[:at], *[slice(None)] * (ndim - used), *entries[at + 1 :]]


def _read_entries(input: Arg, entries: Sequence[Any]) -> _Read:
    read = _Read(list(input.names))
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
        return Decomposition(_by_kind)
    full = _fill_ellipsis(entries, input.ndim) if all(map(_is_basic_entry, entries)) else None
    if full is None:
        return None
    read = _read_entries(input, full)
    text = f"+ {' '.join(read.left)} -> {' '.join(n for n in read.out if n)}"
    return KernelRule(text, lambda call: make_pick_kernel(call, full, input.names, read.chosen))


def _entries_of_index(index: Any) -> list[Any]:
    """One entry per place. A list is a tuple for torch, too, where it has more than numbers; and
    the dispatcher makes a list of a tuple that has tensors."""
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
    """`input[entries]` of this rank's piece, where an int picks from a split dimension.

    Args:
        entries: one for each dimension, and a None for each new one.
        names: of the dimensions.
        chosen: the place of each name that an int picks from.
    """
    mine = {n: i - call.pieces[n][0] for n, i in chosen.items() if call.is_split(n)}
    if not mine:
        return None
    # In a captured step no number says where a piece begins.
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
        return input[tuple(index)] if here else connected_zeros(input, call.outputs[0])

    def pick_traced(input: Any, *_: Any, **__: Any) -> Any:
        away: Any = None
        for dim, at, length in places:
            at = at.to(input.device)
            other = (at < 0) | (at >= length)
            away = other if away is None else away | other
            input = input.index_select(dim, at.clamp(0, length - 1).reshape(1))
        return input[tuple(index)].masked_fill(away, 0)

    return pick_traced if traced else pick


# -- with tensors ----------------------------------------------------------------------------------


def _by_kind(input: Any, index: Any) -> Any:
    """x[index] with masks made integers, and what tensors of no dimensions pick picked first."""
    entries = _entries_of_index(index)
    input, entries = _at_numbers(input, entries)
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
                raise NotImplementedError("a mask of no dimensions beside other indices")
            input, e = input.unsqueeze(0), e.reshape(1)
        found = e.nonzero(as_tuple=True) if masked else (e,)
        tensors += found
        pattern += [INDEX] * len(found)
    if not tensors:
        return input[tuple(pattern)] if pattern else input
    return picked(input, tuple(pattern), *tensors)


def _at_numbers(input: Any, entries: list[Any]) -> tuple[Any, list[Any]]:
    """Take the places that integers in tensors of no dimensions say, as torch does: before others.

    Their values are not read, so that a captured step may have them.
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
    """input[pattern], in which each "index" stands for the next of `tensors`."""
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
    # Ints are taken first, as torch does: their dimensions must be here.
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
        left[d] = left[d].rstrip("!")  # a rank may read the places that it has
    terms = " * ".join([" ".join(left), *(f"[{w}]" for w in words)])
    text = f"{terms} -> {' '.join([*kept[:start], shape, *kept[start:]])}"
    if len(args) > 1:
        return KernelRule(text)
    name, after = left[d], len(kept) - start

    def make_tensor_index_kernel(call: KernelCall) -> Kernel | None:
        def run(input: Any, _pattern: Any, index: Any) -> Any:
            if not call.pieces[name][1]:
                return connected_zeros(input, call.outputs[0])
            at, away = index_in_piece(index, call.pieces[name], from_end=True)
            out = input[tuple(at if isinstance(e, str) else e for e in full)]
            return out.masked_fill(away.view([*away.shape, *[1] * after]), 0)

        return run if call.is_split(name) else None

    return KernelRule(text, make_tensor_index_kernel)
