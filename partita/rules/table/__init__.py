"""The table of rules: importing it registers every rule that partita knows."""

import importlib

LOADED = tuple(
    importlib.import_module(f"{__name__}.{name}")
    for name in (
        "pointwise",
        "matmul",
        "experts",
        "shape",
        "join",
        "reduce",
        "order",
        "norms",
        "attention",
        "conv",
        "embedding",
        "index",
        "getitem",
        "parts",
        "losses",
        "create",
    )
)
