"""Which rank compiles a program, and how do the others come by it?

What is in the store is loaded. Of the ranks of one host that find nothing there the first compiles
and puts the result into the store, and the others wait and load it. Where a store cannot serve,
each compiles for itself. No rank is left behind: where one fails, all raise the same error.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from partita.comm import Wire, gather_texts, user_line
from partita.layout import Fix, LayoutError

from .lower import compiled, load, made_for
from .phases import begin_phase
from .program import Program
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
    """

    call: Callable[..., Sequence[torch.Tensor]]
    loaded: bool
    seconds: float
    key: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{'loaded' if self.loaded else 'compiled'} in {self.seconds:.1f} s"


def build(program: Program, what: str, wires: Iterable[Wire]) -> Built:
    """Compile a program, or load it. All ranks of `wires` call this at the same time.

    Args:
        program: the same on all ranks, with its key.
        what: the program, as a person would say it.
        wires: those of the program.

    Raises:
        LayoutError: it could not be compiled on some rank; the same on all ranks of its wires.
    """
    wires = sorted(wires, key=lambda w: -w.mesh.size())
    begin_phase("compile")
    rank = _Rank(program, what)
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
    begin_phase("graph")
    return rank.built


class _Rank:
    """What this rank does to have a program.

    Attributes:
        built: what it has, if anything.
        error: what it could not do; then it does nothing more.
    """

    def __init__(self, program: Program, what: str):
        self.program, self.what = program, what
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
            call = load(found.payload)
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
        call, payload = compiled(self.program)
        seconds = time.perf_counter() - begin
        metadata = _facts(self.program, self.what) | {"seconds": seconds, **self.program.metadata}
        if payload is not None:
            self.store.put(self.key, Artifact(payload, metadata))
        self.built = Built(call, False, seconds, self.key, metadata)

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
