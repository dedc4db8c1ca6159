"""Losses of classes over a split vocabulary, or a split batch.

Computed in float32 or wider, and returned in the dtype of the logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import Arg, own_op
from ..rule import table_rule as rule
from .partial_operands import reduced, widen
from .softmax import log_softmax, logsumexp

__all__ = ["cross_entropy", "make_mean_loss", "nll", "target_weight"]


@own_op
def target_weight(target: torch.Tensor, weight: Any, ignore_index: int) -> torch.Tensor:
    """What a mean loss is divided by: the weights of all targets that are not ignored."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return (weight[torch.where(kept, target, 0)] * kept).sum()


@rule(target_weight)
def _target_weight(target: Arg, weight: Arg | None, _ignore_index: int) -> str:
    return f"...{', c!' * (weight is not None)} -> sum"


def _reduce_loss(loss: Any, target: Any, weight: Any, ignore_index: int, reduction: int) -> Any:
    if reduction == 0:
        return loss
    total = loss.sum()
    if reduction == 2:
        return total
    return total / reduced(target_weight(target, weight, ignore_index)).to(total.dtype)


def make_mean_loss(loss: Any) -> Any:
    """The mean of a loss of classes of which each rank has all, given by index, by torch's own
    kernel: the sum of a rank's samples, over the weight of all."""

    def run_in_wide_dtype(
        x: Any,
        target: Any,
        weight: Any = None,
        reduction: int = 1,
        ignore_index: int = -100,
        *smoothing: float,
    ) -> Any:
        # A sum of many is more than a narrow dtype holds.
        weights = None if weight is None else widen(weight)
        total = loss(widen(x), target, weights, 2, ignore_index, *smoothing)
        count = reduced(target_weight(target, weights, ignore_index)).to(total.dtype)
        return (total / count).to(x.dtype)

    return run_in_wide_dtype


def nll(
    logp: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100
) -> Any:
    """The negative log likelihood; classes are dimension 1 (0 where there is just one sample)."""
    dim = 1 if logp.ndim > 1 else 0
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)
    loss = -widen(torch.gather(logp, dim, index.unsqueeze(dim)).squeeze(dim))
    if weight is not None:
        loss = loss * F.embedding(index, weight.reshape(-1, 1)).squeeze(-1)
    loss = loss.masked_fill(ignored, 0)
    return _reduce_loss(loss, target, weight, ignore_index, reduction).to(logp.dtype)


def cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross entropy of logits; classes are dimension 1 (0 where there is just one sample).

    Args:
        target: class indices, or probabilities of the logits' shape.
        weight: of each class.
        reduction: 0 none, 1 mean (over the weights of the targets not ignored), 2 sum.
    """
    loss = _cross_entropy(x, target, weight, reduction, ignore_index, label_smoothing)
    return loss.to(x.dtype)


def _cross_entropy(
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Any:
    smoothing = label_smoothing
    dim = 1 if x.ndim > 1 else 0
    classes = x.shape[dim]
    each = None if weight is None else weight.reshape([-1] + [1] * (x.ndim - dim - 1))
    if x.shape == target.shape:  # probabilities
        logp = log_softmax(widen(x), dim)
        target = target * (1 - smoothing) + smoothing / classes if smoothing else target
        loss = -(logp * target if each is None else logp * target * each).sum(dim)
        if reduction == 0:
            return loss
        return loss.sum() / (math.prod(x.shape) // classes if reduction == 1 else 1)
    # The logits of the targets and the logarithm of the sum are all that is needed of them: no
    # tensor as large as the logits is made beyond the exponentials.
    logz = reduced(logsumexp(widen(x), dim))
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)
    loss = logz - reduced(torch.gather(x, dim, index.unsqueeze(dim)).squeeze(dim))
    if weight is not None:
        loss = loss * F.embedding(index, weight.reshape(-1, 1)).squeeze(-1)
    loss = _reduce_loss(loss.masked_fill(ignored, 0), target, weight, ignore_index, reduction)
    if not smoothing:
        return loss
    if each is None:
        smooth = logz * classes - widen(x).sum(dim)
    else:
        smooth = logz * weight.sum() - (x * each).sum(dim)
    smooth = smooth.masked_fill(ignored, 0)
    smooth = _reduce_loss(smooth, target, weight, ignore_index, reduction)
    return loss * (1 - smoothing) + smooth * (smoothing / classes)
