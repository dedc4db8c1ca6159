"""Does one rank compile for all of its host, and is what it made loaded wherever it should be?"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.graph.backend.store import Artifact, Store, default_store
from tests.programs.gloo_ranks import run_ranks


def without_compiler(folder):
    """From here on there is no compiler, and nothing that one has made before."""
    os.environ["PATH"] = os.environ["CXX"] = "/nowhere"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def make_step(place=lambda t, *placements: t):
    """A step that trains two layers, the first split by columns and the second by rows."""
    torch.manual_seed(0)
    w = place(torch.randn(8, 8), pt.Replicate(), pt.Shard(1)).requires_grad_()
    v = place(torch.randn(8, 4), pt.Replicate(), pt.Shard(0)).requires_grad_()
    x = place(torch.randn(4, 8), pt.Shard(0), pt.Replicate())
    optimizer = torch.optim.SGD([w, v], lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = (torch.nn.functional.gelu(x @ w) @ v).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, x


def train(sizes=(1, 1), **options):
    """Three losses of the step, compiled, and the step."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    step, x = make_step(lambda t, *placements: pt.distribute_tensor(t, mesh, placements))
    step = pt.compile(step, **options)
    return [step(x).item() for _ in range(3)], step


def is_right(losses):
    step, x = make_step()
    wanted = [step(x).item() for _ in range(3)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0)


# -- cold and warm ---------------------------------------------------------------------------------


def cold(rank, folder):
    os.environ["PARTITA_CACHE"] = f"{folder}/store"
    if rank > 0:
        without_compiler(f"{folder}/{rank}")
    losses, step = train((2, 2))
    return losses, step.artifact.loaded, step.key, str(step.artifact)


def warm(rank, folder):
    """Nobody can compile; groups have other numbers in this world, and kernels other threads."""
    os.environ["PARTITA_CACHE"] = f"{folder}/store"
    without_compiler(f"{folder}/warm {rank}")
    torch.set_num_threads(2)
    for ranks in ([0, 1], [2, 3], [1, 2, 3]):
        dist.new_group(ranks)
    begin = time.perf_counter()
    losses, step = train((2, 2))
    return losses, step.artifact.loaded, step.key, time.perf_counter() - begin


@pytest.mark.slow
def test_one_rank_of_four_compiles_and_in_a_second_run_all_load_without_a_compiler(tmp_path):
    """Fails too where a new torch cannot save what it compiles, or cannot load it elsewhere."""
    first = run_ranks(cold, 4, str(tmp_path))
    assert [loaded for _, loaded, *_ in first] == [False, True, True, True]
    assert first[0][3].startswith("compiled in") and first[1][3].startswith("loaded in")
    assert len(list((tmp_path / "store").iterdir())) == 1
    second = run_ranks(warm, 4, str(tmp_path))
    assert [loaded for _, loaded, *_ in second] == [True] * 4
    assert len({key for _, _, key, _ in [*first, *second]}) == 1
    for losses, *_ in [*first, *second]:
        is_right(losses)


def on_two_hosts(rank, folder):
    """Ranks that do not share files do not share artifacts."""
    os.environ["PARTITA_CACHE"] = f"{folder}/{rank // 2}"
    losses, step = train((1, 4))
    return losses, step.artifact.loaded


@pytest.mark.slow
def test_one_rank_of_each_host_compiles(tmp_path):
    per_rank = run_ranks(on_two_hosts, 4, str(tmp_path))
    assert [loaded for _, loaded in per_rank] == [False, True, False, True]
    for losses, _ in per_rank:
        is_right(losses)


# -- where it does not go as it should -------------------------------------------------------------


def first_rank_cannot_compile(rank, folder):
    os.environ["PARTITA_CACHE"] = f"{folder}/store"
    if rank == 0:
        without_compiler(f"{folder}/0")
    with pytest.raises(pt.LayoutError, match="could not be compiled") as caught:
        train((2, 1))
    return str(caught.value)


@pytest.mark.slow
def test_a_compilation_that_fails_is_one_error_on_all_ranks(tmp_path):
    told = run_ranks(first_rank_cannot_compile, 2, str(tmp_path))
    assert told[0] == told[1]
    assert "on rank 0" in told[0] and "No working C++ compiler" in told[0]
    assert not Store(tmp_path / "store").entries()


def dies_while_it_writes(rank, folder):
    from partita.graph.backend import store

    os.environ["PARTITA_CACHE"] = folder
    if rank == 0:
        store.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
    train((2, 1))


def after_that(rank, folder):
    os.environ["PARTITA_CACHE"] = folder
    losses, step = train((2, 1))
    return losses, step.artifact.loaded


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_ends_the_run_and_spoils_nothing(tmp_path):
    # A TimeoutError if the other rank waits for the end of time.
    with pytest.raises(RuntimeError):
        run_ranks(dies_while_it_writes, 2, str(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    per_rank = run_ranks(after_that, 2, str(tmp_path))
    assert [loaded for _, loaded in per_rank] == [False, True]
    is_right(per_rank[1][0])


def cannot_write(rank, folder):
    Path(folder, "file").touch()
    os.environ["PARTITA_CACHE"] = f"{folder}/file/store"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses, step = train((2, 1))
    told = [str(w.message) for w in told if "cannot be written" in str(w.message)]
    return losses, step.artifact.loaded, told


@pytest.mark.slow
def test_where_nothing_can_be_stored_each_rank_compiles(tmp_path):
    for losses, loaded, told in run_ranks(cannot_write, 2, str(tmp_path)):
        is_right(losses)
        assert not loaded and len(told) == 1


# -- one process -----------------------------------------------------------------------------------


def double_and_more(x):
    return x * 2 + 1


@pytest.mark.slow
def test_an_artifact_that_does_not_load_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    x = torch.arange(8.0)
    step = pt.compile(double_and_more)
    assert torch.equal(step(x), x * 2 + 1) and not step.artifact.loaded
    store, key = default_store(), step.artifact.key
    assert store.get(key).metadata["what"].endswith("double_and_more")
    store.put(key, Artifact(b"no code"))
    again = pt.compile(double_and_more)
    with pytest.warns(RuntimeWarning, match="is compiled again") as told:
        assert torch.equal(again(x), x * 2 + 1)
    assert str(store.path(key)) in str(told[0].message) and not again.artifact.loaded
    third = pt.compile(double_and_more)
    assert torch.equal(third(x), x * 2 + 1) and third.artifact.loaded
    assert third.artifact.metadata == store.get(key).metadata


@pytest.mark.slow
def test_what_torch_cannot_save_runs_where_it_was_compiled(monkeypatch, tmp_path):
    from partita.graph.backend import inductor as lower

    def refuse(saved):
        raise AttributeError("torch saves this in another way")

    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    monkeypatch.setattr(lower, "remove_compiler_data", refuse)
    step, x = pt.compile(double_and_more), torch.arange(8.0)
    with pytest.warns(UserWarning, match="in another way"):
        assert torch.equal(step(x), x * 2 + 1)
    assert not step.artifact.loaded and not list(tmp_path.iterdir())


LOADED = """
import os
import sys
os.environ["VICTIM"] = str(os.getpid())
import torch
import partita as pt
torch.set_num_threads(2)
f = lambda x: ((x @ x) + 1).exp().sum()
step, x = pt.compile(f), torch.randn(40, 40)
torch.testing.assert_close(step(x), f(x))
print(step.artifact.loaded, "torch._inductor.lowering" in sys.modules)
"""


def loaded_apart(folder, **environment):
    """Was it loaded, in a process of its own, and did that import the compiler?"""
    given = os.environ | {"PARTITA_CACHE": f"{folder}/store", "OMP_NUM_THREADS": "2"}
    given |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"} | environment  # for one kernel
    said = subprocess.check_output([sys.executable, "-c", LOADED], env=given, text=True)
    return [word == "True" for word in said.split()]


@pytest.mark.slow
def test_to_load_an_artifact_is_not_to_import_the_compiler(tmp_path):
    """That takes longer than all else; of torch it is only known by what generated code imports."""
    assert loaded_apart(tmp_path) == [False, True]
    nothing = {"PATH": "/nowhere", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/none"}
    assert loaded_apart(tmp_path, **nothing) == [True, False]


HALF = """#!/bin/bash
# A compiler that is killed, and all with it, when it has written half a library of kernels.
{compiler} "$@" || exit 1
if [[ "$*" == *.main.* ]]; then
    while [[ $# -gt 0 ]]; do
        if [[ "$1" == -o && "$2" == *.so ]]; then
            head -c 3000 "$2" > "$2.half" && mv "$2.half" "$2"
            kill -9 "$VICTIM"
        fi
        shift
    done
fi
"""


@pytest.mark.slow
def test_half_a_library_that_a_killed_compile_left_is_not_taken_for_a_whole_one(tmp_path):
    killer = tmp_path / "killer" / "g++"
    killer.parent.mkdir()
    killer.write_text(HALF.replace("{compiler}", shutil.which("g++") or ""))
    killer.chmod(0o755)
    shared = {"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/torch"}
    path = f"{killer.parent}{os.pathsep}{os.environ['PATH']}"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        loaded_apart(tmp_path, PATH=path, **shared)
    assert caught.value.returncode == -signal.SIGKILL
    there = {p: p.stat() for p in (tmp_path / "torch").glob("*/*.so")}
    whole = [p for p, found in there.items() if found.st_size != 3000]
    assert 0 < len(whole) < len(there)
    assert loaded_apart(tmp_path, **shared) == [False, True]
    assert all(p.stat().st_ino == there[p].st_ino for p in whole)  # and these were not touched
    assert not list((tmp_path / "torch").glob("partita*"))


def test_what_inductor_is_told_by_its_user_is_another_artifact(monkeypatch, tmp_path):
    from torch._inductor import config

    from partita.graph.backend.inductor import CONFIG, digest_of_compiler

    usual = digest_of_compiler(set())
    for name, value in (("max_autotune", True), ("cpp.simdlen", 256)):
        with config.patch({name: value}):
            assert digest_of_compiler(set()) != usual
    with config.patch({"cpp.threads": 7, "compile_threads": 3}):
        assert digest_of_compiler(set()) == usual
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert digest_of_compiler(set()) == usual
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setitem(CONFIG, "fallback_random", False)
    assert digest_of_compiler(set()) != usual


def test_ranks_of_one_process_neither_compile_nor_store(monkeypatch, tmp_path):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "none"))

    def run(mesh):
        step = pt.compile(double_and_more)
        x = pt.distribute_tensor(torch.arange(8.0), mesh, [pt.Shard(0)])
        return step(x).full_tensor(), step.artifact

    with pt.ranks(dp=2) as world:
        for found, artifact in world.run(run):
            assert torch.equal(found, torch.arange(8.0) * 2 + 1) and artifact is None
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_region_tells_how_its_forward_and_its_backward_were_compiled():
    region = pt.compile(lambda x: torch.sin(x) * x)
    x = torch.linspace(0, 1, 7, requires_grad=True)
    region(x).sum().backward()
    assert [part.loaded for part in region.artifact.sections] == [False, False]
    assert not region.artifact.loaded and "2 sections, 2 of them compiled" in str(region.artifact)
    again = pt.compile(lambda x: torch.sin(x) * x)
    again(x)
    assert again.artifact.loaded and again.key == region.key
