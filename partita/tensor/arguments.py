"""Arguments of a call.

Which of a call's arguments are the operands of its rule, and where do its tensors stand?
Which of them does it write, and which are copies of what would be views?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partita.comm import Wire, user_line
from partita.layout import Fix, Layout, LayoutError
from partita.rules import parse

from .autograd import moved
from .dtensor import DTensor
from .names import Form, parameter_names
from .plan import Path
from .spec import Spec, make_two_meshes_error, spec_of

__all__ = [
    "all_tensors",
    "changes_layout",
    "copies_among",
    "declared",
    "in_order",
    "numbers_elsewhere",
    "one_wire",
    "operands_of_call",
    "parameters",
    "writes_copy",
    "written_places",
]


def in_order(
    form: Form, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], torch.Tensor | None]:
    """The call under its rule's own names, and the tensor given as `out=`, taken off."""
    if not kwargs:
        return args, kwargs, None
    kwargs = dict(kwargs)
    out = kwargs.pop("out", None)
    names = parameters(form)
    for numpy_name, name in (("axis", "dim"), ("keepdims", "keepdim")):
        if numpy_name in kwargs and numpy_name not in names and name in names:
            kwargs[name] = kwargs.pop(numpy_name)
    for first in ("input", "self", "x", "a", "x1"):
        if first in kwargs and not args and names and first not in names:
            args = (kwargs.pop(first),)
    if "x2" in kwargs and len(args) == 1:
        args = (*args, kwargs.pop("x2"))
    if "input" in names and "input" in kwargs and not args and names[0] == "input":
        args = (kwargs.pop("input"),)
    return args, kwargs, out


def parameters(form: Form) -> tuple[str, ...]:
    rule = form.rule
    assert rule is not None
    if rule.derive is not None:
        return tuple(p.name for p in rule.params)
    return parameter_names(form.func, len(parse(rule.text).terms))


def operands_of_call(
    form: Form, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[Path, Any]]:
    """The values in the places of a fixed sentence's terms."""
    found: list[tuple[Path, Any]] = []
    for i, name in enumerate(parameters(form)):
        if i < len(args):
            found.append(((i,), args[i]))
        else:
            found.append(((name,), kwargs.get(name)))
    return found


def declared(
    form: Form, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], list[tuple[Path, Any]]]:
    """A derived rule's arguments, and the tensors among them in order."""
    rule = form.rule
    assert rule is not None
    positional: list[Any] = []
    named: dict[str, Any] = {}
    tensors: list[tuple[Path, Any]] = []
    i = 0
    for p in rule.params:
        if p.kind is p.VAR_POSITIONAL:
            rest = args[i:]
            flat = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
            # Variadic sizes may come by name: x.reshape(shape=(2, 3)).
            if not rest and "shape" in kwargs:
                flat = kwargs["shape"]
            positional += list(flat)
            tensors += _tensors_at(tuple(range(i, len(args))), rest)
            i = len(args)
        elif p.kind is not p.KEYWORD_ONLY and i < len(args):
            positional.append(args[i])
            tensors += _tensors_at((i,), (args[i],))
            i += 1
        elif p.name in kwargs:
            named[p.name] = kwargs[p.name]
            tensors += _tensors_at((p.name,), (kwargs[p.name],))
    return positional, named, tensors


def _tensors_at(places: Sequence[Any], values: Sequence[Any]) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for place, value in zip(places, values, strict=True):
        if isinstance(value, torch.Tensor):
            found.append(((place,), value))
        elif isinstance(value, (tuple, list)):
            found += [((place, j), v) for j, v in enumerate(value) if isinstance(v, torch.Tensor)]
    return found


def all_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Path, Any]]:
    found = _tensors_at(tuple(range(len(args))), args)
    return found + _tensors_at(tuple(kwargs), tuple(kwargs.values()))


def numbers_elsewhere(op: str, tensors: Sequence[tuple[Path, Any]]) -> dict[Path, torch.Tensor]:
    """The 0-d DTensors that live on another mesh than the others, as plain tensors; by path.

    A norm, a coefficient: a number that every rank holds is the same number on any mesh. Only
    without a gradient, which would have to go back to its own mesh.
    """
    spread = [(path, t) for path, t in tensors if isinstance(t, DTensor)]
    if len({t._spec.wire for _, t in spread}) < 2:
        return {}
    home = next((t for _, t in spread if not _is_number(t)), spread[0][1])._spec.wire
    away = [(path, t) for path, t in spread if t._spec.wire is not home]
    if not all(_is_number(t) for _, t in away):
        return {}
    with torch.no_grad():
        return {
            path: moved(t, t._spec, _make_replicated_spec(t._spec), op, "implicit")
            for path, t in away
        }


def _is_number(t: DTensor) -> bool:
    return not (t._spec.shape or (t.requires_grad and torch.is_grad_enabled()))


def _make_replicated_spec(spec: Spec) -> Spec:
    layout = spec.layout
    return spec_of(Layout(layout.shape, invariant=layout.invariant), spec.wire)


def one_wire(op: str, tensors: Sequence[Any]) -> Wire:
    """The wire of all DTensors among `tensors`. Raises LayoutError if they are on two meshes."""
    wire: Wire | None = None
    for t in tensors:
        if isinstance(t, DTensor):
            if wire is not None and t._spec.wire is not wire:
                raise make_two_meshes_error(op, wire, t._spec.wire)
            wire = t._spec.wire
    if wire is None:
        raise TypeError(f"{op}: no DTensor among the operands")
    return wire


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
    """The error of op `name` in place, which would need `x` in another layout."""
    return LayoutError(
        f"{name} in place: its operand would have to change its layout",
        place=user_line(),
        operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
        reason="a tensor that is written in place keeps its layout, since others may hold it too",
        fixes=(Fix(f"x = x.{name}(...)", "not in place"),),
    )
