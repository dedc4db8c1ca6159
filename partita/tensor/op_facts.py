"""Facts of operators: whether a call is a view, writes, draws, or only moves elements.

Read off an operator's schema and tags, and for what these do not say off one table of corrections.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

__all__ = ["OpFacts", "Operand", "declare_facts", "facts_of"]

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
