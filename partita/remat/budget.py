"""Budgets: which results are kept, so that the peak of memory stays within a number of bytes and
the least is recomputed.

The first step keeps nothing and measures: the peak, the bytes of each call's result, and the
operations of its recompute. What the budget leaves above that peak is filled with the results that
save the most operations: a knapsack. Kept results add at most their own bytes to the peak, so no
second measurement is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from partita.comm import Wire, read_autocast_state
from partita.compile.passes.remat import Candidate, choose_kept, make_budget_error
from partita.parallel.nested_tensors import tensors_in
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import HERE

from .call_key import TensorOrigins, make_argument_key
from .calls import RecordedCall
from .errors import RematError
from .live_memory import MemoryCount, MemoryCountMode
from .record import ForwardRecord
from .wrapped import Wrapped

__all__ = ["Budget", "BudgetedFunction"]


class _PlannedStep:
    """A step whose inputs are like those of a measured one: what was chosen is kept."""

    measures = False

    def __init__(self, kept: set[Any]):
        self.kept = kept

    def keeps(self, region: Any, event: RecordedCall) -> bool:
        return (id(region), event.key, event.ordinal) in self.kept


class _MeasuredStep:
    """A step in which nothing is kept and all calls are measured."""

    measures = True

    def __init__(self, budget: Budget, wires: list[Wire]):
        self.budget, self.wires = budget, wires
        self.count = MemoryCount()
        self.candidates: dict[Any, Candidate] = {}
        self.forwards: weakref.WeakSet[ForwardRecord] = weakref.WeakSet()
        self.pending = 0
        self.plan: _PlannedStep | None = None

    def counting(self) -> AbstractContextManager[Any]:
        return MemoryCountMode(self.count)

    def keeps(self, region: Any, event: RecordedCall) -> bool:
        return False

    def note_candidate(self, region: Any, event: RecordedCall, nbytes: int) -> None:
        one = self.candidates.setdefault((id(region), event.key, event.ordinal), Candidate())
        one.nbytes += nbytes

    def began(self, forward: ForwardRecord) -> None:
        self.forwards.add(forward)

    def recomputed(self, forward: ForwardRecord, flops_of: dict[RecordedCall, int]) -> None:
        for event, flops in flops_of.items():
            key = (id(forward.region), event.key, event.ordinal)
            if key in self.candidates:
                self.candidates[key].flops += flops
                self.candidates[key].written += self.candidates[key].nbytes
        self.forwards.discard(forward)
        if not any(f.complete and f.saved for f in self.forwards):
            self.decide()

    def decide(self) -> _PlannedStep:
        """Choose what to keep; all ranks alike, by the largest numbers of any rank."""
        keys = list(self.candidates)
        each = [self.candidates[k] for k in keys]
        told = [self.count.peak]
        for c in each:
            told += [c.nbytes, c.flops, c.written]
        for wire in self.wires:
            told = _max_over_ranks(wire, told)
        peak, *rest = told
        each = [Candidate(*rest[3 * i : 3 * i + 3]) for i in range(len(each))]
        budget = self.budget
        if peak > budget.nbytes:
            raise make_budget_error(RematError, budget.nbytes, budget.title, peak)
        self.plan = _PlannedStep({keys[i] for i in choose_kept(each, budget.nbytes - peak)})
        return self.plan


def _max_over_ranks(wire: Wire, mine: list[int]) -> list[int]:
    lengths = wire.gather_ints((len(mine),))
    if len(set(lengths)) > 1:
        raise RematError(
            f"ranks make different calls in the regions of a budget: {[n for (n,) in lengths]}",
            reason="what is kept must be the same on every rank",
        )
    return [max(values) for values in zip(*wire.gather_ints(tuple(mine)), strict=True)]


class Budget:
    """A number of bytes that the regions of one module, or one function, share.

    Attributes:
        nbytes: the most that activations may hold at once.
        title: the name of the module or function.
    """

    def __init__(self, nbytes: int, title: str):
        self.nbytes, self.title = nbytes, title
        self._steps: dict[Any, _PlannedStep | _MeasuredStep] = {}
        self.now: _PlannedStep | _MeasuredStep | None = None

    def __reduce__(self) -> Any:
        return Budget, (self.nbytes, self.title)  # a copy has calls of its own to measure

    def begin(
        self, args: Any, kwargs: Any, module: nn.Module | None
    ) -> _PlannedStep | _MeasuredStep:
        """The step for these inputs: measured the first time, planned from then on."""
        held = list(tensors_in((args, kwargs)))
        key = (
            make_argument_key(args, TensorOrigins(), []),
            make_argument_key(kwargs, TensorOrigins(), []),
            _settings_of_module(module),
        )
        step = self._steps.get(key)
        if isinstance(step, _MeasuredStep) and step.plan is not None:
            step = self._steps[key] = step.plan
        if not isinstance(step, _PlannedStep):
            parameters = () if module is None else module.parameters()
            step = self._steps[key] = _MeasuredStep(self, _find_wires([*held, *parameters]))
        return step


def _settings_of_module(module: nn.Module | None) -> Any:
    return (
        read_autocast_state(),
        None if module is None else tuple(m.training for m in module.modules()),
    )


def _find_wires(tensors: Iterable[torch.Tensor]) -> list[Wire]:
    return list(dict.fromkeys(t._spec.wire for t in tensors if isinstance(t, DTensor)))


class BudgetedFunction(Wrapped):
    """Stands for the forward of a module whose regions share a budget, or for one function."""

    def __init__(self, fn: Any, module: nn.Module | None, budget: Budget):
        super().__init__(fn, module)
        self.budget = budget

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        if HERE.capturing and HERE.watcher is None:  # the compiler measures
            with HERE.recorder.sharing(budget):
                return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or budget.now is not None:
            return self.__wrapped__(*args, **kwargs)
        if HERE.watcher is not None:  # within another region, whose policy holds
            return self.__wrapped__(*args, **kwargs)
        budget.now = step = budget.begin(args, kwargs, self._module)
        try:
            with step.counting() if isinstance(step, _MeasuredStep) else nullcontext():
                return self.__wrapped__(*args, **kwargs)
        finally:
            budget.now = None
