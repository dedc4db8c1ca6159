"""A bench of faults: ranks of `partita train`, killed, stopped or interrupted at random moments.

A trial starts a small job, waits for a random moment, and sends a signal to a random rank. The job
must then end within 15 seconds. Its error must name the rank and its phase, without a traceback.
The checkpoint, if there is one, must be complete, and no process may be left. Half of the jobs are
compiled; for moments during the steps their code comes from a cache. Moments are drawn from the
start, from the time after it, and from the steps. Exits with 1 if a trial fails. Needs Linux
(/proc).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import partita as pt
from partita.checkpoint.folder import Checksums

SMALL = "--layers 2 --width 32 --heads 2 --context 32 --batch 8 --zero 3 --sample 0 --save-every 2"
SIGNALS = ("KILL", "STOP", "INT")
DEADLINE = 15.0  # seconds from the signal to the end of the job
_MARK = "PARTITA_TRIAL"


@dataclass
class Trial:
    """The result of one trial: a signal was sent to a rank of a running job.

    Attributes:
        took: seconds from the signal to the end of the job.
        stderr: the job's output on stderr.
        where: the phase of the rank, as reported by the job; "?" if it reported none.
        saved: the step of the checkpoint; -1 if there is none.
        faults: sentences about violated requirements.
    """

    took: float
    stderr: str
    where: str
    saved: int
    faults: list[str]


def run_trial(
    name: str,
    rank: int,
    *,
    after: str,
    delay: float,
    ranks: int = 2,
    compiled: bool = False,
    cache: str | None = None,
    deadline: float = DEADLINE,
) -> Trial:
    """Sends a signal to a rank of a new training job. Returns how the job ends, and what is wrong.

    Args:
        name: the signal without "SIG", such as "KILL".
        rank: the rank that gets it.
        after: the event to wait for: "start", "ready" (the ranks are about to train), "step".
        delay: seconds to wait after that event.
        ranks: the number of ranks of the job.
        compiled: True compiles the step.
        cache: the folder of compiled steps. None: a new folder.
        deadline: seconds from the signal in which the job must end.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = RunningJob(Path(folder), ranks, compiled, cache)
        try:
            job.wait_for(after)
            time.sleep(delay)
            os.kill(job.pid_of(rank), getattr(signal, f"SIG{name}"))
            sent = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(4 * deadline)
            took = time.monotonic() - sent
            return job.look_at(name, rank, took, deadline)
        finally:
            job.end()


class RunningJob:
    """A `partita train` job that was started for a trial, and runs until it is ended.

    Args:
        folder: the folder of its files.
        ranks, compiled, cache: as `run_trial` has them.
    """

    def __init__(self, folder: Path, ranks: int, compiled: bool = False, cache: str | None = None):
        self.folder, self.mark = folder, uuid.uuid4().hex
        (folder / "text").write_text("abcdefghijklmnopqrstuvwxyz\n" * 400)
        command = [sys.executable, "-m", "partita", "train", *SMALL.split(), "--steps", "1000000"]
        command += ["--mesh", f"dp={ranks}", "--data", str(folder / "text")]
        command += ["--save", str(folder / "run"), *(["--compile"] if compiled else [])]
        self._errors = (folder / "errors").open("w+")
        where = {_MARK: self.mark, "PARTITA_CACHE": cache or str(folder / "cache")}
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **where},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._reached = {name: threading.Event() for name in ("start", "ready", "step")}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            for name, begin in (("start", "starting"), ("ready", ""), ("step", "step")):
                if line.startswith(begin) and (begin or "parameters on" in line):
                    self._reached[name].set()

    def wait_for(self, what: str) -> None:
        """Waits until the job has reached `what`: "start", "ready" or "step".

        Raises:
            RuntimeError: the job ends first, or does not reach it within minutes.
        """
        until = time.monotonic() + 300
        while not self._reached[what].wait(0.05):
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the job did not reach {what}:\n{self._said()}")

    def pid_of(self, rank: int) -> int:
        """Waits until the process of a rank exists, and returns its id."""
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            for pid, environment in self.processes().items():
                if environment.get("RANK") == str(rank) and _parent(pid) == self.process.pid:
                    return pid
            time.sleep(0.01)
        raise RuntimeError(f"there is no rank {rank}:\n{self._said()}")

    def look_at(self, name: str, rank: int, took: float, deadline: float) -> Trial:
        """Checks how the job has ended after a signal to a rank. Returns the trial's result.

        Args:
            name: the signal without "SIG".
            took: seconds from the signal to the end.
            deadline: seconds that it may take.
        """
        said, faults = self._said(), []
        if took > deadline:
            faults.append(f"it took {took:.1f} s to end")
        if self.process.poll() != 1:
            faults.append(f"it ended with {self.process.poll()}")
        word = "stopped" if name == "STOP" else "killed"
        first = rf"rank {rank} was {word} by SIG{name} (.+); the job is ended\n"
        match = re.match(first, said)
        if match is None:
            faults.append("it does not name the rank and its place")
        if "Traceback" in said:
            faults.append("it shows a traceback")
        if left := self.processes():
            faults.append(f"{len(left)} processes are left")
        saved = -1
        try:
            saved = self._saved()
        except Exception as error:
            faults.append(f"the checkpoint: {type(error).__name__}: {error}")
        where = match[1] if match else "?"
        return Trial(took, said, re.sub(r" \d+$", "", where), saved, faults)

    def end(self) -> None:
        """Kills all processes of the job that still run."""
        for pid in (self.process.pid, *self.processes()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def _said(self) -> str:
        return (self.folder / "errors").read_text(errors="replace")

    def _saved(self) -> int:
        """Returns the step of the checkpoint, which is read completely; -1 if there is none."""
        home = self.folder / "run" / "last"
        if not pt.is_checkpoint(home):
            return -1
        state = {"step": -1}
        pt.load(state, home, strict=False)
        place = home if home.exists() else home.with_name(".last.previous")
        sums = Checksums.read(place)
        assert sums is not None
        sums.check_chunks(place, [(chunk, "it") for chunk in sums.chunks])
        return state["step"]

    def processes(self) -> dict[int, dict[str, str]]:
        """Returns the environment variables of the job's processes, except the first, by id."""
        found = {}
        for place in Path("/proc").iterdir():
            if not place.name.isdecimal() or int(place.name) == self.process.pid:
                continue
            with contextlib.suppress(OSError):
                content = (place / "environ").read_bytes().decode(errors="replace")
                pairs = (one.partition("=") for one in content.split("\0"))
                environment = {key: value for key, _, value in pairs}
                if environment.get(_MARK) == self.mark:
                    found[int(place.name)] = environment
        return found


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return -1


def _line(i: int, name: str, rank: int, trial: Trial) -> str:
    saved = f"checkpoint of step {trial.saved}" if trial.saved >= 0 else "no checkpoint"
    line = f"{i:>3}  SIG{name:<5} rank {rank} {trial.where:<34} {trial.took:5.1f} s  {saved}"
    if trial.faults:
        line += f"\n     FAILED: {'; '.join(trial.faults)}\n{trial.stderr}"
    return line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="partita bench faults", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="trials of each signal (10)")
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    chance = random.Random(options.seed)
    places: dict[str, Counter[str]] = {name: Counter() for name in options.signals}
    longest, failed, done = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as cache:
        for i in range(options.times):
            for name in options.signals:
                rank, compiled = chance.randrange(options.ranks), bool(i % 2)
                after = chance.choice(["start", "ready", "step"])
                delays = {"start": 4.0, "ready": 12.0 if compiled else 1.0, "step": 2.0}
                trial = run_trial(
                    name,
                    rank,
                    after=after,
                    delay=chance.uniform(0, delays[after]),
                    ranks=options.ranks,
                    compiled=compiled,
                    cache=cache if after == "step" else None,
                )
                done += 1
                places[name][trial.where] += 1
                longest = max(longest, trial.took)
                print(_line(i, name, rank, trial), flush=True)
                failed += bool(trial.faults)
    for name, where in places.items():
        print(f"SIG{name}: " + ", ".join(f"{n} {place}" for place, n in where.most_common()))
    print(f"{done - failed} of {done} as they must be; the longest end took {longest:.1f} s")
    return 1 if failed else 0
