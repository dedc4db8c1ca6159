"""How does a run outlive its processes? In a folder that any mesh can load."""

from .load import Loaded, load
from .random_state import RandomState
from .save import async_save, save

__all__ = ["Loaded", "RandomState", "async_save", "load", "save"]
