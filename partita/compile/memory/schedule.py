"""Memory schedules: each buffer of a captured step, with where it is made and where it is freed.

A place is a node of the graph where the step runs node by node (`storages.memory_of`), or a line of
the generated code where Inductor compiled it (`codegen_memory`). Either way the schedule, and with
it the peak, is known before anything runs, and is the same on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from partita.comm.ledger import human

_SHOWN = 12  # rows of a printed table


@dataclass(frozen=True)
class Buffer:
    """Memory that a step allocates and frees.

    Attributes:
        name: of the node, or of the variable in generated code, that made it.
        nbytes: of the whole storage, on a rank.
        birth: the place at which it is allocated.
        death: the first place at which it is freed.
        views: the names of other nodes that show the same memory.
        made_by: the operator.
        source: the user's "file:line".
        phase: "forward", "backward" or "update".
        layout: of the DTensor that it is, or "".
        reason: of the move that made it: "gather", "regather", "gradient", or "".
        passing: whether it is a workspace, which a kernel frees before it returns.
    """

    name: str
    nbytes: int
    birth: int
    death: int
    views: tuple[str, ...] = ()
    made_by: str = ""
    source: str = ""
    phase: str = ""
    layout: str = ""
    reason: str = ""
    passing: bool = False


@dataclass(frozen=True)
class HeldInput:
    """Memory of an input, which is allocated before and after the step.

    Attributes:
        name: of the input, in messages.
        kind: of the input, as in `program.Input`.
        nbytes: of its storage, on a rank; 0 where another input has the same.
        written: whether the step writes it in place.
    """

    name: str
    kind: str
    nbytes: int
    written: bool = False


@dataclass(frozen=True)
class Memory:
    """The schedule of a step's memory on one rank; print it for what holds the peak.

    Attributes:
        places: the text of what runs at each place.
        buffers: what the step allocates, in order of birth.
        held: its inputs.
    """

    places: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    held: tuple[HeldInput, ...]

    @cached_property
    def live(self) -> list[int]:
        """For each place the bytes of the step's buffers that are allocated while it runs."""
        return self.live_of(lambda buffer: True)

    def live_of(self, counts: Callable[[Buffer], bool]) -> list[int]:
        """`live`, counting only the buffers for which `counts` returns true."""
        change = [0] * (len(self.places) + 1)
        for buffer in self.buffers:
            if counts(buffer):
                change[buffer.birth] += buffer.nbytes
                change[min(buffer.death, len(self.places))] -= buffer.nbytes
        total, found = 0, []
        for more in change[:-1]:
            total += more
            found.append(total)
        return found

    @cached_property
    def peak(self) -> int:
        """The most bytes of buffers at once, the inputs not counted."""
        return max(self.live, default=0)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of the inputs: parameters, the optimizer's state, arguments."""
        return sum(h.nbytes for h in self.held)

    @property
    def total_peak(self) -> int:
        """The most bytes at once, the inputs counted."""
        return self.peak + self.held_bytes

    @cached_property
    def peak_place(self) -> int:
        """The first place of the peak."""
        return self.live.index(self.peak) if self.live else 0

    def at(self, place: int) -> list[Buffer]:
        """The buffers that are allocated at a place, biggest first."""
        found = [b for b in self.buffers if b.birth <= place < b.death]
        return sorted(found, key=lambda b: (-b.nbytes, b.birth))

    # -- for people and for files ------------------------------------------------------------------

    def __str__(self) -> str:
        place = self.peak_place
        at = self.places[place] if self.places else "nothing"
        lines = [
            f"peak {human(self.peak)} above {human(self.held_bytes)} of inputs, at {at} "
            f"({place + 1} of {len(self.places)})"
        ]
        here = self.at(place)
        rows = [_make_row(buffer) for buffer in here[:_SHOWN]]
        if rows:
            widths = [max(len(row[i]) for row in rows) for i in range(5)]
            for row in rows:
                cells = [row[0].rjust(widths[0])]
                cells += [c.ljust(w) for c, w in zip(row[1:5], widths[1:], strict=True)]
                lines.append("  " + "  ".join([*cells, row[5]]).rstrip())
        if len(here) > _SHOWN:
            rest = sum(b.nbytes for b in here[_SHOWN:])
            lines.append(f"  {human(rest)} in {len(here) - _SHOWN} smaller ones")
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Memory:
        """What `to_json` wrote. Raises ValueError where it is something else."""
        try:
            found = json.loads(text)
            return cls(
                tuple(found["places"]),
                tuple(Buffer(**{**b, "views": tuple(b["views"])}) for b in found["buffers"]),
                tuple(HeldInput(**h) for h in found["held"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no schedule of memory: {error}") from error


def _make_row(buffer: Buffer) -> tuple[str, ...]:
    why = " ".join(filter(None, (buffer.phase, buffer.reason)))
    if buffer.passing:
        why += " (within the kernel)"
    return (human(buffer.nbytes), buffer.name, buffer.made_by, buffer.layout, why, buffer.source)
