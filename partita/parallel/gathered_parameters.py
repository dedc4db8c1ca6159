"""Gathered parameters that are in the modules during a forward, under ZeRO-3.

An `InstalledParameter` connects a gathered parameter to its shard. `SavedVersions` has the write
counts by which backward detects that a parameter was written after autograd saved it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.layout import Fix
from partita.tensor.aliasing import redistribute_view, renew_copy
from partita.tensor.construct import copy_attributes
from partita.tensor.dtensor import DTensor, move_local
from partita.tensor.tensor_state import (
    CopiedView,
    count_unseen_writes,
    count_writes,
    own_state,
    state_of,
)

_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]


class SavedVersions:
    """The write counts of a parameter when autograd saved a view or a cast of it.

    Backward raises an error if they have changed, as autograd does for saved tensors.

    Attributes:
        versions, unseen_writes: the values of these attributes of the group at that time.
        version: the version of the gathered parameter.
        call: the forward, whose `written` is the result of `FsdpGroup.end_forward`.
        is_cast: True if the saved tensor is a cast. A cast has its own memory, so writes to the
            parameter do not change it.
    """

    versions: list[int]
    unseen_writes: list[int]
    version: int
    call: Any
    is_cast: bool


class InstalledParameter(CopiedView):
    """A gathered parameter that replaces its shard in the modules during a forward.

    Other references to the parameter, such as an optimizer's, refer to the shard. During the
    forward the shard is a view copy of the gathered parameter (see `tensor/aliasing`). So a write
    to one of them changes both.

    Attributes:
        number: the index of the parameter in its group.
        shard, whole: the sharded and the gathered parameter.
        follows: True if the shard was connected.
        shard_spec: the spec of the shard outside of the forward.
        shard_writes: two write counts of the shard when it was last equal to its part of `whole`:
            those that autograd counts, and others.
        unseen: the writes to `whole` that autograd does not count, at the last comparison.
        writes: the write count of `whole` when it was installed.
        writes_in_shard: two write counts of `whole` when its values were last copied to the shard:
            those that autograd counts, and others.
        attributes: the attributes that were copied to `whole`.
    """

    __slots__ = (
        "attributes",
        "follows",
        "number",
        "shard",
        "shard_spec",
        "shard_writes",
        "unseen",
        "whole",
        "writes",
        "writes_in_shard",
    )

    def __init__(self, number: int, shard: Any, whole: DTensor, *writes: int):
        """Connects the shard to the gathered parameter.

        Args:
            writes: the write count of `whole`, and the counts of `shard` as in `shard_writes`.
        """
        spec = shard._spec
        layout = (spec.layout,)
        super().__init__(whole, redistribute_view, layout, {}, None, writes[0], graded=True)
        self.number, self.shard, self.whole, self.shard_spec = number, shard, whole, spec
        self.writes, self.writes_in_shard = writes[0], (writes[0], 0)
        self.shard_writes = writes[1:]
        self.follows, self.unseen, self.attributes = False, 0, copy_attributes(whole, shard)

    def connect_shard(self) -> None:
        """Make the shard a view copy of the gathered parameter."""
        self.follows = True
        own_state(self.shard).copied_view, self.shard._spec = self, self.shard_spec.as_copy

    def take_again(self, copy: Any) -> Any:
        unseen = state_of(self.whole).unseen_writes  # such as `module.weight.data = value`
        if self.source is self.whole and unseen != self.unseen:
            self.unseen, self.source_writes, self.retaken = unseen, -1, None
        return super().take_again(copy)

    def note_new_values(self) -> None:
        if _dtype(self.whole) == _dtype(self.shard):
            self.writes_in_shard = self.count_writes_of_whole()
        self.shard_writes = count_writes(self.shard), count_unseen_writes(self.shard)

    def note_write_through(self, copy: Any) -> None:
        super().note_write_through(copy)
        self.note_new_values()
        self.writes_in_shard = self.count_writes_of_whole()

    def count_writes_of_whole(self) -> tuple[int, int]:
        return count_writes(self.whole), count_unseen_writes(self.whole)

    def was_written_itself(self) -> bool:
        """True if the program has written `whole`, and the shard lacks the values."""
        return self.count_writes_of_whole() != self.writes_in_shard

    def release_shard(self) -> None:
        """End the connection of the shard to the gathered parameter, which will be freed."""
        state = own_state(self.shard)
        if state.copied_view is self:
            state.copied_view, self.shard._spec = None, self.shard_spec
        # Views of the shard that were made in the forward refer to this object. They are taken
        # again from the shard.
        self.source, self.source_writes, self.retaken = self.shard, -1, None

    def release_for_step(self) -> None:
        """Make the shard an ordinary parameter with its current values, for an optimizer's step.

        The reason: the kernels of a step write its local tensor.
        """
        renew_copy(self.shard)
        self.release_shard()

    def connect_again(self) -> None:
        """Connect the shard again, as after a step. Gathers its values if it has been written."""
        self.connect_shard()
        self.source, self.source_writes = self.whole, count_writes(self.whole)
        if (count_writes(self.shard), count_unseen_writes(self.shard)) == self.shard_writes:
            return
        with local_ops(), torch.no_grad():
            value = move_local(self.shard, self.shard_spec, self.whole._spec, "write", "implicit")
            self.whole.copy_(value)
        self.note_write_through(self.shard)


WRITTEN_AS = "is written in the forward, where it is gathered as"
DIGITS_LOST = "its shards would lose digits that this dtype lacks"
WRITE_AFTER = Fix("write it after the optimizer's step", "then the modules hold the shards")


CAST_IS_MADE_AGAIN = (
    ". Backward needs a cast of it. Under stage 3 of ZeRO no rank keeps that cast: it is made again"
    " of the parameter as it is now. Write the parameter after backward, or cast a copy in the"
    " forward: w.clone().to(dtype)"
)


HAS_OTHER_MEMORY = (
    ". It was given other memory (p.data = x). In one process backward would go on with the memory"
    " that the forward saved, which ZeRO has freed. Write p.data.copy_(x), or set it after backward"
)


def modified_error(what: str, now: int, expected: int, why: str = "") -> RuntimeError:
    """Returns the error for a saved tensor that was written in place, in autograd's words.

    Args:
        what: text for the tensor: its name or its shape.
        now, expected: its version now, and its version when it was saved.
        why: text to add at the end.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} is at version {now}; expected version {expected}{why}"
    )
