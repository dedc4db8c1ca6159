"""Live memory: how many bytes of tensors are alive, and how many were at most.

The memory of a process says little about that: allocators keep what is freed. Here each storage
that an op makes is counted when it appears, and no longer when it dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.parallel.nested_tensors import tensors_in

from .modes import KernelMode

__all__ = ["MemoryCount", "count_memory"]


@dataclass
class _Held:
    """A storage that is alive.

    Attributes:
        storage: a weak reference to it; when it dies, its bytes are no longer counted.
        nbytes: its size when it was last looked at.
        labels: of the `label` blocks in which it was made, and those it was noted under.
        resized: its size is read again with each op, since its owner may resize it.
    """

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    labels: tuple[str, ...]
    resized: bool = False


class MemoryCount:
    """The bytes of the storages that were made since `count_memory` began and are alive.

    Each storage counts once, in full, however many tensors are views of it. Counted are the
    storages that ops of this thread make, forward and backward, and those passed to `note`: kernels
    of a compiled region allocate unseen.

    Attributes:
        live: bytes that are alive now.
        peak: the most that were alive at once.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._held: dict[int, _Held] = {}
        self._labels: tuple[str, ...] = ()
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._resized: list[_Held] = []

    # -- for users --------------------------------------------------------------------

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        """Count what is made inside under `name` too. Labels nest; it has each of them."""
        before, self._labels = self._labels, (*self._labels, name)
        try:
            yield
        finally:
            self._labels = before

    def note(self, value: Any, name: str | None = None) -> None:
        """Count the storages of the tensors in `value` from now on, whoever made them.

        Their sizes are read anew with each op, so that a storage that its owner resizes (to
        nothing, to free it through every view) counts with what it holds.

        Args:
            value: a tensor, or tensors in lists, tuples and dicts.
            name: a label to count them under as well.
        """
        for t in tensors_in(value):
            with Local():
                held = self._add_storage(t.untyped_storage())
            if name is not None and name not in held.labels:
                held.labels += (name,)
                self._change_live_bytes((name,), held.nbytes)
            if not held.resized:
                held.resized = True
                self._resized.append(held)
        self._update_peaks()

    def live_of(self, name: str) -> int:
        """Bytes under this label that are alive now."""
        self._look_again()
        return self._live.get(name, 0)

    def peak_of(self, name: str) -> int:
        """The most bytes under this label that were alive at once."""
        return self._peak.get(name, 0)

    # -- counting ------------------------------------------------------------------------------

    def after_op(self, args: Any, kwargs: Any, out: Any) -> None:
        """An op returned `out`: count what it made."""
        self._look_again()
        known: set[int] | None = None
        for t in tensors_in(out):
            if t.device.type == "meta":
                continue
            storage = t.untyped_storage()
            if id(storage) in self._held:
                continue
            if known is None:
                known = {id(a.untyped_storage()) for a in tensors_in((args, kwargs))}
            if id(storage) not in known:
                self._add_storage(storage)
        self._update_peaks()

    def _add_storage(self, storage: torch.UntypedStorage) -> _Held:
        # torch keeps one Python object for a storage as long as it lives, so its id is its name.
        key = id(storage)
        held = self._held.get(key)
        if held is None:
            # Not bound to self: a storage that outlives the count would keep the count alive.
            count = weakref.ref(self)

            def dead(_: Any) -> None:
                its = count()
                if its is not None:
                    its._forget_storage(key)

            held = _Held(weakref.ref(storage, dead), storage.nbytes(), self._labels)
            self._held[key] = held
            self.live += held.nbytes
            self._change_live_bytes(held.labels, held.nbytes)
        return held

    def _forget_storage(self, key: int) -> None:
        held = self._held.pop(key)
        self.live -= held.nbytes
        self._change_live_bytes(held.labels, -held.nbytes)
        if held.resized:
            self._resized.remove(held)

    def _look_again(self) -> None:
        for held in self._resized:
            storage = held.storage()
            if storage is not None and storage.nbytes() != held.nbytes:
                more = storage.nbytes() - held.nbytes
                held.nbytes += more
                self.live += more
                self._change_live_bytes(held.labels, more)
                self._update_peaks()

    def _change_live_bytes(self, labels: tuple[str, ...], more: int) -> None:
        for name in dict.fromkeys(labels):
            self._live[name] = self._live.get(name, 0) + more

    def _update_peaks(self) -> None:
        self.peak = max(self.peak, self.live)
        for name, live in self._live.items():
            if live > self._peak.get(name, 0):
                self._peak[name] = live


class MemoryCountMode(KernelMode):
    """Counts the results of each op in a `MemoryCount` while it is entered."""

    def __init__(self, count: MemoryCount):
        super().__init__()
        self.count = count

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.count.after_op(args, kwargs, out)
        return out


@contextmanager
def count_memory() -> Iterator[MemoryCount]:
    """Count the bytes of the tensors that are made inside, exactly, on any device.

        with pt.count_memory() as memory:
            loss = model(batch)
            kept = memory.live          # what forward left for backward, and the loss
            loss.backward()
        print(memory.peak)

    Costs some microseconds for each op. In a world of `pt.ranks` each rank counts its own.
    """
    count = MemoryCount()
    with MemoryCountMode(count):
        yield count
