"""Step counts: the numbers in which torch's optimizers count, wider while a step is captured.

In eager a bias correction is reckoned with Python floats. A captured update reckons it with tensors
of no dimension, which torch holds as float32: so while it steps they are float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from partita.tensor.tensor_state import count_writes

__all__ = ["COUNTS", "WidenedCounts", "narrow_counts", "widen_counts"]

COUNTS = ("step", "mu_product")
"""Names in an optimizer's state: the count of steps, and the product of NAdam's momenta."""

WidenedCounts = list[tuple[dict[Any, Any], torch.Tensor, torch.Tensor, int]]
"""For each count: the state that it is in, itself, its float64 copy, and the writes of that."""


def widen_counts(states: Iterable[dict[Any, Any]], exact: set[int] | None) -> WidenedCounts:
    """Replace step counts by float64 copies, until `narrow_counts`.

    Args:
        states: of parameters.
        exact: gets the ids of products, which eager rounds to float32; None for none.

    Returns:
        What `narrow_counts` takes.
    """
    widened: WidenedCounts = []
    for entries in states:
        for name in COUNTS:
            number = entries.get(name)
            if not isinstance(number, torch.Tensor) or number.ndim or number.dtype != torch.float32:
                continue
            if name == "step":
                with torch.inference_mode(False):  # else nobody would count its writes
                    entries[name] = wide = number.double()
                widened.append((entries, number, wide, count_writes(wide)))
            elif exact is not None:
                exact.add(id(number))
    return widened


def narrow_counts(widened: WidenedCounts) -> None:
    """Write float64 counts back into the tensors that they were copied from.

    Those of parameters that were not updated stay as they are: they are no inputs of the step then.
    """
    for entries, number, wide, writes in widened:
        now = entries["step"]
        is_written = now is not wide or count_writes(wide) != writes
        entries["step"] = number.copy_(now) if is_written else number
    widened.clear()
