"""Rewriting: the functions with which a pass finds nodes, adds nodes and replaces nodes.

A pass may also use the methods of FX, but other passes read metadata of new nodes. The functions
here write these: the fake value (`meta["val"]`) and the note (`graph_nodes.Note`) with the user's
line and the phase.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..fake_values import call_without_memory
from ..graph_nodes import NOTE, Note, add_call, note_of
from ..program import Program
from ..verify import IllegalGraph


def find(program: Program, *targets: Any, **fields: Any) -> list[fx.Node]:
    """Returns a list of the call nodes of a graph that match. The graph may then be changed.

    Args:
        program: the program that has the graph.
        targets: operators: `torch.ops.aten.mul.Tensor`, or `torch.ops.aten.mul` for all overloads;
            without targets, any call.
        fields: values of the notes' fields (`partita.graph.graph_nodes.Note`): `kind="all_gather"`,
            `phase="backward"`, `reason="gather"`.
    """
    found = []
    for node in program.graph.graph.nodes:
        if node.op == "call_function" and (not targets or _is_call_of(node, targets)):
            note = note_of(node)
            if all(getattr(note, name) == value for name, value in fields.items()):
                found.append(node)
    return found


def _is_call_of(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    target: Any = node.target
    return target in targets or getattr(target, "overloadpacket", None) in targets


def put(target: Any, *args: Any, before: fx.Node, **kwargs: Any) -> fx.Node:
    """Adds the call `target(*args, **kwargs)` before the node `before`, and returns its node.

    The new node has the user's line and the phase of `before`.
    """
    with before.graph.inserting_before(before):
        note = note_of(before)
        return NodeBuilder(before.graph, Note(note.source, note.phase))(target, *args, **kwargs)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Makes all users of the node `old` read `new`. Unused nodes are dropped after the pass.

    Raises:
        IllegalGraph: their shapes or dtypes differ.
    """
    before, after = old.meta.get("val"), new.meta.get("val")
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        was, now = (f"{v.dtype} {list(v.shape)}" for v in (before, after))
        if was != now:
            raise IllegalGraph(
                f"{new.name}, {now}, cannot stand for {old.name}, {was}",
                place=note_of(old).source,
            )
    old.replace_all_uses_with(new)


# -- new nodes -------------------------------------------------------------------------------------


class NodeBuilder:
    """Adds several calls to a graph, with the metadata that passes need: fake values and one note.

        with graph.inserting_before(node):
            make = NodeBuilder(graph, note_of(node))
            flat = make(torch.ops.aten.reshape.default, x, [-1])

    The fake value is the call's result over fake tensors: its shape, dtype and strides.
    """

    def __init__(self, graph: fx.Graph, note: Note):
        self.graph, self.note = graph, note

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = add_call(self.graph, target, args, kwargs)
        node.meta["val"] = fake_value_of(node)
        node.meta[NOTE] = self.note
        return node


def fake_value_of(node: fx.Node) -> Any:
    """Returns a node's fake value (shape, dtype, strides), computed from its operands'."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return call_without_memory(node.target, args, kwargs).value
