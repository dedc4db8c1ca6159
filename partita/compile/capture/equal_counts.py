"""Equal counts: step counts of an optimizer that are one number become one in the graph.

torch.optim counts the steps of each parameter in a tensor of its own and computes its bias
corrections from it: a dozen scalar calls per parameter, half of an update. As a rule all counts are
equal and stay so. That they are equal becomes a condition of the program (`EqualInputs`), under
which one stands for all, and what is computed from it is computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from partita.comm.device import HOST
from partita.tensor.op_facts import facts_of

from ..conditions import EqualInputs, read_counts
from ..graph_nodes import is_collective, key_of_operands, note_of
from ..program import Input
from .fakes import device_at_capture
from .optimizers import counts_of

__all__ = ["find_equal_counts", "places_of_equal", "share_equal_counts"]

_COUNTED_ON = (HOST.type, "meta")  # nobody waits for what has no memory


def find_equal_counts(
    inputs: Sequence[Input], optimizers: Iterable[Optimizer]
) -> list[EqualInputs]:
    """Groups of counts of torch's optimizers that are equal now.

    Only counts on the host: to compare others at each call would wait for their device. And none of
    a user's optimizer, whose numbers may differ between ranks: they might be equal on one alone.
    """
    counts = {id(t) for t in counts_of(optimizers)}
    found: dict[Any, list[Input]] = defaultdict(list)
    for given in inputs:
        t = given.tensor
        if id(t) in counts and device_at_capture(t).type in _COUNTED_ON:
            (value,) = read_counts([t])
            found[t.dtype, t.device, value].append(given)
    return [
        EqualInputs(tuple(i.name for i in equal), tuple(i.index for i in equal))
        for equal in found.values()
        if len(equal) > 1
    ]


def places_of_equal(inputs: Sequence[Input], equal: Iterable[EqualInputs]) -> list[list[int]]:
    """The places of equal counts among all inputs."""
    place = {given.index: i for i, given in enumerate(inputs) if given.kind == "optimizer"}
    return [[place[i] for i in one.indices] for one in equal]


def share_equal_counts(graph: fx.Graph, equal: Sequence[Sequence[fx.Node]]) -> None:
    """Compute once what an update computes from equal numbers.

    The graph has no writes but into inputs, at its end; each input is still written. Two results
    may be one node afterwards: see `shared_results.keep_apart`.

    Args:
        equal: groups of inputs that hold the same number.
    """
    for numbers in equal:
        read = [n for n in numbers if any(map(_is_scalar_call, n.users))]
        for other in read[1:]:
            other.replace_all_uses_with(read[0], _is_scalar_call)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_scalar_call(node):
            continue
        key = node.target, key_of_operands((node.args, node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_scalar_call(node: fx.Node) -> bool:
    """Is it a deterministic call of an update that makes one number from single numbers?"""
    if node.op != "call_function" or not _is_single(node) or note_of(node).phase != "update":
        return False
    facts = facts_of(node.target)
    return (
        facts.makes_new
        and not facts.draws
        and not is_collective(node)
        and all(map(_is_single, node.all_input_nodes))
    )


def _is_single(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 0
