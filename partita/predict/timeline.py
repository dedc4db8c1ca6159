"""Timelines: a step's final graph played as events on streams, each kernel priced by its shapes.

One stream computes; each set of mesh axes that a collective runs over has one more. A collective
begins where the graph issues it, when its operands are there and its stream is free; its wait joins
it. Where a machine does not overlap, carrying the bytes takes the processor from when a collective
is issued, and all but sums are waited for at once. A kernel takes the longer of its operations and
its bytes at what is reachable of the peaks, and a fixed cost (Williams, Waterman and Patterson
2009, "Roofline: an insightful visual performance model").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from partita.compile.captured_program import list_sent_moves
from partita.compile.graph_nodes import is_collective, note_of
from partita.compile.program import Program
from partita.report import TimelineEvent
from partita.tensor.op_facts import facts_of

from .machine import BY_FLOPS, COLLECTIVES, Machine, collective_bytes, collective_seconds, rate_of

_COMPUTE = "compute"


@dataclass
class PlayedStep:
    """A step that was played.

    Attributes:
        seconds: until the last stream is done.
        events: in the order of the graph.
        exposed: for each stream of links the seconds in which the processor waits for it.
        busy: for each stream the seconds in which it works.
        flops: operations of matrix products and attention, those that are made again among them.
        model_flops: without those that are made again.
        dtype: in which most of them are made.
    """

    seconds: float = 0.0
    events: list[TimelineEvent] = field(default_factory=list)
    exposed: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    model_flops: float = 0.0
    dtype: str = "float32"


def play_graph(
    program: Program, machine: Machine, mesh: Mapping[str, int] | None = None
) -> PlayedStep:
    """Play a program's graph.

    Args:
        mesh: the sizes of the axes, outermost first, of the mesh of which the program's are parts,
            and which says what lies between neighbours; None where they are whole.
    """
    return _Player(program, machine, mesh or {}).run()


class _Player:
    def __init__(self, program: Program, machine: Machine, mesh: Mapping[str, int]):
        self.program, self.machine, self.mesh = program.flat(), machine, mesh
        self.found = PlayedStep()
        self.now = 0.0  # on the compute stream
        self.free: dict[str, float] = {}  # when an axis's links are
        self.ready: dict[fx.Node, tuple[float, str]] = {}  # what is under way, and on what stream
        self.by_dtype: dict[str, float] = {}
        self.met = 0.0  # when the ranks last met in a collective

    def run(self) -> PlayedStep:
        graph = self.program.graph.graph
        kernels = kernels_of(graph, self.machine.fuses)
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if is_collective(node):
                self._issue_collective(node)
            elif _is_wait(node):
                self._wait_for_collective(node.all_input_nodes[0])
            else:
                self._run_kernel(node, kernels[node])
        for node in list(self.ready):
            self._wait_for_collective(node)
        # The step is done when the slowest rank is.
        late = self.machine.straggling * (self.now - self.met) * bool(self.program.wires)
        self.found.seconds = self.now + late + self.machine.step_seconds
        if self.by_dtype:
            self.found.dtype = max(self.by_dtype, key=self.by_dtype.__getitem__)
        return self.found

    def _issue_collective(self, node: fx.Node) -> None:
        wire, axes = self.program.groups[str(node.args[-1])]
        stream = " ".join(axes)
        sizes = self.mesh or dict(zip(wire.mesh.names, wire.mesh.sizes, strict=True))
        ranks = math.prod(sizes[a] for a in axes)
        kind = _kind_of_collective(node)
        given = _nbytes_of_node(node if kind == "all_gather" else node.all_input_nodes[0])
        sent = collective_bytes(kind, ranks, given)
        seconds = self._seconds_of_collective(kind, ranks, sent, axes, sizes)
        arrived = self.now + self.machine.straggling * (self.now - self.met) * (ranks > 1)
        start = max([arrived, *(self.free.get(axis, 0.0) for axis in axes)])
        for axis in axes:
            self.free[axis] = start + seconds
        self.ready[node] = (start + seconds, stream)
        self._record_event(node, stream, start, seconds, kind, sent)
        if self.machine.overlaps:
            return
        if kind == "all_reduce" and all(_is_wait(user) for user in node.users):
            # It may be under way while others compute, slower by what carries its bytes.
            latency = self._seconds_of_collective(kind, ranks, 0.0, axes, sizes)
            self.now += max(seconds - latency, 0.0)
        else:
            self._wait_for_collective(node)

    def _seconds_of_collective(
        self, kind: str, ranks: int, sent: float, axes: Sequence[str], sizes: Mapping[str, int]
    ) -> float:
        """Seconds once all ranks are there: by a link that is given, as measured, or by formula."""
        curve = self.machine.collectives.get(f"{kind}-{ranks}")
        if curve is not None and self.machine.given_link(axes) is None:
            return curve.seconds_of(sent)
        link = self.machine.reached_link(axes, sizes)
        alone = self.machine.is_each_on_its_host(axes, sizes)
        return collective_seconds(kind, ranks, sent, link, each_on_its_host=alone)

    def _wait_for_collective(self, node: fx.Node) -> None:
        end, stream = self.ready.pop(node, (0.0, ""))
        if end > self.now:
            self.found.exposed[stream] = self.found.exposed.get(stream, 0.0) + end - self.now
            self.now = self.met = end

    def _run_kernel(self, node: fx.Node, kernel: Kernel) -> None:
        seconds = kernel.seconds(self.machine)
        if kernel.flops:
            self.found.flops += kernel.flops
            self.by_dtype[kernel.dtype] = self.by_dtype.get(kernel.dtype, 0.0) + kernel.flops
            if not note_of(node).again:
                self.found.model_flops += kernel.flops
        if seconds:
            self._record_event(node, _COMPUTE, self.now, seconds, kernel.kind, kernel.nbytes)
            self.now += seconds

    def _record_event(
        self, node: fx.Node, stream: str, start: float, seconds: float, kind: str, nbytes: float
    ) -> None:
        note = note_of(node)
        event = TimelineEvent(
            self.machine.name_kernel(node.name),
            stream,
            start,
            seconds,
            kind,
            note.phase,
            note.source,
            nbytes,
        )
        self.found.events.append(event)
        self.found.busy[stream] = self.found.busy.get(stream, 0.0) + seconds


def bytes_per_axis(program: Program) -> dict[str, int]:
    """Bytes that a rank sends in a run of a program, for the axes of each collective: what a ledger
    counts of the run."""
    found: dict[str, int] = {}
    for record in list_sent_moves(program):
        stream = " ".join(record.axes)
        found[stream] = found.get(stream, 0) + record.nbytes
    return found


def _is_wait(node: fx.Node) -> bool:
    return "wait_tensor" in str(node.target)


def _kind_of_collective(node: fx.Node) -> str:
    name = str(node.target)
    for kind in COLLECTIVES:
        if kind in name:
            return kind
    raise ValueError(f"a collective that has no formula: {name}")


# -- times of kernels ------------------------------------------------------------------------------

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
    """What each call of a graph does; nothing of collectives, which are priced apart.

    Where the machine fuses, neighbouring element-wise kernels and reductions are one, and what
    passes between them alone is neither written nor read.

    Args:
        graph: a program's, whose nodes have their shapes.
        fuses: element-wise neighbours are one kernel.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    kinds = {node: _kind_of(node) for node in calls}
    sources = _find_memory_owners(graph, kinds)
    joins = _fuse_elementwise(calls, kinds, sources) if fuses else {}
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
    if _is_wait(node) or (facts.is_view and not facts.writes):
        return "free" if not _makes_copy(node) else "elementwise"
    held = (t for n in (node, *node.all_input_nodes) for t in _collect_tensors(n.meta.get("val")))
    if not any(math.prod(t.shape) > 1 for t in held):
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


def _nbytes_of_node(node: fx.Node) -> int:
    return sum(
        math.prod(t.shape) * t.element_size() for t in _collect_tensors(node.meta.get("val"))
    )


def _shape_of_node(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _dtype_of_operands(node: fx.Node) -> str:
    for operand in node.all_input_nodes:
        for tensor in _collect_tensors(operand.meta.get("val")):
            if tensor.is_floating_point():
                return str(tensor.dtype).removeprefix("torch.")
    return "float32"
