"""Decompositions: ops that need other ranks' results midway, written as other ops.

A softmax over a split dimension needs the maximum and the sum of all pieces in the middle. Such ops
are written here as other ops, which are called on DTensors and find their own sentences; where a
rank must know its place, a small op of our own has a rule with a local kernel.
"""

from .extremes import amax, argmax, first_index, is_at_place, max_dim, partial_max
from .losses import cross_entropy, make_mean_loss, nll, target_weight
from .moments import moments, power_sum, root_of, vector_norm
from .norms import batch_norm, layer_norm, rms_norm
from .partial_operands import reduced, subtract_reduced
from .softmax import log_softmax, logsumexp, softmax

__all__ = [
    "amax",
    "argmax",
    "batch_norm",
    "cross_entropy",
    "first_index",
    "is_at_place",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "make_mean_loss",
    "max_dim",
    "moments",
    "nll",
    "partial_max",
    "power_sum",
    "reduced",
    "rms_norm",
    "root_of",
    "softmax",
    "subtract_reduced",
    "target_weight",
    "vector_norm",
]
