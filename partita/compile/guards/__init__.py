"""Guards: what a captured step read of Python, and why another call is captured again.

While a step is captured, a `ReadRecord` notes each place that it reads (an attribute, a global, an
item of a container) and what stood there. These become the program's `Guards`, which are checked
before each later call: where something differs, the step is captured again, and a reason says why.

In reading order:

- A guard: `places` (where a value stands), `expected` (what it was), `guards` (the check of all).
- What is checked for all tensors at once: `tensors`, `attributes_and_hooks`.
- Arguments and torch's modes: `signature`, `content_keys`, `modes`. What differed: `reasons`.
- What a step reads: `record`, with `instrument` (attributes), `calls` and `codes` (calls),
  `functions` (the names that code uses), `reached_objects` (what an object leads to) and `reader`
  (the record as these see it). What it changes: `writes`.
- Kinds of things read: `objects`, `c_objects`, `reflection`, `settings`, `external_state`.
"""

from .guards import Guards
from .reasons import History, describe_call
from .record import ReadRecord
from .signature import signature_of
from .writes import Write

__all__ = ["Guards", "History", "ReadRecord", "Write", "describe_call", "signature_of"]
