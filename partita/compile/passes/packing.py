"""Packing: the views, casts and copies by which values become the operand of a collective."""

from __future__ import annotations

import torch
from torch import fx

from partita.comm.graph_collectives import WAIT
from partita.tensor.op_facts import facts_of

from .gathered import only_moves

__all__ = ["packing_of"]

_PAD = torch.ops.aten.constant_pad_nd.default


def packing_of(collective: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """A collective with what packs its operand, and the nodes that make what is packed."""
    packing, made_by, waiting = {collective}, set(), [collective]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            puts = only_moves(read) or facts_of(read.target).shows_unsaid or read.target is _PAD
            if not puts or read.target is WAIT:
                made_by.add(read)
            elif read not in packing:
                packing.add(read)
                waiting.append(read)
    return packing, made_by
