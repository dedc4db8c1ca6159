"""Classes of layouts in which the sweep over torch's ops tries the arguments of an op.

- replicated: complete on every rank.
- even: sharded along a dimension that is divisible by the number of ranks (along any, if none is).
- uneven: sharded along a dimension that is not, so that shards are unequal or empty.
- partial: Partial sums of 2x and -x (exact in binary); replicated if not floating-point.
- mixed: each argument has one of these on each mesh axis, or is Invariant, or a plain tensor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

import partita as pt

CLASSES = ("replicated", "even", "uneven", "partial", "mixed")


def distribute_argument(
    t: torch.Tensor, mesh: Any, klass: str, turn: int, first: bool = True
) -> torch.Tensor:
    """Returns the plain tensor `t` as a DTensor on `mesh`, in a layout of the class `klass`.

    `klass` is one of `CLASSES`. In the class "mixed" the result may be a plain copy.

    Args:
        turn: a number that selects one of several layouts.
        first: True for the op's first argument, which always becomes a DTensor.
    """
    # A plain tensor that requires grad is refused beside a DTensor: its gradient has no layout.
    stays = not (first or t.requires_grad)
    t = t.detach()
    placements = _choose_placements(t, klass, turn, [mesh.size(i) for i in range(mesh.ndim)])
    if placements is None:
        return t.clone() if stays else distribute_argument(t, mesh, "replicated", turn)
    held = [pt.Replicate() if p.is_partial() else p for p in placements]
    piece = pt.distribute_tensor(t, mesh, held, src_data_rank=None)
    if not any(p.is_partial() for p in placements):
        return piece
    weight, at = 1, mesh.get_coordinate()
    for i, p in enumerate(placements):
        if p.is_partial():  # 2, -1; of three ranks 4, -2, -1: powers of two whose sum is 1
            n, place = mesh.size(i), at[i]
            weight *= 2 ** (n - 1) if place == 0 else -(2 ** (n - 1 - place))
    local = piece.to_local()
    if local.is_floating_point() or local.is_complex():
        # An element that cannot be doubled exactly is on one rank only; the others have 0.
        exact = torch.isfinite(local) & (local.abs() < 1e30)
        alone = all(at[i] == 0 for i, p in enumerate(placements) if p.is_partial())
        other = local if alone else torch.zeros_like(local)
        share = torch.where(exact, weight * local, other)
    else:
        share = weight * local
    return pt.DTensor.from_local(share, mesh, placements, shape=t.shape, stride=t.stride())


def _choose_placements(t: torch.Tensor, klass: str, turn: int, sizes: Sequence[int]) -> Any:
    """Returns one placement per axis; None to leave `t` a plain tensor."""
    if t.layout is not torch.strided:
        return [pt.Replicate()] * len(sizes)
    # Never Partial in 8-bit dtypes, which torch cannot add.
    floating = t.element_size() > 1 and (t.is_floating_point() or t.is_complex())
    left = list(t.shape)
    found: list[Any] = []
    dice = random.Random(turn)
    if klass == "mixed" and dice.random() < 0.15:
        return None
    for axis, parts in enumerate(sizes):
        shard = _choose_shard_dim(left, klass, turn + axis, parts)
        if klass == "mixed":
            ways = [pt.Replicate(), pt.Invariant()] + [pt.Shard(d) for d in range(t.dim())]
            ways += [pt.Partial("sum")] * (t.element_size() > 1)
            placement = dice.choice(ways)
        elif klass == "partial" and floating:
            placement = pt.Partial("sum")
        else:
            placement = pt.Replicate() if shard is None else pt.Shard(shard)
        if placement.is_shard():
            left[placement.dim] = -(-left[placement.dim] // parts)  # type: ignore[attr-defined]
        found.append(placement)
    return found


def _choose_shard_dim(shape: Sequence[int], klass: str, turn: int, parts: int) -> int | None:
    if not shape or klass not in ("even", "uneven"):
        return None
    even = [d for d, n in enumerate(shape) if n and n % parts == 0]
    odd = [d for d, n in enumerate(shape) if n % parts] or [d for d, n in enumerate(shape) if not n]
    # A size above 1 shards unequally, a size of 1 leaves a rank with nothing.
    odd = [d for d in odd if shape[d] > 1] or odd if turn % 3 else odd
    dims = (even or odd) if klass == "even" else (odd or even)
    return dims[turn % len(dims)]
