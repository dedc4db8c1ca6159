"""Sections: a graph as parts of which equal ones are compiled once.

The collectives stand between them, and a part that repeats itself is cut into its repeats: so a
model of many equal layers is a few sections, called many times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from partita.comm.graph_collectives import WAIT, all_gather

from .executor import Groups, Writing, run_with_places

__all__ = [
    "Section",
    "SectionCall",
    "SectionWriting",
    "Sections",
    "call_section",
    "function_of_sections",
]


@dataclass(eq=False)
class Section:
    """A part of a graph, over inputs of its own.

    Attributes:
        graph: its placeholders are what it takes, its output the list of what it gives.
        key: of its text; equal for equal sections.
        metadata: what is kept of it beside what is compiled; JSON.
    """

    graph: fx.GraphModule
    key: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def example(self) -> list[torch.Tensor]:
        """Tensors without memory like the inputs, for a compiler."""
        return [n.meta["val"] for n in self.graph.graph.find_nodes(op="placeholder")]

    def __repr__(self) -> str:
        return f"section {self.key[:8]}"


def call_section(section: Section, takes: Sequence[Any]) -> Any:
    """What a section gives; in a graph, which is run by what was compiled of it."""
    raise RuntimeError("a section was not compiled")


@dataclass(frozen=True, eq=False)
class Sections:
    """A graph as calls of sections.

    Attributes:
        outer: takes what the graph takes; its calls are collectives, what only shows memory, and
            `call_section`.
        different: the sections, each once, in the order of their first call.
        calls: how many calls of sections there are.
    """

    outer: fx.GraphModule
    different: list[Section]
    calls: int

    @property
    def nodes(self) -> int:
        """Of all different sections: what is compiled."""
        return sum(len(s.graph.graph.nodes) for s in self.different)


# -- the code that calls sections ------------------------------------------------------------------


SectionCall = Callable[[list[Any]], Sequence[torch.Tensor]]
"""What was compiled of a section: it empties the list of what it takes."""


def function_of_sections(
    sections: Sections, calls: Mapping[Section, SectionCall], groups: Groups | None = None
) -> Callable[..., Sequence[torch.Tensor]]:
    """A function of the graph's inputs that gives its outputs. Its errors are those of a graph.

    Args:
        groups: for wires to carry the collectives; None for torch to.
    """
    return run_with_places(SectionWriting(sections, calls, groups))


class SectionWriting(Writing):
    """The code of the calls of sections, and of what stands between them."""

    def __init__(
        self,
        sections: Sections,
        calls: Mapping[Section, SectionCall],
        groups: Groups | None = None,
    ):
        super().__init__(sections.outer, groups)
        self._calls = calls

    def statements(self, node: fx.Node, dropped: Iterable[fx.Node]) -> str:
        if node.target is not call_section:
            return super().statements(node, dropped)
        section, takes = node.args
        gone = "".join(f"del {self.names[n]}; " for n in dropped if n is not node)
        name = self.names[node]
        end = f"; del {name}" if node in dropped else ""
        call = self.bind(self._calls[section])  # type: ignore[index]
        return f"taken = {self.text(takes)}; {gone}{name} = {call}(taken){end}"

    def reads(self, node: fx.Node) -> Iterable[fx.Node]:
        if node.target is not WAIT:
            return node.all_input_nodes
        (begun,) = node.all_input_nodes
        if begun.op == "placeholder" or begun.target is all_gather:  # which has read by then
            return (begun,)
        return (begun, *begun.all_input_nodes)
