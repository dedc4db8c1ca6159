"""Reduction identities.

What may stand in padding, so that what is reduced over it is as without it?

While a step is captured, shards are padded to equal size. An op that keeps a split name computes
something of the padding that nobody reads. One that reduces the name must not see it: before it
runs, its operands get values there that add nothing. Where the op is linear, which its sentence
says, that is 0; where it is not, it is in a table (`table/identities`). Of others nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .bind import Bound
from .rule import RULES, Rule
from .table.identities import EXTREME, IDENTITIES, Identity, argument_getter

__all__ = ["EXTREME", "Fill", "fills"]


@dataclass(frozen=True)
class Fill:
    """One operand's padding.

    Attributes:
        operand: which of the sentence's terms.
        dims: the operand's dimensions that are padded.
        value: a number, `EXTREME`, or a function of the call's arguments that gives one.
        reduce: how the padded dimension is reduced: "sum", "max" or "min".
    """

    operand: int
    dims: tuple[int, ...]
    value: Identity
    reduce: str


def fills(rule: Rule, bound: Bound, padded: Sequence[str]) -> list[Fill] | None:
    """What to put into the operands' padding along the names `padded` before the op runs.

    Returns:
        None where the op reduces one of them and nothing is known of it.
    """
    found: list[Fill] = []
    for name in padded:
        reduce = _find_reduction(bound, name)
        if reduce is None:
            continue
        values = _zeros_of_linear_group(bound, name) if reduce == "sum" else None
        if values is None:
            values = _find_known_values(rule, bound)
        if values is None:
            return None
        for i, value in values.items():
            dims = tuple(d for d, dim in enumerate(bound.inputs[i] or ()) if name in dim.names)
            if dims:
                found.append(Fill(i, dims, value, reduce))
    return found


def _find_reduction(bound: Bound, name: str) -> str | None:
    """How an output that lacks `name` has reduced it; None if all have it."""
    for dims, term in zip(bound.outputs, bound.sentence.outputs, strict=True):
        if not any(name in dim.names for dim in dims):
            return term.reduce
    return None


def _zeros_of_linear_group(bound: Bound, name: str) -> dict[int, Identity] | None:
    """Zeros for one factor of each product of a linear group; None where no such group has it.

    A function that is linear in a group is 0 where the group is.
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
        }  # not of probabilities, which are smoothed
    return None
