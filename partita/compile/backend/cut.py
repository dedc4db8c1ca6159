"""The cutting of a graph into sections.

A section takes values that own their memory and gives such: what only shows memory is made again
where it is read. Between sections stand the collectives, and what checks a value: a compiler may
drop that, since nobody reads what it gives.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from partita.comm.graph_collectives import WAIT

from ..capture.equal_calls import tensors_in
from ..graph import is_collective, line_of
from ..graph_nodes import add_call, checks_value, copy_node, has_effect, lazy_graph_module
from ..memory.storages import storages_of
from ..node_metadata import NOTE, note_of
from ..ordering import with_early_writes
from ..program import Program
from ..repeats import repeats_of
from .sections import Section, Sections, call_section

__all__ = ["sections_of"]

_aten = torch.ops.aten
_COPY = _aten.copy_.default

DEEP = 3000
"""Calls of a graph above which it is cut: below, to compile it whole takes no longer than the parts
of a deep one, and a call of a section costs some microseconds."""

_LEFT = 0.5
"""The part of a deep graph that may be left of what is equal, for it to be cut."""

_LONG = 600
"""Calls between two collectives above which they are cut although others do the same: how many
layers stand there may hang on how many there are."""

_PIECES = 0.5
"""The part of a value that a section reads, at most, to be given only that."""

LEAST = 24
"""Calls in what is cut out of a part that repeats itself."""


def sections_of(program: Program, always: bool = False, least: int = LEAST) -> Sections | None:
    """A program's graph as sections; None where it has values that are no tensors.

    Args:
        always: also where that is not worth it: where the graph is not deep, or too little is
            equal in it.
        least: calls in what is cut out of a part that repeats itself.
    """
    calls = len(program.graph.graph.nodes) - len(program.inputs)
    if not always and calls <= DEEP:
        return None
    found = _Cutting(program, least).sections()
    if found is None or not found.different or (not always and found.nodes > _LEFT * calls):
        return None
    return found


class _Uncut(Exception):
    """What one part has for another is not what a section may give."""


class _Cutting:
    """The cutting of one graph."""

    def __init__(self, program: Program, least: int):
        self.program, self.least = program, least
        self.storages = storages_of(program)
        order = with_early_writes(program.graph.graph, self.storages)
        self.order = [node for node in order if not self._is_remakeable_view(node)]
        self.of: dict[fx.Node, int] = {}  # the part in which a call stands
        self.known: dict[tuple[str, frozenset[torch.device]], Section] = {}
        self.calls = 0
        self._outer = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # in the outer graph
        self._read: dict[fx.Node, None] = {}  # by other parts

    def sections(self) -> Sections | None:
        try:
            return self._cut_graph()
        except _Uncut:
            return None

    def _cut_graph(self) -> Sections:
        parts = [*self._split_into_parts()]
        for i, part in enumerate(parts):
            self.of.update(dict.fromkeys(part, i))
        self._read = self._read_from_outside()
        if any(not isinstance(n.meta.get("val"), torch.Tensor) for n in self._read):
            raise _Uncut
        for node in self.program.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._values[node] = self._copy_to_outer(node)
        starts = {part[0]: part for part in parts}
        for node in self.order:
            if node in starts:
                self._call_section(starts[node])
            elif node not in self.of:
                self._have_operands(node)
                self._values[node] = self._copy_to_outer(node)
        (end,) = self.program.graph.graph.find_nodes(op="output")
        self._have_operands(end)
        self._copy_to_outer(end)
        outer = lazy_graph_module(self.program.graph, self._outer)
        return Sections(outer, [*self.known.values()], self.calls)

    # -- which calls are together ------------------------------------------------------------------

    def _split_into_parts(self) -> Iterator[list[fx.Node]]:
        """What stands between collectives; of what is long, or stands there once, each repeat."""
        runs: list[list[fx.Node]] = [[]]
        for node in self.order:
            if _stands_between(node):
                runs.append([])
            else:
                runs[-1].append(node)
        said = [tuple(map(_key_of_call, run)) for run in runs]
        times = Counter(said)
        for run, text in zip(runs, said, strict=True):
            if times[text] == 1 or len(run) > _LONG:
                yield from self._split_repeats(run)
            elif run:
                yield run

    def _split_repeats(self, run: list[fx.Node]) -> Iterator[list[fx.Node]]:
        is_long = len(run) >= 2 * self.least
        found = repeats_of([*map(_key_of_call, run)], self.least) if is_long else None
        if found is None:
            if run:
                yield run
            return
        part, period = found
        alive = self._count_live_values(run)
        second = [i for i in part[period : 2 * period] if not _is_piece(run[i])]
        cut = min(second, key=lambda i: alive[i]) - period  # where the least is handed over
        yield from self._split_repeats(run[:cut])
        while (end := cut + period) <= part.stop and not (run[end:] and _is_piece(run[end])):
            yield run[cut:end]
            cut = end
        yield from self._split_repeats(run[cut:])

    def _count_live_values(self, run: list[fx.Node]) -> list[int]:
        """Before each call of a run, how many values of earlier ones are read by later ones."""
        place = {node: i for i, node in enumerate(run)}
        change = [0] * (len(run) + 1)
        for node, i in place.items():
            read = [place[user] for user in node.users if user in place]
            if read:
                change[i + 1] += 1
                change[max(read) + 1] -= 1
        alive = 0
        return [alive := alive + more for more in change[:-1]]

    # -- what only shows memory --------------------------------------------------------------------

    def _is_remakeable_view(self, node: fx.Node) -> bool:
        """Does it only show memory, so that it can be made again? Not a piece of what one makes."""
        if node.op != "call_function" or _stands_between(node) or node.target is _COPY:
            return False
        if node.target is operator.getitem:
            return self._is_remakeable_view(node.args[0])  # type: ignore[arg-type]
        return not self.storages.made_by(node) and not has_effect(node)

    def _find_owners(self, node: fx.Node) -> Iterator[fx.Node]:
        """What is read where a node is: itself, or what those that it shows are made of."""
        if self._is_remakeable_view(node):
            for read in node.all_input_nodes:
                yield from self._find_owners(read)
        else:
            yield node

    def _read_from_outside(self) -> dict[fx.Node, None]:
        """The values of parts that others read, or the graph gives."""
        found: dict[fx.Node, None] = {}
        for node in self.program.graph.graph.nodes:
            if self._is_remakeable_view(node):
                continue
            for read in node.all_input_nodes:
                for owner in self._find_owners(read):
                    if owner in self.of and self.of[owner] != self.of.get(node):
                        found[owner] = None
        return found

    # -- the outer graph ---------------------------------------------------------------------------

    def _copy_to_outer(self, node: fx.Node) -> fx.Node:
        copy = copy_node(self._outer, node, lambda n: self._values[n])
        copy.meta = _meta_of(node)
        return copy

    def _have_operands(self, node: fx.Node) -> None:
        """Have the outer graph make what a call of its own reads, where that shows memory."""
        for read in node.all_input_nodes:
            self._ensure_value(read)

    def _ensure_value(self, node: fx.Node) -> None:
        if node not in self._values:
            assert self._is_remakeable_view(node)
            self._have_operands(node)
            self._values[node] = self._copy_to_outer(node)

    def _check_owned(self, gives: Sequence[fx.Node]) -> None:
        """Raise _Uncut where what a part gives may be a view of what it takes, or of each other."""
        shown = [s for node in gives for s in self.storages.of[node]]
        makers = {self.storages.maker[s] for s in shown}
        if len(set(shown)) < len(shown) or any(self.of.get(m) != self.of[gives[0]] for m in makers):
            raise _Uncut

    def _call_section(self, part: Sequence[fx.Node]) -> None:
        """Have the outer graph call the section that does what a part does."""
        made = _Part(self, part)
        if not made.does_something:
            return
        key = made.key()  # which does not say on which GPU, as that differs between ranks
        section = self.known.get((key, made.devices))
        if section is None:
            graph = lazy_graph_module(torch.nn.Module(), made.graph)
            section = self.known[key, made.devices] = Section(graph, key)
        self._check_owned(made.gives)
        self.calls += 1
        for node in made.takes:
            self._ensure_value(node)
        takes = [self._values[n] for n in made.takes]
        call = add_call(self._outer, call_section, (section, takes))  # type: ignore[arg-type]
        call.meta = {NOTE: part[0].meta.get(NOTE)}
        for i, node in enumerate(made.gives):
            self._values[node] = piece = add_call(self._outer, operator.getitem, (call, i))
            piece.meta = _meta_of(node)


class _Part:
    """A part of a graph as a graph of its own.

    Attributes:
        takes, gives: values of the whole, that it reads and that others read of it.
    """

    def __init__(self, cutting: _Cutting, part: Sequence[fx.Node]):
        self._cutting = cutting
        self.graph = fx.Graph()
        self.takes: list[fx.Node] = []
        self._of: dict[fx.Node, fx.Node] = {}
        self._pieces = self._pieces_of_more(part)
        for node in part:
            self._have_operands(node)
            self._of[node] = self._add_call(node)
        self.gives = [n for n in part if n in cutting._read]
        self.does_something = bool(self.gives) or any(has_effect(n) for n in part)
        self.graph.output([self._of[n] for n in self.gives])

    def _add_call(self, node: fx.Node) -> fx.Node:
        copy = copy_node(self.graph, node, lambda n: self._of[n])
        copy.meta = _meta_of(node)
        return copy

    def _have_operands(self, node: fx.Node) -> None:
        for read in node.all_input_nodes:
            if read in self._of:
                continue
            if self._cutting._is_remakeable_view(read) and read not in self._pieces:
                self._have_operands(read)
                self._of[read] = self._add_call(read)
            else:
                self._of[read] = self._add_placeholder(read)

    def _pieces_of_more(self, part: Sequence[fx.Node]) -> set[fx.Node]:
        """What is taken as a piece of what others made, of which the part reads little.

        Which piece of a bucket of gradients it is would else be in its text.
        """
        pieces: dict[fx.Node, set[fx.Node]] = {}
        seen: set[fx.Node] = set()
        inside = set(part)
        waiting = [read for node in part for read in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in seen or not self._cutting._is_remakeable_view(node):
                continue
            seen.add(node)
            owners = [*self._cutting._find_owners(node)]
            if (
                len(owners) == 1
                and owners[0] not in inside
                and _numel_of_node(node) < _numel_of_node(owners[0])
            ):
                source = node
                while _numel_of_node(node := source.all_input_nodes[0]) < _numel_of_node(owners[0]):  # type: ignore[arg-type]
                    source = node
                pieces.setdefault(owners[0], set()).add(source)
            else:
                waiting += node.all_input_nodes
        return {
            piece
            for owner, found in pieces.items()
            if sum(map(_numel_of_node, found)) <= _PIECES * _numel_of_node(owner)
            for piece in found
        }

    def _add_placeholder(self, node: fx.Node) -> fx.Node:
        last = self._of[self.takes[-1]] if self.takes else None
        graph = self.graph
        with graph.inserting_after(last) if last is not None else graph.inserting_before():
            given = self.graph.placeholder(f"in_{len(self.takes)}")
        given.meta = _meta_of(node)
        self.takes.append(node)
        return given

    @property
    def devices(self) -> frozenset[torch.device]:
        """Of all that it computes with."""
        values = [n.meta["val"] for n in self.graph.nodes if n.op != "output"]
        return frozenset(t.device for value in values for t in tensors_in(value))

    def key(self) -> str:
        """Of its text: equal where it does the same."""
        number: dict[fx.Node, str] = {}
        lines = []
        for node in self.graph.nodes:
            number[node] = f"%{len(number)}"
            note = note_of(node)
            lines.append(
                f"{line_of(node, number)} {note.phase} {note.again}"
            )  # see `inductor_scheduling`
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


def _stands_between(node: fx.Node) -> bool:
    """Is it no part of a section: a collective, what waits for one, or what checks a value?"""
    return node.target is WAIT or is_collective(node) or checks_value(node)


def _meta_of(node: fx.Node) -> dict[str, Any]:
    """What is known of a node, for its copy: other entries are of its own graph."""
    return {k: node.meta[k] for k in ("val", NOTE) if k in node.meta}


def _numel_of_node(node: fx.Node) -> int:
    """Elements of a tensor, or of all that a call gives."""
    return sum(t.numel() for t in tensors_in(node.meta["val"]))


def _is_piece(node: fx.Node) -> bool:
    """Of what another call gives, which has to be in the same part."""
    return node.target is operator.getitem


def _key_of_call(node: fx.Node) -> Hashable:
    """What a call is, but for which values it reads."""
    return line_of(node, dict.fromkeys(node.all_input_nodes, "%"))
