"""Recomputation of nodes: copies of forward's nodes in backward, and what they cost.

What backward reads of a chosen node it reads of a copy instead, made right before its first use, of
operands that are copied likewise or still there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from partita.tensor.op_facts import facts_of

from ..graph_nodes import copy_node, lazy_graph_module
from ..node_metadata import NOTE, note_of
from ..program import Program
from ..verify import SPACES

__all__ = ["can_be_made_again", "flops_of", "is_late", "recompute", "trial_of"]


def can_be_made_again(node: fx.Node) -> bool:
    """Is it a call of forward that can be run again with the same result?

    Of a user's operator nobody knows what that costs, or that it draws nothing.
    """
    facts = facts_of(node.target)
    return (
        node.op == "call_function"
        and getattr(node.target, "namespace", "aten") in SPACES
        and note_of(node).phase == "forward"
        and not facts.draws
        and not facts.writes
    )


def is_late(node: fx.Node) -> bool:
    """Is it a call of backward?"""
    return node.op == "call_function" and note_of(node).phase == "backward"


def recompute(graph: fx.Graph, chosen: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Have backward read copies of `chosen`, made where first read; the copies by node."""
    copies: dict[fx.Node, fx.Node] = {}

    def copy_for_backward(node: fx.Node) -> fx.Node:
        if node not in chosen:
            return node
        if node not in copies:
            for read in node.all_input_nodes:
                copy_for_backward(read)
            copies[node] = made = copy_node(graph, node, lambda n: copies.get(n, n))
            note = note_of(node)
            reason = "regather" if note.reason == "gather" else note.reason
            made.meta[NOTE] = replace(note, phase="backward", reason=reason, again=True)
        return copies[node]

    for node in list(graph.nodes):
        if is_late(node):
            for read in node.all_input_nodes:
                if read in chosen:
                    with graph.inserting_before(node):
                        node.replace_input_with(read, copy_for_backward(read))
    return copies


def trial_of(program: Program, names: Collection[str]) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """A copy of a program in which these nodes are recomputed, and their copies by node."""
    trial = copy.copy(program)
    trial.graph = lazy_graph_module(program.graph, copy.deepcopy(program.graph.graph))
    graph = trial.graph.graph
    return trial, recompute(graph, {n for n in graph.nodes if n.name in names})


_flops: dict[Any, Callable[..., int]] = flop_registry


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a call, as torch's own counter has them; 0 where it has none."""
    count = _flops.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))
