"""Is the padding of an uneven shard behind it in memory that nobody else is shown?"""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt
from partita.parallel import flat_buffer
from partita.tensor.tensor_state import spec_on_mesh
from partita.tensor.uneven_pieces import find_padded
from tests.programs.steps import squares
from tests.programs.zero_states import zero_state

X = torch.rand(6, 6, generator=torch.Generator().manual_seed(5)) + 0.5
ROWS = {7: (3, 3, 1), 2: (1, 1, 0)}  # of a dimension, on each of three ranks


def widths():
    """Two weights and biases whose rows three ranks share unevenly; of the last one has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 2))


def on(mesh):
    placements = [pt.Shard(0) if a == "dp" else pt.Replicate() for a in mesh.mesh_dim_names]
    return lambda t: pt.distribute_tensor(t, mesh, placements)


def padded_shape_of(t):
    return spec_on_mesh(t.device_mesh, t.shape, t.placements).padded_shape


def has_room(t):
    """Is there memory behind a piece for as much as the first rank's has more?"""
    local, padded = t.to_local().detach(), padded_shape_of(t)
    return tuple(local.shape) == padded or find_padded(local, padded) is not None


def training(model, mesh, fast=True, make=torch.optim.AdamW):
    """The optimizer of a model, and its step; on a mesh."""
    optimizer = make(model.parameters(), lr=0.1)
    rows = (lambda t: t) if mesh is None else on(mesh)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = pt.compile(step, backend="graph") if fast else step
    return optimizer, lambda: run(rows(X[:5])).item()


def states(optimizer):
    return [v for s in optimizer.state.values() for v in s.values() if v.dim()]


def shown(t):
    """Bytes of the storage in which a tensor is, and where that begins."""
    storage = pt.DTensor.to_local(t).untyped_storage()
    return storage.nbytes(), storage.data_ptr()


def is_exact(t):
    return shown(t)[0] == t.to_local().nbytes


@pytest.mark.slow
def test_no_storage_of_the_users_is_resized_and_none_shows_the_padding():
    def run(mesh):
        model = pt.zero(widths(), mesh)
        before = [shown(p) for p in model.parameters()]
        aliases = [p.detach().to_local() for p in model.parameters()]
        optimizer, step = training(model, mesh)
        places = []
        for _ in range(3):
            step()
            places.append([shown(t) for t in (*model.parameters(), *states(optimizer))])
        assert places[0] == places[1] == places[2]  # what is written is written where it is
        assert places[0][: len(before)] == before
        assert all(
            torch.equal(a, p.to_local()) for a, p in zip(aliases, model.parameters(), strict=True)
        )
        assert all(map(is_exact, (*model.parameters(), *states(optimizer))))
        return [p.to_local().shape[0] for p in model.parameters()]

    with pt.ranks(dp=3) as world:
        assert world.run(run) == [[ROWS[n][rank] for n in (7, 7, 2, 2)] for rank in range(3)]


@pytest.mark.slow
def test_no_file_holds_padding():
    def run(mesh):
        model = pt.zero(widths(), mesh)
        optimizer, step = training(model, mesh)
        step()
        for t in (*model.parameters(), *states(optimizer)):
            mine = t.detach().to_local()
            for same in (mine, pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
                assert same.untyped_storage().nbytes() == mine.nbytes
            written, wanted = io.BytesIO(), io.BytesIO()
            torch.save(mine, written)
            torch.save(mine.clone(), wanted)
            assert len(written.getvalue()) == len(wanted.getvalue())

    with pt.ranks(dp=3) as world:
        world.run(run)


def places(tensors):
    return [shown(t)[1] for t in tensors]


def no_change(model, optimizer):
    """The program leaves everything where it is."""


def other_data(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def other_dtype(model, optimizer):
    model.double().float()


def loaded_state(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def gradients_of_eager(model, optimizer):
    model(on(next(model.parameters()).device_mesh)(X[:5])).sum().backward()


def from_a_file(model, optimizer):
    written = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], written)
    written.seek(0)
    for whole, state in zip((model, optimizer), torch.load(written), strict=True):
        whole.load_state_dict(state)


CHANGES = [no_change, other_data, other_dtype, loaded_state, gradients_of_eager, from_a_file]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "change"), [*((3, change) for change in CHANGES), (1, no_change), (1, from_a_file)]
)
def test_what_comes_without_room_is_given_it_once(change, stage):
    def run(mesh, fast):
        model = pt.zero(widths(), mesh, stage=stage)
        optimizer, step = training(model, mesh, fast)
        losses = [step(), step()]
        change(model, optimizer)
        losses.append(step())
        held = [*model.parameters(), *states(optimizer)]
        before = places(held)
        losses += [step(), step()]
        stays = places(held) == before and all(map(is_exact, held))
        return losses, stays and (not fast or all(map(has_room, held)))

    with pt.ranks(dp=3) as world:
        found, eager = world.run(run, True), world.run(run, False)
    for (losses, stays), (wanted, _) in zip(found, eager, strict=True):
        assert stays
        assert losses == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_memory_that_others_see_is_not_exchanged():
    def run(mesh):
        model = pt.zero(widths(), mesh)
        seen = []
        for p in model.parameters():
            p.data = p.data.clone()
            seen.append(p.to_local().detach())
        plain = np.full(p.to_local().shape, 0.5, dtype=np.float32)
        p.data = tagged_as(p, torch.from_numpy(plain))
        seen[-1] = p.to_local().detach()
        before = places(model.parameters())
        _, step = training(model, mesh)
        step(), step()
        assert places(model.parameters()) == before
        assert all(
            torch.equal(a, p.to_local()) for a, p in zip(seen, model.parameters(), strict=True)
        )
        assert not plain.size or (plain != 0.5).any()
        assert torch.equal(torch.from_numpy(plain), p.to_local().detach())

    with pt.ranks(dp=3) as world:
        world.run(run)


def tagged_as(p, local):
    return pt.DTensor.from_local(
        local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    )


@pytest.mark.slow
def test_a_copy_of_a_model_has_room_of_its_own():
    def run(mesh):
        first = pt.zero(widths(), mesh)
        second = copy.deepcopy(first)
        before = places(second.parameters())
        kept = [p.to_local().clone() for p in first.parameters()]
        _, step = training(second, mesh)
        step()
        assert places(second.parameters()) == before
        after = [p.to_local() for p in first.parameters()]
        assert all(map(torch.equal, kept, after))
        assert {*before} & {*places(first.parameters())} <= {0}  # where a piece has no elements

    with pt.ranks(dp=3) as world:
        world.run(run)


@pytest.mark.parametrize("axes", [{"dp": 3}, {"dp": 2, "tp": 3}])
@pytest.mark.parametrize("by", ["zero", "parallelize", "materialize", "factory"])
def test_whoever_makes_an_uneven_shard_makes_room_behind_it(by, axes):
    def run(mesh):
        model, weights = widths(), None
        if by == "zero":
            pt.zero(model, mesh, "dp")
        elif by == "factory":
            weights = [pt.zeros(7, 6, device_mesh=mesh, placements=[pt.Shard(0)] * mesh.ndim)]
        else:
            if by == "materialize":
                model.to("meta")
            pt.parallelize(model, mesh, {"*": {"dp": pt.Shard(0)}})
            pt.materialize(model) if by == "materialize" else None
        for p in weights or model.parameters():
            local = p.to_local().detach()
            whole = find_padded(local, padded_shape_of(p))
            if tuple(local.shape) == padded_shape_of(p):
                assert whole is None
            else:
                assert whole.shape == padded_shape_of(p)
                assert torch.equal(whole[: local.shape[0]], local)
                assert not local.numel() or whole.data_ptr() == local.data_ptr()

    with pt.ranks(**axes) as world:
        world.run(run)


@pytest.mark.slow
def test_tied_weights_stay_one_and_are_written_where_they_are():
    def run(mesh, fast):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 6))
        model[2].weight = model[0].weight
        if mesh is not None:
            pt.zero(model, mesh)
            before = places(model.parameters())
        rows = (lambda t: t) if mesh is None else on(mesh)
        step = squares(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        run = pt.compile(step, backend="graph") if fast else step
        losses = [run(rows(X[:4, :5])).item() for _ in range(3)]
        if mesh is not None:
            assert model[2].weight is model[0].weight and places(model.parameters()) == before
        return losses

    with pt.ranks(dp=3) as world:
        found, eager = world.run(run, True), world.run(run, False)
    for losses in (*found, *eager):
        assert losses == pytest.approx(run(None, False), rel=1e-5)


def test_what_a_graph_makes_is_not_copied_to_be_cut():
    def run(mesh):
        x = on(mesh)(X[:5])
        step = pt.compile(lambda x: (x + 1, x.view_as(x)), backend="graph")
        more, same = step(x)
        rows = x.to_local().shape[0]
        for t, wanted in ((more, X[:5] + 1), (same, X[:5])):
            assert torch.equal(t.full_tensor(), wanted) and t.to_local().shape[0] == rows
            assert is_exact(t)
        has_room = find_padded(more.to_local(), padded_shape_of(more)) is not None
        assert has_room == (rows < 2)
        return shown(same)[1] != shown(x)[1] or not rows

    with pt.ranks(dp=3) as world:
        world.run(run)


@pytest.mark.parametrize("axes", [{"dp": 3}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("absent", [False, True])
def test_what_pads_gradients_on_their_way_is_zero_and_adds_nothing(axes, absent, monkeypatch):
    def run(mesh):
        model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1, bias=False), nn.Linear(1, 12))
        pt.zero(model, mesh, mesh.mesh_dim_names, blocks=[model])
        (unit,) = zero_state(model).groups
        (one,) = unit.flats
        grads = [torch.full(p.whole.local_shape, i + 1.0) for i, p in enumerate(one.pieces)]
        if absent:
            grads[1] = None
        torch.full((one.n, one.length), float("nan"))  # what memory is made of next
        return one.pack_gradients(grads, torch.float32).sums

    found = []
    for large in (0, 1 << 30):
        monkeypatch.setattr(flat_buffer, "LARGE", large)
        with pt.ranks(**axes) as world:
            found.append(world.run(run))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) and (a == 0).any()


def test_room_that_is_given_in_inference_serves_training():
    def run(mesh, fast):
        model = pt.parallelize(widths(), mesh, {"*": {"dp": pt.Shard(0)}})
        for p in model.parameters():
            p.data = p.data.clone()
        x = pt.distribute_tensor(X, mesh)
        with torch.inference_mode():
            evaluate = lambda: model(x).square().mean()  # noqa: E731
            seen = (pt.compile(evaluate, backend="graph") if fast else evaluate)().item()
        assert not fast or all(map(has_room, model.parameters()))
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return seen, [p.full_tensor().detach() for p in model.parameters()]

    with pt.ranks(dp=3) as world:
        (seen, found), (wanted, values) = world.run(run, True)[2], world.run(run, False)[2]
    assert seen == pytest.approx(wanted)
    torch.testing.assert_close(found, values)
