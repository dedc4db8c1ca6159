"""Does a rank that is alone in a call of partita's get an error, and the others too, in seconds?

Each job waits for most of its time: many run side by side.
"""

from __future__ import annotations

import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partita as pt
from tests.programs.gloo_ranks import run_ranks

HERE = "test_a_rank_alone.py:"
SIDE_BY_SIDE = 8


def calls_of_a_job(mesh, folder):
    """What a rank may do alone, by name; all have been together before."""
    torch.manual_seed(0)
    model = pt.zero(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), mesh, stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = pt.distribute_batch(torch.ones(6, 4), mesh)
    d = pt.distribute_tensor(torch.arange(8.0), mesh, [pt.Shard(0)])

    def train():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    rerun = pt.compile(train, backend="graph")
    train()
    rerun()
    path = f"{folder}/there"
    pt.save({"model": model}, path)
    return {
        "save": lambda: pt.save({"model": model}, f"{folder}/new"),
        "load": lambda: pt.load({"model": model}, path),
        "async_save": lambda: pt.async_save({"model": model}, f"{folder}/later"),
        "save_safetensors": lambda: pt.save_safetensors(model, f"{folder}/new.safetensors"),
        "full_state_dict": lambda: pt.full_state_dict(model),
        "item": lambda: d.sum().item(),
        "print": lambda: print(d.sum()),
        "forward": lambda: model(x),
        "compile": lambda: pt.compile(train, backend="graph")(),
        "barrier": dist.barrier,
        "train": train,
        "three batches": lambda: [train() for _ in range(3)],
        "rerun": rerun,
        "ended": lambda: None,
    }


NAMES = {
    "save": "saves a checkpoint (pt.save) to ",
    "load": "loads a checkpoint (pt.load) from ",
    "async_save": "saves a checkpoint (pt.async_save) to ",
    "save_safetensors": "saves a model (pt.save_safetensors) to ",
    "full_state_dict": "compares whole values (pt.full_state_dict)",
    "item": "reads a value (item): float32 scalar {sum dp}",
    "print": "reads a value (print): float32 scalar {sum dp}",
    "forward": ("waits in all_gather over dp", "begins a forward under zero: Sequential"),
    "compile": "captures calls_of_a_job.<locals>.train",
    "barrier": "waits in torch.distributed.barrier",
    "train": ("waits in all_gather over dp", "begins a forward under zero: Sequential"),
    "three batches": ("waits in all_gather over dp", "begins a forward under zero: Sequential"),
    "rerun": "waits in all_gather",
}
"""What errors say of a rank in each call; one of several where it may come before the gather."""


def is_named(call, text):
    names = NAMES[call]
    return any(name in text for name in ([names] if isinstance(names, str) else names))


def goes_alone(rank, alone, others, folder):
    mesh = pt.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    calls = calls_of_a_job(mesh, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            calls[alone if rank == 0 else others]()
            if others == "ended":
                return "ended"
            for _ in range(3):
                calls["train"]()
        except pt.LayoutError as error:
            return str(error)


def find_problem(case):
    """What is wrong with the errors of a case; None where they are right."""
    alone, others, ranks = case
    with tempfile.TemporaryDirectory() as folder:
        try:
            texts = run_ranks(goes_alone, ranks, alone, others, folder)
        except BaseException as error:
            return case, repr(error)
    wanted = [alone] if others == "ended" else [alone, others]
    for text in texts[:1] if others == "ended" else texts:
        right = isinstance(text, str) and all(is_named(call, text) for call in wanted)
        if not right or HERE not in text or "rank 0" not in text or "rank 1" not in text:
            return case, texts
    return None


def check(cases):
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        assert [p for p in pool.map(find_problem, cases) if p is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [("save", "load", 2), ("async_save", "save_safetensors", 2), ("save", "ended", 2)],
    ids=str,
)
def test_two_calls_that_meet_are_an_error_at_once(case):
    assert find_problem(case) is None


ALONE = "save load async_save save_safetensors full_state_dict item print compile barrier".split()


@pytest.mark.slow
def test_a_rank_alone_beside_a_step_is_an_error_on_all_that_names_both():
    check([(alone, "train", 2) for alone in ALONE])


@pytest.mark.slow
def test_a_rank_alone_beside_other_calls_is_an_error_on_all_that_names_both():
    check(
        [
            ("save", "compile", 2),
            ("save", "rerun", 2),
            ("save", "item", 2),
            ("save", "barrier", 2),
            ("save", "three batches", 3),
            ("three batches", "save", 2),
            ("forward", "save", 2),
            ("forward", "item", 2),
            ("load", "compile", 3),
            ("compile", "rerun", 2),
            ("item", "compile", 2),
            ("barrier", "item", 3),
            *[(alone, "ended", 2) for alone in ("load", "item", "compile", "barrier")],
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_forward_that_one_rank_makes_alone_is_an_error_on_all(ranks):
    with tempfile.TemporaryDirectory() as folder:
        texts = run_ranks(goes_alone, ranks, "forward", "train", folder)
    for text in texts:
        assert "begins a forward under zero: Sequential" in text and HERE in text
        assert "rank 0     begins" in text and "rank 1     waits in " in text


def trains_another_expert(rank, stage):
    """Both ranks have trained both experts, one at a time; now each trains another one."""
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    pt.parallelize(experts, mesh, {}) if stage is None else pt.zero(experts, mesh, stage=stage)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    x = pt.distribute_tensor(torch.ones(2, 2), mesh, [pt.Shard(0)])
    try:
        for i in (0, 1, 0, 1, rank):
            experts[i](x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except pt.LayoutError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_that_train_other_experts_are_refused():
    stages = {None: "gradients of 1 of 2", 2: "gradients under zero", 3: "forward under zero"}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        jobs = [pool.submit(run_ranks, trains_another_expert, 2, stage) for stage in stages]
        for job, compared in zip(jobs, stages.values(), strict=True):
            for text in job.result():
                assert f"compares {compared}" in text and HERE in text


def validates_alone(rank, stage, persistent):
    """Where weights lie whole on every rank, a forward is for one rank alone."""
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = pt.zero(nn.Linear(4, 3), mesh, stage=stage, persistent=persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, seen = pt.distribute_batch(torch.ones(6, 4), mesh), []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        if rank == 0:
            with torch.no_grad():
                model(x)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "persistent"), [(1, False), (3, True)])
def test_a_forward_without_gathers_is_for_one_rank_alone(stage, persistent):
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    for found in run_ranks(validates_alone, 2, stage, persistent):
        assert found == pytest.approx(seen, rel=1e-5)


def cut_off_alone(mesh, rank, path):
    model = pt.zero(nn.Linear(4, 4), mesh, stage=3)
    x = pt.distribute_batch(torch.ones(4, 4), mesh)
    try:
        if rank == 0:
            pt.save({"model": model}, path)
        else:
            model(x)
    except pt.LayoutError as error:
        return str(error)


def test_a_rank_of_one_process_alone_in_a_save_is_an_error_on_all(tmp_path):
    with pt.ranks(dp=2) as world:
        texts = world.run(lambda mesh: cut_off_alone(mesh, mesh.get_rank(), tmp_path / "new"))
    assert len(set(texts)) == 1
    assert "saves a checkpoint (pt.save)" in texts[0] and "forward under zero" in texts[0]
    assert texts[0].count(HERE) >= 2
