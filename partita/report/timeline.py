"""Timelines: what each stream of a step does when, simulated or measured, and as a trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "HasTimeline",
    "TimelineEvent",
    "join_short_events",
    "save_trace",
    "trace_bytes",
    "trace_of",
]


@dataclass(frozen=True)
class TimelineEvent:
    """What a stream does for a while.

    Attributes:
        name: of the node or of the call.
        stream: "compute", or the axes of a collective, such as "dp" or "dp tp".
        start, seconds: since the step began, and for how long.
        kind: of the kernel or of the collective.
        phase: "forward", "backward" or "update".
        source: the user's "file:line".
        nbytes: that a rank sends, or that a kernel reads and writes.
    """

    name: str
    stream: str
    start: float
    seconds: float
    kind: str
    phase: str = ""
    source: str = ""
    nbytes: float = 0.0


class HasTimeline(Protocol):
    """What was simulated or measured.

    Attributes:
        events: of a step on one rank.
        source: where they are from, and what is not in them.
    """

    @property
    def events(self) -> Sequence[TimelineEvent]: ...

    @property
    def source(self) -> str: ...


def trace_of(events: Iterable[TimelineEvent]) -> dict[str, Any]:
    """A timeline as Perfetto (ui.perfetto.dev) and chrome://tracing read it, a thread a stream."""
    numbers: dict[str, int] = {}
    rows = []
    for event in events:
        rows.append(
            {
                "name": f"{event.kind} {event.name}",
                "cat": event.phase,
                "ph": "X",
                "pid": 0,
                "tid": numbers.setdefault(event.stream, len(numbers)),
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
                "args": {"source": event.source, "bytes": round(event.nbytes)},
            }
        )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": stream}}
        for stream, i in numbers.items()
    ]
    return {"traceEvents": [*names, *rows], "displayTimeUnit": "ms"}


def save_trace(events: Iterable[TimelineEvent], path: str | Path) -> None:
    """Write a timeline as JSON that Perfetto opens.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(trace_of(events)), encoding="utf-8")


def trace_bytes(events: Iterable[TimelineEvent]) -> bytes:
    """The same JSON, compressed by gzip, which Perfetto opens too; equal for equal timelines."""
    return gzip.compress(json.dumps(trace_of(events)).encode(), mtime=0)


def join_short_events(events: Sequence[TimelineEvent], most: int) -> list[TimelineEvent]:
    """At most about `most` events on each stream, for a picture.

    What is longer than a `most`-th part of the whole stays as it is. Of what is shorter each such
    part of a stream gets the kind that takes the most of it, as long as all of it together.
    """
    end = max((e.start + e.seconds for e in events), default=0.0)
    if not end:
        return [*events]
    width = end / most
    long = [e for e in events if e.seconds >= width]
    parts: dict[tuple[str, int], list[TimelineEvent]] = {}
    for event in events:
        if 0 < event.seconds < width:
            parts.setdefault((event.stream, int(event.start / width)), []).append(event)
    return sorted([*long, *map(_join_events, parts.values())], key=lambda e: e.start)


def _join_events(events: Sequence[TimelineEvent]) -> TimelineEvent:
    """One event for those of a stream that stand together."""
    if len(events) == 1:
        return events[0]
    by_kind: dict[str, float] = {}
    for event in events:
        by_kind[event.kind] = by_kind.get(event.kind, 0.0) + event.seconds
    kind = max(by_kind, key=by_kind.__getitem__)
    longest = max((e for e in events if e.kind == kind), key=lambda e: e.seconds)
    return TimelineEvent(
        f"{longest.name} and {len(events) - 1} more",
        longest.stream,
        events[0].start,
        sum(e.seconds for e in events),
        kind,
        longest.phase,
        longest.source,
        sum(e.nbytes for e in events),
    )
