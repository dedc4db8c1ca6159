"""`pt.compile`: how a user asks for a compiled step or region, with which options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from .capture.block_choice import BlockChoice
from .step import CompiledStep

if TYPE_CHECKING:
    from .passes import Passes

__all__ = ["compile"]

BACKENDS = ("inductor", "graph")


def compile(
    step: Callable[..., Any] | None = None,
    *,
    state: Iterable[Any] = (),
    backend: str = "inductor",
    fallback: str | None = None,
    without: Iterable[str] = (),
    passes: Passes = (),
    keep: int = 8,
    budget: int | None = None,
    blocks: bool | Iterable[nn.Module | type] | None = None,
    sections: bool | None = None,
    cuda_graphs: bool = False,
) -> Any:
    """Capture a training step, forward, loss, backward and update, into one compiled graph.

    Or a region, a part of a model that runs eagerly, as two: a module, whose forward is then
    compiled in place, or a function through whose results no backward has run when it returns.
    Their results have a history as in eager: gradients flow through a region to its arguments and
    parameters, laid out as ever.

    Args:
        step: a module, or an ordinary function over DTensors (or plain tensors). Modules,
            optimizers and tensors that it reaches by name (closure, globals, `self`) or is given
            are found; all that it writes into them is written by the graph. Gradients that a step
            clears, makes and updates by do not outlive it.
        state: modules, optimizers, and lists, dictionaries and objects that hold tensors, that it
            reaches in another way.
        backend: "inductor", or "graph" to run the graph node by node without compiling it, which
            is also done where ranks are no processes (`pt.ranks`, a dry mesh).
        fallback: "eager" to run a step that cannot be captured as it is.
        without: passes that are left out, by name, such as "bucket".
        passes: of your own, run in order before all others; or by the name of the pass ("end" after
            the last) before which they run. Each is a function of a `Program` that changes its
            graph and says in a few words what it did.
        keep: how many programs are kept.
        budget: the most bytes that the step may take above what it holds between calls; what is
            cheapest to make again for backward is not kept until then.
        blocks: modules, or classes of modules, of which one is traced for all that are built
            alike, so that capture costs less; True for those that are found: the outermost of
            which a model has several; None for those of which it has six or more; False for none.
        sections: compile the graph in sections, of which equal ones are compiled once, or as one;
            None for sections where the graph has more than 3,000 calls, and at most half of them
            are left of what is equal.
        cuda_graphs: record the kernels of a step as a CUDA graph in its second call, and launch
            them as one in later ones; a step that cannot be recorded runs as ever, with a warning
            that says why. What a step takes stays with its recording between calls.

    Returns:
        A `CompiledStep`; of a module the module itself, whose `forward` is one.

    Raises:
        ValueError: an unknown backend or fallback, blocks that are no modules. The call
            raises CaptureError where the step does what a graph cannot say, unless there is a
            fallback.
    """
    if backend not in BACKENDS:
        raise ValueError(f"compile: backend is one of {', '.join(BACKENDS)}, not {backend!r}")
    if fallback not in (None, "eager"):
        raise ValueError(f'compile: fallback is "eager" or None, not {fallback!r}')
    options: dict[str, Any] = {
        "state": tuple(state),
        "backend": backend,
        "fallback": fallback,
        "without": tuple(without),
        "passes": dict(passes) if isinstance(passes, Mapping) else tuple(passes),
        "keep": keep,
        "budget": budget,
        "blocks": blocks if blocks is None or isinstance(blocks, bool) else tuple(blocks),
        "sections": sections,
        "cuda_graphs": cuda_graphs,
    }
    BlockChoice.from_option(options["blocks"])
    if step is None:
        return lambda f: compile(f, **options)
    if not isinstance(step, nn.Module):
        return CompiledStep(step, **options)
    forward = step.forward
    if isinstance(forward, CompiledStep):
        forward = forward.step
    object.__setattr__(step, "forward", CompiledStep(forward, **options))
    return step
