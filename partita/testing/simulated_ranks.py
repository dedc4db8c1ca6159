"""Simulated ranks: functions that split a value over ranks, and join it again, on one device.

Shards have uneven sizes. The addends of a Partial sum are unequal and of both signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from partita.layout import Partial as Shares
from partita.layout import Placement, Shard, chunk

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


def cut_for_ranks(x: Any, p: Placement | None, n: int) -> list[Any]:
    if p is None or not isinstance(x, torch.Tensor):
        return [x] * n
    if isinstance(p, Shard):
        return [x.narrow(p.dim, *chunk(x.shape[p.dim], n, r)) for r in range(n)]
    return _split_into_partials(x, n) if isinstance(p, Shares) else [x] * n


def join_ranks(parts: Sequence[torch.Tensor], p: Placement, terms: int = 1) -> torch.Tensor:
    """Joins the parts that simulated ranks hold, and returns the global value.

    Args:
        parts: each rank's part.
        p: the placement by which the value is distributed.
        terms: the number of terms of a sum that an element may be, as for `tolerance_of`.

    Raises:
        ValueError: ranks that must be equal differ.
    """
    if isinstance(p, Shard):
        return torch.cat(list(parts), p.dim)
    if isinstance(p, Shares):
        stacked = torch.stack(list(parts))
        if p.reduce_op == "sum":
            return stacked.sum(0).to(parts[0].dtype)
        return stacked.amax(0) if p.reduce_op == "max" else stacked.amin(0)
    for part in parts[1:]:
        reason = find_difference(part, parts[0], tolerance_of([part], parts, terms))
        if reason:
            raise ValueError(f"ranks differ on a whole value: {reason}")
    return parts[0]


def are_same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> bool:
    return not find_difference(a, b, max(tolerance, tolerance_of([a])))


def find_difference(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    """Returns a text that says how `found` differs from `wanted`; "" if it does not.

    Args:
        tolerance: the absolute tolerance. The relative one is the same, but at most the tolerance
            of `found`'s dtype (`tolerance_of`). Values that are not rounded, such as integers, get
            an absolute tolerance of 0.
    """
    for what in ("shape", "dtype"):
        if getattr(found, what) != getattr(wanted, what):
            return f"has the {what} {_text_of(found, what)} and not {_text_of(wanted, what)}"
    if torch.equal(found, wanted):
        return ""
    relative = min(tolerance, tolerance_of([found]))
    tolerance = tolerance if _is_rounded(found) else 0.0
    close = torch.isclose(found, wanted, relative, tolerance, equal_nan=True)
    if close.all():
        return ""
    precise = torch.complex128 if found.is_complex() else torch.float64
    apart = (found.to(precise) - wanted.to(precise)).abs()
    apart = apart.nan_to_num(math.inf, math.inf).masked_fill(close, -1.0)
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    place = f" at {at}" if at else ""
    values = f"{_format_number(found[at].item())} and not {_format_number(wanted[at].item())}"
    difference = f"differs most{place}: {values}, by {apart[at].item():.3g}"
    return f"{difference} ({tolerance:.1g} would be rounding)" if tolerance else difference


def _format_number(x: complex) -> str:
    return str(x) if isinstance(x, int) else f"{x:.7g}"


def _text_of(x: torch.Tensor, what: str) -> str:
    return str(tuple(x.shape)) if what == "shape" else str(x.dtype).removeprefix("torch.")


def tolerance_of(
    of: Iterable[torch.Tensor], parts: Iterable[torch.Tensor] = (), terms: int = 1
) -> float:
    """Returns the largest difference that rounding can explain; 0 if the computation is exact.

    Args:
        of: the operands; the least precise of their dtypes counts.
        parts: the shards or addends of the value. Their largest element scales the tolerance,
            because addends may be larger than their sum.
        terms: the number of terms of a sum that an element may be. Rounding errors grow with its
            square root, as in a random walk.
    """
    floating = [x.dtype for x in of if _is_rounded(x)]
    if not floating:
        return 0.0
    large = [x.detach().abs().to(torch.float64) for x in parts if _is_rounded(x)]
    largest = max([1.0, *(x[x.isfinite()].max().item() for x in large if x.isfinite().any())])
    eps = max(torch.finfo(dtype).eps for dtype in floating)
    return max(1e-8, 8 * eps * math.sqrt(max(1, terms)) * largest)


def _is_rounded(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex
