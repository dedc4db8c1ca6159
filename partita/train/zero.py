"""How is a model trained whose parameters no rank holds whole?

At rest each rank holds its shard of every parameter. While one block computes, the next block's
parameters are on their way, and in backward the last block's gradients are: the transpose of a
gather is a reduce-scatter. At most two blocks are gathered at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line, wire_of
from partita.layout import Fix, LayoutError, Replicate, Shard
from partita.tensor.autograd import moved
from partita.tensor.construct import distribute_tensor
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.engine import after_backward, backward_pass, in_backward
from partita.tensor.padded_storage import with_room
from partita.tensor.parameter import hold_value, refuse_lazy
from partita.tensor.spec import Spec, spec_of
from partita.tensor.special import BROKEN_OFF
from partita.tensor.tensor_state import Rest, own_state, state_of
from partita.tensor.watch import HERE

from .blocks import Block, find_blocks
from .call import Shares
from .early import Early
from .in_graph import refuse_no_sync
from .nested import map_tensors
from .unit import Unit

__all__ = ["MixedPrecision", "Zero", "no_sync", "zero", "zero_state"]


@dataclass(frozen=True)
class MixedPrecision:
    """In which dtypes a step works; parameters and optimizer state keep their own.

    Attributes:
        param_dtype: of gathered parameters, on their way and in use; their own where None.
        grad_dtype: in which gradients travel; `param_dtype` where None.
        reduce_dtype: in which gradients are summed; the parameter's own where None.
        output_dtype: to which the model's floating outputs are cast; not at all where None.
        cast_inputs: cast the floating inputs of each block to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True


@dataclass(frozen=True)
class _Reducing:
    """Gradients of a unit that are being reduced.

    Attributes:
        members: which of the unit's parameters have one.
        places: where these stand in what `wait` returns.
    """

    unit: Unit
    members: list[int]
    places: list[int]
    wait: Callable[[], list[torch.Tensor]]


class Zero:
    """A model whose parameters are sharded over `axes` at rest.

    Attributes:
        units: its blocks.
        persistent: what was gathered once stays, until a parameter is changed.
        keeps_shares: gradients stay whole-size shares on each rank, until it is False again.
        holds_shares: may there be some of an earlier backward pass, or of this one?
        peak: the most bytes that were gathered at once.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: tuple[str, ...],
        precision: MixedPrecision,
        blocks: Sequence[Block],
    ):
        self._begin_with(model, axes, precision)
        self.units = [Unit(self, block) for block in blocks if block.slots]
        self.take(model.parameters())
        # Around those of the units, of which the model itself may be one.
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin_with(
        self, model: nn.Module, axes: tuple[str, ...], precision: MixedPrecision
    ) -> None:
        self.model = model
        self.axes, self.precision = axes, precision
        self.options = (axes, 3, precision)
        self.applied: list[nn.Module] = []
        self.persistent = self.keeps_shares = self.holds_shares = False
        self.peak = 0
        self._forwards = 0
        self._token: torch.Tensor | None = None
        self._last: Unit | None = None
        self._next: dict[Unit, Unit] = {}
        self._before: dict[Unit, Unit] = {}
        self._under_way: list[_Reducing] = []
        self._passes: dict[int, list[Unit]] = {}
        self._with_history: dict[DTensor, torch.Tensor] = {}
        BROKEN_OFF.watchers.add(self)

    def leave(self) -> None:
        """Hear of the model no more: a state of a model around it takes over."""
        self.settle()
        BROKEN_OFF.watchers.discard(self)
        mine = {self, *self.units}
        for module in {m for unit in self.units for m in unit.modules} | {self.model}:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [n for n, h in hooks.items() if getattr(h, "__self__", None) in mine]:
                    del hooks[number]

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have the gradients and the updates of the model's parameters lie where these do."""
        self.parameters: list[Any] = list(parameters)
        for p in self.parameters:
            own_state(p).rest = Rest(p._spec, p._spec, self)

    # A copy of the model has a state of its own, over its own parameters, at rest.

    def __getstate__(self) -> Any:
        self.settle()
        return (
            self.model,
            self.axes,
            self.precision,
            self.persistent,
            self.units,
            self.parameters,
        )

    def __setstate__(self, state: Any) -> None:
        model, axes, precision, persistent, self.units, parameters = state
        self._begin_with(model, axes, precision)
        self.persistent = persistent
        self.take(parameters)

    def whole(self, spec: Spec) -> Spec:
        """The layout of a parameter of `spec` when it is gathered."""
        layout = spec.layout
        for a in self.axes:
            layout = layout.put(a, Replicate())
        return spec_of(layout, spec.wire)

    def has_sharded(self, p: torch.Tensor | None) -> bool:
        """Is `p` a parameter that lies as this state lays them?"""
        return (
            isinstance(p, DTensor)
            and isinstance(p, nn.Parameter)
            and all(p._spec.layout.placement(a) == Shard(0) for a in self.axes)
        )

    # -- forward -----------------------------------------------------------------------------------

    def _begin(self, *_: Any) -> None:
        if not self._forwards and not in_backward():
            self.settle()
        self._forwards += 1
        self._last = None

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._forwards = max(0, self._forwards - 1)
        self._token = None
        if not in_backward():
            self.release()
        dtype = self.precision.output_dtype
        if dtype is None or output is None:
            return None
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    def enter_forward(self, unit: Unit) -> None:
        """Gather `unit`; what came next last time may be on its way meanwhile."""
        if in_backward():
            if not unit.alive:
                # A region of several blocks runs again: each comes anew for its own backward.
                self.release()
            unit.gather()
            return
        unit.gather()
        if self._last is not None and self._last is not unit:
            self._next[self._last] = unit
            self._before[unit] = self._last
        self._last = unit
        self._prefetch(self._next.get(unit), unit)

    def enter_backward(self, unit: Unit) -> None:
        """Gather `unit`; what came before it in forward may be on its way meanwhile."""
        unit.gather()
        before = self._before.get(unit)
        while before is not None and not before.needed:
            before = self._before.get(before)
        self._prefetch(before, unit)

    def _prefetch(self, unit: Unit | None, beside: Unit) -> None:
        if unit is None:
            return
        for other in self.units:
            if other is not unit and other is not beside and other.alive:
                return
        unit.start()

    # -- backward ----------------------------------------------------------------------------------

    def release_after_backward(self, unit: Unit) -> None:
        """Release `unit` when the backward pass that is at work ends, if nothing else has.

        Not every pass comes to the gradients of a block's parameters: it may be asked for those of
        the inputs alone.
        """
        number = backward_pass()
        if number not in self._passes:
            self._passes[number] = []
            after_backward(lambda: self._end_backward(number))
        if unit not in self._passes[number]:
            self._passes[number].append(unit)

    def _end_backward(self, number: int) -> None:
        # Units that a pass around this one uses are left to it.
        units = self._passes.pop(number, [])
        around = {u for others in self._passes.values() for u in others}
        with Local(), torch.no_grad():
            for unit in units:
                if unit not in around:
                    unit.end_backward()

    def token(self, unit: Unit) -> torch.Tensor:
        """What ties gathered parameters to their shards: an empty tensor with a history.

        One serves a whole forward of the model, so that its backward comes after every block's,
        and there waits for all gradients that are under way. A block that is called alone has its
        own.
        """
        if not self._forwards or in_backward():
            return _Enter.apply(self, [unit], *_graded([unit]))
        if self._token is None:
            self._token = _Enter.apply(self, self.units, *_graded(self.units))
        return self._token

    def reduce(self, unit: Unit, k: int, shares: Shares) -> None:
        """Begin to reduce gradients, after those that were begun before are here."""
        dtype = self.precision.reduce_dtype or unit.shards()[unit.groups[k][0]].dtype
        for one in self._under_way:
            if one.unit is not unit:
                one.wait()
        wait = unit.flats[k].reduce(shares.sums, dtype)
        members = [i for i, used in zip(unit.groups[k], shares.used, strict=True) if used]
        places = [i for i, used in enumerate(shares.used) if used]
        self._under_way.append(_Reducing(unit, members, places, wait))

    def collect(self, units: Sequence[Unit]) -> dict[DTensor, torch.Tensor]:
        """Wait for what is being reduced of `units`. Each parameter's gradient, plain and local."""
        if not self.keeps_shares:
            self._send(units)
        found: dict[DTensor, torch.Tensor] = {}
        ready = [one for one in self._under_way if one.unit in units]
        self._under_way = [one for one in self._under_way if one.unit not in units]
        for one in ready:
            pieces, shards = one.wait(), one.unit.shards()
            for i, place in zip(one.members, one.places, strict=True):
                p = shards[i]
                g = pieces[place].to(p.dtype)
                found[p] = found[p] + g if p in found else g
        return found

    def add_with_history(self, p: DTensor, grad: torch.Tensor) -> None:
        """The gradient of `p`, in a backward pass that makes a graph: it is of that graph."""
        before = self._with_history.get(p)
        self._with_history[p] = grad if before is None else before + grad

    def take_with_history(self, units: Sequence[Unit]) -> dict[DTensor, torch.Tensor]:
        """What was added for the parameters of `units`."""
        mine = [p for p in _graded(units) if p in self._with_history]
        return {p: self._with_history.pop(p) for p in mine}

    def replaced(self, old: DTensor, new: DTensor) -> None:
        """`new`, which lies as `old` did, has taken its place in the model (see `materialize`)."""
        own_state(new).rest = state_of(old).rest
        self.parameters = [new if p is old else p for p in self.parameters]

    def updated(self) -> None:
        """An optimizer has updated the shards: nothing has to be gathered before it is used."""

    def show_gradient(self) -> None:
        """The program reads a gradient, or clears it: shares that were kept become a part of it."""
        if self.holds_shares and not in_backward():
            self.holds_shares = False
            if any(unit.held for unit in self.units):
                self.finish()

    def finish(self) -> None:
        """Reduce the shares that were kept, and add them to the parameters' gradients."""
        with Local(), torch.no_grad():
            self._send(self.units)
            for p, g in self.collect(self.units).items():
                held = torch._C.TensorBase.grad.__get__(p)
                if held is None:
                    p.grad = tagged(g, p._spec.gradient)
                else:
                    held.add_(g)

    def _send(self, units: Sequence[Unit]) -> None:
        for unit in units:
            for k in list(unit.held):
                self.reduce(unit, k, unit.held.pop(k))

    # -- and after ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Free every block that is not in use."""
        for unit in self.units:
            unit.release()

    def settle(self) -> None:
        """Leave nothing of an earlier step, however it ended: all released, nothing under way."""
        self._passes.clear()
        self._with_history.clear()
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            one.wait()
        for unit in self.units:
            unit.settle()
        self.release()

    @contextmanager
    def keeping_shares(self) -> Iterator[None]:
        """Send no gradients in the backward passes within; the next one outside sends them all."""
        before, self.keeps_shares = self.keeps_shares, True
        try:
            yield
        finally:
            self.keeps_shares = before

    @property
    def alive(self) -> int:
        """Bytes of gathered parameters that are held now."""
        return sum([flat.alive for unit in self.units for flat in unit.flats])

    def note_alive(self) -> None:
        self.peak = max(self.peak, self.alive)


def zero(
    model: nn.Module,
    mesh: Any,
    axis: str | Sequence[str] | None = None,
    *,
    stage: int = 3,
    precision: MixedPrecision | torch.dtype | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    persistent: bool = False,
) -> nn.Module:
    """Shard a model's training state over the ranks of `axis`. In place; returns the model.

    The ranks of `axis` take different parts of the batch: their inputs are `Shard(0)` on it.

    | stage | parameters | settled gradients | optimizer state | bytes sent per step and rank |
    |-------|------------|-------------------|-----------------|------------------------------|
    | 0     | whole      | whole             | whole           | 2 (n-1)/n of the model       |
    | 1     | whole      | whole             | shards          | 3 (n-1)/n                    |
    | 2     | whole      | shards            | shards          | 2 (n-1)/n                    |
    | 3     | shards     | shards            | shards          | 3 (n-1)/n                    |

    Losses are bitwise equal on all stages: on two ranks, and on more where sums are in rank order,
    as `torch.use_deterministic_algorithms(True)` has them. Each backward pass sends its gradients,
    unless it runs under `no_sync`. Stages 1 and 2 shard the state of the element-wise optimizers of
    torch.optim (all but LBFGS, Adafactor, SparseAdam and Muon); others keep theirs whole.

    Args:
        model: plain, or after `parallelize`. An optimizer may be made before or after: parameters
            stay the objects that they are. Modules in it to which `zero` was applied before, with
            the same axes, stage and precision, are its blocks.
        axis: the mesh axis, or several, over which to shard; by default "dp", or the only one of a
            mesh that has no such axis. For hybrid sharding give one of two
            data axes: the other's gradients stay pending and settle, as shards, in the step.
        stage: see above.
        precision: dtypes to compute, to send and to sum in (stage 3); a dtype alone is
            `param_dtype`.
        blocks: the modules whose parameters are gathered together, themselves or as patterns of
            names; found by themselves where not given: the children of the outermost ModuleLists
            and Sequentials.
        persistent: what stage 3 gathered stays until an optimizer steps.

    Raises:
        LayoutError: an unknown axis, or a parameter that is split over it already.
        ValueError: another stage, a model that is sharded already, blocks that do not fit it.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero: stage {stage} is none of 0, 1, 2, 3")
    if "_zero" in model.__dict__:
        raise ValueError("zero: this model is sharded already; shard it once, over all its axes")
    refuse_lazy(model, "zero")
    wire = wire_of(mesh)
    if axis is None:
        axis = wire.mesh.names[0] if wire.mesh.ndim == 1 else "dp"
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    places = sorted(wire.mesh.index(a) for a in axes)  # raises for an axis that there is not
    axes = tuple(wire.mesh.names[i] for i in places)
    if isinstance(precision, torch.dtype):
        precision = MixedPrecision(precision)
    _refuse_other_meshes(model, mesh)
    applied = _take_over(model, axes, stage, precision)
    if applied and blocks is None:
        blocks = applied
    grads: dict[nn.Parameter, torch.Tensor | None] = {}
    for p in model.parameters():  # a 0-d one stays whole: its gradient settles with the others
        if not applied or not _is_placed(p, axes):
            grads[p] = hold_value(p, _placed(p, mesh, axes if stage == 3 and p.ndim else ()))
    for module in model.modules():
        for attr, b in list(module._buffers.items()):
            if b is not None and not isinstance(b, DTensor):
                module._buffers[attr] = distribute_tensor(b, mesh)
    found = find_blocks(model, blocks)
    if stage == 3:
        state: Zero | Early = Zero(model, axes, precision or MixedPrecision(), found)
        state.persistent = persistent
    else:
        parts = []
        for block in found:
            params = [s[0].owner._parameters[s[0].attr] for s in block.slots]
            parts.append((block.name, [p for p in params if p.requires_grad and p.ndim]))
        state = Early(parts, axes, stage, partial(_sharded, axes=axes))
    model.__dict__["_zero"] = state
    state.options, state.applied = (axes, stage, precision or MixedPrecision()), applied
    for p, grad in grads.items():
        if grad is not None:
            p.grad = grad if isinstance(grad, DTensor) else distribute_tensor(grad, mesh)
    return model


def _refuse_other_meshes(model: nn.Module, mesh: Any) -> None:
    wire = wire_of(mesh)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and p._spec.wire is not wire:
            raise LayoutError(
                f"zero: {name} lies on another mesh",
                place=user_line(),
                operands=(
                    f"{name}  {p._spec.layout.brief()} on {p._spec.wire.mesh}",
                    f"zero on {wire.mesh}",
                ),
                reason="moves are planned along the axes of one mesh, of which a sub-mesh is none",
                fixes=(
                    Fix(
                        "parallelize(model, mesh, plan); zero(model, mesh, 'dp')",
                        "the mesh with all axes; the plan and zero name theirs",
                    ),
                ),
            )


def _take_over(
    model: nn.Module, axes: tuple[str, ...], stage: int, precision: MixedPrecision | None
) -> list[nn.Module]:
    """The modules in `model` to which `zero` was applied, which leave their state to it.

    Raises:
        LayoutError: they were sharded otherwise, or `model` lies within what is sharded.
    """
    states: dict[nn.Module, Zero | Early] = {}
    for module in model.modules():
        if "_zero" in module.__dict__:
            states[module] = module.__dict__["_zero"]
    owners = set(states.values())
    for name, p in model.named_parameters():
        rest = state_of(p).rest
        if rest is not None and rest.owner not in owners:
            raise LayoutError(
                f"zero: {name} is sharded already, with a model around this module",
                place=user_line(),
                fixes=(
                    Fix("zero(module, mesh) first, and zero(model, mesh) after", "inner to outer"),
                ),
            )
    wanted = (axes, stage, precision or MixedPrecision())
    for module, state in states.items():
        if state.options != wanted:
            raise LayoutError(
                f"zero: a {type(module).__name__} in the model was sharded otherwise",
                place=user_line(),
                operands=(_options(state.options), _options(wanted)),
                reason="the blocks of one model are gathered and reduced in one way",
                fixes=(Fix("zero(..., blocks=[...])", "once, for the whole model"),),
            )
    applied = [m for module, state in states.items() for m in state.applied or [module]]
    for module, state in states.items():
        state.leave()
        del module.__dict__["_zero"]
    return applied


def _options(options: tuple[tuple[str, ...], int, MixedPrecision]) -> str:
    axes, stage, precision = options
    return f"stage {stage} over {' '.join(axes)}, {precision}"


def _is_placed(p: torch.Tensor, axes: tuple[str, ...]) -> bool:
    rest = state_of(p).rest
    if rest is None:
        return False
    own_state(p).rest = None
    return True


def zero_state(model: nn.Module) -> Zero | Early:
    """What `zero` made of a model.

    Raises:
        ValueError: `zero` has not been called on it.
    """
    try:
        return model.__dict__["_zero"]  # type: ignore[no-any-return]
    except KeyError:
        raise ValueError("this model is not sharded: call zero(model, mesh) first") from None


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of the backward passes within where they are: nothing is sent.

    Of a model without `zero` nothing is sent before the step anyhow: there it does nothing.

    The first backward pass outside, or else the optimizer's step, sends the sum of all. Meanwhile
    each rank holds its shares whole, as many bytes as the model has; without `no_sync` stages 2 and
    3 hold shards, and each micro-batch sends (n-1)/n of the model's bytes.

        for k, (x, y) in enumerate(micro_batches):
            with pt.no_sync(model) if k + 1 < len(micro_batches) else nullcontext():
                loss_of(model(x), y).backward()
    """
    state: Zero | Early | None = model.__dict__.get("_zero")
    if state is None:  # partial gradients add up as they are, and settle in the step
        yield
        return
    if HERE.capturing and isinstance(state, Zero):
        refuse_no_sync()
    with state.keeping_shares():
        yield


def _sharded(spec: Spec, axes: tuple[str, ...]) -> Spec:
    layout = spec.layout
    for a in axes:
        if not (layout.placement(a).is_replicate() or layout.placement(a).is_invariant()):
            raise LayoutError(
                f"zero over {a}: a parameter is split over it already",
                operands=(f"parameter  {layout.brief()} on {spec.wire.mesh}",),
                reason="the ranks of a data axis hold equal parameters before they share them out",
                fixes=(Fix("zero over another axis"), Fix("leave it out of parallelize's plan")),
            )
        layout = layout.put(a, Shard(0))
    return spec_of(layout, spec.wire)


def _placed(p: nn.Parameter, mesh: Any, axes: tuple[str, ...]) -> DTensor:
    value = p.detach() if isinstance(p, DTensor) else distribute_tensor(p.detach(), mesh)
    spec = value._spec
    after = _sharded(spec, axes)
    local = moved(value, spec, after, "zero", "explicit")
    return tagged(with_room(local, after), after)


def _graded(units: Sequence[Unit]) -> list[DTensor]:
    return [
        p
        for unit in units
        for p, trained in zip(unit.shards(), unit.trained(), strict=True)
        if trained
    ]


class _Enter(torch.autograd.Function):
    """From shards to the token; backward gives the shards their gradients."""

    @staticmethod
    def forward(ctx: Any, zero: Zero, units: Sequence[Unit], *shards: torch.Tensor) -> torch.Tensor:
        ctx.zero, ctx.units, ctx.shards = zero, units, shards
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        with Local():
            with torch.no_grad():
                found = ctx.zero.collect(ctx.units)
                ctx.zero.release()
            for p, g in ctx.zero.take_with_history(ctx.units).items():
                found[p] = found[p] + g if p in found else g
        return None, None, *[found.pop(p, None) for p in ctx.shards]
