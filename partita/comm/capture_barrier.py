"""The capture barrier: a rank waits until all ranks of a mesh have come, though some may be in
collectives that the others know nothing of.

Each rank writes a key to the job's store and looks for those of the others. A collective would not
do: one of another kind could answer it. A rank that stays away writes nothing, so the others wait
for as long as the job's timeout. What they wait for stands in the store meanwhile, where a rank
whose own collective fails finds the reason (`explain_failed_collective`).
"""

from __future__ import annotations

import contextlib
import time
import warnings
from weakref import WeakKeyDictionary

import torch.distributed as dist

from partita.layout import Fix, LayoutError

from .deadlock import verdict_of_others
from .presence import find_ended, format_ranks, make_lost_rank_error, make_rank_gone_error
from .source import user_line
from .wire import Wire

__all__ = ["explain_failed_collective", "wait_for_all_ranks"]

PATIENCE = 20.0
"""Seconds after which a rank that waits warns."""
_LOOK = 0.002, 0.1  # seconds between two looks into the store: at first, and at most
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_ONE_WAY = Fix(
    "the same shapes, layouts, modes and Python values on every rank",
    "in each call; pt.check_ranks() finds at once which differ",
)


def wait_for_all_ranks(wire: Wire, why: str) -> None:
    """Return when all ranks of the mesh have made this call as often as this rank.

    Args:
        why: what this rank comes for, for the others to read.

    Raises:
        LayoutError: some did not come for as long as the job waits for a rank (the timeout of
            `init_process_group`). After `PATIENCE` seconds a warning names them.
        RankGoneError: one has ended.
    """
    group = wire.group_of_all()
    if group is None:
        return
    me, store = dist.get_rank(), group.get_group_store()
    number = _calls[group] = _calls.get(group, 0) + 1
    store.set(_key_of_rank(number, me), why)
    begun, warned, nap = time.monotonic(), False, _LOOK[0]
    away = [r for r in dist.get_process_group_ranks(group) if r != me]
    while away := [r for r in away if not store.check([_key_of_rank(number, r)])]:
        waited = time.monotonic() - begun
        if waited > store.timeout.total_seconds():
            raise LayoutError(
                f"rank {me} waited {waited:.0f} s for {format_ranks(away)}",
                place=user_line(),
                operands=(f"rank {me}  {why}",),
                reason="the others go on without it, or have ended",
                fixes=(_ONE_WAY,),
            )
        if nap == _LOOK[1] and (ended := find_ended(away)):
            raise make_rank_gone_error(ended, why)
        if waited > PATIENCE and not warned:
            warned = True
            warnings.warn(f"rank {me} {why}; {format_ranks(away)} has not come yet", stacklevel=2)
        time.sleep(nap)
        nap = min(2 * nap, _LOOK[1])
    if number > 1:
        store.delete_key(_key_of_rank(number - 1, me))


def explain_failed_collective(wire: Wire, failure: RuntimeError) -> LayoutError | None:
    """The error that tells why a collective of this rank failed, with `failure`: other ranks wait
    at the barrier, or have found a deadlock, or a rank is gone. None where none of this is so."""
    group = wire.group_of_all()
    if group is None:
        return None
    if (told := verdict_of_others()) is not None:
        return told
    ranks = dist.get_process_group_ranks(group)
    with contextlib.suppress(Exception):  # the store ends with the rank that holds it
        me, store = dist.get_rank(), group.get_group_store()
        number = _calls.get(group, 0) + 1
        for r in ranks:
            if store.check([_key_of_rank(number, r)]):
                return LayoutError(
                    f"rank {r} does not make the same moves as rank {me}",
                    place=user_line(),
                    operands=(f"rank {r}  {store.get(_key_of_rank(number, r)).decode()}",),
                    reason=f"rank {me} runs what it has captured",
                    fixes=(_ONE_WAY,),
                )
    return make_lost_rank_error(failure, "runs what it has captured", ranks)


def _key_of_rank(number: int, rank: int) -> str:
    return f"partita/roll call {number}/{rank}"
