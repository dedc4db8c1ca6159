"""Which module made the first nan?

Hooks look at what every module returns, and at the gradient that comes back for it. A module is to
blame whose result is not finite though all that it took is; one that was handed a nan is not. The
ranks see their own pieces, so they agree only in `check`: the earliest of all ranks' finds is
raised on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import everyone

from .nested import tensors_in
from .remat import is_recomputing

__all__ = ["NanError", "NanWatch", "detect_nan"]


class NanError(ValueError):
    """A loss or a gradient is not a finite number. Says at which step, and what made it so."""


@dataclass(frozen=True)
class _Find:
    """Something that is not finite.

    Attributes:
        order: how many results the rank had looked at before: equal on all ranks, so the earliest
            find of all ranks has the least.
        step: in which step.
        kind: "nan" or "inf".
        backward: it is a gradient.
        what: where it was found, and what is known of its cause.
    """

    order: int
    step: int
    kind: str
    backward: bool
    what: str


class NanWatch:
    """Watches one model; made by `detect_nan`."""

    def __init__(self, model: nn.Module):
        self._model = type(model).__name__
        self._order = self._step = 0
        self._first: dict[str, _Find] = {}
        self._finite_gradient = ""  # the last module for whose result a finite gradient came
        self._hooks = [
            module.register_forward_hook(partial(self._returned, name or self._model), True)
            if False
            else module.register_forward_hook(
                partial(self._returned, name or self._model), with_kwargs=True
            )
            for name, module in model.named_modules()
        ]

    def check(self, loss: float | torch.Tensor, step: int | None = None) -> None:
        """Raise on every rank if `loss`, or a gradient of this step, is not finite.

        Call it after the backward pass and before the optimizer's step, so that parameters and
        checkpoints stay what they were. Every rank calls it; the ranks agree by one small exchange.

        Args:
            loss: where it is a pending tensor, reading it sends a few bytes.
            step: its number, for the message; the calls of `check` are counted where None.

        Raises:
            NanError: names the step and the first module.
        """
        step = self._step if step is None else step
        value = float(loss)
        mine = dict(self._first)
        first: dict[str, _Find] = everyone().decide(mine, _earliest)
        nan = first.get("nan")
        if not math.isfinite(value) or (nan is not None and nan.backward):
            raise NanError(_message(value, step, step - self._step, first))
        self._step += 1
        self._order = 0
        self._first.clear()  # a mask's inf, or a nan that a loss does not see, is no fault

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> NanWatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    # -- hooks -----------------------------------------------------------------------------------
