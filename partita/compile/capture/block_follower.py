"""Block followers: run a block's forward along a tape, or write the tape of a new structure.

While a step is captured, the forward of a block runs over tensors that only say what they are. What
it calls of torch, and on which values, is its tape. A block whose calls are those of a tape is of
that structure: nothing is traced for it, and the graph gets a call of what was traced before. The
user's Python runs in every block, so whatever it does besides (a cache that it fills, a counter, a
branch on its number) is done; only what it asks of torch decides which structure it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from partita.tensor.watch import HERE

from .block_functions import (
    is_question,
    modes_now,
    who_hears,
    why_refused,
    within_modes,
    writes_first,
)
from .block_tape import (
    BlockTape,
    Made,
    NotABlock,
    OperandWriter,
    Same,
    Taken,
    TapedCall,
    contains,
    number_floats,
    numbers_of,
    with_tensors,
)
from .symbolic import BlockNumberRead

__all__ = ["Follower", "stand_in"]


class Follower(TorchFunctionMode):
    """Follows the forward of one block: along the tapes that it may be of, or writing a new one.

    Args:
        kind: the block's class.
        tapes: of blocks of that class.
        trace: runs a call for a new tape, and what it makes becomes part of the graph.
        heard: `who_hears()` as the step began.
        varying: may floats differ between blocks of one structure?

    Attributes:
        taken: the tensors from outside, in the order of first use.
        operands: of each call, with the floats that this block has.
        tape: the one that this block is of, once its forward has ended.
        inner: for a new tape what it takes and makes, as it is traced.
    """

    def __init__(
        self, kind: type, tapes: Sequence[BlockTape], trace: Any, heard: Any, varying: bool
    ):
        super().__init__()
        self.kind, self._known, self._trace, self._varying = kind, tapes, trace, varying
        self._candidates = list(tapes)
        self._beside: BlockTape | None = None
        self.operands: list[Any] = []
        self._writer = OperandWriter(kind)
        self.taken = self._writer.taken
        self._stands: dict[int, FakeTensor] = {}
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
        self._refuse_function(func)
        operands = self._writer.write_operands(func, args, kwargs)
        around = self._read_modes()
        if is_question(func) and not contains(operands, Made):
            # What comes from outside may be an input of the step: it is asked itself.
            answer = self._ask_outside(func, args, kwargs)
            call = TapedCall(func, around, operands, self._writer.write_operand(answer))
            if self._match_call(call, call.result) is None:
                self._begin_tape(call)
                self._append_call(call, call.operands)
            return answer
        self._refuse_write(func, operands)
        call = TapedCall(func, around, operands, None)
        found = self._match_call(call, None)
        if found is not None and not _is_of_tensors(found):
            self._apply_setting(found, args, kwargs)
        if found is None:
            self._begin_tape(call)
            found = self._trace_call(call)
        made = self._likes_of_tape()
        return with_tensors(
            found.result, lambda n: self._stand_for(n, made[n]), self.taken.__getitem__
        )

    def call_ours(self, func: Callable[..., Any], *args: Any) -> Any:
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

    def _refuse_function(self, func: Any) -> None:
        if reason := why_refused(func):
            raise NotABlock(self.kind, reason)

    def _refuse_write(self, func: Any, operands: Any) -> None:
        name = getattr(func, "__name__", "")
        (_, *args), (_, *kwargs) = operands
        written = [v for k, v in kwargs if k == "out"]
        if writes_first(name):
            written += args[:1]
        if any(contains(v, Taken) for v in written):
            raise NotABlock(self.kind, "it writes into what it takes from outside")

    def _read_modes(self) -> tuple[Any, ...]:
        if who_hears() != self._heard:
            raise NotABlock(self.kind, "it follows calls by a mode of its own, or what is saved")
        region, kept, budget = HERE.recorder.marks
        begun = region - self._regions if region > self._regions else 0
        return (*modes_now(), begun, kept, budget)

    # -- along a tape ------------------------------------------------------------------------------

    def _match_call(self, call: TapedCall, result: Any) -> TapedCall | None:
        """The call of a known tape that this one is, if it is one; a `result` must be equal."""
        if self.tape is not None:
            return None
        described_now = self._writer.describe_taken()
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
            self.operands.append(call.operands)
        return found

    def _likes_of_tape(self) -> dict[int, FakeTensor]:
        return (self.tape or self._candidates[0]).made

    def _stand_for(self, number: int, like: FakeTensor) -> torch.Tensor:
        if number not in self._stands:
            self._stands[number] = stand = stand_in(like)
            self._writer.numbers[id(stand)] = Made(number)
        return self._stands[number]

    def _apply_setting(self, found: TapedCall, args: Any, kwargs: Any) -> None:
        """A call that sets how torch is set, and has nothing to do with tensors."""
        if self._writer.write_operand(self._ask_outside(found.func, args, kwargs)) != found.result:
            raise NotABlock(self.kind, f"{found.func} says something else")

    def _ask_outside(self, func: Any, args: Any, kwargs: Any) -> Any:
        before, self.inside = HERE.recorder.newest(), True
        try:
            answer = func(*args, **kwargs)
        finally:
            self.inside = False
        if HERE.recorder.newest() is not before:
            raise NotABlock(self.kind, f"{func} computes something of what it is asked of")
        return answer

    # -- a new tape --------------------------------------------------------------------------------

    def _begin_tape(self, call: TapedCall | None = None) -> None:
        """From here on what is called is traced; what was called until now is, too.

        Where a known tape has a call that differs from `call` only by floats, it is followed
        further: what it has otherwise are numbers of the new one.
        """
        if self.tape is not None:
            return
        alike = (t for t in self._candidates if call is not None and self._varies_from(t, call))
        self._beside = next(alike, None)
        known = self._beside or (self._candidates[0] if self._at else None)
        prefix = zip(known.calls[: self._at] if known else (), self.operands, strict=True)
        self.tape, self.operands = BlockTape(), []
        for one, operands in list(prefix):
            if not _is_of_tensors(one) or (
                is_question(one.func) and not contains(one.operands, Made)
            ):
                self._append_call(one, operands)
                continue
            with within_modes(one.around, self.kind):
                self._trace_call(replace(one, operands=operands))

    def _varies_from(self, tape: BlockTape, call: TapedCall) -> bool:
        at = len(self.operands)
        if not self._varying or at >= len(tape.calls):
            return False
        one = tape.calls[at]
        return (
            one.func == call.func
            and one.around == call.around
            and number_floats(call.operands, one.operands, int) is not None
        )

    def _append_call(self, call: TapedCall, operands: Any) -> None:
        assert self.tape is not None
        self.tape.calls.append(call)
        self.operands.append(operands)

    def _trace_call(self, call: TapedCall) -> TapedCall:
        """Run a call over what is traced, as the next of a new tape."""
        self._enter_taken()
        numbered, values = self._number_floats(call)
        self.inside = True
        try:
            out = self._run_traced(numbered, values)
        except NotABlock:
            raise
        except Exception as error:  # which the user may catch; what it left is no part of a block
            raise NotABlock(self.kind, f"a call of torch raises {type(error).__name__}") from error
        finally:
            self.inside = False
        self._number_results(out)
        numbered = replace(numbered, result=self._write_result(out))
        self._append_call(numbered, call.operands)
        return numbered

    def _number_floats(self, call: TapedCall) -> tuple[TapedCall, dict[int, float]]:
        """A call with numbers for floats that differ from the tape's beside, and their values."""
        tape, at = self.tape, len(self.operands)
        assert tape is not None
        if self._beside is None or not self._varies_from(self._beside, call):
            self._beside = None
            return call, {}
        numbers = range(len(self._trace.numbers), sys.maxsize)
        operands = number_floats(
            call.operands, self._beside.calls[at].operands, iter(numbers).__next__
        )
        values = dict(numbers_of(operands, call.operands))
        if values:
            tape.numbered.append(at)
        return replace(call, operands=operands), values

    def _run_traced(self, call: TapedCall, values: dict[int, float]) -> Any:
        """What a call gives over what is traced, with numbers in the place of `values`."""

        def bind_operands(number: Callable[[int], Any]) -> Any:
            made, taken = self.inner_made.__getitem__, self.inner_taken.__getitem__
            return (with_tensors(o, made, taken, number) for o in call.operands)

        for value in values.values():
            self._trace.enter_number(value)
        args, kwargs = bind_operands(self._trace.symbols.__getitem__)
        try:
            with self._trace.tracing():
                return call.func(*args, **kwargs)
        except BlockNumberRead:
            self._trace.discard(self.kind)
        args, kwargs = bind_operands(values.__getitem__)
        with self._trace.tracing():
            out = call.func(*args, **kwargs)
        self._trace.pass_numbers(self.kind, call.func, out, values)
        return out

    def _enter_taken(self) -> None:
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
        self.tape.taken = list(self._writer.describe_taken())

    def _number_results(self, out: Any) -> None:
        """Give numbers to the tensors that a call has made."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self._inner:
                self._number_made(out)
        elif isinstance(out, (tuple, list)):
            for one in out:
                self._number_results(one)
        elif isinstance(out, dict):
            raise NotABlock(self.kind, "a call of torch gives a dict")

    def _number_made(self, out: torch.Tensor) -> int:
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

    def _write_result(self, out: Any) -> Any:
        """What a traced call gives, as a tape has it."""
        if isinstance(out, torch.Tensor):
            return self._inner[id(out)]
        if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
            return (type(out), *map(self._write_result, out))
        found = self._writer.write_operand(out)
        if type(found) is Same:
            raise NotABlock(self.kind, f"a call of torch gives a {type(out).__name__}")
        return found

    def admit(self, wire: Any, value: torch.Tensor) -> None:
        """A plain value that is traced is taken for equal on all ranks."""
        assert self.tape is not None
        found = self._inner.get(id(value))
        if found is None or type(found) is Made:
            with torch.no_grad(), Local():
                found = Made(self._number_made(value.clone()))
        self.tape.admitted.append((wire, found))

    # -- the end -----------------------------------------------------------------------------------

    def finish_tape(self) -> dict[int, FakeTensor]:
        """Settle on the tape; what is still held of what the block made, by number.

        What is held must become what the graph makes.
        """
        ended = [t for t in self._candidates if len(t.calls) == self._at]
        self._writer.numbers.clear()
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
            self._enter_taken()
            assert self.tape is not None
            self.tape.escapes = frozenset(held)
        return dict(sorted(held.items()))

    @property
    def is_new(self) -> bool:
        """Was a tape written?"""
        return self.tape is not None and self.tape not in self._known


# -- around what it is asked ----------------------------------------------------------------------


def _is_of_tensors(call: TapedCall) -> bool:
    """Does it take or give any?"""
    return any(contains(v, k) for v in (call.operands, call.result) for k in (Made, Taken))


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
            made.__class__, made._spec = type(like), spec  # type: ignore[attr-defined]
    return made  # type: ignore[no-any-return]
