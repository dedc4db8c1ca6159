"""Logs of a training run: progress on a terminal, files, and services.

Each log gets the events that rank 0 emits, such as "step". There are lines or a live bar on the
terminal, JSON lines, a report, TensorBoard, Weights & Biases, and MLflow. The last three are
imported only if they are requested.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from partita.layout.text import human
from partita.report import (
    RunFacts,
    check_outputs,
    check_plotly,
    check_written_folder,
    read_log,
    write_report,
)

from .options import Options, flag

_NOT_KEPT = ("at", "done", "failed")  # for the launcher: where a rank is, and how it ended
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class RunLog(Protocol):
    """The interface of a log, which receives the events of a training run. `begin` is called first.

    Attributes:
        option: the option that requests it, and its destination: "--log run.jsonl".
    """

    option: str

    def begin(self, options: dict[str, Any]) -> None: ...

    def record_event(self, event: str, facts: dict[str, Any]) -> None: ...

    def end(self) -> None: ...


class Logs:
    """All logs of a run. If one fails, it gets no further events, and training continues.

    Attributes:
        complete: True if none of them has failed.

    Args:
        logs: the logs.
        options: the options of the run, as text and numbers.
        tokens: bytes of text per step, over all ranks.
        show: a function that is also called with each event.
        least_seconds: the seconds of a step at peak speed of all ranks, to compute MFU; None if
            unknown.
    """

    def __init__(
        self,
        logs: Iterable[RunLog],
        options: dict[str, Any],
        tokens: int,
        show: Callable[[str, dict[str, Any]], None],
        least_seconds: float | None = None,
    ):
        self._logs, self._options, self._tokens, self._show = [*logs], options, tokens, show
        self._least_seconds = least_seconds
        self._begun = False
        self.complete = True

    def show(self, event: str, facts: dict[str, Any]) -> None:
        """Passes one event of the run, such as a step, to all logs.

        The events "at", "done" and "failed" go only to the function `show` of the constructor.

        Args:
            event: the kind of the event, such as "step".
            facts: the data of the event, such as "loss".
        """
        self._show(event, facts)
        if event in _NOT_KEPT:
            return
        if event == "step":
            seconds = max(facts["seconds"], 1e-9)
            facts = {**facts, "tokens_per_second": round(self._tokens / seconds, 1)}
            if self._least_seconds is not None:
                facts["mfu"] = round(self._least_seconds / seconds, 6)
        if event == "job":  # the last event of a run, whose process may end before `end`
            if self._begun:
                self._call_each(lambda log: log.record_event("stopped", facts))
            self.end()
            return
        if not self._begun:
            self._begun = True
            self._call_each(lambda log: log.begin(self._options))
        self._call_each(lambda log: log.record_event(event, facts))

    def end(self) -> None:
        """Closes all logs when the run has ended or failed. May be called more than once."""
        if self._begun:
            self._call_each(lambda log: log.end())
        self._logs = []

    def _call_each(self, call: Callable[[RunLog], None]) -> None:
        for log in [*self._logs]:
            try:
                call(log)
            except Exception as error:
                self._logs.remove(log)
                self.complete = False
                said = f"{log.option} is left out from here on: {type(error).__name__}: {error}"
                self._show("note", {"message": said})


def make_logs(
    options: Options,
    show: Callable[[str, dict[str, Any]], None],
    least_seconds: float | None = None,
) -> Logs:
    """Returns the logs of a training run that its options request. `show` gets all events, too.

    Args:
        least_seconds: the seconds of a step at peak speed of all ranks, to compute MFU.

    Raises:
        ValueError: a required package is not installed, or a file cannot be written.
    """
    for name, package in _PACKAGES.items():
        if getattr(options, name) is not None and not _is_installed(package):
            raise ValueError(f"--{flag(name)} needs {package}, which is not installed")
    found: list[RunLog] = []
    check_outputs({"--log": options.log, "--report": options.report})
    if options.log is not None:
        found.append(JsonLines(options.log, append=options.resume))
    if options.report is not None:
        check_plotly()
        earlier = options.log if options.resume else None
        found.append(ReportPage(options.report, goes_on_from=earlier))
    if options.tensorboard is not None:
        check_written_folder(options.tensorboard, "--tensorboard")
        found.append(TensorBoardLog(options.tensorboard))
    if options.wandb is not None:
        found.append(WandbLog(options.wandb))
    if options.mlflow is not None:
        found.append(MlflowLog(options.mlflow))
    return Logs(
        found, _options_by_flag(options), options.batch * options.context, show, least_seconds
    )


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _options_by_flag(options: Options) -> dict[str, Any]:
    """Returns the options that have a value, by flag, as their config file has them."""
    found = {}
    for one in fields(options):
        value, show = getattr(options, one.name), one.metadata["show"]
        if value is not None:
            found[flag(one.name)] = value if show is None else show(value)
    return found


class JsonLines:
    """A file with a JSON object for each event: `{"event": "step", "time": ..., "loss": ...}`.

    Args:
        path: the file.
        append: True appends to an existing file.
    """

    def __init__(self, path: Path, *, append: bool = False):
        self.option = f"--log {path}"
        self.path, self._append = path, append

    def begin(self, options: dict[str, Any]) -> None:
        self._file = self.path.open("a" if self._append else "w", encoding="utf-8")
        if self._append and _ends_within_a_line(self.path):
            print(file=self._file)
        self.record_event("begin", {"options": options})

    def record_event(self, event: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"event": event, "time": time.time(), **facts})
        try:
            print(line, file=self._file, flush=True)
        except OSError:
            with contextlib.suppress(OSError):  # close() tries to write the rest again
                self._file.close()
            raise

    def end(self) -> None:
        self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    """True if the file does not end with a newline, because a run was killed while it wrote."""
    if not path.is_file():  # a terminal or a pipe
        return False
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


class ReportPage:
    """An HTML report of the run, written when it has ended.

    Args:
        path: the HTML file.
        goes_on_from: the log of the run so far, if it was resumed; its steps are shown, too.
    """

    def __init__(self, path: Path, *, goes_on_from: Path | None = None):
        self.option = f"--report {path}"
        self.path, self._run = path, RunFacts(path.stem)
        self._goes_on_from = goes_on_from

    def begin(self, options: dict[str, Any]) -> None:
        if self._goes_on_from is not None and self._goes_on_from.is_file():
            with contextlib.suppress(ValueError, OSError):  # the file is not a log
                self._run = replace(read_log(self._goes_on_from), name=self.path.stem)
        self.record_event("begin", {"options": options, "time": time.time()})

    def record_event(self, event: str, facts: dict[str, Any]) -> None:
        self._run.record_event(event, facts)

    def end(self) -> None:
        write_report(self.path, self._run)


def _figures_of_step(facts: dict[str, Any]) -> dict[str, float]:
    found = {
        "loss": facts["loss"],
        "seconds": facts["seconds"],
        "tokens_per_second": facts["tokens_per_second"],
        "bytes_sent": facts["nbytes"],
        "peak_memory": facts["memory"],
    }
    return found | ({"mfu": facts["mfu"]} if "mfu" in facts else {})


class TensorBoardLog:
    """TensorBoard files in a folder: scalars for each step, and the sample text."""

    def __init__(self, folder: Path):
        self.option, self.folder = f"--tensorboard {folder}", folder

    def begin(self, options: dict[str, Any]) -> None:
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            str(self.folder)
        )
        self._writer.add_text("options", _as_code(json.dumps(options, indent=2)))

    def record_event(self, event: str, facts: dict[str, Any]) -> None:
        if event == "step":
            for name, value in _figures_of_step(facts).items():
                self._writer.add_scalar(name, value, facts["step"])
        elif event == "sample":
            self._writer.add_text("sample", _as_code(facts["prompt"] + facts["text"]))

    def end(self) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    """Returns text as a code block of Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class WandbLog:
    """A run of a Weights & Biases project."""

    def __init__(self, project: str):
        self.option, self.project = f"--wandb {project}", project

    def begin(self, options: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=self.project, config=options)

    def record_event(self, event: str, facts: dict[str, Any]) -> None:
        if event == "step":
            self._run.log(_figures_of_step(facts), step=facts["step"])

    def end(self) -> None:
        self._run.finish()


class MlflowLog:
    """A run of an MLflow experiment."""

    def __init__(self, experiment: str):
        self.option, self.experiment = f"--mlflow {experiment}", experiment

    def begin(self, options: dict[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(self.experiment)
        self._mlflow.start_run()
        self._mlflow.log_params(options)

    def record_event(self, event: str, facts: dict[str, Any]) -> None:
        if event == "step":
            self._mlflow.log_metrics(_figures_of_step(facts), step=facts["step"])
        elif event == "sample":
            self._mlflow.log_text(facts["prompt"] + facts["text"], "sample.txt")

    def end(self) -> None:
        self._mlflow.end_run()


# -- progress on a terminal ------------------------------------------------------------------------

_LAST_STEPS = 10  # the number of last steps whose median is the speed
PAUSE = 10.0  # seconds without a line after which plain progress prints one


class Progress:
    """Progress of a run as lines on a terminal: the mesh, some of the steps, the sample.

    Args:
        steps: the number of steps of the run.
        tokens: bytes of text per step, over all ranks.
        mesh: the mesh as text, such as "dp=2,tp=2".
        least_seconds: the seconds of a step at peak speed of all ranks, to compute MFU; None if
            unknown.
        out: the stream to write to; None for standard output.
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
        """Prints one event of a rank. Events that need no line are skipped.

        Args:
            event: the kind of the event, such as "step".
            facts: the data of the event, such as "loss".
        """
        shown = getattr(self, f"_on_{event}", None)
        if shown is not None:
            shown(**facts)

    def stop(self) -> None:
        """Restores the terminal, in subclasses that change it. Here it does nothing."""

    def say(self, line: str = "") -> None:
        """Prints a line. Unprintable characters, as in a file name or a sample, are escaped."""
        print(printable(line), file=self.out, flush=True)
        self._said = time.monotonic()

    @property
    def waited(self) -> float:
        """The seconds since the last line. After `PAUSE` of them, the next step prints a line."""
        return time.monotonic() - self._said

    def figures_of(self, loss: float, nbytes: int, memory: int) -> str:
        """Returns the text of a step's figures: loss, speed, MFU, bytes sent and peak memory.

        The speed is the median of the last steps, because a few of them plan or compile.

        Args:
            nbytes: the bytes that the rank sent in the step.
            memory: the peak of memory, in bytes.
        """
        seconds = max(statistics.median_low(self._seconds), 1e-9)
        share = "" if self.least_seconds is None else f"  MFU {self.least_seconds / seconds:5.1%}"
        rate = f"{self.tokens / seconds:7,.0f} tokens/s"
        sent, held = human(nbytes, "0 B"), human(memory, "0 B")
        return f"loss {loss:6.4f}  {rate}{share}  {sent:>8}/step  {held:>8} held"

    # -- events ----------------------------------------------------------------------------------

    def _on_ready(
        self, *, parameters: int, bytes: int, files: int, source: str, threads: int, first: int
    ) -> None:
        self.say(
            f"{parameters:,} parameters on {self.mesh}, {threads} thread{'s' * (threads > 1)} a "
            f"rank; {bytes / 1e6:.1f} MB of text in {files} files from {source}; "
            f"started in {time.monotonic() - self._began:.1f} s; tokens/s: the median of the "
            f"last {_LAST_STEPS} steps; bytes: sent by a rank in a step, and the most it has held"
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
    """Progress with a bar at the bottom of the terminal. Needs rich."""

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
    """Returns the display of a run's progress: a live bar on a terminal, otherwise lines.

    The live bar needs the package rich. The arguments are those of `Progress`.
    """
    facts: dict[str, Any] = {"steps": steps, "tokens": tokens, "mesh": mesh}
    facts["least_seconds"] = least_seconds
    if sys.stdout.isatty():
        try:
            return LiveProgress(**facts)
        except ModuleNotFoundError:
            pass
    return Progress(**facts)


def printable(text: str) -> str:
    r"""Returns the text with control characters as escapes, such as `\x1b` for ESC."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
