"""Merging of views: a view of a view becomes one view, and a view of equal shape is dropped."""

from __future__ import annotations

import torch
from torch import fx

from ..capture.functional_memory import lie_alike
from ..program import Program
from .rewrite import fake_value_of

_VIEW = torch.ops.aten.view.default
_RESHAPE = torch.ops.aten.reshape.default


def merge_views(program: Program) -> str:
    """What is shown in one shape and then in another is shown in the last at once.

    A view of the shape that its operand has is dropped. Moves flatten what they carry, and buckets
    flatten the moves' results again: on a small model these are as many calls as the rest. Outputs
    of the step are left as they are.
    """
    graph = program.graph.graph
    (end,) = graph.find_nodes(op="output")
    returned = set(end.all_input_nodes)
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if node.target not in (_VIEW, _RESHAPE) or node in returned:
            continue
        (shown,) = node.all_input_nodes
        same = lie_alike(shown.meta["val"], node.meta["val"])
        if same or (shown not in returned and len(shown.users) == 1 and _try_show(shown, node)):
            node.replace_all_uses_with(shown)
            graph.erase_node(node)
    return f"{before - len(graph.nodes)} views merged into others"


def _try_show(shown: fx.Node, node: fx.Node) -> bool:
    """Give the view `shown` the shape of its view `node`, unless strides would then differ.

    `shown` keeps its place in the graph: a reshape that copies frees what it copied there.
    """
    if shown.target not in (_VIEW, _RESHAPE):
        return False
    target, args = shown.target, shown.args
    if node.target is _RESHAPE:
        shown.target = _RESHAPE
    shown.args = (args[0], *node.args[1:])
    try:
        if lie_alike(fake_value_of(shown), node.meta["val"]):
            shown.meta["val"] = node.meta["val"]
            return True
    except RuntimeError:  # no view of it has that shape
        pass
    shown.target, shown.args = target, args
    return False
