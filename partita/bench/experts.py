"""The model of the example that mixes experts, of any width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt

__all__ = ["ExpertModel", "plan_experts"]

_EXPERTS, _CHOICES = 8, 2


class ExpertModel(nn.Module):
    """Guesses the next byte: a recurrent layer, and two of eight small MLPs for each byte.

    Args:
        width: of what passes between the layers.
        context: bytes of a sequence; an expert takes twice its even share of them at most.
    """

    def __init__(self, width: int, context: int):
        super().__init__()
        self.capacity = 2 * _CHOICES * context // _EXPERTS
        self.embed = nn.Embedding(256, width)
        self.past = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, _EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(_EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(_EXPERTS, 2 * width, width) / (2 * width) ** 0.5)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Bytes (b, t), int64 -> logits (b, t, 256)."""
        x_btw, _ = self.past(self.embed(tokens_bt))
        return self.head(x_btw + self._ask_experts(self.norm(x_btw)))  # type: ignore[no-any-return]

    def _ask_experts(self, x_btw: Tensor) -> Tensor:
        share_bte = self.router(x_btw).softmax(dim=-1)
        best_btk = share_bte.topk(_CHOICES, dim=-1).indices
        chosen_bte = F.one_hot(best_btk, _EXPERTS).sum(dim=2).to(x_btw.dtype)
        place_bte = (chosen_bte.cumsum(dim=1) - 1).long()
        taken_bte = chosen_bte * (place_bte < self.capacity)
        places = F.one_hot(place_bte.clamp(0, self.capacity - 1), self.capacity)
        sent_btec = taken_bte[..., None] * places.to(x_btw.dtype)
        x_becw = torch.einsum("btec,btw->becw", sent_btec, x_btw)
        h_bech = F.gelu(torch.einsum("becw,ewh->bech", x_becw, self.up))
        y_becw = torch.einsum("bech,ehw->becw", h_bech, self.down)
        return torch.einsum("btec,becw->btw", sent_btec * share_bte[..., None], y_becw)


def plan_experts(sequence: bool = False) -> dict[str, dict[str, pt.Shard]]:
    """Each rank of tp has some of the experts."""
    return {"up": {"tp": pt.Shard(0)}, "down": {"tp": pt.Shard(0)}}
