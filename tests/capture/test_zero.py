"""Do all stages of ZeRO train in a graph as in eager, in the dtypes that were asked for?"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from tests.programs.steps import squares
from tests.programs.uneven_steps import X, Y, close, compiled, on, widths

MAKE = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "loop": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=False),
}


def train(mesh, fast, *, make, steps=3, clip=False, keeps=False, **zero):
    """Losses; where each rank's state and gradients lie afterwards; the step."""
    model, x, y = widths(), X, Y
    if mesh is not None:
        model = pt.zero(model, mesh, **zero)
        x, y = on(mesh)(X), on(mesh)(Y)
    optimizer = MAKE[make](model.parameters())

    def step(x, y):
        if not keeps:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clip:
            pt.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    step = compiled(step) if fast else step
    losses = torch.tensor([step(x, y).item() for _ in range(steps)])
    state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    where = [str(v.layout_over_mesh) for v in state] if mesh is not None else []
    return losses, where, step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks", "make", "clip"),
    [
        (1, 3, "adamw", False),
        (1, 2, "momentum", True),
        (2, 3, "adamw", True),
        (2, 2, "momentum", False),
        (2, 2, "loop", False),
    ],
)
def test_stages_1_and_2_train_as_in_eager_with_their_state_in_shards(stage, ranks, make, clip):
    with pt.ranks(dp=ranks) as world:
        eager = world.run(partial(train, make=make, stage=stage, clip=clip), False)
        fast = world.run(partial(train, make=make, stage=stage, clip=clip), True)
    close(fast[0][0], eager[0][0])
    close(fast[0][0], train(None, False, make=make, clip=clip)[0], rtol=1e-5)
    assert [where for _, where, _ in fast] == [where for _, where, _ in eager]
    assert all("@dp" in layout for layout in fast[0][1])
    assert len({step.key for _, _, step in fast}) == 1
    moves = [str(n.target).split(".")[1] for n in fast[0][2].graph.moves]
    assert moves.count("all_gather_into_tensor") == (1 if stage == 1 else 3)  # blocks


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_are_kept_add_up_over_the_steps_of_a_graph(stage):
    with pt.ranks(dp=2) as world:
        eager = world.run(partial(train, make="adamw", stage=stage, keeps=True), False)
        fast = world.run(partial(train, make="adamw", stage=stage, keeps=True), True)
    close(fast[0][0], eager[0][0])
    close(fast[0][0], train(None, False, make="adamw", keeps=True)[0], rtol=1e-5)


def batches(mesh, fast, stage):
    """Losses of steps of two micro-batches, the first under no_sync."""
    model = pt.zero(widths(), mesh, stage=stage)
    x, y = on(mesh)(X), on(mesh)(Y)
    optimizer = MAKE["adamw"](model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        for waits in (True, False):
            with pt.no_sync(model) if waits else nullcontext():
                loss = F.mse_loss(model(x), y)
                loss.backward()
        optimizer.step()
        return loss

    step = compiled(step) if fast else step
    return torch.tensor([step(x, y).item() for _ in range(2)])


@pytest.mark.slow
def test_no_sync_is_kept_in_stages_1_and_2_and_refused_in_stage_3():
    with pt.ranks(dp=2) as world:
        for stage in (1, 2):
            close(world.run(batches, True, stage)[0], world.run(batches, False, stage)[0])
        with pytest.raises(pt.CaptureError, match="no_sync under stage 3"):
            world.run(batches, True, 3)


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [
        pt.MixedPrecision(BF16),
        pt.MixedPrecision(BF16, reduce_dtype=BF16),
        pt.MixedPrecision(grad_dtype=BF16),
        pt.MixedPrecision(BF16, grad_dtype=F32),
    ],
    ids=["bf16", "summed in bf16", "sent in bf16", "sent in f32"],
)
def test_gradients_are_rounded_and_summed_in_the_dtypes_that_were_asked_for(precision):
    with pt.ranks(dp=2) as world:
        eager = world.run(partial(train, make="adamw", precision=precision, steps=4), False)
        fast = world.run(partial(train, make="adamw", precision=precision, steps=4), True)
        plain = world.run(partial(train, make="adamw", steps=4), True)
    close(fast[0][0], eager[0][0])
    assert not torch.allclose(fast[0][0], plain[0][0], rtol=1e-6, atol=0)
    summed = {
        n.args[0].meta["val"].dtype for n in fast[0][2].graph.moves if "reduce_scatter" in n.name
    }
    assert summed == {precision.reduce_dtype or F32}


class Shares(torch.nn.Module):
    """A layer whose parameters stand in a list and a dictionary of the model, too."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.weights, self.named = [self.layer.weight], {"bias": self.layer.bias}

    def forward(self, x):
        return torch.nn.functional.linear(self.layer(x), self.weights[0]) + self.named["bias"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_stands_in_a_list_too_is_the_same_parameter(stage):
    def train(mesh, compiled):
        torch.manual_seed(0)
        model, x = Shares().double(), torch.ones(4, 4).double()
        if mesh:
            pt.zero(model, mesh, stage=stage)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = pt.compile(step, backend="graph") if compiled else step
        return torch.tensor([step(x).item() for _ in range(3)])

    with pt.ranks(dp=2) as world:
        for found in world.run(train, True):
            torch.testing.assert_close(found, train(None, False))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_schedule_that_watches_its_optimizer_steps_beside_the_graph(stage):
    """It puts a function of its own in the place of `optimizer.step`, which sets an attribute."""

    def run(mesh):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        x = torch.ones(2, 4)
        if mesh is not None:
            pt.zero(model, mesh, stage=stage)
            x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = squares(model, optimizer)
        fast = step if mesh is None else pt.compile(step, backend="graph")
        losses = []
        for _ in range(4):
            losses.append(fast(x).item())
            schedule.step()
        return losses

    with pt.ranks(dp=2) as world:
        assert world.run(run)[1] == pytest.approx(run(None))


def test_a_sharded_model_is_evaluated_in_inference_mode():
    def run(mesh):
        model = pt.zero(nn.Linear(4, 4), mesh, stage=3)
        x = pt.distribute_tensor(torch.ones(2, 4), mesh, [pt.Shard(0)])
        want = model(x).square().mean().item()
        with torch.inference_mode():
            return want, pt.compile(lambda x: model(x).square().mean(), backend="graph")(x).item()

    for want, found in pt.ranks(dp=2).run(run):
        assert found == pytest.approx(want)
