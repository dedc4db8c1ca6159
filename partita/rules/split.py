"""Simulated ranks: how is a value cut over ranks that are simulated, and put together again?

Pieces are of uneven size; shares are lopsided and of both signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partita.layout import Partial as Shares
from partita.layout import Placement, Shard, chunk

__all__ = ["cut", "joined", "same", "tolerance_of"]

SCALES = {2: ((3.7, 1.0), (-2.7, -1.0)), 3: ((3.7, 1.0), (-1.2, -2.0), (-1.5, 1.0))}
"""Share r of a value x over n ranks is a * x + b * noise of `SCALES[n][r]`; they add up to x."""
WHOLE_SCALES = {2: ((3, 1), (-2, -1)), 3: ((3, 1), (-1, -2), (-1, 1))}


def _split_into_partials(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    if x.dtype == torch.bool:
        return [x if r == n - 1 else torch.zeros_like(x) for r in range(n)]
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return [a * x + b * (noise + 0.5).to(x.dtype) for a, b in SCALES[n]]
    return [a * x + b * (noise * 5).to(x.dtype) for a, b in WHOLE_SCALES[n]]


def cut(x: Any, p: Placement | None, n: int) -> list[Any]:
    if p is None or not isinstance(x, torch.Tensor):
        return [x] * n
    if isinstance(p, Shard):
        return [x.narrow(p.dim, *chunk(x.shape[p.dim], n, r)) for r in range(n)]
    return _split_into_partials(x, n) if isinstance(p, Shares) else [x] * n


def joined(parts: Sequence[torch.Tensor], p: Placement) -> torch.Tensor:
    """The value; raises ValueError where ranks differ that should agree."""
    if isinstance(p, Shard):
        return torch.cat(list(parts), p.dim)
    if isinstance(p, Shares):
        stacked = torch.stack(list(parts))
        if p.reduce_op == "sum":
            return stacked.sum(0).to(parts[0].dtype)
        return stacked.amax(0) if p.reduce_op == "max" else stacked.amin(0)
    for part in parts[1:]:
        if not same(part, parts[0]):
            raise ValueError("ranks differ on a whole value")
    return parts[0]


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    near = max(tolerance, tolerance_of(a))
    return torch.allclose(a, b, near, near, equal_nan=True) if near else torch.equal(a, b)


def tolerance_of(x: torch.Tensor) -> float:
    """How far apart two roundings of shares may lie: 0 for integers."""
    exact = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return 0.0 if exact else max(1e-8, 8 * torch.finfo(x.dtype).eps)
