"""Do other people's models train on ranks that are processes?"""

from __future__ import annotations

import pytest

import partita as pt
from tests.programs.gloo_ranks import run_ranks

pytestmark = pytest.mark.slow


def train_cells(rank: int, cells: list[tuple[str, str]]) -> None:
    from .modes import MODES, train_truth

    for name, mode in cells:
        mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        train_truth(name, mode)
        MODES[mode].run(mesh, name)


def test_two_models_train_on_processes() -> None:
    cells = [("Llama", "ZeRO-3"), ("BERT", "ZeRO-3, pt.remat"), ("BERT", "bf16 autocast")]
    run_ranks(train_cells, 2, cells)
