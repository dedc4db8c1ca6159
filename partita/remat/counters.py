"""Counters: bytes of live tensors (`count_memory`), and recomputed operations (`remat_report`).

The memory of a process says little about tensors, because allocators keep freed memory. Here each
storage that an op creates is counted until it is freed. `remat_report` shows which regions ran
again, the operations that this took, and what was kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from partita.capture.capture_context import attribute_set
from partita.layout.text import format_count, format_table, human
from partita.parallel.batch import tensors_in
from partita.tensor.tensor_state import HERE

from .watched_calls import KernelMode


@dataclass
class HeldStorage:
    """A storage that is alive and that a `MemoryCount` counts.

    Attributes:
        storage: a weak reference to it; when it is freed, its bytes are no longer counted.
        nbytes: its size when it was last read.
        labels: the labels under which it counts.
        resized: True if its owner may resize it, so that its size is read again after each op.
    """

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    labels: tuple[str, ...]
    resized: bool = False


class MemoryCount:
    """The bytes of live storages that were created since `count_memory` began.

    Each storage counts once, in full, however many tensors are views of it. Ops of this thread are
    counted, in forward and backward. Pass other tensors to `note`, such as the results of a
    compiled region.

    Attributes:
        live: bytes that are alive now.
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._held: dict[int, HeldStorage] = {}
        self._labels: tuple[str, ...] = ()
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._resized: list[HeldStorage] = []

    # -- for users --------------------------------------------------------------------

    def label(self, name: str) -> AbstractContextManager[None]:
        """Returns a context manager. Storages created inside also count under the label `name`.

        Labels may be nested.
        """
        return attribute_set(self, "_labels", (*self._labels, name))

    def note(self, value: Any, name: str | None = None) -> None:
        """Counts the storages of the tensors in `value` from now on, whatever created them.

        Their sizes are read again at each op, because an owner may resize a storage. (For example,
        a size of 0 bytes frees it although views exist.)

        Args:
            value: a tensor, or tensors in lists, tuples and dicts.
            name: a label under which they are counted as well.
        """
        for t in tensors_in(value):
            with local_ops():
                held = self.note_resized(t.untyped_storage())
            if name is not None and name not in held.labels:
                held.labels += (name,)
                self._change_live_bytes((name,), held.nbytes)
        self._update_peaks()

    def note_resized(self, storage: torch.UntypedStorage) -> HeldStorage:
        """Counts a storage that its owner may resize later, such as ZeRO's. Returns its entry."""
        self._look_again()
        held = self._add_storage(storage)
        if not held.resized:
            held.resized = True
            self._resized.append(held)
        self._update_peaks()
        return held

    def live_of(self, name: str) -> int:
        """Returns the bytes that are alive now among the storages with the label `name`."""
        self._look_again()
        return self._live.get(name, 0)

    def peak_of(self, name: str) -> int:
        """Returns the largest number of bytes with the label `name` that were alive at once."""
        return self._peak.get(name, 0)

    # -- counting ------------------------------------------------------------------------------

    def after_op(self, args: Any, kwargs: Any, out: Any) -> None:
        """Counts the storages that an op has created. Called after each op.

        Args:
            args, kwargs: the op's arguments.
            out: its result.
        """
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

    def _add_storage(self, storage: torch.UntypedStorage) -> HeldStorage:
        # torch keeps one Python object for a storage while it is alive, so its id identifies it.
        key = id(storage)
        held = self._held.get(key)
        if held is None:
            # Not bound to self: a storage that outlives the count would keep the count alive.
            count = weakref.ref(self)

            def dead(_: Any) -> None:
                its = count()
                if its is not None:
                    its._forget_storage(key)

            held = HeldStorage(weakref.ref(storage, dead), storage.nbytes(), self._labels)
            self._held[key] = held
            self.changed(held, held.nbytes)
        return held

    def _forget_storage(self, key: int) -> None:
        held = self._held.pop(key)
        self.changed(held, -held.nbytes)
        if held.resized:
            self._resized.remove(held)

    def _look_again(self) -> None:
        for held in self._resized:
            storage = held.storage()
            if storage is not None and storage.nbytes() != held.nbytes:
                more = storage.nbytes() - held.nbytes
                held.nbytes += more
                self.changed(held, more)
                self._update_peaks()

    def changed(self, held: HeldStorage, more: int) -> None:
        """Adds `more` bytes (maybe negative) to the counts, because `held` has another size."""
        self.live += more
        self._change_live_bytes(held.labels, more)

    def _change_live_bytes(self, labels: tuple[str, ...], more: int) -> None:
        for name in dict.fromkeys(labels):
            self._live[name] = self._live.get(name, 0) + more

    def _update_peaks(self) -> None:
        self.peak = max(self.peak, self.live)
        for name, live in self._live.items():
            if live > self._peak.get(name, 0):
                self._peak[name] = live


class MemoryCountMode(KernelMode):
    """A dispatch mode that counts the storages that each op creates, in a `MemoryCount`."""

    def __init__(self, count: MemoryCount):
        super().__init__()
        self.count = count

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.count.after_op(args, kwargs, out)
        return out


@contextmanager
def count_memory() -> Iterator[MemoryCount]:
    """Counts the bytes of all tensors that are allocated inside the `with` block, on any device.

        with pt.count_memory() as memory:
            loss = model(batch)
            kept = memory.live          # what forward left for backward, and the loss
            loss.backward()
        print(memory.peak)

    The count is exact. It costs some microseconds per op. In `pt.ranks` each rank has its own
    count.
    """
    count = MemoryCount()
    with MemoryCountMode(count), resize_listener(count.note_resized):
        yield count


def resize_listener(
    listener: Callable[[torch.UntypedStorage], Any],
) -> AbstractContextManager[None]:
    """Returns a context manager. Inside, `listener(storage)` is called when ZeRO resizes a storage.

    Only storages of this thread count.
    """
    before = HERE.resized

    def call_listener(storage: torch.UntypedStorage) -> None:
        listener(storage)
        if before is not None:
            before(storage)

    return attribute_set(HERE, "resized", call_listener)


# -- recomputed operations -------------------------------------------------------------------------


@dataclass(frozen=True)
class Recomputed:
    """One recomputation of a remat region: a row of `remat_report`.

    Attributes:
        region: the function's or the module's name.
        calls: the number of calls in the region's forward.
        again: how many of these calls occurred in the second run, including those whose results
            were kept.
        kept: the number of results that were kept.
        kept_bytes: the bytes of these results.
        flops: floating-point operations of the second run, as torch.utils.flop_counter counts them.
    """

    region: str
    calls: int
    again: int
    kept: int
    kept_bytes: int
    flops: int


class Report:
    """The result of `remat_report`, a table. `regions` has a row for each recomputation."""

    def __init__(self) -> None:
        self.regions: list[Recomputed] = []
        self.is_open = True

    @property
    def flops(self) -> int:
        """The floating-point operations of all recomputations in the report."""
        return sum(r.flops for r in self.regions)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the results that regions kept instead of recomputing them."""
        return sum(r.kept_bytes for r in self.regions)

    def __str__(self) -> str:
        if not self.regions:
            return "nothing was recomputed"
        rows = [["region", "times", "calls", "kept", "bytes kept", "recomputed"]]
        for name in dict.fromkeys(r.region for r in self.regions):
            own = [r for r in self.regions if r.region == name]
            counts = len(own), sum(r.calls for r in own), sum(r.kept for r in own)
            nbytes, flops = sum(r.kept_bytes for r in own), sum(r.flops for r in own)
            rows.append([name, *map(str, counts), human(nbytes), format_count(flops, "FLOP")])
        return format_table(rows, range(1, len(rows[0])))

    __repr__ = __str__


def _attention_on_cpu(q: Any, k: Any, v: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


_COUNTS = {
    **flop_registry,
    # torch counts attention only on GPUs.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
}


class FlopMode(KernelMode):
    """A dispatch mode that counts floating-point operations as `torch.utils.flop_counter` does.

    It also counts matrix products in compiled regions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        count = _COUNTS.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out


class _Open(threading.local):
    reports: tuple[Report, ...] = ()


_open = _Open()


def open_reports() -> tuple[Report, ...]:
    """Returns the reports of all `remat_report` blocks that are active on this thread."""
    return _open.reports


@contextmanager
def remat_report() -> Iterator[Report]:
    """Reports what is recomputed inside the `with` block, with its floating-point operations.

        with pt.remat_report() as report:
            loss = model(batch)
            loss.backward()
        print(report)

    Counting costs some microseconds for each recomputed op. Without this, nothing is counted.
    """
    report = Report()
    _open.reports = (*_open.reports, report)
    try:
        yield report
    finally:
        report.is_open = False
        _open.reports = tuple(r for r in _open.reports if r is not report)
