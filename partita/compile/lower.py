"""How does a graph become machine code? Inductor does it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing

from .notes import NOTE
from .program import Program

__all__ = ["lowered"]


def lowered(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    """A function of the program's inputs, compiled, that gives its outputs.

    Random numbers are drawn by torch's own kernels, so that they are those of eager.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about itself
        return _lowered(program)


def _lowered(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    graph = copy.deepcopy(program.graph)
    for node in graph.graph.nodes:
        node.meta.pop(NOTE, None)
    examples = program.example()
    mode: Any = next((getattr(x, "fake_mode", None) for x in examples), None)
    options = {"fallback_random": True}
    with torch.no_grad(), tracing(TracingContext(mode)), config.patch(options):
        compiled: Any = compile_fx(graph, examples)
    return compiled  # type: ignore[no-any-return]
