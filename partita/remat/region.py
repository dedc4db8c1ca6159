"""Regions: `pt.remat` of functions and modules, whose forward runs again in backward.

In eager code a region runs once in forward, and again when backward needs it (`runs`). In a
captured step it only marks nodes of the graph, and the graph pass `remat` recomputes them in
backward.

Regions may share a budget in bytes. They keep nothing in a first step, which is measured. Then they
keep the results that save the most operations (a knapsack).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from partita.comm import Wire, read_autocast_state
from partita.parallel.batch import tensors_in
from partita.parallel.parameters import Blocks, block_modules
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import HERE

from .counters import MemoryCount, MemoryCountMode
from .kept_results import Candidate, choose_kept, make_budget_error
from .runs import ForwardRecord, RecordedCall
from .saved_state import LearnedNames
from .watched_calls import (
    CallMode,
    FunctionKind,
    OneCall,
    Policy,
    RematError,
    TensorProducers,
    Wrapped,
    current_watcher,
    find_call_site,
    make_call_mode,
    make_inputs_key,
    run_from_here,
    watching,
)


class RematRegion(Wrapped):
    """A function, or a module's forward, that runs again in backward. Made by `remat`.

    Attributes:
        policy: decides which results are kept.
        names: the names (`checkpoint_name`) that its runs have given to results so far.
        budget: the budget that it shares with other regions, or None.
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
        """The state of the region's memory budget in this training step; None without a budget."""
        return None if self.budget is None else self.budget.now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return HERE.trace.run_region(
            lambda: self._run_again_in_backward(args, kwargs),
            lambda: _run_marked_region(self.__wrapped__, self.policy, args, kwargs),
        )

    def _run_again_in_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            # torch.compile can compile only torch's own checkpoint.
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


def remat(fn: Any, policy: Any = None, *, blocks: Blocks = None) -> Any:
    """Recomputes the intermediate results of `fn` in backward, instead of keeping them.

    The inputs are kept, and the results that the policy names. See docs/remat.md.

        pt.remat(block)                                         # a module: in place
        fn = pt.remat(fn, policy=[torch.matmul, F.scaled_dot_product_attention, "attention"])

    Args:
        fn: a function, or a module. The forward of a module is wrapped in place; the names of its
            parameters do not change.
        policy: the results to keep.
            None: nothing.
            A list: functions of torch, modules, results of `one_call` and of `pt.compile`,
            `autograd.Function`s, names given by `checkpoint_name`, and `keep_collectives`.
            A function: called with a `Call`, it returns True to keep the result.
            An int: the most bytes that activations may hold at once. The first step measures, and
            later steps keep the most expensive results that fit. A captured step raises an error
            for this; use `pt.compile(step, budget=)`.
        blocks: the modules that are recomputed one by one: modules, or patterns of names. By
            default `fn` as a whole. With a budget: the children of its ModuleLists and Sequentials.

    Returns:
        A function. For a module: the module itself.

    Raises:
        ValueError: the policy names a function whose calls cannot be intercepted.
        RematError: in backward, the recompute makes a call that the first run did not make. Or the
            budget is less than the memory that is needed when nothing is kept.
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


def _remat_module(module: nn.Module, policy: Policy, blocks: Blocks) -> nn.Module:
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
    """Gives `x` a name that policies can use, as `jax.ad_checkpoint.checkpoint_name` does.

    A policy that lists the name keeps `x`. If `x` is a view, it keeps the result that `x` is a view
    of. Outside of `pt.remat` this does nothing.

    Returns:
        `x`.
    """
    run = current_watcher()
    if run is not None:
        run.note_name(x, name)
    return x


# -- a captured step -------------------------------------------------------------------------------


def _run_marked_region(fn: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Any:
    """Run `fn(*args, **kwargs)` as a region of a step that is being captured."""
    recorder = HERE.trace
    if HERE.watcher is not None:  # inside another region, whose policy applies
        with recorder.region():
            return fn(*args, **kwargs)
    with watching(_RegionMarker(policy, recorder)), recorder.region(), CallMode():
        return fn(*args, **kwargs)


class _RegionMarker:
    """The `Watcher` of a region in a captured step, which marks the calls that are kept.

    Attributes:
        policy: the policy of the region.
    """

    def __init__(self, policy: Policy, recorder: Any):
        self.policy, self.recorder = policy, recorder

    def _keeps(self, what: Any, args: Any, kwargs: Any, op: str, name: str | None = None) -> bool:
        inputs = make_inputs_key(args, kwargs, TensorProducers(), [])
        return self.policy.keeps(op, what, (what, find_call_site(), inputs), name, False)

    def _run_marked(self, keep: bool, run: Callable[[], Any]) -> Any:
        if not keep:
            return run()
        # Calls inside it are not watched: their results are kept with the call as a whole.
        with watching(None), self.recorder.keeping(True):
            return run()

    def run_call(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """Runs a call of a torch function, and marks its nodes in the captured graph.

        Args:
            kind: the function, and how regions treat its calls.
            args, kwargs: the arguments of the call.
        """
        keep = self._keeps(kind.func, args, kwargs, kind.op)
        return self._run_marked(keep, partial(kind.func, *args, **kwargs))

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Runs an `autograd.Function`, and marks its nodes in the captured graph.

        Args:
            function, args, kwargs: the function, and the arguments of the call.
            run: makes the call and returns its result.
        """
        return self._run_marked(function in self.policy.functions, run)

    def run_one_call(self, function: OneCall, args: Any, kwargs: Any) -> Any:
        """Runs a function that `one_call` marked, and marks its nodes in the captured graph.

        Args:
            function, args, kwargs: the function, and the arguments of the call.
        """
        keep = self._keeps(function, args, kwargs, function.title)
        return self._run_marked(keep, partial(function.__wrapped__, *args, **kwargs))

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Runs a redistribution, and marks its nodes in the captured graph.

        Args:
            op, reason: the op that needs it, and why. They are not used here.
            what: the redistribution: a plan of moves.
            x: the local tensor that is redistributed.
            run: does it and returns the result.
        """
        keep = self.policy.keeps_redistribution(what, x, find_call_site())
        return self._run_marked(keep, run)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """Keeps `x` for backward if the policy keeps results with this name (`checkpoint_name`)."""
        is_named = self.policy.test is None and name in self.policy.names
        if is_named or (self.policy.test and self._keeps(None, (x,), {}, "", name)):
            self.recorder.keep(x)

    def announce_write(self, t: torch.Tensor) -> None:
        """Ignores the write of `t`, because a capture converts writes to new values."""


# -- budgets in bytes ------------------------------------------------------------------------------


class _BudgetStep:
    """One training step of the regions that share a budget.

    The first step with inputs of a kind keeps nothing and measures all calls. When its last region
    is recomputed, the results that later steps keep are chosen.
    """

    def __init__(self, budget: Budget, wires: list[Wire]):
        self.budget, self.wires = budget, wires
        self.count = MemoryCount()
        self._kept: set[Any] | None = None  # as soon as that is chosen
        self._candidates: dict[Any, Candidate] = {}
        # Forwards are counted, because the ranks choose together. Python frees a forward with an
        # unused result at a different time on each rank.
        self._to_recompute = 0
        self._recomputed = False

    @property
    def measures(self) -> bool:
        """True while the memory of a step is measured and no result is kept."""
        return self._kept is None

    def counting(self) -> AbstractContextManager[Any]:
        """Returns a context manager that counts memory, if this step measures."""
        return MemoryCountMode(self.count) if self.measures else nullcontext()

    def keeps(self, region: Any, event: RecordedCall) -> bool:
        """True if the result of a call is kept instead of recomputed.

        Args:
            region: the `RematRegion`.
            event: the call in this region.
        """
        return self._kept is not None and (id(region), event.key, event.ordinal) in self._kept

    def note_candidate(self, region: Any, event: RecordedCall, nbytes: int) -> None:
        """Records how many bytes it would take to keep a call's result.

        Args:
            region: the `RematRegion`.
            event: the call in this region.
            nbytes: bytes that are added for the call.
        """
        one = self._candidates.setdefault((id(region), event.key, event.ordinal), Candidate())
        one.nbytes += nbytes

    def note_forward(self, forward: ForwardRecord) -> None:
        """Records that the forward of a region has ended, which backward will recompute."""
        forward.is_counted = True
        self._to_recompute += 1

    def note_recompute(self, forward: ForwardRecord, flops_of: dict[RecordedCall, int]) -> None:
        """Records the operations of each call in a recomputation.

        After the last recomputation of the step, it chooses which results later steps keep.

        Args:
            forward: the forward that was recomputed.
            flops_of: the floating-point operations of each call.
        """
        for event, flops in flops_of.items():
            one = self._candidates.get((id(forward.region), event.key, event.ordinal))
            if one is not None:
                one.flops += flops
                one.written += one.nbytes
        self._recomputed = True
        if forward.is_counted:
            forward.is_counted = False
            self._to_recompute -= 1
        if not self._to_recompute:
            self.choose()

    def choose(self) -> None:
        """Chooses which results later steps keep, even if some regions were not recomputed.

        Does nothing if no region was recomputed since the step began.
        """
        if self.measures and self._recomputed:
            self._kept = self._choose_kept()

    def _choose_kept(self) -> set[Any]:
        """Returns what to keep, equal on all ranks, from the largest numbers of any rank."""
        measured = [(c.nbytes, c.flops, c.written) for c in self._candidates.values()]
        numbers = [self.count.peak, *chain.from_iterable(measured)]
        for wire in self.wires:
            numbers = _max_over_ranks(wire, numbers)
        peak, *rest = numbers
        each = [Candidate(*rest[i : i + 3]) for i in range(0, len(rest), 3)]
        budget, keys = self.budget, [*self._candidates]
        if peak > budget.nbytes:
            raise make_budget_error(budget.nbytes, budget.title, peak)
        return {keys[i] for i in choose_kept(each, budget.nbytes - peak)}


def _max_over_ranks(wire: Wire, mine: list[int]) -> list[int]:
    lengths = wire.gather_ints((len(mine),), "how many calls a region has")
    if len(set(lengths)) > 1:
        raise RematError(
            f"ranks make different calls in the regions of a budget: {[n for (n,) in lengths]}",
            reason="what is kept must be the same on every rank",
        )
    return [
        max(values)
        for values in zip(*wire.gather_ints(tuple(mine), "bytes of a region"), strict=True)
    ]


class Budget:
    """A limit in bytes for the activations of all regions of a module or function together.

    The first step keeps nothing and measures its peak. The rest of the budget is then used for the
    results that save the most operations (a knapsack). Kept results add at most their own bytes to
    the peak, so one measurement is enough.

    Attributes:
        nbytes: the most that activations may hold at once.
        title: the name of the module or function.
    """

    def __init__(self, nbytes: int, title: str):
        self.nbytes, self.title = nbytes, title
        self._steps: dict[Any, _BudgetStep] = {}
        self.now: _BudgetStep | None = None

    def __reduce__(self) -> Any:
        return Budget, (self.nbytes, self.title)  # a copy has calls of its own to measure

    def begin(self, args: Any, kwargs: Any, module: nn.Module | None) -> _BudgetStep:
        """Returns the state of the budget for a training step with inputs of this kind.

        The first step with these inputs measures the memory. Later steps use the choice that
        followed from it.

        Args:
            args, kwargs: the arguments of the module or function.
            module: the module; None for a function.
        """
        key = (*make_inputs_key(args, kwargs, TensorProducers(), []), _settings_of_module(module))
        step = self._steps.get(key)
        if step is not None:  # the last step had no backward for some region's result
            step.choose()
        if step is None or step.measures:
            parameters = () if module is None else module.parameters()
            held = [*tensors_in((args, kwargs)), *parameters]
            wires = dict.fromkeys(t._spec.wire for t in held if isinstance(t, DTensor))
            step = self._steps[key] = _BudgetStep(self, [*wires])
        return step


def _settings_of_module(module: nn.Module | None) -> Any:
    return (
        read_autocast_state(),
        None if module is None else tuple(m.training for m in module.modules()),
    )


class _BudgetedFunction(Wrapped):
    """A wrapper of a function, or of a module's forward, whose regions share a budget."""

    def __init__(self, fn: Any, module: nn.Module | None, budget: Budget):
        super().__init__(fn, module)
        self.budget = budget

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        HERE.trace.refuse_budget(budget.nbytes, budget.title)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or budget.now is not None:
            return self.__wrapped__(*args, **kwargs)
        if HERE.watcher is not None:  # inside another region, whose policy applies
            return self.__wrapped__(*args, **kwargs)
        budget.now = budget.begin(args, kwargs, self._module)
        try:
            with budget.now.counting():
                return self.__wrapped__(*args, **kwargs)
        finally:
            budget.now = None
