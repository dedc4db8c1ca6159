"""Normalization along split dimensions, or over a split batch.

Computed in float32 or wider, as torch's own kernels do, and returned in the input's dtype, whatever
that of weight and bias is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .moments import moments
from .partial_operands import reduced, subtract_reduced, widen

__all__ = ["batch_norm", "layer_norm", "rms_norm"]


def layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """The input less its mean, over its deviation, along its last dimensions."""
    dims = range(-len(normalized_shape), 0)
    x = widen(input)
    mean, variance = moments(x, tuple(dims), 0, keepdim=True)
    out = subtract_reduced(x, mean) * torch.rsqrt(variance + eps)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(input.dtype)


def rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """The input over the root of the mean of its squares, along its last dimensions."""
    x = widen(input)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = tuple(range(-len(normalized_shape), 0))
    out = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    return (out if weight is None else out * weight).to(input.dtype)


def batch_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The statistics of the whole batch, as on one device; the running ones are updated once."""
    x = widen(input)
    dims = [d for d in range(input.ndim) if d != 1]
    count = math.prod(input.shape[d] for d in dims)
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    mean, variance = moments(x, dims, 0, keepdim=True)
    variance = reduced(variance)
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.mul_(1 - momentum)
                running.add_(new.detach().reshape(-1).to(running.dtype), alpha=momentum)
    out = subtract_reduced(x, mean) * torch.rsqrt(variance + eps)
    shape = [-1] + [1] * (input.ndim - 2)
    out = out if weight is None else out * weight.reshape(shape)
    return (out if bias is None else out + bias.reshape(shape)).to(input.dtype)
