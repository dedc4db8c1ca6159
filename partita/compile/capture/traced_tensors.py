"""Traced tensors: the node that makes a fake tensor, and fakes for nodes added without a call.

Code that adds nodes to the graph being traced, without running the calls, needs both directions.
Private torch: the proxy slots of a tracer, and the construction of a FakeTensor.
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

from .fakes import make_fake

__all__ = [
    "known_node_of",
    "node_of",
    "node_of_number",
    "replace_tensor",
    "set_node_of",
    "tensors_of",
]


def node_of(t: torch.Tensor) -> fx.Node | None:
    """The node that makes a tensor, in the graph that is being traced; None if none does."""
    slot = get_proxy_slot(t, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None else slot.proxy.node


def known_node_of(t: torch.Tensor) -> fx.Node | None:
    """The same, but None where the tracer knows the tensor's values and computes with those."""
    slot = get_proxy_slot(t, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None or slot.constant is not None else slot.proxy.node


def node_of_number(number: torch.SymFloat | torch.SymInt | torch.SymBool) -> fx.Node | None:
    """The node that makes a symbolic number; None if none does."""
    slot = get_proxy_slot(number, get_proxy_mode().tracer, None)  # type: ignore[union-attr]
    return None if slot is None else slot.force().node  # type: ignore[union-attr]


def set_node_of(t: torch.Tensor, node: fx.Node) -> None:
    """Have `node` be the node that makes `t`."""
    tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
    set_proxy_slot(t, tracer, _ProxyTensor(fx.Proxy(node, tracer), None))


def tensors_of(
    nodes: Sequence[fx.Node], likes: Sequence[torch.Tensor], mode: FakeTensorMode
) -> list[FakeTensor]:
    """New fake tensors with the metadata of `likes`, made by `nodes`."""
    with torch._C._DisableTorchDispatch(), Unheard():  # type: ignore[attr-defined]
        made = [_make_fake_like(t, mode) for t in likes]
    for node, fake, like in zip(nodes, made, likes, strict=True):
        node.meta.setdefault("val", like)
        set_node_of(fake, node)
    return made


def _make_fake_like(t: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    if offset := t.storage_offset():
        last = offset + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        meta = torch.empty(last + 1 if t.numel() else offset, dtype=t.dtype, device="meta")
        return make_fake(mode, meta.as_strided(t.shape, t.stride(), offset), t.device)
    meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return make_fake(mode, meta, t.device)


def replace_tensor(stand: FakeTensor, made: FakeTensor) -> None:
    """Turn the object `stand`, which others hold, into the tensor `made`, which nobody holds.

    As `torch.utils.swap_tensors`, which refuses tensors with weak references, as a tracer has.
    """
    tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
    slot = get_proxy_slot(made, tracer)
    with Unheard():
        torch._C._swap_tensor_impl(stand, made)  # type: ignore[attr-defined]
        set_proxy_slot(stand, tracer, slot)
    for name, value in made.__dict__.items():
        stand.__dict__.setdefault(name, value)
