"""Kernels of a step on a GPU that is not there, counted in the code that Inductor generates."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from partita.bench.kernels import KINDS, lower_in_process
from partita.testing.believed_gpu import believing_environment

# Beside the environment, not in it: all other tests run without triton, as on any CPU.
LOWERING = Path(sys.prefix) / "gpu-lowering"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that knows of GPUs"),
    pytest.mark.skipif(
        not LOWERING.exists() and importlib.util.find_spec("triton") is None,
        reason="no triton: `make test-all` installs it",
    ),
]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """Counts the kernels of a way, once."""
    environment = believing_environment(tmp_path_factory.mktemp("believed"))
    paths = [os.environ.get("PYTHONPATH", ""), str(LOWERING)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    known = {}

    def lower(model, way, combine=False):
        key = model, way, combine
        if key not in known:
            known[key] = lower_in_process(environment, *key[:2], 2, chip="h100", combine=combine)
        return known[key]

    return lower


def launches(counts, kinds=KINDS):
    return sum(counts["launches", kind] for kind in kinds)


def test_the_plain_block_has_the_kernels_that_one_knows_of(lowered):
    block = lowered("gpt", "torch")["block"]
    # Four products forward and two of each backward, flash attention and its backward.
    assert block["launches", "products"] == 12
    assert block["launches", "attention"] == 2
    assert launches(block, ("packing", "optimizer", "communication", "other")) == 0


def test_a_block_of_zero_3_computes_with_the_same_products(lowered):
    plain, ours = lowered("gpt", "torch")["block"], lowered("gpt", "zero3", True)["block"]
    for kind in ("products", "attention"):
        assert ours["launches", kind] == plain["launches", kind]
    assert ours["bytes", "products"] == pytest.approx(plain["bytes", "products"], rel=0.05)


def test_a_bucket_is_packed_and_unpacked_by_few_kernels(lowered):
    block = lowered("gpt", "zero3", combine=True)["block"]
    # Two gathers and a reduction of twelve parameters, each packed and unpacked in one launch.
    assert block["launches", "packing"] <= 6


def test_kernels_of_a_step_that_do_not_need_each_other_are_launched_together(lowered):
    found = launches(lowered("gpt", "zero3", combine=True)["step"])
    assert found <= 112  # 192 where each is launched by itself
