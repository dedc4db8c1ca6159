"""Regathering: a parameter that ZeRO gathers is freed between distant uses, and gathered again.

The users of its gathered value are grouped by run (`UseRuns`). Each group after the first gets its
own copy of the gather, starting from the shard. No node frees memory: the executor drops a value
after its last use (`backend.executor`).

A step uses the blocks of a model one after another, forward, then backward, and again for the next
micro-batch. A *run* is the part of the step that uses one block, until another block begins or
backward begins. A gathered parameter must exist in the runs that use it; its gather may run during
the previous run. Around a collective are nodes that only move elements: those that pack its operand
(`packing_of`), and the views of its result (`GatheredParameter.chain`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import fx

from partita.comm.collective import WAIT
from partita.tensor.op_facts import facts_of

from ..graph_nodes import NOTE, copy_node, is_collective, note_of, subgraph_of
from ..program import Program

_PAD = torch.ops.aten.constant_pad_nd.default
_NEXT = 2
"""A parameter is kept to a use at most so many runs later: across one run of another block."""


def regather(program: Program) -> str:
    """A parameter that ZeRO gathers is freed while other blocks compute, and gathered again.

    It is always gathered again for backward. Otherwise the gathered weight would live from forward
    to backward, and ZeRO-3 would need the memory of ZeRO-2. It is also gathered again for each
    micro-batch and each use of a tied weight, because the pass `dedupe` has merged their gathers.
    The cast of the shard, the gather, and the views and casts of its result are all repeated.
    """
    graph = program.graph.graph
    runs = UseRuns(graph)
    regathered = backward = 0
    for parameter in runs.found:
        uses = _group_users(parameter, runs)
        for users in uses[1:]:
            _gather_again(graph, parameter, users)
            regathered += 1
            backward += is_after_forward(users[0])
        if uses:
            _sink_to_first_use(parameter, uses[0][0])
    forward = regathered - backward
    return f"{backward} parameters are gathered again for backward, {forward} for forward"


def _group_users(parameter: GatheredParameter, runs: UseRuns) -> list[list[fx.Node]]:
    """Returns the users of a parameter, in groups between which it is freed."""
    groups: list[list[fx.Node]] = []
    for user in parameter.users:
        if groups:
            before = groups[-1][-1]
            turned = is_after_forward(user) and not is_after_forward(before)
            if (
                not turned
                and runs.run_of_use(parameter, user) - runs.run_of_use(parameter, before) <= _NEXT
            ):
                groups[-1].append(user)
                continue
        groups.append([user])
    return groups


def _gather_again(graph: fx.Graph, parameter: GatheredParameter, users: list[fx.Node]) -> None:
    late = is_after_forward(users[0])
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(users[0]):
        for node in [*_from_shard(parameter.gather), *parameter.chain]:
            copies[node] = copy = copy_node(graph, node, lambda n: copies.get(n, n))
            copy.meta[NOTE] = replace(
                note_of(node),
                phase="backward" if late else "forward",
                reason="regather" if late else "gather",
                again=True,
            )
    for user in users:
        for node in parameter.chain:
            if node in user.all_input_nodes:
                user.replace_input_with(node, copies[node])


def _sink_to_first_use(parameter: GatheredParameter, first: fx.Node) -> None:
    """Moves the gather to right before its first use, however early its block was entered."""
    moved = [*_from_shard(parameter.gather), *parameter.chain]
    together = set(parameter.chain)
    for node in reversed(moved):
        if together.issuperset(node.users):
            together.add(node)
    for node in moved:
        if node in together:
            first.prepend(node)


def _from_shard(gather: fx.Node) -> list[fx.Node]:
    """Returns the views and casts between a parameter's shard and its gather, in order.

    They are repeated, too: the cast shard would otherwise live until backward.
    """
    found: list[fx.Node] = []
    (node,) = gather.all_input_nodes
    while only_moves(node) and len(node.all_input_nodes) == 1:
        found.insert(0, node)
        (node,) = node.all_input_nodes
    return found if node.op == "placeholder" else []


# -- gathered parameters and runs ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GatheredParameter:
    """A parameter that ZeRO gathers in a graph: the collective, and the nodes around it.

    Attributes:
        gather: the collective.
        chain: the gather and the nodes that only move its result, in order.
        users: the calls that compute with the parameter, in order, without the graph's output.
    """

    gather: fx.Node
    chain: list[fx.Node]
    users: list[fx.Node]

    @property
    def block(self) -> str:
        """The name of the block (such as a layer) to which the parameter belongs."""
        return note_of(self.gather).op


class UseRuns:
    """A graph cut into *runs* (parts that use one block each), and its gathered parameters.

    Attributes:
        found: the gathered parameters, in order of their gathers.
        place: the index of each node in the graph.
    """

    def __init__(self, graph: fx.Graph):
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.found = [self._make_gathered_parameter(n) for n in self.place if is_gather(n)]
        uses = sorted(
            {(self.place[user], one.block, user) for one in self.found for user in one.users},
            key=lambda use: use[:2],
        )
        self._number: dict[tuple[fx.Node, str], int] = {}
        self._first: list[fx.Node] = []
        last = None
        for _, block, user in uses:
            run = block, is_after_forward(user)
            if run != last:
                self._first.append(user)
                last = run
            self._number[user, block] = len(self._first) - 1
        self._begins = [self.place[node] for node in self._first]

    def run_of_use(self, one: GatheredParameter, user: fx.Node) -> int:
        """Returns the index of the run in which the node `user` reads the parameter `one`."""
        return self._number[user, one.block]

    def first_run_of(self, one: GatheredParameter) -> int:
        """Returns the index of the first run that reads the parameter `one`; -1 if none does."""
        return self.run_of_use(one, one.users[0]) if one.users else -1

    def run_at(self, node: fx.Node) -> int:
        """Returns the index of the run that contains a node; -1 for nodes before the first run."""
        return bisect.bisect(self._begins, self.place[node]) - 1

    def first(self, number: int) -> fx.Node:
        """Returns the first node of the run with the index `number`."""
        return self._first[number]

    def _make_gathered_parameter(self, gather: fx.Node) -> GatheredParameter:
        chain = find_moved(gather, self.place)
        moved = {*chain}
        users = {u for n in chain for u in n.users if u not in moved and u.op != "output"}
        return GatheredParameter(gather, chain, sorted(users, key=self.place.__getitem__))


def is_after_forward(node: fx.Node) -> bool:
    """True if a node belongs to backward or to the optimizer's update, not to forward."""
    return note_of(node).phase in ("backward", "update") and node.op == "call_function"


def only_moves(node: fx.Node) -> bool:
    """True if a node computes nothing: it is a view, a copy or a cast of its operands."""
    if (section := subgraph_of(node)) is not None:
        return section.only_moves
    facts = facts_of(node.target)
    return facts.moves or facts.casts


def is_gather(node: fx.Node) -> bool:
    """True if the node is the all-gather of a parameter that ZeRO has sharded."""
    if not is_collective(node):
        return False
    note = note_of(node)
    return note.kind == "all_gather" and note.reason in ("gather", "regather")


def find_moved(
    start: fx.Node,
    place: Mapping[fx.Node, int],
    moves: Callable[[fx.Node], bool] = only_moves,
    operands: Callable[[fx.Node], Collection[fx.Node]] = attrgetter("all_input_nodes"),
) -> list[fx.Node]:
    """Returns `start` and the later nodes that only view, copy or cast its value, in order.

    For a gather, these nodes turn the gathered data into the tensor that the program uses.

    Args:
        place: the index of each node in the graph.
        moves: a predicate: True for a call that only views, copies or casts.
        operands: a function from such a call to its operands that must be among the found nodes.
    """
    found = {start}
    waiting = [start]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and moves(user) and found.issuperset(operands(user)):
                found.add(user)
                waiting.append(user)
    return sorted(found, key=place.__getitem__)


def packing_of(collective: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Returns the nodes that pad, view, copy or cast the operand of a collective.

    Returns:
        A pair: the collective with these nodes, and the nodes that they read.
    """
    packing, sources, waiting = {collective}, set(), [collective]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            packs = (
                only_moves(read) or facts_of(read.target).is_undeclared_view or read.target is _PAD
            )
            if not packs or read.target is WAIT:
                sources.add(read)
            elif read not in packing:
                packing.add(read)
                waiting.append(read)
    return packing, sources
