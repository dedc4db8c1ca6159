"""The table: importing it registers every rule that partita knows."""

import importlib

LOADED = tuple(
    importlib.import_module(f"{__name__}.{name}")
    for name in (
        "pointwise",
        "matmul",
        "linalg",
        "shape",
        "join",
        "reduce",
        "nn",
        "index",
        "getitem",
        "losses",
        "create",
    )
)
