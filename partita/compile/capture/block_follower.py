"""Block followers: run a block's forward along a known tape, or trace it and record a new one.

A block's forward runs in Python each time, over stand-in tensors that have metadata only. Each
torch call is recorded and compared with the tapes of the class. As long as one matches, nothing is
traced: the stand-ins for its results are made from the tape. Once none matches (always, for the
first block of a class), the calls so far and all that follow are traced, as a new tape;
`BlockTracing` marks the nodes that this adds, and a `BlockTrace` keeps them, with those of
backward.

Since the user's Python runs in every block, its side effects happen (a cache that is filled, a
counter, a branch on the block's index); only the torch calls decide which structure a block has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from partita.comm.ledger import Ledger, noting_work_in
from partita.tensor.dtensor import tagged
from partita.tensor.op_facts import facts_of
from partita.tensor.tensor_state import HERE, count_writes, own_state, state_of

from ..graph_nodes import add_call, nodes_since
from ..guards.values import ByIdentity
from .block_nodes import BackwardBody, BlockBody, block_number
from .block_tape import (
    BlockTape,
    MadeTensor,
    NotABlock,
    OperandWriter,
    TakenTensor,
    TapedCall,
    VaryingFloatRead,
    bind_recorded,
    contains,
    current_modes,
    is_question,
    mark_varying_floats,
    varying_values_in,
    why_refused,
    within_modes,
    writes_first,
)
from .capture_context import attribute_set, dispatch_listeners, unprofiled
from .differentiate import differentiate
from .equal_calls import node_of
from .known_masks import ATTENTION
from .recorder import Recorder
from .step_function_mode import LibraryCalls
from .symbolic import BlockNumberRead


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
        masks: list[torch.Tensor] = []

        def find_node(mask: torch.Tensor) -> tuple[fx.Node, Mapping[fx.Node, fx.Node]] | None:
            masks.append(mask)
            return self._find_node(mask)

        args, kwargs = HERE.recorder.masks.leave_out(args, kwargs, find_node)
        out = self._follow_call(func, args, kwargs)
        recorded = self._writer.numbers.get(id(masks[0])) if masks else None
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
            if self._match_call(call, call.result) is None:
                self._begin_tape(call)
                self._append_call(call, call.operands)
            return answer
        self._refuse_write(func, operands)
        call = TapedCall(func, modes, operands, None)
        taped = self._match_call(call, None)
        if taped is not None and not _is_of_tensors(taped):
            self._apply_setting(taped, args, kwargs)
        if taped is None:
            self._begin_tape(call)
            taped = self._trace_call(call)
        made = self._metadata_of_made()
        return bind_recorded(
            taped.result, lambda n: self._stand_for(n, made[n]), self.taken.__getitem__
        )

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
        region, kept, budget = HERE.recorder.marks
        begun = region - self._regions if region > self._regions else 0
        return (*current_modes(), begun, kept, budget)

    # -- a known tape ------------------------------------------------------------------------------

    def _match_call(self, call: TapedCall, result: Any) -> TapedCall | None:
        """The call of the known tapes that `call` equals; tapes that differ are dropped.

        Args:
            result: that it must have, where not None.

        Returns:
            None if no tape has it.
        """
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
                and (result is None or taped.result == result)
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

    def _metadata_of_made(self) -> dict[int, FakeTensor]:
        return (self.tape or self._candidates[0]).made

    def _stand_for(self, number: int, like: FakeTensor) -> torch.Tensor:
        if number not in self._stand_ins:
            self._stand_ins[number] = stand = stand_in(like)
            self._writer.numbers[id(stand)] = MadeTensor(number)
        return self._stand_ins[number]

    def _apply_setting(self, taped: TapedCall, args: Any, kwargs: Any) -> None:
        """Make a call without tensors, as one that changes a setting of torch."""
        if self._writer.write_operand(self._ask_outside(taped.func, args, kwargs)) != taped.result:
            raise NotABlock(self.kind, f"{taped.func} says something else")

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
        alike = (t for t in self._candidates if call is not None and self._varies_from(t, call))
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

    def _varies_from(self, tape: BlockTape, call: TapedCall) -> bool:
        """Does the tape's call at this place differ from `call` by floats at most?"""
        at = len(self.operands)
        if not self._floats_may_vary or at >= len(tape.calls):
            return False
        taped = tape.calls[at]
        return (
            taped.func == call.func
            and taped.modes == call.modes
            and mark_varying_floats(call.operands, taped.operands, int) is not None
        )

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
        tape, at = self.tape, len(self.operands)
        assert tape is not None
        if self._sibling is None or not self._varies_from(self._sibling, call):
            self._sibling = None
            return call, {}
        numbers = range(len(self._tracing.numbers), sys.maxsize)
        operands = mark_varying_floats(
            call.operands, self._sibling.calls[at].operands, iter(numbers).__next__
        )
        values = dict(varying_values_in(operands, call.operands))
        if values:
            tape.calls_with_varying.append(at)
        return replace(call, operands=operands), values

    def _run_traced(self, call: TapedCall, values: dict[int, float]) -> Any:
        """Run a call over traced tensors, with symbolic floats for the varying `values`."""

        def bind_operands(number: Callable[[int], Any]) -> Any:
            made, taken = self.traced_made.__getitem__, self.traced_taken.__getitem__
            return (bind_recorded(o, made, taken, number) for o in call.operands)

        for value in values.values():
            self._tracing.enter_number(value)
        args, kwargs = bind_operands(self._tracing.symbols.__getitem__)
        try:
            with self._tracing.tracing():
                return self._run(call.func, args, kwargs)
        except BlockNumberRead:
            self._tracing.discard_last_call(self.kind)
        args, kwargs = bind_operands(values.__getitem__)
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
                inner = self._tracing.enter_tensor(t)
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
        with Local():
            if any(t._version != v for t, v in zip(taken, tracing.versions, strict=True)):
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
            self.kind,
            tracing.entered,
            {n: traced_node(t, self.kind) for n, t in enumerate(made)},
            tracing.nodes,
            tracing.region,
            tuple(self.labels),
            tracing.numbers,
            results=results,
            takes=takes,
        )


# -- stand-ins -------------------------------------------------------------------------------------


def _is_of_tensors(call: TapedCall) -> bool:
    """Does a call take or give tensors?"""
    return any(
        contains(v, k) for v in (call.operands, call.result) for k in (MadeTensor, TakenTensor)
    )


def stand_in(like: FakeTensor) -> FakeTensor:
    """A tensor with the metadata of `like`, of which nothing can be computed."""
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


# -- traces of blocks ------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class BlockTrace(BlockBody):
    """The traced forward of a block structure, and what is needed to differentiate it.

    Attributes:
        results, takes: by number, the traced results and outer tensors that require a gradient.
        backwards: by the gradients' strides and dtypes, which inputs train, and torch's modes.
        written: the numbers of the tensors from outside that it writes in place. Not empty for the
            update of an optimizer, and for no other block.
    """

    results: dict[int, torch.Tensor] = field(default_factory=dict)
    takes: dict[int, torch.Tensor] = field(default_factory=dict)
    backwards: dict[Any, BackwardBody] = field(default_factory=dict)
    written: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return "'a block'"  # as code: it stands among the operands of a node


# -- tracing ---------------------------------------------------------------------------------------


def traced_node(t: torch.Tensor, kind: type) -> fx.Node:
    """The node that makes `t`. Raises NotABlock, for a block of class `kind`, if none does."""
    node = node_of(t)
    if node is None:
        raise NotABlock(kind, "it takes a tensor that the graph does not make")
    return node


class BlockTracing:
    """Traces a block into the graph, and notes which nodes are its own.

    Attributes:
        nodes: of the block, in order.
        entered, versions: the node of each tensor that is traced in place of one from outside, and
            how often that was written when it was made.
        region: the remat region in which the block lies; 0 for none.
        symbols: the symbolic floats that stand for varying floats.
        numbers: their nodes.
    """

    def __init__(self, recorder: Recorder, env: Any):
        self.recorder, self._env = recorder, env
        self.region = recorder.marks[0]
        self.nodes: list[fx.Node] = []
        self.symbols: list[Any] = []
        self.numbers: list[fx.Node] = []
        self._new: list[fx.Node] = []
        self.entered: list[fx.Node] = []
        self.versions: list[int] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within, the nodes that are added belong to the block."""
        first = self.recorder.newest()
        try:
            yield
        finally:
            self._new = [*nodes_since(self.recorder.graph, first)]
            self.nodes += reversed(self._new)

    def enter_number(self, value: float) -> None:
        """Add a symbolic float for a varying float whose value is `value` in this block."""
        mode = get_proxy_mode()
        assert mode is not None
        number = len(self.numbers)
        symbol = self._env.symbolic(f"number {number} of a block", float(value))
        self._env.of_blocks.add(str(symbol.node.expr))
        node = add_call(self.recorder.graph, block_number, (number,))
        self.recorder.note_made(node)
        node.meta["val"] = symbol
        track_tensor_tree(symbol, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)
        self.symbols.append(symbol)
        self.numbers.append(node)

    def discard_last_call(self, kind: type) -> None:
        """Erase the nodes of the last call, which raised BlockNumberRead and will be repeated.

        Raises:
            VaryingFloatRead: they are used, or write.
        """
        for node in self._new:
            if node.users or facts_of(node.target).writes:
                raise VaryingFloatRead(kind)
            self.nodes.remove(node)
            self.recorder.erase(node)

    def pass_numbers(self, kind: type, func: Any, out: Any, values: Mapping[int, float]) -> None:
        """Have the node of the last call, traced with the floats `values`, take the varying floats.

        Raises:
            VaryingFloatRead: the call is more than one node of the same name that takes each float
                once, or has a gradient: then another float might have other effects.
        """
        with Local():
            graded = not isinstance(out, torch.Tensor) or out.requires_grad
        name = getattr(func, "__name__", "")
        if graded or len(self._new) != 1 or getattr(self._new[0].target, "_opname", "") != name:
            raise VaryingFloatRead(kind)
        (node,) = self._new
        args = list(node.args)
        for number, value in values.items():
            at = [i for i, a in enumerate(args) if type(a) is type(value) and a == value]
            if len(at) != 1:
                raise VaryingFloatRead(kind)
            args[at[0]] = self.numbers[number]
        node.args = tuple(args)

    def enter_tensor(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor that is traced in place of `t`: an alias of it at which history begins."""
        with Local(), torch.no_grad():
            inner = t.detach()
        self.entered.append(self.recorder.add_alias(inner))
        spec = getattr(t, "_spec", None)
        with Local(), torch.enable_grad():
            inner.requires_grad_(t.requires_grad)
            if isinstance(t, nn.Parameter):
                inner._is_param = True  # type: ignore[attr-defined]
            self.versions.append(inner._version)
        if spec is not None:
            tagged(inner, spec)
        if state_of(t).gathered_from is not None:
            own_state(inner).gathered_from = state_of(t).gathered_from
        return inner


def differentiate_block(
    trace: BlockTrace,
    given: Mapping[int, torch.Tensor],
    trains: Sequence[bool],
    tracing: BlockTracing,
) -> BackwardBody:
    """Trace the backward of a block.

    Args:
        given: by the number of a result, a gradient of the strides and dtype that it will have.
        trains: for each of `trace.takes`, is its gradient needed?
    """
    wanted = [i for i, trains_too in zip(trace.takes, trains, strict=True) if trains_too]
    with tracing.tracing():
        traced = differentiate(
            [trace.results[n] for n in given],
            [trace.takes[i] for i in wanted],
            tracing.recorder,
            given,
        )
        assert traced is not None
        seeds, gradients = traced
        found = {i: g for i, g in zip(wanted, gradients, strict=True) if g is not None}
        if any(g.layout is not torch.strided for g in found.values()):
            raise NotABlock(trace.kind, "a gradient of what it takes is sparse")
        for g in found.values():
            traced_node(g, trace.kind)  # which may be no node of the block
            tracing.recorder.add_alias(g)
    names = {node.name: node for node in tracing.nodes}
    return BackwardBody(
        [names[seed.node] for seed in seeds],
        {i: traced_node(g, trace.kind) for i, g in found.items()},
        tracing.nodes,
    )
