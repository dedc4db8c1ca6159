"""The control group of a mesh: a process group of all its ranks, apart from those that carry
tensors, on which ranks compare what they do and read values.

Each message begins with a digest of its reason, so it cannot be taken for a message of another
kind, nor for a tensor. A rank that comes alone waits, and the ranks that are elsewhere are named
(`deadlock`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta

import torch

from partita.layout import Fix, LayoutError

from .backends.control import rendezvous_group
from .deadlock import BEGUN, Need
from .messages import hash_text
from .presence import describe_process, make_lost_rank_error, remember_processes
from .source import user_line
from .tensor_bytes import copy_bytes
from .waiting import SLICE, timeout_of_job, wait_longer

__all__ = ["ControlGroup"]

_HEAD = struct.Struct("<8sq")
"""The digest of the reason, and the length of the payload in bytes."""
_SLICE = timedelta(seconds=SLICE)
_INLINE = 112
"""Bytes of the payload that fit in the first message; a longer payload takes a second one."""
_MESSAGE = _HEAD.size + _INLINE


class ControlGroup:
    """One rank's end of the control group of a mesh of more than one rank.

    All ranks make it together: in `init_device_mesh`, or at their first exchange.
    """

    def __init__(self, name: str, ranks: Sequence[int]):
        """Args:
        name: equal on all ranks of the mesh, and of no other mesh.
        ranks: of the mesh, in mesh order, by their numbers in the job.
        """
        self._name, self._ranks = f"partita/control/{name}", list(ranks)
        why = "makes the control group of a mesh"
        try:
            self._group = rendezvous_group(self._name, self._ranks, timeout_of_job())
        except RuntimeError as error:
            if (gone := make_lost_rank_error(error, _append_user_line(why), self._ranks)) is None:
                raise
            raise gone from error
        BEGUN[self._name] = 0
        # A rank that ended now would close connections that slower ranks have yet to accept.
        remember_processes(self._ranks, self.exchange(why, describe_process()))

    def exchange(
        self, why: str, mine: bytes, deadline: float | None = None, place: str = ""
    ) -> list[bytes]:
        """Every rank's payload `mine`, in mesh order, if all ranks come for the same reason.

        Args:
            why: the reason, which must be equal on all ranks: "compares from_local".
            deadline: seconds to wait for ranks of which nothing is known; by default the timeout of
                `init_process_group`.
            place: the line at which all must be, where that matters.

        Raises:
            LayoutError: on all ranks, naming two with different reasons, or the ranks that do not
                come.
        """
        head = _HEAD.pack(hash_text(why + place, 8), len(mine))
        rows = self._gather((head + mine).ljust(_MESSAGE)[:_MESSAGE], why, deadline)
        heads = [_HEAD.unpack_from(row) for row in rows]
        if any(digest != heads[0][0] for digest, _ in heads):
            raise self._make_divergence_error(why, deadline)
        longest = max(length for _, length in heads)
        if longest <= _INLINE:
            return [
                row[_HEAD.size : _HEAD.size + n] for row, (_, n) in zip(rows, heads, strict=True)
            ]
        rows = self._gather(mine.ljust(longest), why, deadline)
        return [row[:n] for row, (_, n) in zip(rows, heads, strict=True)]

    def _gather(self, mine: bytes, why: str, deadline: float | None) -> list[bytes]:
        x = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        out = x.new_empty((len(self._ranks), len(mine)))
        work = self._group._allgather_base(out.view(-1), x)
        BEGUN[self._name] += 1
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            count = self._name, BEGUN[self._name]
            need = Need(_append_user_line(why), self._ranks, meets=True, count=count)
            wait_longer(work, need, error, deadline)
        return [copy_bytes(row) for row in out.unbind()]

    def _make_divergence_error(self, why: str, deadline: float | None) -> LayoutError:
        """The error where ranks come for different reasons; all ranks make this call."""
        mine = _append_user_line(why).encode()
        lengths = self._gather(struct.pack("<q", len(mine)), why, deadline)
        longest = max(struct.unpack("<q", n)[0] for n in lengths)
        rows = self._gather(mine.ljust(longest), why, deadline)
        texts = [row.decode(errors="replace").rstrip() for row in rows]
        other = next(i for i, text in enumerate(texts) if text != texts[0])
        return LayoutError(
            "ranks ask for different things",
            place=user_line(),
            operands=(f"rank 0     {texts[0]}", f"rank {other:<5} {texts[other]}"),
            reason="every rank of a mesh must make the same moves, and read the same values, in "
            "the same order",
            fixes=(
                Fix("value = x.item()", "on every rank, and then `if rank == 0: print(value)`"),
            ),
        )


def _append_user_line(why: str) -> str:
    """The reason with the user's line: "compares from_local, at train.py:10"."""
    return f"{why}, at {user_line() or 'no line'}"
