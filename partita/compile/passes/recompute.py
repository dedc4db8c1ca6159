"""Recomputation of nodes: copies of forward's nodes in backward, and what they cost.

What backward reads of a chosen node it reads of a copy instead, made right before its first use, of
operands that are copied likewise or still there.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, behind_needs, copy_node, lazy_graph_module, nbytes_of, note_of
from ..program import Program
from ..section import Section, section_of
from ..verify import SPACES

__all__ = [
    "can_be_made_again",
    "cost_of_recompute",
    "count_made_again",
    "flops_of",
    "is_late",
    "recompute",
    "trial_of",
]


def can_be_made_again(node: fx.Node) -> bool:
    """Is it a call of forward that can be run again with the same result?

    Of a user's operator nobody knows what that costs, or that it draws nothing. What a block makes
    again is in its own graph; a section is no such call, nor is an item of what one gives.
    """
    if node.target is operator.getitem:
        return can_be_made_again(node.args[0])  # type: ignore[arg-type]
    facts = facts_of(node.target)
    return (
        node.op == "call_function"
        and section_of(node) is None
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
    needs = {node: [n for n in node.all_input_nodes if n in chosen] for node in chosen}
    made: set[fx.Node] = set()

    def copy_for_backward(node: fx.Node) -> None:
        copies[node] = again = copy_node(graph, node, lambda n: copies.get(n, n))
        note = note_of(node)
        reason = "regather" if note.reason == "gather" else note.reason
        again.meta[NOTE] = replace(note, phase="backward", reason=reason, again=True)

    for node in list(graph.nodes):
        if not is_late(node):
            continue
        for read in node.all_input_nodes:
            if read not in chosen:
                continue
            with graph.inserting_before(node):
                for needed in behind_needs([read], needs, made):
                    copy_for_backward(needed)
                    # At once, else all items would stay until the last of them is read.
                    for item in list(needed.users):
                        if item in chosen and item.target is operator.getitem and item not in made:
                            made.add(item)
                            copy_for_backward(item)
            node.replace_input_with(read, copies[read])
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


def cost_of_recompute(graph: fx.Graph) -> tuple[int, int]:
    """Operations, and bytes, that a graph makes again, those within each call of a section too.

    Without parameters that are gathered again, which is for `regather` to say.
    """
    within: dict[Section, tuple[int, int]] = {}
    flops = nbytes = 0
    for node in graph.nodes:
        section = section_of(node)
        if section is not None:
            if section not in within:
                within[section] = cost_of_recompute(section.graph.graph)
            flops, nbytes = flops + within[section][0], nbytes + within[section][1]
        elif _is_made_again(node):
            flops, nbytes = flops + flops_of(node), nbytes + nbytes_of(node)
    return flops, nbytes


def count_made_again(graph: fx.Graph) -> int:
    """How many calls of a graph are made again, those within sections not counted; without
    parameters that are gathered again."""
    return sum(map(_is_made_again, graph.nodes))


def _is_made_again(node: fx.Node) -> bool:
    note = note_of(node)
    item_of = node.args[0] if node.target is operator.getitem else node
    if section_of(item_of) is not None:  # type: ignore[arg-type]
        return False  # the section says it
    return note.again and note.reason not in ("gather", "regather")
