"""Rules of reductions, sorts and scans along a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .. import decompositions
from ..rule import Arg, Decomposition, Kernel, KernelCall, KernelRule, decomposed, dim_rule
from ..rule import builtin_rule as rule
from .pointwise import is_linear_cast

Dim = int | Sequence[int] | None
_DIMS, _ONE_DIM = "input dim=None keepdim=False", "input dim=-1"
"""The parameters of most of these functions."""
_REDUCED, _REDUCED_TO_TWO = "{whole} -> {left}", "{whole} -> {left}, {left}"
_ALONG, _ALONG_IN_TWO = "{whole} -> {whole}", "{whole} -> {whole}, {whole}"


def _sentence_of_whole(x: Arg, dim: Dim, keepdim: bool) -> str:
    """Returns the sentence of an op that needs all of `dim` to reduce it."""
    return f"{x.names.whole(dim)} -> {x.names.without(dim, keepdim)}"


# -- sums ------------------------------------------------------------------------------------------


@rule(torch.sum)
def sum_(input: Arg, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> str:
    if not is_linear_cast(dtype):
        return f"{input.names} -> sum {input.names.without(dim, keepdim)}"
    return f"+ {input.names} -> {input.names.without(dim, keepdim)}"


def _compute_nanmean(input: Any, dim: Dim = None, keepdim: bool = False, **more: Any) -> Any:
    count = (input == input).sum(dim, keepdim)
    return torch.nansum(input, dim, keepdim, **more) / count  # type: ignore[arg-type]


dim_rule(_DIMS, "{x} -> sum {left}", torch.nansum)
dim_rule("input dim=None", "{x} -> sum {left}", torch.count_nonzero)
dim_rule(_DIMS, _REDUCED, torch.nanmean, split=_compute_nanmean)
dim_rule(_DIMS, _REDUCED, torch.prod)
rule("+ a! b! -> ", torch.trace)


@rule(torch.mean)
def mean(input: Arg, dim: Dim = None, keepdim: bool = False) -> str | KernelRule:
    names = input.names
    if any(input.shape[d] == 0 for d in names.dims(dim)):
        return _sentence_of_whole(input, dim, keepdim)

    def make_mean_kernel(call: KernelCall) -> Kernel | None:
        cut = [call.pieces[names[d]] for d in names.dims(dim) if names[d] in call.pieces]
        if not cut:
            return None
        share = math.prod(length / size for _, length, size in cut)
        # The mean of no elements is nan, their sum is 0.
        return lambda *a, **k: call.run(*a, **k) * share if share else torch.sum(*a, **k)

    return KernelRule(f"+ {names} -> {names.without(dim, keepdim)}", make_mean_kernel)


# -- the largest, the smallest ---------------------------------------------------------------------
# A Partial max has no gradient, so the result may be Partial only if it needs none.


def _derive_max_or_min(sign: int) -> Callable[..., str | Decomposition]:
    def derive_max_or_min(
        input: Arg, dim: Any = None, keepdim: bool = False, *, other: Any = None
    ) -> str | Decomposition:
        if isinstance(dim, Arg) or other is not None:
            return "..., ... -> ..."
        if input.is_split(dim):
            run = decompositions.amax if dim is None else decompositions.max_dim
            return Decomposition(partial(run, sign=sign))
        text = _sentence_of_whole(input, dim, keepdim)
        return text if dim is None else f"{text}, {input.names.without(dim, keepdim)}"

    return derive_max_or_min


rule(torch.max)(_derive_max_or_min(1))
rule(torch.min)(_derive_max_or_min(-1))


def _compute_aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = () if dim is None else dim
    both = torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim)
    return torch.return_types.aminmax(both)


_least_of, _least_at = (partial(f, sign=-1) for f in (decompositions.amax, decompositions.argmax))
dim_rule(_DIMS, _REDUCED, torch.amax, split=decompositions.amax)
dim_rule(_DIMS, _REDUCED, torch.amin, split=_least_of)
dim_rule(_DIMS, _REDUCED, torch.argmax, split=decompositions.argmax)
dim_rule(_DIMS, _REDUCED, torch.argmin, split=_least_at)
dim_rule(_DIMS, _REDUCED_TO_TWO, torch.aminmax, split=_compute_aminmax)
dim_rule(_DIMS, "{x} -> max {left}", torch.any)
dim_rule(_DIMS, "{x} -> min {left}", torch.all)

# -- moments and norms -----------------------------------------------------------------------------


def _make_moments_kernel(pick: Callable[[Any, Any], Any]) -> Kernel:
    """Returns a kernel of var and similar ops; `pick` selects from (mean, variance)."""

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

    return run


_takes = "input dim=None _unbiased=True keepdim=False"
for _function, _pick in {
    torch.var: lambda mean, var: var,
    torch.std: lambda mean, var: decompositions.root_of(var),
    torch.var_mean: lambda mean, var: (var, mean),
    torch.std_mean: lambda mean, var: (decompositions.root_of(var), mean),
}.items():
    _text = _REDUCED if _function in (torch.var, torch.std) else _REDUCED_TO_TWO
    dim_rule(_takes, _text, _function, split=_make_moments_kernel(_pick))

_takes = "input _ord=2 dim=None keepdim=False"
dim_rule(_takes, _REDUCED, torch.linalg.vector_norm, split=decompositions.vector_norm)
_logsumexps = (torch.logsumexp, torch.special.logsumexp)
dim_rule("input dim keepdim=False", _REDUCED, *_logsumexps, split=decompositions.logsumexp)


@rule(torch.linalg.norm)
def linalg_norm(input: Arg, ord: Any = None, dim: Dim = None, keepdim: bool = False) -> Any:
    count = 1 if isinstance(dim, int) else input.ndim if dim is None else len(dim)
    if ord is not None and count != 1:
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
    if input.is_split(dim):
        return Decomposition(compute_norm)
    return _sentence_of_whole(input, dim, keepdim)


# -- distances -------------------------------------------------------------------------------------


@decomposed("input other", torch.dist)
def dist(x: Any, y: Any, p: Any = 2) -> Any:
    return torch.linalg.vector_norm(x - y, p)


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
    text = _sentence_of_whole(input, dim, keepdim)
    return text if dim is None else f"{text}, {input.names.without(dim, keepdim)}"


dim_rule("input dim=-1 keepdim=False", _REDUCED_TO_TWO, torch.mode)
dim_rule("input _k=None dim=-1 keepdim=False", _REDUCED_TO_TWO, torch.kthvalue)
dim_rule(_ONE_DIM, _ALONG_IN_TWO, torch.sort)
dim_rule(_ONE_DIM, _ALONG, torch.argsort)
dim_rule("input dim=0", _ALONG, torch.msort)


@rule(torch.topk)
def topk(input: Arg, k: int, dim: int = -1) -> str:
    out = input.names.put(dim, f"z={k}!") if input.ndim else input.names
    return f"{input.names.whole(dim) if input.ndim else ''} -> {out}, {out}"


# -- along a dimension -----------------------------------------------------------------------------

dim_rule("input dim", _ALONG, torch.cumprod, torch.logcumsumexp)
dim_rule("input dim", _ALONG_IN_TWO, torch.cummax, torch.cummin)


@rule(torch.cumsum)
def cumsum(input: Arg, dim: int, *, dtype: Any = None) -> str:
    names = input.names.whole(dim)
    return f"{'+ ' * is_linear_cast(dtype)}{names} -> {names}"


@rule(torch.diff)
def diff(input: Arg, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    if prepend is not None or append is not None:
        return None
    size = max(input.shape[input.names.at(dim)] - n, 0)
    # It is linear, except for bools (their difference is an exclusive or). A rule gets no dtypes.
    return f"{input.names.whole(dim)} -> {input.names.put(dim, f'z={size}!')}"


@rule(torch.renorm)
def renorm(input: Arg, _p: Any = None, dim: int = 0) -> str:
    rest = [d for d in range(input.ndim) if d != input.names.at(dim)]
    names = input.names.whole(rest) if rest else input.names
    return f"{names} -> {names}"


@rule(F.glu)
def glu(input: Arg, dim: int = -1) -> str:
    n = input.shape[input.names.at(dim)] // 2
    return f"{input.names.whole(dim)} -> {input.names.put(dim, f'z={n}!')}"


def _register_softmax(split: Kernel, *functions: Any) -> None:
    """Register `f(input, dim)`; the function `split` computes it if the dimension is split."""

    def compute_softmax(input: Any, dim: int, *rest: Any, dtype: Any = None, **_: Any) -> Any:
        named = (x for x in rest if isinstance(x, torch.dtype))
        return split(input, dim, dtype or next(named, None))

    @rule(*functions)
    def derive_softmax(input: Arg, dim: int | None = None) -> str | Decomposition | None:
        if dim is None:
            return None
        if input.is_split(dim):
            return Decomposition(compute_softmax)
        return f"{input.names.whole(dim)} -> {input.names.whole(dim)}"


_register_softmax(decompositions.softmax, torch.softmax, torch.special.softmax, F.softmax)
_logs = (torch.log_softmax, torch.special.log_softmax, F.log_softmax)
_register_softmax(decompositions.log_softmax, *_logs)
