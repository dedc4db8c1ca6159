"""Names of results: which call made the tensor that the program has just named by
`checkpoint_name`.

The name comes after the call. So in the first run of a region each new call's result is described,
ready to be kept (without its memory), until the run is over; from then on it is known which calls
make named results, and only calls that were never seen are described so.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.parallel.nested_tensors import find_instances, replace_instances, tensors_in

from .calls import RecordedCall
from .saved_results import KeptKernels, storage_id

if TYPE_CHECKING:
    from .record import ForwardRecord

__all__ = ["LearnedNames", "RunNames"]

_Calls = tuple[Any, tuple[int, ...]]
"""(function, call site): the calls of one function from one place."""


class LearnedNames:
    """What a region has learned of names in its runs so far.

    Attributes:
        seen: calls that have been made.
        named: the names of results, by the calls that make them.
    """

    def __init__(self) -> None:
        self.seen: set[_Calls] = set()
        self.named: dict[_Calls, str] = {}

    def __reduce__(self) -> Any:
        return LearnedNames, ()  # places in the program are known within one process

    def start(self, forward: ForwardRecord) -> RunNames:
        return RunNames(self, forward)


@dataclass(frozen=True)
class _PlaceInStorage:
    """Stands for a tensor in a storage of this id, without holding it."""

    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class RunNames:
    """The names that are given during one run."""

    def __init__(self, names: LearnedNames, forward: ForwardRecord):
        self._names = names
        self._forward: Any = weakref.proxy(forward)
        self._makers: dict[int, RecordedCall] = {}
        self._offers: dict[RecordedCall, Any] = {}

    def known(self, event: RecordedCall) -> str | None:
        """The name of this call's result, if it is known."""
        return self._names.named.get(event.key[:2])

    def is_new(self, event: RecordedCall) -> bool:
        return event.key[:2] not in self._names.seen

    def note_maker(self, event: RecordedCall, out: Any) -> None:
        """Note that this call returned `out`."""
        for t in tensors_in(out):
            self._makers[storage_id(t)] = event

    def offer(self, event: RecordedCall, kept: KeptKernels, out: Any) -> None:
        """Note, without the memory of `out`, what to keep if this call's result is named."""
        own = {storage_id(t) for t in tensors_in(out)}

        def reference_weakly(t: torch.Tensor) -> Any:
            start = storage_id(t)
            if start not in own:
                return t
            return _PlaceInStorage(start, t.dtype, t.size(), t.stride(), t.storage_offset())  # type: ignore[arg-type]

        self._offers[event] = replace_instances(kept.made, torch.Tensor, reference_weakly)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program gives `x` this name."""
        start = storage_id(x)
        event = self._makers.get(start)
        if event is None:
            return  # an input of the region, which lives anyhow
        self._names.named[event.key[:2]] = name
        forward = self._forward
        offer = self._offers.pop(event, None)
        if event.kept is not None or offer is None or not forward.is_name_kept(event, name):
            return
        made = _rebuild_offer(offer, x, start)
        if made is not None:
            forward.keep(event, KeptKernels.of(made, x))

    def close(self, events: list[RecordedCall]) -> None:
        """The run is over: all of its calls have been seen."""
        self._names.seen.update(e.key[:2] for e in events)
        self._makers, self._offers = {}, {}


def _rebuild_offer(offer: Any, x: torch.Tensor, start: int) -> Any:
    """The offer with tensors in the storage of `x` again; None if it needs other storages too."""
    if any(w.start != start for w in find_instances(offer, _PlaceInStorage)):
        return None
    with Local():
        storage = x.untyped_storage()

        def view_storage(w: _PlaceInStorage) -> torch.Tensor:
            view = torch.empty(0, dtype=w.dtype, device=x.device)
            return view.set_(storage, w.offset, w.size, w.stride)

        return replace_instances(offer, _PlaceInStorage, view_storage)
