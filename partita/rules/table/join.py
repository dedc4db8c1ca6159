"""Joins and splits: ops that put tensors together, or take one apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rule import Arg, Decomposition
from ..rule import table_rule as rule


@rule(torch.cat)
def cat(tensors: Sequence[Any], dim: int = 0) -> str | None:
    if not all(isinstance(t, Arg) for t in tensors):
        return None
    full = [t for t in tensors if t.shape != (0,)]  # torch skips what is empty in one dimension
    if not full:
        return f"{' + '.join('z!' for _ in tensors)} -> z!"
    names = full[0].names
    i = names.at(dim)
    terms = [
        "y!" if t.shape == (0,) else str(names.put(i, f"z{k}!")) for k, t in enumerate(tensors)
    ]
    length = sum(t.shape[i] for t in full)
    return f"+ {' + '.join(terms)} -> {names.put(i, f'z={length}!')}"


@rule(torch.stack)
def stack(tensors: Sequence[Any], dim: int = 0) -> str | None:
    if not all(isinstance(t, Arg) for t in tensors):
        return None
    names = tensors[0].names
    i = dim if dim >= 0 else dim + len(names) + 1
    terms = " + ".join(str(names) for _ in tensors)
    return f"+ {terms} -> {names.insert(i, f'z={len(tensors)}!')}"


def _derive_stack_along(dim: int, ndim: int) -> Any:
    """A stack in one direction, as `cat` of tensors of at least `ndim` dimensions."""

    def derive_stack(tensors: Sequence[Any]) -> Decomposition:
        def run(tensors: Sequence[Any]) -> Any:
            wide = [getattr(torch, f"atleast_{ndim}d")(t) for t in tensors]
            return torch.cat(wide, 0 if dim == 1 and wide[0].ndim == 1 else dim)

        return Decomposition(run)

    return derive_stack


rule(torch.hstack)(_derive_stack_along(1, 1))
rule(torch.vstack, torch.row_stack)(_derive_stack_along(0, 2))
rule(torch.dstack)(_derive_stack_along(2, 3))


@rule(torch.column_stack)
def column_stack(tensors: Sequence[Any]) -> Decomposition:
    return Decomposition(
        lambda tensors: torch.cat([t.reshape(-1, 1) if t.ndim < 2 else t for t in tensors], 1)
    )


# -- apart -----------------------------------------------------------------------------------------


def _sentence_of_pieces(input: Arg, dim: int, lengths: Sequence[int]) -> str:
    i = input.names.at(dim)
    outs = [str(input.names.put(i, f"z{k}={n}!")) for k, n in enumerate(lengths)]
    return f"+ {input.names.whole(i)} -> {', '.join(outs)}"


def _split_into_lengths(size: int, step: int) -> list[int]:
    return [min(step, size - at) for at in range(0, size, step)] or [size]


@rule(torch.split)
def split(tensor: Arg, split_size_or_sections: Any, dim: int = 0) -> str:
    size = tensor.shape[tensor.names.at(dim)]
    if isinstance(split_size_or_sections, int):
        return _sentence_of_pieces(
            tensor, dim, _split_into_lengths(size, max(split_size_or_sections, 1))
        )
    return _sentence_of_pieces(tensor, dim, split_size_or_sections)


@rule(torch.Tensor.split)
def split_method(input: Arg, split_size: Any, dim: int = 0) -> str:
    return split(input, split_size, dim)


@rule(torch.split_with_sizes, torch.unsafe_split)
def split_with_sizes(input: Arg, split_sizes: Any, dim: int = 0) -> str:
    return split(input, split_sizes, dim)


@rule(torch.chunk, torch.unsafe_chunk)
def chunk(input: Arg, chunks: int, dim: int = 0) -> str:
    size = input.shape[input.names.at(dim)]
    if size == 0:
        return _sentence_of_pieces(input, dim, [0] * chunks)
    return _sentence_of_pieces(input, dim, _split_into_lengths(size, -(-size // chunks)))


@rule(torch.tensor_split)
def tensor_split(input: Arg, indices_or_sections: Any, dim: int = 0) -> str | None:
    size = input.shape[input.names.at(dim)]
    if isinstance(indices_or_sections, int):
        n = indices_or_sections
        return _sentence_of_pieces(input, dim, [size // n + (i < size % n) for i in range(n)])
    if not isinstance(indices_or_sections, list | tuple):
        return None
    ends = [slice(None, i).indices(size)[1] for i in indices_or_sections]
    starts = zip([0, *ends], [*ends, size], strict=True)
    return _sentence_of_pieces(input, dim, [max(b - a, 0) for a, b in starts])


@rule(torch.unbind)
def unbind(input: Arg, dim: int = 0) -> str | None:
    i = input.names.at(dim)
    count = input.shape[i]
    if not count:
        return None
    left = input.names.without(i)
    return f"+ {input.names.whole(i)} -> {', '.join([str(left)] * count)}"


def _derive_split_along(dim: int, ndim: int) -> Any:
    def derive_split(input: Arg, _indices_or_sections: Any = None) -> Decomposition:
        return Decomposition(lambda x, n: torch.tensor_split(x, n, 0 if x.ndim < ndim else dim))

    return derive_split


rule(torch.hsplit)(_derive_split_along(1, 2))
rule(torch.vsplit)(_derive_split_along(0, 2))
rule(torch.dsplit)(_derive_split_along(2, 3))
