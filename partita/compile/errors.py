"""Errors of capture: what is raised where a step cannot become one graph, and when to try again."""

from __future__ import annotations

from typing import Protocol

from partita.comm import user_line
from partita.comm.ledger import human
from partita.layout import Fix, LayoutError

__all__ = ["EAGER", "CaptureError", "Holding", "RefusedCall"]

EAGER = Fix('pt.compile(step, fallback="eager")', "runs a step that cannot be captured eagerly")


class Holding(Protocol):
    """Guards of what a step had read when it could not be captured."""

    def hold(self) -> bool:
        """Is everything as it was?"""

    def as_of_now(self) -> Holding:
        """The same guards with the values of now."""


class CaptureError(LayoutError):
    """A step does what a graph cannot express: a branch on data, a tensor that is no input.

    Attributes:
        guards: of what the step had read of Python until then; None where that is not known.
    """

    guards: Holding | None = None


class RefusedCall:
    """A kind of call that could not be captured, and what the step had read of Python by then.

    It is tried again when something of that has changed, but not by the step itself when it runs
    eagerly: what stands there after a run is what the next call is compared to.

    Args:
        guards: of what was read; None where it is not known.
        tries: how many captures have failed; after `_MOST_TRIES` none is made any more.
    """

    def __init__(self, guards: Holding | None, tries: int):
        self._guards = guards if tries < _MOST_TRIES else None
        self.tries = tries

    def holds(self) -> bool:
        """Would another capture read what the last one read?"""
        return self._guards is None or self._guards.hold()

    def note_run(self) -> None:
        """The step has run eagerly."""
        if self._guards is not None and not self._guards.hold():
            self._guards = self._guards.as_of_now()


_MOST_TRIES = 16  # captures of one kind of call, for other values of Python


def not_captured(fact: str, reason: str, *fixes: Fix, place: str | None = None) -> CaptureError:
    """The error to raise; `place` is the user's current line where None."""
    return CaptureError(
        f"capture: {fact}",
        place=user_line() if place is None else place,
        reason=reason,
        fixes=(*fixes, EAGER),
    )


def of_data(op: str, *, place: str | None = None) -> CaptureError:
    """The error to raise where the output shape of `op`, as "aten::nonzero", depends on data."""
    return not_captured(
        f"the shape of {op.removeprefix('aten::')} depends on data",
        "a graph is of tensors whose shapes are known before it runs",
        place=place,
    )


def of_anomalies() -> CaptureError:
    """The error to raise where a backward pass runs in anomaly mode."""
    return not_captured(
        "the step has a backward pass in torch's anomaly mode",
        "a graph has a backward pass of its own, in which nobody looks for NaN",
        Fix("torch.autograd.set_detect_anomaly(False)", "before the step"),
    )


def of_recording(error: Exception) -> CaptureError:
    """The kernels of a step could not be recorded as a CUDA graph."""
    return not_captured(
        "a step's kernels cannot be recorded as a CUDA graph",
        f"{type(error).__name__}: {error}",
        Fix("cuda_graphs=False", "launches them one by one"),
    )


def cannot_be_kept(budget: int, least: int) -> CaptureError:
    """The error to raise where a step needs more bytes than its budget; `least` suffices."""
    return CaptureError(
        f"compile: a budget of {budget} bytes ({human(budget)}) cannot be kept: the step needs "
        f"{least} ({human(least)}) above what it holds between calls",
        reason="what is recomputed is read from somewhere, and gradients and gathered weights stay",
        fixes=(Fix(f"budget={least}", "the least that was found"),),
    )
