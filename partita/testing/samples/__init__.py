"""Samples: the calls with which the prover checks each rule."""

from .every import samples

__all__ = ["samples"]
