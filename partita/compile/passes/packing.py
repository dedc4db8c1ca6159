"""Packing: the views, casts and copies by which values become the operand of a collective."""

from __future__ import annotations

import torch
from torch import fx

from .gathered import only_moves

__all__ = ["packing_of"]

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_OTHER = (_aten.constant_pad_nd.default, _aten._unsafe_view.default)


def packing_of(collective: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """A collective with what packs its operand, and the nodes that make what is packed."""
    packing, made_by, waiting = {collective}, set(), [collective]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if not (only_moves(read) or read.target in _OTHER) or read.target is _WAIT:
                made_by.add(read)
            elif read not in packing:
                packing.add(read)
                waiting.append(read)
    return packing, made_by
