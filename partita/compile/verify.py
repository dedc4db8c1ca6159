"""`IllegalGraph`, re-exported here because it was in this module before."""

from partita.graph.verify import IllegalGraph

__all__ = ["IllegalGraph"]
