"""A rank of a calibration: it makes the calls of the deck, and collectives between them."""

from __future__ import annotations

import json
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from partita.comm import GroupWire, Request, Wire, init_device_mesh, join, wire_of
from partita.comm.device import HOST
from partita.comm.splits import Splits

from .collective_time import collective_bytes
from .kernel_deck import DeckCall, draw_order, make_deck

__all__ = ["main"]

_SECONDS = 20.0  # of all passes
_KEPT = 4  # results of the last calls, as a step keeps what others read
_ELEMENTS = (64, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21)  # of four bytes, of a collective


@dataclass(frozen=True)
class _Meeting:
    """A collective that is measured: its kind, its group's ranks, the bytes that each sends."""

    kind: str
    ranks: int
    nbytes: float
    run: Callable[[], object]


def main() -> None:
    """Measure as one of the ranks, and print what was found as a line of JSON."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        join()
    with torch.no_grad():
        print(json.dumps(_measure(ranks)), flush=True)


def _measure(ranks: int) -> dict[str, Any]:
    deck, meetings = make_deck(), _make_meetings(ranks)
    draw = random.Random(0)  # the same order on all ranks
    seconds: list[list[float]] = [[] for _ in deck]
    met: list[dict[str, Any]] = []
    _run_pass(deck, meetings, draw, seconds, met)
    passes = _agree_on_passes(_run_pass(deck, meetings, draw, seconds, met), ranks)
    for one in seconds:
        one.clear()  # what the first calls prepare is no part of the later ones
    met.clear()
    for _ in range(passes):
        _run_pass(deck, meetings, draw, seconds, met)
    kernels = [
        {"rate": call.rate, "amount": call.amount, "seconds": found}
        for call, found in zip(deck, seconds, strict=True)
    ]
    return {"kernels": kernels, "collectives": met}


def _run_pass(
    deck: Sequence[DeckCall],
    meetings: Sequence[_Meeting],
    draw: random.Random,
    seconds: list[list[float]],
    met: list[dict[str, Any]],
) -> float:
    """All calls and all collectives once; returns the seconds of the pass."""
    began = time.perf_counter()
    order = draw_order(deck, draw)
    turns = draw.sample(meetings, len(meetings))
    every = -(-len(order) // (len(turns) or 1))
    kept: deque[Any] = deque(maxlen=_KEPT)
    for place, number in enumerate(order):
        if turns and place % every == 0:
            met.append(_time_meeting(turns.pop()))
        start = time.perf_counter()
        result = deck[number].run()
        seconds[number].append(time.perf_counter() - start)
        kept.append(result)
    return time.perf_counter() - began


def _time_meeting(meeting: _Meeting) -> dict[str, Any]:
    start = time.perf_counter()
    meeting.run()
    end = time.perf_counter()
    told = {"kind": meeting.kind, "ranks": meeting.ranks, "nbytes": meeting.nbytes}
    return {**told, "start": start, "end": end}


def _agree_on_passes(seconds: float, ranks: int) -> int:
    """As many as all ranks have time for."""
    if ranks > 1:
        wire = wire_of(init_device_mesh(HOST.type, (ranks,), mesh_dim_names=("all",)))
        told = wire.gather_ints((round(seconds * 1e6),))
        seconds = max(microseconds for (microseconds,) in told) * 1e-6
    return max(3, int(_SECONDS / seconds))


# -- collectives -----------------------------------------------------------------------------------


def _make_meetings(ranks: int) -> list[_Meeting]:
    """Collectives of all ranks, and of as many as each smaller axis of a mesh may have."""
    found = []
    for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
        mesh = init_device_mesh(
            HOST.type, (ranks // size, size), mesh_dim_names=("others", "group")
        )
        wire = cast(GroupWire, wire_of(mesh))
        wire.process_group(("group",))
        for elements in _ELEMENTS:
            found += _meetings_of(wire, ("group",), size, elements)
    return found


def _meetings_of(wire: Wire, axes: tuple[str, ...], ranks: int, elements: int) -> list[_Meeting]:
    """One of each kind that graphs have, as they are run there."""
    x = torch.ones(elements)
    part, each = x[: elements // ranks].clone(), Splits.evenly(ranks, elements // ranks)

    def gather() -> torch.Tensor:
        out = part.new_empty(part.numel() * ranks)
        wire.gather(out, part, axes, Request("all_gather", None, "calibrate"))
        return out

    def exchange() -> torch.Tensor:
        out = torch.empty_like(x)
        wire.all_to_all(out, x, axes, each, each, Request("all_to_all", None, "calibrate"))
        return out

    def reduce() -> torch.Tensor:
        return wire.all_reduce(x.clone(), axes, "sum", Request("all_reduce", None, "calibrate"))

    calls = {"all_gather": gather, "all_to_all": exchange, "all_reduce": reduce}
    whole = 4.0 * part.numel() * ranks
    return [
        _Meeting(kind, ranks, collective_bytes(kind, ranks, whole), run)
        for kind, run in calls.items()
    ]


if __name__ == "__main__":
    main()
