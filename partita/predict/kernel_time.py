"""Times of kernels: a roofline for each kind, of operations and bytes known from a graph's shapes.

A kernel takes the longer of its operations over the reachable operations per second and its bytes
over the reachable bandwidth, and a fixed cost. Where the machine fuses, neighbouring element-wise
kernels and reductions are one, and what passes between them alone is neither written nor read.
(Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model".)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from partita.compile.graph_nodes import is_collective, note_of
from partita.tensor.op_facts import facts_of

from .kernel_rates import BY_FLOPS, rate_of
from .machine import Machine

__all__ = ["Kernel", "count_flops", "kernels_of"]

_NEAR = 64
"""Kernels from one to the next that is fused with it, at most: a compiler's reach, and what memory
a schedule lets it hold."""
_BACKWARD_OF_ATTENTION = 2.5
"""Operations of a fused attention's backward over those of its forward: five products, not two."""


@dataclass(frozen=True)
class Kernel:
    """What a node does on the processor.

    Attributes:
        kind: "matmul", "attention", "elementwise", "other" or "free" (a view, a number).
        flops: operations, a multiplication and an addition being two.
        nbytes: read and written.
        dtype: of its first operand, such as "bfloat16".
        begins: it begins a kernel; false where it is fused into one before.
        rate: the name of its curve, of a machine that has measured ones; "" where it costs nothing.
    """

    kind: str = "free"
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = "float32"
    begins: bool = False
    rate: str = ""

    def seconds(self, machine: Machine) -> float:
        """Seconds on a machine: as measured where it was, else by the roofline."""
        curve = machine.kernels.get(self.rate)
        if curve is not None:
            slower = machine.peak_flops("float32") / machine.peak_flops(self.dtype)
            is_work = self.rate in BY_FLOPS
            return curve.seconds_of(self.flops * slower if is_work else self.nbytes)
        if self.kind == "free":
            return 0.0
        of = self.kind if self.kind in ("matmul", "attention") else "matmul"
        work = self.flops / (machine.peak_flops(self.dtype) * machine.efficiency[of])
        carried = self.nbytes / (machine.memory_bandwidth * machine.efficiency["memory"])
        return max(work, carried) + (machine.kernel_seconds if self.begins else 0.0)


def kernels_of(graph: fx.Graph, fuses: bool) -> dict[fx.Node, Kernel]:
    """What each call of a graph does; nothing of collectives, which `timeline` prices.

    Args:
        graph: a program's, whose nodes have their shapes.
        fuses: element-wise neighbours are one kernel.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    kinds = {node: _kind_of(node) for node in calls}
    sources = _find_memory_owners(graph, kinds)
    if fuses:
        joins = _fuse_elementwise(calls, kinds, sources)
    else:
        joins = {}
    written = _find_written_results(calls, kinds, sources, joins)
    found: dict[fx.Node, Kernel] = {}
    seen: set[tuple[fx.Node, fx.Node]] = set()
    for node in calls:
        kind = kinds[node]
        if kind == "free":
            found[node] = Kernel(rate=rate_of(node, _name_of_op(node), kind))
            continue
        group = joins.get(node, node)
        nbytes = float(_nbytes_of_node(node)) if node in written else 0.0
        for operand in node.all_input_nodes:
            source = sources[operand]
            if kinds.get(source, "") != "free" and joins.get(source, source) is group:
                continue  # it is in registers
            if (group, source) not in seen:
                seen.add((group, source))
                nbytes += min(_nbytes_of_node(operand), _read_at_most(node, operand))
        found[node] = Kernel(
            kind,
            count_flops(node),
            nbytes,
            _dtype_of_operands(node),
            group is node,
            rate_of(node, _name_of_op(node), kind),
        )
    return found


def count_flops(node: fx.Node) -> float:
    """Operations of a matrix product, a convolution or an attention; 0 of anything else.

    Causal attention is counted as half of the whole, as fused kernels compute it.
    """
    name = _name_of_op(node)
    if "scaled_dot_product" in name and "attention" in name:
        backward = "backward" in name
        # A backward's first operand is the gradient of the result.
        q, k = (
            (_shape_of_node(a) for a in node.args[1:3])
            if backward
            else map(_shape_of_node, node.args[:2])
        )
        if len(q) != 4 or len(k) != 4:
            return 0.0
        b, h, t, d = q
        causal = _operand_named(node, "is_causal") is True
        flops = 4.0 * b * h * t * k[2] * d * (0.5 if causal else 1.0)
        return flops * (_BACKWARD_OF_ATTENTION if backward else 1.0)
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))


def _operand_named(node: fx.Node, name: str) -> Any:
    """The operand of this name of a call, by its schema; None where it is not given."""
    if name in node.kwargs or not isinstance(node.target, torch._ops.OpOverload):
        return node.kwargs.get(name)
    names = [argument.name for argument in node.target._schema.arguments]
    at = names.index(name) if name in names else len(node.args)
    return node.args[at] if at < len(node.args) else None


def _kind_of(node: fx.Node) -> str:
    if is_collective(node):
        return "collective"
    facts = facts_of(node.target)
    if "wait_tensor" in _name_of_op(node) or (facts.is_view and not facts.writes):
        return "free" if not _makes_copy(node) else "elementwise"
    if not any(_numel_of_fake(t) > 1 for t in _collect_tensors(node.meta.get("val"))) and not any(
        _numel_of_fake(t) > 1
        for o in node.all_input_nodes
        for t in _collect_tensors(o.meta.get("val"))
    ):
        return "free"  # numbers of an optimizer: the host works them out
    name = _name_of_op(node)
    if "scaled_dot_product" in name or "flash_attention" in name:
        return "attention"
    if count_flops(node):
        return "matmul"
    is_torchs = getattr(node.target, "namespace", "") == "aten"
    return "elementwise" if is_torchs and not facts.stands_alone else "other"


def _makes_copy(node: fx.Node) -> bool:
    """Does a call that may show its operand's memory make new memory instead?"""
    if "reshape" not in _name_of_op(node) or not node.all_input_nodes:
        return False
    before = node.all_input_nodes[0].meta.get("val")
    return isinstance(before, torch.Tensor) and not before.is_contiguous()


def _find_memory_owners(graph: fx.Graph, kinds: dict[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory it shows, itself where that is its own."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        operands = node.all_input_nodes
        is_shown = kinds.get(node) == "free" and operands and facts_of(node.target).is_view
        found[node] = found[operands[0]] if is_shown else node
    return found


def _fuse_elementwise(
    calls: list[fx.Node], kinds: dict[fx.Node, str], sources: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """For each element-wise call the first of the kernel that it is fused into."""
    place: dict[fx.Node, int] = {}
    joins: dict[fx.Node, fx.Node] = {}
    for node in calls:
        if kinds[node] == "free":
            continue
        place[node] = len(place)
        if kinds[node] != "elementwise":
            continue
        near = [
            source
            for operand in node.all_input_nodes
            if kinds.get(source := sources[operand]) == "elementwise"
            and place[node] - place[source] <= _NEAR
            and _phase_of_node(node) == _phase_of_node(source)
        ]
        joins[node] = joins[near[-1]] if near else node
    return joins


def _find_written_results(
    calls: list[fx.Node],
    kinds: dict[fx.Node, str],
    sources: dict[fx.Node, fx.Node],
    joins: dict[fx.Node, fx.Node],
) -> set[fx.Node]:
    """The calls whose results are written to memory: somebody outside their kernel reads them."""
    found = {node for node in calls if facts_of(node.target).writes}
    for node in calls:
        for user in node.users:
            if kinds.get(user) == "free" and sources[user] is sources[node]:
                continue  # a view: who reads it counts
            if user.op == "output" or joins.get(user, user) is not joins.get(
                sources[node], sources[node]
            ):
                found.add(sources[node])
    return found


def _phase_of_node(node: fx.Node) -> str:
    return note_of(node).phase if not facts_of(node.target).writes else "update"


def _read_at_most(node: fx.Node, operand: fx.Node) -> float:
    """Bytes that a call reads of an operand: of a table no more than it takes from it."""
    name = _name_of_op(node)
    if "nll_loss" in name and operand in node.args[:2] and len(_shape_of_node(operand)) > 1:
        # Of the classes forward reads the target's, and backward none.
        classes = _shape_of_node(operand)[1]
        return 0.0 if "backward" in name else float(_nbytes_of_node(operand)) / classes
    is_table = any(part in name for part in ("embedding", "index", "gather"))
    if is_table and operand is node.args[0]:
        return float(_nbytes_of_node(node))
    if "copy_" in name and operand is node.args[0] and len(node.args) > 1:
        return 0.0  # it is only written
    return math.inf


def _name_of_op(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name if schema is not None else getattr(node.target, "__name__", node.target))


def _collect_tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _collect_tensors(one)


def _numel_of_fake(value: torch.Tensor) -> int:
    return math.prod(value.shape)


def _nbytes_of_node(node: fx.Node) -> int:
    return sum(_numel_of_fake(t) * t.element_size() for t in _collect_tensors(node.meta.get("val")))


def _shape_of_node(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _dtype_of_operands(node: fx.Node) -> str:
    for operand in node.all_input_nodes:
        for tensor in _collect_tensors(operand.meta.get("val")):
            if tensor.is_floating_point():
                return str(tensor.dtype).removeprefix("torch.")
    return "float32"
