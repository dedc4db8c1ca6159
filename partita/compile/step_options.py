"""Options of a compiled step: what `pt.compile` is told, checked once and handed on whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

Pass = Callable[[Any], Any]
"""Changes the graph of a `Program`, and returns in a few words what it did."""

Passes = Iterable[Pass] | Mapping[str, Pass | Iterable[Pass]]
"""A user's passes: in order, before all others; or by the name of the pass that they precede."""

_BACKENDS = ("inductor", "graph")

_OUTLINED_ABOVE = 2800
"""The nodes of a traced graph, inputs included, above which blocks stay calls. A smaller one is
compiled whole in as little time."""


@dataclass(frozen=True, eq=False)
class StepOptions:
    """The options of `pt.compile`, which says what they mean.

    Raises:
        ValueError: an unknown backend or fallback.
    """

    backend: str = "inductor"
    fallback: str | None = None
    without: tuple[str, ...] = ()
    passes: Passes = ()
    keep: int = 8
    budget: int | None = None
    blocks: bool | tuple[nn.Module | type, ...] | None = None
    sections: bool | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            known = ", ".join(_BACKENDS)
            raise ValueError(f"compile: backend is one of {known}, not {self.backend!r}")
        if self.fallback not in (None, "eager"):
            raise ValueError(f'compile: fallback is "eager" or None, not {self.fallback!r}')

    @property
    def outline_above(self) -> int | None:
        """The nodes of a graph above which blocks stay calls of sections; None for never.

        Capture makes a program of each block structure that can have one (`outline_blocks`), and
        `FormSearch` inlines them after all where the budget asks for that.
        """
        if self.sections is False or self.passes or self.cuda_graphs:
            return None
        return 0 if self.sections else _OUTLINED_ABOVE

    def key_lines(self, ran: Iterable[str]) -> list[str]:
        """Those that decide what a program is, as lines of its key.

        Args:
            ran: the names of the passes that run.
        """
        lines = [f"backend {self.backend}"]
        lines += [] if self.sections is None else [f"sections {self.sections}"]
        lines += ["cuda graphs"] if self.cuda_graphs else []
        lines.append(f"without {sorted(self.without)}")
        return [*lines, f"passes {[*ran]}", f"budget {self.budget}"]
