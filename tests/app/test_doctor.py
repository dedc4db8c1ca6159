"""Does `partita doctor` say what there is, what is missing, and how it is had?"""

from __future__ import annotations

import importlib.metadata
import shutil

import pytest
import torch

import partita
from partita.cli import main


@pytest.fixture
def diagnose(capsys):
    """Runs it, and gives its lines by their names."""

    def run():
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {name: rest.strip() for name, _, rest in (line.partition(" ") for line in lines)}

    return run


def test_what_there_is_is_named(diagnose, monkeypatch):
    monkeypatch.setattr("partita.cli.accelerator_names", lambda: ["NVIDIA H100", "NVIDIA H100"])
    found = diagnose()
    assert found["partita"].startswith(f"{partita.__version__}, /")
    assert found["torch"] == torch.__version__
    assert "gloo" in found["backends"]
    assert found["gpus"] == "NVIDIA H100, NVIDIA H100"
    assert found["rich"] == importlib.metadata.version("rich")


def test_what_is_missing_is_said_with_what_it_is_for(diagnose, monkeypatch):
    def find_none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("partita.cli.version", find_none)
    monkeypatch.setattr("partita.cli.accelerator_names", list)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("partita.tensor.plan.IN_C", None)
    monkeypatch.setenv("CXX", "clang++")
    found = diagnose()
    assert found["gpus"] == "none: this torch is built without CUDA"
    assert found["compiler"].startswith("none: no clang++, with which pt.compile")
    assert found["dispatch"].startswith("in Python")
    assert "pip install plotly" in found["plotly"] and "pip install rich" in found["rich"]
