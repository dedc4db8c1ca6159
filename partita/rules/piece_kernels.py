"""Kernels over pieces: what a rank runs that has just a piece, or nothing, of a dimension.

To read places of a split dimension is a contraction: each rank reads those that it has and gives 0
for the others, and the sum is the value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .rule import Kernel, KernelCall

__all__ = [
    "connected_zeros",
    "empty_piece_kernel",
    "index_in_piece",
    "narrow_piece",
    "pick_traced",
    "with_dummy_row",
]


def index_in_piece(
    index: Any, piece: tuple[int, int, int], *, from_end: bool = False
) -> tuple[Any, Any]:
    """`(index within this rank's piece, which of them are other ranks')`.

    A place that no rank has stays one that this rank has not: the kernel that reads it says so.

    Args:
        from_end: negative places count from the end.
    """
    offset, length, size = piece
    at = torch.where(index < 0, index + size, index) if from_end else index
    at = at - offset
    away = ((at < 0) | (at >= length)) & (at >= -offset) & (at < size - offset)
    return at.masked_fill(away, 0), away


def narrow_piece(x: Any, dim: int, offset: Any, length: int) -> Any:
    """`length` places of `x` from `offset` on; where that is a tensor, as in a captured step, whose
    graph must not say where one rank is, they are looked up."""
    if isinstance(offset, torch.Tensor):
        places = torch.arange(length, device=x.device) + offset.to(x.device)
        # Every piece is as long as the first: behind the last one stand copies of its last place.
        return x.index_select(dim, places.clamp(max=max(x.shape[dim] - 1, 0)))
    return x.narrow(dim, offset, length)


def pick_traced(input: Any, places: Sequence[tuple[int, Any, int]]) -> tuple[Any, Any]:
    """One place of each of some split dimensions, which stay, of size 1; and whether it is another
    rank's. For a captured step, where no number says at which places a piece begins.

    Args:
        places: dimension, place within this rank's piece (a tensor), and length of that piece.
    """
    away: Any = None
    for dim, at, length in places:
        at = at.to(input.device)
        other = (at < 0) | (at >= length)
        away = other if away is None else away | other
        input = input.index_select(dim, at.clamp(0, length - 1).reshape(1))
    return input, away


def connected_zeros(input: Any, shape: Sequence[int]) -> Any:
    """Zeros that hang on `input` in the graph, so that its gradient is zeros and not None."""
    out = input.new_zeros(shape)
    return out + input.flatten()[:0].sum() if input.requires_grad else out


def empty_piece_kernel(name: str) -> Callable[[KernelCall], Kernel | None]:
    """The kernel of an op that cannot take a first dimension, called `name`, of no elements.

    A rank without any runs it on one, and drops the result.
    """

    def make_empty_piece_kernel(call: KernelCall) -> Kernel | None:
        return (
            with_dummy_row(call.run) if call.is_split(name) and not call.pieces[name][1] else None
        )

    return make_empty_piece_kernel


def with_dummy_row(run: Kernel) -> Kernel:
    """`run` of nothing: of one element in the first dimension, which is dropped."""

    def run_with_dummy_row(input: Any, *args: Any, **kwargs: Any) -> Any:
        one = torch.cat([input, input.new_zeros((1, *input.shape[1:]))])
        out = run(one, *args, **kwargs)
        return tuple(x[:0] for x in out) if isinstance(out, tuple) else out[:0]

    return run_with_dummy_row
