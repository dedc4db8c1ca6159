"""Outlined updates: which updates of blocks can be graphs of their own, and what they share.

The update of a block writes what it takes. As one node of a step's graph it may do so if it is the
last to use that memory. Its step counts are, as a rule, one number in all blocks: what is computed
from them alone, as bias corrections, is computed once, outside of the blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from partita.tensor.op_facts import facts_of

from ..graph_nodes import written_operands
from .block_traces import BlockTrace
from .equal_calls import tensors_in
from .functional_memory import memory_that_is_written, operands_written

__all__ = ["OutlinedUpdates"]


class OutlinedUpdates:
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
        own, shared = {*trace.entered, *trace.forward}, set(counts)
        written: set[int | None] = set()  # memory that the block itself writes,
        read: set[int | None] = set()  # and reads
        for node in trace.forward:
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
