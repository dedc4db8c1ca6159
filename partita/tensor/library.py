"""Operators of torch.library: `torch.ops.aten.add.Tensor`, or one of the user's own.

The backward of a user's operator may be Python that reads what forward saved. It must find this
rank's pieces there, not DTensors beside pieces of gradients: `wrap_with_plain_pieces`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Not public, but where torch keeps the types of what `torch.ops.a.b` and `.default` are.
from torch._ops import OpOverload, OpOverloadPacket

from .dtensor import DTensor

__all__ = ["Operator", "is_collective", "operator_of", "overloads_of", "wrap_with_plain_pieces"]


@dataclass(frozen=True)
class Operator:
    """An operator, or one overload of it.

    Attributes:
        name: without namespace and overload.
        packet: all its overloads.
        is_torchs: it is one of torch's own, so that what is known of the torch function of its
            name holds for it too.
    """

    name: str
    packet: OpOverloadPacket
    is_torchs: bool


def overloads_of(func: Any) -> list[OpOverload]:
    """The overloads of an operator, or the one that `func` is; none of another function."""
    if isinstance(func, OpOverload):
        return [func]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name) for name in func.overloads()]
    return []


def is_collective(func: Any) -> bool:
    """Is it an operator of torch.distributed's, functional or not?"""
    return any("c10d" in overload.namespace for overload in overloads_of(func))


def operator_of(func: Callable[..., Any]) -> Operator | None:
    """What `func` is as an operator; None if it is another function."""
    overloads = overloads_of(func)
    if not overloads:
        return None
    packet = overloads[0].overloadpacket
    return Operator(packet.__name__, packet, overloads[0].namespace == "aten")


def wrap_with_plain_pieces(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `func` with plain aliases of its operands. It is itself called with
    torch-function disabled."""

    def local_view_of(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.view_as(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, DTensor) for v in value):
            return [local_view_of(v) for v in value]
        return value

    def run_on_pieces(*args: Any, **kwargs: Any) -> Any:
        return func(*map(local_view_of, args), **{k: local_view_of(v) for k, v in kwargs.items()})

    return run_on_pieces
