"""Calibration: what this machine's ranks reach, measured while all of them work at once.

Measured are single calls, each the median of several: matrix products (operations per second),
additions of large tensors (bandwidth), additions of small ones (the fixed cost of a kernel), and
all-reduces and all-gathers of few and of many bytes (latency and bandwidth of the ring formulas).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from partita.comm import MEETING, init_device_mesh, join

from .collective_time import collective_bytes, messages_of
from .machine import Link, Machine

__all__ = ["calibrate", "machine_toml"]

_SECONDS = 1.0  # for each measurement
_FEW, _MANY = 64, 1 << 22  # elements of four bytes
_TIMEOUT = 120.0


def calibrate(ranks: int) -> Machine:
    """Measure this machine with so many ranks at work, each a process of one thread.

    Takes about 10 seconds, and the starting of the ranks.

    Raises:
        RuntimeError: a rank ended without an answer; what it wrote is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            mine = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environment = {**os.environ, **mine, MEETING: str(Path(folder) / "meeting")}
            called = [sys.executable, "-m", __name__]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(called, env=environment, **pipes))  # type: ignore[call-overload]
        try:
            told = [process.communicate(timeout=_TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for rank, (process, (_, error)) in enumerate(zip(processes, told, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} ended with {process.returncode}: {error.strip()}")
    measured = [json.loads(out.strip().splitlines()[-1]) for out, _ in told]
    slowest = {name: max(one[name] for one in measured) for name in measured[0]}
    return _make_machine(slowest, ranks)


def machine_toml(machine: Machine) -> str:
    """A machine as the text of a file that `load_machine` reads."""
    lines = [
        f"name = {json.dumps(machine.name)}",
        f"source = {json.dumps(machine.source)}",
        f"memory_bytes = {machine.memory_bytes:.6g}",
        f"memory_bandwidth = {machine.memory_bandwidth:.6g}",
        f"kernel_seconds = {machine.kernel_seconds:.4g}",
        f"fuses = {str(machine.fuses).lower()}",
        f"overlaps = {str(machine.overlaps).lower()}",
        f"ranks_per_host = {machine.ranks_per_host}",
    ]
    for name, table in (("flops", machine.flops), ("efficiency", machine.efficiency)):
        lines += ["", f"[{name}]", *(f"{key} = {value:.6g}" for key, value in table.items())]
    for name, link in (("host", machine.host), ("network", machine.network)):
        lines += ["", f"[{name}]", f"latency = {link.latency:.4g}"]
        lines += [f"bandwidth = {link.bandwidth:.6g}"]
    return "\n".join(lines) + "\n"


def _make_machine(seconds: dict[str, float], ranks: int) -> Machine:
    kernel = seconds["small"]
    size = _MATRIX
    flops = {
        name: 2.0 * size**3 / max(seconds[name] - kernel, 1e-9) for name in ("float32", "bfloat16")
    }
    return Machine(
        name=f"this machine, {ranks} ranks",
        source=f"partita calibrate --ranks {ranks}",
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks,
        memory_bandwidth=3 * 4 * _MANY / max(seconds["large"] - kernel, 1e-9),
        kernel_seconds=kernel,
        fuses=False,
        overlaps=False,  # what carries bytes takes the processors that compute
        ranks_per_host=ranks,
        flops=flops,
        efficiency=dict.fromkeys(("matmul", "attention", "memory", "link"), 1.0),
        host=(link := _fit_link(seconds, ranks)),
        network=link,
    )


def _fit_link(seconds: dict[str, float], ranks: int) -> Link:
    """Latency and bandwidth at which the ring formulas give what was measured of all-reduces."""
    if ranks == 1:
        return Link(1e-6, 1e12)
    latency = seconds["few"] / messages_of("all_reduce", ranks)
    more = max(seconds["many"] - seconds["few"], 1e-9)
    return Link(latency, collective_bytes("all_reduce", ranks, 4.0 * _MANY) / more)


# -- on a rank -------------------------------------------------------------------------------------

_MATRIX = 768


def _measure_seconds(ranks: int) -> dict[str, float]:
    small = torch.ones(16)
    large = torch.ones(_MANY)
    square = torch.ones(_MATRIX, _MATRIX)
    half = square.bfloat16()
    found = {
        "small": _seconds_of(lambda: [torch.add(small, small) for _ in range(100)]) / 100,
        "large": _seconds_of(lambda: torch.add(large, large)),
        "float32": _seconds_of(lambda: torch.mm(square, square)),
        "bfloat16": _seconds_of(lambda: torch.mm(half, half)),
        "few": 0.0,
        "many": 0.0,
    }
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        group = mesh.get_group().group_name
        ops = torch.ops._c10d_functional

        def all_reduce(x: torch.Tensor) -> None:
            ops.wait_tensor(ops.all_reduce(x, "sum", group))

        found["few"] = _seconds_of(lambda: all_reduce(small), times=100)
        found["many"] = _seconds_of(lambda: all_reduce(large), times=10)
    return found


def _seconds_of(call: Callable[[], object], times: int | None = None) -> float:
    """The median of a call; of so many, or of those that `_SECONDS` have time for."""
    call()
    found: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(found) < 3 or (
        len(found) < times if times is not None else time.perf_counter() < end
    ):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return median(found)


def main() -> None:
    """Measure as one of the ranks, and print what was found as a line of JSON."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        join()
    print(json.dumps(_measure_seconds(ranks)), flush=True)


if __name__ == "__main__":
    main()
