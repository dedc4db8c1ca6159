"""Fake tensors: what stands for a DTensor while a step is captured?

A FakeTensor (no memory, a shape and a device) that is re-tagged like any other shard. Its class is
both: a DTensor to Python, so that rules and moves run as ever, and a FakeTensor to the dispatcher,
which aborts where a tensor with a fake's keys has a class that cannot take its calls.
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
    """A shard that is traced. Never made: a FakeTensor is re-tagged."""

    __torch_dispatch__ = FakeTensor.__torch_dispatch__
    device = FakeTensor.device


PLAIN.add(FakeTensor)
TYPED[FakeTensor] = TYPED[FakeDTensor] = FakeDTensor


def fake_mode() -> FakeTensorMode:
    """A mode that takes every shape as it is: another shape is another capture.

    Its environment, without which Inductor's cache is bypassed too, traces Python numbers.
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
    """The device of what stands for `x` while a step is captured."""
    return (_TARGET.get() if x.is_meta else None) or x.device


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of `x` on this rank, as a plain tensor without history."""
    with Local(), torch.no_grad():
        found: Any = x.detach()
    return found


def has_memory(x: Any) -> bool:
    """Is it a tensor for which, while a step is captured, no other stands?"""
    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


def tensors_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lists: bool = False
) -> list[torch.Tensor]:
    """The tensors that a call of an op of torch writes, or those of them that stand in lists."""
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
    """Have the tensors in lists know that `func`, which was called, has written them.

    Torch counts the writes of an op's own operands. Those of tensors in a list are counted by the
    kernels, one by one, and tensors without memory have none of these.
    """
    written = tensors_written(func, args, kwargs, lists=True)
    with Local():
        increment_version([t for t in written if not t.is_inference()])


def hang_hooks(tensor: torch.Tensor, fake: torch.Tensor) -> list[Any]:
    """Hang the user's hooks of a leaf on what stands for it; gives the handles.

    Private torch: the dictionaries of a tensor's hooks, which nothing public tells.
    """
    if not tensor.is_leaf:  # they hang on what made it, which runs outside the graph
        return []
    found = [fake.register_hook(hook) for hook in users_hooks(tensor._backward_hooks)]
    for hook in users_hooks(getattr(tensor, "_post_accumulate_grad_hooks", None)):
        found.append(fake.register_post_accumulate_grad_hook(hook))
    return found


def users_hooks(hooks: Any) -> list[Any]:
    """Those that a user has registered. Partita's own do in eager what the graph does by itself."""
    found = [getattr(hook, "hook", hook) for hook in (hooks or {}).values()]
    return [h for h in found if not str(getattr(h, "__module__", "")).startswith("partita.")]
