"""Checkpoints: how does a run outlive its processes? In a folder that any mesh can load.

In reading order: `state` (what is in one), `staging` and `saving`, `folder`, `locks` and
`checksums`, `loading` with `fitting` and `first_values`, `named_optimizer`, `random_state`,
`full_state`, `safetensors_file`, `pretrained`.
"""

from . import pretrained
from .fitting import Loaded
from .folder import is_checkpoint
from .full_state import full_state_dict, load_full_state_dict
from .loading import load
from .random_state import RandomState
from .safetensors_file import load_safetensors, save_safetensors
from .saving import async_save, save

__all__ = [
    "Loaded",
    "RandomState",
    "async_save",
    "full_state_dict",
    "is_checkpoint",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "pretrained",
    "save",
    "save_safetensors",
]
