"""Is a checkpoint that is not what was written refused, before anything is changed?"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import partita as pt
from partita.checkpoint.folder import NAME

WHOLE = {"a": torch.arange(35.0).view(7, 5), "b": torch.ones(3).bfloat16(), "c": torch.tensor(2)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Of four ranks: pieces of `a` in each file."""

    def program(mesh: Any) -> None:
        a = pt.distribute_tensor(WHOLE["a"].clone(), mesh, [pt.Shard(0), pt.Shard(1)])
        pt.save({**WHOLE, "a": a, "step": 3}, tmp_path / "c")

    with pt.ranks(dp=2, tp=2) as world:
        world.run(program)
    return tmp_path / "c"


@pytest.fixture
def by_torch(tmp_path: Path) -> Path:
    """Of torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves without ranks
        dcp.save({**WHOLE, "step": 3}, checkpoint_id=tmp_path / "t", no_dist=True)
    return tmp_path / "t"


def refused(path: Path) -> str:
    """What `load` says of it; nothing has changed then."""
    state = {name: torch.full_like(x, 9) for name, x in WHOLE.items()} | {"step": 0}
    with pytest.raises(ValueError) as caught:
        pt.load(state, path)
    assert state.pop("step") == 0 and all(x.eq(9).all() for x in state.values())
    return str(caught.value)


def loads(path: Path) -> None:
    state = {name: torch.zeros_like(x) for name, x in WHOLE.items()} | {"step": 0}
    pt.load(state, path)
    assert state["step"] == 3 and all(torch.equal(state[n], x) for n, x in WHOLE.items())


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir())


# -- what pt.save wrote ----------------------------------------------------------------------------


def test_any_byte_that_is_flipped_is_an_error_that_names_the_file(saved):
    loads(saved)
    assert [f.name for f in files_of(saved)][:2] == [NAME, ".metadata"]
    for file in files_of(saved):
        content = file.read_bytes()
        stride = max(1, len(content) // 12)
        for at in [*range(0, len(content), stride), len(content) - 1]:
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            assert f"{file} is damaged" in refused(saved)
        file.write_bytes(content)
    loads(saved)


def test_any_file_that_is_cut_short_or_gone_is_an_error_that_names_it(saved):
    for file in files_of(saved):
        content = file.read_bytes()
        for length in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            assert f"{file} is damaged" in refused(saved)
        file.unlink()
        said = refused(saved)
        assert str(file) in said or (file.name == ".metadata" and "there is no checkpoint" in said)
        file.write_bytes(content)
    loads(saved)


def test_a_file_of_another_save_is_an_error(saved):
    (first, *_) = (f for f in files_of(saved) if f.suffix == ".distcp")
    other = saved.parent / "other"
    pt.save({**{n: x + 1 for n, x in WHOLE.items()}, "step": 4}, other)
    for name in (first.name, ".metadata", NAME):
        copy = saved.parent / f"copy{name}"
        shutil.copytree(saved, copy)
        shutil.copy(other / name, copy / name)
        assert f"{copy}" in refused(copy)


def test_every_rank_raises_what_one_of_them_finds(saved):
    (*_, last) = files_of(saved)  # of a piece that one rank reads
    content = last.read_bytes()
    last.write_bytes(content[:-1000] + b"\0" * 1000)

    def program(mesh: Any) -> str:
        x = pt.zeros(7, 5, device_mesh=mesh, placements=[pt.Shard(0), pt.Shard(1)])
        with pytest.raises(ValueError, match="is damaged: its checksum is wrong") as caught:
            pt.load({"a": x}, saved, strict=False)
        assert x.to_local().eq(0).all()
        return str(caught.value)

    with pt.ranks(dp=2, tp=2) as world:
        assert len(set(world.run(program))) == 1


# -- without checksums -----------------------------------------------------------------------------


def change_metadata(path: Path, change: Callable[[Any], None]) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def lose_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks.pop()


def cover_another_twice(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["a"].chunks
    chunks[-1] = chunks[0]


def lose_half_of_a_chunk(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["a"].chunks[-1]
    chunk.sizes = torch.Size((chunk.sizes[0] - 1, *chunk.sizes[1:]))


def lose_place(metadata: Any) -> None:
    del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "a")]


def lie_outside(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks[0].offsets = torch.Size((5, 5))


def be_elsewhere(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../secret"


def say_nothing(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].properties = None


@pytest.mark.parametrize(
    "change",
    [
        lose_chunk,
        cover_another_twice,
        lose_half_of_a_chunk,
        lose_place,
        lie_outside,
        be_elsewhere,
        say_nothing,
    ],
)
def test_metadata_that_does_not_cover_what_is_to_be_read_is_an_error(change, saved):
    (saved / NAME).unlink()
    change_metadata(saved, lambda m: setattr(m.storage_meta, "save_id", "of torch"))
    loads(saved)
    change_metadata(saved, change)
    assert f"{saved}/.metadata is damaged" in refused(saved)


def test_a_chunk_of_other_dimensions_than_its_tensor_is_named(by_torch):
    def drop_dimension(metadata: Any) -> None:
        metadata.state_dict_metadata["a"].chunks[0].offsets = torch.Size((0,))

    change_metadata(by_torch, drop_dimension)
    assert "a chunk of a is outside of it" in refused(by_torch)


@pytest.mark.parametrize("damage", [b"r\xff\xff\xff\x7f", b"\x96" + b"\xff" * 7 + b"\x0f"])
def test_a_damaged_number_in_metadata_makes_no_memory(damage, by_torch):
    # Of a place in the table of what was read, and of a length.
    path = by_torch / ".metadata"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + damage + content[-1:])
    assert f"{path} is damaged" in refused(by_torch)


def test_a_file_of_torchs_that_is_gone_is_an_error_that_names_it(by_torch):
    (file,) = by_torch.glob("*.distcp")
    file.unlink()
    assert f"{file} is gone" in refused(by_torch)


def test_what_torch_has_saved_is_read_once_before_anything_is_changed(by_torch):
    loads(by_torch)
    for file in files_of(by_torch):
        content = file.read_bytes()
        for length in (0, len(content) // 3, len(content) - 1):
            file.write_bytes(content[:length])
            assert f"{file} is damaged" in refused(by_torch)
        file.unlink()
        refused(by_torch)
        file.write_bytes(content)
    loads(by_torch)


def test_a_value_that_may_not_be_read_leaves_the_tensors_as_they_were(saved):
    pt.save({**WHOLE, "step": Fraction(1, 3)}, saved)
    assert "step holds more than tensors and Python's own types" in refused(saved)


# -- one file of the whole model -------------------------------------------------------------------


def test_any_byte_of_a_safetensors_file_that_is_flipped_or_cut_off_is_an_error(tmp_path):
    path = tmp_path / "m.safetensors"
    state = {"a": torch.arange(5.0), "b": torch.arange(3).bfloat16(), "none": torch.ones(0, 2)}
    pt.save_safetensors(state, path)
    content = path.read_bytes()

    def load() -> dict[str, torch.Tensor]:
        into = {name: torch.full_like(x, 9) for name, x in state.items()}
        try:
            pt.load_safetensors(into, path)
        except ValueError:
            assert all(x.eq(9).all() for x in into.values())
            raise
        return into

    assert all(torch.equal(x, state[name]) for name, x in load().items())
    for at in [*range(0, len(content), 3), len(content) - 1]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(ValueError, match=r"m\.safetensors (is|does)"):
            load()
        path.write_bytes(content[:at])
        with pytest.raises(ValueError, match=r"m\.safetensors (is|does)"):
            load()


def test_ranks_share_the_checking_of_a_safetensors_file_and_all_raise(tmp_path):
    path = tmp_path / "m.safetensors"
    pt.save_safetensors({name: torch.ones(4) for name in "abc"}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"!")

    def program(mesh: Any) -> str:
        model = {name: pt.zeros(4, device_mesh=mesh, placements=[pt.Shard(0)]) for name in "abc"}
        with pytest.raises(ValueError, match="is damaged: the checksum of c is wrong") as caught:
            pt.load_safetensors(model, path)
        assert all(x.to_local().eq(0).all() for x in model.values())
        return str(caught.value)

    with pt.ranks(dp=2) as world:
        assert len(set(world.run(program))) == 1
