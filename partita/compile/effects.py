"""Effects of a graph's calls: which do something though nobody reads what they give?"""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["NORMS", "drop_unused", "has_effect"]

_aten = torch.ops.aten
NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
"""Which write running statistics, and their schemas do not say so."""


def drop_unused(graph: fx.Graph) -> None:
    """Erase every call whose value nobody reads, collectives too, but none that does something."""
    for node in reversed(graph.nodes):  # fx's own looks at the whole graph first
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Does it do something though nobody reads its value: does it write, or draw a number?"""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if node.target in NORMS:  # whose schemas do not say that they write running statistics
        return bool(node.args[3] is not None and node.args[5])
    schema = getattr(node.target, "_schema", None)
    writes = schema is not None and schema.is_mutable
    return writes or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
