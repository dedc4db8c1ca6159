"""Conversion of torch's own DTensors: made from a local tensor, and taken apart again.

Nothing is copied: the local tensor is shared. Placements are passed through in torch's terms;
`tensor/construct` translates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "TorchPlacement",
    "local_of_torch_dtensor",
    "make_torch_dtensor",
    "read_torch_dtensor",
    "torch_mesh",
]

TorchPlacement = tuple[str, Any]
"""`("Shard", dim)`, `("Strided", (dim, factor))`, `("Replicate", None)` or `("Partial", op)`."""

ToLocal = Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]
"""`(local gradient, torch's placements of it)` to the local gradient in our layout."""


def torch_mesh(mesh: Any) -> DeviceMesh | None:
    """The mesh of torch's that a tensor is on; None of ranks in one process, and of dry ones."""
    return mesh if isinstance(mesh, DeviceMesh) else None


def read_torch_dtensor(x: Any) -> tuple[DeviceMesh, Sequence[Any], torch.Size, tuple[int, ...]]:
    """The mesh, placements, shape and strides of one of torch's DTensors.

    Raises:
        TypeError: it is none.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        raise TypeError(f"from_torch takes a torch.distributed.tensor.DTensor, not {type(x)}")
    return x.device_mesh, x.placements, x.shape, x.stride()


def make_torch_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: torch.Size,
    stride: tuple[int, ...],
    gradient: ToLocal,
) -> torch.Tensor:
    """A DTensor of torch's whose local tensor is an alias of `local`. Differentiable.

    Args:
        gradient: makes the gradient of `local` of that of the result.
    """
    theirs = tuple(map(_make_torch_placement, placements))
    out: torch.Tensor = _ToTorch.apply(local, mesh, theirs, shape, stride, gradient)
    return out


def local_of_torch_dtensor(
    x: Any,
    placements: Sequence[TorchPlacement],
    gradient: Callable[[torch.Tensor], torch.Tensor],
    divisor: int = 1,
) -> torch.Tensor:
    """An alias of the local tensor of one of torch's DTensors. Differentiable.

    Args:
        placements: those of the gradient that `x` gets.
        gradient: makes its local gradient of that of the result.
        divisor: of the local tensor; its gradient is that of the same value, and not divided.
    """
    theirs = tuple(map(_make_torch_placement, placements))
    out: torch.Tensor = _FromTorch.apply(x, theirs, gradient, divisor)
    return out


def _make_torch_placement(said: TorchPlacement) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind, value = said
    if kind == "Shard":
        return Shard(value)
    if kind == "Strided":
        return _StridedShard(value[0], split_factor=value[1])
    return Replicate() if kind == "Replicate" else Partial(value)


def _wait_for_tensor(local: Any) -> torch.Tensor:
    """`local`, once it has arrived: torch may return a collective's result before."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _wrap_as_torch_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any
) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _ToTorch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: Any,
        placements: Any,
        shape: Any,
        stride: Any,
        gradient: ToLocal,
    ) -> Any:
        ctx.gradient = gradient
        return _wrap_as_torch_dtensor(local.detach(), mesh, placements, shape, stride)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        local = _wait_for_tensor(grad.to_local(grad_placements=grad.placements))
        return ctx.gradient(local, grad.placements), None, None, None, None, None


class _FromTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, placements: Any, gradient: Any, divisor: int) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.gradient = x.device_mesh, placements, gradient
        ctx.shape, ctx.stride = x.shape, x.stride()
        local = _wait_for_tensor(x.to_local()).detach()
        return local if divisor == 1 else local / divisor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        local = ctx.gradient(grad)
        return (
            _wrap_as_torch_dtensor(local, ctx.mesh, ctx.placements, ctx.shape, ctx.stride),
            None,
            None,
            None,
        )
