"""One run of a step under capture.

It runs over tensors without memory, which take the places of its parameters, its optimizer's state
and its arguments. Every ATen call under it, in backward and in the update too, becomes a node; a
redistribution becomes collectives of local tensors. Nothing is carried and nothing changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils import _pytree as pytree

from partita.comm import TraceWire, Wire, stand_ins
from partita.layout import Fix, LayoutError
from partita.tensor.dtensor import tagged
from partita.tensor.grad_state import update_spec
from partita.tensor.spec import Spec, spec_of
from partita.tensor.tensor_state import own_state, state_of
from partita.tensor.watch import HERE

from ..arguments import classes_of_call, flatten_call, refuse_closed, unflatten_call
from ..captured_program import CapturedProgram
from ..conditions import Conditions, EqualInputs, GradientCondition, kind_of_gradient
from ..errors import not_captured
from ..graph_nodes import drop_unused, lazy_graph_modules
from ..guards import Guards, ReadRecord, Write
from ..guards.codes import line_of_write
from ..guards.expected import MISSING, brief
from ..guards.instrument import exclusive
from ..guards.marks import attributes_of
from ..guards.places import entry
from ..node_metadata import Recorder
from ..program import Input
from .answers import Asked, Guesses, gate_writes, predict_answer
from .block_calls import BlockCalls
from .block_choice import BlockChoice, BlocksTraced
from .block_traces import inline_blocks
from .capture_checks import check_arguments, check_constants, check_operators, check_truth
from .capture_context import call_by_call, compiling, swapped, unseen
from .captured_attributes import Attributes, attributes_given_to, holds_made, is_filled, left_in
from .differentiate import made_inputs
from .equal_counts import find_equal_counts, places_of_equal
from .fakes import hang_hooks
from .functionalize import functionalize_graph
from .inputs import GraphInputs
from .lower_trace import Trace
from .numbers import NUMBER, Numbers, Plain
from .optimizers import ParamGroup, Stepping
from .outputs import GraphOutputs
from .refusals import told_of, users_line
from .repeated_moves import RepeatedMoves
from .state import State
from .state_slots import Cell, Slot
from .step_function_mode import StepFunctionMode
from .tensor_facts import Facts

__all__ = ["CaptureRun"]

_NO_OWNERS = ("gradient", "mark", "number", "cotangent")  # inputs that have no gradient themselves


class CaptureRun:
    """One run of a step over tensors without memory."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: Any,
        kwargs: Any,
        state: State,
        unmarked: set[int],
        plain: Plain,
        guesses: Guesses,
        blocks: BlockChoice,
        counts_apart: bool,
    ):
        self.step, self.args, self.kwargs, self.state = step, args, kwargs, state
        self.record = ReadRecord(_names_of(state))
        self.writes: list[Write] = []
        self._left: list[Write] = []
        self.slots, self.values = [*state.slots, *state.optimizer_slots()], state.values
        self._places = frozenset(slot.identity for slot in self.slots)
        self.inputs = GraphInputs(self.slots, args, kwargs, unmarked)
        self._equal: list[EqualInputs] = []
        if not counts_apart:
            self._equal = find_equal_counts(self.inputs.all, state.optimizers.values())
        self.read_marks: set[int] = set()
        self.unmarked = unmarked
        self.asked = Asked(guesses)
        numbers: Any = self.inputs.mode.shape_env
        numbers.answer = self._answer
        self.numbers = Numbers(numbers, plain)
        self.facts = Facts(self.inputs)
        self.stepping = Stepping(state.optimizers)
        self.attributes, self.modules = Attributes(state), state.modules.values()
        self._blocks = blocks
        self.wires: dict[Wire, TraceWire] = {}
        self.outputs = GraphOutputs(self.inputs)
        self._hooks: list[Any] = []
        self._given: list[tuple[Input, torch.Tensor, dict[str, Any]]] = []
        self.meets_others = False

    def program(self) -> CapturedProgram | None:
        """None where the step read gradients that it was given as marks: those in `read_marks`."""
        inputs = self.inputs
        self._line, self.raised = "", False
        try:
            with inputs.mode, lazy_graph_modules():
                made = make_fx(self._traced, _error_on_data_dependent_ops=True)(*inputs.fakes)
            structures = inline_blocks(made.graph)
        except Exception as error:
            told = told_of(error, self._line)
            if told is error:
                raise
            raise told from error
        check_constants(made.graph)
        check_operators(made.graph)
        made_inputs(made.graph, self.outputs.seeds, inputs)
        nodes = [n for n in made.graph.nodes if n.op == "placeholder"]
        drop_unused(made.graph)
        read = [i for node, i in zip(nodes, inputs.all, strict=True) if node.users]
        self.read_marks = {given.index for given in read if given.kind == "mark"}
        if self.read_marks:
            return None
        self.read_gradients = {i.index for i in read if i.kind == "gradient"} | self.unmarked
        with inputs.mode:
            made = functionalize_graph(made, places_of_equal(inputs.all, self._equal))
            if self.asked.values:
                gate_writes(made.graph, self.asked.given.values)
            program = self._make_trace().program(made)
        program.answers = self.asked.given
        program.blocks = BlocksTraced(structures, self._blocks.apart_by_name)
        if not structures:
            program.work = [work for wire in self.wires.values() for work in wire.work]
        self.numbers.env.forget()
        return program

    def _make_trace(self) -> Trace:
        return Trace(
            self.inputs,
            self.wires,
            self.outputs.all,
            self.outputs.result,
            self.outputs.constants,
            self.outputs.cleared,
            self._collect_conditions(),
        )

    def _collect_conditions(self) -> Conditions:
        asked = self.numbers.conditions(), self.facts.conditions(), self._of_gradients()
        return Conditions((*asked[0], *asked[1], *asked[2], *self._equal))

    def _of_gradients(self) -> Iterator[GradientCondition]:
        """What the step takes for granted of the gradients that it finds."""
        leaves = self.inputs.leaves
        for given in self.inputs.all:
            if given.kind not in _NO_OWNERS and given.index in self.read_gradients:
                kind = kind_of_gradient(leaves[given.index])
                yield GradientCondition(given.name, given.index, kind)

    # -- the run -----------------------------------------------------------------------------------

    def _traced(self, *fakes: torch.Tensor) -> list[Any]:
        mode = get_proxy_mode()
        assert mode is not None
        recorder = self.recorder = Recorder(mode.tracer.graph, self.inputs.mode)
        self._repeated = RepeatedMoves(recorder, self.inputs.mode)
        stand_in = self.inputs.stand_in
        with ExitStack() as stack:
            stack.enter_context(recorder)
            self._make_wires()
            inputs = mode.tracer.graph.find_nodes(op="placeholder")
            pairs = zip(inputs, self.inputs.all, strict=True)
            self._known = {n: i.tensor for n, i in pairs if _is_whole(i)}
            self._tag_stand_ins()
            stack.enter_context(stand_ins(dict(self.wires)))
            stack.enter_context(compiling())
            # A function that the user had `torch.compile` compile is captured as what it is.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(call_by_call(self.modules))
            stack.enter_context(unseen())
            calls = BlockCalls(recorder, self.inputs.mode, self.wires, self._blocks, self.modules)
            stack.enter_context(calls.intercepting(mode.tracer))
            self.record.before_backward = calls.check_results
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(exclusive(self._find_tensor_holders()))
            stack.enter_context(self.attributes.restored())
            self._first = stack.enter_context(swapped(self.slots, stand_in))
            stack.enter_context(
                self.stepping.traced(stand_in, self._make_symbolic_number, recorder)
            )
            self._held = stack.enter_context(self._numbers_swapped())
            args, kwargs = self._arguments()
            stack.enter_context(self._undone_on_error())
            stack.enter_context(HERE.breaking_off())  # hooks hear of no NotABlock
            for optimizer in self.state.optimizers.values():
                self.record.watch(optimizer.param_groups, "param_groups")
            self.record.watch((args, kwargs), "argument")
            writes = StepFunctionMode(self.inputs, self.facts)
            try:
                with writes, self.record.recording(self.step, self._plain_arguments()):
                    result = self.step(*args, **kwargs)
            except Exception as error:
                self._line, self.raised = users_line(error), not isinstance(error, LayoutError)
                raise
            codes = [*self.record.functions.codes.values()]
            check_truth(codes, writes.reads_number)
            check_arguments((self.args, self.kwargs), self.record.places.values(), codes)
            self._check_attributes()
            writes.copy_back()
            self.meets_others = writes.meets_others
            self._read_writes()
            with torch.no_grad():
                self._read_out(result)
            if self.outputs.differentiable:
                self._add_cotangents()
            admitted = [value for trace in self.wires.values() for value in trace.admitted]
            self.outputs.add_unreturned("admitted", admitted)
            if self.asked.values:
                self.outputs.add_unreturned("answers", self.asked.values)
        recorder.finish()
        return self.outputs.values

    def _answer(self, question: Any) -> bool | None:
        if HERE.block is not None:
            HERE.block.refuse_always("torch asks for a value")
        return self.asked.answer(question, self._predicted_answer)

    def _predicted_answer(self, question: torch.SymBool) -> bool:
        """What a question of torch's is likely to be answered: False where it cannot be told."""
        mode = get_proxy_mode()
        assert mode is not None
        node = get_proxy_slot(question, mode.tracer).force().node
        return bool(predict_answer(node, self._known.get))

    def _make_symbolic_number(
        self, name: str, value: float, home: Any = None, path: Any = (), index: int = -1
    ) -> Any:
        """What stands for a float."""
        given = Input(name, "number", NUMBER, index, home, tuple(path))
        found = self.numbers.stand_in(given, value)
        if found is not value:
            self.inputs.add_made(given)
        return found

    def _arguments(self) -> Any:
        """The arguments of the step, with what stands for each."""
        leaves, structure = flatten_call((self.args, self.kwargs))
        first = len(self.inputs.leaves) - len(leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, float):
                leaves[i] = self._make_symbolic_number(f"argument[{i}]", leaf, index=first + i)
            else:
                refuse_closed(f"argument[{i}]", leaf)
                leaves[i] = self.inputs.stand_in(leaf)
        made = unflatten_call(leaves, structure)
        self._made_for_arguments = {id(leaf) for leaf in pytree.tree_leaves(made)}
        return made

    @contextmanager
    def _numbers_swapped(self) -> Iterator[list[tuple[Slot, Any]]]:
        """Within, the variables that hold floats hold what stands for them; gives these."""
        found = [(slot, slot.value) for slot in self.values if isinstance(slot.value, float)]
        try:
            held = []
            for slot, value in found:
                slot.put(self._make_symbolic_number(slot.name, value, slot.home, (slot.key,)))
                held.append((slot, slot.value))
            yield held
        finally:
            for slot, value in found:
                slot.put(value)

    def _plain_arguments(self) -> list[tuple[str, Any]]:
        """What stands in the arguments and is no tensor, and the classes of what is made anew."""
        leaves, structure = flatten_call((self.args, self.kwargs))
        kinds = [(kind.__name__, kind) for kind in classes_of_call(structure)]
        named = ((f"argument[{i}]", v) for i, v in enumerate(leaves))
        return [*kinds, *((name, v) for name, v in named if not isinstance(v, torch.Tensor))]

    def _find_tensor_holders(self) -> list[Any]:
        """The objects whose tensors are exchanged while the step runs."""
        return [part for module in self.modules for part in module.modules()]

    # -- what the step writes ----------------------------------------------------------------------

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Within, an error leaves what the step changes as it was; what it leaves there anyway."""
        try:
            yield
        except BaseException:
            for write in [*self.record.snapshots.writes()]:
                write.undo()
            raise
        for write in self._left:
            write.undo()

    def guards(self) -> Guards:
        """What the step has read, as it is now."""
        numbers = set()
        for given in self.numbers.given:
            if given.path:
                home = given.home
                if isinstance(home, (Cell, ParamGroup)):
                    home = home.cell if isinstance(home, Cell) else home.now
                numbers.add((id(home), given.path[0]))

        def number(home: Any, key: Any) -> bool:
            return (id(home), key) in numbers

        return self.record.guards(number, self._places, self.state.guarded())

    def undo(self) -> None:
        """Make the step's writes undone."""
        for write in reversed(self.writes):
            write.undo()

    def _read_writes(self) -> None:
        """Find what the step has written that is no tensor of a slot.

        Raises:
            CaptureError: it writes what a graph cannot.
        """
        seen = [*self.slots, *self.attributes.left(self._places), *(slot for slot, _ in self._held)]
        slots = {slot.identity for slot in seen}
        for write in self.record.snapshots.writes():
            if write.identity in slots:
                continue
            if is_filled(write.after):
                if not self.attributes.holds(write.home):
                    self._left.append(write)
                    kept = write.attribute and not self._is_argument(write)
                    if not (isinstance(write.after, torch.Tensor) and kept):
                        raise self.attributes.left_in(write.home, write.name, write.after)
            elif holds_made(write.after, self.inputs.identities):
                raise left_in(write.name)
            elif not write.again or self._is_argument(write):
                raise self.make_unrepeated_write_error(write)
            else:
                self.writes.append(write)

    def _is_argument(self, write: Write) -> bool:
        return write.name.startswith(("argument", "param_groups"))

    def make_unrepeated_write_error(self, write: Write) -> Exception:
        """The error to raise where a graph would not write again what the step writes."""
        was, now = brief(write.before), brief(write.after)
        changed = f" ({was} became {now})" if was != now else ""
        codes = [*self.record.functions.codes.values()]
        return not_captured(
            f"the step changes {write.name}{changed}",
            "a graph is of tensors: this would change once, at capture, and not in each call",
            Fix("do it outside the step", "before or after the call"),
            place=line_of_write(codes, write.key) or _line_of(self.step),
        )

    def _make_wires(self) -> None:
        for given in self.inputs.all:
            spec = given.spec
            if spec is not None and spec.wire not in self.wires:
                wire = spec.wire
                trace = TraceWire(wire, self.inputs.places(wire))
                trace.noting = self.recorder.noting_on(trace)
                trace.repeating = self._repeated.carry
                self.wires[wire] = trace

    def _tag_stand_ins(self) -> None:
        """Make the stand-ins what they stand for: laid out, leaves, with their gradients."""
        for given, fake in zip(self.inputs.all, self.inputs.fakes, strict=True):
            spec = given.spec
            if spec is not None:
                spec = spec.gradient if given.kind == "mark" else spec
                tagged(fake, self._traced_spec(spec))
            rest = state_of(given.tensor).rest
            if rest is not None and update_spec(given.tensor) is not spec:  # type: ignore[arg-type]  # ZeRO 1 and 2
                gradient, update = map(self._traced_spec, (rest.gradient, rest.update))
                own_state(fake).rest = replace(rest, gradient=gradient, update=update)
            if given.kind in ("mark", "gradient"):
                self.inputs.owner(given).grad = fake  # typed: it may be settled already
            elif given.tensor.requires_grad:
                with Local():
                    fake.requires_grad_()
                self._hooks += hang_hooks(given.tensor, fake)
            fake._is_param = isinstance(given.tensor, torch.nn.Parameter)  # type: ignore[attr-defined]
            if given.kind not in _NO_OWNERS and given.kind != "coordinate":
                self._give_attributes(given, fake)

    def _give_attributes(self, given: Input, fake: torch.Tensor) -> None:
        """Let what stands for a tensor have the attributes that a program has given that."""
        held = given.tensor.__dict__
        for name in attributes_of(given.tensor):
            self.record.read_at(entry(f"{given.name}.{name}", held, name), held[name])
            fake.__dict__[name] = self.inputs.stand_in(held[name])
        self._given.append((given, fake, {n: fake.__dict__[n] for n in attributes_given_to(fake)}))

    def _check_attributes(self) -> None:
        """Raise CaptureError if the step gives a tensor that is an input an attribute."""
        for given, fake, before in self._given:
            for name in {*before, *attributes_given_to(fake)}:
                if fake.__dict__.get(name, MISSING) is not before.get(name, MISSING):
                    raise not_captured(
                        f"the step sets {given.name}.{name}",
                        "an attribute of a tensor is no part of a graph: it would be set once",
                        Fix("do it outside the step", "before or after the call"),
                    )

    def _traced_spec(self, spec: Spec) -> Spec:
        return spec_of(spec.layout, self.wires[spec.wire])

    # -- what comes out ----------------------------------------------------------------------------

    def _read_out(self, result: Any) -> None:
        """Have `self.outputs` say what the step gives and leaves."""
        outputs = self.outputs
        outputs.add_result(result, self._is_returned_as_itself)
        made = self.stepping.made(self.inputs.stood_for)
        for slot, first in zip(self.slots, self._first, strict=True):
            if slot.value is not first and slot.kind != "optimizer":
                self._check_slot(slot)
                outputs.add_slot(slot, slot.value)
        for slot, value in made:
            outputs.add_slot(slot, value)
        for slot, first in self._held:
            if slot.value is not first:
                outputs.add_slot(slot, slot.value)
        for slot in self.attributes.left(self._places):
            outputs.add_slot(slot, slot.value)
        for write in self._left:
            outputs.add_slot(Slot(write.name, "value", write.home, write.key), write.after)
        outputs.add_left_gradients()

    def _is_returned_as_itself(self, leaf: Any) -> bool:
        """Was this part of a result there before, to be returned as itself?"""
        return self.record.is_reached(leaf) and id(leaf) not in self._made_for_arguments

    def _add_cotangents(self) -> None:
        for hook in self._hooks:  # a gradient that is given on passes the tensors' own
            hook.remove()
        if len(self.outputs.differentiable) > 1:
            self.record.before_backward(self.outputs.differentiable)
        self.outputs.add_cotangents(self.recorder)

    def _check_slot(self, slot: Slot) -> None:
        if not isinstance(slot.value, torch.Tensor):
            raise not_captured(
                f"{slot.name} is no tensor after the step", "it would be one before the next step"
            )


def _names_of(state: State) -> dict[int, str]:
    """What modules and optimizers are called."""
    names = {id(o): name for name, o in state.optimizers.items()}
    for name, module in state.modules.items():
        for prefix, part in module.named_modules():
            names.setdefault(id(part), f"{name}.{prefix}" if prefix else name)
    return names


def _line_of(step: Any) -> str:
    """Where a step begins."""
    f = inspect.unwrap(step) if inspect.isfunction(step) else getattr(step, "__func__", step)
    code = getattr(f, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _is_whole(given: Input) -> bool:
    """Is what a rank holds of it one device's value?"""
    whole = given.spec is None or not (given.spec.layout.shards or given.spec.is_pending)
    return whole and given.kind not in ("mark", "number")
