"""Guards: what a captured step read of Python, and why another call is captured again.

While a step is captured, a `ReadRecord` notes each place that it reads (an attribute, a global, an
item of a container) and what stood there. These become the program's `Guards`, which are checked
before each later call: where something differs, the step is captured again, and a reason says why.

In reading order:

- A guard: `values` (what a value is, how another differs from it, and the place where it stands),
  `guards` (may a program be used again, and if not, why), `call_guard` (is a call like the last),
  `torch_settings` (what a process sets for all calls).
- What a program expects of its inputs: `arguments` (the leaves of a call), `conditions`,
  `captured_program` (how a call runs a program).
- The state of a step: `inputs` (what it reaches, as inputs of the graph), `slot_homes`, `outputs`
  (results, slots, attributes; which of them the program keeps), `answers` (floats as inputs; what
  torch asks of tensors' values), `predicted_values` (what small inputs lead to, on every rank).
- What a step reads: `record` (places that are read, and writes), `calls` (names in bytecode,
  settings that are asked for; what is refused) and `read_record` (what each value that is reached
  leads to: `ReadRecord`).
"""

from .guards import Guards, History, describe_call, signature_of
from .read_record import ReadRecord
from .record import Write

__all__ = ["Guards", "History", "ReadRecord", "Write", "describe_call", "signature_of"]
