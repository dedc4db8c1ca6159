"""Timelines: a step's final graph played as events on streams.

One stream computes; each set of mesh axes that a collective runs over has one more. A collective
begins where the graph issues it, when its operands are there and its stream is free; its wait joins
it. Where a machine does not overlap, carrying the bytes takes the processor from when a collective
is issued, and all but sums are waited for at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from partita.compile.captured_program import list_sent_moves
from partita.compile.graph_nodes import is_collective, note_of
from partita.compile.program import Program
from partita.report import TimelineEvent

from .collective_time import collective_bytes, collective_seconds
from .kernel_time import Kernel, kernels_of
from .machine import Machine

__all__ = ["PlayedStep", "bytes_per_axis", "play_graph"]

COMPUTE = "compute"
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


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


def play_graph(program: Program, machine: Machine) -> PlayedStep:
    """Play a program's graph."""
    return _Player(program, machine).run()


class _Player:
    def __init__(self, program: Program, machine: Machine):
        self.program, self.machine = program.flat(), machine
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
        sizes = dict(zip(wire.mesh.names, wire.mesh.sizes, strict=True))
        ranks = math.prod(sizes[a] for a in axes)
        kind = _kind_of_collective(node)
        given = _nbytes_of_value(node if kind == "all_gather" else node.all_input_nodes[0])
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
            self._record_event(node, COMPUTE, self.now, seconds, kernel.kind, kernel.nbytes)
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
    for kind in _KINDS:
        if kind in name:
            return kind
    raise ValueError(f"a collective that has no formula: {name}")


def _nbytes_of_value(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(math.prod(value.shape)) * int(value.element_size())
