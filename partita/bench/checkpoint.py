"""A bench of checkpoints: how long they stop training, compared with a copy and with torch's own.

Ranks hold the shards of a few large weights. Each round times, one after the other:
- the copy of this rank's shards into existing memory, which every asynchronous save needs
- `pt.save`
- the call of `pt.async_save` that allocates its memory (as the first of a run), and one that reuses
  it
- torch.distributed.checkpoint's `async_save` of as many bytes, with new memory each time (its
  default) and with memory that it keeps (a `DefaultStager`)
- torch.distributed.checkpoint's `save`
- `pt.load` and torch's `load`
- only the checksums of all bytes that a rank reads

For an asynchronous save, only the time until the call returns counts. It is compared with the copy
of the same round.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import partita as pt
from partita.comm.device import HOST, Device, finish_copies

from .place import begin_ranks, bench_device, end_rank, make_dp_mesh

MIB = 1 << 20
COPY = "the copy alone"
CHECKSUMS = "the checksums alone"


def _ways(mesh: Any, mib: int, folder: str) -> dict[str, tuple[Callable[[], Any], Any]]:
    """Returns for each way to save: the timed function, and a function that waits for its end."""
    import torch.distributed.tensor as theirs
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    from partita.checkpoint.folder import Checksums

    rows = mib * MIB // (8 * 4 * 1024)
    whole = [bench_device().place(torch.randn(rows, 1024)) for _ in range(8)]
    ours = {
        f"w{i}": pt.distribute_tensor(w, mesh, [pt.Shard(0)], src_data_rank=None)
        for i, w in enumerate(whole)
    }
    other = {
        f"w{i}": theirs.distribute_tensor(w, mesh, [theirs.Shard(0)], src_data_rank=None)
        for i, w in enumerate(whole)
    }
    pieces = [w.to_local() for w in ours.values()]
    pinned = Device(pieces[0].device.type).copies_beside_python
    copies = [torch.empty(p.shape, dtype=p.dtype, device=HOST, pin_memory=pinned) for p in pieces]

    def copy() -> None:
        for to, piece in zip(copies, pieces, strict=True):
            to.copy_(piece, non_blocking=True)
        finish_copies()

    def at(name: str) -> str:
        return os.path.join(folder, name)

    def ended(saving: Any) -> None:
        saving.result()

    options = StagingOptions(
        use_pinned_memory=pinned,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=pinned,
    )
    stager = DefaultStager(options)

    def check() -> None:
        """Computes the checksums of a file that this rank has written."""
        path = Path(at("a"))
        sums = Checksums.read(path)
        assert sums is not None
        name = f"__{mesh.get_rank()}_0.distcp"
        sums.check_chunks(path, [(place, "it") for place in sums.chunks if place[0] == name])

    return {
        "partita save": (lambda: pt.save(ours, at("a")), None),
        "partita async_save, new memory": (lambda: pt.async_save(ours, at("b")), ended),
        COPY: (copy, None),
        "partita async_save": (lambda: pt.async_save(ours, at("b")), ended),
        "torch async_save, new memory": (lambda: async_save(other, checkpoint_id=at("c")), ended),
        "torch async_save": (
            lambda: async_save(other, checkpoint_id=at("e"), async_stager=stager),
            ended,
        ),
        "torch save": (lambda: save(other, checkpoint_id=at("d")), None),
        "partita load": (lambda: pt.load(ours, at("a")), None),
        "torch load": (lambda: load(other, checkpoint_id=at("d")), None),
        CHECKSUMS: (check, None),
    }


def _rank(end: Any, folder: str, rank: int, ranks: int, rounds: int, mib: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    begin_ranks(rank, ranks, init_method=store)
    mesh = make_dp_mesh(ranks)
    ways = _ways(mesh, mib, folder)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, (run, wait) in ways.items():
            bench_device().finish()
            dist.barrier()
            start = time.perf_counter()
            saving = run()
            took = time.perf_counter() - start
            if wait is not None:
                wait(saving)
            if i:  # the first makes buffers and threads
                seconds[name].append(took)
    end.send(seconds)
    end.close()
    dist.barrier()
    end_rank()


def measure(ranks: int, rounds: int, mib: int) -> dict[str, list[float]]:
    """Runs the bench in `ranks` processes, with `mib` MiB of weights.

    Returns the seconds of each way to save and load, by round, on the slowest rank.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            context.Process(target=_rank, args=(theirs, folder, rank, ranks, rounds, mib)).start()
            theirs.close()
            ends.append(ours)
        results = [end.recv() for end in ends]
    names = results[0]
    return {name: [max(t) for t in zip(*(s[name] for s in results), strict=True)] for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="partita bench checkpoint", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--mib", type=int, default=128, help="size of the state on all ranks together"
    )
    options = parser.parse_args(argv)
    found = measure(options.ranks, options.rounds, options.mib)
    on = f"{options.ranks} ranks of {bench_device().type}"
    print(f"{options.mib} MiB on {on}, {options.rounds} rounds: the pause")
    for name, times in found.items():
        both = list(zip(times, found[COPY], strict=True))
        over, beside = median(t / c for t, c in both), median(t - c for t, c in both)
        print(
            f"{name:<32}{1e3 * median(times):>8.1f} ms {over:>7.2f} copies"
            f" {1e3 * beside:>8.1f} ms beside the copy"
        )
    for name in ("partita save", "partita load"):
        share = median(c / t for c, t in zip(found[CHECKSUMS], found[name], strict=True))
        print(f"of {name}, {share:.0%} are for the checksums")
    return 0
