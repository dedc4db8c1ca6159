"""Decompositions: how are ops computed that must hear from other ranks before they can finish?

A softmax over a split dimension needs the maximum and the sum of all pieces in the middle. Such ops
are written here as other ops, which are called on DTensors and find their own sentences; where a
rank must know its place, a small op of our own has a rule with a local kernel.
"""

from .extremes import amax, argmax, first_index, max_dim, pending_max, stands_at
from .losses import averaged_by_torch, cross_entropy, nll, target_weight
from .moments import moments, power_sum, root, vector_norm
from .norms import batch_norm, layer_norm, rms_norm
from .pending import minus, settled
from .softmax import log_softmax, logsumexp, softmax

__all__ = [
    "amax",
    "argmax",
    "averaged_by_torch",
    "batch_norm",
    "cross_entropy",
    "first_index",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "max_dim",
    "minus",
    "moments",
    "nll",
    "pending_max",
    "power_sum",
    "rms_norm",
    "root",
    "settled",
    "softmax",
    "stands_at",
    "target_weight",
    "vector_norm",
]
