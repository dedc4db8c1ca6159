"""What is compiled of a program, or loaded: the whole, or each of its sections."""

from __future__ import annotations

import functools
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from partita.comm import Wire

from ..graph_nodes import checks_value
from ..memory.codegen_memory import memory_of_sections
from ..phases import begin_phase
from ..program import Program
from .built import Built
from .compile_turns import Wanted, WantedSection, have_all
from .constants import with_constants
from .cut import sections_of
from .sections import Sections, function_of_sections

__all__ = ["build"]


def build(
    program: Program, what: str, wires: Iterable[Wire], sections: bool | None = None
) -> Built:
    """Compile a program, or load it. All ranks of `wires` call this at the same time.

    Args:
        program: the same on all ranks, with its key.
        what: the program, as a person would say it.
        wires: those of the program.
        sections: whether in sections; None where that is worth it.

    Raises:
        LayoutError: it could not be compiled on some rank; the same on all ranks of its wires.
    """
    wires = sorted(wires, key=lambda w: -w.mesh.size())
    begin_phase("compile")
    cut = _cut_into_sections(program, sections)
    if cut is None:
        (built,) = have_all([Wanted(program, _describe_build(program, what))], wires)
        built = replace(built, call=with_constants(built.call, program.graph))
    else:
        built = _built_of_sections(program, cut, what, wires)
    begin_phase("graph")
    return built


def _cut_into_sections(program: Program, sections: bool | None) -> Sections | None:
    """A program's graph as sections, if it is to be compiled so.

    One that checks a value always is: the check stands between sections, where it is made in its
    turn. A compiler may drop it, or make it behind what it is to prevent.
    """
    checks = any(map(checks_value, program.graph.graph.nodes))
    if sections is False and not checks:
        return None
    return sections_of(program, always=checks or sections is True)


def _built_of_sections(program: Program, cut: Sections, what: str, wires: Sequence[Wire]) -> Built:
    """Each section built as a program of its own, and the calls of them all."""
    facts = _describe_build(program, what)
    wanted = []
    for i, section in enumerate(cut.different):
        mine: dict[str, Any] = {"what": f"{what}, section {i + 1} of {len(cut.different)}"}
        mine["nodes"] = len(section.graph.graph.nodes)
        wanted.append(WantedSection(section, facts | mine))
    built = dict(zip(cut.different, have_all(wanted, wires), strict=True))
    calls = {section: one.call for section, one in built.items()}
    sources = {section: one.metadata["code"] for section, one in built.items()}
    return Built(
        function_of_sections(cut, calls),
        all(one.loaded for one in built.values()),
        sum(one.seconds for one in built.values()),
        program.key,
        facts,
        functools.cache(lambda: memory_of_sections(sources, cut, program)),
        tuple(built.values()),
    )


def _describe_build(program: Program, what: str) -> dict[str, Any]:
    meshes = dict.fromkeys(str(i.spec.wire.mesh) for i in program.inputs if i.spec is not None)
    return {
        "what": what,
        "mesh": ", ".join(meshes) or "one process",
        "program": program.key,
        "nodes": len(program.graph.graph.nodes),
        "torch": torch.__version__,
        "partita": version("partita"),
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "system": sys.platform,
        "made": time.time(),
    }
