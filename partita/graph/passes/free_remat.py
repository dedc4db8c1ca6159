"""Free recomputation: backward does not keep what its kernels can compute while they read.

A compiler fuses element-wise calls into the kernels that read their results. So a kernel of
backward that reads `silu(gate)` can read `gate` and compute the rest. If backward reads `gate`
anyway, this reads no more bytes, and `silu(gate)` need not live from forward to backward.

A value of forward is computed again if all of these hold:

- At most `_MOST_CALLS` element-wise calls (and views) make it from its sources. These are values
  that backward reads anyway, after the value is made. For a cast to a wider type it may be the
  operand, even if nothing else keeps that: `x` in bfloat16 has half the bytes of `x.float()`. A
  gathered parameter is not a source, because it would have to be gathered again. Nor is memory that
  the graph writes.
- Backward reads it only in calls that are fused, and no other kernel runs between them. A product
  or a collective would need the value in memory.
- The sources that are not read there anyway have no more bytes than the value.
- Nothing else keeps it: it is not an output, no policy of `pt.remat` keeps it, and neither an
  update nor a later forward reads it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from partita.comm.collective import WAIT
from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, nbytes_of, note_of, written_operands
from ..program import Program
from ..shared_memory import shown_operand
from .regather import UseRuns
from .remat import can_be_made_again, is_in_backward, recompute

_MOST_CALLS = 8
"""The most calls that a kernel repeats for one value."""

_READERS = frozenset(
    """sum mean amax amin var var_mean logsumexp native_layer_norm_backward _fused_rms_norm_backward
    native_group_norm_backward _softmax_backward_data _log_softmax_backward_data""".split()
)
"""Calls that are not element-wise, but compilers fuse them with what makes their operands."""

_CONSTANTS = frozenset("full arange scalar_tensor zeros ones".split())


def free_remat(program: Program) -> str:
    """A value is not kept from forward if the kernels of backward that read it can compute it.

    This holds for an element-wise result of forward if it can be computed from values that backward
    reads anyway, and if all calls of backward that read it are fused.
    """
    values = _Values(program)
    chosen = {call for node in [*values.late_reads] for call in values.find_free_calls(node)}
    made = recompute(program.graph.graph, chosen)
    for again in made.values():
        again.meta[NOTE] = replace(note_of(again), reason="free")
    return f"{len(made)} calls are made again in the kernels of backward that read them"


class _Values:
    """The values of forward that backward reads, and which of them need not be kept.

    Memory is identified by the node that made it, its owner.

    Attributes:
        late_reads: for each owner, the places (indices in the graph) at which backward computes
            with its memory.
    """

    def __init__(self, program: Program):
        self._graph = graph = program.graph.graph
        self._nodes = [*graph.nodes]
        self._place = {node: i for i, node in enumerate(self._nodes)}
        self._owner: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            shown, _ = shown_operand(node)
            self._owner[node] = node if shown is None else self._owner[shown]
        (end,) = graph.find_nodes(op="output")
        self._returned = {self._owner[node] for node in end.all_input_nodes}
        self._kept: set[fx.Node] = set()
        self._read: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)  # by owner
        self._free: dict[fx.Node, tuple[set[fx.Node], set[fx.Node]]] = {}  # values: calls, sources
        self.late_reads: dict[fx.Node, list[int]] = {}
        late: set[fx.Node] = set()
        for node in graph.nodes:
            if is_in_backward(node):
                late.add(node)
            if note_of(node).kept:
                self._kept.add(self._owner[node])
            for read in node.all_input_nodes:
                self._record_read(node, read, late)

    @cached_property
    def _kernels(self) -> list[int]:
        """The places of backward's calls that compilers do not fuse."""
        return [i for n, i in self._place.items() if is_in_backward(n) and not _is_fused(n)]

    @cached_property
    def _no_sources(self) -> set[fx.Node]:
        """The gathered parameters, and the owners of memory that some node writes."""
        gathered = {node for one in UseRuns(self._graph).found for node in one.chain}
        written = (read for node in self._nodes for read in written_operands(node))
        return gathered | {self._owner[read] for read in written}

    def _record_read(self, node: fx.Node, read: fx.Node, late: Set[fx.Node]) -> None:
        owner = self._owner[read]
        if node in late:
            if read not in late:
                self._read[owner].add(read)
            if self._owner[node] is not owner:  # the readers of a view count, not the view
                self.late_reads.setdefault(owner, []).append(self._place[node])
        elif owner in self.late_reads:  # read by an update, a later forward, or the output
            self._kept.add(owner)

    def find_free_calls(self, value: fx.Node) -> set[fx.Node]:
        """Returns the calls that backward repeats if `value` is not kept; none if it must be kept.

        Call it in the order of the graph, because a decision depends on earlier ones.
        """
        if value in self._kept or not _is_element_wise(value):
            return set()
        places = self.late_reads[value]
        first, last = (self._count_kernels_before(f(places)) for f in (min, max))
        if first != last or not all(_is_fused(self._nodes[place]) for place in places):
            return set()
        found = self._trace_to_sources(value) or self._find_narrow_source(value)
        if found is None:
            return set()
        calls, sources = found
        more = [s for s in sources if not self._is_read_among(s, first)]
        if sum(map(nbytes_of, more)) > nbytes_of(value):
            return set()
        for source in sources:
            self.late_reads.setdefault(source, []).append(min(places))
        self._free[value] = found
        return calls.union(*(self._views_between(value, read) for read in self._read[value]))

    def _count_kernels_before(self, place: int) -> int:
        return bisect.bisect(self._kernels, place)

    def _is_read_among(self, source: fx.Node, kernels: int) -> bool:
        """True if backward reads a source while exactly `kernels` of its kernels have run."""
        places = self.late_reads.get(source, ())
        return any(self._count_kernels_before(place) == kernels for place in places)

    def _trace_to_sources(self, value: fx.Node) -> tuple[set[fx.Node], set[fx.Node]] | None:
        """Returns the calls that compute a value from its sources, and the sources.

        Returns None if it cannot be computed from values that backward reads anyway, in few calls.
        """
        calls, sources, waiting = {value}, set[fx.Node](), [value]
        while waiting:
            for read in waiting.pop().all_input_nodes:
                owner = self._owner[read]
                calls.update(self._views_between(owner, read))
                if owner in calls or owner.op == "get_attr":
                    continue
                if owner in self._no_sources:
                    return None
                if owner in self._free:
                    calls |= self._free[owner][0]
                    sources |= self._free[owner][1]
                elif owner in self.late_reads:
                    if max(self.late_reads[owner]) < self._place[value]:
                        return None
                    sources.add(owner)
                elif _is_element_wise(owner):
                    calls.add(owner)
                    waiting.append(owner)
                else:
                    return None
        many = sum(not facts_of(call.target).is_view for call in calls)
        return (calls, sources) if many <= _MOST_CALLS else None

    def _find_narrow_source(self, value: fx.Node) -> tuple[set[fx.Node], set[fx.Node]] | None:
        """Returns the calls that make a value by a cast, and the operand if it has fewer bytes.

        The operand must be a value of the graph alone: others may write arguments and results
        between forward and backward of a region.
        """
        if not facts_of(value.target).casts:
            return None
        read: Any = value.args[0]
        owner = self._owner[read]
        is_ours = owner.op == "call_function" and owner not in self._returned
        if not is_ours or owner in self._no_sources or owner in self._free:
            return None
        if nbytes_of(owner) >= nbytes_of(value):
            return None
        return {value, *self._views_between(owner, read)}, {owner}

    def _views_between(self, owner: fx.Node, node: fx.Node) -> Iterator[fx.Node]:
        """Yields the view calls that make `node` from its owner, up to one that backward reads."""
        while node is not owner and (owner in self._free or node not in self._read[owner]):
            yield node
            shown, _ = shown_operand(node)
            assert shown is not None
            node = shown


def _is_element_wise(node: fx.Node) -> bool:
    """True if each element of a call's result depends on one element of each operand."""
    if not can_be_made_again(node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    is_constant = getattr(node.target, "_opname", "") in _CONSTANTS
    return is_constant or facts_of(node.target).casts or _is_pointwise(node)


def _is_fused(node: fx.Node) -> bool:
    """True if compilers fuse a call with those that make its operands."""
    facts, name = facts_of(node.target), getattr(node.target, "_opname", "")
    moves = facts.moves and node.target is not WAIT
    return moves or facts.casts or _is_pointwise(node) or name in _READERS | _CONSTANTS


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
