"""Guards: let a step run arbitrary Python, and capture it again when what it read has changed.

While a step is captured, a `ReadRecord` records each place that it reads (an attribute, a global,
an item of a container) and its value. These become the program's `Guards`, which are checked before
each later call. If something differs, the step is captured again, and a reason says why.

In reading order:

- The capture of a step: `capture_run` (repeats runs until one yields a complete graph), `inputs`
  (the state that the step reaches), `slot_homes`, `outputs` (what the step leaves in Python
  objects), `answers` (floats as inputs; branches on tensors' values), `predicted_values` (values
  that depend on small inputs, on every rank).
- What a step reads: `record` (places that are read, and writes), `calls` (function calls: which of
  them read a setting, and which raise an error), `bytecode` (names in code) and `read_record`
  (`ReadRecord`: the places to which each value leads).
- A later call: `values` (keys of values, and their places), `guards` (whether a program may be used
  again, and if not, why), `call_guard` (comparison with the last call), `arguments` (the leaves of
  a call), `captured_program` (how a call runs a program).
"""

from .guards import Guards, History, describe_call, signature_of
from .read_record import ReadRecord
from .record import Write

__all__ = ["Guards", "History", "ReadRecord", "Write", "describe_call", "signature_of"]
