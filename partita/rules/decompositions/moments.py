"""Mean, variance and norm along a split dimension.

Added up in float32 or wider, as torch's own kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..rule import Arg, own_op
from ..rule import table_rule as rule
from ..sentence import Names
from .extremes import amax
from .partial_operands import reduced, subtract_reduced, widen

__all__ = ["moments", "power_sum", "root_of", "vector_norm"]

Dim = int | Sequence[int] | None


def moments(
    x: Any, dim: Dim = None, correction: float = 1, keepdim: bool = False
) -> tuple[Any, Any]:
    """`(mean, variance)` with n - correction in the denominator of the variance."""
    dims = Names.of(x.ndim).dims(dim)
    count = math.prod(x.shape[d] for d in dims)
    dtype, x = x.dtype, widen(x)
    mean = reduced(x.mean(dims, keepdim=True))
    away = subtract_reduced(x, mean)
    square = away * away.conj() if away.is_complex() else away * away
    below = max(count - correction, 0)
    total = (square.real if square.is_complex() else square).sum(dims, keepdim)
    variance = total / below if below else total / (total * 0)
    if dtype.is_floating_point:
        mean, variance = mean.to(dtype), variance.to(dtype)
    return mean if keepdim else mean.squeeze(dims), variance


@own_op
def power_sum(x: torch.Tensor, p: float, dim: Dim, keepdim: bool) -> torch.Tensor:
    """The sum of |x|^p over `dim`."""
    size = x.abs()
    if p == 2:
        powers = size * size
    elif p < 1:  # has no slope at 0; torch takes it as 0 there
        zero = size == 0
        powers = (size.masked_fill(zero, 1) ** p).masked_fill(zero, 0 if p > 0 else math.inf)
    else:
        powers = size**p
    return torch.sum(powers, Names.of(x.ndim).dims(dim), keepdim=keepdim)


@rule(power_sum)
def _power_sum(x: Arg, _p: float, dim: Dim, keepdim: bool) -> str:
    return f"{x.names} -> sum {x.names.without(dim, keepdim)}"


def vector_norm(
    x: Any, ord: float = 2, dim: Dim = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    x = x if dtype is None else x.to(dtype)
    return _vector_norm(widen(x), ord, dim, keepdim).to(x.dtype.to_real())


def _vector_norm(x: Any, ord: float, dim: Dim, keepdim: bool) -> Any:
    if math.isinf(ord):
        return amax(x.abs(), dim, keepdim, 1 if ord > 0 else -1)
    if ord == 0:
        # 1 where x is not 0, with the gradient that torch gives it: zeros.
        return torch.where(x != 0, 1.0, x * 0).sum(Names.of(x.ndim).dims(dim), keepdim=keepdim)
    if ord == 1:
        return x.abs().sum(Names.of(x.ndim).dims(dim), keepdim=keepdim)
    return root_of(power_sum(x, ord, dim, keepdim), ord)


def root_of(total: Any, order: float = 2) -> Any:
    """The root whose gradient at 0 is 0, as torch has it for norms and standard deviations."""
    total = reduced(total)
    zero = total == 0
    return (total.masked_fill(zero, 1) ** (1 / order)).masked_fill(zero, 0)
