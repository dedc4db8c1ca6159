"""Functions for writing graph passes, defined in `graph`; this is their old import path."""

from partita.graph.passes import find, put, replace

__all__ = ["find", "put", "replace"]
