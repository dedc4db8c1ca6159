"""Forms of a captured step: blocks are calls or inlined, more or less is made again in backward.

A program is kept as captured (`AsCaptured`) and made again in any form, to be rewritten within a
smaller budget, or for whoever asks what the passes do. `BudgetSearch` finds the form whose
predicted peak of memory is within a number of bytes. `lower_blocks` has the passes rewrite each
block structure once, cuts it at its collectives, and puts calls of these sections in place of the
blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

from torch import fx
from torch.utils import _pytree as pytree

from partita.tensor.op_facts import facts_of

from .backend.section_cutter import UnsureOfSections, sections_of_blocks
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
from .errors import cannot_be_kept
from .graph_nodes import Section, copy_graph, lazy_graph_module, note_of, sections_in
from .memory.storages import peak_of
from .passes import Change, Passes, record_changes, run_passes
from .passes.gathered_parameters import is_gather, packing_of
from .passes.remat import BLOCK_RESULT, cost_of_recompute
from .program import Input, Output, Program

__all__ = [
    "AsCaptured",
    "BudgetSearch",
    "RewrittenBlock",
    "StepForm",
    "lower_and_record_blocks",
    "lower_blocks",
    "mark_results",
]

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


# -- within a budget of memory ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Tried:
    """A form of a step, and the peak in bytes that is predicted for it."""

    form: StepForm
    peak: int


class BudgetSearch(Generic[P]):
    """The forms of one captured step, each rewritten when those before it take too much."""

    def __init__(
        self,
        captured: AsCaptured[P],
        without: Iterable[str],
        passes: Passes,
    ):
        self._captured, self._without, self._passes = captured, without, passes
        self._untried = self._rewrite_in_order()
        self._least: int | None = None

    def first_within(self, budget: int) -> P:
        """The step in the first form whose predicted peak is at most `budget` bytes.

        Asked again, the budget must be smaller.

        Raises:
            CaptureError: there is none; it tells the least that can be kept.
        """
        for tried, program in self._untried:
            if tried.peak <= budget:
                self._captured.form = tried.form
                return program
        assert self._least is not None
        raise cannot_be_kept(budget, self._least)

    def _rewrite_in_order(self) -> Iterator[tuple[_Tried, P]]:
        """The forms in their order, each with a lower peak than those before, and more made again.

        One that has a lower peak and makes less again, or less of one kind, is left out: for a
        smaller budget less would be made again than for a larger one.
        """
        cost, peak = (0, 0), None
        for tried, program in self._rewrite_all():
            if peak is not None and tried.peak >= peak:
                continue
            its_cost = cost_of_recompute(program.graph.graph)
            if all(a >= b for a, b in zip(its_cost, cost, strict=True)):
                self._least = peak = tried.peak
                cost = its_cost
                yield tried, program

    def _rewrite_all(self) -> Iterator[tuple[_Tried, P]]:
        for in_blocks in (True, False) if self._captured.has_blocks else (False,):
            level, levels = 0, 1
            while level < levels:
                form = StepForm(level, in_blocks)
                program = self._rewrite(form)
                yield _Tried(form, peak_of(program)), program
                level, levels = level + 1, program.levels
            if in_blocks and not sections_in(program.graph.graph):
                return  # they could not stay calls

    def _rewrite(self, form: StepForm) -> P:
        program = self._captured.program(form)
        run_passes(program, self._without, self._passes)
        return program


# -- blocks as calls of sections -------------------------------------------------------------------

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
