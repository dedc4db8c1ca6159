"""Redistribution: how a layout changes, and what that costs. This package does not import torch.

A *move* is one step of a redistribution: one collective, or one local change such as a slice. Its
*transpose* is the move that its gradient makes in backward.

In reading order: `move` (moves, their transposes, and the cost of both in bytes and seconds),
`plan` (the cheapest moves from one layout to another).
"""

from .move import Move as Move
from .move import estimate_price as estimate_price
from .move import seconds_of_work as seconds_of_work
from .plan import Plan as Plan
from .plan import plan as plan
