"""Update programs: the update of each block's parameters, traced once, as one graph of its own.

An update may be a graph of its own if it is the last to use what it writes (`_OutlinedUpdates`).
What it computes from step counts that are equal in all blocks is computed once, beside the calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from torch import fx

from partita.graph.block_calls import block_forward, block_output, inline_bodies
from partita.graph.block_programs import BlockProgram, find_base_of_alias
from partita.graph.errors import UnsureOfWrites
from partita.graph.fake_values import make_distinct, tensors_in
from partita.graph.graph_nodes import (
    add_input,
    copy_node,
    drop_unused,
    has_effect,
    lazy_graph_module,
    written_operands,
)
from partita.graph.shared_memory import (
    memory_that_is_written,
    operands_written,
    overlapping_results,
)
from partita.tensor.op_facts import facts_of

from .block_tracing import BlockTrace
from .functionalize import functionalize_graph


def count_inlined_nodes(graph: fx.Graph) -> int:
    """Returns the nodes of a traced graph in which each update has nodes of its own."""
    return len(graph.nodes) + sum(len(_trace_of(call).nodes) for call in _calls_of_updates(graph))


def inline_updates(graph: fx.Graph, only: Collection[BlockTrace] | None = None) -> None:
    """Replace the calls of updates by copies of their traces, and erase the traces.

    Args:
        only: of these updates; None for all.
    """
    found = dict.fromkeys(map(_trace_of, _calls_of_updates(graph)))
    traces = [trace for trace in found if only is None or trace in only]
    inline_bodies(graph, lambda n: n.args[0] if n.args[0] in traces else None)
    traced = [node for trace in traces for node in (*trace.entered, *trace.nodes)]
    for node in reversed(traced):
        if not node.users:  # else it is of no block: a number that is computed once for all
            graph.erase_node(node)


def outline_updates(step: fx.GraphModule, equal: Sequence[Sequence[int]] = ()) -> bool:
    """Replace updates of a traced step by calls of programs, and inline the others.

    Returns whether any update became a call.

    Args:
        equal: groups of inputs, by place, that hold the same number.

    Raises:
        UnsureOfWrites: they have to be inlined after all.
    """
    graph = step.graph
    outlining = _Outlining(step, equal)
    traces = dict.fromkeys(map(_trace_of, _calls_of_updates(graph)))
    outlined = [t for t in traces if outlining.can_outline(t)]
    inline_updates(graph, [t for t in traces if t not in outlined])
    if outlined:
        outlining.outline(outlined)
    return bool(outlined)


def _calls_of_updates(graph: fx.Graph) -> list[fx.Node]:
    calls = graph.find_nodes(op="call_function", target=block_forward)
    return [n for n in calls if isinstance(n.args[0], BlockTrace)]


def _trace_of(call: fx.Node) -> BlockTrace:
    trace: Any = call.args[0]
    return trace  # type: ignore[no-any-return]


class _Outlining:
    """The outlining of the updates of one traced step."""

    def __init__(self, step: fx.GraphModule, equal: Sequence[Sequence[int]]):
        self.step, self._equal = step, equal
        self._calls: dict[BlockTrace, list[fx.Node]] = defaultdict(list)
        for call in _calls_of_updates(step.graph):
            self._calls[_trace_of(call)].append(call)
        # By each node of a trace, the trace.
        self._traced = {n: t for t in self._calls for n in (*t.entered, *t.nodes)}

    def can_outline(self, trace: BlockTrace) -> bool:
        """True if several updates have this trace, and each is the last to use what it writes."""
        calls = self._calls[trace]
        return len(calls) > 1 and self._updates.can_outline(calls)

    @cached_property
    def _updates(self) -> _OutlinedUpdates:
        return _OutlinedUpdates(self.step.graph, self._traced, self._equal)

    def outline(self, traces: Sequence[BlockTrace]) -> None:
        """Replace the updates of these traces by calls of programs."""
        step = self.step.graph
        self._traced = {n: t for n, t in self._traced.items() if t in traces}
        self._outer = self._find_outer_nodes(traces)
        calls = [n for n in _calls_of_updates(step) if n in self._outer]
        programs: dict[Any, tuple[BlockProgram, list[fx.Node]]] = {}
        made = []
        for call in calls:
            read = (n for n in call.users if n.target is block_output and n in self._outer)
            key = _trace_of(call), tuple(sorted({n.args[1] for n in read}))  # type: ignore[type-var]
            if key not in programs:
                programs[key] = self._make_program(*key)  # type: ignore[arg-type]
            made.append(programs[key])
        inner = [n for n in step.nodes if n not in self._outer]
        for call, (program, free) in zip(calls, made, strict=True):
            part: Any = program
            call.args = (part, (), *call.args[2:], *free)
        for node in reversed(inner):
            step.erase_node(node)

    def _find_outer_nodes(self, traces: Sequence[BlockTrace]) -> set[fx.Node]:
        """Returns the nodes that belong to no update, and the nodes of traces that others read.

        The latter are numbers that all updates share, and constants.
        """
        outer = self._find_live_nodes() | {*self.step.graph.find_nodes(op="get_attr")}
        for trace in traces:
            outer |= self._updates.find_shared_numbers(trace, self._calls[trace])
        waiting = [r for n in outer for r in n.all_input_nodes if r in self._traced]
        for trace in traces:
            for node in trace.nodes:
                waiting += [r for r in node.all_input_nodes if self._traced.get(r) is not trace]
        while waiting:
            node = waiting.pop()
            if node not in outer:
                outer.add(node)
                waiting += node.all_input_nodes
        return outer

    def _find_live_nodes(self) -> set[fx.Node]:
        """Returns the nodes outside of traces that have an effect or that something needs."""
        live: set[fx.Node] = set()
        for node in reversed(self.step.graph.nodes):
            if node not in self._traced and (has_effect(node) or not live.isdisjoint(node.users)):
                live.add(node)
        return live

    def _make_program(
        self, trace: BlockTrace, results: tuple[int, ...]
    ) -> tuple[BlockProgram, list[fx.Node]]:
        """The program of a trace, and the nodes that it reads beside the operands of its calls."""
        graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
        nodes = [n for n in trace.nodes if n not in self._outer]
        own = {*trace.entered, *nodes}
        read = (r for n in nodes for r in n.all_input_nodes if r not in own)
        free = [*dict.fromkeys(read)]
        taken = [*trace.entered, *free]
        known: set[int] = set()
        for i, node in enumerate(taken):
            of[node] = given = add_input(graph, f"in_{i}")
            given.meta = {**node.meta, "val": make_distinct(node.meta["val"], known)}
        for node in nodes:
            of[node] = copy_node(graph, node, of.__getitem__)
        graph.output([of[trace.made[n]] for n in results])
        made = functionalize_graph(lazy_graph_module(self.step, graph))
        drop_unused(made.graph)
        program = BlockProgram(trace.kind, made, len(taken), [*results], [], False)
        if any(max(pair) < len(results) for pair in overlapping_results(made.graph)):
            raise UnsureOfWrites  # results show one memory, or that of an operand
        program.mark_results()
        return program, free


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
        """True if each of these calls writes whole inputs, and is the last to use them."""
        return all(map(self._is_last_to_use, calls))

    def _is_last_to_use(self, call: fx.Node) -> bool:
        part: Any = call.args[0]
        given = [self._memory.get(n) for n in part.operands(call)]
        for operand in written_operands(call):
            memory = self._memory[operand]
            if (
                find_base_of_alias(operand).op != "placeholder"
                or self._writers[memory] != [call]
                or self._last_uses[memory] > self._places[call]
                or given.count(memory) > 1
            ):
                return False
        return True

    def find_shared_numbers(self, trace: BlockTrace, calls: Sequence[fx.Node]) -> set[fx.Node]:
        """The nodes of a trace that compute one number for all blocks, from equal step counts."""
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
        """True if an operand is an input of one number in all calls, which only its call writes.

        Args:
            operand: its place.
        """
        groups = set[int | None]()
        for call in calls:
            given: fx.Node = call.args[2 + operand]  # type: ignore[assignment]
            if any(w is not call for w in self._writers.get(self._memory.get(given, -1), ())):
                return False
            groups.add(self._groups.get(find_base_of_alias(given)))
        return len(groups) == 1 and None not in groups
