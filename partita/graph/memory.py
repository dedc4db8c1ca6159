"""Memory of a captured step: when each buffer is allocated and freed, and the peak.

A schedule (`Memory`) is a list of *places* in time. A place is a node of the graph if the step runs
node by node (`memory_of`), or a line of the generated code if Inductor compiled it
(`backend.codegen_memory`). In both cases the schedule is known before anything runs, and is the
same on every rank. `scheduled` returns the schedule of the code that runs. `peak_of` is faster and
returns only the peak.

`Storages` finds the storages of a graph call by call over fake tensors (`fake_values`). If no
operand has the storage of a result, the result is new memory; otherwise it is a view. A storage
lives from the node that makes it to the last node that reads a view of it, because the executor
drops a value after its last use. The memory that a kernel allocates and frees while it runs is
computed or measured (`workspace`). Backends know the temporary buffers of collectives (`staging`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import indent
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, all_gather
from partita.comm.device import Device, state_of_host_profiler
from partita.layout.text import format_table, human
from partita.tensor.op_facts import facts_of

from .fake_values import call_without_memory, tensors_in
from .graph_nodes import Note, SectionSchedule, Subgraph, is_collective, note_of, subgraph_of
from .program import Groups, Program

_SHOWN = 12  # rows of a printed table


@dataclass(frozen=True)
class Buffer:
    """Memory that a step allocates and frees.

    Attributes:
        name: the name of the node, or of the variable in generated code, that made the memory.
        nbytes: the bytes of the whole storage, on a rank.
        birth: the index of the place (node or line of code) at which it is allocated.
        death: the index of the first place at which it is free again.
        views: the names of other nodes with the same storage.
        made_by: the operator.
        source: the user's "file:line".
        phase: "forward", "backward" or "update".
        layout: the layout of the DTensor in the buffer, or "".
        reason: if a redistribution made it, why: "gather", "regather" or "gradient". Otherwise "".
        passing: True for memory that a kernel allocates and frees while it runs (a workspace).
    """

    name: str
    nbytes: int
    birth: int
    death: int
    views: tuple[str, ...] = ()
    made_by: str = ""
    source: str = ""
    phase: str = ""
    layout: str = ""
    reason: str = ""
    passing: bool = False


@dataclass(frozen=True)
class HeldInput:
    """An input of a step and its memory, which exists before and after the step.

    Attributes:
        name: the name of the input in messages.
        kind: the kind of the input, as in `program.Input`.
        nbytes: the bytes of its storage, on a rank; 0 if an earlier input has the same storage.
    """

    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """The schedule of a step's memory on one rank. Print it to see the buffers at the peak.

    Attributes:
        places: a text for each node (or line of code) that runs, in order. Indices in other
            attributes refer to this list.
        buffers: the buffers that the step allocates, in order of birth.
        held: the step's inputs.
        recorded: the bytes that a CUDA graph keeps between calls: the memory of the peak, and
            copies of the arguments; 0 without a CUDA graph.
    """

    places: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    held: tuple[HeldInput, ...]
    recorded: int = 0

    @cached_property
    def live(self) -> list[int]:
        """The bytes that are allocated while each node (or line of code) runs, except inputs."""
        return self.live_of(lambda buffer: True)

    def live_of(self, counts: Callable[[Buffer], bool]) -> list[int]:
        """Returns the bytes of the buffers that `counts` accepts, as each node (or line) runs."""
        change = [0] * (len(self.places) + 1)
        for buffer in self.buffers:
            if counts(buffer):
                change[buffer.birth] += buffer.nbytes
                change[min(buffer.death, len(self.places))] -= buffer.nbytes
        total, found = 0, []
        for more in change[:-1]:
            total += more
            found.append(total)
        return found

    @cached_property
    def peak(self) -> int:
        """The most bytes that the step itself allocates at one time, without its inputs."""
        return max(self.live, default=0)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of the inputs: parameters, optimizer state and arguments."""
        return sum(h.nbytes for h in self.held)

    @property
    def total_peak(self) -> int:
        """The most bytes that are allocated at one time, inputs included."""
        return self.peak + self.held_bytes

    @cached_property
    def peak_place(self) -> int:
        """The index of the node (or line of code) at which the memory first reaches its peak."""
        return self.live.index(self.peak) if self.live else 0

    def at(self, place: int) -> list[Buffer]:
        """Returns the buffers that exist while the node (or line) `place` runs, largest first."""
        found = [b for b in self.buffers if b.birth <= place < b.death]
        return sorted(found, key=lambda b: (-b.nbytes, b.birth))

    def __str__(self) -> str:
        place = self.peak_place
        at = self.places[place] if self.places else "nothing"
        lines = [
            f"peak {human(self.peak)} above {human(self.held_bytes)} of inputs, at {at} "
            f"({place + 1} of {len(self.places)})"
        ]
        if self.recorded:
            lines.append(f"  a CUDA graph keeps {human(self.recorded)} between calls")
        here = self.at(place)
        if here:
            table = format_table([_make_row(buffer) for buffer in here[:_SHOWN]], right=(0,))
            lines.append(indent(table, "  "))
        if len(here) > _SHOWN:
            rest = sum(b.nbytes for b in here[_SHOWN:])
            lines.append(f"  {human(rest)} in {len(here) - _SHOWN} smaller ones")
        return "\n".join(lines)

    __repr__ = __str__


def _make_row(buffer: Buffer) -> tuple[str, ...]:
    why = " ".join(filter(None, (buffer.phase, buffer.reason)))
    if buffer.passing:
        why += " (within the kernel)"
    return (human(buffer.nbytes), buffer.name, buffer.made_by, buffer.layout, why, buffer.source)


# -- storages of a graph ---------------------------------------------------------------------------


class Storages:
    """Maps the nodes of a graph to numbers of storages. Nodes that share memory have one number.

    Two inputs have one number only if their fake tensors share a storage.

    Attributes:
        of: maps each node to the storages of the tensors in its value.
        nbytes: the bytes of each storage.
        maker: the node that allocates each storage.
        passing: the bytes that each node allocates and frees while it runs (its workspace).
        last_reader: maps each storage that the graph does not return to the last node that reads
            it.
    """

    def __init__(self, graph: fx.GraphModule, groups: Groups):
        self.of: dict[fx.Node, tuple[int, ...]] = {}
        self.nbytes: list[int] = []
        self.maker: list[fx.Node] = []
        self.passing: dict[fx.Node, int] = {}
        self._graph, self._groups = graph, groups
        self._shows: dict[fx.Node, Sequence[int]] = {}  # for each tensor of the value, its storage
        known: dict[int, int] = {}
        for node in graph.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "call_function":
                self._shows[node] = self._find_shown_by_call(node)
            else:  # private torch: `_cdata` identifies a storage while it exists
                held = [t.untyped_storage() for t in tensors_in(self._value_of(node))]
                for storage in held:
                    if storage._cdata not in known:
                        known[storage._cdata] = self._add(node, storage.nbytes())
                self._shows[node] = [known[storage._cdata] for storage in held]
            self.of[node] = tuple(dict.fromkeys(self._shows[node]))

    def made_by(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the numbers of the storages that a node allocates."""
        return tuple(s for s in self.of[node] if self.maker[s] is node)

    @cached_property
    def last_reader(self) -> dict[int, fx.Node]:
        last: dict[int, fx.Node] = {}
        stays: set[int] = set()
        for node in self._graph.graph.nodes:
            if node.op == "output":
                stays.update(s for read in node.all_input_nodes for s in self.of[read])
                continue
            if not node.users:  # an unused value is dropped at once
                last.update(dict.fromkeys(self.of[node], node))
            last.update((s, node) for read in node.all_input_nodes for s in self.of[read])
        return {s: node for s, node in last.items() if s not in stays}

    def freed_by(self, node: fx.Node) -> list[int]:
        """Returns the numbers of the storages that a node is the last to read.

        Storages of inputs are not included.
        """
        shown = {s for read in (node, *node.all_input_nodes) for s in self.of.get(read, ())}
        last, maker = self.last_reader, self.maker
        return [s for s in shown if last.get(s) is node and maker[s].op == "call_function"]

    def sum_bytes(self, storages: Iterable[int]) -> int:
        return sum(self.nbytes[s] for s in storages)

    def _add(self, maker: fx.Node, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        self.maker.append(maker)
        return len(self.nbytes) - 1

    def _value_of(self, node: fx.Node) -> Any:
        is_constant = node.op == "get_attr"
        return getattr(self._graph, str(node.target)) if is_constant else node.meta["val"]

    def _find_shown_by_call(self, node: fx.Node) -> Sequence[int]:
        """Returns the storage of each tensor in a call's value."""
        section = subgraph_of(node)
        if section is not None:  # its results have their own storages
            if extra := _schedule_of_section(section).workspace:
                self.passing[node] = extra
            made = [t.untyped_storage().nbytes() for t in tensors_in(node.meta["val"])]
            return [self._add(node, nbytes) for nbytes in made]
        given: Any = (node.args, node.kwargs)
        if node.target is operator.getitem:
            whole, place = given[0]
            value = self._value_of(whole)
            first = len(tensors_in(value[:place]))
            return self._shows[whole][first : first + len(tensors_in(value[place]))]
        operands: list[int] = []

        def value_of(read: fx.Node) -> Any:
            operands.extend(self._shows[read])
            return self._value_of(read)

        args, kwargs = fx.node.map_arg(given, value_of)
        result = call_without_memory(node.target, args, kwargs, node.meta.get("val"))
        new = [self._add(node, nbytes) for nbytes in result.nbytes]
        extra = workspace(node.target, args, result.value)
        if is_collective(node):
            value = result.value
            extra += staging(node.target, args, value, self._groups, compiled=False)
        if extra:
            self.passing[node] = extra
        return [operands[i] if i >= 0 else new[-1 - i] for i in result.storages]


def storages_of(program: Program) -> Storages:
    """Returns which nodes of a program's graph allocate, share and free memory."""
    return Storages(program.graph, program.groups)


def _schedule_of_section(section: Subgraph) -> SectionSchedule:
    """Returns the memory of each call in a section; computed once for each section."""
    if section.schedule is None:
        storages = Storages(section.graph, {})
        calls = [n for n in section.graph.graph.nodes if n.op == "call_function"]
        place: dict[fx.Node | None, int] = {node: i for i, node in enumerate(calls)}
        live, held = [], 0
        for node in calls:
            held += storages.sum_bytes(storages.made_by(node))
            live.append(held + storages.passing.get(node, 0))
            held -= storages.sum_bytes(storages.freed_by(node))
        inputs = section.graph.graph.find_nodes(op="placeholder")
        readers = (storages.last_reader.get(s) for n in inputs for s in storages.of[n])
        reads = [place.get(node, len(calls)) for node in readers]
        section.schedule = SectionSchedule(live, held, reads)
    return section.schedule


def scheduled(program: Program) -> Memory:
    """Returns the memory schedule of the code that will run, for a program after the passes.

    This is the generated code's schedule if the program is compiled, and `memory_of` otherwise.

    Raises:
        ValueError: the memory of the generated code is unknown.
    """
    built = program.built
    return memory_of(program) if built is None or built.schedule is None else built.schedule()


def memory_of(program: Program) -> Memory:
    """Returns the memory schedule of a program that runs node by node, with sections inlined."""
    program = program.flat()
    nodes = [n for n in program.graph.graph.nodes if n.op != "placeholder"]
    storages = storages_of(program)
    place = {node: i for i, node in enumerate(nodes)}
    views: dict[int, list[str]] = {}
    for node, shown in storages.of.items():
        for s in shown:
            if storages.maker[s] is not node:
                views.setdefault(s, []).append(node.name)
    buffers = []
    for at, node in enumerate(nodes):
        what = note_of(node), node.name, name_of_op(node)
        for s in storages.made_by(node) if node.op == "call_function" else ():
            end = storages.last_reader.get(s)
            death = len(nodes) if end is None else place[end] + 1
            names, nbytes = tuple(views.get(s, ())), storages.nbytes[s]
            buffers.append(make_buffer(*what, nbytes, birth=at, death=death, views=names))
        if (extra := storages.passing.get(node)) is not None:
            buffers.append(make_buffer(*what, extra, birth=at, death=at + 1, passing=True))
    return Memory(
        tuple(f"{n.name} {name_of_op(n)}".strip() for n in nodes),
        (*made_at_entry(program, len(nodes)), *buffers),
        tuple(held_inputs(program)),
    )


def peak_of(program: Program) -> int:
    """Returns the peak of `memory_of(program)` in bytes, but faster.

    The memory of each section is computed only once.
    """
    storages = storages_of(program)
    live = peak = sum(b.nbytes for b in made_at_entry(program, 1))
    for node in program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        made, freed = storages.sum_bytes(storages.made_by(node)), storages.freed_by(node)
        section = subgraph_of(node)
        if section is None:
            peak = max(peak, live + made + storages.passing.get(node, 0))
        else:
            peak = max(peak, live + _peak_of_call(node, section, storages, freed))
        live += made - storages.sum_bytes(freed)
    return peak


def _peak_of_call(
    call: fx.Node, section: Subgraph, storages: Storages, freed: Sequence[int]
) -> int:
    """Returns the most bytes that a call of a section adds to those allocated before it.

    The section frees its inputs that are in `freed` after its last read of them.
    """
    schedule = _schedule_of_section(section)
    frees = [0] * (len(schedule.live) + 2)
    for s in freed:
        if storages.maker[s] is not call:
            reads = zip(section.operands(call), schedule.last_reads, strict=True)
            end = max(place for operand, place in reads if s in storages.of[operand])
            frees[end + 1] += storages.nbytes[s]
    gone, most = 0, 0
    for here, less in zip(schedule.live, frees, strict=False):
        gone += less
        most = max(most, here - gone)
    return most


def held_inputs(program: Program) -> Iterator[HeldInput]:
    """Yields the inputs of `program` that are tensors before a call: all except Python numbers.

    A storage that several inputs share counts at the first of them.
    """
    seen: set[int] = set()
    for given, fake in zip(program.inputs, program.example(), strict=True):
        if given.kind != "number":  # a call makes its tensor: `made_at_entry`
            storage = fake.untyped_storage()
            nbytes = 0 if storage._cdata in seen else storage.nbytes()
            seen.add(storage._cdata)
            yield HeldInput(given.name, given.kind, nbytes)


def made_at_entry(program: Program, places: int) -> Iterator[Buffer]:
    """Yields the buffers that each call allocates for its inputs, before the graph runs.

    They hold Python numbers as tensors, and padded copies of uneven shards. They live until the
    call ends.

    Args:
        program: the program that is called.
        places: the number of nodes (or lines of code) of the schedule.
    """
    examples = program.example()
    for i, given in enumerate(program.inputs):
        if given.kind == "number":
            yield Buffer(given.name, examples[i].nbytes, 0, places, made_by="number")
    for i, border in program.entering.items():
        if not border.in_place:
            given = program.inputs[i]
            nbytes = examples[i].untyped_storage().nbytes()
            layout = str(given.spec.layout) if given.spec is not None else ""
            yield Buffer(given.name, nbytes, 0, places, made_by="padding", layout=layout)


def name_of_op(node: fx.Node) -> str:
    """Returns the name of the operator that a node calls, such as "mm"; "" for other nodes."""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def make_buffer(note: Note, name: str, made_by: str, nbytes: int, **more: Any) -> Buffer:
    """Makes a `Buffer`: source, phase, layout and reason are from a node's note, others given."""
    more |= {k: getattr(note, k) for k in ("source", "phase", "layout", "reason")}
    return Buffer(name, nbytes, made_by=made_by, **more)


# -- workspaces of kernels -------------------------------------------------------------------------

_aten = torch.ops.aten


def workspace(target: Any, args: Sequence[Any], made: Any) -> int:
    """Returns the bytes that a CPU kernel allocates and frees while it runs; 0 if unknown.

    Args:
        target: the op that is called.
        args: the operands of the call, with fake tensors.
        made: the result of the call.
    """
    kind = facts_of(target).workspace
    if not kind:
        return 0
    tensors = [t for t in (*args, made) if isinstance(t, torch.Tensor)]
    if not all(Device(t.device.type).workspace_is_fixed for t in tensors):
        return 0
    if kind == "casts":
        return _cast_operands(target.overloadpacket, args, made)
    if sum(t.nbytes for t in tensors) > _LARGEST:
        return 0
    return _measure_workspace(target, args)


_LARGEST = 1 << 29
"""Bytes of operands above which no call is run to measure it: planning must not need that
memory."""


def _cast_operands(packet: Any, args: Sequence[Any], made: Any) -> int:
    """Returns the bytes of the casts that an elementwise kernel makes of its two operands."""
    common = _find_common_dtype(*args[:2])
    if packet is _aten.div and not (common.is_floating_point or common.is_complex):
        common = made.dtype
    extra = 0
    for operand in args[:2]:
        if isinstance(operand, torch.Tensor):
            dtype, count = operand.dtype, operand.numel()
        else:
            dtype, count = _DTYPES[type(operand)], 1
            extra += dtype.itemsize
        if dtype is not common:
            extra += count * common.itemsize
    return extra


def _find_common_dtype(one: Any, other: Any) -> torch.dtype:
    """Returns `torch.result_type(one, other)`, which is slow for fake tensors, by a fast path."""
    if isinstance(one, torch.Tensor):
        if isinstance(other, torch.Tensor):
            if one.dtype is other.dtype:
                return one.dtype
        elif one.dtype.is_floating_point and type(other) in (bool, int, float):
            return one.dtype
    return torch.result_type(one, other)


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


_MEASURED_KEPT = 1024
MEASURED: dict[Any, int] = {}
"""Maps an operator and the metadata of its operands to the measured workspace in bytes."""


def _measure_workspace(target: Any, args: Sequence[Any]) -> int:
    """Returns the workspace of a call in bytes, measured by a call with real tensors."""
    key = target, tuple(map(_signature_of_argument, args))
    found = MEASURED.get(key)  # read once, because other threads clear it, too
    if found is None:
        # Private torch: the caller's modes make fake tensors, and these must be real.
        with _disable_current_modes(), torch.no_grad():
            real = [_make_real(x) if isinstance(x, torch.Tensor) else x for x in args]
            try:
                target(*real)
                found = _measure_peak(lambda: target(*real))
            except RuntimeError:
                found = 0  # fake tensors do not always have the strides of real ones
        if len(MEASURED) >= _MEASURED_KEPT:
            MEASURED.clear()
        MEASURED[key] = found
    return found


def _make_real(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(0.5)


def _measure_peak(call: Callable[[], Any]) -> int:
    """Returns the most bytes that a call allocates at once, minus those of its result."""
    # Private torch: its legacy profiler. The current one prints when it starts, and the user may
    # be running the only one that a process can have.
    start, stop = torch.autograd._enable_profiler_legacy, torch.autograd._disable_profiler_legacy  # type: ignore[attr-defined]
    try:
        start(_legacy_config())
    except RuntimeError:  # another legacy profiler runs
        return 0
    made = None
    try:
        made = call()
    finally:
        threads = stop()
        del made
    (begin,) = (e for events in threads for e in events if e.name() == "__start_profile")
    found = [e for events in threads for e in events if e.kind() == "memory_alloc"]  # type: ignore[comparison-overlap]
    found.sort(key=begin.cpu_elapsed_us)
    live = list(itertools.accumulate(e.cpu_memory_usage() for e in found))
    return max(live) - live[-1] if live else 0


def _legacy_config() -> Any:
    """Returns the configuration of a profiler of the host's memory alone."""
    inner = torch._C._profiler._ExperimentalConfig()
    state = state_of_host_profiler()
    return torch.autograd.ProfilerConfig(state, False, True, False, False, False, inner)  # type: ignore[attr-defined]


def _signature_of_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


# -- collectives -----------------------------------------------------------------------------------


def staging(target: Any, args: Sequence[Any], made: Any, groups: Groups, compiled: bool) -> int:
    """Returns the bytes of the temporary buffers that a backend allocates to run a collective.

    Args:
        target: the collective's op. The result is 0 for other ops.
        args, made: the operands and the result of the call, with fake tensors.
        groups: maps the name of each process group in the graph to its wire and axes.
        compiled: True if it runs as torch's functional collective, False if through a wire.
    """
    if not args or args[-1] not in groups:
        return 0
    wire, axes = groups[args[-1]]
    if target is ALL_GATHER or (target is all_gather and not compiled):
        return wire.backend.staging_of_gather(made)
    if target is REDUCE_SCATTER:
        return wire.backend.staging_of_scatter(args[0])
    if target is ALL_REDUCE and not compiled and args[1] == "sum":
        return wire.backend.staging_of_sum(args[0], wire.mesh_size(axes))
    return 0
