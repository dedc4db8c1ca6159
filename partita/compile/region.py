"""Regions: a compiled part of an eager model, through which gradients flow.

A program whose results have a history (require gradients) is split (`split_program`) into a forward
graph and the parts of a backward graph. In a call each part is one `autograd.Function`
(`_RegionPart`): its forward only returns the results of the forward graph, its backward runs the
part's graph. These are ordinary autograd nodes: saved-tensor hooks (remat, ZeRO, offload) apply to
the tensors that they save. Gradients are local tensors, with the duals of the results' placements.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from partita.comm import user_line
from partita.comm.collective import WAIT
from partita.graph.errors import make_anomaly_mode_error
from partita.graph.graph_nodes import (
    NOTE,
    add_call,
    copy_node,
    drop_unused,
    lazy_graph_module,
    note_of,
)
from partita.graph.graph_text import make_key
from partita.graph.memory import storages_of
from partita.graph.program import (
    Built,
    Call,
    Input,
    Output,
    PaddingBoundary,
    Program,
    find_cotangents,
)
from partita.graph.shared_memory import overlapping_results
from partita.graph.verify import verify
from partita.guards.captured_program import CapturedProgram, record_moves
from partita.layout import Fix, LayoutError
from partita.tensor.op_facts import facts_of, without_any_autocast


@dataclass(frozen=True)
class _Entrance:
    """The conversion of a tensor to an input of a backward graph.

    Attributes:
        size, stride, dtype, device: the metadata of the input for which the graph is compiled.
        border: how it is padded; None if it is not.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    border: PaddingBoundary | None

    def enter(self, x: torch.Tensor | None) -> torch.Tensor:
        """Returns `x` as the graph expects this input: padded, with its strides and dtype.

        None becomes zeros.
        """
        if x is None:
            return self._new().zero_()
        x = x.detach()
        if x.layout is not torch.strided:
            x = x.to_dense()
        if self.border is not None:
            x = self.border.pad_input(x)
        return x if x.stride() == self.stride else self._new().copy_(x)

    def _new(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class _BackwardPart:
    """The backward of results whose gradients are computed together.

    Args:
        given: the outputs of the region.
        results: the same as the attribute.

    Attributes:
        backward: its program.
        results: positions of the results among the outputs of the region.
        numbers: the `Output.number` of these results.
        ancestors: positions of the results from which `results` are computed. Their gradients are
            the part's first outputs.
        graded: indices of the leaves of a call whose gradients are the part's next outputs.
        saved: the positions, among the tensors that the region saves, of those that the part reads.
        entrances: an `_Entrance` for each input of `backward`.
        reached: for each gradient that the part returns, the numbers of the cotangents on which it
            depends. If all of these are None, the gradient is None, as in eager.
    """

    def __init__(self, backward: Program, given: Sequence[Output], results: list[int]):
        numbers = [o.number for o in given]
        self.backward, self.results = backward, results
        self.numbers = [numbers[i] for i in results]
        self.ancestors = [numbers.index(o.number) for o in backward.outputs if o.number >= 0]
        self.graded = [o.index for o in backward.outputs[len(self.ancestors) :]]
        self.saved = sorted({i.index for i in backward.inputs if i.kind in ("saved", "kept")})
        self.entrances = [
            # A fake has the device of the tensor that it replaces.
            _Entrance(x.size(), x.stride(), x.dtype, x.device, backward.entering.get(i))
            for i, x in enumerate(backward.example())
        ]
        cotangents = find_cotangents(backward)
        (end,) = backward.graph.graph.find_nodes(op="output")
        self.reached = [cotangents.get(n, frozenset()) for n in end.args[0]]

    def compute_gradients(
        self, cotangents: dict[int, torch.Tensor | None], saved: dict[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Runs this part. Returns the gradients of `ancestors`, followed by those of `graded`.

        Args:
            cotangents: the gradients of its results, by number.
            saved: the saved tensors that it reads, by position.
        """
        backward = self.backward
        given: dict[str, Any] = {"saved": saved, "kept": saved, "cotangent": cotangents}
        # `once_differentiable` has turned grad mode off.
        with local_ops(), without_any_autocast():
            args = []
            for what, entrance in zip(backward.inputs, self.entrances, strict=True):
                x = given[what.kind][what.index] if what.kind in given else what.local_value(())
                args.append(entrance.enter(x))
            found: list[torch.Tensor | None] = list(backward.call(*args))  # type: ignore[misc]
            for i, border in backward.leaving.items():
                found[i] = border.unpad_output(found[i])  # type: ignore[arg-type]
        absent = {n for n, g in cotangents.items() if g is None}
        if not absent:
            return found
        return [
            None if reached and reached <= absent else g
            for g, reached in zip(found, self.reached, strict=True)
        ]


@dataclass(eq=False)
class Region(CapturedProgram):
    """A compiled part of an eager model: a program with a forward and a backward graph.

    Attributes:
        halves: the forward and the parts of the backward, as programs.
        parts: the parts of the backward, in the order in which they run; each is one autograd node.
    """

    halves: ForwardBackwardPair = field(init=False)
    parts: list[_BackwardPart] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.halves = split_program(self)
        backwards = self.halves.backwards
        # A result through which no input gets a gradient goes with the first part.
        results: dict[int, list[int]] = {number: [] for number in backwards}
        for place, output in enumerate(self.forward_outputs):
            if output.number >= 0:
                results.get(output.part, results[min(results)]).append(place)
        self.parts = [
            _BackwardPart(b, self.forward_outputs, results[n]) for n, b in backwards.items()
        ]

    @cached_property
    def unshared(self) -> list[int]:
        """The positions of the results that share no memory with another result or an input."""
        pairs = overlapping_results(self.halves.forward.graph.graph)
        shared = {
            place for pair in pairs for place in pair if max(pair) < len(self.forward_outputs)
        }
        return [i for i in range(len(self.forward_outputs)) if i not in shared]

    @property
    def runs(self) -> Program:
        return self.halves.forward

    @property
    def artifact(self) -> Built | None:
        halves = [self.halves.forward, *self.halves.backwards.values()]
        parts = [half.built for half in halves if half.built is not None]
        return Built.of_parts(parts[0].call, self.key, parts) if parts else None

    def prepare(self, call_of: Callable[[Program], Call]) -> None:
        halves = {"forward": self.halves.forward}
        for number, backward in self.halves.backwards.items():
            halves[f"backward {number}" if number else "backward"] = backward
        for name, half in halves.items():
            half.key = make_key([self.key, name])
            half.prepare(call_of)

    def run_graph(
        self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        if inputs is not None:
            known = {id(given): x for given, x in zip(self.forward_inputs, inputs, strict=True)}
            inputs = [known[id(given)] for given in self.halves.forward.inputs]
        made = self.halves.forward.run_graph(tensors, inputs)
        count = len(self.forward_outputs)
        with local_ops():
            results, inside = list(made[:count]), iter(made[count:])
            with torch.no_grad():
                # Detached, so that the caller may write them in place: autograd would look for
                # the base of a view.
                for i in self.unshared:
                    results[i] = results[i].detach()
                saved = [next(inside).detach() if i < 0 else tensors[i] for i in self.halves.saved]
            for part in reversed(self.parts):  # ancestors first
                takes = [*(results[i] for i in part.ancestors), *(tensors[i] for i in part.graded)]
                values = [results[i] for i in part.results]
                kept = [saved[n] for n in part.saved]
                with torch.enable_grad():  # for a step that enables gradients itself
                    given = _RegionPart.apply(part, values, kept, *takes)
                for i, result in zip(part.results, given, strict=True):
                    results[i] = result
                hooks_miss_gradient = [
                    weakref.ref(results[i])
                    for i in part.results
                    if self.forward_outputs[i].hooks_miss_gradient
                ]
                if hooks_miss_gradient and given[0].grad_fn is not None:
                    given[0].grad_fn.hooks_miss_gradient = hooks_miss_gradient
        return results


def region_of(program: CapturedProgram) -> CapturedProgram:
    """Returns the program split into forward and backward (`Region`), if its results require grad.

    Otherwise returns the program itself.

    Raises:
        IllegalGraph: the forward or the backward breaks the grammar.
        CaptureError: torch's anomaly mode is on, which would check backward for NaN.
    """
    if not any(o.kind == "cotangent" for o in program.outputs):
        return program
    if torch.is_anomaly_enabled():
        raise make_anomaly_mode_error()
    region = Region(**{f.name: getattr(program, f.name) for f in fields(program) if f.init})
    verify(region, "split")
    verify(region.halves.forward, "split, forward")
    for backward in region.halves.backwards.values():
        verify(backward, "split, backward")
    return region


def _check_hooks(ctx: Any) -> None:
    """Raises LayoutError if a hook would get an incomplete gradient (`hooks_miss_gradient`)."""
    for known in getattr(ctx, "hooks_miss_gradient", ()):
        result = known()
        if result is not None and (result.retains_grad or result._backward_hooks):
            raise LayoutError(
                "compile: a hook or retain_grad() is on a region's result from which another "
                "result of the region is computed",
                place=user_line(),
                operands=(
                    f"a result of shape {tuple(result.shape)}, with a hook or retain_grad()",
                ),
                reason="backward runs once for both results, so the gradient at this result "
                "lacks the part that flows through the other result",
                fixes=(
                    Fix(
                        "b = second(first(x))",
                        "two regions: the first ends at the result with the hook",
                    ),
                    Fix("y.register_hook(hook)", "within the region, where the result is computed"),
                ),
            )


class _RegionPart(Function):
    """The autograd node of a part: forward returns its results, backward runs its graph."""

    @staticmethod
    def forward(
        ctx: Any,
        part: _BackwardPart,
        results: list[torch.Tensor],
        saved: Sequence[torch.Tensor],
        *takes: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.part = part
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_hooks(ctx)
        part: _BackwardPart = ctx.part
        saved = dict(zip(part.saved, ctx.saved_tensors, strict=True))
        if part.backward.scope is not None and part.backward.scope.busy:
            record_moves(part.backward)
        cotangents = dict(zip(part.numbers, grads, strict=True))
        return None, None, None, *part.compute_gradients(cotangents, saved)


# -- the split into forward and backward -----------------------------------------------------------

_aten = torch.ops.aten
_CAST = _aten._to_copy.default


@dataclass(eq=False)
class ForwardBackwardPair:
    """The two halves of a region as programs: the forward, and the parts of the backward.

    Attributes:
        forward: the program that returns the region's outputs except gradients, followed by the
            values that it saves.
        backwards: the parts of the backward by number, in the order in which they run. The inputs
            of a part are the values of `saved` that it reads, followed by gradients of results.
            `Input.index` of a value is its position in `saved`.
        saved: for each value that backward reads: its index among the leaves (tensors) of a call,
            or -1 if forward saves it. Those with -1 are in the order in which forward returns them.
    """

    forward: Program
    backwards: dict[int, Program]
    saved: list[int]


def split_program(program: Program) -> ForwardBackwardPair:
    """Returns a region's program split into forward and backward. Changes its graph.

    Backward gets the nodes that no result needs: those that depend on gradients, and those that
    graph passes have added for recomputation. Forward does not save a view of all elements of a
    tensor, or a cast of an input. Backward makes it again, from the base or the input. A parameter
    that backward gathers again is saved as a shard. Its gathered value can be freed in between.
    """
    graph = program.graph.graph
    given = dict(zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True))
    late = _find_backward_calls(program, given)
    _make_views_again(graph, late)
    drop_unused(graph)
    late.intersection_update(graph.nodes)
    needs = _read_by(program, late, given)
    # A number is not a tensor of the call, and an input that forward writes has changed by then.
    inside = [n for n in needs if n not in given or _is_no_tensor(given[n]) or _is_written(n)]
    parts = sorted({o.part for o in program.outputs if o.kind == "cotangent"})
    return ForwardBackwardPair(
        _make_forward(program, given, late, inside),
        {part: _make_backward(program, given, late, needs, inside, part) for part in parts},
        [-1 if n in inside else given[n].index for n in needs],
    )


def _is_no_tensor(given: Input) -> bool:
    return given.index < 0 or given.kind == "number"


def _results_of_program(program: Program) -> list[tuple[Output, fx.Node]]:
    (end,) = program.graph.graph.find_nodes(op="output")
    return list(zip(program.outputs, end.args[0], strict=True))


def _find_backward_calls(program: Program, given: dict[fx.Node, Input]) -> set[fx.Node]:
    """Returns the calls that belong to backward."""
    graph = program.graph.graph
    needed = {node for output, node in _results_of_program(program) if output.kind != "cotangent"}
    needed.update(n for n in graph.nodes if n.target is _aten.copy_.default)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    late = {n for n, i in given.items() if i.kind == "cotangent"}
    for node in graph.nodes:
        if node.op != "call_function" or node in needed:
            continue
        after = not late.isdisjoint(node.all_input_nodes)
        piece = node.target is operator.getitem  # an item of what an earlier call returned
        if after or (note_of(node).phase == "backward" and not piece):
            late.add(node)
    return late - set(given)


def _make_views_again(graph: fx.Graph, late: set[fx.Node]) -> None:
    """Copies views, and casts of inputs, that backward reads from forward into backward."""
    copies: dict[fx.Node, fx.Node] = {}

    def copy_view(node: fx.Node, before: fx.Node) -> fx.Node:
        if node not in copies:
            source = node.all_input_nodes[0]
            own = copy_view(source, before) if _is_cheap(source) else source
            with graph.inserting_before(before):
                copies[node] = copy_node(graph, node, lambda n: own if n is source else n)
            copies[node].meta[NOTE] = replace(note_of(node), phase="backward")
        return copies[node]

    for node in [n for n in graph.nodes if n in late]:
        for used in node.all_input_nodes:
            if used not in late and _is_cheap(used):
                node.replace_input_with(used, copy_view(used, node))
    late.update(copies.values())


def _is_cheap(node: fx.Node) -> bool:
    return _from_input(node) if node.target is _CAST else _is_whole_view(node)


def _is_whole_view(node: fx.Node) -> bool:
    """True if a node is a view of a whole tensor. Saving a view of a part takes less memory."""
    if not facts_of(node.target).is_view or len(node.all_input_nodes) != 1 or node.target is WAIT:
        return False
    shown, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    tensors = isinstance(shown, torch.Tensor) and isinstance(value, torch.Tensor)
    return bool(tensors and value.numel() >= shown.numel())


def _from_input(node: fx.Node) -> bool:
    while node.target is _CAST or _is_whole_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _read_by(program: Program, late: set[fx.Node], given: dict[fx.Node, Input]) -> list[fx.Node]:
    """Returns the values of inputs and of forward that backward reads, in order."""
    read = {used for n in late for used in n.all_input_nodes}
    read.update(n for output, n in _results_of_program(program) if output.kind == "cotangent")
    nodes = program.graph.graph.nodes
    return [n for n in nodes if n in read and n not in late and _is_kept(n, given)]


def _is_kept(node: fx.Node, given: dict[fx.Node, Input]) -> bool:
    kind = given[node].kind if node in given else node.op
    return kind not in ("get_attr", "cotangent", "coordinate")


def _is_written(node: fx.Node) -> bool:
    return any(u.target is _aten.copy_.default and u.args[0] is node for u in node.users)


# -- the halves ------------------------------------------------------------------------------------


def _make_forward(
    program: Program, given: dict[fx.Node, Input], late: set[fx.Node], saved: list[fx.Node]
) -> Program:
    new = _NewGraph(program)
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.graph.nodes:
        if node.target is _aten.copy_.default and not copies:  # before anything is written
            for taken in filter(given.__contains__, saved):
                copy = add_call(new.graph, _aten.clone.default, (new.of[taken],))
                copy.meta = {"val": taken.meta["val"].clone(), NOTE: note_of(taken)}
                copies[taken] = copy
        if node in given:
            if given[node].kind != "cotangent":
                new.take(node, given[node])
        elif node.op != "output" and node not in late:
            new.copy(node)
    kept = [(o, n) for o, n in _results_of_program(program) if o.kind != "cotangent"]
    values = [new.of[n] for _, n in kept]
    values += [copies.get(n, new.of[n]) for n in saved]
    outputs = [o for o, _ in kept] + [Output("saved", None) for _ in saved]
    return new.program(values, outputs, program)


def _make_backward(
    program: Program,
    given: dict[fx.Node, Input],
    late: set[fx.Node],
    saved: list[fx.Node],
    inside: list[fx.Node],
    part: int,
) -> Program:
    new = _NewGraph(program)
    own = _with_memory_of_their_own(program, [n for n in saved if n not in given])
    for number, node in enumerate(saved):
        if node in given and node not in inside:
            what = replace(given[node], kind="kept", index=number)
        else:
            what = Input(node.name, "saved", own.get(node, node.meta["val"]), number)
        new.take(node, what)
        new.of[node].meta["val"] = own.get(node, node.meta["val"])
    for node, what in given.items():
        if what.kind in ("cotangent", "coordinate"):
            new.take(node, what)
    for node in program.graph.graph.nodes:
        if node in late or node.op == "get_attr":
            new.copy(node)
    found = [(o, n) for o, n in _results_of_program(program) if o.kind == "cotangent"]
    own_part = [(o, n) for o, n in found if o.part == part]
    return new.program([new.of[n] for _, n in own_part], [o for o, _ in own_part], None)


def _with_memory_of_their_own(
    program: Program, nodes: list[fx.Node]
) -> dict[fx.Node, torch.Tensor]:
    """Returns fake values of nodes, which share a storage only if the nodes' values do."""
    if not nodes:
        return {}
    storages = storages_of(program)
    memory: dict[int, torch.Tensor] = {}
    found = {}
    for node in nodes:
        value = node.meta["val"]
        (s,) = storages.of[node]
        with value.fake_mode, torch.no_grad():
            if s not in memory:
                size = -(-storages.nbytes[s] // value.itemsize)
                memory[s] = torch.empty(size, dtype=value.dtype, device=value.device)
            flat = memory[s].view(value.dtype)
            found[node] = flat.as_strided(value.shape, value.stride())
    return found


class _NewGraph:
    """A new graph, built from parts of a program's graph."""

    def __init__(self, program: Program):
        self.graph, self._from = fx.Graph(), program
        self.of: dict[fx.Node, fx.Node] = {}
        self._inputs: list[tuple[fx.Node, Input]] = []

    def take(self, node: fx.Node, what: Input) -> None:
        """Adds an input to the new graph, for the value of the old node `node`.

        Args:
            what: the description of the input.
        """
        self.of[node] = new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        self._inputs.append((new, what))

    def copy(self, node: fx.Node) -> None:
        self.of[node] = copy_node(self.graph, node, self.of.__getitem__)

    def program(
        self, values: list[fx.Node], outputs: list[Output], whole: Program | None
    ) -> Program:
        """Returns the new graph as a program with these outputs.

        Args:
            values: the nodes that it returns.
            outputs: their descriptions.
            whole: the program whose result structure it gets, or None.
        """
        self.graph.output(values)
        drop_unused(self.graph)
        inputs = []
        for node, what in self._inputs:
            if node.users:
                inputs.append(what)
            else:
                self.graph.erase_node(node)
        module = lazy_graph_module(self._from.graph, self.graph)
        module.meta = dict(self._from.graph.meta)
        used = {n.args[-1] for n in self.graph.nodes if n.op == "call_function" and n.args}
        names = {name for name in used if isinstance(name, str)}
        return Program(
            module,
            inputs,
            outputs,
            whole.result if whole else pytree.tree_structure(()),
            whole.constants if whole else [],
            whole.cleared if whole else [],
            {name: at for name, at in self._from.groups.items() if name in names},
        )
