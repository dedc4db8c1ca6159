"""Turns of ranks that compile: which rank compiles what, and how do the others come by it?

What is in the store is loaded. Of the ranks of one host that find something not there one compiles
it and puts the result into the store, and the others wait and load it; where there are several such
things, they do that at once. Where a store cannot serve, each compiles for itself. No rank is left
behind: where one fails, all raise the same error.
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
from .built import Built
from .inductor import compiled, digest_of_compiler, load, load_boxed
from .sections import Section
from .store import Artifact, Store, default_store

__all__ = ["Wanted", "WantedSection", "have_all"]


def have_all(wanted: Sequence[Wanted], wires: Sequence[Wire]) -> list[Built]:
    """What is wanted, after all ranks of the wires have come by it. They all call this.

    Args:
        wanted: the same on all ranks, in the same order.
        wires: the widest first.

    Raises:
        LayoutError: something could not be compiled on some rank; the same on all.
    """
    for one in wanted:
        one.attempt(one.load)
    turns = _assign_turns(wanted, wires[0]) if wires else [0] * len(wanted)
    for one, turn in zip(wanted, turns, strict=True):
        if turn == 0:
            one.attempt(one.compile)
    _raise_together(wanted, wires)
    for one, turn in zip(wanted, turns, strict=True):
        if turn > 0:
            one.attempt(one.load)
            one.attempt(one.compile)
    _raise_together(wanted, wires)
    return [one.built for one in wanted if one.built is not None]


def _assign_turns(wanted: Sequence[Wanted], wire: Wire) -> list[int]:
    """Of each, which this rank is among those of its host that have it not; -1 if it is none.

    The first is another rank for the next: so they have each as many to compile.
    """
    keys = " ".join(one.key for one in wanted)
    place = f"{_identify_host()} {keys} {wanted[0].store and wanted[0].store.folder}"
    host = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
    told = wire.gather_ints((host, *(int(one.is_missing) for one in wanted)))
    found = []
    for i in range(len(wanted)):
        without = [r for r, (where, *missing) in enumerate(told) if where == host and missing[i]]
        mine = wire.rank in without
        found.append((without.index(wire.rank) - i) % len(without) if mine else -1)
    return found


def _raise_together(wanted: Sequence[Wanted], wires: Sequence[Wire]) -> None:
    """Raise if a rank has failed, on all ranks of the wires that it is in."""
    error = next((one.error for one in wanted if one.error is not None), None)
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
        self.attempt(self._find_key_and_store)

    def _find_key_and_store(self) -> None:
        devices = {x.device for x in self.program.example()}
        self.key = f"{self.program.key}-{digest_of_compiler(devices)}"
        self.store = default_store()

    @property
    def is_missing(self) -> bool:
        """Has this rank to come by it?"""
        return self.built is None and self.error is None

    def attempt(self, do: Callable[[], None]) -> None:
        """Do it, if that is still of use. Other ranks are waiting: an error is kept for them."""
        if self.is_missing:
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
            call = self.load_callable(found.payload)
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
        call = self.make_callable(call, payload)
        seconds = time.perf_counter() - begin
        metadata = self.facts | {"seconds": seconds, **self.program.metadata}
        if payload is not None:
            self.store.put(self.key, Artifact(payload, metadata))
        self.built = Built(call, False, seconds, self.key, metadata)

    def load_callable(self, payload: bytes) -> Callable[..., Any]:
        """What runs, of what was compiled in some process."""
        return load(payload)

    def make_callable(self, call: Callable[..., Any], payload: bytes | None) -> Callable[..., Any]:
        """What runs, of what was compiled in this one."""
        return call

    def note(self, code: list[str]) -> None:
        """Keep beside the program what its code allocates: other ranks only load it."""
        assert isinstance(self.program, Program)
        try:
            self.program.metadata["memory"] = memory_of_code(code, self.program).to_json()
        except ValueError as error:
            self.program.metadata["memory_unknown"] = str(error)


class WantedSection(Wanted):
    """What this rank does to have a section, which is called with a list."""

    def load_callable(self, payload: bytes) -> Callable[..., Any]:
        return load_boxed(payload)

    def make_callable(self, call: Callable[..., Any], payload: bytes | None) -> Callable[..., Any]:
        return (lambda taken: call(*taken)) if payload is None else load_boxed(payload)

    def note(self, code: list[str]) -> None:
        """Keep the code: what a section allocates hangs on what its caller still holds."""
        self.program.metadata["code"] = code


def _identify_host() -> str:
    """What ranks that share a machine and its files have in common, and no others."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = str(uuid.getnode())
    return f"{platform.node()} {started}"


# -- errors ----------------------------------------------------------------------------------------


def _describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
