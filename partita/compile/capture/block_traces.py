"""Block traces: what blocks of one structure are in a graph, and how that is put in their places.

The forward of a block is a node in the graph of a step, its backward another, until the traces that
they stand for are inlined.
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
from .block_follower import Follower, stand_in
from .block_tape import BlockTape, NotABlock, NumbersRead
from .differentiate import differentiate
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


def traced_node(t: torch.Tensor, kind: type) -> fx.Node:
    """What makes `t` in the graph.

    Raises:
        NotABlock: nothing does; of a block of class `kind`.
    """
    node = node_of(t)
    if node is None:
        raise NotABlock(kind, "it takes a tensor that the graph does not make")
    return node


class BlockTracing:
    """Which nodes of the graph are those of a block that is traced.

    Attributes:
        symbols: what stands for its numbers.
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
        """Have something stand for a float that differs between blocks."""
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

    def discard(self, kind: type) -> None:
        """Take away what the last call has left, which asked what a number is."""
        for node in self._new:
            if node.users or facts_of(node.target).writes:
                raise NumbersRead(kind)
            self.nodes.remove(node)
            self.recorder.erase(node)

    def pass_numbers(self, kind: type, func: Any, out: Any, values: Mapping[int, float]) -> None:
        """Have the last call take its numbers, for which it could be traced only with these values.

        It is one call below, of the same name, which takes each number where it stands, and which
        nothing goes back through: only then is it sure what becomes of another number.
        """
        with Local():
            graded = not isinstance(out, torch.Tensor) or out.requires_grad
        name = getattr(func, "__name__", "")
        if graded or len(self._new) != 1 or getattr(self._new[0].target, "_opname", "") != name:
            raise NumbersRead(kind)
        (node,) = self._new
        args = list(node.args)
        for number, value in values.items():
            at = [i for i, a in enumerate(args) if type(a) is type(value) and a == value]
            if len(at) != 1:
                raise NumbersRead(kind)
            args[at[0]] = self.numbers[number]
        node.args = tuple(args)

    def enter(self, t: torch.Tensor) -> torch.Tensor:
        """What is traced for a tensor from outside: it begins here."""
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

    def finish(self, follower: Follower) -> BlockTrace:
        """The trace, with its backward."""
        tape = follower.tape
        assert tape is not None
        taken, made = follower.inner_taken, follower.inner_made
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
    """The backward of a block, for gradients like those given of its results."""
    wanted = [i for i, trains_too in zip(trace.takes, trains, strict=True) if trains_too]
    with tracing.tracing():
        found = differentiate(
            [trace.results[n] for n in given],
            [trace.takes[i] for i in wanted],
            tracing.recorder,
            given,
        )
    assert found is not None
    seeds, gradients = found
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
