"""Turns of the ranks that compile: of the ranks of a host one compiles, and the others load.

1. Each rank loads what is in the store.
2. Of the ranks of one host that miss a program, the first compiles it and puts it into the store;
   several programs are shared out among the ranks, which compile at the same time.
3. The others load it. Where the store does not work, they compile it themselves.

Where one rank fails, all raise the same error, so that none waits for it.
"""

from __future__ import annotations

import hashlib
import platform
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from partita.comm import Wire, gather_texts, user_line
from partita.layout import Fix, LayoutError

from ..memory.codegen_memory import memory_of_code
from ..program import Program
from ..section import Section
from .built import Built
from .inductor import compile_program, digest_of_compiler, load, load_boxed
from .store import Artifact, Store, default_store

__all__ = ["Wanted", "WantedSection", "build_together"]


def build_together(wanted: Sequence[Wanted], wires: Sequence[Wire]) -> list[Built]:
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


def _assign_turns(wanted: Sequence[Wanted], wire: Wire) -> list[int]:
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


def _raise_together(wanted: Sequence[Wanted], wires: Sequence[Wire]) -> None:
    """Raise, on all ranks, if one has failed. Raises LayoutError, the same on all."""
    error = next((program.error for program in wanted if program.error is not None), None)
    text = ""
    if error is not None:
        text = f"on rank {wires[0].rank if wires else 0}: {_describe_error(error)}"
    for wire in wires:
        text = next(filter(None, gather_texts(text, wire)), "")
    if text:
        raise LayoutError(
            "compile: the program could not be compiled",
            place=user_line(),
            reason=text,
            fixes=(Fix('pt.compile(step, backend="graph")', "runs the graph as it is"),),
        ) from error


class Wanted:
    """A program that this rank has to load or compile.

    Args:
        program: to be built, or a section.
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

    # -- what can be done --------------------------------------------------------------------------

    def load(self) -> None:
        """Load the program from the store, if it is there and loads."""
        assert self.store is not None
        found = self.store.get(self.key)
        if found is None:
            return
        begin = time.perf_counter()
        try:
            call = self.load_callable(found.payload)
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
        call, payload = compile_program(self.program, self.note_code)
        call = self.make_callable(call, payload)
        seconds = time.perf_counter() - begin
        metadata = self.facts | {"seconds": seconds, **self.program.metadata}
        if payload is not None:
            self.store.put(self.key, Artifact(payload, metadata))
        self.built = Built(call, False, seconds, self.key, metadata)

    def load_callable(self, payload: bytes) -> Callable[..., Any]:
        """The function to call, from a payload of the store."""
        return load(payload)

    def make_callable(self, call: Callable[..., Any], payload: bytes | None) -> Callable[..., Any]:
        """The function to call, from what this process has compiled."""
        return call

    def note_code(self, code: list[str]) -> None:
        """Keep the memory schedule of generated code in the metadata, for ranks that load it."""
        assert isinstance(self.program, Program)
        try:
            self.program.metadata["memory"] = memory_of_code(code, self.program).to_json()
        except ValueError as error:
            self.program.metadata["memory_unknown"] = str(error)


class WantedSection(Wanted):
    """A section that this rank has to load or compile. It is called with a list."""

    def load_callable(self, payload: bytes) -> Callable[..., Any]:
        return load_boxed(payload)

    def make_callable(self, call: Callable[..., Any], payload: bytes | None) -> Callable[..., Any]:
        return (lambda taken: call(*taken)) if payload is None else load_boxed(payload)

    def note_code(self, code: list[str]) -> None:
        """Keep the code: when a section's memory is freed depends on what its caller holds."""
        self.program.metadata["code"] = code


def _identify_host() -> str:
    """A text that is equal for processes of one machine, and for no others."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = str(uuid.getnode())
    return f"{platform.node()} {started}"


# -- errors ----------------------------------------------------------------------------------------


def _describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
