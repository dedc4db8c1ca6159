"""Is a step captured for GPUs where there are none: their kernels, one key, its memory?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partita.testing.believed_gpu import fake_gpu_environment

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that knows of GPUs"),
]


@pytest.fixture(scope="module")
def believing(tmp_path_factory):
    """The environment of a process whose torch believes in a GPU."""
    root = str(HERE.parents[1])
    return {**fake_gpu_environment(tmp_path_factory.mktemp("believed")), "PYTHONPATH": root}


def told_of(name, environment, *rest):
    run = [sys.executable, str(HERE / "capture_steps.py"), name, *rest]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("gpt", "flash"),
        ("cast", "flash"),
        ("llama", "flash"),  # the mask that transformers makes of positions is the causal one
    ],
)
def test_a_step_is_captured_for_a_gpu_that_is_not_there(name, kernel, believing):
    told = told_of(name, believing)
    attention = {call: n for call, n in told["calls"].items() if "scaled_dot_product" in call}
    called = f"aten._scaled_dot_product_{kernel}_attention"
    assert attention == {f"{called}.default": 2, f"{called}_backward.default": 2}  # of two layers
    if name == "cast":  # of float32 are the weights, and what is not a product
        assert told["products"] == {"torch.bfloat16": sum(told["products"].values())}
    # What lies on the host is made of numbers: an optimizer's, or of positions.
    assert told["devices"]["cuda"] > 100 * told["devices"].get("cpu", 0)
    one, other = told["keys"]
    assert one == other and len(one) == 64  # whichever of a host's GPUs a rank has
    assert "cuda:" not in told["text"]
    # ZeRO-3 holds what one block needs; without the pass all gathered weights wait for backward.
    assert 0 < told["peak"] < told["peak without regather"]


def test_a_fused_optimizer_is_captured_for_a_gpu_as_a_capturable_one(believing):
    told = told_of("optimizers", believing)
    assert told["fused"] == told["capturable"]  # which kernels update is the compiler's choice
    assert told["fused"]["of the host"] == ["number"]  # rates and betas
    assert told["foreach"] == told["one by one"]
    assert told["foreach"]["of the host"] == ["number", "optimizer"]  # its counts, as in eager


@pytest.mark.parametrize("name", ["gpt", "cast"])
def test_what_a_cuda_graph_records_of_a_step_takes_nothing_from_the_host(name, believing):
    told = told_of(name, believing, "recorded")
    assert told["recorded"] == ["cuda"] and told["on the host"] == ["cpu"]
    assert told["attention"] == 4 and told["collectives"] > 0  # forward and backward of two layers
    assert told["calls"] > 0.9 * told["calls of the whole"]
    # Rates, betas, bias corrections: a few numbers, whatever the number of parameters. None is
    # rounded to half precision by what it meets.
    assert 0 < told["crossing"] <= 16
    assert "torch.bfloat16" not in told["meets"]
    assert not told["keys differ"] and told["why not"] == ""
    assert not told["is recorded"]  # it has not run
    assert told["kept"] > 0  # the copies of the batch and of the numbers
