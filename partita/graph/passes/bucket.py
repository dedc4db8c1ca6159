"""Bucketing: collectives of one kind, close to each other, are joined into one.

Their operands are flattened and concatenated; parts of the joint result replace the separate
results. If the backend gathers pieces (`Backend.gathers_pieces`), each gathered value is a
contiguous part of the result and is not copied. Members of a bucket have the same group, dtype,
reason and phase, and do not depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partita.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    all_gather_pieces,
)
from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, Note, is_collective, nbytes_of, note_of
from ..program import Program, find_cotangents
from .regather import UseRuns, packing_of
from .rewrite import NodeBuilder

_aten = torch.ops.aten
_REASONS_OF_ZERO = ("gather", "regather", "persistent", "gradient", "settle", "update")
"""Reasons of ZeRO's collectives, which are joined by block."""
_BUCKETS_OF_STEP = 8
"""About so many collectives carry what an optimizer's step reduces: the last one has no backward
left to overlap with, so one collective of all would be slower."""
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 25 << 20
"""Bounds of a bucket's bytes: below, latency dominates; above, the last bucket takes long."""


def bucket(program: Program) -> str:
    """One collective gathers a block's parameters, and one reduces their gradients.

    A bucket contains collectives of one block, in one use of the block. So at most one block's
    parameters are gathered at once. In small models the number of collectives limits the speed, in
    large models the memory is scarce. Gradients that a compiled part of a model returns are joined
    only if they depend on the gradients of the same results. If backward uses the result of a
    reduction, the reduction is not joined with a later one. Gradients that an optimizer's step
    reduces are reduced right after backward has computed them, in about eight buckets.
    """
    graph = program.graph.graph
    _reduce_where_ready(graph)
    groups: dict[Any, list[fx.Node]] = {}
    runs = UseRuns(graph)
    cotangents = find_cotangents(program)
    run_of_gather = {found.gather: runs.first_run_of(found) for found in runs.found}
    for node in graph.nodes:
        note = note_of(node)
        key: tuple[Any, ...] = ()
        if node.target in (ALL_GATHER, REDUCE_SCATTER) and note.reason in _REASONS_OF_ZERO:
            run = runs.run_at(node) if note.reason == "gradient" else run_of_gather.get(node, -1)
            key = (note.op, note.phase, note.reason, run)
        elif node.target is not ALL_REDUCE or note.reason != "settle":
            continue
        key += (node.target, node.args[1:], node.meta["val"].dtype, note.axes, cotangents.get(node))
        groups.setdefault(key, []).append(node)
    least = _least_bytes(groups.values())
    joined = buckets = 0
    # Sorted each time: joining moves readers of the results, which may be in other parts or groups.
    for members in groups.values():
        for part in map(sorted, _split_joinable(sorted(members), least)):
            if len(part) > 1:
                _JOIN[part[0].target](program, part)  # type: ignore[index]
                joined, buckets = joined + len(part), buckets + 1
    return f"{joined} collectives became {buckets}"


def _reduce_where_ready(graph: fx.Graph) -> None:
    """Moves reductions of an optimizer's step to where backward makes their operands."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in (REDUCE_SCATTER, ALL_REDUCE) and note_of(node).reason == "settle":
            packing, made_by = packing_of(node)
            last = max(made_by, key=place.__getitem__)
            late = sorted((n for n in packing if place[n] > place[last]), key=place.__getitem__)
            for packed in late:  # it belongs to backward now
                packed.meta[NOTE] = replace(note_of(packed), phase=note_of(node).phase)
            waits = [user for user in node.users if user.target is WAIT]
            found.setdefault(last, []).extend([*late, *waits])
    for last, late in found.items():
        for node in reversed(dict.fromkeys(late)):
            last.append(node)


def _least_bytes(groups: Iterable[list[fx.Node]]) -> int:
    """Returns the bytes of a bucket of an optimizer's step: an eighth of all, within bounds."""
    settled = [m for members in groups for m in members if note_of(m).reason == "settle"]
    total = sum(nbytes_of(_operand_of_collective(m)) for m in settled)
    return min(max(total // _BUCKETS_OF_STEP, _LEAST_BYTES), _MOST_BYTES)


def _split_joinable(members: list[fx.Node], least: int) -> list[list[fx.Node]]:
    """Splits members into parts that can be one collective: none needs the result of another.

    Joined gathers run in the place of the first, joined reductions in the place of the last.
    Collectives of an optimizer's step are cut into parts of `least` bytes.
    """
    parts = [members]
    if note_of(members[0]).reason in ("settle", "update"):
        parts = _split_by_size(members, least)
    if members[0].target is ALL_GATHER:
        return [found for part in parts for found in _split_where(part, _is_ready_before_part)]
    split = (_split_where(reversed(part), _is_independent_of) for part in parts)
    return [found[::-1] for behind in split for found in behind]


def _split_by_size(members: list[fx.Node], least: int) -> list[list[fx.Node]]:
    """Splits members, in order, into parts of at least `least` bytes each, but for the last."""
    parts, size = list[list[fx.Node]](), least
    for node in members:
        if size >= least:
            parts.append([])
            size = 0
        parts[-1].append(node)
        size += max(nbytes_of(node), nbytes_of(_operand_of_collective(node)))
    return parts


def _split_where(
    members: Iterable[fx.Node], joins: Callable[[fx.Node, list[fx.Node]], bool]
) -> list[list[fx.Node]]:
    """Splits members, in order, into parts; `joins(member, part)` extends the last part."""
    parts: list[list[fx.Node]] = []
    for node in members:
        if parts and joins(node, parts[-1]):
            parts[-1].append(node)
        else:
            parts.append([node])
    return parts


def _is_ready_before_part(gather: fx.Node, part: list[fx.Node]) -> bool:
    """True if the operand of a gather is ready before the first member of a part."""
    return _is_ready_before(_operand_of_collective(gather), part[0])


def _is_independent_of(node: fx.Node, part: list[fx.Node]) -> bool:
    """True if a reduction can be joined with the reductions `part`, which come after it.

    No reduction in `part` may depend on it. Nor may work of backward depend on it, because after
    joining that work would wait for the last member of the part.
    """
    waiting = _find_dependents([node], part[0])
    return waiting.isdisjoint(part) and not any(map(_is_backward_work, waiting))


def _is_backward_work(node: fx.Node) -> bool:
    """True for a node that computes in backward, except sums, scales and moves of gradients.

    If such a node waited for a joined reduction, all values saved for it would be kept longer.
    """
    if note_of(node).phase != "backward" or is_collective(node) or node.target is WAIT:
        return False
    facts = facts_of(node.target)
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return not (facts.moves or facts.casts or facts.is_view or is_pointwise)


def _operand_of_collective(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _is_ready_before(operand: fx.Node, place: fx.Node) -> bool:
    """True if `operand`, or what it is a view or a cast of, is computed before the node `place`."""
    while operand > place and operand.target is not WAIT:
        facts = facts_of(operand.target)
        if not (facts.is_view or facts.casts):
            break
        (operand,) = operand.all_input_nodes
    return operand < place


def _find_dependents(nodes: Iterable[fx.Node], last: fx.Node) -> set[fx.Node]:
    """Returns the nodes up to `last` that depend on one of `nodes`."""
    found: set[fx.Node] = set()
    waiting = [*nodes]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user <= last:
                found.add(user)
                waiting.append(user)
    return found


def _join_gathers(program: Program, members: list[fx.Node]) -> None:
    graph = program.graph.graph
    size, name = members[0].args[1:]
    wire, _ = program.groups[name]  # type: ignore[index]
    with graph.inserting_before(members[0]):
        make = NodeBuilder(graph, _joint_note(members, members[0]))

        def make_before(node: fx.Node) -> fx.Node:
            """Returns `node`, or a copy of it here if `node` comes too late."""
            if node < members[0]:
                return node
            source, *rest = node.args
            assert isinstance(source, fx.Node)
            return make(node.target, make_before(source), *rest, **node.kwargs)

        ordered = _even_first(members, [_operand_of_collective(m) for m in members])
        operands = [_operand_of_collective(m) for m in ordered]
        flats = [make(_aten.reshape.default, make_before(x), [-1]) for x in operands]
        bucket = make(_aten.cat.default, flats)
        if wire.backend.gathers_pieces(bucket.meta["val"]):
            sizes = [x.meta["val"].numel() for x in flats]
            whole = make(WAIT, make(all_gather_pieces, bucket, sizes, size, name))
            shown = [(m, list(m.meta["val"].shape)) for m in ordered]
            _replace_members(make, ordered, whole, 0, shown)
            return
        whole = make(ALL_GATHER, bucket, size, name)
        rows = make(_aten.view.default, make(WAIT, whole), [size, -1])
        _replace_members(make, ordered, rows, 1, [(x, [-1]) for x in operands])


def _join_scatters(program: Program, members: list[fx.Node]) -> None:
    graph = program.graph.graph
    op, size, name = members[0].args[1:]
    with graph.inserting_before(members[-1].next):
        make = NodeBuilder(graph, _joint_note(members, members[-1]))
        members = _even_first(members, members)
        rows = [make(_aten.reshape.default, m.args[0], [size, -1]) for m in members]
        flat = make(_aten.reshape.default, make(_aten.cat.default, rows, 1), [-1])
        part = make(WAIT, make(REDUCE_SCATTER, flat, op, size, name))
        pieces = _replace_members(make, members, part, 0, [(m, None) for m in members])
    _sink_users(pieces)


def _join_all_reduces(program: Program, members: list[fx.Node]) -> None:
    graph = program.graph.graph
    op, name = members[0].args[1:]
    with graph.inserting_before(members[-1].next):
        make = NodeBuilder(graph, _joint_note(members, members[-1]))
        members = _even_first(members, members)
        flats = [make(_aten.reshape.default, _skip_packing_copy(m), [-1]) for m in members]
        whole = make(WAIT, make(ALL_REDUCE, make(_aten.cat.default, flats), op, name))
        shown = [(m, list(m.meta["val"].shape)) for m in members]
        pieces = _replace_members(make, members, whole, 0, shown)
    _sink_users(pieces)


_JOIN = {ALL_GATHER: _join_gathers, REDUCE_SCATTER: _join_scatters, ALL_REDUCE: _join_all_reduces}


def _even_first(members: list[fx.Node], pieces: list[fx.Node]) -> list[fx.Node]:
    """Returns the members of a bucket, those with an even number of elements first.

    The real view of a complex tensor has an even number of elements, and `view_as_complex` requires
    an even offset.
    """
    odd = {m: piece.meta["val"].numel() % 2 for m, piece in zip(members, pieces, strict=True)}
    return sorted(members, key=odd.__getitem__)


def _joint_note(members: list[fx.Node], one: fx.Node) -> Note:
    """Returns the note of a collective that joins `members`; its line and phase are from `one`."""
    nbytes = sum(note_of(m).nbytes for m in members)
    return replace(note_of(one), nbytes=nbytes, before="", after="")


def _skip_packing_copy(node: fx.Node) -> fx.Node:
    """Returns the operand of a reduction, or what it is a copy of: concatenation copies, too."""
    operand = _operand_of_collective(node)
    if operand.target is _aten.clone.default and len(operand.users) == 1:
        (operand,) = operand.all_input_nodes
    return operand


def _replace_members(
    make: NodeBuilder,
    members: list[fx.Node],
    whole: fx.Node,
    dim: int,
    shown: Iterable[tuple[fx.Node, list[int] | None]],
) -> list[fx.Node]:
    """Makes the nodes that wait for `members` read pieces of a joint result. Returns the pieces.

    Args:
        dim: the dimension along which the pieces are in `whole`, end to end.
        shown: for each piece, a node with the same number of elements, and the piece's shape; None
            for a flat piece.
    """
    at, pieces = 0, []
    for like, shape in shown:
        n = like.meta["val"].numel()
        piece = make(_aten.slice.Tensor, whole, dim, at, at + n)
        if shape is not None:
            piece = make(_aten.reshape.default, piece, shape)
        if not piece.meta["val"].is_contiguous():  # a column, which `reshape` does not copy
            piece = make(_aten.clone.default, piece, memory_format=torch.contiguous_format)
        pieces.append(piece)
        at += n
    for member, piece in zip(members, pieces, strict=True):
        for wait in list(member.users):
            assert math.prod(wait.meta["val"].shape) == piece.meta["val"].numel()
            wait.replace_all_uses_with(piece)
            make.graph.erase_node(wait)
        make.graph.erase_node(member)
    return pieces


def _sink_users(pieces: list[fx.Node]) -> None:
    """Moves nodes that read the pieces after the last piece, and keeps their order."""
    behind = pieces[-1]
    for node in sorted(_find_dependents(pieces, behind)):
        behind.append(node)
        behind = node
