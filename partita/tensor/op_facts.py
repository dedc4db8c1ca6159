"""Facts of ops: is a call a view, does it write, draw, only move elements; what does autocast cast?

Of an operator they are read off its schema and its tags, and for what these do not say off a table
of corrections (`facts_of`). What a program calls, `torch.reshape`, `x.t()`, `F.dropout`, has no
schema: there is one table by names (`facts_of_function`), with attributes in it, too, since their
`__get__` and `__set__` are functions to torch.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

# Not public, but where torch keeps the type of what `torch.ops.a.b` is.
from torch._ops import OpOverloadPacket

from partita.comm import read_autocast_state
from partita.comm.device import Device

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of an operator.

    Attributes:
        place, name: where it stands in a call.
        is_list: it is a list of tensors.
    """

    place: int
    name: str
    is_list: bool


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is so of every call of an operator.

    Attributes:
        is_view: its results show memory of an operand, which it does not write, or may do so, as
            those of reshape.
        writes: the operands that it writes.
        makes_new: its results lie in memory of their own, and it writes none.
        moves: its results are elements of its operands as they are, elsewhere or otherwise shown.
        casts: likewise, in another dtype.
        statistics: it writes its fourth and fifth operands where its sixth says that it trains.
        draws: it draws from a generator: another call gives something else.
        fills: it draws, and what it draws is all that its first operand holds afterwards.
        checks: it gives nothing, and raises where what it is given is not as it must be.
        shows_unsaid: its results show memory of its one operand, and its schema does not say so.
        is_alias: it gives its operand under another name, and is a view of all of it.
        lifts: it makes a tensor of what Python holds.
        by_storage: it depends on the whole storage of an operand, and not only on the elements that
            the operand shows of it.
        changes_metadata: it changes the shape, the strides or the storage of an operand in place.
        workspace: what its kernel on a CPU takes while it runs: "casts", its operands in the dtype
            in which it computes; "measured", what can only be found by running it; "", nothing.
        exact_in_numbers: it rounds alike whether a number among its operands is one of Python or a
            tensor. Others, as addcmul, are several calls of tensors.
        stands_alone: no compiler makes one kernel of it and of its neighbours.
    """

    is_view: bool = False
    writes: tuple[Operand, ...] = ()
    makes_new: bool = False
    moves: bool = False
    casts: bool = False
    statistics: bool = False
    draws: bool = False
    fills: bool = False
    checks: bool = False
    shows_unsaid: bool = False
    is_alias: bool = False
    lifts: bool = False
    by_storage: bool = False
    changes_metadata: bool = False
    workspace: str = ""
    exact_in_numbers: bool = False
    stands_alone: bool = False


@functools.lru_cache(maxsize=8192)
def facts_of(target: Any) -> OpFacts:
    """The facts of what a call calls: an operator of torch, `operator.getitem`, or a function that
    declares them; of anything else that it does none of these."""
    if target is operator.getitem:  # of what a call has given
        return OpFacts(is_view=True, moves=True)
    schema = getattr(target, "_schema", None)
    if schema is None:
        found: OpFacts = getattr(target, "facts", OpFacts())
        return found
    writes = tuple(
        Operand(i, a.name, "List" in str(a.type))
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = [r.alias_info for r in schema.returns]
    full_name = f"{target._opname}.{target._overloadname}"
    shows_unsaid = full_name in _SHOW_UNSAID
    is_view = shows_unsaid or any(info is not None and not info.is_write for info in aliases)
    name, is_torchs = target._opname.removesuffix("_copy"), target.namespace == "aten"
    return OpFacts(
        is_view=is_view,
        writes=writes,
        makes_new=not is_view and not writes and all(info is None for info in aliases),
        moves=(is_view and target._opname not in _COMPUTED_WHEN_READ and not writes)
        or (name in _COPYING and is_torchs and not writes),
        casts=is_torchs and target._opname == "_to_copy",
        statistics=full_name in _STATISTICS_UNSAID,
        draws=torch.Tag.nondeterministic_seeded in target.tags,
        fills=target._opname in _FILLS,
        checks=not schema.returns and not writes and is_torchs,
        shows_unsaid=shows_unsaid,
        is_alias=is_torchs and full_name in ("detach.default", "alias.default"),
        lifts=name in ("lift", "lift_fresh"),
        by_storage=is_torchs and name in _BY_STORAGE,
        changes_metadata=torch.Tag.inplace_view in target.tags or full_name in _RESIZES_UNSAID,
        workspace=_find_workspace(target),
        exact_in_numbers=is_torchs
        and target._opname.removeprefix("_foreach_").removesuffix("_") in _EXACT_IN_NUMBERS,
        stands_alone=not is_torchs or target._opname in _STAND_ALONE,
    )


def declare_facts(facts: OpFacts) -> Callable[[Function], Function]:
    """A decorator: these are the facts of a Python function that calls of a graph call."""

    def declare(function: Function) -> Function:
        function.facts = facts  # type: ignore[attr-defined]
        return function

    return declare


def _find_workspace(target: Any) -> str:
    if target.namespace != "aten":
        return ""
    if target._opname in _CASTING:
        return "casts"
    return "measured" if f"{target._opname}.{target._overloadname}" in _MEASURED else ""


# -- the table of corrections ----------------------------------------------------------------------

_SHOW_UNSAID = frozenset(
    """_unsafe_view.default unsafe_split.Tensor unsafe_split_with_sizes.default
    unsafe_chunk.default wait_tensor.default""".split()
)
"""They give what they are given, or parts of it."""
_STATISTICS_UNSAID = frozenset(("native_batch_norm.default", "cudnn_batch_norm.default"))
"""They write running statistics."""
_COMPUTED_WHEN_READ = frozenset(
    """_conj _neg_view conj resolve_conj resolve_neg real imag view_as_real view_as_complex
    as_strided""".split()
)
"""Views whose elements are not those of what they are of."""
_COPYING = frozenset(
    """cat clone copy index_select expand narrow permute reshape select slice split
    split_with_sizes squeeze stack t transpose unsqueeze view""".split()
)
"""They put the elements of tensors into new memory, or may do so."""
_FILLS = frozenset(
    "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_ bernoulli_".split()
)
_BY_STORAGE = frozenset("as_strided as_strided_ as_strided_scatter set_ resize_".split())
_RESIZES_UNSAID = frozenset(("resize_as_sparse_.default", "set_data.default"))
"""They change metadata in place, though they have not the tag that says so."""
_EXACT_IN_NUMBERS = frozenset(
    """add sub rsub mul div true_divide eq ne lt le gt ge maximum minimum clamp clamp_min clamp_max
    where fill masked_fill index_fill full full_like new_full scalar_tensor""".split()
)
_STAND_ALONE = frozenset(
    """embedding_dense_backward sort topk cumsum scatter scatter_add index_put gather
    native_dropout max_pool2d_with_indices unique nonzero""".split()
)
_CASTING = frozenset("add sub rsub mul div remainder fmod eq ne lt le gt ge".split())
"""Operands of another dtype than the kernel computes in are cast, each as a whole; a number becomes
a tensor first."""
_MEASURED = frozenset(
    """convolution.default convolution_backward.default binary_cross_entropy.default
    binary_cross_entropy_backward.default binary_cross_entropy_with_logits.default
    huber_loss.default mse_loss.default smooth_l1_loss.default soft_margin_loss.default
    soft_margin_loss_backward.default native_layer_norm_backward.default
    native_group_norm_backward.default native_batch_norm.default native_batch_norm_backward.default
    batch_norm_backward.default _native_batch_norm_legit.default
    _native_batch_norm_legit_functional.default _native_batch_norm_legit.no_stats
    native_dropout_backward.default embedding_dense_backward.default _softmax_backward_data.default
    _log_softmax_backward_data.default gelu_backward.default logsumexp.default mean.default mean.dim
    std.correction var.correction sort.default sort.stable avg_pool2d_backward.default
    avg_pool3d_backward.default _adaptive_avg_pool2d_backward.default
    max_pool2d_with_indices_backward.default max_pool3d_with_indices_backward.default
    adaptive_max_pool2d_backward.default upsample_nearest1d.default
    upsample_nearest1d_backward.default upsample_linear1d.default upsample_linear1d_backward.default
    upsample_bilinear2d.default upsample_bilinear2d_backward.default upsample_bicubic2d.default
    upsample_bicubic2d_backward.default reflection_pad1d_backward.default
    replication_pad1d_backward.default replication_pad2d_backward.default repeat.default
    count_nonzero.default exp2.default""".split()
)
"""oneDNN reorders a convolution's weights and unfolds its images in memory of its own, and how much
of it depends on the shapes, the strides and the processor. A loss is there for every element before
it is summed. Norms sum by thread, and what is not contiguous is made so by many."""

# -- facts of functions, by their names ------------------------------------------------------------


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
    facts = {fact: name in names.split() for fact, names in _FACTS_OF_FUNCTIONS.items()}
    facts["changes_shape"] |= facts["reshapes"]
    facts["draws"] |= _is_operator_drawing(name)
    casts = (cast for cast, names in _CASTS.items() if name in names.split())
    return FunctionFacts(**facts, autocast=next(casts, None))


def _is_operator_drawing(name: str) -> bool:
    """Does torch say of an operator of this name, or of that in place, that it draws?"""
    packets = [getattr(torch.ops.aten, n, None) for n in (name, name + "_")]
    return any(
        facts_of(getattr(packet, overload)).draws
        for packet in packets
        if isinstance(packet, OpOverloadPacket)  # else an attribute of the namespace itself
        for overload in packet.overloads()
    )


# -- the table by names ----------------------------------------------------------------------------

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

_FACTS_OF_FUNCTIONS = {
    "is_view": """view reshape flatten unflatten ravel transpose permute t movedim unsqueeze squeeze
        expand broadcast_to select narrow diagonal chunk split tensor_split hsplit vsplit dsplit
        split_with_sizes unbind unfold as_strided getitem detach alias real imag view_as_real
        view_as_complex atleast_1d atleast_2d atleast_3d""",
    "may_copy": "contiguous reshape flatten ravel to type",
    "reshapes": "squeeze_ unsqueeze_ t_ transpose_ swapdims_ swapaxes_",
    # Beside those that reshape.
    "changes_shape": "as_strided_ resize_ resize_as_ set_",
    # Torch does not tag them, since they are made of others.
    "draws": """scaled_dot_product_attention feature_dropout feature_alpha_dropout rrelu binomial
        random _standard_gamma _sample_dirichlet multi_head_attention_forward fractional_max_pool2d
        fractional_max_pool3d fractional_max_pool2d_with_indices
        fractional_max_pool3d_with_indices""",
    "answered_by_piece": """requires_grad_ retain_grad is_floating_point is_complex is_signed
        is_inference is_conj is_neg get_device element_size is_pinned is_shared has_names
        is_nonzero_local result_type can_cast promote_types is_tensor is_storage _is_view
        _is_zerotensor is_distributed register_post_accumulate_grad_hook __hash__
        has_torch_function""",
    "computes_nothing": """size dim numel nelement ndimension backward grad register_hook
        requires_grad_ is_same_size _set_grad_enabled _set_view_replay_enabled _is_view __len__
        __repr__ __str__ __format__ __iter__ __reversed__ is_tensor is_floating_point is_complex
        is_contiguous retain_grad __dir__ __array__ __reduce_ex__ __setstate__ __deepcopy__
        share_memory_ refine_names align_as __hash__""",
    "is_question": """size dim ndimension numel nelement stride storage_offset element_size
        is_contiguous is_floating_point is_complex is_signed is_cuda is_sparse get_device __len__
        is_same_size is_tensor is_inference is_conj is_neg is_pinned is_shared result_type can_cast
        type dtype""",
    "needs_itself": """backward register_hook register_post_accumulate_grad_hook retain_grad
        requires_grad_ detach_ set_ resize_ resize_as_ item tolist __bool__ __float__ __int__
        __index__ is_nonzero numpy data_ptr untyped_storage storage register_multi_grad_hook
        to_dlpack __dlpack__ share_memory_ as_subclass _make_subclass __reduce_ex__ __deepcopy__
        __setstate__ pin_memory equal""",
    "is_twin": """celu elu gelu hardshrink hardsigmoid hardswish hardtanh layer_norm leaky_relu
        log_softmax logsigmoid mish relu relu6 rms_norm selu silu softmax softplus softshrink
        tanhshrink""",
}
"""The names of the functions of which each fact of `FunctionFacts` is so."""
_CASTS = {
    Cast.LOWER: """_addmm_activation _convolution _native_multi_head_attention addbmm addmm addmv
        addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d convolution einsum linalg_multi_dot linalg_vecdot linear
        matmul mm mv prelu scaled_dot_product_attention""",
    Cast.WIDEST: """addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_copy index_put
        scatter_add stack tensordot vdot""",
    Cast.FLOAT32_UNLESS_TOLD: """cumprod cumsum frobenius_norm linalg_matrix_norm linalg_vector_norm
        log_softmax norm nuclear_norm prod softmax sum""",
}

# -- what autocast does to an op -------------------------------------------------------------------

_INSIDE = {"cross_entropy_loss": "nll_loss", "nll_loss_nd": "nll_loss"}
"""Composites whose work is done by an op on the lists, listed themselves or not."""


@cache
def _list_aten_overloads() -> dict[str, list[str]]:
    """The overloads of each of torch's own operators; not those that name dimensions."""
    found: dict[str, list[str]] = {}
    # Private: torch says nowhere else which ops its lists hold for a device.
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        base, _, overload = op.partition(".")
        if space == "aten" and "name" not in overload:
            found.setdefault(base, []).append(name)
    return found


@cache
def cast_of(op: str, device_type: str) -> Cast | None:
    """What autocast does to an op's operands on a device; None where it acts on what is inside."""
    overloads = _list_aten_overloads().get(op)
    if overloads is None:
        return None
    device = Device(device_type)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    op = _INSIDE.get(op, op)
    key = f"Autocast{device_type.upper()}"
    listed = any(has_kernel(o, key) for o in _list_aten_overloads()[op])
    is_refused = op == "binary_cross_entropy" and device.autocast_refuses_probabilities
    if not listed or is_refused:
        composite = any(has_kernel(o, "CompositeImplicitAutograd") for o in overloads)
        return None if composite else Cast.NONE
    cast = facts_of_function(op).autocast
    is_told = cast is Cast.FLOAT32_UNLESS_TOLD and device.autocast_heeds_dtype
    return cast if is_told or cast in (Cast.LOWER, Cast.WIDEST) else Cast.FLOAT32


@contextmanager
def without_autocast(*device_types: str) -> Iterator[None]:
    """Within, autocast does nothing on devices where it is on."""
    for device_type in device_types:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        for device_type in device_types:
            torch.set_autocast_enabled(device_type, True)


def without_any_autocast() -> AbstractContextManager[None]:
    """Within, autocast does nothing on any device: what runs has been cast as it was asked to."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return without_autocast(*[kind for kind, enabled, _ in read_autocast_state() if enabled])


def as_autocast_casts(run: Callable[..., Any], op: str, inplace: bool) -> Callable[..., Any]:
    """`run`, which stands for `op`, in the dtypes that `op` has under autocast.

    Torch casts the operands of the ops on its lists and runs what is inside without autocast. An op
    that is written here as other ops has to be treated as the op that it stands for, not as those:
    its operands are cast first, and autocast is off within. Which ops are listed for a device the
    dispatcher is asked; what their list asks for is in the table, all else is in float32.

    Args:
        inplace: it stands for the op in place, which is on no list.
    """

    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        # Private, but one question for all devices: nothing is looked for where there is none.
        if not torch._C._is_any_autocast_enabled():
            return run(*args, **kwargs)
        device = next(t.device.type for t in _collect_tensors((args, list(kwargs.values()))))
        on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        cast = cast_of(op, device) if on else None
        if cast is None:
            return run(*args, **kwargs)
        dtype = None if inplace else _choose_cast_dtype(cast, args, kwargs, device)
        if dtype is not None:
            args = tuple(_cast_floating(a, dtype) for a in args)
            kwargs = {name: _cast_floating(value, dtype) for name, value in kwargs.items()}
        with without_autocast(device):
            return run(*args, **kwargs)

    return cast_and_run if op in _list_aten_overloads() else run


def _choose_cast_dtype(
    cast: Cast, args: Any, kwargs: dict[str, Any], device_type: str
) -> torch.dtype | None:
    """The dtype that floating operands are cast to; None to leave them."""
    if cast is Cast.FLOAT32:
        return torch.float32
    if cast is Cast.FLOAT32_UNLESS_TOLD:
        has_dtype = any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
        return None if has_dtype else torch.float32
    if cast is Cast.LOWER:
        return torch.get_autocast_dtype(device_type)
    if cast is Cast.WIDEST:
        wide = any(
            t.dtype == torch.float32 for t in _collect_tensors((args, list(kwargs.values())))
        )
        return torch.float32 if wide else None
    return None


def _collect_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [t for v in value for t in _collect_tensors(v)] if isinstance(value, (list, tuple)) else []
    )


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if eligible and value.dtype is not dtype else value
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)(_cast_floating(v, dtype) for v in value)
    return value
