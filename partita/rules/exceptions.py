"""How are ops computed that must hear from other ranks before they can finish?

A softmax over a split dimension needs the maximum and the sum of all pieces in the middle. Such ops
are written here as other ops, which are called on DTensors and find their own sentences; where a
rank must know its place, a small op of our own (`@op`) has a rule with a local kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from .names import Names
from .rule import Arg, Call, Said, rule

__all__ = [
    "amax",
    "argmax",
    "attention",
    "cross_entropy",
    "first_index",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "max_dim",
    "minus",
    "moments",
    "nll",
    "nothing",
    "op",
    "own",
    "pending_max",
    "power_sum",
    "scaled_dot_product_attention",
    "settled",
    "softmax",
    "target_weight",
    "vector_norm",
]

Dim = int | Sequence[int] | None


def op(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make `run` an op of its own: called on DTensors it is looked up in the table."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(call, tensors, *args, **kwargs)
        return run(*args, **kwargs)

    return call


def _dims(x: Any, dim: Dim) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    return tuple(d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim))


# -- places of a split dimension -------------------------------------------------------------------


def own(index: Any, piece: tuple[int, int, int]) -> tuple[Any, Any]:
    """`(index within this rank's piece, which of them are not here)`."""
    offset, length, size = piece
    at = torch.where(index < 0, index + size, index) - offset
    away = (at < 0) | (at >= length)
    return at.masked_fill(away, 0), away


def nothing(input: Any, shape: Sequence[int]) -> Any:
    """Zeros that hang on `input` in the graph, so that its gradient is zeros and not None."""
    out = input.new_zeros(shape)
    return out + input.flatten()[:0].sum() if input.requires_grad else out


# -- the largest of all pieces ---------------------------------------------------------------------


@op
def pending_max(x: torch.Tensor, dim: Dim, keepdim: bool, sign: int = 1) -> torch.Tensor:
    """The maximum (`sign` -1: minimum) of this rank's piece, without gradient."""
    x, dims = x.detach(), _dims(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims]
        if x.dtype == torch.bool:
            return x.new_full(shape, sign < 0)
        ends = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        worst = -math.inf * sign if x.is_floating_point() else ends.min if sign > 0 else ends.max
        return x.new_full(shape, worst)
    return (torch.amax if sign > 0 else torch.amin)(x, dims, keepdim)


@rule(pending_max)
def _pending_max(x: Arg, dim: Dim, keepdim: bool, sign: int = 1) -> str:
    return f"{x.names} -> {'max' if sign > 0 else 'min'} {x.names.without(dim, keepdim)}"


@op
def first_index(x: torch.Tensor, best: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The first place along `dim` (kept; None: in the flattened tensor) where `x` is `best`."""
    return _first_index(x, best, dim, [0] * x.ndim, list(x.shape))


def _first_index(x: Any, best: Any, dim: int | None, offset: list[int], size: list[int]) -> Any:
    hit = (x == best) | (x != x)
    at = torch.zeros((), dtype=torch.int64, device=x.device)
    step = 1
    for d in reversed(range(x.ndim)):
        if dim is None or d == dim % x.ndim:
            place = torch.arange(x.shape[d], device=x.device) + offset[d]
            at = at + place.view(-1, *[1] * (x.ndim - d - 1)) * step
            step *= size[d]
    at = torch.where(hit, at, step)
    dims = _dims(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        return at.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], step)
    return at.amin(dims, keepdim=True)


@rule(first_index)
def _first_index_rule(x: Arg, best: Arg, dim: int | None) -> Said:
    names = x.names
    left = names.without(dim, keepdim=True)

    def local(call: Call) -> Any:
        offset = [call.pieces.get(n, (0,))[0] for n in names]
        return lambda x, best, dim: _first_index(x, best, dim, offset, list(call.shapes[0] or ()))

    return Said(f"{names}, {left} -> min {left}", local)


@op
def settled(x: torch.Tensor) -> torch.Tensor:
    """`x` with what is pending reduced, for a value that is used more than once."""
    return x.view_as(x)


@rule(settled)
def _settled(x: Arg) -> str:
    # A dimension that is whole stays whole: what x meets next may be split along another one.
    names = Names(n if x.is_split(d) else f"{n}!" for d, n in enumerate(x.names))
    return f"{names} -> {names}"


@op
def minus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x - y where y is small: y is reduced first, x does not become shares to meet it."""
    return x - y


rule("..., ... -> ...", minus)


def amax(x: Any, dim: Dim = None, keepdim: bool = False, sign: int = 1) -> Any:
    """Maximum or minimum; equal elements share the gradient equally, as in torch.amax."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return pending_max(x, dim, keepdim, sign)
    dims = _dims(x, dim)
    hit = x.detach() == pending_max(x, dims, True, sign)
    total = x.masked_fill(~hit, 0).sum(dims, keepdim)
    return total / settled(hit.sum(dims, keepdim))


def argmax(x: Any, dim: int | None = None, keepdim: bool = False, sign: int = 1) -> Any:
    best = pending_max(x, dim, True, sign)
    at = first_index(x.detach(), best, dim)
    if keepdim:
        return at
    return settled(at).reshape([n for d, n in enumerate(at.shape) if d not in _dims(x, dim)])


def max_dim(x: Any, dim: int, keepdim: bool = False, sign: int = 1) -> Any:
    at = settled(argmax(x, dim, True, sign))
    values = torch.gather(x, dim, at)
    kind = torch.return_types.max if sign > 0 else torch.return_types.min
    return kind((values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim)))


# -- exponentials ----------------------------------------------------------------------------------


def _shifted(x: Any, dim: Dim) -> tuple[Any, Any]:
    top = settled(pending_max(x, dim, True))
    top = top.masked_fill(top.abs() == math.inf, 0)
    return minus(x, top), top


def softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    shifted, _ = _shifted(x if dtype is None else x.to(dtype), dim)
    e = shifted.exp()
    return e / e.sum(dim, keepdim=True)


def log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    shifted, _ = _shifted(x if dtype is None else x.to(dtype), dim)
    return minus(shifted, shifted.exp().sum(dim, keepdim=True).log())


def logsumexp(x: Any, dim: Dim, keepdim: bool = False) -> Any:
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    shifted, top = _shifted(x, dim)
    out = shifted.exp().sum(dim, keepdim=True).log() + top
    if keepdim:
        return out
    dims = _dims(x, dim)
    return out.reshape([n for d, n in enumerate(out.shape) if d not in dims])


# -- moments and norms -----------------------------------------------------------------------------


def moments(
    x: Any, dim: Dim = None, correction: float = 1, keepdim: bool = False
) -> tuple[Any, Any]:
    """`(mean, variance)` with n - correction in the denominator of the variance."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = settled(x.mean(dims, keepdim=True))
    away = minus(x, mean)
    square = away * away.conj() if away.is_complex() else away * away
    below = max(count - correction, 0)
    total = (square.real if square.is_complex() else square).sum(dims, keepdim)
    variance = total / below if below else total / (total * 0)
    if not keepdim:
        mean = mean.reshape([n for d, n in enumerate(mean.shape) if d not in dims])
    return mean, variance


@op
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
    return torch.sum(powers, _dims(x, dim), keepdim=keepdim)


@rule(power_sum)
def _power_sum(x: Arg, _p: float, dim: Dim, keepdim: bool) -> str:
    return f"{x.names} -> sum {x.names.without(dim, keepdim)}"


def vector_norm(
    x: Any, ord: float = 2, dim: Dim = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    x = x if dtype is None else x.to(dtype)
    if math.isinf(ord):
        return amax(x.abs(), dim, keepdim, 1 if ord > 0 else -1)
    if ord == 0:
        return (x != 0).sum(_dims(x, dim), keepdim=keepdim).to(x.dtype)
    if ord == 1:
        return x.abs().sum(_dims(x, dim), keepdim=keepdim)
    total = settled(power_sum(x, ord, dim, keepdim))
    zero = total == 0  # where the root has no slope the gradient is 0, as torch has it
    return (total.masked_fill(zero, 1) ** (1 / ord)).masked_fill(zero, 0)


def layer_norm(x: Any, dims: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """x less its mean, over its deviation, in float32 or wider, along split dimensions."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean, variance = moments(wide, dims, 0, keepdim=True)
    out = (minus(wide, mean) * torch.rsqrt(variance + eps)).to(x.dtype)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


# -- attention -------------------------------------------------------------------------------------


@op
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention without dropout; shapes as F.scaled_dot_product_attention has them."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not dropout_p:
        return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    # As torch's own composite computes it: both factors are scaled, to keep within the range.
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(torch.triu(square, 1), -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.dropout(torch.softmax(scores, -1), dropout_p, True) @ value


# -- losses over a split vocabulary, or a split batch ----------------------------------------------


@op
def target_weight(target: torch.Tensor, weight: Any, ignore_index: int) -> torch.Tensor:
    """What a mean loss is divided by: the weights of all targets that are not ignored."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return (weight[torch.where(kept, target, 0)] * kept).sum()


@rule(target_weight)
def _target_weight(target: Arg, weight: Arg | None, _ignore_index: int) -> str:
    return f"...{', c!' * (weight is not None)} -> sum"


def _averaged(loss: Any, target: Any, weight: Any, ignore_index: int, reduction: int) -> Any:
    if reduction == 0:
        return loss
    total = loss.sum()
    if reduction == 2:
        return total
    return total / settled(target_weight(target, weight, ignore_index)).to(total.dtype)


def nll(
    logp: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100
) -> Any:
    """The negative log likelihood; classes are dimension 1 (0 where there is just one sample)."""
    dim = 1 if logp.ndim > 1 else 0
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)
    loss = -torch.gather(logp, dim, index.unsqueeze(dim)).squeeze(dim)
    if weight is not None:
        loss = loss * F.embedding(index, weight.reshape(-1, 1)).squeeze(-1)
    return _averaged(loss.masked_fill(ignored, 0), target, weight, ignore_index, reduction)


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
    smoothing = label_smoothing
    dim = 1 if x.ndim > 1 else 0
    classes = x.shape[dim]
    wide = None if weight is None else weight.reshape([-1] + [1] * (x.ndim - dim - 1))
    if x.shape == target.shape:  # probabilities
        logp = log_softmax(x, dim)
        target = target * (1 - smoothing) + smoothing / classes if smoothing else target
        loss = -(logp * target if wide is None else logp * target * wide).sum(dim)
        if reduction == 0:
            return loss
        return loss.sum() / (math.prod(x.shape) // classes if reduction == 1 else 1)
    # The logits of the targets and the logarithm of the sum are all that is needed of them: no
    # tensor as large as the logits is made beyond the exponentials.
    logz = settled(logsumexp(x, dim))
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)
    loss = logz - settled(torch.gather(x, dim, index.unsqueeze(dim)).squeeze(dim))
    if weight is not None:
        loss = loss * F.embedding(index, weight.reshape(-1, 1)).squeeze(-1)
    loss = _averaged(loss.masked_fill(ignored, 0), target, weight, ignore_index, reduction)
    if not smoothing:
        return loss
    if wide is None:
        smooth = logz * classes - x.sum(dim)
    else:
        smooth = logz * weight.sum() - (x * wide).sum(dim)
    smooth = smooth.masked_fill(ignored, 0)
    smooth = _averaged(smooth, target, weight, ignore_index, reduction)
    return loss * (1 - smoothing) + smooth * (smoothing / classes)
