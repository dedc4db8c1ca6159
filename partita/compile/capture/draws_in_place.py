"""Draws in place in a graph without writes: memory is filled in the order in which eager fills it.

Eager draws into memory number by number as they lie, not as they are counted. What torch has for a
mask without a write draws into contiguous memory; and what it has for the other numbers says of
memory with gaps, as a slice has, that what it makes has them too, which Inductor finds it has not.
"""

from __future__ import annotations

from typing import Any

import torch

from partita.tensor.op_facts import facts_of

__all__ = ["draw_in_place"]

_aten = torch.ops.aten
_library = torch.library.Library("partita", "FRAGMENT")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)


def _without_gaps(like: torch.Tensor) -> torch.Tensor:
    """Memory without gaps, in the order of `like`."""
    order = sorted(range(like.dim()), key=lambda d: -like.stride(d))  # type: ignore[operator]
    return torch.empty_permuted(like.shape, order, dtype=like.dtype, device=like.device)


def _make_empty_draw(like: torch.Tensor, p: float) -> torch.Tensor:
    return _without_gaps(like)


def _draw_bernoulli(like: torch.Tensor, p: float) -> torch.Tensor:
    """Ones with probability `p`, else zeros, in memory that lies as that of `like`."""
    return _without_gaps(like).bernoulli_(p)


_library.define("bernoulli_like(Tensor like, float p) -> Tensor", tags=_TAGS)
_library.impl("bernoulli_like", _draw_bernoulli, "CompositeExplicitAutograd")
torch.library.register_fake("partita::bernoulli_like", _make_empty_draw, lib=_library)


def draw_in_place(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """`func(*args, **kwargs)`; None if a graph without writes draws it in eager's order anyway."""
    if not facts_of(func).fills or args[0].is_contiguous():
        return None
    x, *rest = args
    if func is _aten.bernoulli_.float and not kwargs:
        drawn = torch.ops.partita.bernoulli_like(x, *(rest or (0.5,)))
    else:
        drawn = _without_gaps(x)
        if drawn.stride() == x.stride():
            return None
        func(drawn, *rest, **kwargs)
    found: torch.Tensor = x.copy_(drawn)
    return found
