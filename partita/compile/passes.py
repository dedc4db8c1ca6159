"""Functions for writing graph passes. They are defined in `graph`; this module keeps an old import
path.
"""

from partita.graph.passes import find, put, replace

__all__ = ["find", "put", "replace"]
