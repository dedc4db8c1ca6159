"""Storages of a graph: which memory each node allocates, and which it only shows.

Found call by call over fake tensors (`equal_calls`): a result whose storage no operand has is new
memory, every other result is a view. A storage lives from the node that makes it to the last node
that reads a view of it, since the executor drops a value behind its last use. `memory_of` turns
these lifetimes into the schedule of a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..backend.executor import Groups
from ..capture.equal_calls import call_without_memory, tensors_in
from ..graph_nodes import is_collective, note_of
from ..program import Program
from ..section import Section, SectionSchedule, section_of
from .schedule import Buffer, HeldInput, Memory
from .workspace import staging, workspace

__all__ = ["Storages", "last_uses", "memory_of", "peak_of", "storages_of"]


@dataclass
class Storages:
    """The storages of a graph's nodes, by number.

    Attributes:
        of: for each node the storages that its value shows.
        nbytes: for each storage its bytes.
        maker: for each storage the node that allocates it.
        passing: for each node the bytes of its kernel's workspace.
    """

    of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    maker: list[fx.Node] = field(default_factory=list)
    passing: dict[fx.Node, int] = field(default_factory=dict)

    def made_by(self, node: fx.Node) -> tuple[int, ...]:
        """The storages that a node allocates."""
        return tuple(s for s in self.of[node] if self.maker[s] is node)

    def add(self, maker: fx.Node, nbytes: int) -> int:
        """Add a storage; its number."""
        self.nbytes.append(nbytes)
        self.maker.append(maker)
        return len(self.nbytes) - 1


def storages_of(program: Program) -> Storages:
    """The storages of a program's graph. Inputs have one each, unless they share it."""
    return _storages_of_graph(program.graph, program.groups)


def _storages_of_graph(graph: fx.GraphModule, groups: Groups) -> Storages:
    found = Storages()
    shows: dict[fx.Node, Sequence[int]] = {}  # for each tensor in a node's value its storage
    known: dict[int, int] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function":
            shows[node] = _shown_by_call(graph, groups, node, shows, found)
        else:
            value = node.meta["val"] if node.op == "placeholder" else _find_constant(graph, node)
            shows[node] = [_number_of(t, node, known, found) for t in tensors_in(value)]
        found.of[node] = tuple(dict.fromkeys(shows[node]))
    return found


def _number_of(t: torch.Tensor, node: fx.Node, known: dict[int, int], found: Storages) -> int:
    """The storage of an input or of a constant."""
    storage = t.untyped_storage()
    key = storage._cdata  # private: one number for one storage, as long as it lives
    if key not in known:
        known[key] = found.add(node, storage.nbytes())
    return known[key]


def _shown_by_call(
    graph: fx.GraphModule,
    groups: Groups,
    node: fx.Node,
    shows: dict[fx.Node, Sequence[int]],
    found: Storages,
) -> Sequence[int]:
    """For each tensor in a call's value its storage."""
    section = section_of(node)
    if section is not None:  # what it gives lies in memory of its own
        nbytes = [t.untyped_storage().nbytes() for t in tensors_in(node.meta["val"])]
        if extra := schedule_of_section(section).workspace:
            found.passing[node] = extra
        return [found.add(node, n) for n in nbytes]
    operands: list[int] = []

    def value_of(read: fx.Node) -> Any:
        operands.extend(shows[read])
        return read.meta["val"] if read.op != "get_attr" else _find_constant(graph, read)

    given: Any = (node.args, node.kwargs)
    args, kwargs = fx.node.map_arg(given, value_of)
    if node.target is operator.getitem:
        whole, place = args
        before, piece = tensors_in(whole[:place]), tensors_in(whole[place])
        return operands[len(before) : len(before) + len(piece)]
    made = call_without_memory(node.target, args, kwargs, node.meta.get("val"))
    new = [found.add(node, nbytes) for nbytes in made.nbytes]
    extra = workspace(node.target, args, made.value)
    if is_collective(node):
        extra += staging(node.target, args, made.value, groups, compiled=False)
    if extra:
        found.passing[node] = extra
    return [operands[i] if i >= 0 else new[-1 - i] for i in made.shows]


def schedule_of_section(section: Section) -> SectionSchedule:
    """What a section has allocated in each of its calls, and which of these reads an input last."""
    if section.schedule is None:
        found, nodes = _storages_of_graph(section.graph, {}), section.graph.graph.nodes
        calls = [n for n in nodes if n.op == "call_function"]
        last = last_uses(nodes, found)
        place = {node: i for i, node in enumerate(calls)}
        live, held = [], 0
        for node in calls:
            held += sum(found.nbytes[s] for s in found.made_by(node))
            live.append(held + found.passing.get(node, 0))
            held -= sum(found.nbytes[s] for s in _freed_by(node, found, last))
        inputs = section.graph.graph.find_nodes(op="placeholder")
        readers = (last.get(s) for n in inputs for s in found.of[n])
        reads = [place.get(node, len(calls)) if node else len(calls) for node in readers]
        section.schedule = SectionSchedule(live, held, reads)
    return section.schedule


def _freed_by(node: fx.Node, storages: Storages, last: Mapping[int, fx.Node]) -> list[int]:
    """The storages that calls have made and that a call is the last to read."""
    shown = {s for read in (node, *node.all_input_nodes) for s in storages.of.get(read, ())}
    return [s for s in shown if last.get(s) is node and storages.maker[s].op == "call_function"]


def _find_constant(graph: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(graph, str(node.target))


def scheduled(program: Program) -> Memory:
    """The schedule of a program as it runs: of its graph, or of the code made of it.

    Raises:
        ValueError: the memory of the generated code is not known.
    """
    if program.built is None:
        return memory_of(program)
    if program.built.schedule is not None:
        return program.built.schedule()
    found = program.built.metadata
    if "memory" not in found:
        raise ValueError(found.get("memory_unknown", "nothing was noted of its memory"))
    return Memory.from_json(found["memory"])


def memory_of(program: Program) -> Memory:
    """The schedule of a graph that runs node by node."""
    program = program.flat()
    graph = program.graph.graph
    nodes = [n for n in graph.nodes if n.op != "placeholder"]
    storages = storages_of(program)
    last = last_uses(graph.nodes, storages)
    place = {node: i for i, node in enumerate(nodes)}
    views: dict[int, list[str]] = {}
    for node, shown in storages.of.items():
        for s in shown:
            if storages.maker[s] is not node:
                views.setdefault(s, []).append(node.name)
    buffers = []
    for node in nodes:
        for s in storages.made_by(node) if node.op == "call_function" else ():
            end = last.get(s)
            death = len(nodes) if end is None else place[end] + 1
            buffers.append(
                _make_buffer(node, storages.nbytes[s], place[node], death, tuple(views.get(s, ())))
            )
        if node in storages.passing:
            at = place[node]
            buffers.append(_make_buffer(node, storages.passing[node], at, at + 1, passing=True))
    return Memory(
        tuple(f"{n.name} {opname(n)}".strip() for n in nodes),
        (*made_at_entry(program, len(nodes)), *buffers),
        tuple(held_by(program)),
    )


def peak_of(program: Program) -> int:
    """The peak of `memory_of` in bytes, which takes no longer where a section is called often."""
    nodes = program.graph.graph.nodes
    storages = storages_of(program)
    last = last_uses(nodes, storages)
    live = peak = sum(b.nbytes for b in made_at_entry(program, 1))
    for node in nodes:
        if node.op != "call_function":
            continue
        made = sum(storages.nbytes[s] for s in storages.made_by(node))
        freed = _freed_by(node, storages, last)
        section = section_of(node)
        if section is None:
            peak = max(peak, live + made + storages.passing.get(node, 0))
        else:
            peak = max(peak, live + _peak_of_call(node, section, storages, freed))
        live += made - sum(storages.nbytes[s] for s in freed)
    return peak


def _peak_of_call(call: fx.Node, section: Section, storages: Storages, freed: Sequence[int]) -> int:
    """The most bytes that a call of a section adds to those allocated before it, of which it frees
    what nobody reads later."""
    schedule = schedule_of_section(section)
    frees = [0] * (len(schedule.live) + 2)
    for s in freed:
        if storages.maker[s] is not call:
            reads = zip(section.operands(call), schedule.last_reads, strict=True)
            end = max(place for operand, place in reads if s in storages.of[operand])
            frees[end + 1] += storages.nbytes[s]
    gone, most = 0, 0
    for here, less in zip(schedule.live, frees, strict=False):
        gone += less
        most = max(most, here - gone)
    return most


def last_uses(nodes: Iterable[fx.Node], storages: Storages) -> dict[int, fx.Node]:
    """For each storage the last node that reads it, but for storages that the graph returns."""
    last: dict[int, fx.Node] = {}
    stays: set[int] = set()
    for node in nodes:
        if node.op == "output":
            for read in node.all_input_nodes:
                stays.update(storages.of[read])
            continue
        if not node.users:  # an unused value is dropped at once
            last.update(dict.fromkeys(storages.of[node], node))
        for read in node.all_input_nodes:
            for s in storages.of[read]:
                last[s] = node
    return {s: node for s, node in last.items() if s not in stays}


def held_by(program: Program) -> Iterator[HeldInput]:
    """The inputs of a program that are there between calls, each storage once."""
    written = set(program.written)
    seen: set[int] = set()
    for i, (given, fake) in enumerate(zip(program.inputs, program.example(), strict=True)):
        if given.kind == "number":  # it is made into a tensor when the step is called
            continue
        storage = fake.untyped_storage()
        nbytes = 0 if storage._cdata in seen else storage.nbytes()
        seen.add(storage._cdata)
        yield HeldInput(given.name, given.kind, nbytes, i in written)


def made_at_entry(program: Program, places: int) -> Iterator[Buffer]:
    """The buffers that a call makes of its inputs before the step, and keeps until its end.

    Tensors of Python numbers; and copies of inputs whose storage has no room for their padding, on
    ranks with smaller pieces.
    """
    examples = program.example()
    for i, given in enumerate(program.inputs):
        if given.kind == "number":
            yield Buffer(given.name, examples[i].nbytes, 0, places, made_by="number")
    for i, border in program.entering.items():
        if not border.in_place:
            given = program.inputs[i]
            nbytes = examples[i].untyped_storage().nbytes()
            layout = str(given.spec.layout) if given.spec is not None else ""
            yield Buffer(given.name, nbytes, 0, places, made_by="padding", layout=layout)


def opname(node: fx.Node) -> str:
    """The name of what a node calls: "mm"; "" for other nodes."""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def _make_buffer(
    node: fx.Node,
    nbytes: int,
    birth: int,
    death: int,
    views: tuple[str, ...] = (),
    passing: bool = False,
) -> Buffer:
    note = note_of(node)
    return Buffer(
        node.name,
        nbytes,
        birth,
        death,
        views,
        opname(node),
        note.source,
        note.phase,
        note.layout,
        note.reason,
        passing,
    )
