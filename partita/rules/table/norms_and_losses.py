"""Normalization and losses: ops that compute a statistic over all samples, or over a dimension.

A mean over a sharded batch is the sum of all losses divided by the global number of elements. The
local kernels here get that number, so each rank's result is one addend of the mean. The Python
bodies of functions in torch.nn.functional run on DTensors. The rules here are for the builtins that
they call, whose `reduction` is 0 (none), 1 (mean) or 2 (sum). If it is not passed there is no rule,
because the default of a builtin differs between Python and C++.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .. import decompositions
from ..rule import Arg, Decomposition, Kernel, KernelCall, KernelRule, decomposed, rule_by_name
from ..rule import builtin_rule as rule
from ..sentence import SentenceError, bind, parse

# -- normalization ---------------------------------------------------------------------------------


def _format_affine_terms(weight: Any, bias: Any, names: str) -> str:
    """Returns the terms of a scale and a shift; each may be missing."""
    count = (weight is not None) + (bias is not None)
    return f", {'+ ' * (count == 1)}{' + '.join([names] * count)}" if count else ""


def _register_norm(takes: str, function: Any, split: Kernel) -> None:
    """Register a norm over the last dimensions; `split` computes it if one of them is split."""

    @rule_by_name(takes, function)
    def derive_norm(given: dict[str, Any]) -> str | Decomposition:
        input, shape = given["input"], tuple(given["normalized_shape"])
        first = input.ndim - len(shape)
        if first < 0 or shape != tuple(input.shape[first:]):
            raise ValueError(f"a norm over {shape} of {input.shape}")
        dims = range(first, input.ndim)
        if input.is_split(dims):
            return Decomposition(split)
        d = " ".join(f"d{i}!" for i in dims)
        affine = _format_affine_terms(given["weight"], given.get("bias"), d)
        return f"... {d}{affine} -> ... {d}"


_takes = "input normalized_shape weight=None"
_register_norm(f"{_takes} bias=None", torch.layer_norm, decompositions.layer_norm)
_register_norm(_takes, torch.rms_norm, decompositions.rms_norm)


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
    # Running statistics are written in place, so no row may redistribute them.
    c = f"{input.names[1]}{'!' if training and stats else '%'}"
    x = " ".join(c if d == 1 else f"{n}{'!' * training}" for d, n in enumerate(input.names))
    return f"{x}{f', {c}' * len(stats)}{_format_affine_terms(weight, bias, c)} -> {x}"


@decomposed("input weight bias *rest", torch.batch_norm)
def batch_norm_builtin(x: Any, w: Any, b: Any, mean: Any, var: Any, *rest: Any) -> Any:
    return F.batch_norm(x, mean, var, w, b, *rest[:3])  # training, momentum, eps


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


def _register_loss(takes: str, text: str, *functions: Any) -> None:
    """Register the sentences of losses, from the sentence that they have without reduction.

    Args:
        takes: the parameters before `reduction`.
        text: the sentence without reduction. Operands that are not passed are its last ones.
    """
    terms, _, out = text.partition(" -> ")
    at = len(takes.split())

    @rule_by_name(f"{takes} reduction=None", *functions)
    def derive_loss(given: dict[str, Any]) -> KernelRule | str | None:
        reduction = given["reduction"]
        operands = [x.shape for x in given.values() if isinstance(x, Arg)]
        mine = ", ".join(terms.split(", ")[: len(operands)])
        if reduction not in (NONE, MEAN, SUM):
            return None
        try:
            count = math.prod(bind(parse(f"{mine} -> {out}"), operands).output_shape(0, ()))
        except SentenceError:
            return None
        if reduction == NONE:
            return f"{mine} -> {out}"
        return KernelRule(f"{mine} -> sum", partial(_make_loss_kernel, at, reduction, count))


def _make_loss_kernel(at: int, reduction: int, count: int, call: KernelCall) -> Kernel | None:
    """Returns the kernel that computes a rank's share of a reduced loss.

    The kernel runs with `reduction` (argument number `at`) set to sum. A mean is divided by
    `count`, the global number of elements.
    """

    def share(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], SUM, *args[at + 1 :])
        else:
            kwargs["reduction"] = SUM
        total = call.run(*args, **kwargs)
        if not args[0].numel():  # some of torch's kernels leave the sum of nothing unwritten
            # Connected to its input: in a second derivative this rank must join other ranks' moves.
            return total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)
        return total / count if reduction == MEAN else total

    return share if call.pieces and count else None


_elements = (_n.mse_loss, _n.l1_loss, _n.smooth_l1_loss, _n.huber_loss, _n.soft_margin_loss)
_register_loss("input target", "..., ... -> ...", *_elements, torch.kl_div)
_register_loss("input target _margin=1.0", "..., ... -> ...", torch.hinge_embedding_loss)
_register_loss("input target weight=None", "..., ..., ... -> ...", _n.binary_cross_entropy)
_takes = "input target weight=None pos_weight=None"
_register_loss(_takes, "..., ..., ..., ... -> ...", torch.binary_cross_entropy_with_logits)
_takes = "input target _log_input=None _full=None _eps=None"
_register_loss(_takes, "..., ... -> ...", torch.poisson_nll_loss)
_takes = "input1 input2 target _margin=0"
_register_loss(_takes, "..., ..., ... -> ...", torch.margin_ranking_loss)
_register_loss(_takes, "n d!, n d!, n -> n", torch.cosine_embedding_loss)
_takes = "anchor positive negative _margin=1.0 _p=2 _eps=1e-6 _swap=False"
_register_loss(_takes, "... d!, ... d!, ... d! -> ...", torch.triplet_margin_loss)
_register_loss("input target", "n c!, n c! -> n", _n.multilabel_margin_loss)
_takes = "input target _p=1 _margin=1.0 weight=None"
_register_loss(_takes, "n c!, n, c! -> n", _n.multi_margin_loss)


# -- losses of a class -----------------------------------------------------------------------------


def _register_class_loss(more: str, split: Kernel, linear: str, *functions: Any) -> None:
    """Register losses over classes, such as cross-entropy.

    Args:
        more: the parameters after `reduction`.
        split: the decomposition for split classes, and for means over split probabilities. linear:
            "+ " if the loss is linear in its input, else "".
    """

    @rule_by_name(f"input target weight=None reduction=None {more}", *functions)
    def derive_class_loss(given: dict[str, Any]) -> str | Decomposition | None:
        input, target, weight, reduction = [*given.values()][:4]
        if reduction not in (NONE, MEAN, SUM):
            return None
        dim = 1 if input.ndim > 1 else 0
        if weight is not None and tuple(weight.shape) != (input.shape[dim],):
            raise ValueError(f"weights of shape {weight.shape} for {input.shape[dim]} classes")
        averaged = reduction == MEAN and (input.is_split() or target.is_split())
        probabilities = target.shape == input.shape
        if input.is_split(dim) or (averaged and probabilities):
            return Decomposition(split)
        if averaged:
            return Decomposition(decompositions.make_mean_loss(functions[0]))
        mark = "!" * (reduction == MEAN)
        names = [f"c{d}!" if d == dim else f"{n}{mark}" for d, n in enumerate(input.names)]
        samples = [n for d, n in enumerate(names) if d != dim]
        terms = [" ".join(names), " ".join(names if probabilities else samples)]
        terms += [names[dim]] * (weight is not None)
        out = " ".join(samples) if reduction == NONE else "sum"
        return f"{linear}{', '.join(terms)} -> {out}"


_more = "_ignore_index=-100 _label_smoothing=0.0"
_register_class_loss(_more, decompositions.cross_entropy, "", _n.cross_entropy_loss)
_nlls = (_n.nll_loss_nd, _n.nll_loss, _n.nll_loss2d)  # type: ignore[attr-defined]
_register_class_loss("_ignore_index=-100", decompositions.nll, "+ ", *_nlls)
