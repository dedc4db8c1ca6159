"""Captured optimizers: how a torch.optim optimizer steps in a graph.

Its state and parameters are inputs like others. So are the floats of its groups, which schedules
change: if they were constants, every step would need another graph. State that the first step would
create is created before capture (`make_optimizer_state`), so that all steps have the same program.
If the model has blocks, `block_updates` updates each separately.

The step count of each parameter needs a dozen scalar calls, but normally all counts are equal.
Their equality becomes a condition (`EqualInputs`), and the calls are made for only one of the
counts (`share_equal_counts`).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from partita.comm import user_line
from partita.comm.device import HOST
from partita.graph.errors import CaptureError, not_captured
from partita.graph.graph_nodes import is_collective, key_of_operands, note_of
from partita.graph.program import Input
from partita.graph.slots import ParamGroup, ParamState, Slot
from partita.layout import Fix
from partita.tensor.construct import lay_out_state
from partita.tensor.dtensor import DTensor
from partita.tensor.dtensor_gradients import update_spec
from partita.tensor.op_facts import facts_of
from partita.tensor.tensor_state import HERE

from .block_updates import COUNTS, BlockUpdates, WidenedCounts, narrow_counts, widen_counts
from .capture_context import dispatch_listeners, intercepting_modes
from .code_origin import codes_within
from .conditions import EqualInputs, read_counts
from .fakes import device_at_capture
from .recorder import Recorder

MadeState = list[tuple[Optimizer, torch.Tensor]]

_UNSCALES = "_step_supports_amp_scaling"
"""Private torch: the attribute of fused optimizers that makes a GradScaler leave unscaling to
them."""


_CAPTURED = {"capturable": True, "foreach": True, "fused": False}
"""Settings of an optimizer during capture: capturable, so that no count is read as a number;
foreach, because the compiler fuses its kernels."""


def make_optimizer_state(optimizers: dict[str, Optimizer]) -> MadeState:
    """Creates the state of torch's `optimizers` before a capture, as their first step would.

    So the first step has the same program as later ones. Private torch: `_init_group`, which every
    optimizer of torch.optim has, makes the state of each parameter with a gradient.

    Returns:
        (optimizer, parameter) for each new state, for `drop_unused_state`.
    """
    found: MadeState = []
    for optimizer in optimizers.values():
        if _leaves_state_to_torch(optimizer):
            if isinstance(optimizer, torch.optim.SGD):
                found += _make_momentum(optimizer)
            found += _make_state(optimizer)
            _lay_out_states(optimizer)
    return found


def _lay_out_states(optimizer: Optimizer) -> None:
    for p, state in optimizer.state.items():
        if isinstance(p, DTensor) and update_spec(p) is not p._spec:  # ZeRO 1 and 2
            lay_out_state(p, state)


def _check_state_is_apart(optimizer: Optimizer) -> None:
    """Raises CaptureError if two parameters have one tensor in their state.

    A captured update goes operation by operation over all parameters, as foreach kernels do; eager
    may go parameter by parameter. Both agree if parameters share no state.
    """
    seen: set[int] = set()
    for entries in optimizer.state.values():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                if id(value) in seen:
                    raise not_captured(
                        f"two parameters of an optimizer share one tensor as their {name!r}",
                        "in eager, the update of one parameter writes it and the next reads it",
                        Fix(f"state[{name!r}].clone()", "for each parameter"),
                    )
                seen.add(id(value))


def _is_of_torch(optimizer: Optimizer) -> bool:
    """True for a class of torch, or a subclass that steps and makes state in the same way."""
    found = [getattr(type(optimizer), name, None) for name in ("step", "_init_group")]
    return all(_is_defined_in_torch(inspect.unwrap(f)) for f in found if f is not None)


def _leaves_state_to_torch(optimizer: Optimizer) -> bool:
    """True for a class of torch, or a subclass whose own methods do not name the state.

    Methods that name it may check whether it exists, and make it in their own way if not.
    """
    for kind in type(optimizer).__mro__:
        if _is_defined_in_torch(kind):
            return kind is not Optimizer
        own = (inspect.unwrap(f) for f in vars(kind).values() if callable(f))
        codes = (c for f in own if isinstance(f, FunctionType) for c in codes_within(f.__code__))
        if any("state" in code.co_names for code in codes):
            return False
    return False


def _is_defined_in_torch(found: Any) -> bool:
    return f"{found.__module__}.".startswith("torch.optim.")


def _find_modes() -> tuple[Any, ...]:
    """Returns the user's modes that intercept functions, and the number of dispatch modes."""
    return (*map(id, intercepting_modes()), dispatch_listeners()[0])


def _steps_under_mode() -> CaptureError:
    return not_captured(
        "an optimizer steps within a TorchFunctionMode or TorchDispatchMode that the step enters",
        "in the graph all parameters are updated together, so the mode would intercept other "
        "calls than in eager",
        Fix("optimizer.step()", "outside of the mode"),
        place=user_line(),
    )


def _make_state(optimizer: Optimizer, only_with_gradient: bool = False) -> MadeState:
    """Makes the state of parameters, or of those with a gradient, as their first step would."""
    found: MadeState = []
    make: Any = getattr(optimizer, "_init_group", None)
    lists = 0 if make is None else len(inspect.signature(make).parameters) - 1
    for group in optimizer.param_groups if make is not None else ():
        new = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        if only_with_gradient:
            new = [p for p in new if p.grad is not None]
        if not new:
            continue
        without = [p for p in new if p.grad is None]
        for p in without:
            p.grad = p.detach()
        try:
            make(_without_fused(group, new) | {"params": new}, *[[] for _ in range(lists)])
        finally:
            for p in without:
                p.grad = None
        found += [(optimizer, p) for p in new]
    return found


def _without_fused(group: dict[str, Any], params: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Returns the group with `fused` off if its parameters are meta tensors.

    A fused optimizer refuses meta tensors, although making its state needs no kernel. It is made
    "capturable", which keeps the step count on the parameter's device, as "fused" does.
    """
    if not group.get("fused") or not all(p.is_meta for p in params):
        return group
    return group | {"fused": False} | ({"capturable": True} if "capturable" in group else {})


def _make_momentum(optimizer: Optimizer) -> MadeState:
    """Gives SGD momentum buffers of zeros, to which its first step adds the first gradient.

    Groups with dampening get none, because dampening does not apply to the first gradient.
    """
    found: MadeState = []
    for group in optimizer.param_groups:
        if not group["momentum"] or group["dampening"]:
            continue
        for p in group["params"]:
            if p.requires_grad and optimizer.state.get(p, {}).get("momentum_buffer") is None:
                state = optimizer.state[p]
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                found.append((optimizer, p))
    return found


def drop_unused_state(made_state: MadeState, used: Callable[[Any], bool]) -> bool:
    """Deletes state that `make_optimizer_state` has created and the step does not use.

    Args:
        made_state: the result of `make_optimizer_state`.
        used: a predicate: True for a tensor that the step uses.

    Returns:
        True if any state was deleted.
    """
    found = False
    for optimizer, p in made_state:
        state = optimizer.state.get(p)
        tensors = [v for v in (state or {}).values() if isinstance(v, torch.Tensor)]
        if state is not None and not any(map(used, tensors)):
            del optimizer.state[p]
            found = True
    return found


class CapturedOptimizers:
    """The optimizers of a step in its capture. Fakes replace their parameters and floats."""

    def __init__(self, optimizers: dict[str, Optimizer]):
        self.optimizers = optimizers
        self._counts: WidenedCounts = []
        self._kept: set[int] = set()
        self._stepped: list[Optimizer] = []
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._held: dict[Optimizer, dict[Any, dict[Any, Any]]] = {}

    @contextmanager
    def standing_in(
        self,
        stand_in: Callable[[Any], Any],
        number: Callable[..., Any],
        recorder: Recorder,
        updates: BlockUpdates,
    ) -> Iterator[None]:
        """Replaces parameters and floats in optimizers' groups by fakes, inside the `with` block.

        Optimizer steps inside the block are set up to be captured. The tensors of the optimizers'
        state are replaced elsewhere.

        Args:
            stand_in: a function that returns the fake of a tensor.
            number: a function that returns the symbolic float for a float, given its name, value,
                and place (home and path).
            recorder: its phase becomes "update" while an optimizer steps.
            updates: traces the updates of blocks.

        Raises:
            CaptureError: an optimizer steps within a mode that the step enters.
        """
        before = [(name, o, o.state, o.param_groups) for name, o in self.optimizers.items()]
        lists = [(groups, [*groups]) for *_, groups in before]
        held: dict[
            int, tuple[dict[str, Any], dict[str, Any]]
        ] = {}  # groups by id, and as they were
        fused = [o for o in self.optimizers.values() if vars(o).get(_UNSCALES) and _is_of_torch(o)]
        modes = _find_modes()

        # Global hooks are called for optimizers of other threads too.
        def begin_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if HERE.trace is recorder:
                if _find_modes() != modes:
                    raise _steps_under_mode()
                recorder.updating = True
                if _is_of_torch(optimizer):
                    HERE.trace.run_without_profiling(_check_state_is_apart, optimizer)
                if _is_of_torch(optimizer) or optimizer in self._held:
                    self._set_up_groups(optimizer)
                if _leaves_state_to_torch(optimizer):
                    # If the step made the optimizer or deleted state. A closure makes gradients.
                    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
                    if _make_state(optimizer, only_with_gradient=closure is None):
                        _lay_out_states(optimizer)
                recorder.exact = self._kept if _is_of_torch(optimizer) else None
                if not updates.has_blocks:
                    self._counts += widen_counts(optimizer.state.values(), self._kept)

        def begin_rest(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            """Widens the counts, unless partita's own hook has updated the blocks before.

            Args:
                optimizer, args, kwargs: what torch passes to a hook before `optimizer.step`.
            """
            if HERE.trace is recorder and updates.has_blocks and optimizer not in self._stepped:
                self._counts += widen_counts(optimizer.state.values(), self._kept)

        def step_in_blocks(optimizer: Optimizer, run: Any, originals: Any) -> None:
            self._stepped.append(optimizer)
            updates.update_blocks(optimizer, run, originals)

        def end_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if HERE.trace is recorder:
                recorder.exact = None
                narrow_counts(self._counts)
                self._stepped.clear()
                self._restore_settings()
                recorder.updating = False

        hooks = [
            register_optimizer_step_pre_hook(begin_update),
            register_optimizer_step_pre_hook(begin_rest),
            register_optimizer_step_post_hook(end_update),
        ]
        # Private torch: there is no public way to put a hook first. Partita's own hook, which was
        # registered before, does the whole step for most optimizers.
        _global_optimizer_pre_hooks.move_to_end(hooks[0].id, last=False)  # type: ignore[attr-defined]
        try:
            for optimizer in fused:
                vars(optimizer)[_UNSCALES] = False  # it is captured as a foreach optimizer
            for name, optimizer, state, groups in before:
                by_stand_in: defaultdict[Any, dict[Any, Any]] = defaultdict(dict)
                self._held[optimizer] = {}
                for p, entries in state.items():
                    by_stand_in[stand_in(p)] = dict(entries)
                    self._held[optimizer][stand_in(p)] = dict(entries)
                optimizer.state = by_stand_in
                # In place: the step may have other references to a group, or to the list of groups.
                for i, group in enumerate(groups):
                    if id(group) not in held:  # optimizers may share their groups
                        held[id(group)] = group, dict(group)
                        group.update(self._stand_in_group(name, i, group, stand_in, number))
            updates.note_parameters()
            if updates.has_blocks:
                recorder.step = step_in_blocks  # type: ignore[method-assign]
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._restore_settings()
            for _, optimizer, state, groups in before:
                optimizer.state, optimizer.param_groups = state, groups
            for groups, was in lists:
                groups[:] = was
            for group, own in held.values():
                group.clear()
                group.update(own)
            for optimizer in fused:
                vars(optimizer)[_UNSCALES] = True

    def _stand_in_group(
        self,
        name: str,
        index: int,
        group: dict[str, Any],
        stand_in: Callable[[Any], Any],
        number: Callable[..., Any],
    ) -> dict[str, Any]:

        def stand_in_for(value: Any, *path: Any) -> Any:
            if isinstance(value, float):
                within = "".join(f"[{at}]" for at in path[1:])
                called = f"{name}.{path[0]}[{index}]{within}"
                return number(called, value, ParamGroup(self.optimizers[name], index), path)
            if type(value) in (tuple, list):
                parts = [stand_in_for(v, *path, i) for i, v in enumerate(value)]
                is_same = all(v is part for v, part in zip(value, parts, strict=True))
                return value if is_same else type(value)(parts)
            return stand_in(value)

        return {key: stand_in_for(value, key) for key, value in group.items()}

    def _set_up_groups(self, optimizer: Optimizer) -> None:
        """Sets an optimizer's options (like `foreach`) for capture, until `_restore_settings`."""
        for group in optimizer.param_groups:
            own = {name: group[name] for name in _CAPTURED if name in group}
            self._settings.append((group, own))
            group.update({name: _CAPTURED[name] for name in own})

    def _restore_settings(self) -> None:
        for group, settings in reversed(self._settings):  # one optimizer may step within another
            group.update(settings)
        self._settings.clear()

    def list_new_state(
        self, find_slot: Callable[[torch.Tensor], Slot | None]
    ) -> list[tuple[Slot, torch.Tensor]]:
        """Returns (slot, tensor) for each tensor that the step has added to an optimizer's state.

        The slot is the place in the optimizer's `state`.

        Args:
            find_slot: a function that returns the slot of the input that a fake replaces.

        Raises:
            CaptureError: the step changed a number in an optimizer's state, or added state for a
                tensor that is in none of its groups.
        """
        found = []
        for name, optimizer in self.optimizers.items():
            for p, entries in optimizer.state.items():
                held = self._held[optimizer].get(p, {})
                real = find_slot(p)
                for key, value in entries.items():
                    if value is held.get(key):
                        continue
                    if isinstance(value, torch.Tensor) and real is None:
                        raise not_captured(
                            f"{name} keeps state for a tensor that is not in its parameter groups",
                            "capture does not find where the optimizer stores it",
                        )
                    if isinstance(value, torch.Tensor) and real is not None:
                        slot = Slot(f"{name}.{key}", "optimizer", ParamState(optimizer, real), key)
                        found.append((slot, value))
                    elif value != held.get(key):
                        raise not_captured(
                            f"{name} changes its state {key!r}, a Python number",
                            "the graph would use the value of the first call in every call",
                        )
        return found


# -- equal step counts -----------------------------------------------------------------------------

_COUNTED_ON = (HOST.type, "meta")  # reading these waits for no device


def find_equal_counts(
    inputs: Sequence[Input], optimizers: Iterable[Optimizer]
) -> list[EqualInputs]:
    """Returns a condition for each group of the optimizers' step counts that are equal now.

    Counts on a GPU are left out, because each call would have to wait for their values. Counts
    of a user's optimizer are left out, because they may be equal on some ranks only.
    """
    states = (s for o in filter(_is_of_torch, optimizers) for s in o.state.values())
    numbers = (entries.get(name) for entries in states for name in COUNTS)
    counts = {id(t) for t in numbers if type(t) is torch.Tensor and t.ndim == 0}
    found: dict[Any, list[Input]] = defaultdict(list)
    for given in inputs:
        t = given.tensor
        if id(t) in counts and device_at_capture(t).type in _COUNTED_ON:
            (value,) = read_counts([t])
            found[t.dtype, t.device, value].append(given)
    return [
        EqualInputs(tuple(i.name for i in equal), tuple(i.index for i in equal))
        for equal in found.values()
        if len(equal) > 1
    ]


def places_of_equal(inputs: Sequence[Input], equal: Iterable[EqualInputs]) -> list[list[int]]:
    """Returns for each group of equal step counts their positions among the graph's `inputs`.

    `equal` is the result of `find_equal_counts`.
    """
    place = {given.index: i for i, given in enumerate(inputs) if given.kind == "optimizer"}
    return [[place[i] for i in one.indices] for one in equal]


def share_equal_counts(graph: fx.Graph, equal: Sequence[Sequence[fx.Node]]) -> None:
    """Rewrites an update so that values that depend only on equal step counts are computed once.

    All writes into inputs must be at the end of the graph; they remain. Two results may become one
    node, so the caller calls `functional_memory.keep_apart` afterwards.

    Args:
        equal: groups of inputs that hold the same number.
    """
    equal_counts: dict[fx.Node, fx.Node] = {}
    for numbers in equal:
        read = [n for n in numbers if any(map(_is_scalar_call, n.users))]
        equal_counts.update(dict.fromkeys(read[1:], read[0]) if read else ())
    known: dict[Any, fx.Node] = {}
    equal_calls: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        _exchange_operands(node, equal_calls)
        if not _is_scalar_call(node):
            continue
        _exchange_operands(node, equal_counts)
        key = node.target, key_of_operands((node.args, node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            equal_calls[node] = first
    for node in reversed(equal_calls):
        graph.erase_node(node)


def _exchange_operands(node: fx.Node, of: Mapping[fx.Node, fx.Node]) -> None:
    """Replaces the operands of a node that are keys of `of` by their values in `of`."""
    # All at once, because each replacement of one operand copies all operands of the call.
    if not of.keys().isdisjoint(node.all_input_nodes):
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: of.get(n, n))


def _is_scalar_call(node: fx.Node) -> bool:
    """True for a deterministic call of an update that makes one number from single numbers."""
    if node.op != "call_function" or not _is_single(node) or note_of(node).phase != "update":
        return False
    facts = facts_of(node.target)
    return (
        facts.makes_new
        and not facts.draws
        and not is_collective(node)
        and all(map(_is_single, node.all_input_nodes))
    )


def _is_single(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 0
