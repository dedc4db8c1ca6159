"""Maxima and minima along a split dimension, and their places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..rule import Arg, Kernel, KernelCall, KernelRule, own_op
from ..rule import table_rule as rule
from ..sentence import Names
from .partial_operands import reduced

__all__ = ["amax", "argmax", "first_index", "is_at_place", "max_dim", "partial_max"]

Dim = int | Sequence[int] | None


@own_op
def partial_max(x: torch.Tensor, dim: Dim, keepdim: bool, sign: int = 1) -> torch.Tensor:
    """The maximum (`sign` -1: minimum) of this rank's piece, without gradient."""
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
    """The first place along `dim` (kept; None: in the flattened tensor) where `x` is `best`."""
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
    """For each element of `x`: is `at` (of size 1 along `dim`) its place along `dim`?"""
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
    """Maximum or minimum; equal elements share the gradient equally, as in torch.amax."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return partial_max(x, dim, keepdim, sign)
    dims = Names.of(x.ndim).dims(dim)
    hit = x.detach() == partial_max(x, dims, True, sign)
    total = x.masked_fill(~hit, 0).sum(dims, keepdim)
    return total / reduced(hit.sum(dims, keepdim))


def argmax(x: Any, dim: int | None = None, keepdim: bool = False, sign: int = 1) -> Any:
    """Where the maximum is: the first place, of equals."""
    best = partial_max(x, dim, True, sign)
    at = first_index(x.detach(), best, dim)
    return at if keepdim else reduced(at).squeeze(Names.of(x.ndim).dims(dim))


def max_dim(x: Any, dim: int, keepdim: bool = False, sign: int = 1) -> Any:
    """The maximum along `dim` and where it is; its gradient goes to that one place."""
    at = reduced(argmax(x, dim, True, sign))
    if x.requires_grad and torch.is_grad_enabled():
        # gather would save x, which torch.max does not: x may be written afterwards.
        values = x.masked_fill(~is_at_place(x.detach(), at, dim), 0).sum(dim, keepdim=True)
    else:
        values = torch.gather(x, dim, at)
    kind = torch.return_types.max if sign > 0 else torch.return_types.min
    return kind((values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim)))
