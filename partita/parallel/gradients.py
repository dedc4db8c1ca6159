"""Reduction of partial gradients: once, before something needs them whole.

The gradient of a replicated parameter is partial, and accumulating micro-batches adds shares to
shares and sends nothing. Whatever first needs a gradient whole (a clip, an optimizer's step, a norm
that is printed) reduces it: one all-reduce for each set of axes and dtype, cut into buckets. A
reduced gradient is not reduced again, and shares that arrive later still add up
(`tensor/dtensor_gradients`). Here is what a user calls; `reduce_pending_gradients` does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.tensor.dtensor import DTensor
from partita.tensor.dtensor_gradients import reduce_pending_gradients
from partita.tensor.foreach import norms

__all__ = ["clip_grad_norm_", "reduce_gradients"]


def reduce_gradients(params: Iterable[torch.Tensor]) -> None:
    """Reduce the partial gradients of `params`: afterwards each is laid out as its parameter.

    Sends each partial byte once. Gradients that are not partial, and plain ones, are left alone, so
    calling it twice reduces once. Noted in the ledger with the reason "settle".
    """
    reduce_pending_gradients(p for p in params if isinstance(p, DTensor))


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, over DTensors and plain tensors together.

    Partial gradients are reduced first. The norm costs one small all-reduce for each mesh over
    which gradients are split.

    Returns:
        The norm of all gradients together, a plain scalar, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    params = [p for p in params if p.grad is not None]
    reduce_gradients(params)
    grads: list[Any] = [p.grad for p in params]
    if not grads:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    with Local(), torch.no_grad():
        each = norms(grads, norm_type)
        # In the widest dtype of them all.
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in each) else torch.float32
        first = each[0].device
        norm = torch.linalg.vector_norm(torch.stack([n.to(first, dtype) for n in each]), norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped."
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for dtype in dict.fromkeys(g.dtype for g in grads):
            alike = [g for g in grads if g.dtype == dtype]
            torch._foreach_mul_(alike, scale.to(alike[0].device, dtype))
    return norm
