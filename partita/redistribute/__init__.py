"""Redistribution: how a layout changes, and what that costs. This package does not import torch.

In reading order: `move` (one collective, its transpose, and the cost of both in bytes and
seconds), `plan` (the cheapest moves from one layout to another).
"""

from .move import Move as Move
from .move import estimate_price as estimate_price
from .move import seconds_of_work as seconds_of_work
from .plan import Plan as Plan
from .plan import plan as plan
