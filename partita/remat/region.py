"""`pt.remat`: functions and modules whose forward is run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from partita.parallel.blocks import block_modules
from partita.tensor.tensor_state import HERE

from .budget import Budget, BudgetedFunction
from .call_key import run_from_here
from .calls import SavedSlot
from .modes import make_call_mode
from .names import LearnedNames
from .policy import Policy
from .recompute import Recomputation
from .record import ForwardRecord
from .wrapped import Wrapped

__all__ = ["RematRegion", "checkpoint_name", "remat"]


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
    def plan(self) -> Any:
        """The budget's step that is running, planned or measured; None without a budget."""
        return None if self.budget is None else self.budget.now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if HERE.capturing:
            from .in_graph import run_marked_region

            return run_marked_region(self.__wrapped__, self.policy, args, kwargs)
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
        return run.run_region(self, args, kwargs, lambda: self._run_first(args, kwargs))

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = ForwardRecord(self, args, kwargs)
        mode = make_call_mode()
        before, HERE.watcher = HERE.watcher, forward
        try:
            with forward.saving_slots(), mode or nullcontext():
                out = run_from_here(self.__wrapped__, args, kwargs)
        finally:
            HERE.watcher = before
        forward.close()
        return out

    def recompute(self, forward: ForwardRecord, slot: SavedSlot) -> None:
        """Run the region again, of which `forward` is the first run, to fill `slot`."""
        recomputation = Recomputation(forward)
        recomputation.run()
        if slot.value is None:
            forward.empty()
            raise recomputation.make_missing_call_error(slot.event)


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
    return BudgetedFunction(region, None, budget)


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
        BudgetedFunction.in_place_of_forward(module, budget)
    return module


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give `x` a name by which policies know it, as `jax.ad_checkpoint.checkpoint_name` does.

    A policy that names it keeps the result of the call that made `x` (made its memory, where `x` is
    a view). Elsewhere, and outside of regions, it does nothing.

    Returns:
        `x`.
    """
    compiling = torch.compiler.is_compiling() and not HERE.capturing
    run = None if compiling else HERE.watcher
    if run is not None:
        run.note_name(x, name)
    return x
