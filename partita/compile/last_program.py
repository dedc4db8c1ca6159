"""The last program of a compiled step: its graph, memory, passes and key, for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from partita.report import HasTimeline

    from .backend.built import Built
    from .captured_program import CapturedProgram
    from .graph import Graph
    from .guards import History
    from .memory.schedule import Memory
    from .passes import Passes

__all__ = ["LastProgram"]


class LastProgram:
    """The part of a `CompiledStep` that is read, not called."""

    without: tuple[str, ...]
    passes: Passes
    _history: History
    _last: CapturedProgram | None

    @property
    def title(self) -> str:
        """How errors and reports call it."""
        raise NotImplementedError

    @property
    def reasons(self) -> list[str]:
        """For each capture, why it was made."""
        return self._history.reasons

    @property
    def program(self) -> CapturedProgram:
        """The program that ran last.

        Raises:
            ValueError: nothing was captured yet.
        """
        if self._last is None:
            raise ValueError("this step has not been captured: call it first")
        return self._last

    @property
    def graph(self) -> Graph:
        """The graph of the last program, printed with a line for each node. Raises as `program`."""
        from .graph import Graph

        return Graph(self.program)

    def explain(self) -> str:
        """What each pass did to the last program, and what it saved. Raises as `program`.

        The passes are run again to see what each does to the predicted peak: it may take seconds.
        """
        from .step_facts import explain_passes

        captured = self.program.captured
        assert captured is not None
        return explain_passes(captured, self.without, self.passes)

    def report(self, path: str | Path, timeline: HasTimeline | None = None) -> None:
        """Write a page on the last program that needs no network: memory over the step by class,
        what holds the peak, bytes by line of the program, what each pass saved, and layouts. Needs
        plotly.

        Args:
            timeline: of the step, by stream: `pt.simulate(step, mesh, machine)`.

        Raises:
            ValueError: nothing was captured yet, or plotly is not installed.
            OSError: the file cannot be written.
        """
        from partita.report import RunFacts, check_plotly, write_report

        from .ledger_replay import list_sent_moves
        from .step_facts import facts_of_graph, facts_of_layouts, facts_of_moves

        check_plotly()
        run = RunFacts(self.title)
        run.hear("graph", facts_of_graph(self))
        run.hear("moves", {"moves": facts_of_moves(list_sent_moves(self.program.runs))})
        run.hear("layouts", {"parameters": facts_of_layouts(self.program.runs)})
        if timeline is not None:
            run.timeline, run.timeline_source = [*timeline.events], timeline.source
        write_report(path, run)

    @property
    def memory(self) -> Memory:
        """The lifetimes of the last program's buffers, and its peak. Raises as `program`.

        Of a region those of its graphs as they run call by call, the backward behind the forward.

        Raises:
            ValueError: also where this torch generates code of an unknown form.
        """
        from .memory.storages import scheduled

        return scheduled(self.program)

    @property
    def artifact(self) -> Built | None:
        """The compiled code of the last program: "compiled in 10.3 s", "loaded in 0.4 s".

        None where it runs without being compiled; of a region its forward's and its backward's
        (`.sections`). Raises as `program`.
        """
        return self.program.artifact

    @property
    def is_recorded(self) -> bool:
        """Is the next call of the last program one launch of a CUDA graph? Raises as `program`."""
        return bool(getattr(self.program.call, "is_recorded", False))

    @property
    def key(self) -> str:
        """The key of the last program: equal for equal programs, on every rank and in every run."""
        return self.program.key
