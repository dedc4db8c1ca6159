"""Ops of our own.

How is a small op of our own made, that is looked up in the table like torch's?
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["op"]


def op(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make `run` an op of its own: called on DTensors it finds the rule that it is given."""

    @functools.wraps(run)
    def call_own_op(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(call_own_op, tensors, *args, **kwargs)
        return run(*args, **kwargs)

    return call_own_op
