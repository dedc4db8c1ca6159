"""Updates of blocks: equal ones are traced once, and each becomes one node of the step's graph.

The update of an elementwise optimizer of torch runs no code of the user's. What it calls is decided
by the settings of its groups and by the metadata of parameters, gradients and state: blocks whose
updates have equal keys (`_Update.key`) have equal updates. The first is traced over aliases of its
tensors, and each becomes one node of the graph (see `BlockTrace`):

    u = block_forward(trace, (), *parameters, gradients and state)

Parameters that belong to no block, and updates that have no equal, are traced in one call.
Symbolic settings (a learning rate) are the same objects for all blocks; what the update computes
from them alone, as `1 - beta`, are nodes outside of the trace, made once for all its blocks.
While an optimizer steps, its counts are float64 (`widen_counts`), so that bias corrections are as
exact as eager's Python floats.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction as Unheard
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode

from partita.comm import read_autocast_state
from partita.graph.block_calls import LABELS, block_forward
from partita.graph.graph_nodes import ByIdentity
from partita.tensor.tensor_state import Spec, count_writes, count_writes_of

from .block_choice import BlockChoice
from .block_tracing import BlockTrace, BlockTracing, NotABlock, add_block_node, traced_node
from .capture_context import attribute_set, dispatch_listeners, hearing_modes, unprofiled
from .equal_calls import known_node_of, tensors_of
from .fakes import is_symbolic
from .recorder import Recorder, StepFunctionMode

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
        blocks = choice.find(models)
        # In the models' order, which is the same on all ranks.
        self._blocks = [m for model in models for m in model.modules() if m in blocks]
        self._block_of: dict[torch.Tensor, int] = {}
        self._traces: dict[Any, _UpdateTrace] = {}

    @property
    def has_blocks(self) -> bool:
        """True if the step has blocks."""
        return bool(self._blocks)

    @property
    def structures(self) -> tuple[tuple[str, int], ...]:
        """The name of each traced update, and the number of updates that are like it."""
        return tuple((t.name, t.calls) for t in self._traces.values())

    def note_parameters(self) -> None:
        """Note the block of each parameter, when the modules hold the traced parameters.

        One that several blocks share is updated with the first of them.
        """
        self._block_of = {}
        for number, block in enumerate(self._blocks):
            for p in block.parameters():
                self._block_of.setdefault(p, number)

    def update_blocks(
        self, optimizer: Optimizer, run: Run, originals: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Trace the step of an optimizer, with a separate update for the parameters of each block.

        Args:
            run: calls the optimizer's own step.
            originals: maps each tensor that the optimizer updates to the parameter that holds it.

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
        """Returns the updates of blocks that are equal to the update of another block."""
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
        """True if torch's own code runs the update, and no hook or mode intercepts its calls."""
        own = vars(optimizer)
        return (
            type(optimizer) not in self._apart
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
        """Trace the update of all parameters that are not in `updates`.

        Returns:
            The memory that it takes, and the part of that memory that it writes.
        """
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
        """Trace the update of one block, over aliases of its tensors.

        Raises:
            NotABlock: no trace can describe the update.
        """
        kind = type(optimizer)
        tracing = BlockTracing(self._recorder)
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
        """Returns the groups and the state of an optimizer that has this update alone.

        Args:
            inner: the tensor to use in place of each tensor of `taken`.
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


@dataclass(frozen=True, slots=True)
class TakenTensor:
    """A tensor that an update takes: the `number`-th in the order of first use."""

    number: int


def bind_recorded(value: Any, bind: Callable[[Any], Any]) -> Any:
    """Returns the value of recorded operands.

    Args:
        bind: gives the values of `TakenTensor`s.
    """
    kind = type(value)
    if kind is TakenTensor:
        return bind(value)
    if kind is ByIdentity:
        return value.value
    if kind is not tuple:
        return value
    of, *rest = value
    if of is int or of is bool:
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


def _is_closed(value: Any) -> bool:
    """True if a function has no closure and no defaults, so that its code alone decides."""
    if isinstance(value, FunctionType):
        return not value.__closure__ and not value.__defaults__ and not value.__kwdefaults__
    return isinstance(value, (BuiltinFunctionType, torch._ops.OpOverload))


def current_modes() -> tuple[Any, ...]:
    """Returns the settings of torch that decide what an update does."""
    casts = read_autocast_state() if torch._C._is_any_autocast_enabled() else None  # private torch
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_torch_function_enabled(),
        torch.get_default_dtype(),
        casts,
    )


class _UpdateWriter:
    """Records what an optimizer's updates are given. A number that is an input is compared by
    identity.

    Attributes:
        kind: the class of the optimizer.
        taken: the tensors that an update takes, in the order of first use.
        numbers: by the id of a tensor, how it is recorded.

    Raises:
        NotABlock: the settings of its groups cannot be compared.
    """

    def __init__(self, optimizer: Optimizer):
        self.kind = type(optimizer)
        self.taken: list[torch.Tensor] = []
        self.numbers: dict[int, TakenTensor] = {}
        self._state, self._modes = optimizer.state, current_modes()
        self._settings = [
            self.write_operand(
                {k: v for k, v in group.items() if k not in ("params", "param_names")}
            )
            for group in optimizer.param_groups
        ]

    def write_operand(self, value: Any) -> Any:
        """Returns an operand as recorded. Raises NotABlock for one that cannot be compared."""
        kind = type(value)
        if kind is int or kind is bool:
            return (kind, value)
        if isinstance(value, torch.Tensor):
            return self._number_tensor(value)
        if kind is float:
            return (kind, value.hex())
        if isinstance(value, _PLAIN):
            return value
        if kind is tuple or kind is list or kind is torch.Size:
            return (kind, *map(self.write_operand, value))
        if kind is dict:
            return (kind, *((k, self.write_operand(v)) for k, v in value.items()))
        if is_symbolic(value) or kind is complex or isinstance(value, (*_ALIKE, type)):
            return ByIdentity(value)
        if _is_closed(value):
            return ByIdentity(value)
        raise NotABlock(self.kind, f"its settings have a {kind.__name__}")

    def _number_tensor(self, t: torch.Tensor) -> TakenTensor:
        found = self.numbers.get(id(t))
        if found is not None:
            return found
        # A tensor whose values the tracer knows would keep them when it is written.
        is_plain = isinstance(t, FakeTensor) and t.layout is torch.strided
        if not is_plain or known_node_of(t) is None:
            raise NotABlock(self.kind, "it takes a tensor that is no plain value of the graph")
        found = self.numbers[id(t)] = TakenTensor(len(self.taken))
        self.taken.append(t)
        return found

    def describe_update(
        self, kind: type, params: Sequence[tuple[int, torch.Tensor]]
    ) -> _Update | None:
        """Returns the update of parameters of one block of class `kind`.

        None if there are no parameters, or if it cannot be compared with other updates.

        Args:
            params: with the number of the group of each.
        """
        own = copy.copy(self)  # knows the tensors of the settings
        own.taken, own.numbers = [*self.taken], dict(self.numbers)
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
        key = self.kind, self._modes, parts, tuple(map(_describe, own.taken))
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
    """Returns the state that an update has made, by number of the parameter and name.

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
    """Put new entries of an optimizer's state in the order of its parameters.

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
    """True if one of several updates writes memory that another one uses.

    Running them one after the other would then differ from running them together.

    Args:
        uses: for each update the memory that it uses, and the part of it that it writes.
    """
    takers = Counter(memory for taken, _ in uses for memory in taken)
    return any(takers[memory] > 1 for _, written in uses for memory in written)


def _memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns the storages of tensors. Private torch: one number for one, as long as it lives."""
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
