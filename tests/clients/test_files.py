"""Do the files of transformers hold whole values, and come back into models on a mesh?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt

from .models import CLIENTS
from .modes import make_batches, make_model
from .places import PLACES, mesh_of, place_model


def save(mesh: Any, name: str, place: str, folder: Path) -> None:
    model = place_model(make_model(CLIENTS[name], torch.float64), mesh, name, place)
    state = pt.full_state_dict(model, rank0_only=True)
    if mesh.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state, max_shard_size="20KB")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_what_is_saved_on_a_mesh_is_read_on_one_device(
    name: str, place: str, tmp_path: Path
) -> None:
    with pt.ranks(**mesh_of(place)) as world:
        world.run(save, name, place, tmp_path)
    truth = make_model(CLIENTS[name], torch.float64)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = type(truth).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    for key, value in truth.state_dict().items():
        assert torch.equal(found[key], value), key


def load(mesh: Any, empty: nn.Module, name: str, place: str, folder: Path) -> tuple[Any, ...]:
    model = place_model(copy.deepcopy(empty), mesh, name, place)
    assert all(p.is_meta for p in (*model.parameters(), *model.buffers()))
    pt.load_safetensors(model, folder)
    batch = pt.distribute_batch(make_batches(CLIENTS[name], torch.float64)[0], mesh)
    return pt.full_state_dict(model), model(**batch).loss.full_tensor().item()


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_pretrained_files_are_read_into_a_model_that_no_rank_holds_whole(
    name: str, place: str, tmp_path: Path
) -> None:
    truth = make_model(CLIENTS[name], torch.float64)
    truth.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.device("meta"):
        empty = type(truth)(truth.config).to(torch.float64)
    loss = truth(**make_batches(CLIENTS[name], torch.float64)[0]).loss.item()
    with pt.ranks(**mesh_of(place)) as world:
        for found, ours in world.run(load, empty, name, place, tmp_path):
            assert ours == pytest.approx(loss, rel=1e-6)
            for key, value in truth.state_dict().items():
                assert torch.equal(found[key], value), key
