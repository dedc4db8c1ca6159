"""What is autograd's engine doing in this thread?

Private torch, since there is no public way to ask: `tests/ranks/test_private_torch.py` says what is
expected of it.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["in_backward", "saving_hooks"]


def in_backward() -> bool:
    """Is a backward pass at work?"""
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> tuple[Any, Any] | None:
    """What packs and unpacks saved tensors now (a checkpoint, an offload); None if nothing does.

    Of nested `saved_tensors_hooks` torch calls the innermost alone: one that wants only some of the
    tensors must give the others to the next.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
