"""Block calls: in the graph of a step, what stands for a block whose structure was traced before.

A block's forward is one node, its backward another; what they stand for is traced once for each
structure. `inline_blocks` puts that in their places again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partita.comm import TraceWire
from partita.tensor.dtensor import tagged
from partita.tensor.tensor_state import own_state, state_of
from partita.tensor.watch import HERE

from .block_tape import BlockTape, Follower, Made, NotABlock, stand_in, who_hears
from .differentiate import differentiate
from .notes import NOTE, Note, Recorder, note_of
from .traced_tensors import become, node_of, tensors_of

__all__ = ["BlockCalls", "inline_blocks"]


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
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    takes: dict[int, torch.Tensor] = field(default_factory=dict)
    backwards: dict[Any, BackwardTrace] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "'a block'"  # as code: it stands among the operands of a node


def block_forward(trace: BlockTrace, *taken: Any) -> Any:
    """What a block makes, by number; stands in a graph until it is inlined."""
    raise RuntimeError("a block's forward was not put in its place")


def block_backward(trace: BackwardTrace, forward: Any, *cotangents: Any) -> Any:
    """The gradients of what a block took; stands in a graph until it is inlined."""
    raise RuntimeError("a block's backward was not put in its place")


class BlockCalls:
    """The blocks of a step that is being captured.

    Args:
        recorder: of the nodes.
        mode: of the tensors without memory.
        wires: that trace.
        blocks: the modules that are blocks.
    """

    def __init__(
        self,
        recorder: Recorder,
        mode: FakeTensorMode,
        wires: Mapping[Any, TraceWire],
        blocks: set[nn.Module],
    ):
        self.recorder, self._mode, self._wires, self._blocks = recorder, mode, wires, blocks
        self._traces: dict[type, list[BlockTrace]] = {}
        self._heard = who_hears()

    @contextmanager
    def intercepting(self, tracer: Any) -> Iterator[None]:
        """Within, a call of a block is traced at most once for each structure."""
        usual = tracer.call_module

        def call_module(m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if m in self._blocks and HERE.block is None:
                return self.call(m, forward, args, kwargs)
            return usual(m, forward, args, kwargs)

        if not self._blocks:
            yield
            return
        tracer.call_module = call_module
        for wire in self._wires.values():
            wire.admit_otherwise = _admit_in_block
        try:
            yield
        finally:
            del tracer.call_module
            for wire in self._wires.values():
                wire.admit_otherwise = None

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`forward(*args, **kwargs)`, the module's own with its hooks."""
        kind = type(module)
        traces = self._traces.setdefault(kind, [])
        tracing = _Tracing(self.recorder)
        follower = Follower(kind, [t.tape for t in traces], tracing, self._heard)
        casts = torch.is_autocast_cache_enabled()
        HERE.block = follower
        try:
            with _apart(self._wires.values()):
                torch.set_autocast_cache_enabled(False)  # what it keeps would be of this block
                try:
                    with follower:
                        out = forward(*args, **kwargs)
                except Exception as error:  # which the user may catch, and go on
                    raise NotABlock(kind, f"it raises {type(error).__name__}") from error
                held = follower.end()
                if follower.is_new:
                    traces.append(tracing.finish(follower))
        finally:
            torch.set_autocast_cache_enabled(casts)
            HERE.block = None
        trace = next(t for t in traces if t.tape is follower.tape)
        self._emit(trace, follower.taken, held)
        return out

    # -- calls in the graph ------------------------------------------------------------------------

    def _emit(
        self, trace: BlockTrace, taken: Sequence[torch.Tensor], held: dict[int, FakeTensor]
    ) -> None:
        """Have the graph call the trace, and what the user holds be what that makes."""
        numbers = [*held]
        admitted = [(w, a) for w, a in trace.tape.admitted]
        numbers += [a.number for _, a in admitted if type(a) is Made and a.number not in held]
        call = _Call(self, trace, numbers, [_node_of(t, trace.kind) for t in taken])
        if any(_has_hooks(taken[i]) for i in trace.takes):
            raise NotABlock(trace.kind, "hooks of what it takes run in the order of its calls")
        with Local():
            if trace.results and trace.takes:
                with torch.enable_grad():  # its calls had it where a result has a history
                    made = _BlockFunction.apply(call, *(taken[i] for i in trace.takes))
            else:
                made = call.forward()
        by_number = dict(zip(numbers, made, strict=True))
        for wire, a in admitted:
            if type(a) is Made:
                wire.admitted.append(by_number[a.number])
            else:
                wire.admit(taken[a.number])
        for number, stand in held.items():
            become(stand, by_number[number])
        call.note_versions([*taken, *held.values()])

    def node(self, target: Any, *args: Any) -> fx.Node:
        """A new node of the graph."""
        node = self.recorder.graph.call_function(target, args)
        self.recorder.note_made(node)
        return node

    def tensors(self, nodes: Sequence[fx.Node], likes: Sequence[torch.Tensor]) -> list[FakeTensor]:
        """Tensors without memory, that the nodes make."""
        return tensors_of(nodes, likes, self._mode)


@dataclass(eq=False)
class _Call:
    """One call of a trace."""

    calls: BlockCalls
    trace: BlockTrace
    numbers: list[int]
    taken: list[fx.Node]
    node: fx.Node | None = None
    _versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def forward(self) -> list[FakeTensor]:
        self.node = self.calls.node(block_forward, self.trace, *self.taken)
        nodes = [self.calls.node(_at, self.node, n) for n in self.numbers]
        return self.calls.tensors(nodes, [self.trace.likes[n] for n in self.numbers])

    def note_versions(self, tensors: Iterable[torch.Tensor]) -> None:
        """Backward may read these: they must then be what they are now."""
        with Local():
            self._versions += [(t, t._version) for t in tensors if not t.is_inference()]

    def check_unwritten(self) -> None:
        """Raise NotABlock if what backward may read was written since."""
        with Local():
            if any(t._version != version for t, version in self._versions):
                raise NotABlock(
                    self.trace.kind, "what it takes or gives is written before backward"
                )

    def backward(
        self, grads: Sequence[torch.Tensor | None], trains: tuple[bool, ...]
    ) -> list[FakeTensor | None]:
        trace = self.trace
        given = {n: g for n, g in zip(self.numbers, grads, strict=True) if g is not None}
        key = tuple((n, g.stride(), g.dtype) for n, g in given.items()), trains
        back = trace.backwards.get(key)
        if back is None:
            back = trace.backwards[key] = _differentiated(trace, given, trains, self.calls.recorder)
        cotangents = [_node_of(g, trace.kind) for g in given.values()]
        node = self.calls.node(block_backward, back, self.node, *cotangents)
        nodes = [self.calls.node(_at, node, i) for i in back.gradients]
        likes = [g.meta["val"] for g in back.gradients.values()]
        made = dict(zip(back.gradients, self.calls.tensors(nodes, likes), strict=True))
        return [made.get(i) for i in trace.takes]


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *wanted: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(wanted[0])  # so that torch knows whether it may go back once more
        made = call.forward()
        ctx.mark_non_differentiable(
            *(m for n, m in zip(call.numbers, made, strict=True) if n not in call.trace.results)
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise NotABlock(ctx.call.trace.kind, "its gradients are differentiated again")
        ctx.call.check_unwritten()
        _ = ctx.saved_tensors
        return None, *ctx.call.backward(grads, ctx.needs_input_grad[1:])


def _at(made: Any, number: int) -> Any:
    """One of what a block's call makes."""
    raise RuntimeError("a block's call was not put in its place")


def _node_of(t: torch.Tensor, kind: type) -> fx.Node:
    node = node_of(t)
    if node is None:
        raise NotABlock(kind, "it takes a tensor that the graph does not make")
    return node


def _admit_in_block(wire: TraceWire, value: torch.Tensor) -> bool:
    if HERE.block is None or not HERE.block.inside:
        return False
    HERE.block.admit(wire, value)
    return True


def _has_hooks(t: torch.Tensor) -> bool:
    """Private torch: where a tensor has its hooks."""
    with Local():
        after = getattr(t, "_post_accumulate_grad_hooks", None)
        return bool(t._backward_hooks) or bool(after)


@contextmanager
def _apart(wires: Iterable[TraceWire]) -> Iterator[None]:
    """Within, what wires keep of values is the block's own."""
    wires = list(wires)
    before = [wire.swap_paddings({}) for wire in wires]
    try:
        yield
    finally:
        for wire, kept in zip(wires, before, strict=True):
            wire.swap_paddings(kept)


# -- tracing a structure ---------------------------------------------------------------------------


class _Tracing:
    """Which nodes of the graph are those of a block that is traced."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._region = recorder.marks[0]
        self.nodes: list[fx.Node] = []
        self._entered: list[fx.Node] = []
        self._versions: list[int] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        first = self._recorder.newest()
        try:
            yield
        finally:
            new = []
            node = self._recorder.newest()
            while node is not first:
                new.append(node)
                node = node.prev
            self.nodes += reversed(new)

    def enter(self, t: torch.Tensor) -> torch.Tensor:
        """What is traced for a tensor from outside: it begins here."""
        with Local(), torch.no_grad():
            inner = t.detach()
        self._entered.append(self._recorder.newest())
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
        nodes = {n: _node_of(t, follower.kind) for n, t in enumerate(made)}
        trace = BlockTrace(follower.kind, tape, self._entered, nodes, forward, region=self._region)
        trace.likes = {n: stand_in(t) for n, t in enumerate(made)}
        with Local():
            trace.results = {n: made[n] for n in sorted(tape.escapes) if made[n].requires_grad}
            trace.takes = {i: t for i, t in enumerate(taken) if t.requires_grad}
        tape.made = trace.likes
        return trace


def _differentiated(
    trace: BlockTrace,
    given: Mapping[int, torch.Tensor],
    trains: Sequence[bool],
    recorder: Recorder,
) -> BackwardTrace:
    """The backward of a block, traced, for gradients like those given of some of its results."""
    tracing = _Tracing(recorder)
    wanted = [i for i, trains_too in zip(trace.takes, trains, strict=True) if trains_too]
    with tracing.tracing():
        found = differentiate(
            [trace.results[n] for n in given], [trace.takes[i] for i in wanted], recorder, given
        )
    assert found is not None
    seeds, gradients = found
    names = {node.name: node for node in tracing.nodes}
    return BackwardTrace(
        [names[seed.node] for seed in seeds],
        {
            i: _node_of(g, trace.kind)
            for i, g in zip(wanted, gradients, strict=True)
            if g is not None
        },
        tracing.nodes,
    )


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
        trace, *given = node.args
        if node.target is block_forward:
            copies[node] = one = _Copy(dict(zip(trace.entered, given, strict=True)))
            one.regions[trace.region] = note_of(node).region
            copying.copy(trace.forward, one, node)
            made: Mapping[int, Any] = trace.made
        else:
            # A copy for each backward: there may be several of one forward.
            one = replace(copies[given[0]], of=dict(copies[given[0]].of))
            one.of.update(zip(trace.seeds, given[1:], strict=True))
            copying.copy(trace.nodes, one, node)
            made = trace.gradients
        for user in list(node.users):
            if user.target is _at:
                inner = made[user.args[1]]
                user.replace_all_uses_with(one.of.get(inner, inner))
                graph.erase_node(user)
    counts = Counter(n.args[0] for n in calls if n.target is block_forward)
    for node in reversed(calls):
        graph.erase_node(node)
    traced = []
    for trace in counts:
        traced += [*trace.entered, *trace.forward]
        for back in trace.backwards.values():
            traced += back.nodes
    for node in reversed(traced):
        if not node.users:  # else it is where a rank is, say, and was remembered for all
            graph.erase_node(node)
    return tuple((trace.kind.__name__, n) for trace, n in counts.items())


@dataclass
class _Copy:
    """What stands for the nodes of a trace in one block, and how its moves and regions count."""

    of: dict[fx.Node, fx.Node]
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
                copy = self.graph.node_copy(node, lambda n: one.of.get(n, n))
                one.of[node] = copy
                copy.meta[NOTE] = self._note(note_of(node), one)

    def _note(self, note: Note, one: _Copy) -> Note:
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
