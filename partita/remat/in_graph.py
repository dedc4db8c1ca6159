"""Regions in a graph: what is a region while a step is captured? A mark on the nodes that it makes.

The pass `remat` of the compiler has backward read copies of them. What the policy keeps is marked
too, when the call is made, or when its result is given a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from partita.tensor.watch import HERE

from .call_key import Key, Origins, printed, site
from .modes import Kind, Listening
from .policy import OneCall, Policy

__all__ = ["Marking", "marked"]


def marked(fn: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, while a step is captured: what a region is then."""
    recorder = HERE.recorder
    if HERE.watcher is not None:  # within another region, whose policy holds
        with recorder.region():
            return fn(*args, **kwargs)
    HERE.watcher = Marking(policy, recorder)
    try:
        with recorder.region(), Listening():
            return fn(*args, **kwargs)
    finally:
        HERE.watcher = None


class Marking:
    """Is told of each call of a region, and says which are kept.

    Attributes:
        policy: of the region.
    """

    def __init__(self, policy: Policy, recorder: Any):
        self.policy, self.recorder = policy, recorder

    def _make_key(self, what: Any, args: Any, kwargs: Any) -> Key:
        origins = Origins()
        return (what, site(), (printed(args, origins, []), printed(kwargs, origins, [])))

    def _run_marked(self, keep: bool, run: Callable[[], Any]) -> Any:
        if not keep:
            return run()
        # Nothing that is called within is asked about: it is kept with the whole.
        before, HERE.watcher = HERE.watcher, None
        try:
            with self.recorder.keeping(True):
                return run()
        finally:
            HERE.watcher = before

    def run_call(self, kind: Kind, args: Any, kwargs: Any) -> Any:
        """A function of torch, announced by the mode."""
        key = self._make_key(kind.op, args, kwargs)
        keep = self.policy.keeps(kind.op, kind.func, key, None, False)
        return self._run_marked(keep, lambda: kind.func(*args, **kwargs))

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """An `autograd.Function`."""
        return self._run_marked(function in self.policy.functions, run)

    def one_call(self, marked: OneCall, args: Any, kwargs: Any) -> Any:
        """A function that `one_call` marked."""
        key = self._make_key(marked, args, kwargs)
        keep = self.policy.keeps(marked.title, marked, key, None, False)
        return self._run_marked(keep, lambda: marked.__wrapped__(*args, **kwargs))

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A redistribution."""
        moves = [m for m in what.moves if m.sends]
        if not moves:
            return run()
        kinds = " ".join(m.kind for m in moves)
        like: Key = (kinds, site(), (((None, torch.Size(moves[0].before.shape), x.dtype),), ()))
        return self._run_marked(self.policy.keeps(kinds, what, like, None, True), run)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program calls `x` so."""
        if self.policy.test is None:
            keep = name in self.policy.names
        else:
            key = self._make_key("", (x,), {})
            keep = self.policy.keeps("", None, key, name, False)
        if keep:
            self.recorder.keep(x)

    def announce_write(self, t: torch.Tensor) -> None:
        """Writes are made values by capture."""
