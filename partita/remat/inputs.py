"""Inputs of a region: the arguments of its first run, saved for the second.

Tensors are saved as autograd saves them: through the hooks of an enclosing region, which then keeps
or recomputes them too, and with a check that they have not been changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.parallel.nested_tensors import replace_instances
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.spec import Spec

from .call_key import TensorOrigins

__all__ = ["RegionInputs"]


@dataclass(frozen=True)
class _InputPlace:
    """Stands in the arguments in place of the tensor of this number."""

    number: int


class _SaveInputs(torch.autograd.Function):
    """A node that saves tensors and does nothing else."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing is computed from this node")


class RegionInputs:
    """The arguments of one call of a region; containers are copied as they were at the call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], origins: TensorOrigins):
        tensors: list[torch.Tensor] = []

        def put_away(t: torch.Tensor) -> _InputPlace:
            for i, known in enumerate(tensors):
                if known is t:
                    return _InputPlace(i)
            origins.learn(t, ("input", len(tensors)))
            tensors.append(t)
            return _InputPlace(len(tensors) - 1)

        self._emptied = replace_instances((args, kwargs), torch.Tensor, put_away)
        self._meta = [_spec_and_gradient(t) for t in tensors]
        with Local():
            graded = torch.empty(0, requires_grad=True)
            # Torch 2.11 lets go of them without that name.
            self._saver: Any = _SaveInputs.apply(graded, *tensors)

    def rebuild(self, origins: TensorOrigins) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments like those of the first run, over the same memory, without history.

        Raises:
            RuntimeError: a tensor was changed in place since.
        """
        # A region around may run again for these, as a program.
        packed = self._saver.grad_fn.saved_tensors
        with Local():
            saved = [t.detach() for t in packed]
        for i, (t, (spec, requires_grad)) in enumerate(zip(saved, self._meta, strict=True)):
            with Local():
                t.requires_grad_(requires_grad)
            if spec is not None:
                tagged(t, spec)
            origins.learn(t, ("input", i))
        args, kwargs = replace_instances(
            self._emptied, _InputPlace, lambda place: saved[place.number]
        )
        return args, kwargs


def _spec_and_gradient(t: torch.Tensor) -> tuple[Spec | None, bool]:
    return (t._spec if isinstance(t, DTensor) else None), t.requires_grad
