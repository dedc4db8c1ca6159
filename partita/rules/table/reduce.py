"""Reductions, sorts and scans: ops that take a dimension together, put it in order, or run along
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .. import decompositions
from ..rule import Arg, Decomposition, Kernel, KernelCall, KernelRule
from ..rule import table_rule as rule
from .pointwise import is_linear_cast

Dim = int | Sequence[int] | None


def whole_dim_sentence(x: Arg, dim: Dim, keepdim: bool, outputs: int = 1) -> str:
    """The sentence of an op that needs all of `dim` to reduce it."""
    out = str(x.names.without(dim, keepdim))
    return f"{x.names.whole(dim)} -> {', '.join([out] * outputs)}"


def _decompose_split(
    x: Arg, dim: Dim, keepdim: bool, run: Callable[..., Any], outputs: int = 1
) -> str | Decomposition:
    """`run`, in place of an op, where `dim` is split; else the sentence that has it whole."""
    if x.is_split(dim):
        return Decomposition(run)
    return whole_dim_sentence(x, dim, keepdim, outputs)


# -- sums ------------------------------------------------------------------------------------------


@rule(torch.sum)
def sum_(input: Arg, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> str:
    if not is_linear_cast(dtype):
        return f"{input.names} -> sum {input.names.without(dim, keepdim)}"
    return f"+ {input.names} -> {input.names.without(dim, keepdim)}"


@rule(torch.nansum)
def nansum(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return f"{input.names} -> sum {input.names.without(dim, keepdim)}"


@rule(torch.nanmean)
def nanmean(input: Arg, dim: Dim = None, keepdim: bool = False) -> str | Decomposition:
    def compute_nanmean(input: Any, dim: Dim = None, keepdim: bool = False, **more: Any) -> Any:
        count = (input == input).sum(dim, keepdim)
        return torch.nansum(input, dim, keepdim, **more) / count  # type: ignore[arg-type]

    return _decompose_split(input, dim, keepdim, compute_nanmean)


@rule(torch.count_nonzero)
def count_nonzero(input: Arg, dim: Dim = None) -> str:
    return f"{input.names} -> sum {input.names.without(dim)}"


@rule(torch.trace)
def trace(input: Arg) -> str:
    return "+ a! b! -> "


@rule(torch.mean)
def mean(input: Arg, dim: Dim = None, keepdim: bool = False) -> str | KernelRule:
    names = input.names
    if any(input.shape[d] == 0 for d in names.dims(dim)):
        return whole_dim_sentence(input, dim, keepdim)

    def make_mean_kernel(call: KernelCall) -> Kernel | None:
        cut = [call.pieces[names[d]] for d in names.dims(dim) if names[d] in call.pieces]
        if not cut:
            return None
        share = math.prod(length / size for _, length, size in cut)
        # The mean of no elements is nan, their sum is 0.
        return lambda *a, **k: call.run(*a, **k) * share if share else torch.sum(*a, **k)

    return KernelRule(f"+ {names} -> {names.without(dim, keepdim)}", make_mean_kernel)


@rule(torch.prod)
def prod(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return whole_dim_sentence(input, dim, keepdim)


# -- the largest, the smallest ---------------------------------------------------------------------


def _derive_extreme(input: Arg, dim: Dim, keepdim: bool, sign: int) -> str | Decomposition:
    """A pending maximum has no gradient; so only what needs none is left pending."""
    return _decompose_split(input, dim, keepdim, partial(decompositions.amax, sign=sign))


@rule(torch.amax)
def amax(input: Arg, dim: Dim = None, keepdim: bool = False) -> Any:
    return _derive_extreme(input, dim, keepdim, 1)


@rule(torch.amin)
def amin(input: Arg, dim: Dim = None, keepdim: bool = False) -> Any:
    return _derive_extreme(input, dim, keepdim, -1)


def _max_or_min(input: Arg, dim: Any, keepdim: bool, other: Any, sign: int) -> Any:
    if isinstance(dim, Arg) or other is not None:
        return "..., ... -> ..."
    if dim is None:
        return _derive_extreme(input, None, False, sign)
    return _decompose_split(input, dim, keepdim, partial(decompositions.max_dim, sign=sign), 2)


@rule(torch.max)
def max_(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    return _max_or_min(input, dim, keepdim, other, 1)


@rule(torch.min)
def min_(input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    return _max_or_min(input, dim, keepdim, other, -1)


@rule(torch.argmax)
def argmax(input: Arg, dim: int | None = None, keepdim: bool = False) -> Any:
    return _decompose_split(input, dim, keepdim, decompositions.argmax)


@rule(torch.argmin)
def argmin(input: Arg, dim: int | None = None, keepdim: bool = False) -> Any:
    return _decompose_split(input, dim, keepdim, partial(decompositions.argmax, sign=-1))


@rule(torch.aminmax)
def aminmax(input: Arg, *, dim: int | None = None, keepdim: bool = False) -> str | Decomposition:
    def compute_aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
        both = (
            (torch.amin(input, dim, keepdim), torch.amax(input, dim, keepdim))
            if dim is not None
            else (torch.amin(input), torch.amax(input))
        )
        return torch.return_types.aminmax(both)

    return _decompose_split(input, dim, keepdim, compute_aminmax, 2)


@rule(torch.any)
def any_(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return f"{input.names} -> max {input.names.without(dim, keepdim)}"


@rule(torch.all)
def all_(input: Arg, dim: Dim = None, keepdim: bool = False) -> str:
    return f"{input.names} -> min {input.names.without(dim, keepdim)}"


# -- moments and norms -----------------------------------------------------------------------------


@rule(torch.logsumexp, torch.special.logsumexp)
def logsumexp(input: Arg, dim: Dim, keepdim: bool = False) -> str | Decomposition:
    return _decompose_split(input, dim, keepdim, decompositions.logsumexp)


def _make_variance_rule(pick: Any, outputs: int) -> Any:
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
        return pick(*decompositions.moments(input, dim, count, keepdim))

    def derive(
        input: Arg, dim: Any = None, _unbiased: bool = True, keepdim: bool = False
    ) -> str | Decomposition:
        dim = None if isinstance(dim, bool) else dim
        return _decompose_split(input, dim, keepdim, run, outputs)

    return derive


rule(torch.var)(_make_variance_rule(lambda mean, var: var, 1))
rule(torch.std)(_make_variance_rule(lambda mean, var: decompositions.root_of(var), 1))
rule(torch.var_mean)(_make_variance_rule(lambda mean, var: (var, mean), 2))
rule(torch.std_mean)(_make_variance_rule(lambda mean, var: (decompositions.root_of(var), mean), 2))


@rule(torch.linalg.vector_norm)
def vector_norm(
    input: Arg, _ord: Any = 2, dim: Dim = None, keepdim: bool = False
) -> str | Decomposition:
    return _decompose_split(input, dim, keepdim, decompositions.vector_norm)


@rule(torch.linalg.norm)
def linalg_norm(input: Arg, ord: Any = None, dim: Dim = None, keepdim: bool = False) -> Any:
    flat = ord is None or (
        input.ndim == 1 if dim is None else isinstance(dim, int) or len(dim) == 1
    )
    if not flat:
        return None  # a norm of matrices
    return Decomposition(
        lambda x, ord=None, dim=None, keepdim=False, *, dtype=None: torch.linalg.vector_norm(
            x, 2 if ord is None else ord, dim, keepdim, dtype=dtype
        )
    )


@rule(torch.norm, torch._C._VariableFunctions.norm)  # type: ignore[attr-defined]
def norm(
    input: Arg, p: Any = "fro", dim: Dim = None, keepdim: bool = False
) -> str | Decomposition | None:
    def compute_norm(
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
        return decompositions.vector_norm(input, p, dim, keepdim, dtype)

    if p == "nuc":
        return None
    return _decompose_split(input, dim, keepdim, compute_norm)


# -- distances -------------------------------------------------------------------------------------


@rule(torch.dist)
def dist(input: Arg, other: Arg) -> Decomposition:
    return Decomposition(lambda x, y, p=2: torch.linalg.vector_norm(x - y, p))


@rule(F.cosine_similarity)
def cosine_similarity(x1: Arg, x2: Arg, dim: int = 1) -> str | None:
    if x1.shape != x2.shape:
        return None
    names = x1.names.whole(dim)
    return f"{names}, {names} -> {x1.names.without(dim)}"


@rule(F.pairwise_distance)
def pairwise_distance(
    x1: Arg, x2: Arg, _p: Any = 2.0, _eps: Any = 1e-6, keepdim: bool = False
) -> str:
    return f"... d!, ... d! -> ...{' 1' * keepdim}"


# -- order -----------------------------------------------------------------------------------------


@rule(torch.median, torch.nanmedian)
def median(input: Arg, dim: int | None = None, keepdim: bool = False) -> str:
    return whole_dim_sentence(input, dim, keepdim, 1 if dim is None else 2)


@rule(torch.mode)
def mode(input: Arg, dim: int = -1, keepdim: bool = False) -> str:
    return whole_dim_sentence(input, dim, keepdim, 2)


@rule(torch.kthvalue)
def kthvalue(input: Arg, _k: Any = None, dim: int = -1, keepdim: bool = False) -> str:
    return whole_dim_sentence(input, dim, keepdim, 2)


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
    return f"{'+ ' * is_linear_cast(dtype)}{names} -> {names}"


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
    # Linear, but not of bools, whose difference is an exclusive or: a rule knows no dtypes.
    return f"{input.names.whole(dim)} -> {input.names.put(dim, f'z={size}!')}"


@rule(torch.renorm)
def renorm(input: Arg, _p: Any = None, dim: int = 0) -> str:
    names = input.names
    rest = [d for d in range(input.ndim) if d != names.at(dim)]
    return f"{names.whole(rest) if rest else names} -> {names.whole(rest) if rest else names}"


@rule(F.glu)
def glu(input: Arg, dim: int = -1) -> str:
    n = input.shape[input.names.at(dim)] // 2
    return f"{input.names.whole(dim)} -> {input.names.put(dim, f'z={n}!')}"


def _dim_kept(split: Any) -> Any:
    """`f(input, dim)`, whose dimension must be whole unless it is computed as `split`."""

    def derive_dim_kept(input: Arg, dim: int | None = None) -> str | Decomposition | None:
        if dim is None:
            return None
        if input.is_split(dim):
            return Decomposition(split)
        names = input.names.whole(dim)
        return f"{names} -> {names}"

    return derive_dim_kept


def _run_softmax(input: Any, dim: int, *rest: Any, dtype: Any = None, **_: Any) -> Any:
    return decompositions.softmax(input, dim, dtype or _find_dtype(rest))


def _log_softmax(input: Any, dim: int, *rest: Any, dtype: Any = None, **_: Any) -> Any:
    return decompositions.log_softmax(input, dim, dtype or _find_dtype(rest))


def _find_dtype(rest: Sequence[Any]) -> Any:
    return next((x for x in rest if isinstance(x, torch.dtype)), None)


rule(torch.softmax, torch.special.softmax, F.softmax)(_dim_kept(_run_softmax))
rule(torch.log_softmax, torch.special.log_softmax, F.log_softmax)(_dim_kept(_log_softmax))
