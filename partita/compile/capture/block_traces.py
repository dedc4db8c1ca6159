"""Block traces: the nodes of one block structure in a step's graph, traced once.

`BlockTracing` marks which nodes of the graph a traced block adds. `BlockTrace` keeps them, with the
nodes that stand for the block's operands; `differentiate_block` adds those of its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from partita.tensor.dtensor import tagged
from partita.tensor.op_facts import facts_of
from partita.tensor.tensor_state import own_state, state_of

from ..graph_nodes import add_call
from .block_follower import BlockFollower, stand_in
from .block_nodes import BackwardBody, BlockBody, block_number
from .block_tape import BlockTape, NotABlock, VaryingFloatRead
from .differentiate import differentiate
from .recorder import Recorder
from .traced_tensors import node_of

__all__ = ["BlockTrace", "BlockTracing", "differentiate_block", "traced_node"]


@dataclass(eq=False, repr=False)
class BlockTrace(BlockBody):
    """The traced forward of a block structure, and what is needed to differentiate it.

    Attributes:
        tape: the calls of its blocks.
        likes: by number, a tensor of the metadata of each made tensor.
        results, takes: by number, the traced results and outer tensors that require a gradient.
        backwards: by the gradients' strides and dtypes, which inputs train, and torch's modes.
        written: the numbers of the tensors from outside that it writes in place. Not empty for the
            update of an optimizer, and for no other block.
    """

    tape: BlockTape = field(default_factory=BlockTape)
    likes: dict[int, FakeTensor] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    takes: dict[int, torch.Tensor] = field(default_factory=dict)
    backwards: dict[Any, BackwardBody] = field(default_factory=dict)
    written: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return "'a block'"  # as code: it stands among the operands of a node


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
            if any(t._version != v for t, v in follower.gathered):
                raise NotABlock(follower.kind, "it writes into a gathered parameter")
            if any(t.layout is not torch.strided for t in (*taken, *made)):
                raise NotABlock(follower.kind, "it computes with sparse tensors")
            memory = {t.untyped_storage()._cdata for t in taken}
            if any(made[n].untyped_storage()._cdata in memory for n in tape.escapes):
                raise NotABlock(follower.kind, "it gives a view of what it takes from outside")
        forward, self.nodes = self.nodes, []
        nodes = {n: traced_node(t, follower.kind) for n, t in enumerate(made)}
        trace = BlockTrace(follower.kind, self._entered, nodes, forward, tape=tape)
        trace.region, trace.numbers = self._region, self.numbers
        trace.labels = tuple(follower.labels)
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
) -> BackwardBody:
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
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise NotABlock(trace.kind, "a gradient of what it takes is sparse")
    names = {node.name: node for node in tracing.nodes}
    return BackwardBody(
        [names[seed.node] for seed in seeds],
        {
            i: traced_node(g, trace.kind)
            for i, g in zip(wanted, gradients, strict=True)
            if g is not None
        },
        tracing.nodes,
    )
