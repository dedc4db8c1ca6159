"""Does torch.save of a state of which each rank has a part lose none of it?"""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

import partita as pt
from partita import LayoutError
from tests.programs.gloo_ranks import run_ranks


def a_model():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def shown(fn):
    try:
        return fn()
    except LayoutError as error:
        return str(error)


def save(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


WRITERS = {
    "torch.save": save,
    "pickle": pickle.dumps,
    "a copy": lambda state: copy.deepcopy(state) and save(state),
}


@pytest.mark.parametrize("how", WRITERS)
def test_a_rank_of_one_process_that_pickles_alone_is_an_error_on_all(how):
    def body(mesh):
        model = pt.zero(a_model(), mesh, stage=3)
        x = pt.distribute_batch(torch.ones(4, 5), mesh)
        if mesh.get_rank() == 0:
            return shown(lambda: WRITERS[how](model.state_dict()))
        return shown(lambda: model(x))

    with pt.ranks(dp=2) as world:
        texts = world.run(body)
    assert len(set(texts)) == 1
    assert "pickles its piece of a tensor (torch.save)" in texts[0]
    assert "test_torch_save.py:" in texts[0]


def saves_alone(rank, others):
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = pt.zero(a_model(), mesh, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    x = pt.distribute_batch(torch.ones(4, 5), mesh)
    model(x).mean().backward()
    optimizer.step()
    if rank == 0:
        return shown(lambda: save({"optimizer": optimizer.state_dict()}))
    return shown(lambda: model(x) if others == "forward" else None)


@pytest.mark.slow
@pytest.mark.parametrize("others", ["forward", "ended"])
def test_a_process_that_saves_its_pieces_alone_gets_an_error_at_the_save(others):
    alone, other = run_ranks(saves_alone, 2, others)
    assert "pickles its piece of a tensor (torch.save)" in alone and "test_torch_save.py:" in alone
    if others == "forward":
        assert "pickles its piece of a tensor (torch.save)" in other and "all_gather" in other
        assert "pt.save(state, path)" in other


def test_files_of_all_ranks_bring_back_what_each_had():
    def body(mesh):
        model = pt.zero(a_model(), mesh, stage=3)
        state = torch.load(save(model.state_dict()), weights_only=True)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(state)
        return [p.full_tensor() for p in model.parameters()]

    for n in (2, 3):
        with pt.ranks(dp=n) as world:
            for found in world.run(body):
                assert all(map(torch.equal, found, a_model().parameters()))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_may_save_what_it_holds_whole(stage):
    def body(mesh):
        model = pt.zero(a_model(), mesh, stage=stage)
        if mesh.get_rank() == 0:
            state = torch.load(save(model.state_dict()), weights_only=True)
            return {name: x.full_tensor() for name, x in state.items()}

    with pt.ranks(dp=2) as world:
        found, _ = world.run(body)
    for name, p in a_model().state_dict().items():
        assert torch.equal(found[name], p)


def test_a_shallow_copy_is_for_one_rank_alone():
    def body(mesh):
        x = pt.distribute_tensor(torch.arange(6.0), mesh, [pt.Shard(0)])
        x.note = "mine"
        if mesh.get_rank() == 0:
            y = copy.copy(x)
            y.to_local()[0] = 7
            assert y.placements == x.placements and y.note == "mine" and y is not x
        return x.full_tensor()[0].item()

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [7.0, 7.0]


def saves_in_a_thread(rank):
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    pieces = [pt.distribute_tensor(torch.arange(6.0), mesh, [pt.Shard(0)]) for _ in range(30)]
    files = []
    thread = threading.Thread(target=lambda: files.append(save(pieces)))
    if rank == 0:
        thread.start()
    sums = [(x * 2).sum().item() for x in pieces]
    if rank == 1:
        thread.start()
    thread.join(60)
    return sums, [x.full_tensor().sum().item() for x in torch.load(files[0], weights_only=True)]


def test_a_thread_may_save_beside_reads_of_the_program():
    assert run_ranks(saves_in_a_thread, 2) == [([30.0] * 30, [15.0] * 30)] * 2


VIEWS = {
    "column": lambda x: x[:, :1],
    "turned": lambda x: x.t(),
    "row": lambda x: x[1],
    "row of rows": lambda x: x[1:][0, ...],
    "rows": lambda x: x.split(1)[1],
    "flat": lambda x: x.view(-1),
    "diagonal": lambda x: x.diagonal(),
}


@pytest.mark.parametrize("ranks", [2, 4])  # uneven pieces, and an empty one
def test_loaded_tensors_keep_their_strides_and_the_memory_that_they_share(ranks):
    def body(mesh):
        found = []
        for view in VIEWS.values():
            for order in (lambda x, y: (x, y), lambda x, y: (y, x), lambda x, y: (x[2], y)):
                x = torch.arange(6.0).view(3, 2)
                x = x if mesh is None else pt.distribute_tensor(x, mesh, [pt.Shard(0)])
                pair = torch.load(save([*order(x, view(x))]), weights_only=True)
                found.append(pair[1].stride())
                for i in (0, 1):
                    pair[i].mul_(10).add_(i)
                    found += [t.clone() if mesh is None else t.full_tensor() for t in pair]
        return found

    truth = body(None)
    with pt.ranks(dp=ranks) as world:
        for found in world.run(body):
            torch.testing.assert_close(found, truth)


def test_a_view_that_is_saved_alone_may_be_loaded_by_one_rank():
    def body(mesh):
        x = pt.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [pt.Shard(0)])
        rows = x[1:]
        if mesh.get_rank() == 0:
            return torch.load(save(rows)).mul_(2).tolist()

    with pt.ranks(dp=2) as world:
        assert world.run(body) == [[[4.0, 6.0], [8.0, 10.0]], None]


def test_pickle_keeps_no_memory_that_tensors_share():
    def body(mesh):
        x = pt.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [pt.Shard(0)])
        base, row = pickle.loads(pickle.dumps([x, x[1]]))
        base.zero_()
        return row.full_tensor().tolist()

    with pt.ranks(dp=4) as world:
        assert world.run(body) == [[2.0, 3.0]] * 4
