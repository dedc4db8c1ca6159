"""Do process groups part when one rank captures another program than the others run?"""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita.comm import waiting
from tests.programs.gloo_ranks import run_ranks


def sums(x, scale):
    return (x * scale).sum().redistribute(placements=[pt.Replicate()])


def spread():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return mesh, pt.distribute_tensor(torch.ones(4), mesh, [pt.Shard(0)])


def parts(rank, checked):
    mesh, x = spread()
    store = mesh.get_group("dp").get_group_store()
    fast = pt.compile(sums, backend="graph")
    for _ in range(2):
        assert fast(x, 2).item() == 8.0
    assert fast(x, 4).item() == 16.0  # all ranks capture again
    store.set_timeout(timedelta(seconds=3))
    told = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        waiting.PATIENCE = 1.0
        with pytest.raises(pt.LayoutError) as caught:
            if checked:
                with pt.check_ranks(timeout=20):
                    fast(x, 2 + rank)
            else:
                fast(x, 2 + rank)
        told += [str(w.message) for w in warned]
    return str(caught.value), told


@pytest.mark.slow
def test_a_rank_that_captures_while_another_runs_is_named_on_both_when_the_job_is_out_of_patience():
    (runs, _), (captures, warned) = run_ranks(parts, 2, False)
    why = "captures sums, at tests/guards/test_limits_on_gloo.py:"
    for text in (runs, captures):
        assert "rank 1 waited 3 s for rank 0" in text and "rank 0     runs compiled sums" in text
        assert why in text and "argument[1]: 4 became 3" in text
        assert "pt.check_ranks()" in text
    assert len(warned) == 1 and "rank 0 has not arrived yet" in warned[0] and why in warned[0]


@pytest.mark.slow
def test_under_check_ranks_that_is_an_error_on_both_at_once():
    (one, _), (other, _) = run_ranks(parts, 2, True)
    assert one == other
    assert "compiled sums runs " in one and "compiled sums is captured at" in one


def plain_that_changes(rank):
    """It is equal where the ranks first compare it, and no longer later."""
    _, x = spread()
    fast = pt.compile(lambda x, plain: x * (plain + 1), backend="graph")
    fast(x, torch.zeros(4))
    mine = torch.full((4,), float(rank))
    fast(x, mine)
    with pytest.raises(pt.LayoutError) as caught, pt.check_ranks(timeout=20):
        fast(x, mine)
    return str(caught.value)


@pytest.mark.slow
def test_under_check_ranks_plain_values_are_compared_in_each_call():
    one, other = run_ranks(plain_that_changes, 2)
    assert one == other
    assert "a plain tensor that the step makes, next to DTensors, differs between ranks" in one


def tells_a_ledger(rank):
    _, x = spread()
    log = []
    for backend in ("graph", "inductor"):
        fast = pt.compile(sums, backend=backend)
        fast(x, 2)
        with pt.ledger() as ledger:
            assert fast(x, 2).item() == 8.0
        log.append([(m.kind, m.nbytes, m.reason, m.rank) for m in ledger.moves])
    with pt.ledger() as eager:
        sums(x, 2.0)
    return log, [(m.kind, m.nbytes, m.reason, m.rank) for m in eager.moves if m.nbytes]


@pytest.mark.slow
def test_a_ledger_is_told_the_same_whatever_runs_the_graph():
    for log, eager in run_ranks(tells_a_ledger, 2):
        assert log == [eager, eager] and len(eager) == 1
