"""Progress of a training run: lines, or a live bar on a terminal."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from typing import Any, TextIO

__all__ = ["Progress", "make_progress", "printable"]

_LAST_STEPS = 10  # whose median says how fast a run is
PAUSE = 10.0  # seconds without a line after which plain progress prints one


class Progress:
    """Shows events as plain lines: the mesh, then a line every few steps, then the sample.

    Args:
        steps: how many there will be.
        tokens: bytes of text per step, over all ranks.
        mesh: what to call the mesh, such as "dp=2,tp=2".
        least_seconds: of a step at the peak of all ranks, for MFU; None where that is not known.
        out: where to write.
    """

    def __init__(
        self,
        *,
        steps: int,
        tokens: int,
        mesh: str,
        least_seconds: float | None = None,
        out: TextIO | None = None,
    ):
        self.steps, self.tokens, self.mesh = steps, tokens, mesh
        self.least_seconds = least_seconds
        self.out = out or sys.stdout
        self.last_step = -1
        self._seconds = deque[float](maxlen=_LAST_STEPS)
        self._began = self._said = time.monotonic()
        self._every = max(1, steps // 30)

    def show(self, event: str, facts: dict[str, Any]) -> None:
        """Show one event that a rank told of; an unknown one is left out."""
        shown = getattr(self, f"_on_{event}", None)
        if shown is not None:
            shown(**facts)

    def stop(self) -> None:
        """Leave the terminal as it was. May be called more than once."""

    def say(self, line: str = "") -> None:
        """Print a line; names of files and what a model writes may hold any character."""
        print(printable(line), file=self.out, flush=True)
        self._said = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the last line: steps that take long should not look like a hang."""
        return time.monotonic() - self._said

    def figures_of(self, loss: float, nbytes: int, memory: int) -> str:
        """The loss, how fast steps are, MFU too where the peak is known, bytes and memory.

        Speed is the median's of the last steps: the few that plan or compile say nothing about it.
        """
        seconds = max(statistics.median_low(self._seconds), 1e-9)
        share = "" if self.least_seconds is None else f"  MFU {self.least_seconds / seconds:5.1%}"
        rate = f"{self.tokens / seconds:7,.0f} tokens/s"
        sent, held = _format_size(nbytes), _format_size(memory)
        return f"loss {loss:6.4f}  {rate}{share}  {sent:>8}/step  {held:>8} held"

    # -- events ----------------------------------------------------------------------------------

    def _on_ready(
        self, *, parameters: int, bytes: int, files: int, source: str, threads: int, first: int
    ) -> None:
        self.say(
            f"{parameters:,} parameters on {self.mesh}, {threads} thread{'s' * (threads > 1)} a "
            f"rank; {bytes / 1e6:.1f} MB of text in {files} files from {source}; "
            f"started in {time.monotonic() - self._began:.1f} s; tokens/s are those of the last "
            f"{_LAST_STEPS} steps' median, bytes those that a rank sends and at most has held"
        )
        if first:
            self.say(f"goes on at step {first}, from the checkpoint")
        self._began = time.monotonic()

    def _on_step(self, *, step: int, loss: float, seconds: float, nbytes: int, memory: int) -> None:
        self.last_step = step
        self._seconds.append(seconds)
        self._step(step, loss, nbytes, memory)

    def _step(self, step: int, loss: float, nbytes: int, memory: int) -> None:
        if step % self._every == 0 or step == self.steps - 1 or self.waited > PAUSE:
            passed = time.monotonic() - self._began
            number = f"{step:>{len(str(self.steps))}}"
            self.say(f"step {number}  {self.figures_of(loss, nbytes, memory)}  {passed:6.1f} s")

    def _on_job(self, *, message: str) -> None:
        self.stop()
        print(printable(message), file=sys.stderr, flush=True)

    def _on_note(self, *, message: str) -> None:
        self.say(message)

    def _on_sample(self, *, prompt: str, text: str) -> None:
        self.stop()
        self.say("\nThe model writes:\n")
        self.say(prompt + text)

    def _on_verify(
        self, *, mesh: list[float], one: list[float], difference: float, tolerance: float
    ) -> None:
        self.stop()
        self.say(f"\nstep  loss on {self.mesh:<14}  loss on one rank  relative difference")
        for step, (a, b) in enumerate(zip(mesh, one, strict=True)):
            self.say(f"{step:>4}  {a:<22.9f}  {b:<16.9f}  {abs(a - b) / abs(b):.2e}")
        holds = difference <= tolerance
        self.say(
            f"max relative difference {difference:.2e}: "
            f"{'within' if holds else 'NOT within'} {tolerance:.0e}"
        )


class LiveProgress(Progress):
    """The same with a bar that stays at the foot of the terminal. Needs rich."""

    def __init__(self, **facts: Any):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        super().__init__(**facts)
        self._console = Console(file=self.out, highlight=False, emoji=False)
        self._bar = Bar(
            BarColumn(16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task: Any = None

    def say(self, line: str = "") -> None:
        self._console.print(printable(line), markup=False, soft_wrap=True)
        self._said = time.monotonic()

    def stop(self) -> None:
        self._bar.stop()

    def _step(self, step: int, loss: float, nbytes: int, memory: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=self.steps, figures="")
            self._bar.start()
        self._bar.update(
            self._task, completed=step + 1, figures=self.figures_of(loss, nbytes, memory)
        )
        if step % (self._every * 3) == 0 or step == self.steps - 1:
            self.say(f"step {step:>{len(str(self.steps))}}  loss {loss:6.4f}")


def make_progress(
    *, steps: int, tokens: int, mesh: str, least_seconds: float | None = None
) -> Progress:
    """A live bar where standard output is a terminal and rich is installed, else lines."""
    facts: dict[str, Any] = {"steps": steps, "tokens": tokens, "mesh": mesh}
    facts["least_seconds"] = least_seconds
    if sys.stdout.isatty():
        try:
            return LiveProgress(**facts)
        except ModuleNotFoundError:
            pass
    return Progress(**facts)


def _format_size(nbytes: float) -> str:
    units = ("B", "KiB", "MiB", "GiB")
    rank = min(int(math.log(max(nbytes, 1), 1024)), len(units) - 1)
    return f"{nbytes / 1024**rank:.{1 if rank else 0}f} {units[rank]}"


def printable(text: str) -> str:
    """The text with escapes for characters that a terminal would obey: `\\x1b` for an ESC."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
