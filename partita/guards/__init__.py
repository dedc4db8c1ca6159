"""Guards: let a step run arbitrary Python, and capture it again when what it read has changed.

While a step is captured, a `ReadRecord` records each *place* that it reads (an attribute, a global,
an item of a container) and the value there. These become the program's `Guards`, which are checked
before each later call. If a value differs, the step is captured again, and a reason says why.

In reading order:

- The capture of a step: `capture_run` (repeats runs until one yields a complete graph), `inputs`
  (finds the modules, optimizers and tensors that the step uses), `slot_homes`, `outputs` (what the
  step assigns to Python objects), `answers` (floats as inputs; branches on tensors' values),
  `predicted_values` (predicts such branches).
- What a step reads: `record` (places that are read, and writes), `calls` (function calls: which of
  them read a setting, and which raise an error), `bytecode` (names in code) and `read_record`
  (which places code can read from each value).
- A later call: `values` (comparison keys of values, and their places), `guards` (decides if a
  program may be used again), `recompile_reasons` (says why not), `call_guard` (fast comparison with
  the last call), `arguments` (the tensors and numbers of a call), `captured_program` (runs a
  program).
"""

from .guards import Guards, signature_of
from .read_record import ReadRecord
from .recompile_reasons import CaptureHistory, describe_call
from .record import Write

__all__ = ["CaptureHistory", "Guards", "ReadRecord", "Write", "describe_call", "signature_of"]
