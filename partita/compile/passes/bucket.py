"""Which collectives can travel together?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..notes import note_of
from ..program import Program
from .gathered import Runs
from .making import Making

__all__ = ["bucket"]

_functional, _aten = torch.ops._c10d_functional, torch.ops.aten
_WAIT = _functional.wait_tensor.default
_GATHER = _functional.all_gather_into_tensor.default
_SCATTER = _functional.reduce_scatter_tensor.default
_ZEROS = ("gather", "regather", "persistent", "gradient", "settle", "update")
"""Why ZeRO carries: these travel by blocks."""
_CHEAP = (_aten.view.default, _aten.reshape.default, _aten._to_copy.default)


def bucket(program: Program) -> str:
    """The gathers of one block's parameters are one collective, and so are their reductions.

    Bounded by the block, and by the run in which the step uses it, so that no more is whole at once
    than one block's parameters: on small models a step is as slow as its collectives are many, on
    large ones as its memory is full.
    """
    graph = program.graph.graph
    groups: dict[Any, list[fx.Node]] = {}
    runs = Runs(graph)
    gathered_for = {one.gather: runs.of(one) for one in runs.found}
    for node in graph.nodes:
        note = note_of(node)
        if node.target in (_GATHER, _SCATTER) and note.reason in _ZEROS:
            dtype = node.args[0].meta["val"].dtype
            rest = node.args[1:]
            run = gathered_for.get(node, -1)
            if note.reason == "gradient":
                run = runs.at(node)
            key = (node.target, rest, dtype, note.op, note.phase, note.reason, note.axes, run)
            groups.setdefault(key, []).append(node)
    joined = made = 0
    for members in groups.values():
        for part in _joinable(members):
            if len(part) > 1:
                (_gathers if part[0].target is _GATHER else _scatters)(graph, part)
                joined, made = joined + len(part), made + 1
    return f"{joined} collectives became {made}"


def _joinable(members: list[fx.Node]) -> list[list[fx.Node]]:
    """Members that can run at one place: none needs what another gives.

    Gathers run where the first of them does, reductions where the last does.
    """
    parts: list[list[fx.Node]] = []
    if members[0].target is _GATHER:
        for node in members:
            if parts and _ready(_operand(node), parts[-1][0]):
                parts[-1].append(node)
            else:
                parts.append([node])
        return parts
    for node in reversed(members):
        if parts and _reached(node, parts[-1][-1]).isdisjoint(parts[-1]):
            parts[-1].insert(0, node)
        else:
            parts.append([node])
    return parts


def _operand(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _ready(operand: fx.Node, place: fx.Node) -> bool:
    """Is `operand` there before the node `place`, or what it is a view or a cast of?"""
    while operand > place and operand.target in _CHEAP:
        (operand,) = operand.all_input_nodes
    return operand < place


def _reached(node: fx.Node, last: fx.Node) -> set[fx.Node]:
    """What depends on `node`, as far as the node `last`."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user <= last:
                found.add(user)
                waiting.append(user)
    return found


def _gathers(graph: fx.Graph, members: list[fx.Node]) -> None:
    size, name = members[0].args[1:]
    sizes = [m.args[0].meta["val"].numel() for m in members]  # type: ignore[union-attr]
    note = note_of(members[0])
    note = replace(note, nbytes=sum(note_of(m).nbytes for m in members), before="", after="")
    with graph.inserting_before(members[0]):
        make = Making(graph, note)

        def brought(node: fx.Node) -> fx.Node:
            """`node`, or the same made here where it stands too late."""
            if node < members[0]:
                return node
            source, *rest = node.args
            assert isinstance(source, fx.Node)
            return make(node.target, brought(source), *rest, **node.kwargs)

        flats = [make(_aten.reshape.default, brought(_operand(m)), [-1]) for m in members]
        whole = make(_GATHER, make(_aten.cat.default, flats), size, name)
        rows = make(_aten.view.default, make(_WAIT, whole), [size, -1])
        at, pieces = 0, []
        for n in sizes:
            piece = make(_aten.slice.Tensor, rows, 1, at, at + n)
            pieces.append(make(_aten.reshape.default, piece, [-1]))
            at += n
    _replace(graph, members, pieces)


def _scatters(graph: fx.Graph, members: list[fx.Node]) -> None:
    op, size, name = members[0].args[1:]
    sizes = [m.meta["val"].numel() for m in members]
    note = note_of(members[-1])
    note = replace(note, nbytes=sum(note_of(m).nbytes for m in members), before="", after="")
    with graph.inserting_before(members[-1].next):
        make = Making(graph, note)
        rows = [make(_aten.reshape.default, m.args[0], [size, -1]) for m in members]
        flat = make(_aten.reshape.default, make(_aten.cat.default, rows, 1), [-1])
        part = make(_WAIT, make(_SCATTER, flat, op, size, name))
        at, pieces = 0, []
        for n in sizes:
            pieces.append(make(_aten.slice.Tensor, part, 0, at, at + n))
            at += n
        end = pieces[-1]
    _replace(graph, members, pieces)
    _sink(pieces, end)


def _replace(graph: fx.Graph, members: list[fx.Node], pieces: list[fx.Node]) -> None:
    for member, piece in zip(members, pieces, strict=True):
        for wait in list(member.users):
            assert math.prod(wait.meta["val"].shape) == piece.meta["val"].numel()
            wait.replace_all_uses_with(piece)
            graph.erase_node(wait)
        graph.erase_node(member)


def _sink(pieces: list[fx.Node], end: fx.Node) -> None:
    """Bring what was made of an earlier collective behind the common one, in its order."""
    late: set[fx.Node] = set()
    waiting = list(pieces)
    while waiting:
        for user in waiting.pop().users:
            if user not in late and user < end:
                late.add(user)
                waiting.append(user)
    behind = end
    for node in sorted(late):
        behind.append(node)
        behind = node
