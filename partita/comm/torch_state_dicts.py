"""Patches of torch.distributed.checkpoint.state_dict: whole values of DTensors out, pieces in.

`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` and its kin know
torch's own DTensors by their class and take every other tensor for whole: of ours they would return
this rank's piece, and a file that rank 0 writes of it would lack the rest. The functions of torch
that test the class are private (`tests/ranks/test_private_torch.py` names them). They are replaced
when torch's module is imported, which partita itself does not do.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

from .after_import import after_import

__all__ = ["SpreadTensors", "patch_state_dicts"]

_WALK = "torch.distributed._state_dict_utils"
_DOOR = "torch.distributed.checkpoint.state_dict"
_STAGER = "torch.distributed.checkpoint._state_dict_stager"


class SpreadTensors(Protocol):
    """What these patches ask of DTensors, which this room does not know."""

    def is_spread(self, x: Any) -> bool:
        """Is `x` a DTensor of partita?"""

    def whole(self, x: Any) -> torch.Tensor:
        """Its whole value, on every rank. All ranks call this."""

    def piece_like(self, x: Any, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a `whole` value that all ranks have, laid out as `x`."""

    def empty_like(self, x: Any) -> torch.Tensor:
        """Memory on the CPU for a copy of `x`."""

    def copy_on_cpu(self, x: Any) -> torch.Tensor:
        """A copy of this rank's piece of it, laid out alike."""

    def give_memory(self, model: torch.nn.Module) -> None:
        """Memory for what of `model` is spread and on the meta device."""


def patch_state_dicts(tensors: SpreadTensors) -> None:
    """Patch torch's functions of state dicts to ask `tensors`, now or when they are imported."""
    after_import(_WALK, lambda module: _teach_walk(module, tensors))
    after_import(_DOOR, lambda module: _teach_door(module, tensors))
    after_import(_STAGER, lambda module: _teach_stager(module.StateDictStager, tensors))


def _teach_walk(module: Any, tensors: SpreadTensors) -> None:
    iterate, broadcast = module._iterate_state_dict, module._broadcast_tensors

    @functools.wraps(iterate)
    def _iterate_state_dict(
        iter_object: Any, sharded_tensor_func: Any, dtensor_func: Any, *args: Any, **options: Any
    ) -> Any:
        if tensors.is_spread(iter_object):
            # The callback for torch's DTensors shows which function walks the state dict.
            asked_by = dtensor_func.__qualname__.partition(".")[0]
            if asked_by == "_gather_state_dict":
                iter_object = tensors.whole(iter_object)
            elif asked_by == "_create_cpu_state_dict":
                return tensors.empty_like(iter_object)
        return iterate(iter_object, sharded_tensor_func, dtensor_func, *args, **options)

    @functools.wraps(broadcast)
    def _broadcast_tensors(
        full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any, **options: Any
    ) -> None:
        ours = {key: local[key] for key in keys if tensors.is_spread(local.get(key))}
        broadcast(full, local, keys, *args, **options)
        for key, x in ours.items():
            local[key] = tensors.piece_like(x, local[key])

    module._iterate_state_dict = _iterate_state_dict
    module._broadcast_tensors = _broadcast_tensors


def _teach_door(module: Any, tensors: SpreadTensors) -> None:
    distribute, load = module._distribute_state_dict, module._load_model_state_dict

    @functools.wraps(distribute)
    def _distribute_state_dict(
        full: dict[str, Any], local: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        ours = {
            key: value
            for key, value in full.items()
            if isinstance(value, torch.Tensor) and tensors.is_spread(local.get(key))
        }
        distribute({k: v for k, v in full.items() if k not in ours}, local, *args, **options)
        for key, whole in ours.items():
            local[key] = tensors.piece_like(local[key], whole)

    @functools.wraps(load)
    def _load_model_state_dict(model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        tensors.give_memory(model)  # else it would assign whole tensors as the parameters
        return load(model, *args, **options)

    module._distribute_state_dict = _distribute_state_dict
    module._load_model_state_dict = _load_model_state_dict


def _teach_stager(stager: Any, tensors: SpreadTensors) -> None:
    """Patch the stager, which `torch.distributed.checkpoint.async_save` copies storages with."""
    offload = stager._offload_tensor

    @functools.wraps(offload)
    def _offload_tensor(self: Any, x: Any, memo: Any, *args: Any, **options: Any) -> Any:
        if tensors.is_spread(x):
            memo[id(x)] = tensors.copy_on_cpu(x)
            return memo[id(x)]
        return offload(self, x, memo, *args, **options)

    stager._offload_tensor = _offload_tensor
