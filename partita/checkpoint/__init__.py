"""Checkpoints: folders that a run writes and that a run on any mesh can load.

In reading order: `object_state` and `optimizer_state` (state dicts of objects, by name), `state`
(the named tensors and values in a state), `folder` (a checkpoint gets its name all at once; locks
and checksums), `save_and_load` (with all that does not fit). Files have torch's own format:
`dcp_format` writes them, and finds what of each a rank on another mesh has to read. Whole
values, also for models that save themselves and for safetensors files: `full_state`.
"""

from .folder import is_checkpoint
from .full_state import full_state_dict, load_full_state_dict, load_safetensors, save_safetensors
from .save_and_load import Loaded, async_save, load, save
from .state import RandomState

__all__ = [
    "Loaded",
    "RandomState",
    "async_save",
    "full_state_dict",
    "is_checkpoint",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "save",
    "save_safetensors",
]
