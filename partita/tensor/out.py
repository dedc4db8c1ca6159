"""`out=`: how a result is written into the tensor, or tensors, given as `out=`.

The op runs without it, and its result is moved into the layout of `out` and copied. The refusals
are torch's own: no gradient goes through `out`, and its dtype must be able to take the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.comm import user_line
from partita.layout import Fix, LayoutError

from .arguments import collect_tensors
from .dtensor import DTensor

__all__ = ["run_into_out"]


def run_into_out(
    out: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """`func(*args, **kwargs)` written into `out`, a tensor or a tuple of them, which is returned.

    Raises:
        RuntimeError: a gradient is wanted, or `out` cannot hold the result's dtype.
        LayoutError: `out` has another shape than the result.
    """
    held = collect_tensors(out)
    operands = [t for a in (*args, *kwargs.values()) for t in collect_tensors(a)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*held, *operands)):
        raise RuntimeError(
            f"{func.__name__}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )
    result = func(*args, **kwargs)
    for into, value in zip(held, collect_tensors(result), strict=True):
        if not torch.can_cast(value.dtype, into.dtype):
            raise RuntimeError(
                f"result type {value.dtype} can't be cast to the desired output type {into.dtype}"
            )
        if into.shape != value.shape and not isinstance(into, DTensor) and not into.numel():
            into.resize_(value.shape)  # as torch does with memory for nothing
        if into.shape != value.shape:
            raise _make_other_shape_error(func.__name__, into, value)
        into.copy_(value)
    return out if isinstance(result, torch.Tensor) else type(result)(held)


def _make_other_shape_error(name: str, into: torch.Tensor, value: torch.Tensor) -> LayoutError:
    def describe_operand(t: torch.Tensor) -> str:
        return t._spec.layout.brief() if isinstance(t, DTensor) else f"plain {tuple(t.shape)}"

    return LayoutError(
        f"{name}: out= has another shape than the result",
        place=user_line(),
        operands=(f"out     {describe_operand(into)}", f"result  {describe_operand(value)}"),
        reason="a DTensor is not resized: its layout says which part each rank holds",
        fixes=(Fix(f"y = torch.{name}(...)", "without out="),),
    )
