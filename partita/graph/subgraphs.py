"""Inlining of subgraphs: each call is replaced by copies of the subgraph's nodes.

`capture.fold` makes subgraphs of blocks and of the updates of their parameters. A block's forward
and backward are one subgraph, so it is functionalized, rewritten by passes and compiled once for
all blocks of equal structure. Its inputs are the operands of forward, then the operands of
backward. Its outputs are the results of forward, then the results of backward. `section_cutter`
makes the subgraphs that are compiled; each has one call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from .graph_nodes import (
    LABELS,
    NOTE,
    Note,
    Subgraph,
    add_call,
    call_backward,
    copy_graph,
    copy_node,
    lazy_graph_module,
    name_of_call,
    note_of,
    subgraph_calls,
)
from .shared_memory import have_same_memory_format


def inline_subgraphs(
    graph: fx.Graph, find_subgraph: Callable[[fx.Node], Any] = lambda call: call.args[0]
) -> None:
    """Replaces each call of a subgraph by copies of the subgraph's nodes.

    Args:
        graph: the graph with the calls. It is changed in place.
        find_subgraph: a function from a call node to the graph to copy; by default the subgraph
            that it calls.
    """
    calls = subgraph_calls(graph)
    if not calls:
        return
    notes = [note_of(n) for n in graph.nodes]
    free = count(1 + max(n.move for n in notes)), count(1 + max(n.region for n in notes))
    bodies: dict[tuple[Subgraph, bool], tuple[Any, ...]] = {}
    copies: dict[Any, _Copy] = {}
    for node in calls:
        part: Subgraph = find_subgraph(node)
        is_late = node.target is call_backward
        if is_late:
            copy = copies[node.args[1]]
        else:
            labels = dict(zip(part.labels, node.meta.get(LABELS, ()), strict=True))
            copies[node] = copy = _Copy({}, labels, *free)
        if (part, is_late) not in bodies:  # once for all calls
            nodes = [(n, _is_alias(n)) for n in part.nodes_of(is_late)]
            bodies[part, is_late] = part.inputs_of(is_late), nodes, part.outputs_of(is_late)
        inputs, nodes, outputs = bodies[part, is_late]
        copy.of.update(zip(inputs, part.operands(node), strict=True))
        with graph.inserting_before(node):
            copy.add_nodes(graph, nodes)
        for user in list(node.users):
            if user.target is operator.getitem:
                inner: Any = outputs[user.args[1]]  # type: ignore[index]
                user.replace_all_uses_with(copy.of.get(inner, inner))
                graph.erase_node(user)
    for node in reversed(calls):
        graph.erase_node(node)


def flatten_module(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a module with all sections inlined; `module` itself if it calls none.

    A result of a section that nothing uses stays alive until the section's end, as in a call.
    """
    if not subgraph_calls(module.graph):
        return module
    graph = copy_graph(module.graph)
    for call in subgraph_calls(graph):
        last, read = call, {user.args[1] for user in call.users}
        for i, value in enumerate(call.meta["val"]):
            if i not in read:
                for target, args in ((operator.getitem, (call, i)), (_ALIAS, None)):
                    with graph.inserting_after(last):
                        last = add_call(graph, target, args or (last,))
                    last.meta = {"val": value, NOTE: note_of(call)}
    inline_subgraphs(graph)
    return lazy_graph_module(module, graph)


_ALIAS = torch.ops.aten.alias.default


@dataclass
class _Copy:
    """The copy of a subgraph for one forward and its backward.

    Attributes:
        of: maps a node of the subgraph to the copied node, operand or number.
        labels: maps a label in the subgraph's notes to the label in the copies.
        free_moves, free_regions: iterators over numbers that are unused in the graph.
        moves, regions: map a number in the subgraph's notes to the number in the copies.
        notes: maps the id of a note of the subgraph to the note of the copies.
    """

    of: dict[fx.Node, Any]
    labels: dict[str, str]
    free_moves: Iterator[int]
    free_regions: Iterator[int]
    moves: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    notes: dict[int, Note] = field(default_factory=dict)

    def add_nodes(self, graph: fx.Graph, nodes: Sequence[tuple[fx.Node, bool]]) -> None:
        """Adds copies of a subgraph's nodes to `graph`.

        Args:
            nodes: pairs of a node, and True if the node is an alias.
        """
        of = self.of
        for node, is_alias in nodes:
            if node in of:
                continue
            if is_alias:
                shown: Any = node.args[0]
                of[node] = of.get(shown, shown)
            else:
                # fx tries all smaller numbers if a name with a number is taken.
                name = name_of_call(node.target)
                of[node] = copied = copy_node(graph, node, lambda n: of.get(n, n), name)
                note = note_of(node)
                if id(note) not in self.notes:
                    self.notes[id(note)] = self._renumber_note(note)
                copied.meta[NOTE] = self.notes[id(note)]

    def _renumber_note(self, note: Note) -> Note:
        """Returns the note with this copy's own move and region numbers, and its label."""
        region = note.region
        if region:  # a region within the block
            region = self.regions.get(note.region) or next(self.free_regions)
            self.regions[note.region] = region
        if not note.move:
            return note if region == note.region else replace(note, region=region)
        if note.move not in self.moves:
            self.moves[note.move] = next(self.free_moves)
        op = self.labels.get(note.op, note.op)
        return replace(note, move=self.moves[note.move], region=region, op=op)


def _is_alias(node: fx.Node) -> bool:
    """True if a call returns an alias of its operand, or a view of the same shape and strides."""
    if facts_of(node.target).is_alias:
        return True
    if node.target is not torch.ops.aten.view.default:
        return False
    return have_same_memory_format(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]
