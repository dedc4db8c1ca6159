"""Call guards: whether a call is like the one before in all but the values of its tensors.

To say of hundreds of tensors what they are takes longer than a small step computes. But most calls
find the same tensors in the same memory as the call before, and that is seen by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from ..arguments import flatten_call
from ..fakes import local_of
from ..program import Program
from ..state import OF_TENSORS, Slot, State, attributes_of, hooks_of
from .content_keys import argument_key, content_key
from .modes import modes

__all__ = ["CallGuard", "kind_of_tensor"]


class CallGuard:
    """One call, to which others are compared.

    Args:
        slots: its tensors, those of optimizers too.
        tensors: the leaves of the call, as `tensors_of_call` gives them.
        call: its (args, kwargs).
        program: what it runs.
        state: what the step reaches.

    Attributes:
        program: as given.
        usable: whether calls can be compared to this one. Not where one tensor is two arguments,
            nor where a module holds what has a history, a gathered parameter, which must not be
            held.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        tensors: Sequence[Any],
        call: Any,
        program: Program,
        state: State,
    ):
        self.program = program
        arguments, self._structure = flatten_call(call)
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
                (slot.home, slot.key, t, *_memory_of(t), t.requires_grad, t.__dict__.get("_spec"))
                for slot, t in zip(slots, self._held, strict=True)
            ]
        self._arguments = [_kind_of(a) for a in arguments]
        self._modes = modes()
        self._modules = [vars(m) for m, _ in state.parts]
        self._training = [held.get("training") for held in self._modules]
        self._state = state
        self._optimizers = [
            (o, o.state, [(p, d, len(d)) for p, d in o.state.items()])
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
        arguments, structure = flatten_call((args, kwargs))
        if structure != self._structure or modes() != self._modes:
            return None
        try:
            if not self._as_before():
                return None
        except LookupError:  # a place that a list or a dictionary has no longer
            return None
        new = [id(a) for a in arguments if isinstance(a, torch.Tensor)]
        if len(set(new)) < len(new) or not self._ids.isdisjoint(new):
            return None
        if [_kind_of(a) for a in arguments] != self._arguments:
            return None
        tensors = self._held + arguments
        return tensors if self.program.conditions.failed(tensors) is None else None

    def inputs(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """What the program's inputs are in a call whose leaves are `tensors`."""
        pairs = zip(self._inputs, self.program.taken, strict=True)
        return [given.now(tensors) if fixed is None else fixed for fixed, given in pairs]

    def _as_before(self) -> bool:
        assert self.program.guards is not None
        if not self.program.guards.hold():
            return False
        if not all(map(is_, map(dict.get, self._modules, repeat("training")), self._training)):
            return False
        if self._state.regrouped():
            return False
        for optimizer, state, entries in self._optimizers:
            if optimizer.state is not state or len(state) != len(entries):
                return False
            for p, known, count in entries:
                if state.get(p) is not known or len(known) != count:
                    return False
        with Local():
            # Another memory, layout or history is another tensor, though it be the same object.
            for home, key, t, start, strides, requires_grad, spec in self._slots:
                if (
                    home[key] is not t
                    or t.data_ptr() != start
                    or t.stride() != strides
                    or t.requires_grad is not requires_grad
                    or t.__dict__.get("_spec") is not spec
                ):
                    return False
        return True


def _memory_of(t: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return t.data_ptr(), t.stride()


def _kind_of(value: Any) -> tuple[Any, ...]:
    """What a graph is made for, of one leaf of a call."""
    if not isinstance(value, torch.Tensor):
        return argument_key(value)  # type: ignore[no-any-return]
    with Local():
        strides = value.stride()
    return (*kind_of_tensor(value), strides)


def kind_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    """What a graph is made for, of a tensor, beside its strides."""
    attributes = t.__dict__
    spec = attributes.get("_spec")
    own = ()
    if attributes and not OF_TENSORS.issuperset(attributes):
        own = tuple([(name, _attribute_key(attributes[name])) for name in attributes_of(t)])
    hooks = hooks_of(t) if t.requires_grad else ()
    return (spec or t.shape, t.dtype, t.requires_grad, t.device, type(t), own, hooks)


def _attribute_key(value: Any) -> Any:
    return torch.Tensor if isinstance(value, torch.Tensor) else content_key(value)
