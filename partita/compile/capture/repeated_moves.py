"""Repeated moves: what was traced of a move, put into the graph again for a tensor like its own.

The parameters of a block are gathered one by one, those of the next block like them, and their
gradients go the other way. To trace a move takes a millisecond, to copy its nodes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partita.redistribute import Move

from ..graph_nodes import copy_node
from ..node_metadata import Recorder
from .traced_tensors import node_of, tensors_of

__all__ = ["RepeatedMoves"]


@dataclass(frozen=True)
class _Traced:
    """A move that was traced.

    Attributes:
        move: kept, since it is known by its identity.
        given, made: the nodes of the tensor that it takes, and of the one that it gives.
        nodes: those of the move, in order.
        like: the tensor that it gives.
    """

    move: Move
    given: fx.Node
    made: fx.Node
    nodes: list[fx.Node]
    like: torch.Tensor


class RepeatedMoves:
    """The moves of one capture, by what they take."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode):
        self._recorder, self._mode = recorder, mode
        self._known: dict[Any, _Traced | None] = {}

    def carry(
        self, wire: Any, move: Move, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """What `run()` gives, which traces the move of `x` along `wire`."""
        given = node_of(x) if isinstance(x, FakeTensor) else None
        if given is None:
            return run()
        with Unheard():
            key = (id(wire), id(move), wire.zeros, x.shape, x.stride(), x.dtype, x.device)
        known = self._known.get(key)
        if known is not None:
            return self._copy_move(known, given)
        first = self._recorder.newest()
        out = run()
        if key not in self._known:
            self._known[key] = self._traced(move, given, x, out, first)
        return out

    def _traced(
        self, move: Move, given: fx.Node, x: torch.Tensor, out: torch.Tensor, first: fx.Node
    ) -> _Traced | None:
        nodes: list[fx.Node] = []
        node = self._recorder.newest()
        while node is not first:
            nodes.insert(0, node)
            node = node.prev
        made = node_of(out)
        with Unheard():
            shows = out.untyped_storage()._cdata == x.untyped_storage()._cdata
        if made is None or made not in nodes or shows:
            return None  # it is an alias of what it takes
        return _Traced(move, given, made, nodes, made.meta["val"])

    def _copy_move(self, known: _Traced, given: fx.Node) -> torch.Tensor:
        graph = self._recorder.graph
        of = {known.given: given}
        for node in known.nodes:
            of[node] = copy_node(graph, node, lambda n: of.get(n, n))
        made = of[known.made]
        (out,) = tensors_of([made], [known.like], self._mode)
        self._recorder.note_copies([of[n] for n in known.nodes], made, out)
        return out
