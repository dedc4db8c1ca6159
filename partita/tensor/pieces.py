"""Pieces for checkpoints: which piece of a tensor a rank holds, and which ranks hold the same."""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Piece, user_line
from partita.layout import Fix, LayoutError

from .spec import Spec

__all__ = ["destination", "holders", "piece_held"]


def piece_held(x: torch.Tensor) -> Piece:
    """The piece of `x` on this rank; of a plain tensor all of it. It shares x's memory.

    Raises:
        LayoutError: `x` is pending: its shares are no pieces of the value.
    """
    with Local(), torch.no_grad():
        local = x.detach()
    spec = getattr(x, "_spec", None)
    if spec is None:
        return Piece(local, tuple(local.shape), tuple((0, n) for n in local.shape))
    if spec.is_pending:
        raise LayoutError(
            "a checkpoint holds values, and this tensor is pending",
            place=user_line(),
            operands=(spec.layout.brief(),),
            fixes=(Fix("x.redistribute(placements=...) first"), Fix("pt.save, which does so")),
        )
    return Piece(local, tuple(spec.shape), spec.region)


def destination(x: torch.Tensor) -> Piece | None:
    """The piece of `x` that a loaded value is written into.

    Of a pending sum the first rank takes the value, and the others hold nothing: there it is None,
    and `x` is zeroed.
    """
    spec = getattr(x, "_spec", None)
    if spec is None or not spec.is_pending:
        return piece_held(x)
    mesh, at = spec.wire.mesh, spec.wire.at
    with Local(), torch.no_grad():
        local = x.detach()
        if any(op == "sum" and at[mesh.index(a)] for a, op in spec.layout.partial):
            local.zero_()
            return None
        return Piece(local, tuple(spec.shape), spec.region)


def holders(spec: Spec) -> tuple[tuple[str, ...], int, int]:
    """Who holds the same piece as this rank: the axes along which, which of them it is, how many.

    Pieces that are equal along the same axes have equally many holders.
    """
    mesh = spec.wire.mesh
    axes = tuple(a for a in mesh.names if not spec.layout.placement(a).is_shard())
    return axes, spec.wire.index(axes), spec.wire.mesh_size(axes)
