"""Block traces: the nodes of a block's forward and backward, and how blocks stand in the graph.

    f = block_forward(block, floats, *operands)    block_output(f, number), for each result
    b = block_backward(back, f, *cotangents)       block_output(b, number), for each gradient

These targets are never called. `block` and `back` are each a `BlockBody`; where they have
become a graph of its own both are one `BlockProgram`. `inline_bodies` replaces the block nodes of a
graph by copies of the nodes for which they stand. While a step is traced `BlockTracing` marks the
nodes that a block adds, and a `BlockTrace` keeps them, with those of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from partita.tensor.op_facts import OpFacts, declare_facts, facts_of
from partita.tensor.tensor_state import count_writes, count_writes_of

from ..graph_nodes import (
    NOTE,
    GraphPart,
    Note,
    add_call,
    copy_node,
    has_effect,
    nodes_since,
    note_of,
)
from .equal_calls import node_of
from .fakes import is_symbolic
from .functional_memory import lie_alike
from .recorder import Recorder


class NotABlock(BaseException):
    """A module cannot be traced once for all alike: capture starts again with its class excluded.

    A BaseException, so that no `except Exception` of the user's catches it.
    """

    def __init__(self, kind: type, reason: str):
        super().__init__(f"{kind.__name__}: {reason}")
        self.kind, self.reason = kind, reason


class VaryingFloatRead(NotABlock):
    """Torch reads a varying float of this class: capture starts again with its floats constant."""

    def __init__(self, kind: type):
        super().__init__(kind, "a number that differs between its blocks is read")


LABELS = "labels"
"""The key, in the `meta` of a `block_forward` node, of the labels of that block's calls."""


@dataclass(eq=False)
class BlockBody(GraphPart):
    """The nodes of a block's forward or backward, for one block or for all of one structure.

    Attributes:
        entered: for each operand the node that stands for it; of backward, for each gradient of a
            result, and for what else backward is given.
        made: by number, the node of each tensor that it makes; of backward, by the number of an
            operand, that of its gradient.
        nodes: its nodes, in order.
        region: the number of the remat region in which those of forward lie.
        labels: of the calls of forward that have one, in order, as the notes have them.
        numbers: the nodes of floats that differ between blocks.
    """

    entered: list[fx.Node]
    made: dict[int, fx.Node]
    nodes: list[fx.Node]
    region: int = 0
    labels: tuple[str, ...] = ()
    numbers: list[fx.Node] = field(default_factory=list)

    @cached_property
    def has_effect(self) -> bool:  # type: ignore[override]
        """Does a call of it write, draw or check?"""
        return any(map(has_effect, self.nodes))

    def __repr__(self) -> str:
        return "'a block'"  # as code: it stands among the operands of a node


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
        _, floats_or_forward, *operands = given
        if node.target is block_forward:
            labels = dict(zip(body.labels, node.meta[LABELS], strict=True))
            numbers = dict(zip(body.numbers, floats_or_forward, strict=True))
            copy = _Copy(numbers, labels, note_of(node).region, body.region, *free)
            copies[node] = copy
        else:
            # A copy for each backward: there may be several of one forward.
            forward_copy = copies[floats_or_forward]
            copy = replace(forward_copy, of=dict(forward_copy.of))
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
        region, body_region: the remat regions in which this block and the body lie; 0 for none.
        free_moves, free_regions: give the next numbers that are free in the graph.
        moves, regions: by the number in the body's notes, the number in the copies.
        notes: by the id of a note of the body that of the copies.
    """

    of: dict[fx.Node, Any]
    labels: dict[str, str]
    region: int
    body_region: int
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
            elif is_symbolic(node.meta.get("val")):  # reckoned with varying floats, known here
                operands = fx.node.map_arg(node.args, lambda n: of.get(n, n))
                of[node] = node.target(*operands)  # type: ignore[operator]
            else:
                of[node] = copied = copy_node(graph, node, lambda n: of.get(n, n))
                note = note_of(node)
                if id(note) not in self.notes:
                    self.notes[id(note)] = self._renumber_note(note)
                copied.meta[NOTE] = self.notes[id(note)]

    def _renumber_note(self, note: Note) -> Note:
        """The note with numbers of this copy, so that its moves and regions are its own."""
        region = self.region
        if not region and note.region != self.body_region:  # a region within the block
            region = self.regions.get(note.region) or next(self.free_regions)
            self.regions[note.region] = region
        if not note.move:
            return note if region == note.region else replace(note, region=region)
        if note.move not in self.moves:
            self.moves[note.move] = next(self.free_moves)
        op = self.labels.get(note.op, note.op)
        return replace(note, move=self.moves[note.move], region=region, op=op)


def _is_alias(node: fx.Node) -> bool:
    """Does it give its operand as it is: an alias, or a view of the same shape and strides?"""
    if facts_of(node.target).is_alias:
        return True
    if node.target is not torch.ops.aten.view.default:
        return False
    return lie_alike(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]


# -- traces of blocks ------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class BlockTrace(BlockBody):
    """The traced forward of a block structure, and what is needed to differentiate it.

    Attributes:
        kind: the class of the blocks.
        results, takes: by number, the traced results and outer tensors that require a gradient.
        backwards: by the gradients' strides and dtypes, which inputs train, and torch's modes.
        written: the numbers of the tensors from outside that it writes in place. Not empty for the
            update of an optimizer, and for no other block.
    """

    kind: type = field(kw_only=True)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    takes: dict[int, torch.Tensor] = field(default_factory=dict)
    backwards: dict[Any, BlockBody] = field(default_factory=dict)
    written: tuple[int, ...] = ()

    def all_nodes(self) -> Iterator[fx.Node]:
        """The nodes of forward and of all backwards."""
        yield from self.nodes
        for back in self.backwards.values():
            yield from back.nodes


# -- tracing ---------------------------------------------------------------------------------------


def traced_node(t: torch.Tensor, kind: type) -> fx.Node:
    """The node that makes `t`. Raises NotABlock, for a block of class `kind`, if none does."""
    node = node_of(t)
    if node is None:
        raise NotABlock(kind, "it takes a tensor that the graph does not make")
    return node


class BlockTracing:
    """Traces a block into the graph, and notes which nodes are its own.

    Attributes:
        nodes: of the block, in order.
        entered: the node of each tensor that is traced in place of one from outside.
        region: the remat region in which the block lies; 0 for none.
        symbols: the symbolic floats that stand for varying floats.
        numbers: their nodes.
    """

    def __init__(self, recorder: Recorder, env: Any):
        self.recorder, self._env = recorder, env
        self.region = recorder.marks[0]
        self.nodes: list[fx.Node] = []
        self.symbols: list[Any] = []
        self.numbers: list[fx.Node] = []
        self._new: list[fx.Node] = []
        self.entered: list[fx.Node] = []
        self._writes: list[int] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within, the nodes that are added belong to the block."""
        first = self.recorder.newest()
        try:
            yield
        finally:
            self._new = [*nodes_since(self.recorder.graph, first)]
            self.nodes += reversed(self._new)

    def enter_number(self, value: float) -> None:
        """Add a symbolic float for a varying float whose value is `value` in this block."""
        mode = get_proxy_mode()
        assert mode is not None
        number = len(self.numbers)
        symbol = self._env.symbolic(f"number {number} of a block", float(value))
        self._env.of_blocks.add(str(symbol.node.expr))
        node = add_call(self.recorder.graph, block_number, (number,))
        self.recorder.note_made(node)
        node.meta["val"] = symbol
        track_tensor_tree(symbol, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)
        self.symbols.append(symbol)
        self.numbers.append(node)

    def discard_last_call(self, kind: type) -> None:
        """Erase the nodes of the last call, which raised BlockNumberRead and will be repeated.

        Raises:
            VaryingFloatRead: they are used, or write.
        """
        for node in self._new:
            if node.users or facts_of(node.target).writes:
                raise VaryingFloatRead(kind)
            self.nodes.remove(node)
            self.recorder.erase(node)

    def pass_numbers(self, kind: type, func: Any, out: Any, values: Mapping[int, float]) -> None:
        """Have the node of the last call, traced with the floats `values`, take the varying floats.

        Raises:
            VaryingFloatRead: the call is more than one node of the same name that takes each float
                once, or has a gradient: then another float might have other effects.
        """
        with Local():
            graded = not isinstance(out, torch.Tensor) or out.requires_grad
        name = getattr(func, "__name__", "")
        if graded or len(self._new) != 1 or getattr(self._new[0].target, "_opname", "") != name:
            raise VaryingFloatRead(kind)
        (node,) = self._new
        args = list(node.args)
        for number, value in values.items():
            at = [i for i, a in enumerate(args) if type(a) is type(value) and a == value]
            if len(at) != 1:
                raise VaryingFloatRead(kind)
            args[at[0]] = self.numbers[number]
        node.args = tuple(args)

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


def stand_in(like: FakeTensor) -> FakeTensor:
    """A tensor with the metadata of `like`, of which nothing can be computed."""
    with Unheard():
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            FakeTensor,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
        )
        made.fake_device, made.fake_mode = like.fake_device, like.fake_mode
        spec = like.__dict__.get("_spec")
        if spec is not None:
            made.__class__, made._spec = type(like), spec  # type: ignore[attr-defined]
    return made  # type: ignore[no-any-return]
