"""Do stages, remat, checkpoints and memory hold what they promise, on whichever device there is?"""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.nn.functional as F

import partita as pt
from partita.bench.predicted import Setup, measure_peaks, relative_error
from partita.comm.device import Device
from partita.testing.allocated_bytes import counted
from tests.programs.gloo_ranks import run_ranks
from tests.programs.zero_training import TOKENS, gpt, loss_of, train

pytestmark = pytest.mark.slow


def on_ranks(place, body, *args):
    return run_ranks(
        body, place.ranks, place.ranks, place.device, *args, timeout=280, device=place.device
    )


def mesh_of(ranks, device):
    return pt.init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))


def rows_on(mesh):
    return lambda t: pt.distribute_tensor(t.to(mesh.device_type), mesh, [pt.Shard(0)])


# -- training --------------------------------------------------------------------------------------


def train_in_stage(rank, ranks, device, stage, remat):
    mesh = mesh_of(ranks, device)
    model = gpt().to(device)
    if remat:
        pt.remat(model)
    pt.zero(model, mesh, stage=stage)
    found = train(model, rows_on(mesh))
    assert {p.device.type for p in model.parameters()} == {device}
    return found, train(gpt().to(device), lambda t: t.to(device))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_trains_as_one_device_does(stage, remat, place):
    for found, alone in on_ranks(place, train_in_stage, stage, remat):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def draw_on_device(rank, ranks, device):
    torch.manual_seed(7)
    x = rows_on(mesh_of(ranks, device))(torch.ones(6, 50))
    found = F.dropout(x, 0.5).full_tensor().cpu()
    torch.manual_seed(7)
    return found, F.dropout(torch.ones(6, 50, device=device), 0.5).cpu()


def test_ranks_draw_the_numbers_of_one_device(place):
    for found, alone in on_ranks(place, draw_on_device):
        torch.testing.assert_close(found, alone)


def train_in_bfloat16(rank, ranks, device):
    mesh = mesh_of(ranks, device)
    found = []
    for model, spread in (
        (pt.zero(gpt().to(device), mesh), rows_on(mesh)),
        (gpt().to(device), None),
    ):
        batch = [(spread or (lambda t: t.to(device)))(t) for t in TOKENS]
        with Device(device).autocast(torch.bfloat16):
            logits = model(batch[0])
        assert logits.dtype is torch.bfloat16
        found.append(F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten()).item())
    return found


def test_autocast_computes_on_ranks_what_it_does_on_one_device(place):
    for found, alone in on_ranks(place, train_in_bfloat16):
        assert found == pytest.approx(alone, rel=1e-3)


# -- checkpoints -----------------------------------------------------------------------------------


def resume(rank, ranks, device, folder):
    mesh = mesh_of(ranks, device)

    def begin():
        model = pt.zero(gpt().to(device), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # Which takes so long to write that it is changed before it is written.
        many = rows_on(mesh)(torch.zeros(2 * ranks, 1 << 23))
        found = {"model": model, "optimizer": optimizer, "random": pt.RandomState()}
        return found | {"many": many}

    def go_on(state, steps):
        state["many"] += 1
        losses = []
        for _ in range(steps):
            tokens, targets = map(rows_on(mesh), TOKENS)
            state["optimizer"].zero_grad()
            loss = loss_of(state["model"], tokens, targets)
            loss.backward()
            state["optimizer"].step()
            losses.append(loss.item())
        ends = state["many"].to_local()[:, -1].tolist()
        return [*losses, *ends, torch.rand((), device=device).item()]

    state = begin()
    go_on(state, 2)
    saving = pt.async_save(state, folder)
    expected = go_on(state, 2)  # which writes what is being saved
    saving.result()
    state = begin()
    pt.load(state, folder)
    return go_on(state, 2), expected


def test_a_run_goes_on_from_what_was_saved_while_it_went_on(place, tmp_path):
    for found, expected in on_ranks(place, resume, str(tmp_path / "saved")):
        assert found == expected


# -- memory ----------------------------------------------------------------------------------------


def count_peaks(rank, ranks, device, setup, backend):
    return measure_peaks(mesh_of(ranks, device), setup, backend=backend)


@pytest.mark.parametrize("backend", ["graph", "inductor"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_predicted_peak_is_the_counted_one(stage, backend, place, record_property):
    setup = Setup("linears", stage, wide=4, samples=32)
    for found in on_ranks(place, count_peaks, setup, backend):
        record_property(f"peak, ZeRO-{stage}, {backend}: predicted, counted, off", str(found))
        assert abs(relative_error(found)) < 0.05


def count_remat(rank, ranks, device, remat):
    mesh = mesh_of(ranks, device)
    torch.manual_seed(0)
    width, layers = 64, [torch.nn.Linear(64, 64) for _ in range(8)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(m, torch.nn.GELU()) for m in layers))
    model = model.to(device)
    if remat:
        pt.remat(model, blocks=list(model))
    pt.zero(model, mesh)
    x = rows_on(mesh)(torch.randn(2048, width))

    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    step()
    return counted(step, device=device)


def test_remat_takes_less(place, record_property):
    plain, less = (max(on_ranks(place, count_remat, remat)) for remat in (False, True))
    record_property("peak of 8 layers in eager ZeRO-3, plain; remat", f"{plain:,}; {less:,} bytes")
    assert less < 0.8 * plain


# -- time ------------------------------------------------------------------------------------------


def time_host(rank, ranks, device):
    mesh = mesh_of(ranks, device)
    x = rows_on(mesh)(torch.randn(8, 8))
    plain = x.to_local()

    def per_call(value):
        for _ in range(100):
            value.sigmoid()
        Device(device).finish()
        rounds = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                value.sigmoid()
            rounds.append((time.perf_counter() - start) / 100)
            Device(device).finish()
        return statistics.median(rounds)

    model = pt.zero(gpt().to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, targets = map(rows_on(mesh), TOKENS)

    def step():
        optimizer.zero_grad()
        loss_of(model, tokens, targets).backward()
        optimizer.step()

    def per_step(run):
        seconds = []
        for _ in range(13):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
            Device(device).finish()
        return statistics.median(seconds[3:])

    eager = per_step(step)
    fast = pt.compile(step, backend="graph", cuda_graphs=False)
    found = per_call(x) - per_call(plain), eager, per_step(fast)
    if Device(device).is_host:
        return *found, None
    return *found, per_step(pt.compile(step, backend="graph", cuda_graphs=True))


def test_what_a_call_and_a_step_take_of_the_host_is_told(place, record_property):
    (dispatch, eager, compiled, recorded), *_ = on_ranks(place, time_host)
    record_property("dispatch of x.sigmoid(), over torch's own", f"{dispatch * 1e6:.1f} us")
    record_property("a ZeRO-3 step of a tiny GPT until Python goes on", f"{eager * 1e3:.1f} ms")
    record_property("the same, captured", f"{compiled * 1e3:.1f} ms")
    if recorded is not None:
        record_property("the same, in a CUDA graph", f"{recorded * 1e3:.1f} ms")
    assert dispatch < eager and compiled > 0
