"""Simulations: `pt.simulate`, the time and memory of a step on a machine that you need not have.

A step is captured and not run. Its memory comes from the graph's memory schedule. For its time, the
graph is simulated as events on streams: one stream computes, and each set of mesh axes with
collectives has another stream. A collective begins when the graph issues it, its operands are ready
and its stream is free. The compute stream continues until the collective's wait.

If a machine does not overlap communication, the compute stream waits for each collective as soon as
it is issued. An all-reduce is the exception. It may run while the rank computes, and delays it only
by the time of sending its bytes.

A kernel takes the time of its operations or of its bytes, whichever is longer, plus a fixed cost.
Both are for the fraction of the machine's peaks that kernels reach (Williams, Waterman and
Patterson 2009, "Roofline: an insightful visual performance model").
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from partita.capture.fakes import captured_for
from partita.comm import Wire, is_part_of_mesh, own_lines_shown, sizes_of_mesh
from partita.comm.collective import WAIT
from partita.comm.device import HOST
from partita.compile import CompiledStep
from partita.compile import compile as compile_step
from partita.compile.collector import collector_paused
from partita.graph.fake_values import tensors_in
from partita.graph.graph_nodes import call_backward, is_collective, note_of, subgraph_of
from partita.graph.memory import Buffer, HeldInput, Memory, held_inputs, scheduled
from partita.graph.passes import PASSES
from partita.graph.program import Program, StepOptions, local_of
from partita.graph.repeat_block import repeat_block
from partita.graph.step_forms import CapturedForms, FormSearch
from partita.graph.step_report import facts_of_layouts, facts_of_memory, facts_of_moves
from partita.guards.captured_program import CapturedProgram, list_sent_moves
from partita.guards.inputs import find_state, tensors_of_call
from partita.layout.text import (
    describe_value,
    escape_controls,
    format_seconds,
    format_table,
    human,
)
from partita.report import RunFacts, TimelineEvent, save_trace, write_report
from partita.tensor import DTensor
from partita.tensor.op_facts import facts_of

from .machine import (
    BY_FLOPS,
    COLLECTIVES,
    Link,
    Machine,
    MachineError,
    collective_bytes,
    collective_seconds,
    load_machine,
    rate_of,
)
from .rehearsal import read_mesh, runs_nothing
from .strategy import (
    ModelShape,
    Strategy,
    StrategyError,
    check_argument,
    check_counts,
    make_step,
    refuse_if,
    shape_of,
)
from .strategy import __file__ as strategy_file


@collector_paused()
def simulate(
    step_or_model: Any,
    mesh: Any,
    machine: str | Path | Machine = "h100",
    args: Sequence[Any] = (),
    *,
    strategy: Strategy | None = None,
    tokens: int | None = None,
    links: Mapping[str, Link] | None = None,
) -> Simulation:
    """Returns the predicted time, memory and traffic of a training step, without running it.

        print(pt.simulate("llama3-8b", {"dp": 64, "tp": 8}, "h100"))

    The step is captured as a graph. The graph is then simulated on streams. Kernels take the time
    of a roofline model, and collectives the time of rings and trees. Attention on meta tensors
    counts as one fused kernel. The printed table and `Simulation` name the limits of each number.

    Args:
        step_or_model: one of: a step, compiled or not, that takes `args`; a module whose result for
            `args` is its loss (it is updated by AdamW); a name in `partita.predict.MODELS`; a
            `ModelShape`.
        mesh: for a step: the mesh of its tensors (`pt.dry_mesh(dp=64)`), or a mesh that contains
            it. Sizes by axis also work, as a dictionary or as "dp=64,tp=8". None: one rank.
        machine: the name of a machine, the path of its TOML file, or a `Machine`.
        args: the arguments of the step, in a list or a tuple. A compiled step that has run needs
            none: its last program is simulated.
        strategy: how to distribute the model, for a name or a `ModelShape` only.
        tokens: tokens per step, over all ranks, for a step or a module only.
        links: replaces links of the machine, by the axes of a collective (separated by blanks). The
            machine's `efficiency` is not applied to them.

    Raises:
        MachineError: an unknown machine, an invalid file, or a link for axes that the mesh lacks.
        StrategyError: an unknown model; a mesh that does not divide the model, or that is not the
            step's; an argument of a wrong type, or one without effect.
        LayoutError: text for a mesh that cannot be read, or too many ranks.
        CaptureError: the step cannot be captured.
    """
    is_named = isinstance(step_or_model, str | ModelShape)
    _check_arguments(step_or_model, args, strategy, tokens, is_named)
    sizes = _sizes_of_mesh(mesh)
    found = with_links(load_machine(machine), {} if links is None else links, sizes)
    if is_named:
        shape = shape_of(step_or_model)
        program, tokens, unread = capture_model(shape, sizes, strategy or Strategy())
        what = shape.name
    else:
        step = _step_of(step_or_model) if isinstance(step_or_model, nn.Module) else step_or_model
        what = _name_of_step(step_or_model)
        program = _capture_step(step, args)
        _check_mesh(program, _find_wires(step, args), sizes, mesh)
        unread = _count_unread_bytes(step, args, program)
    return simulate_program(program, sizes, found, what=what, tokens=tokens, unread=unread)


def _check_arguments(
    step_or_model: Any, args: Any, strategy: Any, tokens: Any, is_named: bool
) -> None:
    """Raises StrategyError for arguments of a wrong type, and for those without effect."""
    what = step_or_model
    is_step = callable(what) and not isinstance(what, type)
    allowed = "a step, a module, the name of a model or a ModelShape"
    check_argument("step_or_model", what, is_named or is_step, allowed)
    is_list = isinstance(args, list | tuple)
    check_argument("args", args, is_list, "a list or a tuple of the step's arguments, such as [x]")
    is_strategy = strategy is None or isinstance(strategy, Strategy)
    check_argument("strategy", strategy, is_strategy, "a pt.Strategy")
    if tokens is not None:
        check_counts(tokens=tokens)
    if is_named:
        where = "no effect on a model that is simulated by its name or shape"
        its_own = "strategy=pt.Strategy(batch=..., micro_batches=..., context=...)"
        refuse_if(args, f"args have {where}: its batch is the strategy's, {its_own}")
        refuse_if(tokens is not None, f"tokens has {where}: they are counted, of {its_own}")
        return
    name = _name_of_step(what)
    instead = "pt.zero, pt.parallelize and pt.remat before, or simulate a name or a ModelShape"
    said = f"strategy has no effect on {name}, which is spread already: call {instead}"
    refuse_if(strategy is not None, said)
    said = f"{name} is a generator or a coroutine function: a call of it runs nothing"
    refuse_if(runs_nothing(what), f"{said}, and a step is a function that runs")
    _check_call(what, args)


def _check_call(step: Any, args: Sequence[Any]) -> None:
    """Raises StrategyError where a step does not take these arguments."""
    if _runs_last_program(step, args):
        return
    fn = _function_of_step(step)
    try:
        inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).bind(*args)
    except TypeError as error:
        raise StrategyError(f"args do not fit {_name_of_step(step)}: {error}") from None
    except ValueError:  # a function written in C may have no signature
        return


def _runs_last_program(step: Any, args: Sequence[Any]) -> bool:
    """True for a compiled step that has run, called without arguments: its last program is used."""
    return isinstance(step, CompiledStep) and not args and bool(step.reasons)


def _function_of_step(step: Any) -> Any:
    return step.step if isinstance(step, CompiledStep) else step


def _name_of_step(step: Any) -> str:
    own = getattr(step, "__name__", type(step).__name__)
    return str(getattr(step, "title", own))


def with_links(machine: Machine, links: Mapping[str, Link], axes: Collection[str]) -> Machine:
    """Returns a copy of the machine in which `links` replace its own links.

    Args:
        links: the links, by the axes of a collective (separated by blanks).
        axes: the axes of the mesh.

    Raises:
        MachineError: `links` has an axis that is not in `axes`, or a value that is not a `Link`.
    """
    if not isinstance(links, Mapping):
        said = describe_value(links)
        raise MachineError(f'links is {said}: a link by axes, {{"dp": Link(2e-6, 450e9)}}')
    for name, link in links.items():
        if not isinstance(link, Link):
            said = describe_value(link)
            raise MachineError(f"a link of {name!r} is {said}: write Link(2e-6, 450e9)")
        if not isinstance(name, str):
            raise MachineError(f"a link of {describe_value(name)}: axes as text, 'dp' or 'dp tp'")
        of, said = name.split(), describe_value(name)
        if not of or not {*of} <= {*axes}:
            has = f"the axes {', '.join(axes)}" if axes else "no axis"
            raise MachineError(f"a link of {said}: the mesh has {has}")
        if len({*of}) < len(of):
            raise MachineError(f"a link of {said} names an axis twice")
    given = [sorted(name.split()) for name in links]
    own = {k: v for k, v in machine.links.items() if sorted(k.split()) not in given}
    return replace(machine, links={**own, **links}) if links else machine


def capture_model(
    model: str | ModelShape, mesh: Mapping[str, int], strategy: Strategy
) -> tuple[Program, int, int]:
    """Captures a training step of a model, which can be simulated on any number of machines.

    Args:
        model: a name in `partita.predict.MODELS`, or a `ModelShape`.
        mesh: the sizes of "dp" and "tp".
        strategy: how the model is distributed and trained.

    Returns:
        The program; the tokens of a step on all ranks together; the bytes of those parameters and
        buffers on a rank that the step does not read.

    Raises:
        StrategyError: an unknown model, or a mesh that does not divide it.
    """
    shape = shape_of(model)
    layers = strategy.layers or shape.layers
    recomputes_some = strategy.remat and strategy.remat_every > 1
    with own_lines_shown(strategy_file):
        if layers > 2 * _FEW and not recomputes_some and are_blocks_alike(shape, layers, strategy):
            few = replace(strategy, layers=_FEW)
            if (found := _capture_deep(shape, mesh, few, layers)) is not None:
                return found
        step, args, tokens = make_step(shape, mesh, strategy)
        program = _capture_step(step, args)
    return program, tokens, _count_unread_bytes(step, args, program)


_FEW = 4
"""The blocks of a deep model that are captured; the others are copies in the graph."""


def _capture_deep(
    shape: ModelShape, mesh: Mapping[str, int], few: Strategy, layers: int
) -> tuple[Program, int, int] | None:
    """Captures a model with few blocks, and repeats one of them in the graph.

    Args:
        few: the strategy, with the number of blocks to capture.
        layers: the number of blocks of the model.

    Returns:
        The result of `capture_model` for all blocks. None if the blocks are not equal, or the graph
        is too small to be compiled block by block.
    """
    step, args, tokens = make_step(shape, mesh, few)
    module: Any = find_state(step, (), args, {}).modules["module"]
    names = [name for name, part in module.named_modules() if part is module.blocks]
    if not names:
        return None
    # The passes run over the deeper graph alone.
    compiled = compile_step(
        step, backend="graph", blocks=[*module.blocks], sections=True, without=PASSES
    )
    captured = _capture_step(compiled, args)
    assert captured.captured is not None
    program, more = captured.captured.rebuild(), layers - _FEW
    if not repeat_block(program, names[0], more):
        return None
    program.options = options = StepOptions(backend="graph")
    if _count_nodes(program) < (options.section_threshold or 0):
        return None
    last = module.blocks[-1]
    held = sum(local_of(t).nbytes for t in (*last.parameters(), *last.buffers()))
    of_last = (i for i in held_inputs(captured) if f"{names[0]}.{_FEW - 1}." in i.name)
    unread_of_block = held - sum(i.nbytes for i in of_last if i.kind in ("parameter", "buffer"))
    unread = _count_unread_bytes(step, args, captured) + more * unread_of_block
    return FormSearch(CapturedForms(program)).first_within(None), tokens, unread


def _count_nodes(program: Program) -> int:
    """Returns the nodes of a program before the passes, if its blocks are inlined."""
    nodes = program.graph.graph.nodes
    parts = ((n, subgraph_of(n)) for n in nodes)
    return sum(1 if of is None else len(of.nodes_of(n.target is call_backward)) for n, of in parts)


@lru_cache(maxsize=8)
def are_blocks_alike(shape: ModelShape, layers: int, strategy: Strategy) -> bool:
    """True if a model's blocks are equal, except that each may store its own index."""
    with torch.device("meta"):
        blocks = getattr(shape.make(layers, strategy.context or shape.context), "blocks", ())
    found = [dict(_describe_block(block)) for block in blocks]
    same_parts = len(found) == layers and all(one.keys() == found[0].keys() for one in found)
    return same_parts and all(
        (of_key := [one[key] for one in found]) == of_key[:1] * layers or of_key == [*range(layers)]
        for key in found[0]
    )


def _describe_block(block: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yields the classes of a block's modules, and their plain attributes and tensors, by name."""
    for name, part in block.named_modules():
        yield name, type(part)
        for key, value in {**vars(part), **part._parameters, **part._buffers}.items():
            if isinstance(value, torch.Tensor):
                yield (name, key), (value.dtype, value.shape)
            elif value is None or isinstance(value, int | float | str):
                yield (name, key), value


def simulate_program(
    program: Program,
    mesh: Mapping[str, int],
    machine: Machine,
    *,
    what: str = "a step",
    tokens: int | None = None,
    unread: int = 0,
) -> Simulation:
    """Simulates a captured program, and returns what `simulate` returns.

    Args:
        mesh: the size of each axis, outermost first.
        machine: the hardware of a rank.
        what: the name of the step.
        tokens: tokens per step, over all ranks; None if unknown.
        unread: bytes of parameters and buffers that a rank holds and the step does not read.
    """
    program = program.flat()
    played = simulate_graph(program, machine, mesh)
    memory = _schedule_for(machine, program, unread)
    reduced = {machine.name_kernel(name) for name in _find_gradient_names(program)}
    facts = facts_of_memory(memory, lambda buffer: _class_of(buffer, reduced))
    holders = memory.at(memory.peak_place)
    classes = dict.fromkeys(_CLASSES, 0) | facts["held"]
    for buffer in holders:
        classes[_class_of(buffer, reduced)] += buffer.nbytes
    busy = dict(played.busy)
    moves, layouts = facts_of_moves(list_sent_moves(program)), facts_of_layouts(program)
    timed = ("seconds", "exposed", "flops", "model_flops", "dtype")
    return Simulation(
        what,
        dict(mesh),
        machine,
        compute_seconds=busy.pop(_COMPUTE, 0.0),
        link_seconds=busy,
        nbytes=bytes_per_axis(program),
        tokens=tokens,
        peak=sum(classes.values()),
        classes=classes,
        holders=tuple(holders[:16]),
        lines=_sum_by_line(played.events, holders),
        timeline=played,
        facts={"memory": facts, "moves": moves, "layouts": layouts},
        **{name: getattr(played, name) for name in timed},
    )


def _schedule_for(machine: Machine, program: Program, unread: int) -> Memory:
    """Returns the memory of a program, with the machine's kernel names and bytes no step reads."""
    memory = scheduled(program)
    held = HeldInput("parameters that no step reads", "parameter", unread)
    # Kernels and collectives of CPUs need extra memory while they run; those of GPUs do not.
    buffers = (b for b in memory.buffers if not (machine.overlaps and b.passing))
    named = machine.name_kernel
    return replace(
        memory,
        buffers=tuple(replace(b, name=named(b.name), made_by=named(b.made_by)) for b in buffers),
        held=(*memory.held, held) if unread else memory.held,
    )


def _capture_step(step: Any, args: Sequence[Any]) -> CapturedProgram:
    if _runs_last_program(step, args):
        return step.program  # type: ignore[no-any-return]
    if not isinstance(step, CompiledStep):
        step = compile_step(step, backend="graph")
    with captured_for(HOST):
        return step.capture(*args)


def _count_unread_bytes(step: Callable[..., Any], args: Sequence[Any], program: Program) -> int:
    """Returns a rank's bytes of parameters and buffers that a step reaches but does not read.

    They are no inputs of the step's program.
    """
    modules = find_state(_function_of_step(step), (), args, {}).modules.values()
    held: dict[int, int] = {}
    for tensor in (t for m in modules for t in (*m.parameters(), *m.buffers())):
        storage = local_of(tensor).untyped_storage()
        held[storage._cdata] = storage.nbytes()
    read = sum(one.nbytes for one in held_inputs(program) if one.kind in ("parameter", "buffer"))
    return max(sum(held.values()) - read, 0)


def _find_wires(step: Callable[..., Any], args: Sequence[Any]) -> list[Wire]:
    """Returns the wires of all tensors that a step reaches, even if it does not read them."""
    state = find_state(_function_of_step(step), (), args, {})
    leaves = tensors_of_call(state.slots, tuple(args), {})
    return list(dict.fromkeys(t._spec.wire for t in leaves if isinstance(t, DTensor)))


def _check_mesh(
    program: Program, reached: Sequence[Wire], sizes: Mapping[str, int], mesh: Any
) -> None:
    """Raises StrategyError if a step's tensors are on another mesh than the given one.

    They may be on sub-meshes of the given mesh. If only sizes are given, sub-meshes cannot be
    recognized; then the step must use each axis.
    """
    held = {name: wire.mesh.size(name) for wire in reached for name in wire.mesh.names}
    is_by_sizes = mesh is None or isinstance(mesh, str | Mapping)
    for wire in program.wires:
        of_step = dict(zip(wire.mesh.names, wire.mesh.sizes, strict=True))
        held |= of_step
        in_order = [axis for axis in sizes if axis in of_step] == [*of_step]
        if any(sizes.get(axis) != size for axis, size in of_step.items()) or (
            is_by_sizes and not in_order  # the order matters, because neighbours share hosts
        ):
            said, is_so = _format_mesh(sizes), _format_mesh(of_step)
            raise StrategyError(f"the argument mesh is {said}, and the step's is {is_so}")
    if sizes.keys() <= held.keys():
        return
    said = f"the argument mesh is {_format_mesh(sizes)}, and no tensor of the step lies"
    how = "spread them (pt.parallelize, pt.zero), or simulate one rank with mesh=None"
    refuse_if(not held, f"{said} on a mesh: {how}")
    more = " ".join(axis for axis in sizes if axis not in held)
    is_part = all(is_part_of_mesh(wire.device_mesh, mesh) for wire in program.wires)
    how = "Pass that one, or the mesh object that contains it, not its sizes"
    refuse_if(not is_part, f"{said} along {more}: the step's mesh is {_format_mesh(held)}. {how}")


def _format_mesh(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={n}" for name, n in sizes.items()) or "one rank"


def _step_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    """Returns a training step of a model that returns its loss, with AdamW."""
    if not any(p.requires_grad for p in model.parameters()):
        has = "none of the model's parameters requires a gradient"
        has = has if any(True for _ in model.parameters()) else "the model has no parameters"
        raise StrategyError(f"{has}, and no step trains it")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(*args: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*args)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, torch.Tensor)
            given = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else describe_value(loss)
            how = "simulate a step of your own, def step(x): ..."
            raise StrategyError(f"the model returns {given}, not its loss: {how}")
        loss.backward()
        optimizer.step()
        return loss

    return step


def _sizes_of_mesh(mesh: Any) -> dict[str, int]:
    """Returns the size of each axis, outermost first."""
    if isinstance(mesh, str):
        return read_mesh(mesh)
    if isinstance(mesh, Mapping):
        for name in mesh:
            check_argument("an axis of the mesh", name, isinstance(name, str), "a name, 'dp'")
        check_counts(**mesh)
        return {name: int(size) for name, size in mesh.items()}
    if mesh is None:
        return {}
    sizes = sizes_of_mesh(mesh)
    allowed = 'a mesh, {"dp": 64, "tp": 8} or "dp=64,tp=8"'
    check_argument("mesh", mesh, sizes is not None, allowed)
    return sizes or {}


# -- a graph played on streams ---------------------------------------------------------------------

_COMPUTE = "compute"


@dataclass
class SimulatedStep:
    """The simulated times at which each kernel and collective of a step's graph runs.

    Attributes:
        seconds: the time until the last stream has ended.
        events: the events, in the order of the graph.
        exposed: for each stream of collectives, the seconds in which the processor waits for it.
        busy: the seconds in which each stream works.
        flops: operations of matrix products and attention, including recomputation.
        model_flops: `flops` without recomputation.
        dtype: the dtype of most of these operations.
    """

    seconds: float = 0.0
    events: list[TimelineEvent] = field(default_factory=list)
    exposed: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    model_flops: float = 0.0
    dtype: str = "float32"


def simulate_graph(
    program: Program, machine: Machine, mesh: Mapping[str, int] | None = None
) -> SimulatedStep:
    """Returns when each kernel and collective of a program's graph would run.

    Args:
        machine: the hardware of a rank.
        mesh: the sizes of the axes, outermost first, of the mesh that contains the program's
            meshes. It determines which links ranks use. None: the program's meshes are not part of
            a larger mesh.
    """
    return _Player(program, machine, mesh or {}).run()


class _Player:
    def __init__(self, program: Program, machine: Machine, mesh: Mapping[str, int]):
        self.program, self.machine, self.mesh = program.flat(), machine, mesh
        self.found = SimulatedStep()
        self.now = 0.0  # seconds, on the compute stream
        self.free: dict[str, float] = {}  # by axis: the time when its links are free
        self.ready: dict[fx.Node, tuple[float, str]] = {}  # its end, its stream
        self.by_dtype: dict[str, float] = {}
        self.met = 0.0  # the time of the last collective, at which the ranks waited for each other

    def run(self) -> SimulatedStep:
        graph = self.program.graph.graph
        kernels = kernels_of(graph, self.machine.fuses)
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if is_collective(node):
                self._issue_collective(node)
            elif node.target is WAIT:
                self._wait_for_collective(node.all_input_nodes[0])
            else:
                self._run_kernel(node, kernels[node])
        for node in list(self.ready):
            self._wait_for_collective(node)
        # The step ends when the slowest rank ends.
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
        if kind == "all_reduce" and all(user.target is WAIT for user in node.users):
            # It may run while others compute, which sending its bytes slows down.
            latency = self._seconds_of_collective(kind, ranks, 0.0, axes, sizes)
            self.now += max(seconds - latency, 0.0)
        else:
            self._wait_for_collective(node)

    def _seconds_of_collective(
        self, kind: str, ranks: int, sent: float, axes: Sequence[str], sizes: Mapping[str, int]
    ) -> float:
        """Returns the seconds of a collective after all ranks have begun it.

        They come from a link that the user gave, from a measurement, or from a formula.
        """
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
        note, name = note_of(node), self.machine.name_kernel(node.name)
        what = (name, stream, start, seconds, kind, note.phase, note.source, nbytes)
        self.found.events.append(TimelineEvent(*what))
        self.found.busy[stream] = self.found.busy.get(stream, 0.0) + seconds


def bytes_per_axis(program: Program) -> dict[str, int]:
    """Returns the bytes that a rank sends in a program, by the mesh axes of the collectives."""
    found: dict[str, int] = {}
    for record in list_sent_moves(program):
        stream = " ".join(record.axes)
        found[stream] = found.get(stream, 0) + record.nbytes
    return found


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
"""The ratio of operations of fused attention, backward to forward: five products to two."""


@dataclass(frozen=True)
class Kernel:
    """The work of one graph node as a kernel: its operations and bytes.

    Attributes:
        kind: "matmul", "attention", "elementwise", "other" or "free" (a view, a number).
        flops: operations; a multiplication and an addition are two.
        nbytes: bytes read and written.
        dtype: the dtype of its first operand, such as "bfloat16".
        begins: True if this node begins a kernel; False if it is fused into an earlier one.
        rate: the name of its measured curve (see `machine.RATES`); "" if it takes no time.
    """

    kind: str = "free"
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = "float32"
    begins: bool = False
    rate: str = ""

    def seconds(self, machine: Machine) -> float:
        """Returns the seconds of the kernel on a machine, by a measured curve or the roofline."""
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
    """Returns the kernel for each call in a graph, except collectives.

    Args:
        graph: the graph of a program; its nodes have shapes.
        fuses: True fuses adjacent element-wise kernels and reductions. Values that are only used
            inside a fused kernel are neither written nor read.
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
                continue  # the value stays in registers
            if (group, source) not in seen:
                seen.add((group, source))
                nbytes += min(_nbytes_of_node(operand), _read_at_most(node, operand))
        dtype, rate = _dtype_of_operands(node), rate_of(node, _name_of_op(node), kind)
        found[node] = Kernel(kind, count_flops(node), nbytes, dtype, group is node, rate)
    return found


def count_flops(node: fx.Node) -> float:
    """Returns the flops of a graph node: of a matrix product, convolution or attention; else 0.

    Causal attention counts half, because fused kernels skip the masked half.
    """
    name = _name_of_op(node)
    if "scaled_dot_product" in name and "attention" in name:
        backward = "backward" in name
        # A backward's first operand is the gradient of the result.
        first = 1 if backward else 0
        q, k = map(_shape_of_node, node.args[first : first + 2])
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
    """Returns the operand of this name of a call, by its schema; None where it is not given."""
    if name in node.kwargs or not isinstance(node.target, torch._ops.OpOverload):
        return node.kwargs.get(name)
    names = [argument.name for argument in node.target._schema.arguments]
    at = names.index(name) if name in names else len(node.args)
    return node.args[at] if at < len(node.args) else None


def _kind_of(node: fx.Node) -> str:
    if is_collective(node):
        return "collective"
    facts = facts_of(node.target)
    if node.target is WAIT or (facts.is_view and not facts.writes):
        return "free" if not _makes_copy(node) else "elementwise"
    held = (t for n in (node, *node.all_input_nodes) for t in tensors_in(n.meta.get("val")))
    if not any(t.numel() > 1 for t in held):
        return "free"  # numbers of an optimizer, which the host computes
    name = _name_of_op(node)
    if "scaled_dot_product" in name or "flash_attention" in name:
        return "attention"
    if count_flops(node):
        return "matmul"
    is_torchs = getattr(node.target, "namespace", "") == "aten"
    return "elementwise" if is_torchs and not facts.stands_alone else "other"


def _makes_copy(node: fx.Node) -> bool:
    """True if a call that may return a view makes a copy here."""
    if "reshape" not in _name_of_op(node) or not node.all_input_nodes:
        return False
    before = node.all_input_nodes[0].meta.get("val")
    return isinstance(before, torch.Tensor) and not before.is_contiguous()


def _find_memory_owners(graph: fx.Graph, kinds: dict[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """Returns for each node the node whose memory it shows, possibly itself."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        operands = node.all_input_nodes
        is_shown = kinds.get(node) == "free" and operands and facts_of(node.target).is_view
        found[node] = found[operands[0]] if is_shown else node
    return found


def _fuse_elementwise(
    calls: list[fx.Node], kinds: dict[fx.Node, str], sources: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Returns for each element-wise call the first call of the kernel that it is fused into."""
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
    """Returns the calls whose results are written to memory, because another kernel reads them."""
    found = {node for node in calls if facts_of(node.target).writes}
    for node in calls:
        for user in node.users:
            if kinds.get(user) == "free" and sources[user] is sources[node]:
                continue  # a view: its readers count
            if user.op == "output" or joins.get(user, user) is not joins.get(
                sources[node], sources[node]
            ):
                found.add(sources[node])
    return found


def _phase_of_node(node: fx.Node) -> str:
    return note_of(node).phase if not facts_of(node.target).writes else "update"


def _read_at_most(node: fx.Node, operand: fx.Node) -> float:
    """Returns the most bytes that a call reads of an operand; infinity if it may read all.

    For example, an embedding reads only the rows of its table that it returns.
    """
    name = _name_of_op(node)
    if "nll_loss" in name and operand in node.args[:2] and len(_shape_of_node(operand)) > 1:
        # Forward reads only the target's class of each row, and backward reads none.
        classes = _shape_of_node(operand)[1]
        return 0.0 if "backward" in name else float(_nbytes_of_node(operand)) / classes
    is_table = any(part in name for part in ("embedding", "index", "gather"))
    if is_table and operand is node.args[0]:
        return float(_nbytes_of_node(node))
    if "copy_" in name and operand is node.args[0] and len(node.args) > 1:
        return 0.0  # its former value is not read
    return math.inf


def _name_of_op(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name if schema is not None else getattr(node.target, "__name__", node.target))


def _nbytes_of_node(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(node.meta.get("val")))


def _shape_of_node(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _dtype_of_operands(node: fx.Node) -> str:
    for operand in node.all_input_nodes:
        for tensor in tensors_in(operand.meta.get("val")):
            if tensor.dtype.is_floating_point:
                return str(tensor.dtype).removeprefix("torch.")
    return "float32"


# -- results ---------------------------------------------------------------------------------------

_CLASSES = "weights gathered gradients optimizer activations workspace arguments".split()
_SHOWN = 8


@dataclass(frozen=True)
class LineCost:
    """The cost of a source line in a simulated step, on one rank.

    Attributes:
        source: the user's "file:line".
        seconds: the seconds of its kernels, in forward, backward and update.
        sent: the bytes that its collectives send.
        held: the bytes that its buffers hold at the peak.
    """

    source: str
    seconds: float
    sent: float
    held: int


def _sum_by_line(
    events: Sequence[TimelineEvent], holders: Sequence[Buffer]
) -> tuple[LineCost, ...]:
    """Returns the cost of each source line, the line with the most seconds first.

    Args:
        events: the kernels and collectives of the step.
        holders: the buffers that are alive at the peak.
    """
    seconds, sent = defaultdict[str, float](float), defaultdict[str, float](float)
    held = defaultdict[str, int](int)
    for event in events:
        if event.stream == _COMPUTE:
            seconds[event.source] += event.seconds
        else:
            sent[event.source] += event.nbytes
    for buffer in holders:
        held[buffer.source] += buffer.nbytes
    sources = dict.fromkeys((*(event.source for event in events), *held))
    lines = (LineCost(s, seconds[s], sent[s], held[s]) for s in sources)
    return tuple(sorted(lines, key=lambda line: -line.seconds))


@dataclass(frozen=True)
class Simulation:
    """Predicted time, memory and traffic of one training step, for one rank.

    Times come from a roofline model with stated efficiencies. They do not include the host, slower
    ranks, or data loading.

    Attributes:
        what: the name of the model or step.
        mesh: the size of each mesh axis.
        machine: the machine.
        seconds: duration of a step.
        compute_seconds: seconds in which the processor computes.
        exposed: the seconds in which the processor waits for collectives, by their axes. A
            collective takes the time of a ring or a tree over one link. It is assumed that
            collectives over different axes do not slow each other.
        link_seconds: the seconds in which the links are busy, by axes.
        nbytes: the bytes that a rank sends, by axes, as `pt.ledger` counts them.
        flops: operations of matrix products and attention on a rank, recomputation included.
        model_flops: `flops` without recomputation.
        dtype: the dtype of most of these operations.
        tokens: tokens per step, over all ranks; None if unknown.
        peak: the most bytes allocated at one time, if the graph runs node by node. A compiler that
            fuses needs less. Fragmentation of the allocator and the workspace of GPU kernels are
            not included.
        classes: the bytes of `peak` by class. "gradients" are tensors that an optimizer reads or a
            collective reduces. "activations" are results of forward. All other results of backward
            are "workspace".
        holders: the buffers that are alive at the peak.
        lines: what each source line costs, the line with the most seconds first.
        timeline: the events of each stream, for `save_trace`.
        facts: data for `report`: bytes over the step, moves by line, layouts of parameters.
    """

    what: str
    mesh: Mapping[str, int]
    machine: Machine
    seconds: float
    compute_seconds: float
    exposed: Mapping[str, float]
    link_seconds: Mapping[str, float]
    nbytes: Mapping[str, int]
    flops: float
    model_flops: float
    dtype: str
    tokens: int | None
    peak: int
    classes: Mapping[str, int]
    holders: tuple[Buffer, ...] = ()
    lines: tuple[LineCost, ...] = ()
    timeline: SimulatedStep = field(default_factory=SimulatedStep, repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """True if the peak is within the machine's memory."""
        return self.peak <= self.machine.memory_bytes

    @cached_property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all ranks; None if `tokens` is unknown or `seconds` is 0."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311), between 0 and 1.

        `model_flops` divided by what the machine could compute in `seconds` in `dtype`; 0 if the
        step takes no time.
        """
        if not self.seconds:
            return 0.0
        return self.model_flops / (self.seconds * self.machine.peak_flops(self.dtype))

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as JSON that Perfetto (ui.perfetto.dev) opens, to the file `path`."""
        save_trace(self.events, path)

    @property
    def events(self) -> Sequence[TimelineEvent]:
        """The kernels and collectives of the timeline, with their streams and times."""
        return self.timeline.events

    @property
    def source(self) -> str:
        """A sentence that says how the timeline was made, and what it leaves out."""
        return f"Simulated on {self.machine.name}: no host, no stragglers, no data loading"

    def report(self, path: str | Path, *others: Simulation) -> None:
        """Writes an HTML page about the step that works without a network. Needs plotly.

        It shows the timeline by stream, memory over the step by class, bytes by source line, and
        the layouts of parameters.

        Args:
            path: the file to write.
            others: simulations to show beside this one.

        Raises:
            ValueError: plotly is not installed, or one of `others` is not a Simulation.
            OSError: the file cannot be written.
        """
        for one in others:
            is_right = isinstance(one, Simulation)
            check_argument("each of the others", one, is_right, "a Simulation")
        write_report(path, *(one.make_run_facts() for one in (self, *others)))

    def make_run_facts(self) -> RunFacts:
        """Returns the data of the simulation in the form that a report page shows."""
        run = RunFacts(
            self.title, figures=[*self._make_rows(), *self._make_line_rows()], **self.facts
        )
        run.timeline, run.timeline_source = [*self.events], self.source
        return run

    @property
    def title(self) -> str:
        """A text that names the model or step, the mesh and the machine."""
        return f"{self.what} on {_format_mesh(self.mesh)} of {self.machine.name}"

    def _make_rows(self) -> list[tuple[str, str, str]]:
        """Returns rows of the printed table: a name, an amount, and what the amount includes."""
        said = "a roofline; no host, no stragglers, no data loading"
        rows = [("step", format_seconds(self.seconds), said)]
        said = f"{self.flops / 1e12:.4g} TFLOP a rank"
        rows.append(("compute", format_seconds(self.compute_seconds), said))
        for name in sorted(self.link_seconds):
            sent = human(self.nbytes.get(name, 0))
            said = f"of {format_seconds(self.link_seconds[name])}, {sent} sent; rings and trees"
            rows.append((f"exposed {name}", format_seconds(self.exposed.get(name, 0.0)), said))
        if self.tokens_per_second is not None:
            said = f"{self.tokens:,} a step, all ranks together"
            rows.append(("tokens/s", f"{self.tokens_per_second:,.0f}", said))
        said = f"of {self.machine.peak_flops(self.dtype) / 1e12:.4g} TFLOP/s in {self.dtype}"
        rows.append(("MFU", f"{self.mfu:.1%}", said + "; recomputation is not counted"))
        said = f"of {human(int(self.machine.memory_bytes))}: "
        said += "fits" if self.fits else "DOES NOT FIT"
        rows.append(("peak memory", human(self.peak), said + "; without fusion and fragmentation"))
        rows += [(f"  {name}", human(size), "") for name, size in self.classes.items() if size]
        return rows

    def _make_line_rows(self) -> list[tuple[str, str, str]]:
        """Returns rows for the source lines with the most seconds: line, seconds, and bytes."""
        rows = []
        for line in self.lines[:_SHOWN]:
            sizes = (int(line.sent), "sent"), (line.held, "at the peak")
            text = ", ".join(f"{human(size)} {what}" for size, what in sizes if size)
            rows.append((line.source or "(no line)", format_seconds(line.seconds), text))
        return rows

    def __str__(self) -> str:
        table = format_table(self._make_rows(), {1}).splitlines()
        lines = [self.title, *(f"  {line}" for line in table)]
        if self.lines:
            table = format_table(self._make_line_rows(), {1}).splitlines()
            lines += ["  seconds of kernels by source line", *(f"    {line}" for line in table)]
        if self.holders:
            lines.append("  largest buffers at the peak")
            for buffer in self.holders[:_SHOWN]:
                why = " ".join(filter(None, (buffer.phase, buffer.reason, buffer.source)))
                lines.append(f"    {human(buffer.nbytes):>9}  {buffer.name} {buffer.made_by} {why}")
        return "\n".join(map(escape_controls, lines))  # names of steps, machines and files


def _class_of(buffer: Buffer, reduced: set[str]) -> str:
    if buffer.passing:
        return "workspace"
    if buffer.reason in ("gather", "regather", "persistent"):
        return "gathered"
    if buffer.reason == "gradient" or buffer.name in reduced:
        return "gradients"
    return "activations" if buffer.phase == "forward" else "workspace"


def _find_gradient_names(program: Program) -> set[str]:
    """Returns the names of backward's results that an update or a reduction reads."""
    found = set()
    for node in program.flat().graph.graph.nodes:
        note = note_of(node)
        if note.phase != "update" and note.reason not in ("gradient", "settle"):
            continue
        for operand in node.all_input_nodes:
            of = note_of(operand)
            while operand.op == "call_function" and of.phase == "backward":
                found.add(operand.name)
                operands = operand.all_input_nodes
                if "view" not in str(operand.target) and "reshape" not in str(operand.target):
                    break
                operand, of = operands[0], note_of(operands[0])
    return found
