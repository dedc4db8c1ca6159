"""Which rank compiles a program, and how do the others come by it?

What is in the store is loaded. Of the ranks of one host that find nothing there the first compiles
and puts the result into the store, and the others wait and load it. Where a store cannot serve,
each compiles for itself. No rank is left behind: where one fails, all raise the same error.
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
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from partita.comm import Wire, gather_texts, user_line
from partita.layout import Fix, LayoutError

from .constants import with_constants
from .generated import memory_of_code, memory_of_sections
from .lower import compiled, load, load_boxed, made_for
from .memory import Memory
from .phases import begin_phase
from .program import Program
from .section_run import function_of_sections
from .sections import Section, Sections, sections_of
from .store import Artifact, Store, default_store

__all__ = ["Built", "build"]


@dataclass(frozen=True, eq=False)
class Built:
    """A program that is ready to run.

    Attributes:
        call: runs it, over its inputs.
        loaded: from the store; else it was compiled here.
        seconds: that this took, without waiting for other ranks.
        key: of the artifact in the store: of the program and of what it is compiled for.
        metadata: of the artifact: what it is, when, and in how many seconds it was compiled.
        schedule: reckons its schedule of memory, where that is not in the metadata.
        sections: the different ones that it calls, where it was cut.
    """

    call: Callable[..., Sequence[torch.Tensor]]
    loaded: bool
    seconds: float
    key: str
    metadata: dict[str, Any] = field(default_factory=dict)
    schedule: Callable[[], Memory] | None = None
    sections: tuple[Built, ...] = ()

    def __str__(self) -> str:
        how = "loaded" if self.loaded else "compiled"
        if self.sections:
            many = sum(not one.loaded for one in self.sections)
            how = f"{len(self.sections)} sections, {many} of them compiled,"
        return f"{how} in {self.seconds:.1f} s"


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
    cut = None if sections is False else sections_of(program, always=sections is True)
    if cut is None:
        built = _built(_Rank(program, _facts(program, what)), wires)
        call = with_constants(built.call, program.graph)
        built = replace(built, call=call)
    else:
        built = _built_of_sections(program, cut, what, wires)
    begin_phase("graph")
    return built


def _built_of_sections(program: Program, cut: Sections, what: str, wires: Sequence[Wire]) -> Built:
    """Each section built as a program of its own, and the calls of them all."""
    facts = _facts(program, what)
    built = {}
    for i, section in enumerate(cut.different):
        mine = {"what": f"{what}, section {i + 1} of {len(cut.different)}"}
        mine["nodes"] = len(section.graph.graph.nodes)
        built[section] = _built(_RankOfSection(section, facts | mine), wires)
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


def _built(rank: _Rank, wires: Sequence[Wire]) -> Built:
    """What a rank has to run, after all ranks of the wires have come by theirs."""
    rank.attempt(rank.load)
    turn = _turn(rank, wires[0]) if wires else 0
    if turn == 0:
        rank.attempt(rank.compile)
    rank.raise_together(wires)
    if turn > 0:
        rank.attempt(rank.load)
        rank.attempt(rank.compile)
    rank.raise_together(wires)
    assert rank.built is not None
    return rank.built


class _Rank:
    """What this rank does to have a program.

    Attributes:
        built: what it has, if anything.
        error: what it could not do; then it does nothing more.
    """

    def __init__(self, program: Program | Section, facts: dict[str, Any]):
        self.program, self.facts = program, facts
        self.built: Built | None = None
        self.error: Exception | None = None
        self.key = ""
        self.store: Store | None = None
        self.attempt(self._prepare)

    def _prepare(self) -> None:
        devices = {x.device for x in self.program.example()}
        self.key = f"{self.program.key}-{made_for(devices)}"
        self.store = default_store()

    def attempt(self, do: Callable[[], None]) -> None:
        """Do it, if that is still of use. Other ranks are waiting: an error is kept for them."""
        if self.built is None and self.error is None:
            try:
                do()
            except Exception as error:
                self.error = error

    # -- what can be done --------------------------------------------------------------------------

    def load(self) -> None:
        """Have what is in the store, if it is of use."""
        assert self.store is not None
        found = self.store.get(self.key)
        if found is None:
            return
        begin = time.perf_counter()
        try:
            call = self.loaded(found.payload)
        except Exception as error:
            path, text = self.store.path(self.key), f"{type(error).__name__}: {error}"
            warnings.warn(f"{path} is compiled again: {text}", RuntimeWarning, stacklevel=2)
            return
        seconds = time.perf_counter() - begin
        self.built = Built(call, True, seconds, self.key, found.metadata)

    def compile(self) -> None:
        """Have the program compiled, for this rank and for the store."""
        assert self.store is not None
        begin = time.perf_counter()
        call, payload = compiled(self.program, self.note)
        call = self.made(call, payload)
        seconds = time.perf_counter() - begin
        metadata = self.facts | {"seconds": seconds, **self.program.metadata}
        if payload is not None:
            self.store.put(self.key, Artifact(payload, metadata))
        self.built = Built(call, False, seconds, self.key, metadata)

    def loaded(self, payload: bytes) -> Callable[..., Any]:
        """What runs, of what was compiled in some process."""
        return load(payload)

    def made(self, call: Callable[..., Any], payload: bytes | None) -> Callable[..., Any]:
        """What runs, of what was compiled in this one."""
        return call

    def note(self, code: list[str]) -> None:
        """Keep beside the program what its code allocates: other ranks only load it."""
        assert isinstance(self.program, Program)
        try:
            self.program.metadata["memory"] = memory_of_code(code, self.program).to_json()
        except ValueError as error:
            self.program.metadata["memory_unknown"] = str(error)

    # -- with the others ---------------------------------------------------------------------------

    def raise_together(self, wires: Sequence[Wire]) -> None:
        """Raise if a rank has failed, on all ranks of the wires that it is in."""
        text = ""
        if self.error is not None:
            text = f"on rank {wires[0].rank if wires else 0}: {_said(self.error)}"
        for wire in wires:
            text = next(filter(None, gather_texts(text, wire)), "")
        if text:
            raise LayoutError(
                "compile: the program could not be compiled",
                place=user_line(),
                reason=text,
                fixes=(Fix('pt.compile(step, backend="graph")', "runs the graph as it is"),),
            ) from self.error


class _RankOfSection(_Rank):
    """What this rank does to have a section, which is called with a list."""

    def loaded(self, payload: bytes) -> Callable[..., Any]:
        return load_boxed(payload)

    def made(self, call: Callable[..., Any], payload: bytes | None) -> Callable[..., Any]:
        return (lambda taken: call(*taken)) if payload is None else load_boxed(payload)

    def note(self, code: list[str]) -> None:
        """Keep the code: what a section allocates hangs on what its caller still holds."""
        self.program.metadata["code"] = code


def _turn(rank: _Rank, wire: Wire) -> int:
    """Which this rank is among those of its host that have nothing; -1 if it is not of them."""
    place = f"{_host()} {rank.key} {rank.store and rank.store.folder}"
    host = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
    told = wire.gather_ints((host, int(rank.built is None and rank.error is None)))
    without = [r for r, said in enumerate(told) if said == (host, 1)]
    return without.index(wire.rank) if wire.rank in without else -1


def _host() -> str:
    """What ranks that share a machine and its files have in common, and no others."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = str(uuid.getnode())
    return f"{platform.node()} {started}"


def _facts(program: Program, what: str) -> dict[str, Any]:
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


# -- errors ----------------------------------------------------------------------------------------


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
