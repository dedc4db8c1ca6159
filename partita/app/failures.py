"""Failures of ranks, as a user reads them: which rank, why, and where the others were."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partita.comm import is_lost, user_line_of_error

__all__ = ["Failure", "LastKnown", "describe_end_of_job", "failure_of", "phase_of"]

_PHASES = {
    "forward": "in forward of step {}",
    "backward": "in backward of step {}",
    "capture": "in the capture of step {}",
    "compile": "in the compilation of step {}",
    "graph": "in the compiled step {}",
    "optimizer": "in the optimizer of step {}",
    "save": "in the save after step {}",
    "sample": "at the sample after step {}",
}


def phase_of(at: dict[str, Any] | None) -> str:
    """Where a rank is that last told so: "in backward of step 12"."""
    return "before the first step" if at is None else _PHASES[at["phase"]].format(at["step"])


@dataclass(frozen=True)
class Failure:
    """An error that ended a rank.

    Attributes:
        said: what the user should read of it.
        lost: it is only that another rank is gone.
        place: the program's line, and the move that the rank was at, where they are known.
    """

    said: str
    lost: bool
    place: str


def failure_of(error: BaseException) -> Failure:
    """What there is to say of an error.

    What a user can mend (a ValueError; a layout that does not fit is one) is said in its own words;
    only a fault of a program needs its traceback.
    """
    said = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, ValueError):
        said = f"{type(error).__name__}: {error}"
    return Failure(said, is_lost(error), _place_of_error(error))


def _place_of_error(error: BaseException) -> str:
    line = user_line_of_error(error)
    return ", ".join(filter(None, [line, *getattr(error, "__notes__", [])]))


# -- seen from the parent --------------------------------------------------------------------------


@dataclass(frozen=True)
class LastKnown:
    """The last that is known of a rank.

    Attributes:
        at: the phase and step that it told of.
        code: its exit code, if it has ended.
        failed: its failure, if it told of one.
        when: at which second of the machine's clock.
        log: what it wrote last.
        stopped: the signal that has stopped it, if it does not go on.
    """

    rank: int
    at: dict[str, Any] | None
    code: int | None
    failed: Failure | None
    when: float
    log: str
    stopped: int = 0


def describe_end_of_job(ranks: Sequence[LastKnown], saved: dict[str, Any] | None) -> str:
    """Which rank ended the job, why, and where the others were.

    One that fails because a peer is gone is not to blame.

    Args:
        ranks: at least one has ended, or been stopped.
        saved: the last checkpoint's "step" and "path", if there is one.
    """
    ended = [r for r in ranks if r.code is not None]
    killed = [r for r in ended if r.code is not None and r.code < 0]
    own = sorted((r for r in ended if r.failed and not r.failed.lost), key=lambda r: r.when)
    untold = [r for r in ended if r.failed is None]
    stopped = [r for r in ranks if r.stopped]
    lost = sorted(ended, key=lambda r: r.when)
    first = (killed or own or untold or stopped or lost)[0]
    alike = [r for r in own if first.failed and r.failed and r.failed.said == first.failed.said]
    if first in own and len(alike) == len(ranks) > 1:
        lines = [f"every rank failed {phase_of(first.at)}; the job is ended"]
        others = []
    else:
        lines = [f"rank {first.rank} {_describe_end(first)} {phase_of(first.at)}; the job is ended"]
        others = [r for r in ranks if r is not first]
    if said := first.failed.said if first.failed else first.log:
        lines.append(said)
    lines += _list_places(others)
    if saved is not None:
        lines.append(
            f"the checkpoint {saved['path']} is that of step {saved['step']}: --resume goes on "
            "from it"
        )
    return "\n".join(lines)


def _describe_end(rank: LastKnown) -> str:
    if rank.code is not None and rank.code < 0:
        return f"was killed by {signal.Signals(-rank.code).name}"
    if rank.stopped:
        return f"was stopped by {signal.Signals(rank.stopped).name}"
    return "failed" if rank.failed else f"ended with exit code {rank.code}"


def _list_places(others: Sequence[LastKnown]) -> list[str]:
    """Where the ranks were that had nothing to do with it; those at one place in one line."""
    places: dict[str, list[str]] = {}
    for r in others:
        line = f" ({r.failed.place})" if r.failed and r.failed.place else ""
        places.setdefault(phase_of(r.at) + line, []).append(str(r.rank))
    return [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'were' if len(ranks) > 1 else 'was'} "
        + place
        for place, ranks in places.items()
    ]
