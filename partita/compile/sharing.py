"""Shared memory of inputs: does an input that a program writes overlap another input?

To a graph its inputs are separate values. Views of one storage are, too, as long as none of them is
written or they do not overlap; else the graph would not do what the step does in eager.
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
    """Finds overlapping inputs in the calls of one program."""

    def __init__(self, program: Program):
        self.program = program
        self._arguments = [i.index for i in program.inputs if i.kind == "argument"]
        # Written arguments; state, with whether it may conflict with an argument; the storages of
        # the state that may.
        self._given_to = [i for i in program.written if program.inputs[i].kind == "argument"]
        self._written = set(program.written)
        self._state = [
            (given.index, bool(self._given_to) or i in self._written)
            for i, given in enumerate(program.inputs)
            if given.kind in _OF_THE_CALL and given.kind != "argument"
        ]
        self._held: set[int] = set()
        self._overlaps = False

    def may_overlap(self, tensors: Sequence[Any]) -> bool:
        """May arguments of a call share memory that is written? Looks at the arguments alone."""
        if not self.program.written:
            return False
        with Local():
            starts = [tensors[i].untyped_storage()._cdata for i in self._arguments]
        if self._overlaps or not self._held.isdisjoint(starts):
            return True
        return bool(self._given_to) and len(set(starts)) < len(starts)

    def note_held(self, tensors: Sequence[Any]) -> None:
        """Note the storages of the state, which may have been exchanged since the last call."""
        with Local():
            starts = [tensors[index].untyped_storage()._cdata for index, _ in self._state]
        self._held = {s for s, (_, near) in zip(starts, self._state, strict=True) if near}
        together = len(set(starts)) < len(starts)
        self._overlaps = together and self.find_error(tensors) is not None

    def find_error(self, tensors: Sequence[Any]) -> CaptureError | None:
        """The error to raise where a written input overlaps another; None where none does."""
        program = self.program
        written = {id(program.inputs[i]) for i in self._written}
        by_storage: dict[int, list[tuple[int, int, Input]]] = {}
        for given in program.inputs:
            if given.kind not in _OF_THE_CALL:
                continue
            with Local():
                t = tensors[given.index]
                start = t.untyped_storage()._cdata  # torch has no public name for a storage
                first, end = _span_of_bytes(t)
            if end > first:
                by_storage.setdefault(start, []).append((first, end, given))
        for there in by_storage.values():
            there.sort(key=lambda one: one[:2])
            for i, (_, end, one) in enumerate(there):
                for first, _, other in there[i + 1 :]:
                    if first >= end:
                        break
                    if written & {id(one), id(other)}:
                        return _make_sharing_error(one, other, id(one) in written)
        return None


def _span_of_bytes(t: torch.Tensor) -> tuple[int, int]:
    """The range of bytes in its storage that a tensor spans: first, and end (excluded)."""
    first = t.storage_offset()
    if not t.numel():
        return first, first  # type: ignore[return-value]
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (first + last + 1) * t.element_size()  # type: ignore[return-value]


def _make_sharing_error(one: Input, other: Input, is_written: bool) -> CaptureError:
    return not_captured(
        f"{one.name} and {other.name} lie in the same memory",
        f"the step writes {(one if is_written else other).name}, and in a graph the other would "
        "not change with it",
        Fix(f"{other.name}.clone()", "where it is made, for memory of its own"),
    )
