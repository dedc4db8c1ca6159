"""The split of a region's graph into forward and backward, and the tensors saved between them.

Backward is what results do not need: what depends on their gradients, and what passes recompute. It
reads inputs of the graph and saved values of forward. Of a view its base is saved, of a cast of
an input the input, and the view or cast is made again. So what is saved of a gathered parameter is
the parameter itself, which its owner can free in between.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from partita.comm.collective import WAIT
from partita.tensor.op_facts import facts_of

from .graph_nodes import NOTE, add_call, copy_node, drop_unused, lazy_graph_module, note_of
from .memory.storages import storages_of
from .program import Input, Output, Program

__all__ = ["Halves", "split"]


_aten = torch.ops.aten
_CAST = _aten._to_copy.default


@dataclass(eq=False)
class Halves:
    """A forward and its backward.

    Attributes:
        forward: its outputs are those of the whole without gradients, then the values it saves.
        backwards: by number, the parts of the backward, in the order in which they run. The inputs
            of each are what it reads of `saved` (an input's index is the place there), then
            gradients of results.
        saved: for each value saved for backward: its index among the leaves of a call, or -1 for
            the next of the values that forward saves.
    """

    forward: Program
    backwards: dict[int, Program]
    saved: list[int]


def split(program: Program) -> Halves:
    """Split a program that has both. Its graph is changed: views are copied into backward."""
    graph = program.graph.graph
    given = dict(zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True))
    late = _find_backward_calls(program, given)
    _make_views_again(graph, late)
    drop_unused(graph)
    late.intersection_update(graph.nodes)
    needs = _read_by(program, late, given)
    # A number is no tensor of the call, and an input that forward writes has changed by then.
    inside = [n for n in needs if n not in given or _is_no_tensor(given[n]) or _is_written(n)]
    parts = sorted({o.part for o in program.outputs if o.kind == "cotangent"})
    return Halves(
        _make_forward(program, given, late, inside),
        {part: _make_backward(program, given, late, needs, inside, part) for part in parts},
        [-1 if n in inside else given[n].index for n in needs],
    )


def _is_no_tensor(given: Input) -> bool:
    return given.index < 0 or given.kind == "number"


def _results_of_program(program: Program) -> list[tuple[Output, fx.Node]]:
    (end,) = program.graph.graph.find_nodes(op="output")
    return list(zip(program.outputs, end.args[0], strict=True))


def _find_backward_calls(program: Program, given: dict[fx.Node, Input]) -> set[fx.Node]:
    """The calls that belong to backward."""
    graph = program.graph.graph
    needed = {node for output, node in _results_of_program(program) if output.kind != "cotangent"}
    needed.update(n for n in graph.nodes if n.target is _aten.copy_.default)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    late = {n for n, i in given.items() if i.kind == "cotangent"}
    for node in graph.nodes:
        if node.op != "call_function" or node in needed:
            continue
        after = not late.isdisjoint(node.all_input_nodes)
        piece = node.target is operator.getitem  # of what an earlier call gave
        if after or (note_of(node).phase == "backward" and not piece):
            late.add(node)
    return late - set(given)


def _make_views_again(graph: fx.Graph, late: set[fx.Node]) -> None:
    """Copy views, and casts of inputs, that backward reads from forward into backward."""
    copies: dict[fx.Node, fx.Node] = {}

    def copy_view(node: fx.Node, before: fx.Node) -> fx.Node:
        if node not in copies:
            source = node.all_input_nodes[0]
            own = copy_view(source, before) if _is_cheap(source) else source
            with graph.inserting_before(before):
                copies[node] = copy_node(graph, node, lambda n: own if n is source else n)
            copies[node].meta[NOTE] = replace(note_of(node), phase="backward")
        return copies[node]

    for node in [n for n in graph.nodes if n in late]:
        for used in node.all_input_nodes:
            if used not in late and _is_cheap(used):
                node.replace_input_with(used, copy_view(used, node))
    late.update(copies.values())


def _is_cheap(node: fx.Node) -> bool:
    if node.target is _CAST:
        return _from_input(node)
    return _is_whole_view(node)


def _is_whole_view(node: fx.Node) -> bool:
    """Is it a view of a whole tensor? (Of a part, saving the part keeps less memory.)"""
    if not facts_of(node.target).is_view or len(node.all_input_nodes) != 1 or node.target is WAIT:
        return False
    shown, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    tensors = isinstance(shown, torch.Tensor) and isinstance(value, torch.Tensor)
    return bool(tensors and value.numel() >= shown.numel())


def _from_input(node: fx.Node) -> bool:
    while node.target is _CAST or _is_whole_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _read_by(program: Program, late: set[fx.Node], given: dict[fx.Node, Input]) -> list[fx.Node]:
    """The values of inputs and of forward that backward reads, in order."""
    read = {used for n in late for used in n.all_input_nodes}
    read.update(n for output, n in _results_of_program(program) if output.kind == "cotangent")
    nodes = program.graph.graph.nodes
    return [n for n in nodes if n in read and n not in late and _is_kept(n, given)]


def _is_kept(node: fx.Node, given: dict[fx.Node, Input]) -> bool:
    if node.op == "get_attr":
        return False
    return node not in given or given[node].kind not in ("cotangent", "coordinate")


def _is_written(node: fx.Node) -> bool:
    return any(u.target is _aten.copy_.default and u.args[0] is node for u in node.users)


# -- the halves ------------------------------------------------------------------------------------


def _make_forward(
    program: Program, given: dict[fx.Node, Input], late: set[fx.Node], saved: list[fx.Node]
) -> Program:
    new = _NewGraph(program)
    clones: list[fx.Node] = []

    def save() -> None:
        """Copy inputs that are saved and that forward writes, before it does."""
        for node in saved:
            if node in given and not clones.count(node):
                clones.append(node)
                copy = add_call(new.graph, _aten.clone.default, (new.of[node],))
                copy.meta = {"val": node.meta["val"].clone(), NOTE: note_of(node)}
                new.of[node, "before"] = copy

    for node in program.graph.graph.nodes:
        if node.target is _aten.copy_.default:
            save()
        if node in given:
            if given[node].kind != "cotangent":
                new.take(node, given[node])
        elif node.op != "output" and node not in late:
            new.copy(node)
    kept = [(o, n) for o, n in _results_of_program(program) if o.kind != "cotangent"]
    values = [new.of[n] for _, n in kept]
    values += [new.of.get((n, "before"), new.of[n]) for n in saved]
    outputs = [o for o, _ in kept] + [Output("saved", None) for _ in saved]
    return new.program(values, outputs, program)


def _make_backward(
    program: Program,
    given: dict[fx.Node, Input],
    late: set[fx.Node],
    saved: list[fx.Node],
    inside: list[fx.Node],
    part: int,
) -> Program:
    new = _NewGraph(program)
    own = _with_memory_of_their_own(program, [n for n in saved if n not in given])
    for number, node in enumerate(saved):
        if node in given and node not in inside:
            what = replace(given[node], kind="kept", index=number)
        else:
            what = Input(node.name, "saved", own.get(node, node.meta["val"]), number)
        new.take(node, what)
        if node in own:
            new.of[node].meta["val"] = own[node]
    for node, what in given.items():
        if what.kind in ("cotangent", "coordinate"):
            new.take(node, what)
    for node in program.graph.graph.nodes:
        if node in late or node.op == "get_attr":
            new.copy(node)
    kept = [
        (o, n) for o, n in _results_of_program(program) if o.kind == "cotangent" and o.part == part
    ]
    return new.program([new.of[n] for _, n in kept], [o for o, _ in kept], None)


def _with_memory_of_their_own(
    program: Program, nodes: list[fx.Node]
) -> dict[fx.Node, torch.Tensor]:
    """Fake values of nodes, with storages that two share only where the nodes' values do."""
    if not nodes:
        return {}
    storages = storages_of(program)
    memory: dict[int, torch.Tensor] = {}
    found = {}
    for node in nodes:
        value = node.meta["val"]
        (s,) = storages.of[node]
        with value.fake_mode, torch.no_grad():
            if s not in memory:
                size = -(-storages.nbytes[s] // value.itemsize)
                memory[s] = torch.empty(size, dtype=value.dtype, device=value.device)
            flat = memory[s].view(value.dtype)
            found[node] = flat.as_strided(value.shape, value.stride())
    return found


class _NewGraph:
    """A new graph, built of parts of a program's."""

    def __init__(self, program: Program):
        self.graph, self._from = fx.Graph(), program
        self.of: dict[Any, fx.Node] = {}
        self._inputs: list[tuple[fx.Node, Input]] = []

    def take(self, node: fx.Node, what: Input) -> None:
        """Add an input for the value of `node`."""
        self.of[node] = new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        self._inputs.append((new, what))

    def copy(self, node: fx.Node) -> None:
        self.of[node] = copy_node(self.graph, node, self.of.__getitem__)

    def program(
        self, values: list[fx.Node], outputs: list[Output], whole: Program | None
    ) -> Program:
        """The program of this graph with outputs `values`, and the result of `whole`, if any."""
        self.graph.output(values)
        drop_unused(self.graph)
        inputs = []
        for node, what in self._inputs:
            if node.users:
                inputs.append(what)
            else:
                self.graph.erase_node(node)
        module = lazy_graph_module(self._from.graph, self.graph)
        module.meta = dict(self._from.graph.meta)
        used = {n.args[-1] for n in self.graph.nodes if n.op == "call_function" and n.args}
        names = {name for name in used if isinstance(name, str)}
        return Program(
            module,
            inputs,
            outputs,
            whole.result if whole else pytree.tree_structure(()),
            whole.constants if whole else [],
            whole.cleared if whole else [],
            {name: at for name, at in self._from.groups.items() if name in names},
        )
