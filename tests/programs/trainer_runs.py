"""Small models and data sets for other packages' trainers, run as torchrun runs them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS, EVALUATED = 22, 13  # neither is a multiple of a batch


class Sentences(torch.utils.data.Dataset):
    """Rows of words that are padded to one length."""

    def __init__(self, rows: int = ROWS) -> None:
        self.words = torch.randint(1, 37, (rows, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(8) < 4 + i % 5).long()
        labels = self.words[i].masked_fill(mask == 0, -100)
        return {"input_ids": self.words[i] * mask, "attention_mask": mask, "labels": labels}


class Plain(nn.Module):
    """A model that is none of transformers', and computes its loss in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 37)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * attention_mask[..., None]
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "plain":
        return Plain().double()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    dropout = 0.1 if kind == "dropout" else 0.0
    config = LlamaConfig(
        vocab_size=37, num_hidden_layers=2, pad_token_id=0, attention_dropout=dropout, **sizes
    )
    model: nn.Module = LlamaForCausalLM(config)
    if kind == "adapters":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return model if kind == "float32" else model.double()


def as_under_torchrun(rank: int, ranks: int, run: Callable[..., Any], *args: Any) -> Any:
    """Call `run` with the environment of torchrun, from which accelerate finds its ranks.

    One rank is a process of its own, without the environment.
    """
    if ranks > 1:
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    else:
        del os.environ["LOCAL_RANK"]
    warnings.simplefilter("ignore")  # as the packages' own
    return run(ranks, *args)


def largest_difference(ours: Any, theirs: Any) -> float:
    """Returns the largest difference of numbers at the same places of nested lists and dicts."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), [theirs[key] for key in ours]
    if isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        return max(map(largest_difference, ours, theirs), default=0.0)
    if isinstance(ours, torch.Tensor):
        assert type(ours) is torch.Tensor and ours.shape == theirs.shape
        return (ours.double() - theirs.double()).abs().max().item()
    return abs(ours - theirs)
