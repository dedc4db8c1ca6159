"""A debug run of captured graphs that finds values whose strides differ from those when traced.

A graph is traced with fake tensors. `watch_strides` runs it node by node and records each value
whose
strides differ from those of its fake tensor:

    with watch_strides(step.program) as differing:
        step(x).sum().backward()
    assert not differing
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from partita.capture.kernel_strides import have_same_strides
from partita.compile.region import Region
from partita.graph.backend.executor import GraphWriter
from partita.graph.graph_nodes import note_of
from partita.graph.program import Program
from partita.guards.captured_program import CapturedProgram


@contextmanager
def watch_strides(program: CapturedProgram) -> Iterator[list[str]]:
    """Run the program call by call inside the block.

    Yields a list that gets a line for each value whose strides differ.
    """
    graphs: list[Program] = [program]
    if isinstance(program, Region):
        graphs = [program.halves.forward, *program.halves.backwards.values()]
    before, found = [graph.call for graph in graphs], list[str]()
    try:
        for graph in graphs:
            run = _Watching(graph, found).function()
            graph.call = lambda *inputs, run=run: run(inputs)
        yield found
    finally:
        for graph, call in zip(graphs, before, strict=True):
            graph.call = call


class _Watching(GraphWriter):
    """Writes code that compares each value, where it is made, with its fake."""

    def __init__(self, program: Program, found: list[str]):
        super().__init__(program.graph, program.groups)
        self._found = found

    def line(self, node: fx.Node) -> str:
        written = super().line(node)
        if node.op != "call_function":
            return written
        return (
            f"{written}; {self.bind(lambda value: self._compare(node, value))}({self.names[node]})"
        )

    def _compare(self, node: fx.Node, value: Any) -> None:
        fake = node.meta["val"]
        reals, fakes = (v if isinstance(v, (tuple, list)) else [v] for v in (value, fake))
        for real, like in zip(reals, fakes, strict=True):
            if not isinstance(real, torch.Tensor) or real.layout is not torch.strided:
                continue
            if not have_same_strides(real.shape, real.stride(), like.stride()):
                self._found.append(
                    f"{node.target} of {note_of(node).source}: {real.stride()}, "
                    f"and its fake {like.stride()}, shape {tuple(real.shape)}"
                )
