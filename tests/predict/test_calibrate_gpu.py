"""Is what is measured on a GPU what its machine file predicts? Here a CPU is measured."""

from __future__ import annotations

import pytest

from partita.comm.device import Device
from partita.predict import calibrate_gpu
from partita.predict.calibrate import machine_toml
from partita.predict.calibrate_gpu import DeckSizes, DeviceFigures, make_gpu_machine, measure_device
from partita.predict.machine import load_machine
from partita.predict.simulate import Kernel

FIGURES = DeviceFigures(
    products={
        "bfloat16": [(2e9, 1e-5), (2e10, 4e-5), (2e12, 3e-3)],
        "float32": [(2e11, 4e-3)],
    },
    attention=3e14,
    sums=[(1e8, 5e-5), (1e10, 2.5e-3)],
    kernel_seconds=2e-6,
    memory_bytes=1.4e11,
)


@pytest.fixture(params=["as made", "from its file"])
def machine(request, tmp_path):
    made = make_gpu_machine(FIGURES, "NVIDIA H200")
    if request.param == "as made":
        return made
    path = tmp_path / "machine.toml"
    path.write_text(machine_toml(made))
    return load_machine(path)


@pytest.mark.parametrize(("flops", "seconds"), FIGURES.products["bfloat16"])
def test_a_product_takes_what_was_measured(flops, seconds, machine):
    product = Kernel("matmul", flops, 1.0, "bfloat16", True, "matmul")
    assert product.seconds(machine) == pytest.approx(seconds, rel=1e-4)


def test_other_kernels_take_their_operations_and_bytes_at_the_measured_rates(machine):
    attention = Kernel("attention", 3e12, 1.0, "bfloat16", False, "attention")
    assert attention.seconds(machine) == pytest.approx(1e-2, rel=1e-4)
    fused = Kernel("elementwise", 0.0, 4e9, "bfloat16", True, "arithmetic")
    assert fused.seconds(machine) == pytest.approx(1e-3 + 2e-6, rel=1e-4)
    single = Kernel("matmul", 5e11, 1.0, "float32", True, "batched_matmul")
    assert single.seconds(machine) == pytest.approx(1e-2 + 2e-6, rel=1e-4)


def test_links_are_those_of_the_same_gpu_s_data_sheet(machine):
    sheet = load_machine("h200")
    for link, given in ((machine.host, sheet.host), (machine.network, sheet.network)):
        assert link.latency == pytest.approx(given.latency)
        assert link.bandwidth == pytest.approx(given.bandwidth)
    assert machine.source.endswith("links of h200")
    other = make_gpu_machine(FIGURES, "NVIDIA GeForce")
    assert other.host.bandwidth < sheet.host.bandwidth and "not measured" in other.source


def test_each_figure_is_measured(monkeypatch):
    monkeypatch.setattr(calibrate_gpu, "ROUND_SECONDS", 1e-5)
    found = measure_device(Device("cpu"), DeckSizes((8, 16), (1, 1, 16, 8), (64, 128)))
    assert [flops for flops, _ in found.products["bfloat16"]] == [2 * 8**3, 2 * 16**3]
    assert {*found.products} == {"bfloat16", "float16", "float32"}
    assert [nbytes for nbytes, _ in found.sums] == [12 * 64, 12 * 128]
    times = [t for points in (*found.products.values(), found.sums) for _, t in points]
    assert min(*times, found.kernel_seconds, found.attention) > 0
    assert make_gpu_machine(found, "a GPU").memory_bytes > 1 << 30
