"""Saved tensors: in place of a gathered parameter, autograd saves a note of where it lay.

So no graph holds what was gathered. Unpacking a note gathers the block again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import saved_tensors_hooks

from partita.tensor.autograd import in_backward, saving_hooks, without_history
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.spec import Spec

from .flat_buffer import FlatBuffer
from .fsdp_backward import ForwardCall, GatherBlock
from .fsdp_group import FsdpGroup

__all__ = ["SavedTensorHooks"]


class SavedTensorHooks:
    """Hooks of saved tensors while one forward of a block runs: notes in place of what is
    gathered."""

    def __init__(self, call: ForwardCall):
        self.call = call
        self._flats = call.group.flats
        self._dtypes = {flat.dtype for flat in self._flats}
        self._other = saving_hooks()
        self._hooks = saved_tensors_hooks(self._pack, self._unpack_saved_tensor)
        self._hooks.__enter__()

    def close(self) -> None:
        self._hooks.__exit__(None, None, None)

    def _pack(self, t: torch.Tensor) -> Any:
        with Local():
            at = t.data_ptr()
            for flat in self._flats:
                if flat.span[0] <= at < flat.span[1] or (not at and flat.is_view_here(t)):
                    self.call.needs = self.call.group.needed = True
                    return _SavedView(self.call, flat, t)
            # A tensor of the one gathered dtype can be no cast of a gathered parameter.
            alike = len(self._dtypes) == 1 and t.dtype in self._dtypes
            place = None if alike else _find_cast_parameter(t, self.call.group)
            if place is not None:
                self.call.needs = self.call.group.needed = True
                return _SavedCast(self.call, place, t)
        return _SavedOther(self._other, t)

    @staticmethod
    def _unpack_saved_tensor(packed: _SavedView | _SavedCast | _SavedOther) -> torch.Tensor:
        return packed.tensor()


def _keep_from_the_next_graph(group: FsdpGroup) -> None:
    """In a backward pass with `create_graph=True`: pack also what the current node saves.

    The engine restores the thread's state, hooks included, for each node: nobody has to remove
    these.
    """
    if in_backward() and torch.is_grad_enabled():
        SavedTensorHooks(ForwardCall(group, False))


class _SavedView:
    """A note: a view of a gathered parameter, made again when it is unpacked."""

    def __init__(self, call: ForwardCall, flat: FlatBuffer, t: torch.Tensor):
        self.call, self.group, self.flat, self.spec = call, call.group, flat, _spec(t)
        self.version = t._version
        self.place: Any = (t.dtype, t.storage_offset(), t.size(), t.stride())
        self.versions = call.group.versions

    def tensor(self) -> torch.Tensor:
        self.group.gather()
        _keep_from_the_next_graph(self.group)
        if self.group.versions != self.versions or self.call.written:
            offset, n = self.place[1], self.flat.n
            for i, piece in enumerate(self.flat.pieces):
                if 0 <= offset - piece.place < max(1, n * piece.length):
                    self.group.check_unwritten(
                        self.flat, i, self.versions, self.call.written, self.version
                    )
        with Local():
            return _restore_tensor_class(self.flat.make_view(*self.place), self.spec)


_VIEW_NODES = tuple(
    f"{name}Backward"
    for name in "Alias T Transpose Permute View UnsafeView ReshapeAlias Unsqueeze Squeeze".split()
)
"""Autograd nodes of views that keep the dtype, as kernels make them of a weight. By name, since a
node does not tell its operator."""


def _find_cast_parameter(t: torch.Tensor, group: FsdpGroup) -> int | None:
    """The number of the gathered parameter that `t` is a cast of, or a view of a cast; None where
    it is neither. Autocast makes such."""
    node: Any = t.grad_fn
    while node is not None and node.name().startswith(_VIEW_NODES):
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith("ToCopyBackward"):
        return None
    source, place = node.next_functions[0]
    if not isinstance(source, GatherBlock._backward_cls):  # type: ignore[attr-defined]
        return None
    return place if source.call.group is group else None  # type: ignore[attr-defined]


class _SavedCast:
    """A note: a view of a gathered parameter's cast, which is cast again when it is unpacked."""

    def __init__(self, call: ForwardCall, place: int, t: torch.Tensor):
        self.call, self.group, self.number, self.spec = call, call.group, place, _spec(t)
        self.dtype = t.dtype
        self.place = (t.size(), t.stride(), t.storage_offset())
        self.versions = call.group.versions

    def tensor(self) -> torch.Tensor:
        self.group.gather()
        _keep_from_the_next_graph(self.group)
        if self.group.versions != self.versions:  # of a cast only the shard's version is known
            i = self.number
            for flat in self.group.flats:
                if 0 <= i < len(flat.pieces):
                    self.group.check_unwritten(flat, i, self.versions, self.call.written, 0)
                i -= len(flat.pieces)
        with Local(), torch.no_grad():
            cast = self.group.views()[self.number].to(self.dtype)
            return _restore_tensor_class(cast.as_strided(*self.place), self.spec)


class _SavedOther:
    """Any other tensor: packed by the hooks outside of ours, or itself."""

    def __init__(self, hooks: tuple[Any, Any] | None, t: torch.Tensor):
        self.hooks, self.spec = hooks, _spec(t)
        self.kept = without_history(t) if hooks is None else hooks[0](t)
        self.version = t._version

    def tensor(self) -> torch.Tensor:
        if self.hooks is not None:  # unpacking may run a part of the program again
            kept = self.hooks[1](self.kept)
            with Local():
                return _restore_tensor_class(kept, self.spec)
        with Local():
            if self.kept._version != self.version:  # with hooks, autograd does not look
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by "
                    f"an inplace operation: {tuple(self.kept.shape)} is at version "
                    f"{self.kept._version}; expected version {self.version}"
                )
            return _restore_tensor_class(self.kept, self.spec)


def _spec(t: torch.Tensor) -> Spec | None:
    return t._spec if isinstance(t, DTensor) else None


def _restore_tensor_class(t: torch.Tensor, spec: Spec | None) -> torch.Tensor:
    """`t` as a DTensor of `spec`, in a tensor object of its own."""
    if spec is None:
        return t
    alone = torch.empty(0, dtype=t.dtype, device=t.device)
    return tagged(alone.set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride()), spec)
