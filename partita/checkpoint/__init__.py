"""Checkpoints: folders that a run writes, and that a run on any mesh can load.

In reading order: `object_state` and `optimizer_state` (state dicts of objects, by name), `state`
(finds all tensors and values in a state), `folder` (writes a folder completely or not at all; locks
and checksums), `save_and_load` (`save`, `load`), `dcp_format` (torch's file format), `full_state`
(whole tensors, `save_pretrained`, safetensors files).
"""

from .folder import is_checkpoint
from .full_state import (
    full_state_dict,
    load_full_state_dict,
    load_safetensors,
    save_safetensors,
    stream_full,
)
from .save_and_load import Loaded, async_save, load, save
from .state import RandomState, TrainableState

__all__ = [
    "Loaded",
    "RandomState",
    "TrainableState",
    "async_save",
    "full_state_dict",
    "is_checkpoint",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "save",
    "save_safetensors",
    "stream_full",
]
