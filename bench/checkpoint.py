"""How fast is a checkpoint written and read, and for how long does an async save stop training?

    python bench/checkpoint.py [--megabytes 256] [--ranks 2] [--rounds 5] [--folder DIR]

Each round saves and loads the same values twice, by torch.distributed.checkpoint from torch's
DTensors and by partita from its own, on the same Gloo ranks, one after the other, into new folders.
Files are brought to the disk by both; what is read was just written, so it comes from memory. An
async save follows another one, as in a run. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
import torch.multiprocessing as mp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import partita as pt

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="of all tensors together")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.spawn(rank, (options, folder), options.ranks)


def rank(number: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=number, world_size=options.ranks)
    warnings.simplefilter("ignore")
    mesh = pt.init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",))
    rows = options.megabytes * 2**20 // 4 // options.tensors // 1024
    values = [torch.randn(rows, 1024) for _ in range(options.tensors)]

    def spread(how: Any, placement: Any) -> dict[str, Any]:
        return {f"w{i}": how.distribute_tensor(v, mesh, [placement]) for i, v in enumerate(values)}

    torchs, ours = spread(theirs, theirs.Shard(0)), spread(pt, pt.Shard(0))
    # Which keeps the memory of its copies, as partita does; torch's default takes new memory.
    options_without_gpu = {"use_pinned_memory": False, "use_non_blocking_copy": False}
    stager = DefaultStager(
        StagingOptions(use_shared_memory=False, use_async_staging=False, **options_without_gpu)
    )
    programs: dict[str, tuple[Callable[..., Any], ...]] = {
        "torch": (
            lambda at: dcp.save(torchs, checkpoint_id=at),
            lambda at: dcp.load(torchs, checkpoint_id=at),
            lambda at: dcp.async_save(torchs, checkpoint_id=at, async_stager=stager),
        ),
        "partita": (
            lambda at: pt.save(ours, at),
            lambda at: pt.load(ours, at),
            lambda at: pt.async_save(ours, at),
        ),
    }
    times: Times = {}
    for turn in range(options.rounds + 1):
        for who, (save, load, async_save) in programs.items():
            with fresh(folder, number) as at:
                clock(times, f"{who} save", save, at)
                clock(times, f"{who} load", load, at)
            with fresh(folder, number) as at:
                # Before pt.save frees the memory that the next one finds again, as in a run that
                # saves asynchronously all the time.
                async_save(at / "first").result()
                clock(times, f"{who} async, stops for", async_save, at / "second").result()
        if turn == 0:
            times.clear()  # a warm-up
    if number == 0:
        report(times, options)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def fresh(folder: str, number: int) -> Iterator[Path]:
    """A folder that is new, as those of a run that keeps its checkpoints are."""
    dist.barrier()
    at = Path(folder) / "round"
    yield at
    dist.barrier()
    if number == 0:
        shutil.rmtree(at)
    dist.barrier()


def clock(times: Times, what: str, run: Callable[[Path], Any], at: Path) -> Any:
    dist.barrier()
    start = time.perf_counter()
    result = run(at)
    times.setdefault(what, []).append(time.perf_counter() - start)
    return result


def report(times: Times, options: argparse.Namespace) -> None:
    size = options.megabytes
    print(f"{size} MiB in {options.tensors} tensors, {options.ranks} Gloo ranks")
    for what in ("save", "load", "async, stops for"):
        torchs, ours = (statistics.median(times[f"{who} {what}"]) for who in ("torch", "partita"))
        print(
            f"{what:<18} torch {torchs * 1e3:8.1f} ms ({size / torchs:6.0f} MiB/s)   "
            f"partita {ours * 1e3:8.1f} ms ({size / ours:6.0f} MiB/s)   ratio {ours / torchs:.2f}"
        )


if __name__ == "__main__":
    main()
