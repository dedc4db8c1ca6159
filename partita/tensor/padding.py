"""Padding in ops: how an op runs on padded shards without seeing the padding.

Only while a step is captured are shards padded (`Wire.padded`). An op that keeps the names that are
split runs as it is. One that reduces such a name gets operands whose padding adds nothing to the
result; and since its gradient does not flow into what it did not see, what padding got is 0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.comm import Wire, identity_of_reduction, uneven
from partita.layout import Layout
from partita.rules import EXTREME, Bound, Fill, fills

from .arguments import Path, get_at_path, locate_in_call, replace_at_paths
from .choose import Choice
from .names import Form

__all__ = ["wrap_filling_padding"]


def wrap_filling_padding(
    kernel: Callable[..., Any] | None,
    func: Callable[..., Any],
    form: Form,
    bound: Bound,
    choice: Choice,
    wire: Wire,
    paths: Sequence[Path],
    names: Sequence[str],
) -> Callable[..., Any] | None:
    """What to run on a rank's padded shards: `kernel`, behind what fills the padding of its
    operands if the op reduces over it.

    Args:
        kernel, func: what runs on even ones; where there is no kernel, the function.
        paths: where each term of the sentence stands in a call.
        names: of the arguments that may be given by place or by name.

    Raises:
        LayoutError: the op reduces what is padded, and nothing is known of how to hide it.
    """
    padded = [
        name
        for name, axes in choice.splits.items()
        if name in bound.sizes and bound.sizes[name] % wire.mesh_size(axes)
    ]
    if not padded:
        return kernel
    assert form.rule is not None
    found = fills(form.rule, bound, padded)
    if found is None:
        given = [x for x in choice.inputs if x is not None]
        raise uneven(f"{form.name} of {', '.join(x.brief() for x in given)} reduces uneven pieces")
    if not found:
        return kernel
    run = kernel or func
    places = [(paths[fill.operand], fill, choice.inputs[fill.operand]) for fill in found]

    def run_with_filled_padding(*args: Any, **kwargs: Any) -> Any:
        for path, fill, layout in places:
            path = locate_in_call(path, names, args, kwargs)
            x = get_at_path(args, kwargs, path)
            if isinstance(x, torch.Tensor) and layout is not None:
                now = _fill_operand_padding(x, fill, layout, wire, args, kwargs)
                args, kwargs = replace_at_paths(args, kwargs, {path: now})  # type: ignore[assignment]
        return run(*args, **kwargs)

    return run_with_filled_padding


def _fill_operand_padding(
    x: torch.Tensor, fill: Fill, layout: Layout, wire: Wire, args: Any, kwargs: Any
) -> torch.Tensor:
    value = fill.value
    if value is EXTREME:
        value = identity_of_reduction(fill.reduce, x.dtype)
    elif callable(value):
        value = value(args, kwargs)
    return wire.fill_padding(x, layout, value, fill.dims)
