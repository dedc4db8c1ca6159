"""Block traces: the nodes of one block structure in a step's graph, traced once and then inlined.

`BlockTracing` marks which nodes of the graph a traced block adds. `BlockTrace` keeps them, with the
nodes that stand for the block's operands; `differentiate_block` adds those of its backward. In the
graph, each block is one `block_forward` node and one `block_backward` node:

    f = block_forward(trace, floats, *operands)    block_output(f, number), for each result
    b = block_backward(back, f, *cotangents)       block_output(b, number), for each gradient

After capture `inline_blocks` replaces each of them by a copy of the traced nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from partita.tensor.dtensor import tagged
from partita.tensor.op_facts import facts_of
from partita.tensor.tensor_state import own_state, state_of

from ..graph_nodes import add_call, copy_node
from ..node_metadata import NOTE, Note, Recorder, note_of
from .block_follower import BlockFollower, stand_in
from .block_tape import BlockTape, NotABlock, VaryingFloatRead
from .differentiate import differentiate
from .functional_memory import lie_alike
from .symbolic import is_symbolic
from .traced_tensors import node_of

__all__ = [
    "BackwardTrace",
    "BlockTrace",
    "BlockTracing",
    "block_backward",
    "block_forward",
    "block_number",
    "block_output",
    "differentiate_block",
    "inline_blocks",
    "traced_node",
]


@dataclass(eq=False)
class BackwardTrace:
    """The traced backward of a block structure, for gradients of some of its results.

    Attributes:
        seeds: the nodes that stand for these gradients.
        gradients: by the number of a tensor from outside, the node of its gradient.
        nodes: of backward, in order.
    """

    seeds: list[fx.Node]
    gradients: dict[int, fx.Node]
    nodes: list[fx.Node]

    def __repr__(self) -> str:
        return "'a block, backward'"


@dataclass(eq=False, repr=False)
class BlockTrace:
    """The traced forward of a block structure, and what is needed to differentiate it.

    Attributes:
        kind: the class of the blocks.
        tape: their calls.
        entered: for each tensor from outside the node that stands for it.
        made: by number, the node of each tensor that the tape makes.
        forward: the nodes of forward, in order.
        likes: by number, a tensor of the metadata of each made tensor.
        region: the number of the remat region that the traced block lies in.
        numbers: the nodes of the varying floats.
        results, takes: by number, the traced results and outer tensors that require a gradient.
        backwards: by the gradients' strides and dtypes, which inputs train, and torch's modes.
        writes: the numbers of the tensors from outside that it writes in place. Not empty for the
            update of an optimizer, and for no other block.
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
    writes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return "'a block'"  # as code: it stands among the operands of a node


def block_number(number: int) -> Any:
    """A varying float, in a trace. A placeholder for `inline_blocks`."""
    raise RuntimeError("a block's number was not put in its place")


def block_forward(trace: BlockTrace, numbers: Sequence[float], *taken: Any) -> Any:
    """The tensors that a block makes, by number. A placeholder for `inline_blocks`."""
    raise RuntimeError("a block's forward was not put in its place")


def block_backward(trace: BackwardTrace, forward: Any, *cotangents: Any) -> Any:
    """The gradients of a block's outer tensors. A placeholder for `inline_blocks`."""
    raise RuntimeError("a block's backward was not put in its place")


def block_output(made: Any, number: int) -> Any:
    """One of the tensors that a block's forward or backward makes."""
    raise RuntimeError("a block's call was not put in its place")


# -- inlining --------------------------------------------------------------------------------------


def inline_blocks(graph: fx.Graph) -> tuple[tuple[str, int], ...]:
    """Replace each block node by a copy of its trace, and erase the traces.

    Returns:
        For each structure of modules the name of its class and the number of its blocks.
    """
    calls = [n for n in graph.nodes if n.target in (block_forward, block_backward)]
    if not calls:
        return ()
    moves = max((note_of(n).move for n in graph.nodes), default=0)
    regions = max((note_of(n).region for n in graph.nodes), default=0)
    copying = _Copying(graph, count(moves + 1), count(regions + 1))
    copies: dict[fx.Node, _Copy] = {}
    for node in calls:
        trace, floats_or_forward, *operands = node.args
        if node.target is block_forward:
            copies[node] = copy = _Copy(dict(zip(trace.entered, operands, strict=True)))
            copy.of.update(zip(trace.numbers, floats_or_forward, strict=True))
            copy.regions[trace.region] = note_of(node).region
            copying.copy(trace.forward, copy, node)
            made: Mapping[int, Any] = trace.made
        else:
            # A copy for each backward: there may be several of one forward.
            forward_copy = copies[floats_or_forward]
            copy = replace(forward_copy, of=dict(forward_copy.of))
            copy.of.update(zip(trace.seeds, operands, strict=True))
            copying.copy(trace.nodes, copy, node)
            made = trace.gradients
        for user in list(node.users):
            if user.target is block_output:
                inner = made[user.args[1]]
                user.replace_all_uses_with(copy.of.get(inner, inner))
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
        if not node.users:  # else it is of no block: a rank's coordinate, computed once for all
            graph.erase_node(node)
    return tuple((trace.kind.__name__, n) for trace, n in counts.items() if not trace.writes)


@dataclass
class _Copy:
    """The copy of a trace for one block.

    Attributes:
        of: by the traced node, the copied node, operand or number.
        moves, regions: by the number in the traced notes, the number in the copies.
    """

    of: dict[fx.Node, Any]
    moves: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)


@dataclass
class _Copying:
    """Copies traces into a graph; `moves` and `regions` give the next free numbers."""

    graph: fx.Graph
    moves: Iterator[int]
    regions: Iterator[int]

    def copy(self, nodes: Sequence[fx.Node], copy: _Copy, before: fx.Node) -> None:
        """Insert copies of a trace's nodes before the node `before`."""
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
                copied.meta[NOTE] = self._renumber_note(note_of(node), copy)

    def _renumber_note(self, note: Note, copy: _Copy) -> Note:
        """The note with numbers of this copy, so that its moves and regions are its own."""
        if not note.move and not note.region:
            return note
        if note.move and note.move not in copy.moves:
            copy.moves[note.move] = next(self.moves)
        if note.region and note.region not in copy.regions:
            copy.regions[note.region] = next(self.regions)
        return replace(
            note, move=copy.moves.get(note.move, 0), region=copy.regions.get(note.region, 0)
        )


def _is_alias(node: fx.Node) -> bool:
    """Does it give its operand as it is: an alias, or a view of the same shape and strides?"""
    if facts_of(node.target).is_alias:
        return True
    if node.target is not torch.ops.aten.view.default:
        return False
    return lie_alike(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]


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
        symbols: the symbolic floats that stand for varying floats.
        numbers: their nodes.
    """

    def __init__(self, recorder: Recorder, env: Any):
        self.recorder, self._env = recorder, env
        self._region = recorder.marks[0]
        self.nodes: list[fx.Node] = []
        self.symbols: list[Any] = []
        self.numbers: list[fx.Node] = []
        self._new: list[fx.Node] = []
        self._entered: list[fx.Node] = []
        self._versions: list[int] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within, the nodes that are added belong to the block."""
        first = self.recorder.newest()
        try:
            yield
        finally:
            self._new = []
            node = self.recorder.newest()
            while node is not first:
                self._new.append(node)
                node = node.prev
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
        """The tensor that is traced in place of `t`: an alias of it at which history begins."""
        with Local(), torch.no_grad():
            inner = t.detach()
        self._entered.append(self.recorder.newest())
        spec = getattr(t, "_spec", None)
        with Local(), torch.enable_grad():
            inner.requires_grad_(t.requires_grad)
            if isinstance(t, nn.Parameter):
                inner._is_param = True  # type: ignore[attr-defined]
            self._versions.append(inner._version)
        if spec is not None:
            tagged(inner, spec)
        if state_of(t).gathered_from is not None:
            own_state(inner).gathered_from = state_of(t).gathered_from
        return inner

    def finish_trace(self, follower: BlockFollower) -> BlockTrace:
        """The trace of the block that `follower` has recorded.

        Raises:
            NotABlock: it writes tensors from outside, or gives views of them.
        """
        tape = follower.tape
        assert tape is not None
        taken, made = follower.traced_taken, follower.traced_made
        with Local():
            if any(t._version != v for t, v in zip(taken, self._versions, strict=True)):
                raise NotABlock(follower.kind, "it writes into what it takes from outside")
            memory = {t.untyped_storage()._cdata for t in taken}
            if any(made[n].untyped_storage()._cdata in memory for n in tape.escapes):
                raise NotABlock(follower.kind, "it gives a view of what it takes from outside")
        forward, self.nodes = self.nodes, []
        nodes = {n: traced_node(t, follower.kind) for n, t in enumerate(made)}
        trace = BlockTrace(follower.kind, tape, self._entered, nodes, forward, region=self._region)
        trace.numbers = self.numbers
        trace.likes = {n: stand_in(t) for n, t in enumerate(made)}  # type: ignore[arg-type]
        with Local():
            trace.results = {n: made[n] for n in sorted(tape.escapes) if made[n].requires_grad}
            trace.takes = {i: t for i, t in enumerate(taken) if t.requires_grad}
        tape.made = trace.likes
        return trace


def differentiate_block(
    trace: BlockTrace,
    given: Mapping[int, torch.Tensor],
    trains: Sequence[bool],
    tracing: BlockTracing,
) -> BackwardTrace:
    """Trace the backward of a block.

    Args:
        given: by the number of a result, a gradient of the strides and dtype that it will have.
        trains: for each of `trace.takes`, is its gradient needed?
    """
    wanted = [i for i, trains_too in zip(trace.takes, trains, strict=True) if trains_too]
    with tracing.tracing():
        traced = differentiate(
            [trace.results[n] for n in given],
            [trace.takes[i] for i in wanted],
            tracing.recorder,
            given,
        )
    assert traced is not None
    seeds, gradients = traced
    names = {node.name: node for node in tracing.nodes}
    return BackwardTrace(
        [names[seed.node] for seed in seeds],
        {
            i: traced_node(g, trace.kind)
            for i, g in zip(wanted, gradients, strict=True)
            if g is not None
        },
        tracing.nodes,
    )
