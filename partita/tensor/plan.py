"""Call plans: what is decided once for calls of one key, and then only done.

A plan says which operands are moved into which layout, what runs on the pieces, and how its results
are tagged. It learns the specs of the results from its first call, and from then on it may be
`direct`: dispatch runs the kernel and tags the result without a call of `CallPlan.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire, user_line
from partita.layout import Layout, LayoutError
from partita.rules import Bound, Work

from .aliasing import copy_as_on_one_device, mark_copies
from .arguments import Path, collect_tensors, get_at_path, locate_in_call, replace_at_paths
from .autograd import alias_without_base, moved
from .choose import Choice
from .dtensor import PLAIN, DTensor, tagged
from .grad_buckets import pending_gradients, reduce_pending_gradients
from .mixed_operands import admit
from .origin import current
from .spec import Spec, spec_of
from .tensor_state import MovedValue, own_state, state_of

__all__ = ["CallPlan", "PlanWork", "Target", "work_of_plan"]


@dataclass(frozen=True)
class Target:
    """An operand that the kernel does not take as it is.

    Attributes:
        path: where it stands in the call.
        spec: the spec that it has to have.
        plain: of a plain tensor, the spec that it is taken for (whole on every rank); None of a
            DTensor.
    """

    path: Path
    spec: Spec
    plain: Spec | None = None


@dataclass(slots=True, weakref_slot=True)
class CallPlan:
    """How calls of one key are run on this rank.

    Attributes:
        op: the op's name.
        wire: the rank's wire, of the mesh on which the operands are.
        direct: a call has nothing to do but to run the kernel, or the function, and to tag its
            result as `spec`. Set by the first call, if not as the plan is made.
        spec, local_shape: of the result, where it is one tensor; set as `direct` is.
        outputs: the spec and the local shape of each result; the first call sets them.
        targets: the operands that are moved first, and those that are plain tensors.
        kernel: what runs on the rank in place of the function.
        bare: what runs on the operands alone, and their number, where a call gives all of them by
            place and nothing else that it gives asks for anything.
        rewrite: what is called with the DTensors in place of all this.
        bound, choice: the reasoning, for `explain` and for shapes that only the kernel tells.
        retags_operand: the op changes its operand's shape in place, so the operand is tagged anew.
        result_is_view_copy: one device's result is a view, and here it has memory of its own.
        may_copy: the op copies or not as the strides are, and a piece's strides do not tell which.
        view_copies: the operands that are view copies (see `aliasing`): they may be out of date.
        names: of the parameters that may be given by place or by name, in order.
        work: the matrix products of a call, for ledgers.
        make_output_spec: gives the spec of a result from it, each time (shapes that depend on
            data).
        hits: how many calls have found this plan.
    """

    op: str
    wire: Wire
    direct: bool = False
    spec: Spec | None = None
    local_shape: torch.Size | None = None
    outputs: tuple[tuple[Spec, torch.Size], ...] = ()
    targets: tuple[Target, ...] = ()
    kernel: Callable[..., Any] | None = None
    bare: tuple[Callable[..., Any], int] | None = None
    rewrite: Callable[..., Any] | None = None
    bound: Bound | None = None
    choice: Choice | None = None
    retags_operand: bool = False
    result_is_view_copy: bool = False
    may_copy: bool = False
    view_copies: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    work: PlanWork | None = None
    make_output_spec: Callable[[torch.Tensor], Spec] | None = None
    hits: int = field(default=0)

    def listen(self, on: bool) -> None:
        """Have calls note their work in the open ledgers, or not any more. The kernel is exchanged
        for it, so that calls cost nothing more while no ledger is open."""
        assert self.work is not None
        self.kernel = self.work.run_noting_work if on else self.work.kernel

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call as planned: take view copies anew, move operands, run the kernel, tag its
        results."""
        if not args and self.names and self.names[0] in kwargs:
            kwargs = dict(kwargs)
            args = (kwargs.pop(self.names[0]),)
        if self.view_copies:
            paths = [self.path_in_call(path, args, kwargs) for path in self.view_copies]
            renewed = {path: current(get_at_path(args, kwargs, path)) for path in paths}
            args, kwargs = replace_at_paths(args, kwargs, renewed)
        if self.rewrite is not None:
            out = self.rewrite(*args, **kwargs)
            return mark_copies(out, func, args, kwargs) if self.result_is_view_copy else out
        given_args, given_kwargs = args, kwargs
        if self.targets:
            args, kwargs = self._move_operands(args, kwargs)
        with Local():
            out = (self.kernel or func)(*args, **kwargs)
        out = self.tag(out)
        copied = self.result_is_view_copy
        if self.may_copy:
            out, copied = copy_as_on_one_device(
                out, func, given_args, given_kwargs, copied or bool(self.view_copies)
            )
        return mark_copies(out, func, given_args, given_kwargs) if copied else out

    def _move_operands(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        new = {}
        for target in self.targets:
            path = self.path_in_call(target.path, args, kwargs)
            value = get_at_path(args, kwargs, path)
            if target.plain is None:
                if value._spec.is_pending and not target.spec.is_pending:
                    reduce_pending_gradients(pending_gradients((value,)))  # its owner's, for good
                new[path] = _move_once(value, target.spec, self.op)
            else:
                admit(value, self.wire, self.op, path, with_gradient=True)
                if value.requires_grad and torch.is_grad_enabled():
                    # Its gradient is to come back whole, as plain autograd goes on with it.
                    names = self.wire.mesh.names
                    whole = spec_of(Layout(tuple(value.shape), invariant=names), self.wire)
                    value = moved(value, whole, target.plain, self.op, "implicit")
                # An alias at least: an op may return its operand, and the user's is not re-tagged.
                new[path] = moved(value, target.plain, target.spec, self.op, "implicit")
        return replace_at_paths(args, kwargs, new)

    def path_in_call(self, path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> Path:
        """Where in this call stands what is at `path` in the call that the plan was made for."""
        return locate_in_call(path, self.names, args, kwargs)

    def tag(self, out: Any) -> Any:
        """Tag each new local tensor of a result with its spec.

        Raises:
            LayoutError: the results are not of the shapes, or as many, as the rule says.
        """
        if type(out) in PLAIN:
            if self.make_output_spec is not None:
                return tagged(out, self.make_output_spec(out))
            if self.spec is None:
                self._learn_output_specs((out,))
            if out.shape != self.local_shape:
                raise self._make_broken_plan_error(out, self.spec)
            return tagged(out, self.spec)  # type: ignore[arg-type]
        if isinstance(out, DTensor):
            self.direct = self._is_direct()  # in place: nothing is new
            if self.retags_operand:
                if self.spec is None:
                    with Local():
                        self._learn_output_specs((out,))
                out._spec = self.spec  # type: ignore[assignment]
            return out
        if self.outputs and (type(out) is tuple or type(out) is list):
            for t, (_, shape) in zip(out, self.outputs, strict=False):
                if type(t) not in PLAIN or t.shape != shape:
                    break
            else:
                for t, (spec, _) in zip(out, self.outputs, strict=False):
                    tagged(t, spec)
                return out
        news = [t for t in collect_tensors(out) if type(t) in PLAIN]
        if not news:
            return out
        if self.make_output_spec is not None:
            for t in news:
                tagged(t, self.make_output_spec(t))
            return out
        if not self.outputs:
            self._learn_output_specs(news)
        for t, (spec, shape) in zip(news, self.outputs, strict=True):
            if t.shape != shape:
                raise self._make_broken_plan_error(t, spec)
            tagged(t, spec)
        return out

    def _learn_output_specs(self, outs: Sequence[torch.Tensor]) -> None:
        """Set the results' specs from the choice of rows. Sizes that the sentence does not tell are
        those of this first result."""
        assert self.bound is not None and self.choice is not None
        if len(outs) != len(self.bound.outputs):
            raise LayoutError(
                f"{self.op} returned {len(outs)} tensors where its rule speaks of "
                f"{len(self.bound.outputs)}",
                place=user_line(),
                reason=f'rule "{self.bound.sentence}"',
            )
        specs = []
        for i, out in enumerate(outs):
            local = tuple(out.shape)
            if len(local) != len(self.bound.outputs[i]):
                raise self._make_broken_plan_error(out, None)
            layout = Layout(
                self.bound.output_shape(i, local),
                self.choice.outputs[i],
                self.choice.partial[i],
                self.choice.invariant[i],
            )
            spec = spec_of(layout, self.wire)
            if spec.local_shape != out.shape:
                raise self._make_broken_plan_error(out, spec)
            specs.append((spec, spec.local_shape))
        self.outputs = tuple(specs)  # one of them may come alone in a tuple too: x.chunk(1)
        if len(specs) == 1:
            self.spec, self.local_shape = specs[0]
        self.direct = self._is_direct()

    def _is_direct(self) -> bool:
        return not (
            self.targets
            or self.retags_operand
            or self.result_is_view_copy
            or self.may_copy
            or self.view_copies
            or self.rewrite
        )

    def _make_broken_plan_error(self, out: torch.Tensor, spec: Spec | None) -> LayoutError:
        promise = (
            "" if spec is None else f", not {tuple(spec.local_shape)} as {spec.layout.brief()}"
        )
        by_rule = "" if self.bound is None else f' by rule "{self.bound.sentence}"'
        return LayoutError(
            f"the plan for {self.op} does not hold: it made {tuple(out.shape)}{promise}",
            place=user_line(),
            reason=f"planned{by_rule}: the rule reads too little or says something wrong",
        )


def _move_once(x: DTensor, after: Spec, op: str) -> torch.Tensor:
    """`x` in layout `after`; a tensor that several ops need in the same other layout moves once.

    Only results no larger than `x` are kept (with `x`, until it is changed or gone): a gathered
    tensor must not outlive its use. Backward, too, the gradients meet before one transposed move.
    """
    before = x._spec
    with Local():
        if torch.is_inference_mode_enabled() or x.is_inference():  # changes are not counted
            return moved(x, before, after, op, "implicit")
    # The largest pieces are compared: whether to move must be the same question on every rank.
    if after.largest > before.largest or state_of(x).written_unseen:
        return moved(x, before, after, op, "implicit")
    graded = torch.is_grad_enabled()
    remembered, version = state_of(x).moved, (_version_of_tensor(x), graded)
    fits = remembered is not None and remembered.spec is after and remembered.version == version
    if (
        remembered is not None
        and fits
        and _version_of_tensor(remembered.value) == remembered.value_version
    ):
        return remembered.value
    # A view would hold `x`, which holds it: no one would ever let go of the two.
    value = moved(x, before, after, op, "implicit")
    with Local():
        value = value if value._base is None else alias_without_base(value)
    own_state(x).moved = MovedValue(
        after, (_version_of_tensor(x), graded), value, _version_of_tensor(value)
    )
    return value


def _version_of_tensor(x: torch.Tensor) -> int:
    with Local():
        return x._version


# -- work ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanWork:
    """The matrix products that calls of one plan compute on this rank.

    Attributes:
        products: of each its operations, and the axes along which every rank computes the same.
        kernel: of the plan while no ledger is open; None where the function itself runs.
        run: what runs, be it the kernel or the function.
    """

    op: str
    wire: Wire
    products: tuple[tuple[float, tuple[str, ...]], ...]
    kernel: Callable[..., Any] | None
    run: Callable[..., Any]

    def run_noting_work(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and note the products in the ledgers that are open."""
        scope = self.wire.scope
        if not scope.recomputing:
            place = user_line()
            for log in scope.work_ledgers:
                for operations, axes in self.products:
                    log.note_work(self.wire.rank, self.op, place, axes, operations)
        return self.run(*args, **kwargs)


def work_of_plan(
    op: str,
    wire: Wire,
    work: Sequence[Work],
    choice: Choice,
    kernel: Callable[..., Any] | None,
    run: Callable[..., Any],
) -> PlanWork:
    """The work of a call whose names are split as `choice` says.

    Args:
        kernel, run: as in `PlanWork`.
    """
    products = []
    for one in work:
        spread = {a for name in one.names for a in choice.splits.get(name, ())}
        repeated = [a for a in wire.mesh.names if a not in spread and wire.mesh.size(a) > 1]
        operations = one.operations / wire.mesh_size(tuple(spread))
        products.append((operations, tuple(repeated)))
    return PlanWork(op, wire, tuple(products), kernel, kernel or run)
