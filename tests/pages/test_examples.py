"""Do the examples run as they stand, and do they learn?"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import partita as pt

EXAMPLES = Path(__file__).parents[2] / "examples"
MESHES = {
    "start": {"dp": 2},
    "gpt": {"dp": 2},
    "llama": {"dp": 2, "tp": 2},
    "cnn": {"dp": 2},
    "moe": {"dp": 2, "ep": 2},
}


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here_and_is_short():
    files = {file.stem: file for file in EXAMPLES.glob("*.py")}
    assert files.keys() == MESHES.keys()
    assert all(len(file.read_text().splitlines()) < 120 for file in files.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_its_loss_falls_and_is_that_of_one_rank(name, tmp_path):
    main = loaded(name).main

    def losses(sizes: dict[str, int], steps: int) -> list[float]:
        # The checkpoint of one run is not for the other.
        where = {"run": tmp_path / str(steps)} if name in ("gpt", "start") else {}
        with pt.ranks(**sizes) as world:
            return world.run(lambda mesh: main(mesh, steps, **where))[0]

    spread_out = losses(MESHES[name], 8)
    one = losses(dict.fromkeys(MESHES[name], 1), 3)
    assert spread_out[:3] == pytest.approx(one, rel=1e-5)
    assert min(spread_out[-2:]) < 0.95 * spread_out[0]


@pytest.mark.slow
def test_it_runs_without_torchrun_and_says_what_has_no_effect_on_one_rank(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "start.py", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "ZeRO has no effect on one rank" and last.startswith("epoch 0  loss ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn"])
def test_it_runs_by_the_command_that_it_states(name):
    command = re.search(r"torchrun (.+) examples/\w+\.py$", loaded(name).__doc__, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1].split()]
        + [EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = re.findall(r"^step +\d+  loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(last) < 0.2 < 2 < float(first)
    right = re.search(r"^([\d.]+)% of 297 images", done.stdout, re.MULTILINE)
    assert float(right[1]) > 90
