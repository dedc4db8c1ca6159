"""How does a run outlive its processes? In a folder that any mesh can load."""

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
