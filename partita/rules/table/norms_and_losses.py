"""Normalization and losses: what is reckoned over all samples, or over all of a dimension.

A mean over a split batch is the sum of all losses over the number of all elements: the local
kernels here know that number, so the result is a share of the mean. The functions of
torch.nn.functional are entered; what is here are the builtins behind them, whose `reduction` is
0 (none), 1 (mean) or 2 (sum). Where it is not given there is no rule: builtins have another default
in Python than in C++.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .. import decompositions
from ..rule import Arg, Decomposition, Kernel, KernelCall, KernelRule
from ..rule import table_rule as rule

# -- normalization ---------------------------------------------------------------------------------


def _format_affine_terms(weight: Any, bias: Any, names: str) -> str:
    """The terms of a scale and a shift, either of which may be missing."""
    count = (weight is not None) + (bias is not None)
    return f", {'+ ' * (count == 1)}{' + '.join([names] * count)}" if count else ""


def _derive_norm(
    input: Arg, shape: Sequence[int], weight: Any, bias: Any, run: Callable[..., Any]
) -> str | Decomposition:
    """A norm over the last dimensions, which are of these sizes; `run`, where one is split."""
    first = input.ndim - len(shape)
    if first < 0 or tuple(shape) != tuple(input.shape[first:]):
        raise ValueError(f"a norm over {tuple(shape)} of {input.shape}")
    dims = range(first, input.ndim)
    if input.is_split(dims):
        return Decomposition(run)
    d = " ".join(f"d{i}!" for i in dims)
    return f"... {d}{_format_affine_terms(weight, bias, d)} -> ... {d}"


@rule(torch.layer_norm)
def layer_norm(
    input: Arg, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None
) -> str | Decomposition:
    return _derive_norm(input, normalized_shape, weight, bias, decompositions.layer_norm)


@rule(torch.rms_norm)
def rms_norm(
    input: Arg, normalized_shape: Sequence[int], weight: Any = None
) -> str | Decomposition:
    return _derive_norm(input, normalized_shape, weight, None, decompositions.rms_norm)


@rule(torch.group_norm)
def group_norm(input: Arg, num_groups: int, weight: Any = None, bias: Any = None) -> KernelRule:
    spatial = " ".join(f"s{i}!" for i in range(input.ndim - 2))
    channels = f"(g={num_groups} c)"
    x = f"n {channels}! {spatial}" if num_groups == 1 else f"n {channels} {spatial}"

    def make_group_norm_kernel(call: KernelCall) -> Kernel | None:
        if not call.is_split("g"):
            return None
        mine = call.pieces["g"][1]
        if not mine:  # from torch 2.14 on none is an error
            return lambda input, *more, **named: input.clone()
        return lambda input, num_groups, *more, **named: call.run(input, mine, *more, **named)

    return KernelRule(
        f"{x}{_format_affine_terms(weight, bias, channels)} -> {x}", make_group_norm_kernel
    )


@rule(F.batch_norm)
def batch_norm(
    input: Arg,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
) -> str | Decomposition | None:
    if input.ndim < 2:
        return None
    stats = [t for t in (running_mean, running_var) if t is not None]
    over = [d for d in range(input.ndim) if d != 1]
    if training and (
        input.is_split(over if not stats else None) or any(t.is_split() for t in stats)
    ):
        return Decomposition(decompositions.batch_norm)
    # Running statistics are written in place: no row may have moved them.
    c = f"{input.names[1]}{'!' if training and stats else '%'}"
    x = " ".join(c if d == 1 else f"{n}{'!' * training}" for d, n in enumerate(input.names))
    return f"{x}{f', {c}' * len(stats)}{_format_affine_terms(weight, bias, c)} -> {x}"


@rule(torch.batch_norm)
def batch_norm_builtin(input: Arg, weight: Any, bias: Any, *rest: Any) -> Decomposition:
    return Decomposition(
        lambda x, w, b, mean, var, training, momentum, eps, *_: F.batch_norm(
            x, mean, var, w, b, training, momentum, eps
        )
    )


@rule(F.instance_norm)
def instance_norm(
    input: Arg,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
) -> str | None:
    if running_mean is not None or running_var is not None or not use_input_stats:
        return None
    x = "n c% " + " ".join(f"s{i}!" for i in range(input.ndim - 2))
    return f"{x}{_format_affine_terms(weight, bias, 'c%')} -> {x}"


# -- losses ----------------------------------------------------------------------------------------

NONE, MEAN, SUM = 0, 1, 2
_n = torch._C._nn


def _rule_of_loss(
    terms: str, out: str, count: int, reduction: Any, at: int
) -> KernelRule | str | None:
    """The rule of a loss.

    Args:
        terms: what the loss is computed from.
        out: its names when it is not reduced.
        count: what a mean is divided by.
        at: which argument `reduction` is.
    """
    if reduction not in (NONE, MEAN, SUM):
        return None
    if reduction == NONE:
        return f"{terms} -> {out}"

    def make_loss_kernel(call: KernelCall) -> Kernel | None:
        def share(*args: Any, **kwargs: Any) -> Any:
            if len(args) > at:
                args = (*args[:at], SUM, *args[at + 1 :])
            else:
                kwargs["reduction"] = SUM
            total = call.run(*args, **kwargs)
            if not args[0].numel():  # some of torch's kernels leave the sum of nothing unwritten
                return torch.zeros_like(total)
            return total / count if reduction == MEAN else total

        return share if call.pieces and count else None

    return KernelRule(f"{terms} -> sum", make_loss_kernel)


# -- losses of each element ------------------------------------------------------------------------


def _of_elements(operands: Sequence[Any], reduction: Any, at: int) -> KernelRule | str | None:
    """A loss of each element of operands that are broadcast."""
    args = [x for x in operands if isinstance(x, Arg)]
    count = math.prod(torch.broadcast_shapes(*(x.shape for x in args)))
    return _rule_of_loss(", ".join("..." for _ in args), "...", count, reduction, at)


@rule(_n.mse_loss, _n.l1_loss, _n.smooth_l1_loss, _n.huber_loss, _n.soft_margin_loss, torch.kl_div)
def mse_loss(input: Arg, target: Arg, reduction: Any = None) -> Any:
    return _of_elements((input, target), reduction, 2)


@rule(torch.hinge_embedding_loss)
def hinge_embedding_loss(input: Arg, target: Arg, _margin: Any = 1.0, reduction: Any = None) -> Any:
    return _of_elements((input, target), reduction, 3)


@rule(_n.binary_cross_entropy)
def binary_cross_entropy(input: Arg, target: Arg, weight: Any = None, reduction: Any = None) -> Any:
    return _of_elements((input, target, weight), reduction, 3)


@rule(torch.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Arg, target: Arg, weight: Any = None, pos_weight: Any = None, reduction: Any = None
) -> Any:
    return _of_elements((input, target, weight, pos_weight), reduction, 4)


@rule(torch.poisson_nll_loss)
def poisson_nll_loss(
    input: Arg,
    target: Arg,
    _log_input: Any = None,
    _full: Any = None,
    _eps: Any = None,
    reduction: Any = None,
) -> Any:
    return _of_elements((input, target), reduction, 5)


@rule(torch.margin_ranking_loss)
def margin_ranking_loss(
    input1: Arg, input2: Arg, target: Arg, _margin: Any = 0, reduction: Any = None
) -> Any:
    return _of_elements((input1, input2, target), reduction, 4)


# -- losses of each sample -------------------------------------------------------------------------


@rule(torch.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Arg, input2: Arg, target: Arg, _margin: Any = 0, reduction: Any = None
) -> Any:
    if target.ndim != 1 or input1.shape != input2.shape:
        return None
    return _rule_of_loss("n d!, n d!, n", "n", target.shape[0], reduction, 4)


@rule(torch.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Arg,
    positive: Arg,
    negative: Arg,
    _margin: Any = 1.0,
    _p: Any = 2,
    _eps: Any = 1e-6,
    _swap: bool = False,
    reduction: Any = None,
) -> Any:
    if not anchor.shape == positive.shape == negative.shape:
        return None
    count = math.prod(anchor.shape[:-1])
    return _rule_of_loss("... d!, ... d!, ... d!", "...", count, reduction, 7)


@rule(_n.multilabel_margin_loss)
def multilabel_margin_loss(input: Arg, target: Arg, reduction: Any = None) -> Any:
    if input.ndim != 2:
        return None
    return _rule_of_loss("n c!, n c!", "n", input.shape[0], reduction, 2)


@rule(_n.multi_margin_loss)
def multi_margin_loss(
    input: Arg,
    target: Arg,
    _p: Any = 1,
    _margin: Any = 1.0,
    weight: Any = None,
    reduction: Any = None,
) -> Any:
    if input.ndim != 2:
        return None
    terms = "n c!, n" + ", c!" * (weight is not None)
    return _rule_of_loss(terms, "n", input.shape[0], reduction, 5)


# -- losses of a class -----------------------------------------------------------------------------


def _of_classes(
    loss: Any,
    input: Arg,
    target: Arg,
    weight: Any,
    reduction: Any,
    run: Callable[..., Any],
    linear: str,
) -> str | Decomposition | None:
    """A sentence where no rank's help is needed: nothing is split, or nothing is averaged."""
    if reduction not in (NONE, MEAN, SUM):
        return None
    dim = 1 if input.ndim > 1 else 0
    if weight is not None and tuple(weight.shape) != (input.shape[dim],):
        raise ValueError(f"weights of shape {weight.shape} for {input.shape[dim]} classes")
    split = input.is_split() or target.is_split()
    probabilities = target.shape == input.shape
    if input.is_split(dim) or (split and reduction == MEAN and probabilities):
        return Decomposition(run)
    if split and reduction == MEAN:
        return Decomposition(decompositions.make_mean_loss(loss))
    mark = "!" * (reduction == MEAN)
    names = [f"c{d}!" if d == dim else f"{n}{mark}" for d, n in enumerate(input.names)]
    samples = [n for d, n in enumerate(names) if d != dim]
    terms = [" ".join(names), " ".join(names if probabilities else samples)]
    if weight is not None:
        terms.append(names[dim])
    out = " ".join(samples) if reduction == NONE else "sum"
    return f"{linear}{', '.join(terms)} -> {out}"


@rule(_n.cross_entropy_loss)
def cross_entropy_loss(
    input: Arg,
    target: Arg,
    weight: Any = None,
    reduction: Any = None,
    _ignore_index: int = -100,
    _label_smoothing: Any = 0.0,
) -> str | Decomposition | None:
    return _of_classes(
        _n.cross_entropy_loss, input, target, weight, reduction, decompositions.cross_entropy, ""
    )


@rule(_n.nll_loss_nd, _n.nll_loss, _n.nll_loss2d)  # type: ignore[attr-defined]
def nll_loss_nd(
    input: Arg,
    target: Arg,
    weight: Any = None,
    reduction: Any = None,
    _ignore_index: int = -100,
) -> str | Decomposition | None:
    return _of_classes(_n.nll_loss_nd, input, target, weight, reduction, decompositions.nll, "+ ")
