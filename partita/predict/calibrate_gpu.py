"""Calibration of a GPU: measures products, attention, memory and launches, for a machine file.

Kernels are timed in a row. Small ones are recorded as a CUDA graph, so that the time is the GPU's,
and not that of the host which launches them. No part of a model is run. Links are not measured:
they are those of the data sheet of the same GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from partita.comm.device import Device

from .machine import Link, Machine, fit_curve, load_machine, shipped_machines

_ROUNDS = 5
ROUND_SECONDS = 0.05
_OTHER_LINK = Link(10e-6, 25e9)  # for a GPU without a data sheet in partita: PCIe
_BACKWARD_OF_ATTENTION = 2.5  # forward has two matrix products, backward five

Point = tuple[float, float]
"""An amount of work (operations or bytes), and the seconds that it takes."""


@dataclass(frozen=True)
class DeckSizes:
    """The sizes of the kernels that are measured.

    Attributes:
        products: the numbers of rows of square matrices.
        attention: batch, heads, length and width of a head.
        elements: the numbers of elements, of four bytes, that a kernel adds.
    """

    products: Sequence[int] = (1024, 2048, 4096, 8192)
    attention: tuple[int, int, int, int] = (4, 16, 2048, 128)
    elements: Sequence[int] = (1 << 22, 1 << 25, 1 << 28)


@dataclass(frozen=True)
class DeviceFigures:
    """The figures that were measured on a device.

    Attributes:
        products: for each dtype, (operations, seconds) of matrix products.
        attention: operations per second of causal attention, forward and backward.
        sums: (bytes read and written, seconds) of element-wise sums.
        kernel_seconds: the seconds of a kernel with almost no work.
        memory_bytes: the device's memory.
    """

    products: Mapping[str, Sequence[Point]]
    attention: float
    sums: Sequence[Point]
    kernel_seconds: float
    memory_bytes: float


def calibrate_gpu(device: Device, name: str) -> Machine:
    """Measures a device, and returns its description, for `pt.simulate` and `pt.autoplan`.

    Args:
        device: the kind of device. The current one is measured.
        name: the device's name, such as "NVIDIA H200".
    """
    return make_gpu_machine(measure_device(device, DeckSizes()), name)


def make_gpu_machine(figures: DeviceFigures, name: str) -> Machine:
    """Returns a `Machine` with the measured figures, and the links of the GPU's data sheet.

    Products have a measured curve. All other kernels are priced by their operations and bytes, with
    peaks that are the best measured rates.

    Args:
        figures: the figures that were measured on the device.
        name: the device's name, such as "NVIDIA H200". It selects the data sheet.
    """
    like = next((m for m in shipped_machines() if m.lower() in name.lower()), None)
    sheet = None if like is None else load_machine(like)
    flops = {dtype: _find_best_rate(points) for dtype, points in figures.products.items()}
    best = max(flops, key=lambda dtype: len(figures.products[dtype]))
    # A curve counts operations of float32: `Kernel.seconds` converts those of other dtypes.
    slower = flops["float32"] / flops[best]
    curve = fit_curve([(amount * slower, seconds) for amount, seconds in figures.products[best]])
    reached = {"matmul": 1.0, "attention": figures.attention / flops[best], "memory": 1.0}
    return Machine(
        name=name,
        source=f"partita calibrate --device cuda; links of {like or 'PCIe, not measured'}",
        memory_bytes=figures.memory_bytes,
        memory_bandwidth=_find_best_rate(figures.sums),
        kernel_seconds=figures.kernel_seconds,
        fuses=True,
        ranks_per_host=sheet.ranks_per_host if sheet else 8,
        flops=flops,
        efficiency={**reached, "link": sheet.efficiency["link"] if sheet else 0.8},
        host=sheet.host if sheet else _OTHER_LINK,
        network=sheet.network if sheet else _OTHER_LINK,
        kernels={"matmul": curve},
    )


def _find_best_rate(points: Sequence[Point]) -> float:
    return max(amount / seconds for amount, seconds in points)


# -- what is measured ------------------------------------------------------------------------------


def measure_device(device: Device, sizes: DeckSizes) -> DeviceFigures:
    """Returns the measured speed of kernels of these `sizes` on the current device."""
    sizes_of = {
        torch.bfloat16: sizes.products,
        torch.float16: sizes.products[-2:],
        torch.float32: sizes.products[-2:-1] or sizes.products,
    }
    with torch.no_grad():
        products = {
            str(dtype).removeprefix("torch."): [_time_product(device, n, dtype) for n in rows]
            for dtype, rows in sizes_of.items()
        }
        sums = [_time_sum(device, n) for n in sizes.elements]
        tiny = device.place(torch.zeros(64))
        launch = _time(device, lambda: tiny.add_(1))
    attention = _time_attention(device, *sizes.attention)
    return DeviceFigures(products, attention, sums, launch, float(device.total_memory()))


def _take_turns(device: Device, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Any]:
    """Returns a function that returns one of four tensors after the other.

    So a kernel does not find its operands in a cache because it has just read them.
    """
    pool = [torch.randn(*shape, dtype=dtype, device=device.type) for _ in range(4)]
    return itertools.cycle(pool).__next__


def _time_product(device: Device, rows: int, dtype: torch.dtype) -> Point:
    one = _take_turns(device, (rows, rows), dtype)
    return 2.0 * rows**3, _time(device, lambda: one() @ one())


def _time_sum(device: Device, elements: int) -> Point:
    one = _take_turns(device, (elements,), torch.float32)
    out = device.place(torch.empty(elements))
    return 12.0 * elements, _time(device, lambda: torch.add(one(), one(), out=out))


def _time_attention(device: Device, batch: int, heads: int, length: int, width: int) -> float:
    """Returns the operations per second of causal attention in bfloat16, with its backward."""
    shape = batch, heads, length, width
    q, k, v, gradient = (device.place(torch.randn(*shape).bfloat16()) for _ in range(4))
    operands = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def run() -> None:
        out = F.scaled_dot_product_attention(*operands, is_causal=True)
        torch.autograd.grad(out, operands, gradient)

    # A mask leaves half of the two products.
    flops = 0.5 * 4 * batch * heads * length**2 * width * (1 + _BACKWARD_OF_ATTENTION)
    return flops / _time(device, run, is_recorded=False)


def _time(device: Device, call: Callable[[], Any], is_recorded: bool = True) -> float:
    """Returns the seconds of a call, in a row of calls: the median of several rounds.

    Args:
        is_recorded: True to record the row, if the device can, so that the host's time is left out.
    """
    for _ in range(2):  # warm-up: kernels are loaded, libraries choose kernels
        call()
    device.finish()
    began = time.perf_counter()
    call()
    device.finish()
    count = max(1, min(1000, int(ROUND_SECONDS / max(time.perf_counter() - began, 1e-9))))

    def run_row() -> None:
        for _ in range(count):
            call()

    launch: Callable[[], None] = run_row
    if is_recorded and device.records_kernels:
        launch = device.record(run_row, device.current(), device.make_recording_pool()).replay
    launch()
    rounds = []
    for _ in range(_ROUNDS):
        device.finish()
        began = time.perf_counter()
        launch()
        device.finish()
        rounds.append((time.perf_counter() - began) / count)
    return median(rounds)
