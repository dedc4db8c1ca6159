"""The functions for writing passes, at the former place of `partita.graph.passes`."""

from partita.graph.passes import find, put, replace

__all__ = ["find", "put", "replace"]
