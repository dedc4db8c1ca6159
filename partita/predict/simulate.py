"""Simulations: `pt.simulate`, what a step would cost on a machine that is not here.

A step is captured and not run; its graph is played (`timeline`), and its memory read from the
schedule. What was found is a `Simulation`: numbers, a table, a timeline, a report.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.comm import Wire, is_part_of_mesh, own_lines_shown, sizes_of_mesh
from partita.comm.device import HOST
from partita.compile import CompiledStep
from partita.compile import compile as compile_step
from partita.compile.capture.fakes import captured_for, local_of
from partita.compile.capture.state import state_of, tensors_of_call
from partita.compile.captured_program import list_sent_moves
from partita.compile.graph_nodes import note_of
from partita.compile.memory import Buffer, HeldInput, Memory, held_by, scheduled
from partita.compile.program import Program
from partita.compile.step_report import facts_of_layouts, facts_of_memory, facts_of_moves
from partita.layout.text import (
    describe_value,
    escape_controls,
    format_seconds,
    format_table,
    human,
)
from partita.report import RunFacts, TimelineEvent, save_trace, write_report
from partita.tensor import DTensor

from .machine import Link, Machine, MachineError, load_machine
from .rehearsal import read_mesh, runs_nothing
from .strategy import (
    ModelShape,
    Strategy,
    StrategyError,
    check_argument,
    check_counts,
    make_step,
    shape_of,
)
from .strategy import __file__ as strategy_file
from .timeline import PlayedStep, bytes_per_axis, play_graph


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
    """What a training step costs a rank, without running it.

        print(pt.simulate("llama3-8b", {"dp": 64, "tp": 8}, "h100"))

    A step is captured, not run; tensors on the meta device are captured as if they lay where fused
    attention is, and so attention is priced as one fused kernel. The final graph is played on
    streams: kernels by a roofline, collectives as rings and trees. The caveat of each number stands
    beside it in the printed table and in `Simulation`.

    Args:
        step_or_model: a step, compiled or not, that takes `args`; a module, whose result for `args`
            is its loss, and which is updated by AdamW; or the name of a model of
            `partita.predict.MODELS`, or a `ModelShape` of one's own.
        mesh: the mesh on which the step's tensors lie (`pt.dry_mesh(dp=64)`), or one of which
            theirs are parts (`mesh["dp"]`); or the size of each axis, as a dictionary or as
            "dp=64,tp=8", which are then the axes that they lie on. None for one rank.
        machine: the name of a shipped machine, or the path of a file.
        args: of the step, in a list or a tuple. Of a compiled step that ran, its last program is
            taken where there are none.
        strategy: for a name or a shape, how the model is spread; a step is spread already.
        tokens: of a step on all ranks together; of a name or a shape they are known.
        links: for the axes of a collective (joined by blanks) another link than the machine's,
            taken as it is: `efficiency` is not applied to it.

    Raises:
        MachineError: a machine that is not known, a wrong file, or a link of no axis of the mesh.
        StrategyError: a model that is not known, a mesh that does not divide, or is not the step's;
            an argument of another type, or one that has no effect on what is simulated.
        LayoutError: a mesh as text that cannot be read, or with too many ranks.
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
    """Raise StrategyError for arguments of a wrong type, and for those that nothing would read."""
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
        where = "on a model that is simulated by its name or shape"
        if args:
            raise StrategyError(
                f"args have no effect {where}: its batch is the strategy's, "
                "strategy=pt.Strategy(batch=..., context=...)"
            )
        if tokens is not None:
            raise StrategyError(
                f"tokens has no effect {where}: they are counted, of "
                "strategy=pt.Strategy(batch=..., micro_batches=..., context=...)"
            )
        return
    if strategy is not None:
        raise StrategyError(
            f"strategy has no effect on {_name_of_step(what)}, which is spread already: call "
            "pt.zero, pt.parallelize and pt.remat before, or simulate a name or a ModelShape"
        )
    if runs_nothing(what):
        raise StrategyError(
            f"{_name_of_step(what)} is a generator or a coroutine function: a call of it runs "
            "nothing, and a step is a function that runs"
        )
    _check_call(what, args)


def _check_call(step: Any, args: Sequence[Any]) -> None:
    """Raise StrategyError where a step does not take these arguments."""
    fn = step.step if isinstance(step, CompiledStep) else step
    if isinstance(step, CompiledStep) and not args and step.reasons:  # its last program is taken
        return
    try:
        inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).bind(*args)
    except TypeError as error:
        raise StrategyError(f"args do not fit {_name_of_step(step)}: {error}") from None
    except ValueError:  # what is written in C may say no signature
        return


def _name_of_step(step: Any) -> str:
    own = getattr(step, "__name__", type(step).__name__)
    return str(getattr(step, "title", own))


def with_links(machine: Machine, links: Mapping[str, Link], axes: Collection[str]) -> Machine:
    """The machine with these links in place of its own.

    Raises:
        MachineError: names a link whose axes are not all among `axes`.
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
    return dataclasses.replace(machine, links={**own, **links}) if links else machine


def capture_model(
    model: str | ModelShape, mesh: Mapping[str, int], strategy: Strategy
) -> tuple[Program, int, int]:
    """A step of a model, its tokens on all ranks together, and the bytes that a rank holds and no
    step reads: one capture serves many machines.

    Raises:
        StrategyError: a model that is not known, or a mesh that does not divide.
    """
    step, args, tokens = make_step(model, mesh, strategy)
    with own_lines_shown(strategy_file):
        program = _capture_step(step, args)
    return program, tokens, _count_unread_bytes(step, args, program)


def simulate_program(
    program: Program,
    mesh: Mapping[str, int],
    machine: Machine,
    *,
    what: str = "a step",
    tokens: int | None = None,
    unread: int = 0,
) -> Simulation:
    """`simulate` of what is captured already.

    Args:
        unread: bytes of parameters and buffers that a rank holds, and no step reads.
    """
    played = play_graph(program, machine, mesh)
    memory = scheduled(program)
    if unread:
        held = HeldInput("parameters that no step reads", "parameter", unread)
        memory = dataclasses.replace(memory, held=(*memory.held, held))
    facts: dict[str, Any] = {"what": what, "mesh": mesh, "machine": machine, "tokens": tokens}
    return _simulation_of(program, memory, played, **facts)


def _capture_step(step: Callable[..., Any], args: Sequence[Any]) -> Program:
    if isinstance(step, CompiledStep):
        if not args and step.reasons:
            return step.program
    else:
        step = compile_step(step, backend="graph")
    with captured_for(HOST):
        return step.capture(*args)  # type: ignore[attr-defined]


def _count_unread_bytes(step: Callable[..., Any], args: Sequence[Any], program: Program) -> int:
    """Bytes on a rank of the parameters and buffers of modules that a step reaches and does not
    read: they are none of its program's inputs."""
    fn = step.step if isinstance(step, CompiledStep) else step
    modules = state_of(fn, (), args, {}).modules.values()
    held: dict[int, int] = {}
    for tensor in (t for m in modules for t in (*m.parameters(), *m.buffers())):
        storage = local_of(tensor).untyped_storage()
        held[storage._cdata] = storage.nbytes()
    read = sum(one.nbytes for one in held_by(program) if one.kind in ("parameter", "buffer"))
    return max(sum(held.values()) - read, 0)


def _find_wires(step: Callable[..., Any], args: Sequence[Any]) -> list[Wire]:
    """The wires of the tensors that a step reaches, of those that it does not read, too."""
    fn = step.step if isinstance(step, CompiledStep) else step
    leaves = tensors_of_call(state_of(fn, (), args, {}).slots, tuple(args), {})
    return list(dict.fromkeys(t._spec.wire for t in leaves if isinstance(t, DTensor)))


def _check_mesh(
    program: Program, reached: Sequence[Wire], sizes: Mapping[str, int], mesh: Any
) -> None:
    """Raise StrategyError where a step's tensors lie on another mesh than is said.

    They may lie on parts of the mesh that is given. By sizes it cannot be told what is a part of
    what: then each axis must be one that they lie on.
    """
    held = {name: wire.mesh.size(name) for wire in reached for name in wire.mesh.names}
    is_by_sizes = mesh is None or isinstance(mesh, str | Mapping)
    for wire in program.wires:
        of_step = dict(zip(wire.mesh.names, wire.mesh.sizes, strict=True))
        held |= of_step
        in_order = [axis for axis in sizes if axis in of_step] == [*of_step]
        if any(sizes.get(axis) != size for axis, size in of_step.items()) or (
            is_by_sizes and not in_order  # neighbours share hosts: the order has a meaning
        ):
            said, is_so = _format_mesh(sizes), _format_mesh(of_step)
            raise StrategyError(f"the mesh is said to be {said}, and the step's is {is_so}")
    if sizes.keys() <= held.keys():
        return
    if not held:
        raise StrategyError(
            f"the mesh is said to be {_format_mesh(sizes)}, and no tensor of the step lies on a "
            "mesh: spread them (pt.parallelize, pt.zero), or simulate one rank with mesh=None"
        )
    if not all(is_part_of_mesh(wire.device_mesh, mesh) for wire in program.wires):
        more = " ".join(axis for axis in sizes if axis not in held)
        raise StrategyError(
            f"the mesh is said to be {_format_mesh(sizes)}, and no tensor of the step lies along "
            f"{more}: the step's mesh is {_format_mesh(held)}. Say that one, or give the mesh "
            "itself of which it is a part, not its sizes"
        )


def _format_mesh(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={n}" for name, n in sizes.items()) or "one rank"


def _step_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    """A step of a model that gives its loss."""
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
            raise StrategyError(
                f"the model gives {given}, not its loss: simulate a step of your own, "
                "def step(x): ..."
            )
        loss.backward()
        optimizer.step()
        return loss

    return step


def _sizes_of_mesh(mesh: Any) -> dict[str, int]:
    """The size of each axis, outermost first."""
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


# -- what was found --------------------------------------------------------------------------------

_CLASSES = (
    "weights",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "workspace",
    "arguments",
)
_SHOWN = 8


@dataclass(frozen=True)
class Simulation:
    """A step that was not run, and what it would cost a rank.

    Attributes:
        what, mesh, machine: that was simulated.
        seconds: of a step. A roofline with stated efficiencies: what the host does, waiting for
            slower ranks and for data is not in it.
        compute_seconds: in which the processor computes.
        exposed: for the axes of collectives, seconds in which the processor waits for them. Rings
            and trees with one link each; collectives of different axes do not slow each other.
        link_seconds: likewise, in which the links work.
        nbytes: likewise, bytes that a rank sends; equal to a ledger's of the step.
        flops: operations of matrix products and attention of a rank; what remat makes again counts.
        model_flops: without what is made again.
        dtype: in which most of them are.
        tokens: of a step on all ranks together; None where that is not known.
        peak: bytes at the moment at which most is held. Of the graph as it is run node by node: a
            compiler that fuses holds less; an allocator's fragments are not in it, nor what a GPU's
            kernels hold while they run.
        classes: bytes of `peak` by class. Gradients are what an optimizer reads, or a collective
            reduces; activations what forward made; the rest of backward is workspace.
        holders: the biggest buffers at that moment.
        timeline: the events, for `save_trace`.
        facts: bytes over the step, moves by line and layouts of parameters, for `report`.
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
    timeline: PlayedStep = field(default_factory=PlayedStep, repr=False, compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Is the peak within the machine's memory?"""
        return self.peak <= self.machine.memory_bytes

    @cached_property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together; None where a step's tokens are not known or it takes no time."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilization: operations that are not made again, over what the machine could
        do in that time in the dtype of most of them (Chowdhery et al., arXiv 2204.02311); 0 of a
        step that takes no time."""
        if not self.seconds:
            return 0.0
        return self.model_flops / (self.seconds * self.machine.peak_flops(self.dtype))

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as JSON that Perfetto (ui.perfetto.dev) opens."""
        save_trace(self.events, path)

    @property
    def events(self) -> Sequence[TimelineEvent]:
        """What each stream does when."""
        return self.timeline.events

    @property
    def source(self) -> str:
        """Where the timeline is from, and what is not in it."""
        return f"Simulated on {self.machine.name}: no host, no stragglers, no data loading"

    def report(self, path: str | Path, *others: Simulation) -> None:
        """Write a page that needs no network: the timeline by stream, memory over the step by
        class, bytes by line, layouts of the parameters; others beside it. Needs plotly.

        Raises:
            ValueError: plotly is not installed, or one of the others is no simulation.
            OSError: the file cannot be written.
        """
        for one in others:
            check_argument(
                "what stands beside it", one, isinstance(one, Simulation), "a Simulation"
            )
        write_report(path, *(one.make_run_facts() for one in (self, *others)))

    def make_run_facts(self) -> RunFacts:
        """What a report shows of it."""
        run = RunFacts(self.title, figures=self._make_rows(), **self.facts)
        run.timeline, run.timeline_source = [*self.events], self.source
        return run

    @property
    def title(self) -> str:
        """What was simulated, on how many ranks of what."""
        return f"{self.what} on {_format_mesh(self.mesh)} of {self.machine.name}"

    def _make_rows(self) -> list[tuple[str, str, str]]:
        """Names, amounts, and what is in them and what is not."""
        rows = [
            (
                "step",
                format_seconds(self.seconds),
                "a roofline; no host, no stragglers, no data loading",
            ),
            (
                "compute",
                format_seconds(self.compute_seconds),
                f"{self.flops / 1e12:.4g} TFLOP a rank",
            ),
        ]
        for name in sorted(self.link_seconds):
            sent = human(self.nbytes.get(name, 0))
            said = f"of {format_seconds(self.link_seconds[name])}, {sent} sent; rings and trees"
            rows.append((f"exposed {name}", format_seconds(self.exposed.get(name, 0.0)), said))
        if self.tokens_per_second is not None:
            said = f"{self.tokens:,} a step, all ranks together"
            rows.append(("tokens/s", f"{self.tokens_per_second:,.0f}", said))
        said = f"of {self.machine.peak_flops(self.dtype) / 1e12:.4g} TFLOP/s in {self.dtype}"
        rows.append(("MFU", f"{self.mfu:.1%}", said + "; what is made again is not counted"))
        said = f"of {human(int(self.machine.memory_bytes))}: "
        said += "fits" if self.fits else "DOES NOT FIT"
        rows.append(("peak memory", human(self.peak), said + "; run node by node, no fragments"))
        rows += [(f"  {name}", human(size), "") for name, size in self.classes.items() if size]
        return rows

    def __str__(self) -> str:
        table = format_table(self._make_rows(), {1}).splitlines()
        lines = [self.title, *(f"  {line}" for line in table)]
        if self.holders:
            lines.append("  held at the peak, biggest first")
            for buffer in self.holders[:_SHOWN]:
                why = " ".join(filter(None, (buffer.phase, buffer.reason, buffer.source)))
                lines.append(f"    {human(buffer.nbytes):>9}  {buffer.name} {buffer.made_by} {why}")
        return "\n".join(map(escape_controls, lines))  # names of steps, machines and files


def _simulation_of(
    program: Program,
    memory: Memory,
    played: PlayedStep,
    *,
    what: str,
    mesh: Mapping[str, int],
    machine: Machine,
    tokens: int | None,
) -> Simulation:
    """What a program that was played costs."""
    reduced = {machine.name_kernel(name) for name in _find_gradient_names(program)}
    if machine.overlaps:  # what kernels and collectives of CPUs hold meanwhile, GPUs' do not
        memory = replace(memory, buffers=tuple(b for b in memory.buffers if not b.passing))
    memory = replace(memory, buffers=tuple(_named_for(machine, b) for b in memory.buffers))
    facts = facts_of_memory(memory, lambda buffer: _class_of(buffer, reduced))
    holders = memory.at(memory.peak_place)
    classes = dict.fromkeys(_CLASSES, 0) | facts["held"]
    for buffer in holders:
        classes[_class_of(buffer, reduced)] += buffer.nbytes
    busy = dict(played.busy)
    return Simulation(
        what=what,
        mesh=dict(mesh),
        machine=machine,
        seconds=played.seconds,
        compute_seconds=busy.pop("compute", 0.0),
        exposed=dict(played.exposed),
        link_seconds=busy,
        nbytes=bytes_per_axis(program),
        flops=played.flops,
        model_flops=played.model_flops,
        dtype=played.dtype,
        tokens=tokens,
        peak=sum(classes.values()),
        classes=classes,
        holders=tuple(holders[:16]),
        timeline=played,
        facts={
            "memory": facts,
            "moves": facts_of_moves(list_sent_moves(program)),
            "layouts": facts_of_layouts(program),
        },
    )


def _named_for(machine: Machine, buffer: Buffer) -> Buffer:
    """The buffer, with the names that kernels have on the machine."""
    name, made_by = map(machine.name_kernel, (buffer.name, buffer.made_by))
    return replace(buffer, name=name, made_by=made_by)


def _class_of(buffer: Buffer, reduced: set[str]) -> str:
    if buffer.passing:
        return "workspace"
    if buffer.reason in ("gather", "regather", "persistent"):
        return "gathered"
    if buffer.reason == "gradient" or buffer.name in reduced:
        return "gradients"
    return "activations" if buffer.phase == "forward" else "workspace"


def _find_gradient_names(program: Program) -> set[str]:
    """Names of what backward makes and an update, or the reduction of gradients, reads."""
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
