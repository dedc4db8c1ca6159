"""Module hooks: the backward hooks of modules, with the gradients of DTensors as DTensors.

torch has a node of autograd before a module and one behind it, and calls a module's backward hooks
with the gradients that pass there. Those are plain pieces. For a module that takes or returns
DTensors they are tagged on the way in, and redistributed as they have to be on the way back.
Modules without DTensors are served as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import BackwardHook

from .autograd import moved
from .dtensor import DTensor, tagged
from .spec import Spec

__all__ = ["TypedBackwardHook"]


class TypedBackwardHook(BackwardHook):
    """A `BackwardHook` whose user hooks get and return the gradients of DTensors as DTensors."""

    def _apply_on_tensors(self, fn: Callable[[Any], None], args: Any) -> Any:
        specs = [
            a._spec.gradient if isinstance(a, DTensor) else None
            for a in args
            if isinstance(a, torch.Tensor)
        ]
        if not any(specs):
            return super()._apply_on_tensors(fn, args)
        return super()._apply_on_tensors(lambda node: fn(_TypedNode(node, specs)), args)


class _TypedNode:
    """A node of autograd that lets its hooks see DTensors."""

    def __init__(self, node: Any, specs: list[Spec | None]):
        self.node, self.specs = node, specs

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        def call_typed_hook(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
            out = hook(self._wrap_gradients(grad_inputs), self._wrap_gradients(grad_outputs))
            return None if out is None else self._unwrap_gradients(out)

        return self.node.register_hook(call_typed_hook)

    def _wrap_gradients(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            g if g is None or spec is None else tagged(g.view_as(g), spec)
            for g, spec in zip(grads, self.specs, strict=True)
        )

    def _unwrap_gradients(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            moved(g, g._spec, spec, "hook", "gradient") if isinstance(g, DTensor) and spec else g
            for g, spec in zip(grads, self.specs, strict=True)
        )


# torch offers no way in: it makes its BackwardHooks by this name.
torch_module.BackwardHook = TypedBackwardHook  # type: ignore[misc]
