"""Facts of a run: what its events have told, for a report."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .timeline import TimelineEvent

__all__ = ["RunFacts", "read_log"]


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

    def hear(self, event: str, facts: dict[str, Any]) -> None:
        """Take note of one event of the run."""
        if event == "begin":
            self.options = facts["options"]
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


def read_log(path: Path) -> RunFacts:
    """The run of which `partita train --log` has kept a log.

    Raises:
        ValueError: a line is no event of such a log, or there is none.
        OSError: the file cannot be read.
    """
    run = RunFacts(path.stem)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            facts = json.loads(line)
            run.hear(facts.pop("event"), facts)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}, line {number}: no event of a run's log") from None
    if not run.steps:
        raise ValueError(f"{path}: no step is in this log")
    return run
