"""Deeper steps from a captured one: `repeat_block` repeats a block that the step calls.

A model of many equal blocks is captured with a few, which are folded (`capture.fold`). Then each
block has the same nodes in forward, backward and update, and they read the same values of the
blocks before and behind. `repeat_block` verifies this for three blocks in a row, and inserts copies
of the one in the middle. The passes run afterwards, so they see the graph of the deeper model.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count, groupby, pairwise
from typing import Any

from torch import fx

from .fake_values import make_empty_fake, tensors_in
from .graph_nodes import (
    LABELS,
    NOTE,
    call_backward,
    copy_node,
    key_of_operands,
    note_of,
    subgraph_calls,
)
from .program import Program


def repeat_block(program: Program, names: str, more: int) -> bool:
    """Inserts `more` copies of a block into a captured program, in place, before the passes run.

    Args:
        names: the name of the module that has the blocks, such as "model.layers". Names of inputs
            contain it, followed by the number of a block.

    Returns:
        False if no block equals the blocks before and behind it. The program is then unchanged.
    """
    blocks = _Blocks(program, names)
    for number in reversed(blocks.nodes):
        if blocks.is_repeated(number):
            blocks.insert_copies(number, more)
            return True
    return False


@dataclass
class _Read:
    """A value that a node of a block reads.

    Attributes:
        node: the node that computes it.
        place: the distance to the block that has the node (0, -1 or 1), and the node's position in
            that block; None for all other nodes.
    """

    node: fx.Node
    place: tuple[int, int] | None


@dataclass
class _BlockCopy:
    """A copy of a block: its nodes by those of the block, and its own numbers in notes."""

    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    moves: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)


class _Blocks:
    """The nodes of a graph by the block to which they belong.

    Attributes:
        nodes: the nodes of each block, by its number, in the order of the graph.
    """

    def __init__(self, program: Program, names: str):
        self.program, self.graph = program, program.graph.graph
        self._name = re.compile(rf"(\b{re.escape(names)}\.)(\d+)\b")
        self._inputs = dict(
            zip(self.graph.find_nodes(op="placeholder"), program.inputs, strict=True)
        )
        (self._end,) = self.graph.find_nodes(op="output")
        self._owner: dict[fx.Node, int] = {}
        self._unclear: set[int] = set()  # blocks that have a node in common
        for node, given in self._inputs.items():
            if found := self._name.search(given.name):
                self._owner[node] = int(found[2])
        self._find_owners()
        self.nodes: dict[int, list[fx.Node]] = {n: [] for n in sorted({*self._owner.values()})}
        for node in self.graph.nodes:
            if node in self._owner:
                self.nodes[self._owner[node]].append(node)
        self._position = {n: i for nodes in self.nodes.values() for i, n in enumerate(nodes)}

    def _find_owners(self) -> None:
        """Notes the block of each call: the one whose inputs it reads, else whose results it reads.

        What a block passes to the next block does not count.
        """
        passed = self._find_passed_results()
        general = {n for n in self._inputs if n not in self._owner}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            reads: Any = node.all_input_nodes
            if general.issuperset(reads):
                general.add(node)
            if node.target is operator.getitem:
                reads = node.args[:1]
            elif node.target is call_backward:
                reads = node.args[1:2]
            else:
                own = [n for n in reads if n in self._inputs and n in self._owner]
                reads = own or [n for n in reads if _describe_result(n) not in passed]
            owners = {self._owner[n] for n in reads if n in self._owner}
            if owners:
                self._owner[node] = min(owners)
            if len(owners) > 1:
                self._unclear |= owners
        for node in reversed(self.graph.nodes):  # what a block computes of inputs of the step
            users = {self._owner.get(user) for user in node.users}
            if (
                node.op == "call_function"
                and node in general
                and len(users) == 1
                and None not in users
            ):
                self._owner[node] = users.pop()  # type: ignore[assignment]

    def _find_passed_results(self) -> set[Any]:
        """Returns descriptions of the results of block calls that calls of other blocks read."""
        found, block_of = set[Any](), dict[fx.Node, int]()
        for call in subgraph_calls(self.graph):
            owners = {self._owner[n] for n in call.all_input_nodes if n in self._owner}
            if call.target is call_backward:
                owners = {block_of.get(call.args[1], -1)}  # type: ignore[arg-type]
            block_of[call] = owners.pop() if len(owners) == 1 else -1
            for read in call.all_input_nodes:
                source: Any = read.args[0] if read.target is operator.getitem else None
                if source in block_of and block_of[source] != block_of[call]:
                    found.add(_describe_result(read))
        return found

    # -- is it repeated ----------------------------------------------------------------------------

    def is_repeated(self, number: int) -> bool:
        """True if the blocks before and behind are equal, and each part is next to theirs."""
        around = (number - 1, number, number + 1)
        if not self._unclear.isdisjoint(around) or not {*around} <= {*self.nodes}:
            return False
        parts = [self._find_parts(n) for n in around]
        if len({tuple(map(len, of_block)) for of_block in parts}) > 1:
            return False
        for three in zip(*parts, strict=True):
            in_order = three if three[0][-1].next is three[1][0] else three[::-1]
            if any(a[-1].next is not b[0] for a, b in pairwise(in_order)):
                return False
        self._constant = set[fx.Node]()
        of_three = zip(*(self.nodes[n] for n in around), strict=True)
        return all(map(self._are_equal, of_three)) and all(
            user is self._end or self._owner.get(user) in around
            for node in self.nodes[number]
            for user in node.users
        )

    def _find_parts(self, number: int) -> list[list[fx.Node]]:
        """Returns the nodes of a block, divided where nodes of others lie between them."""
        parts = groupby(self.graph.nodes, lambda n: self._owner.get(n) == number)
        return [list(nodes) for is_own, nodes in parts if is_own]

    def _are_equal(self, nodes: tuple[fx.Node, ...]) -> bool:
        """True if three nodes, at one position of three blocks, do the same."""
        if len({self._describe_call(node) for node in nodes}) > 1:
            return False
        for before, here, behind in zip(*map(self._list_reads, nodes), strict=True):
            if here.node is behind.node:
                self._constant.add(here.node)
            elif here.place is None or (here.place != behind.place and here.place[0] != 1):
                return False
            is_first = here.place is not None and here.place[0] == -1
            if not is_first and here.node is not before.node and here.place != before.place:
                return False
        return self._constant.isdisjoint(nodes)

    def _describe_call(self, node: fx.Node) -> Any:
        """Returns all about a node except which values it reads, and names and numbers in notes."""
        order = {n: i for i, n in enumerate(node.all_input_nodes)}
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: ("read", order[n]))
        note = replace(note_of(node), move=0, region=0, op="")
        made = [(t.dtype, t.shape, t.stride()) for t in tensors_in(node.meta.get("val"))]
        target = "" if node.op == "placeholder" else node.target
        return target, key_of_operands(args), note, key_of_operands(made)

    def _list_reads(self, node: fx.Node) -> list[_Read]:
        reads, number = [], self._owner[node]
        for read in node.all_input_nodes:
            distance = self._owner.get(read, number + 2) - number
            is_near = abs(distance) <= 1
            reads.append(_Read(read, (distance, self._position[read]) if is_near else None))
        return reads

    # -- copies ------------------------------------------------------------------------------------

    def insert_copies(self, number: int, more: int) -> None:
        """Inserts copies of a block between it and the block behind. `is_repeated` is true."""
        notes = [note_of(n) for n in self.graph.nodes]
        self._free = count(1 + max(n.move for n in notes)), count(1 + max(n.region for n in notes))
        before, template, behind = (self.nodes[number + i] for i in (-1, 0, 1))
        at = {n: n for n in template}
        at |= dict(zip(before, template, strict=True)) | dict(zip(behind, template, strict=True))
        copies = [_BlockCopy() for _ in range(more)]
        chain = [dict(zip(template, template, strict=True)), *(copy.of for copy in copies)]
        chain.append(dict(zip(template, behind, strict=True)))

        def of_copy(place: int) -> Callable[[fx.Node], fx.Node]:
            """Returns the function from a value that the block reads to what its copy reads."""

            def find(read: fx.Node) -> fx.Node:
                if read in self._constant or read not in at:
                    return read
                return chain[place + self._owner[read] - number][at[read]]

            return find

        for part in self._find_parts(number):
            ascends = part[-1].next in behind
            place = part[-1].next if ascends else part[0]
            with self.graph.inserting_before(place):
                for i in range(1, more + 1) if ascends else range(more, 0, -1):
                    for node in part:
                        made = copy_node(self.graph, node, of_copy(i))
                        copies[i - 1].of[node] = made
                        self._finish_copy(node, made, copies[i - 1], number + i)
        # The block and the one behind read the copies between them, instead of each other.
        to_first = {b: chain[1][t] for t, b in zip(template, behind, strict=True)}
        for nodes, to in (template, to_first), (behind, chain[more]):
            for node in nodes:
                for read in node.all_input_nodes:
                    if read in to:
                        node.replace_input_with(read, to[read])
        for node, owner in self._owner.items():
            if owner > number:
                self._rename_node(node, node, owner + more)
        self.program.inputs[:] = [self._inputs[n] for n in self.graph.find_nodes(op="placeholder")]
        self._return_copies(copies)
        self.program.__post_init__()

    def _finish_copy(self, node: fx.Node, made: fx.Node, copy: _BlockCopy, number: int) -> None:
        """Gives a copied node its own numbers, names and memory."""
        if node.op == "placeholder":
            fake = node.meta["val"]
            made.meta["val"] = make_empty_fake(fake, fake.fake_mode)
        note = note_of(node)
        for numbers, of_node, free in zip(
            (copy.moves, copy.regions), (note.move, note.region), self._free, strict=True
        ):
            if of_node and of_node not in numbers:
                numbers[of_node] = next(free)
        if note.move or note.region:
            move, region = copy.moves.get(note.move, 0), copy.regions.get(note.region, 0)
            made.meta[NOTE] = replace(note, move=move, region=region)
        self._rename_node(node, made, number)

    def _rename_node(self, node: fx.Node, made: fx.Node, number: int) -> None:
        """Gives a copy the names that `node` has, with another block's number."""

        def rename(text: str) -> str:
            if len({found[2] for found in self._name.finditer(text)}) > 1:
                return text  # a bucket's name, which lists all blocks
            return self._name.sub(rf"\g<1>{number}", text)

        if node.op == "placeholder":
            given = self._inputs[node]
            self._inputs[made] = replace(given, name=rename(given.name))
        if (note := note_of(made)).op:
            made.meta[NOTE] = replace(note, op=rename(note.op))
        if labels := node.meta.get(LABELS):
            made.meta[LABELS] = tuple(map(rename, labels))

    def _return_copies(self, copies: list[_BlockCopy]) -> None:
        """Adds what the copies return to the outputs, behind what the block returns."""
        pairs = list(zip(self._end.args[0], self.program.outputs, strict=True))  # type: ignore[arg-type]
        own = [i for i, (node, _) in enumerate(pairs) if node in copies[0].of]
        if own:
            more = [(copy.of[pairs[i][0]], pairs[i][1]) for copy in copies for i in own]
            pairs[own[-1] + 1 : own[-1] + 1] = more
            self._end.args = ([node for node, _ in pairs],)
            self.program.outputs[:] = [output for _, output in pairs]


def _describe_result(node: fx.Node) -> Any:
    """Returns the result of a block's call that a node shows, without the call; None if none."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    call, place = node.args
    part: Any = call.args[0] if call.args else None  # type: ignore[union-attr]
    return call.target, part if not isinstance(part, fx.Node) else None, place  # type: ignore[union-attr]
