"""Embeddings: reads of a table whose rows, or columns, are split."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import (
    Arg,
    Decomposition,
    Kernel,
    KernelCall,
    KernelRule,
    connected_zeros,
    index_in_piece,
)
from ..rule import table_rule as rule


def _rows_of(weight: Any, index: Any, piece: Any, padding_idx: Any) -> Any:
    """Rows of this rank's piece of the table, 0 for what is not in it."""
    offset, length, size = piece
    at, away = index_in_piece(index, piece)
    if not length:
        return connected_zeros(weight, (*index.shape, weight.shape[1]))
    if padding_idx is None:
        rows = F.embedding(at, weight)
    elif isinstance(offset, torch.Tensor):
        # Which rank has the row that gets no gradient is nothing that a graph of all ranks may say.
        rows = F.embedding(at, weight)
        rows = torch.where((index == padding_idx % size).unsqueeze(-1), rows.detach(), rows)
    else:
        row = padding_idx % size - offset
        rows = F.embedding(at, weight, row if 0 <= row < length else None)
    return rows.masked_fill(away.unsqueeze(-1), 0)


def _renormalize_first(lookup: Kernel) -> Decomposition:
    """First bring the rows that are read to `max_norm`, in the table itself; then `lookup`."""
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
            return call.run(input, weight, padding_idx)

        # A layout speaks of tensors with strides: a gradient is dense, whatever `sparse` asks for.
        return run if call.is_split("v") else dense if sparse else None

    return KernelRule("[...] * v d -> ... d", make_embedding_kernel)


@rule(torch.embedding)
def embedding_builtin(weight: Arg, indices: Arg) -> Decomposition:
    def look_up(
        weight: Any,
        indices: Any,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        padding = None if padding_idx < 0 else padding_idx
        return F.embedding(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)

    return Decomposition(look_up)


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
