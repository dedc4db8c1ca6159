"""Guards: support for arbitrary Python in a step, which is captured again when something changes.

While a step is captured, a `ReadRecord` records each place that it reads (an attribute, a global,
an item of a container) and its value. These become the program's `Guards`, which are checked before
each later call. If something differs, the step is captured again, and a reason says why.

In reading order:

- The capture of a step: `capture_run` (runs until one gives a complete graph), `inputs` (the state
  that it reaches), `slot_homes`, `outputs` (what it leaves; which of it the program keeps),
  `answers` (floats as inputs; branches on tensors' values), `predicted_values` (what depends on
  small inputs, on every rank).
- What a step reads: `record` (places that are read, and writes), `calls` (names in bytecode,
  settings that are read; what is refused), `bytecode` and `read_record` (what each value that is
  reached leads to: `ReadRecord`).
- A later call: `values` (what a value is, how another differs from it, and its place), `guards`
  (whether a program may be used again, and if not, why), `call_guard` (whether a call is like the
  last), `arguments` (the leaves of a call), `captured_program` (how a call runs a program).
"""

from .guards import Guards, History, describe_call, signature_of
from .read_record import ReadRecord
from .record import Write

__all__ = ["Guards", "History", "ReadRecord", "Write", "describe_call", "signature_of"]
