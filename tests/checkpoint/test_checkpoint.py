"""Does a checkpoint hold what was saved, whatever mesh saves it and whatever mesh loads it?"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import warnings
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.checkpoint import dcp_format, folder
from tests.programs.checkpoint_samples import (
    SAVED_AS,
    VALUES,
    I,
    P,
    R,
    S,
    blank,
    same_bits,
    spread,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """VALUES, saved on 2x2."""

    def program(mesh: Any) -> None:
        pt.save({"t": spread(mesh, SAVED_AS.__getitem__), "step": 7}, tmp_path / "saved")

    with pt.ranks(dp=2, tp=2) as world:
        world.run(program)
    return tmp_path / "saved"


# -- into any mesh and layout ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{"a": 4}, {"a": 1}, {"a": 2, "b": 1}, {"a": 3}, {"a": 2, "b": 2}]
)
@pytest.mark.parametrize("dim", [0, -1, None])
def test_it_loads_into_any_mesh_and_layout_bit_for_bit(sizes, dim, saved):
    def placements(name: str) -> list[pt.Placement]:
        ndim = VALUES[name].dim()
        split = [R] if dim is None or not ndim else [S(dim % ndim)]
        return split * len(sizes)

    def program(mesh: Any) -> None:
        state = {"t": blank(mesh, placements), "step": 0}
        before = {name: x.to_local().data_ptr() for name, x in state["t"].items()}
        pt.load(state, saved)
        assert state["step"] == 7
        for name, x in state["t"].items():
            assert x.to_local().data_ptr() == before[name]  # in place
            assert same_bits(x.full_tensor(), VALUES[name]), name

    with pt.ranks(**sizes) as world:
        world.run(program)


def test_it_loads_without_ranks_and_what_is_saved_there_loads_on_ranks(saved, tmp_path):
    state = {"t": {n: torch.ones_like(v) for n, v in VALUES.items()}, "step": 0}
    pt.load(state, saved)
    assert all(same_bits(state["t"][n], v) for n, v in VALUES.items())
    pt.save(state, tmp_path / "plain")

    def program(mesh: Any) -> None:
        state = {"t": blank(mesh, SAVED_AS.__getitem__), "step": 0}
        pt.load(state, tmp_path / "plain")
        assert all(same_bits(x.full_tensor(), VALUES[n]) for n, x in state["t"].items())

    with pt.ranks(dp=2, tp=2) as world:
        world.run(program)


def test_a_pending_tensor_is_reduced_once_and_loads_into_shares(tmp_path):
    whole = torch.randn(4, 4)

    def program(mesh: Any) -> None:
        x = pt.distribute_tensor(whole, mesh, [S(0), S(1)])
        ones = pt.ones(4, 4, device_mesh=mesh, placements=[S(1), S(0)])
        pending = x @ ones
        assert any(p.is_partial() for p in pending.placements)
        with pt.ledger() as log:
            pt.save({"x": pending}, tmp_path / "pending")
        assert log.count(reason="explicit") == log.count() > 0
        shares = pt.DTensor.from_local(torch.ones(2, 4), mesh, [P, S(0)])  # of every rank
        state = {"x": shares}
        pt.load(state, tmp_path / "pending")
        assert state["x"].placements == (P, S(0))
        torch.testing.assert_close(state["x"].full_tensor(), whole.sum(1, True).expand(4, 4))

    with pt.ranks(dp=2, tp=2) as world:
        world.run(program)


# -- what is written -------------------------------------------------------------------------------


def test_nothing_is_gathered_and_equal_pieces_are_written_once_by_ranks_in_turn(tmp_path):
    def program(mesh: Any) -> None:
        placements = [[R, R], [I, R], [S(0), R], [R, S(1)]]
        state = {
            f"w{i}": pt.distribute_tensor(torch.randn(64, 64), mesh, placements[i % 4])
            for i in range(16)
        }
        with pt.ledger() as log:
            pt.save(state, tmp_path / "c")
        assert not log.moves

    with pt.ranks(dp=2, tp=2) as world:
        world.run(program)
    sizes = [f.stat().st_size for f in (tmp_path / "c").glob("*.distcp")]
    whole = 16 * 64 * 64 * 4
    assert len(sizes) == 4
    assert whole <= sum(sizes) < 1.2 * whole
    assert max(sizes) < 1.3 * whole / 4


def test_torch_reads_it_as_a_plain_state_dict(saved):
    import torch.distributed.checkpoint as dcp

    state = {"t": {n: torch.ones_like(v) for n, v in VALUES.items()}, "step": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=saved)
    assert state["step"] == 7
    assert all(same_bits(state["t"][n], v) for n, v in VALUES.items())


def test_torch_makes_one_file_of_it(saved, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(saved, tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt")
    assert state["step"] == 7
    assert all(same_bits(state["t"][n], v) for n, v in VALUES.items())


def test_what_torch_has_saved_loads(tmp_path):
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"t": VALUES, "n": [1, {"k": "v"}]}, checkpoint_id=tmp_path / "theirs")

    def program(mesh: Any) -> None:
        state = {"t": blank(mesh, SAVED_AS.__getitem__), "n": [0, {"k": ""}]}
        pt.load(state, tmp_path / "theirs")
        assert state["n"] == [1, {"k": "v"}]
        assert all(same_bits(x.full_tensor(), VALUES[n]) for n, x in state["t"].items())

    with pt.ranks(dp=2, tp=2) as world:
        world.run(program)


def test_names_are_those_that_torch_gives(tmp_path):
    """Of the private function that all of torch's own checkpoints go through."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    x = torch.ones(2)
    state = {
        "a": {"b": [x, 1, [x]], 3: x, "c.d": {}},
        "numbers": [1, 2],
        "mixed": [1, {"k": 2}],
        "pair": (1, 2),
        "lists": [[1], [2]],
        "none": None,
    }
    flat, paths = flatten_state_dict(state)
    pt.save(state, tmp_path / "c")
    metadata = dcp_format.Reader(tmp_path / "c").read_metadata()
    assert set(metadata.state_dict_metadata) == set(flat)
    assert metadata.planner_data == paths


# -- what does not fit -----------------------------------------------------------------------------


def test_all_that_does_not_fit_is_one_error_on_every_rank_and_nothing_is_changed(saved):
    def program(mesh: Any) -> str:
        t = blank(mesh, SAVED_AS.__getitem__)
        t["even"] = pt.ones(8, 5, device_mesh=mesh, placements=[S(0), R])
        t["half"] = t["half"].float()
        t["long"] = "a word"
        del t["bits"]
        if mesh.get_rank() == 3:
            t["added"] = torch.ones(2)
        state = {"t": t, "step": 0}
        with pytest.raises(pt.LayoutError) as caught:
            pt.load(state, saved)
        assert state["step"] == 0 and t["uneven"].to_local().eq(1).all()
        return str(caught.value)

    with pt.ranks(dp=2, tp=2) as world:
        first, *others = world.run(program)
    assert others == [first] * 3
    for line in (
        "t.even: float32 (8, 4) in the checkpoint, float32 (8, 5) in the state",
        "t.half: bfloat16 (5, 6) in the checkpoint, float32 (5, 6) in the state",
        "t.long: int64 (10,) in the checkpoint, no tensor in the state",
        "t.added: in the state, not in the checkpoint",
        "t.bits: in the checkpoint, not in the state",
        "test_checkpoint.py:",
    ):
        assert line in first


def test_strict_false_loads_what_is_there_and_says_what_it_passed_over(saved):
    state = {"t": {"even": torch.ones(8, 4), "new": torch.ones(2)}}
    passed_over = pt.load(state, saved, strict=False)
    assert same_bits(state["t"]["even"], VALUES["even"]) and state["t"]["new"].eq(1).all()
    assert passed_over.missing_keys == ("t.new",)
    assert {"step", "t.half"} < set(passed_over.unexpected_keys)
    with pytest.raises(pt.LayoutError, match=r"t\.even: float32 \(8, 4\) in the checkpoint"):
        pt.load({"t": {"even": torch.ones(3)}}, saved, strict=False)


def test_weights_alone_are_read_from_a_checkpoint_that_has_more(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    pt.save({"model": model, "optimizer": optimizer, "step": 3}, tmp_path / "c")
    fresh = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(8)))
    with pytest.raises(pt.LayoutError) as caught:
        pt.load({"model": fresh}, tmp_path / "c")
    _, *lines = str(caught.value).splitlines()
    assert len(lines) == 4 and "optimizer (60 names, such as optimizer.state.0.weight" in lines[0]
    assert "step: in the checkpoint, not in the state" in lines[1]
    assert 'strict="state"' in lines[2]
    passed_over = pt.load({"model": fresh}, tmp_path / "c", strict="state")
    assert torch.equal(fresh[7].weight, model[7].weight) and not passed_over.missing_keys
    fresh.add_module("head", torch.nn.Linear(2, 2))
    with pytest.raises(pt.LayoutError) as caught:
        pt.load({"model": fresh}, tmp_path / "c", strict="state")
    assert "model.head.bias: in the state, not in the checkpoint" in str(caught.value)
    assert "optimizer" not in str(caught.value)
    with pytest.raises(ValueError, match="strict='model': it is True, False or"):
        pt.load({"model": fresh}, tmp_path / "c", strict="model")


def test_names_that_one_side_lacks_are_grouped_below_what_the_other_side_has_nothing_of(tmp_path):
    held = {"a": {str(i): {"w": torch.ones(1), "b": torch.ones(1)} for i in range(5)}}
    pt.save(held, tmp_path / "c")
    state = {"a": {"0": {"w": torch.ones(1)}}, "n": {str(i): i for i in range(9)}}
    with pytest.raises(pt.LayoutError) as caught:
        pt.load(state, tmp_path / "c")
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "n (9 names, such as n.0): in the state, not in the checkpoint" in lines
    assert "a.0.b: in the checkpoint, not in the state" in lines
    assert "a.4.w: in the checkpoint, not in the state" in lines


def test_there_is_nothing_to_load_on_the_meta_device_or_from_nowhere(saved, tmp_path):
    state = {"t": {"even": torch.ones(8, 4, device="meta")}}
    with pytest.raises(pt.LayoutError, match=r"t\.even: on the meta device"):
        pt.load(state, saved, strict=False)
    with pytest.raises(ValueError, match=r"t\.even is on the meta device"):
        pt.save(state, tmp_path / "c")
    with pytest.raises(ValueError, match="there is no checkpoint at"):
        pt.load({}, tmp_path / "nowhere")


@dataclass
class Settings:
    values: Any


VALUES_OF_A_RANK = {
    "tensor": lambda rank: torch.tensor(float(rank)),
    "value": lambda rank: {"at": rank},
    "array": lambda rank: np.arange(3.0) + rank,
    "state of NumPy": lambda rank: np.random.RandomState(rank).get_state(),
    "tensors in a tuple": lambda rank: (torch.zeros(3), torch.tensor(rank)),
    "dataclass": lambda rank: Settings([1, np.float32(rank)]),
    "namespace": lambda rank: SimpleNamespace(at=deque([rank, 1j])),
    "complex": lambda rank: rank + 1j,
    "dtype": lambda rank: (torch.float32, torch.float64)[rank],
}


@pytest.mark.parametrize("what", VALUES_OF_A_RANK)
def test_a_plain_value_that_differs_between_ranks_is_refused_and_named(what, saved):
    before = sorted(f.name for f in saved.iterdir())

    def program(mesh: Any) -> None:
        rank = mesh.get_rank()
        mine, equal = VALUES_OF_A_RANK[what](rank), VALUES_OF_A_RANK[what](0)
        x = pt.ones(4, device_mesh=mesh, placements=[S(0)])
        state = {"x": x, "equal": {"b", "a"}, "too": equal, "mine": mine, f"own.{rank}": mine}
        pt.save(state, saved)

    name = "mine.at" if what == "value" else "mine"
    with (
        pt.ranks(dp=2) as world,
        pytest.raises(pt.LayoutError, match=rf"  {name} \(ranks 0 and 1\)"),
    ):
        world.run(program)
    assert sorted(f.name for f in saved.iterdir()) == before
    assert [f.name for f in saved.parent.iterdir()] == [saved.name]


def test_each_rank_may_have_values_under_names_of_its_own(tmp_path):
    def program(mesh: Any) -> int:
        rank = mesh.get_rank()
        pt.save({"at": {f"rank{rank}": rank}}, tmp_path / "c")
        state = {"at": {f"rank{rank}": -1}}
        pt.load(state, tmp_path / "c", strict=False)
        return state["at"][f"rank{rank}"]

    with pt.ranks(dp=3) as world:
        assert world.run(program) == [0, 1, 2]


def test_a_tensor_of_which_a_part_is_on_no_saving_rank_is_refused(tmp_path):
    with pt.ranks(dp=2) as world:
        x = world.run(lambda mesh: pt.ones(4, device_mesh=mesh, placements=[S(0)]))[0]
    with pytest.raises(ValueError, match="x: 2 of 4 elements"):
        pt.save({"x": x}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_makes_all_fail_and_leaves_what_was_there(failing, saved):
    class Failing:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def program(mesh: Any) -> str:
        state = {"fails": Failing() if mesh.get_rank() == failing else None}
        with pytest.raises(RuntimeError, match="no state") as caught:
            pt.save(state, saved)
        return f"{caught.value} {caught.value.__notes__}"

    with pt.ranks(dp=2) as world:
        assert len(set(world.run(program))) == 1
    pt.load({"step": 0}, saved, strict=False)


def test_a_disk_that_fails_on_one_rank_is_an_error_on_all(saved, monkeypatch):
    write = dcp_format.Writer.write_data

    def write_or_fail(self: Any, plan: Any, planner: Any) -> Any:
        if any(item.index.fqn == "b" for item in plan.items):
            raise OSError(28, "No space left on device")
        return write(self, plan, planner)

    monkeypatch.setattr(dcp_format.Writer, "write_data", write_or_fail)

    def program(mesh: Any) -> None:
        a, b = (pt.ones(4, device_mesh=mesh, placements=[R]) for _ in range(2))
        with pytest.raises(OSError, match="No space left"):  # rank 0 writes a, rank 1 writes b
            pt.save({"a": a, "b": b}, saved)

    with pt.ranks(dp=2) as world:
        world.run(program)
    pt.load({"step": 0}, saved, strict=False)
    assert [f.name for f in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "two entries of the state have the name a.b"),
        (torch.ones(2), "a state is a dict"),
        ({"f": lambda: 0}, "f cannot be saved"),
    ],
)
def test_a_state_that_cannot_be_is_refused(state, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        pt.save(state, tmp_path / "c")


def test_a_dtensor_in_a_tuple_is_refused(tmp_path):
    def program(mesh: Any) -> None:
        pt.save({"pair": (pt.ones(2, device_mesh=mesh), 1)}, tmp_path / "c")

    with pt.ranks(dp=2) as world, pytest.raises(ValueError, match="pair: a DTensor in a tuple"):
        world.run(program)


# -- the folder ------------------------------------------------------------------------------------


def test_a_folder_of_other_things_is_left_as_it_is(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a checkpoint: it was not changed"):
        pt.save({"a": 1}, tmp_path / "work")
    assert (tmp_path / "work" / "thesis.txt").read_text() == "mine"


def test_a_save_replaces_what_is_there_and_removes_what_killed_saves_left(saved):
    (saved.parent / f".{saved.name}.saving-dead").mkdir()
    pt.save({"only": 1}, saved)
    assert [f.name for f in saved.parent.iterdir()] == [saved.name]
    state = {"only": 0}
    pt.load(state, saved)
    assert state["only"] == 1


def test_a_symbolic_link_is_replaced_and_what_it_points_to_stays(saved, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(saved)
    for step in range(3):
        pt.save({"step": step}, link)
        state = {"step": -1}
        pt.load(state, link)
        assert state["step"] == step
    pt.load(state, saved, strict=False)
    assert state["step"] == 7
    assert sorted(f.name for f in tmp_path.iterdir()) == ["latest", saved.name]


def test_a_checkpoint_that_has_just_stepped_aside_is_found_and_put_back(saved):
    os.rename(saved, saved.parent / f".{saved.name}.previous")  # and here the process was killed
    state = {"step": 0}
    pt.load(state, saved, strict=False)
    assert state["step"] == 7
    (saved.parent / f".{saved.name}.saving-dead").mkdir()
    new = folder.begin_replacement(saved)
    assert (saved / ".metadata").is_file()
    new.discard()
    assert [f.name for f in saved.parent.iterdir()] == [saved.name]


# -- beside the program ----------------------------------------------------------------------------


def test_an_async_save_holds_the_values_of_its_call(tmp_path):
    def program(mesh: Any) -> None:
        x = pt.ones(8, device_mesh=mesh, placements=[S(0)])
        plain, counts = torch.ones(2), {"step": 1, "seen": [[1], ({1},)]}
        saving = pt.async_save({"x": x, "plain": plain, "counts": counts}, tmp_path / "c")
        with torch.no_grad():
            x.mul_(2)
            plain.mul_(2)
            counts["step"] = 2
            counts["seen"][0][0] = 2
            counts["seen"][1][0].add(2)
            later = pt.async_save({"x": x, "plain": plain, "counts": counts}, tmp_path / "d")
        assert saving.done()  # the second has waited for the first
        assert later.result() is None
        for value, where in ((1, "c"), (2, "d")):
            state = {"x": x, "plain": plain, "counts": counts}
            pt.load(state, tmp_path / where)
            assert x.full_tensor().eq(value).all() and plain.eq(value).all()
            assert counts["step"] == value
            assert counts["seen"] == [[value], (set(range(1, value + 1)),)]

    with pt.ranks(dp=2) as world:
        world.run(program)


_ENDS_AT_ONCE = """
import sys, torch, partita as pt
from partita.checkpoint.save_and_load import stage_state
from partita.checkpoint.state import open_state
state = {"x": torch.full((4,), 3.0), "step": 3}
stage_state(open_state(state), {})
assert "torch.distributed.checkpoint" not in sys.modules
pt.async_save(state, sys.argv[1])
"""


@pytest.mark.slow
def test_training_waits_for_no_import_and_a_program_that_ends_for_its_save(tmp_path):
    subprocess.run([sys.executable, "-c", _ENDS_AT_ONCE, str(tmp_path / "c")], check=True)
    state = {"x": torch.zeros(4), "step": 0}
    pt.load(state, tmp_path / "c")
    assert state["x"].eq(3).all() and state["step"] == 3


def test_a_rank_may_wait_alone_for_its_async_save(tmp_path):
    def program(mesh: Any) -> None:
        saving = pt.async_save({"x": pt.ones(2, device_mesh=mesh)}, tmp_path / "c")
        if mesh.get_rank() == 2:
            saving.result(timeout=250)

    with pt.ranks(dp=4) as world:
        world.run(program)


def test_an_error_of_an_async_save_is_raised_by_its_result_or_warned_of(saved):
    def program(mesh: Any) -> None:
        state = {"mine": mesh.get_rank()}
        with pytest.raises(pt.LayoutError, match="different values"):
            pt.async_save(state, saved).result()
        forgotten = pt.async_save(state, saved)
        pt.load({"step": 0}, saved, strict=False)  # waits for it
        with pytest.warns(RuntimeWarning, match="LayoutError: the ranks hold different values"):
            del forgotten

    with pt.ranks(dp=2) as world:
        world.run(program)


# -- random numbers, and who may run code ---------------------------------------------------------


def test_random_numbers_go_on_where_they_were(tmp_path):
    def program(mesh: Any) -> None:
        torch.manual_seed(3)
        torch.randn(5)
        state = {"random": pt.RandomState(), "python": random.getstate()}
        pt.save(state, tmp_path / "c")
        expected = torch.randn(4)
        torch.manual_seed(0)
        pt.load(state, tmp_path / "c")
        assert torch.equal(torch.randn(4), expected)
        random.setstate(state["python"])

    with pt.ranks(dp=2) as world:
        world.run(program)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_loading_runs_no_code_of_a_value_unless_asked(tmp_path):
    pt.save({"value": Evil(tmp_path / "ran")}, tmp_path / "c")
    with pytest.raises(ValueError, match="value holds more than tensors"):
        pt.load({"value": 0}, tmp_path / "c")
    assert not (tmp_path / "ran").exists()
    pt.load({"value": 0}, tmp_path / "c", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_loading_runs_no_code_of_the_metadata(saved, tmp_path):
    (saved / ".checksums").unlink()  # as torch's own, which have none
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"the metadata of the checkpoint refers to .*mkdir"):
        pt.load({"step": 0}, saved)
    module = b"torch.distributed.checkpoint.metadata"  # which imports os
    name = b"os.getcwd"
    text = b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name))
    (saved / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93)R.")
    with pytest.raises(ValueError, match=r"refers to torch.*\.os\.getcwd"):
        pt.load({"step": 0}, saved)
    assert not (tmp_path / "ran").exists()


WAYS = [(pt.save, pt.load), (pt.save_safetensors, pt.load_safetensors)]


@pytest.mark.parametrize(("save", "load"), WAYS)
def test_a_view_whose_base_was_written_is_saved_up_to_date_and_loaded_into_its_base(
    save, load, tmp_path
):
    """On one device both are one memory."""
    whole = torch.arange(14.0).view(7, 2)

    def program(mesh):
        x = pt.distribute_tensor(whole, mesh, [pt.Shard(0)])
        rows = x[1:3]
        x.mul_(2)
        save({"rows": rows}, tmp_path / "a")
        x.zero_()
        load({"rows": rows}, tmp_path / "a")
        return x.full_tensor(), rows.full_tensor()

    expected = torch.zeros(7, 2)
    expected[1:3] = 2 * whole[1:3]
    with pt.ranks(tp=3) as world:
        for x, rows in world.run(program):
            assert torch.equal(x, expected) and torch.equal(rows, expected[1:3])


@pytest.mark.parametrize(("save", "load"), WAYS)
def test_a_view_is_up_to_date_after_a_load_of_its_base_of_which_a_rank_has_no_element(
    save, load, tmp_path
):
    whole = torch.arange(6.0).view(3, 2)

    def program(mesh):
        x = pt.distribute_tensor(whole, mesh, [pt.Shard(0)])
        save({"x": x}, tmp_path / "a")
        x.zero_()
        rows = x[1:]
        load({"x": x}, tmp_path / "a")
        return rows.full_tensor()

    with pt.ranks(tp=4) as world:
        assert all(torch.equal(rows, whole[1:]) for rows in world.run(program))
