"""Adapters of low rank, as peft puts them into a client's model."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from .models import CLIENTS
from .modes import make_model

CLIENT = CLIENTS["Llama"]


def with_adapters() -> nn.Module:
    """Llama with adapters at its attention, none of them 0."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "k_proj", "o_proj"], use_dora=False
    )
    with warnings.catch_warnings():  # peft asks transformers by a name that it gave up
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(make_model(CLIENT, torch.float64), config).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.1 * torch.randn(p.shape, dtype=p.dtype, generator=generator))
    return model
