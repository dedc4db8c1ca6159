"""Block programs: each block structure of a step as one graph of its own, without writes.

A block's forward and backward are one graph: its inputs are the block's operands, then what its
backward is given; its outputs the block's results, then the gradients of operands. So it is
functionalized, rewritten by passes and compiled once, however many blocks have the structure. What
is left of the step is an outer graph, in which each block is two nodes (`block_traces`).

A structure stays in the step's graph, inlined, where a graph of its own would not say all of it:
where a forward has several backwards, results share memory, or a weight is gathered for
neighbouring blocks at once. Floats that differ between its blocks are inputs, tensors of no
dimension. The update of a block may be a graph of its own if it is the last to use what it writes
(`_OutlinedUpdates`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import torch
from torch import fx

from partita.comm.device import HOST
from partita.tensor.op_facts import facts_of

from ..errors import CaptureError
from ..graph_nodes import (
    BLOCK_RESULT,
    NOTE,
    GraphPart,
    add_call,
    add_input,
    copy_graph,
    copy_node,
    drop_unused,
    has_effect,
    is_collective,
    lazy_graph_module,
    note_of,
    written_inputs_of,
    written_operands,
)
from .block_traces import (
    BlockBody,
    BlockTrace,
    block_backward,
    block_forward,
    block_output,
    calls_of_blocks,
    inline_bodies,
    is_block_node,
)
from .equal_calls import tensors_in
from .fakes import is_symbolic, make_distinct
from .functional_calls import takes_number_exactly, value_of_input
from .functional_memory import memory_that_is_written, operands_written, overlapping_results
from .functionalize import UnsureOfWrites, functionalize_graph

Structures = tuple[tuple[str, int], ...]

_SCALAR = torch.ops.aten.scalar_tensor.default
_NEIGHBOURS = 2
"""A weight that calls so many blocks apart take is gathered once for both (`passes.regather`)."""


def count_blocks(graph: fx.Graph) -> Structures:
    """For each structure of modules in a traced graph the name of its class and the number of its
    blocks."""
    counts = Counter(n.args[0] for n in calls_of_blocks(graph) if n.target is block_forward)
    traces: Any = counts.items()
    return tuple((trace.kind.__name__, n) for trace, n in traces if not trace.written)


def inline_blocks(graph: fx.Graph, only: Collection[BlockTrace] | None = None) -> None:
    """Replace block nodes by copies of their traces, and erase the traces.

    Args:
        only: of these structures; None for all.
    """
    calls = [n for n in graph.nodes if n.target is block_forward]
    counts = Counter(n.args[0] for n in calls if only is None or n.args[0] in only)
    backs = {back for trace in counts for back in trace.backwards.values()}
    inline_bodies(graph, lambda n: n.args[0] if n.args[0] in counts or n.args[0] in backs else None)
    traced = []
    for trace in counts:
        traced += [*trace.entered, *trace.numbers, *trace.all_nodes()]
    for node in reversed(traced):
        if not node.users:  # else it is of no block: a rank's coordinate, computed once for all
            graph.erase_node(node)


# -- a structure as a graph ------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class BlockProgram(GraphPart):
    """One block structure as a graph without writes but into inputs, at its end.

    Attributes:
        kind: the class of the blocks.
        graph: see above.
        taken: how many of the inputs forward takes; the others are given to backward.
        results: the numbers of the results, in the order of the outputs.
        gradients: the numbers of the operands whose gradients are the outputs after those.
        has_backward: whether blocks of the structure go backward.
        region, labels: as in `BlockBody`.
        written: the places of the inputs that it writes.
    """

    kind: type
    graph: fx.GraphModule
    taken: int
    results: list[int]
    gradients: list[int]
    has_backward: bool
    region: int
    labels: tuple[str, ...]
    has_effect: bool = field(init=False)
    written: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.graph.graph
        self.has_effect = any(n.op == "call_function" and has_effect(n) for n in graph.nodes)
        self.written = written_inputs_of(graph)
        if self.written and self.has_backward:  # which of the two writes is not said
            raise UnsureOfWrites

    def __repr__(self) -> str:
        return f"'a {self.kind.__name__}'"  # as code: it stands among the operands of a node

    def mark_results(self) -> None:
        """Mark the calls that make its results, wherever they are copied to."""
        (end,) = self.graph.graph.find_nodes(op="output")
        outputs: Any = end.args[0]
        for node in outputs[: len(self.results)]:
            _find_base_of_alias(node).meta[BLOCK_RESULT] = True

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
        """The forward and backward of `graph`, which is its own, or was made of it.

        Raises:
            UnsureOfWrites: a result is computed from what backward is given.
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
        forward = BlockBody(entered, made, early_calls, self.region, self.labels)
        return forward, BlockBody(inputs[self.taken :], gradients, late_calls)


def find_late(graph: fx.Graph, operands: int) -> set[fx.Node]:
    """The nodes of backward in the graph of a block: those in its phase, and what is made of them
    and of what backward is given.

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


# -- the graph of a step ---------------------------------------------------------------------------


def outline_blocks(step: fx.GraphModule, least: int, equal: Sequence[Sequence[int]] = ()) -> bool:
    """Outline the blocks of a traced step; returns whether there are any that can be.

    Structures that have to be are inlined.

    Args:
        least: the nodes that the inlined graph must have for blocks to be outlined.
        equal: groups of inputs, by place, that hold the same number.
    """
    graph = step.graph
    calls = calls_of_blocks(graph)
    traces: dict[Any, None] = {n.args[0]: None for n in calls if n.target is block_forward}
    bodies: list[Any] = [n.args[0] for n in calls]
    if len(graph.nodes) + sum(len(body.nodes) for body in bodies) < least:
        return False
    outlining = _Outlining(step, equal)
    outlined = [t for t in traces if outlining.can_outline(t)]
    inline_blocks(graph, [t for t in traces if t not in outlined])
    while outlined:
        try:
            outlining.outline()
            return True
        except _NoProgram as unsure:
            inline_blocks(graph, [unsure.trace])
            outlined.remove(unsure.trace)
            outlining = _Outlining(step, equal)
    return False


class _NoProgram(Exception):
    """A block structure cannot be a graph of its own after all."""

    def __init__(self, trace: BlockTrace):
        super().__init__()
        self.trace = trace


class _Outlining:
    """The outlining of the blocks of one traced step."""

    def __init__(self, step: fx.GraphModule, equal: Sequence[Sequence[int]]):
        self.step, self._equal = step, equal
        self._backs: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._calls: dict[BlockTrace, list[fx.Node]] = defaultdict(list)
        for node in calls_of_blocks(step.graph):
            part, forward, *_ = node.args
            if node.target is block_backward:
                self._backs[forward].append(node)  # type: ignore[index]
            else:
                self._calls[part].append(node)  # type: ignore[index]
        self._programs: dict[Any, tuple[BlockProgram, list[fx.Node], list[fx.Node]]] = {}
        # By each node of a trace, the trace.
        self._traced = {n: t for t in self._calls for n in (*t.entered, *t.all_nodes())}
        self._sharing = self._find_sharing_neighbours()
        self._regions = self._find_regions_of_several()

    # -- which structures --------------------------------------------------------------------------

    def can_outline(self, trace: BlockTrace) -> bool:
        """Can the blocks of this structure be a graph of their own?"""
        calls = self._calls[trace]
        return (
            len(calls) > 1
            and all(len(self._backs[n]) <= 1 for n in calls)
            and self._sharing.isdisjoint(calls)
            and not any(note_of(n).region in self._regions for n in calls)
            and (not trace.written or self._updates.can_outline(calls))
            and (not trace.numbers or all(map(_can_take_tensors, trace.all_nodes())))
        )

    @cached_property
    def _updates(self) -> _OutlinedUpdates:
        return _OutlinedUpdates(self.step.graph, self._traced, self._equal)

    def _find_sharing_neighbours(self) -> set[fx.Node]:
        """Calls of blocks that gather one weight next to each other, or to keep it gathered."""
        order = sorted(n for calls in self._calls.values() for n in calls)
        found: set[fx.Node] = set()
        last: dict[fx.Node, int] = {}
        for i, call in enumerate(order):
            for shard, persists in self._find_gathered(call):
                before = last.get(shard)
                if before is not None and (persists or i - before <= _NEIGHBOURS):
                    found |= {call, order[before]}
                last[shard] = i
        return found

    @staticmethod
    def _find_gathered(call: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
        """What a block gathers in forward, and whether it then stays."""
        trace: Any = call.args[0]
        of = dict(zip(trace.entered, call.args[2:], strict=True))
        for node in trace.nodes:
            reason = note_of(node).reason
            if is_collective(node) and reason in ("gather", "persistent"):
                while node.op == "call_function" and node not in of and node.all_input_nodes:
                    node = node.all_input_nodes[0]
                if node in of:
                    yield of[node], reason == "persistent"

    def _find_regions_of_several(self) -> set[int]:
        """The remat regions that hold more than one block."""
        calls = [n for calls in self._calls.values() for n in calls]
        counts = Counter(note_of(n).region for n in calls)
        for node in self.step.graph.nodes:
            if node not in self._traced and not is_block_node(node) and node.op == "call_function":
                counts[note_of(node).region] += 1
        return {region for region, n in counts.items() if region and n > 1}

    # -- the outer graph ---------------------------------------------------------------------------

    def outline(self) -> None:
        """Make the step's graph the outer graph.

        Raises:
            _NoProgram: a structure cannot be outlined after all; the graph is as it was.
        """
        step = self.step.graph
        forwards = (n for n in calls_of_blocks(step) if n.target is block_forward)
        self._traces: set[Any] = {n.args[0] for n in forwards}
        self._traced = {n: t for n, t in self._traced.items() if t in self._traces}
        self._live = self._find_live_nodes()
        self._outer = self._find_outer_nodes()
        calls = [n for n in calls_of_blocks(step) if n in self._outer]
        programs = {n: self._program_of(n) for n in calls if n.target is block_forward}
        inner = [n for n in step.nodes if n not in self._outer]
        for node in calls:
            operands: Any = node.args
            if node.target is block_forward:
                program, free, _ = programs[node]
                operands = ((), *operands[2:], *_add_numbers(step, node), *free)
            else:
                program, _, free = programs[operands[1]]
                operands = (*operands[1:], *free)
            part: Any = program
            node.args = (part, *operands)
        for node in reversed(inner):
            step.erase_node(node)

    def _find_outer_nodes(self) -> set[fx.Node]:
        """The nodes that are of no block; also those of a trace that others read, as a rank's
        coordinate, which is computed once for all, numbers that all updates share, and constants.
        """
        outer = self._live | {*self.step.graph.find_nodes(op="get_attr")}
        for trace in self._traces:
            if trace.written:
                outer |= self._updates.find_shared_numbers(trace, self._calls[trace])
        waiting = [r for n in outer for r in n.all_input_nodes if r in self._traced]
        for trace in self._traces:
            for node in trace.all_nodes():
                waiting += [r for r in node.all_input_nodes if self._traced.get(r) is not trace]
        while waiting:
            node = waiting.pop()
            if node not in outer:
                outer.add(node)
                waiting += node.all_input_nodes
        return outer

    def _find_live_nodes(self) -> set[fx.Node]:
        """The nodes of no trace that something needs: what nobody reads of a block is not computed
        in it."""
        live: set[fx.Node] = set()
        for node in reversed(self.step.graph.nodes):
            if node not in self._traced and (has_effect(node) or not live.isdisjoint(node.users)):
                live.add(node)
        return live

    def _read_of(self, call: fx.Node) -> tuple[int, ...]:
        """The numbers of what the step reads of a block node."""
        users = (n for n in call.users if n.target is block_output and n in self._live)
        return tuple(sorted({n.args[1] for n in users}))  # type: ignore[type-var, misc]

    def _program_of(self, forward: fx.Node) -> tuple[BlockProgram, list[fx.Node], list[fx.Node]]:
        """The program of a `block_forward` node, and what its forward and its backward read beside
        the block's operands and cotangents."""
        trace: Any = forward.args[0]
        backs = [n for n in self._backs[forward] if n in self._live]
        back: BlockBody | None = backs[0].args[0] if backs else None  # type: ignore[assignment]
        results = self._read_of(forward)
        wanted = self._read_of(backs[0]) if backs else ()
        key = trace, back, results, wanted
        if key not in self._programs:
            try:
                self._programs[key] = self._make_program(*key)
            except UnsureOfWrites:
                raise _NoProgram(trace) from None
            except CaptureError:
                if not trace.numbers:
                    raise
                raise _NoProgram(trace) from None  # they are tensors here
        return self._programs[key]

    def _make_program(
        self,
        trace: BlockTrace,
        back: BlockBody | None,
        results: tuple[int, ...],
        wanted: tuple[int, ...],
    ) -> tuple[BlockProgram, list[fx.Node], list[fx.Node]]:
        graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
        early = [n for n in trace.nodes if n not in self._outer]
        seeds = [] if back is None else back.entered
        late = [n for n in back.nodes if n not in self._outer and n not in seeds] if back else []
        taken = [*trace.entered, *trace.numbers]
        taken += self._find_free(early, {*taken, *early})
        free_early = taken[len(trace.entered) + len(trace.numbers) :]
        free_late = self._find_free(late, {*taken, *early, *seeds, *late})
        inputs = [*taken, *seeds, *free_late]
        known: set[int] = set()
        for i, node in enumerate(inputs):
            of[node] = given = add_input(graph, f"in_{i}")
            given.meta = {**node.meta, "val": make_distinct(node.meta["val"], known)}
        for node in (*early, *late):
            of[node] = copy_node(graph, node, of.__getitem__)
        gradients = {} if back is None else {i: back.made[i] for i in wanted}
        graph.output([*(of[trace.made[n]] for n in results), *(of[g] for g in gradients.values())])
        made = functionalize_graph(lazy_graph_module(self.step, graph))
        drop_unused(made.graph)
        program = BlockProgram(
            trace.kind,
            made,
            len(taken),
            [*results],
            [*gradients],
            back is not None,
            trace.region,
            trace.labels,
        )
        if any(max(pair) < len(results) for pair in overlapping_results(made.graph)):
            raise UnsureOfWrites  # results show one memory, or that of an operand
        program.bodies(made.graph)
        program.mark_results()
        return program, free_early, free_late

    @staticmethod
    def _find_free(nodes: Sequence[fx.Node], own: set[fx.Node]) -> list[fx.Node]:
        read = [r for n in nodes for r in n.all_input_nodes if r not in own]
        return [*dict.fromkeys(read)]


def _can_take_tensors(node: fx.Node) -> bool:
    """Is it the same call where numbers that differ between blocks are tensors? False where one is
    an int."""
    value = node.meta.get("val")
    if is_symbolic(value) and not isinstance(value, torch.SymFloat):
        return False
    takes_number = any(is_symbolic(n.meta.get("val")) for n in node.all_input_nodes)
    return not takes_number or takes_number_exactly(node)


def _add_numbers(graph: fx.Graph, call: fx.Node) -> list[fx.Node]:
    """Add the varying floats of a `block_forward` node before it, as tensors of no dimension."""
    trace, floats, *_ = call.args
    found = []
    with graph.inserting_before(call):
        for node, value in zip(trace.numbers, floats, strict=True):  # type: ignore[union-attr, arg-type]
            made = add_call(graph, _SCALAR, (value,), {"dtype": torch.float64, "device": HOST})
            made.meta = {"val": value_of_input(node.meta["val"]), NOTE: note_of(call)}
            found.append(made)
    return found


def inline_block_programs(graph: fx.Graph) -> None:
    """Replace the block nodes of a graph without writes by copies of their programs' nodes."""
    bodies: dict[Any, tuple[BlockBody, BlockBody]] = {}

    def body_of(node: fx.Node) -> BlockBody:
        program: Any = node.args[0]
        if program not in bodies:
            bodies[program] = program.bodies(program.graph.graph)
        return bodies[program][node.target is block_backward]

    inline_bodies(graph, body_of)


# -- updates that can be outlined ------------------------------------------------------------------


class _OutlinedUpdates:
    """The updates of blocks in a traced step.

    Args:
        graph: of the step, with writes.
        traced: the nodes of traces.
        equal: groups of inputs, by place, that hold the same number.
    """

    def __init__(
        self, graph: fx.Graph, traced: Collection[fx.Node], equal: Sequence[Sequence[int]]
    ):
        self._memory = memory_that_is_written(graph)
        self._places: dict[fx.Node, int] = {}
        self._last_uses: dict[int, int] = {}
        self._writers: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for place, node in enumerate(graph.nodes):
            if node in traced:
                continue
            self._places[node] = place
            for read in node.all_input_nodes:
                if read in self._memory:
                    self._last_uses[self._memory[read]] = place
            for written in operands_written(node):
                self._writers[self._memory[written]].append(node)
        inputs = graph.find_nodes(op="placeholder")
        self._groups = {inputs[i]: group for group, places in enumerate(equal) for i in places}

    def can_outline(self, calls: Sequence[fx.Node]) -> bool:
        """Does each of these calls of one trace write whole inputs, as the last to use them?"""
        return all(map(self._is_last_to_use, calls))

    def _is_last_to_use(self, call: fx.Node) -> bool:
        part: Any = call.args[0]
        given = [self._memory.get(n) for n in part.operands(call)]
        for operand in written_operands(call):
            memory = self._memory[operand]
            if (
                _find_base_of_alias(operand).op != "placeholder"
                or self._writers[memory] != [call]
                or self._last_uses[memory] > self._places[call]
                or given.count(memory) > 1
            ):
                return False
        return True

    def find_shared_numbers(self, trace: BlockTrace, calls: Sequence[fx.Node]) -> set[fx.Node]:
        """The nodes of a trace that compute, from step counts that are equal in all of its blocks,
        what is one number for all of them."""
        counts = {n for i, n in enumerate(trace.entered) if self._is_one_count(i, calls)}
        held = {self._memory.get(n) for n in counts}
        own, shared = {*trace.entered, *trace.nodes}, set(counts)
        written: set[int | None] = set()  # memory that the block itself writes,
        read: set[int | None] = set()  # and reads
        for node in trace.nodes:
            reads = [n for n in node.all_input_nodes if n in own]
            into = operands_written(node)
            memory = {self._memory[n] for n in into}
            if (
                reads
                and shared.issuperset(reads)
                and held.isdisjoint(memory)
                and not facts_of(node.target).draws
                and all(t.ndim == 0 for t in tensors_in(node.meta.get("val")))
            ):
                if not written.isdisjoint(self._memory.get(n) for n in reads):
                    return set()
                if not read.isdisjoint(memory):
                    return set()
                shared.add(node)
                continue
            written |= memory
            read.update(self._memory[n] for n in reads if n in self._memory)
            if any(n in shared and n not in counts for n in into):
                return set()
        return shared - counts

    def _is_one_count(self, operand: int, calls: Sequence[fx.Node]) -> bool:
        """Is an operand an input of one number in all calls, which none but the call itself writes?

        Args:
            operand: its place.
        """
        groups = set[int | None]()
        for call in calls:
            given: fx.Node = call.args[2 + operand]  # type: ignore[assignment]
            if any(w is not call for w in self._writers.get(self._memory.get(given, -1), ())):
                return False
            groups.add(self._groups.get(_find_base_of_alias(given)))
        return len(groups) == 1 and None not in groups


def _find_base_of_alias(node: fx.Node) -> fx.Node:
    """The node of which `node` is an alias; itself where it is none."""
    while node.op == "call_function" and facts_of(node.target).is_alias:
        node = node.args[0]  # type: ignore[assignment]
    return node
