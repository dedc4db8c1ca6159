"""Facts of operators: does a call show memory, write it, draw, or only put elements elsewhere?

Read off an operator's schema and tags, and for what these do not say off one table of corrections.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SHOW_UNSAID", "OpFacts", "Operand", "facts_of"]

_aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default


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
        checks: it gives nothing, and raises where what it is given is not as it must be.
    """

    is_view: bool = False
    writes: tuple[Operand, ...] = ()
    makes_new: bool = False
    moves: bool = False
    casts: bool = False
    statistics: bool = False
    draws: bool = False
    checks: bool = False


@functools.lru_cache(maxsize=8192)
def facts_of(target: Any) -> OpFacts:
    """The facts of what a call calls: an operator of torch, or `operator.getitem`; of anything else
    that it does none of these."""
    if target is operator.getitem:  # of what a call has given
        return OpFacts(is_view=True, moves=True)
    schema = getattr(target, "_schema", None)
    if schema is None:
        return OpFacts()
    writes = tuple(
        Operand(i, a.name, "List" in str(a.type))
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    told = [r.alias_info for r in schema.returns]
    shows = any(info is not None and not info.is_write for info in told)
    is_view = shows or target in SHOW_UNSAID
    name = target._opname.removesuffix("_copy")
    return OpFacts(
        is_view=is_view,
        writes=writes,
        makes_new=not is_view and not writes and all(info is None for info in told),
        moves=(is_view and target._opname not in _COMPUTED_WHEN_READ and not writes)
        or (name in _COPYING and target.namespace == "aten" and not writes),
        casts=target is _aten._to_copy.default,
        statistics=target in _NORMS,
        draws=torch.Tag.nondeterministic_seeded in target.tags,
        checks=not schema.returns and not writes and target.namespace == "aten",
    )


SHOW_UNSAID = (
    *(_aten._unsafe_view.default, _aten.unsafe_split.Tensor),
    *(_aten.unsafe_split_with_sizes.default, _aten.unsafe_chunk.default, _WAIT),
)
"""They give what they are given, or parts of it, and their schemas do not say so."""
_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
"""They write running statistics, and their schemas do not say so."""
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
