"""A training step as one graph: captured, checked, rewritten and compiled."""

from .buckets import pad_to_bucket
from .entry import compile
from .errors import CaptureError
from .step import CompiledStep

__all__ = ["CaptureError", "CompiledStep", "compile", "pad_to_bucket"]
