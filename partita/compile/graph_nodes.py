"""Nodes and modules of graphs: added, copied and dropped without what torch.fx spends on them.

`fx.Graph` walks through the operands of each new call to warn of symbolic numbers: half of what a
node costs. A captured graph (`verify`) has none, so operands are assigned afterwards.
`fx.GraphModule` writes and compiles Python code whenever its graph is set; between capture and the
last pass nobody runs it, so that the modules here do it on first use. `drop_unused` erases calls
whose value nobody uses, unless they have an effect: they write, draw or check.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx import _lazy_graph_module

from partita.comm.collective import all_gather, all_to_all
from partita.tensor.op_facts import facts_of

__all__ = [
    "NOTE",
    "NO_NOTE",
    "GraphPart",
    "Note",
    "add_call",
    "behind_needs",
    "checks_value",
    "copy_graph",
    "copy_node",
    "drop_unused",
    "has_effect",
    "is_collective",
    "key_of_operands",
    "lazy_graph_module",
    "lazy_graph_modules",
    "nbytes_of",
    "note_of",
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


# -- where a node comes from -----------------------------------------------------------------------


NOTE = "partita"
"""The key of the note in a node's `meta`."""


@dataclass(frozen=True)
class Note:
    """Where a node comes from.

    Attributes:
        source: the user's "file:line".
        phase: "forward", "backward" or "update" (within an optimizer's step).
        layout: of the value, where it is a DTensor.
        kind, axes, nbytes, op, reason, before, after: of the move that the node belongs to, as in
            a ledger's `Record`; kind is "" where there is none.
        move: the number of the move in the step; 0 for none.
        region: the number of the call of a `pt.remat` region; 0 outside.
        kept: the region's policy keeps the value.
        again: a pass added the node, to recompute or gather again what forward had.
        budget: (number, bytes) of the remat budget that applies to it; None for none.
    """

    source: str = ""
    phase: str = "forward"
    layout: str = ""
    kind: str = ""
    axes: tuple[str, ...] = ()
    nbytes: int = 0
    op: str = ""
    reason: str = ""
    before: str = ""
    after: str = ""
    move: int = 0
    region: int = 0
    kept: bool = False
    again: bool = False
    budget: tuple[int, int] | None = None


def note_of(node: fx.Node) -> Note:
    """The note of a node; an empty one where it has none."""
    found: Note = node.meta.get(NOTE, NO_NOTE)
    return found


NO_NOTE = Note()


# -- what a node is --------------------------------------------------------------------------------


def nbytes_of(node: fx.Node) -> int:
    """Bytes of a node's value on a rank; 0 where that is no tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def is_collective(node: fx.Node) -> bool:
    """Is it a collective that sends?"""
    return node.op == "call_function" and _sends(node.target)


@functools.lru_cache(maxsize=4096)
def _sends(target: Any) -> bool:
    """Do calls of `target` send?"""
    named = getattr(target, "namespace", "") == "_c10d_functional"
    return (named and "wait_tensor" not in str(target)) or target in (all_gather, all_to_all)


# -- order -----------------------------------------------------------------------------------------


N = TypeVar("N", bound=Hashable)


def behind_needs(wanted: Iterable[N], needs: Mapping[N, Sequence[N]], done: set[N]) -> Iterator[N]:
    """`wanted` in order, each after what it needs, without what is done.

    Args:
        needs: by node what it needs, without cycles; what is not a key is there already.
        done: what was yielded is added.
    """
    stack = list(wanted)[::-1]
    while stack:
        node = stack[-1]
        waiting = [n for n in needs[node] if n in needs and n not in done]
        if waiting and node not in done:
            stack += reversed(waiting)
            continue
        stack.pop()
        if node not in done:
            done.add(node)
            yield node
