"""`pt.simulate`: the cost of a step on a machine that is not here, by its captured graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.comm import own_lines_shown
from partita.comm.device import HOST
from partita.compile import CompiledStep
from partita.compile import compile as compile_step
from partita.compile.capture.fakes import captured_for, local_of
from partita.compile.capture.state import state_of
from partita.compile.memory.schedule import HeldInput
from partita.compile.memory.storages import held_by, scheduled
from partita.compile.program import Program

from .call_text import read_mesh
from .machine import Link, Machine, MachineError, load_machine
from .simulation import Simulation, simulation_of
from .strategy import ModelShape, Strategy, StrategyError, check_counts, make_step, shape_of
from .strategy import __file__ as strategy_file
from .timeline import play_graph

__all__ = ["capture_model", "simulate", "simulate_program", "with_links"]


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
        mesh: the mesh on which the step's tensors lie (`pt.dry_mesh(dp=64)`), or for a name the
            size of each axis, as a dictionary or as "dp=64,tp=8".
        machine: the name of a shipped machine, or the path of a file.
        args: of the step. Of a compiled step that ran, its last program is taken where there are
            none.
        strategy: for a name, how the model is spread.
        tokens: of a step on all ranks together; known of a named model.
        links: for the axes of a collective (joined by blanks) another link than the machine's,
            taken as it is: `efficiency` is not applied to it.

    Raises:
        MachineError: a machine that is not known, a wrong file, or a link of no axis of the mesh.
        StrategyError: a model that is not known, a mesh that does not divide, or is not the step's.
        CaptureError: the step cannot be captured.
    """
    sizes = _sizes_of_mesh(mesh)
    if tokens is not None:
        check_counts(tokens=tokens)
    found = with_links(load_machine(machine), links or {}, sizes)
    if isinstance(step_or_model, str | ModelShape):
        shape = shape_of(step_or_model)
        step, args, tokens = make_step(shape, sizes, strategy or Strategy())
        with own_lines_shown(strategy_file):
            program = _capture_step(step, args)
        what = shape.name
    else:
        step = _step_of(step_or_model) if isinstance(step_or_model, nn.Module) else step_or_model
        own = getattr(step_or_model, "__name__", type(step_or_model).__name__)
        what = getattr(step_or_model, "title", own)
        program = _capture_step(step, args)
        _check_mesh(program, sizes)
    unread = _count_unread_bytes(step, args, program)
    return simulate_program(program, sizes, found, what=what, tokens=tokens, unread=unread)


def with_links(machine: Machine, links: Mapping[str, Link], axes: Iterable[str]) -> Machine:
    """The machine with these links in place of its own.

    Raises:
        MachineError: names a link whose axes are not all among `axes`.
    """
    for name, link in links.items():
        if not isinstance(link, Link):
            raise MachineError(f"a link of {name!r} is {link!r}: write Link(2e-6, 450e9)")
        if not name.split() or not {*name.split()} <= {*axes}:
            raise MachineError(f"a link of {name!r}: the mesh has the axes {', '.join(axes)}")
    own = {k: v for k, v in machine.links.items() if not any(_same_axes(k, name) for name in links)}
    return dataclasses.replace(machine, links={**own, **links}) if links else machine


def _same_axes(one: str, other: str) -> bool:
    return sorted(one.split()) == sorted(other.split())


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
    played = play_graph(program, machine)
    memory = scheduled(program)
    if unread:
        held = HeldInput("parameters that no step reads", "parameter", unread)
        memory = dataclasses.replace(memory, held=(*memory.held, held))
    facts: dict[str, Any] = {"what": what, "mesh": mesh, "machine": machine, "tokens": tokens}
    return simulation_of(program, memory, played, **facts)


def _capture_step(step: Callable[..., Any], args: Sequence[Any]) -> Program:
    if isinstance(step, CompiledStep):
        if not args:
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


def _check_mesh(program: Program, sizes: Mapping[str, int]) -> None:
    """Raise StrategyError where a step's tensors lie on another mesh than is said."""
    for wire in program.wires:
        of_step = dict(zip(wire.mesh.names, wire.mesh.sizes, strict=True))
        if any(sizes.get(axis) != size for axis, size in of_step.items()):
            said, is_so = (
                ",".join(f"{name}={n}" for name, n in mesh.items()) for mesh in (sizes, of_step)
            )
            raise StrategyError(f"the mesh is said to be {said}, and the step's is {is_so}")


def _step_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    """A step of a model that gives its loss."""
    if not any(True for _ in model.parameters()):
        raise StrategyError("the model has no parameters, and no step trains it")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(*args: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*args)
        if loss.numel() != 1:
            raise ValueError(
                f"the model gives a tensor of shape {tuple(loss.shape)}, not its loss: simulate "
                "a step of your own, def step(x): ..."
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
        check_counts(**{str(name): size for name, size in mesh.items()})
        return {str(name): int(size) for name, size in mesh.items()}
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names
    sizes = dict(zip(names, mesh.shape, strict=True))
    return sizes
