"""Block nodes: how the blocks of a step stand in its graph, and the nodes for which they stand.

    f = block_forward(block, floats, *operands)    block_output(f, number), for each result
    b = block_backward(back, f, *cotangents)       block_output(b, number), for each gradient

These targets are never called. `block` is a `BlockBody`, `back` a `BackwardBody`; where each has
become a graph of its own both are a `BlockProgram`. `inline_bodies` replaces the block nodes of a
graph by copies of the nodes for which they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import OpFacts, declare_facts, facts_of

from ..graph_nodes import NOTE, GraphPart, Note, add_call, copy_node, has_effect, note_of
from .functional_memory import lie_alike
from .recorder import Recorder
from .symbolic import is_symbolic

LABELS = "labels"
"""The key, in the `meta` of a `block_forward` node, of the labels of that block's calls."""


@dataclass(eq=False)
class BlockBody(GraphPart):
    """The nodes of a block's forward, for one block or for all of one structure.

    Attributes:
        kind: the class of the blocks.
        entered: for each operand the node that stands for it.
        made: by number, the node of each tensor that the block makes.
        forward: its nodes, in order.
        region: the number of the remat region in which these lie.
        labels: of the calls that have one, in order, as the notes of the nodes have them.
        numbers: the nodes of floats that differ between blocks.
    """

    kind: type
    entered: list[fx.Node]
    made: dict[int, fx.Node]
    forward: list[fx.Node]
    region: int = 0
    labels: tuple[str, ...] = ()
    numbers: list[fx.Node] = field(default_factory=list)

    @cached_property
    def has_effect(self) -> bool:  # type: ignore[override]
        """Does a call of it write, draw or check?"""
        return any(map(has_effect, self.forward))


@dataclass(eq=False)
class BackwardBody(GraphPart):
    """The nodes of a block's backward, for gradients of some of its results.

    Attributes:
        seeds: the nodes that stand for these gradients, and for what else backward is given.
        gradients: by the number of an operand, the node of its gradient.
        nodes: of backward, in order.
    """

    seeds: list[fx.Node]
    gradients: dict[int, fx.Node]
    nodes: list[fx.Node]

    @cached_property
    def has_effect(self) -> bool:  # type: ignore[override]
        """Does a call of it write, draw or check?"""
        return any(map(has_effect, self.nodes))

    def __repr__(self) -> str:
        return "'a block, backward'"  # as code: it stands among the operands of a node


# -- targets ---------------------------------------------------------------------------------------


def block_number(number: int) -> Any:
    """A varying float, in a trace."""
    raise RuntimeError("a block's number was not put in its place")


@declare_facts(OpFacts(makes_new=True))
def block_forward(block: Any, numbers: Sequence[float], *taken: Any) -> Any:
    """The tensors that a block makes, by number."""
    raise RuntimeError("a block's forward was not put in its place")


@declare_facts(OpFacts(makes_new=True))
def block_backward(back: Any, forward: Any, *cotangents: Any) -> Any:
    """The gradients of a block's outer tensors."""
    raise RuntimeError("a block's backward was not put in its place")


@declare_facts(OpFacts(makes_new=True))
def block_output(made: Any, number: int) -> Any:
    """One of the tensors that a block's forward or backward makes."""
    raise RuntimeError("a block's call was not put in its place")


def add_block_node(
    recorder: Recorder, target: Any, args: Sequence[Any], numbers: Iterable[int]
) -> tuple[fx.Node, list[fx.Node]]:
    """Add a block's node to the graph that is being traced, and nodes of what it gives, by
    `numbers`."""
    graph = recorder.graph
    node = add_call(graph, target, tuple(args))
    outputs = [add_call(graph, block_output, (node, n)) for n in numbers]
    recorder.note_made(node, *outputs)
    return node, outputs


def is_block_node(node: fx.Node) -> bool:
    """Does it stand for a block's forward or backward, or for one of their results?"""
    return node.target in (block_forward, block_backward, block_output)


def calls_of_blocks(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that stand for a block's forward or backward, in order."""
    return [n for n in graph.nodes if n.target in (block_forward, block_backward)]


# -- inlining --------------------------------------------------------------------------------------


def inline_bodies(graph: fx.Graph, body_of: Callable[[fx.Node], Any]) -> None:
    """Replace block nodes by copies of what they stand for.

    Args:
        body_of: gives the `BlockBody` of a `block_forward` node, the `BackwardBody` of a
            `block_backward` node; None for those that stay.
    """
    calls = [(node, body) for node in calls_of_blocks(graph) if (body := body_of(node)) is not None]
    if not calls:
        return
    moves = max((note_of(n).move for n in graph.nodes), default=0)
    regions = max((note_of(n).region for n in graph.nodes), default=0)
    copying = _Copying(graph, count(moves + 1), count(regions + 1))
    copies: dict[fx.Node, _Copy] = {}
    for node, body in calls:
        given: Any = node.args
        _, floats_or_forward, *operands = given
        if isinstance(body, BlockBody):
            of: dict[fx.Node, Any] = dict(zip(body.entered, operands, strict=True))
            of.update(zip(body.numbers, floats_or_forward, strict=True))
            labels = dict(zip(body.labels, node.meta[LABELS], strict=True))
            copies[node] = copy = _Copy(of, labels, note_of(node).region, body.region)
            copying.copy(body.forward, copy, node)
            made: Mapping[int, fx.Node] = body.made
        else:
            # A copy for each backward: there may be several of one forward.
            forward_copy = copies[floats_or_forward]
            copy = replace(forward_copy, of=dict(forward_copy.of))
            copy.of.update(zip(body.seeds, operands, strict=True))
            copying.copy(body.nodes, copy, node)
            made = body.gradients
        for user in list(node.users):
            if user.target is block_output:
                inner = made[user.args[1]]  # type: ignore[index]
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
        region, body_region: the remat regions in which this block and the body lie; 0 for none.
        moves, regions: by the number in the body's notes, the number in the copies.
        notes: by the id of a note of the body that of the copies.
    """

    of: dict[fx.Node, Any]
    labels: dict[str, str]
    region: int
    body_region: int
    moves: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    notes: dict[int, Note] = field(default_factory=dict)


@dataclass
class _Copying:
    """Copies bodies into a graph; `moves` and `regions` give the next free numbers."""

    graph: fx.Graph
    moves: Iterator[int]
    regions: Iterator[int]

    def copy(self, nodes: Sequence[fx.Node], copy: _Copy, before: fx.Node) -> None:
        """Insert copies of a body's nodes before the node `before`."""
        with self.graph.inserting_before(before):
            for node in nodes:
                if node in copy.of:
                    continue
                if _is_alias(node):
                    shown: Any = node.args[0]
                    copy.of[node] = copy.of.get(shown, shown)
                    continue
                if is_symbolic(node.meta.get("val")):  # reckoned with varying floats, known here
                    operands = fx.node.map_arg(node.args, lambda n: copy.of.get(n, n))
                    copy.of[node] = node.target(*operands)  # type: ignore[operator]
                    continue
                copied = copy_node(self.graph, node, lambda n: copy.of.get(n, n))
                copy.of[node] = copied
                note = note_of(node)
                if id(note) not in copy.notes:
                    copy.notes[id(note)] = self._renumber_note(note, copy)
                copied.meta[NOTE] = copy.notes[id(note)]

    def _renumber_note(self, note: Note, copy: _Copy) -> Note:
        """The note with numbers of this copy, so that its moves and regions are its own."""
        region = copy.region
        if not region and note.region != copy.body_region:  # a region within the block
            region = copy.regions.get(note.region) or next(self.regions)
            copy.regions[note.region] = region
        if not note.move:
            return note if region == note.region else replace(note, region=region)
        if note.move not in copy.moves:
            copy.moves[note.move] = next(self.moves)
        op = copy.labels.get(note.op, note.op)
        return replace(note, move=copy.moves[note.move], region=region, op=op)


def _is_alias(node: fx.Node) -> bool:
    """Does it give its operand as it is: an alias, or a view of the same shape and strides?"""
    if facts_of(node.target).is_alias:
        return True
    if node.target is not torch.ops.aten.view.default:
        return False
    return lie_alike(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]
