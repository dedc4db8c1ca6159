"""Merging views: which views show only what another shows already?"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..program import Program
from .making import made_by

__all__ = ["merge_views"]

_VIEW, _RESHAPE = torch.ops.aten.view.default, torch.ops.aten.reshape.default


def merge_views(program: Program) -> str:
    """What is shown in one shape and then in another is shown in the last at once.

    And a shape that is there already is not asked for. Moves flatten what they carry, and buckets
    what the moves gave, each for itself: on a small model that is as many calls as the rest. What
    the step gives is left as it is.
    """
    graph = program.graph.graph
    returned = set(graph.output_node().all_input_nodes)
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if node.target not in (_VIEW, _RESHAPE) or node in returned:
            continue
        while (source := _find_passing_shape(node, returned)) is not None:
            if not _try_show(node, source):
                break
            graph.erase_node(source)
        (shown,) = node.all_input_nodes
        if _lie_alike(shown.meta["val"], node.meta["val"]):
            node.replace_all_uses_with(shown)
            graph.erase_node(node)
    return f"{before - len(graph.nodes)} views merged into others"


def _find_passing_shape(node: fx.Node, returned: set[fx.Node]) -> fx.Node | None:
    """The view of which `node` is one, if nobody else reads that."""
    (source,) = node.all_input_nodes
    passing = source.target in (_VIEW, _RESHAPE) and len(source.users) == 1
    return source if passing and source not in returned else None


def _try_show(node: fx.Node, source: fx.Node) -> bool:
    """Have `node` show at once what `source` shows; not where it would then lie otherwise."""
    target, args = node.target, node.args
    if source.target is _RESHAPE:
        node.target = _RESHAPE
    node.args = (source.args[0], *args[1:])
    try:
        if _lie_alike(made_by(node), node.meta["val"]):
            return True
    except RuntimeError:  # no view of it has that shape
        pass
    node.target, node.args = target, args
    return False


def _lie_alike(one: Any, other: Any) -> bool:
    return bool(
        one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    )
