"""The executor of sections: straight-line Python that calls what was compiled of each.

What a section is the last to read is let go within it, behind its last use there. Collectives are
torch's own, begun where they stand and waited for where that stands; until then what they read is
held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from partita.comm.graph_collectives import WAIT, all_gather

from .executor import Groups, Writing, run_with_places
from .sections import Section, Sections, call_section

__all__ = ["SectionCall", "SectionWriting", "function_of_sections"]

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
