"""The device of tensors: where ranks compute, and whatever depends on its kind, the state of
autocast and the bytes of host memory with it.

No other file asks which kind a device is. Each property below is one difference that was met, and
says what it is; a device that is none of those known answers as an accelerator does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

DEVICES = ("auto", "cpu", "cuda")
"""What a user may ask for."""
HOST = torch.device("cpu")
"""The CPU: files are read into its memory, and values of Python live there."""
empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
"""Torch's own. Those that users call write zeros once there is a mesh (`tensor/torch_patches`)."""


Placed = TypeVar("Placed", bound=torch.Tensor | torch.nn.Module)


@dataclass(frozen=True)
class Device:
    """A kind of device, and what depends on it.

    Attributes:
        type: as torch names it, "cpu" or "cuda".
    """

    type: str

    @property
    def is_host(self) -> bool:
        """Is it the processor?"""
        return self.type == HOST.type

    # -- memory ------------------------------------------------------------------------------------

    @property
    def runs_at_once(self) -> bool:
        """Has a kernel run when its call returns? Elsewhere it waits in a stream, and a collective
        may hold the memory of what it received for a while."""
        return self.is_host

    @property
    def clears_new_memory(self) -> bool:
        """Does the system clear each page of new memory? That costs a tenth of a sum over it. An
        accelerator's allocator hands out memory that it had before."""
        return self.is_host

    @property
    def workspace_is_fixed(self) -> bool:
        """Do kernels take as much memory beside their results each time? What cuDNN takes depends
        on which kernel it finds fastest."""
        return self.is_host

    @property
    def copies_beside_python(self) -> bool:
        """Does a copy to pinned memory go on while the next one is asked for?"""
        return self.type == "cuda"

    @property
    def records_kernels(self) -> bool:
        """Can the kernels of a call be recorded, and launched again as one (a CUDA graph)?"""
        return self.type == "cuda"

    def make_recording_pool(self) -> Any:
        """A pool of memory that recordings share, of which one replays at a time."""
        return torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Any], device: torch.device, pool: Any) -> KernelRecording:
        """Record the kernels of a call without running them.

        Args:
            call: reads and writes tensors of `device` alone, which is of this kind. Its kernels
                have run before, so that nothing is compiled, loaded or connected meanwhile.
            pool: of `make_recording_pool`; what the call allocates comes from it.

        Raises:
            RuntimeError: it did what cannot be recorded: it waited for the device, say.
        """
        return KernelRecording(call, device, pool)

    def peak_memory(self) -> int:
        """The most bytes that this process has held at once: of its accelerator's allocator, or, on
        the host, of the system, with Python and torch themselves in it; 0 where neither tells."""
        if not self.is_host:
            return torch.accelerator.max_memory_allocated()
        try:
            import resource
        except ImportError:  # Windows
            return 0
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most  # there in bytes, elsewhere in KiB

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def rounds_factors(self) -> bool:
        """Do sums in half precision round the factor of what is added to it before they use it?"""
        return self.is_host

    @property
    def autocast_heeds_dtype(self) -> bool:
        """Does a reduction that autocast would compute in float32 keep to a `dtype=` it is told?"""
        return not self.is_host

    @property
    def autocast_refuses_probabilities(self) -> bool:
        """Is `binary_cross_entropy` an error under autocast?"""
        return not self.is_host

    # -- processes ---------------------------------------------------------------------------------

    def current(self) -> torch.device:
        """The device of this kind that this process computes on."""
        if self.type != "cuda":
            return torch.device(self.type)
        return torch.device(self.type, torch.cuda.current_device())

    def select(self) -> None:
        """Select the device of this process: the one of its local rank.

        Raises:
            ValueError: the machine has fewer than it has ranks.
        """
        if self.is_host:
            return
        rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        found = torch.accelerator.device_count()
        if rank >= found:
            raise ValueError(
                f"--device {self.type}: rank {rank} of this machine has none of its own, there are "
                f"{found}; start at most {found} ranks here, or --device cpu"
            )
        torch.accelerator.set_device_index(rank)

    def finish(self) -> None:
        """Wait until what this process has asked of its device is done."""
        if not self.is_host:
            torch.accelerator.synchronize()

    def place(self, t: Placed) -> Placed:
        """A tensor, or a module, on this device."""
        return t.to(self.type)  # type: ignore[return-value]

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Within, kernels that profit from it compute in `dtype`."""
        return torch.autocast(self.type, dtype=dtype)


class KernelRecording:
    """The kernels of one call as a CUDA graph.

    Each replay reads and writes the addresses that the recorded call read and wrote, and the
    numbers of the default generator go on as if the call had run.

    Attributes:
        value: what the call returned, whose tensors each replay fills.
    """

    def __init__(self, call: Callable[[], Any], device: torch.device, pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        # Other threads go on meanwhile: those that look after collectives, say.
        record = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with torch.cuda.device(device), record:
            self.value = call()

    def replay(self) -> None:
        """Launch the kernels on the current stream."""
        self._graph.replay()


def choose_device(asked: str) -> Device:
    """The device for `asked`: "auto" is a CUDA device where this machine has one.

    Raises:
        ValueError: another name, or a device that this torch, or this machine, does not have.
    """
    if asked not in DEVICES:
        raise ValueError(f"--device {asked!r} is none of {', '.join(DEVICES)}")
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ValueError(f"--device cuda: {explain_no_gpu()}; --device cpu, or auto, runs here")
    return Device("cuda" if asked != "cpu" and has_cuda else "cpu")


def explain_no_gpu() -> str:
    """Why there is no CUDA device, where there is none."""
    built = torch.version.cuda is not None
    return "no GPU is visible to torch" if built else "this torch is built without CUDA"


def _list_kinds() -> list[str]:
    """The kinds of devices that a tensor may lie on here. A step for "cuda" is captured where there
    is none, too."""
    found = torch.accelerator.current_accelerator()
    kinds = [HOST.type, "cuda"] if found is None else [HOST.type, "cuda", found.type]
    return [*dict.fromkeys(kinds)]


@cache
def _kinds_that_cast() -> tuple[str, ...]:
    """The kinds of devices that a tensor may lie on here and autocast knows."""
    return tuple(k for k in _list_kinds() if torch.amp.is_autocast_available(k))


def keys_of_kernels() -> list[str]:
    """By what the dispatcher finds the kernels of each kind of device that a tensor may lie on
    here. Private torch: it has no public name for them."""
    return [torch._C._dispatch_key_for_device(kind) for kind in _list_kinds()]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random functions use where none is passed."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    found: torch.Generator = torch.cuda.default_generators[index]
    return found


def generators_in_use(devices: Iterable[torch.device] = ()) -> list[torch.Generator]:
    """The default generators of the host, of the current CUDA device and of those among `devices`;
    of CUDA's only once it is in use: to ask would begin it."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        numbers = {d.index for d in devices if d.type == "cuda"} | {torch.cuda.current_device()}
        found += [torch.cuda.default_generators[i] for i in sorted(numbers)]
    return found


def finish_copies() -> None:
    """Wait until what this process has asked to be copied is there."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def accelerator_indices(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The numbers of the GPUs that `tensors` lie on."""
    return sorted({t.device.index for t in tensors if t.is_cuda and t.device.index is not None})


def accelerator_names() -> list[str]:
    """The name of each GPU that this process sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def is_seen_by_processes(memory: torch.UntypedStorage) -> bool:
    """Do other processes see what is written to `memory`? (`is_shared()` is True of all GPU
    memory.)"""
    return memory.device == HOST and memory.is_shared()


def activities_to_profile() -> list[ProfilerActivity]:
    """What torch's profiler listens to here: calls of the host, and kernels of a GPU."""
    host = [ProfilerActivity.CPU]
    return [*host, ProfilerActivity.CUDA] if torch.cuda.is_available() else host


def state_of_host_profiler() -> Any:
    """What has torch's older profiler listen to calls of the host alone. Private torch."""
    return torch.autograd.ProfilerState.CPU  # type: ignore[attr-defined]


def is_of_host(event: Any) -> bool:
    """Is it an event of the host, of those that torch's profiler recorded?"""
    return bool(event.device_type == DeviceType.CPU)


def describe_hardware(device: torch.device) -> str:
    """What code compiled for `device` depends on; "" for the host, which the store describes."""
    if device.type != "cuda":
        return ""
    found = torch.cuda.get_device_properties(device)
    return f"{device} {torch.version.cuda} {found.name} {found.major}.{found.minor}"


# -- precision, and autocast -----------------------------------------------------------------------

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]
"""For each kind of device: (its type, is autocast on, the dtype that it casts to)."""


KERNELS_WITH_PRECISIONS = {
    "torch.backends": ("generic", "all"),
    "torch.backends.cuda.matmul": ("cuda", "matmul"),
    "torch.backends.cudnn": ("cuda", "all"),
    "torch.backends.cudnn.conv": ("cuda", "conv"),
    "torch.backends.cudnn.rnn": ("cuda", "rnn"),
    "torch.backends.mkldnn": ("mkldnn", "all"),
    "torch.backends.mkldnn.matmul": ("mkldnn", "matmul"),
    "torch.backends.mkldnn.conv": ("mkldnn", "conv"),
    "torch.backends.mkldnn.rnn": ("mkldnn", "rnn"),
}
"""By what has an attribute `fp32_precision`, the backend and the kind of kernel."""


def read_autocast_state() -> AutocastState:
    """The state of autocast in this thread."""
    return tuple(
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _kinds_that_cast()
    )


def enabled_autocast_dtypes(state: AutocastState) -> tuple[torch.dtype, ...]:
    """The dtypes of the devices for which autocast is on."""
    return tuple(dtype for _, enabled, dtype in state if enabled)


def switch_off(state: AutocastState) -> AutocastState:
    """The state in which autocast is on for no device."""
    return tuple((kind, False, dtype) for kind, _, dtype in state)


@contextmanager
def use_autocast_state(state: AutocastState, *, cache: bool | None = None) -> Iterator[None]:
    """Within, autocast is in `state`; afterwards as it was before.

    Args:
        cache: does autocast keep what it has cast? None: as outside.
    """
    cache_was_on = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, cache_was_on)
        torch.set_autocast_cache_enabled(cache_was_on if cache is None else cache)
        for kind, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


# -- bytes of host memory --------------------------------------------------------------------------
# Read where they lie: torch's own way there, `x.numpy()`, wants numpy, which torch neither needs
# nor brings.


def view_bytes(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if x.nbytes == 0:
        return memoryview(b"")
    x = x.resolve_conj().resolve_neg()
    memory = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    memory.owner = x  # type: ignore[attr-defined]  # the view keeps the array alive, and that the tensor
    return memoryview(memory).cast("B")


def copy_bytes(x: torch.Tensor) -> bytes:
    """What a contiguous tensor on the CPU holds."""
    x = x.resolve_conj().resolve_neg()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
