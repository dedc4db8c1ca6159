"""Facts of a training run, as a report shows them: from its log, and from the timeline of a step.

A log has one event per line, such as a step with its loss, which is checked when it is read. A
timeline has the kernels and collectives on each stream, simulated or measured, and can be written
as a trace.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from partita.layout import Layout, Mesh

_EVENT = '{"event": '  # the beginning of a line of a log


@dataclass
class RunFacts:
    """All that a report shows about one training run.

    Attributes:
        name: the name in the report.
        options: the options of the run, by flag.
        about: facts about its model and data, reported when it was ready.
        steps: "step", "loss", "seconds", "tokens_per_second" and "nbytes" of each step, and "mfu"
            if the machine's peak is known.
        layouts: the name of each parameter, its layout and its mesh as text, and its bytes on a
            rank.
        moves: for each line of the program that sends in a step: "source", "kind", "axes",
            "reason", "nbytes" of a rank, "count".
        memory: the memory of a captured step: "places", "held" (bytes by class), "live" (by class,
            the bytes at each place), "holders" (at the peak: "source", "name", "kind", "nbytes").
        passes: "name", "promise", "did" of each pass, and (before, after) of "collectives", "sent"
            and "peak".
        timeline: the events of a step on one rank, by stream.
        timeline_source: where the timeline comes from, and what it leaves out.
        figures: other numbers: names, amounts, and a remark on each.
        sample: text that the model generated.
        began: the time of the last start, in seconds since 1970; None if unknown.
        stopped: the reason why it ended before its last step, if reported.
        notes: remarks on its log, such as a line that is cut off.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    layouts: list[list[Any]] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    passes: list[dict[str, Any]] = field(default_factory=list)
    sample: str = ""
    timeline: list[TimelineEvent] = field(default_factory=list)
    timeline_source: str = ""
    figures: list[tuple[str, str, str]] = field(default_factory=list)
    began: float | None = None
    stopped: str = ""
    notes: list[str] = field(default_factory=list)

    def record_event(self, event: str, facts: dict[str, Any]) -> None:
        """Adds one event to these facts. A step replaces those with its number or a later one."""
        if event == "begin":
            self.options, self.began, self.stopped = facts["options"], facts.get("time"), ""
        elif event == "ready":
            self.about = facts
        elif event == "step":
            while self.steps and self.steps[-1]["step"] >= facts["step"]:
                self.steps.pop()  # the run was resumed before this step
            self.steps.append(facts)
        elif event == "timeline":
            self.timeline = [TimelineEvent(*row) for row in facts["events"]]
            self.timeline_source = facts["source"]
        elif event == "sample":
            self.sample = facts["prompt"] + facts["text"]
        for attribute, name in _FIELDS_OF_EVENT.get(event, {}).items():
            setattr(self, attribute, facts[name])


_FIELDS_OF_EVENT = {
    "layouts": {"layouts": "parameters"},
    "moves": {"moves": "moves"},
    "graph": {"memory": "memory", "passes": "passes"},
    "stopped": {"stopped": "message"},
}
"""For each event, attributes of a run and the names of their values in the event."""


def read_logs(paths: Sequence[Path]) -> list[RunFacts]:
    """Reads the logs `paths` of several runs, and gives the runs distinct names.

    Raises:
        ValueError: a line is not an event of a run's log, or a log has no step.
        OSError: a file cannot be read.
    """
    runs = [read_log(path) for path in paths]
    whole = [(*path.absolute().parent.parts, path.stem) for path in paths]
    for run, mine in zip(runs, whole, strict=True):
        # As many folders as it takes: two runs often have logs of one name.
        others = [parts for parts in whole if parts != mine]
        last = range(1, len(mine))
        count = next((n for n in last if all(o[-n:] != mine[-n:] for o in others)), len(mine))
        run.name = "/".join(mine[-count:])
    return runs


def read_log(path: Path) -> RunFacts:
    """Reads the log `path` of `partita train --log`, and returns its facts about the run.

    A run that was killed, or that still writes, may leave an incomplete line. The line is skipped
    if it is the last one, or the last one before a resume, and `notes` mentions it.

    Raises:
        ValueError: a line is not an event of a run's log, or the log has no step.
        OSError: the file cannot be read.
    """
    run = RunFacts(path.stem)
    lines = path.read_bytes().decode(errors="surrogateescape").split("\n")
    for number, line in enumerate(lines, 1):
        if not line and number == len(lines):
            break
        following = lines[number] if number < len(lines) else None
        try:
            facts = json.loads(line)
            if not isinstance(facts, dict) or "event" not in facts:
                raise ValueError('no object with an "event"')
            event = facts.pop("event")
            _check_event(event, facts)
            run.record_event(event, facts)
        except json.JSONDecodeError:
            if not _is_cut(line, following):
                raise ValueError(f"{path}, line {number}: {_NO_EVENT}: no JSON") from None
            run.notes.append(
                f"line {number} of {path.name} is cut off after {len(line):,} characters, and left "
                "out"
            )
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {_NO_EVENT}: {error}") from None
    if not run.steps:
        raise ValueError(f"{path}: no step is in this log")
    return run


_NO_EVENT = "no event of a log of `partita train --log`"


def _is_cut(line: str, following: str | None) -> bool:
    """True if the line is the beginning of an event that was not completely written."""
    begins = _EVENT.startswith(line[: len(_EVENT)])
    return begins and (following is None or following.startswith(_EVENT + '"begin"'))


# -- fields of an event ----------------------------------------------------------------------------

Check = Callable[[str, Any], None]
"""A function of a value's path in its event, such as `["moves"][3]["nbytes"]`, and the value.
It raises ValueError if the value is wrong."""


def _check_event(event: Any, facts: dict[str, Any]) -> None:
    """Raises ValueError if an event lacks something that a report shows.

    Events that no report shows, and additional fields, are ignored.
    """
    if not isinstance(event, str):
        raise ValueError(f"no event is called {_shorten_value(event)}")
    try:
        _EVENTS.get(event, _any)("", facts)
    except ValueError as wrong:
        raise ValueError(f'the event "{event}" has {wrong}') from None


def parse_mesh(text: str) -> Mesh:
    """Returns the mesh that a text such as "dp=2 tp=4" describes.

    Raises:
        ValueError: the text does not describe a mesh.
    """
    axes = [axis.split("=") for axis in text.split()]
    return Mesh(tuple(name for name, _ in axes), tuple(int(size) for _, size in axes))


def _shorten_value(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse(at: str, value: Any, wanted: str) -> NoReturn:
    raise ValueError(f"{at} = {_shorten_value(value)}, where {wanted} belongs")


# -- what a value should be ------------------------------------------------------------------------


def _any(at: str, value: Any) -> None:
    pass


def _of_type(kind: type, wanted: str) -> Check:
    def check_type(at: str, value: Any) -> None:
        if not isinstance(value, kind):
            _refuse(at, value, wanted)

    return check_type


_text, _list, _dict = _of_type(str, "a text"), _of_type(list, "a list"), _of_type(dict, "an object")


def _number(at: str, value: Any) -> None:
    """Checks a number. NaN and infinity are allowed, because a loss may be such."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(at, value, "a number")
    try:
        float(value)
    except OverflowError:
        _refuse(at, value, "a number that a float can hold")


def _finite(at: str, value: Any) -> None:
    _number(at, value)
    if not math.isfinite(value):
        _refuse(at, value, "a finite number")


def _whole(at: str, value: Any) -> None:
    _finite(at, value)
    if value != int(value):
        _refuse(at, value, "a whole number")


def _all_of(kind: Check, check: Check) -> Check:
    """Returns a check of a list or an object whose values all pass `check`."""

    def check_all(at: str, value: Any) -> None:
        kind(at, value)
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            check(f"{at}[{json.dumps(name)}]", one)

    return check_all


_list_of, _table_of = partial(_all_of, _list), partial(_all_of, _dict)


def _row_of(*checks: Check, least: int | None = None) -> Check:
    """Returns a check of a list with a value for each of `checks`; the last ones may be missing.

    Args:
        least: the least number of values; None: all of them.
    """
    counts = range(len(checks) if least is None else least, len(checks) + 1)

    def check_row(at: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) not in counts:
            _refuse(at, value, f"a list of {len(checks)}")
        for i, (check, one) in enumerate(zip(checks, value, strict=False)):
            check(f"{at}[{i}]", one)

    return check_row


def _object(also: dict[str, Check] | None = None, **checks: Check) -> Check:
    """Returns a check of an object that has the keys `checks`, and may have those in `also`."""

    def check_object(at: str, value: Any) -> None:
        _dict(at, value)
        for name, check in (checks | (also or {})).items():
            if name in value:
                check(f"{at}[{json.dumps(name)}]", value[name])
            elif name in checks:
                raise ValueError(f"no {at}[{json.dumps(name)}]")

    return check_object


def _memory(at: str, value: Any) -> None:
    """Checks the memory of a step: for each class, a number for each place."""
    if value is None:  # the step was not captured
        return
    _MEMORY(at, value)
    count = len(value["places"])
    for name, bytes_at in value["live"].items():
        if len(bytes_at) != count:
            there = f'{at}["live"][{json.dumps(name)}]'
            _refuse(there, bytes_at, f"a number for each of {count} places")


def _parameter(at: str, value: Any) -> None:
    """Checks `[name, layout, mesh, bytes]`, where the layout fits the mesh."""
    _PARAMETER(at, value)
    try:
        mesh = parse_mesh(value[2])
    except ValueError:
        _refuse(at, value[2], "a mesh (dp=2 tp=4)")
    try:
        Layout.parse(value[1]).check_axes(mesh)
    except ValueError:
        _refuse(at, value[1], f"a layout over {mesh}")


_PAIR = _row_of(_finite, _finite)
_PARAMETER = _row_of(_text, _text, _text, _finite)
_HOLDERS = _list_of(_object(name=_text, kind=_text, source=_text, nbytes=_finite))
_HELD, _LIVE = _table_of(_finite), _table_of(_list_of(_finite))
_MEMORY = _object(places=_list_of(_text), held=_HELD, live=_LIVE, holders=_HOLDERS)
_MOVE = _object(source=_text, kind=_text, axes=_text, reason=_text, nbytes=_finite, count=_finite)
_PASS = _object(name=_text, promise=_text, did=_text, collectives=_PAIR, sent=_PAIR, peak=_PAIR)
_WORK = _row_of(_text, _text, _finite, _finite, _text, _text, _text, _finite, least=5)

_EVENTS: dict[str, Check] = {
    "begin": _object({"time": _finite}, options=_table_of(_any)),
    "ready": _object({"parameters": _whole}),
    "step": _object(
        {"tokens_per_second": _finite, "mfu": _finite},
        step=_whole,
        loss=_number,
        seconds=_finite,
        nbytes=_finite,
    ),
    "layouts": _object(parameters=_list_of(_parameter)),
    "moves": _object(moves=_list_of(_MOVE)),
    "graph": _object(memory=_memory, passes=_list_of(_PASS)),
    "timeline": _object(events=_list_of(_WORK), source=_text),
    "sample": _object(prompt=_text, text=_text),
    "stopped": _object(message=_text),
}

# -- timelines of a step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TimelineEvent:
    """One kernel or collective in a timeline: an interval of work on a stream.

    Attributes:
        name: the name of the graph node or of the call.
        stream: "compute", or the axes of a collective, such as "dp" or "dp tp".
        start, seconds: its start, in seconds since the step began, and its duration.
        kind: the kind of the kernel or of the collective.
        phase: "forward", "backward" or "update".
        source: the user's "file:line".
        nbytes: bytes that a rank sends, or that a kernel reads and writes.
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
    """An object with a timeline, simulated or measured.

    Attributes:
        events: the events of a step on one rank.
        source: a sentence on where the events come from, and what they leave out.
    """

    @property
    def events(self) -> Sequence[TimelineEvent]: ...

    @property
    def source(self) -> str: ...


def _trace_of(events: Iterable[TimelineEvent]) -> dict[str, Any]:
    """Returns a timeline in the JSON form of Perfetto and chrome://tracing, a thread per stream."""
    numbers: dict[str, int] = {}
    rows = [
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
        for event in events
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": stream}}
        for stream, i in numbers.items()
    ]
    return {"traceEvents": [*names, *rows], "displayTimeUnit": "ms"}


def save_trace(events: Iterable[TimelineEvent], path: str | Path) -> None:
    """Writes the timeline `events` to the file `path`, as JSON that Perfetto opens.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(_trace_of(events)), encoding="utf-8")


def trace_bytes(events: Iterable[TimelineEvent]) -> bytes:
    """Returns the timeline `events` as gzipped JSON for Perfetto.

    Equal timelines give equal bytes.
    """
    return gzip.compress(json.dumps(_trace_of(events)).encode(), mtime=0)


def join_short_events(events: Sequence[TimelineEvent], most: int) -> list[TimelineEvent]:
    """Joins short events of a timeline, so that a picture has about `most` events on each stream.

    The duration is divided into `most` intervals. Events longer than an interval stay unchanged.
    The shorter events of an interval become one event. It has their total duration, and the kind
    that takes most of the time. Events of 0 seconds are left out.
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
    """Returns one event for several adjacent events of a stream."""
    if len(events) == 1:
        return events[0]
    by_kind: dict[str, float] = {}
    for event in events:
        by_kind[event.kind] = by_kind.get(event.kind, 0.0) + event.seconds
    kind = max(by_kind, key=by_kind.__getitem__)
    longest = max((e for e in events if e.kind == kind), key=lambda e: e.seconds)
    return replace(
        longest,
        name=f"{longest.name} and {len(events) - 1} more",
        start=events[0].start,
        seconds=sum(e.seconds for e in events),
        nbytes=sum(e.nbytes for e in events),
    )
