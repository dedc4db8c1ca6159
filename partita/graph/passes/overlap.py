"""Overlap of collectives with computation: early gathers, late waits for reductions.

Each change is first tried on a list of the nodes (`_Order`). It is made only if the predicted peak
of memory stays within a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import fx

from partita.comm.collective import ALL_REDUCE, WAIT

from ..graph_nodes import is_collective, nbytes_of, note_of, written_operands
from ..memory import storages_of
from ..program import Program
from .regather import UseRuns, only_moves, packing_of
from .remat import is_in_backward

_FEW, _SMALL = 16, 1 << 15
"""A collective of at most so many bytes, made of inputs by at most so many calls, begins with the
step. An example counts the targets of a batch."""
_NOTHING: Set[int] = frozenset()
_ROOM = 1.05
"""The factor by which prefetching may raise the predicted peak, inputs included."""


def overlap(program: Program) -> str:
    """A gather runs while the previous block computes, a reduction while the next ones do.

    A gather begins when the block before it begins to compute, so that at most two blocks are
    gathered at once. The wait for a reduction is moved to the beginning of the next reduction. For
    a reduction in an optimizer's step, the wait is moved to the end of backward. Small collectives
    that depend only on inputs begin with the step, and their wait is moved to the first read. A
    change is made only if the predicted peak of memory rises by at most 5 %, inputs included, and
    stays within the step's budget. If activations fill the memory, nothing is prefetched.
    """
    order = _Order(program)
    limit = _ROOM * order.peak
    if (budget := program.options.budget) is not None:
        limit = max(order.peak, min(limit, budget + order.count_input_bytes()))
    earlier = sum(_begin_early(order, limit))
    later = sum(_wait_late(order, limit))
    beside = sum(_carry_beside(order, limit))
    order.apply()
    return (
        f"{earlier} gathers begin a block earlier, {later} reductions end a block later, "
        f"{beside} other collectives overlap with compute"
    )


class _Order:
    """An order of a graph's nodes, in which moves are tried before the graph is changed.

    A try moves nodes within a window. Outside of it neither the memory nor the place of a node
    changes, so that a try takes time for its window alone.

    Attributes:
        peak: the peak of memory in bytes before the first try, including the inputs.
    """

    def __init__(self, program: Program):
        self.graph = program.graph.graph
        self.nodes = list(self.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self._storages = storages_of(program)
        self.reads = {node: self._read_by(node) for node in self.nodes}
        self._made: dict[fx.Node, list[int]] = {}
        for s, maker in enumerate(self._storages.maker):
            self._made.setdefault(maker, []).append(s)
        self._last = {s: node for node in self.nodes for s in self.reads[node]}
        self._live, self.peak = self._simulate_memory(self.nodes, 0, self._last)

    def _read_by(self, node: fx.Node) -> Set[int]:
        """Returns the storages that must be allocated when a node runs."""
        reads = node.all_input_nodes
        if not reads:
            return _NOTHING
        # A collective reads its operand until it is waited for; an all-reduce reads a copy.
        if node.target is WAIT and reads[0].target is not ALL_REDUCE:
            reads = [*reads, *reads[0].all_input_nodes]
        of = self._storages.of
        return {s for read in reads for s in of[read]}

    def written_by(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the numbers of the storages that a node writes in place."""
        return tuple(s for written in written_operands(node) for s in self._storages.of[written])

    def count_input_bytes(self) -> int:
        """Returns the bytes of the graph's inputs."""
        inputs = (node for node in self.nodes if node.op == "placeholder")
        return sum(self._storages.nbytes[s] for node in inputs for s in self._made.get(node, ()))

    def _simulate_memory(
        self, nodes: Sequence[fx.Node], live: int, last: Mapping[int, fx.Node]
    ) -> tuple[list[int], int]:
        """Returns the bytes that are allocated before each of `nodes`, and the peak.

        Args:
            live: the bytes that are allocated before the first of them.
            last: for each storage that one of them reads, its last reader.
        """
        found, nbytes = self._storages, self._storages.nbytes
        before, most = [], live
        for node in nodes:
            before.append(live)
            for s in self._made.get(node, ()):
                live += nbytes[s]
            most = max(most, live + found.passing.get(node, 0))
            for s in self.reads[node]:
                if last[s] is node and found.maker[s].op != "placeholder":
                    live -= nbytes[s]
        return before, most

    def try_behind(self, some: set[fx.Node], behind: fx.Node, limit: float) -> bool:
        """Moves the nodes `some` directly behind the node `behind`, in their order.

        Does nothing if the predicted peak would exceed `limit` bytes. Returns True if they were
        moved.
        """
        at = self.place[behind]
        places = [self.place[node] for node in some]
        first, end = min(*places, at + 1), max(*places, at) + 1
        window = self.nodes[first:end]
        moved = [n for n in window if n in some]
        rest = [n for n in window if n not in some]
        cut = rest.index(behind) + 1 if at >= first else 0
        new = [*rest[:cut], *moved, *rest[cut:]]
        last: dict[int, fx.Node] = {}
        for node in new:
            for s in self.reads[node]:
                known = self._last[s]
                last[s] = node if self.place[known] < end else known
        live, peak = self._simulate_memory(new, self._live[first], last)
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
    runs = UseRuns(order.graph)
    place = order.place
    for one in runs.found:
        number = runs.first_run_of(one)
        if number <= 0:
            continue
        behind = order.nodes[place[runs.first(number - 1)] - 1]
        if place[behind] < place[one.gather]:
            packing, made_by = packing_of(one.gather)
            if all(place[node] <= place[behind] for node in made_by):
                late = {node for node in packing if place[node] > place[behind]}
                yield order.try_behind(late, behind, limit)


def _wait_late(order: _Order, limit: float) -> Iterable[bool]:
    """Moves the wait for a collective to where the next one of its kind begins.

    Then move waits for reductions of an optimizer's step to after backward, the last one first,
    because its result has the shortest life.
    """
    moved: dict[fx.Node, bool] = {}
    place = order.place
    for reasons in (("gradient", "settle"), ("update",)):
        waits = [n for n in order.nodes if n.target is WAIT and note_of(n).reason in reasons]
        starts: list[Any] = [w.args[0] for w in waits]
        for wait, following in zip(waits, starts[1:], strict=False):
            moved[wait] = _try_wait_behind(order, wait, following, limit)
        settled = [wait for wait in waits if note_of(wait).reason == "settle"]
        end = _end_of_backward(order, waits) if settled else None
        for wait in reversed(settled):
            if end is None or place[wait] > place[end]:
                continue
            if not _try_wait_behind(order, wait, end, limit):
                break  # earlier ends would keep the memory even longer
            moved[wait] = True
    return moved.values()


def _carry_beside(order: _Order, limit: float) -> Iterable[bool]:
    """Waits for the user's own collectives where a computation first reads their results.

    Small ones that few calls make from inputs begin with the step: then only latency is left.
    """
    inputs = [n for n in order.nodes if n.op == "placeholder"]
    for wait in [n for n in order.nodes if n.target is WAIT]:
        if note_of(wait).reason in ("implicit", "explicit"):
            begun = bool(inputs) and _try_with_step(order, wait, inputs[-1], limit)
            shown = [wait]
            readers: list[fx.Node] = []
            for node in shown:
                for user in node.users:
                    (shown if only_moves(user) else readers).append(user)
            first = min(readers, key=order.place.__getitem__)
            behind = order.nodes[order.place[first] - 1]
            yield _try_wait_behind(order, wait, behind, limit) or begun


def _try_with_step(order: _Order, wait: fx.Node, inputs: fx.Node, limit: float) -> bool:
    """Begins a collective right behind the inputs, if few calls make its operand of them."""
    made: set[fx.Node] = set()
    waiting = [wait.args[0]]
    while waiting and len(made) <= _FEW:
        node = waiting.pop()
        assert isinstance(node, fx.Node)
        if node not in made and node.op != "placeholder":  # (a constant may be moved)
            made.add(node)
            waiting += node.all_input_nodes
    if len(made) > _FEW or any(is_collective(n) for n in made - {wait.args[0]}):
        return False
    if nbytes_of(wait) > _SMALL:
        return False
    return order.try_behind(made, inputs, limit)


def _try_wait_behind(order: _Order, wait: fx.Node, behind: fx.Node, limit: float) -> bool:
    late = _made_late(order, wait, behind)
    return late is not None and order.try_behind(late, behind, limit)


def _end_of_backward(order: _Order, waits: Sequence[fx.Node]) -> fx.Node | None:
    """Returns the last node of backward that needs none of `waits`."""
    needing = set(waits)
    end = None
    for node in order.nodes:
        if not needing.isdisjoint(node.all_input_nodes):
            needing.add(node)
        elif node not in needing and is_in_backward(node):
            end = node
    return end


def _made_late(order: _Order, wait: fx.Node, behind: fx.Node) -> set[fx.Node] | None:
    """Returns the nodes that must move behind a node with `wait`; None if that is impossible.

    Returns None also if `wait` is behind that node already.
    """
    place = order.place
    late, reads = {wait}, order.reads[wait]
    for node in order.nodes[place[wait] + 1 : place[behind] + 1]:
        # A write into memory that a moved node reads must move with it.
        written = order.written_by(node)
        if not (late.isdisjoint(node.all_input_nodes) and reads.isdisjoint(written)):
            late.add(node)
            reads = reads | order.reads[node]
    return late if behind not in late and place[wait] < place[behind] else None
