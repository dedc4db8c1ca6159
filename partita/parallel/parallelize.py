"""Parallelization of a model by a plan: `parallelize`, and the entries of a plan.

A plan maps patterns of names to the layouts of weights, and of activations: `Inputs` for the
arguments of a module, `Outputs` for its results. A forward hook redistributes these activations,
and backward redistributes their gradients. The ledger names the module. The whole plan is checked
before anything changes, and all mistakes in it are raised as one error.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from types import EllipsisType
from typing import Any, cast

import torch
from torch import nn

from partita.comm import Wire, user_line, wire_of
from partita.layout import Fix, Layout, LayoutError, Partial, Placement, own_placement
from partita.tensor.arguments import check_plain_tensor
from partita.tensor.construct import place_buffer, refuse_all_but_modules, spread
from partita.tensor.dtensor import DTensor, as_dtensor, move_local, redistribute_to
from partita.tensor.tensor_state import Spec, make_argument_error, spec_of, state_of
from partita.tensor.uneven_pieces import with_room

from .batch import Places, place_on_axis, remake_sequence
from .parameters import (
    HeldParameter,
    find_hooked,
    find_parameters_and_buffers,
    plain_name,
    replace_tensor,
)
from .wrappers import refuse_wrapped


def parallelize(
    model: nn.Module, device_mesh: Any, plan: Plan | None = None, *, src_data_rank: int | None = 0
) -> nn.Module:
    """Distributes `model` over a mesh, in place: each parameter and buffer becomes a DTensor.

        pt.parallelize(model, mesh, {
            "*.attention.qkv.weight": {"tp": pt.Shard(0)},
            "*.attention.out.weight": {"tp": pt.Shard(1)},
            "*.attention": pt.Inputs({"tp": pt.Replicate()}),
        })

    Parameters that modules share stay shared. Attributes and requires_grad are kept. Parameters on
    the meta device stay there (see `materialize`). Parameters that are on this mesh already keep
    the placements that the plan does not name. So several plans can be applied one after the other.

    Args:
        model: a module.
        device_mesh: a mesh whose axes have names.
        plan: the layouts by pattern of names. `*` matches any characters, including dots.

            - For parameters: placements by mesh axis. Axes that are not named hold the whole value.
              Several axes that split one dimension do so in the given order, outermost first.
              Parameters that no pattern matches, and all buffers, are Replicate.
            - For modules: `Inputs`, `Outputs`, or a list of both. They set the layouts of
              activations.

            `pt.plans` has ready plans.
        src_data_rank: the rank, in mesh order, whose values are sent to all others. None sends
            nothing: the caller guarantees equal values on all ranks.

    Returns:
        `model`. Its parameters are the same objects as before, unless they are on the meta device.
        So an optimizer may be made before or after.

    Raises:
        LayoutError: one error that lists everything wrong, before anything is changed. In the plan:
            a pattern that matches nothing, two patterns that disagree about a parameter, an unknown
            axis, a dimension that a parameter lacks. In the model: a parameter that is on another
            mesh, or that has a gradient or hooks already.
    """
    refuse_all_but_modules(model, "parallelize")
    takes, fix = "a dict by patterns of names as plan", '{"*.weight": {"tp": pt.Shard(0)}}'
    if not isinstance(plan, (Mapping, type(None))):
        raise make_argument_error("parallelize", takes, plan, fix)
    for key in plan or ():
        if not isinstance(key, str):
            raise make_argument_error("parallelize", takes, key, fix)
    wire = wire_of(device_mesh)
    refuse_wrapped(model, "parallelize", wire)
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
        return as_dtensor(torch.empty(spec.local_shape, dtype=x.dtype, device="meta"), spec)
    with torch.no_grad():
        local = move_local(x, x._spec, spec, "parallelize", "explicit")
        return as_dtensor(with_room(local, spec), spec)


# -- boundaries of modules -------------------------------------------------------------------------


class _Boundary:
    """Placements of the arguments or results of a module, one entry for each value."""

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
    """The layouts of the arguments of a module's `forward`.

    Arguments are redistributed to these layouts before `forward` runs, whether they are passed by
    position or by name. A plain tensor counts as a whole value. Mesh axes that are not named keep
    their placement.

    Args:
        places: placements by mesh axis, for each positional argument in order. None leaves an
            argument as it is.
        named: placements by mesh axis, for the argument with this name in `forward`.
    """

    def __init__(self, *places: Places | None, **named: Places):
        self.places, self.named = places, named

    def __repr__(self) -> str:
        each = [str(p and dict(p)) for p in self.places]
        each += [f"{name}={dict(p)}" for name, p in self.named.items()]
        return f"Inputs({', '.join(each)})"


class Outputs(_Boundary):
    """The layouts of the tensor, or of the tensors in a tuple or list, that `forward` returns.

    Args:
        places: placements by mesh axis, for each tensor in order. None leaves a tensor as it is. A
            last `...` leaves all remaining ones as they are.
    """

    def __init__(self, *places: Places | EllipsisType | None):
        self.open = bool(places) and places[-1] is ...
        self.places = cast("tuple[Places | None, ...]", places[:-1] if self.open else places)
        self.named = {}

    def __repr__(self) -> str:
        said = [str(p and dict(p)) for p in self.places] + ["..."] * self.open
        return f"Outputs({', '.join(said)})"


# -- hooks on a module -----------------------------------------------------------------------------

Pairs = tuple[tuple[str, Placement], ...]


def _register_boundary_hook(
    module: nn.Module, name: str, boundary: Inputs | Outputs, mesh: Any
) -> None:
    """Register the hook that redistributes at a boundary of `module`, called `name` in the ledger.

    Raises:
        ValueError: `forward` has no such argument.
    """
    name = name or type(module).__name__
    if isinstance(boundary, Outputs):
        wanted = tuple(None if p is None else tuple(p.items()) for p in boundary.places)
        module.register_forward_hook(_OutputsHook(name, wanted, mesh, boundary.open))
    else:
        arguments = tuple(
            (i, key, f"{name}({key or f'argument {i}'})", tuple(places.items()))
            for i, key, places in _list_arguments(module, name, boundary)
        )
        module.register_forward_pre_hook(_InputsHook(arguments, mesh), with_kwargs=True)


def _list_arguments(
    module: nn.Module, name: str, boundary: Inputs
) -> list[tuple[int, str, Places]]:
    """Returns `(position, name, places)` of each argument in `boundary`; position -1: keyword-only.

    Raises:
        ValueError: `forward` has no such argument.
    """
    known = inspect.signature(module.forward).parameters.values()
    ordered = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kinds = {p.kind for p in known}
    title = f"{boundary!r}: forward of {name}"
    if len(boundary.places) > len(ordered) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        taken = ", ".join(ordered) or "none"
        raise ValueError(f"{title} takes {len(ordered)} positional arguments: {taken}")
    found = [
        (i, ordered[i] if i < len(ordered) else "", places)
        for i, places in enumerate(boundary.places)
        if places is not None
    ]
    for argument, places in boundary.named.items():
        if argument not in named and inspect.Parameter.VAR_KEYWORD not in kinds:
            has = ", ".join(named) or "none"
            raise ValueError(f"{title} has no argument {argument}; it has {has}")
        found.append((ordered.index(argument) if argument in ordered else -1, argument, places))
    return found


@dataclass(frozen=True)
class _InputsHook:
    """The hook of `Inputs`. A class, so that a model with such hooks can be pickled."""

    wanted: tuple[tuple[int, str, str, Pairs], ...]
    mesh: Any

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new, named, wire = list(args), dict(kwargs), wire_of(self.mesh)
        for i, key, what, places in self.wanted:
            if 0 <= i < len(new):
                new[i] = _redistribute_value(new[i], places, wire, what)
            elif named.get(key) is not None:
                named[key] = _redistribute_value(named[key], places, wire, what)
        return tuple(new), named


@dataclass(frozen=True)
class _OutputsHook:
    """The hook of `Outputs`."""

    name: str
    wanted: tuple[Pairs | None, ...]
    mesh: Any
    open: bool = False

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        many = isinstance(out, (tuple, list))
        each = list(out) if many else [out]
        extra = len(each) - len(self.wanted)
        if extra < 0 or (extra and not self.open):
            raise LayoutError(
                f"{self.name} returned {len(each)} values; its plan has {len(self.wanted)}",
                place=user_line(),
                fixes=(
                    Fix(
                        "Outputs(...) with one layout for each value",
                        "None leaves a value as it is",
                    ),
                ),
            )
        wire, what = wire_of(self.mesh), f"result of {self.name}"
        for i, places in enumerate(self.wanted):
            if places is not None:
                each[i] = _redistribute_value(each[i], places, wire, what)
        return remake_sequence(out, each) if many else each[0]


def _redistribute_value(value: Any, places: Pairs, wire: Wire, what: str) -> DTensor:
    """Redistribute `value` on the axes in `places`. Returns the result. Differentiable.

    Raises:
        LayoutError: no tensor, one of another mesh, or a shard dimension out of range.
    """
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{what} is a {type(value).__name__}, and a plan is for tensors",
            place=user_line(),
            fixes=(Fix("None in its place", "leaves it as it is"),),
        )
    if not isinstance(value, DTensor):
        check_plain_tensor(value, wire, what)
        value = as_dtensor(value.view_as(value), spec_of(Layout(tuple(value.shape)), wire))
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
    return value if after is spec else redistribute_to(value, after, what)


@lru_cache(maxsize=4096)
def _place_on_axes(spec: Spec, places: Pairs) -> Spec:
    layout = spec.layout
    for axis, placement in places:
        layout = place_on_axis(layout, axis, placement)
    return spec if layout == spec.layout else spec_of(layout, spec.wire)


# -- entries of a plan -----------------------------------------------------------------------------

Plan = Mapping[str, Places | Inputs | Outputs | Sequence[Inputs | Outputs]]
"""Maps patterns of names to placements of parameters, or to the `Inputs` and `Outputs` of modules.
`*`
matches any characters, dots too; `?` matches one; `[ab]` matches one of these (as `fnmatch`).
"""


_SHOWN = 40  # the most mistakes of a plan that one error lists


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
        # An entry that is wrong itself is only checked for a match.
        places: dict[str, Places | None] = {}
        boundaries: dict[str, list[Inputs | Outputs]] = {}
        for pattern, value in self.plan.items():
            if isinstance(value, Mapping):
                places[pattern] = value if self._check_placements(pattern, [value]) else None
                continue
            each = list(value) if isinstance(value, (list, tuple)) else [value]
            if all(isinstance(one, (Inputs, Outputs)) for one in each):
                said = [p for boundary in each for p in boundary.all_places]
                boundaries[pattern] = each if self._check_placements(pattern, said) else []
            else:
                self.wrong.append(
                    f"{pattern!r}: {value!r} is neither placements by axis, as "
                    '{"tp": Shard(0)}, nor Inputs or Outputs'
                )
        self._read_parameters(places)
        self._read_boundaries(boundaries)

    def raise_problems(self) -> None:
        """Raise one LayoutError that lists all problems of the plan, if there are any."""
        if self.wrong:
            wrong, many = self.wrong[:_SHOWN], len(self.wrong)
            if many > _SHOWN:
                wrong.append(f"and {many - _SHOWN} more")
            do_not = "this does not" if many == 1 else f"these {many} do not"
            raise LayoutError(
                f"parallelize: {do_not} fit",
                place=user_line(),
                operands=tuple(wrong),
                reason="the model was not changed",
            )

    def _check_placements(self, pattern: str, said: Sequence[Places]) -> bool:
        """True if `said` has placements only, on axes of the mesh; otherwise records why not."""
        before = len(self.wrong)
        for axis, placement in (pair for places in said for pair in places.items()):
            if axis not in self.wire.mesh.names:
                self.wrong.append(f"{pattern!r}: the mesh ({self.wire.mesh}) has no axis {axis!r}")
            if not isinstance(own_placement(placement), Placement):
                self.wrong.append(f"{pattern!r}: {placement!r} on {axis!r} is not a placement")
        return len(self.wrong) == before

    # -- parameters --------------------------------------------------------------------------------

    def _read_parameters(self, plan: Mapping[str, Places | None]) -> None:
        """Record the layouts of parameters."""
        held_tensors = find_parameters_and_buffers(self.model)
        for held in held_tensors:
            # Patterns do not apply to buffers.
            matching = [] if held.is_buffer else _find_matching(plan, held.names)
            if nn.parameter.is_lazy(held.tensor):
                self.wrong.append(f"{held.name} has no shape yet: run the model once before")
                continue
            layouts = {p: self._apply_placements(held, p, plan[p]) for p in matching}
            wanted = {p: layout for p, layout in layouts.items() if layout is not None}
            if len(set(wanted.values())) > 1:
                said = " and ".join(f"{p!r} {dict(plan[p] or {})}" for p in wanted)
                self.wrong.append(f"{held.name}: {said} disagree")
            elif wanted or not matching:
                self._record_layout(held, next(iter(wanted.values()), _find_start_layout(held)))
        known = [name for held in held_tensors if not held.is_buffer for name in held.names]
        buffers = [held.name for held in held_tensors if held.is_buffer]
        self._report_unmatched(plan, "parameter", known, buffers)

    def _apply_placements(
        self, held: HeldParameter, pattern: str, places: Places | None
    ) -> Layout | None:
        if places is None:
            return None
        layout = _find_start_layout(held)
        for axis, placement in places.items():
            if isinstance(own_placement(placement), Partial):
                self.wrong.append(
                    f"{pattern!r}: {held.name} cannot be {placement!r} on {axis!r}: a parameter "
                    "is a value, not shares of one"
                )
                return None
            try:
                layout = place_on_axis(layout, axis, placement)
            except LayoutError as error:
                self.wrong.append(f"{pattern!r}: {held.name}: {error.fact}")
                return None
        return layout

    def _record_layout(self, held: HeldParameter, layout: Layout) -> None:
        """Record a tensor's layout, or the problem that its gradient or hooks would be lost."""
        t = held.tensor
        self.layouts.append((held, layout))
        if isinstance(t, DTensor) and t._spec.wire is not self.wire:
            self.wrong.append(
                f"{held.name} is a DTensor on another mesh: {t._spec.layout.brief()} on "
                f"{t._spec.wire.mesh}"
            )
        elif not isinstance(t, DTensor) or t._spec.layout != layout:
            if state_of(t).zero_layouts is not None:
                self.wrong.append(f"{held.name} is sharded by zero already: parallelize before")
                return
            if t.grad is not None:
                self.wrong.append(f"{held.name} has a gradient, which would be lost: zero_grad()")
            if find_hooked([t]):
                self.wrong.append(f"{held.name} has hooks, which would be lost: add them after")

    # -- modules -----------------------------------------------------------------------------------

    def _read_boundaries(self, plan: Mapping[str, list[Inputs | Outputs]]) -> None:
        """Record the modules that get hooks."""
        names: dict[nn.Module, list[str]] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(plain_name(name))
        for module, its in names.items():
            said: dict[type, tuple[str, Inputs | Outputs]] = {}
            for pattern in _find_matching(plan, its):
                for boundary in plan[pattern]:
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
        self._report_unmatched(plan, "module", [n for its in names.values() for n in its], [])

    def _report_unmatched(
        self, plan: Mapping[str, Any], what: str, known: list[str], buffers: list[str]
    ) -> None:
        for pattern in plan:
            if any(fnmatchcase(name, pattern) for name in known):
                continue
            if any(fnmatchcase(name, pattern) for name in buffers):
                problem = "buffers only, which are whole on every rank"
            else:
                near = ", ".join(_find_similar_names(pattern, known))
                problem = f"no {what}; near: {near}" if near else f"no {what}"
            self.wrong.append(f"{pattern!r} matches {problem}")


def _find_start_layout(held: HeldParameter) -> Layout:
    """Returns the layout that a tensor has on this mesh; for a plain tensor Replicate."""
    t = held.tensor
    return t._spec.layout if isinstance(t, DTensor) else Layout(tuple(t.shape))


# -- names -----------------------------------------------------------------------------------------


def _find_matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    return [p for p in patterns if any(fnmatchcase(name, p) for name in names)]


def _find_similar_names(pattern: str, known: Sequence[str]) -> list[str]:
    """Returns up to three known names similar to `pattern`.

    Names that differ only in numbers become one pattern.
    """
    general = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in known)
    # A leading "*." matches anything: only what follows it is compared.
    tail = pattern.removeprefix("*").removeprefix(".")
    parts = tail.count(".") + 1 if tail != pattern else None
    ends: dict[str, str] = {}
    for name in general:
        ends.setdefault(".".join(name.split(".")[-parts:]) if parts else name, name)
    return [ends[end] for end in difflib.get_close_matches(tail, ends, n=3, cutoff=0.6)]
