"""Length buckets: batches of many lengths, padded to a few, so that few programs are captured.

Only whoever makes the batch knows what padding must hold (a target that the loss ignores, a token
that nothing reads). So it is padded tensor by tensor, with a value that is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

__all__ = ["pad_to_bucket"]

T = TypeVar("T", bound=torch.Tensor)


def pad_to_bucket(x: T, lengths: Iterable[int], *, value: float, dim: int = -1) -> T:
    """`x`, padded at the end of dimension `dim` to the smallest of `lengths` that it fits.

        lengths = (64, 128, 256)
        tokens = pt.pad_to_bucket(tokens, lengths, value=0)
        targets = pt.pad_to_bucket(targets, lengths, value=-100)    # cross_entropy's ignore_index
        loss = step(tokens, targets)

    Then a step is captured once for each length. The mean loss is that of the batch as it was where
    targets are padded with what the loss ignores, and where no place of the model reads those that
    come after it: a causal transformer. Where places read all others (attention without a mask, a
    mean or a batch norm over the length), give the model a mask, padded with `value=False`.

    Args:
        x: a tensor, or a DTensor that is not split along `dim`; dimensions of any number.
        lengths: in elements, in any order.
        value: what padding holds.

    Returns:
        `x` itself where it has one of the lengths.

    Raises:
        ValueError: `x` is longer than all of `lengths`, or has no dimension `dim`.
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"pad_to_bucket: a tensor of shape {tuple(x.shape)} has no dimension {dim}"
        )
    have, sizes = x.shape[dim], sorted(lengths)
    fitting = [n for n in sizes if n >= have]
    if not fitting:
        raise ValueError(f"pad_to_bucket: {have} elements are more than the longest of {sizes}")
    more = fitting[0] - have
    if not more:
        return x
    behind = x.dim() - 1 - dim % x.dim()  # dimensions behind it, of which F.pad is told first
    padded: Any = F.pad(x, (0, 0) * behind + (0, more), value=value)
    return padded
