"""Partial operands: a value that several ops use is reduced once, before the first of them."""

from __future__ import annotations

from typing import Any

import torch

from ..rule import Arg, own_op
from ..rule import table_rule as rule
from ..sentence import Names

__all__ = ["reduced", "subtract_reduced", "widen"]


@own_op
def reduced(x: torch.Tensor) -> torch.Tensor:
    """`x`, of which nothing is partial: for a value that is used more than once."""
    return x.view_as(x)


@rule(reduced)
def _reduced_sentence(x: Arg) -> str:
    # A dimension that is whole stays whole: what x meets next may be split along another one.
    names = Names(n if x.is_split(d) else f"{n}!" for d, n in enumerate(x.names))
    return f"{names} -> {names}"


@own_op
def subtract_reduced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x - y where y is small: y is reduced first, and x does not become partial to meet it."""
    return x - y


rule("..., ... -> ...", subtract_reduced)


def widen(x: Any) -> Any:
    """`x` in float32 or wider, in which torch's own kernels compute, too."""
    narrow = x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)
    return x.float() if narrow else x
