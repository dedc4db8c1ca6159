"""Do other people's models and transformers' Trainer train on ranks that are processes?"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import partita as pt
from tests.programs.gloo_ranks import run_ranks

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "hugging_face.md"


def train_cells(rank: int, cells: list[tuple[str, str]]) -> None:
    from .modes import MODES, train_truth

    for name, mode in cells:
        mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        train_truth(name, mode)
        MODES[mode].run(mesh, name)


def test_two_models_train_on_processes() -> None:
    cells = [("Llama", "ZeRO-3"), ("BERT", "ZeRO-3, pt.remat"), ("BERT", "bf16 autocast")]
    run_ranks(train_cells, 2, cells, timeout=300)


def trainer_of_the_page(rank: int, environment: dict[str, str]) -> tuple[list[float], list[float]]:
    """Run the page's adapter as under torchrun, whose environment accelerate looks for."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    (block,) = (
        b
        for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "MeshTrainer" in b
    )
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block.split("\ntruth = ")[0], str(PAGE), "exec"), names)
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ours = names["on_a_mesh"](mesh)
    for name in (*environment, "RANK", "LOCAL_RANK"):
        del os.environ[name]
    from accelerate.state import AcceleratorState

    assert AcceleratorState().num_processes == 2
    AcceleratorState._reset_state(reset_partial_state=True)
    return ours, names["train"](names["Trainer"], names["new_model"]())


def test_the_trainer_of_the_page_runs_under_torchrun() -> None:
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for ours, truth in run_ranks(trainer_of_the_page, 2, environment, timeout=300):
        assert ours == pytest.approx(truth, rel=1e-4)
