"""Removal of unnecessary moves (repeated, undone, or in too wide a dtype) and views."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, is_collective, key_of_operands, note_of
from ..program import Program
from ..shared_memory import have_same_memory_format
from .regather import find_moved
from .rewrite import fake_value_of, put, replace

_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_VIEW = _aten.view.default
_RESHAPE = _aten.reshape.default


# -- equal collectives -----------------------------------------------------------------------------


def dedupe(program: Program) -> str:
    """A value that one phase of the step gathers or reduces twice is communicated once.

    Equal views are merged too, because two collectives are equal only if their operands are one
    node. Nothing is merged across phases: backward gathers values again to save memory.
    """
    seen: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(program.graph.graph.nodes):
        is_view = node.op == "call_function" and facts_of(node.target).is_view
        if not (is_view or is_collective(node)):
            continue
        key = (
            node.target,
            key_of_operands((node.args, node.kwargs)),
            note_of(node).phase,
        )
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            program.graph.graph.erase_node(node)
            merged += is_collective(node)
    return f"{merged} collectives merged"


# -- inverse moves ---------------------------------------------------------------------------------


# Pairs of moves that return their operand, such as an all-gather from which each rank slices its
# own piece. No reduction is undone, because its sum differs from its operand.
_UNDONE_BY = {("all_gather", "slice"), ("all_to_all", "all_to_all")}


def cancel(program: Program) -> str:
    """A move that is followed by its inverse is removed, together with the inverse.

    Pairs are found by their layouts: the second move starts from the result of the first and
    restores its input. The first move stays if other nodes read its result.
    """
    parts: dict[int, list[fx.Node]] = {}
    for node in program.graph.graph.nodes:
        if note_of(node).move and node.op == "call_function":
            parts.setdefault(note_of(node).move, []).append(node)
    cancelled = 0
    for move, nodes in parts.items():
        note = note_of(nodes[0])
        taken = _find_move_input(nodes)
        if taken is None:
            continue
        before = note_of(taken)
        first = parts.get(before.move, [])
        if before.move == move or (before.kind, note.kind) not in _UNDONE_BY:
            continue
        source = _find_move_input(first)
        if source is None or (before.before, before.after) != (note.after, note.before):
            continue
        end = nodes[-1]
        if have_same_memory_format(source.meta["val"], end.meta["val"]):
            end.replace_all_uses_with(source)
            cancelled += 1
    return f"{cancelled} pairs of moves cancelled"


def _find_move_input(nodes: list[fx.Node]) -> fx.Node | None:
    """Returns the one tensor that a move takes (what its nodes read and do not make), or None."""
    outside = {a for n in nodes for a in n.all_input_nodes if a not in nodes}
    outside = {a for a in outside if a.meta.get("val") is None or a.meta["val"].ndim}
    return outside.pop() if len(outside) == 1 else None


# -- early casts -----------------------------------------------------------------------------------


def cast(program: Program) -> str:
    """A gathered value that is only read after a cast to fewer bytes is cast before its gather.
    This halves the bytes under autocast. The bits are the same, because a cast works element by
    element. Reductions do not change, because a sum in fewer bits has another result.

    Returns:
        How many values are cast first, as text.
    """
    done = 0
    order = {node: i for i, node in enumerate(program.graph.graph.nodes)}
    for gather in [n for n in order if note_of(n).kind == "all_gather" and is_collective(n)]:
        moved_by = partial(_operands_moved_by, dtype=gather.meta["val"].dtype)
        # A cast commutes with calls that only move elements.
        chain = find_moved(gather, order, lambda n: facts_of(n.target).moves, moved_by)
        readers = {user for node in chain for user in node.users if user not in chain}
        dtype = _find_narrower_dtype(gather, readers)
        if dtype is not None:
            _cast_first(gather, chain, sorted(readers, key=order.__getitem__), dtype)
            done += 1
    return f"{done} values are cast before they are gathered"


def _operands_moved_by(node: fx.Node, dtype: torch.dtype) -> set[fx.Node]:
    """Returns the operands of a node that have this dtype, so not tensors of indices."""
    values = {n: n.meta.get("val") for n in node.all_input_nodes}
    return {n for n, x in values.items() if not isinstance(x, torch.Tensor) or x.dtype == dtype}


def _find_narrower_dtype(gather: fx.Node, readers: set[fx.Node]) -> torch.dtype | None:
    """Returns the one dtype to which all readers cast, if it has fewer bytes; else None."""
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
        if reader.meta["val"].stride() != source.meta["val"].stride():  # contiguous, too
            source = put(_aten.clone.default, source, before=reader)
        replace(reader, source)


# -- views of views --------------------------------------------------------------------------------


def merge_views(program: Program) -> str:
    """A view of a view becomes one view.

    A view with the shape of its operand is dropped. Redistributions flatten their operands, and
    buckets flatten the results again. In a small model, these views are half of all calls. Outputs
    of the step do not change.
    """
    graph = program.graph.graph
    (end,) = graph.find_nodes(op="output")
    returned = set(end.all_input_nodes)
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if node.target not in (_VIEW, _RESHAPE) or node in returned:
            continue
        (shown,) = node.all_input_nodes
        same = have_same_memory_format(shown.meta["val"], node.meta["val"])
        if same or (shown not in returned and len(shown.users) == 1 and _try_show(shown, node)):
            node.replace_all_uses_with(shown)
            graph.erase_node(node)
    return f"{before - len(graph.nodes)} views merged into others"


def _try_show(shown: fx.Node, node: fx.Node) -> bool:
    """Gives the view `shown` the shape of its view `node`, unless strides would then differ.

    `shown` keeps its place in the graph, because it may be a copy, after which its operand is
    freed.
    """
    if shown.target not in (_VIEW, _RESHAPE):
        return False
    target, args = shown.target, shown.args
    if node.target is _RESHAPE:
        shown.target = _RESHAPE
    shown.args = (args[0], *node.args[1:])
    try:
        if have_same_memory_format(fake_value_of(shown), node.meta["val"]):
            shown.meta["val"] = node.meta["val"]
            return True
    except RuntimeError:  # no view of it has that shape
        pass
    shown.target, shown.args = target, args
    return False
