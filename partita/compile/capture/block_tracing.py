"""Block tracing: a block's calls become nodes of the step's graph, which are taken for a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from partita.tensor.dtensor import tagged
from partita.tensor.op_facts import facts_of
from partita.tensor.tensor_state import own_state, state_of

from ..graph_nodes import add_call
from ..node_metadata import Recorder
from .block_follower import Follower, stand_in
from .block_tape import NotABlock, NumbersRead
from .block_traces import BackwardTrace, BlockTrace, block_number
from .differentiate import differentiate
from .traced_tensors import node_of

__all__ = ["BlockTracing", "differentiate_block", "traced_node"]


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
