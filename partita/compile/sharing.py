"""Which inputs of a graph lie in the same memory, so that what is written to one changes another?

A graph takes its inputs for values of their own. Views of one storage are that as long as nobody
writes them, or where they do not overlap; else the step would not do what it does eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Fix

from .errors import CaptureError, not_captured
from .program import Input, Program

__all__ = ["Sharing"]


_OF_THE_CALL = ("parameter", "buffer", "optimizer", "value", "argument")


class Sharing:
    """Looks at the tensors of each call of a program."""

    def __init__(self, program: Program):
        self.program = program
        self._arguments = [i.index for i in program.inputs if i.kind == "argument"]
        # Arguments that are written, and the memory of state with which an argument has to do.
        self._given_to = [i for i in program.written if program.inputs[i].kind == "argument"]
        self._held: set[int] = set()

    def may(self, tensors: Sequence[Any]) -> bool:
        """Might arguments of a call share memory that is written? A look at the arguments only."""
        if not self.program.written:
            return False
        with Local():
            starts = [tensors[i].untyped_storage()._cdata for i in self._arguments]
        if not self._held.isdisjoint(starts):
            return True
        return bool(self._given_to) and len(set(starts)) < len(starts)

    def refused(self, tensors: Sequence[Any]) -> CaptureError | None:
        """What to raise where an input that is written overlaps another."""
        program = self.program
        written = {id(program.inputs[i]) for i in program.written}
        by_storage: dict[int, list[tuple[int, int, Input]]] = {}
        self._held.clear()
        for given in program.inputs:
            if given.kind not in _OF_THE_CALL:
                continue
            with Local():
                t = tensors[given.index]
                start = t.untyped_storage()._cdata  # torch has no public name for a storage
                first, end = _span(t)
            if given.kind != "argument" and (self._given_to or id(given) in written):
                self._held.add(start)
            if end > first:
                by_storage.setdefault(start, []).append((first, end, given))
        for there in by_storage.values():
            there.sort(key=lambda one: one[:2])
            for i, (_, end, one) in enumerate(there):
                for first, _, other in there[i + 1 :]:
                    if first >= end:
                        break
                    if written & {id(one), id(other)}:
                        return _shared(one, other, id(one) in written)
        return None


def _span(t: torch.Tensor) -> tuple[int, int]:
    """The elements of its storage between which a tensor lies, the last one excluded."""
    first = t.storage_offset()
    if not t.numel():
        return first, first
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (first + last + 1) * t.element_size()


def _shared(one: Input, other: Input, is_written: bool) -> CaptureError:
    return not_captured(
        f"{one.name} and {other.name} lie in the same memory",
        f"the step writes {(one if is_written else other).name}, and in a graph the other would "
        "not change with it",
        Fix(f"{other.name}.clone()", "where it is made, for memory of its own"),
    )
