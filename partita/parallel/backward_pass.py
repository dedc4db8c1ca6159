"""The state of a backward pass under ZeRO-3: which gradients have arrived, and which are reduced.

A `Token` links the gathered parameters of a forward to their shards in autograd. `CallCounts` says
how many gradients backward expects of each block, and `BackwardPass` how many have arrived. A
`Reduction` is a collective that has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import will_execute

from .flat_buffer import PartialGradients

Group = Any
"""An `FsdpGroup`, whose file imports this one."""

_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]


@dataclass(eq=False)
class CallCounts:
    """Counts how often one forward calls each block, so that backward detects the last gradient.

    One `Token` serves this forward. The counts are equal on all ranks, so all ranks send the same
    gradients. Counts of the results that are still alive would differ: Python frees them at
    different times on different ranks.

    Attributes:
        made: for each block, the number of its calls that need gradients of its parameters.
        shards: the sharded parameters of each block.
        hooked: True if the forward is of a single block whose parameters have hooks of the user.
    """

    shards: Mapping[Group, Sequence[DTensor]]
    hooked: bool
    made: dict[Group, int] = field(default_factory=dict)


@dataclass
class BackwardPass:
    """The state of one backward pass under ZeRO-3: which gradients have arrived.

    A hook may run another backward pass inside it, over the same forward.

    Attributes:
        groups: the blocks that the pass has gathered, as keys in this order.
        came: the number of calls whose gradients have arrived, by (forward, block) or (forward,
            parameter with hooks). A block has an entry from the beginning of its backward.
        complete: parameters that have hooks and a complete gradient, while their block's backward
            has not ended.
        nested: parameters that have hooks, if a nested pass has added to their gradient.
        held: gradients of blocks whose other calls have not arrived. The keys are the forward, and
            then the block and the index of the flat buffer.
        kept: the parameters whose gradient in this pass was added to one that `no_sync` keeps.
        accumulates: for each parameter, True if it required a gradient when its last gradient
            arrived. In plain autograd this decides if the sum is added to `.grad` or dropped.
        switches: for each parameter that a hook has frozen or unfrozen, the handles of hooks
            registered by `_switch_while_added`.
        with_history: gradients that have an autograd graph of their own (`create_graph=True`).
        collected: the gradients of forwards whose tokens have run, until the last token runs.
        ended: the counts of the forwards whose tokens have run.
        used_directly: the result of `ZeroState._find_direct_uses`; None before the first use.
        unwatched: the last forward whose backward has begun, if no gradient will show its end. (The
            block is frozen, and the tensors that get gradients were not its arguments.) The block
            is released when the backward of another block begins. If its own backward has not ended
            by that time, the block is gathered again.
    """

    groups: dict[Group, None] = field(default_factory=dict)
    came: dict[tuple[CallCounts, Group | DTensor], int] = field(default_factory=dict)
    complete: set[DTensor] = field(default_factory=set)
    nested: set[DTensor] = field(default_factory=set)
    held: dict[CallCounts, dict[tuple[Group, int], PartialGradients]] = field(default_factory=dict)
    with_history: dict[DTensor, torch.Tensor] = field(default_factory=dict)
    collected: dict[DTensor, torch.Tensor] = field(default_factory=dict)
    ended: set[CallCounts] = field(default_factory=set)
    used_directly: set[Any] | None = None
    kept: set[DTensor] = field(default_factory=set)
    accumulates: dict[DTensor, bool] = field(default_factory=dict)
    switches: dict[DTensor, list[Any]] = field(default_factory=dict)
    unwatched: Any = None

    def remove_hooks(self) -> None:
        """Remove the hooks that this pass has registered. Called at its end, and after an error."""
        for handles in self.switches.values():
            for handle in handles:
                handle.remove()

    def find_unfinished(self, p: DTensor) -> Iterator[tuple[Group, int]]:
        """Yields `(block, calls)` for each block of the parameter `p` whose backward has not ended.

        Only blocks whose backward has begun count. `calls` is the number of the block's calls in
        forward.
        """
        for (counts, block), came in self.came.items():
            made = counts.made.get(block, 0)
            if came < made and p in {*counts.shards[block]}:
                yield block, made

    def note_gradients(self, counts: CallCounts, group: Group) -> bool:
        """Records that the gradients of one call of the block `group` have arrived.

        `counts` are the calls of the forward. Returns True if the gradients of all of them have
        arrived.
        """
        came = self.came[counts, group] = self.came.get((counts, group), 0) + 1
        return came >= counts.made[group]

    def note_gradient(self, counts: CallCounts, group: Group, p: DTensor) -> None:
        """Records that the parameter `p`, which has hooks of the user, got a call's gradient.

        Args:
            counts: the calls of the forward.
            group: the block of `p`.
        """
        came = self.came[counts, p] = self.came.get((counts, p), 0) + 1
        if came >= counts.made[group]:
            self.complete.add(p)

    def add_with_history(self, p: DTensor, grad: torch.Tensor) -> None:
        """Add `grad`, computed with `create_graph=True`, to the gradient of `p`."""
        before = self.with_history.get(p)
        self.with_history[p] = grad if before is None else before + grad


@dataclass(frozen=True)
class Token:
    """An empty tensor that links a forward's gathered parameters to their shards in autograd.

    Its backward node runs after the backward nodes of all blocks, and returns the reduced gradients
    of the shards.

    Attributes:
        tensor: the empty tensor.
        counts: the counts of the calls that use it.
        trained: the parameters to which its backward returns gradients.
    """

    tensor: torch.Tensor
    counts: CallCounts
    trained: set[DTensor]


@dataclass(frozen=True, slots=True, eq=False)
class LiveToken:
    """A token whose backward may still run, without the tensor, which would keep a graph alive.

    Attributes:
        counts, trained: those of the token.
        node: a weak reference to the token's autograd node.
    """

    counts: CallCounts
    trained: set[DTensor]
    node: ref[Any]

    def is_in_pass(self) -> bool:
        """True if the running backward pass reaches the node, or has executed it."""
        node = self.node()
        return node is not None and will_execute(node)


@dataclass(eq=False)
class Reduction:
    """A collective that reduces gradients of one block, running or ended.

    Attributes:
        group: the block.
        places: for each parameter that has a gradient, its index in `pieces`.
        counts: the `CallCounts` of the forward whose backward collects the pieces; None outside a
            backward pass.
        backward_pass: the number of that backward pass, or -1.
        wait: waits for the reduction, and returns this rank's pieces; None after the wait.
        pieces: the pieces that the reduction returned.
    """

    group: Group
    places: dict[DTensor, int]
    counts: CallCounts | None
    backward_pass: int
    wait: Callable[[], list[torch.Tensor]] | None
    pieces: Sequence[torch.Tensor] = ()

    def take_gradients(self, params: Iterable[DTensor]) -> dict[DTensor, torch.Tensor]:
        """Waits for the reduction, removes the gradients of `params` from it, and returns them."""
        some = [p for p in params if p in self.places]
        pieces = self.finish() if some else ()
        return {p: pieces[self.places.pop(p)].to(_dtype(p)) for p in some}

    def finish(self) -> Sequence[torch.Tensor]:
        """Waits for the reduction, unless an earlier call has, and returns this rank's pieces."""
        if self.wait is not None:
            self.pieces, self.wait = self.wait(), None
        return self.pieces
