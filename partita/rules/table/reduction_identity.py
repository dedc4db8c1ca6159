"""Reduction identities: values for padding that do not change the result of a reduction.

While a step is captured, shards are padded to equal size. An op that keeps a split name computes
values for the padding, which are never read. An op that reduces the name must not count the
padding, so its operands get neutral values there before it runs. For a linear op (by its sentence)
that is 0. For others the table `IDENTITIES` has the value. Other ops have no known value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import decompositions
from ..rule import RULES, Rule
from ..sentence import Bound
from .index import picked

EXTREME = object()
"""For a maximum the least value of the dtype, for a minimum the largest."""

Identity = Any
"""A number, `EXTREME`, or a function of a call's `(args, kwargs)` that returns one of these."""
GetArgument = Callable[[Sequence[Any], dict[str, Any]], Identity]


def argument_getter(place: int, name: str, default: Any) -> GetArgument:
    """Returns a function that gets one argument from a call's `args` and `kwargs`.

    Args:
        place, name: the position and the name of the argument.
        default: the value if it is not passed.
    """
    return lambda args, kwargs: args[place] if place < len(args) else kwargs.get(name, default)


def _identity_of_power_sum(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Returns the x for which |x|**p is 0: 0, or infinity if p is negative."""
    return 0.0 if argument_getter(1, "p", 2)(args, kwargs) > 0 else math.inf


def _identity_of_poisson_loss(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Returns x with loss 0: a large negative x for exp(x), else an x near 0 with a finite log."""
    return -1e4 if argument_getter(2, "log_input", True)(args, kwargs) else 1e-37


_n = torch._C._nn
_NOTHING: dict[int, Identity] = {}
IDENTITIES: dict[Callable[..., Any], dict[int, Identity]] = {
    torch.sum: {0: 0},  # into integers
    torch.nansum: {0: 0},
    torch.count_nonzero: {0: 0},
    torch.any: {0: 0},
    torch.all: {0: 1},
    decompositions.partial_max: {0: EXTREME},
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
    torch.cosine_embedding_loss: {2: 0},  # neither similar nor dissimilar
    # An index selects no padding, and of equal elements the first one is no padding.
    decompositions.first_index: _NOTHING,
    torch.nn.functional.embedding: _NOTHING,
    torch.index_select: _NOTHING,
    torch.gather: _NOTHING,
    torch.take_along_dim: _NOTHING,
    torch.select: _NOTHING,
    torch.Tensor.__getitem__: _NOTHING,
    picked: _NOTHING,
}
"""For each function: `{operand: value}`, the padding value of each operand.

If the operands have these values, the padding does not change the result. A broadcast operand gets
its value, too.
"""


@dataclass(frozen=True)
class PaddingFill:
    """The value with which an operand's padding must be filled before a reduction.

    Attributes:
        operand: the index of the sentence's term.
        like: the index of the term whose layout says where the padding is: the operand, or a term
            with which it is broadcast.
        dims: the dimensions of `like` that are padded.
        value: a number, `EXTREME`, or a function of the call's arguments that returns one.
        reduce: how the padded dimension is reduced: "sum", "max" or "min".
    """

    operand: int
    like: int
    dims: tuple[int, ...]
    value: Identity
    reduce: str


def find_padding_fills(rule: Rule, bound: Bound, padded: Sequence[str]) -> list[PaddingFill] | None:
    """Finds the values with which operands' padding must be filled before an op reduces it.

    Args:
        rule: the op's rule.
        bound: its sentence, applied to the shapes of the call.
        padded: the names of the dimensions that are padded, because their pieces are uneven.

    Returns:
        A fill for each operand that needs one. None if the value is not known, or an operand cannot
        hold it.
    """
    found: list[PaddingFill] = []
    for name in padded:
        reduce = _find_reduction(bound, name)
        if reduce is None:
            continue
        values = _zeros_of_linear_group(bound, name) if reduce == "sum" else None
        if values is None:
            values = _find_known_values(rule, bound)
        if values is None:
            return None
        padded_dims = {
            i: tuple(d for d, dim in enumerate(bound.inputs[i] or ()) if name in dim.names)
            for i in values
        }
        widest = next((i for i, dims in padded_dims.items() if dims), None)
        for i, value in values.items():
            like = i if padded_dims[i] else widest
            if like is None or (like != i and not _broadcasts(bound, i, like)):
                return None
            found.append(PaddingFill(i, like, padded_dims[like], value, reduce))
    return found


def _broadcasts(bound: Bound, *operands: int) -> bool:
    """True if these are tensors whose dimensions are aligned at the right end."""
    terms = bound.sentence.terms
    return all(
        bound.inputs[i] is not None and [dim.names for dim in terms[i].dims] == [("...",)]
        for i in operands
    )


def _find_reduction(bound: Bound, name: str) -> str | None:
    """Returns how an output that lacks `name` reduces it; None if all outputs have it."""
    for dims, term in zip(bound.outputs, bound.sentence.outputs, strict=True):
        if not any(name in dim.names for dim in dims):
            return term.reduce
    return None


def _zeros_of_linear_group(bound: Bound, name: str) -> dict[int, Identity] | None:
    """Returns a zero for one factor of each product in the linear group that has `name`, or None.

    A function that is linear in the group is 0 where these factors are 0.
    """

    def has(i: int) -> bool:
        return any(name in dim.names for dim in bound.inputs[i] or ())

    for group in bound.sentence.groups:
        if group.linear and any(has(i) for product in group.products for i in product):
            values: dict[int, Identity] = {}
            for product in group.products:
                able = [i for i in product if has(i) and not bound.sentence.terms[i].index]
                if able:
                    values[min(able, key=lambda i: _numel_of_operand(bound, i))] = 0
                elif any(map(has, product)):
                    return None
            return values
    return None


def _numel_of_operand(bound: Bound, i: int) -> int:
    shape = bound.operands[i]
    return math.prod(shape) if isinstance(shape, tuple) else 0


def _find_known_values(rule: Rule, bound: Bound) -> dict[int, Identity] | None:
    for function, values in IDENTITIES.items():
        if RULES.get(function) is rule:
            return values
    if RULES[torch._C._nn.cross_entropy_loss] is rule and bound.inputs[0] != bound.inputs[1]:
        return {
            1: argument_getter(4, "ignore_index", -100)
        }  # not for probabilities, which are smoothed
    return None
