"""New nodes of a pass: how does a pass put new nodes into a graph?"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..capture.equal_calls import call_without_memory
from ..graph_nodes import add_call
from ..node_metadata import NOTE, Note

__all__ = ["Making", "made_by"]


class Making:
    """Adds calls that know what they make, with one note, where the graph inserts.

        with graph.inserting_before(node):
            make = Making(graph, note_of(node))
            flat = make(torch.ops.aten.reshape.default, x, [-1])

    What it makes is worked out over tensors without memory: shapes, dtypes and strides are what
    the call gives.
    """

    def __init__(self, graph: fx.Graph, note: Note):
        self.graph, self.note = graph, note

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = add_call(self.graph, target, args, kwargs)
        node.meta["val"] = made_by(node)
        node.meta[NOTE] = self.note
        return node


def made_by(node: fx.Node) -> Any:
    """What a call makes of what its operands say that they make: tensors without memory."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return call_without_memory(node.target, args, kwargs).value
