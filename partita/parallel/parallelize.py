"""Parallelization of a model by a plan: `parallelize`, and what a plan may say.

A plan says by patterns of names where weights live, and where activations do: `Inputs` for what a
module takes, `Outputs` for what it returns. Each of these is an explicit redistribution in a
forward hook, whose transpose runs in backward; the ledger names the module. All of a plan is read
before anything changes, and all that is wrong with it is raised at once.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from types import EllipsisType
from typing import Any, cast

import torch
from torch import nn

from partita.comm import Wire, user_line, wire_of
from partita.layout import Fix, Layout, LayoutError, Partial, Placement, Shard, own_placement
from partita.tensor.arguments import admit
from partita.tensor.autograd import moved
from partita.tensor.construct import place_buffer, spread
from partita.tensor.dtensor import DTensor, laid_out_as, tagged
from partita.tensor.tensor_state import Spec, spec_of, state_of
from partita.tensor.uneven_pieces import with_room

from .parameters import (
    HeldParameter,
    find_parameters_and_buffers,
    has_hooks,
    plain_name,
    replace_tensor,
)


def parallelize(
    model: nn.Module, device_mesh: Any, plan: Plan | None = None, *, src_data_rank: int | None = 0
) -> nn.Module:
    """Put `model` on a mesh, in place: each parameter and buffer becomes a DTensor.

        pt.parallelize(model, mesh, {
            "*.attention.qkv.weight": {"tp": pt.Shard(0)},
            "*.attention.out.weight": {"tp": pt.Shard(1)},
            "*.attention": pt.Inputs({"tp": pt.Replicate()}),
        })

    Args:
        device_mesh: its axes have names.
        plan: by pattern of names, with `*` for any characters, dots too:

            - for parameters, a placement for each axis that is not to hold the whole. Axes that
              split one dimension do so in the order given, outermost first. A parameter of which
              no pattern speaks, and every buffer, is Replicate on all axes;
            - for modules, `Inputs`, `Outputs` or a list of both: where activations live.

            `pt.plans` has ready ones.
        src_data_rank: the rank, in mesh order, whose values count; they are sent to all. None: the
            ranks are known to hold equal values, and nothing is sent.

    A parameter that several modules share stays one; attributes and requires_grad are kept. One on
    the meta device stays there (see `materialize`). One that is on this mesh already keeps what the
    plan does not name, so that plans can be applied one after the other.

    Returns:
        `model`. Its parameters stay the objects that they are: an optimizer may be made before or
        after, unless they are on the meta device yet.

    Raises:
        LayoutError: everything that does not fit, in one list, before anything is changed: a
            pattern that matches nothing, two that disagree on one parameter, an axis that the mesh
            lacks, a shard dimension that a parameter lacks, a parameter on another mesh, one that
            has a gradient or hooks already.
    """
    wire = wire_of(device_mesh)
    parsed = _ParsedPlan(model, wire, dict(plan or {}))
    parsed.raise_problems()
    for held, layout in parsed.layouts:
        old, spec = held.tensor, spec_of(layout, wire)
        if not isinstance(old, DTensor):
            new = partial(spread, spec=spec, src_data_rank=src_data_rank)
            is_buffer = not isinstance(old, nn.Parameter)
            value = place_buffer(old, wire, new) if is_buffer else new(old)
            replace_tensor(held, value, by="parallelize")
        elif old._spec is not spec:
            replace_tensor(held, _redistribute_parameter(old, spec), by="parallelize")
    for module, name, boundary in parsed.boundaries:
        _register_boundary_hook(module, name, boundary, device_mesh)
    return model


def _redistribute_parameter(x: DTensor, spec: Spec) -> DTensor:
    if x.is_meta:
        return tagged(torch.empty(spec.local_shape, dtype=x.dtype, device="meta"), spec)
    with torch.no_grad():
        local = moved(x, x._spec, spec, "parallelize", "explicit")
        return tagged(with_room(local, spec), spec)


# -- boundaries of modules -------------------------------------------------------------------------

Places = Mapping[str, Placement]
"""Placements by mesh axis. Of an activation, an axis that is not named is left as it is."""


class _Boundary:
    """What a plan says of a module: placements of what comes in or goes out, one for each value."""

    places: tuple[Places | None, ...]
    named: dict[str, Places]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def all_places(self) -> list[Places]:
        return [p for p in (*self.places, *self.named.values()) if p is not None]


class Inputs(_Boundary):
    """Where the arguments of a module's `forward` live when it runs.

    Args:
        places: one for each positional argument, in order; None leaves an argument as it is.
        named: by the argument's name in `forward`.

    An argument is found however it is passed. A plain tensor is taken as a whole value, as
    everywhere. An axis that is not named is left as it is.
    """

    def __init__(self, *places: Places | None, **named: Places):
        self.places, self.named = places, named

    def __repr__(self) -> str:
        each = [str(p and dict(p)) for p in self.places]
        each += [f"{name}={dict(p)}" for name, p in self.named.items()]
        return f"Inputs({', '.join(each)})"


class Outputs(_Boundary):
    """Where what a module's `forward` returns lives: a tensor, or a tuple or list of tensors.

    Args:
        places: one for each tensor that is returned, in order; None leaves one as it is, and ...
            at the end what follows, however many there are.
    """

    def __init__(self, *places: Places | EllipsisType | None):
        self.open = bool(places) and places[-1] is ...
        self.places = cast("tuple[Places | None, ...]", places[:-1] if self.open else places)
        self.named = {}

    def __repr__(self) -> str:
        said = [str(p and dict(p)) for p in self.places] + ["..."] * self.open
        return f"Outputs({', '.join(said)})"


# -- hooks on a module -----------------------------------------------------------------------------


def _register_boundary_hook(
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
            for i, key, places in _list_arguments(module, name, boundary)
        )
        module.register_forward_pre_hook(_InputsHook(asked_of, mesh), with_kwargs=True)


def _list_arguments(
    module: nn.Module, name: str, boundary: Inputs
) -> list[tuple[int, str, Places]]:
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


# -- what a plan says ------------------------------------------------------------------------------

Plan = Mapping[str, Places | Inputs | Outputs | Sequence[Inputs | Outputs]]
"""By pattern: placements of the parameters with such names, or the boundaries of such modules.

`*` stands for any characters, dots too; `?` for one; `[ab]` for one of these (as `fnmatch`).
"""


_SHOWN = 40  # problems of a plan in one error


@dataclass
class _ParsedPlan:
    """A plan, read for a model.

    Attributes:
        layouts: the layout that each parameter and buffer is to have.
        boundaries: `(module, name, boundary)` of each module that gets a hook.
        wrong: all that does not fit, a line each.
    """

    model: nn.Module
    wire: Wire
    plan: dict[str, Any]
    layouts: list[tuple[HeldParameter, Layout]] = field(default_factory=list)
    boundaries: list[tuple[nn.Module, str, Inputs | Outputs]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        places: dict[str, Places] = {}
        boundaries: dict[str, list[Inputs | Outputs]] = {}
        faulty: tuple[list[str], list[str]] = [], []  # of parameters, of modules
        for pattern, value in self.plan.items():
            if isinstance(value, Mapping):
                if self._check_placements(pattern, value):
                    places[pattern] = value
                else:
                    faulty[0].append(pattern)
            else:
                each = [value] if isinstance(value, (Inputs, Outputs)) else value
                if not isinstance(each, (list, tuple)) or not all(
                    isinstance(v, (Inputs, Outputs)) for v in each
                ):
                    self.wrong.append(
                        f"{pattern!r}: {value!r} is neither placements by axis, as "
                        '{"tp": Shard(0)}, nor Inputs or Outputs'
                    )
                else:
                    fits = [
                        self._check_placements(pattern, p)
                        for boundary in each
                        for p in boundary.all_places
                    ]
                    if all(fits):
                        boundaries[pattern] = list(each)
                    else:
                        faulty[1].append(pattern)
        self._read_parameters(places, faulty[0])
        self._read_boundaries(boundaries, faulty[1])

    def raise_problems(self) -> None:
        """Raise LayoutError with all that is wrong, if anything is."""
        if self.wrong:
            wrong, many = self.wrong[:_SHOWN], len(self.wrong)
            if many > _SHOWN:
                wrong.append(f"and {many - _SHOWN} more")
            do_not = "this does not" if many == 1 else f"these {many} do not"
            raise LayoutError(
                f"parallelize: {do_not} fit",
                place=user_line(),
                operands=tuple(wrong),
                reason="the model is as it was",
            )

    def _check_placements(self, pattern: str, places: Places) -> bool:
        """Are these placements, on axes that the mesh has?"""
        before = len(self.wrong)
        for axis, placement in places.items():
            if axis not in self.wire.mesh.names:
                self.wrong.append(f"{pattern!r}: the mesh ({self.wire.mesh}) has no axis {axis!r}")
            if not isinstance(own_placement(placement), Placement):
                self.wrong.append(f"{pattern!r}: {placement!r} on {axis!r} is no placement")
        return len(self.wrong) == before

    # -- parameters --------------------------------------------------------------------------------

    def _read_parameters(self, plan: dict[str, Places], faulty: Sequence[str]) -> None:
        """Note where parameters go. Of `faulty` patterns it is only checked whether they match."""
        held_tensors = find_parameters_and_buffers(self.model)
        used: set[str] = set()
        for held in held_tensors:
            # No pattern speaks of buffers.
            of = () if held.is_buffer else plan
            matching = [p for p in of if _matches_any_name(p, held.names)]
            used.update(matching)
            if nn.parameter.is_lazy(held.tensor):
                self.wrong.append(f"{held.name} has no shape yet: run the model once before")
                continue
            layouts = {p: self._apply_placements(held, p, plan[p]) for p in matching}
            wanted = {p: layout for p, layout in layouts.items() if layout is not None}
            if len(set(wanted.values())) > 1:
                said = " and ".join(f"{p!r} {dict(plan[p])}" for p in wanted)
                self.wrong.append(f"{held.name}: {said} disagree")
            elif wanted or not matching:
                self._record_layout(held, next(iter(wanted.values()), _find_start_layout(held)))
        known = [name for held in held_tensors if not held.is_buffer for name in held.names]
        buffers = [held.name for held in held_tensors if held.is_buffer]
        for pattern in (*plan, *faulty):
            if pattern not in used and not _matches_any_name(pattern, known):
                self._report_unmatched(pattern, "parameter", known, buffers)

    def _apply_placements(self, held: HeldParameter, pattern: str, places: Places) -> Layout | None:
        layout = _find_start_layout(held)
        for axis, placement in places.items():
            placement = own_placement(placement)
            if isinstance(placement, Partial):
                self.wrong.append(
                    f"{pattern!r}: {held.name} cannot be {placement!r} on {axis!r}: a parameter "
                    "is a value, not shares of one"
                )
                return None
            try:
                placement = in_range(placement, layout.shape, axis)
            except LayoutError as error:
                self.wrong.append(f"{pattern!r}: {held.name}: {error.fact}")
                return None
            if layout.placement(axis) != placement:
                layout = layout.put(axis, placement)
        return layout

    def _record_layout(self, held: HeldParameter, layout: Layout) -> None:
        """Note the layout of a tensor, or that its gradient or hooks would be lost."""
        t = held.tensor
        self.layouts.append((held, layout))
        if isinstance(t, DTensor) and t._spec.wire is not self.wire:
            self.wrong.append(
                f"{held.name} is a DTensor on another mesh: {t._spec.layout.brief()} on "
                f"{t._spec.wire.mesh}"
            )
        elif not isinstance(t, DTensor) or t._spec.layout != layout:
            if state_of(t).rest is not None:
                self.wrong.append(f"{held.name} is sharded by zero already: parallelize before")
                return
            if t.grad is not None:
                self.wrong.append(f"{held.name} has a gradient, which would be lost: zero_grad()")
            if has_hooks(t):
                self.wrong.append(f"{held.name} has hooks, which would be lost: add them after")

    # -- modules -----------------------------------------------------------------------------------

    def _read_boundaries(
        self, plan: dict[str, list[Inputs | Outputs]], faulty: Sequence[str]
    ) -> None:
        """As `_read_parameters`, of modules."""
        names: dict[nn.Module, list[str]] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(plain_name(name))
        used: set[str] = set()
        for module, its in names.items():
            said: dict[type, tuple[str, Inputs | Outputs]] = {}
            for pattern, boundaries in plan.items():
                if not _matches_any_name(pattern, its):
                    continue
                used.add(pattern)
                for boundary in boundaries:
                    first = said.setdefault(type(boundary), (pattern, boundary))
                    if first[1] != boundary:
                        self.wrong.append(
                            f"{its[0]}: {first[0]!r} {first[1]} and {pattern!r} {boundary} disagree"
                        )
            for _, boundary in said.values():
                try:
                    if isinstance(boundary, Inputs):
                        _list_arguments(module, its[0] or type(module).__name__, boundary)
                    self.boundaries.append((module, its[0], boundary))
                except ValueError as error:
                    self.wrong.append(str(error))
        known = [n for its in names.values() for n in its]
        for pattern in (*plan, *faulty):
            if pattern not in used and not _matches_any_name(pattern, known):
                self._report_unmatched(pattern, "module", known, [])

    def _report_unmatched(
        self, pattern: str, what: str, known: list[str], others: list[str]
    ) -> None:
        if any(fnmatchcase(name, pattern) for name in others):
            self.wrong.append(f"{pattern!r} matches buffers only, which are whole on every rank")
            return
        near = _find_similar_names(pattern, known)
        hint = f"; near: {', '.join(near)}" if near else ""
        self.wrong.append(f"{pattern!r} matches no {what}{hint}")


def _find_start_layout(held: HeldParameter) -> Layout:
    """The layout that it has on this mesh already; of a plain tensor, replicated on all axes."""
    t = held.tensor
    return t._spec.layout if isinstance(t, DTensor) else Layout(tuple(t.shape))


# -- names -----------------------------------------------------------------------------------------


def _matches_any_name(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _find_similar_names(pattern: str, known: Sequence[str]) -> list[str]:
    """Up to three known names like `pattern`; where they differ in numbers only, as one pattern."""
    general = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in known)
    # A leading "*." matches anything: only what follows it is compared.
    tail = pattern.removeprefix("*").removeprefix(".")
    parts = tail.count(".") + 1 if tail != pattern else None
    ends: dict[str, str] = {}
    for name in general:
        ends.setdefault(".".join(name.split(".")[-parts:]) if parts else name, name)
    return [ends[end] for end in difflib.get_close_matches(tail, ends, n=3, cutoff=0.6)]
