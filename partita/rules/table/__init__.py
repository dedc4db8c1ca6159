"""The table of rules: importing it registers every rule that partita knows."""

import importlib

LOADED = """pointwise matmul experts shape join reduce order norms attention conv embedding index
    getitem parts losses create""".split()

for _name in LOADED:
    importlib.import_module(f"{__name__}.{_name}")
