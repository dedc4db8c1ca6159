"""The verifier: checks that a graph is legal, after the last pass.

With PARTITA_VERIFY=1 it also checks after capture and after each pass. In a legal graph:

- there are inputs, constants, calls and one output; each value is made before it is used
- calls are of ATen ops, functional collectives, a user's operators that only return new tensors,
  and sections (such graphs without collectives)
- the only writes are `copy_` into inputs, at most one for each input, which is not read afterwards
- the graph waits for a collective before its result is read, and the collective's group is one of
  the program's
- the coordinates among the inputs are the only values that depend on the rank
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from partita.comm.collective import WAIT
from partita.layout import LayoutError
from partita.tensor.op_facts import facts_of, find_unknown_effect

from .graph_nodes import is_collective, note_of, subgraph_of, written_operands
from .program import Program

_COPY = torch.ops.aten.copy_.default
SPACES = ("aten", "prims", "_c10d_functional", "partita")


class IllegalGraph(LayoutError):
    """Raised if capture or a pass has made a graph that breaks the rules for legal graphs."""


def verifies_each_pass() -> bool:
    """True if PARTITA_VERIFY is set: the graph is then checked after each pass.

    An error names the pass.
    """
    return os.environ.get("PARTITA_VERIFY", "") not in ("", "0")


def verify(program: Program, after: str) -> None:
    """Raises IllegalGraph if the program's graph breaks a rule of the grammar (see the module).

    Args:
        after: the name of the last pass, for the error.
    """
    for node, fact in _find_faults(program):
        place = "" if node is None else note_of(node).source
        shown = () if node is None else (node.format_node() or node.name,)
        raise IllegalGraph(f"after {after}: {fact}", place=place, operands=shown)


def _find_faults(program: Program) -> Iterator[tuple[fx.Node | None, str]]:
    """Yields each violation of the grammar: its node, or None, and a text."""
    graph = program.graph.graph
    seen: set[fx.Node] = set()
    begun = {*filter(is_collective, graph.nodes)}
    closed: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                yield node, f"{used.name} is used before it is made"
            if used in closed and node.op != "output":
                yield node, f"{used.name} is read after {closed[used].name} wrote it"
            if used in begun and node.target is not WAIT:
                yield node, f"{used.name} is read before it is waited for"
        if node.op == "call_function":
            for fact in _find_faults_of_call(program, node):
                yield node, fact
            closed.update((written, node) for written in written_operands(node))
        elif node.op not in ("placeholder", "get_attr", "output"):
            yield node, f"a graph has no {node.op}"
        seen.add(node)
    fakes: set[int] = set()
    inputs = graph.find_nodes(op="placeholder")
    for node in inputs:  # tracers, as a compiler's, identify an input by its fake
        if id(node.meta["val"]) in fakes:
            yield node, f"{node.name} shares its fake tensor with another input"
        fakes.add(id(node.meta["val"]))
    if len(inputs) != len(program.inputs):
        yield None, f"{len(inputs)} inputs, and the program has others"
    (end,) = graph.find_nodes(op="output")
    if len(end.args[0]) != len(program.outputs):
        yield end, "the number of results differs from the program's"


def _find_faults_of_call(program: Program, node: fx.Node) -> Iterator[str]:
    target: Any = node.target
    if target is operator.getitem or subgraph_of(node) is not None:
        return
    if not isinstance(target, torch._ops.OpOverload):
        yield f"{target} is not an operator of torch"
    if target.namespace not in SPACES and (effect := find_unknown_effect(target)):
        yield f"operators of {target.namespace} have no meaning here: {effect}"
    if target is _COPY:
        if not isinstance(node.args[0], fx.Node) or node.args[0].op != "placeholder":
            yield "only inputs are written"
    elif facts_of(target).writes:
        yield f"{target} writes"
    if "val" not in node.meta:
        yield "it has no fake value"
    if is_collective(node) and node.args[-1] not in program.groups:
        yield f"{node.args[-1]!r} is not one of the program's groups"
