"""Origins: which call of the program made a tensor. Ranks compare this when they read a value.

If one rank reads `a.sum()` while another reads `b.sum()`, the values that they exchange look alike.
So ranks that read a value also compare the tensor's origin, a hash that is equal on all ranks for
the same tensor.

A program gets its first tensors from `distribute_tensor`, `from_local`, `distribute_batch` or a
compiled step, which all ranks call. The origin of such a tensor is the line of the call, and how
often it ran before. The origin of an op's result consists of the line of the call, the origins of
its operands, and its numbers. It does not count calls, because a rank may compute a sum by itself.

Origins of results are recorded only for small Partial or sharded ones (`Spec.has_noted_origin`),
such as sums, means and norms. So if one call makes two sums of larger results and ranks read a
different one each, that is not detected.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from partita.comm import (
    Reading,
    Wire,
    digest_of_text,
    find_user_frame,
    first_instruction,
    is_alone,
)

from .tensor_state import Args, Function, Kwargs, Spec

ORIGIN = "_origin"
"""The name of the attribute that holds a tensor's `TensorOrigin`."""
_MASK = (1 << 62) - 1
_FACTOR = 1000003


@dataclass(eq=False)
class TensorOrigin:
    """Which call of the program made a tensor, to compare across ranks.

    Attributes:
        number: a hash that is equal on all ranks for the same tensor, and differs between tensors.
        code, at: the code that makes the call, and the offset of its instruction.
        times: the number of the call, among the calls of this instruction that made a tensor, from
            1. It is 0 for the result of an op, because calls of ops are not counted.
    """

    number: int
    code: CodeType
    at: int
    times: int

    @functools.cached_property
    def gradient(self) -> TensorOrigin:
        """The origin of the gradient of a tensor with this origin."""
        return TensorOrigin(self.number ^ 1, self.code, self.at, self.times)

    def __str__(self) -> str:
        place = f"made at {_describe_place(self.code, self.at)}"
        return f"{place}, call {self.times}" if self.times else place


@functools.lru_cache(1 << 10)
def _describe_place(code: CodeType, at: int) -> str:
    line, _, column, _ = list(code.co_positions())[at // 2]
    place = f"{os.path.basename(code.co_filename)}:{line}"
    return place if column is None else f"{place}:{column + 1}"  # two calls may stand in one line


@functools.lru_cache(1 << 14)
def _digest_of_place(code: CodeType, at: int) -> int:
    name = os.path.basename(code.co_filename)
    # Lambdas in one line, and text that is run by `exec`, differ in these alone. A module's differ
    # between ranks: the text of `python -c` may name the rank.
    column = list(code.co_positions())[at // 2][2]
    constants = () if code.co_name == "<module>" else code.co_consts
    numbers = [c for c in constants if isinstance(c, (int, float, str))]
    return digest_of_text(f"{name}:{code.co_firstlineno}:{code.co_name}:{at}:{column}:{numbers}")


def note_origin(out: torch.Tensor, wire: Wire) -> None:
    """Records the user's current call as the origin of `out`. All ranks must make this call.

    Args:
        wire: the wire of `out`, which counts the calls of each line.
    """
    code, at = _find_call(sys._getframe(1))
    place = _digest_of_place(code, at)
    times = wire.sites[place] = wire.sites.get(place, 0) + 1
    out.__dict__[ORIGIN] = TensorOrigin((place * 31 + times) & _MASK, code, at, times)


def _find_call(frame: FrameType) -> tuple[CodeType, int]:
    frame = find_user_frame(frame)
    return frame.f_code, first_instruction(frame.f_code, frame.f_lasti)


def _digest_arguments(given: Iterable[Any], number: int) -> int:
    """Returns `number` combined with a call's arguments: origins, numbers and strings."""
    for x in given:
        if x is None:
            found = 0
        elif isinstance(x, torch.Tensor):
            made = find_origin(x)
            found = 0 if made is None else made.number
        elif isinstance(x, (int, float)):
            found = hash(x) if x == x else 1  # of a NaN, by its identity
        elif isinstance(x, str):
            found = zlib.crc32(x.encode())
        elif isinstance(x, slice):
            found = _digest_arguments((x.start, x.stop, x.step), 1)
        elif isinstance(x, (tuple, list)):
            found = _digest_arguments(x, 1)
        else:
            found = 0
        number = (number * _FACTOR ^ found) & _MASK
    return number


def note_gradient(grad: torch.Tensor, x: torch.Tensor) -> None:
    """Record the origin of x's gradient `grad`, if the origin of `x` is known."""
    made: TensorOrigin | None = x.__dict__.get(ORIGIN)
    if made is not None:
        grad.__dict__[ORIGIN] = made.gradient


class NotingKernel:
    """A local kernel that also records which call of the user's program made its results.

    Args:
        kernel: the kernel that makes the results.
        keeps_origin: True if the results get the origin of their operand (see `note_origins_of`).
    """

    __slots__ = ("_keeps_origin", "_kernel")

    def __init__(self, kernel: Function, keeps_origin: bool):
        self._kernel, self._keeps_origin = kernel, keeps_origin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._kernel(*args, **kwargs)
        note_origins_of(out, args, kwargs, self._keeps_origin, sys._getframe(1))
        return out


def note_origins_of(
    out: Any, args: Args, kwargs: Kwargs, keeps_origin: bool, frame: FrameType
) -> None:
    """Records the user's call, found from `frame`, as the origin of each new tensor in `out`.

    Args:
        args, kwargs: the arguments of the op that returned `out`.
        keeps_origin: True if the results get the operand's origin. This is for functions that
            return a view or a conversion. On some ranks the result may be the operand itself, for
            example `contiguous` of a single row.
        frame: the Python frame from which the search for the user's call begins.
    """
    given = (*args, *kwargs.values()) if kwargs else args
    made = None
    if keeps_origin:
        kept = next((x for x in given if isinstance(x, torch.Tensor)), None)
        made = None if kept is None else find_origin(kept)
    several = isinstance(out, (tuple, list))
    for i, x in enumerate(out if several else (out,)):
        if not isinstance(x, torch.Tensor) or ORIGIN in x.__dict__:
            continue
        if not keeps_origin:
            if made is None:
                code, at = _find_call(frame)
                number = _digest_arguments(given, _digest_of_place(code, at))
                made = TensorOrigin(number, code, at, 0)
            number = made.number + i & _MASK
            x.__dict__[ORIGIN] = TensorOrigin(number, made.code, made.at, 0)
        elif made is not None:
            x.__dict__[ORIGIN] = made


def find_origin(x: torch.Tensor) -> TensorOrigin | None:
    """Returns the origin of the tensor `x`, or None if it was not recorded."""
    made: TensorOrigin | None = x.__dict__.get(ORIGIN)
    return made


def describe_reading(x: torch.Tensor, op: str, spec: Spec, verb: str = "reads") -> Reading:
    """Returns a description of a read such as `x.item()`, which ranks compare before it.

    If the descriptions differ, the ranks read different tensors, and an error names both.

    Args:
        op: the function that reads.
        spec: the spec of `x`.
        verb: the verb for the error, after the name of a rank.
    """
    made, layout = find_origin(x), f"{str(x.dtype).removeprefix('torch.')} {spec.layout.brief()}"
    if made is None:
        return Reading(op, layout, verb=verb)
    return Reading(op, layout, f"{made.number:x}", made, verb)


def is_beside_program(wire: Wire) -> bool:
    """True in a thread other than the main one, if ranks of `wire` wait for each other.

    There ranks must not compare what they read: exchanges of several threads could be mixed up.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return bool(wire.ranks_to_wait_for) and not is_main


def is_compared_when_moved(before: Spec, after: Spec, op: str, reason: str) -> bool:
    """True if ranks compare a tensor's origins before they redistribute it to the spec `after`.

    They compare small tensors, and all tensors in `full_tensor`, if the move needs all ranks of the
    mesh. They do not compare gradients, tensors that collectives in a stream move, and tensors that
    `Wire.reading` compares. Only the main thread compares, because exchanges of several threads
    could be mixed up.

    Args:
        op, reason: the op that needs the redistribution, and why, as for the ledger.
    """
    wire = before.wire
    if reason == "gradient" or wire.runs_in_streams or wire.is_reading:
        return False
    if is_beside_program(wire):
        return False
    if not (before.has_noted_origin or op == "full_tensor") or is_alone(wire):
        return False
    parted = [(before.layout.placement(a), after.layout.placement(a)) for a in wire.mesh.names]
    return all(x != y and (x.is_shard() or x.is_partial()) for x, y in parted)
