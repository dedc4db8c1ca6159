"""Facts of a run: what its events have told, for a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .events import check_event
from .timeline import TimelineEvent

__all__ = ["RunFacts", "read_log", "read_logs"]

_EVENT = '{"event": '  # what a line of a log begins with


@dataclass
class RunFacts:
    """What is known of one run.

    Attributes:
        name: what to call it.
        options: of the run, by flag.
        about: what was told of its model and data when it was ready.
        steps: for each step its "step", "loss", "seconds", "tokens_per_second" and "nbytes", and
            "mfu" where the machine's peak is known.
        layouts: for each parameter its name, its layout and its mesh as text, and its bytes on a
            rank.
        moves: for each line of the program that sends in a step: "source", "kind", "axes",
            "reason", "nbytes" of a rank, "count".
        memory: of a captured step: "places", "held" (bytes by class), "live" (by class, the bytes
            at each place), "holders" (at the peak: "source", "name", "kind", "nbytes").
        passes: what each pass did to it: "name", "promise", "did", and (before, after) of
            "collectives", "sent" and "peak".
        timeline: of a step on one rank, by stream.
        timeline_source: where it is from, and what is not in it.
        figures: what else is known of it: names, amounts, and what is to be said of each.
        sample: what the model wrote.
        began: when it did, the last time that it was started, in seconds since 1970; None where
            that is not known.
        stopped: why it ended before its last step, as far as that was told.
        notes: what is to be said of its log, such as a line that is cut off.
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

    def hear(self, event: str, facts: dict[str, Any]) -> None:
        """Take note of one event of the run."""
        if event == "begin":
            self.options, self.began, self.stopped = facts["options"], facts.get("time"), ""
        elif event == "ready":
            self.about = facts
        elif event == "step":
            self.steps = [s for s in self.steps if s["step"] < facts["step"]] + [facts]
        elif event == "layouts":
            self.layouts = facts["parameters"]
        elif event == "moves":
            self.moves = facts["moves"]
        elif event == "graph":
            self.memory, self.passes = facts["memory"], facts["passes"]
        elif event == "timeline":
            self.timeline = [TimelineEvent(*row) for row in facts["events"]]
            self.timeline_source = facts["source"]
        elif event == "sample":
            self.sample = facts["prompt"] + facts["text"]
        elif event == "stopped":
            self.stopped = facts["message"]


def read_logs(paths: Sequence[Path]) -> list[RunFacts]:
    """The runs of several logs, by names that tell them apart. Raises as `read_log`."""
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
    """The run of which `partita train --log` has kept a log.

    A line that is cut off, since the run was killed while it wrote or writes still, is left out,
    and told in the run's `notes`: the last one, or the last before a run that goes on.

    Raises:
        ValueError: a line is no event of such a log, or there is none.
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
            check_event(event, facts)
            run.hear(event, facts)
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
    """Is this the beginning of an event, whose end was not written before the log's, or a run's?"""
    begins = _EVENT.startswith(line[: len(_EVENT)])
    return begins and (following is None or following.startswith(_EVENT + '"begin"'))
