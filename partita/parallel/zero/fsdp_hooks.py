"""Forward hooks of a block, which gather its parameters before its forward and release them
after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction as Unheard

from partita.tensor.autograd import in_backward, next_node
from partita.tensor.tensor_state import HERE

from ..nested_tensors import map_tensors, tensors_in
from .fsdp_backward import ForwardCall, install_gathered, watch_input_gradient
from .fsdp_group import FsdpGroup
from .in_graph import GraphGather
from .saved_tensors import SavedTensorHooks
from .state import Zero

__all__ = ["register_hooks"]


def register_hooks(state: Zero) -> None:
    """Register hooks on a model and its blocks that gather what their forwards read."""
    for group in state.groups:
        hooks = _BlockHooks(group)
        for module in group.modules:
            module.register_forward_pre_hook(hooks.begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(hooks.end, always_call=True, with_kwargs=True)
    state.register_hooks()


class _BlockHooks:
    """The hooks before and after a forward of one of a block's modules."""

    def __init__(self, group: FsdpGroup):
        self.group = group
        self._in_graph = GraphGather(group)

    # Copied with the modules, they refer to the copy's group.

    def __getstate__(self) -> Any:
        return (self.group,)

    def __setstate__(self, state: Any) -> None:
        (self.group,) = state
        self._in_graph = GraphGather(self.group)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if HERE.capturing:
            HERE.unfinished.append(self._in_graph.end)
            HERE.unheard(self._in_graph.begin)
            return self._prepare_inputs(args, kwargs, None)
        group = self.group
        group.open_forwards.append(None)
        HERE.unfinished.append(self._finish_forward)
        # Nested: a tied weight's other module, or the same module again.
        if group.depth or not group.holds_own_shards:
            group.depth += 1
            return None
        graded = any(t.requires_grad for t in tensors_in((args, kwargs)))
        is_recorded = torch.is_grad_enabled()
        # Hidden from an enclosing region, which would take these calls for the program's.
        with Unheard(), _counting_versions():
            group.zero.enter_forward(group)
            group.depth = 1
            call, trained = None, group.trained()
            if is_recorded and (graded or any(trained)):
                call = ForwardCall(group, graded, trained)
            install_gathered(group, call)
        if call is not None:
            group.open_forwards[-1] = SavedTensorHooks(call)
        prepared = self._prepare_inputs(args, kwargs, call)
        if call is not None:
            call.since = next_node()
        return prepared

    def _prepare_inputs(self, args: Any, kwargs: Any, call: ForwardCall | None) -> Any:
        """The inputs of a forward, cast and watched; None where they stay as they are."""
        precision = self.group.zero.precision
        dtype = precision.param_dtype
        cast = dtype is not None and precision.cast_inputs
        marks = call is not None and call.watches_inputs
        if not cast and not marks:
            return None

        def prepared(t: torch.Tensor) -> torch.Tensor:
            if cast and t.is_floating_point():
                t = t.to(dtype)
            if marks and t.requires_grad:
                t = watch_input_gradient(t, call)
            return t

        return map_tensors(prepared, args), map_tensors(prepared, kwargs)

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if HERE.capturing:
            if HERE.unfinished and HERE.unfinished[-1] == self._in_graph.end:
                HERE.unfinished.pop()()
            return
        if not self.group.open_forwards:
            return
        forward = self.group.open_forwards[-1]
        HERE.unfinished.pop()
        self._finish_forward()
        if forward is not None:
            with Unheard():
                for t in tensors_in(output):
                    if t.requires_grad and forward.call.has_computed(t):
                        t.register_hook(forward.call.begin_backward)

    def _finish_forward(self) -> None:
        """A forward of one of the block's modules has ended, or was aborted."""
        group = self.group
        if not group.open_forwards:
            return
        forward = group.open_forwards.pop()
        group.depth = max(0, group.depth - 1)
        if forward is not None:
            forward.close()
        if group.depth:
            return
        with Unheard(), _counting_versions():
            try:
                written = group.write_back()
                if forward is not None:
                    forward.call.written.update(written)
            finally:
                # After a recompute, backward goes on with what is gathered.
                if not in_backward():
                    group.put_shards_back()
                    group.release()
                elif not group.calls_in_backward:
                    group.put_shards_back()


@contextmanager
def _counting_versions() -> Iterator[None]:
    """Leave inference mode: its tensors count no versions, and what is gathered here may be used
    after the mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
