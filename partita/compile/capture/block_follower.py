"""Block followers: run a block's forward along a known tape, or trace it and record a new one.

A block's forward runs in Python each time, over stand-in tensors that have metadata only. Each
torch call is recorded and compared with the tapes of the class. As long as one matches, nothing is
traced: the stand-ins for its results are made from the tape. Once none matches (always, for the
first block of a class), the calls so far and all that follow are traced, as a new tape;
`BlockTracing` marks the nodes that this adds, and a `BlockTrace` keeps them, with those of
backward.

Since the user's Python runs in every block, its side effects happen (a cache that is filled, a
counter, a branch on the block's index); only the torch calls decide which structure a block has.

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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import count
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from partita.comm import read_autocast_state, switch_off, use_autocast_state
from partita.comm.ledger import Ledger, noting_work_in
from partita.tensor.dtensor import tagged
from partita.tensor.op_facts import VIEW_ATTRIBUTES, facts_of_function
from partita.tensor.tensor_state import HERE, Label, Spec, count_writes, own_state, state_of

from ..guards.values import ByIdentity
from .block_traces import (
    BlockTrace,
    BlockTracing,
    NotABlock,
    stand_in,
    traced_node,
)
from .capture_context import attribute_set, dispatch_listeners, unprofiled
from .equal_calls import node_of
from .fakes import BlockNumberRead, is_symbolic
from .known_masks import ATTENTION
from .recorder import LibraryCalls

# -- tapes -----------------------------------------------------------------------------------------


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

    def mark(written: Any, place: int | str) -> Any:
        is_number = place in places and type(written) is tuple and written[0] is int
        return (_IntAsFloat, written[1]) if is_number and abs(written[1]) < _EXACT_INTS else written

    (_, *args), (_, *kwargs) = operands
    return (
        (tuple, *(mark(v, i) for i, v in enumerate(args))),
        (dict, *((k, mark(v, k)) for k, v in kwargs)),
    )


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


def bind_recorded(value: Any, bind: Callable[[Any], Any]) -> Any:
    """The value of recorded operands.

    Args:
        bind: gives the values of `MadeTensor`s, `TakenTensor`s and `VaryingFloat`s.
    """
    kind = type(value)
    if kind is MadeTensor or kind is TakenTensor or kind is VaryingFloat:
        return bind(value)
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
        return {k: bind_recorded(v, bind) for k, v in rest}
    parts = [bind_recorded(v, bind) for v in rest]
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
        tuple(is_enabled() for is_enabled in _ATTENTION_KERNELS),
        casts,
    )


_ATTENTION_KERNELS = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)
"""Which kernels attention may take. Private torch: as it asks while it is traced."""


@contextmanager
def within_modes(modes: tuple[Any, ...], kind: type) -> Iterator[None]:
    """Within, torch is set to the recorded modes of a call. Raises NotABlock where it cannot be."""
    grad, inference, torch_function, dtype, kernels, casts, *marks = modes
    set_alike = (dtype, kernels) == current_modes()[3:5]
    if inference or not set_alike or any(marks):
        raise NotABlock(kind, "two of its blocks begin alike, in modes of their own")
    with ExitStack() as stack:
        if not torch_function:
            stack.enter_context(Local())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(use_autocast_state(casts or switch_off(read_autocast_state())))
        yield


# -- following a tape ------------------------------------------------------------------------------


class BlockFollower(TorchFunctionMode):
    """Follows the torch calls of one block's forward, along known tapes or recording a new one.

    Args:
        kind: the block's class.
        tapes: of earlier blocks of that class; gets a new one.
        tracing: traces calls of a new tape into the graph.
        listeners: `dispatch_listeners()` when the step began.
        varying: may floats differ between blocks of one structure?

    Attributes:
        taken: the tensors from outside, in the order of first use.
        labels: of its calls that have one, as the block's name, in order.
        operands: the recorded operands of each call, with the floats of this block.
        tape: the tape of this block: None while known ones match, set once a new one is begun or
            forward has ended.
        traced_taken, traced_made: for a new tape, by number, the fake tensors that are traced.
        gathered: those of them that are parameters gathered, with their versions then.
        is_tracing: is a call being traced, so that calls are not the block's own?
    """

    def __init__(
        self,
        kind: type,
        tapes: list[BlockTape],
        tracing: BlockTracing,
        listeners: Any,
        varying: bool,
    ):
        super().__init__()
        self.kind, self._tracing, self._floats_may_vary = kind, tracing, varying
        self._tapes, self._candidates = tapes, list(tapes)
        self._sibling: BlockTape | None = None
        self.operands: list[Any] = []
        self._writer = OperandWriter(kind)
        self.taken, self.labels = self._writer.taken, self._writer.labels
        self._stand_ins: dict[int, FakeTensor] = {}
        self._position = 0
        self._compared = 0  # tensors from outside, with those of the candidates
        self.tape: BlockTape | None = None
        self.traced_taken: list[torch.Tensor] = []
        self.traced_made: list[torch.Tensor] = []
        self.gathered: list[tuple[torch.Tensor, int]] = []
        self._recorded: dict[int, MadeTensor | TakenTensor] = {}
        self.is_tracing = False
        self._suspended = False
        self._regions = HERE.recorder.regions_begun
        self._listeners = listeners
        self._calls = LibraryCalls()
        self._ours: set[Callable[..., Any]] = set()

    # -- torch calls -------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended or self.is_tracing:
            return func(*args, **kwargs)
        follow = self._follow_attention if func is ATTENTION else self._follow_call
        return unprofiled(follow, func, args, kwargs)

    def _follow_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow a call of attention, of which the tape has no mask that need not be there."""
        mask = None

        def find_node(t: torch.Tensor) -> tuple[fx.Node, Mapping[fx.Node, fx.Node]] | None:
            nonlocal mask
            mask = t
            return self._find_node(t)

        args, kwargs = HERE.recorder.masks.leave_out(args, kwargs, find_node)
        out = self._follow_call(func, args, kwargs)
        recorded = self._writer.numbers.get(id(mask))
        if self.tape is not None and type(recorded) is MadeTensor:
            # Later calls may write it, so that another node makes it.
            node = traced_node(self.traced_made[recorded.number], self.kind)
            self.tape.masks[len(self.tape.calls) - 1] = (recorded.number, node)
        return out

    def _find_node(self, mask: torch.Tensor) -> tuple[fx.Node, Mapping[fx.Node, fx.Node]] | None:
        """The node that makes a mask, and for what others stand where it is that of another block;
        None where there is none."""
        recorded = self._writer.numbers.get(id(mask))
        if type(recorded) is not MadeTensor:
            node = node_of(mask)
            return None if node is None else (node, {})
        at = self._position
        ahead = [t.calls[at].func for t in self._candidates if at < len(t.calls)]
        if ATTENTION not in ahead:
            self._begin_tape()  # as the call that no tape has will do anyway
        if self.tape is not None:
            return traced_node(self.traced_made[recorded.number], self.kind), {}
        for tape in self._candidates:
            number, node = tape.masks.get(self._position, (None, None))
            if node is not None and number == recorded.number:
                stand = zip(tape.trace.entered, self.taken, strict=False)
                return node, {inner: traced_node(t, self.kind) for inner, t in stand}
        return None

    def _follow_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if reason := why_refused(func):
            raise NotABlock(self.kind, reason)
        operands = self._writer.write_operands(func, args, kwargs)
        modes = self._read_modes()
        if is_question(func) and not contains(operands, MadeTensor):
            # A tensor from outside may be an input of the step, so it answers for itself.
            answer = self._ask_outside(func, args, kwargs)
            call = TapedCall(func, modes, operands, self._writer.write_operand(answer))
            if self._match_call(call) is None:
                self._begin_tape(call)
                self._append_call(call, call.operands)
            return answer
        self._refuse_write(func, operands)
        call = TapedCall(func, modes, operands, None)
        taped = self._match_call(call)
        if taped is None:
            self._begin_tape(call)
            taped = self._trace_call(call)
        elif not _is_of_tensors(taped):  # as one that changes a setting of torch
            answer = self._writer.write_operand(self._ask_outside(func, args, kwargs))
            if answer != taped.result:
                raise NotABlock(self.kind, f"{func} says something else")
        return bind_recorded(taped.result, self._stand_for)

    def call_ours(self, func: Callable[..., Any], *args: Any) -> Any:
        """Follow a call of a function of partita's as if it were one of torch's."""
        if self._suspended or self.is_tracing:
            return func(*args)
        if _get_current_function_mode() is not self:
            raise NotABlock(self.kind, "it follows calls by a mode of its own")
        self._ours.add(func)
        with _pop_mode_temporarily():
            return unprofiled(self._follow_call, func, args, {})

    def refuse_always(self, reason: str) -> None:
        """Raise NotABlock, also within a call that is being traced."""
        if not self._suspended:
            raise NotABlock(self.kind, reason)

    def refuse(self, reason: str) -> None:
        """Raise NotABlock, unless what asks is a call that is being traced."""
        if not (self._suspended or self.is_tracing):
            raise NotABlock(self.kind, reason)

    def suspended(self) -> AbstractContextManager[None]:
        """Within, calls are no part of the block."""
        return attribute_set(self, "_suspended", True)

    def _refuse_write(self, func: Any, operands: Any) -> None:
        name = getattr(func, "__name__", "")
        (_, *args), (_, *kwargs) = operands
        written = [v for k, v in kwargs if k == "out"]
        if writes_first(name):
            written += args[:1]
        if any(contains(v, TakenTensor) for v in written):
            raise NotABlock(self.kind, "it writes into what it takes from outside")

    def _read_modes(self) -> tuple[Any, ...]:
        if dispatch_listeners() != self._listeners:
            raise NotABlock(self.kind, "it follows calls by a mode of its own, or what is saved")
        region, kept = HERE.recorder.marks
        begun = region - self._regions if region > self._regions else 0
        return (*current_modes(), begun, kept)

    # -- a known tape ------------------------------------------------------------------------------

    def _match_call(self, call: TapedCall) -> TapedCall | None:
        """The call of the known tapes that `call` equals, in its result too where that is known;
        None if no tape has it. Tapes that differ are dropped."""
        if self.tape is not None:
            return None
        compared, described = self._compared, self._writer.describe_taken()
        matching: list[BlockTape] = []
        matched: TapedCall | None = None
        for tape in self._candidates:
            if self._position >= len(tape.calls):
                continue
            taped = tape.calls[self._position]
            if (
                taped.func == call.func
                and taped.modes == call.modes
                and taped.operands == call.operands
                and (call.result is None or taped.result == call.result)
                and (matched is None or taped.result == matched.result)
                and tape.taken[compared : len(described)] == described[compared:]
            ):
                matching.append(tape)
                matched = matched or taped
        if matched is not None:
            self._candidates, self._compared = matching, len(described)
            self._position += 1
            self.operands.append(call.operands)
        return matched

    def _stand_for(self, tensor: MadeTensor | TakenTensor) -> torch.Tensor:
        """What the user holds of a tensor that is recorded."""
        number = tensor.number
        if type(tensor) is TakenTensor:
            return self.taken[number]
        if number not in self._stand_ins:
            tape = self.tape or self._candidates[0]
            self._stand_ins[number] = stand = stand_in(tape.made[number])
            self._writer.numbers[id(stand)] = tensor
        return self._stand_ins[number]

    def _ask_outside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func`, which reads tensors from outside. Raises NotABlock if it adds a node."""
        before = HERE.recorder.newest()
        with attribute_set(self, "is_tracing", True):
            answer = self._calls.call(func, args, kwargs)
        if HERE.recorder.newest() is not before:
            raise NotABlock(self.kind, f"{func} computes something of what it is asked of")
        return answer

    # -- a new tape --------------------------------------------------------------------------------

    def _begin_tape(self, call: TapedCall | None = None) -> None:
        """Begin a new tape: trace the calls that were matched so far; those that follow will be.

        Args:
            call: the first that no tape matches. A tape in which the call at its place differs only
                by floats becomes the sibling: where the new tape's floats differ from it they are
                recorded as `VaryingFloat`s.
        """
        if self.tape is not None:
            return
        if call is not None:
            alike = (t for t in self._candidates if self._mark_floats(t, call, int) is not None)
            self._sibling = next(alike, None)
        known = self._sibling or (self._candidates[0] if self._position else None)
        prefix = zip(known.calls[: self._position] if known else (), self.operands, strict=True)
        self.tape, self.operands = BlockTape(), []
        for taped, operands in list(prefix):
            if not _is_of_tensors(taped) or (
                is_question(taped.func) and not contains(taped.operands, MadeTensor)
            ):
                self._append_call(taped, operands)
                continue
            with within_modes(taped.modes, self.kind):
                self._trace_call(replace(taped, operands=operands))

    def _mark_floats(self, tape: BlockTape, call: TapedCall, number: Callable[[], int]) -> Any:
        """The operands of `call`, with a `VaryingFloat` where the tape's call at this place has
        another float; None where they differ in more."""
        at = len(self.operands)
        taped = tape.calls[at] if self._floats_may_vary and at < len(tape.calls) else None
        if taped is None or taped.func != call.func or taped.modes != call.modes:
            return None
        return mark_varying_floats(call.operands, taped.operands, number)

    def _append_call(self, call: TapedCall, operands: Any) -> None:
        assert self.tape is not None
        self.tape.calls.append(call)
        self.operands.append(operands)

    def _trace_call(self, call: TapedCall) -> TapedCall:
        """Run a call over traced tensors, as the next call of the new tape."""
        self._enter_taken()
        numbered, values = self._number_floats(call)
        try:
            with attribute_set(self, "is_tracing", True):
                out = self._run_traced(numbered, values)
        except Exception as error:  # which the user may catch; what it left is no part of a block
            raise NotABlock(self.kind, f"a call of torch raises {type(error).__name__}") from error
        self._number_results(out)
        numbered = replace(numbered, result=self._write_result(out))
        self._append_call(numbered, call.operands)
        return numbered

    def _number_floats(self, call: TapedCall) -> tuple[TapedCall, dict[int, float]]:
        """`call` with `VaryingFloat`s where floats differ from the sibling's, and their values."""
        operands = None
        if self._sibling is not None:
            number = count(len(self._tracing.numbers)).__next__
            operands = self._mark_floats(self._sibling, call, number)
        if operands is None:
            self._sibling = None
            return call, {}
        values = dict(varying_values_in(operands, call.operands))
        if values:
            assert self.tape is not None
            self.tape.calls_with_varying.append(len(self.operands))
        return replace(call, operands=operands), values

    def _run_traced(self, call: TapedCall, values: dict[int, float]) -> Any:
        """Run a call over traced tensors, with symbolic floats for the varying `values`."""

        def bind_operands(floats: Any) -> Any:
            known = {MadeTensor: self.traced_made, TakenTensor: self.traced_taken}
            return (
                bind_recorded(o, lambda part: known.get(type(part), floats)[part.number])
                for o in call.operands
            )

        for value in values.values():
            self._tracing.enter_number(value)
        args, kwargs = bind_operands(self._tracing.symbols)
        try:
            with self._tracing.tracing():
                return self._run(call.func, args, kwargs)
        except BlockNumberRead:
            self._tracing.discard_last_call(self.kind)
        args, kwargs = bind_operands(values)
        with self._tracing.tracing():
            out = self._run(call.func, args, kwargs)
        self._tracing.pass_numbers(self.kind, call.func, out, values)
        return out

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`func(*args, **kwargs)`, during which code of the user's is heard, if any runs."""
        assert self.tape is not None
        work = Ledger()
        with noting_work_in(work):
            if func in self._ours:
                out = func(*args, **kwargs)
            else:
                out = self._calls.call(func, args, kwargs)
        self.tape.work.add_work(work)  # of a call that was not refused
        return out

    def _enter_taken(self) -> None:
        """Enter the tensors from outside that have no traced tensor yet."""
        assert self.tape is not None
        with attribute_set(self, "is_tracing", True):
            for t in self.taken[len(self.traced_taken) :]:
                with Unheard():
                    if t.is_inference():  # torch does not count who writes it
                        raise NotABlock(self.kind, "it takes a tensor of inference mode")
                inner = self._tracing.enter_tensor(t)
                if (spec := getattr(t, "_spec", None)) is not None:
                    tagged(inner, spec)
                if (shard := state_of(t).gathered_from) is not None:
                    own_state(inner).gathered_from = shard
                self._recorded[id(inner)] = TakenTensor(len(self.traced_taken))
                self.traced_taken.append(inner)
        self.tape.taken = list(self._writer.describe_taken())

    def _number_results(self, out: Any) -> None:
        """Number the tensors that a call has made."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self._recorded:
                self._number_made(out)
        elif isinstance(out, (tuple, list)):
            for part in out:
                self._number_results(part)
        elif isinstance(out, dict):
            raise NotABlock(self.kind, "a call of torch gives a dict")

    def _number_made(self, out: torch.Tensor) -> int:
        assert self.tape is not None
        if not isinstance(out, FakeTensor):
            raise NotABlock(self.kind, "it makes a tensor that has memory")
        if out.is_conj() or out.is_neg() or out.is_inference():
            raise NotABlock(self.kind, "it makes a tensor that is more than its numbers")
        number = len(self.traced_made)
        self._recorded[id(out)] = MadeTensor(number)
        self.traced_made.append(out)
        self.tape.made[number] = out
        if state_of(out).gathered_from is not None:
            self.gathered.append((out, count_writes(out)))
        return number

    def _write_result(self, out: Any) -> Any:
        """The result of a traced call, as recorded."""
        if isinstance(out, torch.Tensor):
            return self._recorded[id(out)]
        if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
            return (type(out), *map(self._write_result, out))
        recorded = self._writer.write_operand(out)
        if type(recorded) is ByIdentity:
            raise NotABlock(self.kind, f"a call of torch gives a {type(out).__name__}")
        return recorded

    def admit(self, wire: Any, value: torch.Tensor) -> None:
        """Record that a traced plain tensor is taken as equal on all ranks of `wire`."""
        assert self.tape is not None
        recorded = self._recorded.get(id(value))
        if recorded is None or type(recorded) is MadeTensor:
            with torch.no_grad(), Local():
                recorded = MadeTensor(self._number_made(value.clone()))
        self.tape.admitted.append((wire, recorded))

    # -- the end -----------------------------------------------------------------------------------

    def finish_tape(self) -> dict[int, FakeTensor]:
        """Decide which tape the block has, and finish its trace.

        Returns:
            By number, the stand-ins of made tensors that are still referenced from outside, which
            the caller has to replace by what the graph makes.
        """
        ended = [t for t in self._candidates if len(t.calls) == self._position]
        self._writer.numbers.clear()
        held = {}
        while self._stand_ins:
            number, stand = self._stand_ins.popitem()
            if sys.getrefcount(stand) > 2:  # this name, and the call that asks
                held[number] = stand
            del stand
        for stand in held.values():
            with Local():
                if stand.grad_fn is not None:
                    raise NotABlock(self.kind, "a result has a history that torch did not announce")
        if self.tape is None:
            self.tape = next((t for t in ended if t.escapes.issuperset(held)), None)
        if self.tape is None:
            self._begin_tape()
        assert self.tape is not None
        if self.tape not in self._tapes:
            self._enter_taken()
            self.tape.escapes = frozenset(held)
            self._finish_trace(self.tape)
            self._tapes.append(self.tape)
        return dict(sorted(held.items()))

    def _finish_trace(self, tape: BlockTape) -> None:
        """Set the trace of a new tape.

        Raises:
            NotABlock: it writes tensors from outside, or gives views of them.
        """
        taken, made, tracing = self.traced_taken, self.traced_made, self._tracing
        with Unheard():  # nor by a mode around an update, which is traced by the same
            if tracing.written_places(taken):
                raise NotABlock(self.kind, "it writes into what it takes from outside")
            if any(t._version != v for t, v in self.gathered):
                raise NotABlock(self.kind, "it writes into a gathered parameter")
            if any(t.layout is not torch.strided for t in (*taken, *made)):
                raise NotABlock(self.kind, "it computes with sparse tensors")
            memory = {t.untyped_storage()._cdata for t in taken}
            if any(made[n].untyped_storage()._cdata in memory for n in tape.escapes):
                raise NotABlock(self.kind, "it gives a view of what it takes from outside")
            results = {n: made[n] for n in sorted(tape.escapes) if made[n].requires_grad}
            takes = {i: t for i, t in enumerate(taken) if t.requires_grad}
        tape.made = {n: stand_in(t) for n, t in enumerate(made)}  # type: ignore[arg-type]
        tape.trace = BlockTrace(
            tracing.entered,
            {n: traced_node(t, self.kind) for n, t in enumerate(made)},
            tracing.nodes,
            tracing.region,
            tuple(self.labels),
            tracing.numbers,
            kind=self.kind,
            results=results,
            takes=takes,
        )


def _is_of_tensors(call: TapedCall) -> bool:
    """Does a call take or give tensors?"""
    return any(
        contains(v, k) for v in (call.operands, call.result) for k in (MadeTensor, TakenTensor)
    )
