"""Checks of a trace, and how `make_fx` is set for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import fx, nn

from partita.graph.errors import not_an_input, not_captured
from partita.graph.graph_nodes import note_of
from partita.graph.verify import SPACES
from partita.layout import Fix
from partita.tensor.op_facts import facts_of, find_unknown_effect

from .block_choice import BlockChoice
from .fakes import is_symbolic
from .recorder import Recorder


@contextmanager
def noting_blocks(
    choice: BlockChoice, models: Iterable[nn.Module], recorder: Recorder, tracer: Any
) -> Iterator[None]:
    """Within, the nodes of each block that `tracer` (fx's) meets are noted as its own."""
    blocks, usual = choice.find(models), tracer.call_module

    def call_module(m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with recorder.block(type(m)) if m in blocks else nullcontext():
            return usual(m, forward, args, kwargs)

    if not blocks:
        yield
        return
    tracer.call_module = call_module
    try:
        yield
    finally:
        del tracer.call_module


def keep_dead_code(graph: fx.Graph) -> None:
    """Have `make_fx` not look for dead code, of which it drops only numbers, in a fortieth of the
    time of a capture."""
    graph.eliminate_dead_code = lambda *_, **__: False  # type: ignore[method-assign]


def drop_unused_numbers(graph: fx.Graph) -> None:
    """Erase numbers that are computed of numbers alone, and that nobody uses."""
    for node in reversed(graph.nodes):
        is_dead = not node.users and is_symbolic(node.meta.get("val")) and node.op != "placeholder"
        if is_dead and all(is_symbolic(n.meta.get("val")) for n in node.all_input_nodes):
            graph.erase_node(node)


def check_constants(graph: fx.Graph) -> None:
    """Raise CaptureError if a tensor that is no input is a constant of the graph.

    Tensors that a step makes of numbers are copied first (`lift_fresh_copy`). Fake modes refuse any
    other tensor, but a proxy mode handles some calls of one-element tensors itself.
    """
    for node in graph.find_nodes(op="get_attr"):
        for user in node.users:
            if user.op == "call_function" and not facts_of(user.target).lifts:
                raise not_an_input(note_of(user).source)


def check_operators(graph: fx.Graph) -> None:
    """Raise CaptureError if the step calls an operator that is not torch's own, and of which it is
    not known that it only makes tensors of its arguments."""
    for node in graph.nodes:
        space = getattr(node.target, "namespace", "aten")
        if node.op != "call_function" or space in (*SPACES, "profiler"):
            continue
        if effect := find_unknown_effect(node.target):
            raise not_captured(
                f"the step calls {node.target}, an operator of a library of its own",
                effect,
                Fix(
                    "torch.library.custom_op(..., mutates_args=())",
                    "for what only gives new tensors",
                ),
                Fix("call it outside the step", "before or after, or between compiled regions"),
                place=note_of(node).source,
            )
