"""Which losses are sums over samples, and what is a mean of them divided by?

A mean over a split batch is the sum of all losses over the number of all elements: the local
kernels here know that number, so the result is a share of the mean. The functions of
torch.nn.functional are entered; what is here are the builtins behind them, whose `reduction` is
0 (none), 1 (mean) or 2 (sum). Where it is not given there is no rule: builtins have another default
in Python than in C++.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import exceptions
from ..rule import Arg, Call, Rewrite, Said, rule

NONE, MEAN, SUM = 0, 1, 2


def _said(
    run: Callable[..., Any], at: int, terms: str, out: str, reduction: Any, count: int
) -> Said | str | None:
    """The rule of a loss.

    Args:
        at: which argument `reduction` is.
        terms: what the loss is computed from.
        out: its names when it is not reduced.
        count: what a mean is divided by.
    """
    if reduction not in (NONE, MEAN, SUM):
        return None
    if reduction == NONE:
        return f"{terms} -> {out}"

    def local(call: Call) -> Callable[..., Any] | None:
        def share(*args: Any, **kwargs: Any) -> Any:
            if len(args) > at:
                args = (*args[:at], SUM, *args[at + 1 :])
            else:
                kwargs["reduction"] = SUM
            return run(*args, **kwargs) / count

        return share if reduction == MEAN and call.pieces and count else None

    return Said(f"{terms} -> sum", local)


def _elementwise(run: Callable[..., Any], tensors: int, at: int) -> None:
    """The rule of a loss of each element of its first `tensors` arguments, broadcast."""

    def said(given: tuple[Any, ...], reduction: Any) -> Said | str | None:
        args = [x for x in given[:tensors] if isinstance(x, Arg)]
        count = math.prod(torch.broadcast_shapes(*(x.shape for x in args)))
        return _said(run, at, ", ".join("..." for _ in args), "...", reduction, count)

    def two(input: Arg, target: Arg, reduction: Any = None) -> Any:
        return said((input, target), reduction)

    def two_margin(input: Arg, target: Arg, _margin: Any = 1.0, reduction: Any = None) -> Any:
        return said((input, target), reduction)

    def three(input: Arg, target: Arg, weight: Any = None, reduction: Any = None) -> Any:
        return said((input, target, weight), reduction)

    def four(
        input: Arg, target: Arg, weight: Any = None, pos_weight: Any = None, reduction: Any = None
    ) -> Any:
        return said((input, target, weight, pos_weight), reduction)

    rule(run)({(2, 2): two, (2, 3): two_margin, (3, 3): three, (4, 4): four}[tensors, at])


for _name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
    _elementwise(getattr(torch._C._nn, _name), 2, 2)
_elementwise(torch.kl_div, 2, 2)
_elementwise(torch.hinge_embedding_loss, 2, 3)
_elementwise(torch._C._nn.binary_cross_entropy, 3, 3)
_elementwise(torch.binary_cross_entropy_with_logits, 4, 4)


@rule(torch.poisson_nll_loss)
def poisson_nll_loss(
    input: Arg,
    target: Arg,
    _log_input: Any = None,
    _full: Any = None,
    _eps: Any = None,
    reduction: Any = None,
) -> Any:
    count = math.prod(torch.broadcast_shapes(input.shape, target.shape))
    return _said(torch.poisson_nll_loss, 5, "..., ...", "...", reduction, count)


@rule(torch.margin_ranking_loss)
def margin_ranking_loss(
    input1: Arg, input2: Arg, target: Arg, _margin: Any = 0, reduction: Any = None
) -> Any:
    count = math.prod(torch.broadcast_shapes(input1.shape, input2.shape, target.shape))
    return _said(torch.margin_ranking_loss, 4, "..., ..., ...", "...", reduction, count)


# -- losses of each sample -------------------------------------------------------------------------


@rule(torch.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Arg, input2: Arg, target: Arg, _margin: Any = 0, reduction: Any = None
) -> Any:
    if target.ndim != 1 or input1.shape != input2.shape:
        return None
    run, count = torch.cosine_embedding_loss, target.shape[0]
    return _said(run, 4, "n d!, n d!, n", "n", reduction, count)


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
    run, count = torch.triplet_margin_loss, math.prod(anchor.shape[:-1])
    return _said(run, 7, "... d!, ... d!, ... d!", "...", reduction, count)


@rule(torch._C._nn.multilabel_margin_loss)
def multilabel_margin_loss(input: Arg, target: Arg, reduction: Any = None) -> Any:
    if input.ndim != 2:
        return None
    run, count = torch._C._nn.multilabel_margin_loss, input.shape[0]
    return _said(run, 2, "n c!, n c!", "n", reduction, count)


@rule(torch._C._nn.multi_margin_loss)
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
    run, count = torch._C._nn.multi_margin_loss, input.shape[0]
    return _said(run, 5, terms, "n", reduction, count)


# -- losses of a class -----------------------------------------------------------------------------


def _of_classes(
    input: Arg, target: Arg, weight: Any, reduction: Any, run: Callable[..., Any], linear: str
) -> str | Rewrite | None:
    """A sentence where no rank's help is needed: nothing is split, or nothing is averaged."""
    if reduction not in (NONE, MEAN, SUM):
        return None
    dim = 1 if input.ndim > 1 else 0
    split = input.is_split() or target.is_split()
    if input.is_split(dim) or (split and reduction == MEAN):
        return Rewrite(run)
    mark = "!" * (reduction == MEAN)
    names = [f"c{d}!" if d == dim else f"{n}{mark}" for d, n in enumerate(input.names)]
    samples = [n for d, n in enumerate(names) if d != dim]
    terms = [" ".join(names), " ".join(names if target.shape == input.shape else samples)]
    if weight is not None:
        terms.append(names[dim])
    out = " ".join(samples) if reduction == NONE else "sum"
    return f"{linear}{', '.join(terms)} -> {out}"


@rule(torch._C._nn.cross_entropy_loss)
def cross_entropy_loss(
    input: Arg,
    target: Arg,
    weight: Any = None,
    reduction: Any = None,
    _ignore_index: int = -100,
    _label_smoothing: Any = 0.0,
) -> str | Rewrite | None:
    return _of_classes(input, target, weight, reduction, exceptions.cross_entropy, "")


@rule(torch._C._nn.nll_loss_nd, torch._C._nn.nll_loss, torch._C._nn.nll_loss2d)
def nll_loss_nd(
    input: Arg,
    target: Arg,
    weight: Any = None,
    reduction: Any = None,
    _ignore_index: int = -100,
) -> str | Rewrite | None:
    return _of_classes(input, target, weight, reduction, exceptions.nll, "+ ")
