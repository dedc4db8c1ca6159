"""CUDA graphs: a program's kernels, recorded once and launched as one in each later call.

A small step spends more time launching kernels than running them; a replay is one launch. A
recording reads and writes fixed addresses, and a replay runs no Python and no host code. So a
program is cut in two (`HostSplit`). The part on the host (learning rates, step counts, bias
corrections) runs in each call. The values that the other part reads are copied to the device.

- State (parameters, buffers, optimizer state) is read and written in place. If it has moved, the
  kernels are recorded again. State that moves once more is copied like an argument.
- Arguments are copied to the addresses that the recording reads.
- Results are copied out of the recording's memory, because the next replay overwrites it.

The first call runs as without CUDA graphs: kernels are compiled and tuned, and process groups
connect. The second records. Inductor's own CUDA graphs are not used: they skip a graph that writes
its inputs, as every training step does, and record each section separately.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from partita.comm.device import HOST, Device, KernelRecording
from partita.tensor.op_facts import facts_of

from ..errors import CaptureError, make_recording_error
from ..fake_values import tensors_in
from ..graph_nodes import (
    add_call,
    calls_within,
    copy_node,
    drop_unused,
    extract_graph,
    is_collective,
    lazy_graph_module,
    note_of,
)
from ..graph_text import make_key
from ..program import Call, Input, Program
from ..shared_memory import shown_operand
from .executor import make_graph_function

_aten = torch.ops.aten
UNSAFE_TAGS = frozenset(
    (torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
)
_STATE = frozenset(("parameter", "buffer", "optimizer", "value"))
"""Kinds of inputs whose memory stays the same until it is exchanged."""
_OF_REGIONS = frozenset(("cotangent", "saved", "kept"))
"""Kinds of inputs and outputs of regions, whose forward and backward autograd calls."""


class NotRecorded(Exception):
    """Raised if a program's kernels cannot be recorded as a CUDA graph. The message says why."""


# -- which programs are recorded -------------------------------------------------------------------


def find_device(program: Program) -> torch.device:
    """Returns the device on which a program's kernels run, if they can be recorded as a CUDA graph.

    Raises:
        NotRecorded: the tensors are on other devices, the program is a part of a region, a
            collective goes through the host, or torch cannot record a call.
    """
    kinds = {i.kind for i in program.inputs} | {o.kind for o in program.outputs}
    if not kinds.isdisjoint(_OF_REGIONS):
        raise NotRecorded("it is a region, whose backward autograd calls, and not a whole step")
    graph = program.graph.graph
    nodes = [*graph.find_nodes(op="placeholder"), *calls_within(graph)]
    values = [t for n in nodes for t in tensors_in(n.meta.get("val"))]
    devices = [*{t.device for t in values if not is_of_host(t)}]
    if len(devices) != 1 or not Device(devices[0].type).records_kernels:
        lie = " and ".join(sorted({str(t.device) for t in values})) or "no device"
        raise NotRecorded(f"its tensors are on {lie}")
    for node in nodes:
        if not UNSAFE_TAGS.isdisjoint(getattr(node.target, "tags", ())):
            raise NotRecorded(f"torch does not record {node.target}{_describe_source(node)}")
        if is_collective(node):
            wire, axes = program.groups[str(node.args[-1])]
            if not wire.runs_in_streams:
                said = f"{node.target} over {' '.join(axes)}{_describe_source(node)}"
                raise NotRecorded(f"ranks meet on the host, in {said}")
    return devices[0]


def is_of_host(value: torch.Tensor) -> bool:
    """True if the tensor `value` is on the CPU. The host computes it, outside the CUDA graph."""
    return value.device == HOST


def _describe_source(node: fx.Node) -> str:
    source = note_of(node).source
    return f", from {source}" if source else ""


# -- work of the host ------------------------------------------------------------------------------


class HostSplit:
    """A program cut in two: a graph that the CPU runs in each call, and a program for the device.

    Args:
        program: the program, with sections inlined.
        device: the device of the second part. Values that the CPU computes for it are copied to it.

    Attributes:
        host: the CPU's graph. Its first results are the values that are copied to the device.
        host_inputs: the positions of its inputs among the program's inputs.
        crossing: the number of values that the CPU computes for the device.
        is_callers: for each of these values, True if it is an input of the program or a view of
            one.
        device: a program whose inputs are the other inputs, followed by the copied values.
        device_inputs: the positions of the other inputs.
        outputs: where each output of the program comes from, as a pair: ("host" or "device", the
            position among the results of that part), ("input", the position of the input), or
            (None, the value itself).

    Raises:
        NotRecorded: the CPU's part reads a result of the device.
    """

    def __init__(self, program: Program, device: torch.device):
        graph = program.graph.graph
        self._program, self._target = program, device
        self._of_host = {n for n in graph.nodes if n.op != "output" and self._runs_on_host(n)}
        (end,) = graph.find_nodes(op="output")
        place = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        self.host_inputs = [i for node, i in place.items() if node in self._of_host]
        self.device_inputs = [i for node, i in place.items() if node not in self._of_host]
        given_by_host = self._find_crossing()
        given_by_device: list[int] = []  # positions of outputs
        self.crossing = len(given_by_host)
        self.is_callers = [self._is_of_caller(node, place) for node in given_by_host]
        self.outputs: list[tuple[str | None, Any]] = []
        for i, given in enumerate(end.args[0]):
            if not isinstance(given, fx.Node):
                self.outputs.append((None, given))
            elif given in place:
                self.outputs.append(("input", place[given]))
            elif given in self._of_host:
                self.outputs.append(("host", len(given_by_host)))
                given_by_host.append(given)
            else:
                self.outputs.append(("device", len(given_by_device)))
                given_by_device.append(i)
        self.host = extract_graph(program.graph, self._of_host, given_by_host)
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # values of the device's graph
        crossing = given_by_host[: self.crossing]
        self.device = self._make_device_program(crossing, given_by_device, end.args[0])

    def _runs_on_host(self, node: fx.Node) -> bool:
        reads = self._tensors_of(node) or [
            t for read in node.all_input_nodes for t in self._tensors_of(read)
        ]
        return bool(reads) and all(map(is_of_host, reads))

    def _tensors_of(self, node: fx.Node) -> Sequence[torch.Tensor]:
        if node.op == "get_attr":
            return [getattr(self._program.graph, str(node.target))]
        return tensors_in(node.meta.get("val"))

    def _find_crossing(self) -> list[fx.Node]:
        """Returns the values of the host that the device reads, in the graph's order."""
        found = set()
        for node in self._program.graph.graph.nodes:
            if node.op != "call_function":
                continue
            by_host = node in self._of_host
            across = [n for n in node.all_input_nodes if (n in self._of_host) is not by_host]
            if across and by_host:
                said = f"{node.target} brings a value of the device to the host"
                raise NotRecorded(said + _describe_source(node))
            found.update(across)
        return [n for n in self._program.graph.graph.nodes if n in found]

    def _is_of_caller(self, node: fx.Node, place: Mapping[fx.Node, int]) -> bool:
        """True if a value is an input of the program or a view of one. Numbers are made anew."""
        while (shown := shown_operand(node)[0]) is not None:
            node = shown
        return node in place and self._program.inputs[place[node]].kind != "number"

    def _make_device_program(
        self, crossing: Sequence[fx.Node], gives: Sequence[int], outputs: Sequence[Any]
    ) -> Program:
        program, graph, of = self._program, self._graph, self._values
        inputs = [program.inputs[i] for i in self.device_inputs]
        nodes = [n for n in program.graph.graph.nodes if n not in self._of_host]
        for node in nodes:
            if node.op == "placeholder":
                of[node] = copy_node(graph, node, of.__getitem__)
        for node in crossing:
            of[node] = made = graph.placeholder(node.name)
            # `Tensor.to` would begin CUDA, though a fake has no memory there.
            value = _aten._to_copy.default(node.meta["val"], device=self._target)
            made.meta = {**node.meta, "val": value}
            inputs.append(Input(node.name, "number", value))
        numbers = set(crossing)
        for node in nodes:
            if node.op in ("call_function", "get_attr"):
                is_wide = not numbers.isdisjoint(node.all_input_nodes) and _computes_in_half(node)
                add = self._add_widened if is_wide else self._add_copy
                of[node] = add(node)
        graph.output([of[outputs[i]] for i in gives])
        drop_unused(graph)
        return Program(
            lazy_graph_module(program.graph, graph),
            inputs,
            [program.outputs[i] for i in gives],
            program.result,
            program.constants,
            [],
            program.groups,
            key=make_key([program.key, "kernels that are recorded"]),
        )

    def _add_copy(self, node: fx.Node) -> fx.Node:
        return copy_node(self._graph, node, self._values.__getitem__)

    def _add_widened(self, node: fx.Node) -> fx.Node:
        """Adds a half-precision call that reads a number, computed in float32 and then rounded.

        A kernel computes in float32 by itself if the number is on the host. But a number on the
        device would first be rounded to half precision: a rate of 0.001 by 0.2 %.
        """

        def widen(read: fx.Node) -> fx.Node:
            found, is_half = self._values[read], _is_half(read.meta.get("val"))
            return self._add_cast(found, torch.float32, node) if is_half else found

        given: Any = (node.args, node.kwargs)
        args, kwargs = fx.node.map_arg(given, widen)
        made = add_call(self._graph, node.target, args, kwargs, node.name)
        value = node.meta["val"]
        made.meta = dict(node.meta)
        if not _is_half(value):
            return made
        made.meta["val"] = value.to(torch.float32)
        return self._add_cast(made, value.dtype, node)

    def _add_cast(self, x: fx.Node, dtype: torch.dtype, origin: fx.Node) -> fx.Node:
        made = add_call(self._graph, _aten._to_copy.default, (x,), {"dtype": dtype})
        made.meta = {**origin.meta, "val": x.meta["val"].to(dtype)}
        return made


def _is_half(value: Any) -> bool:
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
    return dtype.is_floating_point and dtype.itemsize < 4


def _computes_in_half(node: fx.Node) -> bool:
    """True if a call computes element by element, in half precision."""
    if torch.Tag.pointwise not in node.target.tags or facts_of(node.target).writes:  # type: ignore[union-attr]
        return False
    value = node.meta["val"]
    of_halves = any(_is_half(read.meta.get("val")) for read in node.all_input_nodes)
    return of_halves and (_is_half(value) or value.dtype is torch.bool)


# -- recording and replay --------------------------------------------------------------------------


@dataclass(frozen=True)
class _RecordedProgram:
    """A recording, and the memory that it reads and writes.

    Attributes:
        copies: for each copied input, by position: the tensor that the recording reads.
        crossing: for each value that the host computes: the tensor that the recording reads.
        addresses: the addresses of the other inputs during the recording, by position.
        results: makes the results of a call from its inputs and the recording's memory.
    """

    recording: KernelRecording
    copies: dict[int, torch.Tensor]
    crossing: list[torch.Tensor]
    addresses: dict[int, int]
    results: _ReplayResults


class ReplayedProgram:
    """Runs a program with CUDA graphs: records the second call, and replays it in later calls.

    The first call runs normally, because kernels are compiled and tuned in it.

    Args:
        program: the program.
        compile_part: compiles the device's part, and returns the function that runs it.
        pool: a function from a kind of device ("cuda") to the memory pool of the step's recordings.
        title: the name of the step, for a warning.
        is_required: True to raise an error if CUDA refuses to record. Otherwise the program runs
            without a CUDA graph, with a warning.

    Attributes:
        refusal: why CUDA refused to record; "" if it did not.
        split: the program, cut into a part for the CPU and one for the device.
        host_call, device_call: the functions that run the parts.

    Raises:
        NotRecorded: the program cannot be recorded.
    """

    def __init__(
        self,
        program: Program,
        compile_part: Callable[[Program], Call],
        pool: Callable[[str], Any],
        title: str,
        is_required: bool,
    ):
        self._device, self._pool = find_device(program), pool
        self._title, self._is_required, self.refusal = title, is_required, ""
        self.split = HostSplit(program.flat(), self._device)
        self.host_call = make_graph_function(self.split.host, {})
        self.device_call = compile_part(self.split.device)
        program.built = self.split.device.built
        self._has_run = False
        self._recorded: _RecordedProgram | None = None
        taken = self.split.device.inputs[: len(self.split.device_inputs)]
        self._is_copied = [given.kind not in _STATE for given in taken]
        self._has_moved = [False for _ in taken]

    @property
    def is_recorded(self) -> bool:
        """True if the kernels are recorded, so that the next call replays them."""
        return self._recorded is not None

    @property
    def copied_bytes(self) -> int:
        """The bytes of the copies of arguments and numbers that a recording reads."""
        inputs = self.split.device.graph.graph.find_nodes(op="placeholder")
        is_copied = self._is_copied + [True] * self.split.crossing
        copied = itertools.compress(inputs, is_copied)
        copies = (_make_like(node.meta["val"], torch.device("meta")) for node in copied)
        return sum(copy.untyped_storage().nbytes() for copy in copies)

    def __call__(self, *inputs: torch.Tensor) -> list[Any]:
        split = self.split
        of_device: Sequence[Any]
        given = [inputs[i] for i in split.device_inputs]
        # Before the host computes: where this raises, nothing has changed.
        recorded = self._ensure_recorded(given) if self._has_run and not self.refusal else None
        of_host = self.host_call(*(inputs[i] for i in split.host_inputs))
        crossing = of_host[: split.crossing]
        if recorded is not None:
            of_device = self._replay(recorded, given, crossing)
        else:
            of_device = self.device_call(*given, *(x.to(self._device) for x in crossing))
            self._has_run = True
        found: dict[str | None, Sequence[Any]]
        found = {"host": of_host, "device": of_device, "input": inputs}
        return [found[where][at] if where else at for where, at in split.outputs]

    def _ensure_recorded(self, given: Sequence[torch.Tensor]) -> _RecordedProgram | None:
        """Returns the recording; makes it if there is none, or if state has moved.

        Returns None if CUDA refuses to record, and the program then runs without.
        """
        if (recorded := self._recorded) is not None:
            moved = [i for i, then in recorded.addresses.items() if given[i].data_ptr() != then]
            if not moved:
                return recorded
            for i in moved:
                self._is_copied[i], self._has_moved[i] = self._has_moved[i], True
            self._recorded = recorded = None  # frees its memory for the next recording
        try:
            self._recorded = self._record(given)
        except CaptureError as error:
            if self._is_required:
                raise
            self.refusal = error.reason
            text = f"{self._title} runs without CUDA graphs: {self.refusal}"
            warnings.warn(text, stacklevel=2)
        return self._recorded

    def _record(self, given: Sequence[torch.Tensor]) -> _RecordedProgram:
        copies = {i: _make_like(x) for i, x in enumerate(given) if self._is_copied[i]}
        numbers = [n.tensor for n in self.split.device.inputs[len(given) :]]
        crossing = [_make_like(x, self._device) for x in numbers]
        held = [copies.get(i, x) for i, x in enumerate(given)]
        kind = self._device.type
        try:
            recording = Device(kind).record(
                lambda: self.device_call(*held, *crossing), self._device, self._pool(kind)
            )
        except RuntimeError as error:
            raise make_recording_error(error) from error
        addresses = {i: x.data_ptr() for i, x in enumerate(given) if i not in copies}
        results = _ReplayResults(recording.value, held)
        recording.value = None  # its views would keep the state alive
        return _RecordedProgram(recording, copies, crossing, addresses, results)

    def _replay(
        self,
        recorded: _RecordedProgram,
        given: Sequence[torch.Tensor],
        crossing: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        for i, copy in recorded.copies.items():
            copy.copy_(given[i])
        is_callers = self.split.is_callers
        for to, x, may_be_written in zip(recorded.crossing, crossing, is_callers, strict=True):
            # If `x` is not pinned, the driver has already copied it when this returns.
            to.copy_(x, non_blocking=not (may_be_written and x.is_pinned()))
        recorded.recording.replay()
        for i in self.split.device.written:
            if i in recorded.copies:
                given[i].copy_(recorded.copies[i])
        return recorded.results.of_call(given)


def _make_like(x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Allocates memory for a copy of `x`, with its shape and strides."""
    place = x.device if device is None else device
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=place)


# -- results of a recording ------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """A tensor as a view of a storage; it does not keep the storage alive.

    Attributes:
        begin: the bytes of the storage before its first element.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    @staticmethod
    def of(x: torch.Tensor) -> _View:
        return _View(x.size(), x.stride(), x.dtype, _begin_of(x))

    def show(self, storage: torch.UntypedStorage, further: int = 0) -> torch.Tensor:
        """Returns a view of another storage, with the same shape and strides as this view.

        Args:
            further: the number of bytes by which the new view begins later than this one.
        """
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = (self.begin + further) // self.dtype.itemsize
        made.set_(storage, offset, self.size, self.stride)  # type: ignore[call-overload]
        return made


class _ReplayResults:
    """Makes the results of each call from the memory of a recording.

    If results of the program share memory with each other or with inputs, these do so, too.

    Args:
        values: results of the recording, in memory that the next replay writes.
        held: the inputs that the recording read.
    """

    def __init__(self, values: Sequence[torch.Tensor], held: Sequence[torch.Tensor]):
        inputs = {_address_of(x): i for i, x in enumerate(held)}
        sharers = Counter(_address_of(x) for x in {id(x): x for x in values}.values())
        # For each value, how to make it and its source: the position of an input (which is not kept
        # alive; a copied input begins where its copy does), a storage of the recording (which is
        # copied), or the value itself if its storage has no other value.
        self._shown: list[tuple[_View, int | torch.UntypedStorage | torch.Tensor]] = []
        for value in values:
            view, address = _View.of(value), _address_of(value)
            if (i := inputs.get(address)) is not None:
                view = replace(view, begin=view.begin - _begin_of(held[i]))
                self._shown.append((view, i))
            else:
                is_alone = sharers[address] == 1 and value.is_contiguous()
                self._shown.append((view, value if is_alone else value.untyped_storage()))

    def of_call(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the results of the last replay as tensors with their own memory.

        Args:
            given: the inputs of the replayed call, for results that are inputs.
        """
        copies: dict[int, Any] = {}  # by address, of storages and of values
        found = []
        for view, source in self._shown:
            if isinstance(source, int):
                x = given[source]
                found.append(view.show(x.untyped_storage(), _begin_of(x)))
                continue
            address = source.data_ptr()
            if address not in copies:
                copies[address] = source.clone()
            copy = copies[address]
            found.append(copy if isinstance(copy, torch.Tensor) else view.show(copy))
        return found


def _begin_of(x: torch.Tensor) -> int:
    """Returns the bytes of a tensor's storage before its first element."""
    return int(x.storage_offset()) * x.itemsize


def _address_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
