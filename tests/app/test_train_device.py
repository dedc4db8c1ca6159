"""Which device does a training run take, and what is said where there is none?"""

from __future__ import annotations

import pytest
import torch

from partita.app import Options
from partita.bench.place import DEVICE_VARIABLE, bench_device
from partita.cli import BENCHES, HOST_BENCHES, main
from partita.comm.device import Device, choose_device


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, of which none is touched."""
    chosen = []
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")  # as it was, afterwards
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_is_the_cpu_where_there_is_no_gpu(no_gpu):
    assert choose_device("auto") == choose_device("cpu") == Device("cpu")
    Device("cpu").select()


@pytest.mark.parametrize("built", [None, "12.8"])
def test_a_gpu_that_is_not_there_is_an_error_that_says_why(no_gpu, monkeypatch, built):
    monkeypatch.setattr(torch.version, "cuda", built)
    why = "no GPU is visible" if built else "built without CUDA"
    with pytest.raises(ValueError, match=f"--device cuda: .*{why}.*--device cpu"):
        choose_device("cuda")
    with pytest.raises(ValueError, match=why):
        Options(device="cuda").check()


def test_auto_is_a_gpu_for_each_rank_where_there_are_some(gpus, monkeypatch):
    assert choose_device("auto") == choose_device("cuda") == Device("cuda")
    assert choose_device("cpu") == Device("cpu")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    choose_device("auto").select()
    assert gpus == [1]


def test_a_rank_without_a_gpu_of_its_own_is_an_error(gpus, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(
        ValueError, match="rank 2 of this machine has no device, because there are 2"
    ):
        choose_device("cuda").select()
    assert gpus == []


def test_autocast_is_that_of_the_device():
    with Device("cpu").autocast(torch.bfloat16):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


def test_a_device_that_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match="--device 'gpu' is not one of auto, cpu, cuda"):
        choose_device("gpu")


@pytest.mark.parametrize("name", sorted(HOST_BENCHES))
def test_a_bench_of_the_processor_alone_refuses_a_gpu(name, gpus, capsys, monkeypatch):
    monkeypatch.setitem(BENCHES, name, f"{__name__}:tell_device")
    assert main(["bench", "--device", "cuda", name]) == 2
    assert f"--device cuda: {name} cannot run there" in capsys.readouterr().err
    assert main(["bench", "--device", "auto", name]) == 0
    assert capsys.readouterr().out == "cpu\n"


def test_a_bench_runs_on_the_device_that_it_is_told(gpus, capsys, monkeypatch):
    monkeypatch.setitem(BENCHES, "checkpoint", f"{__name__}:tell_device")
    for asked, found in (("cuda", "cuda"), ("auto", "cuda"), ("cpu", "cpu")):
        assert main(["bench", "--device", asked, "checkpoint"]) == 0
        assert capsys.readouterr().out == f"{found}\n"


def tell_device(arguments):
    print(bench_device().type)


def test_a_bench_says_what_device_it_has_not(no_gpu, capsys):
    assert main(["bench", "--device", "cuda", "zero"]) == 2
    assert "partita bench: --device cuda" in capsys.readouterr().err


def test_what_a_process_has_held_is_told():
    before = Device("cpu").peak_memory()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert Device("cpu").peak_memory() >= max(before, held.nbytes)
