"""`zero`: shards a model's training state over the ranks of a data axis.

Between steps each rank holds its shard of the optimizer state (from stage 1), of gradients (from
stage 2) and of every parameter (stage 3, see `fsdp_group`).

In stages 0 to 2 parameters are whole on every rank of the data axis, and gradients are reduced
while backward runs. When the last gradient of a block is complete, the ranks begin to reduce the
block's gradients (all-reduce, or reduce-scatter in stage 2), and backward continues. The gradients
stay Partial until the sums are written back. If a gradient changes in this time, its sum is
dropped, and the gradient is reduced later.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import (
    Wire,
    active_wire,
    describe_saved_mesh,
    find_saved_wire,
    is_agreed,
    remember_agreed,
    user_line,
    wire_of,
)
from partita.layout import Fix, LayoutError, Replicate, Shard
from partita.tensor.construct import (
    distribute_tensor,
    hold_value,
    place_buffer,
    refuse_all_but_modules,
    refuse_lazy,
)
from partita.tensor.dtensor import DTensor, as_dtensor, move_local
from partita.tensor.dtensor_gradients import mark_gradient_reduced, requiring_grad, update_spec
from partita.tensor.tensor_state import (
    HERE,
    Spec,
    ZeroLayouts,
    count_unseen_writes_of,
    count_writes_of,
    make_argument_error,
    own_state,
    spec_of,
    state_of,
)
from partita.tensor.uneven_pieces import with_room

from .batch import find_data_axes, tensors_in
from .flat_buffer import FlatBuffer
from .fsdp_group import MixedPrecision, ShardedState, ZeroState, agree_on_block
from .fsdp_hooks import register_hooks
from .parameters import Blocks, ParameterSlot, find_blocks
from .wrappers import refuse_wrapped


def zero(
    model: nn.Module,
    mesh: Any,
    axis: str | Sequence[str] | None = None,
    *,
    stage: int = 3,
    precision: MixedPrecision | torch.dtype | None = None,
    blocks: Blocks = None,
    persistent: bool = False,
) -> nn.Module:
    """Shard a model's training state over the ranks of `axis`, in place. Returns the model.

    Each rank of `axis` has its own rows of the batch: inputs are `Shard(0)` on it.

    | stage | parameters | reduced gradients | optimizer state | bytes sent per step and rank |
    |-------|------------|-------------------|-----------------|------------------------------|
    | 0     | whole      | whole             | whole           | 2 (n-1)/n of the model       |
    | 1     | whole      | whole             | shards          | 3 (n-1)/n                    |
    | 2     | whole      | shards            | shards          | 2 (n-1)/n                    |
    | 3     | shards     | shards            | shards          | 3 (n-1)/n                    |

    Losses are bitwise equal on all stages if there are two ranks, or if
    `torch.use_deterministic_algorithms(True)` makes collectives sum in rank order. Each backward
    pass sends its gradients, except under `no_sync`. Stages 1 and 2 shard the state of the
    element-wise optimizers of torch.optim (all but LBFGS, Adafactor, SparseAdam and Muon). The
    state of others stays whole.

    Args:
        model: a plain model, or one after `parallelize`. Parameters stay the same objects, so an
            optimizer may be made before or after. Modules in it to which `zero` was applied with
            the same axes, stage and precision become its blocks.
        mesh: a `DeviceMesh`, or the mesh of `ranks` or `dry_mesh`.
        axis: one or several mesh axes. By default "dp", or the only axis of a mesh without "dp".
            `distribute_batch` shards rows over these axes. For hybrid sharding pass one of two data
            axes. Gradients stay Partial on the other axis until the step reduces their shards.
        stage: see the table.
        precision: dtypes to compute in, to send and to sum (stage 3). A dtype means `param_dtype`.
        blocks: the modules whose parameters are gathered together: modules, or patterns of names.
            By default the children of the outermost ModuleLists and Sequentials.
        persistent: True (stage 3) keeps gathered parameters after forward and backward. A block
            gathers them again when it is called after a parameter was written, as by an optimizer.
            In a compiled step they are kept until their last use.

    Raises:
        LayoutError: an unknown axis, or a parameter that is already sharded over it.
        ValueError: an unknown stage, a model that is sharded already, blocks that do not fit it.
        TypeError: `precision` has another type.
    """
    refuse_lazy(model, "zero")
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"zero: stage {stage!r} is not one of 0, 1, 2, 3")
    if "_zero" in model.__dict__:
        raise ValueError("zero: this model is sharded already; shard it once, over all its axes")
    wire = wire_of(mesh)
    refuse_wrapped(model, "zero", wire)
    if axis is None:
        axis = find_data_axes(wire)[:1] or (wire.mesh.names[0] if wire.mesh.ndim == 1 else "dp")
    axes = (axis,) if isinstance(axis, str) else axis
    is_names = isinstance(axes, Sequence) and all(isinstance(a, str) for a in axes)
    if not is_names or not axes or len({*axes}) < len(axes):
        fix = "zero(model, mesh, stage=3)" if isinstance(axis, int) else 'zero(model, mesh, "dp")'
        raise make_argument_error("zero", "the names of mesh axes, each once, as axis", axis, fix)
    places = sorted(wire.mesh.index(a) for a in axes)  # raises for an unknown axis
    axes = tuple(wire.mesh.names[i] for i in places)
    if isinstance(precision, torch.dtype):
        precision = MixedPrecision(precision)
    if precision is not None and not isinstance(precision, MixedPrecision):
        takes = "a torch.dtype or a pt.MixedPrecision as precision"
        raise make_argument_error("zero", takes, precision, "zero(..., precision=torch.bfloat16)")
    _refuse_other_meshes(model, mesh)
    applied = _take_over(model, axes, stage, precision)
    if applied and blocks is None:
        blocks = applied
    grads: dict[nn.Parameter, torch.Tensor | None] = {}
    for p in model.parameters():  # a 0-d one stays whole; its gradient is reduced like others
        if state_of(p).zero_layouts is not None:  # an inner module, sharded before
            own_state(p).zero_layouts = None
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
        whole = ZeroState(model, axes, precision or MixedPrecision(), found)
        whole.persistent = persistent
        register_hooks(whole)
        state: ZeroState | GradReducer = whole
    else:
        parts = []
        for block in found:
            held = [(some[0], some[0].parameter) for some in block.slots]
            parts.append((block.name, [(s, p) for s, p in held if p.requires_grad and p.ndim]))
        state = GradReducer(parts, axes, stage)
        model.register_forward_pre_hook(state.adopt_replaced)
    model.__dict__["_zero"] = state
    watch = _ForwardWatch(axes, wire, gathers=stage == 3 and not persistent)
    model.register_forward_pre_hook(watch, with_kwargs=True)
    wire.data_axes = (*wire.data_axes, *(a for a in axes if a not in wire.data_axes))
    state.options, state.applied = (axes, stage, precision or MixedPrecision()), applied
    for p, grad in grads.items():
        if grad is not None:
            p.grad = grad if isinstance(grad, DTensor) else distribute_tensor(grad, mesh)
    return model


class _ForwardWatch:
    """A hook before the forward of a model that warns about unsplit batches and compares ranks.

    It warns once if a batch was not split. If forwards gather weights, ranks also compare the kind
    of a forward: the mode, and the collective before it. Without this, a forward of one rank alone
    would gather together with another forward, or the backward, of the other ranks. Kinds that
    repeat in a loop are compared when the loop begins (`is_agreed`).
    """

    def __init__(self, axes: tuple[str, ...], wire: Wire, *, gathers: bool):
        self.axes = tuple(a for a in axes if wire.mesh.size(a) > 1)
        self.unwarned, self.wire, self.gathers = bool(self.axes), wire, gathers

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.axes or active_wire(self.wire) is not self.wire:
            return  # ranks compare the keys of captured steps instead
        trains = model.training and torch.is_grad_enabled()
        if self.gathers and self.wire.ranks_to_wait_for:
            kind = model.training, torch.is_grad_enabled(), self.wire.last_begun(self.axes)
            if not is_agreed(self.wire, "forwards under zero", kind):
                text = f"{type(model).__name__}, training={kind[0]}, with gradients={kind[1]}"
                self.wire.exchange("begins a forward under zero:", b"", None, str(kind), f" {text}")
                remember_agreed(self.wire, "forwards under zero", kind)
        if self.unwarned and trains:
            self._warn_of_whole_batch(model, [*tensors_in((args, kwargs))])

    def _warn_of_whole_batch(self, model: nn.Module, tensors: list[torch.Tensor]) -> None:
        if max((t.shape[0] for t in tensors if t.ndim), default=1) == 1:
            return
        self.unwarned = False
        if not any(isinstance(t, DTensor) and _is_split(t, self.axes) for t in tensors):
            names = " and ".join(self.axes)
            warnings.warn(
                f"every rank of {names} computes the whole batch: no input of the "
                f"{type(model).__name__} is split over {names}, at {user_line() or 'no line'}; "
                "pt.distribute_batch(batch, mesh) splits its rows",
                stacklevel=4,
            )

    def __deepcopy__(self, memo: object) -> _ForwardWatch:
        return _ForwardWatch(self.axes, self.wire, gathers=self.gathers)

    def __reduce__(self) -> Any:
        return _make_forward_watch, (self.axes, describe_saved_mesh(self.wire), self.gathers)


def _make_forward_watch(
    axes: tuple[str, ...], mesh: tuple[Any, ...], gathers: bool
) -> _ForwardWatch:
    return _ForwardWatch(axes, find_saved_wire(mesh), gathers=gathers)


def _is_split(t: DTensor, axes: tuple[str, ...]) -> bool:
    return any(t._spec.layout.placement(a).is_shard() for a in axes)


def _refuse_other_meshes(model: nn.Module, mesh: Any) -> None:
    wire = wire_of(mesh)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and p._spec.wire is not wire:
            raise LayoutError(
                f"zero: {name} is on another mesh",
                place=user_line(),
                operands=(
                    f"{name}  {p._spec.layout.brief()} on {p._spec.wire.mesh}",
                    f"zero on {wire.mesh}",
                ),
                reason="moves are planned along the axes of one mesh; a sub-mesh is another mesh",
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
    """Detach the states of modules in `model` to which `zero` was applied. Returns the modules.

    Raises:
        LayoutError: they have other options, or `model` is a part of a sharded model.
    """
    states: dict[nn.Module, ZeroState | GradReducer] = {}
    for module in model.modules():
        if "_zero" in module.__dict__:
            states[module] = module.__dict__["_zero"]
    owners = set(states.values())
    for name, p in model.named_parameters():
        layouts = state_of(p).zero_layouts
        if layouts is not None and layouts.owner not in owners:
            raise LayoutError(
                f"zero: {name} is sharded already, with another module that holds it",
                place=user_line(),
                reason="each parameter is gathered with one module, or with one model around all",
                fixes=(
                    Fix("zero(module, mesh) first, and zero(model, mesh) after", "inner to outer"),
                    Fix("zero(model, mesh) alone", "for modules that share a parameter"),
                ),
            )
    wanted = (axes, stage, precision or MixedPrecision())
    for module, state in states.items():
        if state.options != wanted:
            raise LayoutError(
                f"zero: a {type(module).__name__} in the model was sharded with other options",
                place=user_line(),
                operands=(_format_options(state.options), _format_options(wanted)),
                reason="the blocks of one model are gathered and reduced in one way",
                fixes=(Fix("zero(..., blocks=[...])", "once, for the whole model"),),
            )
    applied = [m for module, state in states.items() for m in state.applied or [module]]
    for module, state in states.items():
        state.detach_from_model()
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _ForwardWatch) or getattr(hook, "__self__", None) is state:
                del module._forward_pre_hooks[number]
        del module.__dict__["_zero"]
    return applied


def _format_options(options: tuple[tuple[str, ...], int, MixedPrecision]) -> str:
    axes, stage, precision = options
    return f"stage {stage} over {' '.join(axes)}, {precision}"


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Do not reduce gradients in the backward passes within the `with` statement.

    The first backward pass after the `with` statement, or the optimizer's step, reduces the sum of
    all gradients. Until this reduction each rank holds unsharded gradients, as many bytes as the
    model has. Without `no_sync`, stages 2 and 3 hold shards, and each micro-batch sends (n-1)/n of
    the model's bytes. For a model without `zero` this does nothing: its gradients are only reduced
    in the optimizer's step.

        for k, (x, y) in enumerate(micro_batches):
            with pt.no_sync(model) if k + 1 < len(micro_batches) else nullcontext():
                loss_of(model(x), y).backward()
    """
    refuse_all_but_modules(model, "no_sync")
    state: ZeroState | GradReducer | None = model.__dict__.get("_zero")
    if state is None:  # Partial gradients accumulate, and are reduced in the step
        yield
        return
    if isinstance(state, ZeroState):
        HERE.trace.refuse_no_sync()
    with state.keeping_partial_gradients():
        yield


def shard_spec(spec: Spec, axes: tuple[str, ...]) -> Spec:
    layout = spec.layout
    for a in axes:
        if not (layout.placement(a).is_replicate() or layout.placement(a).is_invariant()):
            raise LayoutError(
                f"zero over {a}: a parameter is split over it already",
                operands=(f"parameter  {layout.brief()} on {spec.wire.mesh}",),
                reason="before zero, the ranks of a data axis must hold equal parameters",
                fixes=(
                    Fix("pt.zero(model, mesh, axis=...)", "over another axis"),
                    Fix("pt.parallelize(model, mesh, plan)", f"with a plan that does not name {a}"),
                ),
            )
        layout = layout.put(a, Shard(0))
    return spec_of(layout, spec.wire)


def _shard_parameter(p: nn.Parameter, mesh: Any, axes: tuple[str, ...]) -> DTensor:
    value: Any = p.detach() if isinstance(p, DTensor) else distribute_tensor(p.detach(), mesh)
    spec = value._spec
    after = shard_spec(spec, axes)
    local = move_local(value, spec, after, "zero", "explicit")
    return as_dtensor(with_room(local, after), after)


# -- the gradient reducer of stages 0 to 2 ---------------------------------------------------------

_grad: Any = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_data: Any = torch._C.TensorBase.data
_dtype: Any = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]


_BUCKET_BYTES = 25 << 20
"""If gradients stay whole, small blocks are joined up to about this size: DDP's default."""


_Held = tuple[ParameterSlot, DTensor]
"""A parameter, and a module and attribute of the model that is this parameter."""


class _Bucket:
    """Parameters of one dtype, of one block or of several small ones, and their gradients.

    Attributes:
        ready: the indices of parameters whose gradients are complete, in this step or, if a step
            does not use the parameter, in an earlier one.
        sent, writes: the gradients being reduced, and how often each was written before.
        wait: a function that waits for the reduction, and returns the sums.
        reduced: the specs of the reduced gradients.
    """

    def __init__(self, name: str, held: list[_Held], axes: tuple[str, ...]):
        self.name, self.axes = name, axes
        self.slots, self.params = [slot for slot, _ in held], [p for _, p in held]
        self.pieces = [shard_spec(p._spec, axes) for p in self.params]
        self._flats: dict[tuple[DTensor, ...], FlatBuffer] = {}
        self.ready: set[int] = set()
        self.sent: list[torch.Tensor] = []
        self.writes: tuple[list[int], list[int]] = [], []
        self.wait: Callable[[], list[torch.Tensor]] = list
        self.reduced: list[Spec] = []

    @property
    def flat(self) -> FlatBuffer:
        """The flat buffer of all parameters in this bucket."""
        return self.flat_of(self.params)

    def flat_of(self, params: Sequence[DTensor]) -> FlatBuffer:
        """Returns the flat buffer of `params`, which are in this bucket, in their present dtype."""
        dtype, device = params[0].dtype, params[0].device
        key = () if params is self.params else tuple(params)
        flat = self._flats.get(key)
        if flat is None or flat.dtype != dtype or flat.given_device != device:
            specs, names = [p._spec for p in params], [self.name] * len(params)
            piece = dict(zip(self.params, self.pieces, strict=True))
            pieces = [piece[p] for p in params]
            flat = FlatBuffer(self.name, names, specs, pieces, self.axes, dtype, device)
            self._flats[key] = flat
        return flat

    def grads(self) -> list[torch.Tensor | None]:
        return [_grad(p) for p in self.params]

    def note_gradient(self, i: int) -> list[torch.Tensor] | None:
        """Records that the gradient of parameter `i` is complete.

        Returns all gradients of the bucket if this was the last missing one; otherwise None.
        """
        self.ready.add(i)
        if len(self.ready) < len(self.params):
            return None
        with local_ops():
            grads = self.grads()
            found = []
            for k, (p, g) in enumerate(zip(self.params, grads, strict=True)):
                # A gradient that is part of a graph, or already reduced, is not changed.
                is_pending = not isinstance(g, DTensor) or g._spec is p._spec.gradient
                if g is not None and is_pending and not g.requires_grad:
                    found.append(g)
                else:
                    self.ready.discard(k)
        # Parameters of other dtypes than the bucket was made for are reduced in the step.
        if len(found) < len(self.params) or len({g.dtype for g in found}) > 1:
            return None
        self.ready.clear()
        return found


class GradReducer(ShardedState):
    """The state of a model under ZeRO stages 0 to 2, which reduces gradients block by block.

    Args:
        blocks: for each block its name, and a list of `(slot, parameter)` for its trained
            parameters.
        axes: the mesh axes over which gradients are Partial, and are reduced.
        stage: 0: parameters are updated whole. 1: each rank updates its shard. 2: as 1, and each
            rank keeps only its shard of a gradient.
    """

    def __init__(
        self, blocks: Iterable[tuple[str, list[_Held]]], axes: tuple[str, ...], stage: int
    ):
        self.axes, self.stage = axes, stage
        self.options = (axes, stage, MixedPrecision())
        self._handles: dict[DTensor, Any] = {}
        self._blocks = [(name, list(held)) for name, held in blocks]
        self._buckets: list[_Bucket] = []
        self._under_way: _Bucket | None = None
        for name, held in self._blocks if stage == 2 else _join_small_blocks(self._blocks):
            groups: dict[torch.dtype, list[_Held]] = {}
            for slot, p in held:
                groups.setdefault(p.dtype, []).append((slot, p))
            for group in groups.values():
                bucket = _Bucket(name, group, axes)
                bucket.reduced = [_spec_after_reduction(p._spec, axes, stage) for _, p in group]
                self._buckets.append(bucket)
                for i, (p, piece) in enumerate(zip(bucket.params, bucket.pieces, strict=True)):
                    gradient = piece if stage == 2 else p._spec
                    update = piece if stage else p._spec
                    self._adopt_parameter(bucket, i, p, ZeroLayouts(gradient, update, self, name))

    # A copy of the model has a state of its own, over its own parameters.

    def __getstate__(self) -> Any:
        self.finish()
        return self._blocks, self.axes, self.stage

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def detach_from_model(self) -> None:
        """Remove the hooks of this reducer, because `pt.zero` was applied to an enclosing model."""
        self.finish()
        for handle in self._handles.values():
            handle.remove()

    def register_replacement(self, old: DTensor, new: DTensor) -> None:
        """Register `new`, which has replaced the parameter `old` (see `materialize`)."""
        for _, held in self._blocks:
            held[:] = [(slot, new if p is old else p) for slot, p in held]
        if old is not new and (handle := self._handles.pop(old, None)) is not None:
            handle.remove()
        for bucket in self._buckets:
            bucket._flats.clear()
            for i, p in enumerate(bucket.params):
                if p is old:
                    bucket.params[i] = new
                    self._adopt_parameter(bucket, i, new, state_of(old).zero_layouts)

    def adopt_replaced(self, *_: Any) -> None:
        """Registers parameters that replaced others, as `load_state_dict(assign=True)` does.

        It runs as a hook before the forward. A parameter of another layout or dtype is not
        registered.
        """
        for bucket in self._buckets:
            for slot, old in zip(bucket.slots, bucket.params, strict=True):
                new = slot.owner._parameters.get(slot.attr)
                if new is not old and isinstance(new, DTensor) and new.is_leaf:  # type: ignore[comparison-overlap]
                    alike = new._spec is old._spec and new.dtype is old.dtype
                    layouts = state_of(new).zero_layouts
                    if alike and new.requires_grad and (layouts is None or layouts.owner is self):
                        self.register_replacement(old, new)

    def _adopt_parameter(
        self, bucket: _Bucket, i: int, p: DTensor, layouts: ZeroLayouts | None
    ) -> None:
        own_state(p).zero_layouts = layouts
        if (handle := self._handles.pop(p, None)) is not None:
            handle.remove()

        # Weak: Python's garbage collector cannot see a post-accumulate hook's references.
        find_self, find_bucket = ref(self), ref(bucket)

        def note_gradient(_: Any) -> None:
            reducer, bucket = find_self(), find_bucket()
            if reducer is not None and bucket is not None:
                grads = bucket.note_gradient(i)
                if grads is not None and not reducer.keeps_partial_gradients:
                    reducer._send_bucket(bucket, grads)

        # A copy of the model may be frozen now, and trained later.
        with local_ops(), requiring_grad(p):
            self._handles[p] = p.register_post_accumulate_grad_hook(note_gradient)

    # -- reductions under way ----------------------------------------------------------------------

    def _send_bucket(self, bucket: _Bucket, grads: list[torch.Tensor]) -> None:
        with local_ops(), torch.no_grad():
            self.finish()
            agree_on_block("gradients under zero", bucket.name, bucket.params[0])
            bucket.sent, bucket.writes = grads, _count_all_writes_of(grads)
            if self.stage == 2:
                shares = bucket.flat.pack_gradients(grads, bucket.flat.dtype)
                bucket.wait = bucket.flat.start_reduce_scatter(shares.sums, bucket.flat.dtype)
            else:
                bucket.wait = bucket.flat.start_all_reduce(grads)
            self._under_way = bucket

    def complete_gradients(self) -> None:
        self.finish()

    def reduce_postponed(self, p: DTensor | None = None) -> None:
        """Finishes the running reduction before a program reads or clears one of its gradients.

        Otherwise the program would get the gradient as it was, and it would be reduced again.
        """
        bucket = self._under_way
        if bucket is not None and (p is None or any(p is other for other in bucket.params)):
            self.finish()

    def finish(self) -> None:
        """Wait for the running reduction, and store its sums in the gradients.

        A gradient that changed since the reduction began stays Partial.
        """
        bucket, self._under_way = self._under_way, None
        if bucket is None:
            return
        with local_ops(), torch.no_grad():
            sums, grads = bucket.wait(), bucket.sent
            are_same = all(map(operator.is_, bucket.grads(), grads))
            are_current = are_same and _count_all_writes_of(grads) == bucket.writes
            bucket.wait, bucket.sent = list, []
            if not are_current:
                return
            # Each gradient stays the same object, which the program may have read. If it stays
            # whole, it keeps its memory format.
            for p, g, total, after in zip(bucket.params, grads, sums, bucket.reduced, strict=True):
                if self.stage == 2 or g.is_contiguous():
                    _data.__set__(g, total)
                else:
                    g.copy_(total)
                as_dtensor(g, after)
                mark_gradient_reduced(p)

    # -- after an optimizer has updated shards -----------------------------------------------------

    def gather_updated(self, params: Iterable[DTensor]) -> None:
        """Gathers the updated shards of `params` after an optimizer's step.

        All ranks have whole parameters afterwards.
        """
        if self.stage == 0:
            return
        given = set(params)
        parts = [
            (b, [p for p in b.params if p in given and _dtype(p) is dtype])
            for b in self._buckets
            for dtype in dict.fromkeys(map(_dtype, b.params))
        ]
        with local_ops(), torch.no_grad():
            # While one bucket is received, the previous one is written.
            for before, now in pairwise([None, *(part for part in parts if part[1]), None]):
                if now is not None:
                    rows = [p.detach().narrow(0, *_find_updated_rows(p)) for p in now[1]]
                    now[0].flat_of(now[1]).start_gather(rows, "update")
                if before is not None:
                    # Through `.data`, so that versions count only the optimizer's own writes.
                    before[0].flat_of(before[1]).finish_gather_into([p.data for p in before[1]])


def _count_all_writes_of(grads: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return count_writes_of(grads), count_unseen_writes_of(grads)


def _join_small_blocks(
    blocks: Iterable[tuple[str, list[_Held]]],
) -> Iterator[tuple[str, list[_Held]]]:
    names: list[str] = []
    together: list[_Held] = []
    size = 0
    for name, held in blocks:
        # By the largest pieces, so that all ranks join the same blocks.
        more = sum(p._spec.largest * p.element_size() for _, p in held)
        if together and size + more > _BUCKET_BYTES:
            yield " ".join(names), together
            names, together, size = [], [], 0
        names.append(name)
        together = together + held
        size += more
    if together:
        yield " ".join(names), together


def _spec_after_reduction(spec: Spec, axes: tuple[str, ...], stage: int) -> Spec:
    """Returns the spec of a gradient reduced over `axes`; it may be partial over others."""
    layout = spec.gradient.layout
    for a in axes:
        layout = layout.put(a, Shard(0) if stage == 2 else Replicate())
    return spec_of(layout, spec.wire)


def _find_updated_rows(p: DTensor) -> tuple[int, int]:
    """Returns which rows of its own piece of `p` this rank updates: (first, count)."""
    mine, whole = update_spec(p).region[0], p._spec.region[0]
    return mine[0] - whole[0], mine[1]
