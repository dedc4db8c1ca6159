"""The plan cache: how are plans remembered, and how is the memory bounded?

Each op keeps its plans in a dictionary of its own, which its dispatch reads directly. A second,
older generation stands behind it: when the young generations of all ops together reach half of the
limit, they become the old ones, and the old ones are dropped. A hit costs no bookkeeping; what is
used survives (it is found among the old and moved back); what is not used is gone after at most
two turns. So this is LRU, with the age of an entry known to a generation.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

__all__ = ["CacheInfo", "Plans", "cache_clear", "cache_info", "set_cache_limit"]


class CacheInfo(NamedTuple):
    """What the cache has done and holds. Counts are calls and entries.

    Attributes:
        by_op: for each op with entries, how many.
    """

    hits: int
    misses: int
    size: int
    maxsize: int
    by_op: dict[str, int]


class Plans(dict[Any, Any]):
    """One op's young plans; a miss looks among the old ones before anybody plans anew."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.old: dict[Any, Any] = {}
        _CACHE.ops.append(self)

    def recall(self, key: Any) -> Any | None:
        """A plan of the older generation, made young again; None if there is none."""
        plan = self.old.pop(key, None)
        if plan is not None:
            self.remember(key, plan)
        return plan

    def forget(self) -> None:
        """Drop every plan of this op."""
        with _CACHE.lock:
            _CACHE.young -= len(self)
            self.clear()
            self.old = {}

    def remember(self, key: Any, plan: Any) -> None:
        """Keep `plan`, which has an integer attribute `hits`, under `key`."""
        with _CACHE.lock:
            if _CACHE.young >= max(_CACHE.limit // 2, 1):
                _CACHE.turn()
            if key not in self:
                _CACHE.young += 1
            self[key] = plan


class _Cache:
    def __init__(self) -> None:
        self.ops: list[Plans] = []
        self.limit = 8192
        self.young = 0
        self.misses = 0
        self.forgotten_hits = 0
        self.lock = threading.RLock()

    def turn(self) -> None:
        """The young become old, the old are dropped."""
        for plans in self.ops:
            self.forgotten_hits += sum(p.hits for p in plans.old.values())
            plans.old = dict(plans)
            plans.clear()
        self.young = 0

    def size(self) -> int:
        return sum(len(p) + len(p.old) for p in self.ops)


_CACHE = _Cache()


def note_miss() -> None:
    _CACHE.misses += 1


def cache_info() -> CacheInfo:
    """Hits, misses, entries, the limit, and entries by op, of the cache of plans."""
    with _CACHE.lock:
        live = [p for plans in _CACHE.ops for p in (*plans.values(), *plans.old.values())]
        by_op: dict[str, int] = {}
        for plans in _CACHE.ops:
            n = len(plans) + len(plans.old)
            if n:
                by_op[plans.name] = by_op.get(plans.name, 0) + n
        hits = _CACHE.forgotten_hits + sum(p.hits for p in live)
        return CacheInfo(hits, _CACHE.misses, len(live), _CACHE.limit, by_op)


def cache_clear() -> None:
    """Forget every plan and every count. Results do not change; the next calls plan anew."""
    with _CACHE.lock:
        for plans in _CACHE.ops:
            plans.clear()
            plans.old = {}
        _CACHE.young = _CACHE.misses = _CACHE.forgotten_hits = 0


def set_cache_limit(n: int) -> None:
    """Keep at most `n` plans (n >= 2), all ops and, in `ranks`, all ranks together.

    Raises:
        ValueError: n is less than 2.
    """
    if n < 2:
        raise ValueError(f"the cache holds at least 2 plans, not {n}")
    with _CACHE.lock:
        _CACHE.limit = n
        while _CACHE.size() > n:
            _CACHE.turn()
