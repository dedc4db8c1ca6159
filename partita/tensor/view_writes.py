"""What if a program writes through a view that is none here?

`x[1].fill_(0)`, `x.view(-1).add_(1)`: on one device the result of a view op shares x's memory.
Where a layout had to change to make it, or a rank holds shares of it, it has memory of its own.
Such a copy has a spec of its own that says so (`Spec.as_copy`: the same layout, another identity),
so that no other call pays for asking, and remembers what it was taken from. Written in place, it is
written as a value, and then its place in the tensor that it was taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Layout

from .autograd import moved
from .dtensor import DTensor, tagged
from .spec import Spec, spec_of

__all__ = ["VIEWS", "is_view_of", "mark_copies", "written_through"]

T = torch.Tensor

VIEWS = frozenset(
    """view reshape flatten unflatten ravel transpose permute t movedim unsqueeze squeeze expand
    select narrow diagonal chunk split tensor_split hsplit vsplit dsplit split_with_sizes unbind
    unfold as_strided getitem detach alias real imag view_as_real view_as_complex""".split()
)
"""Ops whose result shares its operand's memory on one device."""


def is_view_of(name: str, args: Any) -> bool:
    """Does op `name` give a view on one device? Indexing does by ints and slices only."""
    name = name.strip("_")
    if name == "getitem":
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(e, (bool, list, torch.Tensor)) for e in entries)
    return name in VIEWS


def mark_copies(out: Any, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Note of each result that it is a copy of a part of `args[0]`, and which."""
    source = args[0]
    if isinstance(out, torch.Tensor):
        return _marked(out, source, (source, func, args[1:], kwargs, None))
    return type(out)(
        [_marked(t, source, (source, func, args[1:], kwargs, i)) for i, t in enumerate(out)]
    )


def _marked(copy: DTensor, source: DTensor, origin: tuple[Any, ...]) -> DTensor:
    if copy is source or "_origin" in copy.__dict__:
        return copy
    spec = copy._spec
    if spec.is_pending and not source._spec.is_pending:
        # The rank that has the place must not share it: its share and the value would be one.
        with Local():
            copy = tagged(copy.clone(), spec)
    copy.__dict__["_origin"] = origin
    copy._spec = spec.as_copy
    return copy


def written_through(write: Callable[..., Any], copy: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Do `write(copy, ...)`, an op in place, and write the result into the tensor behind `copy`."""
    spec = copy._spec
    held = spec_of(spec.layout, spec.wire)
    origin = copy.__dict__.get("_origin")
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
    source, view, rest, named, index = origin
    if view is T.__getitem__:
        source[rest[0]] = value
    else:
        source.copy_(_replaced(source, view, rest, named, index, value))
    return copy


def _replaced(
    source: DTensor, view: Callable[..., Any], rest: Any, named: Any, index: Any, value: DTensor
) -> DTensor:
    """`source` with the part that `view` shows replaced by `value`; both are gathered for it."""
    spec = source._spec
    whole = _whole(spec, spec.shape)
    with Local():
        copy = moved(source, spec, whole, "write", "implicit")
        copy = copy.clone(memory_format=torch.contiguous_format)
        part = view(copy, *rest, **named)
        if index is not None:
            part = part[index]
        part.copy_(moved(value, value._spec, _whole(spec, value._spec.shape), "write", "implicit"))
    return tagged(copy, whole)


def _whole(spec: Spec, shape: Any) -> Spec:
    axes = spec.wire.mesh.names
    invariant = tuple(a for a in axes if not spec.layout.placement(a).is_replicate())
    return spec_of(Layout(tuple(shape), invariant=invariant), spec.wire)
