"""Do adapters of peft train on a mesh as on one device, and the frozen weights stay as they are?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import partita as pt

from .adapters import CLIENT, with_adapters
from .models import LLAMA_PLAN
from .modes import Trained, compare, make_batches, train

pytestmark = pytest.mark.slow

PLAN = {
    name.replace("_proj.*", "_proj.base_layer.*").replace("_proj.weight", "_proj.base_layer.weight")
    if "self_attn" in name
    else name: place
    for name, place in LLAMA_PLAN.items()
}


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
