"""Pauses of Python's garbage collector, while a graph is made or simulated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector inside the `with` block.

    A graph grows by thousands of nodes that all stay alive, and each collection visits all of them.
    That is a third of the time of a first step, and more for a deeper model.
    """
    was = gc.isenabled()
    if was:
        OLD_OBJECTS.collect_if_due()
    gc.disable()
    try:
        yield
    finally:
        if was:
            # Move all objects to the oldest generation. Otherwise the next collections would visit
            # each node once for each younger generation.
            if not gc.get_freeze_count():  # otherwise unfreeze would undo the user's freeze
                OLD_OBJECTS.count_moved(gc.get_count()[0])
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@dataclass
class OldObjects:
    """Counts the objects that `collector_paused` moves to the collector's oldest generation.

    Python decides by the number of new objects in that generation when to collect it. It does not
    count objects that were moved, so dropped programs would stay in memory.
    """

    moved: int = 0
    collections: int = 0
    """The number of full collections when `moved` was 0."""
    total: int = 0
    """Objects in the oldest generation when `moved` was 0. To count them takes milliseconds."""

    def count_moved(self, count: int) -> None:
        """Adds `count` to `moved`, the number of moved objects since the last full collection."""
        done = gc.get_stats()[2]["collections"]
        if done != self.collections:
            self.moved, self.collections, self.total = 0, done, len(gc.get_objects(2))
        self.moved += count

    def collect_if_due(self) -> None:
        """Makes a full collection if more objects were moved since the last one than it left."""
        self.count_moved(0)
        if self.moved > self.total:
            gc.collect()


OLD_OBJECTS = OldObjects()
