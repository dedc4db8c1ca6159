"""Outputs of a captured graph, and what each is to the step.

They are what the step returns, what its slots hold afterwards, the gradients that it leaves in
`.grad`, the gradients that a caller may ask for of results with a history ("cotangent"), and values
for checks alone ("admitted", "answers"), of which `lower_trace` takes the former off again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils import _pytree as pytree

from partita.comm import TraceWire
from partita.layout import Fix
from partita.tensor.dtensor import DTensor
from partita.tensor.spec import Spec, spec_of

from ..arguments import flatten_call
from ..errors import not_captured
from ..program import Input, Output, ResultPlace
from .captured_attributes import check_no_marks, check_result, left_gradient, retains_gradient
from .differentiate import (
    Seed,
    asks_gradient,
    cut_history,
    differentiate,
    has_history,
    part_results,
)
from .inputs import GraphInputs
from .recorder import Recorder
from .state_slots import Slot
from .symbolic import is_symbolic

__all__ = ["GraphOutputs"]

_NO_RESULTS = ("mark", "gradient")  # inputs of which no gradient is left or asked for

_grad: Any = torch._C.TensorBase.grad


class GraphOutputs:
    """The outputs of one capture.

    Args:
        inputs: of the graph.

    Attributes:
        all: in the graph's order.
        values: for each the traced tensor or number.
        result, constants, cleared: as in a `Program`.
        differentiable: the values that have a history, by number.
        seeds: the nodes at which their gradients enter the graph.
    """

    def __init__(self, inputs: GraphInputs):
        self._inputs = inputs
        self.all: list[Output] = []
        self.values: list[Any] = []
        self.result: pytree.TreeSpec
        self.constants: list[Any] = []
        self.cleared: list[int] = []
        self.differentiable: list[torch.Tensor] = []
        self.seeds: list[Seed] = []
        self._places: dict[int, int] = {}

    def add_result(self, result: Any, returns_as_it_is: Callable[[Any], bool]) -> None:
        """Add what the step returns.

        Args:
            returns_as_it_is: was this part of it there before the step?
        """
        leaves, self.result = flatten_call(result, returns_as_it_is)
        results: list[Any] = []
        for leaf in leaves:
            if is_symbolic(leaf):
                self.constants.append(ResultPlace("result", len(results)))
                results.append(leaf)
                self._add_value("result", leaf)
            elif not isinstance(leaf, torch.Tensor):
                if not returns_as_it_is(leaf):
                    check_result(leaf)
                self.constants.append(leaf)
            elif (place := self._inputs.place_of(leaf)) >= 0:
                self.constants.append(ResultPlace("input", place))  # the input tensor itself
            else:
                number = next((i for i, t in enumerate(results) if t is leaf), len(results))
                self.constants.append(ResultPlace("result", number))
                if number == len(results):
                    results.append(leaf)
                    self._add_value("result", leaf)

    def add_slot(self, slot: Slot, value: Any) -> None:
        """Add what a slot holds after the step."""
        self._add_value("slot", value, slot=slot)

    def add_left_gradients(self) -> None:
        """Add the gradients that the step leaves on tensors that it has made, and on inputs."""
        for i, output in enumerate([*self.all]):
            is_first = not output.scalar and output.tensor == i
            if is_first and self._inputs.place_of(self.values[i]) < 0:
                check_no_marks(self.values[i])
                if (grad := left_gradient(self.values[i])) is not None:
                    spec = None if isinstance(grad, DTensor) else output.spec
                    self._add_tensor("left gradient", grad, spec=spec and spec.gradient, index=i)
        for given, fake in self._differentiable_inputs():
            if not fake.requires_grad:
                continue
            with Local():
                grad = _grad.__get__(fake)
            if not given.tensor.is_leaf:
                if grad is not None:
                    raise _no_leaf_error(given)
            elif grad is None:
                self.cleared.append(given.index)
            elif grad not in self._inputs.identities:
                spec = None if isinstance(grad, DTensor) else getattr(fake, "_spec", None)
                self._add_tensor("gradient", grad, spec=spec and spec.gradient, index=given.index)

    def add_cotangents(self, recorder: Recorder) -> None:
        """Add the gradients of inputs; none where the step has used up the results' history."""
        wanted = [(i, t) for i, t in self._differentiable_inputs() if _is_differentiable(t)]
        parts = part_results(self.differentiable) if wanted else []
        part_of = {n: i for i, part in enumerate(parts) for n in part.results}
        unheard = {n for part in parts for n in part.unheard}
        outputs = [
            replace(o, part=part_of.get(o.number, 0), unheard=o.number in unheard) for o in self.all
        ]
        found: list[tuple[Output, torch.Tensor]] = []
        seeds: list[Seed] = []
        for number, part in enumerate(parts):
            results = [self.differentiable[n] for n in part.results]
            ancestors = [self.differentiable[n] for n in part.ancestors]
            takes = [*ancestors, *(t for _, t in wanted)]
            with cut_history(ancestors):
                gradients = differentiate(results, takes, recorder, again=number + 1 < len(parts))
            if gradients is None:
                found, seeds = [], []
                break
            for seed in gradients[0]:
                spec = _untraced_spec(seed.spec)
                seeds.append(replace(seed, spec=spec, number=part.results[seed.number]))
            places: list[dict[str, Any]] = [*({"number": n} for n in part.ancestors)]
            places += [{"index": given.index} for given, _ in wanted]
            for place, taken, grad in zip(places, takes, gradients[1], strict=True):
                if grad is not None:
                    spec = getattr(taken, "_spec", None)
                    real = _untraced_spec(spec and spec.gradient)
                    found.append((Output("cotangent", real, part=number, **place), grad))
        self.seeds = seeds
        self.all = [*outputs, *(output for output, _ in found)]
        self.values += [grad for _, grad in found]

    def add_unreturned(self, kind: str, values: Sequence[Any]) -> None:
        """Add what the step does not return: plain values next to DTensors ("admitted"), or the
        "answers" to what torch has asked, which become one output."""
        many = len(values) if kind == "admitted" else 1
        self.all += [Output(kind, None) for _ in range(many)]
        self.values += values

    def _differentiable_inputs(self) -> Iterable[tuple[Input, torch.Tensor]]:
        pairs = zip(self._inputs.all, self._inputs.fakes, strict=True)
        return [(given, fake) for given, fake in pairs if given.kind not in _NO_RESULTS]

    def _add_value(self, kind: str, value: Any, **more: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(kind, value, **more)
        else:  # a number, plain or symbolic
            self.all.append(Output(kind, None, scalar=True, **more))
            self.values.append(value)

    def _add_tensor(self, kind: str, value: torch.Tensor, **more: Any) -> None:
        more["tensor"] = self._places.setdefault(id(value), len(self.values))
        spec = more.pop("spec", None) or getattr(value, "_spec", None)
        if "gradient" not in kind and has_history(value):
            more["number"] = len(self.differentiable)
            self.differentiable.append(value)
            more["retains_grad"] = retains_gradient(value)
        elif "gradient" not in kind:
            more["asks_gradient"] = asks_gradient(value)
        self.all.append(Output(kind, _untraced_spec(spec), **more))
        self.values.append(value)


def _no_leaf_error(given: Input) -> Exception:
    return not_captured(
        f"{given.name} has a history of its own",
        "a backward within the step would have to go on outside the graph",
        Fix("pt.compile(forward)", "and go backward from what it gives"),
    )


def _untraced_spec(spec: Spec | None) -> Spec | None:
    if spec is None:
        return None
    wire = spec.wire
    return spec_of(spec.layout, wire.real if isinstance(wire, TraceWire) else wire)


def _is_differentiable(t: torch.Tensor) -> bool:
    with Local():
        return t.requires_grad
