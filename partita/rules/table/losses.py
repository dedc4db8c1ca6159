"""Which losses are sums over samples, and what is a mean of them divided by?

A mean over a split batch is the sum of all losses over the number of all elements: the local
kernels here know that number, so the result is a share of the mean.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .. import exceptions
from ..rule import Arg, Call, Rewrite, Said, rule

NONE, MEAN, SUM = 0, 1, 2


def _reduction(given: Any) -> int | None:
    """The number that torch's builtins take.

    None for what only one loss knows ("batchmean"), and where it is not given (the builtins have
    another default in Python than in C++).
    """
    return given if isinstance(given, int) else {"none": 0, "mean": 1, "sum": 2}.get(given)


def _summed(run: Callable[..., Any], at: int, count: int) -> Callable[..., Any]:
    """`run`, whose argument number `at` is `reduction`, as a part of the mean of `count`."""
    total = "sum" if inspect.isfunction(run) else SUM  # torch's builtins take the number

    def local(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], total, *args[at + 1 :])
        else:
            kwargs["reduction"] = total
        return run(*args, **kwargs) / count

    return local


def _said(
    run: Callable[..., Any], at: int, terms: str, out: str, reduction: Any, count: int
) -> Said | str | None:
    """`terms` are what the loss is computed from, `out` its names when it is not reduced."""
    code = _reduction(reduction)
    if code is None:
        return None
    if code == NONE:
        return f"{terms} -> {out}"

    def local(call: Call) -> Callable[..., Any] | None:
        return _summed(run, at, max(count, 1)) if call.pieces and count else None

    return Said(f"{terms} -> sum", local if code == MEAN else None)


def _elements(*tensors: Any) -> int:
    return math.prod(torch.broadcast_shapes(*(t.shape for t in tensors if isinstance(t, Arg))))


def _terms(*tensors: Any) -> str:
    return ", ".join("..." for t in tensors if isinstance(t, Arg))


# -- losses of each element ------------------------------------------------------------------------


def _elementwise(run: Callable[..., Any]) -> None:
    """F.f(input, target, size_average, reduce, reduction, weight)."""

    def derive(
        input: Arg,
        target: Arg,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        weight: Any = None,
    ) -> Any:
        if size_average is not None or reduce is not None or weight is not None:
            return None
        n = _elements(input, target)
        return _said(run, 4, "..., ...", "...", reduction, n)

    rule(run)(derive)


def _elementwise_builtin(run: Callable[..., Any]) -> None:
    """torch._C._nn.f(input, target, reduction)."""

    def derive(input: Arg, target: Arg, reduction: int | None = None) -> Any:
        return _said(run, 2, "..., ...", "...", reduction, _elements(input, target))

    rule(run)(derive)


for _f in (F.mse_loss, F.l1_loss, F.soft_margin_loss):
    _elementwise(_f)
for _name in ("mse_loss", "l1_loss", "soft_margin_loss", "huber_loss", "smooth_l1_loss"):
    if hasattr(torch._C._nn, _name):
        _elementwise_builtin(getattr(torch._C._nn, _name))


@rule(F.smooth_l1_loss)
def smooth_l1_loss(
    input: Arg,
    target: Arg,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    return _said(F.smooth_l1_loss, 4, "..., ...", "...", reduction, _elements(input, target))


@rule(F.huber_loss)
def huber_loss(
    input: Arg, target: Arg, reduction: str = "mean", _delta: Any = 1.0, weight: Any = None
) -> Any:
    if weight is not None:
        return None
    return _said(F.huber_loss, 2, "..., ...", "...", reduction, _elements(input, target))


@rule(F.binary_cross_entropy)
def binary_cross_entropy(
    input: Arg,
    target: Arg,
    weight: Any = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    terms = _terms(input, target, weight)
    return _said(F.binary_cross_entropy, 5, terms, "...", reduction, _elements(input, target))


@rule(torch._C._nn.binary_cross_entropy)
def binary_cross_entropy_builtin(
    input: Arg, target: Arg, weight: Any = None, reduction: int | None = None
) -> Any:
    run, terms = torch._C._nn.binary_cross_entropy, _terms(input, target, weight)
    return _said(run, 3, terms, "...", reduction, _elements(input, target))


@rule(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Arg,
    target: Arg,
    weight: Any = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    run, terms = F.binary_cross_entropy_with_logits, _terms(input, target, weight, pos_weight)
    return _said(run, 5, terms, "...", reduction, _elements(input, target, weight, pos_weight))


@rule(torch.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits_builtin(
    input: Arg, target: Arg, weight: Any = None, pos_weight: Any = None, reduction: int | None = None
) -> Any:
    run = torch.binary_cross_entropy_with_logits
    terms = _terms(input, target, weight, pos_weight)
    return _said(run, 4, terms, "...", reduction, _elements(input, target, weight, pos_weight))


@rule(F.kl_div)
def kl_div(
    input: Arg,
    target: Arg,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    if reduction == "batchmean" and input.ndim:
        size = input.shape[0]
        return Said(
            "..., ... -> sum",
            lambda call: _summed(F.kl_div, 4, size) if call.pieces and size else None,
        )
    return _said(F.kl_div, 4, "..., ...", "...", reduction, _elements(input, target))


@rule(torch.kl_div)
def kl_div_builtin(input: Arg, target: Arg, reduction: int | None = None) -> Any:
    return _said(torch.kl_div, 2, "..., ...", "...", reduction, _elements(input, target))


@rule(torch.poisson_nll_loss)
def poisson_nll_loss(
    input: Arg, target: Arg, log_input: bool, full: bool, _eps: Any, reduction: int
) -> Any:
    return _said(torch.poisson_nll_loss, 5, "..., ...", "...", reduction, _elements(input, target))


@rule(F.poisson_nll_loss)
def poisson_nll_loss_of_f(
    input: Arg,
    target: Arg,
    log_input: bool = True,
    full: bool = False,
    size_average: bool | None = None,
    _eps: Any = 1e-8,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    return _said(F.poisson_nll_loss, 7, "..., ...", "...", reduction, _elements(input, target))


# -- losses of each sample -------------------------------------------------------------------------


@rule(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: Arg,
    input2: Arg,
    target: Arg,
    _margin: Any = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    n = _elements(input1, input2, target)
    return _said(F.margin_ranking_loss, 6, "..., ..., ...", "...", reduction, n)


@rule(F.hinge_embedding_loss)
def hinge_embedding_loss(
    input: Arg,
    target: Arg,
    _margin: Any = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    return _said(F.hinge_embedding_loss, 5, "..., ...", "...", reduction, _elements(input, target))


@rule(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Arg,
    input2: Arg,
    target: Arg,
    _margin: Any = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or target.ndim != 1:
        return None
    n = target.shape[0]
    return _said(F.cosine_embedding_loss, 6, "n d!, n d!, n", "n", reduction, n)


@rule(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Arg,
    positive: Arg,
    negative: Arg,
    _margin: Any = 1.0,
    _p: Any = 2,
    _eps: Any = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        return None
    if not anchor.shape == positive.shape == negative.shape:
        return None
    n = math.prod(anchor.shape[:-1])
    terms = "... d!, ... d!, ... d!"
    return _said(F.triplet_margin_loss, 9, terms, "...", reduction, n)


@rule(F.multilabel_margin_loss)
def multilabel_margin_loss(
    input: Arg,
    target: Arg,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or input.ndim != 2:
        return None
    n = input.shape[0]
    return _said(F.multilabel_margin_loss, 4, "n c!, n c!", "n", reduction, n)


@rule(F.multi_margin_loss)
def multi_margin_loss(
    input: Arg,
    target: Arg,
    _p: Any = 1,
    _margin: Any = 1.0,
    weight: Any = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or input.ndim != 2:
        return None
    terms = "n c!, n" + ", c!" * (weight is not None)
    return _said(F.multi_margin_loss, 7, terms, "n", reduction, input.shape[0])


# -- losses of a class -----------------------------------------------------------------------------


def _of_classes(
    input: Arg, target: Arg, weight: Any, reduction: int | None, run: Callable[..., Any]
) -> str | Rewrite | None:
    """A sentence where no rank's help is needed: nothing is split, or nothing is averaged."""
    if reduction is None:
        return None
    dim = 1 if input.ndim > 1 else 0
    split = input.is_split() or target.is_split()
    if input.is_split(dim) or (split and reduction == MEAN):
        return Rewrite(run)
    mark = "!" * (reduction == MEAN)
    names = [f"c{d}!" if d == dim else f"{n}{mark}" for d, n in enumerate(input.names)]
    samples = [n for d, n in enumerate(names) if d != dim]
    mine = names if target.shape == input.shape else samples
    terms = [" ".join(names), " ".join(mine)]
    if weight is not None:
        terms.append(names[dim])
    out = " ".join(samples) if reduction == NONE else "sum"
    return f"{', '.join(terms)} -> {out}"


@rule(torch._C._nn.cross_entropy_loss)
def cross_entropy_loss(
    input: Arg,
    target: Arg,
    weight: Any = None,
    reduction: int | None = None,
    ignore_index: int = -100,
    _label_smoothing: Any = 0.0,
) -> str | Rewrite | None:
    def run(
        input: Any,
        target: Any,
        weight: Any = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        return exceptions.cross_entropy(
            input, target, weight, reduction, ignore_index, label_smoothing
        )

    return _of_classes(input, target, weight, reduction, run)


def _nll(
    input: Any,
    target: Any,
    weight: Any = None,
    reduction: int | None = None,
    ignore_index: int = -100,
) -> Any:
    return exceptions.nll(input, target, weight, reduction, ignore_index)


@rule(torch._C._nn.nll_loss_nd, torch._C._nn.nll_loss, torch._C._nn.nll_loss2d)
def nll_loss_nd(
    input: Arg,
    target: Arg,
    weight: Any = None,
    reduction: int | None = None,
    ignore_index: int = -100,
) -> str | Rewrite | None:
    return _of_classes(input, target, weight, reduction, _nll)


@rule(F.nll_loss)
def nll_loss(input: Arg, target: Arg, weight: Any = None) -> Rewrite:
    # The builtin behind it has the same name and other arguments.
    def run(
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
    ) -> Any:
        if size_average is not None or reduce is not None:
            reduction = F._Reduction.legacy_get_string(size_average, reduce)
        code = F._Reduction.get_enum(reduction)
        return torch._C._nn.nll_loss_nd(input, target, weight, code, ignore_index)

    return Rewrite(run)
