"""A training step as one graph: captured, checked, rewritten and compiled."""

from .entry import compile
from .errors import CaptureError
from .length_buckets import pad_to_bucket
from .step import CompiledStep

__all__ = ["CaptureError", "CompiledStep", "compile", "pad_to_bucket"]
