"""Regions in a captured step: marks on the nodes that a region makes.

The pass `remat` of the compiler lets backward read copies of marked nodes. Results that the policy
keeps are marked as kept, when the call is made or when its result gets a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from partita.tensor.tensor_state import HERE

from .call_key import Key, TensorOrigins, find_call_site, make_inputs_key
from .modes import CallMode, FunctionKind
from .policy import OneCall, Policy

__all__ = ["RegionMarker", "run_marked_region"]


def run_marked_region(fn: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Any:
    """`fn(*args, **kwargs)` as a region of a step that is being captured."""
    recorder = HERE.recorder
    if HERE.watcher is not None:  # within another region, whose policy holds
        with recorder.region():
            return fn(*args, **kwargs)
    HERE.watcher = RegionMarker(policy, recorder)
    try:
        with recorder.region(), CallMode():
            return fn(*args, **kwargs)
    finally:
        HERE.watcher = None


class RegionMarker:
    """The watcher of a region in a captured step, which marks the calls that are kept.

    Attributes:
        policy: of the region.
    """

    def __init__(self, policy: Policy, recorder: Any):
        self.policy, self.recorder = policy, recorder

    def _make_key(self, what: Any, args: Any, kwargs: Any) -> Key:
        origins = TensorOrigins()
        return (
            what,
            find_call_site(),
            make_inputs_key(args, kwargs, origins, []),
        )

    def _run_marked(self, keep: bool, run: Callable[[], Any]) -> Any:
        if not keep:
            return run()
        # Calls within it are not watched: they are kept with the whole.
        before, HERE.watcher = HERE.watcher, None
        try:
            with self.recorder.keeping(True):
                return run()
        finally:
            HERE.watcher = before

    def run_call(self, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """A function of torch, announced by the mode."""
        key = self._make_key(kind.op, args, kwargs)
        keep = self.policy.keeps(kind.op, kind.func, key, None, False)
        return self._run_marked(keep, lambda: kind.func(*args, **kwargs))

    def run_function(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """An `autograd.Function`."""
        return self._run_marked(function in self.policy.functions, run)

    def run_one_call(self, function: OneCall, args: Any, kwargs: Any) -> Any:
        """A function that `one_call` marked."""
        key = self._make_key(function, args, kwargs)
        keep = self.policy.keeps(function.title, function, key, None, False)
        return self._run_marked(keep, lambda: function.__wrapped__(*args, **kwargs))

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A redistribution."""
        moves = [m for m in what.moves if m.sends]
        if not moves:
            return run()
        kinds = " ".join(m.kind for m in moves)
        like: Key = (
            kinds,
            find_call_site(),
            (((None, torch.Size(moves[0].before.shape), x.dtype),), ()),
        )
        return self._run_marked(self.policy.keeps(kinds, what, like, None, True), run)

    def note_name(self, x: torch.Tensor, name: str) -> None:
        """The program gives `x` this name."""
        if self.policy.test is None:
            keep = name in self.policy.names
        else:
            key = self._make_key("", (x,), {})
            keep = self.policy.keeps("", None, key, name, False)
        if keep:
            self.recorder.keep(x)

    def announce_write(self, t: torch.Tensor) -> None:
        """Nothing to note: capture makes values of writes."""
