"""Guards: arbitrary Python made safe, so that a step can be captured, and captured again in time.

While a step is captured, a `ReadRecord` notes each place that it reads (an attribute, a global, an
item of a container) and what stood there. These become the program's `Guards`, which are checked
before each later call: where something differs, the step is captured again, and a reason says why.

In reading order:

- The capture of a step: `capture_run` (runs until one gives a complete graph), `inputs` (the state
  that it reaches), `slot_homes`, `outputs` (what it leaves; which of it the program keeps),
  `answers` (floats as inputs; what torch asks of tensors' values), `predicted_values` (what small
  inputs lead to, on every rank).
- What a step reads: `record` (places that are read, and writes), `calls` (names in bytecode,
  settings that are asked for; what is refused), `bytecode` and `read_record` (what each value that
  is reached leads to: `ReadRecord`).
- A later call: `values` (what a value is, how another differs from it, and the place where it
  stands), `guards` (may a program be used again, and if not, why), `call_guard` (is a call like the
  last), `arguments` (the leaves of a call), `captured_program` (how a call runs a program).
"""

from .guards import Guards, History, describe_call, signature_of
from .read_record import ReadRecord
from .record import Write

__all__ = ["Guards", "History", "ReadRecord", "Write", "describe_call", "signature_of"]
