"""The lowering of a trace: what of a trace is the step's program?

A trace has an input for everything that the step could have read, and an output for everything that
it left somewhere. What it did not read is no input, and what would only hold memory afterwards no
output; nothing of the call that was captured, which will be over, stays in the program.
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

from ..captured_program import CapturedProgram
from ..conditions import Conditions
from ..graph_nodes import drop_unused
from ..padding_boundary import border_of
from ..program import Input, Output
from ..replicated_input_check import compared
from .inputs import GraphInputs
from .shared_results import refuse_cut_views

__all__ = ["Trace"]


@dataclass(frozen=True, eq=False)
class Trace:
    """A step's graph without writes, and what its inputs and outputs are.

    Attributes:
        inputs: in the graph's order.
        wires: for each wire of theirs what stood in for it.
        outputs: in the graph's order; the last are the plain values that were admitted.
        result, constants: as in a `Program`.
        cleared: places of the tensors whose gradients the step leaves None.
        conditions: what it has asked of its numbers.
    """

    inputs: GraphInputs
    wires: dict[Wire, TraceWire]
    outputs: list[Output]
    result: pytree.TreeSpec
    constants: list[Any]
    cleared: list[int]
    conditions: Conditions

    def program(self, made: fx.GraphModule) -> CapturedProgram:
        """The program whose graph `made` is; that is changed in place."""
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
            compared=compared(made, used, admitted, user_line()),
            conditions=self.conditions,
        )

    def _select_outputs(
        self, graph: fx.Graph, cleared: list[int]
    ) -> tuple[list[Output], list[Any]]:
        """The outputs that stay, and the values that were admitted. Others leave the graph."""
        (end,) = graph.find_nodes(op="output")
        updated = self._updated_by_gradients(graph, end.args[0])
        dropped = self._dropped_gradients(graph)
        kept, admitted = [], []
        wires = iter([t.real for t in self.wires.values() for _ in t.admitted])
        for output, value in zip(self.outputs, end.args[0], strict=True):
            # What a step cleared first, and then updated by, has done its work: it would only
            # hold memory. A gradient that is the step's result, or accumulates, is kept.
            if output.kind == "admitted":
                admitted.append((value.args[0], next(wires)))
            elif output.kind == "gradient" and output.index in updated & dropped:
                cleared.append(output.index)
            else:
                kept.append((output, value))
        end.args = ([value for _, value in kept],)
        drop_unused(graph)
        return [output for output, _ in kept], admitted

    def _updated_by_gradients(self, graph: fx.Graph, values: Sequence[fx.Node]) -> set[int]:
        """The places of the tensors whose new values are reckoned from the gradients made here."""
        pairs = zip(self.outputs, values, strict=True)
        gradients = {value: out.index for out, value in pairs if out.kind == "gradient"}
        nodes = graph.find_nodes(op="placeholder")
        places = dict(zip(nodes, self.inputs.all, strict=True))
        found = set()
        reached: dict[fx.Node, int] = {}  # by the gradients of which places, a bit each
        for node in graph.nodes:
            bits = 1 << gradients[node] if node in gradients else 0
            for read in node.all_input_nodes:
                bits |= reached[read]
            reached[node] = bits
            if node.target is torch.ops.aten.copy_.default:
                given = places[node.args[0]]
                if given.kind != "gradient" and reached[node.args[1]] >> given.index & 1:
                    found.add(given.index)
        return found

    def _without_memory(self, given: Input) -> Input:
        """The input, but holding nothing of the call that is captured."""
        if given.kind != "argument" and given.tensor.is_leaf:
            return given
        with Local(), torch.no_grad():
            like = self.inputs.stand_in(given.tensor).detach()
        return replace(given, tensor=like if given.spec is None else tagged(like, given.spec))

    def _dropped_gradients(self, graph: fx.Graph) -> set[int]:
        """Whose gradients, as it found them, the step did not read."""
        nodes = graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self.inputs.all, strict=True)
        return {
            given.index
            for node, given in pairs
            if given.kind in ("mark", "gradient") and not node.users
        }
