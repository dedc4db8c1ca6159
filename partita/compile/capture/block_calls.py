"""Block calls: modules whose structure was traced before become two nodes of the step's graph.

`BlockChoice`, the argument `blocks` of `pt.compile` and what capture learns on the way, says which
modules are blocks. While a step is captured, `BlockCalls` intercepts their calls. Each runs under a
`BlockFollower`, which finds or records its tape; then one `block_forward` node is added, and what
the user holds of the block's results (stand-ins without a node) becomes what that node makes. To
autograd the block is one `autograd.Function`, whose backward adds a `block_backward` node.
`inline_blocks` replaces these nodes after capture.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partita.comm import TraceWire
from partita.comm.ledger import scope
from partita.tensor.tensor_state import HERE, count_writes_of

from .block_follower import (
    BlockFollower,
    BlockTrace,
    BlockTracing,
    differentiate_block,
    traced_node,
)
from .block_nodes import LABELS, BackwardBody, add_block_node, block_backward, block_forward
from .block_tape import BlockTape, MadeTensor, NotABlock, VaryingFloatRead, current_modes
from .capture_context import dispatch_listeners, profiled_again, unprofiled
from .equal_calls import replace_tensor, tensors_of
from .recorder import Recorder
from .symbolic import BlockNumberRead

# -- which modules are blocks ----------------------------------------------------------------------

_LISTS = (nn.ModuleList, nn.ModuleDict)
_LAYER_PARAMETERS = 2
"""A module with no more parameters is a layer, not a block: tracing it costs next to nothing."""
_LEAST_BY_DEFAULT = 6
"""Alike modules that make blocks where `blocks` is None: fewer are traced soon enough."""


@dataclass(frozen=True)
class BlocksTraced:
    """How the blocks of a step were traced.

    Attributes:
        structures: for each structure the name of its class and the number of its blocks.
        apart: the names of classes whose modules were each traced as they run, and why.
        updates: for each update that was traced once what it is of ("AdamW of Block"), and how many
            are like it.
    """

    structures: tuple[tuple[str, int], ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    updates: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        lines = [f"{kind}: {count} calls, traced once" for kind, count in self.structures]
        lines += [f"{name}: {count} updates, traced once" for name, count in self.updates]
        lines += [f"{kind}: each traced as it runs ({reason})" for kind, reason in self.apart]
        return "\n".join(lines)


@dataclass(frozen=True)
class BlockChoice:
    """Which modules are blocks.

    Attributes:
        named: the modules and classes that the user names; None to search for them: the outermost
            modules that are alike in class and in the names and shapes of their parameters.
        least: how many must be alike to be found by the search.
        outline_above: the nodes of a graph above which blocks stay calls; None for never.
        constants: classes in which floats are constants, since torch reads their values.
        apart: classes that cannot be blocks, and why; also of optimizers, whose updates cannot.
    """

    named: tuple[nn.Module | type, ...] | None = None
    least: int = 2
    outline_above: int | None = None
    apart: tuple[tuple[type, str], ...] = ()
    constants: frozenset[type] = frozenset()

    @classmethod
    def from_option(cls, blocks: bool | Iterable[nn.Module | type] | None) -> BlockChoice:
        """The choice that the argument `blocks` of `pt.compile` means.

        Raises:
            ValueError: something that is neither a module nor a class of modules.
        """
        if blocks is True:
            return cls()
        if blocks is None:
            return cls(least=_LEAST_BY_DEFAULT)
        named = tuple(blocks) if blocks else ()
        for block in named:
            if not isinstance(block, nn.Module) and not (
                isinstance(block, type) and issubclass(block, nn.Module)
            ):
                raise ValueError(f"compile: a block is a module or a class of them, not {block!r}")
        return cls(named)

    def with_constants(self, kind: type) -> BlockChoice:
        """The same choice, in which floats of this class are constants."""
        return replace(self, constants=self.constants | {kind})

    def without_class(self, kind: type, reason: str) -> BlockChoice:
        """The same choice without modules of this class."""
        return replace(self, apart=(*self.apart, (kind, reason)))

    @property
    def apart_by_name(self) -> tuple[tuple[str, str], ...]:
        """The names of the classes in `apart`, and why."""
        return tuple((kind.__name__, reason) for kind, reason in self.apart)

    def find(self, models: Iterable[nn.Module]) -> set[nn.Module]:
        """The blocks of these models."""
        found: set[nn.Module] = set()
        for model in models:
            found.update(
                self._find_named_blocks(model)
                if self.named is not None
                else self._find_repeated_blocks(model)
            )
        return found

    def find_updated(self, models: Iterable[nn.Module]) -> set[nn.Module]:
        """The blocks whose parameters are updated together: also those that cannot be traced once
        in forward."""
        return replace(self, apart=()).find(models)

    def _find_named_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        assert self.named is not None
        kinds = tuple(k for k in self.named if isinstance(k, type))
        those = {id(m) for m in self.named if isinstance(m, nn.Module)}
        for module in model.modules():
            if (isinstance(module, kinds) or id(module) in those) and self._can_be_block(module):
                yield module

    def _find_repeated_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        kinds: dict[nn.Module, Any] = {}
        _describe_modules(model, kinds)
        return self._find_outermost_repeats(model, kinds, Counter(kinds.values()))

    def _find_outermost_repeats(
        self, module: nn.Module, kinds: Mapping[nn.Module, Any], counts: Mapping[Any, int]
    ) -> Iterator[nn.Module]:
        for child in module.children():
            kind = kinds[child]
            if (
                counts[kind] >= self.least
                and kind[1] > _LAYER_PARAMETERS
                and self._can_be_block(child)
            ):
                yield child
            else:
                yield from self._find_outermost_repeats(child, kinds, counts)

    def _can_be_block(self, module: nn.Module) -> bool:
        kind = type(module)
        return not isinstance(module, _LISTS) and all(kind is not k for k, _ in self.apart)


def _describe_modules(module: nn.Module, kinds: dict[nn.Module, Any]) -> Any:
    """Note the structure of a module, and of all within: its class, how many parameters it has, and
    their names and shapes.

    Returns:
        The latter two.
    """
    if module in kinds:
        return kinds[module][1:]
    own = tuple((name, p.shape) for name, p in module._parameters.items() if p is not None)
    count, within = len(own), []
    for name, child in module.named_children():
        more, parameters = _describe_modules(child, kinds)
        if more:
            count += more
            within.append((name, parameters))
    kinds[module] = type(module), count, (own, *within)
    return kinds[module][1:]


# -- their calls -----------------------------------------------------------------------------------


class BlockCalls:
    """The blocks of a step that is being captured.

    Args:
        recorder: notes where nodes come from.
        mode: of the fake tensors.
        wires: by the real wire, the one that traces.
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
        self.recorder, self.mode, self._wires = recorder, mode, wires
        self._choice, self._blocks = choice, choice.find(models)
        self._tapes: dict[type, list[BlockTape]] = {}
        self._listeners = dispatch_listeners()
        self._calls: list[_BlockCall] = []
        self._results: list[tuple[weakref.ref[torch.Tensor], type]] = []  # of those with several

    @contextmanager
    def intercepting(self, tracer: Any) -> Iterator[None]:
        """Within, blocks that `tracer` (fx's) meets are traced once for each structure."""
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
                call.drop_references()
            self._calls.clear()

    def call_block(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run `forward(*args, **kwargs)`, the module's own with its hooks, as one block.

        Raises:
            NotABlock: its class has to be traced as it runs.
        """
        kind = type(module)
        tapes = self._tapes.setdefault(kind, [])
        tracing = BlockTracing(self.recorder, self.mode.shape_env)
        varying = kind not in self._choice.constants
        follower = BlockFollower(kind, tapes, tracing, self._listeners, varying)
        casts = torch.is_autocast_cache_enabled()
        HERE.block = follower
        try:
            with _own_paddings(self._wires.values()):
                torch.set_autocast_cache_enabled(False)  # it would keep tensors of this block
                try:
                    with follower:
                        out = forward(*args, **kwargs)
                except Exception as error:  # which the user may catch, and go on
                    raise NotABlock(kind, f"it raises {type(error).__name__}") from error
                held = unprofiled(follower.finish_tape)
        finally:
            torch.set_autocast_cache_enabled(casts)
            HERE.block = None
        assert follower.tape is not None
        for log in scope().work_ledgers:
            log.add_work(follower.tape.work)
        unprofiled(self._emit_call, follower, held)
        return out

    # -- calls in the graph ------------------------------------------------------------------------

    def _emit_call(self, follower: BlockFollower, held: dict[int, FakeTensor]) -> None:
        """Add the node of a block, and have what the user holds be what it makes.

        Args:
            follower: has followed it.
            held: by number, the stand-ins of results that the user holds.
        """
        tape, taken = follower.tape, follower.taken
        assert tape is not None
        trace, admitted = tape.trace, tape.admitted
        floats = [*tape.varying_values(follower.operands).values()]
        numbers = [*held]
        numbers += [a.number for _, a in admitted if type(a) is MadeTensor and a.number not in held]
        nodes = [traced_node(t, trace.kind) for t in taken]
        call = _BlockCall(self, trace, numbers, floats, follower.labels, nodes)
        self._calls.append(call)
        if any(_has_hooks(taken[i]) for i in trace.takes):
            raise NotABlock(trace.kind, "hooks of what it takes run in the order of its calls")
        with Local():
            if trace.results and trace.takes:
                # A result has a history, so grad mode was on where it was made.
                with torch.enable_grad():
                    made = _BlockFunction.apply(call, *(taken[i] for i in trace.takes))
            else:
                made = call.forward()
        by_number = dict(zip(numbers, made, strict=True))
        for wire, a in admitted:
            if type(a) is MadeTensor:
                wire.admitted.append(by_number[a.number])
            else:
                wire.admit(taken[a.number])
        for number, stand in held.items():
            replace_tensor(stand, by_number[number])
        call.note_versions([*taken, *held.values()])
        if len(trace.results) > 1:
            results = [t for n, t in held.items() if n in trace.results]
            self._results += [(weakref.ref(t), trace.kind) for t in results]

    def check_results(self, asked: Any) -> None:
        """Raise NotABlock if a backward that begins shows the gradient of one of several results.

        Other results of the block may be computed from that one; their gradients flow within the
        block, and would be missing from what is shown.

        Args:
            asked: the tensors whose gradients backward returns: one, several or None.
        """
        asked = [*asked] if isinstance(asked, (tuple, list)) else [asked]
        wanted = {id(t) for t in asked}
        # A GradientEdge or an iterator does not say which tensors it is of.
        is_unsure = any(not isinstance(t, (torch.Tensor, NoneType)) for t in asked)
        for reference, kind in self._results:
            result = reference()
            if result is None:
                continue
            with Local():
                is_shown = result.retains_grad or _has_hooks(result)
            if is_shown or is_unsure or id(result) in wanted:
                raise NotABlock(kind, "the gradient of one of several results is looked at")

    def trace_backward(
        self, trace: BlockTrace, given: Mapping[int, torch.Tensor], trains: Sequence[bool]
    ) -> BackwardBody:
        """Trace the backward of a block: see `differentiate_block`."""
        try:
            tracing = BlockTracing(self.recorder, self.mode.shape_env)
            return differentiate_block(trace, given, trains, tracing)
        except BlockNumberRead as error:
            raise VaryingFloatRead(trace.kind) from error


@dataclass(eq=False)
class _BlockCall:
    """One block in the graph.

    Attributes:
        numbers: of the tensors of the trace that it gives.
        floats: its varying floats.
        labels: of its calls that have one, in order.
        taken: the nodes of its tensors from outside.
        node: its `block_forward` node.
    """

    calls: BlockCalls
    trace: BlockTrace
    numbers: list[int]
    floats: Sequence[float]
    labels: Sequence[str]
    taken: list[fx.Node]
    node: fx.Node | None = None
    _versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def drop_references(self) -> None:
        """Drop all references, once the step is captured.

        C++ may keep autograd's node, and this with it, in a cycle with the node's results.
        """
        self._versions.clear()
        self.taken.clear()
        self.node = None
        del self.calls, self.trace

    def forward(self) -> list[FakeTensor]:
        """Add the `block_forward` node; the tensors of `numbers` that it makes."""
        args = self.trace, tuple(self.floats), *self.taken
        self.node, nodes = add_block_node(self.calls.recorder, block_forward, args, self.numbers)
        self.node.meta[LABELS] = tuple(self.labels)
        likes = [self.trace.made[n].meta["val"] for n in self.numbers]
        return tensors_of(nodes, likes, self.calls.mode)

    def note_versions(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the versions of tensors that backward may read, for `_check_unwritten`."""
        tensors = [*tensors]
        self._versions += zip(tensors, count_writes_of(tensors), strict=True)

    def _check_unwritten(self) -> None:
        """Raise NotABlock if a tensor that backward may read was written since."""
        if count_writes_of(t for t, _ in self._versions) != [n for _, n in self._versions]:
            raise NotABlock(self.trace.kind, "what it takes or gives is written before backward")

    def backward(
        self, grads: Sequence[torch.Tensor | None], trains: tuple[bool, ...]
    ) -> list[FakeTensor | None]:
        """Add a `block_backward` node; for each of `trace.takes` its gradient.

        Args:
            grads: of the results, in the order of `numbers`.
            trains: for each of `trace.takes`, is its gradient needed?
        """
        self._check_unwritten()
        trace = self.trace
        given = {n: g for n, g in zip(self.numbers, grads, strict=True) if g is not None}
        key = tuple((n, g.stride(), g.dtype) for n, g in given.items()), trains, current_modes()
        back = trace.backwards.get(key)
        if back is None:
            # A custom function of the user's may go backward in it.
            back = profiled_again(self.calls.trace_backward, trace, given, trains)
            trace.backwards[key] = back
        cotangents = [traced_node(g, trace.kind) for g in given.values()]
        args = back, self.node, *cotangents
        _, nodes = add_block_node(self.calls.recorder, block_backward, args, back.gradients)
        likes = [g.meta["val"] for g in back.gradients.values()]
        made = dict(zip(back.gradients, tensors_of(nodes, likes, self.calls.mode), strict=True))
        return [made.get(i) for i in trace.takes]


class _BlockFunction(torch.autograd.Function):
    """A block to autograd: its operands with a history, its results."""

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
        _ = ctx.saved_tensors
        return None, *unprofiled(ctx.call.backward, grads, ctx.needs_input_grad[1:])


def _admit_in_block(wire: TraceWire, value: torch.Tensor) -> bool:
    """Have the block that is traced, if any, note a plain value taken as equal on all ranks."""
    if HERE.block is None or not HERE.block.is_tracing:
        return False
    HERE.block.admit(wire, value)
    return True


def _has_hooks(t: torch.Tensor) -> bool:
    """Private torch: where a tensor keeps its hooks."""
    with Unheard():
        after = getattr(t, "_post_accumulate_grad_hooks", None)
        return bool(t._backward_hooks) or bool(after)


@contextmanager
def _own_paddings(wires: Iterable[TraceWire]) -> Iterator[None]:
    """Within, wires remember paddings for the block alone."""
    wires = list(wires)
    before = [wire.swap_paddings({}) for wire in wires]
    try:
        yield
    finally:
        for wire, kept in zip(wires, before, strict=True):
            wire.swap_paddings(kept)
