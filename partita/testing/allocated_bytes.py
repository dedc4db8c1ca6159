"""Allocated bytes: the most bytes that torch's allocator had allocated at one time.

An accelerator's allocator counts this itself. On the CPU, torch's profiler reports allocations by
ops, by kernels that Inductor compiled, and by collectives. It reports those of this thread and of
threads of process groups. A buffer that such a thread is the last to free would seem to stay
allocated, because that is not reported. So after each wait these threads get time to free buffers
first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from partita.comm.device import HOST, Device

_GRACE = 1e-3  # seconds after a wait


def counted(
    step: Callable[[], Any],
    times: int = 2,
    device: str = HOST.type,
    before: Callable[[], Any] = lambda: None,
) -> int:
    """Returns the peak of allocated bytes during `step`, minus the bytes allocated before it.

    Args:
        step: the function to run. Call it once before, so that memory that it allocates only once
            exists.
        times: the number of runs; the smallest peak is returned.
        device: the type of the device, such as "cuda".
        before: a function that is called before each run, whose memory is not counted. For example,
            it frees gradients that the step would free.
    """
    count = counts_of if Device(device).is_host else _count_on_accelerator
    found = []
    for _ in range(times):
        before()
        found.append(count(step))
    return min(found)


def _count_on_accelerator(step: Callable[[], Any]) -> int:
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def counts_of(step: Callable[[], Any]) -> int:
    """Returns the peak of allocated bytes during one run of `step` on the CPU, like `counted`."""
    from torch.profiler import ProfilerActivity, profile

    host = [ProfilerActivity.CPU]
    # `acc_events`: torch 2.12 warns without it, though there is one cycle.
    with profile(activities=host, profile_memory=True, acc_events=True) as found, _waiting_long():
        step()
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, nbytes in changes:
        held += nbytes
        most = max(most, held)
    return most


@contextmanager
def _waiting_long() -> Iterator[None]:
    """Makes functions called "wait" that are written in C take longer inside the `with` block."""

    def seen(frame: Any, event: str, function: Any) -> None:
        if event != "c_return":
            return
        name = getattr(function, "__name__", "")
        if not name:  # an operator of torch has no `__name__`
            name = getattr(frame.f_locals.get("self"), "_opname", "")
        if "wait" in name:
            time.sleep(_GRACE)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)
