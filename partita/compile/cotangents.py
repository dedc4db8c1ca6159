"""Cotangents: of which results' gradients is a value of a graph made?

Autograd gives nothing, and not zeros, where none of these is there. So values that are made of
other ones do not travel together either.
"""

from __future__ import annotations

from torch import fx

from .program import Program

__all__ = ["find_cotangents"]

_NONE: frozenset[int] = frozenset()


def find_cotangents(program: Program) -> dict[fx.Node, frozenset[int]]:
    """For each node the numbers of the results whose gradients it is computed of; nodes that are
    computed of none are left out."""
    graph = program.graph.graph
    found: dict[fx.Node, frozenset[int]] = {}
    for node, given in zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True):
        if given.kind == "cotangent":
            found[node] = frozenset((given.index,))
    if not found:
        return found
    for node in graph.nodes:
        numbers = _NONE.union(*(found.get(n, _NONE) for n in node.all_input_nodes))
        if numbers:
            found[node] = numbers
    return found
