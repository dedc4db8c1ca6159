"""Which memory does each node of a graph make, and which does it only show?

The graph is run over tensors without memory: an output whose storage no input has is new memory,
every other one is a view. A storage is there from the node that makes it to the last node that
reads any view of it, since the interpreter drops each value after its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .graph import is_collective
from .memory import Buffer, Held, Memory
from .notes import note_of
from .program import Program
from .workspace import staging, workspace

__all__ = ["Storages", "last_uses", "memory_of", "storages_of"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass
class Storages:
    """Which storages the nodes of a graph hold.

    Attributes:
        of: for each node the storages that its value shows, by number.
        nbytes: of each storage.
        maker: of each the node that makes it.
        passing: for each node the bytes that its kernel takes and gives back while it runs.
    """

    of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    maker: list[fx.Node] = field(default_factory=list)
    passing: dict[fx.Node, int] = field(default_factory=dict)

    def made_by(self, node: fx.Node) -> tuple[int, ...]:
        """The storages that a node makes."""
        return tuple(s for s in self.of[node] if self.maker[s] is node)


def storages_of(program: Program) -> Storages:
    """The storages of a graph's nodes; inputs have one each, unless they share it."""
    graph = program.graph.graph
    found = Storages()
    values: dict[fx.Node, Any] = {}
    known: dict[int, int] = {}
    kept: list[Any] = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = values[node] = _value(node, values)
        shown = []
        for t in _tensors(value):
            storage = t.untyped_storage()
            key = storage._cdata  # private: one number for one storage, as long as it lives
            if key not in known:
                kept.append(storage)
                known[key] = len(found.nbytes)
                found.nbytes.append(storage.nbytes())
                found.maker.append(node)
            if known[key] not in shown:
                shown.append(known[key])
        found.of[node] = tuple(shown)
        if node.op == "call_function":
            args = fx.node.map_arg(node.args, values.__getitem__)
            extra = workspace(node.target, args, value)
            if is_collective(node):
                extra += staging(node.target, args, value, program.groups, compiled=False)
            if extra:
                found.passing[node] = extra
    return found


def scheduled(program: Program) -> Memory:
    """The schedule of a program as it runs: of its graph, or of the code made of it.

    Raises:
        ValueError: code was made that nothing is known of.
    """
    if program.built is None:
        return memory_of(program)
    found = program.built.metadata
    if "memory" not in found:
        raise ValueError(found.get("memory_unknown", "nothing was noted of its memory"))
    return Memory.from_json(found["memory"])


def memory_of(program: Program) -> Memory:
    """The schedule of a graph that runs node by node."""
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
                _buffer(node, storages.nbytes[s], place[node], death, tuple(views.get(s, ())))
            )
        if node in storages.passing:
            at = place[node]
            buffers.append(_buffer(node, storages.passing[node], at, at + 1, passing=True))
    return Memory(
        tuple(f"{n.name} {opname(n)}".strip() for n in nodes),
        (*made_at_entry(program, len(nodes)), *buffers),
        tuple(held_by(program)),
    )


def last_uses(nodes: Iterable[fx.Node], storages: Storages) -> dict[int, fx.Node]:
    """Of each storage the last node that reads it; none of what the graph returns or leaves."""
    last: dict[int, fx.Node] = {}
    stays: set[int] = set()
    for node in nodes:
        if node.op == "output":
            for read in node.all_input_nodes:
                stays.update(storages.of[read])
            continue
        if not node.users:  # the interpreter keeps what nobody takes
            stays.update(storages.of[node])
        for read in node.all_input_nodes:
            for s in storages.of[read]:
                last[s] = node
    return {s: node for s, node in last.items() if s not in stays}


def held_by(program: Program) -> Iterator[Held]:
    """The inputs of a program that are there between calls, each storage once."""
    written = set(program.written)
    seen: set[int] = set()
    for i, (given, fake) in enumerate(zip(program.inputs, program.example(), strict=True)):
        if given.kind == "number":  # which becomes a tensor when the step is called
            continue
        storage = fake.untyped_storage()
        nbytes = 0 if storage._cdata in seen else storage.nbytes()
        seen.add(storage._cdata)
        yield Held(given.name, given.kind, nbytes, i in written)


def made_at_entry(program: Program, places: int) -> Iterator[Buffer]:
    """What a call makes of its inputs before the step begins, and keeps until it ends.

    The tensors of Python numbers; and copies of inputs whose memory cannot hold their padding, on
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
    """What a node calls, as a person says it: "mm"."""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def _buffer(
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


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        return node.meta["val"]
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    if (
        target is _WAIT
    ):  # which gives what it is given, and says otherwise of tensors without memory
        return args[0]
    # What is made of nothing (an arange) has memory neither.
    some = _tensors((args, kwargs, node.meta.get("val")))
    mode = next((t.fake_mode for t in some if hasattr(t, "fake_mode")), None)
    with torch.no_grad():
        if mode is None:
            return target(*args, **kwargs)
        with mode:
            return target(*args, **kwargs)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
