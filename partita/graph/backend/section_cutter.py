"""The section cutter: cuts a graph into sections, so that equal ones are compiled only once.

The cuts are at collectives, at checks of values (which a compiler might drop), and around calls of
blocks that are sections already (`step_forms`). A section takes and returns only tensors that own
their memory: a section that reads a view makes the view itself.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from partita.comm.collective import WAIT
from partita.tensor.op_facts import facts_of

from ..fake_values import make_distinct, tensors_in
from ..graph_nodes import (
    DEEP,
    NOTE,
    Note,
    Subgraph,
    add_call,
    add_input,
    call_subgraph,
    checks_value,
    copy_node,
    has_effect,
    is_collective,
    lazy_graph_module,
    note_of,
    subgraph_of,
)
from ..graph_text import line_of, make_key
from ..memory import Storages, storages_of
from ..program import Program
from .executor import Sections

_aten = torch.ops.aten
_COPY = _aten.copy_.default

_LEFT = 0.5
"""The largest part of a deep graph that the different sections may be, for it to be cut."""

_PIECES = 0.5
"""The largest part of a value that a section may read to be passed only the pieces that it
reads."""


def sections_of(program: Program, always: bool = False) -> Sections | None:
    """Cuts a program's graph into sections (parts that are compiled separately).

    Equal sections are compiled only once. Returns None if the graph has values that are not
    tensors, or no section. Returns None also if a cut saves too little: for a graph of at most
    `DEEP` calls, or if the different sections have more than half of the calls.

    Args:
        always: True to cut the graph even if that saves too little.
    """
    calls = len(program.graph.graph.nodes) - len(program.inputs)
    if not always and calls <= DEEP:
        return None
    try:
        found = _GraphCutter(program).cut_graph()
    except UnsureOfSections:
        return None
    worth = always or found.nodes <= _LEFT * calls
    return found if found.different and worth else None


def sections_of_blocks(
    program: Program,
    late: Collection[fx.Node],
    packing: Sequence[Collection[fx.Node]],
    known: dict[Any, Subgraph],
) -> fx.GraphModule:
    """Cuts a block's graph into sections at collectives, and between forward and backward.

    Returns the graph that has the collectives and calls the sections.

    Args:
        program: the block's graph, as a program.
        late: the nodes of backward, which no other node reads.
        packing: for each gather, the nodes that compute its operand from inputs. They become a
            separate section, so that the gather may begin before the rest of the block.
        known: the sections of other blocks; new ones are added.

    Raises:
        UnsureOfSections: a section would have to pass a view, or a value that is not a tensor, to
            another one.
    """
    return _GraphCutter(program, late, packing, known).cut_graph().outer


class UnsureOfSections(Exception):
    """Raised if a graph cannot be cut into sections.

    The reason: a section would have to return a view, or a value that is not a tensor.
    """


class _GraphCutter:
    """The cutting of one graph."""

    def __init__(
        self,
        program: Program,
        late: Collection[fx.Node] = (),
        packing: Sequence[Collection[fx.Node]] = (),
        known: dict[Any, Subgraph] | None = None,
    ):
        self.program, self.late = program, late
        self.storages = storages_of(program)
        # Where two gathers share a node, it comes before the first.
        numbered = [*enumerate(packing)][::-1]
        self._packs = {node: i for i, nodes in numbered for node in nodes}
        order = _with_early_writes(program.graph.graph, self.storages)
        order.sort(key=lambda node: node in late)  # stable
        order = [node for node in order if not self._is_remakeable_view(node)]
        self.order = self._with_packing_first(order) if packing else order
        self.of: dict[fx.Node, int] = {}  # for each call the number of its part
        self.is_of_block = known is not None
        self.known: dict[Any, Subgraph] = {} if known is None else known
        self.calls = 0
        self._outer = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # for each node its node in the outer graph
        self._read: dict[fx.Node, None] = {}  # values of parts that are read from outside

    def cut_graph(self) -> Sections:
        """Returns the graph as sections.

        Raises:
            UnsureOfSections: that is impossible.
        """
        parts = [*self._split_into_parts()]
        for i, part in enumerate(parts):
            self.of.update(dict.fromkeys(part, i))
        self._read = self._read_from_outside()
        if any(not isinstance(n.meta.get("val"), torch.Tensor) for n in self._read):
            raise UnsureOfSections
        for node in self.program.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._values[node] = _copy_with_note(self._outer, node, self._values)
        starts = {part[0]: part for part in parts}
        for node in self.order:
            if (section := subgraph_of(node)) is not None:
                self.known[section.key, _devices_of(section.graph.graph)] = section
                self.calls += 1
            if node in starts:
                self._call_section(starts[node])
            elif node not in self.of:
                self._have_operands(node)
                self._values[node] = _copy_with_note(self._outer, node, self._values)
        (end,) = self.program.graph.graph.find_nodes(op="output")
        self._have_operands(end)
        _copy_with_note(self._outer, end, self._values)
        outer = lazy_graph_module(self.program.graph, self._outer)
        return Sections(outer, [*self.known.values()], self.calls)

    # -- which calls are together ------------------------------------------------------------------

    def _split_into_parts(self) -> Iterator[list[fx.Node]]:
        """Returns the parts of the graph between collectives and calls of sections.

        In a block, nodes that pack or unpack gathered values are parts of their own.
        """
        stretches = groupby(self.order, lambda n: (_stands_between(n), n in self.late))
        runs = [[*nodes] for (stands_between, _), nodes in stretches if not stands_between]
        if self.is_of_block:
            for run in runs:
                packing = [n for n in run if n in self._packs]
                for _, part in groupby(packing, self._packs.__getitem__):
                    yield [*part]
                yield from self._split_unpacking(run[len(packing) :])
            return
        yield from runs

    def _with_packing_first(self, order: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns an order in which nodes that pack for a gather come first between collectives."""
        found: list[fx.Node] = []
        last = len(self._packs)
        for _, nodes in groupby(order, _stands_between):
            found += sorted(nodes, key=lambda n: (n in self.late, self._packs.get(n, last)))
        return found

    def _split_unpacking(self, run: list[fx.Node]) -> Iterator[list[fx.Node]]:
        """Yields the first calls of `run`, which unpack gathered values, and then the others.

        So the packed parameters are freed, and the next block's gather begins, before the calls
        that compute with the parameters.
        """
        moves = 0
        for node in run:
            facts = facts_of(node.target)
            owners = [o for read in node.all_input_nodes for o in self._find_owners(read)]
            if not (facts.moves or facts.casts) or any(o.target is not WAIT for o in owners):
                break
            moves += 1
        yield from (part for part in (run[:moves], run[moves:]) if part)

    # -- views -------------------------------------------------------------------------------------

    def _is_remakeable_view(self, node: fx.Node) -> bool:
        """True for a view that can be made again by its readers; False for an item of a result."""
        if node.op != "call_function" or _stands_between(node) or node.target is _COPY:
            return False
        if node.target is operator.getitem:
            return self._is_remakeable_view(node.args[0])  # type: ignore[arg-type]
        return not self.storages.made_by(node) and not has_effect(node)

    def _find_owners(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yields the nodes that own a value's memory: the node, or the bases of a view."""
        if self._is_remakeable_view(node):
            for read in node.all_input_nodes:
                yield from self._find_owners(read)
        else:
            yield node

    def _read_from_outside(self) -> dict[fx.Node, None]:
        """Returns the values of parts that other parts read, or that the graph returns."""
        of = self.of
        return {
            owner: None
            for node in self.program.graph.graph.nodes
            if not self._is_remakeable_view(node)
            for read in node.all_input_nodes
            for owner in self._find_owners(read)
            if owner in of and of[owner] != of.get(node)
        }

    # -- the outer graph ---------------------------------------------------------------------------

    def _have_operands(self, node: fx.Node) -> None:
        """Adds to the outer graph the views that a call of the outer graph reads."""
        for read in node.all_input_nodes:
            self._ensure_value(read)

    def _ensure_value(self, node: fx.Node) -> None:
        if node not in self._values:
            assert self._is_remakeable_view(node)
            self._have_operands(node)
            self._values[node] = _copy_with_note(self._outer, node, self._values)

    def _check_owned(self, outputs: Sequence[fx.Node]) -> None:
        """Raises UnsureOfSections if a part returns a view of an input or of another result."""
        shown = [s for node in outputs for s in self.storages.of[node]]
        parts = {self.of.get(self.storages.maker[s]) for s in shown}
        if len(set(shown)) < len(shown) or not parts <= {self.of[n] for n in outputs}:
            raise UnsureOfSections

    def _call_section(self, part: Sequence[fx.Node]) -> None:
        """Adds a call of the section that equals a part to the outer graph."""
        made = _SectionGraph(self, part)
        if not made.has_effect_or_value:
            return
        key = made.key()  # does not contain the GPU's index, which differs between ranks
        devices = _devices_of(made.graph)
        section = self.known.get((key, devices))
        if section is None:
            graph = lazy_graph_module(torch.nn.Module(), made.graph)
            section = Subgraph(graph, f"section_{key[:8]}", key)
            self.known[key, devices] = section
        self._check_owned(made.outputs)
        self.calls += 1
        for node in made.inputs:
            self._ensure_value(node)
        given = [self._values[n] for n in made.inputs]
        call = add_call(self._outer, call_subgraph, (section, given))  # type: ignore[arg-type]
        first = note_of(part[0])
        note = Note(first.source, first.phase, again=first.again)  # without the note's move
        call.meta = {NOTE: note, "val": [n.meta["val"] for n in made.outputs]}
        for i, node in enumerate(made.outputs):
            self._values[node] = piece = add_call(self._outer, operator.getitem, (call, i))
            piece.meta = _meta_of(node)
            its = note_of(node)
            piece.meta[NOTE] = Note(its.source, its.phase, its.layout, again=its.again)


class _SectionGraph:
    """A part of a graph as a graph of its own.

    Attributes:
        inputs: the nodes of the whole graph that it reads.
        outputs: the nodes of the section that other nodes read.
    """

    def __init__(self, cutting: _GraphCutter, part: Sequence[fx.Node]):
        self._cutting = cutting
        self.graph = fx.Graph()
        self.inputs: list[fx.Node] = []
        self._known: set[int] = set()
        self._of: dict[fx.Node, fx.Node] = {}
        self._pieces = self._pieces_of_more(part)
        for node in part:
            self._have_operands(node)
            self._of[node] = _copy_with_note(self.graph, node, self._of)
        self.outputs = [n for n in part if n in cutting._read]
        self.has_effect_or_value = bool(self.outputs) or any(has_effect(n) for n in part)
        self.graph.output([self._of[n] for n in self.outputs])

    def _have_operands(self, node: fx.Node) -> None:
        for read in node.all_input_nodes:
            if read in self._of:
                continue
            if self._cutting._is_remakeable_view(read) and read not in self._pieces:
                self._have_operands(read)
                self._of[read] = _copy_with_note(self.graph, read, self._of)
            else:
                self._of[read] = self._add_placeholder(read)

    def _pieces_of_more(self, part: Sequence[fx.Node]) -> set[fx.Node]:
        """Returns views of outside values that are inputs of the part, in place of the values.

        This is done if a part reads little of a value, such as its piece of a bucket of gradients.
        A view inside the part would have an offset, and equal parts would have different texts.
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
            owner, *others = self._cutting._find_owners(node)
            whole = _numel_of_node(owner)
            if others or owner in inside or _numel_of_node(node) >= whole:
                waiting += node.all_input_nodes
                continue
            while _numel_of_node(node.all_input_nodes[0]) < whole:
                node = node.all_input_nodes[0]
            pieces.setdefault(owner, set()).add(node)
        few = (
            found
            for owner, found in pieces.items()
            if sum(map(_numel_of_node, found)) <= _PIECES * _numel_of_node(owner)
        )
        return set().union(*few)

    def _add_placeholder(self, node: fx.Node) -> fx.Node:
        last = self._of[self.inputs[-1]] if self.inputs else None
        graph = self.graph
        with graph.inserting_after(last) if last is not None else graph.inserting_before():
            given = add_input(self.graph, f"in_{len(self.inputs)}")
        given.meta = _meta_of(node)
        given.meta["val"] = make_distinct(given.meta["val"], self._known)
        self.inputs.append(node)
        return given

    def key(self) -> str:
        """Returns a hash of the section's text, equal for sections that compute the same."""
        number: dict[fx.Node, str] = {}
        lines = []
        for node in self.graph.nodes:
            number[node] = f"%{len(number)}"
            note = note_of(node)  # by it kernels are fused: `inductor_scheduling`
            lines.append(f"{line_of(node, number)} {note.phase} {note.again}")
        return make_key(lines)[:40]


def _devices_of(graph: fx.Graph) -> frozenset[torch.device]:
    values = [n.meta["val"] for n in graph.nodes if n.op != "output"]
    return frozenset(t.device for value in values for t in tensors_in(value))


def _stands_between(node: fx.Node) -> bool:
    """True if a node is between sections.

    Such nodes are a collective, a wait for one, a check of a value, a call of an existing section,
    or an item of its result.
    """
    if node.target is operator.getitem:
        return node.args[0].target is call_subgraph  # type: ignore[union-attr]
    return node.target in (WAIT, call_subgraph) or is_collective(node) or checks_value(node)


def _meta_of(node: fx.Node) -> dict[str, Any]:
    """Returns the metadata of a node that holds for its copy in another graph."""
    return {k: node.meta[k] for k in ("val", NOTE) if k in node.meta}


def _copy_with_note(graph: fx.Graph, node: fx.Node, of: Mapping[fx.Node, fx.Node]) -> fx.Node:
    copy = copy_node(graph, node, of.__getitem__)
    copy.meta = _meta_of(node)
    return copy


def _numel_of_node(node: fx.Node) -> int:
    """Returns the number of elements of a node's value."""
    return sum(t.numel() for t in tensors_in(node.meta["val"]))


# -- an order with early writes --------------------------------------------------------------------


def _with_early_writes(graph: fx.Graph, storages: Storages) -> list[fx.Node]:
    """Returns the calls of a graph, each write into an input as early as it may be.

    A write comes after its operands and the last use of the old value, and stays behind the checks
    before it, so that nothing is written where one raises. A `getitem` follows its call directly.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    place: dict[fx.Node, int] = {}  # in the new order; a moved node has its predecessor's place
    for i, node in enumerate(calls):
        if node.target is operator.getitem:
            i = place.get(node.args[0], i)  # type: ignore[call-overload, arg-type]
        place[node] = i
    used: dict[int, int] = {}  # by storage, the place of its last use
    for node in calls:
        if node.target is not _COPY:
            _record_last_use(used, storages, node.all_input_nodes, place[node])
    written: dict[int, int] = {}
    checked = -1
    for node in calls:
        if checks_value(node):
            checked = place[node]
        if node.target is _COPY:
            into, value = node.args[:2]
            places = [checked, *(used.get(s, -1) for s in storages.of[into])]  # type: ignore[index]
            places += [place.get(n, -1) for n in node.all_input_nodes]
            places += [written.get(s, -1) for s in storages.of[value]]  # type: ignore[index]
            place[node] = max(places)
            _record_last_use(written, storages, [into], place[node])  # type: ignore[list-item]
            _record_last_use(used, storages, node.all_input_nodes, place[node])
    return sorted(calls, key=lambda n: place[n])  # a stable sort


def _record_last_use(
    used: dict[int, int], storages: Storages, nodes: Sequence[fx.Node], place: int
) -> None:
    for node in nodes:
        for s in storages.of[node]:
            used[s] = max(used.get(s, -1), place)
