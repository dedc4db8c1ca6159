"""Rewriting: how does a pass find nodes, and put others in their place?

A graph may be changed by FX's own methods too. These know what a node makes and where it comes
from, without which other passes could not go on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..capture.equal_calls import call_without_memory
from ..graph_nodes import add_call
from ..node_metadata import NOTE, Note, note_of
from ..program import Program
from ..verify import IllegalGraph

__all__ = ["Making", "find", "made_by", "put", "replace"]


def find(program: Program, *targets: Any, **said: Any) -> list[fx.Node]:
    """The calls of a graph, in order; a list, so that the graph may be changed on the way.

    Args:
        targets: operators, `torch.ops.aten.mul.Tensor` or all of `torch.ops.aten.mul`; any where
            none is given.
        said: what the nodes' notes say (`partita.compile.node_metadata.Note`): `kind="all_gather"`,
            `phase="backward"`, `reason="gather"`.
    """
    found = []
    for node in program.graph.graph.nodes:
        if node.op == "call_function" and (not targets or _is_call_of(node, targets)):
            note = note_of(node)
            if all(getattr(note, name) == value for name, value in said.items()):
                found.append(node)
    return found


def _is_call_of(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    target: Any = node.target
    return target in targets or getattr(target, "overloadpacket", None) in targets


def put(target: Any, *args: Any, before: fx.Node, **kwargs: Any) -> fx.Node:
    """A new call of `target`, which runs before the node `before` and is noted as that is."""
    with before.graph.inserting_before(before):
        return Making(before.graph, _without_move(note_of(before)))(target, *args, **kwargs)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Whoever read `old` reads `new`. What nobody reads any more is dropped after the pass.

    Raises:
        IllegalGraph: the two have other shapes or dtypes.
    """
    one, other = old.meta.get("val"), new.meta.get("val")
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        was, now = (f"{v.dtype} {list(v.shape)}" for v in (one, other))
        if was != now:
            raise IllegalGraph(
                f"{new.name}, {now}, cannot stand for {old.name}, {was}",
                place=note_of(old).source,
            )
    old.replace_all_uses_with(new)


def _without_move(note: Note) -> Note:
    return Note(note.source, note.phase)


# -- new nodes -------------------------------------------------------------------------------------


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
