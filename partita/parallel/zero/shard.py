"""`zero`: shards a model's training state over the ranks of a data axis.

At rest each rank holds its shard of the optimizer state (from stage 1), of gradients (from stage 2)
and of every parameter (stage 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from partita.comm import user_line, wire_of
from partita.layout import Fix, LayoutError, Shard
from partita.tensor.autograd import moved
from partita.tensor.construct import distribute_tensor, hold_value, place_buffer, refuse_lazy
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.tensor_state import HERE, Spec, own_state, spec_of, state_of
from partita.tensor.uneven_pieces import with_room

from ..parameters import find_blocks
from .fsdp_group import MixedPrecision, ShardedState, Zero
from .fsdp_hooks import refuse_no_sync, register_hooks
from .grad_reducer import GradReducer


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
    for p in model.parameters():  # a 0-d one stays whole; its gradient is reduced with the others
        if state_of(p).rest is not None:  # of a module within
            own_state(p).rest = None
        else:
            grads[p] = hold_value(
                p, _shard_parameter(p, mesh, axes if stage == 3 and p.ndim else ())
            )
    for module in model.modules():
        for attr, b in list(module._buffers.items()):
            if b is not None and not isinstance(b, DTensor):
                module._buffers[attr] = place_buffer(b, wire, lambda b: distribute_tensor(b, mesh))
    found = find_blocks(model, blocks)
    if stage == 3:
        whole = Zero(model, axes, precision or MixedPrecision(), found)
        whole.persistent = persistent
        register_hooks(whole)
        state: ShardedState = whole
    else:
        parts = []
        for block in found:
            params: list[Any] = [s[0].owner._parameters[s[0].attr] for s in block.slots]
            parts.append((block.name, [p for p in params if p.requires_grad and p.ndim]))
        state = GradReducer(parts, axes, stage, partial(_shard_spec, axes=axes))
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
    """Detach the states of the modules in `model` to which `zero` was applied; these modules.

    Raises:
        LayoutError: they were sharded otherwise, or `model` lies within a sharded model.
    """
    states: dict[nn.Module, ShardedState] = {}
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
                operands=(_format_options(state.options), _format_options(wanted)),
                reason="the blocks of one model are gathered and reduced in one way",
                fixes=(Fix("zero(..., blocks=[...])", "once, for the whole model"),),
            )
    applied = [m for module, state in states.items() for m in state.applied or [module]]
    for module, state in states.items():
        state.detach_from_model()
        del module.__dict__["_zero"]
    return applied


def _format_options(options: tuple[tuple[str, ...], int, MixedPrecision]) -> str:
    axes, stage, precision = options
    return f"stage {stage} over {' '.join(axes)}, {precision}"


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
    state: ShardedState | None = model.__dict__.get("_zero")
    if state is None:  # partial gradients add up as they are, and settle in the step
        yield
        return
    if HERE.capturing and isinstance(state, Zero):
        refuse_no_sync()
    with state.keeping_partial_gradients():
        yield


def _shard_spec(spec: Spec, axes: tuple[str, ...]) -> Spec:
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


def _shard_parameter(p: nn.Parameter, mesh: Any, axes: tuple[str, ...]) -> DTensor:
    value: Any = p.detach() if isinstance(p, DTensor) else distribute_tensor(p.detach(), mesh)
    spec = value._spec
    after = _shard_spec(spec, axes)
    local = moved(value, spec, after, "zero", "explicit")
    return tagged(with_room(local, after), after)
