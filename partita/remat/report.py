"""The report of recomputation: which regions ran again, the operations it took, and what was
kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from partita.comm.ledger import human

from .modes import KernelMode

__all__ = ["FlopMode", "Recomputed", "Report", "open_reports", "remat_report"]


@dataclass(frozen=True)
class Recomputed:
    """One recompute of a region.

    Attributes:
        region: the function's or the module's name.
        calls: how many calls its forward made.
        again: how many of them were met in the second run, kept ones included.
        kept: how many results were kept.
        kept_bytes: how much memory these hold.
        flops: floating-point operations of the second run, as torch.utils.flop_counter counts them.
    """

    region: str
    calls: int
    again: int
    kept: int
    kept_bytes: int
    flops: int


class Report:
    """What was recomputed while it was open, in order. Printing it gives a table."""

    def __init__(self) -> None:
        self.regions: list[Recomputed] = []
        self.is_open = True

    @property
    def flops(self) -> int:
        """Floating-point operations that were recomputed."""
        return sum(r.flops for r in self.regions)

    @property
    def kept_bytes(self) -> int:
        """Bytes of kept results, of all regions together."""
        return sum(r.kept_bytes for r in self.regions)

    def __str__(self) -> str:
        if not self.regions:
            return "nothing was recomputed"
        head = ["region", "times", "calls", "kept", "bytes kept", "recomputed"]
        rows = [head]
        for name in dict.fromkeys(r.region for r in self.regions):
            own = [r for r in self.regions if r.region == name]
            rows.append(
                [
                    name,
                    str(len(own)),
                    str(sum(r.calls for r in own)),
                    str(sum(r.kept for r in own)),
                    human(sum(r.kept_bytes for r in own)),
                    _format_flops(sum(r.flops for r in own)),
                ]
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join(lines)

    __repr__ = __str__


def _format_flops(count: int) -> str:
    """`1_500_000` as "1.50 MFLOP"."""
    size, units = float(count), ["", "k", "M", "G", "T", "P"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}FLOP"


def _attention_on_cpu(q: Any, k: Any, v: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


_COUNTS = {
    **flop_registry,
    # torch counts attention on GPUs only.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
}


class FlopMode(KernelMode):
    """Counts floating-point operations as `torch.utils.flop_counter` does, those of matrix products
    in compiled regions too."""

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
    """The reports that are open on this thread."""
    return _open.reports


@contextmanager
def remat_report() -> Iterator[Report]:
    """Report what is recomputed within, with its floating-point operations.

    with pt.remat_report() as report:
        loss = model(batch)
        loss.backward()
    print(report)

    Counting costs some microseconds for each op that is recomputed, so it is done on demand.
    """
    report = Report()
    _open.reports = (*_open.reports, report)
    try:
        yield report
    finally:
        report.is_open = False
        _open.reports = tuple(r for r in _open.reports if r is not report)
