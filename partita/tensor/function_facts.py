"""Facts of functions: what every call of a torch function or method does, by its name.

Operators say in their schemas what they do (`op_facts`). What a program calls, `torch.reshape`,
`x.t()`, `F.dropout`, does not: this is the one table of it. Attributes are in it, too, since their
`__get__` and `__set__` are functions to torch.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch

# Not public, but where torch keeps the type of what `torch.ops.a.b` is.
from torch._ops import OpOverloadPacket

from .op_facts import facts_of

__all__ = [
    "ADDRESSES",
    "FACTS_THAT_CHANGE",
    "FACTS_THAT_STAY",
    "FILLS",
    "STATE_OF_LEAVES",
    "VIEW_ATTRIBUTES",
    "Cast",
    "FunctionFacts",
    "facts_of_function",
]


class Cast(enum.Enum):
    """What autocast does to the floating operands of an op (never to those of float64)."""

    FLOAT32 = "to float32"
    FLOAT32_UNLESS_TOLD = "to float32, unless the call gives a dtype"
    LOWER = "to autocast's dtype"
    WIDEST = "to the widest of them"
    NONE = "nothing, and what is inside is not cast either"


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """What is so of every call of a function.

    Attributes:
        is_view: its result shares its operand's memory, on one device and where nothing moves.
        may_copy: its result does so, or is a copy, as the strides are.
        reshapes: it changes its operand's shape in place.
        changes_shape: it does so, or gives its operand other memory.
        draws: it may draw random numbers.
        answered_by_piece: it neither depends on how a DTensor is laid out nor changes it.
        computes_nothing: it asks what is so of a tensor or of torch, or enters autograd.
        is_question: it asks what a tensor is, but for its values, and makes none.
        needs_itself: it asks a tensor for what another of the same shape cannot answer, or hangs
            something on it.
        is_twin: of torch.nn.functional, it passes its arguments on to the builtin of its name, and
            so runs whole on a piece (with `inplace=True` it does not).
        autocast: what autocast does to its operands where it is on the list of a device; None where
            that is to cast them to float32.
    """

    is_view: bool = False
    may_copy: bool = False
    reshapes: bool = False
    changes_shape: bool = False
    draws: bool = False
    answered_by_piece: bool = False
    computes_nothing: bool = False
    is_question: bool = False
    needs_itself: bool = False
    is_twin: bool = False
    autocast: Cast | None = None


@functools.lru_cache(maxsize=8192)
def facts_of_function(name: str) -> FunctionFacts:
    """The facts of functions of this name, "reshape"; of one that is not known that it does none of
    these."""
    return FunctionFacts(
        is_view=name in _VIEWS,
        may_copy=name in _MAY_COPY,
        reshapes=name in _RESHAPING,
        changes_shape=name in _RESHAPING or name in _GIVING_MEMORY,
        draws=name in _DRAWS_UNSAID or _is_operator_drawing(name),
        answered_by_piece=name in _ANSWERED_BY_PIECE,
        computes_nothing=name in _COMPUTING_NOTHING,
        is_question=name in _QUESTIONS,
        needs_itself=name in _NEEDING_ITSELF,
        is_twin=name in _TWINS,
        autocast=next((cast for cast, names in _CASTS.items() if name in names), None),
    )


def _is_operator_drawing(name: str) -> bool:
    """Does torch say of an operator of this name, or of that in place, that it draws?"""
    packets = [getattr(torch.ops.aten, n, None) for n in (name, name + "_")]
    return any(
        facts_of(getattr(packet, overload)).draws
        for packet in packets
        if isinstance(packet, OpOverloadPacket)  # else an attribute of the namespace itself
        for overload in packet.overloads()
    )


# -- the table -------------------------------------------------------------------------------------

FILLS = "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_".split()
"""Methods that draw each element of their operand by itself."""
VIEW_ATTRIBUTES = frozenset("T H mT mH real imag".split())
"""Attributes that are calls all the same, and give views."""
STATE_OF_LEAVES = """grad data requires_grad requires_grad_ retain_grad detach_ register_hook
register_post_accumulate_grad_hook""".split()
"""Attributes and methods of what a tensor is to autograd: another would answer for itself."""
ADDRESSES = "data_ptr untyped_storage storage _typed_storage storage_offset is_set_to".split()
"""Methods that say where a tensor's memory is."""
FACTS_THAT_STAY = """storage_offset is_leaf grad_fn grad _base _is_view is_shared is_inference
is_conj is_neg _backward_hooks retains_grad output_nr is_pinned""".split()
"""Attributes and methods of what a tensor is beside its values, the same in each call of a step."""
FACTS_THAT_CHANGE = "_version data_ptr untyped_storage storage _typed_storage".split()
"""Those of which each call may have others."""
OF_ONE_OPERAND = frozenset("relu silu mish selu relu6 hardswish hardsigmoid".split())
"""Of torch.nn.functional: the builtins of their names take the operand alone, and no `inplace`."""

_VIEWS = frozenset(
    """view reshape flatten unflatten ravel transpose permute t movedim unsqueeze squeeze expand
    broadcast_to select narrow diagonal chunk split tensor_split hsplit vsplit dsplit
    split_with_sizes unbind unfold as_strided getitem detach alias real imag view_as_real
    view_as_complex atleast_1d atleast_2d atleast_3d""".split()
)
_MAY_COPY = frozenset("contiguous reshape flatten ravel to type".split())
_RESHAPING = frozenset("squeeze_ unsqueeze_ t_ transpose_ swapdims_ swapaxes_".split())
_GIVING_MEMORY = frozenset("as_strided_ resize_ resize_as_ set_".split())
_DRAWS_UNSAID = frozenset(
    """scaled_dot_product_attention feature_dropout feature_alpha_dropout rrelu binomial random
    _standard_gamma _sample_dirichlet multi_head_attention_forward fractional_max_pool2d
    fractional_max_pool3d fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices""".split()
)
"""Torch does not tag them, since they are made of others."""
_ANSWERED_BY_PIECE = frozenset(
    """requires_grad_ retain_grad is_floating_point is_complex is_signed is_inference is_conj is_neg
    get_device element_size is_pinned is_shared has_names is_nonzero_local result_type can_cast
    promote_types is_tensor is_storage _is_view _is_zerotensor is_distributed
    register_post_accumulate_grad_hook __hash__ has_torch_function""".split()
)
_COMPUTING_NOTHING = frozenset(
    """size dim numel nelement ndimension backward grad register_hook requires_grad_ is_same_size
    _set_grad_enabled _set_view_replay_enabled _is_view __len__ __repr__ __str__ __format__ __iter__
    __reversed__ is_tensor is_floating_point is_complex is_contiguous retain_grad __dir__ __array__
    __reduce_ex__ __setstate__ __deepcopy__ share_memory_ refine_names align_as __hash__""".split()
)
_QUESTIONS = frozenset(
    """size dim ndimension numel nelement stride storage_offset element_size is_contiguous
    is_floating_point is_complex is_signed is_cuda is_sparse get_device __len__ is_same_size
    is_tensor is_inference is_conj is_neg is_pinned is_shared result_type can_cast type
    dtype""".split()
)
_NEEDING_ITSELF = frozenset(
    """backward register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ detach_
    set_ resize_ resize_as_ item tolist __bool__ __float__ __int__ __index__ is_nonzero numpy
    data_ptr untyped_storage storage register_multi_grad_hook to_dlpack __dlpack__ share_memory_
    as_subclass _make_subclass __reduce_ex__ __deepcopy__ __setstate__ pin_memory equal""".split()
)
_TWINS = frozenset(
    """celu elu gelu hardshrink hardsigmoid hardswish hardtanh layer_norm leaky_relu log_softmax
    logsigmoid mish relu relu6 rms_norm selu silu softmax softplus softshrink tanhshrink""".split()
)
_CASTS = {
    Cast.LOWER: frozenset(
        """_addmm_activation _convolution _native_multi_head_attention addbmm addmm addmv addr
        baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d convolution einsum linalg_multi_dot linalg_vecdot linear matmul mm mv prelu
        scaled_dot_product_attention""".split()
    ),
    Cast.WIDEST: frozenset(
        """addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_copy index_put
        scatter_add stack tensordot vdot""".split()
    ),
    Cast.FLOAT32_UNLESS_TOLD: frozenset(
        """cumprod cumsum frobenius_norm linalg_matrix_norm linalg_vector_norm log_softmax norm
        nuclear_norm prod softmax sum""".split()
    ),
}
