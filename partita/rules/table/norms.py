"""Normalization: which dimensions may be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from .. import decompositions
from ..rule import Arg, Decomposition, Kernel, KernelCall, KernelRule
from ..rule import table_rule as rule


def _format_affine_terms(weight: Any, bias: Any, names: str) -> str:
    """The terms of a scale and a shift, either of which may be missing."""
    count = (weight is not None) + (bias is not None)
    return f", {'+ ' * (count == 1)}{' + '.join([names] * count)}" if count else ""


def _derive_norm(
    input: Arg, shape: Sequence[int], weight: Any, bias: Any, run: Callable[..., Any]
) -> str | Decomposition:
    """A norm over the last dimensions, which are of these sizes; `run`, where one is split."""
    first = input.ndim - len(shape)
    if first < 0 or tuple(shape) != tuple(input.shape[first:]):
        raise ValueError(f"a norm over {tuple(shape)} of {input.shape}")
    dims = range(first, input.ndim)
    if input.is_split(dims):
        return Decomposition(run)
    d = " ".join(f"d{i}!" for i in dims)
    return f"... {d}{_format_affine_terms(weight, bias, d)} -> ... {d}"


@rule(torch.layer_norm)
def layer_norm(
    input: Arg, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None
) -> str | Decomposition:
    return _derive_norm(input, normalized_shape, weight, bias, decompositions.layer_norm)


@rule(torch.rms_norm)
def rms_norm(
    input: Arg, normalized_shape: Sequence[int], weight: Any = None
) -> str | Decomposition:
    return _derive_norm(input, normalized_shape, weight, None, decompositions.rms_norm)


@rule(torch.group_norm)
def group_norm(input: Arg, num_groups: int, weight: Any = None, bias: Any = None) -> KernelRule:
    spatial = " ".join(f"s{i}!" for i in range(input.ndim - 2))
    channels = f"(g={num_groups} c)"
    x = f"n {channels}! {spatial}" if num_groups == 1 else f"n {channels} {spatial}"

    def make_group_norm_kernel(call: KernelCall) -> Kernel | None:
        if not call.is_split("g"):
            return None
        mine = call.pieces["g"][1]
        if not mine:  # from torch 2.14 on none is an error
            return lambda input, *more, **named: input.clone()
        return lambda input, num_groups, *more, **named: call.run(input, mine, *more, **named)

    return KernelRule(
        f"{x}{_format_affine_terms(weight, bias, channels)} -> {x}", make_group_norm_kernel
    )


@rule(F.batch_norm)
def batch_norm(
    input: Arg,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
) -> str | Decomposition | None:
    if input.ndim < 2:
        return None
    stats = [t for t in (running_mean, running_var) if t is not None]
    over = [d for d in range(input.ndim) if d != 1]
    if training and (
        input.is_split(over if not stats else None) or any(t.is_split() for t in stats)
    ):
        return Decomposition(decompositions.batch_norm)
    # Running statistics are written in place: no row may have moved them.
    c = f"{input.names[1]}{'!' if training and stats else '%'}"
    x = " ".join(c if d == 1 else f"{n}{'!' * training}" for d, n in enumerate(input.names))
    return f"{x}{f', {c}' * len(stats)}{_format_affine_terms(weight, bias, c)} -> {x}"


@rule(torch.batch_norm)
def batch_norm_builtin(input: Arg, weight: Any, bias: Any, *rest: Any) -> Decomposition:
    return Decomposition(
        lambda x, w, b, mean, var, training, momentum, eps, *_: F.batch_norm(
            x, mean, var, w, b, training, momentum, eps
        )
    )


@rule(F.instance_norm)
def instance_norm(
    input: Arg,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
) -> str | None:
    if running_mean is not None or running_var is not None or not use_input_stats:
        return None
    x = "n c% " + " ".join(f"s{i}!" for i in range(input.ndim - 2))
    return f"{x}{_format_affine_terms(weight, bias, 'c%')} -> {x}"
