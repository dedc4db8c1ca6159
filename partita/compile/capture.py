"""How does a training step become one graph?

It is run once over tensors without memory, which take the places of its parameters, its optimizer's
state and its arguments. Every ATen call under it, in backward and in the update too, becomes a
node; a redistribution becomes collectives of local tensors. Nothing is carried and nothing changed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from partita.comm import TraceWire, Uneven, Wire, stand_ins, user_line
from partita.layout import Fix, LayoutError
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.engine import saving_hooks
from partita.tensor.settled import Rest, update_spec
from partita.tensor.spec import Spec, spec_of
from partita.tensor.watch import HERE

from .attributes import Attributes, check_result
from .compared import compared
from .differentiate import Seed, differentiate, has_history, made_inputs
from .errors import not_captured
from .functional import drop_unused, functional
from .inputs import Inputs
from .notes import Recorder
from .optimizers import Stepping
from .program import Input, Output, Place, Program, written_inputs
from .state import Slot, State

__all__ = ["capture"]

_grad = torch._C.TensorBase.grad  # type: ignore[attr-defined]


def capture(step: Callable[..., Any], args: Any, kwargs: Any, state: State) -> Program:
    """The graph of `step(*args, **kwargs)`.

    Raises:
        CaptureError: the step does what a graph cannot say, naming the user's line.
    """
    # Whether a step reads the gradients that it finds is seen by giving it some to read.
    for marks in (True, False):
        run = _Capture(step, args, kwargs, state, marks)
        try:
            program = run.program()
        finally:
            for wire in run.wires.values():
                wire.forget()
        if program is not None:
            return program
    raise AssertionError("without marks there is nothing to read")


class _Capture:
    """One run of a step over tensors without memory."""

    def __init__(self, step: Callable[..., Any], args: Any, kwargs: Any, state: State, marks: bool):
        self.step, self.args, self.kwargs = step, args, kwargs
        self.slots = [*state.slots, *state.optimizer_slots()]
        self.inputs = Inputs(self.slots, state.optimizers, args, kwargs, marks)
        self.stepping = Stepping(state.optimizers)
        self.attributes = Attributes(state)
        self.wires: dict[Wire, TraceWire] = {}
        self.outputs: list[Output] = []
        self.constants: list[Any] = []
        self.cleared: list[int] = []
        self.differentiable: list[torch.Tensor] = []
        self.seeds: list[Seed] = []

    def program(self) -> Program | None:
        """None where the step read the gradients that it was given as marks."""
        inputs = self.inputs
        self._line = ""
        try:
            with inputs.mode:
                made = make_fx(self._traced, _error_on_data_dependent_ops=True)(*inputs.fakes)
        except Exception as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error
        made_inputs(made.graph, self.seeds, inputs)
        nodes = [n for n in made.graph.nodes if n.op == "placeholder"]
        made.graph.eliminate_dead_code()
        for node, given in zip(nodes, inputs.all, strict=True):
            if given.kind == "mark" and node.users:
                return None
        with inputs.mode:
            return self._finished(functional(made))

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, Uneven):
            return not_captured(error.fact, error.reason, place=error.place)
        if isinstance(error, LayoutError):
            return error
        text = str(error).strip().split("\n")[0]
        if "_local_scalar_dense" in str(error) or "data-dependent" in str(error).lower():
            return not_captured(
                "the step reads a value",
                "while it is captured there are no values: .item(), float(x) and a branch on x "
                "ask for one; return the tensor and read it outside",
                place=self._line,
            )
        if "a leaf Variable that requires grad is being used in an in-place" in text:
            return not_captured(
                "the step writes in place what has a history",
                "an argument's history would be another after the call, or a parameter would have "
                "one",
                Fix("x = x.clone()", "first"),
                Fix("with torch.no_grad()", "around an update"),
                place=self._line,
            )
        if "FakeTensor" in text or "Fake" in type(error).__name__:
            return not_captured(
                "the step uses a tensor that is not among its inputs",
                f"it is not an argument, nor found by name where the step is defined ({text})",
                Fix("pt.compile(step, state=[holder])", "names the object that holds it"),
                place=self._line,
            )
        return error

    # -- the run -----------------------------------------------------------------------------------

    def _traced(self, *fakes: torch.Tensor) -> list[Any]:
        mode = get_proxy_mode()
        assert mode is not None
        recorder = self.recorder = Recorder(mode.tracer.graph)
        stand_in = self.inputs.stand_in
        with ExitStack() as stack:
            stack.enter_context(recorder)
            self._make_wires()
            self._tag()
            stack.enter_context(stand_ins(dict(self.wires)))
            stack.enter_context(_compiling())
            stack.enter_context(_unseen())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.attributes.restored())
            stack.enter_context(self._swapped())
            stack.enter_context(self.stepping.traced(stand_in, self.inputs.rate, recorder))
            args, kwargs = pytree.tree_map(stand_in, (self.args, self.kwargs))
            try:
                result = self.step(*args, **kwargs)
            except Exception as error:
                self._line = _users_line(error)
                raise
            with torch.no_grad():
                out = self._read_out(result)
            if self.differentiable:
                out += self._cotangents()
            out += self._admitted()
        recorder.finish()
        return out

    def _make_wires(self) -> None:
        for given in self.inputs.all:
            spec = given.spec
            if spec is not None and spec.wire not in self.wires:
                wire = spec.wire
                trace = TraceWire(wire, self.inputs.places(wire))
                trace.noting = self.recorder.noting_on(trace)
                self.wires[wire] = trace

    def _tag(self) -> None:
        """Make the stand-ins what they stand for: laid out, leaves, with their gradients."""
        for given, fake in zip(self.inputs.all, self.inputs.fakes, strict=True):
            spec = given.spec
            if spec is not None:
                spec = spec.gradient if given.kind == "mark" else spec
                tagged(fake, self._traced_spec(spec))
            rest: Rest | None = given.tensor.__dict__.get("_rest")
            if rest is not None and update_spec(given.tensor) is not spec:  # ZeRO 1 and 2
                gradient, update = map(self._traced_spec, (rest.gradient, rest.update))
                fake.__dict__["_rest"] = replace(rest, gradient=gradient, update=update)
            if given.kind in ("mark", "gradient"):
                self.inputs.owner(given).grad = fake  # typed: it may be settled already
            elif given.tensor.requires_grad:
                with Local():
                    fake.requires_grad_()
            fake._is_param = isinstance(given.tensor, torch.nn.Parameter)  # type: ignore[attr-defined]

    def _traced_spec(self, spec: Spec) -> Spec:
        return spec_of(spec.layout, self.wires[spec.wire])

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Within, every slot holds what stands for its value."""
        before = [slot.value for slot in self.slots]
        try:
            for slot, value in zip(self.slots, before, strict=True):
                slot.put(pytree.tree_map(self.inputs.stand_in, value))
            self._first = [slot.value for slot in self.slots]
            yield
        finally:
            for slot, value in zip(self.slots, before, strict=True):
                slot.put(value)

    # -- what comes out ----------------------------------------------------------------------------

    def _read_out(self, result: Any) -> list[torch.Tensor]:
        """The tensors that the graph returns; `self.outputs` says what each is."""
        values: list[torch.Tensor] = []

        def out(kind: str, value: torch.Tensor, **more: Any) -> None:
            spec = more.pop("spec", None) or getattr(value, "_spec", None)
            if kind != "gradient" and has_history(value):
                more["number"] = len(self.differentiable)
                self.differentiable.append(value)
            self.outputs.append(Output(kind, self._real(spec), **more))
            with Local():
                values.append(value.detach())

        leaves, self.result = pytree.tree_flatten(result)
        results: list[torch.Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                check_result(leaf)
                self.constants.append(leaf)
            elif (place := self.inputs.place_of(leaf)) >= 0:
                self.constants.append(Place("input", place))  # the very tensor, as it came
            else:
                number = next((i for i, t in enumerate(results) if t is leaf), len(results))
                self.constants.append(Place("result", number))
                if number == len(results):
                    results.append(leaf)
                    out("result", leaf)
        made = self.stepping.made()
        for slot, first in zip(self.slots, self._first, strict=True):
            if slot.value is not first and slot.kind != "optimizer":
                self._check_slot(slot)
                out("slot", slot.value, slot=slot)
        for slot, value in made:
            out("slot", value, slot=slot)
        for slot in self.attributes.left():
            out("slot", slot.value, slot=slot)
        for given, fake in zip(self.inputs.all, self.inputs.fakes, strict=True):
            if given.kind in ("mark", "gradient") or not fake.requires_grad:
                continue
            with Local():
                grad = _grad.__get__(fake)
            if not given.tensor.is_leaf:
                if grad is not None:
                    raise not_captured(
                        f"{given.name} has a history of its own",
                        "a backward within the step would have to go on outside the graph",
                        Fix("pt.compile(forward)", "and go backward from what it gives"),
                    )
            elif grad is None:
                self.cleared.append(given.index)
            elif grad not in self.inputs.identities:
                spec = None if isinstance(grad, DTensor) else getattr(fake, "_spec", None)
                out("gradient", grad, spec=spec and spec.gradient, index=given.index)
        return values

    def _cotangents(self) -> list[torch.Tensor]:
        """The gradients that the graph gives for those of its results."""
        pairs = zip(self.inputs.all, self.inputs.fakes, strict=True)
        wanted = [(i, t) for i, t in pairs if i.kind not in ("mark", "gradient") and _graded(t)]
        found = differentiate(self.differentiable, [t for _, t in wanted], self.recorder)
        if found is None:
            return []
        seeds, grads = found
        self.seeds = [replace(seed, spec=self._real(seed.spec)) for seed in seeds]
        values = []
        for (given, fake), grad in zip(wanted, grads, strict=True):
            if grad is not None:
                spec = getattr(fake, "_spec", None)
                real = self._real(spec and spec.gradient)
                self.outputs.append(Output("cotangent", real, index=given.index))
                values.append(grad)
        return values

    def _admitted(self) -> list[torch.Tensor]:
        """The plain values that stood next to DTensors. They leave the graph in `_finished`."""
        values = [value for trace in self.wires.values() for value in trace.admitted]
        self.outputs += [Output("admitted", None) for _ in values]
        return values

    def _check_slot(self, slot: Slot) -> None:
        if not isinstance(slot.value, torch.Tensor):
            raise not_captured(
                f"{slot.name} is no tensor after the step", "it would be one before the next step"
            )

    def _real(self, spec: Spec | None) -> Spec | None:
        if spec is None:
            return None
        wire = spec.wire
        return spec_of(spec.layout, wire.real if isinstance(wire, TraceWire) else wire)

    # -- the program -------------------------------------------------------------------------------

    def _finished(self, made: fx.GraphModule) -> Program:
        graph, inputs = made.graph, self.inputs.all
        written = {inputs[i].index for i in written_inputs(graph) if inputs[i].kind != "gradient"}
        (end,) = graph.find_nodes(op="output")
        dropped = self._dropped_gradients(graph)
        kept, admitted = [], []
        wires = iter([t.real for t in self.wires.values() for _ in t.admitted])
        for output, value in zip(self.outputs, end.args[0], strict=True):
            # What a step cleared first, and then updated by, has done its work: it would only
            # hold memory. A gradient that is the step's result, or accumulates, is kept.
            if output.kind == "admitted":
                admitted.append((value.args[0], next(wires)))
            elif output.kind == "gradient" and output.index in written & dropped:
                self.cleared.append(output.index)
            else:
                kept.append((output, value))
        end.args = ([value for _, value in kept],)
        drop_unused(graph)
        used: dict[fx.Node, Input] = {}
        for node, given in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            if node.users:
                used[node] = self._without_memory(given)
            else:
                graph.erase_node(node)
        made.recompile()
        groups = {
            name: (trace.real, axes)
            for trace in self.wires.values()
            for name, axes in trace.groups.items()
        }
        return Program(
            made,
            [*used.values()],
            [output for output, _ in kept],
            self.result,
            self.constants,
            sorted(set(self.cleared)),
            groups,
            compared=compared(made, used, admitted, user_line()),
        )

    def _without_memory(self, given: Input) -> Input:
        """The input, but holding nothing of the call that is captured, which will be over."""
        if given.kind != "argument" and given.tensor.is_leaf:
            return given
        with Local(), torch.no_grad():
            like = self.inputs.stand_in(given.tensor).detach()
        return replace(given, tensor=like if given.spec is None else tagged(like, given.spec))

    def _dropped_gradients(self, graph: fx.Graph) -> set[int]:
        """Whose gradients, as it found them, the step did not read."""
        nodes = graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self.inputs.all, strict=True)
        return {
            given.index
            for node, given in pairs
            if given.kind in ("mark", "gradient") and not node.users
        }


@contextmanager
def _compiling() -> Iterator[None]:
    """Tell torch and partita that a graph is made: optimizers then read no number from a tensor.

    Private torch: `torch.compiler.is_compiling()` has no public way to be made true.
    """
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, True
    HERE.capturing = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before
        HERE.capturing = False


@contextmanager
def _unseen() -> Iterator[None]:
    """Keep from whoever follows the program (remat, an offload) what has no memory."""
    before, HERE.watcher = HERE.watcher, None
    hooks = saved_tensors_hooks(lambda t: t, lambda t: t) if saving_hooks() else nullcontext()
    try:
        with hooks:
            yield
    finally:
        HERE.watcher = before


def _graded(t: torch.Tensor) -> bool:
    with Local():
        return t.requires_grad


def _users_line(error: BaseException) -> str:
    """The user's innermost line in the traceback of an error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, number in reversed(frames):
        line = user_line(frame)
        if line and frame.f_code.co_filename.endswith(line.rsplit(":", 1)[0].lstrip("./")):
            return f"{line.rsplit(':', 1)[0]}:{number}"
    return ""
