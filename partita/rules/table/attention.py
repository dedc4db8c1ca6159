"""How is attention spread over samples, heads and queries?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ..own_op import op
from ..rule import Arg, Rewrite, rule


@op
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention without dropout; shapes as F.scaled_dot_product_attention has them."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@rule(attention)
def _attention(
    query: Arg,
    key: Arg,
    value: Arg,
    attn_mask: Arg | None,
    is_causal: bool,
    _scale: Any,
    enable_gqa: bool,
) -> str | None:
    s = "q!" if is_causal else "q"
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if grouped and query.ndim != 4:
        return None
    lead, heads = (["b", "(g r)"], "b g") if grouped else (["..."], "...")
    mask = "" if attn_mask is None else f", {_mask(query, key, attn_mask, [*lead, s, 'k!'])}"
    ours = " ".join(lead)
    return f"{ours} {s} d!, {heads} k! d!, + {heads} k! e{mask} -> {ours} {s} e"


def _mask(query: Arg, key: Arg, mask: Arg, names: list[str]) -> str:
    """The names of a mask that is broadcast to the scores, which are `names`."""
    scores = (*query.shape[:-1], key.shape[-2])
    if names[0] == "...":
        names, front = names[1:], ["..."] * (mask.ndim > 2)
    else:
        front = []
    last = [
        "1" if have == 1 != want else name
        for have, want, name in zip(mask.shape[::-1], scores[::-1], names[::-1], strict=False)
    ]
    return " ".join(front + last[::-1])


# -- with dropout ----------------------------------------------------------------------------------


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Arg, key: Arg, value: Arg, attn_mask: Any = None
) -> Rewrite:
    # Whether there is dropout is told by a float, which no key may hold: it is asked at each call.
    return Rewrite(_attend)


def _attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not dropout_p:
        return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    # As torch's own composite computes it: both factors are scaled, to keep within the range.
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(torch.triu(square, 1), -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.dropout(torch.softmax(scores, -1), dropout_p, True) @ value
