"""Sections: parts of a program's graph that stand in it as one call, each a graph of its own.

Equal parts are one section, called several times:

    call = call_section(section, [x, weight])     y = call[0]

What a section gives lies in memory of its own; it may write inputs, by the `copy_` calls in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import OpFacts, declare_facts, facts_of

from .graph_nodes import (
    GraphPart,
    add_call,
    copy_node,
    has_effect,
    lazy_graph_module,
    written_inputs_of,
)

__all__ = [
    "DEEP",
    "Section",
    "SectionSchedule",
    "call_section",
    "calls_within",
    "inline_sections",
    "section_of",
    "sections_in",
]

DEEP = 3000
"""Calls in a graph above which it is cut. A smaller one is compiled whole in as little time, and
the call of a section costs some microseconds."""


@dataclass(frozen=True)
class SectionSchedule:
    """The memory of a section in each of its calls, in bytes; what it reads is not counted.

    Attributes:
        live: for each call in it what is allocated while that runs.
        given: what it has allocated in the end: its results.
        last_reads: for each input the place of the last call that reads it.
    """

    live: Sequence[int]
    given: int
    last_reads: Sequence[int]

    @property
    def workspace(self) -> int:
        """The most bytes that are allocated at once beside the results."""
        return max(self.live, default=0) - self.given


@dataclass(eq=False)
class Section(GraphPart):
    """A part of a graph, as a graph of its own.

    Attributes:
        graph: its output is a list.
        key: a hash of its text, equal for equal sections.
        metadata: of its artifact, as JSON.
        schedule: of its memory, where it runs call by call; None while nobody has asked
            (`memory.storages`).
    """

    graph: fx.GraphModule
    key: str
    metadata: dict[str, Any] = field(default_factory=dict)
    schedule: SectionSchedule | None = None

    def example(self) -> list[torch.Tensor]:
        """Fake tensors like its inputs, for the compiler."""
        return [n.meta["val"] for n in self.graph.graph.find_nodes(op="placeholder")]

    def operands(self, call: fx.Node) -> Sequence[Any]:
        """What a call gives to the section."""
        given: Any = call.args[1]
        return given  # type: ignore[no-any-return]

    @cached_property
    def written(self) -> tuple[int, ...]:  # type: ignore[override]
        """The places of the inputs that it writes."""
        return written_inputs_of(self.graph.graph)

    @cached_property
    def has_effect(self) -> bool:  # type: ignore[override]
        """Does it write, draw or check?"""
        calls = self.graph.graph.nodes
        return any(n.op == "call_function" and has_effect(n) for n in calls)

    @cached_property
    def only_moves(self) -> bool:
        """Does it give elements of its inputs as they are, or cast, and computes nothing?"""
        calls = (n for n in self.graph.graph.nodes if n.op == "call_function")
        facts = (facts_of(n.target) for n in calls)
        return all(f.moves or f.casts for f in facts)

    @property
    def name(self) -> str:
        """How graphs that are printed call it."""
        return f"section_{self.key[:8]}"

    def __repr__(self) -> str:
        return f"section {self.key}"


@declare_facts(OpFacts(makes_new=True))
def call_section(section: Section, takes: Sequence[Any]) -> Any:
    """The target of nodes that call a section. (Written code calls what was made of it.)"""
    raise RuntimeError("a section was not made code")


def section_of(node: fx.Node) -> Section | None:
    """The section that a node calls; None where it calls none."""
    return node.args[0] if node.target is call_section else None  # type: ignore[return-value]


def sections_in(graph: fx.Graph) -> list[Section]:
    """The different sections that a graph calls, in the order of their first call."""
    calls = graph.find_nodes(op="call_function", target=call_section)
    return list(dict.fromkeys(n.args[0] for n in calls))  # type: ignore[misc]


def calls_within(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of a graph, those within its sections once for each section."""
    for graph_of_part in (graph, *(s.graph.graph for s in sections_in(graph))):
        yield from (n for n in graph_of_part.nodes if n.op == "call_function")


def inline_sections(module: fx.GraphModule) -> fx.GraphModule:
    """A graph in which each call of a section is its calls; `module` itself where it has none.

    What a section gives and nobody reads is there until the section has ended, as when it is
    called.
    """
    if not sections_in(module.graph):
        return module
    graph, of = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        section = section_of(node)
        if section is not None:
            of[node] = _inline_call(graph, section, [of[n] for n in node.args[1]])
            unread = set(range(len(of[node]))).difference(u.args[1] for u in node.users)
            for i in sorted(unread):
                there = add_call(graph, torch.ops.aten.alias.default, (of[node][i],))
                there.meta = dict(of[node][i].meta)
        elif node.target is operator.getitem and isinstance(of[node.args[0]], list):
            of[node] = of[node.args[0]][node.args[1]]
        else:
            of[node] = copy_node(graph, node, of.__getitem__)
    return lazy_graph_module(module, graph)


def _inline_call(graph: fx.Graph, section: Section, takes: Sequence[fx.Node]) -> list[fx.Node]:
    """Add the calls of a section; the nodes of what it gives."""
    inner = section.graph.graph
    of = dict(zip(inner.find_nodes(op="placeholder"), takes, strict=True))
    for node in inner.nodes:
        if node.op == "call_function":
            of[node] = copy_node(graph, node, of.__getitem__)
    (end,) = inner.find_nodes(op="output")
    return [of[n] for n in end.args[0]]  # type: ignore[union-attr, index]
