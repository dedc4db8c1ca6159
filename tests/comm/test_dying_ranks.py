"""Does a job end in seconds, and say why, when one of its ranks does; and can it go on?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import partita as pt
from partita.app.launch import state_of_child
from partita.bench.faults import RunningJob, run_trial

DYING = Path(__file__).parent / "dying"
RUN = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch", "8"]
RUN += ["--mesh", "dp=2", "--sample", "0", "--zero", "3", "--save-every", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Job:
    """A finished `partita train`.

    Attributes:
        code: its exit code.
    """

    def __init__(self, folder: Path, *options: str, die: str = "", torchrun: tuple[str, ...] = ()):
        text = folder / "text"
        text.write_text("abcdefghijklmnopqrstuvwxyz\n" * 400)
        died = folder / "died"
        path = os.pathsep.join(filter(None, [str(DYING), os.environ.get("PYTHONPATH")]))
        dying = {"PYTHONPATH": path, "DIE": die, "DIED": str(died)} if die else {}
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", "partita", "train", *RUN, "--data", text, *options],
            env={**os.environ, **dying},
            capture_output=True,
            text=True,
            timeout=250,
        )
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def losses(self) -> dict[int, str]:
        """The loss of each step, as printed; of a step that was made twice, the second."""
        return dict(re.findall(r"^step +(\d+) +loss +([\d.]+)", self.out, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_killed_rank_is_named_with_the_place_where_the_others_were(phase, tmp_path):
    job = Job(tmp_path, "--steps", "1000000", die=f"1 kill {phase} 5")
    assert job.code == 1
    first, *others = job.err.splitlines()
    where = phase.replace("optimizer", "the optimizer")
    assert first == f"rank 1 was killed by SIGKILL in {where} of step 5; the job is ended"
    assert re.fullmatch(r"rank 0 was in (the )?\w+ of step [56] \(.+\.py:\d+\)", others[0])
    assert "Traceback" not in job.err


@pytest.mark.slow
def test_a_rank_killed_during_a_save_leaves_the_checkpoint_before(tmp_path):
    run = tmp_path / "run"
    job = Job(tmp_path, "--steps", "1000000", "--save", str(run), die="1 kill save 2")
    assert job.code == 1
    assert job.err.startswith("rank 1 was killed by SIGKILL ")
    assert f"the checkpoint {run}/last is that of step 2: --resume goes on from it" in job.err
    state = {"step": 0}
    pt.load(state, run / "last", strict=False)
    assert state == {"step": 2}


@pytest.mark.slow
def test_a_rank_that_raises_alone_is_the_one_that_is_shown(tmp_path):
    job = Job(tmp_path, "--steps", "1000000", die="1 raise forward 3")
    assert job.code == 1
    assert job.err.startswith("rank 1 failed in forward of step 3; the job is ended\nTraceback")
    assert "ZeroDivisionError: this rank has had enough\nrank 0 was in " in job.err
    assert job.err.count("Traceback") == 1


@pytest.mark.slow
def test_torchrun_starts_it_again_and_it_ends_with_the_losses_of_one_that_was_left_alone(tmp_path):
    (tmp_path / "other").mkdir()
    truth = Job(tmp_path / "other", "--steps", "8")
    again = (*TORCHRUN, "--max-restarts=1")
    save = ("--save", str(tmp_path / "run"), "--resume")
    job = Job(tmp_path, "--steps", "8", *save, die="1 kill backward 5", torchrun=again)
    assert truth.code == job.code == 0, truth.err + job.err
    assert re.search(r"^goes on at step [24], from the checkpoint$", job.out, re.MULTILINE)
    assert len(truth.losses) == 8 and job.losses == truth.losses
    assert re.search(r"rank 0 failed in [a-z ]+ of step [56]: another rank is gone \(.+\)", job.err)


@pytest.mark.slow
def test_a_rank_that_raises_alone_under_torchrun_ends_the_job_with_its_error(tmp_path):
    job = Job(tmp_path, "--steps", "1000000", die="1 raise forward 3", torchrun=(*TORCHRUN,))
    assert job.code == 1
    assert "rank 1 failed in forward of step 3: Traceback" in job.err
    assert "ZeroDivisionError: this rank has had enough" in job.err


# -- at whatever moment ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "after", "compiled", "where"),
    [
        ("INT", 1, "start", False, "before the first step"),
        ("STOP", 0, "start", False, "before the first step"),
        ("STOP", 1, "step", False, r"in .+"),
        ("KILL", 1, "ready", True, r"(in|before) .+"),
    ],
)
def test_a_signal_at_whatever_moment_ends_the_job_with_the_rank_and_its_place(
    name, rank, after, compiled, where
):
    trial = run_trial(name, rank, after=after, delay=0.3, compiled=compiled, deadline=50)
    assert trial.faults == [], trial.stderr
    assert re.fullmatch(where, trial.where)


def test_a_process_is_known_to_be_stopped_whatever_it_does_and_to_go_on():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        assert state_of_child(busy.pid, os.WSTOPPED) == 0
        os.kill(busy.pid, signal.SIGSTOP)
        while not state_of_child(busy.pid, os.WSTOPPED):
            time.sleep(0.01)
        assert state_of_child(busy.pid, os.WSTOPPED) == signal.SIGSTOP  # asking takes nothing away
        os.kill(busy.pid, signal.SIGCONT)
        while state_of_child(busy.pid, os.WSTOPPED):
            time.sleep(0.01)
        busy.kill()


@pytest.mark.slow
def test_no_other_machine_can_reach_a_rank(tmp_path):
    job = RunningJob(tmp_path, 2)
    try:
        job.wait_for("step")
        sockets = {
            link.split("[")[1][:-1]
            for pid in (job.process.pid, *job.processes())
            for file in Path(f"/proc/{pid}/fd").iterdir()
            if (link := os.readlink(file)).startswith("socket:")
        }
        listening = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and inode in sockets:
                    listening.append(local.split(":")[0])
    finally:
        job.end()
    assert listening and set(listening) == {"0100007F"}  # 127.0.0.1, as the kernel writes it
