"""Timelines of steps that are measured: torch's profiler, and the phases that the trainer tells."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import profile, record_function

from partita.comm.device import activities_to_profile, is_of_host
from partita.report import TimelineEvent

__all__ = ["StepTimeline"]

_MARK = "partita at "
_COLLECTIVES = {  # as libraries call them, without blanks
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_PRODUCTS = ("mm", "linear", "matmul", "convolution")
_PHASES = ("forward", "backward", "update")


class StepTimeline:
    """What one rank does in a step, measured. The profiler slows what it measures.

    Attributes:
        events: of the step, when it has run. Streams: "phase"; "compute", the outermost calls of
            torch's operators; "waiting", calls of collectives; "links", their work beside that. On
            a GPU its kernels are "compute" and "links", and what the processor calls is "calls".
    """

    source = (
        "Measured by torch's profiler on rank 0, which slows what it measures; of code that a "
        "compiler generated it knows nothing: that is a gap"
    )

    def __init__(self) -> None:
        self.events: list[TimelineEvent] = []

    def marking(self, tell: Callable[..., None]) -> Callable[..., None]:
        """`tell`, which leaves a mark in the profile when a step goes into another phase."""

        def told(event: str, **facts: Any) -> None:
            if event == "at":
                with record_function(_MARK + facts["phase"]):
                    pass
            tell(event, **facts)

        return told

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, the step runs."""
        with (
            _without_its_log(),
            profile(activities=activities_to_profile(), acc_events=True) as found,
        ):
            yield
        self.events = _events_of([*found.events()])

    def facts(self) -> dict[str, Any]:
        """The event "timeline"."""
        rows = [
            [e.name, e.stream, e.start, e.seconds, e.kind, e.phase, e.source, e.nbytes]
            for e in self.events
        ]
        return {"events": rows, "source": self.source}


@contextmanager
def _without_its_log() -> Iterator[None]:
    """The profiler's own lines on standard error say nothing to who trains."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "5"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before


def _events_of(profiled: list[Any]) -> list[TimelineEvent]:
    marks = sorted(
        (e.time_range.start, e.name.removeprefix(_MARK)) for e in profiled if _is_mark(e)
    )
    work = [e for e in profiled if not _is_mark(e)]
    if not work:
        return []
    began = min([e.time_range.start for e in work] + [at for at, _ in marks])
    ended = max(e.time_range.end for e in work)
    on_gpu = not all(map(is_of_host, work))

    def make(name: str, stream: str, start: float, end: float, kind: str, phase: str) -> Any:
        return TimelineEvent(name, stream, (start - began) / 1e6, (end - start) / 1e6, kind, phase)

    phases = [(at, _name_of_phase(name)) for at, name in marks]
    found = []
    for (start, phase), (end, _) in zip(phases, [*phases[1:], (ended, "")], strict=True):
        if phase in _PHASES:
            found.append(make(phase, "phase", start, end, phase, phase))
    for event in work:
        stream, kind = _stream_of(event, on_gpu), _kind_of(event.name)
        start, end = event.time_range.start, event.time_range.end
        if stream and end > start:
            phase = next((p for at, p in reversed(phases) if at <= start and p in _PHASES), "")
            found.append(make(event.name, stream, start, end, kind, phase))
    return found


def _is_mark(event: Any) -> bool:
    return bool(event.name.startswith(_MARK))


def _name_of_phase(name: str) -> str:
    return "update" if name == "optimizer" else name


def _stream_of(event: Any, on_gpu: bool) -> str:
    """The stream that shows an event; "" for none: what is called within a call that is shown."""
    is_collective = _kind_of(event.name) in _COLLECTIVES.values()
    if not is_of_host(event):
        return "links" if is_collective else "compute"
    if event.is_async:
        return "links" if is_collective else ""
    above = event.cpu_parent
    while above is not None:
        if _is_call(above.name):
            return ""
        above = above.cpu_parent
    if not _is_call(event.name):
        return ""
    if on_gpu:
        return "calls"
    return "waiting" if is_collective else "compute"


def _is_call(name: str) -> bool:
    return name.startswith(("aten::", "c10d::"))


def _kind_of(name: str) -> str:
    plain = name.lower().replace("_", "")
    for text, kind in _COLLECTIVES.items():
        if text in plain and not name.startswith("aten::"):
            return kind
    if "scaled_dot_product" in name or "flash" in plain:
        return "attention"
    return "matmul" if any(part in plain for part in _PRODUCTS) else "other"
