"""Does a run of the claims about GPUs say what it could not test?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]


def run_pytest(file, text):
    file.write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--rootdir={file.parent}", str(file)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.stdout


SKIPS = """
import pytest

@pytest.mark.skip(reason="a torch that knows of GPUs")
def test_a_claim(): ...

def test_another(record_property):
    record_property("seconds", "2.0")
"""


def test_what_is_skipped_is_told_with_the_reason_and_figures_with_their_names(tmp_path):
    said = run_pytest(tmp_path / "test_gpu.py", SKIPS)
    assert "Not tested: test_gpu.py::test_a_claim: a torch that knows of GPUs" in said
    assert "seconds" in said and "2.0" in said


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="a machine with a GPU")
def test_what_only_a_gpu_shows_is_told_where_there_is_none(tmp_path):
    said = run_pytest(tmp_path / "test_gpu.py", SKIPS)
    assert "Not tested, since this machine has no GPU:" in said and "NCCL" in said


def test_a_run_of_other_tests_says_nothing_of_gpus(tmp_path):
    assert "Not tested" not in run_pytest(tmp_path / "test_other.py", SKIPS)


def test_they_need_no_plugin_of_pytest_and_no_hypothesis(tmp_path):
    (tmp_path / "hypothesis.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q"],
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{_ROOT}",
        },
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_train_on_device.py" in done.stdout


def test_the_tests_run_by_a_python_that_has_torch_where_there_is_no_environment():
    run = [
        "make",
        "test-gpu",
        "VENV=/nowhere",
        f"PYTHON={sys.executable}",
        "ARGS=--collect-only -q",
    ]
    done = subprocess.run(run, cwd=_ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "test_train_on_device.py" in done.stdout and "pip" not in done.stderr
