"""What can be under way while something else is computed?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from ..notes import note_of
from ..program import Program
from ..storages import storages_of
from .gathered import Runs

__all__ = ["overlap"]

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_COPY = _aten.copy_.default
_PACKING = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._to_copy.default,
    _aten.cat.default,
    _aten.constant_pad_nd.default,
    _aten.slice.Tensor,
)
_ROOM = 1.05
"""How far prefetching may raise the predicted peak, inputs included."""


def overlap(program: Program) -> str:
    """A gather is under way while the block before computes, a sum while the next one does.

    A gather begins when the block before has what it needs and begins to compute, so that no more
    than two are gathered at once; a reduction is waited for when the next one begins. Each only
    where the predicted peak of memory, the inputs included, stays within 5 % of what it was: where
    activations fill the memory, nothing is fetched ahead.
    """
    order = _Order(program)
    limit = _ROOM * order.peak()
    earlier = sum(_begin_early(order, limit))
    later = sum(_wait_late(order, limit))
    order.apply()
    return f"{earlier} gathers begin a block earlier, {later} reductions end a block later"


class _Order:
    """The nodes of a graph in an order that is tried out before it is taken.

    What is tried lies within a window of it. Outside of that nothing changes, neither what is in
    memory nor where a node stands: a try takes as long as its window.
    """

    def __init__(self, program: Program):
        self.graph = program.graph.graph
        self.nodes = list(self.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self._storages = storages_of(program)
        self.reads = {node: self._read_by(node) for node in self.nodes}
        self._last = {s: node for node in self.nodes for s in self.reads[node]}
        self._live, self._peak = self._run(self.nodes, 0, self._last)

    def _read_by(self, node: fx.Node) -> set[int]:
        """The storages that must be there when a node runs."""
        reads = node.all_input_nodes
        if node.target is _WAIT:  # what is under way reads its operand until it is waited for
            reads = [*reads, *reads[0].all_input_nodes]
        return {s for read in reads for s in self._storages.of[read]}

    def written_by(self, node: fx.Node) -> tuple[int, ...]:
        """The storages that a node writes."""
        return self._storages.of[node.args[0]] if node.target is _COPY else ()

    def peak(self) -> int:
        """Bytes at the fullest place, the inputs' among them."""
        return self._peak

    def _run(
        self, nodes: Sequence[fx.Node], live: int, last: Mapping[int, fx.Node]
    ) -> tuple[list[int], int]:
        """Bytes that are there before each of `nodes`, `live` of them before the first; the most.

        Args:
            last: of each storage that one of them reads, who reads it last.
        """
        found, nbytes = self._storages, self._storages.nbytes
        before, most = [], live
        for node in nodes:
            before.append(live)
            for s in found.made_by(node) if node in found.of else ():
                live += nbytes[s]
            most = max(most, live + found.passing.get(node, 0))
            for s in self.reads[node]:
                if last[s] is node and found.maker[s].op != "placeholder":
                    live -= nbytes[s]
        return before, most

    def try_behind(self, some: set[fx.Node], behind: fx.Node, limit: float) -> bool:
        """Have `some`, in their order, right behind another node, if that stays within the limit.

        Args:
            limit: within which the order is now.
        """
        at = self.place[behind]
        places = [self.place[node] for node in some]
        first, end = min(*places, at + 1), max(*places, at) + 1
        window = self.nodes[first:end]
        moved = [n for n in window if n in some]
        rest = [n for n in window if n not in some]
        cut = rest.index(behind) + 1 if at >= first else 0
        new = [*rest[:cut], *moved, *rest[cut:]]
        last = {s: self._last[s] for node in new for s in self.reads[node]}
        for node in new:
            for s in self.reads[node]:
                if self.place[last[s]] < end:
                    last[s] = node
        live, peak = self._run(new, self._live[first], last)
        if peak > limit:
            return False
        self.nodes[first:end], self._live[first:end] = new, live
        self.place.update((node, first + i) for i, node in enumerate(new))
        self._last.update(last)
        return True

    def apply(self) -> None:
        root = self.graph._root
        for node in self.nodes:
            root.prepend(node)


def _begin_early(order: _Order, limit: float) -> Iterable[bool]:
    runs = Runs(order.graph)
    place = order.place
    for one in runs.found:
        number = runs.of(one)
        if number <= 0:
            continue
        behind = order.nodes[place[runs.first(number - 1)] - 1]
        if place[behind] < place[one.gather]:
            needed = _packing(one.gather, place, place[behind])
            if needed is not None:
                yield order.try_behind(needed, behind, limit)


def _packing(start: fx.Node, place: dict[fx.Node, int], at: int) -> set[fx.Node] | None:
    """`start` and what packs its operand behind `at`; None where that is more than packing."""
    found, waiting = {start}, [start]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if place[read] > at and read not in found:
                if read.target not in _PACKING:
                    return None
                found.add(read)
                waiting.append(read)
    return found


def _wait_late(order: _Order, limit: float) -> Iterable[bool]:
    waits = [n for n in order.nodes if n.target is _WAIT and note_of(n).reason == "gradient"]
    starts = [w.args[0] for w in waits]
    place = order.place
    for wait, following in zip(waits, starts[1:], strict=False):
        assert isinstance(following, fx.Node)
        late, reads = {wait}, order.reads[wait]
        for node in order.nodes[place[wait] + 1 : place[following] + 1]:
            # What writes into memory that is read late must wait for that too.
            written = order.written_by(node)
            if not (late.isdisjoint(node.all_input_nodes) and reads.isdisjoint(written)):
                late.add(node)
                reads = reads | order.reads[node]
        if following not in late and place[wait] < place[following]:
            yield order.try_behind(late, following, limit)
