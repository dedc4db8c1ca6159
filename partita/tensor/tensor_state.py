"""State: what partita remembers of a tensor beside its value and its spec, and of a thread.

Of a tensor all of it is one `TensorState` in one attribute, so that it is clear what a copy does
not take over, and what a tensor that takes another's place must be given. The spec alone, which
every op reads, is an attribute of its own (`_spec`). A view copy (see `aliasing`) has its `Origin`
there. Of a thread, which runs a rank, `HERE` has who is told of what runs in it, where torch has no
hook for that: rematerialisation, a capture, `explain`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C import DisableTorchFunction as Unheard  # by modes, too

# Not public, but a copy may be asked for where torch-function is disabled, and nothing else turns
# it on again. Without it the view would be taken of the shard.
from torch._C import _EnableTorchFunction

if TYPE_CHECKING:
    from .spec import Spec

_STATE = "_partita"
OURS = frozenset(("_spec", _STATE))
"""Attributes of a DTensor that belong to us and are not copied as the user's own are."""


@dataclass(frozen=True)
class Rest:
    """The specs of a parameter's gradient and update, where ZeRO has them in another layout than
    it.

    Attributes:
        gradient: the spec of the gradient, once it is reduced.
        update: the spec of the optimizer's state, and of the part of the value that it updates.
        owner: what reduces the gradient early and gathers what was updated.
        name: of the block, whose gradients travel together.
    """

    gradient: Spec
    update: Spec
    owner: Any
    name: str = ""


@dataclass(frozen=True)
class MovedValue:
    """A tensor's value in the layout of `spec`, which is good as long as neither is written.

    Attributes:
        version: of the tensor that was moved, and whether gradients were recorded then.
        value_version: of `value`.
    """

    spec: Spec
    version: tuple[int, bool]
    value: torch.Tensor
    value_version: int

    def is_of(self, spec: Spec, version: tuple[int, bool]) -> bool:
        """Is it still the value, in the layout of `spec`, of a tensor that is now of `version`?"""
        is_same = self.spec is spec and self.version == version
        return is_same and count_writes(self.value) == self.value_version


@dataclass(frozen=True)
class ReopenHook:
    """A tensor's hook that is taken off and registered again in every step.

    Private torch: it is put into the dictionary `_backward_hooks` itself. To register a hook costs
    3 microseconds for each parameter and step, a hook that is called for nothing 6.
    """

    id: int
    hook: Any


@dataclass(slots=True)
class TensorState:
    """What is known of one tensor; of most tensors nothing.

    Attributes:
        rest: the layouts in which ZeRO keeps its gradient and its update.
        gradient_of: the tensor whose `.grad` this object is, or was.
        origin: of a view copy, what it was copied from (an `Origin`).
        moved: its value in the last other layout that an op needed.
        reopens: the hook that makes a reduced gradient partial again, before backward adds to it.
        written_unseen: may it have been written through `.data`, which torch does not count?
        gathered_from: the parameter at rest that this is the gathered value of, and its version.
        was_plain: was it a plain parameter when an optimizer may have made its state for it?
        given_up: its name in the model that now holds another in its place, and what replaced it.
    """

    rest: Rest | None = None
    gradient_of: weakref.ref[Any] | None = None
    origin: Any = None
    moved: MovedValue | None = None
    reopens: ReopenHook | None = None
    written_unseen: bool = False
    gathered_from: tuple[torch.Tensor, int] | None = None
    was_plain: bool = False
    given_up: tuple[str, str] | None = None


_NOTHING = TensorState()


def state_of(x: torch.Tensor) -> TensorState:
    """What is known of `x`, to be read only: tensors of which nothing is known share one state."""
    state: TensorState = x.__dict__.get(_STATE, _NOTHING)
    return state


def own_state(x: torch.Tensor) -> TensorState:
    """The state of `x` alone, to be written."""
    state: TensorState | None = x.__dict__.get(_STATE)
    if state is None:
        state = x.__dict__[_STATE] = TensorState()
    return state


def count_writes(x: torch.Tensor) -> int:
    """How many writes of `x` torch has counted (its version); in inference it counts none."""
    with Unheard():
        return 0 if x.is_inference() else x._version


def count_writes_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`count_writes` of each."""
    with Unheard():
        return [0 if x.is_inference() else x._version for x in tensors]


def was_written_since(x: torch.Tensor, count: int) -> bool:
    """May `x` have other values than when `count` writes were counted?"""
    return count_writes(x) != count or state_of(x).written_unseen


# -- where a view copy comes from ------------------------------------------------------------------


@dataclass(slots=True)
class Origin:
    """What a view copy is of: `view(source, *args, **kwargs)`, of several results number `index`.

    A view copy has memory of its own and would be a view on one device, where a view shows what is
    written into its base afterwards. So it is taken again when it is read and its source was
    written since. Torch counts a tensor's writes, and every write of ours is counted on all ranks
    alike, so that all take it again together. In inference mode nothing is counted, and it is taken
    again at each read.

    Attributes:
        source: an alias of the tensor, whose shape stays as it was.
        source_writes: how often `source` was written before the copy was taken.
        retaken: the copy that was taken last in its place, with what it was taken from:
            (source, its writes, with gradients?, copy).
        graded: was it taken where gradients are recorded? Else it has none, wherever it is read.
    """

    source: Any
    view: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    index: int | None
    source_writes: int
    retaken: tuple[Any, int, bool, Any] | None = None
    graded: bool = field(default_factory=torch.is_grad_enabled)

    def take_again(self, copy: Any) -> Any:
        """`copy` if it is up to date, else the same part of the source as it is now."""
        source = current(self.source)
        count, graded = count_writes(source), self.graded and torch.is_grad_enabled()
        with Unheard():
            is_counted = not source.is_inference()
        if is_counted:
            if source is self.source and count == self.source_writes:
                return copy
            retaken = self.retaken
            if retaken is not None and retaken[0] is source and retaken[1:3] == (count, graded):
                return retaken[3]
        with _EnableTorchFunction(), torch.set_grad_enabled(graded):
            part = self.view(source, *self.args, **self.kwargs)
            if self.index is not None:
                part = part[self.index]
        if is_counted:
            self.retaken = (source, count, graded, part)
        return part


def current(x: Any) -> Any:
    """`x`; where it is a view copy that is out of date, the same part of its source as it is
    now."""
    origin = state_of(x).origin
    return x if origin is None else origin.take_again(x)


# -- who watches a thread --------------------------------------------------------------------------


class Watcher(Protocol):
    """What is told of a call, and decides whether it is made.

    A `TorchFunctionMode` is called for torch's own functions. It is not called where an
    `autograd.Function` is applied (a region that torch compiled is one), where a region that
    partita compiled is called, or for what a redistribution carries. Rematerialisation runs a part
    of the program again and must find each call of the first run in the second, so it is told of
    those.
    """

    def run_function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """`function.apply(*args, **kwargs)`, or the call of a compiled region; `run()` does it."""

    def announce_write(self, t: torch.Tensor) -> None:
        """Take note that the autograd.Function that is applied now is about to write `t` in
        place."""

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The redistribution `what` (a plan of moves) of the local tensor `x`; `run()` carries it
        out."""


class Label(str):
    """The name of a call in reports. Calls that differ in nothing else are the same call."""


class _Here(threading.local):
    """What watches this thread, which runs a rank.

    Attributes:
        watcher: the `Watcher` that is told of calls.
        capturing: is a step being captured (see `compile.capture`)? Its tensors have no memory.
        recorder: notes where the nodes of a captured step come from, while it is captured.
        block: follows the block of a captured step that runs now, if one does.
        explainer: is told how each call is planned; while there is one, all are planned anew.
        step_in_blocks: while a step of a model with blocks is captured, makes the update of an
            elementwise optimizer, given it, what runs its step, and of which parameter each tensor
            that it updates is a part (itself where it is none).
        call_own: while a step is captured, makes a call of which the capture need not hear.
        resized: is told of each storage whose memory its owner has freed or allocated again.
        rerunnable: counts what may run a part of the program again in backward: hooks of saved
            tensors (a checkpoint's), autograd.Functions.
    """

    watcher: Any = None
    capturing: bool = False
    recorder: Any = None
    block: Any = None
    explainer: Any = None
    step_in_blocks: Any = None
    call_own: Any = None
    resized: Any = None
    rerunnable: int = 0

    def unheard(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, a function of partita's during which no code of the user's runs."""
        return function(*args) if self.call_own is None else self.call_own(function, *args)

    @cached_property
    def unfinished(self) -> list[Callable[[], None]]:
        """For what has begun here and not ended (a block's forward), innermost last, the function
        that ends it."""
        return []

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """End what begins inside when it is left, in whichever way: torch does not call a module's
        forward hooks where its forward raises what is no `Exception`."""
        n = len(self.unfinished)
        try:
            yield
        finally:
            while len(self.unfinished) > n:
                self.unfinished.pop()()

    def outside_block(self) -> AbstractContextManager[None]:
        """A context in which calls are not taken for a part of the block that is followed."""
        return nullcontext() if self.block is None else self.block.suspended()


HERE = _Here()
