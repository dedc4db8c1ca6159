"""Module boundaries: where activations live as a module takes and returns them.

A plan says where weights live, and where activations do: `Inputs` for what a module takes,
`Outputs` for what it returns. Each is an explicit redistribution in a forward hook, whose transpose
runs in backward; the ledger names the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import Any, cast

import torch
from torch import nn

from partita.comm import Wire, user_line, wire_of
from partita.layout import Fix, Layout, LayoutError, Placement, Shard, own_placement
from partita.tensor.arguments import admit
from partita.tensor.dtensor import DTensor, laid_out_as, tagged
from partita.tensor.spec import Spec, spec_of

__all__ = ["Inputs", "Outputs", "Places", "arguments", "in_range", "register_boundary_hook"]

Places = Mapping[str, Placement]
"""Placements by mesh axis. Of an activation, an axis that is not named is left as it is."""


class Inputs:
    """Where the arguments of a module's `forward` live when it runs.

    Args:
        places: one for each positional argument, in order; None leaves an argument as it is.
        named: by the argument's name in `forward`.

    An argument is found however it is passed. A plain tensor is taken as a whole value, as
    everywhere. An axis that is not named is left as it is.
    """

    def __init__(self, *places: Places | None, **named: Places):
        self.places, self.named = places, named

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inputs) and _make_boundary_key(self) == _make_boundary_key(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        each = [str(p and dict(p)) for p in self.places]
        each += [f"{name}={dict(p)}" for name, p in self.named.items()]
        return f"Inputs({', '.join(each)})"


class Outputs:
    """Where what a module's `forward` returns lives: a tensor, or a tuple or list of tensors.

    Args:
        places: one for each tensor that is returned, in order; None leaves one as it is, and ...
            at the end what follows, however many there are.
    """

    def __init__(self, *places: Places | EllipsisType | None):
        self.open = bool(places) and places[-1] is ...
        self.places = cast("tuple[Places | None, ...]", places[:-1] if self.open else places)
        self.named: dict[str, Places] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outputs) and _make_boundary_key(self) == _make_boundary_key(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        said = [str(p and dict(p)) for p in self.places] + ["..."] * self.open
        return f"Outputs({', '.join(said)})"


def _make_boundary_key(boundary: Inputs | Outputs) -> Any:
    listed = [None if p is None else list(p.items()) for p in boundary.places]
    return (
        listed,
        getattr(boundary, "open", False),
        {name: list(p.items()) for name, p in boundary.named.items()},
    )


# -- hooks on a module -----------------------------------------------------------------------------


def register_boundary_hook(
    module: nn.Module, name: str, boundary: Inputs | Outputs, mesh: Any
) -> None:
    """Register the hook that redistributes at a boundary of `module`, called `name` in the ledger.

    Raises:
        ValueError: `forward` has no such argument.
    """
    name = name or type(module).__name__
    if isinstance(boundary, Outputs):
        asked = tuple(None if p is None else tuple(p.items()) for p in boundary.places)
        module.register_forward_hook(_OutputsHook(name, asked, mesh, boundary.open))
    else:
        asked_of = tuple(
            (i, key, f"{name}({key or f'argument {i}'})", tuple(places.items()))
            for i, key, places in arguments(module, name, boundary)
        )
        module.register_forward_pre_hook(_InputsHook(asked_of, mesh), with_kwargs=True)


def arguments(module: nn.Module, name: str, boundary: Inputs) -> list[tuple[int, str, Places]]:
    """`(position, name, places)` of each argument that `boundary` names; position -1: keyword-only.

    Raises:
        ValueError: `forward` has no such argument.
    """
    known = inspect.signature(module.forward).parameters.values()
    ordered = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    more = any(p.kind is p.VAR_POSITIONAL for p in known)
    any_name = any(p.kind is p.VAR_KEYWORD for p in known)
    found = []
    for i, places in enumerate(boundary.places):
        if i >= len(ordered) and not more:
            raise ValueError(
                f"{boundary!r}: forward of {name} takes {len(ordered)} positional arguments: "
                f"{', '.join(ordered) or 'none'}"
            )
        if places is not None:
            found.append((i, ordered[i] if i < len(ordered) else "", places))
    for argument, places in boundary.named.items():
        if argument not in named and not any_name:
            raise ValueError(
                f"{boundary!r}: forward of {name} has no argument {argument}; it has "
                f"{', '.join(named) or 'none'}"
            )
        found.append((ordered.index(argument) if argument in ordered else -1, argument, places))
    return found


Pairs = tuple[tuple[str, Placement], ...]


@dataclass(frozen=True)
class _InputsHook:
    """The hook of `Inputs`. A class, so that a model with such hooks can be pickled."""

    asked: tuple[tuple[int, str, str, Pairs], ...]
    mesh: Any

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new, named, wire = list(args), dict(kwargs), wire_of(self.mesh)
        for i, key, what, places in self.asked:
            if 0 <= i < len(new):
                new[i] = _redistribute_value(new[i], places, wire, what)
            elif named.get(key) is not None:
                named[key] = _redistribute_value(named[key], places, wire, what)
        return tuple(new), named


@dataclass(frozen=True)
class _OutputsHook:
    """The hook of `Outputs`."""

    name: str
    asked: tuple[Pairs | None, ...]
    mesh: Any
    open: bool = False

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        many = isinstance(out, (tuple, list))
        each = list(out) if many else [out]
        fits = len(each) >= len(self.asked) if self.open else len(each) == len(self.asked)
        if not fits:
            raise LayoutError(
                f"{self.name} returned {len(each)} values; its plan speaks of {len(self.asked)}",
                place=user_line(),
                fixes=(Fix("Outputs(...) with one for each", "None leaves one as it is"),),
            )
        wire, what = wire_of(self.mesh), f"result of {self.name}"
        for i, places in enumerate(self.asked):
            if places is not None:
                each[i] = _redistribute_value(each[i], places, wire, what)
        if not many:
            return each[0]
        return type(out)(*each) if hasattr(out, "_fields") else type(out)(each)


def _redistribute_value(value: Any, places: Pairs, wire: Wire, what: str) -> DTensor:
    """`value` with the axes of `places` laid out so, the others as they are. Differentiable.

    Raises:
        LayoutError: no tensor, one of another mesh, or a shard dimension out of range.
    """
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{what} is a {type(value).__name__}, and a plan lays out tensors",
            place=user_line(),
            fixes=(Fix("None in its place", "leaves it as it is"),),
        )
    if not isinstance(value, DTensor):
        admit(value, wire, what)
        value = tagged(value.view_as(value), spec_of(Layout(tuple(value.shape)), wire))
    spec = value._spec
    if spec.wire is not wire:
        raise LayoutError(
            f"{what} is on the mesh {spec.wire.mesh}, its module on {wire.mesh}",
            place=user_line(),
            fixes=(Fix("pt.distribute_tensor(x.full_tensor(), mesh, placements)"),),
        )
    try:
        after = _place_on_axes(spec, places)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error.fact}", place=user_line()) from None
    return value if after is spec else laid_out_as(value, after, what)


@lru_cache(maxsize=4096)
def _place_on_axes(spec: Spec, places: Pairs) -> Spec:
    layout = spec.layout
    for axis, placement in places:
        placement = in_range(placement, layout.shape, axis)
        if layout.placement(axis) != placement:
            layout = layout.put(axis, placement)
    return spec if layout == spec.layout else spec_of(layout, spec.wire)


def in_range(placement: Placement, shape: Sequence[int], axis: str) -> Placement:
    """`placement`, a shard's dimension counted from the front.

    Raises:
        LayoutError: a tensor of this shape has no such dimension.
    """
    placement = own_placement(placement)
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise LayoutError(
            f"Shard({placement.dim}) on axis {axis} is out of range for shape {tuple(shape)}"
        )
    return Shard(dim)
