"""Does a run that is resumed from a checkpoint go on as if nothing had happened?"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from partita.checkpoint import dcp_format
from partita.checkpoint.full_state import patch_save_pretrained
from tests.programs.checkpoint_samples import (
    model_of,
    put,
    same_bits,
    train,
)

# -- objects ---------------------------------------------------------------------------------------


class Reader:
    """A source of data that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.slow
@pytest.mark.parametrize("save", [pt.save, lambda *args: pt.async_save(*args).result()])
def test_a_resumed_run_goes_on_bit_for_bit(save, tmp_path):
    def start(mesh: Any, seed: int) -> dict[str, Any]:
        model = put(model_of(seed), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "random": pt.RandomState(),
            "reader": Reader(),
            "step": 0,
        }

    def run(state: dict[str, Any], mesh: Any, stop: int) -> list[float]:
        losses = []
        while state["step"] < stop:
            at = state["reader"].at
            losses += train(state["model"], state["optimizer"], mesh, range(at, at + 1))
            state["schedule"].step()
            state["reader"].at += 1
            state["step"] += 1
        return losses

    def through(mesh: Any) -> list[float]:
        return run(start(mesh, 0), mesh, 10)

    def first(mesh: Any) -> list[float]:
        state = start(mesh, 0)
        losses = run(state, mesh, 5)
        save(state, tmp_path / "c")
        return losses

    def second(mesh: Any) -> list[float]:
        state = start(mesh, 1)  # other weights, and no optimizer state yet
        pt.load(state, tmp_path / "c")
        assert state["step"] == state["reader"].at == 5
        return run(state, mesh, 10)

    with pt.ranks(dp=2, tp=2) as world:
        whole, before, after = (world.run(f)[0] for f in (through, first, second))
    assert before + after == whole
    with pt.ranks(tp=3) as world:  # another mesh: equal but for the order of sums
        torch.testing.assert_close(world.run(second)[0], whole[5:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, 0.9)])
def test_an_optimizer_finds_its_state_by_name_in_another_order_and_mesh(make, tmp_path):
    def save(mesh: Any) -> None:
        model = put(model_of(0), mesh)
        optimizer = make(model.parameters())
        train(model, optimizer, mesh, range(2))
        pt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")

    with pt.ranks(dp=2, tp=2) as world:
        world.run(save)
    model = model_of(0)
    truth = make(model.parameters())
    train(model, truth, None, range(2))
    state = {n: truth.state[p] for n, p in model.named_parameters()}

    def load(mesh: Any) -> None:
        model = put(model_of(1), mesh)
        optimizer = make(list(model.parameters())[::-1])
        pt.load({"optimizer": optimizer, "model": model}, tmp_path / "c")
        for name, p in model.named_parameters():
            assert set(optimizer.state[p]) == set(state[name])
            for key, value in optimizer.state[p].items():
                if isinstance(value, pt.DTensor):
                    assert value.placements == p.placements
                    value = value.full_tensor()
                torch.testing.assert_close(value, state[name][key])
        train(model, optimizer, mesh, range(1))

    for sizes in ({"dp": 2, "tp": 1}, {"dp": 3}):
        with pt.ranks(**sizes) as world:
            world.run(load)


def optimizers(model: nn.Sequential) -> tuple[Any, Any]:
    """Weights and biases in two groups, in either order."""
    weights, biases = ([p for n, p in model.named_parameters() if k in n] for k in ("w", "b"))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3), torch.optim.AdamW(groups[::-1], lr=1e-3)


def test_groups_of_an_optimizer_are_found_by_their_parameters(tmp_path):
    model = model_of(0)
    one, other = optimizers(model)
    train(model, one, None, range(1))
    pt.save({"model": model, "optimizer": one}, tmp_path / "c")
    pt.load({"model": model, "optimizer": other}, tmp_path / "c")
    assert [g["weight_decay"] for g in other.param_groups] == [0.0, 0.1]
    first, last = model[0], model[3]
    mixed = torch.optim.AdamW(
        [{"params": list(first.parameters())}, {"params": list(last.parameters())}]
    )
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias are one group"):
        pt.load({"model": model, "optimizer": mixed}, tmp_path / "c")


def test_without_its_module_an_optimizer_is_saved_by_number_as_torch_does(tmp_path):
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, None, range(1))
    pt.save({"optimizer": optimizer}, tmp_path / "c")
    names = dcp_format.Reader(tmp_path / "c").read_metadata().state_dict_metadata
    assert "optimizer.state.3.exp_avg" in names
    fresh = torch.optim.AdamW(model_of(1).parameters())
    pt.load({"optimizer": fresh}, tmp_path / "c")
    ours, theirs = fresh.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(torch.equal(ours[i][k], theirs[i][k]) for i in theirs for k in theirs[i])


def test_an_optimizer_that_was_made_with_names_keeps_them(tmp_path):
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer, None, range(1))
    pt.save({"optimizer": optimizer}, tmp_path / "c")
    fresh = torch.optim.AdamW(list(model.named_parameters())[::-1])
    pt.load({"optimizer": fresh}, tmp_path / "c")
    for p in model.parameters():
        assert torch.equal(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_two_models_whose_parameters_have_equal_names_share_an_optimizer(tmp_path):
    a, b = model_of(0), model_of(1)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1, momentum=0.9)
    train(a, optimizer, None, range(1))
    train(b, optimizer, None, range(1))
    pt.save({"nets": {"a": a, "b": b}, "optimizer": optimizer}, tmp_path / "c")
    fresh = torch.optim.SGD([*b.parameters(), *a.parameters()], lr=0.1, momentum=0.9)
    pt.load({"nets": {"a": a, "b": b}, "optimizer": fresh}, tmp_path / "c")
    for p in (*a.parameters(), *b.parameters()):
        assert torch.equal(fresh.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


def test_fp32_state_of_a_bf16_parameter_stays_fp32(tmp_path):
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for p in model.parameters():
        optimizer.state[p]["exp_avg"] = torch.randn(p.shape)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    pt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    fresh = torch.optim.AdamW(model.parameters())
    pt.load({"model": model, "optimizer": fresh}, tmp_path / "c")
    after = fresh.state_dict()["state"]
    assert all(same_bits(after[i][k], v) for i in before for k, v in before[i].items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own imports
def test_names_are_those_without_torch_compile(tmp_path):
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    train(model, optimizer, None, range(1))
    pt.save({"model": torch.compile(model), "optimizer": optimizer}, tmp_path / "c")
    names = dcp_format.Reader(tmp_path / "c").read_metadata().state_dict_metadata
    assert {"model.0.weight", "optimizer.state.0.weight.momentum_buffer"} < set(names)
    wrapped = torch.compile(model_of(1))
    pt.load({"model": wrapped}, tmp_path / "c", strict=False)
    assert torch.equal(next(wrapped.parameters()), model[0].weight)


def test_two_tensors_whose_names_differ_by_the_part_of_torch_compile_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    model._orig_mod = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for save in (
        lambda: pt.save({"model": model}, tmp_path / "c"),
        lambda: pt.save({"model": model, "opt": optimizer}, tmp_path / "c"),
        lambda: pt.save_safetensors(model, tmp_path / "c.safetensors"),
        lambda: pt.full_state_dict(model, optimizer),
    ):
        with pytest.raises(ValueError, match=r"weight and _orig_mod\.weight have one name"):
            save()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(1, 1), (2, 2), (3, 3), (0, 3), (3, 1), (2, 0)])
def test_it_loads_from_one_stage_of_zero_into_another(first, then, tmp_path):
    def start(mesh: Any, seed: int, stage: int) -> dict[str, Any]:
        model = pt.zero(model_of(seed), mesh, stage=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return {"model": model, "optimizer": optimizer, "random": pt.RandomState()}

    def go_on(state: dict[str, Any], mesh: Any, steps: range) -> list[float]:
        return train(state["model"], state["optimizer"], mesh, steps)

    def save(mesh: Any) -> list[float]:
        state = start(mesh, 0, first)
        go_on(state, mesh, range(2))
        pt.save(state, tmp_path / "c")
        return go_on(state, mesh, range(2, 4))

    def load(mesh: Any) -> list[float]:
        state = start(mesh, 1, then)
        pt.load(state, tmp_path / "c")
        moments = [held["exp_avg"] for held in state["optimizer"].state.values()]
        assert all(m.placements == ((pt.Shard(0) if then else pt.Replicate()),) for m in moments)
        pt.save(state, tmp_path / f"d{mesh.size()}")
        return go_on(state, mesh, range(2, 4))

    with pt.ranks(dp=2) as world:
        expected, got = world.run(save), world.run(load)
    if first == then:
        assert got == expected  # else the sums of gradients may have another order
    with pt.ranks(dp=3) as world:
        world.run(load)
    saved, *others = (everything(tmp_path / name) for name in ("c", "d2", "d3"))
    for other in others:
        assert set(other) == set(saved)
        assert all(same_bits(other[name], saved[name]) for name in saved)


def everything(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    found = dcp_format.Reader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in found.items()
        if isinstance(stored, dcp_format.TensorStorageMetadata)
    }
    pt.load(state, path, strict=False)
    return state


# -- whole values ----------------------------------------------------------------------------------


class Counting(nn.Linear):
    """A layer with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 1

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_an_equal_value_of_another_name_is_not_taken_for_the_same_tensor():
    model = nn.Sequential(Counting(), Counting())
    state = pt.full_state_dict(model)
    del state["1._extra_state"]
    with pytest.raises(pt.LayoutError, match=r"model\.1\._extra_state: in the state, not in the"):
        pt.load_full_state_dict(model, state)


def test_tensors_on_the_meta_device_that_a_state_dict_lacks_stay_there():
    def program(mesh: Any) -> Any:
        with torch.device("meta"):
            model = pt.parallelize(nn.Linear(2, 2), mesh)
        state = {"weight": torch.ones(2, 2)}
        with pytest.raises(pt.LayoutError, match=r"model\.bias: in the state, not in the"):
            pt.load_full_state_dict(model, state)
        assert model.weight.is_meta
        pt.load_full_state_dict(model, state, strict=False)
        assert model.bias.is_meta
        return model.weight.full_tensor()

    with pt.ranks(dp=2) as world:
        assert all(weight.eq(1).all() for weight in world.run(program))


class SelfSaving(nn.Linear):
    """A model that saves itself, whose method is decorated, as those of libraries are."""

    def _save(self, folder: Path, state_dict: dict[str, Any] | None = None, **options: Any) -> None:
        state = self.state_dict() if state_dict is None else state_dict
        torch.save({**state, **options}, folder / "weights.pt")

    @functools.wraps(_save)
    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        SelfSaving._save(args[0], *args[1:], **kwargs)


patch_save_pretrained(SelfSaving)


@pytest.mark.parametrize("gives_state", [False, True])
def test_a_decorated_save_pretrained_is_called_with_the_arguments_as_they_came(
    gives_state, tmp_path
):
    model = SelfSaving(4, 4)
    want = copy.deepcopy(model.state_dict())

    def run(mesh):
        sharded = pt.zero(copy.deepcopy(model), mesh)
        state = {"state_dict": sharded.state_dict()} if gives_state else {}
        sharded.save_pretrained(tmp_path, **state, note="n")

    with pt.ranks(dp=2) as world:
        world.run(run)
    found = torch.load(tmp_path / "weights.pt")
    assert found.pop("note") == "n"
    assert found.keys() == want.keys()
    assert all(same_bits(found[name], want[name]) for name in want)
