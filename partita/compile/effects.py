"""Effects of a graph's calls: which do something though nobody reads what they give?"""

from __future__ import annotations

from torch import fx

from partita.tensor.op_facts import facts_of

__all__ = ["checks_value", "drop_unused", "has_effect"]


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
