"""Properties of ops (is it a view, does it write, does it draw random numbers), and functions' ops.

Properties of an operator follow from its schema and its tags, with a table of corrections
(`facts_of`). Functions that a program calls, such as `torch.reshape`, `x.t()` and `F.dropout`, have
no schema. A table by name has their properties (`facts_of_function`). It includes attributes,
because torch treats their `__get__` and `__set__` as functions.

An op has one rule, registered for one of its functions. Its other functions are found by name:
`torch.add`, `Tensor.add`, `Tensor.__add__`, `Tensor.add_`, `torch._foreach_add_` and
`torch.ops.aten.add.Tensor` are *forms* of one op.

    form_of(torch.Tensor.add_)  ->  Form(name="add", rule=RULES[torch.add], inplace=True, ...)

For a Python function without a rule, its body runs on DTensors (`enter_function`).
"""

from __future__ import annotations

import enum
import functools
import inspect
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import torch

# Not public, but where torch keeps what `torch.library.custom_op` has made, by name.
from torch._library.custom_ops import OPDEFS

# Not public, but where torch keeps the types of what `torch.ops.a.b.default` and `torch.ops.a.b`
# are.
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves, tree_map_only

from partita.comm import read_autocast_state
from partita.comm.device import Device
from partita.rules import RULES, Rule, parse

from .tensor_state import Args, Function, Kwargs

F = TypeVar("F", bound=Function)


@dataclass(frozen=True, slots=True)
class Written:
    """An argument of an op that the op writes in place.

    The call must write the user's tensor, not a redistributed copy. Schemas of operators list their
    written operands, except the running statistics of older normalizations.

    Attributes:
        place, name: the operand's position and name in a call.
        is_list: True if the operand is a list of tensors.
        flag: position and name of the parameter that decides if the operand is written. None if it
            is always written.
    """

    place: int
    name: str
    is_list: bool = False
    flag: tuple[int, str] | None = None

    def path(self, args: Args, kwargs: Kwargs) -> tuple[int | str] | None:
        """Returns the path of the argument in the call `(args, kwargs)`; None if it is not written.

        The path is a tuple with the argument's position, or with its name.
        """
        if self.flag is not None:
            i, name = self.flag
            if not (args[i] if i < len(args) else kwargs.get(name, i and name != "training")):
                return None
        return (self.place,) if self.place < len(args) else (self.name,)

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the written argument of the call `(args, kwargs)`; None if it is not passed."""
        return args[self.place] if self.place < len(args) else kwargs.get(self.name)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Properties that every call of an operator has. In the list below, "it" is the operator.

    Attributes:
        is_view: its results are views of an operand that it does not write (reshape: maybe).
        writes: the operands that it writes.
        makes_new: its results have their own memory, and it writes no operand.
        moves: its results are unchanged elements of its operands, at other positions.
        casts: its results are its operand's elements in another dtype.
        statistics: it writes its fourth and fifth operands if its sixth is True (training).
        draws: it draws random numbers, so another call returns another result.
        fills: it draws random numbers that replace all values of its first operand.
        overwrites: its result does not depend on the values of its first operand, only on the
            metadata.
        checks: it returns nothing, and raises if its operands are not as required.
        is_undeclared_view: its results are views of its only operand, but its schema does not say
            so.
        is_alias: it returns a view of the whole operand.
        lifts: it turns a Python value into a tensor.
        by_storage: it depends on the whole storage of an operand, not only on the operand's
            elements.
        changes_metadata: it changes the shape, the strides or the storage of an operand in place.
        workspace: the memory that its CPU kernel allocates while it runs. "casts": copies of its
            operands in the dtype in which it computes. "measured": found by running it. "": none.
        takes_number_as_tensor: it accepts a 0-d tensor in place of a number. The result may then be
            rounded differently.
        exact_in_numbers: it rounds the same for a Python number and for a 0-d tensor.
        stands_alone: compilers run it as a kernel of its own, not fused with other ops.
    """

    is_view: bool = False
    writes: tuple[Written, ...] = ()
    makes_new: bool = False
    moves: bool = False
    casts: bool = False
    statistics: bool = False
    draws: bool = False
    fills: bool = False
    overwrites: bool = False
    checks: bool = False
    is_undeclared_view: bool = False
    is_alias: bool = False
    lifts: bool = False
    by_storage: bool = False
    changes_metadata: bool = False
    workspace: str = ""
    takes_number_as_tensor: bool = False
    exact_in_numbers: bool = False
    stands_alone: bool = False


@functools.lru_cache(maxsize=8192)
def facts_of(target: Any) -> OpFacts:
    """Returns the properties of `target`, the target of a node in an fx graph.

    A target is an operator of torch, `operator.getitem`, or a function with `declare_facts`. For
    anything else all properties are False.
    """
    if target is operator.getitem:  # an item of a call's result
        return OpFacts(is_view=True, moves=True)
    schema = getattr(target, "_schema", None)
    if schema is None:
        found: OpFacts = getattr(target, "facts", OpFacts())
        return found
    writes = tuple(
        Written(i, a.name, "List" in str(a.type))
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = [r.alias_info for r in schema.returns]
    full_name = f"{target._opname}.{target._overloadname}"
    is_undeclared_view = full_name in _SHOW_UNSAID
    is_view = is_undeclared_view or any(info is not None and not info.is_write for info in aliases)
    name, is_torchs = target._opname.removesuffix("_copy"), target.namespace == "aten"
    base = target._opname.removeprefix("_foreach_").removesuffix("_")
    measured = "measured" if is_torchs and full_name in _MEASURED else ""
    return OpFacts(
        is_view=is_view,
        writes=writes,
        makes_new=not is_view and not writes and all(info is None for info in aliases),
        moves=(is_view and target._opname not in _COMPUTED_WHEN_READ and not writes)
        or (name in _COPYING and is_torchs and not writes),
        casts=is_torchs and target._opname == "_to_copy",
        statistics=full_name in _STATISTICS_UNSAID,
        draws=torch.Tag.nondeterministic_seeded in target.tags,
        fills=target._opname in (*FILLS, "bernoulli_"),
        overwrites=is_torchs and _is_overwriting(target._opname),
        checks=not schema.returns and not writes and is_torchs,
        is_undeclared_view=is_undeclared_view,
        is_alias=is_torchs and full_name in ("detach.default", "alias.default"),
        lifts=name in ("lift", "lift_fresh"),
        by_storage=is_torchs and name in _BY_STORAGE,
        changes_metadata=torch.Tag.inplace_view in target.tags or full_name in _RESIZES_UNSAID,
        workspace="casts" if is_torchs and target._opname in _CASTING else measured,
        takes_number_as_tensor=is_torchs and base in _EXACT_IN_NUMBERS | _ROUNDED_IN_NUMBERS,
        exact_in_numbers=is_torchs and base in _EXACT_IN_NUMBERS,
        stands_alone=not is_torchs or target._opname in _STAND_ALONE,
    )


def declare_facts(facts: OpFacts) -> Callable[[F], F]:
    """Returns a decorator that declares `facts`, the properties of a Python function.

    fx graphs call a function with declared properties like an operator.
    """

    def declare(function: F) -> F:
        function.facts = facts  # type: ignore[attr-defined]
        return function

    return declare


def _is_overwriting(name: str) -> bool:
    made_like = name.startswith("new_") or name.endswith("_like")
    return made_like or name.removesuffix("_") in _OVERWRITING


# -- the table of corrections ----------------------------------------------------------------------

_SHOW_UNSAID = frozenset(
    """_unsafe_view.default unsafe_split.Tensor unsafe_split_with_sizes.default
    unsafe_chunk.default wait_tensor.default""".split()
)
"""Operators that return their operand, or views of it."""
_STATISTICS_UNSAID = frozenset(("native_batch_norm.default", "cudnn_batch_norm.default"))
"""Operators that write running statistics, which their schemas do not show."""
_COMPUTED_WHEN_READ = frozenset(
    """_conj _neg_view conj resolve_conj resolve_neg real imag view_as_real view_as_complex
    as_strided""".split()
)
"""Views whose elements are computed from those of their base when they are read."""
_COPYING = frozenset(
    """cat clone copy index_select expand narrow permute reshape select slice split
    split_with_sizes squeeze stack t transpose unsqueeze view""".split()
)
"""Operators that copy elements of tensors into new memory, or may do so."""
FILLS = "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_".split()
"""Operators that draw each element of their operand independently."""
_OVERWRITING = frozenset("fill zero copy".split())
_BY_STORAGE = frozenset("as_strided as_strided_ as_strided_scatter set_ resize_".split())
_RESIZES_UNSAID = frozenset(("resize_as_sparse_.default", "set_data.default"))
"""Operators that change metadata in place, but lack torch's tag for this."""
_EXACT_IN_NUMBERS = frozenset(
    """add sub rsub mul div true_divide eq ne lt le gt ge maximum minimum clamp clamp_min clamp_max
    where fill masked_fill index_fill full full_like new_full scalar_tensor""".split()
)
_ROUNDED_IN_NUMBERS = frozenset("pow remainder fmod floor_divide xlogy".split())
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
    """How autocast casts floating-point operands of an op. It never casts float64."""

    FLOAT32 = "to float32"
    FLOAT32_UNLESS_GIVEN = "to float32, unless the call gives a dtype"
    LOWER = "to autocast's dtype"
    WIDEST = "to the widest of them"
    NONE = "nothing, and what is inside is not cast either"


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """Properties that every call of a function has. In the list below, "it" is the function.

    Attributes:
        is_view: its result shares its operand's memory, on one device and if no operand is
            redistributed.
        may_copy: its result is a view or a copy, depending on the strides.
        reshapes: it changes its operand's shape in place.
        changes_shape: it changes its operand's shape or memory in place.
        draws: it may draw random numbers.
        ignores_layout: its result does not depend on the layout, so it runs on the local tensor.
        computes_nothing: it reads a property of a tensor or of torch, or starts autograd.
        needs_itself: it must run on the tensor object itself, not on a copy or an alias.
        is_twin: it is a function of torch.nn.functional that only calls the builtin with its name.
            So it runs as a whole on a local tensor (except with `inplace=True`).
        autocast: how autocast casts its operands, on devices whose autocast lists it. None: to
            float32.
    """

    is_view: bool = False
    may_copy: bool = False
    reshapes: bool = False
    changes_shape: bool = False
    draws: bool = False
    ignores_layout: bool = False
    computes_nothing: bool = False
    needs_itself: bool = False
    is_twin: bool = False
    autocast: Cast | None = None


@functools.lru_cache(maxsize=8192)
def facts_of_function(name: str) -> FunctionFacts:
    """Returns the properties of functions with this name, such as "reshape".

    For an unknown name all are False.
    """
    facts = {fact: name in names.split() for fact, names in _FACTS_OF_FUNCTIONS.items()}
    facts["changes_shape"] |= facts["reshapes"]
    facts["draws"] |= _is_operator_drawing(name)
    casts = (cast for cast, names in _CASTS.items() if name in names.split())
    return FunctionFacts(**facts, autocast=next(casts, None))


def _is_operator_drawing(name: str) -> bool:
    """True if torch marks an operator of this name as drawing random numbers."""
    packets = [getattr(torch.ops.aten, n, None) for n in (name, name + "_")]
    return any(
        facts_of(getattr(packet, overload)).draws
        for packet in packets
        if isinstance(packet, OpOverloadPacket)  # others are attributes of the namespace itself
        for overload in packet.overloads()
    )


# -- the table by names ----------------------------------------------------------------------------

VIEW_ATTRIBUTES = frozenset("T H mT mH real imag".split())
"""Attributes that compute like functions, and return views."""
STATE_OF_LEAVES = """grad data requires_grad requires_grad_ retain_grad detach_ register_hook
register_post_accumulate_grad_hook""".split()
"""Attributes and methods of autograd's state, which belongs to one tensor object."""
ADDRESSES = "data_ptr untyped_storage storage _typed_storage storage_offset is_set_to".split()
"""Methods that return the address of a tensor's memory."""
FACTS_THAT_STAY = """storage_offset is_leaf grad_fn grad _base _is_view is_shared is_inference
is_conj is_neg _backward_hooks retains_grad output_nr is_pinned""".split()
"""Attributes and methods that describe a tensor, not its values, and stay equal in all calls."""
FACTS_THAT_CHANGE = "_version data_ptr untyped_storage storage _typed_storage".split()
"""Attributes and methods whose result may differ in each call, such as an address."""
FREQUENT_METHODS = """
    abs neg exp log sqrt rsqrt tanh sigmoid relu sin cos square reciprocal detach t erf __neg__
    __abs__ __invert__ add sub mul div matmul mm pow maximum minimum bmm add_ mul_ sub_ div_
    __add__ __radd__ __sub__ __mul__ __rmul__ __truediv__ __matmul__ __pow__ __eq__ __ne__
    __lt__ __le__ __gt__ __ge__ __and__ __or__ __iadd__ __isub__ __imul__ __itruediv__ view
    reshape transpose permute sum mean unsqueeze squeeze flatten expand softmax to type_as
    __getitem__ split chunk amax amin repeat clone contiguous float
""".split()
"""Names of methods that skip torch's argument parser where the hot path is in C."""
METHOD_OF_OPERATOR = {f"__{name}__": name for name in "pow eq ne lt le gt ge neg abs".split()}
"""Maps each operator that torch.Tensor defines in Python to the builtin that it calls last."""
OF_ONE_OPERAND = frozenset("relu silu mish selu relu6 hardswish hardsigmoid".split())
"""Functions of torch.nn.functional whose builtins take only the operand, and no `inplace`."""

_FACTS_OF_FUNCTIONS = {
    "is_view": """view reshape flatten unflatten ravel transpose permute t movedim unsqueeze squeeze
        expand broadcast_to select narrow diagonal chunk split tensor_split hsplit vsplit dsplit
        split_with_sizes unbind unfold as_strided getitem detach alias real imag view_as_real
        view_as_complex atleast_1d atleast_2d atleast_3d""",
    "may_copy": "contiguous reshape flatten ravel to type",
    "reshapes": "squeeze_ unsqueeze_ t_ transpose_ swapdims_ swapaxes_",
    # In addition to those that reshape.
    "changes_shape": "as_strided_ resize_ resize_as_ set_",
    # Torch does not tag them, since they are made of others.
    "draws": """scaled_dot_product_attention feature_dropout feature_alpha_dropout rrelu binomial
        random _standard_gamma _sample_dirichlet multi_head_attention_forward fractional_max_pool2d
        fractional_max_pool3d fractional_max_pool2d_with_indices
        fractional_max_pool3d_with_indices""",
    "ignores_layout": """requires_grad_ retain_grad is_floating_point is_complex is_signed
        is_inference is_conj is_neg get_device element_size is_pinned is_shared has_names
        is_nonzero_local result_type can_cast promote_types is_tensor is_storage _is_view
        _is_zerotensor is_distributed register_post_accumulate_grad_hook __hash__
        has_torch_function _has_compatible_shallow_copy_type""",
    "computes_nothing": """size dim numel nelement ndimension backward grad register_hook
        requires_grad_ is_same_size _set_grad_enabled _set_view_replay_enabled _is_view __len__
        __repr__ __str__ __format__ __iter__ __reversed__ is_tensor is_floating_point is_complex
        is_contiguous retain_grad __dir__ __array__ __reduce_ex__ __setstate__ __deepcopy__
        share_memory_ refine_names align_as __hash__""",
    "needs_itself": """backward register_hook register_post_accumulate_grad_hook retain_grad
        requires_grad_ detach_ set_ resize_ resize_as_ item tolist __bool__ __float__ __int__
        __index__ is_nonzero numpy data_ptr untyped_storage storage register_multi_grad_hook
        to_dlpack __dlpack__ share_memory_ as_subclass _make_subclass __reduce_ex__ __deepcopy__
        __setstate__ pin_memory equal""",
    "is_twin": """celu elu gelu hardshrink hardsigmoid hardswish hardtanh layer_norm leaky_relu
        log_softmax logsigmoid mish relu relu6 rms_norm selu silu softmax softplus softshrink
        tanhshrink""",
}
"""For each fact of `FunctionFacts`, the names of the functions that have it."""
_CASTS = {
    Cast.LOWER: """_addmm_activation _convolution _native_multi_head_attention addbmm addmm addmv
        addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d convolution einsum linalg_multi_dot linalg_vecdot linear
        matmul mm mv prelu scaled_dot_product_attention""",
    Cast.WIDEST: """addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_copy index_put
        scatter_add stack tensordot vdot""",
    Cast.FLOAT32_UNLESS_GIVEN: """cumprod cumsum frobenius_norm linalg_matrix_norm
    linalg_vector_norm
        log_softmax norm nuclear_norm prod softmax sum""",
}

# -- autocast --------------------------------------------------------------------------------------

_INSIDE = {"cross_entropy_loss": "nll_loss", "nll_loss_nd": "nll_loss"}
"""Composites whose work is done by an op on the lists, listed themselves or not."""


@cache
def _list_aten_overloads() -> dict[str, list[str]]:
    """Returns the overloads of each of torch's own operators that do not name dimensions."""
    found: dict[str, list[str]] = defaultdict(list)
    # Private torch: the only list of all registered operators.
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        base, _, overload = op.partition(".")
        if space == "aten" and "name" not in overload:
            found[base].append(name)
    return dict(found)


@cache
def cast_of(op: str, device_type: str) -> Cast | None:
    """Returns how autocast casts the operands of the op `op` on devices of `device_type`.

    `Cast.NONE` means that it casts no operands. None means that autocast has no entry for the op.
    It may cast operands of other ops that the op calls.
    """
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
    is_given = cast is Cast.FLOAT32_UNLESS_GIVEN and device.autocast_keeps_dtype
    return cast if is_given or cast in (Cast.LOWER, Cast.WIDEST) else Cast.FLOAT32


@contextmanager
def without_autocast(*device_types: str) -> Iterator[None]:
    """Disable autocast inside the `with` block on devices for which it is on."""
    for device_type in device_types:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        for device_type in device_types:
            torch.set_autocast_enabled(device_type, True)


def without_any_autocast() -> AbstractContextManager[None]:
    """Disable autocast inside the `with` block on all devices."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return without_autocast(*[kind for kind, enabled, _ in read_autocast_state() if enabled])


def as_autocast_casts(run: Function, op: str, inplace: bool) -> Function:
    """Wraps `run`, a decomposition of the op `op`, so that autocast casts its operands as for `op`.

    The operands are cast first. Autocast is disabled while `run` runs, so that the ops inside are
    not cast again. Torch's dispatcher says which ops autocast lists for a device. The table in this
    file has the cast of each op, by default to float32.

    Args:
        inplace: True if `run` implements the in-place op, which autocast never casts.
    """

    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        # Private torch: one check for all devices, for calls without autocast.
        if not torch._C._is_any_autocast_enabled():
            return run(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        device = next(v.device.type for v in leaves if isinstance(v, torch.Tensor))
        on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        cast = cast_of(op, device) if on else None
        if cast is None:
            return run(*args, **kwargs)
        dtype = None if inplace else _choose_cast_dtype(cast, leaves, device)
        if dtype is not None:
            to_dtype = partial(_cast_floating, dtype)
            args, kwargs = tree_map_only(torch.Tensor, to_dtype, (args, kwargs))
        with without_autocast(device):
            return run(*args, **kwargs)

    return cast_and_run if op in _list_aten_overloads() else run


def _choose_cast_dtype(cast: Cast, leaves: Sequence[Any], device: str) -> torch.dtype | None:
    """Returns the dtype to which a call's floating-point arguments are cast; None: no cast."""
    if cast is Cast.LOWER:
        return torch.get_autocast_dtype(device)
    if cast is Cast.WIDEST:
        has_wide = any(isinstance(v, torch.Tensor) and v.dtype == torch.float32 for v in leaves)
        return torch.float32 if has_wide else None
    is_given = cast is Cast.FLOAT32_UNLESS_GIVEN and any(isinstance(v, torch.dtype) for v in leaves)
    return None if is_given or cast is Cast.NONE else torch.float32


def _cast_floating(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    is_wide = not value.is_floating_point() or value.dtype is torch.float64
    return value if is_wide or value.dtype is dtype else value.to(dtype)


# -- forms of ops ----------------------------------------------------------------------------------

_DUNDERS = dict(
    pair.split("=")
    for pair in """
    and=bitwise_and or=bitwise_or xor=bitwise_xor invert=bitwise_not lshift=bitwise_left_shift
    rshift=bitwise_right_shift truediv=div mod=remainder floordiv=floor_divide neg=neg pos=positive
    """.split()
)
_COMMUTING = {"add", "mul", "and", "or", "xor"}

_SYNONYMS = dict(
    pair.split("=")
    for pair in """
    multiply=mul subtract=sub divide=div true_divide=div greater=gt greater_equal=ge less=lt
    less_equal=le not_equal=ne negative=neg absolute=abs arccos=acos arccosh=acosh arcsin=asin
    arcsinh=asinh arctan=atan arctanh=atanh arctan2=atan2 clip=clamp fix=trunc swapdims=transpose
    swapaxes=transpose moveaxis=movedim concat=cat concatenate=cat
    """.split()
)

_BARE_CALLS: dict[Any, Function] = {
    getattr(torch.nn.functional, op): getattr(torch._C._nn, op, None) or getattr(torch, op)
    for op in OF_ONE_OPERAND
} | {torch.nn.functional.embedding: lambda input, weight: torch.embedding(weight, input)}
"""The builtins that functions of torch.nn.functional call on their operands if each flag is None or
False.
"""


@dataclass(frozen=True)
class Form:
    """A torch function and its op: `torch.add` and `Tensor.add_` are forms of the op add.

    Attributes:
        func: the function.
        name: the op's name.
        rule: its rule, or None.
        inplace: True if it writes and returns its first operand.
        reshapes: True if it changes the first operand's shape in place.
        foreach: True if it takes lists, and calls the op for each position in them.
        local: the function that runs on local tensors; None means `func` itself.
        bare: a faster function for calls in which all arguments but the operands have their
            defaults.
        operator: the `Operator`, for an operator of torch.library; None for other functions.
        writes: operands that are written, besides the first one of an in-place op.
    """

    func: Function
    name: str
    rule: Rule | None
    inplace: bool = False
    reshapes: bool = False
    foreach: bool = False
    local: Function | None = None
    bare: Function | None = None
    operator: Operator | None = None
    writes: tuple[Written, ...] = ()

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the function's parameters that its rule reads, in order."""
        assert self.rule is not None
        if self.rule.derive is not None:
            return tuple(p.name for p in self.rule.params)
        return parameter_names(self.func, len(parse(self.rule.text).terms))


@cache
def form_of(func: Function) -> Form:
    """Returns the form of the torch function `func`: its op, its rule, and if it works in place.

    The rule is the function's own, or otherwise the rule of its op. A function written in Python
    has no rule of its op, unless it only calls the builtin of its name. Without a rule, its body
    runs.
    """
    operator = _operator_of(func)
    if operator is not None:
        return _form_of_operator(func, operator)
    name = getattr(func, "__name__", "")
    own = RULES.get(func)
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_")
        op = base.removesuffix("_")
        rule = _find_rule_named(op) or _find_rule_named(base)
        return Form(func, op, rule, inplace=base.endswith("_"), foreach=True)
    inplace = name.endswith("_") and not name.endswith("__")
    op = name.rstrip("_") if inplace else name
    if name.startswith("__") and name.endswith("__"):
        op = name[2:-2]
        bare = op[1:]
        if op.startswith("i") and bare in (*_DUNDERS, "add", "sub", "mul", "pow", "matmul"):
            op, inplace = bare, True
        elif op.startswith("r") and bare in _COMMUTING:
            op = bare
        op = _DUNDERS.get(op, op)
    op = _SYNONYMS.get(op, op)
    reshapes, writes = facts_of_function(name).reshapes, written_by(func)
    if own is not None:
        name, bare = own.name.removeprefix("__").rstrip("_") or op, _BARE_CALLS.get(func)
        return Form(func, name, own, inplace, reshapes, bare=bare, writes=writes)
    if isinstance(func, types.FunctionType):
        if facts_of_function(op).is_twin and func is getattr(torch.nn.functional, op):
            bare = _BARE_CALLS.get(func)
            return Form(func, op, _find_rule_named(op), local=_builtin_twin(func), bare=bare)
        return Form(func, op, None, inplace)
    # `zero_` has no other form than the one in place.
    rule = _find_rule_named(op) or _find_rule_named(name)
    return Form(func, op, rule, inplace, reshapes, writes=writes)


def _form_of_operator(func: Function, operator: Operator) -> Form:
    """Returns the form of an operator.

    An operator of torch is known as the torch function of its name. Another one is known by its own
    rule, which may belong to its packet or to the result of `torch.library.custom_op`.
    """
    name = operator.name
    if operator.is_torchs:
        op = name.rstrip("_")
        rule = _find_rule_named(op) or _find_rule_named(name)
        reshapes, writes = facts_of_function(name).reshapes, written_by(func)
        return Form(func, op, rule, op != name, reshapes, operator=operator, writes=writes)
    same = [func, operator.packet]
    if func is operator.packet:
        same += overloads_of(func)
    rule = next((r for f, r in RULES.items() if getattr(f, "_opoverload", f) in same), None)
    local, writes = _wrap_with_plain_pieces(func), written_by(func)
    return Form(func, name, rule, local=local, operator=operator, writes=writes)


def _builtin_twin(func: Function) -> Function | None:
    """Returns the builtin that a function of torch.nn.functional only calls, or None."""
    bare = _BARE_CALLS.get(func)
    if bare is not None:
        return lambda input, inplace=False: bare(input)
    norms = ("layer_norm", "rms_norm")
    return getattr(torch, func.__name__) if func.__name__ in norms else None


def _find_rule_named(name: str) -> Rule | None:
    """Returns the rule of a torch function with this name, in any namespace."""
    for home in (torch, torch.Tensor, torch._C._nn, torch.nn.functional, torch.special):
        f = getattr(home, name, None)
        if f is not None and f in RULES and not isinstance(f, types.FunctionType):
            return RULES[f]
    return None


@cache
def parameter_names(func: Function, count: int) -> tuple[str, ...]:
    """Returns the names of the first `count` parameters of `func`.

    The names come from torch's table of overrides or from an operator's schema. Without either they
    are `operand0`, `operand1`, ...: these arguments must be passed by position.
    """
    stand_in = torch.overrides.get_testing_overrides().get(func)
    names: list[str] = []
    overloads = overloads_of(func)
    if len(overloads) == 1 and overloads[0].namespace != "aten":
        names = [a.name for a in overloads[0]._schema.arguments]
    elif stand_in is not None:
        for p in inspect.signature(stand_in).parameters.values():
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) and p.name != "out":
                names.append(p.name)
    names = names[:count]
    return tuple(names) + tuple(f"operand{i}" for i in range(len(names), count))


# -- replacements of functions ---------------------------------------------------------------------

OVERRIDES: dict[Function, Function] = {}
"""Maps a function of torch to the one that is called in its place if an argument is a DTensor."""


def needs_no_rule(func: Function) -> bool:
    """True if `func` needs no rule, because it gives the right result on the local tensor.

    These are attributes without an entry in `OVERRIDES`, and functions that ignore the layout.
    """
    name = getattr(func, "__name__", "")
    attributes = ("__get__", "__set__", "__delete__")
    return name in attributes or facts_of_function(name).ignores_layout


def implements(*functions: Any) -> Callable[[Function], Function]:
    """Returns a decorator. DTensors call the decorated function in place of `functions` of torch.

    The function is registered in `OVERRIDES`.
    """

    def register_override(f: Function) -> Function:
        for function in functions:
            OVERRIDES[function] = f
        return f

    return register_override


def find_getter(name: str) -> Any:
    """Returns what torch passes to `__torch_function__` for the attribute `name` ("shape")."""
    return getattr(torch.Tensor, name).__get__


# -- operators of torch.library --------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """An operator of `torch.ops` with all its overloads, or with one of them.

    Attributes:
        name: its name, without namespace and overload.
        packet: all its overloads.
        is_torchs: True for torch's own operators: they have the properties of the torch function
            with their name.
    """

    name: str
    packet: OpOverloadPacket
    is_torchs: bool


def overloads_of(func: Any) -> list[OpOverload]:
    """Returns the overloads of an operator; [func] for an `OpOverload`, [] for other objects.

    Args:
        func: an operator of `torch.ops` (an `OpOverload` or an `OpOverloadPacket`), or another
            object.
    """
    if isinstance(func, OpOverload):
        return [func]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name) for name in func.overloads()]
    return []


def is_collective(func: Any) -> bool:
    """True if `func` is an operator of torch.distributed, functional or not."""
    return any("c10d" in overload.namespace for overload in overloads_of(func))


def _operator_of(func: Function) -> Operator | None:
    """Returns `func` as an operator; None if it is another kind of function."""
    overloads = overloads_of(func)
    if not overloads:
        return None
    packet = overloads[0].overloadpacket
    return Operator(packet.__name__, packet, overloads[0].namespace == "aten")


def find_unknown_effect(target: Any) -> str:
    """Returns why a custom operator may do something that a graph would not record; "" if nothing.

    Its schema and registration must show that it only returns new tensors. By the contract of
    `torch.library.custom_op` an operator sends nothing, and has a tag if it draws random numbers.
    An operator with a sharding rule is assumed to keep this contract, too.

    Args:
        target: an operator, or the target of another node of an fx graph.
    """
    if not isinstance(target, OpOverload):
        return "it has no schema"
    facts = facts_of(target)
    if facts.writes:
        return f"it writes {' and '.join(w.name for w in facts.writes)}"
    if facts.is_view:
        return "its result shares memory with an argument"
    if facts.draws:
        return "it draws random numbers in a way that a graph does not support"
    if not target._schema.returns:
        return "it returns nothing, so it must have a side effect"
    if target._schema.name not in OPDEFS and form_of(target).rule is None:
        return "it is not made by torch.library.custom_op, and no rule says that it runs on pieces"
    return ""


def _wrap_with_plain_pieces(func: Function) -> Function:
    """Returns a function that calls `func` with plain aliases of the operands.

    It is called with torch-function disabled. The reason: the Python backward of a user's operator
    reads saved operands, which must be local tensors, as the gradients are.
    """

    def local_view_of(value: Any) -> Any:
        if hasattr(value, "_spec"):
            return value.view_as(value)
        if isinstance(value, (list, tuple)) and any(hasattr(v, "_spec") for v in value):
            return [local_view_of(v) for v in value]
        return value

    def run_on_pieces(*args: Any, **kwargs: Any) -> Any:
        return func(*map(local_view_of, args), **{k: local_view_of(v) for k, v in kwargs.items()})

    return run_on_pieces


# -- arguments that a function writes --------------------------------------------------------------

_STATISTICS = ("running_mean", "running_var")
_UPDATING = ("training", "use_input_stats")


def written_by(func: Function) -> tuple[Written, ...]:
    """Returns the arguments that `func` writes in place, by its schema or signature."""
    if isinstance(func, types.FunctionType):
        # Its own signature: a wrapped function, as of Tensor.__pow__, may be a builtin without one.
        return _find_written_statistics(
            list(inspect.signature(func, follow_wrapped=False).parameters)
        )
    overloads = overloads_of(func)
    if not overloads:  # a builtin, or a method: known as the operator of its name
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        overloads = overloads_of(packet) if packet is not None else []
    found: dict[Written, None] = {}
    for overload in overloads:
        arguments = overload._schema.arguments
        for one in facts_of(overload).writes:
            # TorchScript has operators on Python's lists, `aten::sort` among them: no tensor is
            # written.
            is_python = one.is_list and not overload._opname.endswith("_")
            kind = str(arguments[one.place].type)
            if not arguments[one.place].is_out and not is_python and "Tensor" in kind:
                found[Written(one.place, one.name)] = None
        if not found:
            found |= dict.fromkeys(_find_written_statistics([a.name for a in arguments]))
    return tuple(found)


def _find_written_statistics(names: list[str]) -> tuple[Written, ...]:
    flag = next(((i, n) for i, n in enumerate(names) if n in _UPDATING), None)
    return tuple(Written(i, n, flag=flag) for i, n in enumerate(names) if n in _STATISTICS)


# -- Python functions that are entered -------------------------------------------------------------

# An init function passes itself on by its name in torch.nn.init. While transformers initialises a
# model, it puts its own functions there, which call torch's: to enter one would never end.
_INITS = {
    name: func
    for name, func in vars(torch.nn.init).items()
    if isinstance(func, types.FunctionType) and name.endswith("_") and name[0] != "_"
}

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _answer_false(*_: object) -> bool:
    return False


_OVERRIDES = types.SimpleNamespace(
    **vars(torch.overrides) | dict.fromkeys(_QUESTIONS, _answer_false)
)


class _Torch(types.ModuleType):
    """A replacement of `torch` in a function that calls `torch.overrides.has_torch_function...`."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.overrides = _OVERRIDES

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_entered_globals: dict[tuple[int, bool], dict[str, Any]] = {}


def _make_globals_answering_no(space: dict[str, Any], through_torch: bool) -> dict[str, Any]:
    """Returns a copy of a module's globals in which `has_torch_function` returns False. Cached."""
    key = (id(space), through_torch)
    if key not in _entered_globals:
        changed = dict(space)
        changed.update((q, _answer_false) for q in _QUESTIONS if q in changed)
        if through_torch and changed.get("torch") is torch:
            changed["torch"] = _Torch()
        if through_torch and changed.get("overrides") is torch.overrides:  # in torch itself
            changed["overrides"] = _OVERRIDES
        _entered_globals[key] = changed
        for name, helper in space.items():
            # A module's private helper checks on behalf of the public function that calls it.
            if name.startswith("_") and _has_questions(helper) and helper.__globals__ is space:
                changed[name] = copy_function(helper, changed)
    return _entered_globals[key]


def _has_questions(func: Any) -> bool:
    return isinstance(func, types.FunctionType) and any(
        q in func.__code__.co_names for q in _QUESTIONS
    )


def copy_function(func: types.FunctionType, space: dict[str, Any], closure: Any = None) -> Any:
    """Copies the Python function `func`. The copy reads its globals from the dictionary `space`.

    Args:
        closure: the cells of the copy; None: the cells of `func`.
    """
    copy = types.FunctionType(
        func.__code__, space, func.__name__, func.__defaults__, closure or func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _entered_cell(cell: types.CellType, func: types.FunctionType) -> types.CellType:
    """Returns a cell for the copy of `func`, with a copy of the function in it if needed.

    A function in the closure is copied, too, if it calls `has_torch_function`. For example,
    `boolean_dispatch` makes functions that refer to two others.
    """
    try:
        held = cell.cell_contents
    except ValueError:  # nothing in it yet
        return cell
    again = isinstance(held, types.FunctionType) and held.__code__ is func.__code__
    if again and held is not func:
        return types.CellType(enter_function(held))
    return (
        types.CellType(copy_function(held, _globals_to_enter(held)))
        if _has_questions(held)
        else cell
    )


def _globals_to_enter(func: types.FunctionType) -> dict[str, Any]:
    return _make_globals_answering_no(func.__globals__, "overrides" in func.__code__.co_names)


@cache
def enter_function(func: Function) -> Function | None:
    """Returns a copy of the Python function `func` that runs on DTensors; None for a builtin.

    Many functions of `torch.nn.functional` begin with `if has_torch_function(...)`. If that is
    True, they pass themselves to `__torch_function__` as a whole. In the copy, `has_torch_function`
    returns False. So the body runs, and each op in it is dispatched.
    """
    if not isinstance(func, types.FunctionType):
        return None
    if func.__module__ != torch.nn.init.__name__:
        func = _INITS.get(func.__name__, func)
    closure = func.__closure__ and tuple(_entered_cell(c, func) for c in func.__closure__)
    return copy_function(func, _globals_to_enter(func), closure)
