"""Calibration: measures the speed of this machine's kernels and collectives, while all ranks work.

Every rank runs this module as a program. It calls a list of kernels (the *deck*) in random order,
and collectives between them, as in a step. The time of a kernel is the CPU time of its median call,
times the ratio of elapsed time to CPU time of all calls. The time of a collective is measured from
when the last rank begins to when the first has ended. Between two collectives, the slowest rank
takes longer than its kernels: `Machine.straggling` is this excess. No part of a model is run.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import torch

from partita.comm import MEETING, GroupWire, Request, Wire, init_device_mesh, join, wire_of
from partita.comm.collective import Splits
from partita.comm.device import HOST, Device

from .machine import Link, Machine, MeasuredCurve, collective_bytes, fit_curve, messages_of

_TIMEOUT = 120.0


def calibrate(ranks: int) -> Machine:
    """Measures this machine and returns its description, for `pt.simulate` and `pt.autoplan`.

    Starts `ranks` processes with one thread each, which work at the same time. Takes about 25
    seconds, plus the start of the processes.

    Raises:
        RuntimeError: a rank ended without a result. The message contains its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            mine = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environment = {**os.environ, **mine, MEETING: str(Path(folder) / "meeting")}
            called = [sys.executable, "-m", f"{__package__}.calibrate"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(called, env=environment, **pipes))  # type: ignore[call-overload]
        try:
            outputs = [process.communicate(timeout=_TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for rank, (process, (_, error)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} ended with {process.returncode}: {error.strip()}")
    return make_machine([json.loads(out.strip().splitlines()[-1]) for out, _ in outputs], ranks)


def machine_toml(machine: Machine) -> str:
    """Returns the TOML text of a machine file, which `load_machine` can read."""
    said = {f.name: getattr(machine, f.name) for f in fields(machine)}
    usual = {f.name: f.default for f in fields(machine)}
    return "\n".join(_format_table({k: v for k, v in said.items() if v != usual[k]})) + "\n"


def _format_table(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yields the lines of a table of TOML: its values, and then the tables in it."""
    inner: dict[str, Mapping[str, Any]] = {}
    for key, value in table.items():
        if is_dataclass(value) or isinstance(value, Mapping):
            inner[key] = value if isinstance(value, Mapping) else vars(value)
        elif isinstance(value, tuple):
            yield f"{key} = [{', '.join(f'{one:.6g}' for one in value)}]"
        else:
            is_figure = isinstance(value, float)
            yield f"{key} = {f'{value:.6g}' if is_figure else json.dumps(value)}"
    for key, held in inner.items():
        name = above + (key if re.fullmatch(r"[\w-]+", key) else json.dumps(key))
        if not all(isinstance(v, Mapping) or is_dataclass(v) for v in held.values()):
            yield from ("", f"[{name}]")
        yield from _format_table(held, f"{name}.")


def make_machine(reports: Sequence[Mapping[str, Any]], ranks: int) -> Machine:
    """Returns a `Machine` that fits `reports`, each rank's times of kernels and collectives."""
    slower = _compare_clocks(reports)
    kernels = _fit_kernels(reports, slower)
    bfloat16 = kernels.pop("matmul_bfloat16")
    collectives, straggling = _fit_collectives(reports, slower)
    best = _find_best_rate(kernels["matmul"])
    same = kernels["matmul"].seconds_of(bfloat16.amounts[0])
    link = _fit_link(collectives, ranks)
    return Machine(
        name=f"this machine, {ranks} ranks",
        source=f"partita calibrate --ranks {ranks}",
        memory_bytes=Device(HOST.type).total_memory() / ranks,
        memory_bandwidth=_find_best_rate(kernels["arithmetic"]),
        kernel_seconds=kernels["arithmetic"].seconds[0],
        fuses=False,
        overlaps=False,  # on CPUs, sending takes the processors that compute
        ranks_per_host=ranks,
        flops={"float32": best, "bfloat16": best * same / bfloat16.seconds[0]},
        efficiency=dict.fromkeys(("matmul", "attention", "memory", "link"), 1.0),
        host=link,
        network=link,
        straggling=straggling,
        kernels=kernels,
        collectives=collectives,
    )


def _find_best_rate(curve: MeasuredCurve) -> float:
    return max(a / s for a, s in zip(curve.amounts, curve.seconds, strict=True))


# -- curves of kernels -----------------------------------------------------------------------------


def _compare_clocks(reports: Sequence[Mapping[str, Any]]) -> float:
    """Returns the elapsed time of all calls, divided by their processor time.

    It is more than 1 if ranks share processors.
    """
    calls = [call for one in reports for call in one["kernels"]]
    return max(sum(sum(c["passed"]) for c in calls) / sum(sum(c["worked"]) for c in calls), 1.0)


def _fit_kernels(reports: Sequence[Mapping[str, Any]], slower: float) -> dict[str, MeasuredCurve]:
    """Returns the curve of each rate: at each amount, the mean over calls and ranks.

    The time of a call is its median processor time, which excludes other processes, multiplied by
    `slower`.
    """
    points: dict[tuple[str, float], list[float]] = {}
    for call in (call for one in reports for call in one["kernels"]):
        seconds = median(call["worked"]) * slower
        points.setdefault((call["rate"], call["amount"]), []).append(seconds)
    return {
        rate: fit_curve([(a, fmean(s)) for (name, a), s in points.items() if name == rate])
        for rate in dict.fromkeys(name for name, _ in points)
    }


# -- curves of collectives -------------------------------------------------------------------------


def _fit_collectives(
    reports: Sequence[Mapping[str, Any]], slower: float
) -> tuple[dict[str, MeasuredCurve], float]:
    """Returns the curve of each kind and number of ranks, and how far behind the slowest rank is.

    All ranks report the start and the end of each collective, by a shared clock. The duration of a
    collective is from the last start to the first end. A rank that ends later has waited for a
    processor, while other ranks already compute.

    From the first end of a collective to the last start of the next, the slowest rank computes. A
    line is fitted through the processor time and the elapsed time of these intervals. Its slope
    shows how far behind the slowest rank is. Its constant is the time in which sleeping ranks wake
    up, and is added to each collective.

    Args:
        slower: the factor by which elapsed time exceeds processor time.
    """
    points: dict[tuple[str, float], list[float]] = {}
    phases: dict[int, list[tuple[float, float]]] = {}
    rows = zip(*(one["collectives"] for one in reports), strict=True)
    for before, now in pairwise([(), *rows]):
        ranks = now[0]["ranks"]
        # Ranks next to each other form a group. Each group begins and ends by itself.
        for group in range(0, len(now), ranks):
            those = slice(group, group + ranks)
            begun = max(row["start"] for row in now[those])
            taken = min(row["end"] for row in now[those]) - begun
            points.setdefault((f"{now[0]['kind']}-{ranks}", now[0]["nbytes"]), []).append(taken)
            if before and before[0]["ranks"] == ranks:  # otherwise they do not begin together
                passed = begun - min(row["end"] for row in before[those])
                works = zip(before[those], now[those], strict=True)
                worked = fmean(b["worked"][0] - a["worked"][1] for a, b in works)
                phases.setdefault(ranks, []).append((worked, passed))
    slope, awaking = _fit_lines(phases) if phases else (slower, {})
    curves: dict[str, list[tuple[float, float]]] = {}
    for (key, nbytes), taken in points.items():
        beside = awaking.get(int(key.rpartition("-")[2]), 0.0)
        curves.setdefault(key, []).append((nbytes, max(median(taken), 1e-7) + beside))
    fitted = {key: fit_curve(found) for key, found in curves.items()}
    return fitted, max(slope / slower - 1, 0.0)


def _fit_lines(
    points: Mapping[int, Sequence[tuple[float, float]]],
) -> tuple[float, dict[int, float]]:
    """Fits parallel lines to several sets of points. Returns the slope, and each intercept.

    No intercept is negative: if one would be, the slope is that of a line through 0.
    """
    means = {key: tuple(map(fmean, zip(*each, strict=True))) for key, each in points.items()}
    apart = [(x - means[k][0], y - means[k][1]) for k, each in points.items() for x, y in each]
    slope = sum(x * y for x, y in apart) / sum(x * x for x, _ in apart)
    if any(y < slope * x for x, y in means.values()):
        xs, ys = zip(*(pair for each in points.values() for pair in each), strict=True)
        slope = sum(ys) / sum(xs)
    return slope, {key: max(y - slope * x, 0.0) for key, (x, y) in means.items()}


def _fit_link(collectives: Mapping[str, MeasuredCurve], ranks: int) -> Link:
    """Returns the link for which the ring formulas give the measured times of all-reduces."""
    curve = collectives.get(f"all_reduce-{ranks}")
    if curve is None:
        return Link(1e-6, 1e12)
    (few, *_, many), (short, *_, long) = curve.amounts, curve.seconds
    return Link(short / messages_of("all_reduce", ranks), (many - few) / max(long - short, 1e-9))


# -- a rank that measures --------------------------------------------------------------------------

_SECONDS = 20.0  # the seconds for all passes
_KEPT = 4  # the results of this many calls are kept alive, as in a step
_ELEMENTS = (64, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21)  # four-byte elements in a collective


@dataclass(frozen=True)
class _TimedCollective:
    """A collective that is measured: its kind, its group's ranks, the bytes that each sends."""

    kind: str
    ranks: int
    nbytes: float
    run: Callable[[], object]


def main() -> None:
    """Runs the measurements as one of the ranks, and prints them as a line of JSON."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        join()
    with torch.no_grad():
        print(json.dumps(_measure(ranks)), flush=True)


def _measure(ranks: int) -> dict[str, Any]:
    deck, collectives = make_deck(), _make_collectives(ranks)
    draw = random.Random(0)  # the same order on all ranks
    found: list[list[tuple[float, float]]] = [[] for _ in deck]
    met: list[dict[str, Any]] = []
    _run_pass(deck, collectives, draw, found, met)
    passes = _agree_on_passes(_run_pass(deck, collectives, draw, found, met), ranks)
    for one in found:
        one.clear()  # the first calls prepare caches and connections: they do not count
    met.clear()
    for _ in range(passes):
        _run_pass(deck, collectives, draw, found, met)
    reading = _time_clock()
    kernels = []
    for call, pairs in zip(deck, found, strict=True):
        worked = [max(seconds - reading, 1e-9) for seconds, _ in pairs]
        row = {"rate": call.rate, "amount": call.amount, "worked": worked}
        kernels.append({**row, "passed": [passed for _, passed in pairs]})
    return {"kernels": kernels, "collectives": met}


def _time_clock() -> float:
    """Returns the seconds that reading this thread's clock takes."""
    pairs = [(time.thread_time(), time.thread_time()) for _ in range(1000)]
    return median(after - before for before, after in pairs)


def _run_pass(
    deck: Sequence[DeckCall],
    collectives: Sequence[_TimedCollective],
    draw: random.Random,
    found: list[list[tuple[float, float]]],
    met: list[dict[str, Any]],
) -> float:
    """Runs all calls and all collectives once; returns the seconds of the pass.

    For each call `found` gets its processor time and its elapsed time.
    """
    began = time.perf_counter()
    order = draw_order(deck, draw)
    turns = draw.sample(collectives, len(collectives))
    every = -(-len(order) // (len(turns) or 1))
    kept: deque[Any] = deque(maxlen=_KEPT)
    for place, number in enumerate(order):
        if turns and place % every == 0:
            met.append(_time_collective(turns.pop()))
        start, worked = time.perf_counter(), time.thread_time()
        result = deck[number].run()
        worked = time.thread_time() - worked
        found[number].append((worked, time.perf_counter() - start))
        kept.append(result)
    return time.perf_counter() - began


def _time_collective(collective: _TimedCollective) -> dict[str, Any]:
    """Returns when a collective began and ended, by two clocks: of all ranks, of this thread."""
    worked, start = time.thread_time(), time.perf_counter()
    collective.run()
    end, worked_after = time.perf_counter(), time.thread_time()
    row = {"kind": collective.kind, "ranks": collective.ranks, "nbytes": collective.nbytes}
    return {**row, "start": start, "end": end, "worked": (worked, worked_after)}


def _agree_on_passes(seconds: float, ranks: int) -> int:
    """Returns the number of passes that the slowest rank runs in `_SECONDS`, at least 3.

    Args:
        seconds: the duration of a pass on this rank.
    """
    if ranks > 1:
        wire = wire_of(init_device_mesh(HOST.type, (ranks,), mesh_dim_names=("all",)))
        gathered = wire.gather_ints((round(seconds * 1e6),))
        seconds = max(microseconds for (microseconds,) in gathered) * 1e-6
    return max(3, int(_SECONDS / seconds))


# -- collectives that are measured -----------------------------------------------------------------


def _make_collectives(ranks: int) -> list[_TimedCollective]:
    """Returns collectives of all ranks, and of each number of ranks on a smaller mesh axis."""
    found = []
    for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
        sizes, names = (ranks // size, size), ("others", "group")
        mesh = init_device_mesh(HOST.type, sizes, mesh_dim_names=names)
        wire = cast(GroupWire, wire_of(mesh))
        wire.process_group(("group",))
        for elements in _ELEMENTS:
            found += _collectives_of(wire, ("group",), size, elements)
    return found


def _collectives_of(
    wire: Wire, axes: tuple[str, ...], ranks: int, elements: int
) -> list[_TimedCollective]:
    """Returns one collective of each kind that graphs have, as they run there."""
    x = torch.ones(elements)
    part, each = x[: elements // ranks].clone(), Splits.evenly(ranks, elements // ranks)

    def gather() -> torch.Tensor:
        out = part.new_empty(part.numel() * ranks)
        wire.run_collective(out, part, axes, Request("all_gather", None, "calibrate"))
        return out

    def exchange() -> torch.Tensor:
        out = torch.empty_like(x)
        request = Request("all_to_all", None, "calibrate", get=each, send=each)
        wire.run_collective(out, x, axes, request)
        return out

    def reduce() -> torch.Tensor:
        out = x.clone()
        wire.run_collective(out, out, axes, Request("all_reduce", None, "calibrate"))
        return out

    calls = {"all_gather": gather, "all_to_all": exchange, "all_reduce": reduce}
    whole = 4.0 * part.numel() * ranks
    sent = {kind: collective_bytes(kind, ranks, whole) for kind in calls}
    return [_TimedCollective(kind, ranks, sent[kind], run) for kind, run in calls.items()]


# -- the deck of kernels ---------------------------------------------------------------------------
# A step runs each kernel once, between others. In a tight loop, a kernel would find its code and
# its operands in the caches, and memory that was just freed. So different calls alternate, on pools
# of tensors, and results are kept for a while.

_aten = torch.ops.aten
_SIZES = (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20)  # elements of four bytes
_LARGE, _HUGE = 1 << 20, 1 << 22
_POOL = 1 << 23  # bytes of the tensors of one size, where these are smaller
_IN_A_ROW = 3
_WIDTH = 128  # elements in a row, for kernels that work on rows


@dataclass(frozen=True)
class DeckCall:
    """A kernel call that is timed to measure the machine.

    Attributes:
        rate: the kind of kernel, one of `machine.RATES`.
        amount: the bytes that it reads and writes, or its operations.
        run: a function that makes the call, each time with other operands.
        is_large: True if its data fill the caches that cores share. Large and small calls are timed
            separately.
    """

    rate: str
    amount: float
    run: Callable[[], Any]
    is_large: bool = False


def make_deck() -> list[DeckCall]:
    """Returns the kernel calls to time: for each kind of kernel, calls of several sizes."""
    pools: dict[int, list[torch.Tensor]] = {}
    return [*_make_host_calls(), *_make_byte_calls(pools), *_make_work_calls()]


def draw_order(deck: Sequence[DeckCall], draw: random.Random) -> list[int]:
    """Returns the order in which to time the calls, as indices into `deck`.

    The small calls come first, followed by the large ones. Each group is shuffled. A small call is
    repeated in a row, as when an optimizer updates many small parameters.

    Args:
        draw: the random generator that shuffles them.
    """
    found: list[int] = []
    for is_large in (False, True):
        numbers = [i for i, call in enumerate(deck) if call.is_large is is_large]
        draw.shuffle(numbers)
        found += [i for i in numbers for _ in range(1 if is_large else _IN_A_ROW)]
    return found


def _take_turns(pools: dict[int, list[torch.Tensor]], elements: int) -> Callable[[], torch.Tensor]:
    """Returns a function that returns one of several tensors with `elements` positive values.

    Successive calls return different tensors in turn, so that they are not in a cache.
    """
    if elements not in pools:
        count = min(max(_POOL // (4 * elements), 3), 64)
        pools[elements] = [torch.rand(elements) + 0.5 for _ in range(count)]
    return itertools.cycle(pools[elements]).__next__


def _make_host_calls() -> Iterator[DeckCall]:
    x, number = torch.rand(16, 64), torch.tensor(2.0)
    yield DeckCall("view", 0.0, lambda: _aten.view.default(x, [64, 16]))
    yield DeckCall("view", 0.0, lambda: _aten.slice.Tensor(x, 0, 2, 8))
    yield DeckCall("view", 0.0, lambda: _aten.t.default(x))
    yield DeckCall("number", 0.0, lambda: _aten.mul.Tensor(number, number))
    yield DeckCall("number", 0.0, lambda: _aten.sub.Tensor(number, 1))


def _make_byte_calls(pools: dict[int, list[torch.Tensor]]) -> Iterator[DeckCall]:
    for elements in _SIZES:
        one = _take_turns(pools, elements)
        calls = [*_make_light_calls(one, 4.0 * elements)]
        calls += _make_heavy_calls(one, elements, 4.0 * elements)
        yield from (replace(call, is_large=elements >= _LARGE) for call in calls)
    for call in _make_light_calls(_take_turns(pools, _HUGE), 4.0 * _HUGE):
        yield replace(call, is_large=True)


def _make_light_calls(one: Callable[[], torch.Tensor], nbytes: float) -> Iterator[DeckCall]:
    factor = torch.tensor(0.999)
    yield DeckCall("arithmetic", 3 * nbytes, lambda: _aten.add.Tensor(one(), one()))
    yield DeckCall("arithmetic", 2 * nbytes, lambda: _aten.mul.Tensor(one(), factor))
    yield DeckCall("arithmetic", 3 * nbytes, lambda: _aten.lerp.Tensor(one(), one(), factor))
    yield DeckCall("copy", 2 * nbytes, lambda: _aten.copy_.default(one(), one()))
    yield DeckCall("copy", 4 * nbytes, lambda: _aten.cat.default([one(), one()]))


def _make_heavy_calls(
    one: Callable[[], torch.Tensor], elements: int, nbytes: float
) -> Iterator[DeckCall]:
    shape = [elements // _WIDTH, _WIDTH]
    weight, bias = torch.rand(_WIDTH), torch.rand(_WIDTH)
    rows = torch.randint(0, shape[0], (shape[0],))

    def table() -> torch.Tensor:
        return one().view(shape)

    def heads() -> torch.Tensor:
        """Returns rows of 32 elements, in another order than in memory."""
        return one().view(-1, 2, elements // 64, 32).transpose(1, 2)

    yield DeckCall("root", 2 * nbytes, lambda: _aten.sqrt.default(one()))
    yield DeckCall("transcendental", 2 * nbytes, lambda: _aten.gelu.default(one()))
    yield DeckCall("transcendental", 2 * nbytes, lambda: _aten.exp.default(one()))
    yield DeckCall("sigmoid", 2 * nbytes, lambda: _aten.silu.default(one()))
    yield DeckCall("unvectorized", 2.25 * nbytes, lambda: _aten.native_dropout(one(), 0.1, True))
    side = 16 if elements >= 1 << 12 else 4
    images = [elements // (16 * side * side), 16, side, side]
    pool, norm = _aten.max_pool2d_with_indices.default, _aten.native_layer_norm.default
    yield DeckCall("unvectorized", 1.75 * nbytes, lambda: pool(one().view(images), [2, 2], [2, 2]))
    yield DeckCall("softmax", 2 * nbytes, lambda: _aten._log_softmax.default(table(), 1, False))
    yield DeckCall("norm", 2 * nbytes, lambda: norm(table(), [_WIDTH], weight, bias, 1e-5))
    yield DeckCall("reduction", nbytes, lambda: _aten.sum.dim_IntList(table(), [0]))
    yield DeckCall("reduction", nbytes, lambda: _aten.mean.dim(table(), [1]))
    dense = {"memory_format": torch.contiguous_format}
    yield DeckCall("permute", 2 * nbytes, lambda: _aten.clone.default(heads(), **dense))
    yield DeckCall("gather", 2 * nbytes, lambda: _aten.embedding.default(table(), rows))
    scatter = _aten.embedding_dense_backward.default
    yield DeckCall("scatter", 2 * nbytes, lambda: scatter(table(), rows, shape[0], -1, False))


def _make_work_calls() -> Iterator[DeckCall]:
    for size in (32, 64, 128, 256, 512):
        yield from (replace(call, is_large=size == 512) for call in _make_products(size))
    half = torch.rand(128, 128).bfloat16()
    yield DeckCall("matmul_bfloat16", 2.0 * 128**3, lambda: _aten.mm.default(half, half))
    for length, width in ((32, 32), (128, 32), (256, 64)):
        yield from _make_attention(length, width)
    for images, size, channels in ((1, 8, 16), (16, 8, 16), (32, 16, 32)):
        flops = 2.0 * images * size * size * channels * 2 * channels * 9
        is_large = images == 32
        for call in _make_convolutions("", flops, images, size, channels, 2 * channels):
            yield replace(call, is_large=is_large)
    for images in (1, 32):  # three colours
        flops = 2.0 * images * 16 * 16 * 3 * 32 * 9
        yield from _make_convolutions("thin_", flops, images, 16, 3, 32)


def _make_products(size: int) -> Iterator[DeckCall]:
    """Yields products of two matrices as in a forward, and as for the gradient of a weight."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    flops = 2.0 * size**3
    yield DeckCall("matmul", flops, lambda: _aten.mm.default(a, b.t()))
    yield DeckCall("matmul", flops, lambda: _aten.mm.default(a.t(), b))
    if size <= 256:
        many = torch.rand(4, size, size)
        yield DeckCall("batched_matmul", 4 * flops, lambda: _aten.bmm.default(many, many))


def _make_attention(length: int, width: int) -> Iterator[DeckCall]:
    """Returns causal attention of two sequences and four heads, forward and backward."""
    forward = _aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, k, v, gradient = (torch.rand(2, 4, length, width) for _ in range(4))
    out, logsumexp = forward(q, k, v, 0.0, True)
    flops = 0.5 * 4 * 2 * 4 * length**2 * width
    yield DeckCall("attention", flops, lambda: forward(q, k, v, 0.0, True))
    given = (gradient, q, k, v, out, logsumexp, 0.0, True)
    yield DeckCall("attention_backward", 2.5 * flops, lambda: backward(*given))


def _make_convolutions(
    thin: str, flops: float, images: int, size: int, channels: int, more: int
) -> Iterator[DeckCall]:
    """Yields a 3 x 3 convolution of square images, and its backward."""
    x, weight = torch.rand(images, channels, size, size), torch.rand(more, channels, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    gradient = torch.rand(images, more, size, size)
    forward, backward = _aten.convolution.default, _aten.convolution_backward.default
    # The gradient of the images themselves is not needed.
    wanted, times = ([False, True, False], 1) if thin else ([True, True, False], 2)
    yield DeckCall(f"{thin}convolution", flops, lambda: forward(x, weight, None, *how))
    given = (gradient, x, weight, None, *how, wanted)
    yield DeckCall(f"{thin}convolution_backward", times * flops, lambda: backward(*given))


if __name__ == "__main__":
    main()
