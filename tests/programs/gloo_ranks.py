"""How does a test run one function on several real Gloo ranks?

    def body(rank, sizes):                       # at module level: it travels by name
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        ...
        return local_result

    def test_it():
        per_rank = run_ranks(body, 4, (2, 2))

Ranks are forked from a server that has imported torch once, so that a run costs tenths of a second.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from partita.comm.device import HOST, Device

from .scripts import PRELOADED

__all__ = ["run_ranks"]

_GRACE = 3.0  # seconds that the others get to report once a rank has failed
_CONNECTING = 60.0  # seconds that ranks get to start and to find each other
_CONNECTED = b"connected"


def run_ranks(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float = 300, device: str = HOST.type
) -> list[Any]:
    """Call `fn(rank, *args)` on `n` ranks, each a process with an initialized default group.

    Args:
        fn: a function at the top level of an importable module.
        args: anything that pickles.
        timeout: seconds for the run once the ranks are connected. The process groups' own timeout,
            which holds for connecting, too, is as long, but at least a minute.
        device: what ranks compute on, and what their group is for: Gloo for "cpu", NCCL for "cuda".

    Returns:
        The results in rank order. Tensors are copied.

    Raises:
        Exception: what the first rank to fail raised, with notes that name the rank and show its
            traceback; RuntimeError where that cannot be pickled or the rank died.
        TimeoutError: names the ranks that had not ended; their stacks are on stderr.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ends: list[Connection] = []
        processes = []
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, store, rank, n, timeout, device, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, timeout)
        finally:
            late = time.monotonic() + _GRACE
            for process in processes:
                process.join(max(0.1, late - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for end in ends:
                end.close()


def _collect(ends: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + max(timeout, _CONNECTING)
    connected = 0
    results: dict[int, Any] = {}
    failed: BaseException | None = None
    left = dict(enumerate(ends))
    while left:
        ready = wait(list(left.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [r for r, end in left.items() if end in ready]:
            try:
                report = left[rank].recv_bytes()
            except EOFError:
                error: BaseException | None = RuntimeError("the process died")
                text = ""
            else:
                if report == _CONNECTED:
                    connected += 1
                    if connected == len(ends) and failed is None:
                        deadline = time.monotonic() + timeout
                    continue
                value, error, text = torch.load(io.BytesIO(report), weights_only=False)
                results[rank] = value
            del left[rank]
            if error is not None and failed is None:
                error.add_note(f"on rank {rank} of {len(ends)}\n{text}")
                failed = error
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failed is not None:
        raise failed
    if left:
        raise TimeoutError(f"ranks {sorted(left)} of {len(ends)} had not ended in time")
    return [results[rank] for rank in range(len(ends))]


def _rank(
    end: Connection,
    store: str,
    rank: int,
    n: int,
    timeout: float,
    device: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    value, error, text = None, None, ""
    shared = dist.FileStore(store, n)
    try:
        os.environ["LOCAL_RANK"] = str(rank)
        Device(device).select()
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            store=shared,
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=max(timeout, _CONNECTING)),
        )
        faulthandler.dump_traceback_later(max(1.0, timeout - 2), exit=False)
        end.send_bytes(_CONNECTED)
        shared.set(f"connected/{rank}", "")
        value = fn(rank, *args)
    except BaseException as caught:
        error, text = caught, traceback.format_exc()
    end.send_bytes(_pickled(value, error, text))
    if error is None:  # whoever leaves while another still connects to it takes that one along
        with suppress(RuntimeError):
            everyone = [f"connected/{r}" for r in range(n)]
            shared.wait(everyone, timedelta(seconds=_CONNECTING))
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized() and error is None:
        dist.destroy_process_group()
    end.close()
    os._exit(0)  # a group that another rank has left may never come down in order


def _pickled(value: Any, error: BaseException | None, text: str) -> bytes:
    if error is not None:
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
    out = io.BytesIO()
    torch.save((value, error, text), out)
    return out.getvalue()
