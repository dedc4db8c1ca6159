"""Kernels of a step on a GPU that is not there, counted in the code that Inductor generates."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from partita.bench.kernels import KINDS, lower_in_process
from partita.bench.steps import MIB
from partita.testing.believed_gpu import fake_gpu_environment

# Beside the environment, not in it: all other tests run without triton, as on any CPU.
LOWERING = Path(sys.prefix) / "gpu-lowering"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that knows of GPUs"),
    pytest.mark.skipif(
        not LOWERING.exists() and importlib.util.find_spec("triton") is None,
        reason="no triton: `make test-all` installs it",
    ),
]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """Counts the kernels of a way, once."""
    environment = fake_gpu_environment(tmp_path_factory.mktemp("believed"))
    paths = [os.environ.get("PYTHONPATH", ""), str(LOWERING)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    known = {}

    def lower(model, way, blocks=1, without=()):
        asked = model, way, blocks, without
        if asked not in known:
            known[asked] = lower_in_process(environment, *asked, chip="h100")
        return known[asked]

    return lower


def launches(counts, kinds=KINDS):
    return sum(counts["launches", kind] for kind in kinds)


def test_the_plain_block_has_the_kernels_that_one_knows_of(lowered):
    block = lowered("gpt", "torch")["block"]
    # Four products forward and two of each backward, flash attention and its backward.
    assert block["launches", "products"] == 12
    assert block["launches", "attention"] == 2
    assert launches(block, ("packing", "optimizer", "communication", "other")) == 0


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_block_of_zero_3_computes_with_the_same_products(lowered, model):
    plain, ours = lowered(model, "torch")["block"], lowered(model, "zero3")["block"]
    for kind in ("products", "attention"):
        assert ours["launches", kind] == plain["launches", kind]
        assert ours["bytes", kind] == pytest.approx(plain["bytes", kind], rel=0.05)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_block_of_zero_3_launches_few_kernels_more_than_the_plain_one(lowered, model):
    plain, ours = lowered(model, "torch")["block"], lowered(model, "zero3")["block"]
    assert launches(ours) <= 1.15 * launches(plain) + 4
    # Two gathers and a reduction, each of one collective, which one kernel packs.
    assert ours["launches", "communication"] == ours["launches", "packing"] == 3


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_block_of_zero_3_reads_and_writes_little_more_than_the_plain_one(lowered, model):
    plain, ours = lowered(model, "torch")["block"], lowered(model, "zero3")["block"]
    beside = ("communication", "packing", "optimizer")
    computing = sum(ours["bytes", kind] for kind in KINDS if kind not in beside)
    assert computing <= 1.05 * sum(plain["bytes", kind] for kind in KINDS)


def test_an_optimizer_is_few_kernels(lowered):
    found = lowered("gpt", "zero3")
    assert found["step"]["launches", "optimizer"] == 1
    assert found["block"]["launches", "optimizer"] == 0


def test_a_step_launches_few_kernels(lowered):
    assert launches(lowered("gpt", "zero3")["step"]) <= 72  # 113 with a kernel for each parameter


def test_a_step_of_zero_3_allocates_at_most(lowered):
    """Compiled blocks of FSDP2 took 12,269 MiB for this Llama."""
    found = lowered("llama", "zero3", 16)["step"]["peak", "bytes"]
    assert found <= 12_000 * MIB


def test_a_pass_can_be_left_out(lowered):
    whole, without = (
        lowered("llama", "zero3", 1, left_out)["step"] for left_out in ((), ("free_remat",))
    )
    assert without["peak", "bytes"] >= whole["peak", "bytes"] + 64 * MIB
    assert launches(without) <= launches(whole)
