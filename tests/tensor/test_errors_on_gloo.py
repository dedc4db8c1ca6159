"""Do real ranks all hear of bad input, and does none of them wait for ever?"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partita as pt
from partita import LayoutError, Partial, Replicate, Shard
from tests.programs.gloo_ranks import run_ranks

T = torch.arange(32.0).view(8, 4)


def heard(fn):
    """What one rank is told; and afterwards it can still work with the others."""
    try:
        value = fn()
    except LayoutError as error:
        return error
    return value


def mesh_of(rank, sizes=(2,), names=("dp", "tp")):
    return pt.init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])


# -- how long ranks wait ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["gloo", "cpu:gloo", "cuda:gloo"])
def test_ranks_wait_as_long_as_the_job_says_whatever_its_devices_are(kinds, tmp_path):
    script = f"""
import torch.distributed as dist
from datetime import timedelta
from partita.comm.waiting import timeout_of_job

meeting = dict(init_method="file://{tmp_path}/meeting", rank=0, world_size=1)
dist.init_process_group({kinds!r}, timeout=timedelta(seconds=77), **meeting)
print(timeout_of_job().total_seconds())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "77.0\n", ran.stderr


# -- a mesh that does not fit the job --------------------------------------------------------------


def made(rank, sizes):
    error = heard(lambda: mesh_of(rank, sizes))
    if not isinstance(error, LayoutError):
        return error.shape, None
    fitting = eval(error.fixes[0].write.removeprefix("mesh_shape="))
    return str(error), mesh_of(rank, fitting).size()


@pytest.mark.parametrize(
    ("sizes", "said"), [((2, 3), "2 x 3 needs 6"), ((3,), "3 needs 3")], ids=str
)
def test_a_mesh_that_does_not_match_the_world_is_refused_on_every_rank(sizes, said):
    results = run_ranks(made, 4, sizes)
    assert len({text for text, _ in results}) == 1
    assert f"a mesh of {said} ranks, and the job has 4" in results[0][0]
    assert all(fitted == 4 for _, fitted in results)


def leaves_at_once(rank, folder):
    made = dist.ProcessGroupGloo

    def slowly(*args):
        group = made(*args)
        if rank == 1:
            time.sleep(1)
            Path(folder, "made").touch()
        return group

    dist.ProcessGroupGloo = slowly
    mesh_of(rank)
    return Path(folder, "made").exists()


@pytest.mark.slow
def test_no_rank_has_a_mesh_and_may_end_before_all_are_connected(tmp_path):
    assert run_ranks(leaves_at_once, 2, str(tmp_path)) == [True, True]


# -- a rank that is gone ---------------------------------------------------------------------------


class Broken(torch.autograd.Function):
    """Raises on rank 1 of the job, in the pass that is asked for."""

    @staticmethod
    def forward(ctx, x, where):
        if dist.get_rank() == 1 and where == "forward":
            raise ZeroDivisionError("this rank has had enough")
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if dist.get_rank() == 1 and ctx.where == "backward":
            raise ZeroDivisionError("this rank has had enough")
        return g, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.where = ""

    def forward(self, x):
        for layer in self.layers:
            x = Broken.apply(layer(x), self.where)
        return x


def one_raises(rank, folder, where):
    mesh = mesh_of(rank, (3,))
    model = pt.zero(pt.parallelize(Net(), mesh, {}), mesh, "dp", stage=3)
    x = pt.distribute_tensor(T, mesh, [Shard(0)])
    model(x).sum().backward()
    model.where = where
    try:
        model(x).sum().backward()
        if rank == 1:
            raise ZeroDivisionError("this rank has had enough")
        (x + 1).sum().item()
    except RuntimeError as error:  # as torch's own is, for those who wait for it
        assert isinstance(error, LayoutError)
        assert type(pickle.loads(pickle.dumps(error))) is type(error)
        Path(folder, str(rank)).write_text(str(error))
        until = time.monotonic() + 10  # one that has been told and ends is named, too
        while not Path(folder, str(2 - rank)).exists() and time.monotonic() < until:
            time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "afterwards"])
@pytest.mark.filterwarnings("ignore:module forward hook")
def test_where_a_rank_raises_within_a_step_the_others_are_told_which_is_gone(where, tmp_path):
    with pytest.raises(ZeroDivisionError, match="this rank has had enough"):
        run_ranks(one_raises, 3, str(tmp_path), where)
    for rank in (0, 2):
        said = (tmp_path / str(rank)).read_text()
        assert f"rank {rank} waited for rank 1, which has ended (at " in said
        assert "tests/tensor/test_errors_on_gloo.py:" in said and "Connection closed" not in said


# -- what one rank finds, and all are told ---------------------------------------------------------


def unlike_pieces(rank, how):
    mesh = mesh_of(rank)
    local = torch.ones(3 if how == "piece" and rank else 4, 4) + rank
    placement = Shard(0) if how == "piece" else Replicate()
    shape = {"shape": (8, 4)} if how == "piece" else {}
    body = lambda: pt.DTensor.from_local(local, mesh, [placement], run_check=True, **shape)  # noqa: E731
    error = heard(body)
    x = pt.DTensor.from_local(local[:3], mesh, [Partial()], run_check=True)
    return str(error), x.full_tensor()


@pytest.mark.parametrize("how", ["piece", "whole"])
def test_with_run_check_all_ranks_refuse_and_go_on_together(how):
    results = run_ranks(unlike_pieces, 2, how)
    assert len({text for text, _ in results}) == 1
    said = "the piece of rank 1 does not fit" if how == "piece" else "do not hold the same value"
    assert said in results[0][0]
    assert all(torch.equal(x, torch.full((3, 4), 3.0)) for _, x in results)


def unlike_plain(rank):
    x = pt.distribute_tensor(T, mesh_of(rank), [Shard(0)])
    error = heard(lambda: x + torch.full((4,), float(rank)))
    return str(error), (x + 1).full_tensor()


def test_a_plain_tensor_that_differs_is_an_error_on_every_rank():
    results = run_ranks(unlike_plain, 2)
    assert len({text for text, _ in results}) == 1
    assert "a plain tensor next to a DTensor differs between ranks" in results[0][0]
    assert "tests/tensor/test_errors_on_gloo.py" in results[0][0]
    assert all(torch.equal(x, T + 1) for _, x in results)


def unlike_tensors(rank):
    return str(heard(lambda: pt.distribute_tensor(T[: 8 - rank], mesh_of(rank), [Shard(0)])))


def test_ranks_that_spread_different_tensors_do_not_mix_them_up():
    (one, other) = run_ranks(unlike_tensors, 2)
    assert one == other and "the ranks pass different arguments" in one


def one_is_short(rank):
    mesh = mesh_of(rank)
    local = torch.ones(3 if rank else 4, 4)
    error = heard(lambda: pt.DTensor.from_local(local, mesh, [Shard(0)], shape=(8, 4)))
    return str(error), pt.DTensor.from_local(local, mesh, [Shard(0)], shape=(7, 4)).full_tensor()


def test_a_piece_that_does_not_fit_is_named_on_every_rank_and_the_fix_works():
    (one, whole), (other, _) = run_ranks(one_is_short, 2)
    assert one == other and "the piece of rank 1 does not fit" in one
    assert "shape=(7, 4)" in one and torch.equal(whole, torch.ones(7, 4))


# -- meshes that are equal, and one that is lost ---------------------------------------------------


def lent(rank):
    x = pt.distribute_tensor(T, mesh_of(rank), [Shard(0)])  # nobody else holds its mesh
    y = pt.distribute_tensor(T, mesh_of(rank), [Shard(0)])
    names = x.device_mesh.mesh_dim_names
    other = mesh_of(rank, names=("tp",))
    error = heard(lambda: x + pt.distribute_tensor(T, other, [Shard(0)]))
    return (x + y).full_tensor(), names, str(error)


def test_equal_meshes_are_one_mesh_and_a_tensor_keeps_its_own():
    for total, names, said in run_ranks(lent, 2):
        assert torch.equal(total, 2 * T)
        assert names == ("dp",)
        assert "two meshes in one operation" in said


# -- files -----------------------------------------------------------------------------------------


def save_and_load(rank, folder):
    mesh = mesh_of(rank)
    model = nn.Linear(4, 8)
    with torch.no_grad():
        model.weight.copy_(T + 1)
    pt.distribute_module(model, mesh, lambda name, m, mesh: None)
    model.weight = nn.Parameter(pt.distribute_tensor(T + 1, mesh, [Shard(0)]))
    path = f"{folder}/{rank}.pt"
    torch.save(model.state_dict(), path)
    with torch.no_grad():
        model.weight.zero_()
    model.load_state_dict(torch.load(path, weights_only=True))
    loaded = torch.load(path, weights_only=True)["weight"]
    both = (model.weight + loaded).full_tensor()
    dist.barrier()  # the other rank's file is whole
    other = heard(lambda: torch.load(f"{folder}/{1 - rank}.pt", weights_only=True))
    return both, loaded.placements, str(other)


def load_without_mesh(rank, folder):
    error = heard(lambda: torch.load(f"{folder}/{rank}.pt", weights_only=True))
    for fix in error.fixes[:1]:
        eval(fix.write, {"pt": pt})
    x = torch.load(f"{folder}/{rank}.pt", weights_only=True)["weight"]
    return str(error), x.full_tensor()


def test_what_a_rank_saves_it_loads_on_its_mesh_and_no_other_does(tmp_path):
    for both, placements, other in run_ranks(save_and_load, 2, str(tmp_path)):
        assert torch.equal(both, 2 * (T + 1))
        assert placements == (Shard(0),)
        assert "the piece of another rank of axis dp was loaded" in other
    for error, x in run_ranks(load_without_mesh, 2, str(tmp_path)):
        assert "a tensor was saved on a mesh that this process lacks" in error
        assert torch.equal(x, T + 1)
