"""Checks of the graph that a run has made, before anything is done to it."""

from __future__ import annotations

from torch import fx

from partita.layout import Fix
from partita.tensor.op_facts import facts_of

from ..errors import not_captured
from ..node_metadata import note_of
from ..verify import SPACES
from .refusals import not_an_input

__all__ = ["check_constants", "check_operators"]


def check_constants(graph: fx.Graph) -> None:
    """Raise CaptureError if a tensor that is no input has come into the graph with its value.

    What a step makes of numbers is copied first. Fake modes refuse any other tensor, but a proxy
    mode takes some calls of a tensor of one number on itself.
    """
    for node in graph.find_nodes(op="get_attr"):
        for user in node.users:
            if user.op == "call_function" and not facts_of(user.target).lifts:
                raise not_an_input(note_of(user).source)


def check_operators(graph: fx.Graph) -> None:
    """Raise CaptureError if the step calls an operator that is not torch's own."""
    for node in graph.nodes:
        space = getattr(node.target, "namespace", "aten")
        if node.op == "call_function" and space not in (*SPACES, "profiler"):
            raise not_captured(
                f"the step calls {node.target}, an operator of a library of its own",
                "what it writes, draws or sends no schema says for sure, and a graph must know",
                Fix("call it outside the step", "before or after, or between compiled regions"),
                place=note_of(node).source,
            )
