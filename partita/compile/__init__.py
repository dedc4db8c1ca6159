"""Compiled steps: `pt.compile`, and what a call of a compiled step does.

In reading order: `step` (`pt.compile`, `CompiledStep`; finds the program of a call), `pipeline`
(makes a program with `capture` and the passes and compilers of `graph`), `region` (a compiled part
of an eager model: forward and backward), `progress` (the progress of a long first call),
`collector` (pauses Python's garbage collector). `passes` and `verify` re-export names of `graph` at
their former places.

The rooms below: `guards` (what a step reads and writes in Python, and when it is captured again),
`capture` (makes the graph of a step) and `graph` (graphs, passes, memory, backends).
"""

from partita.graph.errors import CaptureError
from partita.guards.arguments import pad_to_bucket

from .step import CompiledStep, compile

__all__ = ["CaptureError", "CompiledStep", "compile", "pad_to_bucket"]
