"""Block tapes: what a module's forward asks of torch, written so that two can be compared.

A tape is a list of calls. Tensors stand in it by number, other operands by value; so the tapes of
two blocks are equal where they call the same of torch, on values that come about in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor

from partita.tensor.spec import Spec
from partita.tensor.watch import Label

from .symbolic import is_symbolic

__all__ = [
    "BlockTape",
    "IntAsFloat",
    "Made",
    "Named",
    "NotABlock",
    "Number",
    "NumbersRead",
    "OperandWriter",
    "Same",
    "Taken",
    "TapedCall",
    "contains",
    "is_varying",
    "number_floats",
    "numbers_of",
    "with_tensors",
    "with_whole_numbers",
]


class NotABlock(BaseException):
    """A module does what no call of a program can do for it: its class is traced as it runs.

    No `except Exception` of the user's may catch it.
    """

    def __init__(self, kind: type, reason: str):
        super().__init__(f"{kind.__name__}: {reason}")
        self.kind, self.reason = kind, reason


class NumbersRead(NotABlock):
    """A number that differs between blocks of a class decides what they call: it is a constant."""

    def __init__(self, kind: type):
        super().__init__(kind, "a number that differs between its blocks is read")


@dataclass(frozen=True, slots=True)
class Made:
    """The tensor that a tape makes under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The tensor that a tape takes from outside under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Same:
    """An object that is compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class IntAsFloat:
    """In a tape the kind of an int that torch takes for the float of that value."""


@dataclass(frozen=True, slots=True)
class Number:
    """A float that differs between blocks of one structure, under this number: any other one that
    can be reckoned with in the same way is as good."""

    number: int

    def __eq__(self, other: object) -> bool:
        return type(other) is Number or is_varying(other)

    def __hash__(self) -> int:
        return hash(float)


def is_varying(written: Any) -> bool:
    """Is it a float, as a tape has it, that may be another in another block?

    Not zero, nor infinite: with these numbers are reckoned otherwise.
    """
    if type(written) is not tuple or len(written) != 2 or written[0] not in (float, IntAsFloat):
        return False
    value = _value(written)
    return value != 0 and math.isfinite(value)


def _value(written: tuple[type, Any]) -> float:
    """Of a float as a tape has it."""
    return float.fromhex(written[1]) if written[0] is float else float(written[1])


def with_whole_numbers(operands: Any, places: frozenset[int | str]) -> Any:
    """Operands in which the ints at these places are `IntAsFloat`."""
    (_, *args), (_, *kwargs) = operands
    return (
        (tuple, *(_as_whole(v) if i in places else v for i, v in enumerate(args))),
        (dict, *((k, _as_whole(v) if k in places else v) for k, v in kwargs)),
    )


def _as_whole(written: Any) -> Any:
    is_int = type(written) is tuple and len(written) == 2 and written[0] is int
    return (IntAsFloat, written[1]) if is_int and abs(written[1]) < _EXACT else written


_EXACT = 2**53
"""Of ints below it, no two are the same float."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a call is called: each other one is as good."""

    value: str

    def __eq__(self, other: object) -> bool:
        return type(other) is Named

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class TapedCall:
    """One call of torch.

    Attributes:
        func: what is called.
        around: the modes in which it is.
        operands: args and kwargs, tensors by number.
        result: likewise.
    """

    func: Any
    around: tuple[Any, ...]
    operands: Any
    result: Any


@dataclass(eq=False)
class BlockTape:
    """What a block of one structure calls, in order.

    Attributes:
        calls: of torch.
        taken: what it takes from outside, described, in the order of first use.
        made: by number, tensors like those that it makes.
        escapes: the numbers of those that were still held when its forward had returned.
        admitted: plain values that were taken for equal on all ranks of a wire.
        numbered: the places of the calls in whose operands there is a `Number`.
    """

    calls: list[TapedCall] = field(default_factory=list)
    taken: list[tuple[Any, ...]] = field(default_factory=list)
    made: dict[int, FakeTensor] = field(default_factory=dict)
    escapes: frozenset[int] = frozenset()
    admitted: list[tuple[Any, Made | Taken]] = field(default_factory=list)
    numbered: list[int] = field(default_factory=list)

    def numbers(self, operands: Sequence[Any]) -> dict[int, float]:
        """Its numbers in a block that is of this structure, whose calls have these `operands`."""
        found: dict[int, float] = {}
        for place in self.numbered:
            found.update(numbers_of(self.calls[place].operands, operands[place]))
        return found


def number_floats(written: Any, beside: Any, number: Callable[[], int]) -> Any:
    """Operands in which floats that differ from those `beside` are `Number`s.

    None where something else differs, or a float that cannot vary.
    """
    if type(beside) is Number:
        return Number(number()) if is_varying(written) else None
    if type(written) is not tuple or type(beside) is not tuple:
        return written if written == beside else None
    if is_varying(written) and is_varying(beside):
        return written if written == beside else Number(number())
    if len(written) != len(beside):
        return None
    parts = tuple(number_floats(w, b, number) for w, b in zip(written, beside, strict=True))
    same = (p is not None or w is None for p, w in zip(parts, written, strict=True))
    return parts if all(same) else None


def numbers_of(operands: Any, written: Any) -> Iterator[tuple[int, float]]:
    """The values that `written` has where `operands` have `Number`s."""
    if type(operands) is Number:
        yield operands.number, written[1] if written[0] is IntAsFloat else _value(written)
    elif type(operands) is tuple:
        for one, other in zip(operands, written, strict=True):
            yield from numbers_of(one, other)


def with_tensors(
    value: Any,
    made: Callable[[int], Any],
    taken: Callable[[int], Any],
    number: Callable[[int], Any] | None = None,
) -> Any:
    """What a tape has written, with these tensors, and these numbers."""
    kind = type(value)
    if kind is Number:
        assert number is not None
        return number(value.number)
    if kind is Made:
        return made(value.number)
    if kind is Taken:
        return taken(value.number)
    if kind is Same or kind is Named:
        return value.value
    if kind is not tuple:
        return value
    of, *rest = value
    if of is int or of is bool or of is IntAsFloat:
        return rest[0]
    if of is float:
        return float.fromhex(rest[0])
    if of is dict:
        return {k: with_tensors(v, made, taken, number) for k, v in rest}
    parts = [with_tensors(v, made, taken, number) for v in rest]
    if of is slice:
        return slice(*parts)
    if of is tuple or of is list or of is torch.Size:
        return of(parts)
    return of(*parts) if hasattr(of, "_fields") else of(parts)  # as torch.max gives them


def contains(value: Any, kind: type) -> bool:
    if type(value) is kind:
        return True
    return type(value) is tuple and any(contains(v, kind) for v in value)


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


def is_closed(value: Any) -> bool:
    """Is it a function that holds nothing but what is written in it?"""
    if isinstance(value, FunctionType):
        return not value.__closure__ and not value.__defaults__ and not value.__kwdefaults__
    return isinstance(value, (BuiltinFunctionType, torch._ops.OpOverload))


def scalar_places(func: Any) -> frozenset[int | str]:
    """Where among its operands a function of torch takes a number of any kind for what it reckons
    with, and never a size or a dimension: positions and keywords.

    A tensor of floats takes an int there as it takes the float of that value.
    """
    owner, _, name = getattr(func, "__qualname__", "").rpartition(".")
    if owner not in ("TensorBase", "Tensor", "_VariableFunctionsClass"):
        return frozenset()  # Python's own functions may do with a number what they like
    return _scalar_places(name.strip("_"))


@cache
def _scalar_places(name: str) -> frozenset[int | str]:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return frozenset()
    scalars: set[int | str] = set()
    others: set[int | str] = set()
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        if not arguments or str(arguments[0].type) != "Tensor":
            continue  # of Python's numbers and lists, for scripts
        for position, argument in enumerate(arguments):
            kind = str(argument.type)
            if "Tensor" not in kind:
                found = scalars if "number" in kind else others
                found |= {argument.name} if argument.kwarg_only else {position, argument.name}
    return frozenset(scalars - others)
