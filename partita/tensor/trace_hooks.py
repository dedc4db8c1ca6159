"""Trace hooks: calls that tensors, optimizers and regions make, so that a capture can record them.

`HERE.trace` has the hooks of this thread. By default they do what eager code does. A capture
installs its own (`capture.recorder`), so that no package below imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class TraceHooks:
    """The hooks of this thread.

    Attributes:
        is_tracing: True while the program runs over fake tensors. They have no memory: no value is
            read, and ranks compare nothing. A backward pass belongs to the same graph.
        is_behind_forward: True if a backward is traced that the program has not called yet.
        updates_blocks: True if `step` makes the updates of a model's blocks.
    """

    is_tracing = False
    is_behind_forward = False
    updates_blocks = False

    def run_without_profiling(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function of partita's during which no code of the user's runs."""
        return function(*args)

    def replace_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Set `x.data = value`, which may have another shape."""
        with Local():
            _set_data(x, value)

    def fill_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Set `x.data = value`, which has the shape of `x`."""
        _set_data(x, value)

    def step(
        self, optimizer: Any, run: Callable[[], Any], originals: Mapping[Any, torch.Tensor]
    ) -> None:
        """An elementwise optimizer makes its update.

        Args:
            run: makes it.
            originals: maps each tensor that it updates to the parameter that holds it; a
                parameter itself has no entry.
        """
        run()

    def begin_block(self, gather: Any) -> bool:
        """The forward of a block begins, whose parameters are gathered.

        Args:
            gather: has the methods `begin` and `end`, by which it is a part of the graph.

        Returns:
            True if the gather is a part of the graph.
        """
        return False

    def end_block(self, gather: Any) -> bool:
        """The forward of a block has ended; returns what `begin_block` does."""
        return False

    def keep_missing_gradients(self, ctx: Any) -> None:
        """The forward of an autograd function runs, whose results may get no gradient.

        In eager code it gets zeros then: a rank without a gradient takes part in what the others
        send.
        """

    def swap_contents(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Two tensors exchange their contents (`torch.utils.swap_tensors`); True if it is done."""
        return False

    def region(self) -> AbstractContextManager[None]:
        """Returns a context in which calls belong to a remat region."""
        return nullcontext()

    def keeping(self, keep: bool) -> AbstractContextManager[None]:
        """Returns a context in which the region keeps what is made, if `keep`."""
        return nullcontext()

    def keep(self, x: torch.Tensor) -> None:
        """The region keeps the memory of `x`."""

    def refuse_budget(self, nbytes: int, title: str) -> None:
        """Regions of `title` with a budget of bytes begin; raises where they cannot have one."""
