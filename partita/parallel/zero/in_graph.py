"""ZeRO in a captured step: placements and moves only.

Stage 3: a move gathers a block's parameters, and its transpose reduces and scatters their
gradients. Passes of the compiler, which see all uses, decide how long a gathered value lives and
whether backward gathers it again; so there are no hooks on saved tensors and no emptied storages.
Stages 1 and 2: the optimizer steps on slices of the parameters, which are then gathered into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor

from partita.compile.errors import not_captured
from partita.layout import Fix
from partita.redistribute import Plan, plan
from partita.tensor.autograd import carry_all, keep_missing_gradients, moved
from partita.tensor.construct import keep_attributes, stand_for
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.dtensor_gradients import reduce_pending_gradients, update_spec
from partita.tensor.spec import Spec
from partita.tensor.tensor_state import (
    HERE,
    Label,
    count_writes,
    own_state,
    state_of,
    was_written_since,
)

from ..blocks import ParameterSlot
from .fsdp_group import FsdpGroup, GroupOwner

__all__ = ["GraphGather", "refuse_no_sync", "step_on_parts"]


@dataclass(eq=False)
class _InstalledParameter:
    """A gathered parameter that stands in the modules in place of its shard.

    Attributes:
        places: the slots of the modules.
        parameter, whole: the shard, and what was gathered.
        writes: the write count of `whole` when it was gathered.
        attributes: that `whole` was given.
    """

    places: Sequence[ParameterSlot]
    parameter: Any
    whole: DTensor
    writes: int
    attributes: dict[str, Any]


class GraphGather:
    """Puts the gathered parameters of one block into its modules while its forward runs."""

    def __init__(self, group: FsdpGroup):
        self.group = group
        self.depth = 0
        self._shown: list[_InstalledParameter] = []

    def begin(self) -> None:
        """A forward of one of the block's modules begins."""
        self.depth += 1
        if self.depth > 1:  # a tied weight's other module, or the same module again, within
            return
        group = self.group
        if group.zero.keeps_partial_gradients:
            refuse_no_sync()
        # Passes know by the reason whether the gathered value may be freed.
        reason = "persistent" if group.zero.persistent else "gather"
        # A block's gathers are a call of it; that a parameter is exchanged for its gathered value
        # is not.
        gather: Callable[..., Sequence[DTensor]] = _gather_parameters
        if HERE.block is not None:
            gather = partial(HERE.block.call_ours, gather)
        with HERE.outside_block():
            all_shards = zip(group.slots, group.shards(), strict=True)
            # Others are of a module that the block has no more.
            taken = [(places, p) for places, p in all_shards if isinstance(p, FakeTensor)]
            shards = [p for _, p in taken]
            gathers = [_describe_gather(p, group.zero) for p in shards]
        wholes = gather(shards, gathers, Label(group.name), reason) if shards else []
        with HERE.outside_block():
            for (places, p), whole in zip(taken, wholes, strict=True):
                self._install(places, p, whole)

    def _install(self, places: Sequence[ParameterSlot], p: DTensor, whole: DTensor) -> None:
        given = stand_for(whole, p)
        self._shown.append(_InstalledParameter(places, p, whole, count_writes(whole), given))
        for slot in places:
            slot.owner._parameters[slot.attr] = whole  # type: ignore[assignment]

    def end(self) -> None:
        """The forward has ended, or was aborted."""
        with HERE.outside_block():
            HERE.unheard(self._end_forward)

    def _end_forward(self) -> None:
        self.depth -= 1
        if self.depth:
            return
        shown, self._shown = self._shown, []
        for one in shown:
            for slot in one.places:
                slot.owner._parameters[slot.attr] = one.parameter
        for one in shown:
            keep_attributes(one.whole, one.parameter, one.attributes)
            if was_written_since(one.whole, one.writes):
                _write_back(one.whole, one.parameter)


def _write_back(whole: DTensor, p: DTensor) -> None:
    """Write what the forward wrote into a gathered parameter into this rank's shard."""
    if whole.dtype != p.dtype:
        raise not_captured(
            f"a parameter is written in the forward, where it is gathered as {whole.dtype}",
            "its shards would lose the digits that they have and this dtype has not",
            Fix("write it after the optimizer's step", "there it is what the ranks hold"),
        )
    with torch.no_grad():
        p.copy_(whole.detach())


# -- mixed precision -------------------------------------------------------------------------------


GatherDtypes = tuple[torch.dtype, torch.dtype, torch.dtype]


def _describe_gather(p: DTensor, zero: GroupOwner) -> tuple[Spec, GatherDtypes | None]:
    """What `p` is when it is gathered, and the dtypes in which it is gathered, its gradient sent,
    and summed; None for its own."""
    precision, own = zero.precision, p.dtype
    work = precision.param_dtype or own
    sent = precision.grad_dtype or work
    summed = precision.reduce_dtype or own
    dtypes = None if work == sent == summed == own else (work, sent, summed)
    return zero.make_unsharded_spec(p._spec), dtypes


def _gather_parameters(
    params: Sequence[DTensor],
    gathers: Sequence[tuple[Spec, GatherDtypes | None]],
    name: str,
    reason: str,
) -> list[DTensor]:
    """`params` gathered, with a history.

    Args:
        gathers: for each what `_describe_gather` says.
    """
    pairs = zip(params, gathers, strict=True)
    return [_gather_parameter(p, *gather, name, reason) for p, gather in pairs]


def _gather_parameter(
    p: DTensor, after: Spec, dtypes: GatherDtypes | None, name: str, reason: str
) -> DTensor:
    """`p` gathered as `after`, with a history."""
    if dtypes is None:
        found = moved(p, p._spec, after, name, reason)
    else:
        moves = plan(p._spec.layout, after.layout, p._spec.wire.mesh, dtypes[0].itemsize)
        with Local():
            found = _Gather.apply(p, moves, p._spec, name, dtypes, reason)
    whole = tagged(found, after)
    own_state(whole).gathered_from = (p, 0)
    return whole


class _Gather(torch.autograd.Function):
    """A gather in one dtype, whose gradient is rounded to another and summed in a third.

    Eager code sends gradients in the dtype to which they are rounded and sums them in a wider one;
    here they are sent in the wider one, with the same values.
    """

    @staticmethod
    def forward(
        ctx: Any, p: torch.Tensor, moves: Plan, spec: Spec, name: str, dtypes: Any, reason: str
    ) -> torch.Tensor:
        ctx.moves, ctx.spec, ctx.name, ctx.dtypes, ctx.own = moves, spec, name, dtypes, p.dtype
        keep_missing_gradients(ctx)
        return carry_all(moves, p.to(dtypes[0]), spec.wire, name, reason)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None, None
        _, sent, summed = ctx.dtypes
        wire = ctx.spec.wire
        back = ctx.moves.transpose(wire.mesh)
        grad = carry_all(back, grad.to(sent).to(summed), wire, ctx.name, "gradient")
        return grad.to(ctx.own), None, None, None, None, None


def refuse_no_sync() -> None:
    """Raise CaptureError: a graph cannot hold back gradients of ZeRO-3 for a later micro-batch."""
    raise not_captured(
        "no_sync under stage 3 of ZeRO",
        "in a graph the gather of a parameter has a transpose, which scatters its gradient at once",
        Fix("leave no_sync out", "gradients add up as shards; each micro-batch sends its own"),
    )


# -- stages 1 and 2 --------------------------------------------------------------------------------


@contextmanager
def step_on_parts(
    optimizer: torch.optim.Optimizer, params: Sequence[DTensor]
) -> Iterator[list[DTensor]]:
    """Within, the optimizer holds the parts that this rank updates in place of `params`.

    Afterwards the parts are gathered into the parameters.
    """
    cut = [p for p in params if update_spec(p) is not p._spec]
    parts: dict[DTensor, DTensor] = {p: p for p in params}
    with torch.no_grad():
        for p in cut:
            update, name = update_spec(p), _block_of(p)
            parts[p] = part = tagged(moved(p, p._spec, update, name, "update"), update)
            grad: Any = p.grad
            if grad is not None:  # partial; or whole, after a clip has reduced it; or a shard
                part.grad = tagged(moved(grad, grad._spec, update, name, "settle"), update)
    reduce_pending_gradients(p for p in params if parts[p] is p)
    groups = optimizer.param_groups
    _rekey_optimizer_state(optimizer, parts)
    optimizer.param_groups = [
        dict(group, params=[parts.get(p, p) for p in group["params"]]) for group in groups
    ]
    try:
        yield list(parts.values())
    finally:
        _rekey_optimizer_state(optimizer, {part: p for p, part in parts.items()})
        optimizer.param_groups = groups
    with torch.no_grad():
        for p in cut:
            now = moved(parts[p], parts[p]._spec, p._spec, _block_of(p), "update")
            with Local():
                p.copy_(now)


def _block_of(p: DTensor) -> str:
    rest = state_of(p).rest
    return "" if rest is None else rest.name


def _rekey_optimizer_state(optimizer: torch.optim.Optimizer, to: dict[Any, Any]) -> None:
    """Move each entry of the optimizer's state to another tensor, in the same order."""
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for p, state in entries:
        optimizer.state[to.get(p, p)] = state
