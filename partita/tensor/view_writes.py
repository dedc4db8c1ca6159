"""Writes through views: what if a program writes through a view that is none here?

`x[1].fill_(0)`, `x.view(-1).add_(1)`: on one device the result of a view op shares x's memory.
Where a layout had to change to make it, or a rank holds shares of it, it has memory of its own.
Such a copy has a spec of its own that says so (`Spec.as_copy`: the same layout, another identity),
so that no other call pays for asking, and remembers what it was taken from (`origin`). Written in
place, it is written as a value, and then its place in the tensor that it was taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Layout

from .autograd import moved
from .dtensor import DTensor, tagged
from .function_facts import facts_of_function
from .names import Form
from .origin import Origin, count_writes_or_none
from .spec import Spec, spec_of
from .tensor_state import own_state, state_of

__all__ = ["gives_view", "mark_copies", "reshape_copy", "write_through_copy"]

T = torch.Tensor


def gives_view(form: Form, args: Sequence[Any]) -> bool:
    """Would the result share its operand's memory on one device? By indexing it does by ints and
    slices only."""
    if (
        form.inplace
        or not facts_of_function(form.name).is_view
        or not args
        or not isinstance(args[0], DTensor)
    ):
        return False
    if form.func is torch.nn.functional.unfold:  # Tensor.unfold is a view, this one copies
        return False
    if form.name == "getitem":
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(e, (bool, list, torch.Tensor)) for e in entries)
    return not (form.name.startswith("atleast") and len(args) > 1)


def mark_copies(out: Any, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Note of each result that it is a copy of a part of `args[0]`, and which."""
    source = args[0]
    alias = alias_of(source)
    seen = count_writes_or_none(alias)

    def mark_output(t: DTensor, index: int | None) -> DTensor:
        return _mark_copy_of_view(t, source, Origin(alias, func, args[1:], kwargs, index, seen))

    if isinstance(out, torch.Tensor):
        return mark_output(out, None)  # type: ignore[arg-type]
    return type(out)([mark_output(t, i) for i, t in enumerate(out)])


def alias_of(x: DTensor) -> DTensor:
    """`x` under another name, which keeps its shape when that of `x` is changed in place."""
    with Local():
        # `view_as` would make the stride of a dimension of one element anew.
        alias = tagged(torch.ops.aten.alias(x), x._spec)
    origin: Origin | None = state_of(x).origin
    if origin is not None:
        own_state(alias).origin = origin
    return alias


def _mark_copy_of_view(copy: DTensor, source: DTensor, origin: Origin) -> DTensor:
    if copy is source or state_of(copy).origin is not None:
        return copy
    spec = copy._spec
    if not set(spec.layout.partial) <= set(source._spec.layout.partial):
        # The rank that has the place must not share it: its share and the value would be one.
        with Local():
            copy = tagged(copy.clone(), spec)
    own_state(copy).origin = origin
    copy._spec = spec.as_copy
    return copy


def write_through_copy(
    write: Callable[..., Any], copy: DTensor, *args: Any, **kwargs: Any
) -> DTensor:
    """Do `write(copy, ...)`, an op in place, and write the result into the tensor behind `copy`."""
    spec = copy._spec
    held = spec_of(spec.layout, spec.wire)
    origin: Origin | None = state_of(copy).origin
    if origin is None:  # another tensor of the same spec: nothing is behind it
        copy._spec = held
        write(copy, *args, **kwargs)
        return copy
    layout = spec.layout
    settled = spec_of(Layout(layout.shape, layout.shards, (), layout.invariant), spec.wire)
    with Local():
        value = moved(copy, spec, settled, "write", "implicit").clone()
    value = tagged(value, settled)
    write(value, *args, **kwargs)
    with Local():
        # First, since on some ranks a copy that is not pending may share its source's memory.
        T.copy_(copy, moved(value, settled, held, "write", "implicit"))
    origin, own = _before_expand(origin), origin
    source = origin.source
    # What is written through a detached tensor has no history on one device either.
    with torch.set_grad_enabled(torch.is_grad_enabled() and origin.view.__name__ != "detach"):
        if origin.view is T.__getitem__:
            source[origin.args[0]] = value
        else:
            source.copy_(_replace_viewed_part(source, origin, value))
    own.seen, own.again = count_writes_or_none(own.source), None
    return copy


def _before_expand(origin: Origin) -> Origin:
    """The same part as one of what was expanded: what is stretched cannot be written itself."""
    wide: Origin | None = state_of(origin.source).origin
    if wide is None or wide.view.__name__ not in ("expand", "expand_as", "broadcast_to"):
        return origin

    def apply_view_to_wide(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return origin.view(wide.view(x, *wide.args, **wide.kwargs), *args, **kwargs)

    part = Origin(wide.source, apply_view_to_wide, origin.args, origin.kwargs, origin.index, None)
    return _before_expand(part)


def reshape_copy(reshape: Callable[..., Any], copy: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Do `reshape(copy, ...)`, which changes the shape in place: a view of what it was."""
    before, spec = alias_of(copy), copy._spec
    own_state(copy).origin = None
    copy._spec = spec_of(spec.layout, spec.wire)
    reshape(copy, *args, **kwargs)
    view = getattr(T, reshape.__name__.removesuffix("_"))
    return _mark_copy_of_view(
        copy, before, Origin(before, view, args, kwargs, None, count_writes_or_none(before))
    )


def _replace_viewed_part(source: DTensor, origin: Origin, value: DTensor) -> DTensor:
    """`source` with the part that `origin` views replaced by `value`; both are gathered for it."""
    spec = source._spec
    whole = _make_invariant_spec(spec, spec.shape)
    with Local():
        copy = moved(source, spec, whole, "write", "implicit")
        copy = copy.clone(memory_format=torch.contiguous_format)
        part = origin.view(copy, *origin.args, **origin.kwargs)
        if origin.index is not None:
            part = part[origin.index]
        part.copy_(
            moved(
                value,
                value._spec,
                _make_invariant_spec(spec, value._spec.shape),
                "write",
                "implicit",
            )
        )
    return tagged(copy, whole)


def _make_invariant_spec(spec: Spec, shape: Any) -> Spec:
    axes = spec.wire.mesh.names
    invariant = tuple(a for a in axes if not spec.layout.placement(a).is_replicate())
    return spec_of(Layout(tuple(shape), invariant=invariant), spec.wire)
