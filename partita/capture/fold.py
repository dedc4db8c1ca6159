"""The fold: equal blocks of a traced step become calls of one subgraph, so they are compiled once.

While a step is traced, each node gets the number of its block call (`Recorder.block`). In forward
this is the call of the module that runs, in backward the call that created the autograd node.
`StepBlocks` compares the nodes of these calls: targets, operands by position, metadata of operands
from outside, notes. Equal blocks may differ in operands, in labels, and in floats for which a
tensor gives the same bits. These are passed to each call.

    f = call_subgraph(block, operands)          getitem(f, i), for each result
    b = call_backward(block, f, cotangents)     getitem(b, i), for each gradient

The update of a block's parameters is a block call, too. It may write inputs of the step if no later
node uses them. Numbers that depend only on equal step counts are computed once, outside the calls.
A block is left *flat* (not folded) if a call would change the results of the step. For example, a
block writes memory that other nodes use. `StepBlocks` first decides for all blocks of the traced
graph, and then replaces them, so that no decision depends on an earlier replacement.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm.device import HOST
from partita.graph.errors import CaptureError, UnsureOfWrites
from partita.graph.fake_values import make_distinct, tensors_in
from partita.graph.graph_nodes import (
    BLOCK,
    BLOCK_RESULT,
    LABELS,
    NOTE,
    Note,
    Subgraph,
    add_call,
    add_input,
    call_backward,
    call_subgraph,
    copy_node,
    drop_unused,
    has_effect,
    is_collective,
    key_of_operands,
    lazy_graph_module,
    note_of,
)
from partita.graph.shared_memory import (
    memory_that_is_written,
    operands_written,
    overlapping_results,
)
from partita.tensor.op_facts import facts_of

from .block_choice import BlockCalls, BlocksTraced
from .fakes import is_symbolic
from .functional_calls import takes_number_exactly
from .functionalize import functionalize_graph

_SCALAR = torch.ops.aten.scalar_tensor.default
_NEIGHBOURS = 2
"""Blocks at most this far apart share one gather of a common weight (`passes.regather`)."""
_EXACT_INTS = 2**53
"""Ints below this size are exact as floats."""


class StepBlocks:
    """The blocks of a traced step, compared with each other, so that equal ones can be folded.

    Args:
        step: the traced graph, from which unused calls were removed.
        kinds: the classes of each block call, as in `Recorder.block_kinds`.
        coordinates: the inputs that hold the rank's coordinates.
        equal: groups of inputs that hold the same number.
        env: the `NumberEnv` of the capture, which makes symbolic floats.
    """

    def __init__(
        self,
        step: fx.GraphModule,
        kinds: Sequence[tuple[type, ...]],
        coordinates: Collection[fx.Node],
        equal: Iterable[Iterable[fx.Node]],
        env: Any,
    ):
        self.step, self.graph, self._env = step, step.graph, env
        self._runs, self._odd_runs = _find_runs(step.graph, kinds, coordinates)
        self._by_key: defaultdict[Any, list[_BlockRun]] = defaultdict(list)
        self._exchanged: dict[fx.Node, fx.Node] = {}
        self._equal = {n: group for group, inputs in enumerate(equal) for n in inputs}
        self._memory: dict[fx.Node, int] = {}
        self._places: dict[fx.Node, int] = {}
        self._writers: defaultdict[int, list[fx.Node]] = defaultdict(list)
        self._shows: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for run in self._runs:
            run.add_intermediate_nodes()
            with local_ops():
                run.describe()
            self._by_key[run.key].append(run)

    @property
    def traced(self) -> BlocksTraced:
        """A report: the blocks that were found, by structure, and why some were not folded."""
        found: Counter[tuple[Any, tuple[type, ...], str]] = Counter()
        for key, runs in self._by_key.items():
            found.update((key, run.kinds, run.reason) for run in runs)
        found.update((None, run.kinds, run.reason) for run in self._odd_runs)
        calls: list[BlockCalls] = []
        updates: list[BlockCalls] = []
        for (_, kinds, why), n in found.items():
            of = calls if len(kinds) == 1 else updates
            of.append(BlockCalls(_name_of(kinds), n, why))
        return BlocksTraced(tuple(calls), tuple(updates))

    def leave_flat(self, reason: str) -> None:
        """Leaves all blocks' nodes in the step's graph, without folding, for `reason`."""
        for run in self._runs:
            run.reason = run.reason or reason

    def fold(self) -> None:
        """Replaces equal blocks of the graph by calls of one subgraph."""
        if self._runs:
            self._describe_memory()
            for equal in self._by_key.values():
                for runs in _group_by_numbers(equal) if len(equal) > 1 else ():
                    self._share_numbers(runs)
            self._by_key.clear()
            for run in self._runs:
                self._by_key[run.key].append(run)
            self._places = {node: place for place, node in enumerate(self.graph.nodes)}
        groups = self._plan_groups()  # all of it, before the first node is replaced
        for group in groups:
            for run in group.runs:
                self._replace_run(run, group)

    def _describe_memory(self) -> None:
        self._memory = memory_that_is_written(self.graph)
        for node in self.graph.nodes:
            if node in self._memory:
                self._shows[self._memory[node]].append(node)
            for written in operands_written(node):
                if written in self._memory:
                    self._writers[self._memory[written]].append(node)

    # -- numbers that equal updates share ----------------------------------------------------------

    def _share_numbers(self, runs: Sequence[_BlockRun]) -> None:
        """Computes numbers from step counts once for equal blocks whose counts are equal.

        The first block computes them before anything else.
        """
        shared = self._find_shared_numbers(runs)
        if not shared:
            return
        first, *others = runs
        numbers = [first.forward[i] for i in shared]
        start = next(n for n in first.forward if n not in numbers)
        waiting, moved = [*numbers], {*numbers}
        while waiting:
            for node in waiting.pop().all_input_nodes:
                if node > start and node not in moved:  # a number that the step computes later
                    moved.add(node)
                    waiting.append(node)
        for node in sorted(moved):
            start.prepend(node)
        for run in others:
            for i, number in zip(shared, numbers, strict=True):
                run.forward[i].replace_all_uses_with(number)
            for i in reversed(shared):
                self.graph.erase_node(run.forward[i])
        for run in runs:
            run.forward = [n for i, n in enumerate(run.forward) if i not in {*shared}]
            run.own = {n: i for i, n in enumerate(run.forward)}
            with local_ops():
                run.describe()

    def _find_shared_numbers(self, runs: Sequence[_BlockRun]) -> list[int]:
        """Returns the positions of calls that all blocks can share.

        They compute numbers from step counts, and have the same result in all blocks.
        """
        first, memory = runs[0], self._memory
        operands = zip(*(run.outside_inputs for run in runs), strict=True)
        other = {nodes[0] for nodes in operands if len({*nodes}) > 1}  # which differ between blocks
        counts = {n for i, n in enumerate(first.outside_inputs) if self._is_one_count(i, runs)}
        other -= counts
        held = {memory.get(n) for n in counts}
        shared = set(counts)
        written: set[int | None] = set()  # memory that unshared calls of the block write,
        read: set[int | None] = set()  # and read
        for node in first.forward if counts else ():
            reads = [n for n in node.all_input_nodes if n in first.own or n in counts]
            into = operands_written(node)
            of_into = {memory[n] for n in into}
            outside = [n for n in node.all_input_nodes if n not in first.own and n not in counts]
            if (
                reads
                and shared.issuperset(reads)
                and not any(self._writers.get(memory.get(n, -1)) for n in outside)
                and held.isdisjoint(of_into)
                and other.isdisjoint(node.all_input_nodes)
                and not facts_of(node.target).draws
                and all(t.ndim == 0 for t in tensors_in(node.meta.get("val")))
            ):
                if not written.isdisjoint(memory.get(n) for n in reads):
                    return []
                if not read.isdisjoint(of_into):
                    return []
                shared.add(node)
                continue
            written |= of_into
            read.update(memory[n] for n in reads if n in memory)
            if any(n in shared and n not in counts for n in into):
                return []
        found = [i for i, node in enumerate(first.forward) if node in shared]
        are_own = (u in run.own for run in runs for i in found for u in run.forward[i].users)
        return found if all(are_own) else []

    def _is_one_count(self, operand: int, runs: Sequence[_BlockRun]) -> bool:
        """True if an operand is the same number in all blocks, and only the block itself writes it.

        Args:
            operand: the index of the operand in `_BlockRun.outside_inputs`.
        """
        groups = set[int | None]()
        for run in runs:
            given = run.outside_inputs[operand]
            if any(w not in run.own for w in self._writers.get(self._memory.get(given, -1), ())):
                return False
            groups.add(self._equal.get(_find_base_of_alias(given)))
        return len(groups) == 1 and None not in groups

    # -- which can be folded -----------------------------------------------------------------------

    def _plan_groups(self) -> list[_EqualRuns]:
        """Returns the groups of equal blocks to replace. Each other block gets a reason."""
        sharing = self._find_sharing_neighbours()
        regions = self._find_split(lambda note: note.region)
        moves = self._find_split(lambda note: note.move)
        groups: list[_EqualRuns] = []
        for equal in self._by_key.values():
            for run in equal:
                if len(equal) == 1:
                    run.reason = run.reason or "no other call is equal to it"
                elif run in sharing:
                    run.reason = "a neighbour gathers the same weight"
                elif not regions.isdisjoint(run.regions):
                    run.reason = "a remat region contains more than this block"
                elif not moves.isdisjoint(run.moves):
                    run.reason = "a redistribution belongs to this block and to other nodes"
                else:
                    run.reason = self._find_outside_write(run) or self._find_order(run)
            for runs in _split_by_use([run for run in equal if not run.reason]):
                if (group := self._make_group(runs)) is not None:
                    groups.append(group)
        self._drop_overlapping(groups)
        return [group for group in groups if group.runs]

    def _make_group(self, runs: list[_BlockRun]) -> _EqualRuns | None:
        """Returns a group of equal blocks with its subgraph; None if no subgraph fits all."""
        reason = "no equal call is used in the same way"
        if len(runs) > 1:
            varying = _find_varying_floats(runs)
            try:
                return _EqualRuns(runs, self._make_program(runs[0], varying), varying)
            except (UnsureOfWrites, CaptureError):
                reason = "it cannot be expressed by a graph without in-place writes"
        for run in runs:
            run.reason = reason
        return None

    def _drop_overlapping(self, groups: Sequence[_EqualRuns]) -> None:
        """Leaves a block flat if its nodes alternate with those of another block that is folded.

        One call cannot come before the other, because each may need results of the other.
        """
        spans = [
            (self._places[nodes[0]], self._places[nodes[-1]], run)
            for group in groups
            for run in group.runs
            for nodes in (run.forward, run.backward)
            if nodes
        ]
        end = -1
        for first, last, run in sorted(spans, key=lambda span: span[:2]):
            if run.reason:
                continue
            if first < end:
                run.reason = "its nodes alternate with another block's nodes"
            else:
                end = last
        for group in groups:
            group.runs = [run for run in group.runs if not run.reason]
            if len(group.runs) == 1:
                group.runs.pop().reason = "the calls that equal it were left flat"

    def _find_sharing_neighbours(self) -> set[_BlockRun]:
        """Returns blocks that gather the same weight as a block shortly before or after them.

        Blocks that gather the same weight and keep it gathered are included at any distance.
        """
        found: set[_BlockRun] = set()
        last: dict[fx.Node, int] = {}
        for i, run in enumerate(self._runs):
            for shard, persists in run.find_gathered():
                before = last.get(shard)
                if before is not None and (persists or i - before <= _NEIGHBOURS):
                    found |= {run, self._runs[before]}
                last[shard] = i
        return found

    def _find_split(self, number_of: Callable[[Note], int]) -> set[int]:
        """Returns the regions or moves whose nodes do not all belong to one block.

        Args:
            number_of: a function that returns the number of a note's region or move; 0 for none.
        """
        holders: defaultdict[int, set[Any]] = defaultdict(set)
        for node in self.graph.nodes:
            if node.op == "call_function" and (number := number_of(note_of(node))):
                holders[number].add(node.meta.get(BLOCK))
        return {number for number, blocks in holders.items() if len(blocks) > 1}

    def _find_outside_write(self, run: _BlockRun) -> str:
        """Returns the reason if writes prevent a block from becoming a subgraph; "" if not."""
        memory = self._memory
        of_forward = {memory[n] for n in run.forward if n in memory}
        outside = {memory[n] for n in run.outside_inputs if n in memory}
        late_outside = outside | of_forward
        for nodes, others in ((run.forward, outside), (run.backward, late_outside)):
            for node in nodes:
                into = {memory[n] for n in operands_written(node) if memory.get(n) in others}
                if not all(self._is_last_to_use(run, m) for m in into):
                    return "it writes memory from outside"
        views = Counter(memory[n] for n in _nodes_read(run) if n in memory)
        for shown, times in views.items():
            is_shared = times > 1 or shown in outside
            if is_shared and any(w not in run.own for w in self._writers[shown]):
                return "a result is a view of memory that is written"
        if not run.backward:
            return ""
        start, end = self._places[run.forward[-1]], self._places[run.backward[-1]]
        early = run.outside_inputs[: run.early_count]
        for node in run.backward:
            for read in node.all_input_nodes:
                if read not in memory or (read not in run.own and read not in early):
                    continue
                for writer in self._writers[memory[read]]:
                    if writer not in run.own and start < self._places[writer] < end:
                        return "what its backward reads is written after its forward"
        return ""

    def _is_last_to_use(self, run: _BlockRun, memory: int) -> bool:
        """True if `memory` is an input's, and only the block uses it after the block's start.

        False for a block with a backward. It becomes two calls, and either might write.
        """
        shown = [n for n in run.outside_inputs if self._memory.get(n) == memory]
        start = self._places[run.forward[0]]
        users = (user for node in self._shows[memory] for user in node.users)
        return (
            not run.backward
            and len(shown) == 1
            and _find_base_of_alias(shown[0]).op == "placeholder"
            and all(w in run.own for w in self._writers[memory])
            and all(u in run.own or self._places[u] < start for u in users)
        )

    def _find_order(self, run: _BlockRun) -> str:
        """Returns why the nodes of a block cannot be moved next to each other; "" if they can."""
        try:
            run.later = self._find_later(run, run.forward), self._find_later(run, run.backward)
        except _OrderMatters as matter:
            return str(matter)
        return ""

    # -- calls -------------------------------------------------------------------------------------

    def _make_program(self, run: _BlockRun, varying: Sequence[int]) -> Subgraph:
        """Returns the subgraph of a block.

        Args:
            varying: the positions (in `_BlockRun.floats`) of floats that become inputs.

        Raises:
            UnsureOfWrites: no separate graph computes the same.
        """
        graph, of = fx.Graph(), dict[fx.Node, Any]()
        known: set[int] = set()

        def enter(node: fx.Node, value: Any) -> None:
            given = add_input(graph, f"in_{len(graph.nodes)}")
            given.meta = {NOTE: note_of(node), "val": make_distinct(value, known)}
            of[node] = given

        early, late = run.outside_inputs[: run.early_count], run.outside_inputs[run.early_count :]
        for node in early:
            enter(node, node.meta["val"])
        numbers: dict[int, fx.Node] = {}
        for i in varying:
            numbers[i] = given = add_input(graph, f"number_{i}")
            value = float(run.floats[i])
            given.meta["val"] = self._env.symbolic(f"number {i} of a block", value)
        input_count = len(graph.nodes)
        for node in late:
            enter(node, node.meta["val"])
        homes = {run.homes[i] for i in varying}
        floats = count()
        for node in (*run.forward, *run.backward):
            of[node] = made = copy_node(graph, node, of.__getitem__)
            if numbers:
                args = _put_numbers(node, made.args, made.kwargs, floats, numbers)
                if node in homes:
                    made.args, made.kwargs = args
        results, gradients = run.read
        made_by = [*run.forward, *run.backward]
        first = len(run.forward)
        graph.output([of[made_by[n]] for n in (*results, *(first + n for n in gradients))])
        made_graph = functionalize_graph(lazy_graph_module(self.step, graph))
        drop_unused(made_graph.graph)
        block = Subgraph(made_graph, _name_of(run.kinds), labels=tuple(run.labels))
        if run.backward:
            block.forward_input_count, block.forward_output_count = input_count, len(results)
        if any(max(pair) < len(results) for pair in overlapping_results(made_graph.graph)):
            raise UnsureOfWrites  # results overlap, or are views of an operand
        if run.backward and (
            block.written or not block.backward_nodes.isdisjoint(block.outputs_of(False))
        ):
            raise UnsureOfWrites  # either of the two may write; or backward makes a result
        for node in block.outputs_of(False):
            _find_base_of_alias(node).meta[BLOCK_RESULT] = True
        return block

    def _replace_run(self, run: _BlockRun, group: _EqualRuns) -> None:
        """Replaces the nodes of a block call by calls of its subgraph."""
        later = run.later
        operands = [self._exchanged.get(n, n) for n in run.outside_inputs]
        early, late = operands[: run.early_count], operands[run.early_count :]
        results, gradients = run.read
        graph = self.graph
        with graph.inserting_after(run.forward[-1]):
            forward = add_call(graph, call_subgraph)
        first = note_of(run.forward[0])
        forward.meta = {NOTE: Note(first.source, first.phase), LABELS: tuple(run.labels)}
        numbers = []
        with graph.inserting_before(forward):
            for i in group.varying:
                options = {"dtype": torch.float64, "device": HOST}
                numbers.append(add_call(graph, _SCALAR, (run.floats[i],), options))
                numbers[-1].meta = {"val": _make_number_like(run), NOTE: forward.meta[NOTE]}
        part: Any = group.program
        forward.args = (part, [*early, *numbers])
        self._replace(run, forward, run.forward, results, later[0])
        if run.backward:
            with graph.inserting_after(run.backward[-1]):
                backward = add_call(graph, call_backward, (part, forward, late))
            first = note_of(run.backward[0])
            backward.meta = {NOTE: Note(first.source, first.phase)}
            self._replace(run, backward, run.backward, gradients, later[1])
        for node in reversed([*run.forward, *run.backward]):
            graph.erase_node(node)

    def _replace(
        self,
        run: _BlockRun,
        call: fx.Node,
        nodes: Sequence[fx.Node],
        read: Iterable[int],
        later: Iterable[fx.Node],
    ) -> None:
        """Replaces the results of `nodes`, at the indices `read`, by items of `call`.

        The nodes in `later` are moved behind these items.
        """
        last = call
        made = [nodes[place] for place in read]
        call.meta["val"] = [node.meta["val"] for node in made]
        for i, node in enumerate(made):
            with self.graph.inserting_after(last):
                last = add_call(self.graph, operator.getitem, (call, i))
            note = note_of(node)
            last.meta = {"val": node.meta["val"]}
            last.meta[NOTE] = Note(note.source, note.phase, note.layout)
            self._exchanged[node] = last
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in run.own)
        for node in later:
            last.append(node)
            last = node

    def _find_later(self, run: _BlockRun, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns the nodes between `nodes`, but outside the block, that must come after the block.

        Raises:
            _OrderMatters: the block needs one of them, or their order changes what is computed.
        """
        if not nodes:
            return []
        own, memory = run.own, self._memory
        touched: set[int] | None = None
        draws = any(map(_draws_random_numbers, nodes))
        later: dict[fx.Node, None] = {}
        has_late_effect = False
        node, last = nodes[0], nodes[-1]
        while node is not last:
            node = node.next
            reads = node.all_input_nodes
            if node in own:
                if any(n in later for n in reads):
                    raise _OrderMatters(
                        "nodes outside it use a part of it and compute values for another part"
                    )
                continue
            effect = node.op == "call_function" and has_effect(node)
            if effect:
                if touched is None:
                    both = {r for n in nodes for r in (n, *n.all_input_nodes)}
                    touched = {memory[n] for n in both if n in memory}
                written = {memory.get(n) for n in operands_written(node)}
                if not touched.isdisjoint(written):  # type: ignore[arg-type]
                    raise _OrderMatters(
                        "nodes outside it write memory that it uses, between its own nodes"
                    )
                if draws and _draws_random_numbers(node):
                    raise _OrderMatters(
                        "nodes outside it draw random numbers between its own draws"
                    )
            if any(n in own or n in later for n in reads) or (later and effect) or has_late_effect:
                later[node] = None
                has_late_effect |= effect
                if self._is_written_later(run, node):
                    raise _OrderMatters("it writes memory after others have read it")
        return [*later]

    def _is_written_later(self, run: _BlockRun, node: fx.Node) -> bool:
        """True if a block writes its own memory after the outside `node` reads it."""
        memory, place = self._memory, self._places[node]
        shown = {memory[n] for n in node.all_input_nodes if n in memory and n in run.own}
        writers = [w for m in shown for w in self._writers[m] if w in run.own]
        return any(self._places[w] > place for w in writers)


class _OrderMatters(Exception):
    """The nodes of a block cannot be moved next to each other; the message says why."""


def _find_base_of_alias(node: fx.Node) -> fx.Node:
    """Returns the node that `node` is an alias of; `node` itself if it is none."""
    while node.op == "call_function" and facts_of(node.target).is_alias:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _make_number_like(run: _BlockRun) -> torch.Tensor:
    """Returns the fake value of a float that becomes a tensor, in the fake mode of a block."""
    mode = next(t.fake_mode for n in run.forward for t in tensors_in(n.meta.get("val")))  # type: ignore[attr-defined]
    with mode:
        return torch.empty((), dtype=torch.float64, device=HOST)


@dataclass
class _EqualRuns:
    """Equal blocks, and the subgraph that replaces them.

    Attributes:
        varying: the positions (in `_BlockRun.floats`) of floats that become inputs of the subgraph.
    """

    runs: list[_BlockRun]
    program: Subgraph
    varying: list[int]


# -- the block calls of a traced graph -------------------------------------------------------------


@dataclass(eq=False)
class _BlockRun:
    """One call of a block in a traced step: its nodes, and how they are compared.

    Attributes:
        kinds: (the block's class,); for an update (the optimizer's class, the block's class).
        forward, backward: its nodes, in order; the nodes of an update are in `forward`.
        own: all of them, with their positions.
        outside_inputs: the nodes outside the block that it reads, in the order of first use.
        early_count: the number of `outside_inputs` that forward reads. Only backward reads the
            rest.
        floats: the numbers among its operands that may vary, in order.
        homes: for each of `floats`, the node that has it as an operand.
        labels: the distinct labels of its redistributions.
        moves, regions: map the number in the step's notes to the number within the block.
        key: equal for blocks that compute the same, except for labels and floats.
        reason: why it is left flat; "" if it is folded.
        later: the outside nodes between its nodes of forward that have to come after them, and
            the same for backward.
    """

    kinds: tuple[type, ...]
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)
    own: dict[fx.Node, int] = field(default_factory=dict)
    outside_inputs: list[fx.Node] = field(default_factory=list)
    early_count: int = 0
    floats: list[float] = field(default_factory=list)
    homes: list[fx.Node] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    moves: dict[int, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    key: Any = None
    reason: str = ""
    later: tuple[list[fx.Node], list[fx.Node]] = ([], [])

    @cached_property
    def read(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions of nodes that are read outside the block: in forward, and in backward."""
        early, late = (
            tuple(i for i, n in enumerate(nodes) if any(u not in self.own for u in n.users))
            for nodes in (self.forward, self.backward)
        )
        return early, late

    def add_intermediate_nodes(self) -> None:
        """Adds nodes to the block that lie between two of its nodes, but have no block."""
        self.own = dict.fromkeys((*self.forward, *self.backward), 0)
        for nodes in (self.forward, self.backward):
            if len(nodes) < 2:
                continue
            node, last = nodes[0], nodes[-1]
            made: dict[fx.Node, None] = {}
            while node is not last:
                node = node.next
                if node in self.own or node.meta.get(BLOCK) is not None:
                    continue
                if any(n in self.own or n in made for n in node.all_input_nodes):
                    made[node] = None
            absorbed: set[fx.Node] = set()
            for node in reversed(made):
                if any(u in self.own or u in absorbed for u in node.users) and not has_effect(node):
                    absorbed.add(node)
            if absorbed:
                nodes[:] = sorted([*nodes, *absorbed])
                self.own.update(dict.fromkeys(absorbed, 0))
        self.own = {n: i for i, n in enumerate((*self.forward, *self.backward))}

    def find_gathered(self) -> Iterator[tuple[fx.Node, bool]]:
        """Yields each ZeRO shard that forward gathers, and True if its gathered value is kept."""
        for node in self.forward:
            reason = note_of(node).reason
            if is_collective(node) and reason in ("gather", "persistent"):
                while node in self.own and node.all_input_nodes:
                    node = node.all_input_nodes[0]
                if node not in self.own:
                    yield node, reason == "persistent"

    # -- what it does ------------------------------------------------------------------------------

    def describe(self) -> None:
        """Sets `key`, equal for blocks that can share a subgraph, and lists operands and floats."""
        self.floats, self.homes, self.moves, self.regions = [], [], {}, {}
        self._numbers: dict[fx.Node, int] = {}
        self._labels: dict[str, int] = {}
        self._notes: dict[int, Any] = {}
        lines = []
        for nodes in (self.forward, self.backward):
            for node in nodes:
                args = [self._describe_operand(node, a, place) for place, a in enumerate(node.args)]
                named = [(k, self._describe_operand(node, v, k)) for k, v in node.kwargs.items()]
                lines.append((node.target, *args, *named, self._describe_note(node)))
            if nodes is self.forward:
                self.early_count = len(self._numbers)
                lines.append(())
        self.outside_inputs, self.labels = [*self._numbers], [*self._labels]
        self.key = self.kinds, tuple(lines)
        if any(not _is_comparable(n.meta.get("val")) for n in self.outside_inputs):
            self.reason = "it takes a tensor that is not strided"
        try:
            hash(self.key)
        except TypeError:
            self.key, self.reason = object(), "it has an operand that cannot be compared"

    def _describe_operand(self, node: fx.Node, value: Any, place: int | str) -> Any:
        kind = type(value)
        if kind is fx.Node:
            if (own := self.own.get(value)) is not None:
                return own, None
            number = self._numbers.get(value)
            if number is None:
                number = self._numbers[value] = len(self._numbers)
            return number, _describe_metadata(value.meta.get("val"))
        if isinstance(value, (tuple, list)):
            return "list", *(self._describe_operand(node, v, place) for v in value)
        if _may_vary(node, value, place):
            self.floats.append(value)
            self.homes.append(node)
            return _FLOAT
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return kind, *(self._describe_operand(node, v, place) for v in parts)
        return kind, key_of_operands(value)

    def _describe_note(self, node: fx.Node) -> Any:
        note = note_of(node)
        found = self._notes.get(id(note))
        if found is None:
            move = note.move and self.moves.setdefault(note.move, len(self.moves) + 1)
            region = note.region and self.regions.setdefault(note.region, len(self.regions) + 1)
            op: Any = note.op
            layout = note.layout
            if note.move:
                op = self._labels.setdefault(note.op, len(self._labels))
                layout = ""  # in a copied move only the last node has a layout
            found = self._notes[id(note)] = (
                *(note.source, note.phase, layout, note.kind, note.axes, note.nbytes, op),
                *(note.reason, note.before, note.after, move, region, note.kept, note.again),
            )
        return found


_FLOAT = ("a float",)


def _may_vary(node: fx.Node, value: Any, place: int | str) -> bool:
    """True if an operand is a number that may differ in another block and become a tensor.

    Zero, infinity and NaN may not vary, because torch treats them specially. An int may vary only
    if torch computes with it as a float.
    """
    if type(value) is float:
        return value != 0 and math.isfinite(value)
    if type(value) is not int or not value or abs(value) >= _EXACT_INTS:
        return False
    read = next((n.meta.get("val") for n in node.all_input_nodes), None)
    is_float = isinstance(read, torch.Tensor) and read.is_floating_point()
    return is_float and place in _places_of_numbers(node.target)


@lru_cache(maxsize=4096)
def _places_of_numbers(target: Any) -> frozenset[int | str]:
    """Returns the positions and names of operands that may be numbers."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return frozenset()
    kinds = ("number", "Tensor", "Optional[number]")
    places = enumerate(schema.arguments)
    return frozenset(k for i, a in places if str(a.type) in kinds for k in (i, a.name))


def _describe_metadata(value: Any) -> Any:
    """Returns the metadata in which operands of equal blocks must agree."""
    if not _is_comparable(value):
        return object()  # equal to nothing
    if not isinstance(value, torch.Tensor):
        return type(value)
    lies = value.shape, value.stride(), value.storage_offset()
    return *lies, value.dtype, value.device, value.is_conj(), value.is_neg()


def _is_comparable(value: Any) -> bool:
    """True if two such operands with equal metadata can be passed to one subgraph.

    False for a sparse tensor, for example.
    """
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided
    return is_symbolic(value)


def _name_of(kinds: Sequence[type]) -> str:
    """Returns the name of a block, or of its update: "AdamW of Block"."""
    return " of ".join(kind.__name__ for kind in kinds)


def _find_runs(
    graph: fx.Graph, kinds: Sequence[tuple[type, ...]], coordinates: Collection[fx.Node]
) -> tuple[list[_BlockRun], list[_BlockRun]]:
    """Returns the block calls that can be compared, and the others, which have a `reason`.

    All nodes of the former belong to forward, or to a backward after it.
    """
    _release_shared(graph, coordinates)
    runs = {number: _BlockRun(of) for number, of in enumerate(kinds)}
    for node in graph.nodes:
        number = node.meta.get(BLOCK)
        if number is None or node.op != "call_function":
            continue
        phase, run = note_of(node).phase, runs[number]
        if phase == "backward":
            run.backward.append(node)
        elif phase == ("forward" if len(run.kinds) == 1 else "update") and not run.backward:
            run.forward.append(node)
        else:
            run.reason = "it computes outside its forward and backward, or forward again"
        if is_symbolic(node.meta.get("val")):
            run.reason = "a number is read from one of its tensors"
    for run in runs.values():
        if run.backward and not run.forward:
            run.reason = run.reason or "nothing of its forward is in the graph"
    whole = [run for run in runs.values() if run.forward and not run.reason]
    return whole, [run for run in runs.values() if run.reason]


def _release_shared(graph: fx.Graph, coordinates: Collection[fx.Node]) -> None:
    """Removes numbers, constants and coordinates that several blocks use from their block."""
    constant: set[fx.Node] = {*coordinates, *graph.find_nodes(op="get_attr")}
    shared: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reads = node.all_input_nodes
        if is_symbolic(node.meta.get("val")) and all(is_symbolic(n.meta.get("val")) for n in reads):
            node.meta[BLOCK] = None
        if not has_effect(node) and constant.issuperset(reads):
            constant.add(node)
            block = node.meta.get(BLOCK)
            if block is not None and any(u.meta.get(BLOCK) != block for u in node.users):
                shared.append(node)
    while shared:
        node = shared.pop()
        if node.op == "call_function" and node.meta.get(BLOCK) is not None:
            node.meta[BLOCK] = None
            shared += node.all_input_nodes


def _group_by_numbers(runs: Iterable[_BlockRun]) -> Iterable[list[_BlockRun]]:
    """Returns equal blocks in groups that read the same symbolic numbers and have equal floats."""
    groups: defaultdict[Any, list[_BlockRun]] = defaultdict(list)
    for run in runs:
        symbolic = tuple(n for n in run.outside_inputs if is_symbolic(n.meta.get("val")))
        groups[symbolic, tuple(map(repr, run.floats))].append(run)
    return groups.values()


def _split_by_use(runs: Iterable[_BlockRun]) -> Iterator[list[_BlockRun]]:
    """Yields equal blocks in groups that one subgraph can replace.

    In a group, the same results are read, and all floats that differ may become inputs.
    """
    runs = [*runs]
    if not runs:
        return
    fixed = [i for i in _find_varying_floats(runs) if not takes_number_exactly(runs[0].homes[i])]
    groups: defaultdict[Any, list[_BlockRun]] = defaultdict(list)
    for run in runs:
        if all(isinstance(n.meta.get("val"), torch.Tensor) for n in _nodes_read(run)):
            groups[run.read, tuple(repr(run.floats[i]) for i in fixed)].append(run)
        else:
            run.reason = "a result is not a tensor"
    yield from groups.values()


def _nodes_read(run: _BlockRun) -> Iterator[fx.Node]:
    """Yields the nodes of a block that outside nodes read."""
    results, gradients = run.read
    yield from (run.forward[i] for i in results)
    yield from (run.backward[i] for i in gradients)


def _find_varying_floats(runs: Sequence[_BlockRun]) -> list[int]:
    """Returns the positions of floats that are not the same in all of these blocks."""
    columns = zip(*(run.floats for run in runs), strict=True)
    return [i for i, values in enumerate(columns) if len({repr(float(v)) for v in values}) > 1]


def _put_numbers(
    node: fx.Node, args: Any, kwargs: Any, floats: Iterator[int], numbers: dict[int, fx.Node]
) -> tuple[Any, Any]:
    """Returns the operands of a node, with nodes in place of the floats that become inputs.

    Args:
        floats: counts the floats that may vary, in the order of `_BlockRun.describe`.
        numbers: the node of each float, by the float's position.
    """

    def put(value: Any, place: int | str) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)([put(v, place) for v in value])
        if _may_vary(node, value, place):
            return numbers.get(next(floats), value)
        return value

    found = tuple(put(a, place) for place, a in enumerate(args))
    return found, {k: put(v, k) for k, v in kwargs.items()}


def _draws_random_numbers(node: fx.Node) -> bool:
    return node.op == "call_function" and facts_of(node.target).draws
