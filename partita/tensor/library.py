"""What is known of an operator of torch.library: `torch.ops.aten.add.Tensor`, or one of your own?

Its schema says which operands it writes. Its backward may be Python that reads what forward saved:
it must find this rank's pieces there, not DTensors beside pieces of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Not public, but where torch keeps the types of what `torch.ops.a.b` and `.default` are.
from torch._ops import OpOverload, OpOverloadPacket

from .dtensor import DTensor

__all__ = ["Operator", "on_pieces", "operator_of"]


@dataclass(frozen=True)
class Operator:
    """An operator, or one overload of it.

    Attributes:
        name: without namespace and overload.
        packet: all its overloads.
        is_torchs: it is one of torch's own, so that what is known of the torch function of its
            name holds for it too.
        writes: place and name of the operands that it writes, besides `out`.
    """

    name: str
    packet: OpOverloadPacket
    is_torchs: bool
    writes: tuple[tuple[int, str], ...]


def operator_of(func: Callable[..., Any]) -> Operator | None:
    """What `func` is as an operator; None if it is another function."""
    if isinstance(func, OpOverload):
        packet, overloads = func.overloadpacket, [func]
    elif isinstance(func, OpOverloadPacket):
        packet, overloads = func, [getattr(func, name) for name in func.overloads()]
    else:
        return None
    writes = {
        (i, a.name): None
        for overload in overloads
        for i, a in enumerate(overload._schema.arguments)
        if a.is_write and not a.is_out
    }
    space = overloads[0].namespace
    return Operator(packet.__name__, packet, space == "aten", tuple(writes))


def on_pieces(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` on plain aliases of its operands; called with torch-function disabled."""

    def piece(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.view_as(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, DTensor) for v in value):
            return [piece(v) for v in value]
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        return func(*map(piece, args), **{k: piece(v) for k, v in kwargs.items()})

    return run
