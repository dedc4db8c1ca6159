"""Block traces: the calls of blocks in the graph of a step.

    f = block_forward(block, (), *operands)        block_output(f, number), for each result
    b = block_backward(block, f, *cotangents)      block_output(b, number), for each gradient

These targets are never called. `block` is a `BlockProgram`; of an update, until it is outlined, a
`BlockTrace`, whose nodes `BlockTracing` marks while it is traced. `inline_bodies` replaces block
nodes by copies of the nodes of a `BlockBody`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunction as Unheard

from partita.capture.equal_calls import node_of
from partita.capture.functional_memory import lie_alike
from partita.capture.recorder import Recorder
from partita.tensor.op_facts import OpFacts, declare_facts, facts_of
from partita.tensor.tensor_state import count_writes, count_writes_of

from .graph_nodes import (
    NOTE,
    GraphPart,
    Note,
    add_call,
    copy_node,
    has_effect,
    nodes_since,
    note_of,
)


class NotABlock(BaseException):
    """Updates of a class of optimizers cannot be traced once: capture starts again without them.

    A BaseException, so that no `except Exception` of the user's catches it.
    """

    def __init__(self, kind: type, reason: str):
        super().__init__(f"{kind.__name__}: {reason}")
        self.kind, self.reason = kind, reason


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
    """Add a block's node to the graph that is being traced, and a node for each of the results with
    these `numbers`."""
    graph = recorder.graph
    node = add_call(graph, target, tuple(args))
    outputs = [add_call(graph, block_output, (node, n)) for n in numbers]
    recorder.note_made(node, *outputs)
    return node, outputs


def is_block_node(node: fx.Node) -> bool:
    """True if a node is the call of a block's forward or backward, or one of its results."""
    return node.target in (block_forward, block_backward, block_output)


def calls_of_blocks(graph: fx.Graph) -> list[fx.Node]:
    """The calls of the forward and backward of blocks, in order."""
    return [n for n in graph.nodes if n.target in (block_forward, block_backward)]


# -- inlining --------------------------------------------------------------------------------------


def inline_bodies(graph: fx.Graph, body_of: Callable[[fx.Node], Any]) -> None:
    """Replace block nodes by copies of the nodes of their bodies.

    Args:
        body_of: gives the `BlockBody` of a block node; None for those that stay.
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
        free_moves, free_regions: give the next numbers that are free in the graph.
        moves, regions: by the number in the body's notes, the number in the copies.
        notes: by the id of a note of the body that of the copies.
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
        """The note with numbers of this copy, so that its moves and regions are its own."""
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


# -- traces of blocks ------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class BlockTrace(BlockBody):
    """The traced update of the parameters of a block.

    Attributes:
        kind: the class of the optimizer.
        written: the places of the operands that it writes.
    """

    kind: type = field(kw_only=True)
    written: tuple[int, ...] = ()


# -- tracing ---------------------------------------------------------------------------------------


def traced_node(t: torch.Tensor, kind: type) -> fx.Node:
    """The node that makes `t`. Raises NotABlock, for an optimizer of class `kind`."""
    node = node_of(t)
    if node is None:
        raise NotABlock(kind, "it takes a tensor that the graph does not make")
    return node


class BlockTracing:
    """Traces an update into the graph, and notes which nodes are its own.

    Attributes:
        nodes: of the update, in order.
        entered: the node of each tensor that is traced in place of one from outside.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.nodes: list[fx.Node] = []
        self.entered: list[fx.Node] = []
        self._writes: list[int] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within, the nodes that are added belong to the update."""
        first = self.recorder.newest()
        try:
            yield
        finally:
            self.nodes += reversed([*nodes_since(self.recorder.graph, first)])

    def enter_tensor(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor that is traced in place of `t`: an alias of it at which history begins, of no
        layout."""
        with Unheard(), torch.no_grad():
            inner = t.detach()
        self.entered.append(self.recorder.add_alias(inner))
        with Unheard(), torch.enable_grad():
            inner.requires_grad_(t.requires_grad)
            if isinstance(t, nn.Parameter):
                inner._is_param = True  # type: ignore[attr-defined]
            self._writes.append(count_writes(inner))
        return inner

    def written_places(self, entered: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The places of those of the tensors entered that were written since."""
        counts = enumerate(zip(self._writes, count_writes_of(entered), strict=True))
        return tuple(i for i, (before, now) in counts if before != now)
