"""Gradients of a captured function.

Which gradients can the caller of a captured function ask for, and what are they?

A function through whose results no backward has run is a region of a larger model. Its backward is
traced right behind its forward, into the same graph, so that passes see both. Where the gradients
of its results come in the graph gets inputs, "cotangents"; they are laid out by duality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local

from partita.tensor.dtensor import tagged
from partita.tensor.spec import Spec

from ..node_metadata import NOTE, Recorder
from ..program import Input
from .inputs import GraphInputs

__all__ = ["Seed", "asks_gradient", "differentiate", "has_history", "made_inputs"]

_SPENT = (
    "Trying to backward through the graph a second time",
    "modified by an inplace operation",
)
"""What autograd says of a history that a backward, or an update, has used up."""


@dataclass(frozen=True)
class Seed:
    """Where the gradient of a result comes in.

    Attributes:
        node: the name of the node that stands there while the graph is made.
        spec: of the gradient, where the result is a DTensor.
        number: of the result.
    """

    node: str
    spec: Spec | None
    number: int


def has_history(value: torch.Tensor) -> bool:
    """Could a caller of the function that made `value` go backward from it?"""
    if not _requires_grad(value) or not _is_computed(value):
        return False
    spec = getattr(value, "_spec", None)
    return spec is None or all(op == "sum" for _, op in spec.layout.partial)


def asks_gradient(value: torch.Tensor) -> bool:
    """Does it require a gradient without a history, as leaves do, and views under `no_grad`?"""
    return _requires_grad(value) and not _is_computed(value)


def _requires_grad(value: torch.Tensor) -> bool:
    with Local():
        return value.requires_grad


def _is_computed(value: torch.Tensor) -> bool:
    with Local(), suppress(RuntimeError):  # a view made under `no_grad`, of what was written since
        return value.grad_fn is not None
    return False


def differentiate(
    results: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    recorder: Recorder,
    like: Mapping[int, torch.Tensor] | None = None,
    again: bool = False,
) -> tuple[list[Seed], list[torch.Tensor | None]] | None:
    """The gradients of `inputs`, and where those of `results` come in.

    Args:
        again: what is computed here may be asked once more.
        like: gradients of the results as they will be, strides and all; then what is computed here
            may be asked once more, of others.

    Returns:
        None where a backward within the function has used up what they are computed by: there is
        nothing left to give, in eager neither. And where no input has one: a history that begins
        within the function ends there.
    """
    if not inputs:
        return None
    seeds, values = [], []
    with recorder.behind_forward():
        pairs = zip(results, (like or {}).values() or results, strict=True)
        for number, (result, as_given) in enumerate(pairs):
            spec = getattr(result, "_spec", None)
            with Local(), torch.no_grad():
                value = _make_seed_gradient(as_given.detach(), like is not None)
            seeds.append(Seed(recorder.newest().name, spec and spec.gradient, number))
            values.append(value if spec is None else tagged(value, spec.gradient))
        try:
            found = torch.autograd.grad(
                results, inputs, values, retain_graph=again or like is not None, allow_unused=True
            )
        except RuntimeError as error:
            if any(told in str(error) for told in _SPENT):
                return None
            raise
        with Local():
            return seeds, [None if g is None else g.detach() for g in found]


def _make_seed_gradient(like: torch.Tensor, exactly: bool) -> torch.Tensor:
    if not exactly:
        return torch.empty_like(like)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def made_inputs(graph: fx.Graph, seeds: Sequence[Seed], inputs: GraphInputs) -> None:
    """Make inputs of the graph of the nodes at which gradients come in."""
    if not seeds:
        return
    nodes = {n.name: n for n in graph.nodes}
    last = graph.find_nodes(op="placeholder")[-1]
    for seed in seeds:
        number, node = seed.number, nodes[seed.node]
        with graph.inserting_after(last):
            last = graph.placeholder(f"cotangent_{number}")
        last.meta = {k: v for k, v in node.meta.items() if k != NOTE}
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        with inputs.mode, Local(), torch.no_grad():
            like = last.meta["val"].detach()
        if seed.spec is not None:
            like = tagged(like, seed.spec)
        inputs.add_made(Input(f"gradient {number}", "cotangent", like, number))
