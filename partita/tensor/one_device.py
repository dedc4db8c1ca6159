"""One device's memory of a tensor: the strides that it would have, told from this rank's piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

# Not public: what is asked of tensors without memory is no part of a step that is captured.
from torch.utils._python_dispatch import _disable_current_modes

from .dtensor import DTensor
from .origin import Origin
from .tensor_state import state_of

__all__ = [
    "fills_memory",
    "global_strides",
    "laid_out_alike",
    "strides_of_whole",
    "without_memory",
]

_stride = torch._C.TensorBase.stride


def global_strides(x: DTensor) -> tuple[int, ...]:
    """The strides in elements of the global tensor, where each rank's piece lies as x's does.

    Of a copy of what would be a view, they are the view's.
    """
    if state_of(x).origin is not None:
        with _disable_current_modes():
            return laid_out_alike(x).stride()
    return strides_of_whole(x, x._spec.shape)


def strides_of_whole(x: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides in elements of a tensor of `shape`, of which x is a piece, that lies as x does.

    A piece that is dense stands for a tensor that is dense in the same order of dimensions. A gap
    between rows, as a slice leaves it, stays the same number of rows. Where a piece has one row,
    its stride from row to row is whatever it was copied from: the memory tells whether there are
    gaps.
    """
    with Local():
        local = _stride(x)
        sizes = tuple(x.size())
        if sizes == tuple(shape):
            return local
        short = any(n < whole and n == 1 for n, whole in zip(sizes, shape, strict=True))
        dense = short and fills_memory(x)
    strides = [0] * len(shape)
    inner_local = inner_global = 1
    # From the innermost out. Of two equal strides a dimension of one element is the inner one:
    # outside of the other it would have a longer one.
    for d in sorted(range(len(shape)), key=lambda d: (local[d], sizes[d] > 1, -d)):
        if local[d] == 0:
            continue
        strides[d] = inner_global if dense else local[d] * inner_global // inner_local
        inner_local *= max(sizes[d], 1)
        inner_global *= max(shape[d], 1)
    return tuple(strides)


def fills_memory(x: torch.Tensor) -> bool:
    """Has the memory no element beside those of this rank's piece?"""
    with Local():
        held = math.prod(n for n, stride in zip(x.size(), _stride(x), strict=True) if stride)
        return 0 < x.untyped_storage().nbytes() == held * x.element_size()


def laid_out_alike(x: DTensor) -> torch.Tensor:
    """A tensor of the global shape and strides without memory."""
    origin: Origin | None = state_of(x).origin
    with Local():
        if origin is None:
            return torch.empty_strided(x._spec.shape, global_strides(x), device="meta")
        args, kwargs = without_memory(origin.args), without_memory(origin.kwargs)
        part = origin.view(laid_out_alike(origin.source), *args, **kwargs)
    return part if origin.index is None else part[origin.index]


def without_memory(value: Any) -> Any:
    """Arguments of a call, with tensors without memory in the place of tensors."""
    if isinstance(value, torch.Tensor):
        with Local():
            shape = value._spec.shape if isinstance(value, DTensor) else value.shape
            return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: without_memory(v) for key, v in value.items()}
    return type(value)(map(without_memory, value)) if type(value) in (tuple, list) else value
