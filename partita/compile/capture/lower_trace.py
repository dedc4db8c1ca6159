"""Lowering of a trace: which inputs and outputs of the traced graph the step's program keeps.

A trace has an input for everything that the step could have read, and an output for everything that
it left somewhere. Inputs that are not read are dropped, and so are gradients that the step clears
before backward and updates by: they would only hold memory. Tensors of the captured call, which
will be over, are replaced by fakes of the same metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils import _pytree as pytree

from partita.comm import TraceWire, Wire, user_line
from partita.tensor.dtensor import tagged

from ..captured_program import CapturedProgram, extract_compared
from ..conditions import Conditions
from ..graph_nodes import drop_unused, written_operands
from ..program import Input, Output, border_of
from .block_nodes import is_block_node
from .inputs import GraphInputs
from .shared_results import refuse_cut_views

__all__ = ["StepTrace"]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """What the inputs and outputs of a traced graph are.

    Attributes:
        inputs: in the graph's order.
        wires: by real wire, the one that traced.
        outputs: in the graph's order; "admitted" are plain values taken as equal on all ranks.
        result, constants: as in a `Program`.
        cleared: places, in the call, of tensors whose gradients the step leaves None.
        conditions: under which the program may run.
    """

    inputs: GraphInputs
    wires: dict[Wire, TraceWire]
    outputs: list[Output]
    result: pytree.TreeSpec
    constants: list[Any]
    cleared: list[int]
    conditions: Conditions

    def program(self, made: fx.GraphModule) -> CapturedProgram:
        """The program of the graph `made`, which is changed in place."""
        cleared = list(self.cleared)
        kept, admitted = self._select_outputs(made.graph, cleared)
        cut = [i for i, output in enumerate(kept) if border_of(output.spec) is not None]
        if cut:
            refuse_cut_views(made.graph, cut)
        used: dict[fx.Node, Input] = {}
        for node, given in zip(
            made.graph.find_nodes(op="placeholder"), self.inputs.all, strict=True
        ):
            if node.users:
                used[node] = self._without_memory(given)
            else:
                made.graph.erase_node(node)
        groups = {
            name: (trace.real, axes)
            for trace in self.wires.values()
            for name, axes in trace.groups.items()
        }
        return CapturedProgram(
            made,
            [*used.values()],
            kept,
            self.result,
            self.constants,
            sorted(set(cleared)),
            groups,
            compared=extract_compared(made, used, admitted, user_line()),
            conditions=self.conditions,
        )

    def _select_outputs(
        self, graph: fx.Graph, cleared: list[int]
    ) -> tuple[list[Output], list[Any]]:
        """The outputs that stay and the admitted (node, wire)s; others are taken off the graph."""
        (end,) = graph.find_nodes(op="output")
        updated = self._updated_by_gradients(graph, end.args[0])
        dropped = self._dropped_gradients(graph)
        kept, admitted = [], []
        wires = iter([t.real for t in self.wires.values() for _ in t.admitted])
        for output, value in zip(self.outputs, end.args[0], strict=True):
            # A gradient that the step did not accumulate, and that its update has used, would only
            # hold memory. One that accumulates, or is used by nothing, is kept.
            if output.kind == "admitted":
                admitted.append((_find_compared(value), next(wires)))
            elif output.kind == "gradient" and output.index in updated & dropped:
                cleared.append(output.index)
            else:
                kept.append((output, value))
        end.args = ([value for _, value in kept],)
        drop_unused(graph)
        return [output for output, _ in kept], admitted

    def _updated_by_gradients(self, graph: fx.Graph, values: Sequence[fx.Node]) -> set[int]:
        """The places of tensors whose new values are computed from their new gradients."""
        pairs = zip(self.outputs, values, strict=True)
        gradients = {value: out.index for out, value in pairs if out.kind == "gradient"}
        nodes = graph.find_nodes(op="placeholder")
        places = dict(zip(nodes, self.inputs.all, strict=True))
        found = set()
        reached: dict[
            fx.Node, int
        ] = {}  # a bit for the place of each gradient that a node depends on
        for node in graph.nodes:
            bits = 1 << gradients[node] if node in gradients else 0
            for read in node.all_input_nodes:
                bits |= reached[read]
            reached[node] = bits
            for written in written_operands(node):
                given = places[written]
                if given.kind != "gradient" and bits >> given.index & 1:
                    found.add(given.index)
        return found

    def _without_memory(self, given: Input) -> Input:
        """The input with a fake in place of a tensor that belongs to the captured call alone."""
        if given.kind != "argument" and given.tensor.is_leaf:
            return given
        with Local(), torch.no_grad():
            like = self.inputs.stand_in(given.tensor).detach()
        return replace(given, tensor=like if given.spec is None else tagged(like, given.spec))

    def _dropped_gradients(self, graph: fx.Graph) -> set[int]:
        """The places of tensors whose gradients, as the step found them, it did not read."""
        nodes = graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self.inputs.all, strict=True)
        return {
            given.index
            for node, given in pairs
            if given.kind in ("mark", "gradient") and not node.users
        }


def _find_compared(value: fx.Node) -> fx.Node:
    """What is compared for an "admitted" output, which is a copy of it; that of a block is made in
    the block."""
    return value if is_block_node(value) else value.args[0]  # type: ignore[return-value]
