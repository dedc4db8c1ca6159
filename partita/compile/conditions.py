"""Conditions of a program: what it takes for granted of the numbers and gradients that it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

if TYPE_CHECKING:
    from .capture.tensor_facts import FactCondition
    from .program import Input

__all__ = [
    "Condition",
    "Conditions",
    "EqualInputs",
    "GradientCondition",
    "kind_of_gradient",
    "read_counts",
]


@dataclass(frozen=True, eq=False)
class Condition:
    """What a program takes for granted of its numbers.

    Attributes:
        text: as a person would say it: "optimizer.weight_decay[0] != 0".
        line: the user's, that asks.
        numbers: that it is about.
        values: theirs at capture.
        code: over `numbers` by their symbols; None where they must be what they were.
        symbols: of `numbers`.
    """

    text: str
    line: str
    numbers: tuple[Input, ...]
    values: tuple[float, ...]
    code: Any
    symbols: tuple[str, ...] = ()

    def holds(self, tensors: Sequence[Any]) -> bool:
        now = [given.number(tensors) for given in self.numbers]
        if self.code is None:
            return all(map(_is_same_number, now, self.values))
        try:
            return bool(eval(self.code, _SPACE, dict(zip(self.symbols, now, strict=True))))
        except ArithmeticError:
            return False

    def reason(self, tensors: Sequence[Any]) -> str:
        """Why it does not hold: which number became what, and who asks."""
        changed = [
            f"{given.name}: {was} became {now}"
            for given, was in zip(self.numbers, self.values, strict=True)
            if not _is_same_number(now := given.number(tensors), was)
        ]
        return f"{', '.join(changed)}, and {self.text} at {self.line}"


_SPACE = dict(SYMPY_INTERP)


def _is_same_number(one: float, other: float) -> bool:
    if type(one) is not type(other):
        return False
    if one == other:
        return math.copysign(1, one) == math.copysign(1, other)
    return math.isnan(one) and math.isnan(other)


@dataclass(frozen=True, eq=False)
class GradientCondition:
    """Whether a tensor whose gradient a program reads has one, and of what kind.

    Attributes:
        name: of the tensor.
        index: among those of a call.
        kind: of the gradient at capture.
    """

    name: str
    index: int
    kind: Any

    def holds(self, tensors: Sequence[Any]) -> bool:
        return kind_of_gradient(tensors[self.index]) == self.kind

    def reason(self, tensors: Sequence[Any]) -> str:
        now = kind_of_gradient(tensors[self.index])
        if now is None or self.kind is None:
            was, became = ("none", "there") if self.kind is None else ("there", "none")
            return f"{self.name}: gradient {was} became {became}"
        return f"{self.name}: its gradient is of another kind"


@dataclass(frozen=True, eq=False)
class EqualInputs:
    """Tensors of one number each, which a program takes for the same number.

    Attributes:
        names: of the tensors.
        indices: among those of a call.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]

    def holds(self, tensors: Sequence[Any]) -> bool:
        values = self._read_counts(tensors)
        return values.count(values[0]) == len(values)

    def reason(self, tensors: Sequence[Any]) -> str:
        values = self._read_counts(tensors)
        i = next((i for i, v in enumerate(values) if not _is_same_number(v, values[0])), 0)
        return (
            f"{self.names[i]} is {values[i]} and {self.names[0]} is {values[0]}, "
            f"where all {len(values)} such numbers were equal"
        )

    def _read_counts(self, tensors: Sequence[Any]) -> list[float]:
        return read_counts([tensors[i] for i in self.indices])


def read_counts(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The numbers that tensors of no dimensions, alike but for that, hold; read at once, which is
    five times as fast as one by one. Zeros where they have no memory, as before the first step."""
    with Local(), torch.no_grad():
        if tensors[0].is_meta:
            return [0.0] * len(tensors)
        found: list[float] = torch.stack([*tensors]).tolist()
        return found


_grad: Any = torch._C.TensorBase.grad


def kind_of_gradient(t: torch.Tensor) -> Any:
    """What a program is made for, of the gradient of `t`; None where there is none."""
    with Local():
        grad = _grad.__get__(t)
        if grad is None:
            return None
        return (grad.__dict__.get("_spec") or grad.shape, grad.dtype, grad.device, grad.stride())


class Conditions(tuple["Condition | EqualInputs | GradientCondition | FactCondition", ...]):
    """All that a program takes for granted of the values of its inputs."""

    def failed(self, tensors: Sequence[Any]) -> str | None:
        """Why a call with these leaves needs another program, if it does."""
        for condition in self:
            if not condition.holds(tensors):
                return condition.reason(tensors)
        return None

    def counts_differ(self, tensors: Sequence[Any]) -> bool:
        """Do numbers of optimizers differ, that the program takes for equal?"""
        return any(isinstance(c, EqualInputs) and not c.holds(tensors) for c in self)
