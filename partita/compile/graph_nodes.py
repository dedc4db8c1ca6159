"""Nodes of a graph, added, copied and told apart in one way.

`fx.Graph` walks through the operands of each call that it is given, to warn of symbolic numbers
among them: half of what a node costs, and a graph has thousands. The grammar of a captured graph
(`verify`) has none. A node that is given its operands afterwards is the same, without the walk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch.fx import _lazy_graph_module

from partita.tensor.op_facts import facts_of

__all__ = [
    "add_call",
    "checks_value",
    "copy_node",
    "drop_unused",
    "has_effect",
    "key_of_operands",
    "lazy_graph_module",
    "lazy_graph_modules",
]


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


def lazy_graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of `graph`, with what it needs of `root`."""
    # Private torch: its own class for this, which Inductor and Dynamo use.
    made: fx.GraphModule = _lazy_graph_module._LazyGraphModule(root, graph)
    return made


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Within, the modules that `make_fx` makes are such, too."""
    found: AbstractContextManager[None] = _lazy_graph_module._use_lazy_graph_module(True)
    return found


def drop_unused(graph: fx.Graph) -> None:
    """Erase every call whose value nobody reads, collectives too, but none that does something."""
    for node in reversed(graph.nodes):  # fx's own looks at the whole graph first
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Does it do something though nobody reads its value: does it write, or draw a number?"""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    facts = facts_of(node.target)
    if facts.statistics:
        return bool(node.args[3] is not None and node.args[5])
    return bool(facts.writes) or facts.draws or facts.checks


def checks_value(node: fx.Node) -> bool:
    """Does it give nothing, and raise where a value is not as it must be?"""
    return node.op == "call_function" and facts_of(node.target).checks
