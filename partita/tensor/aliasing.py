"""Aliasing: DTensors behave like views where plain PyTorch returns a view.

In plain PyTorch the result of a view op (`x[1]`, `x.view(-1)`) shares x's memory: a write to one is
seen in the other. With DTensors the result may have its own memory, because its layout had to
change, or because it is Partial. Such a result is a *view copy*. Its `CopiedView` stores the tensor
that it is a view of (the source). Its spec is marked (`Spec.as_copy`), so that other calls do not
pay for a check.

- The source is written: the view copy is made again when it is next read (`current`).
- The view copy is written: its value is written, and then the corresponding part of the source
  (`write_through_copy`).

Some ops copy only if the strides require it (`contiguous`, `reshape`, `to`). The strides in plain
PyTorch decide this, on all ranks, although a shard may be contiguous where the whole is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

# Not public: ops on tensors without memory are not part of a captured step.
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from partita.comm import is_alone, user_line
from partita.layout import Fix, Layout, LayoutError

from .arguments import is_index_of_view
from .dtensor import DTensor, as_dtensor, move_local
from .op_facts import facts_of_function, form_of
from .origins import ORIGIN, find_origin
from .tensor_state import (
    Args,
    CopiedView,
    Function,
    Kwargs,
    Spec,
    count_writes,
    current,
    own_state,
    spec_of,
    state_of,
)

T = torch.Tensor


def mark_copies(out: Any, func: Function, args: Any, kwargs: Kwargs) -> Any:
    """Marks the results of a view op on `args[0]` as view copies, and returns them.

    In plain PyTorch the result of a view op shares memory with its source. Here it has memory of
    its own, so it is copied again after a write to the source.

    Args:
        out: the result: a DTensor, or a tuple or list of DTensors.
        func, args, kwargs: the call of the view op that returned `out`.
    """
    source = args[0]
    if func is T.__getitem__:
        if not is_index_of_view(args[1]):  # a mask, though the plan was made for a number
            return out
        # The index of this call, not that of the call for which the plan was made.
        args = tree_map_only(torch.Tensor, lambda i: i.detach().clone(), args[1:])
        args = (source, *args)
        if out is not source and state_of(out).copied_view is not None:  # of an inner value
            own_state(out).copied_view = None
            out._spec = spec_of(out._spec.layout, out._spec.wire)
    alias = _alias_of(source)
    seen = count_writes(alias)

    def mark_output(t: DTensor, index: int | None) -> DTensor:
        return _mark_copy_of_view(t, source, CopiedView(alias, func, args[1:], kwargs, index, seen))

    if isinstance(out, torch.Tensor):
        return mark_output(out, None)  # type: ignore[arg-type]
    return type(out)([mark_output(t, i) for i, t in enumerate(out)])


def _alias_of(x: DTensor) -> DTensor:
    """Returns an alias of `x` that keeps its shape if the shape of `x` is changed in place."""
    with local_ops():
        # `view_as` would change the stride of a dimension of one element.
        alias = as_dtensor(torch.ops.aten.alias(x), x._spec)
    copied: CopiedView | None = state_of(x).copied_view
    if copied is not None:
        own_state(alias).copied_view = copied
    return alias


def _mark_copy_of_view(copy: DTensor, source: DTensor, copied: CopiedView) -> DTensor:
    if copy is source or state_of(copy).copied_view is not None:
        return copy
    spec = copy._spec
    if not set(spec.layout.partial) <= set(source._spec.layout.partial):
        # The rank that has the element must not return a view: a write to the Partial result
        # would then change x on this rank only.
        with local_ops():
            copy = as_dtensor(copy.clone(), spec)
    own_state(copy).copied_view = copied
    copy._spec = spec.as_copy
    return copy


def write_through_copy(write: Function, copy: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Runs an in-place op on a view copy, and writes the changed values to its source, too.

    Args:
        write: the in-place op.
        copy: the view copy that `write` changes.
        *args, **kwargs: the other arguments of `write`.
    """
    spec = copy._spec
    held = spec_of(spec.layout, spec.wire)
    copied: CopiedView | None = state_of(copy).copied_view
    if copied is None:  # another tensor of the same spec, which is not a view copy
        copy._spec = held
        write(copy, *args, **kwargs)
        return copy
    name = form_of(write).name
    if name == "setitem":
        refuse_partial_overlap(name, copy, args[1:], lambda x: x[args[0]])
    else:
        refuse_partial_overlap(name, copy, (args, kwargs))
    _refuse_overlapping_pieces(copy)
    refuse_repeated_write(write.__name__, copy)
    own, copied = copied, _before_overlap(copy, copied)
    settled = spec.reduced
    with local_ops():
        value = move_local(copy, spec, settled, "write", "implicit").clone()
    value = as_dtensor(value, settled)
    write(value, *args, **kwargs)
    with local_ops():
        # First, because on some ranks a copy that is not Partial may share its source's memory.
        T.copy_(copy, move_local(value, settled, held, "write", "implicit"))
    source = copied.source
    # As on one device, a write through a detached tensor is not differentiable.
    with torch.set_grad_enabled(torch.is_grad_enabled() and copied.view.__name__ != "detach"):
        if copied.view is T.__getitem__:
            source[copied.args[0]] = value
        else:
            source.copy_(_replace_viewed_part(source, copied, value))
    own.note_write_through(copy)
    return copy


def _before_overlap(copy: DTensor, copied: CopiedView) -> CopiedView:
    """Returns `copied`, or the same part as a view of the first base if its source overlaps itself.

    On one device the elements of a source made by `expand` or `unfold` share memory. So a write to
    one of them also changes the others.
    """
    source = copied.source
    if state_of(source).copied_view is None:
        return copied
    if is_without_overlap(make_meta_twin(source, dense=True)):
        return copied
    base, views = _list_views(copy)
    return CopiedView(base, _compose_views(views), (), {}, None, 0)


_SETS_VALUES = ("copy_", "fill_", "zero_")
"""Writes of all elements whose result does not depend on how often an element is written."""


def refuse_repeated_write(name: str, x: DTensor) -> None:
    """Raises LayoutError if an op would write the same element of a view several times.

    The view is one whose positions share memory, as made by `unfold`. In plain PyTorch the op
    changes an element once for each of its positions. The view copy has separate memory for each
    position. Ops that set all values (`copy_`, `fill_`, `zero_`) are allowed. After `expand`, torch
    raises its own error.

    Args:
        name: the name of the op.
        x: the written tensor: a view copy, or one that gets a copy of the result.
    """
    is_copy = state_of(x).copied_view is not None
    if name in _SETS_VALUES or is_without_overlap(twin := make_meta_twin(x, dense=is_copy)):
        return
    if any(n > 1 and not stride for n, stride in zip(twin.shape, twin.stride(), strict=True)):
        return  # as by expand(): torch raises its own error
    raise LayoutError(
        f"{name} of a view whose elements share memory, as by unfold()",
        place=user_line(),
        operands=(str(x._spec.layout),),
        reason="the op writes a copy of the view, in which such an element has several places",
        fixes=(Fix(f"x.{name}(...)", "of the base"), Fix("view = view.clone()", "before that")),
    )


def _refuse_overlapping_pieces(copy: DTensor) -> None:
    """Raise LayoutError if a write to a view copy would have to change elements that it does not
    reach.

    These exist if elements of this rank's piece of the first base share memory, and more than one
    of them is written.
    """
    part, base, is_item = copy, copy, False
    while (copied := state_of(base).copied_view) is not None:
        part, base, is_item = base, copied.source, copied.view is T.__getitem__
    with local_ops():
        misses = not is_without_overlap(base)
    if misses and is_item:  # then no other element of the base is written
        misses = not is_without_overlap(make_meta_twin(part))
    wire = base._spec.wire
    if has_short_pieces(base._spec) and not is_alone(wire):  # all ranks raise, or none does
        misses = any(n for (n,) in wire.gather_ints((misses,), "whether elements share memory"))
    if misses:
        raise LayoutError(
            "a write to a part of a tensor whose elements share memory, as by expand()",
            place=user_line(),
            operands=(str(base._spec.layout),),
            reason="the part has another layout than the tensor, so it has its own memory",
            fixes=(Fix("x = x.clone()", "of the tensor, before that"),),
        )


def is_without_overlap(t: Any) -> bool:
    """True if the strides alone show that no two elements of `t` have the same address.

    Args:
        t: a tensor or a list of tensors.
    """
    if not isinstance(t, torch.Tensor):
        return all(map(is_without_overlap, t if isinstance(t, (list, tuple)) else ()))
    if 0 in t.shape:
        return True
    end = 0
    for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n > 1 and stride <= end:
            return False
        end += (n - 1) * stride
    return True


_CHECKED = frozenset(
    "copy setitem where cumsum cumprod index_add index_copy index_put scatter scatter_add".split()
)
"""Ops that are not pointwise, and check if an operand overlaps the written tensor."""


@cache
def checks_overlap(name: str) -> bool:
    """True if the torch op `name` raises if an operand partly overlaps the written tensor."""
    # `idiv` is the name of `/=`. Not the op that makes a new tensor: `masked_fill_` does not check.
    for one in (f"{name}_", f"{name[1:]}_"):
        if isinstance(packet := getattr(torch.ops.aten, one, None), torch._ops.OpOverloadPacket):
            tags = (getattr(packet, overload).tags for overload in packet.overloads())
            return name in _CHECKED or any(torch.Tag.pointwise in found for found in tags)
    return name in _CHECKED


def refuse_partial_overlap(
    name: str, written: Any, operands: Any, part: Callable[[Any], Any] | None = None
) -> None:
    """Raise torch's RuntimeError if an op reads an operand that partly overlaps the written tensor.

    In plain PyTorch such an operand would change while the op reads it. A view copy would not.

    Args:
        name: the name of the op.
        operands: the op's other arguments, in any containers.
        part: a function that makes the written part of `written`; None if all of it is written.
    """
    if not (isinstance(written, DTensor) and checks_overlap(name)):
        return
    is_short = has_short_pieces(written._spec)
    base, overlaps, shares = _list_views(written)[0], False, False
    if is_short and part is None and _is_expanded(written):
        raise RuntimeError(MORE_THAN_ONE)  # kernels raise it where the piece has elements
    for other in tree_leaves(operands):
        if not isinstance(other, DTensor) or (other is written and part is None):
            continue
        its_base = _list_views(other)[0]
        if not _share_memory(base, its_base):
            continue
        shares, is_short = True, is_short or has_short_pieces(other._spec)
        with _disable_current_modes(), local_ops():
            if part is None and _share_memory(written, other):  # as the kernel compares them
                overlaps |= do_parts_overlap(written, other)
            into: torch.Tensor | None = written
            read: torch.Tensor | None = other
            if base.storage_offset() == its_base.storage_offset():
                into, read = _locate_in_base(written), _locate_in_base(other)
            elif base is not written or its_base is not other:
                continue  # nothing says where the views are in a whole that both are parts of
            if into is not None and read is not None:
                overlaps |= do_parts_overlap(into if part is None else part(into), read)
    wire = written._spec.wire
    if shares and is_short and not is_alone(wire):  # all ranks raise, or none does
        overlaps = any(n for (n,) in wire.gather_ints((overlaps,), "whether operands overlap"))
    if overlaps:
        raise RuntimeError(SOME_OVERLAP)


def _locate_in_base(x: DTensor) -> torch.Tensor | None:
    """Returns a "meta" tensor with the global shape, strides and offset of `x` in its first base.

    Returns None if they depend on the value of an index.
    """
    base, views = _list_views(x)
    if any(isinstance(a, torch.Tensor) for a in tree_leaves([(v.args, v.kwargs) for v in views])):
        return None
    whole = make_meta_twin(base, dense=has_short_pieces(base._spec))
    part: torch.Tensor = _compose_views(views)(whole)
    return part


def _is_expanded(x: DTensor) -> bool:
    """True if a view has repeated the elements of `x`, as `expand` does.

    The strides of a short piece that is no view show nothing: any may be 0.
    """
    shape = x._spec.shape
    with local_ops():
        if x._base is None or 0 in x._base.stride() or not shape.numel():
            return False
        return any(n > 1 and not stride for n, stride in zip(shape, x.stride(), strict=True))


MORE_THAN_ONE = (
    "unsupported operation: more than one element of the written-to tensor refers to a single "
    "memory location. Please clone() the tensor before performing the operation."
)
SOME_OVERLAP = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
    "single memory location. Please clone() the tensor before performing the operation."
)


def do_parts_overlap(written: torch.Tensor, read: torch.Tensor) -> bool:
    """True if two views of one memory overlap, and are not the same part.

    Like torch, this does not compare tensors with gaps.
    """
    ranges = []
    for t in (written, read):
        if not t.numel() or not is_without_overlap(t):
            return False
        if 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) != t.numel():
            return False
        first = t.storage_offset() * t.itemsize
        ranges.append((first, first + t.numel() * t.itemsize, t.stride()))
    (first, end, _), (its_first, its_end, _) = ranges
    return ranges[0] != ranges[1] and first < its_end and its_first < end


def first_base_of(copy: DTensor) -> tuple[DTensor, Callable[[Any], Any] | None, bool]:
    """Finds the tensor that a view copy is a view of, through any number of views.

    Returns:
        `(base, view, graded)`. `base` is that tensor. `view(base)` makes the view; None if
        arguments of the views are tensors. `graded` is True if all these views were made with
        gradients enabled.
    """
    base, views = _list_views(copy)
    given = tree_leaves([(one.args, one.kwargs) for one in views])
    view = None if any(isinstance(a, torch.Tensor) for a in given) else _compose_views(views)
    return base, view, all(one.graded for one in views)


def _list_views(copy: DTensor) -> tuple[DTensor, list[CopiedView]]:
    views: list[CopiedView] = []
    while (copied := state_of(copy).copied_view) is not None:
        views.insert(0, copied)
        copy = copied.source
    return copy, views


def _compose_views(views: Sequence[CopiedView]) -> Callable[[Any], Any]:
    # Without the sources: a program keeps the function.
    calls = [(one.view, one.args, one.kwargs, one.index) for one in views]
    return _compose_calls(calls)


def _compose_calls(calls: Sequence[_ViewCall]) -> Callable[[Any], Any]:
    def make_view(x: Any) -> Any:
        for view, args, kwargs, index in calls:
            x = view(x, *args, **kwargs)
            x = x if index is None else x[index]
        return x

    if any(view.__name__ == "detach" for view, *_ in calls):
        make_view.__name__ = "detach"
    make_view.calls = calls  # type: ignore[attr-defined]
    return make_view


_ViewCall = tuple[Function, Any, dict[str, Any], int | None]
"""A view op, its arguments behind the tensor, and the index of its result, if it has several."""


def describe_views(copy: DTensor) -> tuple[DTensor, list[Any]] | None:
    """Returns `(base, calls)`: the tensor that `copy` is a view of, and the calls that make the
    view.

    Each call is `(name, args, kwargs, index)`, with the name of a function of torch, so it can be
    saved. Returns None if `copy` is no view copy, or another function made it.
    """
    base, views = _list_views(copy)
    calls: list[_ViewCall] = []
    for one in views:
        own = (one.view, one.args, one.kwargs, one.index)
        calls += getattr(one.view, "calls", [own])
    named = [(view.__name__, *given) for view, *given in calls]
    if not named or any(_find_view_function(name) is None for name, *_ in named):
        return None
    return base, named


def compose_named_calls(named: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns a function that makes a view of its argument by the calls of `describe_views`.

    Args:
        named: the calls that `describe_views` returned.
    """
    return _compose_calls([(_find_view_function(name), *given) for name, *given in named])


def _find_view_function(name: str) -> Function | None:
    known = facts_of_function(name.strip("_"))
    return getattr(T, name, None) or getattr(torch, name) if known.is_view else None


def connect_copy(
    copy: DTensor, base: DTensor, view: Callable[[Any], Any] | None, graded: bool
) -> None:
    """Makes `copy` a view copy of `base`, so that it changes with `base` as a view would.

    After a write to `base`, `copy` is computed again as `view(base)`. If `view` is None, `copy`
    cannot be computed again. In this case a read of `copy` after a write to `base` raises an error,
    and so does any write to `copy`.

    Args:
        view: a function that makes the view of `base`, or None if it is not known.
        graded: True if the view was made with gradients enabled.
    """
    line, meta = user_line(), _make_meta_of_shape(copy)

    def refuse_reading(x: Any) -> Any:
        if x.is_meta:
            return meta
        raise LayoutError(
            "a view that a compiled step returned is out of date: its base was written, or it is",
            place=user_line(),
            operands=(f"a view {copy._spec.layout.brief()}, returned at {line}",),
            reason="only the step can make this view again",
            fixes=(Fix("x.clone()", "of the view, in the step"),),
        )

    alias = _alias_of(base)
    seen = count_writes(alias)
    graded = graded and torch.is_grad_enabled()
    own_state(copy).copied_view = CopiedView(
        alias, view or refuse_reading, (), {}, None, seen, graded=graded
    )
    copy._spec = copy._spec.as_copy


def redistribute_view(x: Any, layout: Layout) -> Any:
    """Returns a view copy of the DTensor `x` in the layout `layout`; of a plain tensor an alias."""
    if not isinstance(x, DTensor):  # the whole value, or a "meta" tensor
        return torch.ops.aten.alias(x)
    alias, now = _alias_of(x), current(x)
    copied = CopiedView(alias, redistribute_view, (layout,), {}, None, count_writes(alias))
    spec = spec_of(layout, now._spec.wire)
    copy = as_dtensor(move_local(now, now._spec, spec, "grad", "explicit"), spec)
    return _mark_copy_of_view(copy, x, copied)


def renew_copy(copy: DTensor) -> None:
    """Brings a view copy up to date: copies the values of its source into it."""
    now = current(copy)
    if now is not copy:
        with local_ops(), torch.no_grad():
            copy.copy_(move_local(now, now._spec, copy._spec, "grad", "implicit"))
        copied: CopiedView = state_of(copy).copied_view
        copied.note_write_through(copy)


def reshape_copy(reshape: Function, copy: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Runs an op that changes a view copy's shape in place, such as `x.squeeze_()`.

    Later writes to the view copy still change its source.

    Args:
        reshape: the op, a method of torch.Tensor whose name ends with "_".
    """
    before, spec = _alias_of(copy), copy._spec
    own_state(copy).copied_view = None
    copy._spec = spec_of(spec.layout, spec.wire)
    reshape(copy, *args, **kwargs)
    view = getattr(T, reshape.__name__.removesuffix("_"))
    return _mark_copy_of_view(
        copy, before, CopiedView(before, view, args, kwargs, None, count_writes(before))
    )


def _replace_viewed_part(source: DTensor, copied: CopiedView, value: DTensor) -> DTensor:
    """Returns `source` with the part that `copied` views replaced by `value`. Gathers both."""
    spec = source._spec
    whole = spec.invariant_of(spec.shape)
    with local_ops():
        copy = move_local(source, spec, whole, "write", "implicit")
        copy = copy.clone(memory_format=torch.contiguous_format)
        part = copied.view(copy, *copied.args, **copied.kwargs)
        if copied.index is not None:
            part = part[copied.index]
        of_part = spec.invariant_of(value._spec.shape)
        part.copy_(move_local(value, value._spec, of_part, "write", "implicit"))
    return as_dtensor(copy, whole)


# -- ops that copy only where they must ------------------------------------------------------------


def may_be_denser_than_whole(spec: Spec) -> bool:
    """True if this rank's shard may be contiguous although the global tensor is not.

    This happens if the global tensor has more than one element in a dimension, and the shard has at
    most one.
    """
    return any(n < 2 <= whole for n, whole in zip(spec.local_shape, spec.shape, strict=True))


def has_short_pieces(spec: Spec) -> bool:
    """True if pieces of some ranks, but not of all, have fewer than two elements in a dimension.

    The strides of such pieces may show another order in memory.
    """
    mesh = spec.wire.mesh
    first = spec.layout.local_shape(mesh, (0,) * mesh.ndim)
    last = spec.layout.local_shape(mesh, tuple(n - 1 for n in mesh.sizes))
    return any(n < 2 and n != m for n, m in zip(last, first, strict=True))


def copy_as_on_one_device(
    out: Any, func: Function, args: Args, kwargs: Kwargs, moved: bool
) -> tuple[Any, bool]:
    """Returns the result of an op, copied if plain PyTorch would copy and `out` is a view.

    This is for ops whose strides decide if they copy (`contiguous`, `reshape`, `to`).

    Args:
        out: the result of the local kernel, as a DTensor.
        func, args, kwargs: the user's call. `args[0]` is the operand before a redistribution.
        moved: True if the operand of the call has memory of its own already: it was redistributed,
            or is a view copy.

    Returns:
        The result, and True if the result is a view copy: it has its own memory, but one device
        returns a view.
    """
    source, given = args[0], (*args[1:], *kwargs.values())
    modes = [m for m in given if m is torch.channels_last or m is torch.channels_last_3d]
    shared = _share_memory(out, source)
    if not (moved or modes or shared):  # a piece is never less dense than the whole
        return out, False
    if out.device != source.device:
        return out, False
    with _disable_current_modes(), local_ops():
        alike = make_meta_twin(source)
        arguments: Any = (tuple(args[1:]), kwargs)
        of_type = func is T.to or func is T.type
        others, named = (
            _convert_options_to_meta(arguments, out) if of_type else _convert_to_meta(arguments)
        )
        there = func(alike, *others, **named)
        views = _share_memory(there, alike)
    if moved and has_short_pieces(source._spec) and not is_alone(source._spec.wire):
        # All ranks mark the result, or none does. The first one's piece shows the strides best.
        views = bool(
            source._spec.wire.gather_ints((views,), f"whether {func.__name__} copies")[0][0]
        )
    if views:
        return out, moved or not shared
    if shared:
        with local_ops():
            mode = modes[0] if modes else torch.contiguous_format
            copy = T.clone(out, memory_format=mode)
        if isinstance(out, DTensor):
            copy = as_dtensor(copy, out._spec)
            if (made := find_origin(out)) is not None:  # equal to that on ranks whose kernels copy
                copy.__dict__[ORIGIN] = made
        return copy, False
    return out, False


def _convert_options_to_meta(given: Any, out: torch.Tensor) -> Any:
    """Returns the arguments of a call of `to` or `type`, for a tensor that stays on "meta".

    Args:
        out: the result of the call.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _make_meta_of_shape(value)
        if isinstance(value, str) and value.startswith("torch."):  # "torch.FloatTensor"
            return out.dtype
        is_device = isinstance(value, (torch.device, str)) or type(value) is int
        return torch.device("meta") if is_device else value

    return tree_map(convert, given)


def wrap_copying_as_on_one_device(run: Function, func: Function, spec: Spec) -> Function:
    """Wraps an op such as `contiguous` so that it copies exactly if plain PyTorch copies.

    A shard may be contiguous although the whole tensor is not (`may_be_denser_than_whole`). For
    this shard the local op would return a view, although plain PyTorch would copy.

    Args:
        run: the function that runs on the local tensor.
        func: the function that the user called.
        spec: the spec of the operand.
    """
    dense = torch.empty(spec.local_shape, device="meta").stride()
    held = spec.local_shape.numel()

    def run_and_restride(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(x, *args, **kwargs)
        in_order = x.stride() == dense and x.untyped_storage().nbytes() == held * x.element_size()
        if in_order and "memory_format" not in kwargs and (run is not T.contiguous or not args):
            return out
        return copy_as_on_one_device(out, func, (x, *args), kwargs, False)[0]

    return run_and_restride


def _share_memory(out: torch.Tensor, source: torch.Tensor) -> bool:
    with local_ops():
        return out.untyped_storage()._cdata == source.untyped_storage()._cdata


# -- one device's strides --------------------------------------------------------------------------

_stride = torch._C.TensorBase.stride


def global_strides(x: DTensor) -> tuple[int, ...]:
    """Returns the strides, in elements, that the global tensor of x would have in plain PyTorch."""
    if state_of(x).copied_view is not None:
        with _disable_current_modes():
            return make_meta_twin(x).stride()
    return strides_of_whole(x, x._spec.shape)


def strides_of_whole(x: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a global tensor, derived from one rank's shard.

    If the shard is dense, the result is dense, with the same order of dimensions. If there are gaps
    between the rows of the shard, as in a slice, the result has gaps of the same size. A shard with
    a single row has an arbitrary stride between rows: the size of its storage shows whether there
    are gaps. If at most one dimension of the shard has more than one element, the order cannot be
    derived, because a kernel may have made such a shard contiguous.

    Args:
        x: the shard.
        shape: the global shape.
    """
    with local_ops():
        local = _stride(x)
        sizes = tuple(x.size())
        if sizes == tuple(shape):
            return local
        short = any(n < whole and n == 1 for n, whole in zip(sizes, shape, strict=True))
        dense = short and _fills_memory(x)
    strides = [0] * len(shape)
    inner_local = inner_global = 1
    # From the innermost dimension outwards. Of two dimensions with equal strides, the one with a
    # single element is the inner one; as the outer one it would have a larger stride.
    for d in sorted(range(len(shape)), key=lambda d: (local[d], sizes[d] > 1, -d)):
        if local[d] == 0:
            continue
        strides[d] = inner_global if dense else local[d] * inner_global // inner_local
        inner_local *= max(sizes[d], 1)
        inner_global *= max(shape[d], 1)
    return tuple(strides)


def _fills_memory(x: torch.Tensor) -> bool:
    """True if the storage holds the elements of this rank's piece and nothing else."""
    with local_ops():
        held = math.prod(n for n, stride in zip(x.size(), _stride(x), strict=True) if stride)
        return 0 < x.untyped_storage().nbytes() == held * x.element_size()


def make_meta_twin(x: DTensor, dense: bool = False) -> torch.Tensor:
    """Returns a "meta" tensor with the global shape and strides of x, to try ops without data.

    Args:
        dense: True assumes that the source of a view copy is contiguous. This makes the result
            equal on all ranks.
    """
    copied: CopiedView | None = state_of(x).copied_view
    with local_ops():
        if copied is None:
            if dense:
                return _make_meta_of_shape(x)
            strides = global_strides(x)
            return torch.empty_strided(x._spec.shape, strides, dtype=x.dtype, device="meta")
        args, kwargs = _convert_to_meta(copied.args), _convert_to_meta(copied.kwargs)
        if copied.view is T.__getitem__:  # strides do not depend on the index
            args = tree_map_only(torch.Tensor, lambda _: 0, args)
        part = copied.view(make_meta_twin(copied.source, dense), *args, **kwargs)
    return part if copied.index is None else part[copied.index]


def _convert_to_meta(value: Any) -> Any:
    """Returns arguments in which each tensor is a "meta" tensor of the same global shape."""
    return tree_map_only(torch.Tensor, _make_meta_of_shape, value)


def _make_meta_of_shape(x: torch.Tensor) -> torch.Tensor:
    with local_ops():
        shape = x._spec.shape if isinstance(x, DTensor) else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta")
