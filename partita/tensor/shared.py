"""What does a call share memory with: what does it write, and is its result a view?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partita.comm import user_line
from partita.layout import Fix, LayoutError

from .arguments import all_tensors
from .dtensor import DTensor
from .names import Form
from .plan import Path
from .view_writes import is_view_of

__all__ = [
    "changes_layout",
    "copies_among",
    "gives_view",
    "writes_copy",
    "written_places",
]


def gives_view(form: Form, args: Sequence[Any]) -> bool:
    """Would the result share its operand's memory on one device?"""
    if form.inplace or not args or not isinstance(args[0], DTensor):
        return False
    if form.func is torch.nn.functional.unfold:  # Tensor.unfold is a view, this one copies
        return False
    return is_view_of(form.name, args)


def copies_among(tensors: Sequence[tuple[Path, Any]]) -> tuple[Path, ...]:
    """Where the operands stand that are copies of what would be views on one device."""
    return tuple(path for path, t in tensors if isinstance(t, DTensor) and t._spec.is_copy)


def writes_copy(form: Form, args: Sequence[Any]) -> bool:
    """Is this an op in place on a copy of what would be a view on one device?"""
    first = args[0] if args else None
    return form.inplace and isinstance(first, DTensor) and first._spec.is_copy


def written_places(form: Form, args: Sequence[Any], kwargs: dict[str, Any]) -> set[Path]:
    """Where the operands stand that the op writes."""
    places = {w.path(args, kwargs) for w in form.writes} | ({(0,)} if form.inplace else set())
    return {path for path, _ in all_tensors(args, kwargs) if path[:1] in places}


def changes_layout(name: str, x: DTensor) -> LayoutError:
    return LayoutError(
        f"{name} in place: its operand would have to change its layout",
        place=user_line(),
        operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
        reason="a tensor that is written in place keeps its layout, since others may hold it too",
        fixes=(Fix(f"x = x.{name}(...)", "not in place"),),
    )
