"""Attention, sharded over samples, heads and queries.

Queries that are sharded along the sequence stay so, and keys and values are gathered (Llama Team,
"The Llama 3 Herd of Models", 2024, section 3.3.2). So each rank does its part of the work for any
mask. With grouped heads, keys and values are smaller than queries. A causal mask has an offset: the
position of the rank's first query in the sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import Arg, Kernel, KernelCall, KernelRule, decomposed, own_op
from ..rule import builtin_rule as rule


@own_op
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Computes F.scaled_dot_product_attention without dropout. It has its own sharding rule.

    The parameters have the same meaning as in F.scaled_dot_product_attention.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@rule(attention)
def _derive_attention(
    query: Arg,
    key: Arg,
    value: Arg,
    attn_mask: Arg | None,
    is_causal: bool,
    _scale: Any,
    enable_gqa: bool,
) -> KernelRule | None:
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if grouped and query.ndim != 4:
        return None
    lead, heads = (["b", "(g r)"], "b g") if grouped else (["..."], "...")
    mask = "" if attn_mask is None else f", {_mask(query, key, attn_mask, [*lead, 'q', 'k!'])}"
    ours = " ".join(lead)
    # If there are both a mask and is_causal, torch's kernel decides (it may raise).
    q = "q!" if is_causal and mask else "q"
    text = f"{ours} {q} d!, {heads} k! d!, + {heads} k! e{mask} -> {ours} {q} e"
    spread = ours.replace("(", "").replace(")", "")
    work = (f"{spread} q k d", f"{spread} q k e")
    return KernelRule(text, _causal if is_causal else None, keeps="q", beyond=True, work=work)


def _causal(call: KernelCall) -> Kernel | None:
    """Returns the kernel for causal attention of this rank's queries; None if they come first."""
    first = call.pieces.get("q", (0,))[0]
    if isinstance(first, int) and first == 0:
        return None

    def attend_with_mask(
        query: Any, key: Any, value: Any, _mask: None, _causal: bool, scale: Any, gqa: bool
    ) -> Any:
        kind = (query.shape[-2], key.shape[-2], query.dtype, query.device)
        # All layers share one mask tensor, which their backward keeps alive.
        name = ("causal", first, *kind, type(query))
        mask = call.share(name, lambda: _make_causal_mask(query, key, first))
        return call.run(query, key, value, mask, False, scale, gqa)

    return attend_with_mask


def _make_causal_mask(
    query: torch.Tensor, key: torch.Tensor, first: int | torch.Tensor
) -> torch.Tensor:
    """Returns a mask that hides the keys after each query. `first` is the first query's index."""
    if isinstance(first, torch.Tensor):  # in a captured step, whose graph is one for all ranks
        first = first.to(query.device)
    places = torch.arange(query.shape[-2], device=query.device) + first
    hidden = torch.arange(key.shape[-2], device=query.device) > places.unsqueeze(-1)
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -math.inf)


def _mask(query: Arg, key: Arg, mask: Arg, names: list[str]) -> str:
    """Returns the sentence's term for a mask, which is broadcast to scores with these `names`."""
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


@own_op
def product_by_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns `left @ right`, as an op whose rule keeps the rows sharded as in `left`."""
    return left @ right


@rule(product_by_rows)
def _product_by_rows(left: Arg, right: Arg) -> KernelRule:
    return KernelRule("... m k * ... k n -> ... m n", keeps="m")


# The dropout rate is a float, which is never part of a plan's key, so it is read at each call.
@decomposed("query key value attn_mask=None", F.scaled_dot_product_attention)
def scaled_dot_product_attention(
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
    # As in torch's composite implementation, both factors are scaled, to avoid overflow.
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = product_by_rows(query * root, key.transpose(-2, -1) * root)
    if is_causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(torch.triu(square, 1), -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.dropout(torch.softmax(scores, -1), dropout_p, True)
    return product_by_rows(weights, value)
