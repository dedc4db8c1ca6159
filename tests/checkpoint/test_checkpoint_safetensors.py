"""Is a safetensors file the whole model, and does every layout load from it?"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import partita as pt
from tests.programs.checkpoint_samples import (
    SAVED_AS,
    VALUES,
    R,
    S,
    blank,
    model_of,
    put,
    same_bits,
    spread,
)


def test_safetensors_holds_every_tensor_whole_and_loads_into_any_layout(tmp_path):
    from safetensors.torch import load_file

    file = tmp_path / "m.safetensors"
    with pt.ranks(dp=2, tp=2) as world:
        world.run(lambda mesh: pt.save_safetensors({"t": spread(mesh, SAVED_AS.get)}, file))
    read = load_file(file)
    assert set(read) == {f"t.{name}" for name in VALUES}
    assert all(same_bits(read[f"t.{name}"], v) for name, v in VALUES.items())

    def program(mesh: Any) -> None:
        blanks = blank(mesh, lambda name: [S(0) if VALUES[name].dim() else R])
        pt.load_safetensors({"t": blanks}, file)
        assert all(same_bits(x.full_tensor(), VALUES[n]) for n, x in blanks.items())

    with pt.ranks(dp=3) as world:
        world.run(program)


def test_what_others_write_with_safetensors_loads_into_a_module(tmp_path):
    from safetensors.torch import save_file

    theirs = model_of(0)
    save_file(theirs.state_dict(), tmp_path / "m.safetensors")

    def program(mesh: Any) -> None:
        model = put(model_of(1), mesh)
        assert pt.load_safetensors(model, tmp_path / "m.safetensors").missing_keys == ()
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
        pt.save_safetensors(model, tmp_path / "n.safetensors")

    with pt.ranks(dp=2, tp=2) as world:
        world.run(program)
    model = model_of(1)
    pt.load_safetensors(model, tmp_path / "n.safetensors")
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), theirs.parameters(), strict=True)
    )


def test_no_rank_holds_a_second_whole_tensor_while_safetensors_are_written(tmp_path, monkeypatch):
    alive: list[int] = []
    wholes: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    gather = pt.DTensor.full_tensor

    def counted(self: pt.DTensor) -> torch.Tensor:
        alive.append(len(wholes))
        whole = gather(self)
        wholes.add(whole.untyped_storage())
        return whole

    monkeypatch.setattr(pt.DTensor, "full_tensor", counted)

    def program(mesh: Any) -> None:
        tensors = {f"w{i}": pt.ones(8, 8, device_mesh=mesh, placements=[S(0)]) for i in range(6)}
        with pt.ledger() as log:
            pt.save_safetensors(tensors, tmp_path / "m.safetensors")
        assert log.count("all_gather") == 6

    with pt.ranks(dp=1) as world:  # of more ranks, each takes its turn in between
        world.run(program)
    assert len(alive) == 6 and max(alive) <= 1


def test_what_does_not_fit_a_safetensors_file_is_one_error(tmp_path):
    file = tmp_path / "m.safetensors"
    pt.save_safetensors({"a": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(1)}, file)

    def program(mesh: Any) -> str:
        a = pt.zeros(3, 3, device_mesh=mesh, placements=[S(0)])
        state = {"a": a, "b": torch.zeros(2, dtype=torch.int64), "d": torch.ones(1)}
        with pytest.raises(pt.LayoutError) as caught:
            pt.load_safetensors(state, file)
        assert pt.load_safetensors({"c": torch.zeros(1)}, file, strict=False).unexpected_keys
        return str(caught.value)

    with pt.ranks(dp=2) as world:
        first, second = world.run(program)
    assert first == second
    for line in (
        "a: float32 (2, 3) in the checkpoint, float32 (3, 3) in the state",
        "b: float32 (2,) in the checkpoint, int64 (2,) in the state",
        "c: in the checkpoint, not in the state",
        "d: in the state, not in the checkpoint",
    ):
        assert line in first


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"step": 1}, "step is a int: a safetensors file has tensors only"),
        ({"z": torch.ones(1, dtype=torch.complex128)}, r"no torch\.complex128"),
    ],
)
def test_what_a_safetensors_file_cannot_hold_is_refused(state, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        pt.save_safetensors(state, tmp_path / "m.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        pt.load_safetensors({}, tmp_path / "no.safetensors")
    assert len(list(tmp_path.iterdir())) == 1
