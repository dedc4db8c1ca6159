"""Does a captured step that updates more than once compute with what each update has left?"""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import partita as pt
from partita.capture import tracer

OPTIMIZERS = {
    "a list at once": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "one by one": lambda p: optim.Adam(p, 0.1, foreach=False),
    "fused": lambda p: optim.AdamW(p, 0.1, fused=True),
    "with numbers of Python's": lambda p: optim.RAdam(p, 0.1),
    "with a product of numbers": lambda p: optim.NAdam(p, 0.1),
    "with state that is there at once": lambda p: optim.Adagrad(p, 0.1),
    "with numbers that the update writes": lambda p: optim.ASGD(p, 0.1),
}


def steps_of(kind, mesh=None, place=""):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    if place == "tp":
        split = {"0.weight": 0, "0.bias": 0, "2.weight": 1}  # the last bias is added by shares
        pt.parallelize(model, mesh, {name: {"tp": pt.Shard(d)} for name, d in split.items()})
        x = pt.distribute_tensor(x, mesh, [pt.Replicate()])
    elif mesh is not None:
        pt.zero(model, mesh, stage=3 if place == "dp" else 1)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    optimizer = OPTIMIZERS[kind](model.parameters())

    def step(x):
        losses = []
        for _ in range(3):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():  # what an average over steps does
            torch._foreach_mul_(list(model.parameters()), 0.5)
        return [*losses, model(x).detach().square().mean()]

    step = step if mesh is None else pt.compile(step, backend="graph")
    return [[v.item() for v in step(x)] for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tp", "dp"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_use_reads_what_the_update_before_it_wrote(kind, place):
    check(kind, place, {place: 2})


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OPTIMIZERS)[-4:])
def test_each_rank_updates_its_part_where_the_optimizer_is_sharded(kind):
    check(kind, "the optimizer alone", {"dp": 2})


def check(kind, place, ranks):
    with pt.ranks(**ranks) as world:
        found = world.run(lambda mesh: steps_of(kind, mesh, place))
    for losses, truth in zip(found[1], steps_of(kind), strict=True):
        assert losses == pytest.approx(truth, abs=1e-12)


def clipped_weights(mesh=None):
    weight = torch.linspace(-2, 2, 8, dtype=torch.float64).view(4, 2)
    if mesh is not None:
        weight = pt.distribute_tensor(weight, mesh, [pt.Shard(0)])
    weight = weight.detach().requires_grad_()

    def step():
        weight.grad = None
        with torch.no_grad():
            weight.clamp_(-1, 1)
        weight.pow(3).sum().backward()

    (step if mesh is None else pt.compile(step, backend="graph"))()
    return weight.grad if mesh is None else weight.grad.full_tensor()


def test_a_gradient_is_kept_where_what_is_written_was_not_reckoned_from_it():
    with pt.ranks(dp=2) as world:
        found = world.run(clipped_weights)
    torch.testing.assert_close(found[0], clipped_weights(), rtol=0, atol=1e-12)


def test_a_value_that_is_put_into_data_is_read_by_what_comes_after():
    """Where it was moved already, as a bias that is added by shares is."""

    def run(mesh, captured):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).double()
        x = torch.ones(2, 4, dtype=torch.float64)
        if mesh is not None:
            pt.parallelize(model, mesh, {"weight": {"tp": pt.Shard(1)}})
            x = pt.distribute_tensor(x, mesh, [pt.Replicate()])

        def step(x):
            before = model(x).sum()
            with torch.no_grad():
                model.bias.data = model.bias.detach() * 3
            between = model(x).sum()
            return before, between

        found = [v.item() for v in (pt.compile(step, backend="graph") if captured else step)(x)]
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 2, model.parameters())
        found.append(model(x).sum().item())
        return [*found, model.float()(x.float()).sum().item()]

    want = run(None, False)
    for captured in (False, True):
        with pt.ranks(tp=2) as world:
            assert world.run(run, captured)[1] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("name", ["t_", "unsqueeze_", "resize_"])
def test_an_input_keeps_its_shape(name):
    w = torch.ones(3, 4)
    how = {"t_": (), "unsqueeze_": (0,), "resize_": ((2, 6),)}[name]

    def step(x):
        made = getattr(x + 1, name)(*how)
        getattr(w, name)(*how)
        return made

    with pytest.raises(pt.CaptureError, match=rf"the shape .*\({name}\) \(at .*updates.py:\d+\)"):
        pt.compile(step, backend="graph")(w + 1)
    assert w.shape == (3, 4)


@pytest.mark.parametrize("whole", ["made at once", "loaded"])
def test_state_that_is_made_whole_is_sharded_with_the_optimizer(whole):
    def trained(mesh=None):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).double()
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
        if mesh is not None:
            pt.zero(model, mesh, stage=1)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        made = optim.Adagrad if whole == "made at once" else optim.RMSprop
        name = "sum" if whole == "made at once" else "square_avg"
        optimizer = made(model.parameters(), 0.1)
        if whole == "loaded":
            for p in model.parameters():
                optimizer.state[p] = {"step": torch.tensor(3.0), name: torch.ones_like(p)}
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        kept = optimizer.state[model.weight][name]
        if mesh is not None:
            assert kept.to_local().shape == (2, 4)
            kept = kept.full_tensor()
        return kept

    with pt.ranks(dp=2) as world:
        found = world.run(trained)
    torch.testing.assert_close(found[1], trained(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", ["tp", "zero"])
def test_a_parametrization_of_torch_is_put_on_a_model_that_is_spread_out(place):
    """It gives its parameters their values by `set_`, which torch has for `.data = y`."""

    def run(mesh):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).double()
        x = torch.ones(2, 4, dtype=torch.float64)
        if mesh is not None:
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        if mesh is not None and place == "tp":
            pt.parallelize(
                model, mesh, {"weight": {"dp": pt.Shard(0)}, "bias": {"dp": pt.Shard(0)}}
            )
        elif mesh is not None:
            pt.zero(model, mesh, stage=3)
        nn.utils.parametrizations.spectral_norm(model)
        with torch.no_grad():
            model.bias.set_(model.bias.detach() * 3)
        loss = model(x).square().sum()
        loss.backward()
        return loss.item(), model.bias.grad.sum().item()

    with pt.ranks(dp=2) as world:
        assert world.run(run)[1] == pytest.approx(run(None), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_what_a_step_gives_of_an_optimizers_counts_is_what_eager_gives(kind):
    def run(compiled):
        w = nn.Parameter(torch.ones(3))
        optimizer = kind([w])

        def step(x):
            for _ in range(2):
                optimizer.zero_grad()
                (w * x).sum().backward()
                optimizer.step()
            count = optimizer.state[w]["step"]
            return count, count / 3, w.sum()

        step = pt.compile(step, backend="graph") if compiled else step
        step(torch.ones(3))
        count, *values = step(torch.ones(3))
        assert count is optimizer.state[w]["step"]
        return count, *values

    for eager, captured in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.SGD])
def test_a_fused_optimizer_is_planned_for_tensors_without_memory(kind):
    def plan(**how):
        mesh = pt.dry_mesh(dp=2, device_type="meta")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            x = torch.zeros(3, 4)
        optimizer = kind(pt.zero(model, mesh, stage=3).parameters(), 0.1, **how)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        planned = pt.compile(step, backend="graph")
        planned.capture(pt.DTensor.from_local(x, mesh, [pt.Shard(0)]))
        assert optimizer.param_groups[0]["fused"] is how.get("fused")
        return str(planned.graph)

    assert plan(fused=True) == plan(foreach=True)


def test_a_gradient_is_one_value_however_often_it_is_kept_and_read(monkeypatch):
    traced = []
    rewrite = tracer.functionalize_graph

    def note(module, *given):
        traced.append(list(module.graph.nodes))
        return rewrite(module, *given)

    def run(mesh):
        model = pt.zero(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), mesh)
        optimizer = optim.SGD(model.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = pt.compile(step, backend="graph")
        step(pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)]))
        final = [n.target for n in step.program.graph.graph.nodes]
        return len(step.program.inputs), final.count(torch.ops.aten.detach.default)

    monkeypatch.setattr(tracer, "functionalize_graph", note)
    with pt.ranks(dp=1) as world:
        ((inputs, detached),) = world.run(run)
    (nodes,) = traced
    assert not detached
    # No input stands for a gradient that is not there.
    assert sum(n.op == "placeholder" for n in nodes) == inputs
