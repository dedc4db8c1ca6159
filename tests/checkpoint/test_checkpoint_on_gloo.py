"""Do processes save, load and outlive each other as they should?"""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import partita as pt
from tests.programs.gloo_ranks import run_ranks

WHOLE = torch.arange(35.0).view(7, 5)


def mesh_of(sizes: tuple[int, ...]) -> Any:
    return pt.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def state_of(mesh: Any, value: torch.Tensor, step: int) -> dict[str, Any]:
    """One tensor in three layouts, and a number."""
    n = mesh.ndim
    layouts = {
        "rows": [pt.Shard(0)] * n,
        "columns": [pt.Shard(1)] + [pt.Replicate()] * (n - 1),
        "whole": [pt.Invariant()] * n,
    }
    tensors = {k: pt.distribute_tensor(value.clone(), mesh, p) for k, p in layouts.items()}
    return {**tensors, "step": step}


def save(rank: int, sizes: tuple[int, ...], path: str, step: int) -> None:
    pt.save(state_of(mesh_of(sizes), WHOLE + step, step), path)


def save_here(path: str, step: int) -> None:
    """In this process, without ranks."""
    pt.save(dict.fromkeys(("rows", "columns", "whole"), WHOLE + step) | {"step": step}, path)


def loaded_step(path: str) -> int:
    """In this process, without ranks: the step that was saved; every element must be of it."""
    state = {k: torch.zeros(7, 5) for k in ("rows", "columns", "whole")} | {"step": -1}
    pt.load(state, path)
    for name in ("rows", "columns", "whole"):
        assert torch.equal(state[name], WHOLE + state["step"]), name
    return state["step"]


# -- from mesh to mesh -----------------------------------------------------------------------------


def load(rank: int, sizes: tuple[int, ...], path: str) -> None:
    state = state_of(mesh_of(sizes), torch.zeros(7, 5), 0)
    pt.load(state, path)
    assert state["step"] == 3
    for name in ("rows", "columns", "whole"):
        assert torch.equal(state[name].full_tensor(), WHOLE + 3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (1,), (2, 1), (3,)])
def test_what_four_processes_save_others_load(sizes, tmp_path):
    run_ranks(save, 4, (2, 2), str(tmp_path / "c"), 3)
    assert loaded_step(str(tmp_path / "c")) == 3
    run_ranks(load, torch.Size(sizes).numel(), sizes, str(tmp_path / "c"))


def refuse(rank: int, path: str) -> str:
    mesh = mesh_of((2,))
    state = {"rows": pt.zeros(7, 4, device_mesh=mesh, placements=[pt.Shard(0)]), "step": 0}
    if rank == 1:
        state["more"] = 1
    with pytest.raises(pt.LayoutError) as caught:
        pt.load(state, path)
    with pytest.raises(pt.LayoutError) as unequal:
        pt.save({"rank": rank}, path)
    return f"{caught.value}\n{unequal.value}"


@pytest.mark.slow
def test_every_process_raises_the_same_error(tmp_path):
    save_here(str(tmp_path / "c"), 3)
    first, second = run_ranks(refuse, 2, str(tmp_path / "c"))
    assert first == second
    assert "rows: float32 (7, 5) in the checkpoint, float32 (7, 4) in the state" in first
    assert "more: in the state, not in the checkpoint" in first
    assert "rank (ranks 0 and 1)" in first
    assert loaded_step(str(tmp_path / "c")) == 3


def save_and_load_without_pickle(rank: int, path: str) -> list[str]:
    import pickle

    from torch.distributed import distributed_c10d

    def refuse(*_: Any) -> Any:
        raise AssertionError("unpickled")

    mesh = mesh_of((2,))
    pickle.loads = pickle.load = distributed_c10d._unpickler = refuse
    pt.save(state_of(mesh, WHOLE, 3), path)
    state = state_of(mesh, torch.zeros(7, 5), 0)
    pt.async_save(state, path + "2").result()
    pt.load(state, path)
    assert torch.equal(state["rows"].full_tensor(), WHOLE)
    with pytest.raises(ValueError, match="one of its own") as caught:
        pt.save({"m": Fails(rank)}, path)
    return [type(caught.value).__name__, str(caught.value), *caught.value.__notes__]


class Fails:
    """A module whose state cannot be had on one rank."""

    class Error(ValueError):
        pass

    def __init__(self, rank: int):
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 1:
            raise self.Error("one of its own")
        return {}

    load_state_dict = state_dict


@pytest.mark.slow
def test_nothing_that_comes_from_another_rank_is_unpickled(tmp_path):
    first, second = run_ranks(save_and_load_without_pickle, 2, str(tmp_path / "c"))
    assert first == ["ValueError", "Error: one of its own", "on rank 1 of 2"]
    assert second == ["Error", "one of its own", "on rank 1 of 2"]  # where it was raised


# -- killed ----------------------------------------------------------------------------------------


def kill_at(moment: str) -> None:
    """Make this process kill itself at a moment of its next save."""
    from partita.checkpoint import dcp_format, folder

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before its file":
        dcp_format.Writer.write_data = die
    elif moment == "within its file":
        resolve, resolved = dcp_format.SavePieces.resolve_data, []

        def resolve_once(self: Any, item: Any) -> Any:
            if resolved:
                die()
            resolved.append(item)
            return resolve(self, item)

        dcp_format.SavePieces.resolve_data = resolve_once
    elif moment == "after its file":
        write = dcp_format.Writer.write_data

        def write_and_die(self: Any, *args: Any) -> Any:
            write(self, *args)
            die()

        dcp_format.Writer.write_data = write_and_die
    elif moment == "within the metadata":
        replace = Path.rename
        Path.rename = lambda self, to: die() if self.name == ".metadata.tmp" else replace(self, to)
    elif moment == "before the names":
        folder.os.rename = die
    elif moment == "between the names":
        folder.os.replace = die
    elif moment == "after the names":
        shutil.rmtree = die
    else:
        raise AssertionError(moment)


def die_saving(rank: int, path: str, victim: int, moment: str, beside: bool) -> None:
    mesh = mesh_of((2,))
    if rank == victim:
        kill_at(moment)
    state = state_of(mesh, WHOLE + 4, 4)
    if beside:
        pt.async_save(state, path).result()
    else:
        pt.save(state, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "moment", "beside"),
    [
        (0, "before its file", True),
        (1, "before its file", False),
        (0, "within its file", False),
        (1, "within its file", True),
        (0, "after its file", True),
        (1, "after its file", False),
        (0, "within the metadata", False),
        (0, "within the metadata", True),
        (0, "before the names", False),
        (0, "between the names", False),
        (0, "between the names", True),
        (0, "after the names", False),
    ],
)
def test_a_checkpoint_is_whole_whenever_a_process_is_killed(victim, moment, beside, tmp_path):
    path = str(tmp_path / "c")
    save_here(path, 3)
    with pytest.raises(RuntimeError):
        run_ranks(die_saving, 2, path, victim, moment, beside)
    if victim == 0:  # else rank 0 lives on and tidies up
        assert len(list(tmp_path.iterdir())) > 1
    assert loaded_step(path) == (4 if moment == "after the names" else 3)
    save_here(path, 5)
    assert loaded_step(path) == 5
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


# -- beside the program ----------------------------------------------------------------------------


def train_and_save(rank: int, path: str | None) -> list[float]:
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    pt.distribute_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    losses, savings = [], []
    for step in range(12):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)], src_data_rank=None)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if path is not None:
            savings.append(pt.async_save({**state, "step": step}, f"{path}{step % 2}"))
    for saving in savings:
        saving.result(timeout=250)
    if path is not None:
        expected = model[0].weight.full_tensor().clone()
        with torch.no_grad():
            model[0].weight.zero_()
        final = {**state, "step": 0}
        pt.load(final, f"{path}1")
        assert final["step"] == 11 and torch.equal(model[0].weight.full_tensor(), expected)
    return losses


@pytest.mark.slow
def test_training_goes_on_while_it_saves_and_does_not_change(tmp_path):
    alone = run_ranks(train_and_save, 2, None)
    assert run_ranks(train_and_save, 2, str(tmp_path / "c")) == alone


def fail_on_one_disk(rank: int, path: str) -> str:
    from partita.checkpoint import dcp_format

    if rank == 1:
        dcp_format.Writer.write_data = no_space
    state = state_of(mesh_of((2,)), WHOLE, 9)
    saving = pt.async_save(state, path)
    with pytest.raises(OSError, match="No space left") as caught:
        saving.result(timeout=250)
    dist.destroy_process_group()  # and ranks can meet again in another group
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2
    )
    with pytest.raises(OSError, match="No space left"):
        pt.save(state_of(mesh_of((2,)), WHOLE, 9), path)
    return f"{caught.value} {caught.value.__notes__}"


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_fails_on_one_process_is_an_error_on_all(tmp_path):
    save_here(str(tmp_path / "c"), 3)
    first, second = run_ranks(fail_on_one_disk, 2, str(tmp_path / "c"))
    assert first == second and "on rank 1 of 2" in first
    assert loaded_step(str(tmp_path / "c")) == 3


# -- resumed ---------------------------------------------------------------------------------------


def steps(rank: int, path: str, start: int, stop: int) -> list[float]:
    mesh = mesh_of((2,))
    torch.manual_seed(start)  # a resumed run begins with other weights
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 4))
    pt.distribute_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "random": pt.RandomState(), "step": 0}
    if start:
        pt.load(state, path)
        assert state["step"] == start
    losses = []
    for step in range(start, stop):
        g = torch.Generator().manual_seed(step)
        x, y = (
            pt.distribute_tensor(t, mesh, [pt.Shard(0)], src_data_rank=None)
            for t in (torch.randn(8, 6, generator=g), torch.randn(8, 4, generator=g))
        )
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not start:
        pt.save({**state, "step": stop}, path)
    return losses


@pytest.mark.slow
def test_new_processes_go_on_bit_for_bit(tmp_path):
    whole = run_ranks(steps, 2, str(tmp_path / "whole"), 0, 10)[0]
    before = run_ranks(steps, 2, str(tmp_path / "c"), 0, 5)[0]
    assert before + run_ranks(steps, 2, str(tmp_path / "c"), 5, 10)[0] == whole


# -- torch's own checkpoints -----------------------------------------------------------------------


def by_torch(rank: int, path: str) -> None:
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as theirs

    mesh = mesh_of((2, 2))
    ours = state_of(mesh, WHOLE + 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(ours, checkpoint_id=f"{path}/by_torch")  # torch's program, partita's tensors
        blank = state_of(mesh, torch.zeros(7, 5), 0)
        dcp.load(blank, checkpoint_id=f"{path}/by_torch")
        for name in ("rows", "columns", "whole"):
            assert torch.equal(blank[name].full_tensor(), WHOLE + 3)
        with pytest.raises(dcp.CheckpointException, match="this tensor is pending"):
            pending = pt.zeros(2, device_mesh=mesh, placements=[pt.Partial(), pt.Partial()])
            dcp.save({"pending": pending}, checkpoint_id=f"{path}/pending")
        placements = [theirs.Shard(0), theirs.Shard(1)]
        tensors = {
            k: theirs.distribute_tensor(WHOLE + 3, mesh, placements)
            for k in ("rows", "columns", "whole")
        }
        dcp.save({**tensors, "step": 3}, checkpoint_id=f"{path}/theirs")
        pt.save(ours, f"{path}/ours")
        zeros = {k: theirs.zeros(7, 5, device_mesh=mesh, placements=placements) for k in tensors}
        dcp.load(zeros, checkpoint_id=f"{path}/ours")
        assert all(torch.equal(x.full_tensor(), WHOLE + 3) for x in zeros.values())
    blank = state_of(mesh, torch.zeros(7, 5), 0)
    pt.load(blank, f"{path}/theirs")
    assert blank["step"] == 3
    assert torch.equal(blank["rows"].full_tensor(), WHOLE + 3)


@pytest.mark.slow
def test_torch_and_partita_read_each_others_checkpoints(tmp_path):
    run_ranks(by_torch, 4, str(tmp_path))
    for name in ("by_torch", "theirs", "ours"):
        assert loaded_step(str(tmp_path / name)) == 3


# -- one file of the whole model -------------------------------------------------------------------


def to_safetensors(rank: int, path: str, fails: bool) -> str:
    mesh = mesh_of((2,))
    state = state_of(mesh, WHOLE + 3, 3)
    del state["step"]
    if fails:
        if rank == 0:
            os.fsync = no_space
        with pytest.raises(OSError, match="No space left") as caught:
            pt.save_safetensors(state, path)
        return str(caught.value)
    pt.save_safetensors(state, path)
    blank = state_of(mesh, torch.zeros(7, 5), 0)
    del blank["step"]
    pt.load_safetensors(blank, path)
    assert all(torch.equal(x.full_tensor(), WHOLE + 3) for x in blank.values())
    return ""


@pytest.mark.slow
def test_a_safetensors_file_is_there_whole_or_not_at_all(tmp_path):
    from safetensors.torch import load_file

    run_ranks(to_safetensors, 2, str(tmp_path / "m.safetensors"), False)
    whole = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(whole[k], WHOLE + 3) for k in ("rows", "columns", "whole"))
    first, second = run_ranks(to_safetensors, 2, str(tmp_path / "n.safetensors"), True)
    assert first == second
    assert [f.name for f in tmp_path.iterdir()] == ["m.safetensors"]
