"""The memory of a step that is run eagerly, before it runs: `pt.eager_memory`.

The step is made and run as it is, with all its hooks, on a dry mesh and over tensors without
memory. Each storage that a kernel makes, that autograd drops or that ZeRO resizes changes a
schedule, the same kind as that of a compiled step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm import user_line
from partita.compile.capture.fakes import local_of
from partita.compile.capture.state import State, names_of_call, state_of, tensors_of_call
from partita.compile.errors import user_line_of
from partita.compile.memory import Buffer, HeldInput, Memory, workspace
from partita.layout import Fix, LayoutError
from partita.remat.counters import HeldStorage, MemoryCount, told_of_resizes
from partita.remat.watched_calls import KernelMode
from partita.tensor.autograd import in_backward

from .rehearsal import VALUE_ASKED, LocalFakes, asks_value

_read_number = torch.ops.aten._local_scalar_dense.default


def eager_memory(make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]) -> Memory:
    """The schedule of a rank's memory while a step runs eagerly, without running it.

        def make():
            mesh = pt.dry_mesh(dp=64)
            model = pt.zero(GPT(), mesh, stage=3)
            ...
            return step, (x, y)

        print(pt.eager_memory(make).peak)      # bytes that the step allocates, at most at once

    What `make` creates has no memory, whatever its size. The step is run twice: the first run
    makes the optimizer's state, and the second is counted. What a kernel holds while it runs is
    counted where torch's CPU kernels take a fixed amount, and what collectives hold where the dry
    mesh is told its `backend`.

    Args:
        make: creates model, optimizer and batch on a `pt.dry_mesh`, and returns a step that is not
            compiled and its arguments.

    Returns:
        What `step.memory` is of a compiled step: a place for each kernel and for each time that
        ZeRO's gathered memory is allocated or freed. Gradients that were there before the step and
        are freed in it are not in it.

    Raises:
        LayoutError: the step asks for the value of a tensor, or computes with one that `make` did
            not create.
    """
    schedule = _Schedule()
    with _EagerFakes(schedule), schedule.told_of_updates(), _errors_explained():
        step, args = make()
        step(*args)
        with _disable_current_modes():
            held = tuple(_list_held(state_of(step, (), args, {}), args))
        with _ScheduleMode(schedule), told_of_resizes(schedule.note_resized):
            result = step(*args)
        found = schedule.memory_with(held)
        del result  # the caller of a step holds it
    return found


class _Schedule(MemoryCount):
    """The bytes that are alive, and the buffers that they were in: where each began and ended.

    Attributes:
        stepping: the optimizer that steps now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stepping: Optimizer | None = None
        self._places: list[str] = []
        self._buffers: list[Buffer] = []
        self._of: dict[int, int] = {}  # by the id of what is held, the number of its last buffer
        self._made_by = self._source = ""

    def counts(self, t: torch.Tensor) -> bool:
        """Is it a count of steps of the optimizer that steps?"""
        state = {} if self.stepping is None else self.stepping.state
        return any(own.get("step") is t for own in state.values())

    def begin_place(self, made_by: str) -> None:
        """What changes from now on does so where this runs."""
        self._made_by, self._source = made_by, user_line()
        self._places.append(f"{made_by}_{len(self._places)} {made_by}")

    def note_resized(self, storage: torch.UntypedStorage) -> HeldStorage:
        self.begin_place("resize_")
        return super().note_resized(storage)

    def changed(self, held: HeldStorage, more: int) -> None:
        super().changed(held, more)
        at, number = len(self._places) - 1, self._of.pop(id(held), None)
        if number is not None:
            self._buffers[number] = replace(self._buffers[number], death=at + 1)
        if more > 0:
            self._of[id(held)] = len(self._buffers)
            self._buffers.append(self._make_buffer(held.nbytes, at))

    def add_workspace(self, nbytes: int) -> None:
        """A kernel takes so many bytes beside its results while it runs."""
        at = len(self._places) - 1
        self._buffers.append(replace(self._make_buffer(nbytes, at), death=at + 1, passing=True))

    def _make_buffer(self, nbytes: int, at: int) -> Buffer:
        phase = (
            "update" if self.stepping is not None else "backward" if in_backward() else "forward"
        )
        name = f"{self._made_by}_{at}"
        return Buffer(
            name, nbytes, at, _NEVER, made_by=self._made_by, source=self._source, phase=phase
        )

    def memory_with(self, held: tuple[HeldInput, ...]) -> Memory:
        """The schedule as it is now."""
        end = len(self._places)
        buffers = (replace(b, death=min(b.death, end)) for b in self._buffers if b.nbytes)
        return Memory(tuple(self._places), tuple(buffers), held)

    @contextmanager
    def told_of_updates(self) -> Iterator[None]:
        """Within, `stepping` says which optimizer of this thread steps."""
        thread = threading.get_ident()  # torch calls the hooks of all threads' optimizers

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread:
                self.stepping = optimizer

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread:
                self.stepping = None
                # What is written through `detach()` of a fake is not counted as a write of it.
                increment_version([p for group in optimizer.param_groups for p in group["params"]])

        handles = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_NEVER = 1 << 60
"""The death of a buffer that is alive."""


class _ScheduleMode(KernelMode):
    """Makes each kernel a place of a schedule."""

    def __init__(self, schedule: _Schedule):
        super().__init__()
        self._schedule = schedule

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self._schedule.begin_place(func._opname)
        self._schedule.after_op(args, kwargs, out)
        if extra := workspace(func, args, out):
            self._schedule.add_workspace(extra)
        return out


class _EagerFakes(LocalFakes):
    """Fakes; an optimizer may read its own counts of steps, on which no memory depends: each is
    1."""

    def __init__(self, schedule: _Schedule):
        super().__init__(static_shapes=True)
        self._schedule = schedule
        # Private torch: from its cache, a result that shows an operand's memory has its own.
        self.cache_enabled = False

    def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is _read_number and self._schedule.counts(args[1][0]):
            return 1
        try:
            return super().__torch_dispatch__(func, *args, **kwargs)
        finally:
            # Private torch: its memo has weak references, beside which no module can be converted.
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Say what torch's errors of fake tensors mean here."""
    try:
        yield
    except VALUE_ASKED as error:
        raise asks_value(error) from None
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise LayoutError(
            "the step computes with a tensor that has memory",
            place=user_line_of(error),
            reason="of what make() did not create no copy without memory is made",
            fixes=(Fix("create it in make()", "model, optimizer and batch, on a dry mesh"),),
        ) from None


def _list_held(state: State, args: Sequence[Any]) -> Iterator[HeldInput]:
    """What is there between steps, each storage once: parameters, buffers, the optimizer's state,
    arguments."""
    slots = [*state.slots, *state.optimizer_slots()]
    tensors, names = tensors_of_call(slots, args, {}), names_of_call(slots, args, {})
    seen = set()
    for tensor, (name, kind) in zip(tensors, names, strict=True):
        if isinstance(tensor, torch.Tensor):
            storage = local_of(tensor).untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield HeldInput(name, kind, storage.nbytes())
