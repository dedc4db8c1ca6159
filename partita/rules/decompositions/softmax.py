"""Softmax and its like along a split dimension.

Exponentials are computed and added up in float32 or wider, as torch's own kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..sentence import Names
from .extremes import partial_max
from .partial_operands import reduced, subtract_reduced, widen

__all__ = ["log_softmax", "logsumexp", "softmax"]

Dim = int | Sequence[int] | None


def _subtract_max(x: Any, dim: Dim) -> tuple[Any, Any]:
    """`(x - top, top)`, where top is the maximum of all pieces."""
    top = reduced(partial_max(x, dim, True))
    top = top.masked_fill(top.abs() == math.inf, 0)
    return subtract_reduced(x, top), top


def softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    shifted, _ = _subtract_max(widen(x if dtype is None else x.to(dtype)), dim)
    e = shifted.exp()
    return (e / e.sum(dim, keepdim=True)).to(dtype or x.dtype)


def log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    shifted, _ = _subtract_max(widen(x if dtype is None else x.to(dtype)), dim)
    out = subtract_reduced(shifted, shifted.exp().sum(dim, keepdim=True).log())
    return out.to(dtype or x.dtype)


def logsumexp(x: Any, dim: Dim, keepdim: bool = False) -> Any:
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    shifted, top = _subtract_max(widen(x), dim)
    out = (shifted.exp().sum(dim, keepdim=True).log() + top).to(x.dtype)
    return out if keepdim else out.squeeze(Names.of(x.ndim).dims(dim))
