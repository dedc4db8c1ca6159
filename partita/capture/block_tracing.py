"""Traces of updates: the nodes that one block's update adds to the graph of a step.

`BlockTracing` marks them while they are traced, over aliases of the tensors that come from outside
(`enter_tensor`). A `BlockTrace` has the nodes, until `update_programs` makes a program of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunction as Unheard

from partita.graph.block_calls import BlockBody, block_output
from partita.graph.graph_nodes import add_call, nodes_since
from partita.tensor.tensor_state import count_writes, count_writes_of

from .equal_calls import node_of
from .recorder import Recorder


class NotABlock(BaseException):
    """Updates of a class of optimizers cannot be traced once: capture starts again without them.

    It is a BaseException, so that no `except Exception` of the user catches it.
    """

    def __init__(self, kind: type, reason: str):
        super().__init__(f"{kind.__name__}: {reason}")
        self.kind, self.reason = kind, reason


def add_block_node(
    recorder: Recorder, target: Any, args: Sequence[Any], numbers: Iterable[int]
) -> tuple[fx.Node, list[fx.Node]]:
    """Add a block's node to the graph that is being traced, and a node for each result in
    `numbers`.
    """
    graph = recorder.graph
    node = add_call(graph, target, tuple(args))
    outputs = [add_call(graph, block_output, (node, n)) for n in numbers]
    recorder.note_made(node, *outputs)
    return node, outputs


@dataclass(eq=False, repr=False)
class BlockTrace(BlockBody):
    """The traced update of the parameters of a block.

    Attributes:
        kind: the class of the optimizer.
        written: the positions of the operands that it writes.
    """

    kind: type = field(kw_only=True)
    written: tuple[int, ...] = ()


def traced_node(t: torch.Tensor, kind: type) -> fx.Node:
    """Returns the node that makes `t`. Raises NotABlock, for an optimizer of class `kind`."""
    node = node_of(t)
    if node is None:
        raise NotABlock(kind, "it takes a tensor that the graph does not make")
    return node


class BlockTracing:
    """Traces an update into the graph, and records which nodes belong to it.

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
        """Assign nodes that are added inside the block to the update."""
        first = self.recorder.newest()
        try:
            yield
        finally:
            self.nodes += reversed([*nodes_since(self.recorder.graph, first)])

    def enter_tensor(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that is traced in place of `t`: an alias with no history or layout."""
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
        """Returns the positions of the entered tensors that have been written since."""
        counts = enumerate(zip(self._writes, count_writes_of(entered), strict=True))
        return tuple(i for i, (before, now) in counts if before != now)
