"""Workspaces of kernels: memory that a kernel allocates and frees while it runs.

It is not in the graph, and torch does not document it. `OpFacts.workspace` says for which operators
it is computed (operands that are cast) or measured, by running one call and reading the profiler.
What collectives stage is known of their backends (`staging`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm import Wire
from partita.comm.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, all_gather
from partita.comm.device import Device, state_of_host_profiler
from partita.tensor.op_facts import facts_of

__all__ = ["staging", "workspace"]

_aten = torch.ops.aten

Groups = dict[str, tuple[Wire, tuple[str, ...]]]


def workspace(target: Any, args: Sequence[Any], made: Any) -> int:
    """Bytes of the workspace of a call; 0 where none is known.

    Args:
        args: its operands, with fake tensors.
        made: its result.
    """
    kind = facts_of(target).workspace
    if not kind:
        return 0
    tensors = [t for t in (*args, made) if isinstance(t, torch.Tensor)]
    if not all(Device(t.device.type).workspace_is_fixed for t in tensors):
        return 0
    if kind == "casts":
        return _cast_operands(target.overloadpacket, args, made)
    if sum(t.nbytes for t in tensors) > _LARGEST:
        return 0
    return _measure_workspace(target, tuple(map(_signature_of_argument, args)))


_LARGEST = 1 << 29
"""Bytes of operands above which no call is run to measure it: planning must not need that
memory."""


def _cast_operands(packet: Any, args: Sequence[Any], made: Any) -> int:
    """Bytes of the casts that an elementwise kernel makes of its two operands."""
    common = _find_common_dtype(*args[:2])
    if packet is _aten.div and not (common.is_floating_point or common.is_complex):
        common = made.dtype
    extra = 0
    for operand in args[:2]:
        if isinstance(operand, torch.Tensor):
            dtype, count = operand.dtype, operand.numel()
        else:
            dtype, count = _DTYPES[type(operand)], 1
            extra += dtype.itemsize
        if dtype is not common:
            extra += count * common.itemsize
    return extra


def _find_common_dtype(one: Any, other: Any) -> torch.dtype:
    """`torch.result_type`, with fast paths: it is slow for fake tensors."""
    if isinstance(one, torch.Tensor):
        if isinstance(other, torch.Tensor):
            if one.dtype is other.dtype:
                return one.dtype
        elif one.dtype.is_floating_point and type(other) in (bool, int, float):
            return one.dtype
    return torch.result_type(one, other)


_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


@functools.lru_cache(maxsize=1024)
def _measure_workspace(target: Any, signature: tuple[Any, ...]) -> int:
    """The workspace of a call with such arguments, measured by making one."""
    # Private torch: the caller's modes make fake tensors, and these here must be real.
    with _disable_current_modes(), torch.no_grad():
        args = [_make_real_argument(s) for s in signature]
        try:
            target(*args)
        except RuntimeError:
            return 0  # fake tensors do not always have the strides of real ones
        return _measure_peak(lambda: target(*args))


def _measure_peak(call: Callable[[], Any]) -> int:
    """The most bytes that a call allocates at once, above those of its result."""
    # Private torch: its legacy profiler. Of the current one there is one per process, which the
    # user may be running; and it prints that it starts.
    start, stop = torch.autograd._enable_profiler_legacy, torch.autograd._disable_profiler_legacy  # type: ignore[attr-defined]
    try:
        start(_legacy_config())
    except RuntimeError:  # another legacy profiler runs
        return 0
    made = None
    try:
        made = call()
    finally:
        threads = stop()
        del made
    (begin,) = (e for events in threads for e in events if e.name() == "__start_profile")
    found = [e for events in threads for e in events if e.kind() == "memory_alloc"]  # type: ignore[comparison-overlap]
    found.sort(key=begin.cpu_elapsed_us)
    live = list(itertools.accumulate(e.cpu_memory_usage() for e in found))
    return max(0, max(live, default=0) - (live[-1] if live else 0))


def _legacy_config() -> Any:
    """The configuration of a profiler of the host's memory alone."""
    inner = torch._C._profiler._ExperimentalConfig()
    state = state_of_host_profiler()
    return torch.autograd.ProfilerConfig(state, False, True, False, False, False, inner)  # type: ignore[attr-defined]


def _signature_of_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorSignature(tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class _TensorSignature:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _make_real_argument(value: Any) -> Any:
    if isinstance(value, _TensorSignature):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype).fill_(0.5)
    return list(value) if isinstance(value, tuple) else value


# -- collectives -----------------------------------------------------------------------------------


def staging(target: Any, args: Sequence[Any], made: Any, groups: Groups, compiled: bool) -> int:
    """Bytes of the buffers that a collective of the program's groups stages its data in.

    Args:
        compiled: whether it is called as torch's functional collective, not through a wire.
    """
    if not args or args[-1] not in groups:
        return 0
    wire, axes = groups[args[-1]]
    if target is ALL_GATHER or (target is all_gather and not compiled):
        return wire.backend.staging_of_gather(made)
    if target is REDUCE_SCATTER:
        return wire.backend.staging_of_scatter(args[0])
    if target is ALL_REDUCE and not compiled and args[1] == "sum":
        return wire.backend.staging_of_sum(args[0], wire.mesh_size(axes))
    return 0
