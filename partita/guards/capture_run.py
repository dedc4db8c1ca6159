"""The capture of a step that uses Python objects: it is run until one run gives a complete graph.

A *run* is one execution of the step over fake tensors. `CaptureRun` traces it (`capture.tracer`),
and records what the step reads from and writes to Python objects. `capture_step` repeats runs,
because a run may show that another one is needed: for example, that a float must be a constant.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from partita.capture.block_choice import BlockChoice, BlocksTraced
from partita.capture.capture_context import (
    taking_turns,
    without_function_modes,
)
from partita.capture.conditions import (
    Conditions,
    GradientCondition,
    GradientObjects,
    kind_of_gradient,
)
from partita.capture.equal_calls import node_of
from partita.capture.fakes import is_symbolic
from partita.capture.graph_inputs import WITHOUT_GRADIENT, GraphInputs
from partita.capture.graph_outputs import list_trained, program_of_trace
from partita.capture.tracer import Tracer
from partita.comm import user_line
from partita.graph.backend.executor import make_graph_function
from partita.graph.errors import (
    CaptureError,
    UnsureOfWrites,
    explain_error,
    is_of_number,
    not_an_input,
    not_captured,
    user_line_of,
)
from partita.graph.graph_nodes import has_effect
from partita.graph.program import Input
from partita.graph.slots import Slot
from partita.layout import Fix, LayoutError

from . import Guards, ReadRecord, Write
from .answers import (
    NUMBER,
    Answer,
    AskedQuestions,
    CapturedNumbers,
    Guesses,
    PlainNumbers,
    StepRaises,
    ValuesWanted,
    as_symbol,
    gate_writes,
    guess_by_kind,
)
from .arguments import (
    classes_of_call,
    flatten_call,
    is_flattened,
    objects_of_call,
    refuse_unflattenable,
    share_repeated,
    unflatten_call,
)
from .bytecode import compares_identities, compares_objects, writes_items
from .captured_program import (
    CapturedProgram,
    extract_answers,
    extract_compared,
    extract_values,
)
from .guards import ReadInputs, find_first_leaves
from .inputs import State, names_of_call, tensors_of_call
from .outputs import (
    InputAttributes,
    ModuleAttributes,
    check_result,
    contains_fake,
    contains_new_fake,
    has_only_known_fakes,
    make_left_error,
    unrepeated_write_error,
    walk_reachable,
)
from .predicted_values import PredictedValues, ValuesOfCall, gather_small_integers
from .record import exclusive_access
from .slot_homes import PlaceAsItem
from .values import (
    HUGE,
    MISSING,
    PLAIN,
    count_items,
    has_type,
    is_container,
    items_of,
    walk_containers,
)

# -- runs until one is complete --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """A call of a step that is to be captured.

    Attributes:
        step, args, kwargs: the step, and the arguments of the call.
        state: the modules, optimizers and tensors that the step reaches.
        guesses: assumed answers to branches on tensor values.
        values: known values of the call's tensors, from which answers are computed.
        blocks: the choice of modules that are blocks. Equal blocks are traced as one subgraph.
        counts_apart: True if the parameters of one optimizer may have different step counts.
    """

    step: Callable[..., Any]
    args: Any
    kwargs: Any
    state: State
    guesses: Guesses
    values: ValuesOfCall
    blocks: BlockChoice
    counts_apart: bool


@taking_turns()
def capture_step(request: CaptureRequest) -> CapturedProgram:
    """Captures a step: runs it over fake tensors until one run gives a complete graph.

    The step runs again if a run has shown that an assumption was wrong. Examples: the step reads a
    `.grad` that was assumed unread, or a float must be a constant.

    Raises:
        ValuesWanted: more values must be computed, for another capture.
        CaptureError: a graph cannot express what the step does. The error names the user's line.
        NewStateFound: a run has read tensors, modules or optimizers that `request.state` lacks.
            Capture again with the error's `state`.
        StepRaises: the step raises an error of its own, such as a ValueError. If a CaptureError
            explains it, that is raised instead. It is not if answers are known for this call
            (`Guesses.certain`).
    """
    # In the first run each tensor without a gradient gets a mark as its gradient, which shows
    # whether the step reads it. Tensors whose marks were read get none in the next run.
    state, plain = request.state, PlainNumbers()
    state.refuse_cached_values()
    unmarked: set[int] = set()
    tried = request  # with the guesses of the next run
    first_failure: tuple[Exception, CaptureRun] | None = None
    while True:
        run = CaptureRun(tried, unmarked, plain)
        try:
            program = trace_once(run)
        except Exception as error:
            if (more := state.find_more(run.record.places.values())) is not None:
                raise more from error
            first_failure = first_failure or (error, run)
            other_guesses = run.questions.other_way()
            if other_guesses is not None:
                tried = replace(request, guesses=other_guesses)
                continue
            error, run = first_failure
            if isinstance(error, LayoutError):
                _note_guards(error, run)
            has_symbols = run.numbers.traced or run.questions.reads
            is_final = isinstance(error, LayoutError) and not is_of_number(error.__cause__)
            if is_final or plain.why or not has_symbols:
                if run.raised and (request.guesses.certain or not isinstance(error, LayoutError)):
                    raise StepRaises(error, run.guards(refused=True)) from error
                raise error
            # Symbolic numbers cannot do all that Python's can: try once more with plain floats.
            plain.why = str(error).strip().split("\n")[0] or type(error).__name__
            tried, first_failure = request, None
            continue
        is_more = run.meets_unknown_tensors or run.other_tensors or run.record.reaches_optimizers()
        if is_more and (more := state.find_more(run.record.places.values())) is not None:
            run.undo()
            raise more
        run.check_other_tensors()
        if program is not None and not run.numbers.make_read_zeros_constant():
            if run.writes:
                repetition = CaptureRun(tried, unmarked, plain)
                try:
                    trace_once(repetition)
                    _check_repeats(run, repetition)
                except LayoutError as error:
                    _note_guards(error, run)
                    raise
            if _attach_guards(run, program):
                return program
        run.undo()
        unmarked |= run.read_marks


def _note_guards(error: LayoutError, run: CaptureRun) -> None:
    """Attaches to an error the guards of what the step had read until then."""
    if isinstance(error, CaptureError):
        error.guards = run.guards(refused=True)


def trace_once(run: CaptureRun) -> CapturedProgram | None:
    """Returns `run.program()`, and frees what tracing has stored for the run."""
    try:
        return run.program()
    finally:
        run.numbers.env.answer = lambda question: None  # it refers to the run
        run.tracer.forget()


def _check_repeats(run: CaptureRun, other: CaptureRun) -> None:
    """Raises CaptureError if `other`, a second run, changes again what `run` has changed.

    A counter would change again, and a graph would not count. A cache, or a value that each call
    sets to the same, is written once.
    """
    other.undo()
    repeated = {w.place.identity for w in other.writes}
    growing = {id(w.place.home) for w in other.writes if w.before is MISSING}
    for write in run.writes:
        grows = write.before is MISSING and id(write.place.home) in growing
        if grows or write.place.identity in repeated:
            run.undo()
            raise run.make_unrepeated_write_error(write)


def _attach_guards(run: CaptureRun, program: CapturedProgram) -> bool:
    """Gives a program its guards, made from the state before the step, and its writes.

    Returns:
        False if code may compare a traced float by `is`. Another run is needed, in which the float
        is a constant.
    """
    run.undo()
    program.guards = run.guards()
    if run.numbers.make_constants(program.guards.shared_numbers):
        return False
    for write in run.writes:
        write.redo()
    program.writes = run.writes
    return True


# -- one run ---------------------------------------------------------------------------------------


_UPDATED_KINDS = ("parameter", "buffer", "optimizer", "gradient", "mark")


class CaptureRun:
    """One run of a step over fake tensors, which traces its graph and records what it reads.

    Args:
        request: the call to capture.
        unmarked: the indices (among the leaves of the call) of tensors that get no mark. A mark is
            a fake gradient that shows whether the step reads `.grad`.
        plain: the floats that stay Python numbers.

    Attributes:
        record: the record of what the step reads from Python objects.
        writes: the writes to Python objects, which each call must repeat.
        other_tensors: (tensor, name) of real tensors that the step may compare by identity with a
            fake.
        slots, values: where the step's tensors are stored, and where its plain Python values are.
        inputs, outputs: the inputs and outputs of the graph.
        read_marks: the indices of tensors whose marks the step has read.
        questions: the branches on values.
        numbers: the floats that the step reads.
        raised: True if the step has raised an error of its own.
        meets_unknown_tensors: True if a function was called on a tensor that is not an input.
    """

    def __init__(self, request: CaptureRequest, unmarked: set[int], plain: PlainNumbers):
        self.step, self.args, self.kwargs = request.step, request.args, request.kwargs
        self.state = state = request.state
        self.record = ReadRecord(state.names_by_id())
        self.writes: list[Write] = []
        self._tensor_writes: list[Write] = []
        self.slots, self.values = [*state.slots, *state.optimizer_slots()], state.values
        self._slot_identities = frozenset(slot.identity for slot in self.slots)
        self.inputs = GraphInputs(
            tensors_of_call(self.slots, self.args, self.kwargs),
            names_of_call(self.slots, self.args, self.kwargs),
            unmarked,
        )
        modules, optimizers = state.modules.values(), state.optimizers
        choice = request.blocks, request.counts_apart
        self.tracer = Tracer(self.inputs, self.slots, modules, optimizers, *choice)
        self.outputs = self.tracer.outputs
        self.read_marks: set[int] = set()
        self.unmarked = unmarked
        self.questions = AskedQuestions(request.guesses)
        self._values_of_call = request.values
        self._wanted: ValuesWanted | None = None
        numbers: Any = self.inputs.mode.shape_env
        numbers.answer = self._answer
        self.numbers = CapturedNumbers(numbers, plain)
        self.attributes = ModuleAttributes(state)
        self._input_attributes = InputAttributes(self.record)
        self.meets_unknown_tensors = self._returns_unknown_tensor = False
        self.other_tensors: list[tuple[torch.Tensor, str]] = []

    def program(self) -> CapturedProgram | None:
        """Runs the step, and returns its program.

        Returns None if the step has read a mark (`read_marks`). The caller must then start another
        run.
        """
        tracer = self.tracer
        self._error_line, self._called_last, self.raised = "", "", False
        try:
            made = tracer.trace(self._trace_step)
        except Exception as error:
            explained = explain_error(error, self._error_line, self._called_last)
            if explained is error:
                raise
            raise explained from error
        if self._wanted is not None:
            self._want_values(self._wanted, made)
            return None
        tracer.check(made)
        blocks = tracer.fold(made, "the step reads values of tensors" * bool(self.questions.values))
        try:
            program = self._make_program(made, blocks.traced)
        except UnsureOfWrites:
            tracer.inline_blocks(made, blocks)
            program = self._make_program(made, blocks.traced)
        self.numbers.env.forget()
        return program

    def _want_values(self, wanted: ValuesWanted, made: fx.GraphModule) -> None:
        """Gives `wanted` a function that computes the values that the step read, and raises it.

        Returns without an error if the values depend on marks (`read_marks`): another run is then
        needed.
        """
        inputs = self.inputs
        if len(self._values_of_call.reads) >= len(self.questions.reads):  # all are known
            raise not_captured(
                "the step reads a value that is not computed from numbers that it has read",
                "during capture no other values are known",
                Fix("return the tensor", "and read it outside"),
                place=self.questions.last_line,
            )
        _drop_all_but(made.graph, made.graph.find_nodes(op="output")[0].all_input_nodes)
        made = self.tracer.functionalize(made)
        given = dict(zip(made.graph.find_nodes(op="placeholder"), inputs.all, strict=True))
        side = extract_values(made, given, made.graph.find_nodes(op="output")[0].args[0])
        self.read_marks = {given.index for given in side.inputs if given.kind == "mark"}
        if self.read_marks:
            return
        wires = self.tracer.wires
        groups = {name: (t.real, a) for t in wires.values() for name, a in t.groups.items()}
        run = make_graph_function(side.graph, groups)
        known, given_all, real = self._values_of_call, [*inputs.all], [*wires]

        def compute(tensors: Sequence[Any]) -> ValuesOfCall:
            reads = tuple(t.item() for t in side.compute(tensors, run))
            # The ranks' integers are gathered once for a call.
            held = known if known.reads else gather_small_integers(given_all, tensors, real)
            return replace(held, reads=reads)

        wanted.compute = compute
        raise wanted

    def _make_program(self, made: fx.GraphModule, blocks: BlocksTraced) -> CapturedProgram | None:
        """Returns the program of a traced graph; None if the step has read marks.

        Raises:
            UnsureOfWrites: it is unclear what calls of folded blocks write, so they must be
                inlined.
        """
        tracer, inputs = self.tracer, self.inputs
        read = tracer.list_read_inputs(made)
        self.read_marks = {given.index for given in read if given.kind == "mark"}
        if self.read_marks:
            return None
        self.read_gradients = {i.index for i in read if i.kind == "gradient"} | self.unmarked
        made = tracer.functionalize(made)
        with inputs.mode:
            if self.questions.values:
                gate_writes(made.graph, self.questions.answers.values)
            program, given, admitted = program_of_trace(
                made, inputs, tracer.wires, self.outputs, CapturedProgram
            )
            program.conditions = self._collect_conditions()
            program.replicated_inputs = extract_compared(made, given, admitted, user_line())
        for i in map(program.inputs.__getitem__, program.written):
            if i.kind != "gradient" and i.index in program.view_copies:
                raise not_captured(
                    f"the step writes to {i.name}, a view that has another layout than its base",
                    "the view has its own memory, and a graph cannot write to the base",
                    Fix("x = x.clone()", "before the step, or make the view in the step"),
                )
        program.answers, program.requires_grad_writes = self.questions.answers, self._trained
        program.given_memory = self._given_memory
        if program.answers.numeric:
            program.numeric_answers = extract_answers(program, program.answers.numeric)
        program.blocks = blocks
        program.work = [work for wire in tracer.wires.values() for work in wire.work]
        return program

    def _collect_conditions(self) -> Conditions:
        numbers, facts = self.numbers.conditions(), self.tracer.facts.conditions()
        counts = self.tracer.equal_counts
        return Conditions((*numbers, *facts, *self._gradient_conditions(), *counts))

    def _gradient_conditions(self) -> Iterator[GradientCondition | GradientObjects]:
        """Yields the conditions of the gradients that the step reads: their metadata, and which
        tensors share one.
        """
        leaves = self.inputs.leaves
        first = {i.index: i.index for i in self.inputs.all if i.kind == "gradient"}
        first |= {index: shared.index for index, shared in self.inputs.shared_gradients.items()}
        read = [index for index in first if first[index] in self.read_gradients]
        if len(read) > 1:
            yield GradientObjects(read, [read.index(first[index]) for index in read])
        for given in self.inputs.all:
            if given.kind not in WITHOUT_GRADIENT and given.index in self.read_gradients:
                kind = kind_of_gradient(leaves[given.index])
                yield GradientCondition(given.name, given.index, kind)

    # -- the run -----------------------------------------------------------------------------------

    def _trace_step(self) -> list[Any]:
        """Runs the step and returns the outputs of the graph."""
        recorder = self.tracer.recorder
        recorder.note_read = self._note_read
        recorder.follows_from_integers = partial(self._follows_from_data, only_integers=True)
        try:
            self._run_step()
        except ValuesWanted as wanted:
            self._wanted = wanted
            return [*self.questions.reads]
        finally:
            recorder.note_read = lambda number, of: None
            recorder.follows_from_integers = lambda number: False
        return self.outputs.values

    def _run_step(self) -> None:
        tracer = self.tracer
        pairs = [*zip(tracer.nodes, self.inputs.all, strict=True)]
        self._kinds = {n: i.kind for n, i in pairs}
        with ExitStack() as stack:
            parts = [part for module in tracer.modules for part in module.modules()]
            stack.enter_context(exclusive_access(parts))  # fakes replace their tensors
            stack.enter_context(self.attributes.restored())
            copy_attributes = self._input_attributes.copy
            stack.enter_context(tracer.tracing(self._make_symbolic_number, copy_attributes))
            self._predicted = PredictedValues(
                tracer.recorder.graph, tracer.root, dict(pairs), tracer.wires, self._values_of_call
            )
            self._number_slots = stack.enter_context(self._swap_numbers())
            args, kwargs = self._stand_in_arguments()
            stack.enter_context(self._undo_writes_on_error())
            for optimizer in self.state.optimizers.values():
                self.record.watch_new(optimizer.param_groups, "param_groups")
            self.record.watch_new((args, kwargs), "argument")
            recording = self.record.recording(self.step, self._list_plain_arguments())
            following = tracer.following_functions(bool(self.numbers.plain.why))
            try:
                with following as functions, recording:
                    result = self.step(*args, **kwargs)
            except Exception as error:
                self._error_line, self._called_last = user_line_of(error), tracer.called_last
                self.raised = not isinstance(error, LayoutError)
                if self.raised:  # perhaps because it did not find an argument by identity
                    check_arguments((self.args, self.kwargs), self.record)
                raise
            check_arguments((self.args, self.kwargs), self.record)
            self.other_tensors = self._list_compared_tensors()
            self._input_attributes.check_unchanged()
            functions.check_data()
            self.outputs.separate_data = functions.separate_data
            self._given_memory = frozenset(
                (given.kind, given.index)
                for given, fake in zip(self.inputs.all, self.inputs.fakes, strict=True)
                if functions.is_given_memory(fake)
            )
            self.meets_unknown_tensors = functions.meets_unknown_tensors
            self._collect_writes()
            with torch.no_grad():
                self._collect_outputs(result)
            functions.copy_back()
            tracer.finish_outputs()
            if self.questions.values:
                self.outputs.add_unreturned("answers", self.questions.values)

    def _note_read(self, number: Any, of: torch.Tensor) -> None:
        if is_symbolic(number) and not number.node.has_hint() and node_of(of) is not None:
            self._predicted.note_read(self._node_of_number(number), len(self.questions.reads))
            self.questions.reads.append(number)

    def _answer(self, question: Any) -> Answer | None:
        number = as_symbol(question)
        # Floats of the data, and floats that follow from them, differ in each call.
        if not isinstance(number, torch.SymBool) and not self._follows_from_data(
            number, only_integers=isinstance(number, torch.SymFloat)
        ):
            return None
        return self.questions.answer(question, self._predict_answer)

    def _follows_from_data(self, number: Any, only_integers: bool = False) -> bool:
        """True if a number depends only on arguments and similar inputs, not on what steps update.

        A number that depends on updated state would differ in each call, and need another program.

        Args:
            only_integers: if True, the arguments must be integers or bools, such as labels and
                masks.
        """
        ahead, done = [self._node_of_number(number)], set()
        while ahead:
            node = ahead.pop()
            if node in done:
                continue
            done.add(node)
            kind, value = self._kinds.get(node, ""), node.meta.get("val")
            if kind in _UPDATED_KINDS:
                return False
            is_whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
            if kind and only_integers and not is_whole:
                return False
            ahead += node.all_input_nodes
        return True

    def _node_of_number(self, number: Any) -> fx.Node:
        mode = get_proxy_mode()
        assert mode is not None
        node: fx.Node = get_proxy_slot(number, mode.tracer).force().node
        return node

    def _predict_answer(self, question: Any) -> Answer | None:
        """Returns the likely answer to a branch on a value; None if nothing predicts it.

        It is a guess. If it is right, it saves a run and a capture.
        """
        node = self._node_of_number(question)
        kind = question.node.pytype
        try:
            found: Answer = kind(self._predicted.find_value(node))
            return found
        except Exception:  # a guess raises nothing
            return guess_by_kind(node) if kind is bool else None

    def _make_symbolic_number(
        self, name: str, value: float, home: Any = None, path: Any = (), index: int = -1
    ) -> Any:
        """Returns a symbolic float, an input of the graph, for `value`; or `value` itself."""
        given = Input(name, "number", NUMBER, index, home, tuple(path))
        found = self.numbers.stand_in(given, value)
        if found is not value:
            self.inputs.add_made(given)
        return found

    def _stand_in_arguments(self) -> Any:
        """Returns the step's arguments with fakes for tensors and symbolic floats for floats."""
        leaves, structure = flatten_call((self.args, self.kwargs))
        first = len(self.inputs.leaves) - len(leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, float):
                leaves[i] = self._make_symbolic_number(f"argument[{i}]", leaf, index=first + i)
            else:
                refuse_unflattenable(f"argument[{i}]", leaf)
                leaves[i] = self.inputs.stand_in(leaf)
        call = self.args, self.kwargs
        made = share_repeated(call, unflatten_call(leaves, structure), {})
        self._made_for_arguments = {id(leaf) for leaf in pytree.tree_leaves(made)}
        return made

    @contextmanager
    def _swap_numbers(self) -> Iterator[list[tuple[Slot, Any]]]:
        """Puts symbolic floats into variables inside the `with` block; yields (slot, float)."""
        found = [(slot, slot.value) for slot in self.values if isinstance(slot.value, float)]
        try:
            held = []
            for slot, value in found:
                slot.put(self._make_symbolic_number(slot.name, value, slot))
                held.append((slot, slot.value))
            yield held
        finally:
            for slot, value in found:
                slot.put(value)

    def _list_plain_arguments(self) -> list[tuple[str, Any]]:
        """Returns (name, value) of leaves that are no tensors, and of the classes of containers."""
        leaves, structure = flatten_call((self.args, self.kwargs))
        kinds = [(kind.__name__, kind) for kind in classes_of_call(structure)]
        named = ((f"argument[{i}]", v) for i, v in enumerate(leaves))
        return [*kinds, *((name, v) for name, v in named if not isinstance(v, torch.Tensor))]

    # -- what the step writes ----------------------------------------------------------------------

    @contextmanager
    def _undo_writes_on_error(self) -> Iterator[None]:
        """On an error, undo all that the step has written; otherwise only its writes of tensors."""
        try:
            yield
        except BaseException:
            known = self._ids_known()
            for write in [*self.record.snapshots.find_writes()]:
                if _must_be_kept(write, known):
                    write.undo()
            raise
        for write in self._tensor_writes:
            write.undo()

    def guards(self, refused: bool = False) -> Guards:
        """Returns guards that expect the current values of all Python state that the step has read.

        Args:
            refused: True if the capture has failed. The guards then do not compare which tensor a
                place holds, only that it holds one.
        """
        numbers = [given for given, _ in self.numbers.met if given.home is not None]
        leaves, slots, written = dict[int, int](), frozenset[Any](), frozenset[int]()
        if not refused:
            leaves, slots = find_first_leaves(self.inputs.leaves), self._slot_identities
            homes = [w.place.home for w in (*self.writes, *self._tensor_writes)]
            # A container that the step leaves somewhere is compared by identity.
            left = chain.from_iterable(walk_reachable(w.after) for w in self.writes)
            written = frozenset(map(id, (*homes, *filter(is_container, left))))
        inputs = ReadInputs(leaves, slots, numbers, written)
        with without_function_modes():  # which would intercept reads of tensors
            places = self.state.guarded_places()
            call = None if refused else (self.args, self.kwargs)
            return self.record.make_guards(inputs, places, call)

    def check_other_tensors(self) -> None:
        """Raises CaptureError if the step may compare an input with `is`, and get a wrong result.

        One side of the comparison would be the fake, and the other side the real tensor: an object
        may hold it in a place where capture cannot put the fake.
        """
        if self._returns_unknown_tensor:
            raise not_an_input("")
        leaves = {id(t) for t in self.inputs.leaves if isinstance(t, torch.Tensor)}
        name = next((name for t, name in self.other_tensors if id(t) in leaves), None)
        if name is not None:
            raise not_captured(
                f"the step reads the tensor {name} from a place where no fake can replace it",
                "the step may compare tensors by identity, and would see two objects for one "
                "tensor",
                Fix(
                    "self.t = t",
                    "store it in an attribute of a module or an object, or in a variable",
                ),
                place="",
            )

    def _list_compared_tensors(self) -> list[tuple[torch.Tensor, str]]:
        """Returns the real tensors (of `_find_other_tensors`) that code may compare by identity.

        Code does so by `is`, `id`, and lookups in sets and dictionaries. `==`, and `in` of a list,
        call an operator unless both are one object, and the operator refuses a tensor that is not
        an input.
        """
        codes, hashed = self.record.codes.values(), self.record.hashed
        asks = self.record.compares_identities
        # If calls are not watched, neither are hashes.
        asks = asks or (not self.record.sees_calls and any(map(compares_objects, codes)))
        if not (asks or hashed):
            return []
        return [(t, name) for t, name in self._find_other_tensors() if asks or id(t) in hashed]

    def _find_other_tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Yields (tensor, name) of real tensors in read places, while fakes are in slots."""
        # Fakes of inputs have their attributes.
        attributes = {id(given.tensor.__dict__) for given in self.inputs.all}
        for place in self.record.places.values():
            value = place.value
            if id(place.home) in attributes and has_type(value, torch.Tensor):
                continue
            for t, name in walk_containers(value, place.name):
                if _is_real(t):
                    yield t, name

    def undo(self) -> None:
        """Restores the Python objects that the step has changed during the run."""
        for write in reversed(self.writes):
            write.undo()

    def _collect_writes(self) -> None:
        """Finds what the step has written outside its slots: `writes`, and tensors in attributes.

        Raises:
            CaptureError: a call could not repeat the write.
        """
        seen = [
            *self.slots,
            *self.attributes.list_left_tensors(self._slot_identities),
            *(slot for slot, _ in self._number_slots),
        ]
        slots = {slot.identity for slot in seen}
        self._known = self._ids_known()
        for write in self.record.snapshots.find_writes():
            if write.place.identity in slots or not _must_be_kept(write, self._known):
                continue
            if contains_fake(write.after):
                if has_only_known_fakes(write.after, slots):  # a container that existed before
                    self.writes.append(write)
                elif not self.attributes.is_of_module(write.place.home):
                    self._tensor_writes.append(write)
                    kept = write.is_attribute and not self._is_argument(write)
                    if not (isinstance(write.after, torch.Tensor) and kept):
                        raise self.attributes.make_left_error(write.place, write.after)
            elif contains_new_fake(write.after, self._known):
                raise make_left_error(write.place.name, write.after)
            elif not write.is_repeatable or self._is_argument(write):
                raise self.make_unrepeated_write_error(write)
            else:
                self.writes.append(write)

    def _ids_known(self) -> set[int]:
        """Returns the ids of objects that existed before the step."""
        return self.record.ids_reached() | self.state.ids_searched()

    def _is_argument(self, write: Write) -> bool:
        return write.place.name.startswith(("argument", "param_groups"))

    def make_unrepeated_write_error(self, write: Write) -> Exception:
        """Returns the error for a change of a Python object that later calls could not repeat."""
        codes = [*self.record.codes.values()]
        return unrepeated_write_error(write, codes, self.step)

    # -- collecting results ------------------------------------------------------------------------

    def _collect_outputs(self, result: Any) -> None:
        """Adds to `outputs` the step's result, and the new values of slots and gradients."""
        outputs = self.outputs
        leaves, structure = flatten_call(result, self._is_returned_as_itself)
        self._returns_unknown_tensor = any(map(_is_real, leaves))
        self.meets_unknown_tensors |= self._returns_unknown_tensor
        outputs.add_result(leaves, structure, self._check_result)
        self._trained = list_trained(self.inputs)
        self.tracer.collect_state()
        for slot, first in self._number_slots:
            if slot.value is not first:
                outputs.add_slot(slot, slot.value)
        for slot in self.attributes.list_left_tensors(self._slot_identities):
            outputs.add_slot(slot, slot.value)
        for write in self._tensor_writes:
            place = write.place
            outputs.add_slot(Slot(place.name, "value", PlaceAsItem(place), place.key), write.after)
        outputs.add_left_gradients()

    def _is_returned_as_itself(self, leaf: Any) -> bool:
        """True if this part of a result existed before the step, so it is returned unchanged."""
        return self.record.is_reached(leaf) and id(leaf) not in self._made_for_arguments

    def _check_result(self, leaf: Any) -> None:
        if not self._is_returned_as_itself(leaf):
            check_result(leaf, self._known)


def _is_real(value: Any) -> bool:
    """True for a tensor that is not a fake."""
    return has_type(value, torch.Tensor) and not has_type(value, FakeTensor)


def _must_be_kept(write: Write, known: set[int]) -> bool:
    """True if the user's code makes a write, or a library's code stores a tensor."""
    if not write.is_of_library:
        return True
    return contains_fake(write.after) or contains_new_fake(write.after, known)


def _drop_all_but(graph: fx.Graph, wanted: Iterable[fx.Node]) -> None:
    """Erases the calls that do not affect the values of `wanted`.

    A write through another view is missed, and erased. So the values are only guesses, which each
    run of the program checks.
    """
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node in needed or (has_effect(node) and not needed.isdisjoint(node.all_input_nodes)):
            needed.update((node, *node.all_input_nodes))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node not in needed:
            graph.erase_node(node)


# -- checks of a run -------------------------------------------------------------------------------


def check_arguments(call: Any, record: ReadRecord) -> None:
    """Raises CaptureError if the step may see that capture rebuilds an argument.

    Containers and objects among the arguments are rebuilt. So the step must not
    - compare one by identity: by `is` or `id`, or without its own `__eq__` by `==` or as a key
    - write the items of one that it also reaches by a name

    Args:
        call: the arguments and keyword arguments.
        record: the values that the step reached, and the functions that ran.
    """
    codes = record.codes.values()
    asking = next(filter(compares_identities, codes), None)
    comparing = asking or next(filter(compares_objects, codes), None)
    # Containers and objects that are rebuilt for the step.
    objects = objects_of_call(call, frozenset())
    made_anew = [v for v in objects if not pytree.tree_is_leaf(v) or is_flattened(v)]
    _check_keys([v for v in made_anew if _is_equal_by_identity(v)], record)
    _check_named(made_anew, record)
    # Other classes define `==` by their contents, which rebuilding keeps.
    asked = [(v, asking or (comparing if _is_equal_by_identity(v) else None)) for v in made_anew]
    for v, code in asked:
        for value, name in record.values_reached() if code else ():
            if code and _may_be_argument(value, v):
                raise not_captured(
                    f"{code.co_name} uses `is` or `id`, and both an argument and {name} are "
                    f"{type(value).__name__} objects",
                    "container arguments are rebuilt for the graph, so `is` would compare "
                    "different objects",
                    Fix("pass it, or read it by its name", "not both"),
                    place=f"{code.co_filename}:{code.co_firstlineno}",
                )


def _check_named(made_anew: Sequence[Any], record: ReadRecord) -> None:
    """Raises CaptureError if the step may write a container that is an argument and has a name."""
    given = {id(v): v for v in made_anew if has_type(v, (dict, list, collections.deque))}
    code = next(filter(writes_items, record.codes.values()), None) if given else None
    for value, name in record.values_reached() if code is not None else ():
        if code is not None and id(value) in given:
            raise not_captured(
                f"an argument is {name}, and {code.co_name} changes items of a container",
                "container arguments are rebuilt for the graph, so a write to one is not seen in "
                "the other",
                Fix("pass it, or read it by its name", "not both"),
                place=f"{code.co_filename}:{code.co_firstlineno}",
            )


def _check_keys(made_anew: Sequence[Any], record: ReadRecord) -> None:
    """Raises CaptureError if a dictionary or set may have an argument as a key, by identity."""
    for container, name in record.values_reached() if made_anew else ():
        keyed = has_type(container, (dict, set, frozenset)) and count_items(container) <= HUGE
        for key in items_of(container)[0] or () if keyed else ():
            if type(key) not in PLAIN and any(_may_be_argument(key, v) for v in made_anew):
                raise not_captured(
                    f"an argument is a {type(key).__name__}, and {name} has such objects as keys",
                    "container arguments are rebuilt for the graph, so the lookup by identity "
                    "would fail",
                    Fix("its tensors", "as arguments, and the value that was looked up"),
                    place="",
                )


def _is_equal_by_identity(value: Any) -> bool:
    """True if the class of `value` does not define `__eq__`."""
    equal: Any = type(value).__eq__
    return equal is object.__eq__


def _may_be_argument(value: Any, given: Any) -> bool:
    """True if `value` may be passed as the argument `given` in a call like this one."""
    if value is given or type(value) is not type(given):
        return value is given
    if not is_container(value):
        return True
    form = _form_of(value)
    return bool(form[1]) and form == _form_of(given)


def _form_of(container: Any) -> tuple[Any, list[type]]:
    """Returns the keys of a container, and the types of its values."""
    keys, values = items_of(container)
    kinds = [torch.Tensor if isinstance(v, torch.Tensor) else type(v) for v in values]
    return None if keys is None else [*keys], kinds
