"""Uneven shards: where their padding is, and kernels for padded or empty shards.

    7 elements over 2 ranks    rank 0: 4    rank 1: 3, and space for 1 after them

In eager code a shard has its true size. A captured graph is equal on all ranks, so its inputs are
padded to the size of the first rank's shard. So tensors that exist between steps have spare memory
for the padding after their end. An op that reduces padding gets neutral values there. An op whose
shard is empty on this rank makes the same autograd graph as on ranks with elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import to_dlpack

from partita.comm import Wire, identity_of_reduction, uneven
from partita.comm.device import is_seen_by_processes
from partita.comm.move_steps import contiguous_strides
from partita.layout import Layout
from partita.rules import EXTREME, Bound, PaddingFill, find_padding_fills

from .aliasing import strides_of_whole
from .arguments import OpCall, Path, collect_tensors, get_at_path, locate_in_call, replace_at_paths
from .dtensor import DTensor
from .op_facts import Form, facts_of_function
from .plan import CallPlan, Choice
from .tensor_state import Function, HooksWithoutRerun, Spec, count_holders, saving_hooks

# -- room for padding behind a piece ---------------------------------------------------------------
# On every rank the memory of parameters, their gradients and optimizer state is as large as the
# first rank's piece. But the storage of the tensor is only as large as its own piece, and begins at
# the same address. So copying it, sharing it or writing it to a file does not include the padding.
# A tensor that gets other memory (`p.data = x`, `model.to(dtype)`) has no such room.


_data: Any = torch._C.TensorBase.data


def empty_padded(spec: Spec, dtype: torch.dtype, device: torch.device | str | None) -> torch.Tensor:
    """Returns an uninitialized local tensor of `spec`, with spare memory after its end for padding.

    A captured graph uses the padded size: the size of the first rank's shard.

    Args:
        dtype, device: the dtype and device, as for `torch.empty`.
    """
    if not has_room(spec, device):
        return torch.empty(spec.local_shape, dtype=dtype, device=device)
    whole = torch.empty(math.prod(spec.padded_shape), dtype=dtype, device=device)
    if type(whole) is not torch.Tensor:  # a mode of the user makes fake tensors
        return torch.empty(spec.local_shape, dtype=dtype, device=device)
    whole[spec.local_shape.numel() :] = 0
    return narrow_storage(whole, spec.local_shape)


def copy_with_room(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Returns a contiguous copy of `local`, with spare memory after its end for padding.

    `spec` is the spec of the DTensor that has the local tensor.
    """
    # A call of the program on every rank, also for a mode that records calls (remat).
    copy = local.clone(memory_format=torch.contiguous_format)
    if has_room(spec, local.device):
        with torch._C.DisableTorchFunction(), torch.no_grad():
            _data.__set__(copy, empty_padded(spec, local.dtype, local.device).copy_(copy))
    return copy


def with_room(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Returns `local` as a contiguous tensor with spare memory for padding after its end.

    It is copied only if this is necessary. `spec` is the spec of its DTensor.
    """
    if not has_room(spec, local.device) or find_padded(local, spec.padded_shape) is not None:
        return local.contiguous()
    return copy_with_room(local, spec)


def has_room(spec: Spec, device: torch.device | str | None) -> bool:
    """True if a tensor of `spec` on `device` needs spare memory after this rank's piece.

    False if the piece has the padded shape, if padding would not be at its end, and on "meta".
    """
    if spec.local_shape == spec.padded_shape or not spec.is_padded_behind:
        return False
    return device is None or torch.device(device).type != "meta"


def narrow_storage(whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns the first elements of `whole` as a tensor whose storage seems to end after them.

    The rest of the memory stays allocated as spare room. `find_padded` returns all of it.

    Args:
        whole: a contiguous tensor.
        shape: the shape of the result.
    """
    count = math.prod(shape)
    # By DLPack, a storage can refer to a part of another storage, which it keeps alive.
    front = torch.from_dlpack(to_dlpack(whole.view(-1).view(torch.uint8)[: count * whole.itemsize]))
    storage = front.untyped_storage()
    # An attribute of a storage stays with it, whichever tensor uses it.
    storage.padded = whole  # type: ignore[attr-defined]
    shown = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return shown.set_(storage, 0, tuple(shape), contiguous_strides(shape))


def find_padded(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Returns `local` enlarged to `shape` by the spare memory after it; None if it has none.

    Args:
        shape: the enlarged shape. One dimension is larger than in `local`, and all dimensions
            before it must be 1.
    """
    storage = local.untyped_storage()
    whole: torch.Tensor | None = vars(storage).get("padded")
    if whole is None or not local.is_contiguous():
        return None
    if local.numel() * local.itemsize != storage.nbytes():
        return None
    # Memory that `share_memory_` has moved has no room for padding.
    if storage.nbytes() and storage.data_ptr() != whole.data_ptr():
        return None
    if whole.nbytes != math.prod(shape) * local.itemsize:
        return None
    if whole.is_inference() and not torch.is_inference_mode_enabled():
        return None
    if whole.dtype != local.dtype:
        whole = whole.view(-1).view(local.dtype)
    return whole.view(tuple(shape))


def give_room(x: torch.Tensor) -> None:
    """Moves `x` to memory with spare room for padding after its end, if it has none.

    Does nothing if another tensor shares the memory of `x`, or if torch did not allocate it. Writes
    to `x` would otherwise no longer be visible there.
    """
    if not isinstance(x, DTensor) or not x._spec.is_padded_behind:
        return
    padded = x._spec.padded_shape
    # A tensor made in inference mode could not be trained later.
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        if x.shape == padded or not x.is_leaf or find_padded(x, padded) is not None:
            return
        storage = x.untyped_storage()
        is_alone = count_holders(storage) == 2 and x.numel() * x.itemsize == storage.nbytes()
        is_torchs = storage.resizable() and not is_seen_by_processes(storage)
        if is_alone and is_torchs and not x.is_inference():
            _data.__set__(x, copy_with_room(x.detach(), x._spec))


def give_own_memory(x: torch.Tensor, holders: int) -> bool:
    """Replace the memory of `x` by a copy if other tensors share it. Returns True if it did.

    Args:
        holders: the number of tensors that may share it, `x` included.
    """
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        if count_holders(x.untyped_storage()) <= holders + 1:  # the storage object is one, too
            return False
        _data.__set__(x, x.detach().clone())
    give_room(x)
    return True


# -- padded pieces ---------------------------------------------------------------------------------


def wrap_filling_padding(kernel: Function | None, call: OpCall, plan: CallPlan) -> Function | None:
    """Wraps a kernel of a captured graph, so that padding does not change its result.

    Before the kernel runs, padding is filled with neutral values, such as zeros for a sum. Shards
    are padded only while a step is captured (`Wire.padded`). An op that keeps the split dimension
    runs unchanged. The gradient of padding is 0.

    Args:
        kernel: the kernel for even shards; None means torch's function.
        call: the first call, for which the plan is made.
        plan: the plan of the call; its kernel is not set yet.

    Raises:
        LayoutError: the op reduces padded elements, and no neutral value is known.
    """
    bound, choice, wire, names = plan.bound, plan.choice, plan.wire, plan.names
    assert bound is not None and choice is not None and call.form.rule is not None
    padded = [
        name
        for name, axes in choice.splits.items()
        if name in bound.sizes and bound.sizes[name] % wire.mesh_size(axes)
    ]
    if not padded:
        return kernel
    found = find_padding_fills(call.form.rule, bound, padded)
    if found is None:
        given = [x for x in choice.inputs if x is not None]
        raise uneven(
            f"{call.form.name} of {', '.join(x.brief() for x in given)} reduces uneven pieces"
        )
    if not found:
        return kernel
    run = kernel or call.func
    places = [(call.operands[f.operand][0], f, choice.inputs[f.like]) for f in found]

    def run_with_filled_padding(*args: Any, **kwargs: Any) -> Any:
        for path, fill, layout in places:
            path = locate_in_call(path, names, args, kwargs)
            x = get_at_path(args, kwargs, path)
            if isinstance(x, torch.Tensor) and layout is not None:
                now = _fill_operand_padding(x, fill, layout, wire, args, kwargs)
                args, kwargs = replace_at_paths(args, kwargs, {path: now})  # type: ignore[assignment]
        return run(*args, **kwargs)

    return run_with_filled_padding


def _fill_operand_padding(
    x: torch.Tensor, fill: PaddingFill, layout: Layout, wire: Wire, args: Any, kwargs: Any
) -> torch.Tensor:
    value = fill.value
    if value is EXTREME:
        value = identity_of_reduction(fill.reduce, x.dtype)
    elif callable(value):
        value = value(args, kwargs)
    return wire.fill_padding(x, layout, value, fill.dims)


# -- strides of pieces with a single row -----------------------------------------------------------

_stride = torch._C.TensorBase.stride
_RIGHT: list[Any] = []
"""The result of `_find_strides` if all strides are right."""
_MOST_TRIED = 8
"""The largest size of a dimension in a trial: strides depend only on which sizes are 1."""


def wrap_keeping_strides(kernel: Function | None, call: OpCall, plan: CallPlan) -> Function | None:
    """Wraps a kernel for shards with a single row, so that the results show the global strides.

    Torch ignores the stride of a dimension of one element, so a kernel gives it any. But ops decide
    by the strides of the global tensor if they copy, and random numbers fill memory in that order.
    The strides are found by a trial of the op on small tensors that lie as the global ones, once
    for the strides of the operands.

    Args:
        kernel: the kernel; None means torch's function.
        call: the first call, for which the plan is made.
        plan: the plan of the call; its kernel is not set yet.
    """
    assert plan.choice is not None
    form, names = call.form, plan.names
    if _is_of_users(form):
        return kernel  # a trial could have effects
    inputs = {
        path: layout.shape
        for (path, _), layout in zip(call.operands, plan.choice.inputs, strict=True)
        if layout is not None
    }
    whole = form.local or call.func
    run = kernel or whole
    draws = facts_of_function(form.name).draws  # a trial must not draw
    known: dict[Any, Any] = {}
    count = len(inputs)
    is_usual = [*inputs] == [(i,) for i in range(count)]

    def run_and_restride(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if is_usual and not kwargs and len(args) >= count:
            paths, given = [*inputs], [*args[:count]]
            key: Any = tuple(map(_stride, given))
        else:
            paths = [locate_in_call(path, names, args, kwargs) for path in inputs]
            given = [get_at_path(args, kwargs, path) for path in paths]
            key = (kwargs.get("memory_format"), *map(_stride, given))
        found = known.get(key)
        if found is None:
            sizes = zip(paths, given, inputs.values(), strict=True)
            small = {p: _make_small(t, shape, on_meta=draws) for p, t, shape in sizes}
            outs = collect_tensors(out)
            operands = {t.untyped_storage()._cdata for t in given}
            if any(t.untyped_storage()._cdata in operands for t in outs):
                outs = []  # a result that is an operand shows its strides
            found = known[key] = _find_strides(whole, args, kwargs, small, outs)
        if found is _RIGHT:
            return out
        restrided = map(_restride, collect_tensors(out), found)
        return next(restrided) if isinstance(out, torch.Tensor) else type(out)(restrided)

    return run_and_restride


def _make_small(t: torch.Tensor, shape: Sequence[int], *, on_meta: bool) -> torch.Tensor:
    """Returns a small tensor with the order in memory, and the gaps, of a global tensor.

    Args:
        t: this rank's shard of the global tensor.
        shape: the global shape.
        on_meta: True returns a "meta" tensor.
    """
    given, strides = strides_of_whole(t, shape), [0] * len(shape)
    small = [min(n, _MOST_TRIED) for n in shape]
    held = held_in_small = 1
    for d in _order_in_memory(given, shape):
        if given[d]:
            strides[d] = held_in_small * (1 if given[d] <= held else 2)
            held, held_in_small = given[d] * shape[d], strides[d] * max(small[d], 1)
    with _disable_current_modes(), torch.no_grad():
        device = "meta" if on_meta else t.device
        return torch.empty_strided(small, strides, dtype=t.dtype, device=device).zero_()


def _order_in_memory(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Returns the dimensions of a tensor from the innermost to the outermost."""
    return sorted(range(len(shape)), key=lambda d: (strides[d], shape[d] > 1, -d))


def _find_strides(
    whole: Function, args: Any, kwargs: Any, small: Any, outs: Sequence[torch.Tensor]
) -> list[tuple[int, ...] | None]:
    """Returns the strides that the results `outs` should have; None for those that are right."""
    args, kwargs = replace_at_paths(args, kwargs, small)
    try:
        with _disable_current_modes(), torch.no_grad():
            tried = collect_tensors(whole(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):  # an argument is a size
        return _RIGHT
    found: list[tuple[int, ...] | None] = []
    for out, t in zip(outs, tried, strict=False):
        held, strides = 1, [0] * out.ndim
        for d in _order_in_memory(t.stride(), t.shape):
            strides[d] = held
            held *= max(out.size(d), 1)
        is_right = out.stride() == tuple(strides) or 0 in t.stride()
        found.append(None if is_right else tuple(strides))
    return found if any(found) else _RIGHT


def _restride(t: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Returns `t` with the strides `strides`: itself, if no element lies elsewhere then."""
    if strides is None or isinstance(t, DTensor):  # a call that returned its operand
        return t
    sizes = zip(t.shape, t.stride(), strides, strict=True)
    if any(n > 1 and now != wanted for n, now, wanted in sizes):
        return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
    if isinstance(t, FakeTensor) or t._base is not None:
        return t.as_strided(t.shape, strides)
    with torch.no_grad():
        t.data = t.as_strided(t.shape, strides)  # it keeps its history and its version
    return t


# -- empty pieces ----------------------------------------------------------------------------------


def wrap_for_empty_pieces(kernel: Function | None, call: OpCall, plan: CallPlan) -> Function:
    """Wraps a kernel for an empty shard, so that its autograd graph is as on other ranks.

    Otherwise collectives in backward might not match: for an empty tensor, torch's kernels may
    leave an operand out of the graph, or raise an error. So the wrapper also runs the op, forward
    and backward, on "meta" tensors as large as the first rank's shards. Operands that get a
    gradient in this trial get zeros as gradient here. If the trial raises an error, for example
    because the dtype has no kernel, it is raised here, too.

    Args:
        kernel: the kernel for shards with elements; None means torch's function.
        call: the first call, for which the plan is made.
        plan: the plan of the call; its kernel is not set yet.
    """
    bound, choice, wire, names, form = plan.bound, plan.choice, plan.wire, plan.names, call.form
    assert bound is not None and choice is not None
    mesh, first = wire.mesh, (0,) * wire.mesh.ndim
    inputs = {
        path: layout
        for (path, _), layout in zip(call.operands, choice.inputs, strict=True)
        if layout is not None
    }
    largest = [layout.local_shape(mesh, first) for layout in inputs.values()]
    wholes = [layout.shape for layout in inputs.values()]
    whole = form.local or call.func
    is_users = _is_of_users(form)
    checks_refusal = not (is_users or facts_of_function(form.name).draws)
    known: dict[tuple[Any, ...], _MetaRun | None] = {}

    def locate_operands(args: Any, kwargs: Any) -> dict[Path, torch.Tensor]:
        there = [locate_in_call(p, names, args, kwargs) for p in inputs]
        return {p: get_at_path(args, kwargs, p) for p in there}

    def try_with_elements(args: Any, kwargs: Any) -> _MetaRun | None:
        given = locate_operands(args, kwargs)
        graded = not (form.inplace or torch.is_inference_mode_enabled())
        kinds = (graded, *[(t.dtype, t.requires_grad) for t in given.values()])
        if kinds not in known:
            found = None
            # A global index or count may not fit a piece. Then global shapes are tried.
            for shapes in (largest, wholes):
                given_metas = {}
                for (path, t), shape in zip(given.items(), shapes, strict=True):
                    meta = torch.empty(shape, dtype=t.dtype, device="meta")
                    given_metas[path] = meta.requires_grad_(t.requires_grad and graded)
                try:
                    found = _run_on_meta(whole, args, kwargs, given_metas, is_users)
                except (IndexError, ValueError, AssertionError):
                    continue
                if found is None and not _takes_shapes(whole, args, kwargs, given_metas):
                    continue
                refusal = None
                if checks_refusal:
                    refusal = _find_refusal(whole, args, kwargs, given_metas, wire.device)
                if refusal is None:
                    break
                if shapes is wholes:
                    raise refusal
            known[kinds] = found
        return known[kinds]

    def run_in_place(*args: Any, **kwargs: Any) -> Any:
        try_with_elements(args, kwargs)
        return (kernel or whole)(*args, **kwargs)

    def run_on_empty_pieces(*args: Any, **kwargs: Any) -> Any:
        try:
            out = (kernel or whole)(*args, **kwargs)
        except (RuntimeError, IndexError):
            tried = try_with_elements(args, kwargs)
            if tried is None:
                raise
            outs = [_make_empty_output(t, i, bound, choice, wire) for i, t in enumerate(tried.outs)]
            if any(t is None for t in outs):
                raise
            out = outs[0] if len(outs) == 1 else tuple(outs)
        tried = try_with_elements(args, kwargs)
        # Without operands the result is a leaf itself (`x.to(x.dtype)`), and stays one.
        if tried is not None and tried.operands and torch.is_grad_enabled():
            # By number: this call may pass by name what the call of `tried` passed by position.
            given = [*locate_operands(args, kwargs).values()]
            return _tie_outputs_to_operands(out, [given[i] for i in tried.operands], tried)
        return out

    return run_in_place if form.inplace else run_on_empty_pieces


def _find_refusal(
    run: Function, args: Any, kwargs: Any, metas: dict[Path, torch.Tensor], device: torch.device
) -> RuntimeError | None:
    """Returns the error that torch raises for these shapes and dtypes; None if it depends on
    values.

    It runs the function on zeros and on ones. If both raise, the dtypes or shapes are the cause.
    Kernels check dtypes when they compute the first element, and without elements some never do.
    """
    refused: list[RuntimeError] = []
    for fill in (torch.zeros, torch.ones):
        try:
            # Hidden from modes, such as one that counts operations.
            with torch.no_grad(), _disable_current_modes():
                filled = {p: fill(m.shape, dtype=m.dtype, device=device) for p, m in metas.items()}
                given, named = replace_at_paths(args, kwargs, filled)
                run(*given, **named)
        except torch.linalg.LinAlgError:  # depends on values
            return None
        except RuntimeError as error:
            refused.append(error)
        except Exception:  # may depend on an index or a value
            return None
        else:
            return None
    return refused[0] if str(refused[0]) == str(refused[1]) else None


def _takes_shapes(run: Function, args: Any, kwargs: Any, metas: dict[Path, torch.Tensor]) -> bool:
    """True if torch accepts operands of these shapes with other dtypes.

    An error for the actual operands is then not about their shapes, and is the same on each rank.
    """
    for path, meta in metas.items():
        other = torch.int64 if meta.dtype.is_floating_point else torch.float32
        with suppress(RuntimeError, TypeError, IndexError):
            given, named = replace_at_paths(args, kwargs, metas | {path: meta.detach().to(other)})
            run(*given, **named)
            return True
    return False


@dataclass(frozen=True, slots=True)
class _MetaRun:
    """A trial run of an op on "meta" tensors with the shapes of the first rank's shards.

    Attributes:
        outs: the outputs of the op.
        operands: the operands that may get a gradient, by their numbers in the plan.
        saves: True if autograd saves tensors for backward.
        lacking: for outputs whose backward was tried, by number: True for each operand that gets no
            gradient.
    """

    outs: list[torch.Tensor]
    operands: dict[int, torch.Tensor]
    saves: bool = False
    lacking: dict[int, list[bool]] = field(default_factory=dict)


def _run_on_meta(
    run: Function, args: Any, kwargs: Any, metas: dict[Path, torch.Tensor], is_users: bool
) -> _MetaRun | None:
    """Runs an op on the "meta" tensors `metas`; returns None if the op reads values.

    Args:
        is_users: True for a user's own op, whose errors are raised.
    """
    args, kwargs = replace_at_paths(args, kwargs, dict(metas))
    saved: list[torch.Tensor] = []

    def note_saved(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t.detach()

    try:
        # Hooks and modes that are set (remat's, an offload's) see only the op.
        with (
            _disable_current_modes(),
            torch.enable_grad(),
            HooksWithoutRerun(note_saved, _unpack_meta),
        ):
            outs = collect_tensors(run(*args, **kwargs))
    except (RuntimeError, TypeError) as error:
        # An error of torch's ops may be about sizes that are not the first rank's. A user's op may
        # have read values, which a tensor without storage lacks. Private torch: its text.
        if is_users and "meta" not in str(error).lower():
            raise
        return None
    graded = {i: m for i, m in enumerate(metas.values()) if m.requires_grad}
    reached = nodes_behind(outs, map(node_of_tensor, graded.values()))
    graded = {i: m for i, m in graded.items() if node_of_tensor(m) in reached}
    # The backward of a user's op must not run before the program's backward.
    first = [] if is_users else _order_of_gradients(outs, graded)
    return _MetaRun(outs, {i: graded[i] for i in [*first, *graded]}, bool(saved))


def _order_of_gradients(outs: list[torch.Tensor], operands: dict[int, torch.Tensor]) -> list[int]:
    """Returns the operands in the order in which backward has their gradients.

    Ranks reduce gradients in this order. Empty if backward needs values.
    """
    order: list[int] = []
    handles = [
        m.register_hook(lambda _, number=i: order.append(number)) for i, m in operands.items()
    ]
    roots = [t for t in outs if t.requires_grad]
    hooks = HooksWithoutRerun(torch.Tensor.detach, _unpack_meta)
    try:
        with _disable_current_modes(), hooks, suppress(RuntimeError, TypeError):
            seeds = [torch.empty_like(t) for t in roots]
            inputs = list(operands.values())
            torch.autograd.backward(roots, seeds, retain_graph=True, inputs=inputs)
    finally:
        for handle, m in zip(handles, operands.values(), strict=True):
            handle.remove()
            m.grad = None
    return order


def _is_of_users(form: Form) -> bool:
    """True if the op is the user's own, which may raise its own errors."""
    if form.operator is not None:
        return not form.operator.is_torchs
    module = getattr(form.func, "__module__", None) or "torch"
    return not module.startswith(("torch", "partita"))


def _unpack_meta(t: torch.Tensor) -> torch.Tensor:
    return t


def node_of_tensor(t: torch.Tensor) -> Node:
    return get_gradient_edge(t).node


def nodes_behind(outs: Iterable[torch.Tensor], ends: Iterable[Node]) -> set[Node]:
    """Returns all autograd nodes on paths from `outs` back to `ends`, including `ends`."""
    ends = {*ends}
    ahead = [node_of_tensor(t) for t in outs if t.requires_grad]
    seen: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                ahead += [n for n, _ in node.next_functions if n is not None]
    return seen


def _make_empty_output(
    t: torch.Tensor, i: int, bound: Bound, choice: Choice, wire: Wire
) -> torch.Tensor | None:
    """Returns this rank's empty output i; None if it is not empty. `t` is the first rank's."""
    layout = choice.layout_of_output(bound, i, tuple(t.shape))
    local = layout.local_shape(wire.mesh, wire.at)
    if 0 not in local:
        return None
    return torch.empty(local, dtype=t.dtype, device=wire.device)


def _tie_outputs_to_operands(out: Any, operands: list[torch.Tensor], tried: _MetaRun) -> Any:
    """Returns `out`, with all `operands` in its autograd graph.

    Operands that are in the graph already are added, too, because for an empty tensor a kernel's
    backward may return no gradient. A view of an operand is not changed, because its backward
    returns one, and `register_multi_grad_hook` finds a leaf's node through it.
    """
    outs = collect_tensors(out)
    if len(outs) != len(tried.outs):
        return out
    storages = {o.untyped_storage()._cdata for o in operands}
    # Graphs keep these empty tensors: the operands would keep memory, such as gathered weights. In
    # reverse: autograd runs the last node first, so the first operand gets its gradient first.
    empty = [_EmptyOperand.apply(o) for o in reversed(operands)][::-1]
    for i, (t, there) in enumerate(zip(outs, tried.outs, strict=True)):
        if there.requires_grad and t.untyped_storage()._cdata not in storages:
            # All gradients are zeros. An empty result may have a history that ranks with elements
            # lack. It stays only under a checkpoint, whose rerun depends on the tensors that
            # kernels saved.
            plain = t if t.numel() or saving_hooks() is not None else t.detach()
            outs[i] = _Tie.apply(plain, tried, i, *empty)
    if isinstance(out, torch.Tensor):
        return outs[0]
    return type(out)(*outs) if hasattr(out, "_fields") else type(out)(outs)


def tie_to_operands(t: torch.Tensor, operands: list[torch.Tensor]) -> torch.Tensor:
    """Returns `t` connected in autograd to `operands`, so that these get gradients of zeros.

    On this rank `t` does not depend on the operands. On other ranks it does, and every rank needs
    the same autograd graph.
    """
    tied: torch.Tensor = _TieWithZeros.apply(t, *operands)
    return tied


class _EmptyOperand(torch.autograd.Function):
    """Returns a tensor without elements, whose backward gives the operand zeros."""

    @staticmethod
    def forward(ctx: Any, operand: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.shape = operand.shape
        return torch.empty(0, dtype=operand.dtype, device=operand.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        # A sum of nothing is zero, and has the history of `grad`. A hook may write to the result.
        return None if grad is None else grad.sum().expand(ctx.shape).contiguous()


class _Tie(torch.autograd.Function):
    """Returns a copy of `out` that depends on `operands`, which get gradients of zeros.

    `tried` is the trial run, with elements. An operand that gets no gradient there gets none here,
    and a gradient of zeros has the same history as there.
    """

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, tried: _MetaRun, number: int, *operands: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.tried, ctx.number, ctx.operands = tried, number, operands
        # As ranks with elements save something, whose hooks may run the forward again (remat).
        if tried.saves:
            ctx.save_for_backward(torch.empty(0))
        return out.clone()  # not a view: it may be written to

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        tried, number = ctx.tried, ctx.number
        operands = list(tried.operands.values())
        if grad is None:
            return None, None, None, *[None] * len(operands)
        if tried.saves:  # otherwise backward may run again, as on ranks with elements
            _ = ctx.saved_tensors
        zeros: list[Any] = [torch.zeros_like(o) for o in ctx.operands]
        again = torch.is_grad_enabled()
        if not again and number in tried.lacking:
            lacking = tried.lacking[number]
            given = [None if lacks else z for z, lacks in zip(zeros, lacking, strict=True)]
            return grad, None, None, *given
        found = differentiate_meta(tried.outs[number], operands, grad.requires_grad)
        if found is None:
            return grad, None, None, *zeros
        seed, grads = found
        if not again:
            tried.lacking[number] = [g is None for g in grads]
        metas, behind = [seed, *operands], [grad, *ctx.operands]
        nodes = {k: node_of_tensor(m) for k, m in enumerate(metas) if m.requires_grad}
        for i, there in enumerate(grads):
            if there is None:
                zeros[i] = None
            elif there.requires_grad:
                reached = nodes_behind([there], nodes.values())
                some = [k for k, node in nodes.items() if node in reached]
                tied = _MetaRun([there], {k: metas[k] for k in some})
                with local_ops():
                    zeros[i] = _Tie.apply(zeros[i], tied, 0, *[behind[k] for k in some])
        return grad, None, None, *zeros


class _TieWithZeros(torch.autograd.Function):
    """Like `_Tie`, but without a trial run: all operands get zeros without a history."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.likes = [(o.shape, o.dtype, o.device) for o in operands]
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, *[None] * len(ctx.likes)
        return grad, *[torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.likes]


def differentiate_meta(
    out: torch.Tensor, operands: list[torch.Tensor], seed_has_history: bool
) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]] | None:
    """Runs backward on "meta" tensors, to find out which operands get a gradient.

    Args:
        out: the result of the trial.
        operands: the operands of the trial.
        seed_has_history: True if the gradient of `out` requires grad.

    Returns:
        A gradient of `out` and the operands' gradients; None if backward needs values.
    """
    seed = torch.empty_like(out).requires_grad_(seed_has_history)
    hooks = HooksWithoutRerun(torch.Tensor.detach, _unpack_meta)
    again = torch.is_grad_enabled()
    try:
        # Torch's anomaly mode would look for NaN, and these tensors have no values.
        with _disable_current_modes(), hooks, torch.autograd.set_detect_anomaly(False):
            return seed, torch.autograd.grad(
                out, operands, seed, retain_graph=True, create_graph=again, allow_unused=True
            )
    except (RuntimeError, TypeError) as error:
        if "derivative" in str(error):  # the text where torch has none, on ranks with elements, too
            raise
        return None
