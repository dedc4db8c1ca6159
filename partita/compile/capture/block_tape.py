"""Block tapes: the torch calls of a block's forward, recorded so that two blocks can be compared.

A tape is a list of calls: the function, the torch modes around it, its operands and its result. A
tensor is recorded by number, everything else by value. So two blocks have equal tapes if they call
the same functions on values that come about in the same way; one trace then serves both.

    y = 0.5 * x      TapedCall(mul, modes, operands=((tuple, (float, "0x1.0p-1"), TakenTensor(0)),
                               (dict,)), result=MadeTensor(0))

A float that differs between blocks of otherwise equal tapes becomes a `VaryingFloat`, which is an
input of the trace. `OperandWriter` records operands, `bind_recorded` turns them back into values.
`why_refused` names the functions that a block cannot call, `current_modes` are the modes of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor

from partita.comm import read_autocast_state, switch_off, use_autocast_state
from partita.comm.ledger import Ledger
from partita.tensor.op_facts import VIEW_ATTRIBUTES, facts_of_function
from partita.tensor.tensor_state import Label, Spec

from ..guards.values import ByIdentity
from .symbolic import is_symbolic


class NotABlock(BaseException):
    """A module cannot be traced once for all alike: capture starts again with its class excluded.

    A BaseException, so that no `except Exception` of the user's catches it.
    """

    def __init__(self, kind: type, reason: str):
        super().__init__(f"{kind.__name__}: {reason}")
        self.kind, self.reason = kind, reason


class VaryingFloatRead(NotABlock):
    """Torch reads a varying float of this class: capture starts again with its floats constant."""

    def __init__(self, kind: type):
        super().__init__(kind, "a number that differs between its blocks is read")


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that the tape's calls make: the `number`-th of them."""

    number: int


@dataclass(frozen=True, slots=True)
class TakenTensor:
    """A tensor from outside the block: the `number`-th in the order of first use."""

    number: int


class _IntAsFloat:
    """The recorded type of an int that torch computes with as the float of that value."""


@dataclass(frozen=True, slots=True)
class VaryingFloat:
    """A float that differs between blocks of one structure, by number.

    It equals every float that `_may_vary`, so that a block matches whatever its value is.
    """

    number: int

    def __eq__(self, other: object) -> bool:
        return type(other) is VaryingFloat or _may_vary(other)

    def __hash__(self) -> int:
        return hash(float)


def _may_vary(written: Any) -> bool:
    """Is it a recorded float that may have another value in another block?

    Not zero, infinite or NaN: torch and symbolic numbers treat these in ways of their own.
    """
    if type(written) is not tuple or len(written) != 2 or written[0] not in (float, _IntAsFloat):
        return False
    value = _float_of(written)
    return value != 0 and math.isfinite(value)


def _float_of(written: tuple[type, Any]) -> float:
    """The value of a recorded float."""
    return float.fromhex(written[1]) if written[0] is float else float(written[1])


def _mark_ints_as_floats(operands: Any, places: frozenset[int | str]) -> Any:
    """Recorded operands in which the ints at these positions and keywords are `_IntAsFloat`."""
    (_, *args), (_, *kwargs) = operands
    return (
        (tuple, *(_mark_int_as_float(v) if i in places else v for i, v in enumerate(args))),
        (dict, *((k, _mark_int_as_float(v) if k in places else v) for k, v in kwargs)),
    )


def _mark_int_as_float(written: Any) -> Any:
    is_int = type(written) is tuple and len(written) == 2 and written[0] is int
    return (_IntAsFloat, written[1]) if is_int and abs(written[1]) < _EXACT_INTS else written


_EXACT_INTS = 2**53
"""Ints below this size are different floats."""


@dataclass(frozen=True, slots=True)
class _CallLabel:
    """The label of a call in ledgers and messages: every other label is equal to it."""

    value: str

    def __eq__(self, other: object) -> bool:
        return type(other) is _CallLabel

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class TapedCall:
    """One call of torch.

    Attributes:
        func: the function that is called.
        modes: `current_modes()` and the remat region when it is called.
        operands: (args, kwargs) as recorded.
        result: as recorded; None until the call is traced.
    """

    func: Any
    modes: tuple[Any, ...]
    operands: Any
    result: Any


@dataclass(eq=False)
class BlockTape:
    """The calls of blocks of one structure, in order.

    Attributes:
        calls: of torch.
        taken: for each tensor from outside its metadata, in the order of first use.
        made: by number, for each tensor that the calls make one of the same metadata.
        escapes: the numbers of made tensors that were still referenced when forward had returned.
        admitted: (wire, value) for each plain tensor that is taken as equal on all ranks.
        calls_with_varying: the indices of calls whose operands contain a `VaryingFloat`.
        work: the matrix products of its calls.
        masks: by the index of a call of attention whose mask its calls make, the number of that,
            and the node that makes it in the trace.
        trace: the `BlockTrace` of its calls, once forward has returned.
    """

    calls: list[TapedCall] = field(default_factory=list)
    taken: list[tuple[Any, ...]] = field(default_factory=list)
    made: dict[int, FakeTensor] = field(default_factory=dict)
    escapes: frozenset[int] = frozenset()
    admitted: list[tuple[Any, MadeTensor | TakenTensor]] = field(default_factory=list)
    calls_with_varying: list[int] = field(default_factory=list)
    work: Ledger = field(default_factory=Ledger)
    masks: dict[int, tuple[int, fx.Node]] = field(default_factory=dict)
    trace: Any = None

    def varying_values(self, operands: Sequence[Any]) -> dict[int, float]:
        """The varying floats, by number, of a block whose calls have these recorded operands."""
        values: dict[int, float] = {}
        for place in self.calls_with_varying:
            values.update(varying_values_in(self.calls[place].operands, operands[place]))
        return values


def mark_varying_floats(written: Any, beside: Any, number: Callable[[], int]) -> Any:
    """`written` with a `VaryingFloat` wherever a float differs from the one in `beside`.

    Args:
        written, beside: recorded operands of a call in two blocks.
        number: gives the next number.

    Returns:
        None if they differ in anything else, or in a float that may not vary.
    """
    if type(beside) is VaryingFloat:
        return VaryingFloat(number()) if _may_vary(written) else None
    if type(written) is not tuple or type(beside) is not tuple:
        return written if written == beside else None
    if _may_vary(written) and _may_vary(beside):
        return written if written == beside else VaryingFloat(number())
    if len(written) != len(beside):
        return None
    parts = tuple(mark_varying_floats(w, b, number) for w, b in zip(written, beside, strict=True))
    same = (p is not None or w is None for p, w in zip(parts, written, strict=True))
    return parts if all(same) else None


def varying_values_in(operands: Any, written: Any) -> Iterator[tuple[int, float]]:
    """(number, value) for each `VaryingFloat` of `operands`; the values are those of `written`."""
    if type(operands) is VaryingFloat:
        yield operands.number, written[1] if written[0] is _IntAsFloat else _float_of(written)
    elif type(operands) is tuple:
        for part, written_part in zip(operands, written, strict=True):
            yield from varying_values_in(part, written_part)


def bind_recorded(
    value: Any,
    made: Callable[[int], Any],
    taken: Callable[[int], Any],
    number: Callable[[int], Any] | None = None,
) -> Any:
    """The value of recorded operands.

    Args:
        made, taken, number: give, by number, the values of made tensors, of tensors from outside
            and of varying floats.
    """
    kind = type(value)
    if kind is VaryingFloat:
        assert number is not None
        return number(value.number)
    if kind is MadeTensor:
        return made(value.number)
    if kind is TakenTensor:
        return taken(value.number)
    if kind is ByIdentity or kind is _CallLabel:
        return value.value
    if kind is not tuple:
        return value
    of, *rest = value
    if of is int or of is bool or of is _IntAsFloat:
        return rest[0]
    if of is float:
        return float.fromhex(rest[0])
    if of is dict:
        return {k: bind_recorded(v, made, taken, number) for k, v in rest}
    parts = [bind_recorded(v, made, taken, number) for v in rest]
    if of is slice:
        return slice(*parts)
    if of is tuple or of is list or of is torch.Size:
        return of(parts)
    return of(*parts) if hasattr(of, "_fields") else of(parts)  # as torch.max gives them


def contains(value: Any, kind: type) -> bool:
    """Is a part of a recorded value of this class?"""
    if type(value) is kind:
        return True
    return type(value) is tuple and any(contains(v, kind) for v in value)


# -- recording operands ----------------------------------------------------------------------------


_ALIKE = (Enum, Spec, torch.Generator)
"""Types whose objects are compared by identity."""
_PLAIN = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def _describe(t: torch.Tensor) -> tuple[Any, ...]:
    """The metadata in which tensors from outside must agree for one trace to take either."""
    with Unheard():
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
    """Records the operands of one block's calls.

    Attributes:
        taken: the tensors from outside, in the order of first use.
        numbers: by the id of a tensor, how it is recorded.
        labels: of the calls that have one, in order.
    """

    def __init__(self, kind: type):
        self.kind = kind
        self.labels: list[str] = []
        self.taken: list[torch.Tensor] = []
        self.numbers: dict[int, MadeTensor | TakenTensor] = {}
        self._described: list[tuple[Any, ...]] = []

    def write_operands(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The recorded (args, kwargs) of a call."""
        operands = (self.write_operand(args), self.write_operand(kwargs))
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return operands
        with Unheard():
            computes_in_floats = first.is_floating_point()
        places = scalar_places(func) if computes_in_floats else ()
        return _mark_ints_as_floats(operands, places) if places else operands

    def write_operand(self, value: Any) -> Any:
        """An operand as recorded. Raises NotABlock for one that cannot be compared."""
        kind = type(value)
        if kind is int or kind is bool:
            return (kind, value)
        if isinstance(value, torch.Tensor):
            return self._number_tensor(value)
        if kind is float:
            return (kind, value.hex())
        if kind is Label:
            self.labels.append(value)
            return _CallLabel(value)
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
        if kind is complex or isinstance(value, (*_ALIKE, type)) or _is_closed(value):
            return ByIdentity(value)
        raise NotABlock(self.kind, f"it gives torch a {kind.__name__}")

    def _number_tensor(self, t: torch.Tensor) -> MadeTensor | TakenTensor:
        found = self.numbers.get(id(t))
        if found is not None:
            return found
        if not isinstance(t, FakeTensor):
            raise NotABlock(self.kind, "it reads a tensor for which no other stands")
        found = self.numbers[id(t)] = TakenTensor(len(self.taken))
        self.taken.append(t)
        return found

    def describe_taken(self) -> list[tuple[Any, ...]]:
        """The metadata of each tensor from outside."""
        self._described += map(_describe, self.taken[len(self._described) :])
        return self._described


def _is_closed(value: Any) -> bool:
    """Is it a function that holds nothing but what is written in it?"""
    if isinstance(value, FunctionType):
        return not value.__closure__ and not value.__defaults__ and not value.__kwdefaults__
    return isinstance(value, (BuiltinFunctionType, torch._ops.OpOverload))


def scalar_places(func: Any) -> frozenset[int | str]:
    """The positions and keywords at which a torch function takes a number to compute with, and
    never a size or a dimension.

    With a float tensor, an int there has the effect of the float of that value.
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


# -- functions that a block may call ---------------------------------------------------------------

_REFUSED_ATTRIBUTES = frozenset(
    "grad data grad_fn _base _version _grad _grad_fn _backward_hooks output_nr retains_grad".split()
)


def why_refused(func: Any) -> str:
    """Why a block cannot call `func`, as words for an error; "" where it can.

    While a block is followed its tensors have metadata and nothing else: no history, no gradient,
    no memory.
    """
    name = getattr(func, "__name__", "")
    if facts_of_function(name).needs_itself or name in ("__set__", "__delete__"):
        return f"it calls {name} of a tensor"
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute in _REFUSED_ATTRIBUTES:
            return f"it asks for .{attribute} of a tensor"
    if getattr(func, "__module__", "") == "torch.autograd" and name == "grad":
        return "it asks for gradients"
    return ""


def writes_first(name: str) -> bool:
    """Does a method or function of this name write into its first operand?"""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")


_NO_WRITES = ("__invert__", "__index__", "__int__", "__init__")


def is_question(func: Any) -> bool:
    """Does `func` read metadata of a tensor and make none?"""
    name = getattr(func, "__name__", "")
    return facts_of_function(name).is_question or (
        name == "__get__" and getattr(func.__self__, "__name__", "") not in VIEW_ATTRIBUTES
    )


# -- torch modes -----------------------------------------------------------------------------------


def current_modes() -> tuple[Any, ...]:
    """The settings of torch that decide what a call does."""
    # Private, but one question for all devices: a block asks it often.
    casts = read_autocast_state() if torch._C._is_any_autocast_enabled() else None
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_torch_function_enabled(),
        torch.get_default_dtype(),
        _attention_kernels(),
        casts,
    )


def _attention_kernels() -> tuple[bool, ...]:
    """The kernels that attention may take. Private torch: as it asks while it is traced."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


@contextmanager
def within_modes(modes: tuple[Any, ...], kind: type) -> Iterator[None]:
    """Within, torch is set to the recorded modes of a call. Raises NotABlock where it cannot be."""
    grad, inference, torch_function, dtype, kernels, casts, *marks = modes
    set_alike = dtype is torch.get_default_dtype() and kernels == _attention_kernels()
    if inference or not set_alike or any(marks):
        raise NotABlock(kind, "two of its blocks begin alike, in modes of their own")
    with ExitStack() as stack:
        if not torch_function:
            stack.enter_context(Local())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(use_autocast_state(casts or switch_off(read_autocast_state())))
        yield
