"""Do jobs that save to one path, and jobs that read it, keep out of each other's way?"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import partita as pt
from partita.checkpoint.folder import Lock, Replacement
from tests.programs.gloo_ranks import run_ranks

TIMES = 15


def state_of(mesh: Any, step: int) -> dict[str, Any]:
    rows = pt.distribute_tensor(torch.full((6, 5), float(step)), mesh, [pt.Shard(0)])
    return {"rows": rows, "whole": torch.full((3,), float(step)), "step": step}


def save_often(rank: int, path: str, first: int, beside: bool) -> None:
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for step in range(first, first + TIMES):
        if beside:
            pt.async_save(state_of(mesh, step), path).result()
        else:
            pt.save(state_of(mesh, step), path)


def read_often(rank: int, path: str) -> list[int]:
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    steps = []
    for _ in range(2 * TIMES):
        assert pt.is_checkpoint(path)
        state = state_of(mesh, 0)
        pt.load(state, path)
        steps.append(state["step"])
        assert state["rows"].to_local().eq(state["step"]).all()
        assert state["whole"].eq(state["step"]).all()
    return steps


@pytest.mark.slow
def test_jobs_that_save_to_one_path_wait_and_each_read_is_one_whole_save(tmp_path):
    path = str(tmp_path / "c")
    pt.save({"rows": torch.zeros(6, 5), "whole": torch.zeros(3), "step": 0}, path)
    with ThreadPoolExecutor(3) as jobs:
        savers = [jobs.submit(run_ranks, save_often, 2, path, n, n > 50) for n in (1, 101)]
        reader = jobs.submit(run_ranks, read_often, 2, path)
        first, second = reader.result()
        for saver in savers:
            saver.result()
    assert first == second and set(first) <= {0, *range(1, 1 + TIMES), *range(101, 101 + TIMES)}
    state = {"step": 0}
    pt.load(state, path, strict=False)
    assert state["step"] in (TIMES, 100 + TIMES)
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def die_with_lock(path: Path) -> None:
    child = os.fork()
    if not child:
        Replacement(path).written.mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads
def test_a_job_that_was_killed_keeps_nobody_waiting_and_what_it_left_is_removed(tmp_path):
    path = tmp_path / "c"
    die_with_lock(path)
    assert len(list(tmp_path.iterdir())) == 2  # its work, and the file of its lock
    pt.save({"step": 1}, path)
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def test_what_another_job_is_writing_is_left_alone(tmp_path):
    first = Replacement(tmp_path / "c")
    first.written.mkdir()
    with ThreadPoolExecutor(1) as other:
        second = other.submit(pt.save, {"step": 2}, tmp_path / "c")
        time.sleep(0.3)
        assert not second.done() and first.written.is_dir()
        first.discard()
        second.result(timeout=250)


def test_a_checkpoint_is_not_replaced_while_it_is_read(tmp_path):
    path = tmp_path / "c"
    pt.save({"step": 1}, path)
    inode = path.stat().st_ino
    with ThreadPoolExecutor(1) as other, Lock(tmp_path / ".c.reading", shared=True):
        saving = other.submit(pt.save, {"step": 2}, path)
        time.sleep(0.3)
        assert not saving.done() and path.stat().st_ino == inode
    state = {"step": 0}
    pt.load(state, path)
    assert state["step"] == 2


def test_where_no_lock_can_be_had_nothing_of_others_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("partita.checkpoint.folder.fcntl", None)
    (tmp_path / ".c.saving-other").mkdir()
    pt.save({"step": 1}, tmp_path / "c")
    assert (tmp_path / ".c.saving-other").is_dir()
    state = {"step": 0}
    pt.load(state, tmp_path / "c")
    assert state["step"] == 1
