"""Block calls: the blocks of a step as calls in its graph.

    f = block_forward(block, (), *operands)        block_output(f, number), for each result
    b = block_backward(block, f, *cotangents)      block_output(b, number), for each gradient

These targets are never called. `block` is a `BlockProgram`. `inline_bodies` replaces block nodes
by copies of the nodes of a `BlockBody`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import OpFacts, declare_facts, facts_of

from .graph_nodes import (
    NOTE,
    GraphPart,
    Note,
    copy_node,
    has_effect,
    note_of,
)
from .shared_memory import lie_alike

LABELS = "labels"
"""The key, in the `meta` of a `block_forward` node, of the labels of that block's calls."""


@dataclass(eq=False)
class BlockBody(GraphPart):
    """The nodes of a block's forward or backward, for one block or for all of one structure.

    Attributes:
        entered: the node of each operand. The operands of backward are the gradients of results,
            and other tensors that backward alone reads.
        made: the node of each result, by its number. The results of backward are gradients, by the
            numbers of operands.
        nodes: its nodes, in order.
        labels: of the calls of forward that have one, in order, as the notes have them.
    """

    entered: list[fx.Node]
    made: dict[int, fx.Node]
    nodes: list[fx.Node]
    labels: tuple[str, ...] = ()

    @cached_property
    def has_effect(self) -> bool:  # type: ignore[override]
        """True if a call of it writes, draws random numbers or checks a value."""
        return any(map(has_effect, self.nodes))

    def __repr__(self) -> str:
        return "'a block'"  # as code: it stands among the operands of a node


# -- targets ---------------------------------------------------------------------------------------


@declare_facts(OpFacts(makes_new=True))
def block_forward(block: Any, numbers: Sequence[float], *taken: Any) -> Any:
    """Returns the tensors that a block makes, by number."""
    raise RuntimeError("a block's forward was not put in its place")


@declare_facts(OpFacts(makes_new=True))
def block_backward(back: Any, forward: Any, *cotangents: Any) -> Any:
    """Returns the gradients of a block's outer tensors."""
    raise RuntimeError("a block's backward was not put in its place")


@declare_facts(OpFacts(makes_new=True))
def block_output(made: Any, number: int) -> Any:
    """Returns one of the tensors that a block's forward or backward makes."""
    raise RuntimeError("a block's call was not put in its place")


def is_block_node(node: fx.Node) -> bool:
    """True if a node is the call of a block's forward or backward, or one of its results."""
    return node.target in (block_forward, block_backward, block_output)


def calls_of_blocks(graph: fx.Graph) -> list[fx.Node]:
    """Returns the calls of the forward and backward of blocks, in order."""
    return [n for n in graph.nodes if n.target in (block_forward, block_backward)]


# -- inlining --------------------------------------------------------------------------------------


def inline_bodies(graph: fx.Graph, body_of: Callable[[fx.Node], Any]) -> None:
    """Replace block nodes by copies of the nodes of their bodies.

    Args:
        body_of: returns the `BlockBody` of a block node; None for those that stay.
    """
    calls = [(node, body) for node in calls_of_blocks(graph) if (body := body_of(node)) is not None]
    if not calls:
        return
    moves = max((note_of(n).move for n in graph.nodes), default=0)
    regions = max((note_of(n).region for n in graph.nodes), default=0)
    free = count(moves + 1), count(regions + 1)
    copies: dict[fx.Node, _Copy] = {}
    for node, body in calls:
        given: Any = node.args
        _, forward, *operands = given
        if node.target is block_forward:
            labels = dict(zip(body.labels, node.meta[LABELS], strict=True))
            copies[node] = copy = _Copy({}, labels, *free)
        else:
            copy = copies[forward]
        copy.of.update(zip(body.entered, operands, strict=True))
        with graph.inserting_before(node):
            copy.add_nodes(graph, body.nodes)
        for user in list(node.users):
            if user.target is block_output:
                inner = body.made[user.args[1]]
                user.replace_all_uses_with(copy.of.get(inner, inner))
                graph.erase_node(user)
    for node, _ in reversed(calls):
        graph.erase_node(node)


@dataclass
class _Copy:
    """The copy of a body for one block.

    Attributes:
        of: by the body's node, the copied node, operand or number.
        labels: by the label in the body's notes, the label in the copies.
        free_moves, free_regions: return the next numbers that are free in the graph.
        moves, regions: by the number in the body's notes, the number in the copies.
        notes: by the id of a note of the body, the note of the copies.
    """

    of: dict[fx.Node, Any]
    labels: dict[str, str]
    free_moves: Iterator[int]
    free_regions: Iterator[int]
    moves: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    notes: dict[int, Note] = field(default_factory=dict)

    def add_nodes(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        """Add copies of a body's nodes at the insertion point of a graph."""
        of = self.of
        for node in nodes:
            if node in of:
                continue
            if _is_alias(node):
                shown: Any = node.args[0]
                of[node] = of.get(shown, shown)
            else:
                of[node] = copied = copy_node(graph, node, lambda n: of.get(n, n))
                note = note_of(node)
                if id(note) not in self.notes:
                    self.notes[id(note)] = self._renumber_note(note)
                copied.meta[NOTE] = self.notes[id(note)]

    def _renumber_note(self, note: Note) -> Note:
        """Returns the note with numbers of this copy, so that moves and regions are distinct."""
        region = note.region
        if region:  # it lies within the block
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
    return lie_alike(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]
