"""Block traces: what blocks of one structure are in a graph, and how that is put in their places.

The forward of a block is a node in the graph of a step, its backward another, until the traces that
they stand for are inlined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..graph_nodes import copy_node
from ..node_metadata import NOTE, Note, note_of
from .block_tape import BlockTape
from .symbolic import is_symbolic

__all__ = [
    "BackwardTrace",
    "BlockTrace",
    "block_backward",
    "block_forward",
    "block_number",
    "block_output",
    "inline_blocks",
]


@dataclass(eq=False)
class BackwardTrace:
    """The backward of a block's trace, for some of its results' gradients.

    Attributes:
        seeds: the nodes of these gradients.
        gradients: for each tensor that a block takes and that has one, the node of its gradient.
        nodes: in order.
    """

    seeds: list[fx.Node]
    gradients: dict[int, fx.Node]
    nodes: list[fx.Node]

    def __repr__(self) -> str:
        return "'a block, backward'"


@dataclass(eq=False, repr=False)
class BlockTrace:
    """What the blocks of one structure are in a graph, traced once.

    Attributes:
        kind: the class of the blocks.
        tape: what they call.
        entered: for each tensor that a block takes the node that stands for it.
        made: for each number of the tape the node that makes it.
        forward: the nodes of forward, in order.
        likes: by number, tensors like those that it makes.
        region: of remat, that the block lies in; numbered as in these nodes.
        numbers: the nodes of what differs between its blocks.
        results, takes: what has a history among what was traced, by number.
        backwards: by what is known of the gradients of its results.
    """

    kind: type
    tape: BlockTape
    entered: list[fx.Node]
    made: dict[int, fx.Node]
    forward: list[fx.Node]
    likes: dict[int, FakeTensor] = field(default_factory=dict)
    region: int = 0
    numbers: list[fx.Node] = field(default_factory=list)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    takes: dict[int, torch.Tensor] = field(default_factory=dict)
    backwards: dict[Any, BackwardTrace] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "'a block'"  # as code: it stands among the operands of a node


def block_number(number: int) -> Any:
    """A float that differs between blocks; stands in a trace until that is inlined."""
    raise RuntimeError("a block's number was not put in its place")


def block_forward(trace: BlockTrace, numbers: Sequence[float], *taken: Any) -> Any:
    """What a block makes, by number; stands in a graph until it is inlined."""
    raise RuntimeError("a block's forward was not put in its place")


def block_backward(trace: BackwardTrace, forward: Any, *cotangents: Any) -> Any:
    """The gradients of what a block took; stands in a graph until it is inlined."""
    raise RuntimeError("a block's backward was not put in its place")


def block_output(made: Any, number: int) -> Any:
    """One of what a block's call makes."""
    raise RuntimeError("a block's call was not put in its place")


# -- inlining --------------------------------------------------------------------------------------


def inline_blocks(graph: fx.Graph) -> tuple[tuple[str, int], ...]:
    """Put what calls of blocks stand for in their places.

    Returns:
        For each structure the class of its blocks, and how many calls of them there are.
    """
    calls = [n for n in graph.nodes if n.target in (block_forward, block_backward)]
    if not calls:
        return ()
    moves = max((note_of(n).move for n in graph.nodes), default=0)
    regions = max((note_of(n).region for n in graph.nodes), default=0)
    copying = _Copying(graph, count(moves + 1), count(regions + 1))
    copies: dict[fx.Node, _Copy] = {}
    for node in calls:
        trace, known, *given = node.args
        if node.target is block_forward:
            copies[node] = one = _Copy(dict(zip(trace.entered, given, strict=True)))
            one.of.update(zip(trace.numbers, known, strict=True))
            one.regions[trace.region] = note_of(node).region
            copying.copy(trace.forward, one, node)
            made: Mapping[int, Any] = trace.made
        else:
            # A copy for each backward: there may be several of one forward.
            one = replace(copies[known], of=dict(copies[known].of))
            one.of.update(zip(trace.seeds, given, strict=True))
            copying.copy(trace.nodes, one, node)
            made = trace.gradients
        for user in list(node.users):
            if user.target is block_output:
                inner = made[user.args[1]]
                user.replace_all_uses_with(one.of.get(inner, inner))
                graph.erase_node(user)
    counts = Counter(n.args[0] for n in calls if n.target is block_forward)
    for node in reversed(calls):
        graph.erase_node(node)
    traced = []
    for trace in counts:
        traced += [*trace.entered, *trace.numbers, *trace.forward]
        for back in trace.backwards.values():
            traced += back.nodes
    for node in reversed(traced):
        if not node.users:  # else it is where a rank is, say, and was remembered for all
            graph.erase_node(node)
    return tuple((trace.kind.__name__, n) for trace, n in counts.items())


@dataclass
class _Copy:
    """What stands for the nodes of a trace in one block, and how its moves and regions count."""

    of: dict[fx.Node, Any]
    moves: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)


@dataclass
class _Copying:
    graph: fx.Graph
    moves: Iterator[int]
    regions: Iterator[int]

    def copy(self, nodes: Sequence[fx.Node], one: _Copy, before: fx.Node) -> None:
        """Put copies of a trace's nodes before another one."""
        with self.graph.inserting_before(before):
            for node in nodes:
                if node in one.of:
                    continue
                if _shows_all(node):
                    shown: Any = node.args[0]
                    one.of[node] = one.of.get(shown, shown)
                    continue
                if is_symbolic(node.meta.get("val")):
                    operands = fx.node.map_arg(node.args, lambda n: one.of.get(n, n))
                    one.of[node] = node.target(*operands)  # type: ignore[operator]
                    continue
                copy = copy_node(self.graph, node, lambda n: one.of.get(n, n))
                one.of[node] = copy
                copy.meta[NOTE] = self._renumber_note(note_of(node), one)

    def _renumber_note(self, note: Note, one: _Copy) -> Note:
        if not note.move and not note.region:
            return note
        if note.move and note.move not in one.moves:
            one.moves[note.move] = next(self.moves)
        if note.region and note.region not in one.regions:
            one.regions[note.region] = next(self.regions)
        return replace(
            note, move=one.moves.get(note.move, 0), region=one.regions.get(note.region, 0)
        )


def _shows_all(node: fx.Node) -> bool:
    """Does it show all of what it is given, as that is?"""
    if node.target is torch.ops.aten.detach.default:
        return True
    if node.target is not torch.ops.aten.view.default:
        return False
    one, other = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(one.shape == other.shape and one.stride() == other.stride())
