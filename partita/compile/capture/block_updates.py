"""Block updates: an optimizer's update of one block's parameters, traced once for all alike.

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

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction as Unheard
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode

from partita.tensor.tensor_state import HERE, count_writes, count_writes_of

from ..guards.values import ByIdentity
from .block_calls import BlockChoice
from .block_follower import BlockTrace, BlockTracing, traced_node
from .block_nodes import LABELS, add_block_node, block_forward
from .block_tape import NotABlock, OperandWriter, bind_recorded, current_modes
from .capture_context import attribute_set, dispatch_listeners, unprofiled
from .equal_calls import known_node_of, tensors_of
from .recorder import Recorder
from .step_function_mode import StepFunctionMode
from .symbolic import is_symbolic

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
        shared = _SharedMemory()
        self._step_rest(optimizer, run, updates, shared)
        for update in updates:
            trace = self._traces.get(update.key)
            follows = trace is not None
            if trace is None:
                trace = self._traces[update.key] = self._trace_update(optimizer, run, update)
            self._add_update_node(optimizer, update, trace, follows)
            shared.add(update.taken, [update.taken[i] for i in trace.block.written])
        if shared.has_shared_writes:
            raise NotABlock(type(optimizer), "what two blocks update lies in one memory")
        _order_state(optimizer, held)

    # -- which updates are blocks ------------------------------------------------------------------

    def _find_updates(
        self, optimizer: Optimizer, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> list[_Update]:
        """The updates of blocks that have an equal."""
        groups = _UpdateWriter(type(optimizer))
        try:
            settings = [groups.write_settings(group) for group in optimizer.param_groups]
        except NotABlock:
            return []
        members: defaultdict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for i, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                block = self._block_of.get(originals.get(p, p))
                if block is not None:
                    members[block].append((i, p))
        updates = []
        modes = current_modes()
        with Unheard():
            for block, params in sorted(members.items()):
                kind = type(self._blocks[block])
                update = _describe_update(optimizer, kind, params, groups, settings, modes)
                if update is not None:
                    updates.append(update)
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
        )

    # -- updates that are traced -------------------------------------------------------------------

    def _step_whole(self, optimizer: Optimizer, run: Run) -> None:
        """Trace the update of all parameters."""
        counts = widen_counts(optimizer.state.values(), self._recorder.exact)
        run()
        narrow_counts(counts)

    def _step_rest(
        self, optimizer: Optimizer, run: Run, updates: Sequence[_Update], shared: _SharedMemory
    ) -> None:
        """Trace the update of all parameters that are not in `updates`."""
        if not updates:
            self._step_whole(optimizer, run)
            return
        groups, state = optimizer.param_groups, optimizer.state
        ours = {p for u in updates for p in u.params}
        rest = [p for group in groups for p in group["params"] if p not in ours]
        counts = widen_counts(
            [entries for p, entries in state.items() if p not in ours], self._recorder.exact
        )
        taken = list(_strided_tensors(rest, state))
        versions = count_writes_of(taken)
        if rest:
            others = [
                dict(group, params=[p for p in group["params"] if p not in ours])
                for group in groups
            ]
            with attribute_set(optimizer, "param_groups", others):
                run()
        narrow_counts(counts)
        pairs = zip(taken, versions, count_writes_of(taken), strict=True)
        shared.add(taken, [t for t, before, after in pairs if before != after])

    def _trace_update(self, optimizer: Optimizer, run: Run, update: _Update) -> _UpdateTrace:
        """Trace the update of one block, over aliases of what it takes.

        Raises:
            NotABlock: it does what no trace can say.
        """
        kind = type(optimizer)
        tracing = BlockTracing(self._recorder, self._mode.shape_env)
        with Unheard(), torch.no_grad():
            inner = [_alias_of(t) for t in update.taken]
        versions = count_writes_of(inner)
        entered = [self._recorder.add_alias(t) for t in inner]
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
        pairs = enumerate(zip(versions, count_writes_of(inner), strict=True))
        written = tuple(i for i, (was, now) in pairs if was != now)
        with Unheard():
            memory = {t.untyped_storage()._cdata for t in inner}
            if any(t.untyped_storage()._cdata in memory for t in results.values()):
                raise NotABlock(kind, "its state becomes a view of what it updates")
        forward = _without_numbers(tracing.nodes, entered, kind)
        made = {i: traced_node(t, kind) for i, t in enumerate(results.values())}
        trace = BlockTrace(kind, entered, made, forward, written=written)
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
            return bind_recorded(value, inner.__getitem__, inner.__getitem__)

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
    """Records what an update is given. A number that is an input is compared by identity."""

    def write_operand(self, value: Any) -> Any:
        return ByIdentity(value) if is_symbolic(value) else super().write_operand(value)

    def write_settings(self, group: dict[str, Any]) -> Any:
        """A parameter group as recorded, without its parameters."""
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        return self.write_operand(settings)

    def copy_writer(self) -> _UpdateWriter:
        """A writer that knows the same tensors."""
        made = _UpdateWriter(self.kind)
        made.taken, made.numbers = list(self.taken), dict(self.numbers)
        return made

    def _number_tensor(self, t: torch.Tensor) -> Any:
        found = super()._number_tensor(t)
        # A tensor whose values the tracer knows would keep them when it is written.
        if t.layout is not torch.strided or known_node_of(t) is None:
            raise NotABlock(self.kind, "it takes a tensor that is no plain value of the graph")
        return found


def _describe_update(
    optimizer: Optimizer,
    kind: type,
    params: Sequence[tuple[int, torch.Tensor]],
    groups: _UpdateWriter,
    settings: Sequence[Any],
    modes: Any,
) -> _Update | None:
    """The update of one block's parameters; None if it cannot be compared with others, or is of
    no parameter.

    Args:
        params: with the number of the group of each.
        groups, settings: what has recorded the groups' settings, and these.
    """
    writer = groups.copy_writer()
    recorded: dict[int, list[Any]] = {}
    updated = []
    state = optimizer.state
    try:
        for i, p in params:
            grad = _grad.__get__(p)
            if grad is None:
                continue
            updated.append(p)
            number, of_grad = writer.write_operand(p), writer.write_operand(grad)
            entries = writer.write_operand(dict(state[p])) if p in state else None
            recorded.setdefault(i, []).append((number, of_grad, entries))
    except NotABlock:
        return None
    if not updated or len(set(map(id, updated))) != len(updated):
        return None
    parts = tuple((settings[i], tuple(recorded[i])) for i in sorted(recorded))
    key = type(optimizer), modes, parts, tuple(writer.describe_taken())
    return _Update(kind, updated, writer.taken, key)


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


def _alias_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor over which an update is traced in place of `t`."""
    inner = t.detach()
    inner.requires_grad_(t.requires_grad)
    inner._is_param = isinstance(t, nn.Parameter)  # type: ignore[attr-defined]
    return inner


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


class _SharedMemory:
    """Which memory several updates of one step take.

    One after the other they would not compute what they compute together, if one writes there.
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}
        self._shared: set[int] = set()
        self._written: set[int] = set()
        self._updates = 0

    def add(self, taken: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Note what one more update takes, and what of it it writes."""
        self._updates += 1
        with Unheard():
            for t in taken:
                memory = t.untyped_storage()._cdata
                if self._taken.setdefault(memory, self._updates) != self._updates:
                    self._shared.add(memory)
            self._written.update(t.untyped_storage()._cdata for t in written)

    @property
    def has_shared_writes(self) -> bool:
        """Is memory written that several updates take?"""
        return not self._shared.isdisjoint(self._written)


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
