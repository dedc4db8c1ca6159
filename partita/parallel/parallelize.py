"""`parallelize`: puts a model on a mesh in place, each parameter where a plan says."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from partita.comm import wire_of
from partita.tensor.autograd import moved
from partita.tensor.construct import place_buffer, spread
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.spec import Spec, spec_of
from partita.tensor.uneven_pieces import with_room

from .module_boundary import register_boundary_hook
from .parameters import replace_tensor
from .plan_parser import ParsedPlan, Plan

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    device_mesh: Any,
    plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Put `model` on a mesh, in place: each parameter and buffer becomes a DTensor.

        pt.parallelize(model, mesh, {
            "*.attention.qkv.weight": {"tp": pt.Shard(0)},
            "*.attention.out.weight": {"tp": pt.Shard(1)},
            "*.attention": pt.Inputs({"tp": pt.Replicate()}),
        })

    Args:
        device_mesh: its axes have names.
        plan: by pattern of names, with `*` for any characters, dots too:

            - for parameters, a placement for each axis that is not to hold the whole. Axes that
              split one dimension do so in the order given, outermost first. A parameter of which
              no pattern speaks, and every buffer, is Replicate on all axes;
            - for modules, `Inputs`, `Outputs` or a list of both: where activations live.

            `pt.plans` has ready ones.
        src_data_rank: the rank, in mesh order, whose values count; they are sent to all. None: the
            ranks are known to hold equal values, and nothing is sent.

    A parameter that several modules share stays one; attributes and requires_grad are kept. One on
    the meta device stays there (see `materialize`). One that is on this mesh already keeps what the
    plan does not name, so that plans can be applied one after the other.

    Returns:
        `model`. Its parameters stay the objects that they are: an optimizer may be made before or
        after, unless they are on the meta device yet.

    Raises:
        LayoutError: everything that does not fit, in one list, before anything is changed: a
            pattern that matches nothing, two that disagree on one parameter, an axis that the mesh
            lacks, a shard dimension that a parameter lacks, a parameter on another mesh, one that
            has a gradient or hooks already.
    """
    wire = wire_of(device_mesh)
    parsed = ParsedPlan(model, wire, dict(plan or {}))
    parsed.raise_problems()
    for held, layout in parsed.layouts:
        old, spec = held.tensor, spec_of(layout, wire)
        if not isinstance(old, DTensor):
            new = partial(spread, spec=spec, src_data_rank=src_data_rank)
            is_buffer = not isinstance(old, nn.Parameter)
            value = place_buffer(old, wire, new) if is_buffer else new(old)
            replace_tensor(held, value, by="parallelize")
        elif old._spec is not spec:
            replace_tensor(held, _redistribute_parameter(old, spec), by="parallelize")
    for module, name, boundary in parsed.boundaries:
        register_boundary_hook(module, name, boundary, device_mesh)
    return model


def _redistribute_parameter(x: DTensor, spec: Spec) -> DTensor:
    if x.is_meta:
        return tagged(torch.empty(spec.local_shape, dtype=x.dtype, device="meta"), spec)
    with torch.no_grad():
        local = moved(x, x._spec, spec, "parallelize", "explicit")
        return tagged(with_room(local, spec), spec)
