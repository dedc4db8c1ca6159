"""Block calls: in the graph of a step, what stands for a block whose structure was traced before.

A block's forward is one node, its backward another; what they stand for is traced once for each
structure (`block_traces`), which also puts it in their places.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partita.comm import TraceWire
from partita.tensor.watch import HERE

from ..graph_nodes import add_call
from ..node_metadata import Recorder
from .block_choice import BlockChoice
from .block_follower import Follower
from .block_functions import modes_now, who_hears
from .block_tape import Made, NotABlock, NumbersRead
from .block_traces import (
    BackwardTrace,
    BlockTrace,
    BlockTracing,
    block_backward,
    block_forward,
    block_output,
    differentiate_block,
    traced_node,
)
from .symbolic import BlockNumberRead
from .traced_tensors import become, tensors_of

__all__ = ["BlockCalls"]


class BlockCalls:
    """The blocks of a step that is being captured.

    Args:
        recorder: of the nodes.
        mode: of the tensors without memory.
        wires: that trace.
        choice: which modules are blocks.
        models: the models of the step.
    """

    def __init__(
        self,
        recorder: Recorder,
        mode: FakeTensorMode,
        wires: Mapping[Any, TraceWire],
        choice: BlockChoice,
        models: Iterable[nn.Module],
    ):
        self.recorder, self._mode, self._wires = recorder, mode, wires
        self._choice, self._blocks = choice, choice.find(models)
        self._traces: dict[type, list[BlockTrace]] = {}
        self._heard = who_hears()
        self._calls: list[_BlockCall] = []
        self._results: list[tuple[weakref.ref[torch.Tensor], type]] = []  # of those with several

    @contextmanager
    def intercepting(self, tracer: Any) -> Iterator[None]:
        """Within, a call of a block is traced at most once for each structure."""
        usual = tracer.call_module

        def call_module(m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if m in self._blocks and HERE.block is None:
                return self.call_block(m, forward, args, kwargs)
            return usual(m, forward, args, kwargs)

        if not self._blocks:
            yield
            return
        tracer.call_module = call_module
        for wire in self._wires.values():
            wire.admit_otherwise = _admit_in_block
        try:
            yield
        finally:
            del tracer.call_module
            for wire in self._wires.values():
                wire.admit_otherwise = None
            for call in self._calls:
                call.forget()
            self._calls.clear()

    def call_block(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """`forward(*args, **kwargs)`, the module's own with its hooks."""
        kind = type(module)
        traces = self._traces.setdefault(kind, [])
        tracing = BlockTracing(self.recorder, self._mode.shape_env)
        varying = kind not in self._choice.constants
        follower = Follower(kind, [t.tape for t in traces], tracing, self._heard, varying)
        casts = torch.is_autocast_cache_enabled()
        HERE.block = follower
        try:
            with _own_paddings(self._wires.values()):
                torch.set_autocast_cache_enabled(False)  # what it keeps would be of this block
                try:
                    with follower:
                        out = forward(*args, **kwargs)
                except Exception as error:  # which the user may catch, and go on
                    raise NotABlock(kind, f"it raises {type(error).__name__}") from error
                held = follower.finish_tape()
                if follower.is_new:
                    traces.append(tracing.finish(follower))
        finally:
            torch.set_autocast_cache_enabled(casts)
            HERE.block = None
        trace = next(t for t in traces if t.tape is follower.tape)
        numbers = trace.tape.numbers(follower.operands)
        self._emit_call(trace, [*numbers.values()], follower.taken, held)
        return out

    # -- calls in the graph ------------------------------------------------------------------------

    def _emit_call(
        self,
        trace: BlockTrace,
        floats: Sequence[float],
        taken: Sequence[torch.Tensor],
        held: dict[int, FakeTensor],
    ) -> None:
        """Have the graph call the trace, and what the user holds be what that makes."""
        numbers = [*held]
        admitted = [(w, a) for w, a in trace.tape.admitted]
        numbers += [a.number for _, a in admitted if type(a) is Made and a.number not in held]
        call = _BlockCall(self, trace, numbers, floats, [traced_node(t, trace.kind) for t in taken])
        self._calls.append(call)
        if any(_has_hooks(taken[i]) for i in trace.takes):
            raise NotABlock(trace.kind, "hooks of what it takes run in the order of its calls")
        with Local():
            if trace.results and trace.takes:
                with torch.enable_grad():  # its calls had it where a result has a history
                    made = _BlockFunction.apply(call, *(taken[i] for i in trace.takes))
            else:
                made = call.forward()
        by_number = dict(zip(numbers, made, strict=True))
        for wire, a in admitted:
            if type(a) is Made:
                wire.admitted.append(by_number[a.number])
            else:
                wire.admit(taken[a.number])
        for number, stand in held.items():
            become(stand, by_number[number])
        call.note_versions([*taken, *held.values()])
        if len(trace.results) > 1:
            results = [t for n, t in held.items() if n in trace.results]
            self._results += [(weakref.ref(t), trace.kind) for t in results]

    def check_results(self, asked: Any) -> None:
        """Raise NotABlock where a backward that begins is to show the gradient of one of several
        results of a block: no gradient comes to it from the others, which may be made of it.

        Args:
            asked: the tensors whose gradients it gives: one, several or None.
        """
        asked = [*asked] if isinstance(asked, (tuple, list)) else [asked]
        wanted = {id(t) for t in asked}
        # An edge of the graph, or what gives its tensors only once, may be of any.
        is_unsure = any(not isinstance(t, (torch.Tensor, NoneType)) for t in asked)
        for known, kind in self._results:
            result = known()
            if result is None:
                continue
            with Local():
                is_heard = result.retains_grad or _has_hooks(result)
            if is_heard or is_unsure or id(result) in wanted:
                raise NotABlock(kind, "the gradient of one of several results is looked at")

    def add_node(self, target: Any, *args: Any) -> fx.Node:
        """A new node of the graph."""
        node = add_call(self.recorder.graph, target, args)
        self.recorder.note_made(node)
        return node

    def differentiated(
        self, trace: BlockTrace, given: Mapping[int, torch.Tensor], trains: Sequence[bool]
    ) -> BackwardTrace:
        """The backward of a block, traced, for gradients like those given of its results."""
        try:
            tracing = BlockTracing(self.recorder, self._mode.shape_env)
            return differentiate_block(trace, given, trains, tracing)
        except BlockNumberRead as error:
            raise NumbersRead(trace.kind) from error

    def tensors(self, nodes: Sequence[fx.Node], likes: Sequence[torch.Tensor]) -> list[FakeTensor]:
        """Tensors without memory, that the nodes make."""
        return tensors_of(nodes, likes, self._mode)


@dataclass(eq=False)
class _BlockCall:
    """One call of a trace.

    Attributes:
        numbers: of the tensors that it gives.
        floats: what differs between blocks.
    """

    calls: BlockCalls
    trace: BlockTrace
    numbers: list[int]
    floats: Sequence[float]
    taken: list[fx.Node]
    node: fx.Node | None = None
    _versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def forget(self) -> None:
        """The step is captured: let go of what autograd's node, which C++ may keep in a circle with
        the results that it made, would keep with it."""
        self._versions.clear()
        self.taken.clear()
        self.node = None
        del self.calls, self.trace

    def forward(self) -> list[FakeTensor]:
        self.node = self.calls.add_node(block_forward, self.trace, tuple(self.floats), *self.taken)
        nodes = [self.calls.add_node(block_output, self.node, n) for n in self.numbers]
        return self.calls.tensors(nodes, [self.trace.likes[n] for n in self.numbers])

    def note_versions(self, tensors: Iterable[torch.Tensor]) -> None:
        """Backward may read these: they must then be what they are now."""
        with Local():
            self._versions += [(t, t._version) for t in tensors if not t.is_inference()]

    def check_unwritten(self) -> None:
        """Raise NotABlock if what backward may read was written since."""
        with Local():
            if any(t._version != version for t, version in self._versions):
                raise NotABlock(
                    self.trace.kind, "what it takes or gives is written before backward"
                )

    def backward(
        self, grads: Sequence[torch.Tensor | None], trains: tuple[bool, ...]
    ) -> list[FakeTensor | None]:
        trace = self.trace
        given = {n: g for n, g in zip(self.numbers, grads, strict=True) if g is not None}
        key = tuple((n, g.stride(), g.dtype) for n, g in given.items()), trains, modes_now()
        back = trace.backwards.get(key)
        if back is None:
            back = trace.backwards[key] = self.calls.differentiated(trace, given, trains)
        cotangents = [traced_node(g, trace.kind) for g in given.values()]
        node = self.calls.add_node(block_backward, back, self.node, *cotangents)
        nodes = [self.calls.add_node(block_output, node, i) for i in back.gradients]
        likes = [g.meta["val"] for g in back.gradients.values()]
        made = dict(zip(back.gradients, self.calls.tensors(nodes, likes), strict=True))
        return [made.get(i) for i in trace.takes]


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _BlockCall, *wanted: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(wanted[0])  # so that torch knows whether it may go back once more
        made = call.forward()
        ctx.mark_non_differentiable(
            *(m for n, m in zip(call.numbers, made, strict=True) if n not in call.trace.results)
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise NotABlock(ctx.call.trace.kind, "its gradients are differentiated again")
        ctx.call.check_unwritten()
        _ = ctx.saved_tensors
        return None, *ctx.call.backward(grads, ctx.needs_input_grad[1:])


def _admit_in_block(wire: TraceWire, value: torch.Tensor) -> bool:
    if HERE.block is None or not HERE.block.inside:
        return False
    HERE.block.admit(wire, value)
    return True


def _has_hooks(t: torch.Tensor) -> bool:
    """Private torch: where a tensor has its hooks."""
    with Local():
        after = getattr(t, "_post_accumulate_grad_hooks", None)
        return bool(t._backward_hooks) or bool(after)


@contextmanager
def _own_paddings(wires: Iterable[TraceWire]) -> Iterator[None]:
    """Within, what wires keep of values is the block's own."""
    wires = list(wires)
    before = [wire.swap_paddings({}) for wire in wires]
    try:
        yield
    finally:
        for wire, kept in zip(wires, before, strict=True):
            wire.swap_paddings(kept)
