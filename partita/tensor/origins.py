"""Origins: which call of the program made a tensor, so that ranks that read a value can compare it.

A rank that reads `a.sum()` while another reads `b.sum()` exchanges values that look alike. So what
the ranks of a mesh bring to a read has the place of the call that made the tensor, and how often
that place had been reached. Both are equal on all ranks for the same tensor, whatever else a rank
computes by itself.

It is noted where a tensor enters the program (`distribute_tensor`, `from_local`, batches, compiled
steps) and for small results of which no rank has the value (`Spec.has_noted_origin`): sums, means,
norms. Larger ones cost nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from partita.comm import (
    Reading,
    Wire,
    digest_of_text,
    find_user_frame,
    first_instruction,
    is_alone,
)

from .tensor_state import Args, Function, Kwargs, Spec, state_of

_ATTRIBUTE = "_origin"
_MASK = (1 << 62) - 1
_SITES_KEPT = 1 << 14


class TensorOrigin(NamedTuple):
    """The call that made a tensor.

    Attributes:
        number: the same on all ranks for one tensor, and different for different tensors.
        code, at: of the call, an instruction of some code.
        times: how often it had been made by then.
    """

    number: int
    code: CodeType
    at: int
    times: int

    def of_gradient(self) -> TensorOrigin:
        """The origin of the gradient of this tensor."""
        return TensorOrigin(self.number ^ 1, self.code, self.at, self.times)

    def __str__(self) -> str:
        line, _, column, _ = list(self.code.co_positions())[self.at // 2]
        place = f"{os.path.basename(self.code.co_filename)}:{line}"
        if column is not None:  # two calls may stand in one line
            place += f":{column + 1}"
        return f"made at {place}, call {self.times}"


def note_origin(
    out: torch.Tensor, wire: Wire, operands: Sequence[Any] = (), frame: FrameType | None = None
) -> None:
    """Note that the calling line of the program has made `out`, of these operands."""
    frame = find_user_frame(frame or sys._getframe(1))
    code = frame.f_code
    at = first_instruction(code, frame.f_lasti)
    sites = wire.sites
    site = sites.get((code, at))
    if site is None:
        if len(sites) >= _SITES_KEPT:
            sites.clear()  # on all ranks at once, since they have as many
        name = os.path.basename(code.co_filename)
        text = f"{name}:{code.co_firstlineno}:{code.co_name}:{at}"
        site = sites[code, at] = [digest_of_text(text), 0]
    site[1] += 1
    number = site[0] * 31 + site[1]
    for x in operands:
        if isinstance(x, torch.Tensor) and (made := find_origin(x)) is not None:
            number = number * 1000003 ^ made.number
    out.__dict__[_ATTRIBUTE] = TensorOrigin(number & _MASK, code, at, site[1])


def note_gradient(grad: torch.Tensor, made: TensorOrigin | None) -> None:
    """Note that `grad` is the gradient of a tensor of this origin, if that is known."""
    if made is not None:
        grad.__dict__[_ATTRIBUTE] = made.of_gradient()


class NotingKernel:
    """A kernel whose results have their origin noted; see `note_origins_of`."""

    __slots__ = ("_keeps_origin", "_kernel", "_wire")

    def __init__(self, kernel: Function, wire: Wire, keeps_origin: bool):
        self._kernel, self._wire, self._keeps_origin = kernel, wire, keeps_origin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._kernel(*args, **kwargs)
        note_origins_of(out, self._wire, args, kwargs, self._keeps_origin, sys._getframe(1))
        return out


def note_origins_of(
    out: Any, wire: Wire, args: Args, kwargs: Kwargs, keeps_origin: bool, frame: FrameType
) -> None:
    """`note_origin` of each new tensor of a result.

    Args:
        keeps_origin: the function shows its operand or converts it. It may return the operand
            itself on some ranks only (`contiguous` where one row is left), so that its results have
            the operand's origin on all ranks.
    """
    given = (*args, *kwargs.values()) if kwargs else args
    kept = next((x for x in given if isinstance(x, torch.Tensor)), None) if keeps_origin else None
    made = None if kept is None else find_origin(kept)
    for x in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(x, torch.Tensor) and _ATTRIBUTE not in x.__dict__:
            if not keeps_origin:
                note_origin(x, wire, given, frame)
            elif made is not None:
                x.__dict__[_ATTRIBUTE] = made


def find_origin(x: torch.Tensor) -> TensorOrigin | None:
    """The origin of a tensor, where it was noted; of a gradient, that of whose gradient it is."""
    made: TensorOrigin | None = x.__dict__.get(_ATTRIBUTE)
    if made is not None or (reference := state_of(x).gradient_of) is None:
        return made
    owner = reference()
    made = None if owner is None else owner.__dict__.get(_ATTRIBUTE)
    return None if made is None else made.of_gradient()


def describe_reading(x: torch.Tensor, op: str, spec: Spec, verb: str = "reads") -> Reading:
    """What ranks compare of a value of `spec` that the program reads by `op`."""
    made, layout = find_origin(x), f"{str(x.dtype).removeprefix('torch.')} {spec.layout.brief()}"
    if made is None:
        return Reading(op, layout, verb=verb)
    return Reading(op, layout, f"{made.number:x}", made, verb)


def is_compared_when_moved(before: Spec, after: Spec, op: str, reason: str) -> bool:
    """True if the ranks compare which tensor they move: a small one, or one that all get whole.

    Only where all ranks of the mesh take part, and collectives block the processor anyhow. Not in
    a thread beside the program's: other ranks would take its wait for that of the whole rank.
    """
    wire = before.wire
    if reason == "gradient" or wire.runs_in_streams or wire.is_reading:
        return False
    if wire.ranks_to_wait_for and threading.current_thread() is not threading.main_thread():
        return False
    if not (before.has_noted_origin or op == "full_tensor") or is_alone(wire):
        return False
    parted = [(before.layout.placement(a), after.layout.placement(a)) for a in wire.mesh.names]
    return all(x != y and (x.is_shard() or x.is_partial()) for x, y in parted)
