"""Predicted values: tensor values that a step reads at capture, computed in advance on the CPU.

A step may read values (`grid.tolist()`) and branch on them. While the graph is traced,
`PredictedValues` runs each new node on the CPU if all its operands are known: constants, small
inputs of the call, and values computed from these. Ranks exchange small tensors of integers and
bools once (`gather_small_integers`). After that each rank runs the nodes for all ranks, and
collectives are copies within the process.

A prediction is a guess. The graph computes the true value, and writes nothing if the guess was
wrong (`answers`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from partita.capture.fakes import is_symbolic
from partita.capture.known_masks import NotKnown, computing_on_host
from partita.comm import TraceWire, Wire, run_in_one_process
from partita.comm.device import HOST
from partita.graph.graph_nodes import is_collective, request_of_collective
from partita.graph.program import Input, local_of
from partita.graph.shared_memory import operands_written
from partita.tensor.op_facts import facts_of

FEW = 64
"""The most elements of an input of any dtype that is read, if each rank has all elements."""
_SMALL = 2**16
"""The most elements of an integer or bool input that ranks exchange, and of a computed value."""

Values = list[Any]
"""The values of one node, one for each rank for which nodes are run."""


@dataclass(frozen=True)
class ValuesOfCall:
    """Values of a call's tensors that are known while its step is captured.

    Attributes:
        reads: the numbers that the step has read so far, in order. Later ones are unknown.
        integers: the local values of each small integer or bool input, one for each rank, padded as
            for the graph. The key is the input's index among the leaves (tensors and numbers) of
            the call.
        mesh: the mesh of these ranks.
    """

    reads: tuple[float, ...] = ()
    integers: Mapping[int, Values] = field(default_factory=dict)
    mesh: Any = None


def gather_small_integers(
    inputs: Iterable[Input], tensors: Sequence[Any], wires: Iterable[Wire]
) -> ValuesOfCall:
    """Returns the values on all ranks of a call's integer and bool tensors that have few elements.

    From them ranks predict branches. All ranks must call it.

    Args:
        inputs: the inputs of the graph.
        tensors: the call's leaves: tensors and numbers of the state and the arguments.
        wires: the wires (connections to the ranks) of the inputs. The result is empty unless there
            is exactly one.
    """
    among = [*wires]
    if len(among) != 1:
        return ValuesOfCall()
    (wire,) = among
    chosen = [i for i in inputs if _is_small_integer(i)]
    mine = []
    for given in chosen:
        value, border = given.local_value(tensors), given.padding
        mine.append((value if border is None else border.pad_input(value)).to(HOST))
    numbers = tuple(n for x in mine for n in x.flatten().to(torch.int64).tolist())
    rows = wire.gather_ints(numbers, "the integers of a call")
    columns, at = dict[int, Values](), 0
    for given, like in zip(chosen, mine, strict=True):
        pieces = [torch.tensor(row[at : at + like.numel()]) for row in rows]
        columns[given.index] = [x.to(like.dtype).view(like.shape) for x in pieces]
        at += like.numel()
    return ValuesOfCall((), columns, wire.mesh)


def _is_small_integer(given: Input) -> bool:
    x = given.tensor
    if given.kind not in ("argument", "value") or x.layout is not torch.strided:
        return False
    return x.numel() <= _SMALL and not (x.is_floating_point() or x.is_complex() or x.is_quantized)


class PredictedValues:
    """Computes values of graph nodes on the CPU during capture, from known inputs.

    Args:
        graph: the graph that is being traced.
        root: the tracer's module, which holds the graph's constants.
        inputs: the graph's inputs, by node.
        wires: maps the wire (connection to the ranks) of an input to the `TraceWire` that replaces
            it during the run.
        known: the known values of the call.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: Any,
        inputs: Mapping[fx.Node, Input],
        wires: Mapping[Wire, TraceWire],
        known: ValuesOfCall,
    ):
        self._graph, self._holder, self._inputs, self._known = graph, root, inputs, known
        self._wires = [*wires.values()]
        # Coordinates of all ranks if their values are known, otherwise of this one.
        self._at = known.mesh.coordinates() if known.integers else (None,)
        self._own = self._at.index(tuple(self._wires[0].real.at)) if known.integers else 0
        self._values: dict[fx.Node, Values | None] = {}
        self._lost: set[int] = set()  # storages into which something unknown was written
        self._reads: dict[fx.Node, float] = {}  # computed values, by the node of the number
        self._read_of: dict[fx.Node, float] = {}  # computed values, by the node that is read

    def note_read(self, node: fx.Node, place: int) -> None:
        """Records that the step reads a number from a tensor (`x.item()`).

        Args:
            node: the node of the number.
            place: the index of this read among all reads of numbers in the step.
        """
        of, reads = node.all_input_nodes[0], self._known.reads
        if place < len(reads):
            self._read_of[of] = reads[place]
        if of in self._read_of:
            self._reads[node] = self._read_of[of]

    def find_value(self, node: fx.Node) -> Any:
        """Returns the value that a number's node is predicted to have on this rank.

        Raises:
            NotKnown: it cannot be predicted.
        """
        new = []
        for last in reversed(self._graph.nodes):
            if last in self._values:
                break
            new.append(last)
        with computing_on_host():
            for one in reversed(new):
                self._values[one] = self._find_values(one)
        found = self._values.get(node)
        if found is None:
            raise NotKnown
        return found[self._own]

    def _find_values(self, node: fx.Node) -> Values | None:
        if node.op == "placeholder":
            return self._read_input(node)
        if node in self._reads:
            return [self._reads[node] for _ in self._at]
        like = node.meta.get("val")
        if node.op == "get_attr":
            constant = reduce(getattr, str(node.target).split("."), self._holder)
            is_known = type(constant) is torch.Tensor and not constant.is_meta
            return self._for_each_rank(constant) if is_known and _is_small(constant) else None
        operands = {n: self._values.get(n) for n in node.all_input_nodes}
        written = operands_written(node)
        if not _is_small(like) or None in operands.values() or self._are_lost(operands.values()):
            self._mark_as_unknown(values for n in written if (values := operands[n]) is not None)
            return None
        try:
            if is_collective(node):
                return self._run_collective(node, operands)
            return [self._run_on_rank(node, operands, i) for i in range(len(self._at))]
        except Exception:  # a guess raises nothing
            self._mark_as_unknown(operands[n] for n in written)
            return None

    def _for_each_rank(self, value: torch.Tensor) -> Values:
        return [local_of(value).to(HOST, copy=True) for _ in self._at]

    def _read_input(self, node: fx.Node) -> Values | None:
        given, like = self._inputs.get(node), node.meta["val"]
        if is_symbolic(like):
            return [like.node.hint for _ in self._at]
        if given is None or given.kind in ("mark", "gradient"):
            return None
        if given.index in self._known.integers:
            return [x.clone() for x in self._known.integers[given.index]]
        if given.kind == "coordinate":
            return self._read_coordinate(given)
        spec, few = given.spec, given.tensor.numel() <= FEW
        if not few or (spec is not None and (spec.layout.shards or spec.is_pending)):
            return None
        return self._for_each_rank(given.tensor)

    def _read_coordinate(self, given: Input) -> Values:
        if not self._known.integers:
            return [given.tensor.clone()]
        mesh: Any = self._known.mesh
        axis = mesh.index(given.name.removeprefix("at "))
        return [torch.full((), at[axis]) for at in mesh.coordinates()]

    def _run_on_rank(self, node: fx.Node, operands: Mapping[fx.Node, Any], i: int) -> Any:
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: operands[n][i])
        if is_symbolic(node.meta.get("val")) or target is operator.getitem:
            return target(*args, **kwargs)
        facts = facts_of(target)
        if target.namespace not in ("aten", "partita", "_c10d_functional"):
            raise NotKnown
        if facts.draws or facts.changes_metadata or facts.by_storage:
            raise NotKnown
        if target.namespace == "_c10d_functional":  # it waits
            return args[0]
        kwargs = {k: HOST if k == "device" else v for k, v in kwargs.items()}
        found = target(*args, **kwargs)
        if "empty" in target._opname:
            found.zero_()
        _check_like(found, node.meta.get("val"))
        return found

    def _run_collective(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> Values:
        name, found = str(node.args[-1]), list[Any](self._at)
        (axes,) = {wire.groups[name] for wire in self._wires if name in wire.groups}
        values, mesh = operands[node.all_input_nodes[0]], self._known.mesh
        request, like = request_of_collective(node), node.meta["val"]
        numbers = {at: i for i, at in enumerate(self._at)}
        for members in {mesh.group(axes, at) for at in self._at}:
            ranks = [numbers[at] for at in members]
            outs = [torch.empty(like.shape, dtype=like.dtype) for _ in ranks]
            run_in_one_process(request, [values[i].contiguous() for i in ranks], outs)
            for i, out in zip(ranks, outs, strict=True):
                found[i] = out
        return found

    # -- memory into which something unknown was written -------------------------------------------

    def _mark_as_unknown(self, written: Iterable[Any]) -> None:
        for x in pytree.tree_leaves([*written]):
            if isinstance(x, torch.Tensor):
                self._lost.add(x.untyped_storage()._cdata)

    def _are_lost(self, values: Iterable[Any]) -> bool:
        if not self._lost:
            return False
        tensors = (x for x in pytree.tree_leaves([*values]) if isinstance(x, torch.Tensor))
        return any(x.untyped_storage()._cdata in self._lost for x in tensors)


def _is_small(like: Any) -> bool:
    tensors = (x for x in pytree.tree_leaves(like) if isinstance(x, torch.Tensor))
    return all(x.numel() <= _SMALL and x.layout is torch.strided for x in tensors)


def _check_like(found: Any, like: Any) -> None:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(like), strict=True)
    if any((x.shape, x.dtype) != (y.shape, y.dtype) for x, y in pairs):
        raise NotKnown
