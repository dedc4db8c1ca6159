"""Forms of a captured step: blocks called or inlined, and how much is recomputed in backward.

A block is a call of a module with the same structure as other calls. Capture folds the blocks of
each structure into calls of one subgraph (`capture.fold`); inlining reverses this. `CapturedForms`
stores a captured program and rebuilds it in any form: for a smaller budget, or to explain what the
passes do. `FormSearch` finds the form whose predicted peak of memory is within a limit.
`_lower_blocks` runs the passes once on each block structure and cuts it at its collectives into
sections, which the step then calls.

Blocks are called only if all of these allow it: the options, by the size of the graph
(`StepOptions.section_threshold`); capture, if the structure can be a separate graph
(`capture.fold`); the budget (`FormSearch`); the cut into sections (`_lower_blocks`).
"""

from __future__ import annotations

import copy
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from .backend.section_cutter import UnsureOfSections, sections_of_blocks
from .errors import make_budget_too_small_error
from .graph_nodes import (
    Subgraph,
    call_backward,
    call_subgraph,
    copy_graph,
    drop_unused,
    lazy_graph_module,
    subgraph_calls,
    subgraphs_in,
)
from .memory import peak_of
from .passes import Change, record_changes, run_passes
from .passes.pass_manager import OF_STEP, OF_STEP_AND_UPDATES
from .passes.regather import is_gather, packing_of
from .passes.remat import cost_of_recompute
from .program import Input, Output, Program, RecomputeLevel
from .subgraphs import inline_subgraphs


@dataclass(frozen=True)
class StepForm:
    """A variant of a captured step: how much it recomputes, and whether blocks are calls.

    Attributes:
        level: how much is recomputed for a budget: the number of a `RecomputeLevel`.
        in_blocks: True if blocks are calls of subgraphs; False if they are inlined.
    """

    level: int = 0
    in_blocks: bool = False


_CHANGED_PARTS = ("inputs", "outputs")
"""The attributes of a program that passes change in place, besides its graph."""


class CapturedForms:
    """A captured program before the passes, which can be rebuilt in any form (variant).

    The first program that it returns is the captured program itself. Later ones are built from a
    record of each node.

    Attributes:
        form: the chosen form. Blocks are calls, unless a budget requires another form.
        has_blocks: True if the captured program has calls of blocks.
    """

    def __init__(self, program: Program):
        self.has_blocks = bool(subgraph_calls(program.graph.graph))
        self.form = StepForm(in_blocks=self.has_blocks)
        self._unchanged: Program | None = program
        self._kind, self._root_module = type(program), program.graph
        self._rows = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, dict(n.meta))
            for n in program.graph.graph.nodes
        ]
        parts = {f.name: getattr(program, f.name) for f in fields(program) if f.init}
        self._parts = parts | {name: copy.copy(parts[name]) for name in _CHANGED_PARTS}

    def program(
        self, form: StepForm | None = None, recorded: list[RewrittenBlock] | None = None
    ) -> Program:
        """Returns the captured program in a form, as a new object for the passes to change.

        Args:
            form: the form; None for the chosen one, `self.form`.
            recorded: a list that gets a `RewrittenBlock` for each structure of blocks, or None.
        """
        form = form or self.form
        program, self._unchanged = self._unchanged or self.rebuild(), None
        program.recompute = RecomputeLevel(form.level)
        if form.in_blocks:
            _lower_blocks(program, recorded)
        else:
            inline_subgraphs(program.graph.graph)
        return program

    def inlined(self) -> Program:
        """Returns the captured program in the chosen form, with blocks inlined. See `program`."""
        return self.program(replace(self.form, in_blocks=False))

    def rebuild(self) -> Program:
        """Returns a new copy of the captured program, in which folded blocks are calls."""
        graph = lazy_graph_module(self._root_module, self._rebuild_graph())
        changed = {name: copy.copy(self._parts[name]) for name in _CHANGED_PARTS}
        return self._kind(**self._parts | changed | {"graph": graph})

    def _rebuild_graph(self) -> fx.Graph:
        graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, op, target, args, kwargs, name, meta in self._rows:
            given = fx.node.map_arg((args, kwargs), of.__getitem__)
            of[node] = new = graph.create_node(op, target, *given, name=name)
            new.meta = dict(meta)
        return graph


class FormSearch:
    """Searches for a form (variant) of a captured step whose peak memory is within a limit.

    Forms are tried in a fixed order. The first ones call the blocks, with more and more
    recomputation inside and around them. If none of them fits, blocks are inlined, so that
    recomputation may span several blocks. A larger limit never results in a later form.
    """

    def __init__(self, captured: CapturedForms):
        self.captured = captured
        self._untried = self._rewrite_in_order()
        self._peak = math.inf  # the lowest so far, in bytes,
        self._cost = (0, 0)  # and the cost of its recomputation

    def first_within(self, limit: int | None) -> Program:
        """Returns the rewritten program of the first form whose predicted peak is within a limit.

        Args:
            limit: bytes. None returns the first form. Each later call needs a smaller limit.

        Raises:
            CaptureError: no form fits; the error names the smallest budget that suffices.
        """
        for form, program in self._untried:
            if limit is None or (self._is_better(program) and self._peak <= limit):
                self.captured.form = form
                return program
        assert limit is not None
        raise make_budget_too_small_error(limit, int(self._peak))

    def _is_better(self, program: Program) -> bool:
        """True if the form has a lower peak than those before, and recomputes no less.

        A form with a lower peak that recomputes less, or less of one kind, is skipped. Otherwise a
        smaller limit could recompute less than a larger one.
        """
        peak = peak_of(program)
        if peak >= self._peak:
            return False
        cost = cost_of_recompute(program.graph.graph)
        if any(now < then for now, then in zip(cost, self._cost, strict=True)):
            return False
        self._peak, self._cost = peak, cost
        return True

    def _rewrite_in_order(self) -> Iterator[tuple[StepForm, Program]]:
        for in_blocks in (True, False) if self.captured.has_blocks else (False,):
            level = 0
            while True:
                form = StepForm(level, in_blocks)
                program = self.captured.program(form)
                run_passes(program)
                is_last = program.recompute.is_last
                yield form, program
                if is_last:
                    break
                level += 1
            if in_blocks and not subgraphs_in(program.graph.graph):
                return  # `_lower_blocks` had to inline them, as the next form does


# -- blocks as calls of sections -------------------------------------------------------------------


@dataclass(frozen=True)
class RewrittenBlock:
    """What the passes changed in all blocks of one structure.

    Attributes:
        name: the name of the blocks' class.
        calls: the number of blocks in the step with this structure.
        changes: for each pass, what it changed.
    """

    name: str
    calls: int
    changes: list[Change]


def _lower_blocks(program: Program, recorded: list[RewrittenBlock] | None = None) -> None:
    """Replaces calls of blocks by calls of sections with collectives between them.

    Collectives and waits become nodes of the step's graph, where later passes place them. The parts
    between two of them become sections. Forward and backward never share a section. All blocks are
    inlined instead if a section would return a value that is not a tensor with its own memory.

    Args:
        recorded: a list to append what passes did to each structure; None to record nothing.

    Raises:
        IllegalGraph: a pass breaks a block's graph.
    """
    try:
        inline_subgraphs(program.graph.graph, _Lowering(program, recorded).lower)
    except UnsureOfSections:
        inline_subgraphs(program.graph.graph)
        if recorded is not None:
            recorded.clear()


class _Lowering:
    """The rewritten and cut blocks of one step; each structure is handled once."""

    def __init__(self, program: Program, recorded: list[RewrittenBlock] | None):
        self.program, self._recorded = program, recorded
        self._sections: dict[Any, Subgraph] = {}
        self._read = _find_read(program.graph.graph)
        self._calls: defaultdict[Any, list[fx.Node]] = defaultdict(list)
        for node in program.graph.graph.find_nodes(op="call_function", target=call_subgraph):
            self._calls[node.args[0]].append(node)
        self._lowered: dict[Subgraph, Subgraph] = {}

    def lower(self, node: fx.Node) -> Subgraph:
        """Returns the block that a node calls, as a graph of collectives and section calls."""
        block: Any = node.args[0]
        if block not in self._lowered:
            self._lowered[block] = self._rewrite_and_cut(block)
        return self._lowered[block]

    def _rewrite_and_cut(self, block: Subgraph) -> Subgraph:
        calls = self._calls[block]
        graph = _copy_narrowed(block, self._read[block], _find_equal_operands(block, calls))
        part = _program_of_block(lazy_graph_module(block.graph, graph), self.program)
        left_out = OF_STEP if block.written else (*OF_STEP, *OF_STEP_AND_UPDATES)
        without = (*self.program.options.without, *left_out)
        part.options = replace(self.program.options, without=without, passes=())
        if self._recorded is None:
            run_passes(part)
        else:
            changed = [change for change in record_changes(part) if change.changed]
            self._recorded.append(RewrittenBlock(block.name, len(calls), changed))
        late = replace(block, graph=part.graph).backward_nodes
        packing = [*_find_packing_of_gathers(part.graph.graph)]
        return replace(block, graph=sections_of_blocks(part, late, packing, self._sections))


def _find_read(graph: fx.Graph) -> dict[Any, set[int]]:
    """Returns for each block the indices of the outputs that some call uses."""
    found: defaultdict[Any, set[int]] = defaultdict(set)
    for call in subgraph_calls(graph):
        block: Any = call.args[0]
        first: int = block.forward_output_count if call.target is call_backward else 0
        items: Any = (n.args[1] for n in call.users if n.target is operator.getitem)
        found[block].update(first + i for i in items)
    return found


def _copy_narrowed(
    block: Subgraph, read: Collection[int], equal: Iterable[tuple[int, int]]
) -> fx.Graph:
    """Returns a copy of a block's graph, with only the outputs whose indices are in `read`.

    The second input of each pair of indices in `equal` is replaced by the first.
    """
    graph = copy_graph(block.graph.graph)
    inputs, (end,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    for first, other in equal:
        inputs[other].replace_all_uses_with(inputs[first])
    outputs: Any = end.args[0]
    end.args = ([node if i in read else None for i, node in enumerate(outputs)],)
    drop_unused(graph)
    return graph


def _find_packing_of_gathers(graph: fx.Graph) -> Iterator[set[fx.Node]]:
    """Yields the nodes that pack each gather's operand, if it depends on a block's inputs alone."""
    for node in filter(is_gather, graph.nodes):
        packing, sources = packing_of(node)
        if all(source.op != "call_function" for source in sources):
            yield packing - {node}


def _find_equal_operands(block: Subgraph, calls: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yields pairs of indices of unwritten inputs that have one operand in each call of a block."""
    first: dict[tuple[Any, ...], int] = {}
    for place, given in enumerate(zip(*(block.operands(call) for call in calls), strict=True)):
        if place not in block.written and first.setdefault(given, place) != place:
            yield first[given], place


def _program_of_block(graph: fx.GraphModule, step: Program) -> Program:
    """Returns a block's graph as a program that passes can rewrite."""
    inputs = graph.graph.find_nodes(op="placeholder")
    (end,) = graph.graph.find_nodes(op="output")
    outputs: Any = end.args[0]
    nothing = pytree.tree_structure(None)
    return Program(
        graph,
        [Input(n.name, "argument", n.meta["val"]) for n in inputs],
        [Output("result", None) for _ in outputs],
        nothing,
        [],
        [],
        step.groups,
        recompute=step.recompute,
    )
