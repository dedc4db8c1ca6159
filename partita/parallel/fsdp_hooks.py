"""Hooks of a block under ZeRO-3: they gather its parameters for forward and backward, and free
them.

In place of a gathered parameter, autograd saves a record of its position, so that no autograd graph
keeps gathered memory alive. When backward needs it, the block is gathered again. An autograd node
(`_GatherBlock`) connects shards and gathered parameters; its backward reduce-scatters gradients.

A captured step has no such hooks: its graph has only the collectives. The graph pass
`graph/passes/regather` adds another gather for distant uses, and the executor drops a value after
its last read (`graph/backend/executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._C import DisableTorchFunction  # also disables modes
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_tensor import FakeTensor

from partita.comm import user_line
from partita.comm.device import empty
from partita.graph.errors import not_captured
from partita.layout import Fix, LayoutError
from partita.redistribute import Plan, plan
from partita.tensor.construct import keep_attributes
from partita.tensor.dtensor import DTensor, as_dtensor, carry_all, move_local
from partita.tensor.reruns import (
    ForwardNote,
    find_forward_of_rerun,
    note_end_of_forward,
    note_forward,
    note_partial_reruns,
)
from partita.tensor.tensor_state import (
    HERE,
    WRITTEN_UNSEEN,
    HooksWithoutRerun,
    Spec,
    in_backward,
    next_node,
    own_state,
    saving_hooks,
    state_of,
    will_execute,
)
from partita.tensor.transforms import outside_transforms

from .backward_pass import CallCounts
from .batch import replace_instances, tensors_in, write_to_originals
from .fsdp_group import FsdpGroup, ZeroState, agree_on_block, are_same, counting_versions
from .gathered_parameters import (
    DIGITS_LOST,
    WRITE_AFTER,
    WRITTEN_AS,
    SavedVersions,
    modified_error,
)
from .parameters import find_hooked

# torch's own attributes in C. Those of DTensor are Python and slower.
_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]
_grad_fn = torch._C.TensorBase.grad_fn.__get__  # type: ignore[union-attr]
_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]


def register_hooks(state: ZeroState) -> None:
    """Registers the hooks of all blocks of `state`, which gather and free their parameters."""
    for group in state.groups:
        hooks = _BlockHooks(group)
        for module in group.modules:
            module.register_forward_pre_hook(hooks.begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(hooks.end, always_call=True, with_kwargs=True)
    state.register_hooks()


class _BlockHooks:
    """The hooks before and after a forward of one of a block's modules."""

    def __init__(self, group: FsdpGroup):
        self.group = group
        self._begin_at_rest()

    def _begin_at_rest(self) -> None:
        self._in_graph = _GraphGather(self.group)
        # For each forward that has begun: what the program has passed, and copies of it.
        self._copies: list[dict[int, tuple[Any, Any]]] = []

    # When the modules are copied, so are the hooks, which then refer to the copy's group.

    def __getstate__(self) -> Any:
        return (self.group,)

    def __setstate__(self, state: Any) -> None:
        (self.group,) = state
        self._begin_at_rest()

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.group.depth and not self._in_graph.depth:
            self._copies.clear()  # of forwards that were broken off
        self._copies.append({})
        if HERE.trace.begin_block(self._in_graph):
            return self._prepare_inputs(args, kwargs, None)
        group = self.group
        group.open_forwards.append(None)
        HERE.unfinished.append(self._finish_forward)
        # A nested forward: of another module with a tied weight, or of the same module.
        holds_shards = group.depth > 0 or group.holds_shards
        if not group.depth:
            rerun = find_forward_of_rerun(group.identity)
            if holds_shards and rerun is not None and rerun.is_of_other_values:
                raise _make_rerun_error(group)
            # Also in backward: a rerun may contain checkpoints, which run again later.
            note = note_forward(group.identity, is_of_other_values=not holds_shards)
            if rerun is not None:
                note.saves_unseen = rerun.saves_unseen
                if (first := rerun.call()) is not None:
                    first.has_rerun = True
        if group.depth or not holds_shards:
            group.depth += 1
            return None
        graded = any(t.requires_grad for t in tensors_in((args, kwargs)))
        in_inference = torch.is_inference_mode_enabled()
        # Hidden from an enclosing remat region, which would record these calls as the program's.
        with DisableTorchFunction(), counting_versions(), outside_transforms():
            group.zero.enter_forward(group)
            group.depth = 1
            # Also if no argument requires grad: the block may read other tensors.
            call = None if in_inference else _ForwardCall(group, graded)
            _install_gathered(group, call)
        if call is not None and not note.saves_unseen:
            group.open_forwards[-1] = _SavedTensorHooks(call, note)
            note.call = ref(call)
        prepared = self._prepare_inputs(args, kwargs, call)
        if call is not None:
            call.since, call.rerunnable = next_node(), HERE.rerunnable
        return prepared

    def _prepare_inputs(self, args: Any, kwargs: Any, call: _ForwardCall | None) -> Any:
        """Returns the cast and watched inputs of a forward; None if they are unchanged."""
        precision = self.group.zero.precision
        dtype = precision.param_dtype
        cast = dtype is not None and precision.cast_inputs
        watcher = call if call is not None and call.watches_inputs else None
        if not cast and watcher is None:
            return None

        def prepared(t: torch.Tensor) -> torch.Tensor:
            if cast and t.is_floating_point():
                t = t.to(dtype)
            # A view copy is no alias: it follows its base, and writes to it reach the base.
            if watcher is not None and t.requires_grad and state_of(t).copied_view is None:
                t = _watch_input_gradient(t, watcher)
            return t

        copies = self._copies[-1]
        return replace_instances((args, kwargs), torch.Tensor, prepared, copies=copies)

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._copies:
            # The forward may have changed a list or a dict.
            write_to_originals(self._copies.pop().values())
        if HERE.trace.end_block(self._in_graph):
            return
        if not self.group.open_forwards:
            return
        forward = self.group.open_forwards[-1]
        HERE.unfinished.pop()
        self._finish_forward()
        if forward is not None:
            call = forward.call
            forward.note.saves_unseen = torch.is_grad_enabled() and not forward.has_notes
            if HERE.rerunnable != call.rerunnable:
                call.needs = call.runs_again = call.group.needed = True
            with DisableTorchFunction():
                for t in tensors_in(output):
                    if _requires_grad(t) and call.has_computed(t):
                        t.register_hook(call.begin_backward)

    def _finish_forward(self) -> None:
        """End a forward of one of the block's modules, which may have been aborted."""
        group = self.group
        if not group.open_forwards:
            return
        forward = group.open_forwards.pop()
        group.depth = max(0, group.depth - 1)
        if forward is not None:
            forward.close()
        if group.depth:
            return
        note_end_of_forward()
        with DisableTorchFunction(), counting_versions(), outside_transforms():
            try:
                written = group.end_forward()
                if forward is not None:
                    forward.call.written.update(written)
            finally:
                # After a recompute, backward continues with the gathered parameters.
                if not in_backward():
                    group.put_shards_back()
                    group.release()
                elif not group.calls_in_backward:
                    group.put_shards_back()


def _make_rerun_error(group: FsdpGroup) -> LayoutError:
    """Returns the error of a checkpoint that would rerun a block with other parameters."""
    return LayoutError(
        f"a checkpoint of the block {group.name!r}, or in it, would run again with other "
        "parameters than in its forward",
        place=user_line(),
        reason="it reads the parameters that the modules hold now",
        fixes=(
            Fix("exchange parameters after backward"),
            Fix("torch.func.functional_call(...)", "of a model without checkpoints"),
        ),
    )


# -- backward of a block ---------------------------------------------------------------------------


class _ForwardCall:
    """One forward of a block, as its backward needs it.

    The block is gathered again when the first gradient of its outputs arrives, unless its backward
    reads no parameter (as an embedding's). It is released when all its parameters have their
    gradients.

    Attributes:
        trains: True if some of the block's parameters get gradients.
        counts: the counts of the calls that share its token; empty if it does not train.
        written: what the forward wrote in place; see `FsdpGroup.end_forward`.
        shards: the parameters that the forward gathered.
        wanting: for each of them, True if it gets a gradient.
        since: autograd's sequence number of the first node that the block itself made.
        rerunnable: `HERE.rerunnable` when the block's own code began.
        runs_again: True if backward may run a part of the forward again (a checkpoint inside).
        needs: True if backward will read the parameters. (The backward of an embedding does not.)
        has_rerun: True if a checkpoint has run this forward again. In one process backward then
            uses parameters as they are now, also if the rerun has written them.
        node: a weak reference to the `_GatherBlock` node, which gives parameters their gradients.
        watches_inputs: True if the block is done only when its inputs' gradients have arrived. This
            is so only if a parameter gets no gradient. Otherwise no node reads a parameter after
            its own gradient is complete.
    """

    def __init__(self, group: FsdpGroup, graded: bool, shards: Sequence[DTensor] | None = None):
        self.group = group
        self.shards = group.shards() if shards is None else shards
        with local_ops():
            self.wanting = [_requires_grad(p) for p in self.shards]
        self.trains = torch.is_grad_enabled() and any(self.wanting)
        self.since = self.rerunnable = 0
        self.needs = self.runs_again = self.has_rerun = False
        self.written: dict[int, tuple[int, int]] = {}
        self.watches_inputs = graded and not all(self.wanting)
        self.counts = CallCounts({}, False)
        self.node: Callable[[], Any] = lambda: None
        self._to_come: set[str] = set()
        self._came: set[str] = set()

    def has_computed(self, t: torch.Tensor) -> bool:
        """True if this forward computed `t`. False if it only passed the tensor on.

        The gradient of a tensor that is passed on may arrive when the block is done.
        """
        node = _grad_fn(t)
        return node is not None and node._sequence_nr() >= self.since

    def begin_backward(self, *_: Any) -> None:
        """Begin the backward of this forward, when the first gradient of an output arrives."""
        group = self.group
        at_work = group.zero.current_pass()
        # A pass that computes the gradients of inputs only does not run the parameters' node.
        comes = (node := self.node()) is not None and will_execute(node)
        if comes:
            at_work.came.setdefault((self.counts, group), 0)
        if self in group.calls_in_backward or not self.needs:
            return
        if (before := at_work.unwatched) is not None:
            before.release_when_complete("output")
        self._to_come = {"parameters"} if comes else set()
        self._to_come |= {"inputs"} if self.watches_inputs else set()
        at_work.unwatched = None if self._to_come or self.runs_again else self
        group.zero.enter_backward(group, self.shards)  # gathers again if they were written
        group.calls_in_backward[self] = None
        if self.runs_again and not group.installed:
            if not are_same(group.shards(), self.shards):
                raise _make_rerun_error(group)
            self._install_for_reruns()

    def _install_for_reruns(self) -> None:
        with torch.enable_grad():
            _install_gathered(self.group, _ForwardCall(self.group, False))
        self.group.disconnect_shards()  # until a rerun begins: hooks get the shards
        note_partial_reruns(self.group)

    def gather_again(self) -> None:
        """Gather the block again, after a hook has written its parameters in a nested backward."""
        group, installed = self.group, self.group.installed
        group.put_shards_back()
        for flat in group.flats:
            flat.release()
        group.gather(self.shards)
        if installed:
            self._install_for_reruns()

    def watch_gradients(self, plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns aliases of `plain`, the gathered parameters, whose hooks note complete gradients.

        The hooks run in backward.
        """

        def watch(t: torch.Tensor, p: DTensor) -> torch.Tensor:
            note, group = self.group.zero.current_pass, self.group
            t = t.view_as(t)
            t.register_hook(lambda _: note().note_gradient(self.counts, group, p))
            # As soon as the gradient is complete, as torch does for leaves.
            t.grad_fn._set_sequence_nr(2**64 - 1)  # type: ignore[union-attr]
            return t

        hooked = set(find_hooked(self.shards))
        pairs = zip(plain, (self.shards[i] for i in self.group.order), strict=True)
        return [watch(t, p) if t.requires_grad and p in hooked else t for t, p in pairs]

    def release_when_complete(self, what: str) -> None:
        """Records that gradients of one kind are complete; releases the block if both kinds are.

        Args:
            what: "parameters" or "inputs".
        """
        self._came.add(what)
        if self._came >= self._to_come:
            self._came.clear()
            group = self.group
            group.calls_in_backward.pop(self, None)
            if not group.calls_in_backward and not group.depth:
                group.end_forward()  # a hook may have written the gathered parameters
                group.put_shards_back()
            group.release()

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Reduces `grads`, the gradients of the gathered parameters, in flat-buffer order."""
        group, zero, at = self.group, self.group.zero, 0
        group.fit_buffers(self.shards)
        at_work = zero.current_pass()
        is_last = at_work.note_gradients(self.counts, group)
        shards = [self.shards[i] for i in group.order]
        found = {p: g for p, g in zip(shards, grads, strict=True) if g is not None}
        at_work.accumulates.update((p, _requires_grad(p)) for p in found)
        if torch.is_grad_enabled() and any(g.requires_grad for g in found.values()):
            self._reduce_with_history(found)
            return
        held = zero.current_pass().held.setdefault(self.counts, {})
        for k, flat in enumerate(group.flats):
            some = grads[at : at + len(flat.pieces)]
            at += len(flat.pieces)
            if all(g is None for g in some):
                continue
            # Gradients of all calls of the block in this forward are sent together. If backward
            # does not reach the last call, the token's backward sends them.
            before = held.pop((group, k), None)
            is_kept = not is_last or zero.keeps_partial_gradients
            dtype = group.gradient_dtype(k, is_kept=is_kept)
            with torch.no_grad():
                shares = flat.pack_gradients(some, dtype, before, is_kept=is_kept)
                if is_last:
                    zero.send_or_keep(group, k, shares, self.counts)
                else:
                    held[group, k] = shares

    def _reduce_with_history(self, grads: Mapping[DTensor, torch.Tensor]) -> None:
        """Reduce gradients that are to be differentiated again (`create_graph=True`)."""
        group, zero = self.group, self.group.zero
        used = [p in grads for p in self.shards]
        agree_on_block("gradients under zero", group.name, self.shards[0], used)
        for p, g in grads.items():
            _, sent, summed = zero.precision.dtypes_of(p.dtype)
            before = zero.make_unsharded_spec(p._spec).gradient
            g = move_local(g.to(sent).to(summed), before, p._spec.gradient, group.name, "gradient")
            zero.current_pass().add_with_history(p, g.to(p.dtype))


def _install_gathered(group: FsdpGroup, call: _ForwardCall | None) -> None:
    """Set gathered parameters in the modules of a block, connected to their shards for `call`."""
    with local_ops():
        if call is not None and call.trains:
            token = group.zero.token(group)
            call.counts, made = token.counts, token.counts.made
            made[group] = made.get(group, 0) + 1
            plain = _GatherBlock.apply(token.tensor, call)
            if token.counts.hooked:
                plain = call.watch_gradients(plain)
        else:
            plain = group.views()
    group.install(plain)


class _GatherBlock(torch.autograd.Function):
    """The autograd node from shards (by a token) to gathered parameters; it reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: _ForwardCall) -> Any:
        ctx.call, call.node = call, ref(ctx)
        ctx.set_materialize_grads(False)
        views = call.group.views()
        numbered = zip(call.group.order, views, strict=True)
        ctx.mark_non_differentiable(*[v for i, v in numbered if not call.wanting[i]])
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with local_ops():
            # Frees gathered parameters before their gradients are copied.
            ctx.call.release_when_complete("parameters")
            ctx.call.reduce(grads)
        return empty(0), None


def _watch_input_gradient(t: torch.Tensor, call: _ForwardCall) -> torch.Tensor:
    """Returns an alias of the input `t` of a block that notifies `call` of its full gradient."""
    with local_ops():
        out = t.view_as(t)
        out.register_hook(lambda _: call.release_when_complete("inputs"))
    return as_dtensor(out, t._spec) if isinstance(t, DTensor) else out


# -- what autograd saves ---------------------------------------------------------------------------


class _SavedTensorHooks:
    """Saved-tensor hooks in a block's forward: they save notes in place of gathered parameters.

    Every saved tensor of a block passes here, in forward and in backward, so these functions are
    short.

    Attributes:
        has_notes: True if autograd has saved a gathered parameter through these hooks. It has not
            if a checkpoint that is a hook of the block (`_composable.checkpoint`) put its hooks
            above these.
    """

    def __init__(self, call: _ForwardCall, note: ForwardNote):
        self.call, self.note = call, note
        self.has_notes = False
        self._flats = call.group.flats
        self._have_addresses = all(flat.has_memory for flat in self._flats)
        dtypes = {flat.dtype for flat in self._flats}
        # With one gathered dtype, a tensor of that dtype is not a cast of a gathered parameter.
        self._no_cast = dtypes.pop() if len(dtypes) == 1 else None
        self._other = saving_hooks()
        self._hooks = HooksWithoutRerun(self._pack, _unpack_saved_tensor)
        self._hooks.__enter__()

    def close(self) -> None:
        self._hooks.__exit__(None, None, None)

    def _pack(self, t: torch.Tensor) -> Any:
        with local_ops():
            at = t.data_ptr() if self._have_addresses else 0
            for number, flat in enumerate(self._flats):
                start, end = flat.span
                if start <= at < end or (not at and flat.is_view_here(t)):
                    self.has_notes = self.call.needs = self.call.group.needed = True
                    return _SavedView(self.call, number, t)
            if _dtype(t) is not self._no_cast:
                place = _find_cast_parameter(t, self.call.group)
                if place is not None and not self.call.group.was_written(place):
                    self.has_notes = self.call.needs = self.call.group.needed = True
                    return _SavedCast(self.call, place, t)
            if self._other is None:
                # As `without_history` has it.
                return (t := t if _grad_fn(t) is None else t.detach()), t._version
        return _PackedOutside(self._other[1], self._other[0](t))


def _unpack_saved_tensor(packed: Any) -> torch.Tensor:
    if type(packed) is not tuple:
        return packed.tensor()  # type: ignore[no-any-return]
    t, version = packed
    with local_ops():
        if t._version != version:  # autograd does not check this if there are hooks
            raise modified_error(str(tuple(t.shape)), t._version, version)
    return t  # type: ignore[no-any-return]


def _keep_from_the_next_graph(group: FsdpGroup) -> None:
    """In a backward pass with `create_graph=True`: pack tensors that the current node saves.

    The hooks need not be removed, because the engine restores the thread's hooks for each node.
    """
    if torch.is_grad_enabled() and in_backward():
        _SavedTensorHooks(_ForwardCall(group, False, group.gathered), ForwardNote())


class _SavedNote(SavedVersions):
    """A note that autograd saves in place of a view or cast of a gathered parameter.

    To unpack it, the block is gathered, and the view or cast is made again.
    """

    is_cast = False

    def __init__(self, call: _ForwardCall, t: torch.Tensor, version: int):
        self.group, self.version, self.call = call.group, version, call
        self.versions, self.unseen_writes = call.group.versions, call.group.unseen_writes
        self.dtype, self.size, self.stride = t.dtype, t.size(), t.stride()
        self.offset = t.storage_offset()

    def tensor(self) -> torch.Tensor:
        group = self.group
        group.gather(self.call.shards)
        _keep_from_the_next_graph(group)
        if (
            self.call.written
            or group.versions != self.versions
            or group.unseen_writes != self.unseen_writes
        ) and (self.is_cast or not self.call.has_rerun):
            group.check_unwritten(self.find_parameter(), self)
        with local_ops():
            return self.make_again()

    def find_parameter(self) -> int:
        """Returns the index in the block's group of the parameter of the saved tensor."""
        raise NotImplementedError

    def make_again(self) -> torch.Tensor:
        """Returns the saved tensor, made again from the parameters that are gathered now."""
        raise NotImplementedError


class _SavedView(_SavedNote):
    """The note of a view of a gathered parameter."""

    def __init__(self, call: _ForwardCall, flat: int, t: torch.Tensor):
        super().__init__(call, t, t._version)
        self.flat = flat  # an index: the block may have several flat buffers
        self.is_conj, self.is_neg = t.dtype.is_complex and t.is_conj(), t.is_neg()

    def find_parameter(self) -> int:
        flat = self.group.flats[self.flat]
        piece = flat.find_piece(self.offset * self.dtype.itemsize // flat.dtype.itemsize)
        return self.group.members[self.flat][piece]

    def make_again(self) -> torch.Tensor:
        flat = self.group.flats[self.flat]
        view = flat.make_view(self.dtype, self.offset, self.size, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


_VIEW_NODES = tuple(
    f"{name}Backward"
    for name in "Alias T Transpose Permute View UnsafeView ReshapeAlias Unsqueeze Squeeze".split()
)
"""Autograd nodes of views that keep the dtype, as kernels make them of a weight. By name, since a
node does not show its operator."""


def _find_cast_parameter(t: torch.Tensor, group: FsdpGroup) -> int | None:
    """Returns the index of the gathered parameter of which `t` is a cast, or a view of a cast.

    Returns None if there is none. Autocast makes such casts.
    """
    node: Any = _grad_fn(t)
    while node is not None and node.name().startswith(_VIEW_NODES):
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith("ToCopyBackward"):
        return None
    # It is made again as `.to(dtype)` makes it: contiguous, and not written since.
    cast = t if t._base is None else t._base
    written = t._version or WRITTEN_UNSEEN in vars(t.untyped_storage())
    if written or not cast.is_contiguous():
        return None
    source, place = node.next_functions[0]
    if not isinstance(source, _GatherBlock._backward_cls):  # type: ignore[attr-defined]
        return None
    return place if source.call.group is group else None  # type: ignore[attr-defined]


class _SavedCast(_SavedNote):
    """The note of a view of a cast of a gathered parameter, made before any write to it."""

    is_cast = True

    def __init__(self, call: _ForwardCall, place: int, t: torch.Tensor):
        super().__init__(call, t, call.group.find_first_version(place))
        self.place = place

    def find_parameter(self) -> int:
        return self.group.order[self.place]

    @torch.no_grad()
    def make_again(self) -> torch.Tensor:
        cast = self.group.views()[self.place].to(self.dtype)
        return cast.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _PackedOutside:
    """A saved tensor that is not the block's: packed by the hooks outside of the block's."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any

    def tensor(self) -> torch.Tensor:
        return self.unpack(self.packed)  # may run a part of the program again


# -- a captured step -------------------------------------------------------------------------------


class _GraphGather:
    """Puts the gathered parameters of one block into its modules while its forward runs."""

    def __init__(self, group: FsdpGroup):
        self.group = group
        self.depth = 0

    def begin(self) -> None:
        """Record the gather of a block in the graph, when a module of it begins its forward."""
        self.depth += 1
        if self.depth > 1:  # a nested forward: a tied weight's other module, or the same one
            return
        group = self.group
        if group.zero.keeps_partial_gradients:
            HERE.trace.refuse_no_sync()
        # By this reason, passes recognize gathered values that may be freed.
        reason = "persistent" if group.zero.persistent else "gather"
        # Other slots belong to modules that are no longer in the block, or hold other tensors.
        fakes = {i: p for i, p in enumerate(group.shards()) if isinstance(p, FakeTensor)}
        taken = {i: p for i, p in fakes.items() if group.zero.has_sharded(p)}
        if taken:
            group.install_wholes(
                [(i, _gather_parameter(p, group, reason)) for i, p in taken.items()]
            )

    def end(self) -> None:
        """End the forward of a module of the block, also after an exception."""
        HERE.trace.run_without_profiling(self._end_forward)

    def _end_forward(self) -> None:
        self.depth -= 1
        if self.depth:
            return
        installed = self.group.installed
        self.group.put_shards_back()
        self.group.gathered = ()
        self.group.check_shards(installed)
        for one in installed:
            keep_attributes(one.whole, one.shard, one.attributes)
            if one.was_written_itself():
                _write_back(one.whole, one.shard)


def _write_back(whole: DTensor, p: DTensor) -> None:
    """Copy a gathered parameter that forward has written into this rank's shard."""
    if whole.dtype != p.dtype:
        raise not_captured(f"a parameter {WRITTEN_AS} {whole.dtype}", DIGITS_LOST, WRITE_AFTER)
    with torch.no_grad():
        p.copy_(whole.detach())


# -- gathers in a graph ----------------------------------------------------------------------------


def _gather_parameter(p: DTensor, group: FsdpGroup, reason: str) -> DTensor:
    """Returns `p` gathered, differentiable."""
    after = group.zero.make_unsharded_spec(p._spec)
    dtypes = group.zero.precision.dtypes_of(p.dtype)
    if set(dtypes) == {p.dtype}:
        found = move_local(p, p._spec, after, group.name, reason)
    else:
        moves = plan(p._spec.layout, after.layout, p._spec.wire.mesh, dtypes[0].itemsize)
        with local_ops():
            found = _Gather.apply(p, moves, p._spec, group.name, dtypes, reason)
    whole = as_dtensor(found, after)
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
        ctx.set_materialize_grads(False)
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
