"""Operands of a block's calls as a tape has them: tensors by number, all else by what it is."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor

from partita.tensor.spec import Spec
from partita.tensor.watch import Label

from .block_functions import is_closed, scalar_places
from .block_tape import Made, Named, NotABlock, Same, Taken, with_whole_numbers
from .symbolic import is_symbolic

__all__ = ["OperandWriter"]


_ALIKE = (Enum, Spec, torch.Generator)
"""Of what is the same object, or is not the same."""
_PLAIN = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def _describe(t: torch.Tensor) -> tuple[Any, ...]:
    """What must be alike of tensors that one program is to take."""
    with Local():
        return (
            type(t),
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            getattr(t, "_spec", None),
            t.requires_grad,
            isinstance(t, torch.nn.Parameter),
            t.is_inference(),
        )


class OperandWriter:
    """Writes what the calls of one block are given.

    Attributes:
        taken: the tensors from outside, in the order of first use.
        numbers: by the id of a tensor, which one it is.
    """

    def __init__(self, kind: type):
        self.kind = kind
        self.taken: list[torch.Tensor] = []
        self.numbers: dict[int, Made | Taken] = {}
        self._described: list[tuple[Any, ...]] = []

    def write_operands(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operands of a call, as a tape has them."""
        operands = (self.write_operand(args), self.write_operand(kwargs))
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return operands
        with Local():
            reckons_in_floats = first.is_floating_point()
        places = scalar_places(func) if reckons_in_floats else ()
        return with_whole_numbers(operands, places) if places else operands

    def write_operand(self, value: Any) -> Any:
        """An operand as a tape has it."""
        kind = type(value)
        if kind is int or kind is bool:
            return (kind, value)
        if isinstance(value, torch.Tensor):
            return self._number_tensor(value)
        if kind is float:
            return (kind, value.hex())
        if kind is Label:
            return Named(value)
        if isinstance(value, _PLAIN):
            return value
        if kind is tuple or kind is list or kind is torch.Size:
            return (kind, *map(self.write_operand, value))
        if kind is dict:
            return (kind, *((k, self.write_operand(v)) for k, v in value.items()))
        if kind is slice:
            return (kind, *map(self.write_operand, (value.start, value.stop, value.step)))
        if is_symbolic(value):
            raise NotABlock(self.kind, "it reckons with a number that is an input")
        if kind is complex or isinstance(value, (*_ALIKE, type)) or is_closed(value):
            return Same(value)
        raise NotABlock(self.kind, f"it gives torch a {kind.__name__}")

    def _number_tensor(self, t: torch.Tensor) -> Made | Taken:
        found = self.numbers.get(id(t))
        if found is not None:
            return found
        if not isinstance(t, FakeTensor):
            raise NotABlock(self.kind, "it reads a tensor for which no other stands")
        found = self.numbers[id(t)] = Taken(len(self.taken))
        self.taken.append(t)
        return found

    def describe_taken(self) -> list[tuple[Any, ...]]:
        """What each of the tensors from outside is."""
        self._described += map(_describe, self.taken[len(self._described) :])
        return self._described
