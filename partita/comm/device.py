"""Devices: everything that depends on the kind of device (CPU, CUDA) is in this file.

This includes autocast state and the bytes of host memory. No other file compares the kind of a
device. Each property below is one difference that occurred. A device of an unknown kind behaves
like an accelerator.
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
"""Device names that a user may pass."""
HOST = torch.device("cpu")
"""The CPU: files are read into its memory, and Python values are in it."""
empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
"""Torch's own. Those of users write zeros once there is a mesh (`tensor/torch_patches`)."""


Placed = TypeVar("Placed", bound=torch.Tensor | torch.nn.Module)


@dataclass(frozen=True)
class Device:
    """A kind of device ("cpu", "cuda"), with the properties in which kinds differ.

    Attributes:
        type: torch's name of the kind, such as "cpu" or "cuda".
    """

    type: str

    @property
    def is_host(self) -> bool:
        """True for the CPU, which is called the host."""
        return self.type == HOST.type

    # -- memory ------------------------------------------------------------------------------------

    @property
    def runs_at_once(self) -> bool:
        """True if a kernel has finished when its call returns.

        On other devices it is queued in a stream, and a collective may use its buffers for a while.
        """
        return self.is_host

    @property
    def clears_new_memory(self) -> bool:
        """True if the system clears each page of new memory, as for host memory.

        An accelerator's allocator reuses memory without clearing it.
        """
        return self.is_host

    @property
    def workspace_is_fixed(self) -> bool:
        """True if a kernel allocates the same temporary memory (workspace) every time.

        The workspace of cuDNN depends on which kernel it measures as fastest.
        """
        return self.is_host

    @property
    def copies_beside_python(self) -> bool:
        """True if Python continues while copies to pinned memory run."""
        return self.type == "cuda"

    @property
    def records_kernels(self) -> bool:
        """True if the kernels of a call can be recorded and launched as one (a CUDA graph)."""
        return self.type == "cuda"

    def make_recording_pool(self) -> Any:
        """Returns a memory pool for CUDA graphs that are replayed one at a time."""
        return torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Any], device: torch.device, pool: Any) -> KernelRecording:
        """Record the kernels of a call without running them.

        Args:
            call: a function that uses only tensors on `device`. Its kernels must have run before,
                so that nothing is compiled, loaded or connected during the recording.
            device: a device of this kind.
            pool: the result of `make_recording_pool`, from which the call allocates.

        Raises:
            RuntimeError: the call did something that cannot be recorded, such as waiting for the
                device.
        """
        return KernelRecording(call, device, pool)

    def total_memory(self) -> int:
        """Returns the bytes of memory that the current device of this kind has."""
        if self.type == "cuda":
            return int(torch.cuda.get_device_properties(self.current()).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak_memory(self) -> int:
        """Returns the most bytes that this process has allocated at once; 0 if unknown.

        On an accelerator its allocator counts them. On the host the system does, including Python
        and torch themselves.
        """
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
        """True if `add(x, y, alpha=a)` in half precision rounds `a` to that precision first."""
        return self.is_host

    @property
    def autocast_keeps_dtype(self) -> bool:
        """True if `dtype=` of a reduction takes precedence over autocast, which uses float32."""
        return not self.is_host

    @property
    def autocast_refuses_probabilities(self) -> bool:
        """True if `binary_cross_entropy` raises an error under autocast."""
        return not self.is_host

    # -- processes ---------------------------------------------------------------------------------

    def current(self) -> torch.device:
        """Returns the current device of this kind, on which this process computes."""
        if self.type != "cuda":
            return torch.device(self.type)
        return torch.device(self.type, torch.cuda.current_device())

    def select(self) -> None:
        """Select the device of this process: the one of its local rank.

        Raises:
            ValueError: the machine has fewer devices than ranks.
        """
        if self.is_host:
            return
        rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        found = torch.accelerator.device_count()
        if rank >= found:
            raise ValueError(
                f"--device {self.type}: rank {rank} of this machine has no device, because there "
                f"are {found}; start at most {found} ranks here, or --device cpu"
            )
        torch.accelerator.set_device_index(rank)

    def finish(self) -> None:
        """Wait until all kernels that this process has launched on its device have run."""
        if not self.is_host:
            torch.accelerator.synchronize()

    def place(self, t: Placed) -> Placed:
        """Returns the tensor or module `t` moved to this kind of device."""
        return t.to(self.type)  # type: ignore[return-value]

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Returns a context manager that enables autocast to `dtype` on this kind of device."""
        return torch.autocast(self.type, dtype=dtype)


class KernelRecording:
    """The kernels of one call, recorded as a CUDA graph.

    Each replay reads and writes the addresses that the recorded call read and wrote. It advances
    the default random generator as the call would.

    Attributes:
        value: the result of the recorded call. Each replay writes into its tensors.
    """

    def __init__(self, call: Callable[[], Any], device: torch.device, pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, such as the watchdog of collectives.
        record = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(device), record:
                self.value = call()
        except BaseException:
            _end_failed_recording(device)
            raise

    def replay(self) -> None:
        """Launch the recorded kernels on the current stream."""
        self._graph.replay()


def _end_failed_recording(device: torch.device) -> None:
    """Makes the default random generator of a device usable after a recording that failed.

    The generator still assumes that kernels are recorded, and refuses to draw. The end of a
    recording that succeeds corrects this.
    """
    spare = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        spare.zero_()


def choose_device(name: str) -> Device:
    """Returns the device for `name`. "auto" is a CUDA device if this machine has one.

    Raises:
        ValueError: an unknown name, or a device that this torch or this machine lacks.
    """
    if name not in DEVICES:
        raise ValueError(f"--device {name!r} is not one of {', '.join(DEVICES)}")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError(f"--device cuda: {explain_no_gpu()}; --device cpu, or auto, runs here")
    return Device("cuda" if name != "cpu" and has_cuda else "cpu")


def explain_no_gpu() -> str:
    """Returns a text that says why there is no CUDA device."""
    built = torch.version.cuda is not None
    return "no GPU is visible to torch" if built else "this torch is built without CUDA"


def _list_kinds() -> list[str]:
    """Returns the kinds of devices that a tensor may be on here.

    A step for "cuda" can be captured without such a device, too.
    """
    found = torch.accelerator.current_accelerator()
    kinds = [HOST.type, "cuda"] if found is None else [HOST.type, "cuda", found.type]
    return [*dict.fromkeys(kinds)]


@cache
def _kinds_that_cast() -> tuple[str, ...]:
    """Returns the kinds of devices that a tensor may lie on here and autocast knows."""
    return tuple(k for k in _list_kinds() if torch.amp.is_autocast_available(k))


def keys_of_kernels() -> list[str]:
    """Returns torch's dispatch keys ("CPU", "CUDA") for the kinds of device on this machine.

    Private torch: `_dispatch_key_for_device`.
    """
    return [torch._C._dispatch_key_for_device(kind) for kind in _list_kinds()]


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator from which torch draws on a device if none is passed."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    found: torch.Generator = torch.cuda.default_generators[index]
    return found


def generators_in_use(devices: Iterable[torch.device] = ()) -> list[torch.Generator]:
    """Returns torch's default generators: of the CPU, the current CUDA device, and `devices`.

    CUDA generators are included only if CUDA is initialized, because reading them would initialize
    it.
    """
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        numbers = {d.index for d in devices if d.type == "cuda"} | {torch.cuda.current_device()}
        found += [torch.cuda.default_generators[i] for i in sorted(numbers)]
    return found


def finish_copies() -> None:
    """Wait until copies between host and GPU that this process has started are complete."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def accelerator_indices(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns the indices of the GPUs on which `tensors` are."""
    return sorted({t.device.index for t in tensors if t.is_cuda and t.device.index is not None})


def accelerator_names() -> list[str]:
    """Returns the name of each GPU that this process sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def is_seen_by_processes(memory: torch.UntypedStorage) -> bool:
    """True if this memory is shared with other processes, which see writes to it.

    `is_shared()` is not sufficient, because it is True for all GPU memory.
    """
    return memory.device == HOST and memory.is_shared()


def activities_to_profile() -> list[ProfilerActivity]:
    """Returns the activities for torch's profiler: calls on the host, and GPU kernels if any."""
    host = [ProfilerActivity.CPU]
    return [*host, ProfilerActivity.CUDA] if torch.cuda.is_available() else host


def state_of_host_profiler() -> Any:
    """Returns the setting with which torch's older profiler records only calls on the host.

    Private torch: `ProfilerState`.
    """
    return torch.autograd.ProfilerState.CPU  # type: ignore[attr-defined]


def is_of_host(event: Any) -> bool:
    """True if a profiler event was recorded on the host, not on a GPU."""
    return bool(event.device_type == DeviceType.CPU)


def describe_hardware(device: torch.device) -> str:
    """Returns a text that identifies the kind of GPU, for stored compiled code; "" if not CUDA.

    The store of compiled code adds a description of the host itself.
    """
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
"""Maps each object with an attribute `fp32_precision` to the backend and the kind of kernel."""


def read_autocast_state() -> AutocastState:
    """Returns the state of autocast in this thread, for each kind of device."""
    return tuple(
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _kinds_that_cast()
    )


def enabled_autocast_dtypes(state: AutocastState) -> tuple[torch.dtype, ...]:
    """Returns the dtypes to which `state` casts, for the device kinds where autocast is on."""
    return tuple(dtype for _, enabled, dtype in state if enabled)


def switch_off(state: AutocastState) -> AutocastState:
    """Returns a copy of an autocast state in which autocast is off for every device."""
    return tuple((kind, False, dtype) for kind, _, dtype in state)


@contextmanager
def use_autocast_state(state: AutocastState, *, cache: bool | None = None) -> Iterator[None]:
    """Set autocast to `state` inside the `with` block, and restore it afterwards.

    Args:
        cache: True if autocast caches the tensors that it casts. None: unchanged.
    """
    cache_was_on = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, cache_was_on)
        torch.set_autocast_cache_enabled(cache_was_on if cache is None else cache)
        for kind, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


# -- bytes of memory -------------------------------------------------------------------------------


def resolve_lazy_values(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor equal to `x` whose memory contains its values. Code may then read the
    memory.

    In torch a conjugation or negation may be a bit of the tensor only. Some gradients are zeros
    without memory, for example the gradient of `torch.sgn`.
    """
    if x._is_zerotensor():  # torch has no public name for it
        return x.clone()
    return x.resolve_conj().resolve_neg()


# Not `x.numpy()`, which needs numpy: torch does not require it.


def view_bytes(x: torch.Tensor) -> memoryview:
    """Returns the bytes of the contiguous CPU tensor `x` as a memoryview, without a copy."""
    if x.nbytes == 0:
        return memoryview(b"")
    x = resolve_lazy_values(x)
    memory = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    memory.owner = x  # type: ignore[attr-defined]  # the view keeps the array alive, and that the tensor
    return memoryview(memory).cast("B")


def copy_bytes(x: torch.Tensor) -> bytes:
    """Returns a copy of the bytes of the contiguous CPU tensor `x`."""
    x = resolve_lazy_values(x)
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
