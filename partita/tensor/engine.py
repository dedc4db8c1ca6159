"""The autograd engine: what it is doing in this thread.

Private torch, since there is no public way to ask: `tests/ranks/test_private_torch.py` says what is
expected of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

__all__ = [
    "after_backward",
    "backward_pass",
    "frees_graph",
    "holders",
    "in_backward",
    "next_node",
    "saving_hooks",
    "without_history",
]


def in_backward() -> bool:
    """Is a backward pass at work?"""
    return torch._C._current_graph_task_id() != -1


def backward_pass() -> int:
    """The number of the backward pass that is at work: no two have the same. -1 if none is."""
    return torch._C._current_graph_task_id()


def frees_graph() -> bool:
    """Is a backward pass at work that no second one over the same nodes can follow?"""
    keeps = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
    return in_backward() and not keeps()


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` made when the backward pass that is at work ends; not if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def next_node() -> int:
    """The number of the next node that autograd makes in this thread: they count up."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]


def saving_hooks() -> tuple[Any, Any] | None:
    """What packs and unpacks saved tensors now (a checkpoint, an offload); None if nothing does.

    Of nested `saved_tensors_hooks` torch calls the innermost alone: one that wants only some of the
    tensors must give the others to the next.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def without_history(t: torch.Tensor) -> torch.Tensor:
    """`t` as a hook that packs saved tensors may keep it: an alias of its memory, without history.

    A node may save what it gives. Kept as it is, that holds the node, which holds what was packed:
    a circle through C++ that is never collected unless a backward pass comes by.
    """
    with Local():
        return t if t.grad_fn is None else t.detach()


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages have this memory? Whoever asks has one of them in hand."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
