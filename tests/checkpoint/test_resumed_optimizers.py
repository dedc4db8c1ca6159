"""A resumed run goes on as an uninterrupted one, whatever form its optimizer's state has."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from tests.programs.optimizers import HOME_MADE


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def spread(model: nn.Module, mesh: Any, stage: int | None) -> nn.Module:
    if mesh is None:
        return model
    if stage is None:
        pt.distribute_module(model, mesh)
        return model
    return pt.zero(model, mesh, stage=stage)


def train(model: nn.Module, optimizer: Any, mesh: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x, y = (torch.randn(12, n, generator=g, dtype=torch.float64) for n in (6, 4))
        if mesh is not None:
            x, y = (pt.distribute_tensor(t, mesh, [pt.Shard(0)]) for t in (x, y))

        def closure(x=x, y=y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(closure().item())
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return losses


def run(ranks: int, program: Any) -> list[float]:
    """The losses on so many ranks; on one without a mesh."""
    if ranks == 1:
        return program(None)
    with pt.ranks(dp=ranks) as world:
        return world.run(program)[0]


def resume(
    make: Any, ranks: tuple[int, int], path: Any, stage: int | None = None
) -> tuple[Any, Any]:
    """The losses of a run that was interrupted after three steps, and of one that was not."""

    def start(mesh: Any, seed: int) -> tuple[nn.Module, Any]:
        model = spread(model_of(seed), mesh, stage)
        return model, make(model)

    def save(mesh: Any) -> list[float]:
        model, optimizer = start(mesh, 0)
        losses = train(model, optimizer, mesh, range(3))
        pt.save({"model": model, "optimizer": optimizer}, path)
        return losses

    def load(mesh: Any) -> list[float]:
        model, optimizer = start(mesh, 1)
        pt.load({"model": model, "optimizer": optimizer}, path)
        return train(model, optimizer, mesh, range(3, 6))

    def through(mesh: Any) -> list[float]:
        return train(*start(mesh, 0), mesh, range(6))

    first, then = ranks
    return run(first, save) + run(then, load), run(1, through)


def muon(model: nn.Module) -> Any:
    # In bfloat16, where another order of a sum shows.
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.05)


OF_TORCH = [
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
]


@pytest.mark.parametrize("ranks", [(2, 2), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("kind", HOME_MADE, ids=lambda kind: kind.__name__)
def test_state_of_any_form_comes_back_on_any_number_of_ranks(kind, ranks, tmp_path):
    got, want = resume(lambda model: kind(model.parameters()), ranks, tmp_path / "c")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", OF_TORCH, ids=lambda kind: kind.__name__)
def test_each_optimizer_of_torch_goes_on_where_it_was(kind, tmp_path):
    options = {"max_iter": 2} if kind is torch.optim.LBFGS else {}
    make = lambda model: kind(model.parameters(), lr=0.05, **options)  # noqa: E731
    got, want = resume(make, (2, 3), tmp_path / "c")
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


def test_muon_goes_on_where_it_was(tmp_path):
    got, want = resume(muon, (1, 1), tmp_path / "c")
    assert got == want


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "kind", [Any, *HOME_MADE[1:4]], ids=lambda kind: getattr(kind, "__name__", "")
)
def test_state_of_any_form_comes_back_under_each_stage_of_zero(kind, stage, tmp_path):
    kind = torch.optim.NAdam if kind is Any else kind
    make = lambda model: kind(model.parameters(), lr=0.05)  # noqa: E731
    got, want = resume(make, (3, 2), tmp_path / "c", stage)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


# -- groups and parameters -------------------------------------------------------------------------


def parts(model: nn.Sequential) -> tuple[list[Any], list[Any]]:
    return list(model[0].parameters()), list(model[2].parameters())


def test_a_schedule_and_a_group_that_was_added_later_come_back(tmp_path):
    def start(mesh: Any, seed: int, added: bool) -> dict[str, Any]:
        model = spread(model_of(seed), mesh, 2)
        first, last = parts(model)
        last[0].requires_grad_(added)
        optimizer = torch.optim.NAdam(first, lr=0.05)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        if added:
            add(state)
        return state

    def add(state: dict[str, Any]) -> None:
        last = parts(state["model"])[1]
        last[0].requires_grad_(True)
        state["optimizer"].add_param_group({"params": last, "lr": 0.01, "initial_lr": 0.01})
        state["schedule"].base_lrs.append(0.01)

    def go_on(state: dict[str, Any], mesh: Any, steps: range) -> list[float]:
        losses = []
        for i in steps:
            if i == 2 and len(state["optimizer"].param_groups) == 1:
                add(state)
            losses += train(state["model"], state["optimizer"], mesh, range(i, i + 1))
            state["schedule"].step()
        return losses

    def save(mesh: Any) -> list[float]:
        state = start(mesh, 0, False)
        losses = go_on(state, mesh, range(3))
        pt.save(state, tmp_path / "c")
        return losses

    def load(mesh: Any) -> list[float]:
        state = start(mesh, 1, True)
        pt.load(state, tmp_path / "c")
        return go_on(state, mesh, range(3, 6))

    want = go_on(start(None, 0, False), None, range(6))
    torch.testing.assert_close(run(2, save) + run(3, load), want, rtol=1e-9, atol=1e-12)


def saved_after_steps(path: Any, steps: int, kind: Any = torch.optim.Adam) -> tuple[Any, Any]:
    model = model_of(0)
    optimizer = kind(model.parameters(), lr=0.05)
    train(model, optimizer, None, range(steps))
    pt.save({"model": model, "optimizer": optimizer}, path)
    return model, optimizer


def test_an_optimizer_that_has_stepped_goes_back_to_before_its_first_step(tmp_path):
    model, optimizer = saved_after_steps(tmp_path / "c", 0)
    first = train(model, optimizer, None, range(3))
    pt.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert not optimizer.state
    assert train(model, optimizer, None, range(3)) == first


def test_an_option_that_was_not_saved_keeps_its_value(tmp_path):
    model, optimizer = saved_after_steps(tmp_path / "c", 1)
    for group in optimizer.param_groups:
        group["added"] = 3
    pt.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert optimizer.param_groups[0]["added"] == 3


def test_parameters_that_only_one_side_has_are_named_before_anything_changes(tmp_path):
    model, _ = saved_after_steps(tmp_path / "c", 1)
    before = copy.deepcopy(model.state_dict())
    first, _ = parts(model)
    fewer = torch.optim.Adam(first)
    with pytest.raises(pt.LayoutError) as caught:
        pt.load({"model": model, "optimizer": fewer}, tmp_path / "c")
    assert "optimizer.state.2.weight: in the checkpoint, not in the state" in str(caught.value)
    assert not fewer.state and all(torch.equal(before[n], p) for n, p in model.state_dict().items())

    model.add_module("3", nn.Linear(4, 2).double())
    more = torch.optim.Adam(model.parameters(), lr=0.3)
    with pytest.raises(pt.LayoutError) as caught:
        pt.load({"optimizer": more, "model": model}, tmp_path / "c")
    assert "optimizer.state.3.bias: in the state, not in the checkpoint" in str(caught.value)
    assert more.param_groups[0]["lr"] == 0.3


def test_without_strict_a_parameter_that_was_not_saved_keeps_its_state(tmp_path):
    _, saved = saved_after_steps(tmp_path / "c", 2)
    model = model_of(1)
    model.add_module("3", nn.Linear(4, 4).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    train(model, optimizer, None, range(1))
    own = optimizer.state[model[3].weight]["exp_avg"].clone()
    passed = pt.load({"model": model, "optimizer": optimizer}, tmp_path / "c", strict=False)
    assert {"model.3.weight", "optimizer.state.3.weight.exp_avg"} < set(passed.missing_keys)
    assert torch.equal(optimizer.state[model[3].weight]["exp_avg"], own)
    was = saved.state[saved.param_groups[0]["params"][0]]
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], was["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.05
    train(model, optimizer, None, range(1))


def test_whole_values_of_state_of_any_form_go_into_a_fresh_optimizer():
    def program(mesh: Any) -> Any:
        model = spread(model_of(0), mesh, 3)
        optimizer = HOME_MADE[3](model.parameters())
        train(model, optimizer, mesh, range(3))
        whole = pt.full_state_dict(model, optimizer)
        fresh = spread(model_of(1), mesh, 1)
        other = HOME_MADE[3](fresh.parameters())
        pt.load_full_state_dict(fresh, whole, other)
        return whole[1]["state"]["0.weight"], train(fresh, other, mesh, range(3, 6))

    plain = model_of(0)
    optimizer = HOME_MADE[3](plain.parameters())
    want = train(plain, optimizer, None, range(6))[3:]
    with pt.ranks(dp=2) as world:
        held, losses = world.run(program)[0]
    assert set(held["by_beta"]) == {0.0, 0.9} and type(held["pair"]) is tuple
    torch.testing.assert_close(losses, want, rtol=1e-9, atol=1e-12)


# -- other objects ---------------------------------------------------------------------------------


class Averages:
    """Makes its averages when it first sees a model, and counts in a dict of another class."""

    def __init__(self) -> None:
        self.mean: dict[str, Any] = {}
        self.seen: Counter[int] = Counter()

    def update(self, model: nn.Module) -> None:
        self.seen[len(self.seen)] += 1
        for name, p in model.named_parameters():
            self.mean.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen = state["mean"], state["seen"]


def test_any_object_gets_what_it_has_not_made_yet(tmp_path):
    averages = Averages()
    averages.update(model_of(0))
    averages.update(model_of(1))
    pt.save({"averages": averages}, tmp_path / "c")
    fresh = Averages()
    pt.load({"averages": fresh}, tmp_path / "c")
    assert fresh.seen == averages.seen and type(fresh.seen) is Counter
    assert all(torch.equal(fresh.mean[name], mean) for name, mean in averages.mean.items())


def test_a_gradient_scaler_comes_back(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    pt.save({"scaler": scaler}, tmp_path / "c")
    fresh = torch.amp.GradScaler("cpu", growth_interval=1)
    pt.load({"scaler": fresh}, tmp_path / "c")
    assert fresh.state_dict() == scaler.state_dict() and fresh.get_scale() == 16.0


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_dtensor_within_an_object_is_refused_where_it_is_saved(tmp_path):
    def program(mesh: Any) -> None:
        model = spread(model_of(0), mesh, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            optimizer.state[p]["projector"] = Holder([torch.zeros_like(p)])
        with pytest.raises(ValueError, match=r"0\.weight\.projector: a DTensor in a Holder"):
            pt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")

    with pt.ranks(dp=2) as world:
        world.run(program)
    assert not (tmp_path / "c").exists()


def test_keys_that_a_checkpoint_cannot_hold_are_refused_where_it_is_saved(tmp_path):
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["by_tensor"] = {model[0].bias: 1}
    with pytest.raises(ValueError, match="cannot be saved"):
        pt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
