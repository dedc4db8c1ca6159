"""Building of a program: it is compiled or loaded from the store, whole or section by section.

A graph is cut into sections where that is worth it, or where it checks a value, which a compiler
might drop. All ranks build together, and of the ranks of a host one compiles:

1. Each rank loads what is in the store.
2. Of the ranks of one host that miss a program, the first compiles it and puts it into the store;
   several programs are shared out among the ranks, which compile at the same time.
3. The others load it. Where the store does not work, they compile it themselves.

Where one rank fails, all raise the same error, so that none waits for it.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from partita.comm import Wire, gather_texts, user_line
from partita.layout import Fix, LayoutError
from partita.versions import __version__

from ..graph_nodes import Section, checks_value, section_of
from ..memory.codegen_memory import memory_of_code, memory_of_sections
from ..program import Built, Program
from .executor import Sections, function_of_sections, with_constants
from .inductor import compile_program, digest_of_compiler, load, load_boxed
from .section_cutter import sections_of
from .store import Artifact, Store, default_store


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
        (built,) = _build_together([_BuildRequest(flat, _describe_build(program, what))], wires)
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
        wanted.append(_BuildRequest(section, facts | section_facts))
    built = dict(zip(cut.different, _build_together(wanted, wires), strict=True))
    calls = {section: its.call for section, its in built.items()}
    sources = {section: its.metadata["code"] for section, its in built.items()}
    return replace(
        Built.of_parts(function_of_sections(cut, calls), program.key, built.values()),
        metadata=facts,
        schedule=functools.cache(lambda: memory_of_sections(sources, cut, program)),
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


# -- turns of the ranks ----------------------------------------------------------------------------


def _build_together(wanted: Sequence[_BuildRequest], wires: Sequence[Wire]) -> list[Built]:
    """Load or compile programs, on all ranks of the wires together.

    Args:
        wanted: the same on all ranks, in the same order.
        wires: the one with most ranks first.

    Raises:
        LayoutError: something could not be compiled on some rank; the same on all.
    """
    for program in wanted:
        program.attempt(program.load)
    turns = _assign_turns(wanted, wires[0]) if wires else [0] * len(wanted)
    for program, turn in zip(wanted, turns, strict=True):
        if turn == 0:
            program.attempt(program.compile)
    _raise_together(wanted, wires)
    for program, turn in zip(wanted, turns, strict=True):
        if turn > 0:
            program.attempt(program.load)
            program.attempt(program.compile)
    _raise_together(wanted, wires)
    return [program.built for program in wanted if program.built is not None]


def _assign_turns(wanted: Sequence[_BuildRequest], wire: Wire) -> list[int]:
    """For each program this rank's turn among the ranks of its host that miss it; -1 if it has it.

    Turn 0 compiles. It rotates from program to program, so that each rank has as many to compile.
    """
    keys = " ".join(program.key for program in wanted)
    place = f"{_identify_host()} {keys} {wanted[0].store and wanted[0].store.folder}"
    host = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
    missing_by_rank = wire.gather_ints((host, *(int(program.is_missing) for program in wanted)))
    found = []
    for i in range(len(wanted)):
        missing_ranks = [
            r for r, (where, *missing) in enumerate(missing_by_rank) if where == host and missing[i]
        ]
        is_missing = wire.rank in missing_ranks
        found.append(
            (missing_ranks.index(wire.rank) - i) % len(missing_ranks) if is_missing else -1
        )
    return found


def _raise_together(wanted: Sequence[_BuildRequest], wires: Sequence[Wire]) -> None:
    """Raise, on all ranks, if one has failed. Raises LayoutError, the same on all."""
    error = next((program.error for program in wanted if program.error is not None), None)
    text = ""
    if error is not None:
        kind = "" if isinstance(error, LayoutError) else f"{type(error).__name__}: "
        text = f"on rank {wires[0].rank if wires else 0}: {kind}{error}"
    for wire in wires:
        text = next(
            filter(None, gather_texts(text, wire, "waits for code that another rank compiles")), ""
        )
    if text:
        raise LayoutError(
            "compile: the program could not be compiled",
            place=user_line(),
            reason=text,
            fixes=(Fix('pt.compile(step, backend="graph")', "runs the graph as it is"),),
        ) from error


class _BuildRequest:
    """A program that this rank has to load or compile.

    Args:
        program: to be built, or a section, which is called with a list.
        facts: metadata of the artifact.

    Attributes:
        built: the program, once it is loaded or compiled.
        error: of a failed attempt, after which nothing more is attempted.
        key: of the program and of the compiler, in the store.
    """

    def __init__(self, program: Program | Section, facts: dict[str, Any]):
        self.program, self.facts = program, facts
        self.built: Built | None = None
        self.error: Exception | None = None
        self.key = ""
        self.store: Store | None = None
        self._load_payload: Callable[[bytes], Callable[..., Any]]
        self._load_payload = load_boxed if isinstance(program, Section) else load
        self.attempt(self._find_key_and_store)

    def _find_key_and_store(self) -> None:
        devices = {x.device for x in self.program.example()}
        self.key = f"{self.program.key}-{digest_of_compiler(devices)}"
        self.store = default_store()

    @property
    def is_missing(self) -> bool:
        """Is it neither built nor failed?"""
        return self.built is None and self.error is None

    def attempt(self, do: Callable[[], None]) -> None:
        """Call `do` if the program is missing; an error is kept, for other ranks wait."""
        if self.is_missing:
            try:
                do()
            except Exception as error:
                self.error = error

    def load(self) -> None:
        """Load the program from the store, if it is there and loads."""
        assert self.store is not None
        found = self.store.get(self.key)
        if found is None:
            return
        begin = time.perf_counter()
        try:
            call = self._load_payload(found.payload)
        except Exception as error:
            path, text = self.store.path(self.key), f"{type(error).__name__}: {error}"
            warnings.warn(f"{path} is compiled again: {text}", RuntimeWarning, stacklevel=2)
            return
        seconds = time.perf_counter() - begin
        self.built = Built(call, True, seconds, self.key, found.metadata)

    def compile(self) -> None:
        """Compile the program, and put it into the store."""
        assert self.store is not None
        begin = time.perf_counter()
        call, payload = compile_program(self.program, self._note_code)
        if isinstance(self.program, Section):
            whole = call
            call = (lambda taken: whole(*taken)) if payload is None else load_boxed(payload)
        seconds = time.perf_counter() - begin
        metadata = self.facts | {"seconds": seconds, **self.program.metadata}
        if payload is not None:
            self.store.put(self.key, Artifact(payload, metadata))
        self.built = Built(call, False, seconds, self.key, metadata)

    def _note_code(self, code: list[str]) -> None:
        """Keep the memory schedule of generated code in the metadata, for ranks that load it; of a
        section the code: when its memory is freed depends on what its caller holds."""
        metadata = self.program.metadata
        if isinstance(self.program, Section):
            metadata["code"] = code
            return
        try:
            metadata["memory"] = memory_of_code(code, self.program).to_json()
        except ValueError as error:
            metadata["memory_unknown"] = str(error)


def _identify_host() -> str:
    """A text that is equal for processes of one machine, and for no others."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = str(uuid.getnode())
    return f"{platform.node()} {started}"
