"""Rehearsals: runs of a function over tensors without memory, on a wire without peers.

Parameters, buffers and arguments give way to fakes of the same layouts, and each mesh's wire to a
dry one at the same place of the same mesh. So the function plans what it would plan, sends nothing
and computes nothing; what it had is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from partita.comm import DryWire, Wire, substitute_wires, user_line
from partita.compile.capture.capture import taking_turns
from partita.compile.capture.capture_context import compiling, hidden_from_watchers, slots_swapped
from partita.compile.capture.fakes import local_of
from partita.compile.capture.outputs import ModuleAttributes
from partita.compile.capture.state import State, state_of, tensors_of_call
from partita.compile.errors import user_line_of
from partita.layout import Fix, LayoutError
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.spec import spec_of
from partita.tensor.tensor_state import HERE

__all__ = ["rehearse"]

_VALUE_ASKED = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def rehearse(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make_wire: Callable[[Wire], Wire] = DryWire.standing_for,
) -> Iterator[tuple[Callable[[], Any], State]]:
    """Within, `fn` is run over tensors without memory; what is changed is put back.

    Args:
        make_wire: what stands in for the wire of a mesh.

    Returns:
        What runs `fn(*args, **kwargs)` so, and what `fn` was found to reach.

    Raises:
        LayoutError: `fn` asks for a value of a tensor, or steps an optimizer.
    """
    state = state_of(fn, (), args, kwargs)
    fakes = _Fakes(make_wire)
    leaves = tensors_of_call(state.slots, args, kwargs)
    with ExitStack() as stack:
        stack.enter_context(taking_turns())
        for wire in dict.fromkeys(t._spec.wire for t in leaves if isinstance(t, DTensor)):
            fakes.stand_in_for(wire)
        stack.enter_context(substitute_wires(dict(fakes.wires), fakes.stand_in_for))
        stack.enter_context(compiling())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(hidden_from_watchers())
        stack.enter_context(_without_nodes())
        stack.enter_context(_refusing_steps(state))
        stack.enter_context(ModuleAttributes(state).restored())
        stack.enter_context(slots_swapped(state.slots, fakes.stand_in))
        given, named = pytree.tree_map(fakes.stand_in, (args, kwargs))
        stack.enter_context(HERE.breaking_off())
        stack.enter_context(fakes.mode)

        def run() -> Any:
            try:
                return fn(*given, **named)
            except _VALUE_ASKED as error:
                raise _asks_value(error) from None

        yield run, state


class _LocalFakes(FakeTensorMode):
    """Fakes of what a rank holds: asked by their mode, a DTensor tells of its piece."""

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        with Local():
            return super().__torch_dispatch__(*args, **kwargs)


class _Fakes:
    """What stands for tensors and wires: the same for the same."""

    def __init__(self, make_wire: Callable[[Wire], Wire]):
        self.mode = _LocalFakes(static_shapes=True)
        self.wires: dict[Wire, Wire] = {}
        self._make_wire = make_wire
        self._standing: dict[int, torch.Tensor] = {}

    def stand_in_for(self, wire: Wire) -> Wire:
        if wire not in self.wires:
            self.wires[wire] = self._make_wire(wire)
        return self.wires[wire]

    def stand_in(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = self._standing.get(id(value))
        if found is None:
            found = self._standing[id(value)] = self._make_fake(value)
        return found

    def _make_fake(self, value: torch.Tensor) -> torch.Tensor:
        fake: torch.Tensor = self.mode.from_tensor(local_of(value), static_shapes=True)
        if isinstance(value, DTensor):
            spec = value._spec
            fake = tagged(fake, spec_of(spec.layout, self.wires[spec.wire]))
        with Local():
            fake.requires_grad_(value.requires_grad)
        fake._is_param = isinstance(value, torch.nn.Parameter)  # type: ignore[attr-defined]
        return fake


class _NoNodes:
    """Stands for the recorder of a capture where no graph is made: a region is run as it is."""

    is_behind_forward = False
    marks = (None, False, None)

    def region(self) -> Any:
        return nullcontext()

    def keeping(self, keep: bool) -> Any:
        return nullcontext()

    def sharing(self, budget: Any) -> Any:
        return nullcontext()

    def exchange(self, x: Any, value: Any) -> None: ...


@contextmanager
def _without_nodes() -> Iterator[None]:
    before, HERE.recorder = HERE.recorder, _NoNodes()
    try:
        yield
    finally:
        HERE.recorder = before


@contextmanager
def _refusing_steps(state: State) -> Iterator[None]:
    """Within, no optimizer that the function reaches steps: its state has no fakes."""
    hooks = [o.register_step_pre_hook(_refuse_step) for o in state.optimizers.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise LayoutError(
        "the explained function steps an optimizer",
        place=user_line(),
        reason="explain plans calls on tensors; an update is told by a step that is captured",
        fixes=(
            Fix("pt.explain(model, x)", "forward, or a function that ends in backward()"),
            Fix("pt.compile(step)", "then step.explain() and step.memory"),
        ),
    )


def _asks_value(error: Exception) -> LayoutError:
    return LayoutError(
        "the explained function asks for the value of a tensor",
        place=user_line_of(error),
        reason="nothing is computed, so that no value is known",
        fixes=(Fix("explain the part before it", "and the part after it by itself"),),
    )
