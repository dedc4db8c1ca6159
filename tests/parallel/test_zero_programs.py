"""Do random training programs compute under ZeRO what they compute on one device?

    PARTITA_EXAMPLES=500 python -m pytest tests/parallel/test_zero_programs.py --timeout 0

runs that many on two and on three Gloo ranks each, under all stages, while each rank collects
garbage where it likes.
"""

from __future__ import annotations

import gc
import os
import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from tests.programs.gloo_ranks import run_ranks
from tests.programs.zero_programs import Report, run_programs

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "0"))
SLICE = 50
"""Programs in one launch of ranks."""


@pytest.fixture
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def assert_right(reports: list[Report]) -> None:
    assert [line for report in reports for line in report.wrong + report.unclear] == []
    assert all(report.moves == reports[0].moves for report in reports)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("first", range(0, 6, 3))
def test_random_programs_are_right_on_ranks_of_one_process(first, ranks):
    with pt.ranks(dp=ranks) as world:
        assert_right(world.run(lambda mesh: run_programs(range(first, first + 3), mesh)))


def run_slice(rank, ranks, seeds, threshold):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    gc.freeze()  # only what the programs make is looked at
    gc.set_threshold(threshold)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    return run_programs(seeds, mesh, garbage=random.Random(rank))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("first", range(0, max(EXAMPLES, 4), SLICE))
def test_random_programs_are_right_on_gloo_whenever_a_rank_collects_garbage(first, ranks):
    seeds = range(first, first + (SLICE if EXAMPLES else 4))
    reports = run_ranks(run_slice, ranks, ranks, seeds, 60, timeout=3600 if EXAMPLES else 300)
    assert_right(reports)
