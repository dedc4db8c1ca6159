"""How does a compiled part of an eager model run, and how do gradients cross it?

As one `autograd.Function` whose forward is a graph and whose backward is another. To autograd it is
any other node: what it saves goes through the hooks that are set (remat, ZeRO, an offload), the
gradients that it takes and gives are this rank's, laid out by duality.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.tensor.autocast import without_any_autocast

from .errors import of_anomalies
from .key import key_of
from .overlapping_results import overlapping_results
from .program import Call, Program
from .split import Halves, split
from .told import tell
from .uneven import Border
from .verify import verify

__all__ = ["Region", "region_of"]


@dataclass(frozen=True)
class _Entrance:
    """How a tensor goes into the graph of a backward.

    Attributes:
        size, stride, dtype, device: for which the graph is made.
        border: how it is padded first.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    border: Border | None

    def enter(self, x: torch.Tensor | None) -> torch.Tensor:
        """`x` as the graph takes it; zeros where it is None."""
        if x is None:
            return self._new().zero_()
        x = x.detach()
        if x.layout is not torch.strided:
            x = x.to_dense()
        if self.border is not None:
            x = self.border.enter(x)
        return x if x.stride() == self.stride else self._new().copy_(x)

    def _new(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(eq=False)
class Region(Program):
    """A program whose results have a history: gradients of them are given later, and taken on.

    Attributes:
        halves: its forward and its backward.
        entrances: of its backward's inputs.
        graded: places, among the tensors of a call, of those whose gradients it gives.
        plain: the numbers of the results without a history.
        reached: for each gradient that it gives, the places of the results' gradients that it is
            computed of. Where none of them is there it is None, as without a graph.
    """

    halves: Halves = field(init=False)
    entrances: list[_Entrance] = field(init=False)
    graded: list[int] = field(init=False)
    plain: list[int] = field(init=False)
    reached: list[frozenset[int]] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.halves = split(self)
        backward = self.halves.backward
        self.graded = [o.index for o in backward.outputs]
        # The device of what stands in for a tensor is that of the tensor.
        self.entrances = [
            _Entrance(x.size(), x.stride(), x.dtype, x.device, backward.entering.get(i))
            for i, x in enumerate(backward.example())
        ]
        self.reached = _reached(backward)
        self.plain = [i for i, o in enumerate(self.given) if o.number < 0]

    @cached_property
    def alone(self) -> list[int]:
        """The results that share memory with no other, nor with an input."""
        pairs = overlapping_results(self.halves.forward.graph.graph)
        shared = {place for pair in pairs for place in pair if max(pair) < len(self.given)}
        return [i for i in range(len(self.given)) if i not in shared]

    @cached_property
    def ancestors(self) -> list[int]:
        """The results with a history of which another one is made: gradients that come to that one
        go on to the inputs at once, and not by way of these."""
        graph = self.halves.forward.graph.graph
        (end,) = graph.find_nodes(op="output")
        made = [end.args[0][i] for i, o in enumerate(self.given) if o.number >= 0]
        places = [i for i, o in enumerate(self.given) if o.number >= 0]
        behind: set[Any] = set()
        reached = [below for node in made for below in node.all_input_nodes]
        while reached:
            node = reached.pop()
            if node not in behind and node.target is not torch.ops.aten.detach.default:
                behind.add(node)
                reached += node.all_input_nodes
        return [i for i, node in zip(places, made, strict=True) if node in behind]

    @property
    def runs(self) -> Program:
        return self.halves.forward

    def prepare(self, call_of: Callable[[Program], Call]) -> None:
        for name, half in (
            ("forward", self.halves.forward),
            ("backward", self.halves.backward),
        ):
            half.key = key_of([self.key, name])
            half.prepare(call_of)

    def numbered(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of the gradients of all results those of results with a history, by number."""
        pairs = zip(self.given, grads, strict=True)
        return [g for o, g in pairs if o.number >= 0]

    def made(
        self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        if inputs is not None:
            known = {id(given): x for given, x in zip(self.taken, inputs, strict=True)}
            inputs = [known[id(given)] for given in self.halves.forward.inputs]
        with Local():
            made: Sequence[torch.Tensor] = _Region.apply(
                self, tensors, inputs, *[tensors[i] for i in self.graded]
            )
            if self.ancestors:
                node: Any = made[self.ancestors[0]].grad_fn
                if node is not None:
                    node.ancestors = [weakref.ref(made[i]) for i in self.ancestors]
        return made


def region_of(program: Program) -> Program:
    """The program, as a region if it gives gradients for those of its results.

    Raises:
        IllegalGraph: one of its halves breaks the grammar.
        CaptureError: the backward pass is to be watched for NaN.
    """
    if not any(o.kind == "cotangent" for o in program.outputs):
        return program
    if torch.is_anomaly_enabled():
        raise of_anomalies()
    region = Region(**{f.name: getattr(program, f.name) for f in fields(program) if f.init})
    verify(region, "split")
    verify(region.halves.forward, "split, forward")
    verify(region.halves.backward, "split, backward")
    return region


def _reached(backward: Program) -> list[frozenset[int]]:
    graph = backward.graph.graph
    given = dict(zip(graph.find_nodes(op="placeholder"), backward.inputs, strict=True))
    nothing: frozenset[int] = frozenset()
    found: dict[Any, frozenset[int]] = {}
    for node in graph.nodes:
        what = given.get(node)
        if what is not None and what.kind == "cotangent":
            found[node] = frozenset((what.index,))
        else:
            found[node] = nothing.union(*(found[n] for n in node.all_input_nodes))
    (end,) = graph.find_nodes(op="output")
    return [found.get(n, nothing) for n in end.args[0]]


def _check_unheard(ctx: Any) -> None:
    """Raise where the user looks at a gradient that does not come to where he looks."""
    for known in getattr(ctx, "ancestors", ()):
        result = known()
        if result is not None and (result.retains_grad or result._backward_hooks):
            raise LayoutError(
                "compile: the gradient of a region's result is looked at, of which another result "
                "of the region is made",
                place=user_line(),
                operands=(
                    f"a result of shape {tuple(result.shape)}, with a hook or retain_grad()",
                ),
                reason="a region's gradients go from its results to its inputs at once: what comes "
                "by way of the other result is not in this one's",
                fixes=(
                    Fix("two regions", "that end and begin at the result whose gradient you want"),
                    Fix("the hook within the region", "where the result is made"),
                ),
            )


class _Region(Function):
    @staticmethod
    def forward(
        ctx: Any,
        region: Region,
        tensors: Sequence[Any],
        inputs: Sequence[torch.Tensor] | None,
        *graded: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.region = region
        forward = region.halves.forward
        made = forward.made(tensors, inputs)
        count = len(region.given)
        results, inside = list(made[:count]), iter(made[count:])
        for i in region.alone:  # a view could not be written: autograd would look for its base
            results[i] = results[i].detach()
        ctx.save_for_backward(
            *[next(inside).detach() if i < 0 else tensors[i] for i in region.halves.saved]
        )
        ctx.mark_non_differentiable(*[results[i] for i in region.plain])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_unheard(ctx)
        region, backward = ctx.region, ctx.region.halves.backward
        saved = ctx.saved_tensors
        if backward.scope is not None and backward.scope.busy:
            tell(backward)
        cotangents = region.numbered(grads)
        given = {"saved": saved, "kept": saved, "cotangent": cotangents}
        # And without gradients, which `once_differentiable` sees to.
        with Local(), without_any_autocast():
            args = []
            for what, entrance in zip(backward.inputs, region.entrances, strict=True):
                x = given[what.kind][what.index] if what.kind in given else what.now(())
                args.append(entrance.enter(x))
            found = list(backward.call(*args))
            for i, border in backward.leaving.items():
                found[i] = border.leave(found[i])
        absent = {i for i, g in enumerate(cotangents) if g is None}
        if absent:
            found = [
                None if reached and reached <= absent else g
                for g, reached in zip(found, region.reached, strict=True)
            ]
        return None, None, None, *found
