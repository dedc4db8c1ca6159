"""Does a calibration tell apart what ranks compute, wait for and carry, and does it have a curve of
each kind of kernel?"""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from partita.predict.calibrate import draw_order, make_deck, make_machine
from partita.predict.machine import RATES
from partita.predict.simulate import kernels_of

SHARED = 1.6  # how much longer a call lasts than a processor works for it
BEHIND = 2.2  # seconds in which the slowest of ranks has worked for one
AWAKE = {2: 3e-4, 4: 9e-4}  # until all that slept in a collective are awake, by their number
WORKED = {"matmul": (1e-5, 4e-5), "arithmetic": (2e-6, 9e-6), "matmul_bfloat16": (3e-5,)}


def carried(kind, nbytes):
    return {"all_reduce": 2e-4, "all_gather": 1e-4}[kind] + nbytes * 1e-9


def measurements(ranks, sizes, passes=40):
    """What ranks tell that compute, meet in groups of each of these sizes, and compute again."""
    draw = random.Random(0)
    deck = [
        {
            "rate": rate,
            "amount": 1e3 * (i + 1),
            "worked": [seconds] * 9,
            "passed": [seconds * SHARED] * 9,
        }
        for rate, times in WORKED.items()
        for i, seconds in enumerate(times)
    ]
    told = [{"kernels": deck, "collectives": []} for _ in range(ranks)]
    now, worked = [0.0] * ranks, [0.0] * ranks
    for _ in range(passes):
        for size in sizes:
            for kind in ("all_reduce", "all_gather"):
                for nbytes in (1e3, 1e6):
                    work = draw.uniform(1e-4, 9e-3)
                    for first in range(0, ranks, size):
                        group = range(first, first + size)
                        last = min(now[r] for r in group) + work * BEHIND + AWAKE[size]
                        end = last + carried(kind, nbytes)
                        for r in group:
                            begun = last - (r - first) * 1e-5  # the first rank comes last
                            ended = end + (r - first) * 2e-5  # and is done first
                            event = {"kind": kind, "ranks": size, "nbytes": nbytes}
                            event |= {"start": begun, "end": ended}
                            event["worked"] = (worked[r] + work, worked[r] + work + 1e-5)
                            told[r]["collectives"].append(event)
                            now[r], worked[r] = ended, worked[r] + work + 1e-5
    return told


@pytest.mark.parametrize(("ranks", "sizes"), [(2, (2,)), (4, (4,)), (4, (2, 4))])
def test_computing_waiting_and_carrying_are_told_apart(ranks, sizes):
    found = make_machine(measurements(ranks, sizes), ranks)
    assert found.kernels["matmul"].seconds == pytest.approx([1e-5 * SHARED, 4e-5 * SHARED])
    assert found.straggling == pytest.approx(BEHIND / SHARED - 1, rel=0.02)
    for size in sizes:
        for kind in ("all_reduce", "all_gather"):
            curve = found.collectives[f"{kind}-{size}"]
            for nbytes in (1e3, 1e6):
                expected = carried(kind, nbytes) + AWAKE[size]
                assert curve.seconds_of(nbytes) == pytest.approx(expected, rel=0.06)


def test_what_runs_beside_a_calibration_does_not_enter_the_work_of_a_call():
    quiet, busy = measurements(2, (2,)), measurements(2, (2,))
    for one in busy:
        one["kernels"] = [{**c, "passed": [3 * s for s in c["passed"]]} for c in one["kernels"]]
    a, b = make_machine(quiet, 2), make_machine(busy, 2)
    assert b.kernels["matmul"].seconds == pytest.approx(
        [3 * s for s in a.kernels["matmul"].seconds]
    )
    # It slows the calls; what passes between two collectives is what it was.
    assert b.straggling == 0.0


def test_one_rank_waits_for_nobody():
    alone = [{**one, "collectives": []} for one in measurements(2, (2,))[:1]]
    found = make_machine(alone, 1)
    assert found.straggling == 0.0 and found.collectives == {}


def test_each_kind_of_kernel_is_measured_and_each_call_of_the_deck_can_be_made():
    deck = make_deck()
    assert {call.rate for call in deck} == {*RATES, "matmul_bfloat16"}
    assert all(call.amount > 0 or call.rate in ("view", "number") for call in deck)
    order = draw_order(deck, random.Random(1))
    assert {*order} == {*range(len(deck))}
    with torch.no_grad():
        for call in deck:
            if call.amount < 1e6:
                call.run()


def rates(fn, *args):
    """For each call of an operator in a function its rate and the bytes that it moves."""
    graph = make_fx(fn, tracing_mode="fake")(*args).graph
    found = kernels_of(graph, fuses=False)
    return {n.target.__name__.split(".")[0]: (k.rate, k.nbytes) for n, k in found.items()}


def test_kernels_that_do_not_move_bytes_alike_have_rates_of_their_own():
    x = torch.rand(8, 16, 16, 16)
    thin, thick = torch.rand(8, 3, 3, 3), torch.rand(8, 16, 3, 3)

    def convolutions(x, thin, thick):
        return F.conv2d(x[:, :3], thin), F.conv2d(x, thick)

    found = rates(lambda x: (F.max_pool2d(x, 2), x.relu(), F.silu(x)), x)
    assert found["max_pool2d_with_indices"][0] == "unvectorized"
    assert found["relu"][0] == "arithmetic" and found["silu"][0] == "sigmoid"
    graph = make_fx(convolutions, tracing_mode="fake")(x, thin, thick).graph
    kinds = [k.rate for n, k in kernels_of(graph, False).items() if "convolution" in str(n.target)]
    assert kinds == ["thin_convolution", "convolution"]
    assert rates(lambda x: x.pow(2), x)["pow"][0] == "arithmetic"
    assert rates(lambda x: x.pow(1.5), x)["pow"][0] == "transcendental"


def test_a_loss_reads_of_each_row_its_targets_place_alone():
    logits, targets = torch.rand(64, 1000, requires_grad=True), torch.randint(0, 1000, (64,))

    def step(logits, targets):
        loss = F.cross_entropy(logits, targets)
        return torch.autograd.grad(loss, logits)

    found = rates(step, logits, targets)
    rows, whole = 64 * 4, 64 * 1000 * 4
    assert found["nll_loss_forward"][1] <= rows + 64 * 8 + 16
    assert whole <= found["nll_loss_backward"][1] <= whole + 64 * 8 + 16
