"""The call guard: decides fast if a call is like the last one, so that the same program may run.

It compares tensor objects and storages by identity, because to describe hundreds of tensors takes
longer than a small step computes. Most calls have the same tensor objects as the call before.

The *leaves* of a call are the result of `tensors_of_call`: the tensors of the state, then tensors
and values of the arguments. `t.is_leaf` has autograd's meaning: a tensor without a history.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.capture.conditions import Condition, Conditions
from partita.graph.program import local_of
from partita.tensor.dtensor_gradients import zero_owners_of

from .arguments import LEAVES, flatten_call
from .guards import TensorGuard, active_modes, keys_of_call, kind_of_tensor
from .values import AttributesAndHooks, argument_key

if TYPE_CHECKING:
    from partita.graph.slots import Slot

    from .captured_program import CapturedProgram
    from .inputs import State


class CallGuard:
    """Compares a call with the last one, to decide fast whether the same program may run.

    Tensors are compared by object identity. If that fails, the slower `Guards` decide.

    Args:
        slots: where the state's tensors are stored: `state.slots`, and the slots of the optimizer
            state that exists now.
        state: the state that the step reaches.
        tensors: the leaves of the call (its tensors and values), as `tensors_of_call` returns them.
        program: the program that the call runs.

    Attributes:
        usable: True if later calls can be compared with this one. It is False if one tensor is
            passed as two arguments. It is also False if a module holds a tensor with an autograd
            history, such as a gathered parameter. A guard must not keep this tensor alive.
    """

    def __init__(
        self,
        args: Any,
        kwargs: Any,
        slots: Sequence[Slot],
        state: State,
        tensors: Sequence[Any],
        program: CapturedProgram,
    ):
        self.program = program
        arguments, self._structure = flatten_call((args, kwargs))
        self._keys = keys_of_call(self._structure)
        self._flat = not kwargs and LEAVES.issuperset(map(type, args))
        count = len(tensors) - len(arguments)
        self._held = list(tensors[:count])
        self._owners = zero_owners_of(self._held)
        new = [id(a) for a in arguments if isinstance(a, torch.Tensor)]
        whole = len(slots) == count and all(isinstance(t, torch.Tensor) for t in self._held)
        self._ids = {id(t) for t in self._held}
        with local_ops():
            self.usable = (
                whole
                and len(set(new)) == len(new)
                and self._ids.isdisjoint(new)
                and all(t.is_leaf for t in self._held)
                and (program.guards is None or program.guards.holds_no_arguments(count))
            )
        if not self.usable:
            self._held = []
            return
        self._tensors = TensorGuard(slots, self._held)
        self._arguments = [_kind_of(a) for a in arguments]
        self._modes = active_modes()
        self._marks = AttributesAndHooks(self._held)
        # The guards look into attributes of the captured tensors only.
        if self._marks.may_change_within({id(i.tensor) for i in program.inputs}):
            self.usable = False
        self._modules = [*map(vars, state.parts)]
        self._training = [held.get("training") for held in self._modules]
        self._optimizers = [
            (o, o.state, [*o.state], [*o.state.values()], [*map(len, o.state.values())])
            for o in state.optimizers.values()
        ]
        self._inputs = [
            self._find_fixed_input(i.kind, i.index, count) for i in program.forward_inputs
        ]
        unfixed = [
            (at, i) for at, i in enumerate(program.forward_inputs) if self._inputs[at] is None
        ]
        kept = program.numbers_to_keep
        self._new = [(at, given) for at, given in unfixed if given not in kept]
        self._numbers = [(at, given) for at, given in unfixed if given in kept]
        self._values: list[Any] = [None for _ in self._numbers]
        asked = [c for c in program.conditions if isinstance(c, Condition)]
        self._asked = [*dict.fromkeys(given for c in asked for given in c.numbers)]
        self._answered: list[Any] = []
        self._others = Conditions(c for c in program.conditions if c not in asked)

    def _find_fixed_input(self, kind: str, index: int, count: int) -> torch.Tensor | None:
        """Returns the local tensor of an input with the same memory in each call, or None."""
        if kind in ("parameter", "buffer", "optimizer", "value") and 0 <= index < count:
            return local_of(self._held[index])
        return None

    def tensors(self, args: Any, kwargs: Any) -> list[Any] | None:
        """Returns the leaves (tensors and plain values) of a new call if it is like the last one.

        Otherwise returns None, and the slower `Guards` must decide.
        """
        if self._flat and not kwargs and LEAVES.issuperset(map(type, args)):
            if len(args) != len(self._arguments):
                return None
            arguments = [*args]
        else:
            arguments, structure = flatten_call((args, kwargs))
            if structure != self._structure or keys_of_call(structure) != self._keys:
                return None
        if active_modes() != self._modes:
            return None
        if not self._as_before((args, kwargs)):
            return None
        new = [id(a) for a in arguments if isinstance(a, torch.Tensor)]
        if len(set(new)) < len(new) or not self._ids.isdisjoint(new):
            return None
        if not self.program.guards.holds_none_of(new):  # type: ignore[union-attr]
            return None
        if [_kind_of(a) for a in arguments] != self._arguments:
            return None
        for owner in self._owners:
            owner.complete_gradients()
        tensors = self._held + arguments
        return tensors if self._has_met_conditions(tensors) else None

    def _has_met_conditions(self, tensors: list[Any]) -> bool:
        """True if the program's conditions hold.

        Conditions on numbers are evaluated only if a number object has changed.
        """
        numbers = [given.number(tensors) for given in self._asked]
        if len(numbers) == len(self._answered) and all(map(is_, numbers, self._answered)):
            return self._others.failed(tensors) is None
        holds = self.program.conditions.failed(tensors) is None
        self._answered = numbers if holds else []
        return holds

    def inputs(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the local tensors that this rank passes to the program in a call.

        Args:
            tensors: the leaves of the call, as the method `tensors` returns them.
        """
        for i, (at, given) in enumerate(self._numbers):
            value = given.number(tensors)
            if value is not self._values[i]:
                self._values[i], self._inputs[at] = value, given.local_value(tensors)
        found: list[Any] = self._inputs.copy()
        for at, given in self._new:
            found[at] = given.local_value(tensors)
        return found

    def _as_before(self, call: Any) -> bool:
        """True if Python values, training flags, optimizers and state are as in the last call."""
        assert self.program.guards is not None
        if not self.program.guards.hold(self._held, call, are_the_same=True):
            return False
        if not all(map(is_, map(dict.get, self._modules, repeat("training")), self._training)):
            return False
        for optimizer, state, keys, entries, counts in self._optimizers:
            if optimizer.state is not state or len(state) != len(keys):
                return False
            if not (all(map(is_, state, keys)) and all(map(is_, state.values(), entries))):
                return False
            if [*map(len, entries)] != counts:
                return False
        return self._tensors.same() and self._marks.unchanged()


def _kind_of(value: Any) -> tuple[Any, ...]:
    """Returns the properties of one leaf of a call that a program depends on."""
    if not isinstance(value, torch.Tensor):
        return argument_key(value)  # type: ignore[no-any-return]
    with local_ops():  # once, because each attribute of a DTensor would enter it again
        return (*kind_of_tensor(value), value.stride())
