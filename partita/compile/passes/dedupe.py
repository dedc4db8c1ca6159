"""Deduplication of collectives: of several that carry the same value, one is kept."""

from __future__ import annotations

from typing import Any

from torch import fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import is_collective, key_of_operands, note_of
from ..program import Program


def dedupe(program: Program) -> str:
    """A value that one phase of the step gathers or reduces twice is carried once.

    Equal views are merged too, since two collectives are equal only if their operands are one node.
    Nothing is merged across phases: what backward gathers again, it does to save memory.
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
