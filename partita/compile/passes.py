"""Functions to write graph passes, re-exported here because they were in this module before."""

from partita.graph.passes import find, put, replace

__all__ = ["find", "put", "replace"]
