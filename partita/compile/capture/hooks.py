"""Hooks of tensors: those that a user has hung on an input are part of the graph."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hang_hooks", "users_hooks"]


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
