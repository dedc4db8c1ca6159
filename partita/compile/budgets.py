"""Budgets: how much of a step is made again in backward, so that it takes at most so many bytes.

A step can be rewritten in several forms: at each level of the pass `remat`, with blocks as calls or
inlined. They are tried in one order, whatever the budget, and the first whose predicted peak is
within it is taken; so a larger budget never takes one that comes later, which makes more again.
With blocks as calls a level is chosen in each structure's own program and in the graph around them,
and all blocks of a structure have the same variant. Blocks are inlined where no level of that is
enough: then what is recomputed may go back through several of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from .errors import cannot_be_kept
from .memory.storages import peak_of
from .pass_report import AsCaptured, StepForm
from .passes import Passes, run_passes
from .passes.recompute import cost_of_recompute
from .program import Program
from .section import sections_in

__all__ = ["BudgetSearch"]

P = TypeVar("P", bound=Program)


@dataclass(frozen=True)
class _Tried:
    """A form of a step, and the peak in bytes that is predicted for it."""

    form: StepForm
    peak: int


class BudgetSearch(Generic[P]):
    """The forms of one captured step, each rewritten when those before it take too much."""

    def __init__(
        self,
        captured: AsCaptured[P],
        without: Iterable[str],
        passes: Passes,
    ):
        self._captured, self._without, self._passes = captured, without, passes
        self._untried = self._rewrite_in_order()
        self._least: int | None = None

    def first_within(self, budget: int) -> P:
        """The step in the first form whose predicted peak is at most `budget` bytes.

        Asked again, the budget must be smaller.

        Raises:
            CaptureError: there is none; it tells the least that can be kept.
        """
        for tried, program in self._untried:
            if tried.peak <= budget:
                self._captured.form = tried.form
                return program
        assert self._least is not None
        raise cannot_be_kept(budget, self._least)

    def _rewrite_in_order(self) -> Iterator[tuple[_Tried, P]]:
        """The forms in their order, each with a lower peak than those before, and more made again.

        One that has a lower peak and makes less again, or less of one kind, is left out: for a
        smaller budget less would be made again than for a larger one.
        """
        cost, peak = (0, 0), None
        for tried, program in self._rewrite_all():
            if peak is not None and tried.peak >= peak:
                continue
            its_cost = cost_of_recompute(program.graph.graph)
            if all(a >= b for a, b in zip(its_cost, cost, strict=True)):
                self._least = peak = tried.peak
                cost = its_cost
                yield tried, program

    def _rewrite_all(self) -> Iterator[tuple[_Tried, P]]:
        for in_blocks in (True, False) if self._captured.has_blocks else (False,):
            level, levels = 0, 1
            while level < levels:
                form = StepForm(level, in_blocks)
                program = self._rewrite(form)
                yield _Tried(form, peak_of(program)), program
                level, levels = level + 1, program.levels
            if in_blocks and not sections_in(program.graph.graph):
                return  # they could not stay calls

    def _rewrite(self, form: StepForm) -> P:
        program = self._captured.program(form)
        run_passes(program, self._without, self._passes)
        return program
