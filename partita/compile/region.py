"""Regions: a compiled part of an eager model, through which gradients flow.

A program whose results have a history is split (`split`) into a forward graph and the parts of a
backward graph. In a call each part is one `autograd.Function` (`_RegionPart`): forward has run
already, backward runs the part's graph. To autograd these are nodes like any other: what they save
goes through saved-tensor hooks (remat, ZeRO, offload), and gradients are this rank's, laid out by
duality.
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
from partita.tensor.op_facts import without_any_autocast

from .backend.built import Built
from .capture.shared_results import overlapping_results
from .captured_program import CapturedProgram
from .errors import of_anomalies
from .key import key_of
from .ledger_replay import record_moves
from .padding_boundary import Border
from .program import Call, Program, find_cotangents
from .split import Halves, split
from .verify import verify

__all__ = ["Region", "region_of"]


@dataclass(frozen=True)
class _Entrance:
    """How a tensor enters the graph of a backward.

    Attributes:
        size, stride, dtype, device: of the input, for which the graph is made.
        border: how it is padded; None where it is not.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    border: Border | None

    def enter(self, x: torch.Tensor | None) -> torch.Tensor:
        """`x` with the metadata of the input; zeros where it is None."""
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
class _BackwardPart:
    """The backward of results that go backward together.

    Attributes:
        backward: its program.
        results: places of the results among the outputs of the region.
        numbers: of these results, as in `Output.number`.
        ancestors: places of the results from which these are computed: it gives their gradients.
        graded: indices of the leaves of a call whose gradients it gives after those.
        saved: places, among what the region saves, of what it reads.
        entrances: for each of its inputs.
        reached: for each gradient that it gives, the numbers of the cotangents from which it is
            computed. Without any of them it is None, as in eager.
    """

    backward: Program
    results: list[int]
    numbers: list[int]
    ancestors: list[int]
    graded: list[int]
    saved: list[int]
    entrances: list[_Entrance]
    reached: list[frozenset[int]]

    @staticmethod
    def make(region: Region, backward: Program, results: list[int]) -> _BackwardPart:
        numbers = [o.number for o in region.given]
        ancestors = [numbers.index(o.number) for o in backward.outputs if o.number >= 0]
        return _BackwardPart(
            backward,
            results,
            [numbers[i] for i in results],
            ancestors,
            [o.index for o in backward.outputs[len(ancestors) :]],
            sorted({i.index for i in backward.inputs if i.kind in ("saved", "kept")}),
            # A fake has the device of the tensor that it stands for.
            [
                _Entrance(x.size(), x.stride(), x.dtype, x.device, backward.entering.get(i))
                for i, x in enumerate(backward.example())
            ],
            _find_reached_cotangents(backward),
        )

    def compute_gradients(
        self, cotangents: dict[int, torch.Tensor | None], saved: dict[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run the backward; the gradients of ancestors and leaves.

        Args:
            cotangents: by number, the gradients of its results.
            saved: by place, what it reads of the saved tensors.
        """
        backward = self.backward
        given: dict[str, Any] = {"saved": saved, "kept": saved, "cotangent": cotangents}
        # `once_differentiable` has grad mode off.
        with Local(), without_any_autocast():
            args = []
            for what, entrance in zip(backward.inputs, self.entrances, strict=True):
                x = given[what.kind][what.index] if what.kind in given else what.now(())
                args.append(entrance.enter(x))
            found: list[torch.Tensor | None] = list(backward.call(*args))  # type: ignore[misc]
            for i, border in backward.leaving.items():
                found[i] = border.leave(found[i])  # type: ignore[arg-type]
        absent = {n for n, g in cotangents.items() if g is None}
        if not absent:
            return found
        return [
            None if reached and reached <= absent else g
            for g, reached in zip(found, self.reached, strict=True)
        ]


@dataclass(eq=False)
class Region(CapturedProgram):
    """A program whose results have a history.

    Attributes:
        halves: its forward and its backward.
        parts: of its backward, in the order in which they run; each is one autograd node.
    """

    halves: Halves = field(init=False)
    parts: list[_BackwardPart] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.halves = split(self)
        backwards = self.halves.backwards
        # A result that gives no input a gradient goes with the first part.
        results: dict[int, list[int]] = {number: [] for number in backwards}
        for place, output in enumerate(self.given):
            if output.number >= 0:
                results.get(output.part, results[min(results)]).append(place)
        self.parts = [_BackwardPart.make(self, b, results[n]) for n, b in backwards.items()]

    @cached_property
    def unshared(self) -> list[int]:
        """The places of results that share memory with no other result and no input."""
        pairs = overlapping_results(self.halves.forward.graph.graph)
        shared = {place for pair in pairs for place in pair if max(pair) < len(self.given)}
        return [i for i in range(len(self.given)) if i not in shared]

    @property
    def runs(self) -> Program:
        return self.halves.forward

    @property
    def artifact(self) -> Built | None:
        halves = [self.halves.forward, *self.halves.backwards.values()]
        parts = [half.built for half in halves if half.built is not None]
        if not parts:
            return None
        return Built(
            parts[0].call,
            all(part.loaded for part in parts),
            sum(part.seconds for part in parts),
            self.key,
            sections=tuple(parts),
        )

    def prepare(self, call_of: Callable[[Program], Call]) -> None:
        halves = {"forward": self.halves.forward}
        for number, backward in self.halves.backwards.items():
            halves[f"backward {number}" if number else "backward"] = backward
        for name, half in halves.items():
            half.key = key_of([self.key, name])
            half.prepare(call_of)

    def run_graph(
        self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        if inputs is not None:
            known = {id(given): x for given, x in zip(self.taken, inputs, strict=True)}
            inputs = [known[id(given)] for given in self.halves.forward.inputs]
        made = self.halves.forward.run_graph(tensors, inputs)
        count = len(self.given)
        with Local():
            results, inside = list(made[:count]), iter(made[count:])
            with torch.no_grad():
                # A view could not be written: autograd would look for its base.
                for i in self.unshared:
                    results[i] = results[i].detach()
                saved = [next(inside).detach() if i < 0 else tensors[i] for i in self.halves.saved]
            for part in reversed(self.parts):  # ancestors first
                takes = [*(results[i] for i in part.ancestors), *(tensors[i] for i in part.graded)]
                values = [results[i] for i in part.results]
                given = _RegionPart.apply(part, values, [saved[n] for n in part.saved], *takes)
                for i, result in zip(part.results, given, strict=True):
                    results[i] = result
                unheard = [weakref.ref(results[i]) for i in part.results if self.given[i].unheard]
                if unheard and given[0].grad_fn is not None:
                    given[0].grad_fn.unheard = unheard
        return results


def region_of(program: CapturedProgram) -> CapturedProgram:
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
    for backward in region.halves.backwards.values():
        verify(backward, "split, backward")
    return region


def _find_reached_cotangents(backward: Program) -> list[frozenset[int]]:
    found = find_cotangents(backward)
    (end,) = backward.graph.graph.find_nodes(op="output")
    return [found.get(n, frozenset()) for n in end.args[0]]


def _check_unheard(ctx: Any) -> None:
    """Raise LayoutError where the user looks at the gradient of an `unheard` result."""
    for known in getattr(ctx, "unheard", ()):
        result = known()
        if result is not None and (result.retains_grad or result._backward_hooks):
            raise LayoutError(
                "compile: the gradient of a region's result is looked at, of which another result "
                "of the region is made",
                place=user_line(),
                operands=(
                    f"a result of shape {tuple(result.shape)}, with a hook or retain_grad()",
                ),
                reason="both come of a third value, so that their gradients go to the inputs at "
                "once: what comes by way of the other result is not in this one's",
                fixes=(
                    Fix("two regions", "that end and begin at the result whose gradient you want"),
                    Fix("the hook within the region", "where the result is made"),
                ),
            )


class _RegionPart(Function):
    """The autograd node of a part: forward passes its results on, backward runs its graph."""

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
        _check_unheard(ctx)
        part: _BackwardPart = ctx.part
        saved = dict(zip(part.saved, ctx.saved_tensors, strict=True))
        if part.backward.scope is not None and part.backward.scope.busy:
            record_moves(part.backward)
        cotangents = dict(zip(part.numbers, grads, strict=True))
        return None, None, None, *part.compute_gradients(cotangents, saved)
