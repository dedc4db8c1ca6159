"""The table of rules: importing it registers partita's rules that are sentences."""

import importlib

LOADED = """pointwise matmul shape index reduce norms_and_losses attention conv""".split()

for _name in LOADED:
    importlib.import_module(f"{__name__}.{_name}")
