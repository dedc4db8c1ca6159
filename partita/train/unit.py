"""What happens to one block's parameters in a forward and its backward?

They are gathered before its forward and released after it. Autograd wants some of them again: it
is handed a note of where each stood, and gathers them when it reads the note. So nothing that was
gathered is ever saved, and no graph, alias or cast can make it live longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import saved_tensors_hooks

from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.engine import in_backward, saving_hooks
from partita.tensor.spec import Spec
from partita.tensor.watch import HERE

from .blocks import Block
from .flat import Flat
from .in_graph import InGraph
from .nested import map_tensors, tensors_in

if TYPE_CHECKING:
    from .zero import Zero

__all__ = ["Shares", "Unit"]


_ALONE = 1 << 22
"""Bytes from which a parameter travels alone: one collective more costs less than its copies."""


@dataclass(frozen=True)
class Shares:
    """A rank's shares of the gradients of one flat, a row for each rank; not all may have one."""

    sums: torch.Tensor
    used: list[bool]


class Unit:
    """One block's parameters: at rest, on their way, or here.

    Attributes:
        depth: forwards of the block that have begun and not ended.
        needed: was it read in backward, as far as is known, the last time?
        busy: the calls whose backward has begun and not ended.
        calls: the forwards whose gradients are yet to come; the last one's are sent with all.
        held: whole-size gradients that were kept, by number of the flat.
    """

    def __init__(self, zero: Zero, block: Block):
        self.zero, self.name, self.slots = zero, block.name, block.slots
        self._modules = block.modules
        self.depth = 0
        self.needed = self.saves_unseen
        self.busy: set[Call] = set()
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self.held: dict[int, Shares] = {}
        self._shown = False
        self._versions: list[int] = []
        self._shards: list[DTensor] = []
        groups: dict[tuple[torch.dtype, int | None], list[int]] = {}
        shards = self.shards()
        for i, p in enumerate(shards):
            dtype = zero.precision.param_dtype or p.dtype
            alone = zero.whole(p._spec).largest * dtype.itemsize >= _ALONE
            groups.setdefault((dtype, i if alone else None), []).append(i)
        self.groups = list(groups.values())
        self.flats = []
        for (dtype, _), members in groups.items():
            specs = [shards[i]._spec for i in members]
            wholes = [zero.whole(s) for s in specs]
            device = shards[members[0]].device
            self.flats.append(Flat(self.name, wholes, specs, zero.axes, dtype, device))
        for module in block.modules:
            module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._end, always_call=True, with_kwargs=True)
        self._open: list[_Forward | None] = []
        self._in_graph = InGraph(self)

    def shards(self) -> list[DTensor]:
        """The parameters at rest, as the modules hold them now."""
        if not self._shown:
            self._shards = [s[0].owner._parameters[s[0].attr] for s in self.slots]  # type: ignore[misc]
        return self._shards

    @property
    def saves_unseen(self) -> bool:
        """May there be a checkpoint within: of a module's part, or of its own forward?"""
        return any(next(m.children(), m) is not m or "forward" in vars(m) for m in self._modules)

    # -- where the bytes are -----------------------------------------------------------------------

    @property
    def alive(self) -> int:
        """Bytes that are gathered, or on their way."""
        return sum(flat.alive for flat in self.flats)

    @property
    def _is_ready(self) -> bool:
        return bool(self.depth or self.busy) and all(flat.here for flat in self.flats)

    def start(self) -> None:
        """Begin to gather."""
        if self._is_ready:
            return
        shards = self.shards()
        versions = [_version(p) for p in shards]
        if versions != self._versions and not self.depth and not self.busy:
            for flat in self.flats:  # what is persistent is out of date
                flat.release()
        self._versions = versions
        for flat, members in zip(self.flats, self.groups, strict=True):
            flat.start([shards[i] for i in members], "regather" if in_backward() else "gather")
        self.zero.note_alive()

    def gather(self) -> None:
        """Have everything here."""
        if self._is_ready:
            return
        self.start()
        for flat in self.flats:
            flat.finish()
        self.zero.note_alive()

    def check_unwritten(self, flat: Flat, i: int, versions: list[int]) -> None:
        """Is the flat's parameter `i` as it was when its shard had its place in `versions`?

        Raises:
            RuntimeError: as autograd's own, which sees no shards.
        """
        number = self.groups[self.flats.index(flat)][i]
        before, now = versions[number], self._versions[number]
        if before != now:
            slot = self.slots[number][0]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {slot.attr} of a {type(slot.owner).__name__} in the block "
                f"{self.name!r} is at version {now}; expected version {before}"
            )

    def release(self) -> None:
        """Free what is gathered, unless a forward or backward is using it."""
        if not self.depth and not self.busy and not self.zero.persistent:
            for flat in self.flats:
                flat.release()

    def settle(self) -> None:
        """Forget a forward or a backward that broke off."""
        self.busy.clear()
        self.calls.clear()
        self._open.clear()
        self.depth = 0
        self._hide()

    # -- what the modules see ----------------------------------------------------------------------

    def _show(self, call: Call | None) -> None:
        self.shards()
        self._shown = True
        with Local():
            if call is not None and call.trains:
                plain = _Gathered.apply(self.zero.token(self), call)
            else:
                plain = [v for flat in self.flats for v in flat.views()]
        specs = [p.whole for flat in self.flats for p in flat.pieces]
        order = [i for members in self.groups for i in members]
        for i, t, spec in zip(order, plain, specs, strict=True):
            whole = tagged(t, spec)
            # Of which version: remat compares it with that of the next time (remat/reads.py).
            whole._gathered_from = (self._shards[i], self._versions[i])  # type: ignore[attr-defined]
            for slot in self.slots[i]:
                slot.owner._parameters[slot.attr] = whole  # type: ignore[assignment]

    def _hide(self) -> None:
        if self._shown:
            for places, p in zip(self.slots, self._shards, strict=True):
                for slot in places:
                    slot.owner._parameters[slot.attr] = p  # type: ignore[assignment]
            self._shown = False

    # -- forward -----------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if HERE.capturing:
            self._in_graph.begin()
            return self._prepared(args, kwargs, None)
        self._open.append(None)
        if self.depth:  # a tied weight's other module, or the same module again, within
            self.depth += 1
            return None
        self.zero.enter_forward(self)
        self.depth = 1
        call = None
        if torch.is_grad_enabled():
            graded = any(t.requires_grad for t in tensors_in((args, kwargs)))
            if graded or any(p.requires_grad for p in self.shards()):
                call = Call(self, graded)
        self._show(call)
        if call is not None:
            self._open[-1] = _Forward(call)
        return self._prepared(args, kwargs, call)

    def _prepared(self, args: Any, kwargs: Any, call: Call | None) -> Any:
        """The inputs of a forward, cast and marked; None where they stay as they are."""
        dtype = self.zero.precision.param_dtype
        cast = dtype is not None and self.zero.precision.cast_inputs
        marks = call is not None and call.watches_inputs
        if not cast and not marks:
            return None

        def prepared(t: torch.Tensor) -> torch.Tensor:
            if cast and t.is_floating_point():
                t = t.to(dtype)
            if marks and t.requires_grad:
                t = _leave(t, call)
            return t

        return map_tensors(prepared, args), map_tensors(prepared, kwargs)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if HERE.capturing:
            self._in_graph.end()
            return
        if not self._open:
            return
        forward = self._open.pop()
        self.depth = max(0, self.depth - 1)
        if forward is not None:
            forward.close()
            for t in tensors_in(output):
                if t.requires_grad:
                    with Local():
                        t.register_hook(forward.call.begin_backward)
        if not self.depth:
            # In a recompute the backward that asked for it goes on with what is here.
            if not in_backward():
                self._hide()
                self.release()
            elif not self.busy:
                self._hide()


def _version(p: torch.Tensor) -> int:
    with Local():
        return p._version


class Call:
    """One forward of a block, as its backward sees it.

    Attributes:
        trains: does any of the block's parameters get a gradient?
        needs: will backward read the parameters? Not of an embedding, say. What a checkpoint within
            saves is not seen here.
        watches_inputs: is the block done only when its inputs' gradients are there? Only where a
            parameter gets none: else no node reads a parameter after its own gradient is complete.
    """

    def __init__(self, unit: Unit, graded: bool):
        self.unit = unit
        self.needs = unit.saves_unseen
        wanting = [p.requires_grad for p in unit.shards()]
        self.trains = any(wanting)
        self.watches_inputs = graded and not all(wanting)
        if self.trains and not in_backward():
            unit.calls.add(self)
        self._to_come = {"parameters"} if self.trains else set()
        self._to_come |= {"inputs"} if self.watches_inputs else set()
        self._came: set[str] = set()

    def begin_backward(self, *_: Any) -> None:
        """The first gradient of an output is here."""
        unit = self.unit
        if self in unit.busy or not self.needs:
            return
        unit.zero.enter_backward(unit)
        unit.busy.add(self)
        if not unit._shown:
            # A checkpoint within the block runs parts of its forward again.
            with torch.enable_grad():
                unit._show(Call(unit, False))

    def came(self, what: str) -> None:
        """The gradients of the "parameters", or of the "inputs", are complete."""
        self._came.add(what)
        if self._came >= self._to_come:
            self._came.clear()
            unit = self.unit
            unit.busy.discard(self)
            if not unit.busy and not unit.depth:
                unit._hide()
            unit.release()

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the gathered parameters, in the order of the flats."""
        unit, zero, at = self.unit, self.unit.zero, 0
        unit.calls.discard(self)
        for k, flat in enumerate(unit.flats):
            some = grads[at : at + len(flat.pieces)]
            at += len(flat.pieces)
            if all(g is None for g in some):
                continue
            dtype = zero.precision.grad_dtype or flat.dtype
            held = unit.held.pop(k, None)
            used = [g is not None for g in some]
            if held is not None:
                used = [a or b for a, b in zip(used, held.used, strict=True)]
            shares = Shares(flat.shares(some, dtype, held and held.sums), used)
            if zero.keeps_shares or unit.calls:
                unit.held[k] = shares
            else:
                zero.reduce(unit, k, shares)


class _Forward:
    """Keeps autograd from keeping what is gathered, while one forward of a block runs."""

    def __init__(self, call: Call):
        self.call = call
        self._flats = call.unit.flats
        self._other = saving_hooks()
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def close(self) -> None:
        self._hooks.__exit__(None, None, None)

    def _pack(self, t: torch.Tensor) -> Any:
        with Local():
            for flat in self._flats:
                if flat.holds(t):
                    self.call.needs = self.call.unit.needed = True
                    return _Stood(self.call.unit, flat, t)
            place = _cast_of(t, self.call.unit)
            if place is not None:
                self.call.needs = self.call.unit.needed = True
                return _Cast(self.call.unit, place, t)
        return _Other(self._other, t)

    @staticmethod
    def _unpack(packed: _Stood | _Cast | _Other) -> torch.Tensor:
        return packed.tensor()


class _Stood:
    """Where a view of a gathered parameter stood."""

    def __init__(self, unit: Unit, flat: Flat, t: torch.Tensor):
        self.unit, self.flat, self.spec = unit, flat, _spec(t)
        self.place = (t.dtype, t.storage_offset(), t.size(), t.stride())
        self.versions = unit._versions

    def tensor(self) -> torch.Tensor:
        self.unit.gather()
        if self.unit._versions != self.versions:
            offset, n = self.place[1], self.flat.n
            for i, piece in enumerate(self.flat.pieces):
                if 0 <= offset - piece.place < max(1, n * piece.length):
                    self.unit.check_unwritten(self.flat, i, self.versions)
        with Local():
            return _typed(self.flat.view(*self.place), self.spec)


_VIEWS = tuple(
    f"{name}Backward"
    for name in "Alias T Transpose Permute View UnsafeView ReshapeAlias Unsqueeze Squeeze".split()
)


def _cast_of(t: torch.Tensor, unit: Unit) -> int | None:
    """Of which gathered parameter is `t` a cast, or a view of one? Autocast makes such."""
    node: Any = t.grad_fn
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith("ToCopyBackward"):
        return None
    source, place = node.next_functions[0]
    if not isinstance(source, _Gathered._backward_cls):  # type: ignore[attr-defined]
        return None
    return place if source.call.unit is unit else None  # type: ignore[attr-defined]


class _Cast:
    """Where a view of a gathered parameter's cast stood: cast anew when it is read."""

    def __init__(self, unit: Unit, place: int, t: torch.Tensor):
        self.unit, self.number, self.spec = unit, place, _spec(t)
        self.dtype = t.dtype
        self.place = (t.size(), t.stride(), t.storage_offset())
        self.versions = unit._versions

    def tensor(self) -> torch.Tensor:
        self.unit.gather()
        if self.unit._versions != self.versions:
            i = self.number
            for flat in self.unit.flats:
                if 0 <= i < len(flat.pieces):
                    self.unit.check_unwritten(flat, i, self.versions)
                i -= len(flat.pieces)
        with Local(), torch.no_grad():
            views = [v for flat in self.unit.flats for v in flat.views()]
            cast = views[self.number].to(self.dtype)
            return _typed(cast.as_strided(*self.place), self.spec)


class _Other:
    """Any other tensor: as whoever else packs saved tensors keeps it, or itself."""

    def __init__(self, hooks: tuple[Any, Any] | None, t: torch.Tensor):
        self.hooks, self.spec = hooks, _spec(t)
        self.kept = t if hooks is None else hooks[0](t)
        self.version = t._version

    def tensor(self) -> torch.Tensor:
        with Local():
            if self.hooks is not None:
                return _typed(self.hooks[1](self.kept), self.spec)
            if self.kept._version != self.version:  # with hooks, autograd does not look
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by "
                    f"an inplace operation: {tuple(self.kept.shape)} is at version "
                    f"{self.kept._version}; expected version {self.version}"
                )
            return _typed(self.kept, self.spec)


def _spec(t: torch.Tensor) -> Spec | None:
    return t._spec if isinstance(t, DTensor) else None


def _typed(t: torch.Tensor, spec: Spec | None) -> torch.Tensor:
    """`t` as autograd will hand it on: of the class that it has here only if nobody shares it."""
    if spec is None:
        return t
    alone = torch.empty(0, dtype=t.dtype, device=t.device)
    return tagged(alone.set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride()), spec)


class _Gathered(torch.autograd.Function):
    """Gathered parameters, tied to their shards by a token; backward reduces and scatters."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: Call) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        unit = call.unit
        views = [v for flat in unit.flats for v in flat.views()]
        order = [i for members in unit.groups for i in members]
        shards = unit.shards()
        frozen = [v for i, v in zip(order, views, strict=True) if not shards[i].requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with Local(), torch.no_grad():
            ctx.call.came("parameters")  # frees what was gathered, before its gradients are copied
            ctx.call.reduce(grads)
        return torch.empty(0), None


class _Left(torch.autograd.Function):
    """The identity on an input of a block; tells when the input's gradient is complete."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call.came("inputs")
        return grad, None


def _leave(t: torch.Tensor, call: Call | None) -> torch.Tensor:
    with Local():
        out = _Left.apply(t, call)
    return tagged(out, t._spec) if isinstance(t, DTensor) else out
