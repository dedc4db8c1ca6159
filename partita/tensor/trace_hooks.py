"""Trace hooks: methods that eager code calls at certain actions, so that a capture can record them.

`HERE.trace` has the hooks of this thread. By default they do what eager code does. A capture
installs its own (`capture.recorder`), so that tensors, optimizers and remat regions need not import
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class TraceHooks:
    """Actions that a capture records in its graph. The methods here are for eager code.

    Tensors, optimizers and remat regions call them as `HERE.trace`; a capture overrides them.
    """

    def is_behind_forward(self) -> bool:
        """True while a capture traces a backward that the program's caller runs later, or never."""
        return False

    def run_without_profiling(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`. The function calls no user code.

        A capture turns its profile function off while it runs.
        """
        return function(*args)

    def replace_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Set `x.data = value`. The value may have another shape. A capture records it."""
        with local_ops():
            _set_data(x, value)

    def alias_data(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor that `x.data` is within a capture; None in eager code."""
        return None

    def fill_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Set `x.data = value`, which has the shape of `x`.

        A capture copies `value` into `x` instead, if the step made `x`.
        """
        _set_data(x, value)

    def step(
        self, optimizer: Any, run: Callable[[], Any], originals: Mapping[Any, torch.Tensor]
    ) -> None:
        """Runs the update of an element-wise optimizer. A capture may split it by blocks.

        Args:
            optimizer: the optimizer, or the object that updates.
            run: a function that makes the update.
            originals: maps an updated tensor to the parameter that it is a part of. A parameter
                that is updated itself has no entry.
        """
        run()

    def take_step(self, run: Callable[[], Any]) -> Any:
        """Makes an optimizer's step in a capture: returns `run()`. In eager code returns None."""
        return None

    def limit_bucket(self, nbytes: int) -> int:
        """Returns the most bytes of gradients that one all-reduce may join: `nbytes` in eager code.

        A capture returns -1: nothing is joined, because a graph pass does it later.
        """
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

        Args:
            gather: the object that was passed to `begin_block`.
        """
        return False

    def swap_contents(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Swaps the contents of the tensors `one` and `other` in a capture, and returns True.

        In eager code it does nothing and returns False: the caller uses `torch.utils.swap_tensors`.
        """
        return False

    def is_compiling(self) -> bool:
        """True while torch's own compiler traces this thread."""
        return torch.compiler.is_compiling()

    def run_region(self, again: Callable[[], Any], once: Callable[[], Any]) -> Any:
        """Runs a remat region: returns `again()` in eager code.

        A capture returns `once()` instead, because its graph decides what is recomputed.

        Args:
            again: runs the region so that backward can run it again.
            once: runs the region, and marks its nodes in the graph.
        """
        return again()

    def choose_control_flow(self, compiled: Any, unrolled: Any) -> Any:
        """Returns the function that runs `torch.cond` and similar calls on plain tensors.

        In eager code that is `compiled`, torch's own. A capture may return `unrolled`, which runs
        as ordinary calls.
        """
        return compiled

    def region(self, reads_again: bool = False) -> AbstractContextManager[None]:
        """Returns a context manager for a remat region. A capture marks the nodes made inside.

        Args:
            reads_again: True if eager code runs the region again with the values that exist in
                backward.
        """
        return nullcontext()

    def keeping(self, keep: bool) -> AbstractContextManager[None]:
        """Returns a context manager. If `keep`, results made inside are saved, not recomputed."""
        return nullcontext()

    def keep(self, x: torch.Tensor) -> None:
        """Save `x` for backward, where the current remat region would recompute it."""

    def refuse_budget(self, nbytes: int, title: str) -> None:
        """Raise if a remat region cannot have its own memory budget, as in a capture.

        Args:
            nbytes: the budget, in bytes.
            title: the name of the regions.
        """

    def refuse_no_sync(self) -> None:
        """Raise if gradients cannot be accumulated without reduction, as in a capture.

        Eagerly this does nothing.
        """
