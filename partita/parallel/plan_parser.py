"""The parser of plans: what a plan says of a model, and what in it does not fit.

All of a plan is read before anything changes, and all that is wrong with it is raised at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from partita.comm import Wire, user_line
from partita.layout import Layout, LayoutError, Partial, Placement, own_placement
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import state_of

from .module_boundary import Inputs, Outputs, Places, arguments, in_range
from .parameters import HeldParameter, find_parameters_and_buffers, has_hooks, plain_name

__all__ = ["ParsedPlan", "Plan"]

Plan = Mapping[str, Places | Inputs | Outputs | Sequence[Inputs | Outputs]]
"""By pattern: placements of the parameters with such names, or the boundaries of such modules.

`*` stands for any characters, dots too; `?` for one; `[ab]` for one of these (as `fnmatch`).
"""


_SHOWN = 40  # problems of a plan in one error


@dataclass
class ParsedPlan:
    """A plan, read for a model.

    Attributes:
        layouts: the layout that each parameter and buffer is to have.
        doors: `(module, name, boundary)` of each module that gets a hook.
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
                        for p in _all_places(boundary)
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
        parameters, buffers = find_parameters_and_buffers(self.model)
        used: set[str] = set()
        for held in parameters:
            matching = [p for p in plan if _matches_any_name(p, held.names)]
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
        for held in buffers:
            if nn.parameter.is_lazy(held.tensor):
                self.wrong.append(f"{held.name} has no shape yet: run the model once before")
                continue
            self._record_layout(held, _find_start_layout(held))
        known = [name for held in parameters for name in held.names]
        for pattern in (*plan, *faulty):
            if pattern not in used and not _matches_any_name(pattern, known):
                self._report_unmatched(pattern, "parameter", known, [h.name for h in buffers])

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
                        arguments(module, its[0] or type(module).__name__, boundary)
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


def _all_places(boundary: Inputs | Outputs) -> Iterable[Places]:
    return [p for p in (*boundary.places, *boundary.named.values()) if p is not None]


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
