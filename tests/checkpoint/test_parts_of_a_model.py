"""Do checkpoints hold what is trainable alone, and does a model stream as one device has it?"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import partita as pt

MESHES = [{"dp": 1}, {"dp": 3}, {"dp": 2, "tp": 3}]


class Adapted(nn.Module):
    """A frozen layer of 7 rows, two adapters of which one is used twice, and a frozen buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64)
        self.again = self.down
        self.register_buffer("scale", torch.full((4096,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x)) * self.scale[0] + self.again(x).sum()


def make(mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = pt.zero(Adapted(), mesh)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh) -> None:
    x = torch.linspace(-1, 1, 5 * 64).reshape(5, 64)
    model(pt.distribute_batch(x, mesh)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in pt.stream_full(model)}


def files(folder: os.PathLike[str]) -> Iterator[int]:
    return (os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_adapters_are_saved_alone_and_go_on_on_another_mesh(axes, tmp_path):
    def save(mesh):
        model, optimizer = make(mesh)
        train(model, optimizer, mesh)
        pt.save({"model": pt.TrainableState(model), "optimizer": optimizer}, tmp_path / "part")
        pt.save({"model": model, "optimizer": optimizer}, tmp_path / "whole")
        train(model, optimizer, mesh)
        return values(model)

    def resume(mesh, strict, *names):
        model, optimizer = make(mesh)
        pt.load(
            {"model": pt.TrainableState(model), "optimizer": optimizer},
            tmp_path.joinpath(*names),
            strict=strict,
        )
        train(model, optimizer, mesh)
        return values(model)

    with pt.ranks(**axes) as world:
        (wanted, *_) = world.run(save)
    assert {"frozen.weight", "scale", "down.weight", "again.weight"} <= wanted.keys()
    for name, strict in (("part", True), ("whole", "state")):
        with pt.ranks(dp=2) as world:
            for got in world.run(resume, strict, name):
                assert got.keys() == wanted.keys()
                for key, value in wanted.items():
                    torch.testing.assert_close(got[key], value)
    frozen = 4 * (64 * 64 + 64 + 4096)
    assert sum(files(tmp_path / "whole")) - sum(files(tmp_path / "part")) >= frozen


def test_what_was_frozen_since_is_no_longer_saved_and_is_missed_at_a_load(tmp_path):
    def program(mesh):
        model, _ = make(mesh)
        model.up.requires_grad_(False)
        pt.save({"model": pt.TrainableState(model)}, tmp_path / "c")
        model.up.requires_grad_(True)
        before = values(model)
        with pytest.raises(pt.LayoutError, match=r"model\.up\.bias: in the state"):
            pt.load({"model": pt.TrainableState(model)}, tmp_path / "c")
        assert all(torch.equal(before[name], x) for name, x in values(model).items())
        state = pt.TrainableState(model)
        with pytest.raises(ValueError, match=r"or only the state has .* down\.weight"):
            state.load_state_dict({})

    with pt.ranks(dp=2) as world:
        world.run(program)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_model_streams_as_one_device_has_it(axes):
    torch.manual_seed(0)
    truth = Adapted().state_dict()

    def program(mesh):
        model, _ = make(mesh)
        with pt.ledger() as ledger:
            found = [(name, x.clone()) for name, x in pt.stream_full(model)]
        assert ledger.count("all_gather") <= 5  # a tensor with two names is gathered once
        return found

    with pt.ranks(**axes) as world:
        for found in world.run(program):
            assert sorted(name for name, _ in found) == sorted(truth)
            for name, x in found:
                assert type(x) is torch.Tensor
                assert torch.equal(x, truth[name])


def test_a_model_without_values_is_not_streamed():
    def program(mesh):
        with torch.device("meta"):
            model = pt.zero(Adapted(), mesh)
        with pytest.raises(pt.LayoutError, match=r"stream_full: .* is on the meta device"):
            next(pt.stream_full(model))

    with pt.ranks(dp=2) as world:
        world.run(program)


def test_ranks_that_stream_other_models_are_an_error_on_all():
    def program(mesh):
        model = pt.zero(nn.Linear(4, 3 if mesh.get_rank() else 4, bias=False), mesh)
        dict(pt.stream_full(model))

    with pt.ranks(dp=2) as world, pytest.raises(pt.LayoutError):
        world.run(program)


def test_a_layer_that_gets_another_size_is_told_when():
    def program(mesh):
        model, _ = make(mesh)
        with pytest.raises(pt.LayoutError, match=r"do it before pt.zero or pt.parallelize"):
            model.up.weight.data = torch.zeros(9, 2)

    with pt.ranks(dp=2) as world:
        world.run(program)
