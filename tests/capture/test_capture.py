"""Is a captured step the step, whatever it does, and the same graph on every rank?"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.guards.inputs import find_state
from tests.programs.captured_steps import (
    adamw,
    data_parallel,
    loss_of,
    losses,
    plain_step,
    rows,
    split_words,
    tensor_parallel,
    tiny,
    zero3,
)
from tests.programs.zero_training import TOKENS


def same(found, wanted, rtol=1e-6):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=rtol, atol=0)


def compare(mesh, spread_out, build, make, make_step=plain_step, steps=3):
    """The losses of an eager and of a captured run, and the captured step."""
    batch = [rows(mesh)(t) for t in TOKENS]
    found = []
    for compiled in (False, True):
        model = spread_out(build(), mesh)
        step = make_step(model, make(model.parameters()))
        if compiled:
            step = pt.compile(step, backend="graph")
        found.append(losses(step, batch, steps))
    same(found[1], found[0])
    return found[1], step, model


def graphs(per_rank):
    return {str(step.program.graph.graph) for _, step, _ in per_rank}


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread_out", "axes"),
    [
        (data_parallel, {"dp": 2}),
        (tensor_parallel, {"tp": 2}),
        (split_words, {"tp": 2}),
        (tensor_parallel, {"dp": 2, "tp": 2}),
        (split_words, {"dp": 2, "tp": 2}),
        (zero3, {"dp": 2}),
        (zero3, {"dp": 4}),
    ],
)
def test_a_captured_step_has_the_losses_of_eager_and_one_graph_on_all_ranks(spread_out, axes):
    with pt.ranks(**axes) as world:
        per_rank = world.run(compare, spread_out, tiny, adamw)
    assert len(graphs(per_rank)) == 1
    assert all(step.reasons == ["the first call"] for _, step, _ in per_rank)
    model = tiny()
    single = losses(plain_step(model, adamw(model.parameters())), TOKENS, 3)
    same(per_rank[0][0], single, rtol=1e-5)


# -- optimizers ------------------------------------------------------------------------------------

MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "foreach": lambda p: adamw(p, foreach=True),
    "loop": lambda p: adamw(p, foreach=False),
    "fused": lambda p: adamw(p, fused=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "spread_out"), [*((m, data_parallel) for m in MAKE), ("adam", zero3), ("fused", zero3)]
)
def test_any_optimizer_of_torch_steps_in_the_graph(make, spread_out):
    with pt.ranks(dp=2) as world:
        per_rank = world.run(compare, spread_out, tiny, MAKE[make])
    assert len(graphs(per_rank)) == 1
    assert per_rank[0][1].reasons == ["the first call"]


@pytest.mark.slow
def test_a_schedule_of_learning_rates_needs_one_graph():
    def run(mesh):
        found = []
        for compiled in (False, True):
            model = data_parallel(tiny(), mesh)
            optimizer = adamw(model.parameters())
            step = plain_step(model, optimizer)
            step = pt.compile(step, backend="graph") if compiled else step
            batch = [rows(mesh)(t) for t in TOKENS]
            found.append([])
            for _ in range(5):
                optimizer.param_groups[0]["lr"] *= 0.5
                found[-1].append(step(*batch).item())
        same(found[1], found[0])
        assert step.reasons == ["the first call"]

    with pt.ranks(dp=2) as world:
        world.run(run)


@pytest.mark.slow
def test_an_optimizer_goes_on_eagerly_where_the_graph_left_off():
    def run(mesh):
        batch = [rows(mesh)(t) for t in TOKENS]
        found = []
        for compiled in (0, 2, 4):
            model = zero3(tiny(), mesh)
            step = plain_step(model, adamw(model.parameters()))
            fast = pt.compile(step, backend="graph")
            found.append([(fast if i < compiled else step)(*batch).item() for i in range(4)])
        same(found[1], found[0])
        same(found[2], found[0])

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- what a step does ------------------------------------------------------------------------------


def accumulating(model, optimizer):
    def step(tokens, targets):
        optimizer.zero_grad()
        total = 0
        for tok, tar in zip(tokens.chunk(2, 1), targets.chunk(2, 1), strict=True):
            loss = loss_of(model, tok, tar) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


def clipping(model, optimizer):
    def step(tokens, targets):
        loss = loss_of(model, tokens, targets)
        loss.backward()
        pt.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def torchs_clipping(model, optimizer):
    def step(tokens, targets):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return step


def functional_update(model, optimizer):
    params = list(model.parameters())

    def step(tokens, targets):
        loss = loss_of(model, tokens, targets)
        grads = torch.autograd.grad(loss, params)
        pt_grads = [
            g.redistribute(placements=p.placements) for g, p in zip(grads, params, strict=True)
        ]
        with torch.no_grad():
            for p, g in zip(params, pt_grads, strict=True):
                p -= 0.1 * g
        return loss

    return step


def autocast(model, optimizer):
    inner = plain_step(model, optimizer)

    def step(tokens, targets):
        with torch.autocast("cpu", torch.bfloat16):
            return inner(tokens, targets)

    return step


def never_cleared(model, optimizer):
    """Gradients add up over the steps: a mistake, and the graph makes the same."""

    def step(tokens, targets):
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


STEPS = [accumulating, clipping, torchs_clipping, functional_update, autocast, never_cleared]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_step", "spread_out", "axes"),
    [
        *((make_step, data_parallel, {"dp": 2}) for make_step in STEPS),
        (accumulating, tensor_parallel, {"dp": 2, "tp": 2}),
        (clipping, zero3, {"dp": 2}),
    ],
)
def test_a_step_may_do_what_steps_do(make_step, spread_out, axes):
    with pt.ranks(**axes) as world:
        per_rank = world.run(compare, spread_out, tiny, MAKE["sgd"], make_step)
    assert len(graphs(per_rank)) == 1


class Small(nn.Module):
    """A tied weight, a buffer that is written, and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 256, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.seen = self.seen + 1
        x = self.embed(tokens)
        x = self.norm(x.flatten(0, 1)).unflatten(0, tokens.shape)
        return self.head(F.dropout(x, 0.1, self.training))


def small():
    torch.manual_seed(0)
    return Small()


@pytest.mark.slow
def test_tied_weights_written_buffers_and_dropout_are_those_of_eager():
    def run(mesh):
        batch = [rows(mesh)(t) for t in TOKENS]
        found, buffers = [], []
        for compiled in (False, True):
            model = pt.parallelize(small(), mesh)
            step = plain_step(model, adamw(model.parameters()))
            step = pt.compile(step, backend="graph") if compiled else step
            torch.manual_seed(5)
            found.append(losses(step, batch, 4))
            buffers.append({n: copy.deepcopy(b) for n, b in model.named_buffers()})
        same(found[1], found[0])
        assert int(buffers[1]["seen"]) == 4
        for name, b in buffers[0].items():
            torch.testing.assert_close(buffers[1][name].full_tensor(), b.full_tensor())
        return found[1], step, model

    with pt.ranks(dp=2) as world:
        per_rank = world.run(run)
    assert len(graphs(per_rank)) == 1


def test_inputs_and_outputs_may_be_nested():
    def run(mesh):
        w = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)]).requires_grad_()

        def step(batch, *, scale):
            y = (batch["x"] @ w).sum() * scale
            (grad,) = torch.autograd.grad(y, w)
            return {"y": y, "grads": [grad], "text": "done", "n": 3}

        x = pt.distribute_tensor(torch.arange(8.0).view(2, 4), mesh)
        wanted = step({"x": x}, scale=2.0)
        found = pt.compile(step, backend="graph")({"x": x}, scale=2.0)
        assert found["text"] == "done" and found["n"] == 3
        for a, b in ((found["y"], wanted["y"]), (found["grads"][0], wanted["grads"][0])):
            assert a.placements == b.placements
            torch.testing.assert_close(a.full_tensor(), b.full_tensor())

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_that_a_step_makes_for_others_are_kept_and_add_up():
    def run(mesh):
        batch = [rows(mesh)(t) for t in TOKENS]

        def grads(compiled):
            model = data_parallel(tiny(), mesh)

            def step(tokens, targets):
                loss_of(model, tokens, targets).backward()

            step = pt.compile(step, backend="graph") if compiled else step
            for _ in range(3):
                step(*batch)
            return [p.grad.full_tensor() for p in model.parameters()]

        for a, b in zip(grads(True), grads(False), strict=True):
            torch.testing.assert_close(a, b)

    with pt.ranks(dp=2) as world:
        world.run(run)


@pytest.mark.slow
def test_gradients_that_have_done_their_work_are_gone():
    def run(mesh):
        model = data_parallel(tiny(), mesh)
        step = pt.compile(plain_step(model, MAKE["sgd"](model.parameters())), backend="graph")
        step(*[rows(mesh)(t) for t in TOKENS])
        assert all(p.grad is None for p in model.parameters())
        assert [o.kind for o in step.program.outputs] == ["result"]

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- other programs --------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_shape_value_or_mode_is_another_capture_with_its_reason():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    scale = 1

    def step(x):
        return (model(x) * scale).sum()

    fast = pt.compile(step, backend="graph", keep=2)
    for n in (2, 3, 2):
        assert fast(torch.ones(n, 4)).item() == step(torch.ones(n, 4)).item()
    assert len(fast.reasons) == 2 and "shape (2, 4) became (3, 4)" in fast.reasons[1]
    scale = 3
    assert fast(torch.ones(2, 4)).item() == step(torch.ones(2, 4)).item()
    assert "scale" in fast.reasons[2]
    model.eval()
    fast(torch.ones(2, 4))
    assert "training" in fast.reasons[3]
    assert len(fast.programs) == 2


# -- what cannot be captured -----------------------------------------------------------------------


def number(x):
    return x * float(x.sum())


def unknown_shape(x):
    return x[x > 0]


@pytest.mark.parametrize("step", [number, unknown_shape], ids=lambda f: f.__name__)
def test_what_depends_on_data_is_refused_with_the_users_line_or_runs_eagerly(step):
    x = torch.arange(-2.0, 6)
    with pytest.raises(pt.CaptureError) as caught:
        pt.compile(step, backend="graph")(x)
    assert "test_capture.py:" in str(caught.value)
    assert 'fallback="eager"' in str(caught.value)
    with pytest.warns(UserWarning, match="runs eagerly"):
        found = pt.compile(step, backend="graph", fallback="eager")(x)
    torch.testing.assert_close(found, step(x))


def test_a_plain_argument_that_differs_between_ranks_is_refused_on_all():
    def run(mesh):
        x = pt.distribute_tensor(torch.ones(4), mesh, [pt.Shard(0)])
        mine = torch.full((4,), float(mesh.get_rank()))
        with pytest.raises(pt.LayoutError, match="differs between ranks 0 and 1"):
            pt.compile(lambda x, y: x + y, backend="graph")(x, mine)
        same = pt.compile(lambda x, y: x + y, backend="graph")(x, torch.arange(4.0))
        assert torch.equal(same.full_tensor(), torch.arange(1.0, 5.0))

    with pt.ranks(dp=2) as world:
        world.run(run)


class Holder:
    def __init__(self):
        self.w = torch.ones(3)


def test_a_tensor_of_a_key_is_found_whether_or_not_its_holder_is_named():
    def step(x):
        (found,) = places
        found.w.add_(x)
        return found.w * 2

    for named in (False, True):
        holder = Holder()
        places = {holder: 1}  # where the step finds it among the keys
        fast = pt.compile(step, backend="graph", state=[holder] if named else ())
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 4.0))
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 6.0))
        assert torch.equal(holder.w, torch.full((3,), 3.0))
        holder.w = torch.zeros(3)
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 2.0))
        places.clear()
        places[other := Holder()] = 1
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 4.0))
        assert torch.equal(other.w, torch.full((3,), 2.0))
        assert torch.equal(holder.w, torch.full((3,), 1.0))


amax = 2.0  # and no global that a step reads which calls the method of this name


def test_a_global_is_part_of_a_step_where_it_is_named_and_not_where_a_method_is():
    def by_the_method(x):
        return x.amax()

    def by_the_global(x):
        return x * amax

    assert not [slot.name for slot in find_state(by_the_method, (), (), {}).values]
    assert [slot.name for slot in find_state(by_the_global, (), (), {}).values] == ["amax"]


def rematerialised(model, mesh):
    pt.parallelize(model, mesh)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = pt.remat(block)
    return model


@pytest.mark.slow
def test_a_rematerialised_block_is_captured_with_its_recompute():
    with pt.ranks(dp=2) as world:
        per_rank = world.run(compare, rematerialised, tiny, adamw)
    assert len(graphs(per_rank)) == 1


def test_a_step_that_raises_leaves_what_it_leaves_in_eager():
    def run(compiled):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = adamw(model.parameters())
        params = list(model.parameters())

        def step(x):
            model(x).sum().backward()
            optimizer.step()
            raise ValueError("in the middle")

        with pytest.raises(ValueError, match="in the middle"):
            compiled(step)(torch.ones(2, 4))
        assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
        states = [t for state in optimizer.state.values() for t in state.values()]
        return [*params, *(p.grad for p in params), *states]

    found = run(lambda step: pt.compile(step, backend="graph"))
    for mine, eager in zip(found, run(lambda step: step), strict=True):
        assert type(mine) is type(eager) and torch.equal(mine, eager)
    assert not torch.compiler.is_compiling()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_step_may_make_sparse_tensors_that_are_alike():
    at = torch.tensor([[0, 1], [1, 2]])

    def sums(values, x):
        one, two = (torch.sparse_coo_tensor(at, v, (3, 3)) for v in (values, values * 2))
        return one @ x + two @ x + (one * 2).to_dense() + (two * 2).to_dense()

    values, x = torch.randn(2), torch.randn(3, 3)
    torch.testing.assert_close(pt.compile(sums, backend="graph")(values, x), sums(values, x))
