"""Modules that a captured step converts or changes for a while, or that have no parameters yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt

CONVERSIONS = {
    "to a device": lambda m: m.to("cpu"),
    "to a dtype": lambda m: m.float(),
    "to a memory format": lambda m: m.to(memory_format=torch.channels_last),
    "to other values": lambda m: m._apply(lambda t: t * 0.5),
}


def losses(convert, compiled, mesh=None, stage=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.linspace(-1, 1, 12).view(4, 3)
    if mesh is not None:
        pt.zero(model, mesh, stage=stage)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        convert(model)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        convert(model)
        optimizer.step()
        return loss

    run = pt.compile(step, backend="graph") if compiled else step
    return [run(x).item() for _ in range(3)]


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_step_converts_its_module_as_in_eager(conversion):
    convert = CONVERSIONS[conversion]
    wanted = losses(convert, compiled=False)
    assert losses(convert, compiled=True) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_converts_a_module_under_zero(stage):
    convert = CONVERSIONS["to a dtype"]
    with pt.ranks(dp=2) as world:
        found = world.run(lambda mesh: losses(convert, True, mesh, stage))[0]
    assert found == pytest.approx(losses(convert, compiled=False), abs=1e-6)


def test_a_conversion_to_another_dtype_is_refused_and_changes_nothing():
    model = nn.Linear(3, 4)
    step = pt.compile(lambda x: model.double()(x.double()).sum(), backend="graph")
    with pytest.raises(pt.CaptureError, match="another shape or dtype"):
        step(torch.ones(2, 3))
    assert model.weight.dtype is torch.float32


def test_a_module_that_the_step_makes_and_converts_is_refused_with_what_to_write():
    x = torch.ones(2, 3, dtype=torch.float64)
    step = pt.compile(lambda x: nn.Linear(3, 4).double()(x).sum(), backend="graph")
    with pytest.raises(pt.CaptureError, match=r"module\.double\(\)") as raised:
        step(x)
    assert "dtype=" in str(raised.value)

    def make_and_call(x):  # a result with a history would not reach the leaves that a step makes
        return nn.Linear(3, 4, dtype=torch.float64)(x).sum().detach()

    made = pt.compile(make_and_call, backend="graph")
    torch.manual_seed(0)
    found = made(x)
    torch.manual_seed(0)
    assert torch.equal(found, nn.Linear(3, 4, dtype=torch.float64)(x).sum())


@pytest.mark.parametrize("fallback", [None, "eager"])
def test_a_lazy_module_is_refused_until_it_has_parameters(fallback):
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(6, 3)
    step = pt.compile(lambda x: model(x).square().sum(), backend="graph", fallback=fallback)
    if fallback is None:
        with pytest.raises(pt.CaptureError, match="no shape yet") as raised:
            step(x)
        assert "model(x)" in str(raised.value)
        model(x)
    wanted = step(x)
    assert wanted.item() == pytest.approx(model(x).square().sum().item(), rel=1e-6)
    assert step(x).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert step.program.graph is not None  # it runs as a graph by now


# -- modules that are there for a while ------------------------------------------------------------


class Twice(nn.Module):
    def forward(self, w):
        return w * 2


def in_a_dictionary(model, x):
    model.extra = nn.ModuleDict()
    model.extra["twice"] = Twice()
    x = model.extra["twice"](x)
    del model.extra
    return model(x)


def in_a_list(model, x):
    model.extra = nn.ModuleList([Twice()])
    model.extra.append(nn.Identity())
    for module in model.extra:
        x = module(x)
    del model.extra
    return model(x)


def parameters_in_a_dictionary(model, x):
    model.extra = nn.ParameterDict({"scale": nn.Parameter(torch.full((3,), 2.0))})
    x = x * model.extra["scale"]
    del model.extra
    return model(x)


def in_place_of_another(model, x):
    before, model.act = model.act, Twice()
    x = model.act(x)
    model.act = before
    return model.act(model(x))


def parametrized(model, x):
    nn.utils.parametrize.register_parametrization(model, "weight", Twice())
    loss = model(x)
    nn.utils.parametrize.remove_parametrizations(model, "weight", leave_parametrized=False)
    return loss


@pytest.mark.parametrize(
    "change",
    [in_a_dictionary, in_a_list, parameters_in_a_dictionary, in_place_of_another, parametrized],
)
def test_a_step_may_add_a_module_and_take_it_away(change):
    def run(compiled):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        model.act = nn.ReLU()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = change(model, x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        called = pt.compile(step, backend="graph") if compiled else step
        found = [called(torch.linspace(-1, 1, 12).view(4, 3)).item() for _ in range(3)]
        return found, [*model.state_dict()], [name for name, _ in model.named_modules()]

    wanted, found = run(False), run(True)
    assert found[0] == pytest.approx(wanted[0], abs=1e-6)
    assert found[1:] == wanted[1:]


def test_a_module_that_a_step_reads_is_guarded_though_the_step_replaces_it():
    model = nn.Module()
    model.scale = Twice()

    def step(x):
        before, model.scale = model.scale, nn.Identity()
        x = model.scale(x)
        model.scale = before
        return model.scale(x)

    captured = pt.compile(step, backend="graph")
    x = torch.ones(2)
    assert captured(x).tolist() == [2, 2]
    model.scale = nn.Identity()
    assert captured(x).tolist() == [1, 1]
