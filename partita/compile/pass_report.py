"""The report of the passes: what each did to a program, and to its predicted peak of memory.

To describe changes takes longer than all passes together, and mostly nobody asks. So a program is
kept as captured (`AsCaptured`), and whoever asks has the passes run over it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

from torch import fx

from .block_sections import (
    RewrittenBlock,
    lower_and_record_blocks,
    lower_blocks,
    mark_results,
)
from .capture.block_nodes import calls_of_blocks
from .capture.block_programs import inline_block_programs
from .graph_nodes import lazy_graph_module
from .program import Program

__all__ = ["AsCaptured", "StepForm"]

P = TypeVar("P", bound=Program)


@dataclass(frozen=True)
class StepForm:
    """How a captured step is rewritten.

    Attributes:
        level: how much is made again for a budget: `Program.level`.
        in_blocks: blocks stay calls; else they are inlined.
    """

    level: int = 0
    in_blocks: bool = False


class AsCaptured(Generic[P]):
    """A copy of a program before the passes: a row for each node, made a program on request.

    Attributes:
        form: the one in which it was rewritten: with blocks as calls where it has any, unless a
            budget took another.
    """

    def __init__(self, program: P):
        blocks: Any = {n.args[0] for n in calls_of_blocks(program.graph.graph)}
        self.has_blocks = bool(blocks)
        self.form = StepForm(in_blocks=self.has_blocks)
        for block in blocks:
            mark_results(block)
        self._kind, self._root_module = type(program), program.graph
        self._rows = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, dict(n.meta))
            for n in program.graph.graph.nodes
        ]
        self._parts = {f.name: getattr(program, f.name) for f in fields(program) if f.init}
        for name in ("inputs", "outputs"):
            self._parts[name] = list(self._parts[name])

    def program(self, form: StepForm | None = None) -> P:
        """A new program like it, which may be changed: one of `self.form` unless another is
        asked for."""
        form = form or self.form
        program = self._rebuild_program(form.level)
        if form.in_blocks:
            lower_blocks(program)
        else:
            inline_block_programs(program.graph.graph)
        return program

    def inlined(self) -> P:
        """As `program`, with its blocks inlined."""
        return self.program(replace(self.form, in_blocks=False))

    def program_and_blocks(self) -> tuple[P, list[RewrittenBlock]]:
        """As `program`, with what passes did in its blocks, if they stay calls."""
        if not self.form.in_blocks:
            return self.program(), []
        program = self._rebuild_program(self.form.level)
        return program, lower_and_record_blocks(program)

    def _rebuild_program(self, level: int) -> P:
        parts: dict[str, Any] = {
            **self._parts,
            "graph": lazy_graph_module(self._root_module, self._rebuild_graph()),
            "level": level,
            "metadata": dict(self._parts["metadata"]),
        }
        for name in ("inputs", "outputs"):
            parts[name] = list(parts[name])
        return self._kind(**parts)

    def _rebuild_graph(self) -> fx.Graph:
        graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, op, target, args, kwargs, name, meta in self._rows:
            given = fx.node.map_arg((args, kwargs), of.__getitem__)
            of[node] = new = graph.create_node(op, target, *given, name=name)
            new.meta = dict(meta)
        return graph


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within, passes warn of nothing: they did at capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
