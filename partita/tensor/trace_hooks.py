"""Trace hooks: methods that tensors, optimizers and regions call, so that a capture records them.

`HERE.trace` has the hooks of this thread. By default they do what eager code does. A capture
installs its own (`capture.recorder`), so that no package below imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class TraceHooks:
    """Methods that code calls so that a capture can record or replace an action; here they act
    eagerly.
    """

    def is_behind_forward(self) -> bool:
        """True if a backward is traced that the program has not called yet."""
        return False

    def run_without_profiling(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function of partita that calls no user code. Profilers do not record it."""
        return function(*args)

    def replace_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Set `x.data = value`. The value may have another shape. A capture records it."""
        with local_ops():
            _set_data(x, value)

    def may_replace_value(self, x: torch.Tensor) -> bool:
        """True if `replace_value` may be called on `x`."""
        return True

    def alias_data(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns what a captured `x.data` is; None: the alias whose writes count as those of x."""
        return None

    def fill_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Set `x.data = value`, which has the shape of `x`."""
        _set_data(x, value)

    def step(
        self, optimizer: Any, run: Callable[[], Any], originals: Mapping[Any, torch.Tensor]
    ) -> None:
        """Run the update of an element-wise optimizer, so that a capture can record it.

        Args:
            run: a function that makes it.
            originals: maps each tensor that it updates to the parameter that contains it; a
                parameter itself has no entry.
        """
        run()

    def take_step(self, run: Callable[[], Any]) -> Any:
        """Returns `run()`, a step that partita makes; None: torch does, or ZeRO in place."""
        return None

    def limit_bucket(self, nbytes: int) -> int:
        """Returns the most bytes of gradients that are reduced together."""
        return nbytes

    def begin_block(self, gather: Any) -> bool:
        """Begin the forward of a block whose parameters ZeRO gathers.

        A capture records the gather in its graph. Eagerly this does nothing.

        Args:
            gather: an object with methods `begin` and `end`, which record the gather in the graph.

        Returns:
            True if the gather is recorded in the graph.
        """
        return False

    def end_block(self, gather: Any) -> bool:
        """End the forward of a block that `begin_block` began.

        Returns True if the block's gather is recorded in a graph.
        """
        return False

    def swap_contents(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Swap the contents of two tensors as `torch.utils.swap_tensors` does, if this is a
        capture.

        Returns True if it did so. Eagerly it returns False, and the caller swaps them.
        """
        return False

    def is_compiling(self) -> bool:
        """True while torch's own compiler traces this thread."""
        return torch.compiler.is_compiling()

    def run_region(self, again: Callable[[], Any], once: Callable[[], Any]) -> Any:
        """Run a remat region by `again`, so that backward runs it again. A capture calls `once`."""
        return again()

    def choose_control_flow(self, compiled: Any, unrolled: Any) -> Any:
        """Returns the function to run for `torch.cond` of plain tensors: torch's own by default."""
        return compiled

    def region(self) -> AbstractContextManager[None]:
        """Returns a context manager for the calls of a rematerialization region."""
        return nullcontext()

    def keeping(self, keep: bool) -> AbstractContextManager[None]:
        """Returns a context manager in which the remat region saves all results for backward, if
        `keep`.
        """
        return nullcontext()

    def keep(self, x: torch.Tensor) -> None:
        """Make the current remat region save `x` for backward instead of recomputing it."""

    def refuse_budget(self, nbytes: int, title: str) -> None:
        """Raise if a remat region cannot have a memory budget here. Eagerly this does nothing.

        Args:
            nbytes: the budget, in bytes.
            title: the name of the regions.
        """

    def refuse_no_sync(self) -> None:
        """Raise if gradients cannot be accumulated without reduction, as in a capture.

        Eagerly this does nothing.
        """
