"""Early casts: values that are only read in a narrower dtype are cast before their gather."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, is_collective, note_of
from ..program import Program
from .rewrite import fake_value_of, put, replace

_aten = torch.ops.aten
_CAST = _aten._to_copy.default


def cast(program: Program) -> str:
    """A value that is gathered and then read in a narrower dtype only is cast before it travels.

    Half the bytes under autocast, and the same bits: casting is done element by element. Reductions
    stay as they are, for a sum in fewer bits is another sum.
    """
    done = 0
    order = {node: i for i, node in enumerate(program.graph.graph.nodes)}
    for gather in [n for n in order if is_collective(n) and note_of(n).kind == "all_gather"]:
        chain = _moved_from(gather, order)
        readers = {user for node in chain for user in node.users if user not in chain}
        dtype = _find_narrower_dtype(gather, readers)
        if dtype is not None:
            _cast_first(gather, chain, sorted(readers, key=order.__getitem__), dtype)
            done += 1
    return f"{done} values are cast before they are gathered"


def _moved_from(gather: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The gather and what is made of its result alone by moving elements, in order."""
    found = {gather}
    waiting = [gather]
    while waiting:
        for user in sorted(waiting.pop().users, key=order.__getitem__):
            # A cast commutes with what only moves elements.
            moves = facts_of(user.target).moves
            if user not in found and moves and _tensors_read_by(user, gather) <= found:
                found.add(user)
                waiting.append(user)
    return sorted(found, key=order.__getitem__)


def _tensors_read_by(node: fx.Node, gather: fx.Node) -> set[fx.Node]:
    """The operands of a node, without tensors of indices."""
    dtype = gather.meta["val"].dtype
    return {
        n
        for n in node.all_input_nodes
        if not isinstance(n.meta.get("val"), torch.Tensor) or n.meta["val"].dtype == dtype
    }


def _find_narrower_dtype(gather: fx.Node, readers: set[fx.Node]) -> torch.dtype | None:
    """The one dtype to which all readers cast, if it has fewer bytes; else None."""
    wide = gather.meta["val"].dtype
    dtypes = set()
    for node in readers:
        if node.target is not _CAST or set(node.kwargs) - {"dtype"}:
            return None
        dtypes.add(node.kwargs["dtype"])
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return dtype if isinstance(dtype, torch.dtype) and dtype.itemsize < wide.itemsize else None


def _cast_first(
    gather: fx.Node, chain: list[fx.Node], readers: list[fx.Node], dtype: torch.dtype
) -> None:
    shard: Any = gather.args[0]
    wide, move = shard.meta["val"].dtype, note_of(gather).move
    narrow = put(_CAST, shard, before=gather, dtype=dtype)
    gather.replace_input_with(shard, narrow)
    for node in chain:
        node.meta["val"] = fake_value_of(node)
        note = note_of(node)
        if note.move == move:
            nbytes = note.nbytes * dtype.itemsize // wide.itemsize
            node.meta[NOTE] = dataclasses.replace(note, nbytes=nbytes)
    narrow.meta[NOTE] = note_of(gather)  # the cast is part of the move
    for reader in readers:
        source: Any = reader.args[0]
        if reader.meta["val"].stride() != source.meta["val"].stride():  # it also packed a piece
            source = put(_aten.clone.default, source, before=reader)
        replace(reader, source)
