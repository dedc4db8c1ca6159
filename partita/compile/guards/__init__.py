"""Guards: what a captured step read of Python, and why another call is captured again.

In reading order: `expected` (what a value was), `places` (where it stands), `record` with
`instrument`, `calls` and `codes` (what a step reads), `writes` (what it changes), `guards` (the
check), `marks` and `tensors` (all tensors at once), `tensor_kinds`, `signature` and `content_keys`
(arguments), `reasons`; what is read: `reader`, `containers`, `functions`, `objects`,
`reached_objects`, `reflection`, `settings`, `modes`, `outside`, `in_c`.
"""

from .guards import Guards
from .reasons import History, described
from .record import ReadRecord
from .signature import signature_of
from .writes import Write

__all__ = ["Guards", "History", "ReadRecord", "Write", "described", "signature_of"]
