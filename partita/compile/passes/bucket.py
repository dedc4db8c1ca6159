"""Bucketing: which collectives can travel together?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partita.comm.graph_collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from partita.tensor.op_facts import facts_of

from ..node_metadata import NOTE, note_of
from ..program import Program
from ..split import find_cotangents
from .gathered import Runs, packing_of
from .rewrite import Making

__all__ = ["bucket"]

_aten = torch.ops.aten
_ZEROS = ("gather", "regather", "persistent", "gradient", "settle", "update")
"""Why ZeRO carries: these travel by blocks."""
_PARTS = 8
"""What an optimizer's step reduces travels in about so many collectives: the last of them has no
backward left to run beside."""
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 25 << 20
"""Of one of them: less is as slow as nothing, and of more the last takes long."""


def bucket(program: Program) -> str:
    """The gathers of one block's parameters are one collective, and so are their reductions.

    Bounded by the block, and by the run in which the step uses it, so that no more is whole at once
    than one block's parameters: on small models a step is as slow as its collectives are many, on
    large ones as its memory is full. Gradients that a region gives travel with those that are made
    of the gradients of the same results. What an optimizer's step asks for is reduced where
    backward has made it, and about an eighth of it at a time.
    """
    graph = program.graph.graph
    _reduce_where_ready(graph)
    groups: dict[Any, list[fx.Node]] = {}
    runs = Runs(graph)
    cotangents = find_cotangents(program)
    gathered_for = {one.gather: runs.of(one) for one in runs.found}
    key: tuple[Any, ...]
    for node in graph.nodes:
        note = note_of(node)
        if node.target in (ALL_GATHER, REDUCE_SCATTER) and note.reason in _ZEROS:
            dtype = node.args[0].meta["val"].dtype
            rest = node.args[1:]
            run = gathered_for.get(node, -1)
            if note.reason == "gradient":
                run = runs.at(node)
            key = (node.target, rest, dtype, note.op, note.phase, note.reason, note.axes, run)
            key += (cotangents.get(node),)
            groups.setdefault(key, []).append(node)
        elif node.target is ALL_REDUCE and note.reason == "settle":
            key = (node.target, node.args[1:], node.meta["val"].dtype, note.axes)
            key += (cotangents.get(node),)
            groups.setdefault(key, []).append(node)
    least = _least_bytes(groups.values())
    joined = made = 0
    for members in groups.values():
        for part in _split_joinable(members, least):
            if len(part) > 1:
                _JOIN[part[0].target](graph, part)  # type: ignore[index]
                joined, made = joined + len(part), made + 1
    return f"{joined} collectives became {made}"


def _reduce_where_ready(graph: fx.Graph) -> None:
    """Bring reductions that an optimizer's step asks for to where backward makes their operands."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in (REDUCE_SCATTER, ALL_REDUCE) and note_of(node).reason == "settle":
            packing, made_by = packing_of(node)
            last = max(made_by, key=place.__getitem__)
            late = sorted((n for n in packing if place[n] > place[last]), key=place.__getitem__)
            for one in late:  # of backward, whoever asks for it
                one.meta[NOTE] = replace(note_of(one), phase=note_of(node).phase)
            waits = [user for user in node.users if user.target is WAIT]
            found.setdefault(last, []).extend([*late, *waits])
    for last, late in found.items():
        for node in reversed(dict.fromkeys(late)):
            last.append(node)


def _least_bytes(groups: Iterable[list[fx.Node]]) -> int:
    """Of what a collective carries for an optimizer's step: an eighth of all, within bounds."""
    settled = [m for members in groups for m in members if note_of(m).reason == "settle"]
    total = sum(_operand_of_collective(m).meta["val"].nbytes for m in settled)
    return min(max(total // _PARTS, _LEAST_BYTES), _MOST_BYTES)


def _split_joinable(members: list[fx.Node], least: int) -> list[list[fx.Node]]:
    """Members that can run at one place: none needs what another gives.

    Gathers run where the first of them does, reductions where the last does. What an optimizer's
    step reduces and gathers is cut into parts of `least` bytes.
    """
    if note_of(members[0]).reason in ("settle", "update"):
        parts = _by_size(members, least)
    else:
        parts = [members]
    together = _ready_together if members[0].target is ALL_GATHER else _split_independent
    return [found for part in parts for found in together(part)]


def _by_size(members: list[fx.Node], least: int) -> list[list[fx.Node]]:
    """Members, in order, in parts that each but the last carry `least` bytes."""
    parts: list[list[fx.Node]] = [[]]
    size = 0
    for node in members:
        if size >= least:
            parts.append([])
            size = 0
        parts[-1].append(node)
        size += max(node.meta["val"].nbytes, _operand_of_collective(node).meta["val"].nbytes)
    return parts


def _ready_together(members: list[fx.Node]) -> list[list[fx.Node]]:
    """Gathers, in order, in parts whose operands are there where the first of the part runs."""
    parts: list[list[fx.Node]] = []
    for node in members:
        if parts and _is_ready_before(_operand_of_collective(node), parts[-1][0]):
            parts[-1].append(node)
        else:
            parts.append([node])
    return parts


def _split_independent(members: list[fx.Node]) -> list[list[fx.Node]]:
    """Members, from behind, in parts of which none needs what another of the part gives."""
    parts: list[list[fx.Node]] = []
    for node in reversed(members):
        if parts and _find_dependents(node, parts[-1][-1]).isdisjoint(parts[-1]):
            parts[-1].insert(0, node)
        else:
            parts.append([node])
    return parts


def _operand_of_collective(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _is_ready_before(operand: fx.Node, place: fx.Node) -> bool:
    """Is `operand` there before the node `place`, or what it is a view or a cast of?"""
    while operand > place and operand.target is not WAIT:
        facts = facts_of(operand.target)
        if not (facts.is_view or facts.casts):
            break
        (operand,) = operand.all_input_nodes
    return operand < place


def _find_dependents(node: fx.Node, last: fx.Node) -> set[fx.Node]:
    """What depends on `node`, as far as the node `last`."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user <= last:
                found.add(user)
                waiting.append(user)
    return found


def _join_gathers(graph: fx.Graph, members: list[fx.Node]) -> None:
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

        flats = [
            make(_aten.reshape.default, brought(_operand_of_collective(m)), [-1]) for m in members
        ]
        whole = make(ALL_GATHER, make(_aten.cat.default, flats), size, name)
        rows = make(_aten.view.default, make(WAIT, whole), [size, -1])
        at, pieces = 0, []
        for n in sizes:
            piece = make(_aten.slice.Tensor, rows, 1, at, at + n)
            pieces.append(make(_aten.reshape.default, piece, [-1]))
            at += n
    _replace_members(graph, members, pieces)


def _join_scatters(graph: fx.Graph, members: list[fx.Node]) -> None:
    op, size, name = members[0].args[1:]
    sizes = [m.meta["val"].numel() for m in members]
    note = note_of(members[-1])
    note = replace(note, nbytes=sum(note_of(m).nbytes for m in members), before="", after="")
    with graph.inserting_before(members[-1].next):
        make = Making(graph, note)
        rows = [make(_aten.reshape.default, m.args[0], [size, -1]) for m in members]
        flat = make(_aten.reshape.default, make(_aten.cat.default, rows, 1), [-1])
        part = make(WAIT, make(REDUCE_SCATTER, flat, op, size, name))
        at, pieces = 0, []
        for n in sizes:
            pieces.append(make(_aten.slice.Tensor, part, 0, at, at + n))
            at += n
        end = pieces[-1]
    _replace_members(graph, members, pieces)
    _sink_users(pieces, end)


def _all_reduces(graph: fx.Graph, members: list[fx.Node]) -> None:
    op, name = members[0].args[1:]
    note = note_of(members[-1])
    note = replace(note, nbytes=sum(note_of(m).nbytes for m in members), before="", after="")
    with graph.inserting_before(members[-1].next):
        make = Making(graph, note)
        flats = [make(_aten.reshape.default, _skip_packing_copy(m), [-1]) for m in members]
        whole = make(WAIT, make(ALL_REDUCE, make(_aten.cat.default, flats), op, name))
        at, pieces = 0, []
        for m in members:
            n, shape = m.meta["val"].numel(), list(m.meta["val"].shape)
            piece = make(_aten.slice.Tensor, whole, 0, at, at + n)
            pieces.append(make(_aten.reshape.default, piece, shape))
            at += n
        end = pieces[-1]
    _replace_members(graph, members, pieces)
    _sink_users(pieces, end)


def _skip_packing_copy(node: fx.Node) -> fx.Node:
    """What is reduced, without the copy of it that only one collective would need."""
    operand = _operand_of_collective(node)
    if operand.target is _aten.clone.default and len(operand.users) == 1:
        (operand,) = operand.all_input_nodes
    return operand


_JOIN = {ALL_GATHER: _join_gathers, REDUCE_SCATTER: _join_scatters, ALL_REDUCE: _all_reduces}


def _replace_members(graph: fx.Graph, members: list[fx.Node], pieces: list[fx.Node]) -> None:
    for member, piece in zip(members, pieces, strict=True):
        for wait in list(member.users):
            assert math.prod(wait.meta["val"].shape) == piece.meta["val"].numel()
            wait.replace_all_uses_with(piece)
            graph.erase_node(wait)
        graph.erase_node(member)


def _sink_users(pieces: list[fx.Node], end: fx.Node) -> None:
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
