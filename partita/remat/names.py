"""Names of results: which call made the tensor that the program has just given a name?

The name comes after the call. So in the first run of a region each call's result is held ready to
be kept (weakly: its memory is not), until the run is over; from then on the calls whose results
have names are known, and only calls that were never made before are watched so.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.parallel.nested_tensors import find_instances, replace_instances, tensors_in

from .calls import Event
from .saved_results import KeptKernels, start_of

if TYPE_CHECKING:
    from .record import Forward

__all__ = ["LearnedNames", "Naming"]

_Calls = tuple[Any, tuple[int, ...]]
"""The calls of one op from one place."""


class LearnedNames:
    """What a region has learned of names.

    Attributes:
        seen: calls that have been made.
        named: of some, the name of what they make.
    """

    def __init__(self) -> None:
        self.seen: set[_Calls] = set()
        self.named: dict[_Calls, str] = {}

    def __reduce__(self) -> Any:
        return LearnedNames, ()  # places in the program are known within one process

    def start(self, forward: Forward) -> Naming:
        return Naming(self, forward)


@dataclass(frozen=True)
class _Where:
    """A tensor that lies in the memory that starts here."""

    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Naming:
    """Names, during one run."""

    def __init__(self, names: LearnedNames, forward: Forward):
        self._names = names
        self._forward: Any = weakref.proxy(forward)
        self._makers: dict[int, Event] = {}
        self._offers: dict[Event, Any] = {}

    def known(self, event: Event) -> str | None:
        """The name of what this call makes, as far as is known."""
        return self._names.named.get(event.key[:2])

    def is_new(self, event: Event) -> bool:
        return event.key[:2] not in self._names.seen

    def note_maker(self, event: Event, out: Any) -> None:
        """This call returned `out`; of what is a view, the call before it stays the maker."""
        for t in tensors_in(out):
            self._makers[start_of(t)] = event

    def offer(self, event: Event, kept: KeptKernels, out: Any) -> None:
        """What would have to be kept of this call, should its result be named."""
        own = {start_of(t) for t in tensors_in(out)}

        def reference_weakly(t: torch.Tensor) -> Any:
            start = start_of(t)
            if start not in own:
                return t
            return _Where(start, t.dtype, t.size(), t.stride(), t.storage_offset())  # type: ignore[arg-type]

        self._offers[event] = replace_instances(kept.made, torch.Tensor, reference_weakly)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program calls `x` by this name."""
        start = start_of(x)
        event = self._makers.get(start)
        if event is None:
            return  # an input of the region, which lives anyhow
        self._names.named[event.key[:2]] = name
        forward = self._forward
        offer = self._offers.pop(event, None)
        if event.kept is not None or offer is None or not forward.wants(event, name):
            return
        made = _found_again(offer, x, start)
        if made is not None:
            forward.keep(event, KeptKernels.of(made, x))

    def close(self, events: list[Event]) -> None:
        """The run is over: what was called is known now."""
        self._names.seen.update(e.key[:2] for e in events)
        self._makers, self._offers = {}, {}


def _found_again(offer: Any, x: torch.Tensor, start: int) -> Any:
    """The offer with what lies in the memory of `x` as tensors again; None if there is more."""
    if any(w.start != start for w in find_instances(offer, _Where)):
        return None
    with Local():
        storage = x.untyped_storage()

        def view_storage(w: _Where) -> torch.Tensor:
            view = torch.empty(0, dtype=w.dtype, device=x.device)
            return view.set_(storage, w.offset, w.size, w.stride)

        return replace_instances(offer, _Where, view_storage)
