"""Do adapters of peft train on a mesh as on one device, and the frozen weights stay as they are?"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt

from .models import CLIENTS, LLAMA_PLAN
from .modes import Trained, compare, make_batches, make_model, train

pytestmark = pytest.mark.slow

CLIENT = CLIENTS["Llama"]
PLAN = {
    name.replace("_proj.*", "_proj.base_layer.*").replace("_proj.weight", "_proj.base_layer.weight")
    if "self_attn" in name
    else name: place
    for name, place in LLAMA_PLAN.items()
}


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


def on_a_mesh(mesh: Any, place: str) -> Trained:
    model = with_adapters()
    if place == "tensor parallel":
        pt.parallelize(model.base_model.model, mesh, PLAN)
        pt.parallelize(model, mesh)
    else:
        (pt.parallelize if place == "data parallel" else pt.zero)(model, mesh)
    batches = [pt.distribute_batch(b, mesh) for b in make_batches(CLIENT, torch.float64)]
    return train(CLIENT, model, batches, compiled="graph" if "compile" in place else None)


@pytest.mark.parametrize(
    "place", ["data parallel", "ZeRO-3", "ZeRO-3, pt.compile", "tensor parallel"]
)
def test_adapters_train_as_on_one_device(place: str) -> None:
    truth = train(CLIENT, with_adapters(), make_batches(CLIENT, torch.float64))
    assert any(g is None for g in truth.gradients[0].values())
    assert sum(g is not None for g in truth.gradients[0].values()) == 2 * 4 * 2
    with pt.ranks(**({"dp": 2, "tp": 2} if place == "tensor parallel" else {"dp": 2})) as world:
        for ours in world.run(on_a_mesh, place):
            compare(ours, truth)
