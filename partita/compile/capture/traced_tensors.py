"""Traced tensors: which node of a graph makes one, and how one is had for a node without a call.

Private torch: what a tracer knows of a tensor, and what makes a tensor without memory. Whoever puts
nodes into the graph that is being traced, beside the calls that make them as they run, needs both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._C import DisableTorchFunction as Unheard
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)

__all__ = ["become", "known_node_of", "node_of", "node_of_number", "stands_for", "tensors_of"]


def node_of(t: torch.Tensor) -> fx.Node | None:
    """The node that makes a tensor, in the graph that is being traced; None if none does."""
    slot = get_proxy_slot(t, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None else slot.proxy.node


def known_node_of(t: torch.Tensor) -> fx.Node | None:
    """The same, but None where the tracer knows the tensor's numbers, and goes on with those."""
    slot = get_proxy_slot(t, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None or slot.constant is not None else slot.proxy.node


def node_of_number(number: torch.SymFloat | torch.SymInt | torch.SymBool) -> fx.Node | None:
    """The node that makes a number which is not known; None if none does."""
    slot = get_proxy_slot(number, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None else slot.force().node  # type: ignore[union-attr]


def stands_for(t: torch.Tensor, node: fx.Node) -> None:
    """From now on the node makes what `t` is."""
    tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
    set_proxy_slot(t, tracer, _ProxyTensor(fx.Proxy(node, tracer), None))


def tensors_of(
    nodes: Sequence[fx.Node], likes: Sequence[torch.Tensor], mode: FakeTensorMode
) -> list[FakeTensor]:
    """Tensors without memory that the nodes make; what they are like, `likes` say."""
    with torch._C._DisableTorchDispatch(), Unheard():  # type: ignore[attr-defined]
        made = [_make_fake_like(t, mode) for t in likes]
    for node, fake, like in zip(nodes, made, likes, strict=True):
        node.meta.setdefault("val", like)
        stands_for(fake, node)
    return made


def _make_fake_like(t: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    if offset := t.storage_offset():
        last = offset + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        meta = torch.empty(last + 1 if t.numel() else offset, dtype=t.dtype, device="meta")
        return FakeTensor(mode, meta.as_strided(t.shape, t.stride(), offset), t.device)
    meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return FakeTensor(mode, meta, t.device)


def become(stand: FakeTensor, made: FakeTensor) -> None:
    """Have the object `stand`, which others hold, be the tensor `made`, which nobody holds.

    As `torch.utils.swap_tensors` does, which refuses where something refers to one weakly, as a
    tracer does.
    """
    tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
    slot = get_proxy_slot(made, tracer)
    with Unheard():
        torch._C._swap_tensor_impl(stand, made)  # type: ignore[attr-defined]
        set_proxy_slot(stand, tracer, slot)
    for name, value in made.__dict__.items():
        stand.__dict__.setdefault(name, value)
