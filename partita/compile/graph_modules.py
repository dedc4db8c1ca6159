"""Graph modules whose Python code is made when somebody asks for it.

`fx.GraphModule` writes and compiles its code whenever its graph is set. Between a capture and the
last pass nobody runs that code, and it takes longer to make than most passes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch.fx import _lazy_graph_module

__all__ = ["lazy_graph_module", "lazy_graph_modules"]


def lazy_graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of `graph`, with what it needs of `root`."""
    # Private torch: its own class for this, which Inductor and Dynamo use.
    made: fx.GraphModule = _lazy_graph_module._LazyGraphModule(root, graph)
    return made


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Within, the modules that `make_fx` makes are such, too."""
    found: AbstractContextManager[None] = _lazy_graph_module._use_lazy_graph_module(True)
    return found
