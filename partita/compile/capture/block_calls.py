"""Block calls: modules whose structure was traced before become two nodes of the step's graph.

`BlockChoice`, the argument `blocks` of `pt.compile` and what capture learns on the way, says which
modules are blocks. While a step is captured, `BlockCalls` intercepts their calls. Each runs under a
`BlockFollower`, which finds or records its tape; then one `block_forward` node is added, and what
the user holds of the block's results (stand-ins without a node) becomes what that node makes. To
autograd the block is one `autograd.Function`, whose backward adds a `block_backward` node.
`inline_blocks` replaces these nodes after capture.

The update of an elementwise optimizer of torch runs no code of the user's. What it calls is decided
by the settings of its groups and by the metadata of parameters, gradients and state. So, other than
a module's forward, it need not run for each block to be compared call by call: blocks whose updates
have equal keys (`_Update.key`) have equal updates. The first is traced over aliases of its tensors,
and each becomes one node of the graph (see `BlockTrace`):

    u = block_forward(trace, (), *parameters, gradients and state)

Parameters that belong to no block, and updates that have no equal, are traced as ever, in one call.
Symbolic settings (a learning rate) are the same objects for all blocks; what the update computes
from them alone, as `1 - beta`, are nodes outside of the trace, made once for all its blocks.
While an optimizer steps, its counts are float64 (`widen_counts`), so that bias corrections are as
exact as eager's Python floats.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from types import NoneType
from typing import Any

import torch
from torch import fx, nn
from torch._C import DisableTorchFunction as Unheard
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode

from partita.comm import TraceWire
from partita.comm.ledger import scope
from partita.tensor.tensor_state import HERE, count_writes, count_writes_of

from ..guards.guards import hearing_modes
from ..guards.values import ByIdentity
from .block_follower import (
    BlockFollower,
    BlockTape,
    MadeTensor,
    OperandWriter,
    bind_recorded,
    current_modes,
)
from .block_traces import (
    LABELS,
    BlockBody,
    BlockTrace,
    BlockTracing,
    NotABlock,
    VaryingFloatRead,
    add_block_node,
    block_backward,
    block_forward,
    traced_node,
)
from .capture_context import attribute_set, dispatch_listeners, profiled_again, unprofiled
from .differentiate import differentiate
from .equal_calls import known_node_of, replace_tensor, tensors_of
from .fakes import BlockNumberRead, is_symbolic
from .recorder import Recorder, StepFunctionMode

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
        search = self._find_repeated if self.named is None else self._find_named
        return {block for model in models for block in search(model)}

    def find_updated(self, models: Iterable[nn.Module]) -> set[nn.Module]:
        """The blocks whose parameters are updated together: also those that cannot be traced once
        in forward."""
        return replace(self, apart=()).find(models)

    def _find_named(self, model: nn.Module) -> Iterator[nn.Module]:
        named = self.named or ()
        kinds = tuple(k for k in named if isinstance(k, type))
        for module in model.modules():
            is_named = isinstance(module, kinds) or any(module is m for m in named)
            if is_named and self._can_be_block(module):
                yield module

    def _find_repeated(self, model: nn.Module) -> Iterator[nn.Module]:
        found: dict[nn.Module, _Parameters] = {}
        _describe_parameters(model, found)
        structures = {module: (type(module), parameters) for module, parameters in found.items()}
        counts = Counter(structures.values())
        around = [model]
        for module in around:
            for child in module.children():
                structure = structures[child]
                is_block = counts[structure] >= self.least and len(structure[1]) > _LAYER_PARAMETERS
                if is_block and self._can_be_block(child):
                    yield child
                else:
                    around.append(child)

    def _can_be_block(self, module: nn.Module) -> bool:
        kind = type(module)
        return not isinstance(module, _LISTS) and all(kind is not k for k, _ in self.apart)


_Parameters = tuple[tuple[str, torch.Size], ...]


def _describe_parameters(module: nn.Module, found: dict[nn.Module, _Parameters]) -> _Parameters:
    """The names and shapes of a module's parameters; `found` gets those of all modules within."""
    if module not in found:
        own = [(name, p.shape) for name, p in module._parameters.items() if p is not None]
        for name, child in module.named_children():
            parameters = _describe_parameters(child, found)
            own += ((f"{name}.{inner}", shape) for inner, shape in parameters)
        found[module] = tuple(own)
    return found[module]


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
        if hearing_modes():  # it may do otherwise in each block
            raise NotABlock(kind, "a TorchFunctionMode around it hears what it calls")
        tapes = self._tapes.setdefault(kind, [])
        tracing = BlockTracing(self.recorder, self.mode.shape_env)
        varying = kind not in self._choice.constants
        follower = BlockFollower(kind, tapes, tracing, self._listeners, varying)
        with ExitStack() as own:
            own.enter_context(attribute_set(HERE, "block", follower))
            for wire in self._wires.values():
                own.enter_context(attribute_set(wire, "paddings", {}))
            own.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)  # it would keep tensors of this block
            try:
                with follower:
                    out = forward(*args, **kwargs)
            except Exception as error:  # which the user may catch, and go on
                raise NotABlock(kind, f"it raises {type(error).__name__}") from error
            held = unprofiled(follower.finish_tape)
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
        if count_writes_of([t for t, _ in self._versions]) != [n for _, n in self._versions]:
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
            back = trace.backwards[key] = profiled_again(self._trace_backward, given, trains)
        cotangents = [traced_node(g, trace.kind) for g in given.values()]
        args = back, self.node, *cotangents
        _, nodes = add_block_node(self.calls.recorder, block_backward, args, back.made)
        likes = [g.meta["val"] for g in back.made.values()]
        made = dict(zip(back.made, tensors_of(nodes, likes, self.calls.mode), strict=True))
        return [made.get(i) for i in trace.takes]

    def _trace_backward(
        self, given: Mapping[int, torch.Tensor], trains: Sequence[bool]
    ) -> BlockBody:
        """Trace the backward of a block.

        Args:
            given: by the number of a result, a gradient of the strides and dtype that it will have.
            trains: for each of `trace.takes`, is its gradient needed?
        """
        trace, recorder = self.trace, self.calls.recorder
        results = [trace.results[n] for n in given]
        wanted = [*compress(trace.takes, trains)]
        tracing = BlockTracing(recorder, self.calls.mode.shape_env)
        with tracing.tracing():
            try:
                traced = differentiate(results, [trace.takes[i] for i in wanted], recorder, given)
            except BlockNumberRead as error:
                raise VaryingFloatRead(trace.kind) from error
            assert traced is not None
            seeds, gradients = traced
            found = {i: g for i, g in zip(wanted, gradients, strict=True) if g is not None}
            for g in found.values():
                if g.layout is not torch.strided:
                    raise NotABlock(trace.kind, "a gradient of what it takes is sparse")
                traced_node(g, trace.kind)  # which may be no node of the block
                recorder.add_alias(g)
        names = {node.name: node for node in tracing.nodes}
        return BlockBody(
            [names[seed.node] for seed in seeds],
            {i: traced_node(g, trace.kind) for i, g in found.items()},
            tracing.nodes,
        )


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


# -- updates of optimizers -------------------------------------------------------------------------


_grad: Any = torch._C.TensorBase.grad
Run = Callable[[], Any]


class BlockUpdates:
    """The updates of blocks in a step that is being captured.

    Args:
        recorder: notes where nodes come from.
        mode: of the fake tensors.
        choice: which modules are blocks; also says which optimizers' updates cannot be.
        models: the models of the step.
    """

    def __init__(
        self,
        recorder: Recorder,
        mode: FakeTensorMode,
        choice: BlockChoice,
        models: Iterable[nn.Module],
    ):
        self._recorder, self._mode = recorder, mode
        self._listeners = dispatch_listeners()
        self._apart = tuple(kind for kind, _ in choice.apart)
        models = list(models)
        blocks = choice.find_updated(models)
        # In the models' order, which is the same on all ranks.
        self._blocks = [m for model in models for m in model.modules() if m in blocks]
        self._block_of: dict[torch.Tensor, int] = {}
        self._traces: dict[Any, _UpdateTrace] = {}

    @property
    def has_blocks(self) -> bool:
        """Has the step any blocks?"""
        return bool(self._blocks)

    @property
    def structures(self) -> tuple[tuple[str, int], ...]:
        """For each traced update what it is of, and how many updates are like it."""
        return tuple((t.name, t.calls) for t in self._traces.values())

    def note_parameters(self) -> None:
        """Note which parameter is of which block, when the modules hold those that are traced.

        One that several blocks share is updated with the first of them.
        """
        self._block_of = {}
        for number, block in enumerate(self._blocks):
            for p in block.parameters():
                self._block_of.setdefault(p, number)

    def update_blocks(
        self, optimizer: Optimizer, run: Run, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Have an optimizer update its parameters, those of each block by themselves.

        Args:
            run: calls the optimizer's own step.
            originals: by a tensor that the optimizer updates, the parameter of which it is a part.

        Raises:
            NotABlock: updates of this optimizer cannot be blocks.
        """
        if self._can_be_split(optimizer):
            unprofiled(self._step_in_blocks, optimizer, run, originals)
        else:
            self._step_whole(optimizer, run)

    def _step_in_blocks(
        self, optimizer: Optimizer, run: Run, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        updates = self._find_updates(optimizer, originals)
        held = [*optimizer.state]
        uses = [self._step_rest(optimizer, run, updates)]
        for update in updates:
            trace = self._traces.get(update.key)
            follows = trace is not None
            if trace is None:
                trace = self._traces[update.key] = self._trace_update(optimizer, run, update)
            self._add_update_node(optimizer, update, trace, follows)
            written = (update.taken[i] for i in trace.block.written)
            uses.append((_memory_of(update.taken), _memory_of(written)))
        if _share_writes(uses):
            raise NotABlock(type(optimizer), "what two blocks update lies in one memory")
        _order_state(optimizer, held)

    # -- which updates are blocks ------------------------------------------------------------------

    def _find_updates(
        self, optimizer: Optimizer, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> list[_Update]:
        """The updates of blocks that have an equal."""
        try:
            writer = _UpdateWriter(optimizer)
        except NotABlock:
            return []
        members: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for i, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                block = self._block_of.get(originals.get(p, p))
                if block is not None:
                    members[block].append((i, p))
        with Unheard():
            described = (
                writer.describe_update(type(self._blocks[block]), params)
                for block, params in sorted(members.items())
            )
            updates = [u for u in described if u is not None]
        counts = Counter(u.key for u in updates)
        return [u for u in updates if counts[u.key] > 1 or u.key in self._traces]

    def _can_be_split(self, optimizer: Optimizer) -> bool:
        """Is it an update of torch's own, of which nobody hears while it runs?"""
        own = vars(optimizer)
        return (
            type(optimizer) not in self._apart
            and HERE.block is None
            and not optimizer.defaults.get("differentiable")
            and own.get("grad_scale") is None
            and own.get("found_inf") is None
            and "_init_group" not in own
            and isinstance(_get_current_function_mode(), StepFunctionMode)
            and dispatch_listeners() == self._listeners
            and not hearing_modes()
        )

    # -- updates that are traced -------------------------------------------------------------------

    def _step_whole(self, optimizer: Optimizer, run: Run) -> None:
        """Trace the update of all parameters."""
        counts = widen_counts(optimizer.state.values(), self._recorder.exact)
        run()
        narrow_counts(counts)

    def _step_rest(
        self, optimizer: Optimizer, run: Run, updates: Sequence[_Update]
    ) -> tuple[set[int], set[int]]:
        """Trace the update of all parameters that are not in `updates`; the memory that it takes,
        and what of it it writes."""
        if not updates:
            self._step_whole(optimizer, run)
            return set(), set()
        state, ours = optimizer.state, {p for u in updates for p in u.params}
        groups = [
            dict(group, params=[p for p in group["params"] if p not in ours])
            for group in optimizer.param_groups
        ]
        rest = [p for group in groups for p in group["params"]]
        counts = widen_counts(
            [entries for p, entries in state.items() if p not in ours], self._recorder.exact
        )
        taken = list(_strided_tensors(rest, state))
        versions = count_writes_of(taken)
        if rest:
            with attribute_set(optimizer, "param_groups", groups):
                run()
        narrow_counts(counts)
        pairs = zip(taken, versions, count_writes_of(taken), strict=True)
        return _memory_of(taken), _memory_of(t for t, was, now in pairs if was != now)

    def _trace_update(self, optimizer: Optimizer, run: Run, update: _Update) -> _UpdateTrace:
        """Trace the update of one block, over aliases of what it takes.

        Raises:
            NotABlock: it does what no trace can say.
        """
        kind = type(optimizer)
        tracing = BlockTracing(self._recorder, self._mode.shape_env)
        with Unheard():
            inner = [tracing.enter_tensor(t) for t in update.taken]
        groups, state = update.bind_tensors(inner)
        before = {p: dict(entries) for p, entries in state.items()}
        with (
            tracing.tracing(),
            attribute_set(optimizer, "param_groups", groups),
            attribute_set(optimizer, "state", state),
            attribute_set(self._recorder, "exact", set()),
        ):
            counts = widen_counts(state.values(), self._recorder.exact)
            run()
            narrow_counts(counts)
        results = _results_of(kind, update, inner, before, state)
        if not _memory_of(inner).isdisjoint(_memory_of(results.values())):
            raise NotABlock(kind, "its state becomes a view of what it updates")
        entered = tracing.entered
        forward = _without_numbers(tracing.nodes, entered, kind)
        made = {i: traced_node(t, kind) for i, t in enumerate(results.values())}
        trace = BlockTrace(entered, made, forward, kind=kind, written=tracing.written_places(inner))
        name = f"{kind.__name__} of {update.kind.__name__}"
        return _UpdateTrace(name, trace, [*results])

    def _add_update_node(
        self, optimizer: Optimizer, update: _Update, trace: _UpdateTrace, follows: bool
    ) -> None:
        """Add the node of an update, and have the optimizer hold what it makes."""
        kind, block = type(optimizer), trace.block
        nodes = [traced_node(t, kind) for t in update.taken]
        args = block, (), *nodes
        call, outputs = add_block_node(self._recorder, block_forward, args, block.made)
        call.meta[LABELS] = ()
        trace.calls += 1
        if follows:  # where it was traced, the aliases' writes were counted
            with Unheard():
                written = [update.taken[i] for i in block.written]
                increment_version([t for t in written if not t.is_inference()])
        made = tensors_of(outputs, [n.meta["val"] for n in block.made.values()], self._mode)
        for (p, name), value in zip(trace.results, made, strict=True):
            optimizer.state[update.taken[p]][name] = value


# -- one update ------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Update:
    """The update of one block's parameters.

    Attributes:
        kind: the block's class.
        params: those with a gradient.
        taken: what the update takes: each parameter, its gradient and state, tensors among the
            settings.
        key: equal for equal updates: settings, (parameter, gradient, state) of each group, with
            tensors by number, and the metadata of each tensor.
    """

    kind: type
    params: list[torch.Tensor]
    taken: list[torch.Tensor]
    key: Any = field(repr=False)

    def bind_tensors(self, inner: Sequence[Any]) -> tuple[list[dict[str, Any]], Any]:
        """The groups and the state of an optimizer that has this update alone.

        Args:
            inner: what stands for each tensor of `taken`.
        """

        def bind(value: Any) -> Any:
            return bind_recorded(value, lambda part: inner[part.number])

        _, _, recorded, _ = self.key
        groups = []
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for settings, params in recorded:
            groups.append(bind(settings) | {"params": [bind(p) for p, _, _ in params]})
            for p, grad, entries in params:
                with Unheard():
                    _grad.__set__(bind(p), bind(grad))
                if entries is not None:
                    state[bind(p)] = bind(entries)
        return groups, state


class _UpdateWriter(OperandWriter):
    """Records what an optimizer's updates are given. A number that is an input is compared by
    identity.

    Raises:
        NotABlock: the settings of its groups cannot be compared.
    """

    def __init__(self, optimizer: Optimizer):
        super().__init__(type(optimizer))
        self._state, self._modes = optimizer.state, current_modes()
        self._settings = [
            self.write_operand(
                {k: v for k, v in group.items() if k not in ("params", "param_names")}
            )
            for group in optimizer.param_groups
        ]

    def write_operand(self, value: Any) -> Any:
        return ByIdentity(value) if is_symbolic(value) else super().write_operand(value)

    def _number_tensor(self, t: torch.Tensor) -> Any:
        found = super()._number_tensor(t)
        # A tensor whose values the tracer knows would keep them when it is written.
        if t.layout is not torch.strided or known_node_of(t) is None:
            raise NotABlock(self.kind, "it takes a tensor that is no plain value of the graph")
        return found

    def describe_update(
        self, kind: type, params: Sequence[tuple[int, torch.Tensor]]
    ) -> _Update | None:
        """The update of parameters of one block of class `kind`; None if it cannot be compared with
        others, or is of no parameter.

        Args:
            params: with the number of the group of each.
        """
        own = copy.copy(self)  # knows the tensors of the settings
        own.taken, own.numbers, own._described = [*self.taken], dict(self.numbers), []
        recorded: defaultdict[int, list[Any]] = defaultdict(list)
        updated = []
        try:
            for i, p in params:
                grad = _grad.__get__(p)
                if grad is None:
                    continue
                updated.append(p)
                number, of_grad = own.write_operand(p), own.write_operand(grad)
                state = own.write_operand(dict(self._state[p])) if p in self._state else None
                recorded[i].append((number, of_grad, state))
        except NotABlock:
            return None
        if not updated or len(set(map(id, updated))) != len(updated):
            return None
        parts = tuple((self._settings[i], tuple(recorded[i])) for i in sorted(recorded))
        key = self.kind, self._modes, parts, tuple(own.describe_taken())
        return _Update(kind, updated, own.taken, key)


@dataclass(eq=False)
class _UpdateTrace:
    """A traced update.

    Attributes:
        name: of the optimizer, and of the first block that it was traced for.
        block: its nodes.
        results: for each tensor that it makes, the (number of the parameter, name) under which it
            becomes state.
        calls: how many updates of the step are like it.
    """

    name: str
    block: BlockTrace
    results: list[tuple[int, str]]
    calls: int = 0


def _results_of(
    kind: type, update: _Update, inner: Sequence[Any], before: Any, state: Any
) -> dict[tuple[int, str], FakeTensor]:
    """The state that an update has made, by number of the parameter and name.

    Raises:
        NotABlock: it changed its state in another way.
    """
    numbers = {id(t): i for i, t in enumerate(inner)}
    found: dict[tuple[int, str], FakeTensor] = {}
    for p, entries in state.items():
        was = before.get(p, {})
        if not was.keys() <= entries.keys():
            raise NotABlock(kind, "it deletes some of its state")
        for name, value in entries.items():
            if value is was.get(name):
                continue
            if not isinstance(value, FakeTensor) or id(value) in numbers:
                raise NotABlock(kind, f"it exchanges its {name!r}")
            found[numbers[id(p)], name] = value
    if len({id(t) for t in found.values()}) != len(found):
        raise NotABlock(kind, "two parameters get one tensor for their state")
    return found


def _order_state(optimizer: Optimizer, held: Sequence[torch.Tensor]) -> None:
    """Have the state of parameters that got some just now stand in the order of the parameters.

    Args:
        held: those that had some before.
    """
    new = optimizer.state.keys() - {*held}
    if not new:
        return
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        if p in new:
            optimizer.state[p] = optimizer.state.pop(p)


def _without_numbers(nodes: Sequence[Any], entered: Sequence[Any], kind: type) -> list[Any]:
    """The nodes of a trace but for those that compute numbers from the step's numbers alone.

    Raises:
        NotABlock: it computes numbers from tensors.
    """
    own, ours = {*entered}, []
    for node in nodes:
        if is_symbolic(node.meta.get("val")):
            if not own.isdisjoint(node.all_input_nodes):
                raise NotABlock(kind, "it reads a tensor as a number")
            continue
        own.add(node)
        ours.append(node)
    return ours


# -- memory ----------------------------------------------------------------------------------------


def _share_writes(uses: Sequence[tuple[set[int], set[int]]]) -> bool:
    """Does one of several updates write memory that another one takes?

    One after the other they would not compute what they compute together.

    Args:
        uses: for each update the memory that it takes, and what of it it writes.
    """
    takers = Counter(memory for taken, _ in uses for memory in taken)
    return any(takers[memory] > 1 for _, written in uses for memory in written)


def _memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of tensors. Private torch: one number for one, as long as it lives."""
    with Unheard():
        return {t.untyped_storage()._cdata for t in tensors}


def _strided_tensors(
    params: Sequence[torch.Tensor], state: Mapping[Any, Any]
) -> Iterator[torch.Tensor]:
    """Parameters, their gradients and their state, those that are strided."""
    for p in params:
        with Unheard():
            found = [p, _grad.__get__(p)]
        found += [v for v in state[p].values() if isinstance(v, torch.Tensor)] if p in state else []
        yield from (t for t in found if t is not None and t.layout is torch.strided)


# -- step counts -----------------------------------------------------------------------------------

COUNTS = ("step", "mu_product")
"""Names in an optimizer's state: the count of steps, and the product of NAdam's momenta."""

WidenedCounts = list[tuple[dict[Any, Any], torch.Tensor, torch.Tensor, int]]
"""For each count: the state that it is in, itself, its float64 copy, and the writes of that."""


def widen_counts(states: Iterable[dict[Any, Any]], exact: set[int] | None) -> WidenedCounts:
    """Replace step counts by float64 copies, until `narrow_counts`.

    Args:
        states: of parameters.
        exact: gets the ids of products, which eager rounds to float32; None for none.

    Returns:
        What `narrow_counts` takes.
    """
    widened: WidenedCounts = []
    for entries in states:
        for name in COUNTS:
            number = entries.get(name)
            if not isinstance(number, torch.Tensor) or number.ndim or number.dtype != torch.float32:
                continue
            if name == "step":
                with torch.inference_mode(False):  # else nobody would count its writes
                    entries[name] = wide = number.double()
                widened.append((entries, number, wide, count_writes(wide)))
            elif exact is not None:
                exact.add(id(number))
    return widened


def narrow_counts(widened: WidenedCounts) -> None:
    """Write float64 counts back into the tensors that they were copied from.

    Those of parameters that were not updated stay as they are: they are no inputs of the step then.
    """
    for entries, number, wide, writes in widened:
        now = entries["step"]
        is_written = now is not wide or count_writes(wide) != writes
        entries["step"] = number.copy_(now) if is_written else number
    widened.clear()
