"""Is a call like an earlier one in all but the values of its tensors?

To say of hundreds of tensors what they are takes longer than a small step computes. But most calls
find the same tensors in the same memory as the call before, and that is seen by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils import _pytree as pytree

from .fakes import local_of
from .program import Program
from .state import Slot, State

__all__ = ["Again", "kind_of", "kind_of_number", "modes"]


class Again:
    """One call, to which others are compared.

    Args:
        state: what the step reaches.
        slots: its tensors, those of optimizers too.
        tensors: the leaves of the call, as `tensors_of_call` gives them.
        call: its (args, kwargs).
        program: what it runs.

    Attributes:
        program: as given.
        usable: whether calls can be compared to this one. Not where one tensor is two arguments,
            nor where a module holds what has a history, a gathered parameter, which must not be
            held.
    """

    def __init__(
        self,
        state: State,
        slots: Sequence[Slot],
        tensors: Sequence[Any],
        call: Any,
        program: Program,
    ):
        self.program, self._state = program, state
        arguments, self._structure = pytree.tree_flatten(call)
        count = len(tensors) - len(arguments)
        self._held = list(tensors[:count])
        new = [id(a) for a in arguments if isinstance(a, torch.Tensor)]
        whole = len(slots) == count and all(isinstance(t, torch.Tensor) for t in self._held)
        self._ids = {id(t) for t in self._held}
        with Local():
            self.usable = (
                whole
                and len(set(new)) == len(new)
                and self._ids.isdisjoint(new)
                and all(t.is_leaf for t in self._held)
            )
            if not self.usable:
                self._held = []
                return
            self._slots = [
                (slot.home, slot.key, t, t.data_ptr(), t.requires_grad, t.__dict__.get("_spec"))
                for slot, t in zip(slots, self._held, strict=True)
            ]
        self._arguments = [kind_of(a) for a in arguments]
        self._modes = modes()
        self._values = [
            (slot.home, slot.key, slot.value)
            for slot in state.values
            if not isinstance(slot.value, float)
        ]
        self._modules = [(m, m.training) for m, _ in state.parts]
        self._optimizers = [
            (o, o.state, [(p, d, len(d)) for p, d in o.state.items()], _groups(o))
            for o in state.optimizers.values()
        ]
        self._inputs = [self._fixed(i.kind, i.index, count) for i in program.taken]

    def _fixed(self, kind: str, index: int, count: int) -> torch.Tensor | None:
        """An input that is the same memory in each call; None of others."""
        if kind in ("parameter", "buffer", "optimizer", "value") and 0 <= index < count:
            return local_of(self._held[index])
        return None

    def tensors(self, args: Any, kwargs: Any) -> list[Any] | None:
        """The leaves of a call, where it is like this one; else None."""
        arguments, structure = pytree.tree_flatten((args, kwargs))
        if structure != self._structure or modes() != self._modes or not self._as_before():
            return None
        new = [id(a) for a in arguments if isinstance(a, torch.Tensor)]
        if len(set(new)) < len(new) or not self._ids.isdisjoint(new):
            return None
        if [kind_of(a) for a in arguments] != self._arguments:
            return None
        tensors = self._held + arguments
        return tensors if self.program.conditions.failed(tensors) is None else None

    def inputs(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """What the program's inputs are in a call whose leaves are `tensors`."""
        pairs = zip(self._inputs, self.program.taken, strict=True)
        return [given.now(tensors) if fixed is None else fixed for fixed, given in pairs]

    def _as_before(self) -> bool:
        if self._state.moved():
            return False
        for m, training in self._modules:
            if m.training is not training:
                return False
        for home, key, value in self._values:
            now = home[key]
            if now is not value and (type(now) is not type(value) or now != value):
                return False
        for optimizer, state, entries, groups in self._optimizers:
            if optimizer.state is not state or len(state) != len(entries):
                return False
            for p, known, count in entries:
                if state.get(p) is not known or len(known) != count:
                    return False
            if _groups(optimizer) != groups:
                return False
        with Local():
            # Another memory, layout or history is another tensor, though it be the same object.
            for home, key, t, start, requires_grad, spec in self._slots:
                if (
                    home[key] is not t
                    or t.data_ptr() != start
                    or t.requires_grad is not requires_grad
                    or t.__dict__.get("_spec") is not spec
                ):
                    return False
        return True


def _groups(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What of an optimizer's groups is part of a program: not the parameters, nor their rates."""
    return [
        (len(group["params"]), [(k, kind_of_number(v)) for k, v in group.items() if k != "params"])
        for group in optimizer.param_groups
    ]


def kind_of_number(value: Any) -> Any:
    """What a graph is made for, of a value in which floats are inputs of it."""
    if isinstance(value, float):
        return float
    if type(value) in (tuple, list):
        return tuple([kind_of_number(v) for v in value])
    return value


def kind_of(value: Any) -> tuple[Any, ...]:
    """What a graph is made for, of one leaf of a call."""
    if not isinstance(value, torch.Tensor):
        return (float,) if isinstance(value, float) else (type(value), value)
    spec = value.__dict__.get("_spec")
    with Local():
        strides = value.stride()
    return (spec or value.shape, value.dtype, value.requires_grad, value.device, strides)


def modes() -> tuple[Any, ...]:
    """What of torch's modes is part of a program."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
    )
