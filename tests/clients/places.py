"""Places in which a client's model is put: its mesh, and how it is spread over that."""

from __future__ import annotations

from typing import Any

from torch import nn

import partita as pt

from .models import CLIENTS

PLACES = ["data parallel", "ZeRO-3", "tensor parallel, ZeRO-3"]


def place_model(model: nn.Module, mesh: Any, name: str, place: str) -> nn.Module:
    if "tensor" in place:
        pt.parallelize(model, mesh, CLIENTS[name].plan)
    return pt.zero(model, mesh) if "ZeRO" in place else pt.parallelize(model, mesh)


def mesh_of(place: str) -> dict[str, int]:
    return {"dp": 2, "tp": 2} if "tensor" in place else {"dp": 2}
