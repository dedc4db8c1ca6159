"""Does `partita train` train, and does it end as it should?"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from partita.app import Options, train

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4"]
FEW = ["--steps", "4", "--sample", "8"]
MANY = ["--steps", "1000000"]
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small text of which every byte is foretold by the one before."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "alphabet.txt").write_text("abcdefghijklmnopqrstuvwxyz\n" * 400)
    return ["--data", str(folder)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "partita", "train", *TINY, *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=250)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss +([\d.]+)", output, re.MULTILINE)]


def heed_ctrl_c() -> None:
    """As from a terminal: what a shell starts in the background has SIGINT ignored, and so have
    these tests and all that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def training(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A job that has made at least one step and would go on for hours."""
    job = subprocess.Popen(
        command(*arguments, *MANY),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=heed_ctrl_c,
    )
    try:
        assert job.stdout is not None and job.stderr is not None
        for line in job.stdout:
            if line.startswith("step"):
                break
        else:
            pytest.fail(f"the job ended before its first step: {job.stderr.read()}")
        yield job
    finally:
        job.kill()
        job.communicate()


def ranks_of(job: subprocess.Popen[str]) -> dict[int, int]:
    """The process id of each rank that the job has started and that still runs."""
    found = {}
    for line in Path(f"/proc/{job.pid}/task").glob("*/children"):
        for pid in map(int, line.read_text().split()):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = [value for value in environment if value.startswith(b"RANK=")]
            found[int(rank[0].removeprefix(b"RANK="))] = pid
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids: list[int], within: float = 100.0) -> bool:
    until = time.monotonic() + within
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(runs, pids))


@pytest.mark.slow
def test_a_mesh_of_ranks_learns_and_writes_a_sample(text):
    done = run("--steps", "60", "--lr", "1e-2", "--sample", "8", "--mesh", "dp=2,tp=2", *text)
    assert done.returncode == 0, done.stderr
    first, *_, last = losses(done.stdout)
    assert 5 < first < 6 and last < 2
    assert "dp=2,tp=2" in done.stdout
    assert re.search(r"[1-9][\d.]* (B|KiB|MiB)/step", done.stdout)
    assert "The model writes:\n\ndef " in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_one_rank_is_a_job_too(text):
    done = run("--ranks", "1", *FEW, *text)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_the_losses_of_a_mesh_are_those_of_one_rank(mesh, text):
    done = run("--verify", "--steps", "6", "--mesh", mesh, *text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"max relative difference [\d.e+-]+: within 1e-05", done.stdout)


def test_equal_seeds_give_equal_losses_and_others_do_not(text):
    def tell(event: str, **facts: object) -> None:
        pass

    tiny = Options(data=Path(text[1]), steps=4, layers=1, width=32, heads=2, context=32, sample=0)
    zero, again, one = (train(replace(tiny, seed=seed), tell) for seed in (0, 0, 1))
    assert zero == again != one


@pytest.mark.slow
def test_it_joins_the_ranks_that_torchrun_started(text):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", *command("--mesh", "dp=2", *FEW, *text)[2:]],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 4  # said once, by one rank


@pytest.mark.slow
def test_two_agents_of_torchrun_train_as_one_does(text):
    """As on two machines, which meet at one address: each agent starts ranks of the same job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    trained = [*command("--mesh", "dp=2,tp=2", "--zero", "3", *FEW, *text)[1:]]
    start = [sys.executable, "-m", "torch.distributed.run"]
    meet = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}"]
    agents = [
        subprocess.Popen(
            [*start, *meet, "--local-addr=127.0.0.1", *trained],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        output = [agent.communicate(timeout=280) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], output
    said = [losses(out) for out, _ in output]
    assert sorted(map(len, said)) == [0, 4]  # by the first rank of all, wherever it is
    alone = subprocess.run(
        [*start, "--standalone", "--nproc-per-node=4", *trained],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert alone.returncode == 0, alone.stderr
    assert max(said) == losses(alone.stdout)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "stopped after"), (signal.SIGTERM, 143, "ended by SIGTERM after")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_job_that_is_asked_to_end_ends_every_rank_and_says_so_without_a_traceback(
    number, code, said, text, tmp_path
):
    log = tmp_path / "run.jsonl"
    with training("--mesh", "dp=2", *text, "--log", str(log)) as job:
        ranks = ranks_of(job)
        assert len(ranks) == 2
        os.kill(job.pid, number)
        _, errors = job.communicate(timeout=250)
    assert job.returncode == code
    assert re.fullmatch(rf"{said} \d+ steps?\n", errors)
    assert all_end(list(ranks.values()))
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["event"] == "stopped" and last["message"].startswith(said)


@pytest.mark.slow
@needs_proc
def test_a_rank_that_is_killed_ends_the_job_which_names_it(text):
    with training("--mesh", "dp=2", *text) as job:
        ranks = ranks_of(job)
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = job.communicate(timeout=250)
    assert job.returncode == 1
    where = r"in (the )?(forward|backward|optimizer) of step \d+"
    assert re.match(rf"rank 1 was killed by SIGKILL {where}; the job is ended\n", errors)
    assert re.search(rf"^rank 0 was {where}", errors, re.MULTILINE)
    assert "Traceback" not in errors
    assert all_end(list(ranks.values()))


@pytest.mark.slow
@needs_proc
def test_no_rank_outlives_a_parent_that_is_killed(text):
    with training("--mesh", "dp=2", *text) as job:
        ranks = ranks_of(job)
        job.kill()
        assert all_end(list(ranks.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "dp=2", "--ranks", "3"], "--mesh dp=2 has 2 ranks, but there are 3"),
        (["--mesh", "pp=2"], "'pp=2' is not an axis"),
        (["--width", "30", "--heads", "4"], "--width 30 does not divide into --heads 4"),
        (["--data", "/nowhere"], "--data: there is no /nowhere"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_cannot_start_says_why(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    done = run("--ranks", "2", "--data", str(tmp_path))
    assert done.returncode == 1
    assert "before the first step" in done.stderr and "holds 9 bytes of text" in done.stderr
    assert "Traceback" not in done.stderr
