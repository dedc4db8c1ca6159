"""Anomaly detection: finds the module that produced the first NaN of a step.

Hooks check the results of every module, and the gradients of these results. The first module whose
result is not finite although all its inputs are is the cause. Each rank checks its own shards. In
`check` the ranks exchange what they found, and all raise an error that names the earliest find.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction  # for DTensors, and for regions of remat

from partita.comm import control_plane, message
from partita.remat import is_recomputing

from .parallel.batch import tensors_in


class NanError(ValueError):
    """Raised if a loss is not finite or a gradient is NaN. Names the step and the first module."""


@message
@dataclass(frozen=True)
class _Find:
    """A tensor that is not finite, found by one rank.

    Attributes:
        order: the number of tensors that the rank had checked before. All ranks check the same
            tensors in the same order, so the smallest number is the earliest find.
        what: a sentence that says where it was found, and what is known of its cause.
        rank: the rank that found it; set when ranks exchange their finds.
    """

    order: int
    what: str
    rank: int = 0


_Finds = Mapping[tuple[str, str], _Find]
"""The first find for each of ("forward" or "backward", "nan" or "inf")."""


class NanWatch:
    """The result of `detect_nan`: hooks that look for NaN in one model, in a `with` block.

    The end of the `with` block removes the hooks.
    """

    def __init__(self, model: nn.Module):
        self._seen = self._steps = 0
        self._finds: dict[tuple[str, str], _Find] = {}
        self._last_finite = ""  # the module whose result's gradient was the last finite one
        self._hooks = []
        for name, module in model.named_modules():
            title = f"{name} ({type(module).__name__})" if name else type(module).__name__
            hook = partial(self._check_results, title)
            self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def check(self, loss: float | torch.Tensor, step: int | None = None) -> None:
        """Raises on every rank if the loss is not finite, or a gradient of this step is NaN.

        Must be called on all ranks once per step, after backward and before the optimizer's step,
        which would write the NaN into the parameters. It costs one small collective of all ranks.

        Args:
            step: the step's number, for the message; by default counted from 0.

        Raises:
            NanError: names the step, and the first module.
        """
        value = loss.detach().item() if isinstance(loss, torch.Tensor) else loss
        why = "checks a loss (pt.detect_nan)"
        finds = control_plane().decide(why, self._finds, _merge_earliest_finds)
        step = self._steps if step is None else step
        if not math.isfinite(value) or ("backward", "nan") in finds:
            raise NanError(_format_message(value, step, finds))
        self._steps += 1
        self._seen, self._last_finite = 0, ""
        self._finds = {}  # what the loss does not see, such as the -inf of a mask, is no fault

    def remove(self) -> None:
        """Removes the hooks from the model. The `with` block does this at its end."""
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

    def _check_results(
        self, title: str, module: nn.Module, args: Any, kwargs: Any, result: Any
    ) -> None:
        if is_recomputing():
            return
        with DisableTorchFunction(), torch.no_grad():
            for t in tensors_in(result):
                self._seen += 1
                fault = _find_nan_or_inf(t)
                if fault and ("forward", fault) not in self._finds:
                    self._record_culprit(title, module, fault, (args, kwargs))
                if t.requires_grad:
                    t.register_hook(partial(self._came_back, title))

    def _record_culprit(self, title: str, module: nn.Module, fault: str, taken: Any) -> None:
        if any(_find_nan_or_inf(t) for t in tensors_in(taken)):
            return
        what = f"the first {fault} is in the result of {title}, whose inputs had none"
        spoilt = [name for name, p in module.named_parameters() if _find_nan_or_inf(p)]
        if spoilt:
            what += f"; its {spoilt[0]} is not finite, since an earlier step"
        elif next(module.children(), None) is not None:
            what += ": not made by a module in it, but by its own forward"
        self._finds["forward", fault] = _Find(self._seen, what)

    def _came_back(self, title: str, gradient: torch.Tensor) -> None:
        with DisableTorchFunction(), torch.no_grad():
            self._seen += 1
            fault = _find_nan_or_inf(gradient)
        if not fault:
            self._last_finite = title
        elif ("backward", fault) not in self._finds:
            what = f"the first {fault} gradient is that of the result of {title}"
            if self._last_finite:
                what += f"; that of the result of {self._last_finite}, just before, is finite"
            self._finds["backward", fault] = _Find(self._seen, what)


def detect_nan(model: nn.Module) -> NanWatch:
    """Finds the module that produces the first NaN of a step, in forward or in backward.

    Works with any model: plain, parallel, sharded, recomputed. It reads each result and each
    gradient once more, and on a GPU waits for them. Use it to find a fault, not in every run. It
    returns a `NanWatch`, which has hooks on all modules until the `with` block ends.

        with pt.detect_nan(model) as watch:
            for step, (x, y) in enumerate(batches):
                loss = loss_of(model(x), y)
                loss.backward()
                watch.check(loss, step)  # NanError names the step and the module
                optimizer.step()
    """
    return NanWatch(model)


def _find_nan_or_inf(t: torch.Tensor) -> str:
    """Returns "nan" or "inf" if this rank's piece contains one, else ""."""
    if not (t.is_floating_point() or t.is_complex()) or t.is_meta:
        return ""
    total = t.detach().sum()  # one pass without a copy; a sum may overflow, so look twice
    if torch.isfinite(total):
        return ""
    if t.isnan().any():
        return "nan"
    return "inf" if t.isinf().any() else ""


def _merge_earliest_finds(finds: list[_Finds]) -> Sequence[_Finds]:
    first: dict[tuple[str, str], _Find] = {}
    for rank, of_rank in enumerate(finds):
        for kind, find in of_rank.items():
            if kind not in first or find.order < first[kind].order:
                first[kind] = _Find(find.order, find.what, rank)
    return [first] * len(finds)


def _format_message(loss: float, step: int, finds: _Finds) -> str:
    fact = f"the loss of step {step} is {loss}"
    if math.isfinite(loss):
        fact = f"a gradient of step {step} is nan"
    named = [find for (way, _), find in finds.items() if way == "forward"]
    if not named:
        named = [find for (way, _), find in finds.items() if way == "backward"]
        if not math.isfinite(loss):
            fact += ", though every module gave a finite result: code after the model produced it"
    named.sort(key=lambda find: find.order)
    return "\n  ".join([fact, *(f"{find.what} (on rank {find.rank})" for find in named)])
