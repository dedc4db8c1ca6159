"""Facts of input tensors that a step reads beside values, shapes and layouts.

Whether an input is a leaf, a view, shared or conjugated may be part of what a program is made for:
the answer at capture becomes a condition. Where its memory lies and how often it was written
differs in each call: to ask for that is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix
from partita.tensor.op_facts import FACTS_THAT_CHANGE, FACTS_THAT_STAY
from partita.tensor.tensor_state import count_writes

from ..errors import not_captured
from ..guards.codes import is_recorded
from .inputs import GraphInputs
from .symbolic import identity_of

__all__ = ["FactCondition", "TensorFacts", "is_fact"]

_HELD = {inspect.getattr_static(torch.Tensor, name): name for name in FACTS_THAT_STAY}
_LOST = {inspect.getattr_static(torch.Tensor, name): name for name in FACTS_THAT_CHANGE}
_HELD[identity_of] = "id"
_OBJECTS = ("grad_fn", "grad", "_base", "_backward_hooks")  # the fact: is there one?
_OF_MEMORY = ("storage_offset", "is_shared", "is_pinned", "_base")
_WITHIN = (
    torch.Tensor.is_shared.__code__.co_filename,
    torch.overrides.__file__,
    identity_of.__code__.co_filename,
)


@dataclass(frozen=True, eq=False)
class FactCondition:
    """A condition on a fact of one input tensor.

    Attributes:
        name: of the tensor.
        index: among the leaves of a call.
        fact: its name, as "is_leaf".
        value: at capture.
        line: the user's line that asks.
    """

    name: str
    index: int
    fact: str
    value: Any
    line: str

    def holds(self, tensors: Sequence[Any]) -> bool:
        found: bool = _read_fact(tensors[self.index], self.fact) == self.value
        return found

    def reason(self, tensors: Sequence[Any]) -> str:
        now = _read_fact(tensors[self.index], self.fact)
        return f"{self.name}.{self.fact}: {self.value} became {now}, asked for at {self.line}"


class TensorFacts:
    """Answers the facts that a step reads while it is captured.

    Args:
        inputs: of the graph.
    """

    def __init__(self, inputs: GraphInputs):
        self._inputs = inputs
        # By id of each gradient that is there when the step begins: is it a mark (which stands
        # where there is none), and how often was it written?
        self._grads = {
            id(fake): (given.kind == "mark", _count_writes(fake))
            for given, fake in zip(inputs.all, inputs.fakes, strict=True)
            if given.kind in ("mark", "gradient")
        }
        self._found: dict[tuple[int, str], FactCondition] = {}

    def conditions(self) -> list[FactCondition]:
        return [*self._found.values()]

    def answer(self, func: Any, args: Any, caller: FrameType) -> tuple[Any, ...]:
        """The answer, in a tuple, where a torch function reads a fact of an input; () for others.

        Args:
            caller: the frame that calls the function.

        Raises:
            CaptureError: it reads what differs in each call.
        """
        if not is_fact(func) or not args or not _is_asked_by_user(caller):
            return ()
        asked = getattr(func, "__self__", func)
        name = _HELD.get(asked) or _LOST[asked]
        if asked in _LOST:
            raise not_captured(
                f"the step asks for {name} of a tensor",
                "where memory lies, and how often it was written, is another thing in each call",
                Fix("ask before the step", "and give the answer as an argument"),
                place=user_line(),
            )
        return self._answer(name, args[0], func)

    def _answer(self, name: str, fake: Any, func: Any) -> tuple[Any, ...]:
        given, index = self._inputs.stood_for(fake), self._inputs.place_of(fake)
        if given is None or index < 0:
            if name in _OF_MEMORY and self._shows_input(fake):
                raise not_captured(
                    f"the step asks for {name} of a view of one of its inputs",
                    "it depends on the memory of what the call brings, which a graph does not ask",
                    Fix(f"ask the input itself for {name}", "which becomes a condition"),
                    place=user_line(),
                )
            return ()
        if name == "grad":
            with Local():
                found = fake.grad
            if found is not None and id(found) not in self._grads:
                return ()  # the step's own
            untouched = self._grads.get(id(found)) == (True, _count_writes(found))
        value = _read_fact(given, name)
        named = self._inputs.name_of(index)
        condition = FactCondition(named, index, name, value, user_line())
        self._found.setdefault((index, name), condition)
        if name == "grad":
            return (None,) if untouched else ()
        if name in _OBJECTS:
            with Local():
                return () if not value or func(fake) is not None else (func(given),)
        return (value,)

    def _shows_input(self, fake: Any) -> bool:
        with Local():
            memory = fake.untyped_storage()._cdata
            return any(x.untyped_storage()._cdata == memory for x in self._inputs.fakes)


def is_fact(func: Any) -> bool:
    """Does a function of torch read a fact of a tensor, rather than set one or anything else?"""
    asked = getattr(func, "__self__", func)
    reads = getattr(func, "__name__", "") not in ("__set__", "__delete__")
    return reads and (asked in _HELD or asked in _LOST)


def _is_asked_by_user(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename in _WITHIN:
        frame = frame.f_back
    return frame is not None and is_recorded(frame.f_code.co_filename)


def _count_writes(t: Any) -> int:
    """How often a tensor was written."""
    return 0 if t is None else count_writes(t)


def _read_fact(t: torch.Tensor, name: str) -> Any:
    if name == "id":
        return id(t)
    with Local():
        found = getattr(t, name)
        return found is not None if name in _OBJECTS else found() if callable(found) else found
