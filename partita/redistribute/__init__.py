"""Redistribution: how a layout changes, and what that costs. Nothing here knows of torch.

In reading order: `move` (what one collective does, its transpose, and what they cost in bytes and
seconds), `plan` (the cheapest moves from one layout to another).
"""

from .move import Move, estimate_price, seconds_of_work
from .plan import Plan, plan

__all__ = ["Move", "Plan", "estimate_price", "plan", "seconds_of_work"]
