"""Sections of a graph: its parts between collectives, of which equal ones are compiled once.

A part that repeats itself is cut into its repeats (`cut`), so that a model of many equal layers is
a few different sections, called many times from an outer graph. `function_of_sections` writes the
outer graph as Python code that calls what was compiled. A section is passed its inputs in a list,
which it empties, so that it frees what it is the last to read. Collectives are torch's own, and
what they read is held until they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partita.comm.collective import WAIT, all_gather

from ..section import Section
from .executor import GraphWriter, Groups, run_with_places

__all__ = ["SectionCall", "SectionWriter", "Sections", "function_of_sections"]


@dataclass(frozen=True, eq=False)
class Sections:
    """A graph as calls of sections.

    Attributes:
        outer: a graph of the same inputs and outputs; its calls are collectives, views and
            `call_section`.
        different: the different sections, in the order of their first call.
        calls: the number of calls of sections.
    """

    outer: fx.GraphModule
    different: list[Section]
    calls: int

    @property
    def nodes(self) -> int:
        """The number of nodes of all different sections, which are compiled."""
        return sum(len(s.graph.graph.nodes) for s in self.different)


# -- the code that calls sections ------------------------------------------------------------------


SectionCall = Callable[[list[Any]], Sequence[torch.Tensor]]
"""A compiled section: takes a list of its inputs, which it empties."""


def function_of_sections(
    sections: Sections, calls: Mapping[Section, SectionCall], groups: Groups | None = None
) -> Callable[..., Sequence[torch.Tensor]]:
    """A function of the graph's inputs that returns its outputs, with errors as of `function_of`.

    Args:
        groups: for collectives through wires; None for torch's own.
    """
    return run_with_places(SectionWriter(sections, calls, groups))


class SectionWriter(GraphWriter):
    """Writes the code of an outer graph: calls of sections, and what stands between them."""

    def __init__(
        self,
        sections: Sections,
        calls: Mapping[Section, SectionCall],
        groups: Groups | None = None,
    ):
        super().__init__(sections.outer, groups)
        self._calls = dict(calls)

    def reads(self, node: fx.Node) -> Iterable[fx.Node]:
        if node.target is not WAIT:
            return node.all_input_nodes
        (begun,) = node.all_input_nodes
        if begun.op == "placeholder" or begun.target is all_gather:
            return (begun,)  # which has read its operand by then
        return (begun, *begun.all_input_nodes)
