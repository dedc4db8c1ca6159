"""Samples: the arguments with which each rule is proved."""

from .every import samples

__all__ = ["samples"]
