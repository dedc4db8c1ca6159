"""Construction: makes DTensors of plain tensors, modules and torch's own DTensors, and back.

`distribute_tensor` and `distribute_module` distribute existing values. Factories (`zeros`, `randn`,
...) make only a rank's shard. `local_map` runs a function on local tensors and makes its results
DTensors. `from_torch` and `to_torch` share memory with `torch.distributed.tensor`. An optimizer,
hooks and other modules refer to a parameter by identity, so the object stays and its value is
replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from partita.comm import (
    Wire,
    check_equal_on_ranks,
    is_uneven,
    local_of_torch_dtensor,
    make_torch_dtensor,
    read_torch_dtensor,
    torch_mesh,
    wire_of,
    zeros_signed_as,
)
from partita.layout import Fix, Partial, Placement, own_placement, split_factors
from partita.layout.text import explain_calls
from partita.rules.rule import narrow_piece

from .aliasing import global_strides
from .arguments import find_wire
from .dtensor import TYPED, DTensor, as_dtensor, make_no_strides_error, move_local, shape_of_pieces
from .dtensor_gradients import type_accumulate_hook, type_hook, update_spec
from .origins import note_origin
from .random import run_with_generator_check
from .tensor_state import (
    OURS,
    Function,
    Spec,
    make_argument_error,
    make_layout_error,
    note_other_memory,
    own_state,
    spec_on_mesh,
    spec_on_wire,
)
from .uneven_pieces import (
    copy_with_room,
    node_of_tensor,
    nodes_behind,
    tie_to_operands,
    with_room,
)


def piece_of(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Returns this rank's local tensor, in the layout `spec`, of the global value `whole`, as a
    copy.

    On the axis of a Partial sum the first rank gets the value and the others get zeros.
    """
    part = whole
    for dim, (offset, length) in enumerate(spec.region):
        if length != part.shape[dim]:
            part = narrow_piece(part, dim, offset, length)
    part = part.contiguous()
    if part.untyped_storage()._cdata == whole.untyped_storage()._cdata:
        # A piece that shares memory would keep the whole value alive. An empty piece gets the
        # strides of other ranks' pieces.
        part = copy_with_room(part, spec)
    _keep_on_first(part, spec)
    return part


def _keep_on_first(local: torch.Tensor, spec: Spec) -> None:
    """Zero the shares of a Partial sum on all ranks but the first, which keeps its values."""
    summed = [axis for axis, op in spec.layout.partial if op == "sum"]
    if summed:
        is_first = spec.wire.is_first_along([summed], local.device)[0]
        local.copy_(torch.where(is_first, local, zeros_signed_as(local)))


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a tensor over a mesh: each rank gets its piece of rank `src_data_rank`'s value.

    Args:
        tensor: a leaf tensor, with the same shape and dtype on every rank. A DTensor is
            redistributed.
        device_mesh: a `DeviceMesh`, or the mesh of `ranks`. None is possible only for a DTensor.
        placements: one per mesh axis; Replicate on all axes by default.
        src_data_rank: the rank, in mesh order, whose value is sent to all others. The ledger does
            not count these bytes, because they belong to the setup. None sends nothing: each rank
            uses its own value, and the caller guarantees that they are equal.

    Returns:
        A leaf that requires grad if `tensor` does.

    Raises:
        LayoutError: placements that do not fit the mesh or the shape; ranks that pass different
            shapes, dtypes or placements; a tensor that is not a leaf; a DTensor on another mesh.
    """
    if isinstance(tensor, DTensor):
        if device_mesh is not None and wire_of(device_mesh) is not tensor._spec.wire:
            raise make_layout_error(
                "distribute_tensor of a DTensor that lives on another mesh",
                Fix("pt.distribute_tensor(x.full_tensor(), mesh, placements)"),
            )
        return tensor.redistribute(placements=placements)
    if not isinstance(tensor, torch.Tensor):
        fix = "pt.distribute_tensor(torch.as_tensor(values), mesh, placements)"
        if isinstance(tensor, nn.Module):
            fix = "pt.distribute_module(module, mesh), or pt.parallelize(model, mesh, plan)"
        raise make_argument_error("distribute_tensor", "a torch.Tensor", tensor, fix)
    if not tensor.is_leaf:
        raise make_layout_error(
            "distribute_tensor needs a leaf: this tensor has a history",
            Fix("pt.distribute_tensor(t.detach(), ...)", "without a gradient"),
            Fix("pt.DTensor.from_local(t, ...)", "differentiable"),
        )
    if tensor.layout is not torch.strided:
        raise make_no_strides_error("distribute_tensor", tensor)
    spec = spec_on_mesh(device_mesh, tensor.shape, placements)
    if src_data_rank is not None:
        check_equal_on_ranks("distribute_tensor", f"{spec.layout} of {tensor.dtype}", spec.wire)
        if not 0 <= src_data_rank < spec.wire.mesh.size():
            raise make_layout_error(
                f"distribute_tensor: src_data_rank={src_data_rank} is no rank of the mesh",
                Fix("src_data_rank=0"),
                Fix("src_data_rank=None", "each rank's own value"),
                operands=(f"mesh {spec.wire.mesh} has ranks 0 to {spec.wire.mesh.size() - 1}",),
                reason="ranks are counted along the mesh, row by row",
            )
    return spread(tensor, spec, src_data_rank).requires_grad_(tensor.requires_grad)


def spread(tensor: torch.Tensor, spec: Spec, src_data_rank: int | None = 0) -> DTensor:
    """Returns a new DTensor of `spec` with the values of `tensor`, without requires_grad.

    Args:
        src_data_rank: the rank whose value is sent to all others; None uses each rank's own value.
    """
    with torch.no_grad():
        value = tensor.detach()
        if value.is_meta:
            return as_dtensor(torch.empty(spec.local_shape, dtype=value.dtype, device="meta"), spec)
        if src_data_rank is not None:
            value = spec.wire.from_first(value, src_data_rank)
        out = as_dtensor(piece_of(value, spec), spec)
        note_origin(out, spec.wire)
        return out


def distribute_module(
    module: torch.nn.Module,
    device_mesh: Any,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    input_fn: Function | None = None,
    output_fn: Function | None = None,
) -> torch.nn.Module:
    """Convert each parameter and buffer of `module` to a DTensor, in place. Returns `module`.

    `torch.distributed.tensor.distribute_module` has the same arguments.

    Args:
        device_mesh: a `DeviceMesh`, or the mesh of `ranks`.
        partition_fn: called as `partition_fn(name, submodule, mesh)` for each submodule. It may
            distribute the submodule's parameters; others become Replicate.
        input_fn: called as `input_fn(module, inputs, mesh)` before each forward; returns the
            inputs.
        output_fn: called as `output_fn(module, outputs, mesh)` after it; returns the outputs.
    """
    refuse_lazy(module, "distribute_module")
    for key, fn in {
        "partition_fn": partition_fn,
        "input_fn": input_fn,
        "output_fn": output_fn,
    }.items():
        if fn is not None and not callable(fn):
            fix = "pt.parallelize(module, mesh, plan) takes a dict of placements"
            raise make_argument_error("distribute_module", f"a function as {key}", fn, fix)
    wire = wire_of(device_mesh)
    for name, part in module.named_modules():
        before = dict(part.named_parameters(recurse=False))
        if partition_fn is not None:
            partition_fn(name, part, device_mesh)
        for key, p in list(part.named_parameters(recurse=False)):
            _put_on_mesh(part, key, before.get(key, p), device_mesh)
        for key, b in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            if not isinstance(b, DTensor):
                spread_buffer = partial(distribute_tensor, device_mesh=device_mesh)
                part._buffers[key] = place_buffer(b, wire, spread_buffer)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda m, args: input_fn(m, args, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda m, args, out: output_fn(m, out, device_mesh))
    return module


def place_buffer(b: torch.Tensor, wire: Wire, spread: Callable[[torch.Tensor], DTensor]) -> DTensor:
    """Returns the DTensor that replaces the plain buffer `b` of a module on a mesh.

    If modules share a buffer, they get the same DTensor: the first call makes it by `spread(b)`,
    and later calls return it.
    """
    placed = _PLACED.get(b)
    if placed is None or placed._spec.wire is not wire:
        placed = _PLACED[b] = spread(b)
    return placed


_PLACED: Any = WeakIdKeyDictionary()
"""Maps a plain buffer that was replaced to its replacement. Entries live as long as the plain
buffer. Whether ranks communicate must not depend on whether another module has been freed."""


def _put_on_mesh(part: torch.nn.Module, key: str, before: Any, device_mesh: Any) -> None:
    """Distribute the parameter `key`, but keep the object that `part` had `before`.

    Others, such as optimizers, refer to that object by identity.
    """
    now: Any = part._parameters[key]
    value = now if isinstance(now, DTensor) else distribute_tensor(now.detach(), device_mesh)
    if now is before and value is now:
        return
    if not can_hold(before, value) or before.shape != value.shape:
        setattr(part, key, torch.nn.Parameter(value.detach(), now.requires_grad))
        return
    grad = hold_value(before, value)
    before.requires_grad_(now.requires_grad)
    if grad is not None:
        before.grad = grad if isinstance(grad, DTensor) else distribute_tensor(grad, device_mesh)
    setattr(part, key, before)  # by setattr: recurrent layers list their parameters


# -- factories -------------------------------------------------------------------------------------


def _normalize_size(size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = tuple(size[0])
    try:
        return torch.Size(size)
    except TypeError:
        given = next(n for n in size if not hasattr(n, "__index__"))
        fix = "pt.zeros(4, 8, device_mesh=mesh)"
        raise make_argument_error("a size", "whole numbers", given, fix) from None


def _fill_pieces(
    make: Function, spec: Spec, dtype: Any, requires_grad: bool, as_shares: bool = False
) -> DTensor:
    """Returns a DTensor whose local tensors `make` makes.

    If it is Partial, the first rank keeps its values, and the others get zeros. With `as_shares`
    all ranks keep theirs.
    """
    local = with_room(make(spec.local_shape, dtype=dtype, device=spec.wire.device), spec)
    if not as_shares:
        _keep_on_first(local, spec)
    return as_dtensor(local, spec).requires_grad_(requires_grad)


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor of zeros. `size` is global; each rank allocates only its shard.

    The other arguments are documented at `empty`.
    """
    spec = spec_on_mesh(device_mesh, _normalize_size(size), placements)
    return _fill_pieces(torch.zeros, spec, dtype, requires_grad, as_shares=True)


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns an uninitialized DTensor. `size` is global; each rank allocates only its shard.

    Args:
        *size: the global shape, as numbers or as one list.
        dtype: the dtype; None: torch's default dtype.
        device_mesh: a `DeviceMesh`, or the mesh of `ranks`. It must be passed.
        placements: one per mesh axis; Replicate on all axes by default.
    """
    spec = spec_on_mesh(device_mesh, _normalize_size(size), placements)
    return _fill_pieces(torch.empty, spec, dtype, requires_grad, as_shares=True)


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor of ones. `size` is global; each rank allocates only its shard.

    The other arguments are documented at `empty`.
    """
    spec = spec_on_mesh(device_mesh, _normalize_size(size), placements)
    return _fill_pieces(torch.ones, spec, dtype, requires_grad)


def full(
    size: Any,
    fill_value: Any,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor filled with `fill_value`. `size` is global; a rank allocates its shard.

    The other arguments are documented at `empty`.
    """
    spec = spec_on_mesh(device_mesh, _normalize_size((size,)), placements)
    return _fill_pieces(partial(torch.full, fill_value=fill_value), spec, dtype, requires_grad)


def _draw_pieces(make: Function, spec: Spec, dtype: Any, requires_grad: bool) -> DTensor:
    """Returns random numbers: each rank draws the whole value, and keeps its piece."""
    draw = partial(make, spec.shape, dtype=dtype, device=spec.wire.device)
    whole = run_with_generator_check(draw, make.__name__, spec.wire)
    return as_dtensor(piece_of(whole, spec), spec).requires_grad_(requires_grad)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor of normal values, which are the same as on one device in every layout.

    `size` is global. The other arguments are documented at `empty`.
    """
    spec = spec_on_mesh(device_mesh, _normalize_size(size), placements)
    return _draw_pieces(torch.randn, spec, dtype, requires_grad)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Returns a DTensor of uniform values, which are the same as on one device in every layout.

    `size` is global. The other arguments are documented at `empty`.
    """
    spec = spec_on_mesh(device_mesh, _normalize_size(size), placements)
    return _draw_pieces(torch.rand, spec, dtype, requires_grad)


# -- parameters get values -------------------------------------------------------------------------

_data: Any = torch._C.TensorBase.data
_grad: Any = torch._C.TensorBase.grad


def can_hold(p: torch.Tensor, value: torch.Tensor) -> bool:
    """True if `p.data = value` is possible for the parameter `p`.

    Torch requires one device type, and that both are on the meta device or neither is.
    """
    return p.is_meta == value.is_meta and p.device.type == value.device.type


def refuse_all_but_modules(given: Any, by: str) -> None:
    """Raise TypeError unless `given`, the first argument of the function `by`, is an nn.Module."""
    if not isinstance(given, nn.Module):
        raise make_argument_error(by, "a torch.nn.Module", given, f"pt.{by}(model, ...)")


def refuse_lazy(model: nn.Module, by: str) -> None:
    """Raise unless `model` is an nn.Module without uninitialized (lazy) parameters.

    Args:
        by: the name of the calling function, for the error.
    """
    refuse_all_but_modules(model, by)
    for name, part in model.named_modules():
        own = *part.named_parameters(recurse=False), *part.named_buffers(recurse=False)
        for key, tensor in own:
            if nn.parameter.is_lazy(tensor):
                raise make_layout_error(
                    f"{by}: {name + '.' if name else ''}{key} has no shape yet",
                    Fix("model(batch)", f"once, of plain tensors, before {by}"),
                    reason=f"{type(part).__name__} makes it in its first forward",
                )


def hold_value(p: nn.Parameter, value: DTensor) -> torch.Tensor | None:
    """Replaces the data of `p` by `value`, in place. Attributes and hooks of `p` stay.

    The object stays the same, so optimizers and modules that refer to `p` get the distributed
    value.

    Returns:
        The old gradient. It is removed from `p`, because it has the layout of the old value.
    """
    grad = p.grad
    with local_ops(), torch.no_grad():
        _grad.__set__(p, None)
        if p.is_floating_point():
            # By way of another dtype, which makes autograd forget the old shape.
            other = torch.float32 if p.dtype == torch.float64 else torch.float64
            _data.__set__(p, torch.empty(0, dtype=other, device=p.device))
        _data.__set__(p, value.detach())
    if isinstance(p, DTensor):
        own_state(p).retyped = None
        note_other_memory(p)
    else:
        hooks: dict[int, Any] = p._backward_hooks or {}
        for number, hook in list(hooks.items()):
            hooks[number] = type_hook(p, hook)
        after: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
        for number, hook in list(after.items()):
            after[number] = type_accumulate_hook(p, hook)
        p.__class__ = TYPED.get(p.__class__, DTensor)
        p._is_param = True
    p._spec = value._spec  # type: ignore[attr-defined]
    note_origin(p, value._spec.wire)
    for name, own in value.__dict__.items():
        if name not in OURS:
            p.__dict__.setdefault(name, own)
    return grad


def lay_out_state(p: DTensor, state: dict[str, Any]) -> None:
    """Redistributes a parameter's optimizer state to the layout of its updates.

    This is needed for state that was loaded, or made before `p` was distributed. The dict `state`
    changes in place.

    Args:
        p: a parameter; its updates have the layout `update_spec(p)`.
        state: the optimizer's state of `p` by name, in the layout of `p` or as plain tensors.
    """
    update = update_spec(p)
    for name, value in state.items():
        part = None
        with torch.no_grad():
            if is_whole_state(p, value):
                part = piece_of(value, update)
            elif isinstance(value, DTensor) and value._spec is not update:
                before = value._spec
                if before.wire is update.wire and before.shape == update.shape:
                    part = move_local(value, before, update, "optimizer state", "explicit")
        if part is not None:
            state[name] = as_dtensor(part, update)


def is_whole_state(p: DTensor, value: Any) -> bool:
    """True if `value`, a value of p's optimizer state, is a plain tensor of p's global shape.

    False for scalars, such as step counts.
    """
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.ndim > 0
        and value.shape == p._spec.shape
    )


def copy_attributes(whole: torch.Tensor, p: torch.Tensor) -> dict[str, Any]:
    """Copies the Python attributes of the parameter `p` to `whole`.

    The gathered tensor `whole` replaces `p` in its module during a forward. Returns the copied
    attributes by name.
    """
    given = {key: v for key, v in p.__dict__.items() if key not in OURS}
    whole.__dict__.update(given)
    return given


def keep_attributes(whole: torch.Tensor, p: torch.Tensor, given: dict[str, Any]) -> None:
    """Copies the attributes that a forward has set or deleted on `whole` back to `p`.

    During the forward, the gathered tensor `whole` replaces `p` in its module.

    Args:
        given: the attributes that `copy_attributes` had copied to `whole`.
    """
    now = whole.__dict__
    if not given and now.keys() <= OURS:
        return
    for key in given.keys() - now.keys():
        p.__dict__.pop(key, None)
    for key, v in now.items():
        if key not in OURS and (key not in given or given[key] is not v):
            p.__dict__[key] = v


# -- functions of local tensors --------------------------------------------------------------------

Placements = Sequence[Placement] | None
Operands = list[tuple[torch.Tensor, Node | None]]


def local_map(
    func: Function | None = None,
    out_placements: Any = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Function:
    """Returns a function of DTensors that runs `func` on their local tensors, as in torch.

    Arguments and results may be nested in lists, tuples and dicts; placements apply to the tensors
    and values in them, in order. Without `func` this is a decorator. `func` runs unchanged if no
    argument is a DTensor and there is no `device_mesh`.

    Args:
        func: a function of local tensors.
        out_placements: the placements of the result (one list), or a tuple of lists for several
            results. None for a result that is not a tensor.
        in_placements: for each positional argument, the placements that it must have. None: any
            placements, or not a tensor. Keyword arguments may have any placements.
        in_grad_placements: for each argument, the placements of the gradient that `func` computes.
            By default Replicate becomes Partial and Partial becomes Replicate; others stay.
        device_mesh: the mesh of the results. None: the mesh of the arguments.
        redistribute_inputs: True redistributes arguments with other placements. False raises.

    Raises:
        LayoutError: an argument has other placements than `in_placements`; or the number of
            placements differs from the number of arguments or results.
    """
    if func is None:
        return partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    name = getattr(func, "__name__", str(func))

    @wraps(func)
    def run_local_map(*args: Any, **kwargs: Any) -> Any:
        flat, shape_of_call = pytree.tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, DTensor)]
        if device_mesh is not None:
            wire = wire_of(device_mesh)
        elif tensors:
            wire = find_wire("local_map", tensors)
        else:
            return func(*args, **kwargs)
        count = len(pytree.tree_leaves(args))
        named: list[Placements] = [None] * (len(flat) - count)
        wanted = _match_placements(in_placements, count, "in_placements", name) + named
        grads = _match_placements(in_grad_placements, count, "in_grad_placements", name) + named
        tensors = []
        for i, x in enumerate(flat):
            if isinstance(x, DTensor):
                x = _require_placements(x, wanted[i], i, name, redistribute_inputs)
                tensors.append(x)
                # By default the dual: not ambiguous, because `func` computes on pieces.
                given = grads[i]
                flat[i] = x._piece() if given is None else x.to_local(grad_placements=given)
        operands: Operands | None = None
        if any(is_uneven(t._spec.layout, t._spec.wire.mesh) for t in tensors):
            operands = []
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                # The nodes are read here, because `func` may write to its arguments.
                locals_ = [t for t in flat if isinstance(t, torch.Tensor)]
                operands = [(t, node_of_tensor(t) if t.requires_grad else None) for t in locals_]
        args, kwargs = pytree.tree_unflatten(flat, shape_of_call)
        results, shape_of_results = pytree.tree_flatten(func(*args, **kwargs))
        listed = _list_per_result(out_placements)
        placed = _match_placements(listed, len(results), "out_placements", name)
        wrapped = [_wrap_result(o, p, wire, operands) for o, p in zip(results, placed, strict=True)]
        return pytree.tree_unflatten(wrapped, shape_of_results)

    return run_local_map


def _list_per_result(placements: Any) -> Any:
    """Returns `out_placements` as a tuple with one entry for each result."""
    if placements is None or isinstance(own_placement(placements), Placement):
        return (placements,)
    several = all(p is None or isinstance(p, (list, tuple)) for p in placements)
    return placements if several else (placements,)


def _match_placements(given: Any, count: int, what: str, name: str) -> list[Placements]:
    """Returns the placements of each of `count` values: `given`, or None for each value.

    Raises LayoutError if `given` has another number of entries.
    """
    if given is None:
        return [None] * count
    if len(given) != count:
        raise make_layout_error(
            f"local_map: {what} has {len(given)} entries, and {name} {count} "
            + ("results" if what == "out_placements" else "arguments"),
            Fix(f"{what}=({', '.join(['[...]'] * count)},)"),
            reason="one entry for each tensor or value, also in lists and dicts; None for a value",
        )
    return list(given)


def _require_placements(x: DTensor, wanted: Placements, i: int, name: str, move: bool) -> DTensor:
    if wanted is None:
        return x
    wanted_spec = spec_on_wire(x._spec.wire, x._spec.layout.shape, wanted)
    if wanted_spec.layout == x._spec.layout:
        return x
    if not move:
        raise make_layout_error(
            f"local_map: argument {i} of {name} has other placements than in_placements says",
            Fix("local_map(..., redistribute_inputs=True)"),
            Fix(f"x.redistribute(placements={list(wanted_spec.placements)})"),
            operands=(
                f"has     {', '.join(map(str, x.placements))}",
                f"wanted  {', '.join(map(str, wanted_spec.placements))}",
            ),
        )
    return x.redistribute(placements=wanted)


def _wrap_result(out: Any, placements: Placements, wire: Wire, operands: Operands | None) -> Any:
    """Returns a result of `func` as a DTensor.

    Args:
        operands: if pieces may be uneven: (local tensor, autograd node) of each operand. Ranks then
            exchange the result's shape, and which operands are in its autograd graph. Operands that
            are missing in the graph of a rank without elements get gradients of zeros.
    """
    if placements is None or not isinstance(out, torch.Tensor):
        return out
    probe = spec_on_wire(wire, out.shape, placements)
    shape = None
    if operands or (operands is not None and probe.is_sharded):
        behind = nodes_behind([out], [node for _, node in operands if node is not None])
        has = [node in behind for _, node in operands]
        gathered = wire.gather_ints((*map(int, has), *out.shape), "shapes of pieces")
        some_have = [any(column) for column in zip(*gathered, strict=True)]
        lacks = any(not t.numel() for t, _ in operands)
        lost = [t for i, (t, _) in enumerate(operands) if some_have[i] and (lacks or not has[i])]
        if lost:
            out = tie_to_operands(out, lost)
        if probe.is_sharded:
            pieces = [row[len(has) :] for row in gathered]
            shape = shape_of_pieces(pieces, probe.layout.shards, wire.mesh)
    spec = DTensor._spec_of_local(out, wire.device_mesh, placements, shape)
    with local_ops():
        return as_dtensor(out.view_as(out), spec)


# -- torch's own DTensor ---------------------------------------------------------------------------


def to_torch(x: DTensor) -> Any:
    """Convert `x` to a `torch.distributed.tensor.DTensor` on the same mesh that shares its memory.

    Differentiable: the gradient may have any placements that torch gives it. Invariant becomes
    Replicate. If axes split a dimension in another order than the mesh order, torch's placements
    are `_StridedShard`.

    Raises:
        LayoutError: the mesh is not one of torch's (`pt.ranks`, a dry mesh); or a `_StridedShard`
            would not divide its dimension evenly.
    """
    spec = x._spec
    mesh = torch_mesh(spec.wire.device_mesh)
    if mesh is None:
        raise make_layout_error(
            f"to_torch: the mesh {spec.wire.mesh} is not one of torch's",
            Fix("pt.init_device_mesh(...)", "under torchrun or partita train"),
            Fix("x.full_tensor()", "the whole value, plain"),
            reason="torch's DTensor needs process groups, which these ranks have not",
        )

    def gradient(local: torch.Tensor, placements: Any) -> torch.Tensor:
        given = spec_on_wire(spec.wire, spec.shape, placements)
        return move_local(local, given, spec.gradient, "to_torch", "gradient")

    return make_torch_dtensor(
        x._piece(), mesh, _torch_placements(spec), spec.shape, global_strides(x), gradient
    )


def _torch_placements(spec: Spec) -> list[tuple[str, Any]]:
    """Returns torch's placement for each mesh axis: (name, dimension, factor or reduction)."""
    mesh, layout = spec.wire.mesh, spec.layout
    factors = split_factors(mesh, layout.shards)
    for size, axes in zip(layout.shape, layout.shards, strict=True):
        pieces = math.prod(map(mesh.size, axes))
        if size % pieces and any(factors[a] > 1 for a in axes):
            raise make_layout_error(
                f"to_torch: {size} elements in uneven pieces, over {' then '.join(axes)}",
                Fix(f"x.redistribute(placements={list(spec.placements)})", "mesh order"),
                operands=(f"x  {layout.brief()} on {mesh}",),
                reason="torch cuts such a dimension at other positions",
            )
    placements_of_axes: list[tuple[str, Any]] = []
    for axis, p in spec.by_axis():
        if p.is_shard():
            dim, factor = p.dim, factors[axis]  # type: ignore[attr-defined]
            placements_of_axes.append(("Shard", dim) if factor == 1 else ("Strided", (dim, factor)))
        elif isinstance(p, Partial):
            placements_of_axes.append(("Partial", p.reduce_op))
        else:
            placements_of_axes.append(("Replicate", None))
    return placements_of_axes


def from_torch(x: Any) -> DTensor:
    """Convert a `torch.distributed.tensor.DTensor` to a partita DTensor that shares its memory.

    Differentiable. The gradient of `x` has the placements that torch's own functions give it:
    Replicate where `x` is Replicate or Partial. `Partial("avg")` becomes a Partial sum: each local
    tensor is divided by the number of ranks.

    Raises:
        LayoutError: a placement that partita lacks (a Partial product); uneven pieces of a
            `_StridedShard`.
        TypeError: `x` is not a DTensor of torch.
    """
    mesh, placements, shape, _ = read_torch_dtensor(x)
    divisor, summed = 1, []
    for i, p in enumerate(placements):
        if p.is_partial() and getattr(p, "reduce_op", "") == "avg":
            divisor *= mesh.size(i)
            p = Partial()
        summed.append(p)
    spec = spec_on_mesh(mesh, shape, summed)
    given = spec.reduced

    def gradient(local: torch.Tensor) -> torch.Tensor:
        return move_local(local, spec.gradient, given, "from_torch", "gradient")

    local = local_of_torch_dtensor(x, _torch_placements(given), gradient, divisor)
    if local.shape != spec.local_shape:
        raise make_layout_error(
            "from_torch: torch has cut this tensor at other positions",
            Fix("from_torch(x.redistribute(placements=[Shard(0), Shard(0)]))"),
            operands=(
                f"x  {x.placements} of {tuple(shape)}",
                f"this rank's piece  {tuple(local.shape)}, here {tuple(spec.local_shape)}",
            ),
            reason="a strided shard of uneven pieces is cut by another rule",
        )
    return as_dtensor(local, spec)


explain_calls("partita.tensor", "pt.distribute_tensor(torch.tensor(data), mesh, placements)")
