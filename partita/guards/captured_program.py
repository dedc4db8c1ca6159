"""Captured programs: how a call runs a program, and what is checked and recorded before.

`CapturedProgram.run` runs the graph and stores its outputs as the step would: in the state, in
`.grad`, and in the result. Conditions, guards and answers decide if the program may run in place of
the step.

Plain tensors that the step mixes with DTensors must be equal on all ranks. A small graph computes
them (`ReplicatedInputCheck`), and ranks compare them before the first run (under `check_ranks()`
before each run). A graph's redistributions are known in advance: a run without a ledger and without
`strict()` spends no time on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd import Function

from partita.capture.block_choice import BlocksTraced
from partita.capture.conditions import Conditions, OverlapCheck
from partita.comm import (
    Record,
    RepeatedCall,
    Wire,
    check_equal_on_ranks,
    is_alone,
    user_line,
)
from partita.comm.device import accelerator_indices, default_generator
from partita.graph.backend.executor import make_graph_function
from partita.graph.graph_nodes import Note, extract_graph, is_collective, note_of
from partita.graph.program import Input, Program, ResultPlace
from partita.graph.step_forms import CapturedForms, FormSearch
from partita.graph.step_report import changes_of
from partita.layout import Fix, LayoutError
from partita.layout.text import human
from partita.tensor.aliasing import connect_copy
from partita.tensor.dtensor import as_dtensor, checksum
from partita.tensor.dtensor_gradients import clear_gradients, renew_gradient
from partita.tensor.origins import note_origin
from partita.tensor.tensor_state import current
from partita.tensor.uneven_pieces import give_own_memory, give_room

from . import Guards, Write
from .answers import Answers
from .arguments import unflatten_call


@dataclass(eq=False)
class CapturedProgram(Program):
    """A captured step: a program, with the checks that decide whether a call may run it.

    Attributes:
        replicated_inputs: the check that plain values used with DTensors are equal on all ranks.
        conditions: the checks of the inputs: numbers, gradients, tensor metadata.
        guards: the checks of the Python state that the step read at capture.
        writes: the changes of Python objects that each call repeats.
        requires_grad_writes: (index, value) of tensors whose `requires_grad` the step sets.
        given_memory: (kind, index) of inputs that get other memory in the step (`x.data = y`).
        answers: the results of branches on values that the program assumes.
        blocks: which blocks were folded, and why others were not.
        work: (op, line, mesh axes, operations) of each matrix product, for ledgers.
        captured: the program before any pass.
        budget_search: the search for a rewriting with a lower peak; None after compilation.
        overlap_check: the check whether a written input overlaps another input in memory.
        numeric_answers: a graph that computes those answers that are numbers. It runs before the
            program.
        calls: the Python numbers among the inputs of recent calls, which ranks compare from time to
            time.
        holds_writes: True until the first run: Python objects still have the values that the
            capture gave them.
    """

    replicated_inputs: ReplicatedInputCheck | None = None
    conditions: Conditions = field(default_factory=Conditions)
    guards: Guards | None = None
    writes: list[Write] = field(default_factory=list)
    requires_grad_writes: list[tuple[int, bool]] = field(default_factory=list)
    given_memory: frozenset[tuple[str, int]] = frozenset()
    answers: Answers = field(default_factory=Answers)
    blocks: BlocksTraced = field(default_factory=BlocksTraced)
    work: list[tuple[str, str, tuple[str, ...], float]] = field(default_factory=list)
    captured: CapturedForms | None = field(init=False, default=None)
    budget_search: FormSearch | None = field(init=False, default=None)
    overlap_check: OverlapCheck = field(init=False)
    numeric_answers: PrecomputeGraph | None = None
    calls: RepeatedCall = field(default_factory=lambda: RepeatedCall(compared=0))
    holds_writes: bool = True

    @cached_property
    def changes(self) -> list[Any]:
        """A `Change` for each pass. Reading this takes seconds, because the passes run again."""
        assert self.captured is not None
        return [*changes_of(self.captured)]

    @cached_property
    def _compute_numeric_answers(self) -> Callable[..., Sequence[torch.Tensor]]:
        assert self.numeric_answers is not None
        return make_graph_function(self.numeric_answers.graph, self.groups)

    def undo_writes(self) -> None:
        """Restores the Python objects that capture has changed, unless a run has changed them."""
        for write in reversed(self.writes) if self.holds_writes else ():
            write.undo()
        self.holds_writes = False

    def compare(self, tensors: Sequence[Any]) -> None:
        """Raises on all ranks if values that must be equal on all ranks differ.

        These are Python numbers, and plain tensors that are used with DTensors.
        """
        if self._numbers:
            self._compare_numbers(self._read_numbers(tensors))
        if self.replicated_inputs is not None:
            self.replicated_inputs.check(
                tensors, make_graph_function(self.replicated_inputs.precompute.graph, self.groups)
            )

    def note_call(self, tensors: Sequence[Any]) -> None:
        """Stores the Python numbers among the inputs of a call. Ranks compare them in some calls.

        `compare` compares the numbers of the first call. A number may first differ in a later call.
        An example is a learning rate that a scheduler computes from local values.
        """
        if self._numbers:
            numbers = self._read_numbers(tensors)
            if self.calls.add(numbers):
                self._compare_numbers(numbers)

    def _compare_numbers(self, numbers: tuple[float, ...]) -> None:
        said = [f"{i.name} = {n!r}" for i, n in zip(self._numbers, numbers, strict=True)]
        for wire in self.wires:
            check_equal_on_ranks(
                "compile",
                f"{'; '.join(said)}; {self.calls}",
                wire,
                fact="the ranks pass different numbers to a step",
                reason="a number is one value, equal on every rank",
                fixes=(Fix("the same number", "on every rank, or pass a sharded tensor"),),
            )

    def _read_numbers(self, tensors: Sequence[Any]) -> tuple[float, ...]:
        return tuple([float(i.number(tensors)) for i in self._numbers])

    @cached_property
    def _numbers(self) -> list[Input]:
        return [i for i in self.inputs if i.kind == "number"] if self.wires else []

    def prepare_memory(self, tensors: Sequence[Any]) -> None:
        """Adapts the program to the storages of the state. Call it after a storage has changed.

        Uneven shards get room for their padding, and `overlap_check` records the new storages.
        """
        for i, border in self.entering.items():
            if border.in_place:
                held = tensors[self.inputs[i].index]
                give_room(held.grad if self.inputs[i].kind == "gradient" else held)
        self.overlap_check.note_held(tensors)

    def _give_own_memory(
        self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None
    ) -> bool:
        """Gives new memory to inputs whose memory the step replaces, as by `x.data = y`.

        The graph writes into the memory that it finds, which tensors outside of the step may share.

        Args:
            inputs: the local values of the inputs, which share their memory, too.

        Returns:
            True if an input has new memory now.
        """
        moved = False
        for i, given in enumerate(self.inputs):
            if (given.kind, given.index) in self.given_memory:
                held = tensors[given.index]
                held = held.grad if given.kind == "gradient" else held
                is_alias = inputs is not None and inputs[i] is not held
                moved |= give_own_memory(held, 1 + is_alias)
        return moved

    def run(self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None) -> Any:
        """Runs the program in a call, and stores its outputs where the step would store them.

        Args:
            tensors: the call's leaves: tensors and numbers of the state and the arguments.
            inputs: the graph's inputs, as for `run_graph`; None reads them from `tensors`.

        Returns:
            The step's result. If the program has assumed wrong results of branches, an
            `OtherAnswers`: nothing has changed, not even the state of random generators.
        """
        reads = tensors
        if self.view_copies:
            reads, inputs = [*tensors], None
            for i in self.view_copies:
                reads[i] = current(tensors[i])
        if self.given_memory and self._give_own_memory(reads, inputs):
            inputs = None
        if self.numeric_answers is not None:
            numbers = self.numeric_answers.compute(reads, self._compute_numeric_answers)
            otherwise = self.answers.compare_numbers([int(t) for t in numbers])
            if otherwise is not None:
                return otherwise
        if self.answers.values:
            generators = map(default_generator, self.draws_on)
            before = [(generator, generator.get_state()) for generator in generators]
            found = self.run_graph(reads, inputs)
            at = [output.kind for output in self.forward_outputs].index("answers")
            otherwise = self.answers.compare(found[at].tolist())
            if otherwise is not None:
                for generator, state in before:
                    generator.set_state(state)
                return otherwise
        else:
            found = self.run_graph(reads, inputs)
        held = {i: tensors[i].grad for i in self.held_gradients}
        for output, new in zip(self.forward_outputs, found, strict=True) if held else ():
            if output.kind == "held gradient":
                new = new if output.spec is None else as_dtensor(new, output.spec)
                renew_gradient(held[output.index], new)
        clear_gradients([tensors[i] for i in self.cleared])
        leaves: list[Any] = []
        made: dict[int, Any] = {}
        value: Any
        for i, (output, value) in enumerate(zip(self.forward_outputs, found, strict=True)):
            if output.spent is not None:
                message, places = output.spent
                with local_ops(), torch.enable_grad():
                    takes = [torch.empty(0, requires_grad=True), *(tensors[n] for n in places)]
                    value = _SpentHistory.apply(message, [value.detach()], *takes)
            if output.asks_gradient:  # for an input, an alias and not the caller's tensor
                value = (value.detach() if i in self.returned_inputs else value).requires_grad_()
            if output.spec is not None:
                value = as_dtensor(
                    value.detach() if i in self.returned_inputs else value, output.spec
                )
            if output.is_parameter:
                value = nn.Parameter(value, output.asks_gradient)
            if output.spec is not None and output.spec.has_noted_origin:
                note_origin(value, output.spec.wire)
            if output.scalar and isinstance(value, torch.Tensor):  # else a constant of the step
                value = value.item()
            if output.retains_grad and value.requires_grad:  # else its history was used up
                value.retain_grad()
            if output.held >= 0:
                value = held[output.held]
            made[output.tensor] = value
            if output.kind == "result":
                leaves.append(value)
            elif output.kind == "gradient":
                tensors[output.index].grad = value
            elif output.kind == "left gradient":
                made[output.index].grad = value
            elif output.kind == "slot":
                assert output.slot is not None
                output.slot.put(value if output.index < 0 else tensors[output.index])
        for output in self.forward_outputs:
            if output.view_of is not None:
                source, index, view, graded = output.view_of
                bases: dict[str, Any] = {"output": made, "input": tensors, "gradient": held}
                base = bases[source][index]
                connect_copy(made[output.tensor], base, view, graded)
        for write in self.writes:
            write.redo()
        self.holds_writes = False
        for i, flag in self.requires_grad_writes:
            tensors[i].requires_grad_(flag)
        of: dict[str, Any] = {"result": leaves, "input": tensors, "gradient": held}
        whole = [of[c.source][c.index] if type(c) is ResultPlace else c for c in self.constants]
        return unflatten_call(whole, self.result)


class _SpentHistory(Function):
    """The autograd node of an output whose history is spent. Its backward raises an error."""

    @staticmethod
    def forward(
        ctx: Any, message: str, value: list[torch.Tensor], *takes: torch.Tensor
    ) -> torch.Tensor:
        ctx.message = message
        return value[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(ctx.message)


# -- the check of replicated inputs ----------------------------------------------------------------


@dataclass(eq=False)
class PrecomputeGraph:
    """A copied part of a captured graph that computes some values before the program runs.

    It writes nothing.

    Attributes:
        graph, inputs: the module with the part, and its inputs.
    """

    graph: fx.GraphModule
    inputs: list[Input]

    def compute(
        self, tensors: Sequence[Any], run: Callable[..., Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """Returns the values that `run` computes from a call's leaves `tensors`; it runs the graph.

        The state of random generators does not change.
        """
        given = [i.local_value(tensors) for i in self.inputs]
        borders = [i.padding for i in self.inputs]
        given = [x if b is None else b.pad_input(x) for x, b in zip(given, borders, strict=True)]
        with (
            torch.random.fork_rng(devices=accelerator_indices(given)),
            local_ops(),
            torch.no_grad(),
        ):
            return run(*given)


@dataclass(eq=False)
class ReplicatedInputCheck:
    """The check that plain tensors which a step mixes with DTensors are equal on all ranks.

    In eager code, ranks compare a mixed tensor when a line first uses it. During capture there are
    no values, so the calls that compute the tensor are copied into a separate graph.

    Attributes:
        precompute: the graph that computes the values.
        said: for messages, the name of each value ("" if the step computes it) and the user's line.
        wires: the wire of each value, on whose ranks it must be equal.
    """

    precompute: PrecomputeGraph
    said: list[tuple[str, str]]
    wires: list[Wire]

    def check(self, tensors: Sequence[Any], run: Callable[..., Sequence[torch.Tensor]]) -> None:
        """Raises on all ranks if a plain tensor that is used with DTensors differs on a rank.

        Args:
            tensors: the call's leaves: tensors and numbers of the state and the arguments.
            run: a function that runs the graph that computes the values.
        """
        if all(map(is_alone, self.wires)):  # a dry mesh, whose device may not exist
            return
        values = self.precompute.compute(tensors, run)
        for wire in dict.fromkeys(self.wires):
            mine = [i for i, w in enumerate(self.wires) if w is wire]
            checksums = wire.gather_ints(
                tuple(n for i in mine for n in checksum(values[i])), "plain tensors of a program"
            )
            for rank, theirs in enumerate(checksums):
                for place, i in enumerate(mine):
                    at = slice(3 * place, 3 * place + 3)
                    if theirs[at] != checksums[0][at]:
                        raise _make_difference_error(*self.said[i], rank)


def _make_difference_error(name: str, line: str, rank: int) -> LayoutError:
    what = f"{name}, a plain tensor" if name else "a plain tensor that the step makes,"
    return LayoutError(
        f"compile: {what} next to DTensors, differs between ranks 0 and {rank}",
        place=line,
        reason="a plain tensor counts as one whole value, equal on every rank",
        fixes=(
            Fix("pt.DTensor.from_local(t, mesh, placements)", "if each rank has its own piece"),
            Fix("pt.distribute_tensor(t, mesh, placements)", "to use rank 0's value on all ranks"),
        ),
    )


def extract_compared(
    made: fx.GraphModule,
    given: Mapping[fx.Node, Input],
    values: Sequence[tuple[fx.Node, Wire]],
    line: str,
) -> ReplicatedInputCheck | None:
    """Returns a check that some values in a graph are equal on all ranks; None if there are none.

    The check has a copy of the nodes that compute these values.

    Args:
        made: the module with the graph.
        given: the graph's inputs, by node.
        values: (node, wire) of each value; erased nodes are skipped.
        line: the user's line, for values that are inputs.
    """
    there = set(made.graph.nodes)
    values = [(n, w) for n, w in dict.fromkeys(values) if n in there]
    if not values:
        return None
    return ReplicatedInputCheck(
        extract_values(made, given, [n for n, _ in values]),
        [(given[n].name, line) if n in given else ("", _line_of_node(n)) for n, _ in values],
        [w for _, w in values],
    )


def extract_values(
    made: fx.GraphModule, given: Mapping[fx.Node, Input], values: Sequence[fx.Node]
) -> PrecomputeGraph:
    """Returns a copy of the part of a graph that computes `values`.

    Args:
        made: a module whose graph has no in-place writes.
        given: the graph's inputs, by node.
    """
    needed = set(values)
    for node in reversed(made.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    graph = extract_graph(made, needed, values)
    return PrecomputeGraph(graph, [i for n, i in given.items() if n in needed])


def extract_answers(program: CapturedProgram, numbers: Sequence[int]) -> PrecomputeGraph:
    """Returns a graph that computes the answers (results of branches) with the indices `numbers`.

    It runs before the program.
    """
    graph = program.graph.graph
    at = [output.kind for output in program.outputs].index("answers")
    (end,) = graph.find_nodes(op="output")
    answers = end.args[0][at].args[0]
    given = dict(zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True))
    return extract_values(program.graph, given, [answers[i] for i in numbers])


def _line_of_node(node: fx.Node) -> str:
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return note_of(node).source


# -- events for ledgers, strict() and check_ranks() ------------------------------------------------


def list_sent_moves(program: Program) -> list[Record]:
    """Returns a ledger record for each redistribution, and each padding, in a program's run."""
    found: dict[Any, Record] = {}
    for i, border in program.entering.items():
        given = program.inputs[i]
        for axes, nbytes in border.moves(given.tensor.element_size()):
            found[given, axes] = Record(
                *("all_gather", axes, nbytes, given.name, "", "padding", border.wire.rank)
            )
    for node in program.graph.graph.nodes:
        if is_collective(node):
            note = note_of(node)
            wire, axes = program.groups[str(node.args[-1])]
            # On some backends a redistribution is several collectives.
            found.setdefault(
                (note.move, note.phase, note.reason) if note.move else id(note),
                _record_of_note(note, wire, axes),
            )
    return [*found.values()]


_SAME_IN_RECORD = ("nbytes", "op", "source", "reason", "before", "after")


def _record_of_note(note: Note, wire: Wire, axes: tuple[str, ...]) -> Record:
    same: dict[str, Any] = {name: getattr(note, name) for name in _SAME_IN_RECORD}
    return Record(note.kind or "collective", note.axes or axes, rank=wire.rank, **same)


def record_moves(program: Program) -> None:
    """Adds the redistributions of a program, which is going to run, to the open ledgers.

    Raises:
        LayoutError: a redistribution is implicit, and `strict()` forbids it.
    """
    scope = program.scope
    if scope is None or not scope.busy:
        return
    if program.carried is None:
        program.carried = list_sent_moves(program)
    if scope.strict:
        for move in program.carried:
            if move.reason == "implicit":
                raise _make_strict_error(move)
    for log in scope.ledgers:
        log.moves += program.carried


def announce_run(program: CapturedProgram, title: str, tensors: Sequence[Any]) -> None:
    """Reports that a program is about to run: to ledgers, `strict()` and `check_ranks()`.

    They get the same records as from an eager step.

    Args:
        title: the name of the step in errors.
        tensors: the call's leaves: tensors and numbers of the state and the arguments.

    Raises:
        LayoutError: `strict()` forbids a redistribution, or ranks differ under `check_ranks()`.
    """
    assert program.scope is not None
    if program.scope.check is not None:
        for wire in program.wires:
            wire.check(f"compiled {title} runs {program.key[:16]} at {user_line()}")
        program.compare(tensors)
    record_moves(program.runs)
    for log in program.scope.ledgers:  # ledgers count repeated matrix products
        for op, source, axes, operations in program.work:
            log.note_work(program.wires[0].rank, op, source, axes, operations)


def _make_strict_error(move: Record) -> LayoutError:
    return LayoutError(
        f"{move.op} needs an implicit {move.kind} over {' '.join(move.axes)}, and strict() "
        "forbids it",
        place=move.source,
        operands=(f"{move.before}  would become  {move.after}",) if move.before else (),
        reason="strict() allows only moves that the program requests, also in a graph",
        fixes=(
            Fix("x.redistribute(...)", f"before {move.op}: {move.kind} {human(move.nbytes)}"),
            Fix("with pt.strict(False): ...", "around the step"),
        ),
    )
