"""Gathered calls: how a function runs that no rule speaks of.

Its operands are gathered, so that each is whole on every rank, and so is its result. This is right
whatever the function does, and the ledger shows what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Layout

from .agreement import make_no_strides_error
from .aliasing import gives_view, write_through_copy
from .arguments import (
    all_tensors,
    find_view_copies,
    find_wire,
    find_written_operands,
    get_at_path,
    make_changed_layout_error,
    read_numbers_of_other_meshes,
    replace_at_paths,
    writes_view_copy,
)
from .autograd import moved
from .dtensor import DTensor, tagged
from .forms import Form
from .function_facts import facts_of_function
from .grad_buckets import pending_gradients, reduce_pending_gradients
from .mixed_operands import write_into_plain
from .plan import CallPlan, Target
from .random import with_generator_check
from .spec import Spec, spec_of

__all__ = ["run_gathered"]


def run_gathered(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], form: Form
) -> Any:
    """Run a call on whole operands; its result is whole.

    An operand that is written keeps its layout, since others may hold it too: it is written as a
    gathered copy, which is then moved back. Where that layout is pending, the first rank keeps the
    result and the others hold zeros; of a pending maximum or minimum each keeps it.

    Raises:
        LayoutError: what is written would have another shape.
    """
    tensors = all_tensors(args, kwargs)
    numbers = read_numbers_of_other_meshes(form.name, tensors)
    if numbers:
        args, kwargs = replace_at_paths(args, kwargs, numbers)
        return func(*args, **kwargs)
    written = find_written_operands(form, args, kwargs)
    plain = [path for path, t in tensors if path in written and not isinstance(t, DTensor)]
    if plain:
        return write_into_plain(func, form.name, plain, args, kwargs)
    waiting = pending_gradients(t for _, t in tensors)
    if waiting:  # a pending gradient that is needed whole is reduced for good
        reduce_pending_gradients(waiting)
        return func(*args, **kwargs)
    wire = find_wire(form.name, [t for _, t in tensors])
    layouts = [t._spec.layout for _, t in tensors if isinstance(t, DTensor)]
    invariant = tuple(
        a for a in wire.mesh.names if not all(x.placement(a).is_replicate() for x in layouts)
    )

    def make_replicated_spec(shape: Sequence[int]) -> Spec:
        return spec_of(Layout(tuple(shape), invariant=invariant), wire)

    def make_output_spec(out: torch.Tensor) -> Spec:
        if out.layout is not torch.strided:
            raise make_no_strides_error(form.name, out)
        return make_replicated_spec(out.shape)

    if writes_view_copy(form, args) and written == {(0,)}:
        return write_through_copy(func, *args, **kwargs)
    copies = {}
    targets = []
    for path, t in tensors:
        after = make_replicated_spec(t.shape)
        if not isinstance(t, DTensor):
            targets.append(Target(path, after, spec_of(Layout(tuple(t.shape)), wire)))
        elif t._spec is not after:
            if path not in written:
                targets.append(Target(path, after))
            else:
                with Local():
                    copies[path] = moved(t, t._spec, after, form.name, "implicit").clone()
    draws = facts_of_function(form.name).draws
    plan = CallPlan(
        form.name,
        wire,
        targets=tuple(targets),
        kernel=(with_generator_check(form.local or func, form, wire) if draws else None)
        or form.local,
        make_output_spec=make_output_spec,
        result_is_view_copy=bool(targets) and gives_view(form, args),
        view_copies=find_view_copies(tensors),
    )
    if not copies:
        return plan.run(func, args, kwargs)
    out = plan.run(func, *replace_at_paths(args, kwargs, copies))
    for path, copy in copies.items():
        x = get_at_path(args, kwargs, path)
        if copy.shape != x.shape:
            raise make_changed_layout_error(form.name, x)
        layout = x._spec.layout
        if all(op == "sum" for _, op in layout.partial):
            x.copy_(tagged(copy, make_replicated_spec(x.shape)))
            continue
        # A pending maximum of one value is that value: each rank keeps it whole.
        with Local():
            x.copy_(
                moved(copy, make_replicated_spec(x.shape), x._spec.reduced, form.name, "implicit")
            )
    return args[0] if form.inplace else out
