"""Capture context: the replacements and settings that are active while a step is captured.

During capture, slots (the places of the step's tensors) hold fake tensors (`slots_swapped`).
Settings of torch and Python change only for the thread that captures. The profile function that
watches the user's calls is suspended in library code (`unprofiled`).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from partita.graph.errors import not_captured
from partita.graph.slots import Slot, is_no_tuple
from partita.layout import Fix
from partita.tensor.tensor_overrides import show_same_memory
from partita.tensor.tensor_state import (
    HERE,
    HooksWithoutRerun,
    note_unseen_write,
    saving_hooks,
    without_history,
)
from partita.tensor.trace_hooks import TraceHooks

from .code_origin import is_user_module


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets the attribute `name` of `owner` to `value` inside the `with` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class FakeRunHooks(TraceHooks):
    """The `TraceHooks` that are active during a capture.

    Tensors, optimizers and remat regions call these hooks, so that the capture records what they
    do.
    """

    def is_compiling(self) -> bool:
        return False  # `torch.compile` is off

    def run_region(self, again: Callable[[], Any], once: Callable[[], Any]) -> Any:
        return once()

    def choose_control_flow(self, compiled: Any, unrolled: Any) -> Any:
        return unrolled

    def alias_data(self, x: torch.Tensor) -> torch.Tensor:
        note_unseen_write(x)  # an alias of a fake counts its own writes
        with local_ops():
            return x.data

    def limit_bucket(self, nbytes: int) -> int:
        return -1  # each gradient by itself: a graph pass makes the buckets

    def take_step(self, run: Callable[[], Any]) -> Any:
        return run()

    def begin_block(self, gather: Any) -> bool:
        HERE.unfinished.append(gather.end)
        self.run_without_profiling(gather.begin)
        return True

    def refuse_no_sync(self) -> None:
        """Raises CaptureError, because `no_sync` under ZeRO-3 cannot be captured."""
        raise not_captured(
            "no_sync under stage 3 of ZeRO",
            "in a graph, ZeRO-3 reduce-scatters each gradient as soon as it is computed",
            Fix(
                "with contextlib.nullcontext(): ...",
                "instead of no_sync: each micro-batch reduces its gradients, and shards accumulate",
            ),
        )

    def end_block(self, gather: Any) -> bool:
        if HERE.unfinished and HERE.unfinished[-1] == gather.end:
            HERE.unfinished.pop()()
        return True

    def swap_contents(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        # `module.to(...)` swaps parameters, which a tracer's weak references to fakes forbid. Its
        # effect is that of `p.data = ...` in eager.
        with local_ops():
            is_same = show_same_memory(one, other)
        if not is_same:
            one.data = other
        return True


class _InThisThread:
    """A replacement of a module's bool: True in threads that capture, and `otherwise` in others."""

    def __init__(self, otherwise: Any):
        self.otherwise = otherwise

    def __bool__(self) -> bool:
        return isinstance(HERE.trace, FakeRunHooks) or bool(self.otherwise)


def _make_bool_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return getattr(bool(self), name)(*others)

    return method


for _name in "eq ne hash int index repr or ror and rand xor rxor".split():
    setattr(_InThisThread, f"__{_name}__", _make_bool_method(f"__{_name}__"))


_LOCK = threading.Lock()
_capturing = 0  # the number of threads that capture


@contextmanager
def compiling() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` return True inside the `with` block, in this thread.

    If it is True, optimizers do not read tensors as numbers.

    Private torch: there is no public way.
    """
    global _capturing
    compiler: Any = torch.compiler
    with _LOCK:
        if not _capturing:
            compiler._is_compiling_flag = _InThisThread(compiler._is_compiling_flag)
        _capturing += 1
    try:
        yield
    finally:
        with _LOCK:
            _capturing -= 1
            flag = compiler._is_compiling_flag
            if not _capturing and isinstance(flag, _InThisThread):
                compiler._is_compiling_flag = flag.otherwise


@contextmanager
def hidden_from_watchers() -> Iterator[None]:
    """Hides calls on fakes from remat regions and saved-tensor hooks, inside the `with` block."""
    own = HooksWithoutRerun(without_history, lambda t: t)
    hooks = own if saving_hooks() else nullcontext()
    with attribute_set(HERE, "watcher", None), hooks:
        yield


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Disables the user's dispatch modes (such as a flop counter) inside the `with` block.

    Private torch: the stack of modes. If one of torch's own modes is active, all modes stay active.
    """
    stack = _get_current_dispatch_mode_stack()
    hidden = stack and not any(type(mode).is_infra_mode() for mode in stack)
    with _disable_current_modes() if hidden else nullcontext():
        yield


@contextmanager
def errors_not_logged() -> Iterator[None]:
    """Keeps torch from logging errors of fake tensors in this thread, inside the `with` block.

    partita explains and raises them itself. Private torch: the name of their logger.
    """
    thread = threading.get_ident()
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno != logging.ERROR

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


@contextmanager
def lstm_as_calls(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Makes a capture inside the `with` block record the individual calls of nn.LSTM.

    oneDNN's fused layer allocates memory for backward, and only oneDNN can compute its size.
    Nothing changes if none of `modules` contains an nn.LSTM.
    """
    if not any(isinstance(part, torch.nn.LSTM) for m in modules for part in m.modules()):
        yield
        return
    onednn: Any = torch.backends.mkldnn
    # `flags` works after `disable_global_flags()`, too; it resets settings that are not passed.
    others = {"deterministic": onednn.deterministic, "allow_tf32": onednn.allow_tf32}
    with onednn.flags(enabled=False, **others, fp32_precision=onednn.fp32_precision):
        yield


# A tracer of torch.fx replaces nn.Module.__call__, which all threads see.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Makes other captures wait, and disables the user's dispatch modes, inside the `with` block.

    Torch logs no errors of fake tensors in the block.
    """
    with _ONE_AT_A_TIME, without_dispatch_modes(), errors_not_logged():
        yield


@contextmanager
def set_for_capture(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Changes the settings that a capture of `modules` needs, inside the `with` block.

    These are settings of torch and of partita: see the functions that this one calls.
    """
    with (
        compiling(),
        # A function that is wrapped by `torch.compile` is captured as the function itself.
        torch.compiler.set_stance("force_eager"),
        lstm_as_calls(modules),
        hidden_from_watchers(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


@contextmanager
def slots_swapped(slots: Sequence[Slot], stand_in: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Replaces the tensors of a step's state by others inside the `with` block.

    At the end, the original tensors are restored.

    Args:
        slots: where the tensors are stored, such as `module._parameters["weight"]`.
        stand_in: a function from a tensor to its replacement.

    Yields:
        The new values.
    """
    before = [slot.value for slot in slots]
    try:
        for slot, value in zip(slots, before, strict=True):
            slot.put(pytree.tree_map(stand_in, value, is_leaf=is_no_tuple))
        yield [slot.value for slot in slots]
    finally:
        for slot, value in zip(slots, before, strict=True):
            slot.put(value)


# -- profile function ------------------------------------------------------------------------------


_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Profiling(threading.local):
    """The active profile function of this thread (`event`), and the suspended one (`silenced`)."""

    event: Callable[[FrameType, str, Any], None] | None = None
    silenced: Callable[[FrameType, str, Any], None] | None = None


_profiling = _Profiling()


@contextmanager
def profiled_by(event: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Sets `event` as this thread's profile function inside the `with` block.

    It gets no events of an `unprofiled` call. Torch makes about a thousand Python calls for each op
    over fake tensors. None of them is the user's, and reporting a call takes longer than the call.
    So these ops run `unprofiled`.

    Args:
        event: a function of (frame, event, argument), as for `sys.setprofile`.
    """
    before = sys.getprofile(), _profiling.event
    _profiling.event = event
    sys.setprofile(event)
    try:
        yield
    finally:
        _profiling.event = before[1]
        sys.setprofile(before[0])


def unprofiled(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls `function(*args, **kwargs)` with this thread's profile function off, which is faster.

    The function must be one of partita or torch that runs no user code: by the profile function,
    capture watches the user's calls.
    """
    event = _profiling.event
    if event is None:
        return function(*args, **kwargs)
    _profiling.event, _profiling.silenced = None, event
    sys.setprofile(None)
    try:
        return function(*args, **kwargs)
    finally:
        _profiling.event, _profiling.silenced = event, None
        sys.setprofile(event)


def profiled_again(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls `function(*args, **kwargs)`, which may run user code, from inside `unprofiled`.

    The profile function that watches the user's calls is active again during the call.
    """
    event = _profiling.silenced
    if event is None:
        return function(*args, **kwargs)
    _profiling.event, _profiling.silenced = event, None
    sys.setprofile(event)
    try:
        return function(*args, **kwargs)
    finally:
        sys.setprofile(None)
        _profiling.event, _profiling.silenced = None, event


# -- listeners -------------------------------------------------------------------------------------


def dispatch_listeners() -> tuple[Any, ...]:
    """Returns what intercepts calls: the number of dispatch modes, and the saved-tensor hooks.

    If the result differs from an earlier one, user code may run in a call. Private torch: the
    number of dispatch modes.
    """
    return torch._C._len_torch_dispatch_stack(), saving_hooks()  # type: ignore[attr-defined]


# Private torch: the mode of `with torch.device(...)`.
DeviceMode = torch.utils._device.DeviceContext


def function_modes() -> list[Any]:
    """Returns the user's active TorchFunctionModes, outermost first.

    What they do to calls becomes a part of the captured graph.
    """
    count = torch._C._len_torch_function_stack()
    if not count:
        return []
    found = map(torch._C._get_function_stack_at, range(count))
    return [m for m in found if isinstance(m, DeviceMode) or is_user_module(type(m).__module__)]


def intercepting_modes() -> list[Any]:
    """Returns the user's active TorchFunctionModes, except those of `with torch.device(...)`."""
    return [mode for mode in function_modes() if not isinstance(mode, DeviceMode)]


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Disables all TorchFunctionModes inside the `with` block, partita's own included.

    Private torch: `_pop_mode_temporarily`.
    """
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


def find_user_dispatch_mode() -> Any:
    """Returns an active TorchDispatchMode of the user; None if there is none.

    Private torch: the stack of modes.
    """
    if not torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
        return None
    active = _get_current_dispatch_mode_stack()
    return next((mode for mode in active if is_user_module(type(mode).__module__)), None)
