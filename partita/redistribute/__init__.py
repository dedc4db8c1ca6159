"""Redistribution: how a layout changes, and what that costs. Nothing here knows of torch.

In reading order: `move` (what one collective does, and its transpose), `plan` (the cheapest moves
from one layout to another), `cost` (bytes and seconds).
"""

from .cost import estimate_price, seconds_of_work
from .move import Move
from .plan import Plan, plan

__all__ = ["Move", "Plan", "estimate_price", "plan", "seconds_of_work"]
