"""Building of a program: it is compiled or loaded from the store, whole or section by section.

All ranks build together (`compile_turns`). A graph is cut into sections where that is worth it, or
where it checks a value, which a compiler might drop.
"""

from __future__ import annotations

import functools
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from partita.comm import Wire
from partita.versions import __version__

from ..graph_nodes import checks_value
from ..memory.codegen_memory import memory_of_sections
from ..program import Program
from ..section import section_of
from .built import Built
from .compile_turns import Wanted, WantedSection, build_together
from .constants import with_constants
from .cut import sections_of
from .sections import Sections, function_of_sections

__all__ = ["build"]


def build(
    program: Program, what: str, wires: Iterable[Wire], sections: bool | None = None
) -> Built:
    """Compile or load a program. All ranks of `wires` call this at the same time.

    Args:
        program: the same on all ranks, with its key.
        what: the program's title, in messages.
        wires: of the program's meshes.
        sections: whether to cut it into sections; None to do so where it is worth it.

    Raises:
        LayoutError: it could not be compiled on some rank; the same on all ranks of its wires.
    """
    wires = sorted(wires, key=lambda w: -w.mesh.size())
    found = _cut_into_sections(program, sections)
    if found is None:
        flat = program.flat()
        (built,) = build_together([Wanted(flat, _describe_build(program, what))], wires)
        built = replace(built, call=with_constants(built.call, flat.graph))
    else:
        built = _build_sections(program, found, what, wires)
    return built


def _cut_into_sections(program: Program, sections: bool | None) -> Sections | None:
    """The sections of a program's graph; None where it is to be compiled whole.

    A graph in which blocks are calls of sections is cut between these, too. One that checks a value
    is always cut: the check stands between sections and so keeps its
    place. A compiler may drop it, or run it behind what it is to prevent.
    """
    nodes = program.graph.graph.nodes
    checks = any(map(checks_value, nodes))
    if sections is False and not checks:
        return None
    has_sections = any(section_of(node) is not None for node in nodes)
    return sections_of(program, always=checks or has_sections or sections is True)


def _build_sections(program: Program, cut: Sections, what: str, wires: Sequence[Wire]) -> Built:
    """Build each different section as a program of its own, and the code that calls them."""
    facts = _describe_build(program, what)
    wanted = []
    for i, section in enumerate(cut.different):
        section_facts: dict[str, Any] = {"what": f"{what}, section {i + 1} of {len(cut.different)}"}
        section_facts["nodes"] = len(section.graph.graph.nodes)
        wanted.append(WantedSection(section, facts | section_facts))
    built = dict(zip(cut.different, build_together(wanted, wires), strict=True))
    calls = {section: its.call for section, its in built.items()}
    sources = {section: its.metadata["code"] for section, its in built.items()}
    return Built(
        function_of_sections(cut, calls),
        all(its.loaded for its in built.values()),
        sum(its.seconds for its in built.values()),
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
        "partita": __version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "system": sys.platform,
        "made": time.time(),
    }
