"""A bench of whole training steps on one device: alone, under ZeRO-3, and under FSDP2.

Each way is timed eagerly and compiled. Sharded ways run on a fake process group: each rank's share
of the work, its copies and the host's time are real, but collectives move nothing. Models compute
in bfloat16, and their parameters are float32, updated by fused AdamW. The model alone uses
autocast. Sharded models use the mixed-precision policies of FSDP2 and of ZeRO-3, which gather
bfloat16 and reduce float32.

The ways run one after another, each in its own process, so that none affects another. The table has
for each way:
- the mean time of consecutive steps
- the fraction of the device's peak that the model's matrix products reach (MFU)
- the host's time until the call returns
- the number of kernels and their time
- the MiB held between steps, and the additional MiB in a step
- the time of the first step, compilation included

A way with the same code as an earlier one finds the compiled code in a cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import partita as pt
from partita.app.models import GPT, Llama
from partita.comm.device import accelerator_names, activities_to_profile, is_of_host
from partita.report import written_file
from partita.testing.allocated_bytes import counted

from .place import bench_device, end_rank, make_dp_mesh, make_rival_mesh
from .rivals import (
    CompiledRival,
    Step,
    compile_blocks,
    compiled_loss,
    cross_entropy,
    shard_by_fsdp,
    training,
)

MIB = 1 << 20


@dataclass(frozen=True)
class StepShape:
    """The sizes of a model and of the batch on one rank.

    Attributes:
        layers, width, heads: the number of blocks, their width, and the heads of each.
        context: tokens per sequence.
        batch: sequences on one rank.
        vocab: the number of different tokens.
        hidden: the width of a Llama's MLP; 0 for a GPT.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocab: int
    hidden: int = 0

    def make(self, device: str | None = None) -> nn.Module:
        """Returns the model on the device `device`; None means the bench's own device."""
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            name: getattr(self, name) for name in ("layers", "width", "heads", "context", "vocab")
        }
        with torch.device(device or bench_device().type):
            if self.hidden:
                return Llama(**sizes, groups=self.heads // 4, hidden=self.hidden)
            return GPT(**sizes)

    def tokens(self) -> list[torch.Tensor]:
        torch.manual_seed(1)
        size = (2, self.batch, self.context)
        return list(bench_device().place(torch.randint(0, self.vocab, size)))

    def flops(self, parameters: int) -> float:
        """Returns the floating-point operations of a training step of a model with `parameters`.

        They are six for each parameter and token, plus causal attention: a token attends to half of
        the others.
        """
        attention = 6 * self.layers * self.width * self.context
        return float((6 * parameters + attention) * self.batch * self.context)


MODELS = {
    "gpt": StepShape(12, 1024, 16, 1024, 8, 50304),
    "llama": StepShape(16, 2048, 16, 2048, 4, 32000, hidden=8192),
    "small": StepShape(12, 256, 4, 256, 8, 256),
    "tiny": StepShape(2, 32, 2, 16, 2, 64),
}

WAYS = {
    "alone": "eager, one rank",
    "alone-compiled": "torch.compile (whole model and loss), one rank",
    "alone-pt": "pt.compile, one rank",
    "alone-pt-graphs": "pt.compile with CUDA graphs, one rank",
    "fsdp2": "FSDP2",
    "fsdp2-compiled": "FSDP2, blocks and loss compiled",
    "zero3": "partita ZeRO-3",
    "zero3-compiled": "partita ZeRO-3, compiled",
    "zero3-graphs": "partita ZeRO-3, compiled, with CUDA graphs",
}
_RECORDED = [name for name in WAYS if name.endswith("-graphs")]

_WARM, _IN_A_ROW = 5, 10  # steps

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Operations per second of dense bfloat16 matrix products, by a part of the device's name."""


@dataclass
class StepFigures:
    """The measurements of one way to train, such as "FSDP2, compiled".

    Attributes:
        ms, host_ms: the time of a step in a row of steps, and the host's time until a call returns.
        mfu: the fraction of the device's peak that matrix products reach; None if the peak is
            unknown.
        kernels, kernel_ms: the number of a step's kernels, and their time; None on a CPU.
        held_mib: the memory that is held between steps; None on a CPU.
        above_mib, predicted_mib: the counted and the predicted peak above that. There is a
            prediction only for compiled steps of partita.
        first_seconds: the time of the first step, compilation included.
        dynamo_graphs, graph_breaks: the numbers of Dynamo's graphs and graph breaks.
        loss: the loss of the last warm-up step.
    """

    ms: float
    host_ms: float
    mfu: float | None
    kernels: int | None
    kernel_ms: float | None
    held_mib: float | None
    above_mib: float
    predicted_mib: float | None
    first_seconds: float
    dynamo_graphs: int
    graph_breaks: int
    loss: float


def _make_step(way: str, shape: StepShape, ranks: int) -> tuple[Any, Any]:
    """Returns the step of a way, and partita's `CompiledStep` if it is one."""
    model, batch = shape.make(), shape.tokens()
    kind, _, how = way.partition("-")
    bf16 = torch.bfloat16
    if kind == "fsdp2":
        if how:
            compile_blocks(model)
        model = shard_by_fsdp(model, make_rival_mesh(ranks), dtype=bf16)
        theirs = training(model, loss=compiled_loss() if how else cross_entropy, fused=True)
        return _rival(way, lambda: theirs(*batch), how), None
    if way == "alone-compiled":
        whole: Any = torch.compile(model)
        theirs = training(whole, loss=compiled_loss(), autocast=bf16, fused=True)
        return _rival(way, lambda: theirs(*batch), how), None
    if kind == "zero3":
        mesh = make_dp_mesh(ranks)
        same = pt.MixedPrecision(bf16, grad_dtype=torch.float32, reduce_dtype=torch.float32)
        model = pt.zero(model, mesh, stage=3, precision=same)
        batch = [pt.DTensor.from_local(part, mesh, [pt.Shard(0)]) for part in batch]
    step = training(model, autocast=bf16 if kind == "alone" else None, fused=True)
    if not how:
        return lambda: step(*batch), None
    ours = pt.compile(step, cuda_graphs=way in _RECORDED)
    return lambda: ours(*batch), ours


def _rival(way: str, step: Step, compiled: str) -> Any:
    return CompiledRival(way, step) if compiled else step


def _measure_way(
    end: Any, way: str, shape: StepShape, ranks: int, rounds: int, peak: float | None
) -> None:
    """The main function of a way's process: sends its figures, or the traceback of its failure."""
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        device = bench_device()
        device.select()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        step, ours = _make_step(way, shape, ranks)
        end.send((_measure_step(way, step, ours, shape, rounds, peak), ""))
    except BaseException:
        end.send((None, traceback.format_exc()))
    end.close()
    end_rank()


def _measure_step(
    way: str, step: Any, ours: Any, shape: StepShape, rounds: int, peak: float | None
) -> StepFigures:
    device = bench_device()
    start = time.perf_counter()
    if isinstance(step, CompiledRival):
        step.compile()
        print(step, flush=True)
    else:
        step()
    device.finish()
    first = time.perf_counter() - start
    for _ in range(_WARM):
        loss = step()
    rows, hosts = [], []
    for _ in range(rounds):
        device.finish()
        start = time.perf_counter()
        for _ in range(_IN_A_ROW):
            step()
        device.finish()
        rows.append((time.perf_counter() - start) / _IN_A_ROW)
        start = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - start)
        device.finish()
    if device.records_kernels and way in _RECORDED and not ours.is_recorded:
        raise RuntimeError("the step was not recorded as a CUDA graph: a warning above says why")
    seconds = median(rows)
    kernels = kernel_ms = held = None
    above = counted(step, device=device.type)
    if not device.is_host:
        held = torch.accelerator.memory_allocated() / MIB
        kernels, kernel_ms = _count_kernels(step)
    parameters = sum(p.numel() for p in shape.make().parameters())
    return StepFigures(
        ms=1e3 * seconds,
        host_ms=1e3 * median(hosts),
        mfu=None if peak is None else shape.flops(parameters) / seconds / peak,
        kernels=kernels,
        kernel_ms=kernel_ms,
        held_mib=held,
        above_mib=above / MIB,
        predicted_mib=None if ours is None else ours.memory.peak / MIB,
        first_seconds=first,
        dynamo_graphs=getattr(step, "graphs", 0),
        graph_breaks=sum(getattr(step, "breaks", {}).values()),
        loss=_local(loss).item(),
    )


def _local(loss: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a loss, because a fake group does not reduce it."""
    return getattr(loss.detach(), "to_local", loss.detach)()


def _count_kernels(step: Any) -> tuple[int, float]:
    """Returns the number of a step's kernels and copies, and their milliseconds in total."""
    # `acc_events`: torch 2.12 and earlier warn without it, though there is one cycle.
    with torch.profiler.profile(activities=activities_to_profile(), acc_events=True) as found:
        step()
        bench_device().finish()
    events = [e for e in found.events() if not is_of_host(e) and not e.is_user_annotation]
    return len(events), sum(e.time_range.elapsed_us() for e in events) / 1e3


def _run_way(
    way: str, shape: StepShape, ranks: int, rounds: int, peak: float | None
) -> StepFigures | str:
    """Returns the figures of a way, or the traceback of its failure."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure_way, args=(theirs, way, shape, ranks, rounds, peak))
    process.start()
    theirs.close()
    try:
        found, failure = ours.recv()
    except EOFError:
        found, failure = None, "the process died"
    process.join()
    return failure or found


# -- the table -------------------------------------------------------------------------------------

_COLUMNS = "| way | ms a step | MFU | host ms | kernels, their ms | MiB held + above | first step |"


def _format_row(way: str, f: StepFigures) -> str:
    mfu = "" if f.mfu is None else f"{f.mfu:.3f}"
    kernels = "" if f.kernels is None else f"{f.kernels:,}, {f.kernel_ms:.1f}"
    held = "" if f.held_mib is None else f"{f.held_mib:.0f} + "
    predicted = "" if f.predicted_mib is None else f" (predicted {f.predicted_mib:.0f})"
    cells = (f"{f.ms:.1f}", mfu, f"{f.host_ms:.1f}", kernels, f"{held}{f.above_mib:.0f}{predicted}")
    return f"| {WAYS[way]} | {' | '.join(cells)} | {f.first_seconds:.1f} s |"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `partita bench steps`. Returns 1 if a way failed.

    Args:
        argv: the command line without the program's name; None for `sys.argv`.
    """
    parser = argparse.ArgumentParser(
        prog="partita bench steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument(
        "--layers", type=int, help="blocks; two depths of `tiny` give the host's time of a block"
    )
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the fake process group (8)")
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"rounds, each of {_IN_A_ROW} steps (5)"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, help="the ways (all that the device can run)"
    )
    parser.add_argument(
        "--warm", action="store_true", help="use code that was compiled before this run"
    )
    parser.add_argument("--json", type=written_file, metavar="FILE")
    options = parser.parse_args(argv)
    shape, device = MODELS[options.model], bench_device()
    shape = replace(shape, layers=options.layers or shape.layers)
    name = device.type if device.is_host else accelerator_names()[0]
    peak = next((PEAKS[part] for part in PEAKS if part in name), None)
    ways = options.ways or [w for w in WAYS if w not in _RECORDED or device.records_kernels]
    found: dict[str, StepFigures] = {}
    failed = {}
    with nullcontext() if options.warm else _empty_stores():
        for way in ways:
            figures = _run_way(way, shape, options.ranks, options.rounds, peak)
            if isinstance(figures, str):
                failed[way] = figures
                print(f"{way} failed:\n{figures}", flush=True)
            else:
                found[way] = figures
                print(_format_row(way, figures), flush=True)
            if options.json:  # after each way: a run may be cut short
                rows = {way: asdict(figures) for way, figures in found.items()}
                facts = {"device": name, "model": options.model, "ways": rows, "failed": failed}
                options.json.write_text(json.dumps(facts))
    print(f"\n{options.model}: {shape}\n{name}, torch {torch.__version__}, {options.ranks} ranks")
    print(_COLUMNS + "\n|" + "---|" * (_COLUMNS.count("|") - 1))
    for way, figures in found.items():
        print(_format_row(way, figures))
    for way, failure in failed.items():
        print(f"| {WAYS[way]} | failed: {failure.splitlines()[-1]} |")
    return int(bool(failed))


@contextmanager
def _empty_stores() -> Iterator[None]:
    """Uses empty caches of compiled code, which all ways share.

    The processes of the ways inherit the environment variables that are set here.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PARTITA_CACHE"] = f"{folder}/store"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        yield


if __name__ == "__main__":
    sys.exit(main())
