"""Functions of lists of DTensors: foreach and fused kernels, and norms of many tensors.

A foreach function calls its op once for each position of its lists. Each position is planned like a
call of the op. If no position needs a redistribution, the native foreach kernel runs on the local
tensors. A plan's key has the specs of the lists' elements, but no numbers such as bias corrections
and learning rates. Norms of all gradients, and a GradScaler's search for infinities, need one small
all-reduce.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache as once
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _foreach_supported_types as _in_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _in_clip

from partita.comm import Wire
from partita.layout import Layout
from partita.redistribute import plan

from .aliasing import refuse_partial_overlap
from .arguments import OpCall, check_plain_tensor, replace_at_paths
from .dtensor import DTensor, as_dtensor, move_local
from .dtensor_gradients import pending_gradients, reduce_pending_gradients
from .op_facts import OVERRIDES, form_of
from .origins import note_origins_of
from .plan import OPS, CallPlan, Op, note_miss, operand_kind
from .plan_call import make_plan
from .tensor_state import Args, Function, Kwargs, Spec, current, spec_of


class _ListPlan:
    """The plan of foreach calls with one key.

    Attributes:
        wires: the wire of each position, if not all are on one mesh; None for plain tensors.
        places: the plan of each position; None if the op is called on DTensors.
        clean: True if the native kernel runs: nothing moves, and no position has its own kernel.
        short: the positions whose operands are compared before a write (see `CallPlan.is_short`).
        specs: the specs of the results, set by the first call.
        hits: the number of calls that have used this plan.
    """

    __slots__ = ("clean", "hits", "places", "short", "specs", "wires")

    def __init__(self, places: list[CallPlan | None], wires: Sequence[Wire | None] = ()):
        self.hits = 0
        self.places, self.wires = places, wires
        self.specs: list[Spec] | None = None
        self.clean = not wires and all(p is not None and _is_clean(p) for p in places)
        self.short = [i for i, p in enumerate(places) if p is not None and p.is_short]
        for i in self.short:  # compared for all positions at once, however they are run
            places[i].is_short = False  # type: ignore[union-attr]


def _is_clean(plan: CallPlan) -> bool:
    return not (plan.targets or plan.kernel or plan.rewrite or plan.view_copies)


def run_foreach(func: Function, args: Args, kwargs: Kwargs, op: Op) -> Any:
    """Runs a `torch._foreach_*` function `func` on lists of DTensors. `op` stores its plans."""
    if not _OWN_NAMES.issuperset(kwargs):
        args, kwargs = _place_arguments(func, args, kwargs)
    named = [(k, _kind_of_value(v)) for k, v in kwargs.items() if isinstance(v, torch.Tensor)]
    key = (tuple(map(_kind_of_argument, args)), tuple(named))
    plan = op.plans.get(key) or op.plans.recall(key)
    if plan is None:
        note_miss()
        count = len(next(a for a in args if type(a) in (list, tuple)))
        wires = [_wire_of_place(i, args) for i in range(count)]
        if len(set(wires)) > 1:
            plan = _ListPlan([], wires)
        else:
            plan = _ListPlan([_plan_place(i, args, kwargs, op) for i in range(count)])
        op.plans.remember(key, plan)
    plan.hits += 1
    for i in plan.short:
        written, *others = _arguments_at_place(i, args)
        refuse_partial_overlap(op.form.name, written, (others, kwargs))
    # One autograd node for all places would give zeros, and not no gradient, to the operands of a
    # result that is not used.
    if not plan.clean or (torch.is_grad_enabled() and _require_gradients(args)):
        return _run_with_moves(plan, func, args, kwargs, op)
    with local_ops():
        out = func(*args, **kwargs)
    if op.form.inplace or out is None:
        return out
    if plan.specs is None:
        plan.specs = [p.tag(t)._spec for p, t in zip(plan.places, out, strict=True)]
    for i, (t, spec) in enumerate(zip(out, plan.specs, strict=True)):
        as_dtensor(t, spec)
        if spec.has_noted_origin:  # as on ranks that run one by one, where a piece is empty
            at_place = _arguments_at_place(i, args)
            note_origins_of(t, at_place, kwargs, False, sys._getframe(1))
    return out


def _require_gradients(args: Args) -> bool:
    """True if several places of the lists may have a gradient."""
    lists = [a for a in args if type(a) in (list, tuple)]
    return len(lists[0]) > 1 and any(
        isinstance(t, torch.Tensor) and t.requires_grad for a in lists for t in a
    )


_OWN_NAMES = frozenset(("alpha", "value", "dtype", "non_blocking"))
"""Arguments that only have a name, or that the op for one place takes by the same name."""


def _place_arguments(func: Function, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns arguments in which lists and numbers that were passed by name are positional.

    The op for one position may have other names for them (`scalar`, `tensors1`, `weights`).
    """
    packet = getattr(torch.ops.aten, func.__name__)
    for overload in packet.overloads():
        places = [a.name for a in getattr(packet, overload)._schema.arguments if not a.kwarg_only]
        names = [n for n in places[len(args) :] if n in kwargs]
        if _OWN_NAMES.union(names).issuperset(kwargs):
            after = [n for n in places[len(args) :] if n in names and n not in _OWN_NAMES]
            if after == places[len(args) : len(args) + len(after)]:
                rest = {k: v for k, v in kwargs.items() if k not in after}
                return (*args, *(kwargs[n] for n in after)), rest
    return args, kwargs


def _run_with_moves(plan: _ListPlan, func: Function, args: Args, kwargs: Kwargs, op: Op) -> Any:
    """Run a call that needs redistributions, or whose tensors are on several meshes."""
    by_name = op.form.name in ("addcdiv", "addcmul")  # each place has its own
    if by_name and len(args) == 4 and isinstance(args[3], torch.Tensor):
        args = (*args[:3], args[3].tolist())
    if plan.wires:
        return _run_by_mesh(plan.wires, func, args, kwargs)
    moving = [i for i, p in enumerate(plan.places) if p is None or p.targets or p.rewrite]
    lists = [a for a in args if type(a) in (list, tuple)]
    waiting = pending_gradients(a[i] for a in lists for i in moving)
    if waiting:  # reduced together, for good
        reduce_pending_gradients(waiting)
        return run_foreach(func, args, kwargs, op)
    return _run_one_by_one(plan, args, kwargs, op)


def _run_by_mesh(
    wires: Sequence[Wire | None], func: Function, args: Sequence[Any], kwargs: Any
) -> Any:
    """Call `func` once for each mesh, and once for the plain tensors."""
    found: list[Any] = [None] * len(wires)
    for wire in dict.fromkeys(wires):
        mine = [i for i, w in enumerate(wires) if w is wire]
        given = [[a[i] for i in mine] if type(a) in (list, tuple) else a for a in args]
        with local_ops() if wire is None else nullcontext():
            outs = func(*given, **kwargs)
        for i, out in zip(mine, outs or (), strict=False):
            found[i] = out
    if func.__name__.endswith("_"):
        return args[0]
    return None if outs is None else found


def _wire_of_place(i: int, args: Sequence[Any]) -> Wire | None:
    for a in args:
        if type(a) in (list, tuple) and isinstance(a[i], DTensor):
            return a[i]._spec.wire
    return None


def _kind_of_argument(value: Any) -> Any:
    if type(value) is list or type(value) is tuple:
        return tuple([v._spec if type(v) is DTensor else operand_kind(v) for v in value])
    return _kind_of_value(value)


def _kind_of_value(value: Any) -> Any:
    return value._spec if type(value) is DTensor else operand_kind(value)


def _arguments_at_place(i: int, args: Sequence[Any]) -> list[Any]:
    """Returns the op's arguments at position `i`: item i of each list, and the others."""
    return [a[i] if type(a) in (list, tuple) else a for a in args]


def _function_named(name: str) -> Function | None:
    return getattr(torch.Tensor, name, None) or getattr(torch, name, None)


def _find_single_op(op: Op) -> Function:
    """Returns the function that a foreach function runs for one position of its lists.

    For some (`maximum`), torch has an in-place form only for lists.
    """
    name = op.form.name
    function = _NUMBERS_TOO.get(name) or _function_named(name)
    if not op.form.inplace:
        assert function is not None
        return function
    return _function_named(name + "_") or _make_inplace_op(function)


def _make_op_or_clamp(function: Function, clamp: Function) -> Function:
    def call_or_clamp(x: torch.Tensor, other: Any) -> torch.Tensor:
        if isinstance(other, torch.Tensor):
            return function(x, other)
        if x.requires_grad:  # if equal, x gets half the gradient; by a clamp, all of it
            return function(x, torch.full((), other, dtype=x.dtype, device=x.device))
        return clamp(x, other)

    return call_or_clamp


# Ops whose list form accepts a number in a place where the op itself accepts only a tensor.
_NUMBERS_TOO: dict[str, Function] = {
    "maximum": _make_op_or_clamp(torch.maximum, torch.clamp_min),
    "minimum": _make_op_or_clamp(torch.minimum, torch.clamp_max),
    "pow": torch.pow,
}


@once
def _make_inplace_op(function: Function) -> Function:
    return lambda x, *args, **kwargs: x.copy_(function(x, *args, **kwargs))


def _plan_place(i: int, args: Args, kwargs: Kwargs, op: Op) -> CallPlan | None:
    single, place = _find_single_op(op), _arguments_at_place(i, args)
    own = form_of(single)
    if own.rule is not None:
        return make_plan(OpCall(own, single, place, kwargs))
    function = _function_named(op.form.name)
    if not op.form.inplace or function is None:
        return None
    # The native kernel serves if nothing moves and the result has the written operand's layout.
    plan = make_plan(OpCall(form_of(function), function, place, kwargs))
    if plan is None or plan.choice is None or not isinstance(place[0], DTensor):
        return None
    choice, layout = plan.choice, place[0]._spec.layout
    lies = (choice.outputs[0], choice.partial[0], choice.invariant[0])
    alike = lies == (layout.shards, layout.partial, layout.invariant)
    return plan if alike and _is_clean(plan) else None


def _run_one_by_one(plan: _ListPlan, args: Args, kwargs: Kwargs, op: Op) -> Any:
    single, outs = _find_single_op(op), []
    by_name = op.form.name in ("addcdiv", "addcmul")  # the op accepts `value` only by name
    for i, place in enumerate(plan.places):
        mine, options = _arguments_at_place(i, args), kwargs
        if by_name and len(mine) == 4:
            *mine, value = mine
            options = {**kwargs, "value": value}
        if place is None:
            outs.append(single(*mine, **options))
        else:
            outs.append(place.run(single, mine, options))
    return args[0] if op.form.inplace else outs


def run_fused(func: Function, args: Args, kwargs: Kwargs, op: Op) -> Any:
    """Runs a fused optimizer kernel `func`, such as `torch._fused_adam_`, on lists of DTensors."""
    new: dict[tuple[int | str, ...], Any] = {}
    shares = []
    for j, values in enumerate(args):
        if type(values) not in (list, tuple):
            continue
        for i, value in enumerate(values):
            target = args[0][i]._spec.reduced
            if isinstance(value, DTensor):
                if value._spec is not target and value._spec.shape == target.shape:
                    new[(j, i)] = move_local(value, value._spec, target, op.form.name, "implicit")
                    if args[0][i]._spec is not target:  # Partial: step on the reduced value
                        new[(j, i)] = as_dtensor(new[(j, i)].clone(), target)
                        shares.append((value, new[(j, i)]))
            elif value.dim() > 0:
                check_plain_tensor(value, target.wire, op.form.name, (j, i))
    args, kwargs = replace_at_paths(args, kwargs, new)
    with local_ops():
        out = func(*args, **kwargs)
        # The kernels increase no version counters, which decide whether kept results are valid.
        lists = [a for a in args if type(a) in (list, tuple)]
        increment_version([x for a in lists for x in a if isinstance(x, torch.Tensor)])
    for value, stepped in shares:
        value.copy_(stepped)
    return out


# -- norms and infinities of many tensors ----------------------------------------------------------
# One reduction serves all tensors. Pending gradients among them are reduced first, in buckets.


def norms(tensors: Sequence[torch.Tensor], ord: float = 2.0) -> list[torch.Tensor]:
    """Returns the norm of each tensor, as plain scalars that are equal on every rank.

    Not differentiable. The norms have at least float32 precision. Costs one small all-reduce for
    each mesh over which a tensor is sharded.

    Args:
        tensors: DTensors on any meshes, none of them Partial, and plain tensors.
        ord: the order of the norm, such as 2.0 or infinity.
    """
    with local_ops(), torch.no_grad():
        parts = _local_norms([_hide_padding(t, ord) for t in tensors], ord)
        split: dict[Wire, list[int]] = {}
        for i, t in enumerate(tensors):
            if isinstance(t, DTensor) and t._spec.is_sharded:
                split.setdefault(t._spec.wire, []).append(i)
        for wire, places in split.items():
            layouts = [tensors[i]._spec.layout for i in places]  # type: ignore[attr-defined]
            axes = {a for layout in layouts for stack in layout.shards for a in stack}
            dtype = torch.float64 if any(parts[i].dtype == torch.float64 for i in places) else None
            values = torch.stack([parts[i].to(dtype or torch.float32) for i in places])
            if not math.isinf(ord):
                # Of the ranks that hold the same piece, only the first counts it.
                copied = [[a for a in axes if not x.placement(a).is_shard()] for x in layouts]
                # The power first: copies on other ranks must count 0, but 0 ** ord may not be 0.
                values = values if ord in (0, 1) else values**ord
                values = torch.where(wire.is_first_along(copied, values.device), values, 0)
            whole = _reduce_norms(values, wire, axes, ord, "norms")
            whole = whole if math.isinf(ord) or ord in (0, 1) else whole ** (1 / ord)
            for i, value in zip(places, whole, strict=True):
                parts[i] = value.to(parts[i].dtype)
    return parts


def _hide_padding(t: torch.Tensor, ord: float) -> torch.Tensor:
    """Returns `t` with values in its padding that do not change its norm."""
    if not isinstance(t, DTensor):
        return t
    nothing = math.inf if ord < 0 else 0.0
    return t._spec.wire.fill_padding(t, t._spec.layout, nothing)


def _local_norms(tensors: Sequence[torch.Tensor], ord: float) -> list[torch.Tensor]:
    """Returns the norm of each piece, by one kernel for each dtype and device."""
    parts: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault((t.dtype, t.device, t.numel() > 0), []).append(i)
    for (dtype, device, filled), places in alike.items():
        found: Sequence[torch.Tensor]
        real = torch.empty((), dtype=dtype).abs().dtype  # of complex numbers, too
        wide = real if real in (torch.float32, torch.float64) else torch.float32
        if not filled:  # a norm that changes no sum of powers, no maximum and no minimum
            nothing = math.inf if ord < 0 else 0.0
            found = [torch.full((), nothing, dtype=wide, device=device) for _ in places]
        elif real is dtype:
            found = torch._foreach_norm([tensors[i] for i in places], ord, wide)
        else:
            found = [torch.linalg.vector_norm(tensors[i].abs(), ord) for i in places]
        for i, part in zip(places, found, strict=True):
            parts[i] = part
    return parts


def _reduce_norms(
    values: torch.Tensor, wire: Wire, axes: set[str], ord: float, needed_by: str
) -> torch.Tensor:
    op = "sum" if not math.isinf(ord) else "max" if ord > 0 else "min"
    shape = tuple(values.shape)
    before = Layout(shape, partial=tuple((a, op) for a in wire.mesh.names if a in axes))
    for move in plan(before, Layout(shape), wire.mesh, values.element_size()).moves:
        values = wire.carry(move, values, op=needed_by, reason="settle")
    return values


# -- torch's own functions -------------------------------------------------------------------------


def _foreach_norm(
    self: Sequence[torch.Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> Sequence[torch.Tensor]:
    """Runs torch._foreach_norm. For tensors on several meshes the norms are plain tensors."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in self):
        given = {} if dtype is None else {"dtype": dtype}
        return run_foreach(torch._foreach_norm, (self, ord), given, OPS[torch._foreach_norm])
    reduce_pending_gradients(pending_gradients(self))
    tensors = [_reduce_partial(current(t)) for t in self]  # a view copy may be out of date
    found = [
        n.to(dtype or torch.empty((), dtype=t.dtype).abs().dtype)
        for n, t in zip(norms(tensors, ord), tensors, strict=True)
    ]
    wires = {t._spec.wire if isinstance(t, DTensor) else None for t in tensors}
    (wire, *others) = wires
    if wire is None or others:
        return tuple(found)
    spec = spec_of(Layout(()), wire)
    return tuple(as_dtensor(n, spec) for n in found)


def _reduce_partial(t: torch.Tensor) -> torch.Tensor:
    """Returns `t`, reduced if it is Partial."""
    if not isinstance(t, DTensor) or not t._spec.is_pending:
        return t
    after = t._spec.reduced
    return as_dtensor(move_local(t, t._spec, after, "norms", "implicit"), after)


def _check_and_unscale(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Runs a GradScaler's kernel: unscales gradients, and finds infinities on all ranks."""
    reduce_pending_gradients(pending_gradients(grads))
    with local_ops():
        mine = torch.zeros_like(found_inf)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, mine, inv_scale)  # type: ignore[arg-type]
        increment_version(grads)  # the kernel does not count what it changes
        wires = dict.fromkeys(t._spec.wire for t in grads if isinstance(t, DTensor))
        for wire in wires:
            mine = _reduce_norms(mine, wire, set(wire.mesh.names), math.inf, "GradScaler")
        found_inf.copy_(torch.maximum(found_inf, mine))


OVERRIDES[torch._foreach_norm] = _foreach_norm
OVERRIDES[torch._amp_foreach_non_finite_check_and_unscale_] = _check_and_unscale


# torch's clip and optimizers use foreach functions for the types in these lists. They are private;
# torch's own DTensor adds itself to the same list.
def let_clip_use_foreach(kind: type[torch.Tensor]) -> None:
    """Make torch's gradient clipping use fast foreach kernels for tensors of the class `kind`.

    Torch does so only for tensor classes in a list of its own.
    """
    if kind not in _in_clip:
        _in_clip.append(kind)


if DTensor not in _in_optimizers:
    _in_optimizers.append(DTensor)
let_clip_use_foreach(DTensor)
