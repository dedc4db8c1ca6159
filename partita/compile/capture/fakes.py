"""Fake tensors: what stands for a tensor, or a DTensor, while a step is captured.

A FakeTensor has metadata, a device and no memory. For a DTensor's local tensor it is re-tagged as
`FakeDTensor`, like any other shard. That class is both: a DTensor to Python, so that rules and
moves run as ever, and a FakeTensor to the dispatcher, which aborts where a tensor with a fake's
dispatch keys has a class that cannot take its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version

from partita.tensor.dtensor import PLAIN, TYPED, DTensor
from partita.tensor.op_facts import facts_of

from .symbolic import NumberEnv

__all__ = [
    "FakeDTensor",
    "captured_for",
    "count_writes_of_lists",
    "device_at_capture",
    "fake_mode",
    "fake_mode_of",
    "hang_hooks",
    "has_memory",
    "local_of",
    "tensors_written",
    "users_hooks",
]


class FakeDTensor(DTensor, FakeTensor):
    """A fake shard. Never constructed: a FakeTensor is re-tagged."""

    __torch_dispatch__ = FakeTensor.__torch_dispatch__
    device = FakeTensor.device


PLAIN.add(FakeTensor)
TYPED[FakeTensor] = TYPED[FakeDTensor] = FakeDTensor


def fake_mode() -> FakeTensorMode:
    """A mode in which shapes are static: another shape is another capture.

    Its shape environment traces Python numbers; without one Inductor's cache would be bypassed.
    """
    return FakeTensorMode(shape_env=NumberEnv(), static_shapes=True)


def fake_mode_of(inputs: Iterable[Any]) -> FakeTensorMode:
    """The mode in which a graph's inputs were made; a new one for a graph that has none."""
    found = (getattr(x, "fake_mode", None) for x in inputs)
    return next((mode for mode in found if mode is not None), None) or FakeTensorMode()


_TARGET: ContextVar[torch.device | None] = ContextVar("captured_for", default=None)


@contextmanager
def captured_for(device: torch.device | str) -> Iterator[None]:
    """Within, what lies on the meta device is captured as if it lay on `device`.

    So a graph that is never run has a device's own kernels, of attention above all, of which the
    meta device has none.
    """
    token = _TARGET.set(torch.device(device))
    try:
        yield
    finally:
        _TARGET.reset(token)


def device_at_capture(x: torch.Tensor) -> torch.device:
    """The device of the fake of `x`."""
    return (_TARGET.get() if x.is_meta else None) or x.device


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The local tensor of `x`, plain and without history."""
    with Local(), torch.no_grad():
        found: Any = x.detach()
    return found


def has_memory(x: Any) -> bool:
    """Is it a real tensor, for which no fake stands?"""
    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


def tensors_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lists: bool = False
) -> list[torch.Tensor]:
    """The tensors that a call of an op writes; with `lists` only those within list operands."""
    found: list[torch.Tensor] = []
    for operand in facts_of(func).writes:
        place = operand.place
        given = args[place] if place < len(args) else kwargs.get(operand.name)
        if operand.is_list:
            found += [t for t in given or () if t is not None]
        elif given is not None and not lists:
            found.append(given)
    return found


def count_writes_of_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Increment the versions of tensors in list operands that `func` has written.

    Torch counts writes of an op's own operands. For tensors in a list the kernels do, one by one,
    and fake tensors run no kernels.
    """
    written = tensors_written(func, args, kwargs, lists=True)
    with Local():
        increment_version([t for t in written if not t.is_inference()])


def hang_hooks(tensor: torch.Tensor, fake: torch.Tensor) -> list[Any]:
    """Register the user's hooks of a leaf on its fake, so that they are traced; the handles.

    Private torch: the dictionaries of a tensor's hooks.
    """
    if not tensor.is_leaf:  # autograd calls them outside the graph, when it goes on from there
        return []
    found = [fake.register_hook(hook) for hook in users_hooks(tensor._backward_hooks)]
    for hook in users_hooks(getattr(tensor, "_post_accumulate_grad_hooks", None)):
        found.append(fake.register_post_accumulate_grad_hook(hook))
    return found


def users_hooks(hooks: Any) -> list[Any]:
    """The hooks that are not partita's own, which do in eager what the graph does by itself."""
    found = [getattr(hook, "hook", hook) for hook in (hooks or {}).values()]
    return [h for h in found if not str(getattr(h, "__module__", "")).startswith("partita.")]
