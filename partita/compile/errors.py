"""Errors of capture: what is raised where a step cannot become one graph?"""

from __future__ import annotations

from typing import Protocol

from partita.comm import user_line
from partita.comm.ledger import human
from partita.layout import Fix, LayoutError

__all__ = ["EAGER", "CaptureError", "Holding"]

EAGER = Fix('pt.compile(step, fallback="eager")', "runs a step that cannot be captured eagerly")


class Holding(Protocol):
    """What a step had read when it could not be captured, and whether it is still so: guards."""

    def hold(self) -> bool:
        """Is everything as it was?"""

    def as_now(self) -> Holding:
        """The same of what is there now."""


class CaptureError(LayoutError):
    """A step does what a graph cannot say: a branch on data, a tensor from nowhere.

    Attributes:
        guards: what the step had read of Python until then; None where that is not known.
    """

    guards: Holding | None = None


def not_captured(fact: str, reason: str, *fixes: Fix, place: str | None = None) -> CaptureError:
    """The error to raise; `place` is the user's line where None."""
    return CaptureError(
        f"capture: {fact}",
        place=user_line() if place is None else place,
        reason=reason,
        fixes=(*fixes, EAGER),
    )


def of_data(op: str, *, place: str | None = None) -> CaptureError:
    """The error to raise where `op`, as "aten::nonzero", makes what has no shape beforehand."""
    return not_captured(
        f"the shape of {op.removeprefix('aten::')} depends on data",
        "a graph is of tensors whose shapes are known before it runs",
        place=place,
    )


def of_anomalies() -> CaptureError:
    """The error to raise where a backward pass is to be watched for NaN."""
    return not_captured(
        "the step has a backward pass in torch's anomaly mode",
        "a graph has a backward pass of its own, in which nobody looks for NaN",
        Fix("torch.autograd.set_detect_anomaly(False)", "before the step"),
    )


def cannot_be_kept(budget: int, least: int) -> CaptureError:
    """The error to raise where a step needs more than its budget; `least` is what it needs."""
    return CaptureError(
        f"compile: a budget of {budget} bytes ({human(budget)}) cannot be kept: the step needs "
        f"{least} ({human(least)}) above what it holds between calls",
        reason="what is recomputed is read from somewhere, and gradients and gathered weights stay",
        fixes=(Fix(f"budget={least}", "the least that was found"),),
    )
