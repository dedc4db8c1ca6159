"""`IllegalGraph`, at the former place of `partita.graph.verify`."""

from partita.graph.verify import IllegalGraph

__all__ = ["IllegalGraph"]
