"""Which ops take a dimension together into one value?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .. import exceptions
from ..rule import Arg, Call, Rewrite, Said, rule
from .pointwise import keeps_sums

Dim = int | Sequence[int] | None


def _kept_whole(x: Arg, dim: Dim, keepdim: bool, outputs: int = 1) -> str:
    out = str(x.names.without(dim, keepdim))
    return f"{x.names.whole(dim)} -> {', '.join([out] * outputs)}"


# -- sums ------------------------------------------------------------------------------------------


@rule(torch.sum)
def sum_(input: Arg, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> str:
    if not keeps_sums(dtype):
        return f"{input.names} -> sum {input.names.without(dim, keepdim)}"
    return f"+ {input.names} -> {input.names.without(dim, keepdim)}"


@rule(torch.nansum)
def nansum(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return f"{input.names} -> sum {input.names.without(dim, keepdim)}"


@rule(torch.nanmean)
def nanmean(input: Arg, dim: Dim = None, keepdim: bool = False) -> str | Rewrite:
    def run(input: Any, dim: Dim = None, keepdim: bool = False, **more: Any) -> Any:
        count = (input == input).sum(dim, keepdim)
        return torch.nansum(input, dim, keepdim, **more) / count

    return Rewrite(run) if input.is_split(dim) else _kept_whole(input, dim, keepdim)


@rule(torch.count_nonzero)
def count_nonzero(input: Arg, dim: Dim = None) -> str:
    return f"{input.names} -> sum {input.names.without(dim)}"


@rule(torch.trace)
def trace(input: Arg) -> str:
    return "+ a! b! -> "


@rule(torch.mean)
def mean(input: Arg, dim: Dim = None, keepdim: bool = False) -> Said:
    names = input.names

    def local(call: Call) -> Any:
        cut = [call.pieces[names[d]] for d in names.dims(dim) if names[d] in call.pieces]
        if not cut:
            return None
        share = math.prod(length / size for _, length, size in cut)
        # The mean of no elements is nan, their sum is 0.
        return lambda *a, **k: torch.mean(*a, **k) * share if share else torch.sum(*a, **k)

    return Said(f"+ {names} -> {names.without(dim, keepdim)}", local)


@rule(torch.prod)
def prod(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return _kept_whole(input, dim, keepdim)


# -- the largest, the smallest ---------------------------------------------------------------------


def _extreme(input: Arg, dim: Dim, keepdim: bool, sign: int) -> str | Rewrite:
    """A pending maximum has no gradient; so only what needs none is left pending."""
    if not input.is_split(dim):
        return _kept_whole(input, dim, keepdim)
    return Rewrite(
        lambda input, dim=None, keepdim=False: exceptions.amax(input, dim, keepdim, sign)
    )


@rule(torch.amax)
def amax(input: Arg, dim: Dim = None, keepdim: bool = False) -> Any:
    return _extreme(input, dim, keepdim, 1)


@rule(torch.amin)
def amin(input: Arg, dim: Dim = None, keepdim: bool = False) -> Any:
    return _extreme(input, dim, keepdim, -1)


def _max_or_min(input: Arg, dim: Any, keepdim: bool, other: Any, sign: int) -> Any:
    if isinstance(dim, Arg) or other is not None:
        return "..., ... -> ..."
    if dim is None:
        return _extreme(input, None, False, sign)
    if input.is_split(dim):
        return Rewrite(lambda x, dim, keepdim=False: exceptions.max_dim(x, dim, keepdim, sign))
    return _kept_whole(input, dim, keepdim, 2)


@rule(torch.max)
def max_(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    return _max_or_min(input, dim, keepdim, other, 1)


@rule(torch.min)
def min_(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    return _max_or_min(input, dim, keepdim, other, -1)


def _arg_extreme(sign: int) -> Any:
    def derive(input: Arg, dim: int | None = None, keepdim: bool = False) -> str | Rewrite:
        if input.is_split(dim):
            return Rewrite(
                lambda input, dim=None, keepdim=False: exceptions.argmax(input, dim, keepdim, sign)
            )
        return _kept_whole(input, dim, keepdim)

    return derive


rule(torch.argmax)(_arg_extreme(1))
rule(torch.argmin)(_arg_extreme(-1))


@rule(torch.aminmax)
def aminmax(input: Arg, *, dim: int | None = None, keepdim: bool = False) -> str | Rewrite:
    def run(input: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
        both = (
            (torch.amin(input, dim, keepdim), torch.amax(input, dim, keepdim))
            if dim is not None
            else (torch.amin(input), torch.amax(input))
        )
        return torch.return_types.aminmax(both)

    return Rewrite(run) if input.is_split(dim) else _kept_whole(input, dim, keepdim, 2)


@rule(torch.any)
def any_(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return f"{input.names} -> max {input.names.without(dim, keepdim)}"


@rule(torch.all)
def all_(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return f"{input.names} -> min {input.names.without(dim, keepdim)}"


# -- order -----------------------------------------------------------------------------------------


@rule(torch.median, torch.nanmedian)
def median(input: Arg, dim: int | None = None, keepdim: bool = False) -> str:
    return _kept_whole(input, dim, keepdim, 1 if dim is None else 2)


@rule(torch.mode)
def mode(input: Arg, dim: int = -1, keepdim: bool = False) -> str:
    return _kept_whole(input, dim, keepdim, 2)


@rule(torch.kthvalue)
def kthvalue(input: Arg, _k: Any = None, dim: int = -1, keepdim: bool = False) -> str:
    return _kept_whole(input, dim, keepdim, 2)


@rule(torch.topk)
def topk(input: Arg, k: int, dim: int = -1) -> str:
    out = input.names.put(dim, f"z={k}!") if input.ndim else input.names
    return f"{input.names.whole(dim) if input.ndim else ''} -> {out}, {out}"


@rule(torch.sort)
def sort(input: Arg, dim: int = -1) -> str:
    names = input.names.whole(dim)
    return f"{names} -> {names}, {names}"


@rule(torch.msort)
def msort(input: Arg) -> str:
    return f"{input.names.whole(0)} -> {input.names.whole(0)}"


@rule(torch.argsort)
def argsort(input: Arg, dim: int = -1) -> str:
    return f"{input.names.whole(dim)} -> {input.names.whole(dim)}"


# -- along a dimension -----------------------------------------------------------------------------


@rule(torch.cumsum)
def cumsum(input: Arg, dim: int, *, dtype: Any = None) -> str:
    names = input.names.whole(dim)
    return f"{'+ ' * keeps_sums(dtype)}{names} -> {names}"


@rule(torch.cumprod, torch.logcumsumexp)
def cumprod(input: Arg, dim: int) -> str:
    return f"{input.names.whole(dim)} -> {input.names.whole(dim)}"


@rule(torch.cummax, torch.cummin)
def cummax(input: Arg, dim: int) -> str:
    names = input.names.whole(dim)
    return f"{names} -> {names}, {names}"


@rule(torch.diff)
def diff(input: Arg, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    if prepend is not None or append is not None:
        return None
    size = max(input.shape[input.names.at(dim)] - n, 0)
    return f"+ {input.names.whole(dim)} -> {input.names.put(dim, f'z={size}!')}"


@rule(torch.renorm)
def renorm(input: Arg, _p: Any = None, dim: int = 0) -> str:
    names = input.names
    rest = [d for d in range(input.ndim) if d != names.at(dim)]
    return f"{names.whole(rest) if rest else names} -> {names.whole(rest) if rest else names}"


# -- where the ranks must hear of each other first -------------------------------------------------


def _dim_kept(split: Any) -> Any:
    """`f(input, dim)`, whose dimension must be whole unless it is computed as `split`."""

    def derive(input: Arg, dim: int | None = None) -> str | Rewrite | None:
        if dim is None:
            return None
        if input.is_split(dim):
            return Rewrite(split)
        names = input.names.whole(dim)
        return f"{names} -> {names}"

    return derive


def _softmax(input: Any, dim: int, *rest: Any, dtype: Any = None, **_: Any) -> Any:
    return exceptions.softmax(input, dim, dtype or _dtype(rest))


def _log_softmax(input: Any, dim: int, *rest: Any, dtype: Any = None, **_: Any) -> Any:
    return exceptions.log_softmax(input, dim, dtype or _dtype(rest))


def _dtype(rest: Sequence[Any]) -> Any:
    return next((x for x in rest if isinstance(x, torch.dtype)), None)


rule(torch.softmax, torch.special.softmax, F.softmax)(_dim_kept(_softmax))
rule(torch.log_softmax, torch.special.log_softmax, F.log_softmax)(_dim_kept(_log_softmax))


@rule(torch.logsumexp, torch.special.logsumexp)
def logsumexp(input: Arg, dim: Dim, keepdim: bool = False) -> str | Rewrite:
    if input.is_split(dim):
        return Rewrite(exceptions.logsumexp)
    return _kept_whole(input, dim, keepdim)


def _spread(pick: Any, outputs: int) -> Any:
    """var, std and the like; `pick` takes what is asked for from (mean, variance)."""

    def run(
        input: Any,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: Any = None,
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        count = correction if correction is not None else int(unbiased)
        return pick(*exceptions.moments(input, dim, count, keepdim))

    def derive(
        input: Arg, dim: Any = None, _unbiased: bool = True, keepdim: bool = False
    ) -> str | Rewrite:
        dim = None if isinstance(dim, bool) else dim
        return Rewrite(run) if input.is_split(dim) else _kept_whole(input, dim, keepdim, outputs)

    return derive


rule(torch.var)(_spread(lambda mean, var: var, 1))
rule(torch.std)(_spread(lambda mean, var: var.sqrt(), 1))
rule(torch.var_mean)(_spread(lambda mean, var: (var, mean), 2))
rule(torch.std_mean)(_spread(lambda mean, var: (var.sqrt(), mean), 2))


@rule(torch.linalg.vector_norm)
def vector_norm(input: Arg, _ord: Any = 2, dim: Dim = None, keepdim: bool = False) -> str | Rewrite:
    if input.is_split(dim):
        return Rewrite(
            lambda x, ord=2, dim=None, keepdim=False, *, dtype=None: exceptions.vector_norm(
                x, ord, dim, keepdim, dtype
            )
        )
    return _kept_whole(input, dim, keepdim)


@rule(torch.dist)
def dist(input: Arg, other: Arg) -> Rewrite:
    return Rewrite(lambda x, y, p=2: torch.linalg.vector_norm(x - y, p))


@rule(torch.linalg.norm)
def linalg_norm(input: Arg, ord: Any = None, dim: Dim = None, keepdim: bool = False) -> Any:
    flat = ord is None or (
        input.ndim == 1 if dim is None else isinstance(dim, int) or len(dim) == 1
    )
    if not flat:
        return None  # a norm of matrices
    return Rewrite(
        lambda x, ord=None, dim=None, keepdim=False, *, dtype=None: torch.linalg.vector_norm(
            x, 2 if ord is None else ord, dim, keepdim, dtype=dtype
        )
    )


@rule(torch.norm, torch._C._VariableFunctions.norm)
def norm(
    input: Arg, p: Any = "fro", dim: Dim = None, keepdim: bool = False
) -> str | Rewrite | None:
    def run(
        input: Any,
        p: Any = "fro",
        dim: Dim = None,
        keepdim: bool = False,
        *,
        ord: Any = None,
        dtype: Any = None,
    ) -> Any:
        p = ord if ord is not None else p
        p = 2 if p in ("fro", None) else p
        return exceptions.vector_norm(input, p, dim, keepdim, dtype)

    if p == "nuc":
        return None
    return Rewrite(run) if input.is_split(dim) else _kept_whole(input, dim, keepdim)
