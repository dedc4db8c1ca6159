"""How a layout changes, and what that costs. Nothing here knows of torch."""

from .cost import price, seconds_of_work
from .move import Move
from .plan import Plan, plan

__all__ = ["Move", "Plan", "plan", "price", "seconds_of_work"]
