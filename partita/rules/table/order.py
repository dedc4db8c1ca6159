"""Sorts and scans: ops that put a dimension in order, or run along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .. import decompositions
from ..rule import Arg, Decomposition
from ..rule import table_rule as rule
from .pointwise import is_linear_cast
from .reduce import whole_dim_sentence

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
