"""Regions: `pt.remat` of functions and modules, whose forward is run again in backward.

In eager code a region makes its first run here (`record`) and its second when backward needs it
(`recompute`). In a captured step it marks the nodes that it makes, of which the compiler's pass
`remat` lets backward read copies. Regions that share a budget of bytes keep nothing in a first
step, which is measured; then they keep the results that save the most operations, a knapsack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from partita.comm import Wire, read_autocast_state
from partita.compile.passes.remat import Candidate, choose_kept, make_budget_error
from partita.parallel.batch import tensors_in
from partita.parallel.parameters import block_modules
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import HERE

from .counters import MemoryCount, MemoryCountMode
from .policy import OneCall, Policy, Wrapped
from .record import ForwardRecord, RecordedCall
from .saved_state import LearnedNames
from .watched_calls import (
    CallMode,
    FunctionKind,
    Key,
    RematError,
    TensorOrigins,
    current_watcher,
    find_call_site,
    make_call_mode,
    make_inputs_key,
    run_from_here,
    watching,
)


class RematRegion(Wrapped):
    """A function, or a module's forward, that is run again in backward.

    Attributes:
        policy: says which results are kept.
        names: the named results of its runs so far.
        budget: the budget that it shares, or None.
    """

    def __init__(
        self,
        fn: Callable[..., Any] | None,
        module: nn.Module | None,
        policy: Policy,
        budget: Budget | None = None,
    ):
        super().__init__(fn, module)
        self.policy, self.budget = policy, budget
        self.names = LearnedNames()

    @property
    def budget_step(self) -> Any:
        """The budget's step that is running, planned or measured; None without a budget."""
        return None if self.budget is None else self.budget.now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if HERE.capturing:
            return _run_marked_region(self.__wrapped__, self.policy, args, kwargs)
        if torch.compiler.is_compiling():
            # torch.compile knows torch's checkpoint.
            return torch.utils.checkpoint.checkpoint(
                self.__wrapped__, *args, use_reentrant=False, **kwargs
            )
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        run = HERE.watcher
        if run is None:
            return self._run_first(args, kwargs)
        return run.run_function(self, args, kwargs, lambda: self._run_first(args, kwargs))

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = ForwardRecord(self, args, kwargs)
        with watching(forward), forward.saving_slots(), make_call_mode():
            out = run_from_here(self.__wrapped__, args, kwargs)
        forward.close()
        return out


def remat(fn: Any, policy: Any = None, *, blocks: Sequence[str | nn.Module] | None = None) -> Any:
    """Recompute what `fn` computes when backward needs it, instead of keeping it.

    Kept are the inputs, and the results that the policy names. See docs/remat.md.

        pt.remat(block)                                         # a module: in place
        fn = pt.remat(fn, policy=[torch.matmul, F.scaled_dot_product_attention, "attention"])

    Args:
        fn: a function, or a module, whose forward is wrapped in place: its names stay as they are.
        policy: what is kept.
            None: nothing.
            A list of functions of torch, of modules and what `one_call` made, of functions that
            `pt.compile` made, of `autograd.Function`s, of names given by `checkpoint_name`, and
            `keep_collectives`.
            A function of a `Call`, true for what is kept.
            An int: a budget, the most bytes that activations may hold at once. The first step
            measures, and the most expensive results that fit are kept from then on.
        blocks: the modules that are recomputed one by one, themselves or as patterns of names; by
            default `fn` as a whole, and for a budget the children of its ModuleLists and
            Sequentials.

    Returns:
        A function; for a module the module.

    Raises:
        ValueError: a policy that names what cannot be seen.
        RematError: in backward, where the second run makes a call that the first did not make; or
            where a budget is less than what keeping nothing takes.
    """
    read = Policy(policy)
    if isinstance(fn, nn.Module):
        return _remat_module(fn, read, blocks)
    if not callable(fn):
        raise ValueError(f"remat takes a function or a module, not a {type(fn).__name__}")
    if blocks is not None:
        raise ValueError("blocks are parts of a module, and this is a function")
    if read.budget is None:
        return RematRegion(fn, None, read)
    region = RematRegion(fn, None, Policy(None), budget := Budget(read.budget, Wrapped(fn).title))
    return _BudgetedFunction(region, None, budget)


def _remat_module(
    module: nn.Module, policy: Policy, blocks: Sequence[str | nn.Module] | None
) -> nn.Module:
    budget = None
    chosen = [module]
    if blocks is not None or policy.budget is not None:
        chosen = block_modules(module, blocks) or chosen
    if policy.budget is not None:
        budget = Budget(policy.budget, type(module).__name__)
        policy = Policy(None)
    for block in chosen:
        RematRegion.in_place_of_forward(block, policy, budget)
    if budget is not None:
        _BudgetedFunction.in_place_of_forward(module, budget)
    return module


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give `x` a name by which policies know it, as `jax.ad_checkpoint.checkpoint_name` does.

    A policy that names it keeps the result of the call that made `x` (made its memory, where `x` is
    a view). Elsewhere, and outside of regions, it does nothing.

    Returns:
        `x`.
    """
    run = current_watcher()
    if run is not None:
        run.note_name(x, name)
    return x


# -- a captured step -------------------------------------------------------------------------------


def _run_marked_region(fn: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Any:
    """`fn(*args, **kwargs)` as a region of a step that is being captured."""
    recorder = HERE.recorder
    if HERE.watcher is not None:  # within another region, whose policy holds
        with recorder.region():
            return fn(*args, **kwargs)
    with watching(_RegionMarker(policy, recorder)), recorder.region(), CallMode():
        return fn(*args, **kwargs)


class _RegionMarker:
    """The watcher of a region in a captured step, which marks the calls that are kept.

    Attributes:
        policy: of the region.
    """

    def __init__(self, policy: Policy, recorder: Any):
        self.policy, self.recorder = policy, recorder

    def _make_key(self, what: Any, args: Any, kwargs: Any) -> Key:
        origins = TensorOrigins()
        return what, find_call_site(), make_inputs_key(args, kwargs, origins, [])

    def _run_marked(self, keep: bool, run: Callable[[], Any]) -> Any:
        if not keep:
            return run()
        # Calls within it are not watched: they are kept with the whole.
        with watching(None), self.recorder.keeping(True):
            return run()

    def run_call(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """A function of torch, announced by the mode."""
        key = self._make_key(kind.op, args, kwargs)
        keep = self.policy.keeps(kind.op, kind.func, key, None, False)
        return self._run_marked(keep, lambda: kind.func(*args, **kwargs))

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """An `autograd.Function`."""
        return self._run_marked(function in self.policy.functions, run)

    def run_one_call(self, function: OneCall, args: Any, kwargs: Any) -> Any:
        """A function that `one_call` marked."""
        key = self._make_key(function, args, kwargs)
        keep = self.policy.keeps(function.title, function, key, None, False)
        return self._run_marked(keep, lambda: function.__wrapped__(*args, **kwargs))

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A redistribution."""
        keep = self.policy.keeps_redistribution(what, x, find_call_site())
        return self._run_marked(keep, run)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program gives `x` this name."""
        if self.policy.test is None:
            keep = name in self.policy.names
        else:
            key = self._make_key("", (x,), {})
            keep = self.policy.keeps("", None, key, name, False)
        if keep:
            self.recorder.keep(x)

    def announce_write(self, t: torch.Tensor) -> None:
        """Nothing to note: capture makes values of writes."""


# -- budgets in bytes ------------------------------------------------------------------------------


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
        self.planned: _PlannedStep | None = None

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
        self.planned = _PlannedStep({keys[i] for i in choose_kept(each, budget.nbytes - peak)})
        return self.planned


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

    The first step keeps nothing and measures. What the budget leaves above its peak is filled with
    the results that save the most operations: a knapsack. Kept results add at most their own bytes
    to the peak, so no second measurement is needed.

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
        key = (*make_inputs_key(args, kwargs, TensorOrigins(), []), _settings_of_module(module))
        step = self._steps.get(key)
        if isinstance(step, _MeasuredStep) and step.planned is not None:
            step = self._steps[key] = step.planned
        if not isinstance(step, _PlannedStep):
            parameters = () if module is None else module.parameters()
            held = [*tensors_in((args, kwargs)), *parameters]
            wires = dict.fromkeys(t._spec.wire for t in held if isinstance(t, DTensor))
            step = self._steps[key] = _MeasuredStep(self, [*wires])
        return step


def _settings_of_module(module: nn.Module | None) -> Any:
    return (
        read_autocast_state(),
        None if module is None else tuple(m.training for m in module.modules()),
    )


class _BudgetedFunction(Wrapped):
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
