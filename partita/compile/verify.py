"""`IllegalGraph`. It is defined in `graph`; this module keeps an old import path."""

from partita.graph.verify import IllegalGraph

__all__ = ["IllegalGraph"]
