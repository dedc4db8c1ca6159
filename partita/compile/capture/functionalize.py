"""A captured graph without writes: each node is a value, which a pass may move, merge or drop.

What a step writes in place (gradients that are added up, parameters, optimizer state) becomes a new
value; what it wrote into its inputs is copied into them by the last nodes of the graph. Only these
`copy_` write. The graph is rewritten call by call; where it is not sure which values a write
changes, it is traced once more under torch's own functionalization, which takes as long as capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

from ..effects import drop_unused
from .equal_counts import reckon_once
from .functional_memory import makers_of_shared, memory_that_is_written
from .functional_rewrite import UnsureOfWrites, rewrite_without_writes
from .functional_trace import trace_without_writes
from .overlapping_results import keep_apart, overlapping_results
from .shared_results import share_memory_of_results
from .views_in_place import without_views_in_place

__all__ = ["functionalize_graph"]

_aten = torch.ops.aten


def functionalize_graph(
    graph: fx.GraphModule, equal: Sequence[Sequence[int]] = ()
) -> fx.GraphModule:
    """`graph` without writes but for `copy_` into inputs at its end. Notes are kept.

    Args:
        equal: inputs that hold the same number, by their places.
    """
    without_views_in_place(graph.graph)
    memory = memory_that_is_written(graph.graph)
    makers = makers_of_shared(graph.graph, memory)
    try:
        made, shared = rewrite_without_writes(graph, memory, makers)
    except UnsureOfWrites:
        made, shared = trace_without_writes(graph, makers)
    share_memory_of_results(graph.graph, made.graph, memory, shared)
    overlapping = overlapping_results(made.graph)
    inputs = made.graph.find_nodes(op="placeholder")
    reckon_once(made.graph, [[inputs[i] for i in places] for places in equal])
    _remove_redundant_nodes(made.graph)
    keep_apart(made.graph, overlapping)  # a gradient is a copy of what came, where others have that
    return made


def _remove_redundant_nodes(graph: fx.Graph) -> None:
    """Drop what functionalization and autograd leave: aliases, and copies into fresh memory."""
    for node in list(graph.nodes):
        if facts_of(node.target).shows_all:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is _aten.copy.default:
            into, value = node.args[0], node.args[1]
            if _has_same_metadata(into, value) and not node.args[2:]:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)  # marks for a profiler, which torch's optimizers set
    drop_unused(graph)


def _has_same_metadata(a: Any, b: Any) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )
