"""Nodes and modules of graphs: added, copied and dropped without what torch.fx spends on them.

`fx.Graph` walks through the operands of each new call to warn of symbolic numbers: half of what a
node costs. A captured graph (`verify`) has none, so operands are assigned afterwards.
`fx.GraphModule` writes and compiles Python code whenever its graph is set; between capture and the
last pass nobody runs it, so that the modules here do it on first use. `drop_unused` erases calls
whose value nobody uses, unless they have an effect: they write, draw or check.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx import _lazy_graph_module

from partita.tensor.op_facts import facts_of

__all__ = [
    "GraphPart",
    "add_call",
    "checks_value",
    "copy_graph",
    "copy_node",
    "drop_unused",
    "has_effect",
    "key_of_operands",
    "lazy_graph_module",
    "lazy_graph_modules",
    "written_inputs_of",
    "written_operands",
]

_COPY = torch.ops.aten.copy_.default
_GRAPH = fx.Graph()


def add_call(
    graph: fx.Graph, target: Any, args: Any = (), kwargs: Any = None, name: str | None = None
) -> fx.Node:
    """Add a call at the graph's insertion point; as `fx.Graph.call_function`."""
    node = graph.create_node("call_function", target, name=name or _name_of(target))
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


@lru_cache(maxsize=4096)
def _name_of(target: Any) -> str:
    """How fx calls a node of a target, before it appends a number. Private torch."""
    found: str = _GRAPH._target_to_str(target)
    return found


def copy_node(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any]) -> fx.Node:
    """Add a copy of a node whose operands are mapped by `of`; as `fx.Graph.node_copy`."""
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    made.args = fx.node.map_arg(node.args, of)
    if node.kwargs:
        made.kwargs = fx.node.map_arg(node.kwargs, of)
    made.meta = copy.copy(node.meta)
    return made


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, its output included."""
    made, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        of[node] = copy_node(made, node, of.__getitem__)
    return made


def key_of_operands(value: Any) -> Any:
    """A key of operands, in which 1 is not 1.0, nor True, and 0.0 is not -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(key_of_operands(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, key_of_operands(v)) for k, v in value.items())
    if isinstance(value, float):
        return float, value.hex()
    return (type(value), value) if isinstance(value, (bool, int)) else value


# -- modules ---------------------------------------------------------------------------------------


def lazy_graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of `graph` with the attributes of `root` that it uses; its code is made on use."""
    # Private torch: its own class for this, which Inductor and Dynamo use.
    made: fx.GraphModule = _lazy_graph_module._LazyGraphModule(root, graph)
    return made


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Within, the modules that `make_fx` makes have their code made on use, too."""
    found: AbstractContextManager[None] = _lazy_graph_module._use_lazy_graph_module(True)
    return found


# -- effects ---------------------------------------------------------------------------------------


class GraphPart:
    """A part of a graph, a graph of its own, that stands in it as one call: the first operand of
    that call.

    Attributes:
        has_effect: does it write, draw or check?
        written: the places, among what is given to the part, of what it writes.
    """

    has_effect: bool
    written: tuple[int, ...] = ()

    def operands(self, call: fx.Node) -> Sequence[Any]:
        """What a call gives to the part: of a block what stands behind its first two operands."""
        return call.args[2:]


def written_inputs_of(graph: fx.Graph) -> tuple[int, ...]:
    """The places of the inputs that a graph without writes but into inputs writes."""
    places = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    return tuple(places[written] for node in graph.nodes for written in written_operands(node))


def written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a call of a graph without writes but into inputs writes: those of `copy_`
    and of parts in which it is."""
    if node.target is _COPY:
        yield node.args[0]  # type: ignore[misc]
    elif node.args and isinstance(part := node.args[0], GraphPart) and part.written:
        operands = part.operands(node)
        for place in part.written:
            yield operands[place]


def drop_unused(graph: fx.Graph) -> None:
    """Erase calls whose value nobody uses, collectives too, unless they have an effect."""
    for node in reversed(graph.nodes):  # fx's own looks at the whole graph first
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Must a node stay though nobody uses its value: does it write, draw or check?"""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if node.args and isinstance(node.args[0], GraphPart):
        return node.args[0].has_effect
    facts = facts_of(node.target)
    if facts.statistics:
        return bool(node.args[3] is not None and node.args[5])
    return bool(facts.writes) or facts.draws or facts.checks


def checks_value(node: fx.Node) -> bool:
    """Does a call only raise where a value is not as it must be?"""
    return node.op == "call_function" and facts_of(node.target).checks
