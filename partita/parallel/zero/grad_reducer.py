"""The gradient reducer of ZeRO stages 0 to 2: gradients are reduced while backward still runs.

Parameters lie whole on every rank of the data axis. When the last gradient of a block has come, the
ranks begin to reduce the block's gradients (all-reduce, or reduce-scatter in stage 2), and the
block before it goes on computing. Until the sums are written back the gradients stay partial. If
one is changed meanwhile, its sum is dropped, and it is reduced later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Replicate, Shard
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.dtensor_gradients import mark_settled, store_gradient, update_spec
from partita.tensor.tensor_state import Rest, Spec, own_state, spec_of, state_of

from .flat_buffer import FlatBuffer
from .fsdp_group import MixedPrecision, ShardedState

_grad: Any = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_data: Any = torch._C.TensorBase.data


_BUCKET_BYTES = 25 << 20
"""Where gradients stay whole, small blocks are joined up to about this size: DDP's default."""


class _Bucket:
    """Parameters of one dtype, of one block or of several small ones, and their gradients.

    Attributes:
        ready: the parameters whose gradients have come, in this step or, since a step need not use
            all of them, in an earlier one.
        sent: the gradients being reduced, with their versions.
        wait: waits for the reduction, and returns the sums.
    """

    def __init__(self, name: str, params: list[DTensor], pieces: list[Spec], axes: tuple[str, ...]):
        self.name, self.params, self.pieces, self.axes = name, params, pieces, axes
        self._flat: FlatBuffer | None = None
        self._of: torch.device | None = None
        self.ready: set[int] = set()
        self.sent: list[tuple[torch.Tensor, int]] = []
        self.wait: Callable[[], list[torch.Tensor]] = list

    @property
    def flat(self) -> FlatBuffer:
        """The flat buffer of these parameters, in the dtype that they have now."""
        dtype, device = self.params[0].dtype, self.params[0].device
        if self._flat is None or (self._flat.dtype, self._of) != (dtype, device):
            specs = [p._spec for p in self.params]
            names = [self.name] * len(specs)
            self._flat = FlatBuffer(self.name, names, specs, self.pieces, self.axes, dtype, device)
            self._of = device
        return self._flat

    def grads(self) -> list[torch.Tensor | None]:
        return [_grad(p) for p in self.params]

    def note_gradient(self, i: int) -> list[torch.Tensor] | None:
        """Note that parameter `i` has its gradient. Returns all gradients if it was the last."""
        self.ready.add(i)
        if len(self.ready) < len(self.params):
            return None
        with Local():
            grads = self.grads()
            found = []
            for k, (p, g) in enumerate(zip(self.params, grads, strict=True)):
                # A gradient with a history, or reduced since it came, is left as it is.
                is_pending = not isinstance(g, DTensor) or g._spec is p._spec.gradient
                if g is not None and is_pending and not g.requires_grad:
                    found.append(g)
                else:
                    self.ready.discard(k)
        if len(found) < len(self.params):
            return None
        self.ready.clear()
        return found


class GradReducer(ShardedState):
    """Reduces the gradients of blocks as their backward ends.

    Args:
        blocks: a name and the trained parameters of each.
        axes: the mesh axes over which gradients are partial.
        stage: 0, 1 (each rank updates its shard) or 2 (and holds its shard of a gradient only).
        shard: gives the spec of the shard of a whole parameter.
    """

    def __init__(
        self,
        blocks: Iterable[tuple[str, list[DTensor]]],
        axes: tuple[str, ...],
        stage: int,
        shard: Callable[[Spec], Spec],
    ):
        self.axes, self.stage = axes, stage
        self.options = (axes, stage, MixedPrecision())
        self._handles: list[Any] = []
        self._blocks, self._shard = [(name, list(params)) for name, params in blocks], shard
        self._buckets: list[_Bucket] = []
        self._specs: dict[Spec, Spec] = {}
        self._under_way: _Bucket | None = None
        for name, params in self._blocks if stage == 2 else _join_small_blocks(self._blocks):
            groups: dict[torch.dtype, list[DTensor]] = {}
            for p in params:
                groups.setdefault(p.dtype, []).append(p)
            for group in groups.values():
                pieces = [shard(p._spec) for p in group]
                bucket = _Bucket(name, group, pieces, axes)
                self._buckets.append(bucket)
                for i, p in enumerate(group):
                    rest = Rest(
                        gradient=pieces[i] if stage == 2 else p._spec,
                        update=pieces[i] if stage else p._spec,
                        owner=self,
                        name=name,
                    )
                    own_state(p).rest = rest
                    hook = p.register_post_accumulate_grad_hook(self._make_ready_hook(bucket, i))
                    self._handles.append(hook)

    # A copy of the model has a state of its own, over its own parameters.

    def __getstate__(self) -> Any:
        self.finish()
        return self._blocks, self.axes, self.stage, self._shard

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def detach_from_model(self) -> None:
        """Remove the hooks: the state of an enclosing model takes over."""
        self.finish()
        for handle in self._handles:
            handle.remove()

    def replaced(self, old: DTensor, new: DTensor) -> None:
        """`new`, laid out as `old`, has taken its place in the model (see `materialize`)."""
        for bucket in self._buckets:
            for i, p in enumerate(bucket.params):
                if p is old:
                    bucket.params[i] = new
                    for _, params in self._blocks:
                        params[:] = [new if q is old else q for q in params]
                    own_state(new).rest = state_of(old).rest
                    hook = new.register_post_accumulate_grad_hook(self._make_ready_hook(bucket, i))
                    self._handles.append(hook)

    def _make_ready_hook(self, bucket: _Bucket, i: int) -> Any:
        def ready(_: Any) -> None:
            grads = bucket.note_gradient(i)
            if grads is not None and not self.keeps_partial_gradients:
                self._send_bucket(bucket, grads)

        return ready

    # -- reductions under way ----------------------------------------------------------------------

    def _send_bucket(self, bucket: _Bucket, grads: list[torch.Tensor]) -> None:
        with Local(), torch.no_grad():
            self.finish()
            bucket.sent = [(g, g._version) for g in grads]
            if self.stage == 2:
                shares = bucket.flat.pack_gradients(grads, bucket.flat.dtype)
                bucket.wait = bucket.flat.start_reduce_scatter(shares.sums, bucket.flat.dtype)
            else:
                bucket.wait = bucket.flat.start_all_reduce(grads)
            self._under_way = bucket

    def finish(self) -> None:
        """Wait for the reduction under way. Gradients that changed meanwhile stay partial."""
        bucket, self._under_way = self._under_way, None
        if bucket is None:
            return
        with Local(), torch.no_grad():
            sums, grads = bucket.wait(), [sent for sent, _ in bucket.sent]
            current = all(
                g is sent and g._version == version
                for g, (sent, version) in zip(bucket.grads(), bucket.sent, strict=True)
            )
            bucket.wait, bucket.sent = list, []
            if not current:
                return
            if self.stage < 2:  # each keeps its identity, and its order in memory
                for g, total in zip(grads, sums, strict=True):
                    if g.is_contiguous():
                        _data.__set__(g, total)
                    else:
                        g.copy_(total)
                sums = grads
            for p, g in zip(bucket.params, sums, strict=True):
                after = self._spec_after_reduction(p)
                if self.stage < 2:  # it is p's gradient
                    tagged(g, after)
                else:
                    store_gradient(p, tagged(g, after))
                mark_settled(p)

    def _spec_after_reduction(self, p: DTensor) -> Spec:
        """The spec of a gradient reduced over `axes`; it may be partial over others."""
        known = self._specs.get(p._spec)
        if known is None:
            layout = p._spec.gradient.layout
            for a in self.axes:
                layout = layout.put(a, Shard(0) if self.stage == 2 else Replicate())
            known = self._specs[p._spec] = spec_of(layout, p._spec.wire)
        return known

    # -- after an optimizer has updated shards -----------------------------------------------------

    def updated(self) -> None:
        """An optimizer has updated each rank's shards: gather them into the whole parameters."""
        if self.stage == 0:
            return
        with Local(), torch.no_grad():
            # While a bucket arrives, the one before it is written.
            for before, bucket in pairwise([None, *self._buckets, None]):
                if bucket is not None:
                    rows = [p.detach().narrow(0, *_find_updated_rows(p)) for p in bucket.params]
                    bucket.flat.start_gather(rows, "update")
                if before is not None:
                    before.flat.finish_gather_into([p.detach() for p in before.params])


def _join_small_blocks(
    blocks: Iterable[tuple[str, list[DTensor]]],
) -> Iterator[tuple[str, list[DTensor]]]:
    names: list[str] = []
    together: list[DTensor] = []
    size = 0
    for name, params in blocks:
        # The largest pieces: every rank joins the same blocks.
        more = sum(p._spec.largest * p.element_size() for p in params)
        if together and size + more > _BUCKET_BYTES:
            yield " ".join(names), together
            names, together, size = [], [], 0
        names.append(name)
        together = together + params
        size += more
    if together:
        yield " ".join(names), together


def _find_updated_rows(p: DTensor) -> tuple[int, int]:
    """Which rows of its own piece of `p` this rank updates: (first, count)."""
    mine, whole = update_spec(p).region[0], p._spec.region[0]
    return mine[0] - whole[0], mine[1]
