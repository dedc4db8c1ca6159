"""Identities: which element of an operand adds nothing to what its reduction gives?

Of ops that are linear it is 0, which their sentences say. This is the table of those that are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import decompositions
from .getitem import picked

__all__ = ["EXTREME", "IDENTITIES", "Identity", "argument_getter"]

EXTREME = object()
"""Of a maximum the least value that there is, of a minimum the greatest."""

Identity = Any
"""A number, `EXTREME`, or a function of a call's arguments that gives one."""
Asked = Callable[[Sequence[Any], dict[str, Any]], Identity]


def argument_getter(place: int, name: str, default: Any) -> Asked:
    """What gives the argument of this place and name of a call; `default` where it is not given."""
    return lambda args, kwargs: args[place] if place < len(args) else kwargs.get(name, default)


def _identity_of_power_sum(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """|x|**p is 0 of 0, or of infinity where p is negative."""
    return 0.0 if argument_getter(1, "p", 2)(args, kwargs) > 0 else math.inf


def _identity_of_poisson_loss(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """exp(x) - 0 * x is 0 far to the left, x - 0 * log(x) at 0."""
    return -1e4 if argument_getter(2, "log_input", True)(args, kwargs) else 0.0


_n = torch._C._nn
_NOTHING: dict[int, Identity] = {}
IDENTITIES: dict[Callable[..., Any], dict[int, Identity]] = {
    torch.sum: {0: 0},  # into integers
    torch.nansum: {0: 0},
    torch.count_nonzero: {0: 0},
    torch.any: {0: 0},
    torch.all: {0: 1},
    decompositions.pending_max: {0: EXTREME},
    decompositions.power_sum: {0: _identity_of_power_sum},
    decompositions.target_weight: {0: argument_getter(2, "ignore_index", -100)},
    _n.mse_loss: {0: 0, 1: 0},
    _n.l1_loss: {0: 0, 1: 0},
    _n.smooth_l1_loss: {0: 0, 1: 0},
    _n.huber_loss: {0: 0, 1: 0},
    torch.kl_div: {0: 0, 1: 0},
    torch.hinge_embedding_loss: {0: 0, 1: 1},
    _n.binary_cross_entropy: {0: 0, 1: 0},
    torch.binary_cross_entropy_with_logits: {0: 1e4, 1: 1},
    torch.poisson_nll_loss: {0: _identity_of_poisson_loss, 1: 0},
    torch.margin_ranking_loss: {0: math.inf, 1: 0, 2: 1},
    torch.cosine_embedding_loss: {2: 0},  # neither alike nor unlike
    # What reads places by number reads no padding, and the first of equals is no copy.
    decompositions.first_index: _NOTHING,
    torch.nn.functional.embedding: _NOTHING,
    torch.embedding: _NOTHING,
    torch.index_select: _NOTHING,
    torch.gather: _NOTHING,
    torch.take_along_dim: _NOTHING,
    torch.select: _NOTHING,
    torch.Tensor.__getitem__: _NOTHING,
    picked: _NOTHING,
}
"""For each function what its operands get, by their places among the tensors of the sentence."""
