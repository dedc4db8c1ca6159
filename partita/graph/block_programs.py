"""Block programs: each block structure of a step as one graph of its own, without writes.

A block's forward and backward are one graph. Its inputs are the block's operands, then the
cotangents of its backward. Its outputs are the block's results, then the gradients of operands. So
it is functionalized, rewritten by passes and compiled once, however many blocks have the structure.
The rest of the step is an outer graph, in which each block is two nodes (`block_calls`). `fold`
makes the programs of modules and of the updates of their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from torch import fx

from partita.tensor.op_facts import facts_of

from .block_calls import BlockBody, block_backward, inline_bodies
from .errors import UnsureOfWrites
from .graph_nodes import (
    BLOCK_RESULT,
    GraphPart,
    copy_graph,
    drop_unused,
    has_effect,
    lazy_graph_module,
    note_of,
    written_inputs_of,
)


@dataclass(eq=False, repr=False)
class BlockProgram(GraphPart):
    """One block structure as a graph without writes but into inputs, at its end.

    Attributes:
        name: of the class of the blocks; of their updates "AdamW of Block".
        graph: see above.
        taken: how many of the inputs forward takes; the others are given to backward.
        results: the numbers of the results, in the order of the outputs.
        gradients: the numbers of the operands whose gradients are the outputs after those.
        has_backward: whether blocks of the structure go backward.
        labels: as in `BlockBody`.
        written: the places of the inputs that it writes.
    """

    name: str
    graph: fx.GraphModule
    taken: int
    results: list[int]
    gradients: list[int]
    has_backward: bool
    labels: tuple[str, ...] = ()
    has_effect: bool = field(init=False)
    written: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.graph.graph
        self.has_effect = any(n.op == "call_function" and has_effect(n) for n in graph.nodes)
        self.written = written_inputs_of(graph)
        if self.written and self.has_backward:  # which of the two writes is not said
            raise UnsureOfWrites

    def __repr__(self) -> str:
        return f"'a {self.name}'"  # as code: it stands among the operands of a node

    def mark_results(self) -> None:
        """Mark the calls that make its results, wherever they are copied to."""
        (end,) = self.graph.graph.find_nodes(op="output")
        outputs: Any = end.args[0]
        for node in outputs[: len(self.results)]:
            find_base_of_alias(node).meta[BLOCK_RESULT] = True

    def narrowed(
        self,
        results: Collection[int],
        gradients: Collection[int],
        equal: Iterable[tuple[int, int]],
    ) -> BlockProgram:
        """The program that gives of its results and gradients those with these numbers, and of
        operands that are `equal`, by pairs of places, reads only the first."""
        graph = copy_graph(self.graph.graph)
        inputs, (end,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
        for first, other in equal:
            inputs[other].replace_all_uses_with(inputs[first])
        kept = [*(n in results for n in self.results), *(n in gradients for n in self.gradients)]
        end.args = ([*compress(end.args[0], kept)],)  # type: ignore[arg-type]
        drop_unused(graph)
        return replace(
            self,
            graph=lazy_graph_module(self.graph, graph),
            results=[n for n in self.results if n in results],
            gradients=[n for n in self.gradients if n in gradients],
        )

    def bodies(self, graph: fx.Graph) -> tuple[BlockBody, BlockBody]:
        """Returns the forward and backward of `graph`, which is its own graph or was made from it.

        Raises:
            UnsureOfWrites: a result depends on the inputs of backward.
        """
        inputs, (end,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
        late = find_late(graph, self.taken) if self.has_backward else set()
        calls = [n for n in graph.nodes if n.op == "call_function"]
        outputs: Sequence[Any] = end.args[0]
        made = dict(zip(self.results, outputs, strict=False))
        if not late.isdisjoint(made.values()):
            raise UnsureOfWrites
        gradients = dict(zip(self.gradients, outputs[len(made) :], strict=True))
        early_calls, late_calls = ([n for n in calls if (n in late) is of] for of in (False, True))
        entered = inputs[: self.taken]
        forward = BlockBody(entered, made, early_calls, self.labels)
        return forward, BlockBody(inputs[self.taken :], gradients, late_calls)


def find_late(graph: fx.Graph, operands: int) -> set[fx.Node]:
    """Returns the nodes of backward in the graph of a block.

    They are those in its phase, and those that depend on them or on the inputs of backward.

    Args:
        operands: how many of the inputs forward takes.
    """
    late = set(graph.find_nodes(op="placeholder")[operands:])
    for node in graph.nodes:
        if node.op == "call_function" and (
            note_of(node).phase == "backward" or not late.isdisjoint(node.all_input_nodes)
        ):
            late.add(node)
    return late


def inline_block_programs(graph: fx.Graph) -> None:
    """Replace the block nodes of a graph without writes by copies of their programs' nodes."""
    bodies: dict[Any, tuple[BlockBody, BlockBody]] = {}

    def body_of(node: fx.Node) -> BlockBody:
        program: Any = node.args[0]
        if program not in bodies:
            bodies[program] = program.bodies(program.graph.graph)
        return bodies[program][node.target is block_backward]

    inline_bodies(graph, body_of)


def find_base_of_alias(node: fx.Node) -> fx.Node:
    """Returns the node that `node` is an alias of; `node` itself if it is none."""
    while node.op == "call_function" and facts_of(node.target).is_alias:
        node = node.args[0]  # type: ignore[assignment]
    return node
