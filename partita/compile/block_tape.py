"""Block tapes: what a module's forward asks of torch, so that a second one like it is not traced.

While a step is captured, the forward of a block runs over tensors that only say what they are. What
it calls of torch, and on which values, is its tape. A block whose calls are those of a tape is of
that structure: nothing is traced for it, and the graph gets a call of what was traced before. The
user's Python runs in every block, so whatever it does besides (a cache that it fills, a counter, a
branch on its number) is done; only what it asks of torch decides which structure it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode_temporarily,
)

from partita.tensor.engine import saving_hooks
from partita.tensor.spec import Spec
from partita.tensor.watch import HERE, Label

from .symbolic import is_symbolic

__all__ = [
    "BlockTape",
    "Follower",
    "Made",
    "NotABlock",
    "Taken",
    "TapedCall",
    "described",
    "stand_in",
    "who_hears",
]


class NotABlock(BaseException):
    """A module does what no call of a program can do for it: its class is traced as it runs.

    No `except Exception` of the user's may catch it.
    """

    def __init__(self, kind: type, reason: str):
        super().__init__(f"{kind.__name__}: {reason}")
        self.kind, self.reason = kind, reason


@dataclass(frozen=True, slots=True)
class Made:
    """The tensor that a tape makes under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The tensor that a tape takes from outside under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Same:
    """An object that is compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class _Called:
    """What a call is called: each other one is as good."""

    value: str

    def __eq__(self, other: object) -> bool:
        return type(other) is _Called

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
    """

    calls: list[TapedCall] = field(default_factory=list)
    taken: list[tuple[Any, ...]] = field(default_factory=list)
    made: dict[int, FakeTensor] = field(default_factory=dict)
    escapes: frozenset[int] = frozenset()
    admitted: list[tuple[Any, Made | Taken]] = field(default_factory=list)


_REFUSED = frozenset(
    """backward register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ detach_
    set_ resize_ resize_as_ item tolist __bool__ __float__ __int__ __index__ is_nonzero numpy
    data_ptr untyped_storage storage register_multi_grad_hook to_dlpack __dlpack__ share_memory_
    as_subclass _make_subclass __reduce_ex__ __deepcopy__ __setstate__ pin_memory equal""".split()
)
"""What a tensor that another stands for must not be asked."""
_REFUSED_ATTRIBUTES = frozenset(
    "grad data grad_fn _base _version _grad _grad_fn _backward_hooks output_nr retains_grad".split()
)
_ALIKE = (Enum, Spec, torch.Generator)
"""Of what is the same object, or is not the same."""
_CASTING = ("cpu", "cuda")
_PLAIN = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def described(t: torch.Tensor) -> tuple[Any, ...]:
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


class Follower(TorchFunctionMode):
    """Follows the forward of one block: along the tapes that it may be of, or writing a new one.

    Args:
        kind: the block's class.
        tapes: of blocks of that class.
        trace: runs a call for a new tape, and what it makes becomes part of the graph.
        heard: `who_hears()` as the step began.

    Attributes:
        taken: the tensors from outside, in the order of first use.
        tape: the one that this block is of, once its forward has ended.
        inner: for a new tape what it takes and makes, as it is traced.
    """

    def __init__(self, kind: type, tapes: Sequence[BlockTape], trace: Any, heard: Any):
        super().__init__()
        self.kind, self._known, self._trace = kind, tapes, trace
        self._candidates = list(tapes)
        self.taken: list[torch.Tensor] = []
        self._described: list[tuple[Any, ...]] = []
        self._stands: dict[int, FakeTensor] = {}
        self._numbers: dict[int, Made | Taken] = {}
        self._at = 0
        self.tape: BlockTape | None = None
        self.inner_taken: list[torch.Tensor] = []
        self.inner_made: list[torch.Tensor] = []
        self._inner: dict[int, Made | Taken] = {}
        self.inside = False
        self._suspended = False
        self._regions = HERE.recorder.regions_begun
        self._heard = heard

    # -- what is asked -----------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended or self.inside:
            return func(*args, **kwargs)
        self._refuse(func)
        operands = (self._written(args), self._written(kwargs))
        around = self._around()
        if _is_question(func) and not _holds(operands, Made):
            # What comes from outside may be an input of the step: it is asked itself.
            answer = self._outside(func, args, kwargs)
            call = TapedCall(func, around, operands, self._written(answer))
            if self._follow(call, call.result) is None:
                self._begin_tape()
                self._append(call)
            return answer
        self._refuse_write(func, operands)
        call = TapedCall(func, around, operands, None)
        found = self._follow(call, None)
        if found is not None and not _is_of_tensors(found):
            self._set(found, args, kwargs)
        if found is None:
            self._begin_tape()
            found = self._trace_call(call)
        made = self._like()
        return _built(found.result, lambda n: self._stand(n, made[n]), self.taken.__getitem__)

    def call(self, func: Callable[..., Any], *args: Any) -> Any:
        """A function of ours that torch does not know, as one of its own."""
        if self._suspended or self.inside:
            return func(*args)
        if _get_current_function_mode() is not self:
            raise NotABlock(self.kind, "it follows calls by a mode of its own")
        with _pop_mode_temporarily():
            return self.__torch_function__(func, (), args)

    def refuse_always(self, reason: str) -> None:
        """Raise NotABlock, also within a call that is being traced."""
        if not self._suspended:
            raise NotABlock(self.kind, reason)

    def refuse(self, reason: str) -> None:
        """Raise NotABlock, unless what asks is a call that is being traced."""
        if not (self._suspended or self.inside):
            raise NotABlock(self.kind, reason)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within, what is called is no part of the block."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def _refuse(self, func: Any) -> None:
        name = getattr(func, "__name__", "")
        if name in _REFUSED or name in ("__set__", "__delete__"):
            raise NotABlock(self.kind, f"it calls {name} of a tensor")
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute in _REFUSED_ATTRIBUTES:
                raise NotABlock(self.kind, f"it asks for .{attribute} of a tensor")
        if getattr(func, "__module__", "") == "torch.autograd" and name == "grad":
            raise NotABlock(self.kind, "it asks for gradients")

    def _refuse_write(self, func: Any, operands: Any) -> None:
        name = getattr(func, "__name__", "")
        (_, *args), (_, *kwargs) = operands
        written = [v for k, v in kwargs if k == "out"]
        if _writes_first(name):
            written += args[:1]
        if any(_holds(v, Taken) for v in written):
            raise NotABlock(self.kind, "it writes into what it takes from outside")

    def _around(self) -> tuple[Any, ...]:
        if who_hears() != self._heard:
            raise NotABlock(self.kind, "it follows calls by a mode of its own, or what is saved")
        region, kept, budget = HERE.recorder.marks
        if torch._C._is_any_autocast_enabled():
            casts: Any = tuple(
                (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _CASTING
            )
        else:
            casts = None
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch._C._is_torch_function_enabled(),
            torch.get_default_dtype(),
            _attention_kernels(),
            casts,
            region - self._regions if region > self._regions else 0,
            kept,
            budget,
        )

    # -- tensors by number -------------------------------------------------------------------------

    def _written(self, value: Any) -> Any:
        """An operand as a tape has it."""
        kind = type(value)
        if kind is int or kind is bool:
            return (kind, value)
        if isinstance(value, torch.Tensor):
            return self._number(value)
        if kind is float:
            return (kind, value.hex())
        if kind is Label:
            return _Called(value)
        if isinstance(value, _PLAIN):
            return value
        if kind is tuple or kind is list or kind is torch.Size:
            return (kind, *map(self._written, value))
        if kind is dict:
            return (kind, *((k, self._written(v)) for k, v in value.items()))
        if kind is slice:
            return (kind, *map(self._written, (value.start, value.stop, value.step)))
        if is_symbolic(value):
            raise NotABlock(self.kind, "it reckons with a number that is an input")
        if kind is complex or isinstance(value, (*_ALIKE, type)) or _is_closed(value):
            return _Same(value)
        raise NotABlock(self.kind, f"it gives torch a {kind.__name__}")

    def _number(self, t: torch.Tensor) -> Made | Taken:
        found = self._numbers.get(id(t))
        if found is not None:
            return found
        if not isinstance(t, FakeTensor):
            raise NotABlock(self.kind, "it reads a tensor for which no other stands")
        found = self._numbers[id(t)] = Taken(len(self.taken))
        self.taken.append(t)
        return found

    # -- along a tape ------------------------------------------------------------------------------

    def _follow(self, call: TapedCall, result: Any) -> TapedCall | None:
        """The call of a known tape that this one is, if it is one; a `result` must be equal."""
        if self.tape is not None:
            return None
        described_now = self._describe()
        kept: list[BlockTape] = []
        found = None
        for tape in self._candidates:
            if self._at >= len(tape.calls):
                continue
            one = tape.calls[self._at]
            if (
                one.func == call.func
                and one.around == call.around
                and one.operands == call.operands
                and (result is None or one.result == result)
                and (found is None or one.result == found.result)
                and tape.taken[: len(described_now)] == described_now
            ):
                kept.append(tape)
                found = found or one
        if found is not None:
            self._candidates = kept
            self._at += 1
        return found

    def _describe(self) -> list[tuple[Any, ...]]:
        self._described += map(described, self.taken[len(self._described) :])
        return self._described

    def _like(self) -> dict[int, FakeTensor]:
        return (self.tape or self._candidates[0]).made

    def _stand(self, number: int, like: FakeTensor) -> torch.Tensor:
        if number not in self._stands:
            self._stands[number] = stand = stand_in(like)
            self._numbers[id(stand)] = Made(number)
        return self._stands[number]

    def _set(self, found: TapedCall, args: Any, kwargs: Any) -> None:
        """A call that sets how torch is set, and has nothing to do with tensors."""
        if self._written(self._outside(found.func, args, kwargs)) != found.result:
            raise NotABlock(self.kind, f"{found.func} says something else")

    def _outside(self, func: Any, args: Any, kwargs: Any) -> Any:
        before, self.inside = HERE.recorder.newest(), True
        try:
            answer = func(*args, **kwargs)
        finally:
            self.inside = False
        if HERE.recorder.newest() is not before:
            raise NotABlock(self.kind, f"{func} computes something of what it is asked of")
        return answer

    # -- a new tape --------------------------------------------------------------------------------

    def _begin_tape(self) -> None:
        """From here on what is called is traced; what was called until now is, too."""
        if self.tape is not None:
            return
        prefix = self._candidates[0].calls[: self._at] if self._at else []
        self.tape = BlockTape()
        for call in prefix:
            if not _is_of_tensors(call) or (
                _is_question(call.func) and not _holds(call.operands, Made)
            ):
                self._append(call)
                continue
            with _within(call.around, self.kind):
                self._trace_call(call)

    def _append(self, call: TapedCall) -> None:
        assert self.tape is not None
        self.tape.calls.append(call)

    def _trace_call(self, call: TapedCall) -> TapedCall:
        """Run a call over what is traced, as the next of a new tape."""
        self._enter()
        args, kwargs = (
            _built(o, self.inner_made.__getitem__, self.inner_taken.__getitem__)
            for o in call.operands
        )
        self.inside = True
        try:
            with self._trace.tracing():
                out = call.func(*args, **kwargs)
        except Exception as error:  # which the user may catch; what it left is no part of a block
            raise NotABlock(self.kind, f"a call of torch raises {type(error).__name__}") from error
        finally:
            self.inside = False
        self._learn(out)
        call = replace(call, result=self._written_result(out))
        self._append(call)
        return call

    def _enter(self) -> None:
        """Have something to trace for all that was taken from outside until now."""
        assert self.tape is not None
        self.inside = True
        try:
            for t in self.taken[len(self.inner_taken) :]:
                inner = self._trace.enter(t)
                self._inner[id(inner)] = Taken(len(self.inner_taken))
                self.inner_taken.append(inner)
        finally:
            self.inside = False
        self.tape.taken = list(self._describe())

    def _learn(self, out: Any) -> None:
        """Give numbers to the tensors that a call has made."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self._inner:
                self._add(out)
        elif isinstance(out, (tuple, list)):
            for one in out:
                self._learn(one)
        elif isinstance(out, dict):
            raise NotABlock(self.kind, "a call of torch gives a dict")

    def _add(self, out: torch.Tensor) -> int:
        assert self.tape is not None
        if not isinstance(out, FakeTensor):
            raise NotABlock(self.kind, "it makes a tensor that has memory")
        if out.is_conj() or out.is_neg() or out.is_inference():
            raise NotABlock(self.kind, "it makes a tensor that is more than its numbers")
        number = len(self.inner_made)
        self._inner[id(out)] = Made(number)
        self.inner_made.append(out)
        self.tape.made[number] = out
        return number

    def _written_result(self, out: Any) -> Any:
        """What a traced call gives, as a tape has it."""
        if isinstance(out, torch.Tensor):
            return self._inner[id(out)]
        if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
            return (type(out), *map(self._written_result, out))
        found = self._written(out)
        if type(found) is _Same:
            raise NotABlock(self.kind, f"a call of torch gives a {type(out).__name__}")
        return found

    def admit(self, wire: Any, value: torch.Tensor) -> None:
        """A plain value that is traced is taken for equal on all ranks."""
        assert self.tape is not None
        found = self._inner.get(id(value))
        if found is None or type(found) is Made:
            with torch.no_grad(), Local():
                found = Made(self._add(value.clone()))
        self.tape.admitted.append((wire, found))

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> dict[int, FakeTensor]:
        """Settle on the tape; what is still held of what the block made, by number.

        What is held must become what the graph makes.
        """
        ended = [t for t in self._candidates if len(t.calls) == self._at]
        self._numbers.clear()
        held = {}
        while self._stands:
            number, stand = self._stands.popitem()
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
        if self.is_new:
            self._enter()
            assert self.tape is not None
            self.tape.escapes = frozenset(held)
        return dict(sorted(held.items()))

    @property
    def is_new(self) -> bool:
        """Was a tape written?"""
        return self.tape is not None and self.tape not in self._known


# -- templates -------------------------------------------------------------------------------------


def _built(value: Any, made: Callable[[int], Any], taken: Callable[[int], Any]) -> Any:
    """What a tape has written, with these tensors."""
    kind = type(value)
    if kind is Made:
        return made(value.number)
    if kind is Taken:
        return taken(value.number)
    if kind is _Same or kind is _Called:
        return value.value
    if kind is not tuple:
        return value
    of, *rest = value
    if of is int or of is bool:
        return rest[0]
    if of is float:
        return float.fromhex(rest[0])
    if of is dict:
        return {k: _built(v, made, taken) for k, v in rest}
    parts = [_built(v, made, taken) for v in rest]
    if of is slice:
        return slice(*parts)
    if of is tuple or of is list or of is torch.Size:
        return of(parts)
    return of(*parts) if hasattr(of, "_fields") else of(parts)  # as torch.max gives them


def _holds(value: Any, kind: type) -> bool:
    if type(value) is kind:
        return True
    return type(value) is tuple and any(_holds(v, kind) for v in value)


def who_hears() -> tuple[Any, ...]:
    """Who is told of each call below torch's functions, and of what is saved for backward."""
    return torch._C._len_torch_dispatch_stack(), saving_hooks()  # type: ignore[attr-defined]


def _attention_kernels() -> tuple[bool, ...]:
    """Private torch: which kernels attention may take, as torch asks while it is traced."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def _is_closed(value: Any) -> bool:
    """Is it a function that holds nothing but what is written in it?"""
    if isinstance(value, FunctionType):
        return not value.__closure__ and not value.__defaults__ and not value.__kwdefaults__
    return isinstance(value, (BuiltinFunctionType, torch._ops.OpOverload))


def _is_of_tensors(call: TapedCall) -> bool:
    """Does it take or give any?"""
    return any(_holds(v, k) for v in (call.operands, call.result) for k in (Made, Taken))


def _writes_first(name: str) -> bool:
    """Does a method or function of this name write into its first operand?"""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")


_NO_WRITES = ("__invert__", "__index__", "__int__", "__init__")


def _is_question(func: Any) -> bool:
    """Does it ask what a tensor is, and makes none?"""
    name = getattr(func, "__name__", "")
    return name in _QUESTIONS or (
        name == "__get__" and getattr(func.__self__, "__name__", "") not in _VIEWS
    )


_VIEWS = frozenset("T H mT mH real imag".split())
_QUESTIONS = frozenset(
    """size dim ndimension numel nelement stride storage_offset element_size is_contiguous
    is_floating_point is_complex is_signed is_cuda is_sparse get_device __len__ is_same_size
    is_tensor is_inference is_conj is_neg is_pinned is_shared result_type can_cast type
    dtype""".split()
)


def stand_in(like: FakeTensor) -> FakeTensor:
    """A tensor that says it is what `like` is, and of which nothing can be computed."""
    with Unheard():
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            FakeTensor,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=like.device,
        )
        made.fake_device, made.fake_mode = like.fake_device, like.fake_mode
        spec = like.__dict__.get("_spec")
        if spec is not None:
            made.__class__, made._spec = type(like), spec
    return made  # type: ignore[no-any-return]


@contextmanager
def _within(around: tuple[Any, ...], kind: type) -> Iterator[None]:
    """The modes in which a call of a tape was made."""
    grad, inference, typed, dtype, kernels, casts, *marks = around
    set_alike = dtype is torch.get_default_dtype() and kernels == _attention_kernels()
    if inference or not set_alike or any(marks):
        raise NotABlock(kind, "two of its blocks begin alike, in modes of their own")
    with ExitStack() as stack:
        if not typed:
            stack.enter_context(Local())
        stack.enter_context(torch.set_grad_enabled(grad))
        now = torch._C._is_any_autocast_enabled()
        for device, (enabled, dtype) in zip(_CASTING, casts or (), strict=False):
            if enabled != torch.is_autocast_enabled(device) or enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        if now and casts is None:
            raise NotABlock(kind, "two of its blocks begin alike, and cast otherwise")
        yield
