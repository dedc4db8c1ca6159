"""Sections of blocks: what is computed in a block between its collectives, once for a structure.

`lower_blocks` has the passes rewrite each block program of a step, cuts it at its collectives, and
puts what that gives in place of the block's nodes: gathers, reductions and waits as nodes of the
step's graph, in which later passes place them, and a call of a section for each part between two.
Forward and backward are never in one section.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from partita.tensor.op_facts import facts_of

from .backend.cut import UnsureOfSections, sections_of_blocks
from .capture.block_nodes import (
    BackwardBody,
    BlockBody,
    block_backward,
    block_forward,
    block_output,
    calls_of_blocks,
    inline_bodies,
)
from .capture.block_programs import BlockProgram, find_late, inline_block_programs
from .graph_nodes import copy_graph, lazy_graph_module, note_of
from .passes import Change, record_changes, run_passes
from .passes.gathered import is_gather, packing_of
from .passes.remat import BLOCK_RESULT
from .program import Input, Output, Program
from .section import Section

__all__ = ["RewrittenBlock", "lower_and_record_blocks", "lower_blocks", "mark_results"]

_OF_STEP = ("overlap", "backend_ways")
"""Passes that place what stands between blocks: they run over the graph of the step alone."""

_OF_STEP_AND_UPDATES = ("lifetime",)
"""Passes that place updates: they run over the graph of the step, and over those of updates."""


Rewrite = Callable[[Program, Collection[str]], list[Change]]
"""Runs the passes over a block's program but those that are named, and returns what each did where
somebody asks for that."""


@dataclass(frozen=True)
class RewrittenBlock:
    """What passes did in one block structure.

    Attributes:
        name: of the class of the blocks.
        calls: how many blocks of the step are of the structure.
        changes: of the passes that changed it.
    """

    name: str
    calls: int
    changes: list[Change]


def lower_blocks(program: Program) -> None:
    """Replace the block nodes of a program by calls of sections, and collectives; where a part of a
    block gives another what is no tensor of its own, by copies of the block's calls.

    Raises:
        IllegalGraph: a pass breaks a block's graph.
    """

    def rewrite(part: Program, without: Collection[str]) -> list[Change]:
        run_passes(part, without)
        return []

    _lower_blocks(program, rewrite)


def lower_and_record_blocks(program: Program) -> list[RewrittenBlock]:
    """As `lower_blocks`, and tell what passes did in each structure."""
    return _lower_blocks(program, record_changes)


def _lower_blocks(program: Program, rewrite: Rewrite) -> list[RewrittenBlock]:
    lowering = _Lowering(program, rewrite)
    try:
        inline_bodies(program.graph.graph, lowering.body_of)
    except UnsureOfSections:
        inline_block_programs(program.graph.graph)
        return []
    return lowering.rewritten


def mark_results(block: BlockProgram) -> None:
    """Mark the calls that make a block's results, wherever they are copied to: under a budget the
    last to be let go (`passes.remat`)."""
    (end,) = block.graph.graph.find_nodes(op="output")
    outputs: Any = end.args[0]
    for node in outputs[: len(block.results)]:
        while facts_of(node.target).is_alias:
            node = node.args[0]
        node.meta[BLOCK_RESULT] = True


class _Lowering:
    """The sections of the block programs of one step."""

    def __init__(self, program: Program, rewrite: Rewrite):
        self.program, self._rewrite = program, rewrite
        self.rewritten: list[RewrittenBlock] = []
        self._sections: dict[Any, Section] = {}
        self._read = _find_read(program.graph.graph)
        self._calls: defaultdict[Any, list[fx.Node]] = defaultdict(list)
        for node in program.graph.graph.find_nodes(op="call_function", target=block_forward):
            self._calls[node.args[0]].append(node)
        self._bodies: dict[BlockProgram, tuple[BlockBody, BackwardBody]] = {}

    def body_of(self, node: fx.Node) -> BlockBody | BackwardBody:
        """What a block node stands for."""
        block: Any = node.args[0]
        if block not in self._bodies:
            self._bodies[block] = self._lower(block)
        return self._bodies[block][node.target is block_backward]

    def _lower(self, block: BlockProgram) -> tuple[BlockBody, BackwardBody]:
        if any(note_of(n).budget is not None for n in block.graph.graph.nodes):
            return block.bodies(block.graph.graph)  # what is kept is chosen over all that share it
        calls = self._calls[block]
        equal = [*_find_equal_operands(block, calls)]
        block = block.without_unread(*self._read[block])
        if equal:
            block = block.with_shared_operands(equal)
        part = _program_of_block(block, self.program)
        left_out = _OF_STEP if block.written else (*_OF_STEP, *_OF_STEP_AND_UPDATES)
        changes = self._rewrite(part, {*self.program.without, *left_out})
        changed = [change for change in changes if change.changed]
        self.rewritten.append(RewrittenBlock(block.kind.__name__, len(calls), changed))
        self.program.levels = max(self.program.levels, part.levels)
        late = find_late(part.graph.graph, block.taken) if block.has_backward else set()
        packing = [*_find_packing_of_gathers(part.graph.graph)]
        outer = sections_of_blocks(part, late, packing, self._sections)
        return block.bodies(outer)


def _find_read(graph: fx.Graph) -> dict[Any, tuple[set[int], set[int]]]:
    """For each block program the numbers of the results, and of the gradients, that are read of
    one of its calls: what was only compared is read by nobody."""
    found: dict[Any, tuple[set[int], set[int]]] = {}
    for call in calls_of_blocks(graph):
        read = found.setdefault(call.args[0], (set(), set()))
        users = (n for n in call.users if n.target is block_output)
        read[call.target is block_backward].update(n.args[1] for n in users)  # type: ignore[misc]
    return found


def _find_packing_of_gathers(graph: fx.Graph) -> Iterator[set[fx.Node]]:
    """For each gather of a block what packs its operand, where that is made of inputs alone."""
    for node in filter(is_gather, graph.nodes):
        packing, sources = packing_of(node)
        if all(source.op != "call_function" for source in sources):
            yield packing - {node}


def _find_equal_operands(
    block: BlockProgram, calls: Sequence[fx.Node]
) -> Iterator[tuple[int, int]]:
    """Pairs of places at which each call of a block gives one node, that is not written."""
    first: dict[tuple[Any, ...], int] = {}
    for place, given in enumerate(zip(*(block.operands(call) for call in calls), strict=True)):
        if place not in block.written and first.setdefault(given, place) != place:
            yield first[given], place


def _program_of_block(block: BlockProgram, step: Program) -> Program:
    """A copy of a block's graph, as a program that passes rewrite."""
    graph = copy_graph(block.graph.graph)
    inputs = graph.find_nodes(op="placeholder")
    (end,) = graph.find_nodes(op="output")
    outputs: Any = end.args[0]
    nothing = pytree.tree_structure(None)
    return Program(
        lazy_graph_module(block.graph, graph),
        [Input(n.name, "argument", n.meta["val"]) for n in inputs],
        [Output("result", None) for _ in outputs],
        nothing,
        [],
        [],
        step.groups,
        budget=step.budget,
        level=step.level,
    )
