"""Decompositions: ops that need results of other ranks midway, written as calls of other ops.

For example, a softmax over a sharded dimension needs the maximum and the sum over all shards. The
ops that are called here run on DTensors by their own rules. All sum in float32 or wider, as torch's
kernels do, and return the dtype of their input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .rule import Arg, Kernel, KernelCall, KernelRule, own_op
from .rule import builtin_rule as rule
from .sentence import Names

# -- values that are reduced once ------------------------------------------------------------------


@own_op
def reduced(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` with its Partial axes reduced. Its rule does this, not the body.

    Use it for a value that is used several times. Otherwise each use would reduce the value again.
    """
    return x.view_as(x)


@rule(reduced)
def _reduced_sentence(x: Arg) -> str:
    # A whole dimension stays whole, because the next operand may be split along another one.
    names = Names(n if x.is_split(d) else f"{n}!" for d, n in enumerate(x.names))
    return f"{names} -> {names}"


@own_op
def subtract_reduced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns x - y, and reduces a Partial y (such as a mean) first, so that x keeps its layout."""
    return x - y


rule("..., ... -> ...", subtract_reduced)


def widen(x: Any) -> Any:
    """Returns `x` in float32, or in its own dtype if that is float32 or wider.

    Torch's kernels also compute narrow dtypes in float32.
    """
    narrow = x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)
    return x.float() if narrow else x


# -- maxima and their places -----------------------------------------------------------------------

Dim = int | Sequence[int] | None


@own_op
def partial_max(x: torch.Tensor, dim: Dim, keepdim: bool, sign: int = 1) -> torch.Tensor:
    """Returns the maximum (or minimum) over this rank's shard: a Partial max (or min).

    It has no gradient. For an empty shard it is the least (or largest) value.

    Args:
        x: the local shard.
        dim, keepdim: the dimensions to reduce, and True to keep them with size 1. None and () mean
            all dimensions.
        sign: 1 for the maximum, -1 for the minimum.
    """
    x, dims = x.detach(), Names.of(x.ndim).dims(dim)
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims]
        if x.dtype == torch.bool:
            return x.new_full(shape, sign < 0)
        ends = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        worst = -math.inf * sign if x.is_floating_point() else ends.min if sign > 0 else ends.max
        return x.new_full(shape, worst)
    return (torch.amax if sign > 0 else torch.amin)(x, dims, keepdim)


@rule(partial_max)
def _partial_max_sentence(x: Arg, dim: Dim, keepdim: bool, sign: int = 1) -> str:
    return f"{x.names} -> {'max' if sign > 0 else 'min'} {x.names.without(dim, keepdim)}"


@own_op
def first_index(x: torch.Tensor, best: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Returns the first index along `dim` at which `x` equals `best`, such as its maximum.

    The result has size 1 in `dim`. If `dim` is None, it is the index in the flattened tensor.
    """
    return _first_index(x, best, dim, [0] * x.ndim, list(x.shape))


def _first_index(x: Any, best: Any, dim: int | None, offset: list[int], size: list[int]) -> Any:
    hit = (x == best) | (x != x)
    at = torch.zeros((), dtype=torch.int64, device=x.device)
    step = 1
    dims = Names.of(x.ndim).dims(dim)
    for d in reversed(dims):
        place = torch.arange(x.shape[d], device=x.device) + offset[d]
        at = at + place.view(-1, *[1] * (x.ndim - d - 1)) * step
        step *= size[d]
    at = torch.where(hit, at, step)
    if any(x.shape[d] == 0 for d in dims):
        return at.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], step)
    return at.amin(dims, keepdim=True)


@rule(first_index)
def _derive_first_index(x: Arg, best: Arg, dim: int | None) -> KernelRule:
    names = x.names
    left = names.without(dim, keepdim=True)

    def make_first_index_kernel(call: KernelCall) -> Kernel:
        offset = [call.pieces.get(n, (0,))[0] for n in names]
        return lambda x, best, dim: _first_index(x, best, dim, offset, list(call.shapes[0] or ()))

    return KernelRule(f"{names}, {left} -> min {left}", make_first_index_kernel)


@own_op
def is_at_place(x: torch.Tensor, at: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a mask that is True for the elements of `x` at index `at` along `dim`.

    Args:
        at: indices along `dim`, with size 1 in that dimension.
    """
    return _is_at_place(x, at, dim, 0)


def _is_at_place(x: Any, at: Any, dim: int, offset: int) -> Any:
    places = torch.arange(x.shape[dim], device=x.device) + offset
    return places.view(-1, *[1] * (x.ndim - dim % x.ndim - 1)) == at


@rule(is_at_place)
def _derive_is_at_place(x: Arg, at: Arg, dim: int) -> KernelRule:
    names = x.names

    def make_is_at_place_kernel(call: KernelCall) -> Kernel:
        offset = call.pieces.get(names[dim], (0,))[0]
        return lambda x, at, dim: _is_at_place(x, at, dim, offset)

    return KernelRule(
        f"{names}, {names.without(dim, keepdim=True)} -> {names}", make_is_at_place_kernel
    )


def amax(x: Any, dim: Dim = None, keepdim: bool = False, sign: int = 1) -> Any:
    """Computes torch.amax (`sign` -1: torch.amin) of the DTensor `x`.

    Equal elements get equal parts of the gradient.

    Args:
        dim, keepdim: as for torch.amax; None means all dimensions.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return partial_max(x, dim, keepdim, sign)
    dims = Names.of(x.ndim).dims(dim)
    hit = x.detach() == partial_max(x, dims, True, sign)
    total = x.masked_fill(~hit, 0).sum(dims, keepdim)
    return total / reduced(hit.sum(dims, keepdim))


def argmax(x: Any, dim: int | None = None, keepdim: bool = False, sign: int = 1) -> Any:
    """Computes torch.argmax (`sign` -1: argmin) of a DTensor. Of equal values, the first index
    counts.

    Args:
        x: the DTensor.
        dim, keepdim: as for torch.argmax; None means the index in the flattened tensor.
    """
    best = partial_max(x, dim, True, sign)
    at = first_index(x.detach(), best, dim)
    return at if keepdim else reduced(at).squeeze(Names.of(x.ndim).dims(dim))


def max_dim(x: Any, dim: int, keepdim: bool = False, sign: int = 1) -> Any:
    """Computes torch.max (`sign` -1: torch.min) along `dim` of a DTensor: values and indices.

    Only the element at that index gets the gradient.

    Args:
        x: the DTensor.
        keepdim: True keeps the dimension with size 1.
    """
    at = reduced(argmax(x, dim, True, sign))
    if x.requires_grad and torch.is_grad_enabled():
        # gather would save x for backward; torch.max does not, so programs may write x afterwards.
        values = x.masked_fill(~is_at_place(x.detach(), at, dim), 0).sum(dim, keepdim=True)
    else:
        values = torch.gather(x, dim, at)
    kind = torch.return_types.max if sign > 0 else torch.return_types.min
    return kind((values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim)))


# -- softmax ---------------------------------------------------------------------------------------


def _subtract_max(x: Any, dim: Dim) -> Any:
    """Returns `x` minus the maximum of all pieces."""
    return subtract_reduced(x, reduced(partial_max(x, dim, True)))


def softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    shifted = _subtract_max(widen(x if dtype is None else x.to(dtype)), dim)
    e = shifted.exp()
    return (e / e.sum(dim, keepdim=True)).to(dtype or x.dtype)


def log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    shifted = _subtract_max(widen(x if dtype is None else x.to(dtype)), dim)
    out = subtract_reduced(shifted, shifted.exp().sum(dim, keepdim=True).log())
    return out.to(dtype or x.dtype)


def logsumexp(x: Any, dim: Dim, keepdim: bool = False) -> Any:
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    x, dtype = widen(x), x.dtype
    top = reduced(partial_max(x, dim, True))
    top = top.masked_fill(top.abs() == math.inf, 0)  # softmax would return nan there
    shifted = subtract_reduced(x, top)
    out = (shifted.exp().sum(dim, keepdim=True).log() + top).to(dtype)
    return out if keepdim else out.squeeze(Names.of(x.ndim).dims(dim))


# -- mean, variance, norm --------------------------------------------------------------------------


def moments(
    x: Any, dim: Dim = None, correction: float = 1, keepdim: bool = False
) -> tuple[Any, Any]:
    """Returns the mean and the variance of the DTensor `x` over `dim`.

    Args:
        dim: the dimensions; None means all.
        correction: the variance is the sum of squares divided by n - correction.
        keepdim: True keeps the dimensions with size 1.
    """
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
    """Returns the sum of |x|^p over `dim`, as in norms. It is an op with its own rule.

    Args:
        keepdim: True keeps the dimensions with size 1.
    """
    if p == 2:  # not by |x|, whose gradient at 0 is 0: the second derivative would be wrong
        powers = x.real.square() + x.imag.square() if x.is_complex() else x * x
        return torch.sum(powers, Names.of(x.ndim).dims(dim), keepdim=keepdim)
    size = x.abs()
    if p < 1:  # not differentiable at 0, where torch's gradient is 0
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
    wide, dims = widen(x), Names.of(x.ndim).dims(dim)
    if math.isinf(ord):
        norm = amax(wide.abs(), dim, keepdim, 1 if ord > 0 else -1)
    elif ord == 0:
        count = (wide != 0).sum(dims, keepdim=keepdim).to(wide.dtype.to_real())
        norm = _NoGradient.apply(count, x)  # torch's has no gradient either
    elif ord == 1:
        norm = wide.abs().sum(dims, keepdim=keepdim)
    else:
        norm = root_of(power_sum(wide, ord, dim, keepdim), ord)
    return norm.to(x.dtype.to_real())


class _NoGradient(torch.autograd.Function):
    """Returns a copy of `out` that depends on `x` in autograd, but gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, out: Any, x: Any) -> Any:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None


def root_of(total: Any, order: float = 2) -> Any:
    """Returns the root of a sum of powers, as in a norm. As in torch, its gradient at 0 is 0.

    Args:
        total: the sum of powers.
        order: 2 for a square root, and so on.
    """
    total = reduced(total)
    zero = total == 0
    return (total.masked_fill(zero, 1) ** (1 / order)).masked_fill(zero, 0)


# -- normalization ---------------------------------------------------------------------------------


def layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Computes F.layer_norm: (input - mean) / sqrt(variance + eps) over the last dimensions.

    Args:
        normalized_shape: the sizes of the last dimensions. Only their number is used.
        weight, bias: a factor and an addend of the result, or None.
    """
    dims = range(-len(normalized_shape), 0)
    x = widen(input)
    mean, variance = moments(x, tuple(dims), 0, keepdim=True)
    out = subtract_reduced(x, mean) * torch.rsqrt(variance + eps)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(input.dtype)


def rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """Computes F.rms_norm: input / sqrt(mean of squares + eps) over the last dimensions.

    Args:
        normalized_shape: the sizes of the last dimensions. Only their number is used.
        weight: a factor of the result, or None.
        eps: None means the smallest step of the dtype at 1.
    """
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
    """Computes F.batch_norm with statistics of the whole batch of all ranks, as on one device.

    Running statistics are updated once, equally on all ranks. The parameters have the same meaning
    as in F.batch_norm, except `training`, which is not read.

    Raises:
        ValueError: there is only one value per channel.
    """
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


# -- losses of classes -----------------------------------------------------------------------------


@own_op
def target_weight(target: torch.Tensor, weight: Any, ignore_index: int) -> torch.Tensor:
    """Returns the divisor of a mean loss: the sum of the class weights of targets that count.

    Args:
        target: class indices.
        weight: a weight for each class; None counts targets.
        ignore_index: the class index of targets that do not count.
    """
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
    """Makes a function that computes the mean of a loss such as cross-entropy, on a sharded batch.

    Each rank sums the losses of its samples by torch's kernel. It divides by the weight of the
    samples of all ranks. Each rank must have all classes.

    Args:
        loss: torch's function of the loss, whose `reduction` is a number (2 for the sum).
    """

    def run_in_wide_dtype(
        x: Any,
        target: Any,
        weight: Any = None,
        reduction: int = 1,
        ignore_index: int = -100,
        *smoothing: float,
    ) -> Any:
        # A sum of many losses may overflow a narrow dtype.
        weights = None if weight is None else widen(weight)
        total = loss(widen(x), target, weights, 2, ignore_index, *smoothing)
        count = reduced(target_weight(target, weights, ignore_index)).to(total.dtype)
        return (total / count).to(x.dtype)

    return run_in_wide_dtype


def nll(
    logp: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100
) -> Any:
    """Computes F.nll_loss. Classes are dimension 1 (0 without a batch).

    Args:
        logp: the logarithms of probabilities.
        target: class indices.
        weight: a weight for each class, or None.
        reduction: 0 none, 1 mean (over the weights of the targets not ignored), 2 sum.
        ignore_index: the class index of targets that do not count.
    """
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
    """Computes F.cross_entropy of logits. Classes are dimension 1 (0 without a batch).

    Args:
        x: the logits.
        target: class indices, or probabilities with the shape of the logits.
        weight: a weight for each class, or None.
        reduction: 0 none, 1 mean (over the weights of the targets not ignored), 2 sum.
        ignore_index: the class index of targets that do not count.
        label_smoothing: the part of a target's probability that is spread equally over all classes.
    """
    smoothing, dtype = label_smoothing, x.dtype
    dim = 1 if x.ndim > 1 else 0
    classes = x.shape[dim]
    each = None if weight is None else weight.reshape([-1] + [1] * (x.ndim - dim - 1))
    if x.shape == target.shape:  # probabilities
        logp = log_softmax(widen(x), dim)
        target = target * (1 - smoothing) + smoothing / classes if smoothing else target
        loss = -(logp * target if each is None else logp * target * each).sum(dim)
        if reduction != 0:
            loss = loss.sum() / (math.prod(x.shape) // classes if reduction == 1 else 1)
        return loss.to(dtype)
    # This needs only the logits of the targets and the logarithm of the sum of exponentials, so
    # no other tensor as large as the logits is made.
    logz = reduced(logsumexp(widen(x), dim))
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)
    loss = logz - reduced(torch.gather(x, dim, index.unsqueeze(dim)).squeeze(dim))
    if weight is not None:
        loss = loss * F.embedding(index, weight.reshape(-1, 1)).squeeze(-1)
    loss = _reduce_loss(loss.masked_fill(ignored, 0), target, weight, ignore_index, reduction)
    if smoothing:
        if each is None:
            smooth = logz * classes - widen(x).sum(dim)
        else:
            smooth = logz * weight.sum() - (x * each).sum(dim)
        smooth = smooth.masked_fill(ignored, 0)
        smooth = _reduce_loss(smooth, target, weight, ignore_index, reduction)
        loss = loss * (1 - smoothing) + smooth * (smoothing / classes)
    return loss.to(dtype)
