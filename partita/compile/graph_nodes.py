"""Nodes of a graph, added, copied and told apart in one way.

`fx.Graph` walks through the operands of each call that it is given, to warn of symbolic numbers
among them: half of what a node costs, and a graph has thousands. The grammar of a captured graph
(`verify`) has none. A node that is given its operands afterwards is the same, without the walk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import fx

__all__ = ["add_call", "copy_node", "key_of_operands"]


def add_call(
    graph: fx.Graph, target: Any, args: Any = (), kwargs: Any = None, name: str | None = None
) -> fx.Node:
    """A call more, where the graph inserts; as `fx.Graph.call_function`."""
    node = graph.create_node("call_function", target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def copy_node(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any]) -> fx.Node:
    """A copy of a node, of whose operands `of` gives the new ones; as `fx.Graph.node_copy`."""
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    made.args = fx.node.map_arg(node.args, of)
    if node.kwargs:
        made.kwargs = fx.node.map_arg(node.kwargs, of)
    made.meta = copy.copy(node.meta)
    return made


def key_of_operands(value: Any) -> Any:
    """What tells the operands of a call from others: 1 is not 1.0, nor True, and 0.0 not -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(key_of_operands(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, key_of_operands(v)) for k, v in value.items())
    if isinstance(value, float):
        return float, value.hex()
    return (type(value), value) if isinstance(value, (bool, int)) else value
