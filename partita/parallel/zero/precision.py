"""Mixed precision: the dtypes in which a sharded model computes, sends and sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MixedPrecision"]


@dataclass(frozen=True)
class MixedPrecision:
    """In which dtypes a step works; parameters and optimizer state keep their own.

    Attributes:
        param_dtype: of gathered parameters, on their way and in use; their own where None.
        grad_dtype: in which gradients travel; `param_dtype` where None.
        reduce_dtype: in which gradients are summed; the parameter's own where None.
        output_dtype: to which the model's floating outputs are cast; not at all where None.
        cast_inputs: cast the floating inputs of each block to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
