"""Does `save_pretrained`, called as on one device, write whole values, and write them once?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import partita as pt
from tests.programs.gloo_ranks import run_ranks

from .adapters import with_adapters
from .models import CLIENTS
from .modes import make_model
from .places import PLACES, mesh_of, place_model

CELLS = [(name, place) for name in ("T5", "Llama") for place in PLACES]
CELLS += [("GPT-2", "ZeRO-3"), ("UNet", "ZeRO-3")]


def make(name: str) -> nn.Module:
    return with_adapters() if name == "adapters" else make_model(CLIENTS[name], torch.float64)


def save(mesh: Any, name: str, place: str, folder: Path, how: str = "", **options: Any) -> None:
    """Every rank saves as any program does, here into a folder of its own."""
    model = (
        place_model(make(name), mesh, name, place) if name in CLIENTS else pt.zero(make(name), mesh)
    )
    if how == "a state dict":
        options["state_dict"] = model.state_dict()
    if how == "another rank":
        options["is_main_process"] = mesh.get_rank() == 1
    mine = folder / str(mesh.get_rank())
    mine.mkdir()
    model.save_pretrained(mine, **options)
    assert list(folder.glob("*/*.safetensors")), "the files are there for every rank"
    assert all(isinstance(p, pt.DTensor) for p in model.parameters())


def assert_as_of_one_device(folder: Path, name: str, writer: int = 0, **options: Any) -> None:
    """One rank has written the files of one device, to the last bit."""
    for other in folder.glob("[0-9]"):
        assert other.name == str(writer) or not list(other.iterdir())
    found, alone = folder / str(writer), folder / "alone"
    make(name).save_pretrained(alone, **options)
    assert {file.name for file in found.iterdir()} == {file.name for file in alone.iterdir()}
    for file in alone.glob("*.safetensors"):
        ours, theirs = load_file(found / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name, place", CELLS)
def test_one_rank_writes_the_files_of_one_device(name: str, place: str, tmp_path: Path) -> None:
    with pt.ranks(**mesh_of(place)) as world:
        world.run(save, name, place, tmp_path, max_shard_size="20KB")
    assert_as_of_one_device(tmp_path, name, max_shard_size="20KB")
    truth = make(name)
    kind = {"dtype": torch.float64} if name != "UNet" else {"torch_dtype": torch.float64}
    again = type(truth).from_pretrained(tmp_path / "0", **kind).state_dict()
    assert all(torch.equal(again[key], value) for key, value in truth.state_dict().items())


@pytest.mark.parametrize("how", ["a state dict", "another rank"])
def test_a_state_dict_and_the_rank_that_writes_may_be_given(how: str, tmp_path: Path) -> None:
    with pt.ranks(dp=2) as world:
        world.run(save, "T5", "ZeRO-3", tmp_path, how, max_shard_size="20KB")
    assert_as_of_one_device(tmp_path, "T5", int(how == "another rank"), max_shard_size="20KB")


def test_adapters_are_saved_alone(tmp_path: Path) -> None:
    with pt.ranks(dp=2) as world:
        world.run(save, "adapters", "ZeRO-3", tmp_path)
    assert_as_of_one_device(tmp_path, "adapters")


def save_badly(mesh: Any, folder: Path) -> str:
    model = place_model(make("Llama"), mesh, "Llama", "ZeRO-3")
    (folder / "config.json").mkdir(parents=True, exist_ok=True)
    with pytest.raises(OSError) as caught:
        model.save_pretrained(folder)
    assert all(isinstance(p, pt.DTensor) for p in model.parameters())
    return str(caught.value)


def test_what_fails_on_the_rank_that_writes_fails_on_all(tmp_path: Path) -> None:
    with pt.ranks(dp=2) as world:
        assert all("config.json" in text for text in world.run(save_badly, tmp_path))


def save_on_processes(rank: int, folder: Path) -> str:
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    save(mesh, "Llama", "ZeRO-3", folder)
    model = place_model(make("Llama"), mesh, "Llama", "ZeRO-3")
    with pytest.raises(pt.LayoutError) as caught:
        if rank == 0:
            model.save_pretrained(folder / "alone on one")
        else:
            next(model.parameters()).sum().item()
    assert not list(folder.glob("alone on one/*"))
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_of_processes_that_saves_alone_is_told_so(tmp_path: Path) -> None:
    for text in run_ranks(save_on_processes, 2, tmp_path):
        assert "ranks ask for different things" in text and "save_pretrained" in text
        assert "test_save_pretrained.py" in text
    assert_as_of_one_device(tmp_path, "Llama")
