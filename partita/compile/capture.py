"""How does a training step become one graph?

It is run once over tensors without memory, which take the places of its parameters, its optimizer's
state and its arguments. Every ATen call under it, in backward and in the update too, becomes a
node; a redistribution becomes collectives of local tensors. Nothing is carried and nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from partita.comm import TraceWire, Wire, stand_ins
from partita.layout import Fix
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.settled import update_spec
from partita.tensor.spec import Spec, spec_of
from partita.tensor.tensor_state import own_state, state_of

from .attributes import Attributes, check_result
from .differentiate import Seed, differentiate, has_history, made_inputs
from .errors import not_captured
from .finished import Trace
from .functional import functional
from .inputs import Inputs
from .meanwhile import call_by_call, compiling, swapped, unseen
from .notes import Recorder
from .optimizers import Stepping
from .program import Output, Place, Program
from .refusals import told_of, users_line
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
        self.attributes, self.modules = Attributes(state), state.modules.values()
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
            told = told_of(error, self._line)
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
            return self._trace().program(functional(made))

    def _trace(self) -> Trace:
        return Trace(
            self.inputs, self.wires, self.outputs, self.result, self.constants, self.cleared
        )

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
            stack.enter_context(compiling())
            stack.enter_context(call_by_call(self.modules))
            stack.enter_context(unseen())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.attributes.restored())
            self._first = stack.enter_context(swapped(self.slots, stand_in))
            stack.enter_context(self.stepping.traced(stand_in, self.inputs.rate, recorder))
            args, kwargs = pytree.tree_map(stand_in, (self.args, self.kwargs))
            try:
                result = self.step(*args, **kwargs)
            except Exception as error:
                self._line = users_line(error)
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
            rest = state_of(given.tensor).rest
            if rest is not None and update_spec(given.tensor) is not spec:  # ZeRO 1 and 2
                gradient, update = map(self._traced_spec, (rest.gradient, rest.update))
                own_state(fake).rest = replace(rest, gradient=gradient, update=update)
            if given.kind in ("mark", "gradient"):
                self.inputs.owner(given).grad = fake  # typed: it may be settled already
            elif given.tensor.requires_grad:
                with Local():
                    fake.requires_grad_()
            fake._is_param = isinstance(given.tensor, torch.nn.Parameter)  # type: ignore[attr-defined]

    def _traced_spec(self, spec: Spec) -> Spec:
        return spec_of(spec.layout, self.wires[spec.wire])

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
        """The plain values that stood next to DTensors. They leave the graph: see `finished`."""
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


def _graded(t: torch.Tensor) -> bool:
    with Local():
        return t.requires_grad
