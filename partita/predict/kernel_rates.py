"""Rates of kernels: which measured curve prices a call, of a machine that has such curves.

Kernels that move the same bytes do not take the same time: a processor adds several times as fast
as it takes exponentials, and a sum over rows reads faster than a permutation writes. A rate is the
name of those that do alike; `calibrate_rank` has the calls that are measured of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["BY_FLOPS", "RATES", "rate_of"]

_RATES = {
    "copy": "cat stack clone copy_ copy _to_copy contiguous constant_pad_nd repeat fill_ zero_ "
    "full full_like zeros zeros_like ones ones_like new_zeros new_full empty slice_scatter arange",
    "root": "sqrt rsqrt sqrt_ _foreach_sqrt",
    "transcendental": "gelu gelu_backward exp log log1p expm1 tanh mish softplus softplus_backward "
    "erf pow sin cos logsumexp",
    "sigmoid": "sigmoid silu silu_backward",
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "nll_loss_forward nll_loss_backward",
    "norm": "native_layer_norm native_layer_norm_backward native_group_norm "
    "native_group_norm_backward native_batch_norm native_batch_norm_backward "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _fused_rms_norm "
    "_fused_rms_norm_backward batch_norm_backward",
    "reduction": "sum mean amax amin max min linalg_vector_norm norm any all argmax prod "
    "max_pool2d_with_indices_backward avg_pool2d_backward",
    "unvectorized": "max_pool2d_with_indices avg_pool2d var var_mean native_dropout bernoulli "
    "normal_ uniform_",
    "gather": "embedding index index_select gather",
    "scatter": "embedding_dense_backward scatter scatter_ scatter_add scatter_add_ index_put "
    "index_put_ index_add _unsafe_index_put sort topk cumsum one_hot",
    "batched_matmul": "bmm baddbmm",
    "convolution": "convolution",
    "convolution_backward": "convolution_backward",
    "thin_convolution": "",
    "thin_convolution_backward": "",
}
_RATE_OF = {name: rate for rate, names in _RATES.items() for name in names.split()}
BY_FLOPS = (
    "matmul",
    "batched_matmul",
    "convolution",
    "convolution_backward",
    "thin_convolution",
    "thin_convolution_backward",
    "attention",
    "attention_backward",
)
"""Rates whose amounts are operations; those of the others are bytes, read and written."""
RATES = (
    *_RATES,
    "matmul",
    "attention",
    "attention_backward",
    "permute",
    "arithmetic",
    "view",
    "number",
)
"""All that a machine may have a curve of."""
_HOST_ONLY = ("getitem", "wait_tensor")
_MULTIPLIED_POWERS = (2, 3)
_THIN = 4
"""Input channels of a group up to which a convolution has too few products to each output."""


def rate_of(node: fx.Node, name: str, kind: str) -> str:
    """The rate of a call; "" of one that costs nothing at all.

    Args:
        name: of the operator.
        kind: of the kernel, as `Kernel` has it.
    """
    short = name.split("::")[-1]
    if kind == "free":
        return "" if short in _HOST_ONLY else _rate_of_free(node)
    if kind == "attention":
        return "attention_backward" if "backward" in short else "attention"
    if kind == "matmul":
        thin = "thin_" if short.startswith("convolution") and _count_channels(node) <= _THIN else ""
        return thin + _RATE_OF.get(short, "matmul")
    if short == "pow" and len(node.args) > 1 and node.args[1] in _MULTIPLIED_POWERS:
        return "arithmetic"
    if _moves_apart(node, short):
        return "permute"
    return _RATE_OF.get(short, "arithmetic")


def _count_channels(node: fx.Node) -> int:
    """Input channels of a group of a convolution, by its weight."""
    weight: Any = node.args[2 if "backward" in str(node.target) else 1]
    return int(weight.meta["val"].shape[1])


def _rate_of_free(node: fx.Node) -> str:
    """Of a view, or of a number: the host's time, at each node."""
    value = node.meta.get("val")
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(r.alias_info is not None for r in schema.returns)
    if is_view or not isinstance(value, torch.Tensor) or value.numel() != 1:
        return "view"
    return "number"


def _moves_apart(node: fx.Node, short: str) -> bool:
    """Does it copy what does not lie in one piece?"""
    if short not in ("clone", "reshape", "_unsafe_view", "contiguous") or not node.all_input_nodes:
        return False
    before = node.all_input_nodes[0].meta.get("val")
    return isinstance(before, torch.Tensor) and not before.is_contiguous()
