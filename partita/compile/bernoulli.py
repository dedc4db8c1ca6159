"""Bernoulli draws of a graph: an op that fills memory in the order in which eager fills it.

Eager draws a mask into memory that lies as the tensor's does: number by number as they lie, not as
they are counted. What torch has for it without a write draws into contiguous memory.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["draw_in_place"]

_aten = torch.ops.aten
_library = torch.library.Library("partita", "FRAGMENT")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)


def _shape(like: torch.Tensor, p: float) -> torch.Tensor:
    """Memory without gaps, in the order of `like`."""
    order = sorted(range(like.dim()), key=lambda d: -like.stride(d))
    return torch.empty_permuted(like.shape, order, dtype=like.dtype, device=like.device)


def _draw(like: torch.Tensor, p: float) -> torch.Tensor:
    """Ones with probability `p`, else zeros, in memory that lies as that of `like`."""
    return _shape(like, p).bernoulli_(p)


_library.define("bernoulli_like(Tensor like, float p) -> Tensor", tags=_TAGS)
_library.impl("bernoulli_like", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("partita::bernoulli_like", _shape, lib=_library)


def draw_in_place(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """`func(*args, **kwargs)`; None if a graph without writes draws it in eager's order anyway."""
    if func is not _aten.bernoulli_.float or args[0].is_contiguous() or kwargs:
        return None
    x, *p = args
    found: torch.Tensor = x.copy_(torch.ops.partita.bernoulli_like(x, *(p or (0.5,))))
    return found
