"""Sections: a graph as parts of which equal ones are compiled once.

The collectives stand between them, and a part that repeats itself is cut into its repeats: so a
model of many equal layers is a few sections, called many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

__all__ = ["Section", "Sections", "call_section"]


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
