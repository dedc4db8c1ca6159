"""FSDP groups: when each block's parameters are gathered and freed under ZeRO-3.

A block is a module that is called as a whole, such as a layer of a transformer. A group is the
parameters of one block. `ZeroState` is the state of the model, with all groups. While a block
computes, the next block's parameters are gathered, and in backward the previous block's gradients
are reduced. At most two blocks are gathered at any time. Blocks between them that are at least 8
times smaller do not count. `fsdp_hooks` calls a group when its block runs.

`ShardedState` is common to all stages of ZeRO. `MixedPrecision` has the dtypes of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import get_gradient_edge

from partita.comm import check_equal_on_ranks, is_agreed, remember_agreed, user_line
from partita.comm.device import empty
from partita.layout import Fix, LayoutError, Replicate, Shard
from partita.tensor.construct import keep_attributes
from partita.tensor.dtensor import DTensor, as_dtensor
from partita.tensor.dtensor_gradients import (
    BROKEN_OFF,
    refuse_copied_part,
    requiring_grad,
    restore_partial_gradient,
)
from partita.tensor.origins import find_origin, is_beside_program
from partita.tensor.tensor_state import (
    HERE,
    Spec,
    ZeroLayouts,
    after_backward,
    backward_pass,
    count_unseen_writes,
    count_unseen_writes_of,
    count_writes,
    count_writes_of,
    in_backward,
    is_only_returned,
    make_argument_error,
    note_other_memory,
    note_unseen_write,
    own_state,
    spec_of,
    state_of,
)

from .backward_pass import BackwardPass, CallCounts, LiveToken, Reduction, Token
from .batch import replace_instances
from .flat_buffer import FlatBuffer, PartialGradients
from .gathered_parameters import (
    CAST_IS_MADE_AGAIN,
    DIGITS_LOST,
    HAS_OTHER_MEMORY,
    WRITE_AFTER,
    WRITTEN_AS,
    InstalledParameter,
    SavedVersions,
    modified_error,
)
from .parameters import Block, find_hooked


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a step computes and communicates.

    Parameters and optimizer state keep their own dtype.

    Attributes:
        param_dtype: the dtype of gathered parameters, when sent and when used. None: the
            parameter's own dtype.
        grad_dtype: the dtype to which gradients are rounded before they are sent. None:
            `param_dtype`.
        reduce_dtype: the dtype in which gradients are summed. None: the parameter's own dtype.
        output_dtype: the dtype to which floating-point outputs of the model are cast. None: they
            are not cast.
        cast_inputs: True casts the floating-point inputs of each block to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "grad_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
                continue
            if dtype is not None:
                takes = f"a floating-point torch.dtype as {name}"
                fix = f"MixedPrecision({name}=torch.bfloat16)"
                raise make_argument_error("MixedPrecision", takes, dtype, fix)

    def dtypes_of(self, own: torch.dtype) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Returns `(gathered, sent, summed)` for a parameter whose own dtype is `own`.

        The parameter is gathered in the first dtype. Its gradient is sent in the second, and summed
        in the third. A parameter that is not floating-point keeps its own dtype.
        """
        if not (own.is_floating_point or own.is_complex):
            return own, own, own
        wanted = (self.param_dtype, self.grad_dtype, self.reduce_dtype)
        # Real and complex numbers keep their kind.
        work, sent, summed = (d if d and d.is_complex == own.is_complex else None for d in wanted)
        return work or own, sent or work or own, summed or own


class ShardedState:
    """The object that `pt.zero` stores for a model. Each parameter's `zero_layouts.owner` is this
    object.

    Subclasses: `ZeroState` (stage 3), `GradReducer` (stages 0-2).

    Attributes:
        options: the axes, the stage and the dtypes that were passed to `zero`.
        applied: the inner modules to which `zero` was applied before.
        keeps_partial_gradients: True keeps gradients unsharded and Partial (`no_sync`).
    """

    options: tuple[tuple[str, ...], int, MixedPrecision]
    applied: Sequence[nn.Module] = ()
    keeps_partial_gradients = False

    @contextmanager
    def keeping_partial_gradients(self) -> Iterator[None]:
        """Keep gradients unsharded and Partial in backward passes within the `with` statement.

        The next backward pass after it reduces them all.
        """
        before, self.keeps_partial_gradients = self.keeps_partial_gradients, True
        try:
            yield
        finally:
            self.keeps_partial_gradients = before

    def gather_updated(self, params: Iterable[DTensor]) -> None:
        """Gathers `params` after an optimizer's step updated their shards. Only stages 1 and 2 do
        so.
        """

    def reduce_postponed(self, p: DTensor | None = None) -> None:
        """Reduce gradients whose reduction was postponed, if there are any.

        Called when a program reads or clears a gradient.

        Args:
            p: the parameter of the gradient. None: any parameter.
        """

    def complete_gradients(self) -> None:
        """Makes all gradients complete, before a captured step, which reads them.

        It waits for running reductions, and makes those that were postponed.
        """
        self.reduce_postponed()

    def find_phase(self, p: DTensor) -> str:
        """Returns the phase of p's block: "forward", "backward", or "" for neither."""
        return ""


def agree_on_block(what: str, name: str, first: DTensor, used: Sequence[bool] = ()) -> None:
    """Raises an error on all ranks unless all are about to gather or reduce the same block.

    Blocks may be equally large, so a collective would not detect the difference. The ranks compare
    the block and `used`. They skip this if they compared the same blocks in the same order before
    (`comm.is_agreed`).

    Args:
        what: what the ranks do with the block, for the error.
        name: the block's name.
        first: a parameter of the block. Its origin distinguishes blocks with equal names.
        used: for each parameter, True if it gets a gradient on this rank. It must be equal on all
            ranks: a rank without a gradient would not add the sum to its shard.
    """
    wire, made = first._spec.wire, find_origin(first)
    key = name, made and made.number, *used
    if is_beside_program(wire) or is_agreed(wire, what, key):
        return
    places = ", ".join(str(i) for i, one in enumerate(used) if one)
    check_equal_on_ranks(
        what,
        f"at block {name!r}, {made}{f', of its parameters {places}' if used else ''}",
        wire,
        fact="the ranks are at different blocks, or have gradients of different parameters",
        reason="all ranks gather a block's parameters, and reduce their gradients, together",
        fixes=(
            Fix("the same branch on every rank", "where a condition reads this rank's data"),
            Fix("y = y + 0 * p.sum()", "on ranks that do not use the parameter p"),
        ),
    )
    remember_agreed(wire, what, key)


@contextmanager
def counting_versions() -> Iterator[None]:
    """Disable inference mode for a `with` statement, because its tensors have no version counters.

    Parameters that are gathered in inference mode may be used after that mode ends.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


# -- one block -------------------------------------------------------------------------------------


def are_same(some: Sequence[DTensor], others: Sequence[DTensor]) -> bool:
    """True if `some` and `others` contain the same parameter objects in the same order."""
    return some is others or (len(some) == len(others) and all(map(is_, some, others)))


_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]
_device = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]

_Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
"""The type of the result of `MixedPrecision.dtypes_of`."""
_ALONE = 1 << 22
"""Bytes from which a parameter travels alone: one collective more costs less than its copies."""

_SMALL = 8
"""A group is gathered beside the next one if it has at least so many times fewer bytes."""


class FsdpGroup:
    """The parameters of one block (such as a layer) under ZeRO-3, gathered and freed together.

    Attributes:
        depth: the number of forwards of the block that have begun and not ended.
        needed: True if a backward reads the parameters, as far as is known.
        calls_in_backward: the forwards whose backward has begun and not ended, as keys of a dict.
            Gathers follow the order of the keys. (The order of a set would differ between ranks.)
        held_gradients: gradients that `no_sync` keeps unreduced, with the sharded parameters. The
            key is the index of the flat buffer, followed by the ids of its parameters.
        installed: the gathered parameters that are attributes of the modules now.
        gathered: the shards whose parameters are gathered or being gathered; empty if none are.
        versions: autograd's versions of the shards in `gathered`, when they were gathered.
        unseen_writes: for each shard in `gathered`, when it was gathered: the number of writes that
            autograd had not counted.
        largest_nbytes: bytes of the gathered parameters, on the rank that has most.
        members: for each flat buffer, the indices of its parameters.
        order: the indices of the parameters of all flat buffers, in order.
        identity: an object that identifies the group in `reruns`, without keeping the model alive.
        open_forwards: for each forward that has begun and not ended: its saved-tensor hooks, or
            None.
    """

    def __init__(self, zero: ZeroState, block: Block):
        self._begin_with(zero, block)
        self.fit_buffers(self.shards())

    def _begin_with(self, zero: ZeroState, block: Block) -> None:
        self.zero: ZeroState = zero
        self.name, self.slots = block.name, block.slots
        self.modules = block.modules
        self.depth = 0
        self.calls_in_backward: dict[Any, None] = {}
        self.held_gradients: dict[tuple[int, ...], tuple[Sequence[DTensor], PartialGradients]] = {}
        self.installed: list[InstalledParameter] = []
        self.versions: list[int] = []
        self.unseen_writes: list[int] = []
        self.gathered: Sequence[DTensor] = ()
        self.members: list[list[int]] = []
        self.flats: list[FlatBuffer] = []
        self._dtypes: list[_Dtypes] = []
        self._kinds: list[Any] = []
        self.largest_nbytes = 0
        self._specs: list[Spec] = []
        self.order: list[int] = []
        self._places: list[tuple[nn.Module, str, int, Spec]] = []
        self.identity = object()
        self.open_forwards: list[Any] = []
        self._tokens: list[LiveToken] = []

    # A copied or unpickled model has groups of its own over its own modules, at rest. The copy of a
    # block does not take the model along: until the model's state adopts it, it has one of its own.

    def __getstate__(self) -> Any:
        zero = self.zero
        options = zero.axes, zero.precision, zero.persistent
        return options, [*self.shards()], Block(self.name, self.modules, self.slots)

    def __setstate__(self, state: Any) -> None:
        (axes, precision, persistent), shards, block = state
        zero = self.__dict__.get("zero")
        if zero is None:
            zero = ZeroState.__new__(ZeroState)
            zero._begin_with(block.modules[0], axes, precision)
            zero.persistent, zero.groups = persistent, [self]
            zero.adopt_parameters(shards)
        self._begin_with(zero, block)

    def fit_buffers(self, shards: Sequence[DTensor]) -> None:
        """Make new flat buffers if the existing ones do not fit `shards`, as after `model.to()`."""
        if self.installed and are_same(shards, self.gathered):
            return  # the spec of such a shard is marked (see `InstalledParameter`)
        with local_ops():
            kinds = [(_dtype(p), _device(p), p._spec) for p in shards]
        if kinds == self._kinds:
            return
        for flat in self.flats:
            flat.release()
        self._kinds = kinds
        self.needed = False
        wholes = [self.zero.make_unsharded_spec(p._spec) for p in shards]
        by_kind: dict[tuple[_Dtypes, int | None], list[int]] = {}
        # On the largest rank, so that all ranks agree which groups are small.
        self.largest_nbytes = 0
        for i, p in enumerate(shards):
            dtypes = self.zero.precision.dtypes_of(p.dtype)
            nbytes = wholes[i].largest * dtypes[0].itemsize
            by_kind.setdefault((dtypes, i if nbytes >= _ALONE else None), []).append(i)
            self.largest_nbytes += nbytes
        self.members = list(by_kind.values())
        self.order = [i for members in self.members for i in members]
        self._specs = [wholes[i] for i in self.order]
        self.flats = [
            FlatBuffer(
                self.name,
                [self.name_of(i) for i in members],
                [wholes[i] for i in members],
                [shards[i]._spec for i in members],
                self.zero.axes,
                dtypes[0],
                shards[members[0]].device,
            )
            for (dtypes, _), members in by_kind.items()
        ]
        self._dtypes = [dtypes for dtypes, _ in by_kind]

    def gradient_dtype(self, k: int, *, is_kept: bool) -> torch.dtype:
        """Returns the dtype in which gradients of flat buffer `k` are sent.

        Args:
            k: the index of the flat buffer.
            is_kept: True returns the dtype of gradients that `no_sync` keeps. It is at least as
                wide.
        """
        _, sent, summed = self._dtypes[k]
        return torch.promote_types(sent, summed) if is_kept else sent

    def shards(self) -> Sequence[DTensor]:
        """Returns the sharded parameters, even while gathered ones replace them in the modules."""
        if self.installed:
            return self.gathered
        return [
            p if (p := s[0].owner._parameters.get(s[0].attr)) is not None else s[0].parameter  # type: ignore[misc]
            for s in self.slots
        ]

    @property
    def holds_shards(self) -> bool:
        """True if the modules' parameters are still sharded as `zero` shards them.

        They may be other objects than before, as in `torch.func.functional_call`. It is False if a
        program has set other values, has set `p.data` to another layout, or has untied a weight. In
        these cases nothing is gathered, and ops use the values as they are.
        """
        if self.installed:
            return True
        for owner, attr, identity, spec in self._places:
            p: Any = owner._parameters.get(attr)
            if id(p) != identity or p._spec is not spec:
                break
        else:
            if self._places:
                return True
        return self._find_places()

    def _find_places(self) -> bool:
        """Computes `holds_shards`, and stores the places for a faster comparison next time.

        The places have the ids of parameters, so that they keep no replaced parameter alive. A new
        parameter with the id and layout of a freed one may be gathered just as well.
        """
        self._places = []
        places: list[tuple[nn.Module, str, int, Spec]] = []
        for some in self.slots:
            held: list[Any] = [s.owner._parameters.get(s.attr) for s in some]
            if not self.zero.has_sharded(held[0]) or any(p is not held[0] for p in held):
                return False
            places += [(s.owner, s.attr, id(p), p._spec) for s, p in zip(some, held, strict=True)]
        self._places = places
        return True

    def note_token(self, token: LiveToken) -> None:
        """Records the token of a forward that may use this block (see `ZeroState.token`)."""
        self._tokens = [one for one in self._tokens if one.node() is not None]
        self._tokens.append(token)

    def has_all_gradients(self, passing: BackwardPass) -> bool:
        """True if the backward pass `passing` has computed the gradients of all calls that it
        reaches.
        """
        return not any(
            passing.came.get((one.counts, self), 0) < one.counts.made.get(self, 0)
            and one.is_in_pass()
            for one in self._tokens
        )

    def find_later_tokens(self, passing: BackwardPass) -> list[LiveToken]:
        """Returns the tokens that the backward pass `passing` reaches later, in this block."""
        later = [t for t in self._tokens if self in t.counts.made and t.counts not in passing.ended]
        return [one for one in later if one.is_in_pass()]

    def has_hooks(self) -> bool:
        """True if a user has registered hooks on a parameter of the block."""
        return bool(find_hooked(self.shards()))

    # -- gather and release ------------------------------------------------------------------------

    @property
    def alive(self) -> int:
        """Bytes of this block that are gathered or being gathered now."""
        return sum([flat.alive for flat in self.flats])

    def is_small_beside(self, other: FsdpGroup | None) -> bool:
        """True if this block is at least 8 times smaller than `other`, in gathered bytes.

        A block that is so small does not count in the limit of two gathered blocks.
        """
        return other is not None and _SMALL * self.largest_nbytes <= other.largest_nbytes

    @property
    def _is_ready(self) -> bool:
        return bool(self.depth or self.calls_in_backward) and all(flat.here for flat in self.flats)

    def start(self, shards: Sequence[DTensor] | None = None) -> None:
        """Begins to gather the block's parameters, without waiting.

        It does nothing if they are gathered already, or if they are not sharded (see
        `holds_shards`).

        Args:
            shards: the sharded parameters; by default the current ones.
        """
        if shards is None:
            if not self.holds_shards:
                return
            shards = self.shards()
        is_other = not are_same(shards, self.gathered)
        if self._is_ready and not is_other:
            return
        versions, unseen = count_writes_of(shards), count_unseen_writes_of(shards)
        if is_other or (not self.depth and not self.calls_in_backward):
            if is_other and not self.depth:
                self.put_shards_back()
            self.fit_buffers(shards)
            if is_other or versions != self.versions or unseen != self.unseen_writes:
                for flat in self.flats:  # gathered values, also pending ones, are out of date
                    flat.release()
        self.gathered, self.versions, self.unseen_writes = shards, versions, unseen
        reason = "regather" if in_backward() else "gather"
        started = False
        for flat, members in zip(self.flats, self.members, strict=True):
            started |= flat.start_gather([shards[i] for i in members], reason)
        if started:
            self.zero.note_gathered(self)

    @property
    def is_current(self) -> bool:
        """True if the gathered values are up to date: no shard was written after the gather."""
        unseen = count_unseen_writes_of(self.gathered)
        return self.versions == count_writes_of(self.gathered) and self.unseen_writes == unseen

    def gather(self, shards: Sequence[DTensor] | None = None) -> None:
        """Gathers the block's parameters, and waits for the result.

        Args:
            shards: the sharded parameters; by default the current ones.
        """
        if self._is_ready and are_same(shards or self.shards(), self.gathered):
            return
        if in_backward():
            self.zero.release_after_backward(self)
        self.start(shards)
        for flat in self.flats:
            flat.finish_gather()
        self.zero.note_gathered(self)

    def check_unwritten(self, number: int, saved: SavedVersions) -> None:
        """Raise if parameter `number` was written in place after a forward saved it for backward.

        Args:
            number: the index of the parameter in the group.
            saved: the write counts when the forward saved the parameter.

        Raises:
            RuntimeError: like autograd's own check, which does not cover shards.
        """
        before, now = saved.versions[number], self.versions[number]
        if saved.is_cast:
            before, now = before + saved.unseen_writes[number], now + self.unseen_writes[number]
        if before == now and number in saved.call.written:
            counted, unseen = saved.call.written[number]
            before, now = saved.version, counted + unseen if saved.is_cast else counted
        why = CAST_IS_MADE_AGAIN if saved.is_cast else ""
        replaced_at = state_of(self.gathered[number]).replaced_at
        if before == now and replaced_at > saved.unseen_writes[number]:
            before, now, why = saved.unseen_writes[number], replaced_at, HAS_OTHER_MEMORY
        if before != now:
            raise modified_error(self.name_of(number), now, before, why)

    def name_of(self, i: int) -> str:
        slot = self.slots[i][0]
        return f"{slot.attr} of a {type(slot.owner).__name__} in the block {self.name!r}"

    def release(self) -> None:
        """Frees the block's gathered parameters, unless they are in use or the model is persistent.

        It is called at the end of each forward and backward of the block, and after an abort.
        """
        if not self.depth and not self.calls_in_backward and not self.zero.persistent:
            for flat in self.flats:
                flat.release()
            self.gathered = ()
            self.zero.in_memory.pop(self, None)

    def end_backward(self) -> None:
        """Release the block at the end of a backward pass that gathered it."""
        self.calls_in_backward.clear()
        if not self.depth:
            self.end_forward()  # a hook may have written the gathered parameters
            self.put_shards_back()
        self.release()

    def reset_after_abort(self) -> None:
        """Reset the block after a forward or backward pass was aborted by an exception."""
        self.calls_in_backward.clear()
        self.open_forwards.clear()
        self.depth = 0
        self.put_shards_back()

    # -- gathered parameters in the modules --------------------------------------------------------

    def views(self) -> list[torch.Tensor]:
        """Returns the gathered parameters as plain local tensors, in flat-buffer order."""
        return [v for flat in self.flats for v in flat.views()]

    def install(self, plain: Sequence[torch.Tensor]) -> None:
        """Put the gathered parameters into the modules in place of the shards, for a forward.

        Args:
            plain: the gathered parameters as local tensors, in the order of the flat buffers.
        """
        shards = self.gathered
        wholes = []
        for i, t, spec in zip(self.order, plain, self._specs, strict=True):
            whole = as_dtensor(t, spec)
            # The version: remat compares it with that of the next gather (remat/runs.py).
            own_state(whole).gathered_from = (shards[i], self.versions[i])
            wholes.append((i, whole))
        self.install_wholes(wholes)

    def install_wholes(self, wholes: Sequence[tuple[int, DTensor]]) -> None:
        """Put gathered parameters into the modules in place of the shards.

        Args:
            wholes: pairs of the parameter's index in the group and the gathered parameter.
        """
        self.gathered = shards = self.shards()
        some = [shards[i] for i, _ in wholes]
        writes = count_writes_of([whole for _, whole in wholes])
        counts = writes, count_writes_of(some), count_unseen_writes_of(some)
        self.installed = [
            InstalledParameter(i, shards[i], whole, *before)
            for (i, whole), *before in zip(wholes, *counts, strict=True)
        ]
        for one in self.installed:
            one.connect_shard()
            for slot in self.slots[one.number]:
                slot.owner._parameters[slot.attr] = one.whole  # type: ignore[assignment]

    def connect_shards(self) -> None:
        """Make the shards view copies of the gathered parameters, while code of the block runs."""
        for one in self.installed:
            one.connect_again()

    def disconnect_shards(self) -> None:
        """End what `connect_shards` has begun. Gathered parameters stay in the modules."""
        for one in self.installed:
            one.release_shard()
            one.follows = False

    def end_forward(self) -> dict[int, tuple[int, int]]:
        """Copies values that the forward wrote into gathered parameters to this rank's shards.

        The shards are then no longer connected to them.

        Returns:
            Maps the index of each written parameter to `(version, unseen)`: the version of the
            gathered parameter, and its number of writes that autograd does not count.

        Raises:
            LayoutError: the gathered dtype is narrower than the shard's, or a shard was written
                through a view that does not follow the gathered parameter.
        """
        written: dict[int, tuple[int, int]] = {}
        self.check_shards(self.installed)
        wholes = [one.whole for one in self.installed]
        # Compared by write counts, not by values: these may have changed only on some ranks.
        counts = count_writes_of(wholes), count_unseen_writes_of(wholes)
        for one, now, unseen in zip(self.installed, *counts, strict=True):
            i, p, whole, before = one.number, one.shard, one.whole, one.writes
            keep_attributes(whole, p, one.attributes)
            is_written = one.was_written_itself()
            # A hook in backward, where the shard is not connected, may have written only the shard.
            if not (is_written or (one.follows and (now != before or unseen))):
                continue
            if is_written:
                self._copy_to_shard(i, p, whole, is_counted=now != before)
                one.note_new_values()
            # Changed in place in the lists that saved tensors of this forward refer to.
            self.versions[i] = count_writes(p)
            if state_of(whole).replaced_at:  # saved views show the memory that it had before
                note_other_memory(p)
            else:
                if now == before:
                    note_unseen_write(p)
                self.unseen_writes[i] = count_unseen_writes(p)
            written[i] = now, unseen
        self.disconnect_shards()
        return written

    def _copy_to_shard(self, i: int, p: DTensor, whole: DTensor, *, is_counted: bool) -> None:
        """Copies the gathered parameter `i` to its shard `p`.

        Args:
            is_counted: True if autograd counts the write of the shard, as it counted that of
                `whole`. It counts no write through `.data`.
        """
        mine, held = p._spec.region[0], whole._spec.region[0]
        with local_ops(), torch.no_grad():
            rows = whole.detach().narrow(0, mine[0] - held[0], mine[1])
            if rows.dtype != p.dtype:
                raise LayoutError(
                    f"{self.name_of(i)} {WRITTEN_AS} {rows.dtype}",
                    place=user_line(),
                    reason=DIGITS_LOST,
                    fixes=(WRITE_AFTER,),
                )
            (p if is_counted else p.data).copy_(rows)

    def check_shards(self, installed: Sequence[InstalledParameter]) -> None:
        """Raises unless every write to a shard in the forward has changed the gathered parameter.

        Args:
            installed: the gathered parameters that replaced shards in the forward.

        Raises:
            LayoutError: a shard was written through a view or `.data` that is older than the
                forward.
        """
        shards = [one.shard for one in installed]
        counts = zip(count_writes_of(shards), count_unseen_writes_of(shards), strict=True)
        for one, now in zip(installed, counts, strict=True):
            if one.follows and now != one.shard_writes:
                raise LayoutError(
                    f"{self.name_of(one.number)} was written in the block's forward, through a "
                    "view or .data from before",
                    place=user_line(),
                    reason="the block computes with the gathered parameter, which such a write "
                    "does not reach",
                    fixes=(
                        Fix("p.copy_(...)", "of the parameter itself, under no_grad"),
                        Fix("write it before the forward of the block, or after it"),
                    ),
                )

    def was_written(self, i: int) -> bool:
        """True if forward has written the gathered parameter of index `order[i]` in place."""
        if not self.installed:
            return False
        one = self.installed[i]
        return count_writes(one.whole) != one.writes or count_unseen_writes(one.whole) > 0

    def find_first_version(self, i: int) -> int:
        """Returns the `_version` of gathered parameter `order[i]` when the forward began."""
        return self.installed[i].writes if self.installed else 0

    def put_shards_back(self) -> None:
        """Puts the sharded parameters back into the modules, in place of the gathered ones."""
        installed, self.installed = self.installed, []
        for one in installed:
            # It refers to a view of `whole`, which refers to `whole`: a cycle that Python's
            # garbage collector cannot find.
            state = own_state(one.whole)
            state.retyped = state.data = None
            one.release_shard()
            for slot in self.slots[one.number]:
                held: Any = slot.owner._parameters.get(slot.attr)
                if held is one.whole:  # the forward may have set another one
                    slot.owner._parameters[slot.attr] = one.shard


# -- all blocks of a model -------------------------------------------------------------------------


class ZeroState(ShardedState):
    """The state of ZeRO-3 for one model, whose parameters are sharded over `axes` between steps.

    Attributes:
        groups: an `FsdpGroup` for each block of the model.
        persistent: True keeps gathered parameters after forward and backward. A block gathers them
            again when it begins after a write of a parameter. In a captured step they are kept
            until their last use.
        holds_partial_gradients: True if `no_sync` may have kept gradients unreduced.
        peak: the largest number of bytes that were gathered at once.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: tuple[str, ...],
        precision: MixedPrecision,
        blocks: Sequence[Block],
    ):
        self._begin_with(model, axes, precision)
        self.groups = [FsdpGroup(self, block) for block in blocks if block.slots]
        self.adopt_parameters(model.parameters())

    def register_hooks(self) -> None:
        """Register the hooks of the whole model's forward. Blocks have their own hooks."""
        self.model.register_forward_pre_hook(self._begin_forward, prepend=True)
        self.model.register_forward_hook(self._end, always_call=True)

    def _begin_with(
        self, model: nn.Module, axes: tuple[str, ...], precision: MixedPrecision
    ) -> None:
        self.model = model
        self.axes, self.precision = axes, precision
        self.options = (axes, 3, precision)
        self.persistent = self.holds_partial_gradients = self._adds = False
        self.peak = 0
        self.in_memory: dict[FsdpGroup, None] = {}  # not all groups: a step would be quadratic
        # Weak: a capture has its own specs, which refer to its wires.
        self._unsharded = WeakKeyDictionary[Spec, Spec]()
        self._forwards = 0
        self._hooked: set[FsdpGroup] = set()
        self._tokens: dict[FsdpGroup | None, Token] = {}
        self._last: FsdpGroup | None = None
        self._next: dict[FsdpGroup, FsdpGroup] = {}
        self._before: dict[FsdpGroup, FsdpGroup] = {}
        self._under_way: list[Reduction] = []
        self._unfinished: list[Reduction] = []  # of these, so that a step is not quadratic
        self._passes: dict[int, BackwardPass] = {}
        BROKEN_OFF.watchers.add(self)

    def detach_from_model(self) -> None:
        """Remove this state's hooks, because `pt.zero` was applied to an enclosing model."""
        self.reset_after_abort()
        BROKEN_OFF.watchers.discard(self)
        for module in {m for group in self.groups for m in group.modules} | {self.model}:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [n for n, hook in hooks.items() if self._owns_hook(hook)]:
                    del hooks[number]

    def _owns_hook(self, hook: Any) -> bool:
        owner = getattr(hook, "__self__", None)
        return owner is self or getattr(owner, "group", None) in self.groups

    def adopt_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Records that the gradient and update of each parameter are sharded like the parameter."""
        for p in parameters:
            own_state(p).zero_layouts = ZeroLayouts(p._spec, p._spec, self)  # type: ignore[attr-defined]

    # A copy of the model has its own state over its own parameters, with nothing gathered.

    def __getstate__(self) -> Any:
        if in_backward():  # it continues after the copy, which must have shards
            for group in self.groups:
                group.put_shards_back()
        else:
            self.reset_after_abort()
        begun = self.model, self.axes, self.precision
        return begun, self.persistent, self.groups, list(self.model.parameters())

    def __setstate__(self, state: Any) -> None:
        begun, persistent, self.groups, parameters = state
        self._begin_with(*begun)
        self.persistent = persistent
        for group in self.groups:
            group.zero = self
        self.adopt_parameters(parameters)

    def make_unsharded_spec(self, spec: Spec) -> Spec:
        """Returns the spec (layout) of a gathered parameter, given the spec of its shard."""
        found = self._unsharded.get(spec)
        if found is None:
            layout = spec.layout
            for a in self.axes:
                layout = layout.put(a, Replicate())
            found = spec_of(layout, spec.wire)
            if found is not spec:  # otherwise it would refer to itself
                self._unsharded[spec] = found
        return found

    def has_sharded(self, p: torch.Tensor | None) -> bool:
        """True if `p` is a DTensor parameter that is `Shard(0)` on all axes of this state."""
        return (
            isinstance(p, DTensor)
            and isinstance(p, nn.Parameter)
            and all(p._spec.layout.placement(a) == Shard(0) for a in self.axes)
        )

    # -- forward -----------------------------------------------------------------------------------

    def find_phase(self, p: DTensor) -> str:
        if any(any(one.find_unfinished(p)) for one in self._passes.values()):
            return "backward"
        here = any(p is other for group in self.groups if group.depth for other in group.gathered)
        return "forward" if here else ""

    def _begin_forward(self, *_: Any) -> None:
        if not self._forwards and not in_backward():
            self.reset_after_abort()
        self._forwards += 1
        self._last = None

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._forwards = max(0, self._forwards - 1)
        self._tokens = {}
        if not in_backward():
            self.release()
        dtype = self.precision.output_dtype
        if dtype is None or output is None:
            return None
        return replace_instances(
            output, torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, copies={}
        )

    def enter_forward(self, group: FsdpGroup) -> None:
        """Gathers the block `group`, whose forward begins.

        It prefetches the block that was next in the last step, unless backward runs a forward
        again.
        """
        if in_backward():
            if not group.alive:
                # A recomputed region has several blocks: each is gathered again for its backward.
                self.release()
            elif not group.installed and not group.is_current:  # a hook has written a parameter
                for flat in group.flats:
                    flat.release()
            group.gather()
            return
        if not self.persistent:  # else a forward may need no gather, and be for one rank alone
            agree_on_block("forward under zero", group.name, group.shards()[0])
        if self._last is not None and self._last is not group:
            self._next[self._last] = group
            self._before[group] = self._last
        self._last = group
        self._gather_and_prefetch(group, self._next.get)

    def enter_backward(self, group: FsdpGroup, shards: Sequence[DTensor]) -> None:
        """Gathers the block `group`, whose backward begins. Prefetches the block before it in
        forward.

        Blocks whose parameters the last backward did not read are skipped.

        Args:
            shards: the sharded parameters of `group` in the forward whose backward begins.
        """
        if not self.persistent:
            agree_on_block("backward under zero", group.name, shards[0])
        self._gather_and_prefetch(group, self._find_needed_before, shards)

    def _find_needed_before(self, group: FsdpGroup) -> FsdpGroup | None:
        before = self._before.get(group)
        for _ in self.groups:  # bounded, because blocks that alternate precede each other
            if before is None or before.needed:
                return before
            before = self._before.get(before)
        return None

    def _gather_and_prefetch(
        self,
        group: FsdpGroup,
        follow: Callable[[FsdpGroup], FsdpGroup | None],
        shards: Sequence[DTensor] | None = None,
    ) -> None:
        """Gather `group`, and begin to gather the group after it.

        The computation of a small group (a norm, an embedding) takes less time than a gather. So
        the group after a small one is begun together with it.
        """
        coming = [group]
        while (after := follow(coming[-1])) is not None and after not in coming:
            coming.append(after)
            if not after.is_small_beside(follow(after)):
                break
        waits_later = group.is_small_beside(follow(group))
        if waits_later:
            group.start(shards)
        else:
            group.gather(shards)
        if not any(other.alive for other in self.in_memory if other not in coming):
            for after in coming[1:]:
                after.start()
        if waits_later:
            group.gather(shards)

    # -- backward ----------------------------------------------------------------------------------

    def release_after_backward(self, group: FsdpGroup) -> None:
        """Records that the running backward pass must release `group` when it ends.

        Normally a group is released when the gradients of its parameters arrive. In a backward pass
        that computes only gradients of inputs, these never arrive.
        """
        self.current_pass().groups[group] = None

    def current_pass(self) -> BackwardPass:
        """Returns the state of the running backward pass. The first call in a pass creates it."""
        number = backward_pass()
        if number not in self._passes:
            self._passes[number] = BackwardPass()
            after_backward(lambda: self._end_backward(number))
        return self._passes[number]

    def _end_backward(self, number: int) -> None:
        # An enclosing backward pass releases the groups that it uses itself.
        ended = self._passes.pop(number, BackwardPass())
        ended.remove_hooks()
        # Not sets, whose order differs between ranks: all must gather the same first one.
        around = dict.fromkeys(g for other in self._passes.values() for g in other.groups)
        with local_ops(), torch.no_grad():
            for group in ended.groups:
                if group not in around:
                    group.end_backward()
            for group in around:
                if group.calls_in_backward and not group.is_current:
                    next(iter(group.calls_in_backward)).gather_again()
            if not self._passes:
                self.release()  # blocks that were prefetched and not used

    def token(self, group: FsdpGroup) -> Token:
        """Returns the token that links the gathered parameters of `group` to shards in autograd.

        One token serves all blocks in a forward of the model. Its backward runs after the backward
        of every block, and waits for all running reductions. A block has a token of its own in
        these cases:

        - It is called alone, or in backward.
        - Its parameters have hooks of the user, which must run as soon as the gradient is complete.
        - Its parameters were replaced or unfrozen since the forward began.
        """
        if not self._forwards or in_backward():
            return self._make_token([group])
        if not self._tokens:
            self._hooked = {other for other in self.groups if other.has_hooks()}
        key = group if group in self._hooked else None
        if key not in self._tokens:
            others = [other for other in self.groups if other not in self._hooked]
            self._tokens[key] = self._make_token(others if key is None else [group])
        token = self._tokens[key]
        # `functional_call` inside a forward replaces parameters that were set when it began, and
        # hooks may unfreeze some.
        if not are_same(token.counts.shards[group], group.gathered) or any(
            _requires_grad(p) and p not in token.trained for p in group.gathered
        ):
            return self._make_token([group])
        return token

    def _make_token(self, groups: Sequence[FsdpGroup]) -> Token:
        shards = {group: group.shards() for group in groups}
        counts = CallCounts(shards, len(groups) == 1 and groups[0].has_hooks())
        with local_ops():
            trained = [p for some in shards.values() for p in some if _requires_grad(p)]
            given = _make_ordered_aliases(trained) if counts.hooked else trained
        tensor = _ShardsToToken.apply(self, groups, counts, trained, *given)
        token = Token(tensor, counts, set(trained))
        if tensor.grad_fn is not None:
            live = LiveToken(counts, token.trained, ref(tensor.grad_fn))
            for group in groups:
                group.note_token(live)
        return token

    def send_or_keep(
        self, group: FsdpGroup, k: int, shares: PartialGradients, counts: CallCounts
    ) -> None:
        """Begins to reduce a flat buffer's gradients, or keeps them under `no_sync`.

        Gradients that were kept before are added first. Gradients of parameters with hooks are
        never kept, because hooks run in each backward pass, on the sum of all ranks. A pass that
        does not add to `.grad` only reduces its own gradients.

        Args:
            group: the block.
            k: the index of the flat buffer in the group.
            shares: this rank's unreduced gradients.
            counts: identifies the forward to which they belong.

        Raises:
            LayoutError: a hook has frozen a parameter after a gradient of this pass was kept.
        """
        shards = counts.shards[group]
        params = [shards[i] for i in group.members[k]]
        key = k, *map(id, params)
        keeps = self.keeps_partial_gradients and self._may_keep(params)
        adds = (keeps or key in group.held_gradients) and self._are_added(params)
        here = self.current_pass()
        if keeps and adds:
            here.kept.update(params)
        elif not adds:
            self._refuse_frozen([p for p in params if p in here.kept])
        if adds and key in group.held_gradients:
            here.kept.update(params)  # this pass reduces what earlier ones have kept, too
            shares = group.held_gradients.pop(key)[1].add(shares)
        if adds and keeps:
            group.held_gradients[key] = shards, shares
            self.holds_partial_gradients = True
        else:
            self.reduce(group, k, shares, counts, shards)

    def _refuse_frozen(self, kept: Sequence[DTensor]) -> None:
        """Raise LayoutError if the running pass does not add to `.grad` of one of `kept` any more.

        In one process the gradients of all forwards of a pass are added at once, or none is.
        """
        accumulates = self.current_pass().accumulates
        frozen = [p for p in kept if not accumulates.get(p, True)]
        if frozen:
            raise LayoutError(
                f"a hook has frozen {self._name_of(frozen[0])} between the gradients of two "
                "forwards of its block",
                place=user_line(),
                reason="in one process it gets none of them; under no_sync, stage 3 of ZeRO has "
                "already added the first to those of earlier backward passes",
                fixes=(
                    Fix("p.requires_grad_(False)", "before backward, or after it"),
                    Fix("loss.backward()", "without no_sync, where a hook freezes parameters"),
                ),
            )

    def _may_keep(self, params: list[DTensor]) -> bool:
        """True if partial gradients of `params` may be kept: no hook waits for them."""
        all_layouts = [state_of(p).zero_layouts for p in params]
        return all(r is not None and r.owner is self for r in all_layouts) and not find_hooked(
            params
        )

    def _are_added(self, params: Iterable[DTensor]) -> bool:
        """True if the running backward pass adds the gradients of all `params` to their `.grad`.

        A hook may have frozen some. `torch.autograd.grad` adds none, and `backward(inputs=...)`
        only those of its inputs.
        """
        accumulates = self.current_pass().accumulates
        for p in params:
            with requiring_grad(p):  # a frozen parameter has no node
                if not accumulates.get(p, True) or is_only_returned(p):
                    return False
        return True

    def reduce(
        self,
        group: FsdpGroup,
        k: int,
        shares: PartialGradients,
        counts: CallCounts | None,
        shards: Sequence[DTensor],
    ) -> None:
        """Begins to reduce a flat buffer's gradients, without waiting for the result.

        Before that it waits for running reductions of other blocks. It does not wait for those of a
        block that is at least 8 times larger.

        Args:
            group: the block.
            k: the index of the flat buffer in the group.
            shares: this rank's unreduced gradients.
            counts: identifies the forward to which they belong; None outside of a backward pass.
            shards: the sharded parameters of the block.
        """
        params = [shards[i] for i in group.members[k]]
        agree_on_block("gradients under zero", group.name, params[0], shares.used)
        _, _, dtype = self.precision.dtypes_of(params[0].dtype)
        sums = shares.sums.to(group.gradient_dtype(k, is_kept=False))
        unfinished = []
        for one in self._unfinished:
            # The backward of a small group is too short to hide the reduction before it.
            if one.group is group or group.is_small_beside(one.group):
                unfinished.append(one)
            else:
                one.finish()
        wait = group.flats[k].start_reduce_scatter(sums, dtype)
        places = {p: i for i, p in enumerate(params) if shares.used[i]}
        begun = Reduction(group, places, counts, backward_pass(), wait)
        self._under_way.append(begun)
        self._unfinished = [*unfinished, begun]

    def collect(
        self, groups: Sequence[FsdpGroup], counts: CallCounts | None
    ) -> dict[DTensor, torch.Tensor]:
        """Waits for the reductions of this backward pass, and returns their results.

        If backward did not reach all calls of a block, their gradients are reduced here. Outside of
        `no_sync`, gradients that were kept are reduced, too. Reductions of an enclosing backward
        pass are left to that pass.

        Args:
            groups: the blocks of the forward.
            counts: the forward whose gradients are collected; None outside of a backward pass.

        Returns:
            The gradient of each parameter, as a plain local tensor.
        """
        if counts is not None:
            # Backward did not reach all calls of these blocks.
            held = self.current_pass().held.pop(counts, {})
            for (group, k), shares in held.items():
                self.send_or_keep(group, k, shares, counts)
        if not self.keeps_partial_gradients:
            self._reduce_held_gradients(groups, counts)
        found: dict[DTensor, torch.Tensor] = {}
        mine = counts, backward_pass()
        ready, others = list[Reduction](), list[Reduction]()
        for one in self._under_way:
            (ready if (one.counts, one.backward_pass) == mine else others).append(one)
        self._under_way = others
        for one in ready:
            pieces = one.finish()
            for p, place in one.places.items():
                g = pieces[place].to(_dtype(p))
                if (before := found.setdefault(p, g)) is not g:
                    found[p] = before + g
        self._unfinished = [one for one in self._unfinished if one.wait is not None]
        self._check_order_of_hooks(found, counts)
        return found

    def _check_order_of_hooks(
        self, found: Mapping[DTensor, torch.Tensor], counts: CallCounts | None
    ) -> None:
        """Raise unless hooks get the gradients `found` in the same order as in one process.

        A reentrant checkpoint runs a backward pass within another, and hooks run in both.

        Raises:
            LayoutError: in one process a hook would first get the gradient of the outer pass, then
                that of the nested pass; here it would be the reverse, or the order is unknown.
        """
        if counts is None:
            return
        here, number = self.current_pass(), backward_pass()
        here.complete.difference_update(found)
        around = [other for other in self._passes.values() if other is not here]
        if not around and not here.nested:
            return
        waiting = {p for other in around for p in other.complete}
        waiting.update(
            p for one in self._under_way if one.backward_pass != number for p in one.places
        )
        for p in find_hooked([*found]):
            is_nested = p in here.nested and not counts.hooked
            if p in waiting or is_nested or (around and self._is_held_up(p, around[0])):
                raise LayoutError(
                    f"a hook of {self._name_of(p)} would run on the gradient of a reentrant "
                    "checkpoint before that of a direct call",
                    place=user_line(),
                    reason="in one process the direct call's gradient is complete first; stage 3 "
                    "of ZeRO has it when the backward of its block ends",
                    fixes=(
                        Fix(
                            "checkpoint(..., use_reentrant=False)",
                            "hooks run once in each backward",
                        ),
                        Fix("zero(..., blocks=[...])", "a block of its own for this layer"),
                        Fix("p.register_hook(...)", "before the forward, if it was set after it"),
                    ),
                )
            for other in around:
                other.nested.add(p)

    def _is_held_up(self, p: DTensor, around: BackwardPass) -> bool:
        """True if the pass `around` uses `p` directly, and adds its gradient with a token's."""
        return any(
            p in one.trained and not one.counts.hooked and one.node() is not None
            for group in self.groups
            for one in group._tokens
        ) and p in self._find_direct_uses(around, HERE.roots[:-1])

    def _name_of(self, p: DTensor) -> str:
        for group in self.groups:
            for i, other in enumerate(group.shards()):
                if other is p:
                    return group.name_of(i)
        return "a parameter"

    def register_replacement(self, old: DTensor, new: DTensor) -> None:
        """Copy the ZeRO layouts of `old` to `new`, which has replaced it in the model."""
        own_state(new).zero_layouts = state_of(old).zero_layouts

    def reduce_postponed(self, p: DTensor | None = None) -> None:
        """Adds gradients to `.grad` before a program reads or clears one.

        In a backward pass these are the gradients that it has completed. Otherwise they are those
        that `no_sync` has kept, which are reduced first.

        Raises:
            LayoutError: the running backward pass computes the gradient of `p`, and has not added
                it yet.
        """
        if self._passes and in_backward():
            if self._adds:  # it reads gradients itself
                return
            self._adds = True
            try:
                with local_ops(), counting_versions(), torch.no_grad():
                    self._add_complete_gradients()
            finally:
                self._adds = False
            if p is not None:
                self._refuse_unfinished(p)
        elif self.holds_partial_gradients and not in_backward():
            self.holds_partial_gradients = False
            if any(group.held_gradients for group in self.groups):
                self.finish()

    def _find_direct_uses(
        self, here: BackwardPass, all_roots: Sequence[Sequence[torch.Tensor]]
    ) -> set[Any]:
        """Returns the tensors whose gradients a pass does not compute by tokens alone.

        These are leaves that are also used outside of their block's forward, such as in a penalty.

        Args:
            here: the state of the pass.
            all_roots: its roots, and those of passes around it.
        """
        if here.used_directly is None:
            here.used_directly, seen = set(), set()
            waiting = [t.grad_fn for roots in all_roots for t in roots]
            while waiting:
                node = waiting.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                is_token = isinstance(node, _ShardsToToken._backward_cls)  # type: ignore[attr-defined]
                for after, _ in node.next_functions:
                    leaf = getattr(after, "variable", None)
                    if leaf is None:
                        waiting.append(after)
                    elif not is_token:
                        here.used_directly.add(leaf)
        return here.used_directly

    def _refuse_unfinished(self, p: DTensor) -> None:
        """Raise if the running backward pass computes the gradient of `p`, and has not added it."""
        here, number = self.current_pass(), backward_pass()
        # Between two calls of a block, its gradient is complete in no process.
        unfinished = any(n == 1 or block.calls_in_backward for block, n in here.find_unfinished(p))
        reducing: list[Any] = [one.places for one in self._under_way if one.backward_pass == number]
        is_waiting = any(p in some for some in (here.collected, here.with_history, *reducing))
        if unfinished or (is_waiting and not find_hooked([p])):
            raise LayoutError(
                f"a hook uses the gradient of {self._name_of(p)} before this backward pass has "
                "added it",
                place=user_line(),
                reason="in one process it may be complete; stage 3 of ZeRO adds it when the "
                "backward of the block ends, and of other uses of the parameter",
                fixes=(
                    Fix("p.register_post_accumulate_grad_hook(hook)", "on the parameter"),
                    Fix("use it after loss.backward()"),
                ),
            )

    def _add_complete_gradients(self) -> None:
        """Add the gradients that the running backward pass has completed to `.grad`.

        A hook of the user is about to use one. In one process autograd has added them already.
        Gradients for which hooks wait come from the token's backward alone.
        """
        number, here = backward_pass(), self.current_pass()
        for group in self.groups:
            for key, (shards, shares) in list(group.held_gradients.items()):
                params = [shards[i] for i in group.members[key[0]]]
                if here.kept.isdisjoint(params) or group.has_all_gradients(here):
                    del group.held_gradients[key]
                    self.reduce(group, key[0], shares, None, shards)
                    self.add_gradients(self._under_way.pop().take_gradients(params))
        under_way = [one for one in self._under_way if one.places and one.backward_pass == number]
        if not under_way and not here.collected and not here.with_history:
            return
        complete = [group for group in self.groups if group.has_all_gradients(here)]
        params = [p for group in complete for p in group.shards()]
        left = {*find_hooked(params), *self._find_direct_uses(here, HERE.roots[-1:])}
        params = [p for p in params if p not in left and self._are_added([p])]
        self.add_gradients({p: here.collected.pop(p) for p in params if p in here.collected})
        for one in under_way:
            self.add_gradients(one.take_gradients(params))
        with torch.enable_grad():
            for p in params:
                if (g := here.with_history.pop(p, None)) is not None:
                    held = _grad(p)
                    p.grad = as_dtensor(g if held is None else held + g, p._spec.gradient)

    def finish(self) -> None:
        """Reduce gradients that `no_sync` has kept, and add them to the parameters' `.grad`.

        During a backward pass, it only adds gradients that are complete.
        """
        if in_backward():
            self.reduce_postponed()
            return
        with local_ops(), counting_versions(), torch.no_grad():
            self._reduce_held_gradients(self.groups, None)
            self.add_gradients(self.collect(self.groups, None))

    def add_gradients(self, found: Mapping[DTensor, torch.Tensor]) -> None:
        """Adds the reduced local gradients `found` to `.grad`, in place of autograd."""
        for p, g in found.items():
            given = restore_partial_gradient(p, g)  # as a hook does in backward
            held = _grad(p)
            if held is None:
                p.grad = as_dtensor(g, p._spec.gradient)
            else:
                held.add_(g if given is None else given)

    def _reduce_held_gradients(
        self, groups: Sequence[FsdpGroup], counts: CallCounts | None
    ) -> None:
        for group in groups:
            for key, (shards, shares) in list(group.held_gradients.items()):
                if counts is None or (
                    are_same(shards, counts.shards[group])
                    and self._are_added([shards[i] for i in group.members[key[0]]])
                ):
                    del group.held_gradients[key]
                    self.reduce(group, key[0], shares, counts, shards)

    # -- after a step ------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the gathered parameters of every block that is not in use."""
        with counting_versions():
            for group in [*self.in_memory]:
                group.release()

    def reset_after_abort(self) -> None:
        """Releases all blocks and waits for running reductions. Called before a step, and after an
        error.
        """
        while self._passes:
            self._passes.popitem()[1].remove_hooks()
        under_way, self._under_way, self._unfinished = self._under_way, [], []
        for one in under_way:
            one.finish()
        for group in self.groups:
            group.reset_after_abort()
        self.release()

    @property
    def alive(self) -> int:
        """Bytes of parameters that are gathered, or being gathered, now, in all blocks."""
        return sum([group.alive for group in self.in_memory])

    def note_gathered(self, group: FsdpGroup) -> None:
        """Records that memory of `group` was allocated."""
        self.in_memory[group] = None
        self.peak = max(self.peak, self.alive)


def _make_ordered_aliases(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns aliases of `leaves`. Backward gives them their gradients in reverse order.

    So hooks of the leaves run in the same order on all ranks. Autograd itself does not order
    leaves, and graphs of ranks without rows have other nodes.
    """
    aliases = [torch.ops.aten.alias(leaf) for leaf in leaves]
    for i, alias in enumerate(aliases):
        alias.grad_fn._set_sequence_nr(2**64 - 1 - len(aliases) + i)
    return aliases


def _switch_while_added(p: DTensor, accumulates: Mapping[DTensor, bool]) -> list[Any]:
    """Restore `p.requires_grad` to `accumulates[p]` while autograd adds the gradient of `p`.

    That is its value when its last gradient arrived. Afterwards it has its present value again.
    Returns the handles of the hooks.
    """
    left = _requires_grad(p)
    p.requires_grad_(True)  # a frozen parameter has no node
    node = get_gradient_edge(p).node
    p.requires_grad_(left)
    before: list[bool] = []

    def set_as_at_arrival(_: Any) -> None:
        before.append(_requires_grad(p))
        with local_ops():
            p.requires_grad_(accumulates[p])

    def set_back(*_: Any) -> None:
        with local_ops():
            p.requires_grad_(before.pop())

    return [node.register_prehook(set_as_at_arrival), node.register_hook(set_back)]


class _ShardsToToken(torch.autograd.Function):
    """The autograd node from shards to the token; its backward returns the shards' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        zero: ZeroState,
        groups: Sequence[FsdpGroup],
        counts: CallCounts,
        shards: Sequence[DTensor],
        *given: torch.Tensor,
    ) -> torch.Tensor:
        ctx.zero, ctx.groups, ctx.counts, ctx.shards = zero, groups, counts, shards
        return empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        with local_ops():
            with torch.no_grad():
                found = ctx.zero.collect(ctx.groups, ctx.counts)
            at_work = ctx.zero.current_pass()
            at_work.ended.add(ctx.counts)
            tokens = (t for group in ctx.counts.made for t in group.find_later_tokens(at_work))
            later = [t.trained for t in dict.fromkeys(tokens)]
            for p in ctx.shards:
                if p in found:
                    refuse_copied_part(_grad(p))
                if (g := at_work.with_history.pop(p, None)) is not None:
                    found[p] = found[p] + g if p in found else g
                if (g := at_work.collected.pop(p, None)) is not None:
                    found[p] = g + found[p] if p in found else g
                if p not in found:
                    continue
                # In one process autograd adds the sum over all forwards at once.
                if any(p in some for some in later):
                    at_work.collected[p] = found.pop(p)
                    continue
                # In one process a gradient is added as soon as its last part is computed.
                adds = at_work.accumulates.setdefault(p, True)  # if it was kept of earlier passes
                if adds != _requires_grad(p) and p not in at_work.switches:
                    at_work.switches[p] = _switch_while_added(p, at_work.accumulates)
            grads = [found.pop(p, None) for p in ctx.shards]
            # Kept by `no_sync`, of parameters that were frozen before this forward.
            with torch.no_grad():
                ctx.zero.add_gradients(found)
        return None, None, None, None, *grads
