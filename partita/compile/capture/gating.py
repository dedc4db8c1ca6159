"""Gated writes: a graph that leaves what it writes as it was where answers are others.

See `answers`. Each `copy_` into an input writes what it would only if all answers are those that
the program was made for, else what the input holds; no write waits for Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from partita.layout import Fix
from partita.tensor.op_facts import facts_of

from ..effects import has_effect
from ..errors import not_captured
from ..node_metadata import note_of
from ..passes.making import Making

__all__ = ["gate_writes"]

_aten = torch.ops.aten


def gate_writes(graph: fx.Graph, answers: Sequence[bool]) -> None:
    """Have a graph write only where the answers, its last outputs, are those that are given.

    They become one output: a tensor of bools.

    Raises:
        CaptureError: a call of the graph writes by itself, whatever the answers are.
    """
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])
    results, found = values[: -len(answers)], values[-len(answers) :]
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    for node in graph.nodes:
        writes = node.op == "call_function" and has_effect(node) and node not in copies
        facts = facts_of(node.target)
        if writes and not (facts.draws or facts.checks):
            raise not_captured(
                f"{node.target} writes, in a step in which torch asks for a value",
                "it would have written before the answer is known",
                Fix("do it outside the step", "before or after the call"),
                place=note_of(node).source,
            )
    with graph.inserting_before(copies[0] if copies else end):
        make = Making(graph, note_of(found[-1]))
        answers_found = make(_aten.stack.default, found)
        if copies:
            held = [
                v if a else make(_aten.logical_not.default, v)
                for v, a in zip(found, answers, strict=True)
            ]
            all_hold = make(_aten.all.default, make(_aten.stack.default, held))
    for copy in copies:
        into, value = copy.args[:2]
        with graph.inserting_before(copy):
            make = Making(graph, note_of(copy))
            now, was = value.meta["val"], into.meta["val"]
            if now.dtype != was.dtype:
                value = make(_aten._to_copy.default, value, dtype=was.dtype)
            holds = all_hold
            if was.device != holds.meta["val"].device:
                holds = make(_aten._to_copy.default, holds, device=was.device)
            copy.args = (into, make(_aten.where.self, holds, value, into), *copy.args[2:])
    end.args = ([*results, answers_found],)
