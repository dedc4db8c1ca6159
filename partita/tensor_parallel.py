"""torch's names for tensor parallelism over `pt.parallelize`.

    from partita.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

Two things differ. Activations stay DTensors with the global shape, so a model keeps its global
number of heads. A plain tensor counts as the global value, and the ranks check that it is equal on
all of them. A style may say that plain tensors are shards, as `input_layouts=Shard(0)` does. Then a
plain tensor is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import nn

from partita.comm import (
    find_context_mesh,
    find_root_mesh,
    init_mesh_of_all_ranks,
    sizes_of_mesh,
    user_line,
    wire_of,
)
from partita.layout import Fix, LayoutError, Replicate, Shard, own_placement
from partita.parallel.parallelize import Inputs, Outputs, parallelize
from partita.tensor.dtensor import DTensor

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]


class ParallelStyle:
    """The base class of styles, which parallelize one module. A subclass implements `_apply`."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Parallelizes `module` over a mesh of one dimension. In place; returns the module."""
        raise NotImplementedError(f"{type(self).__name__} has no _apply(module, device_mesh)")


class _Layouts(ParallelStyle):
    """A style that gives layouts to parameters, inputs and outputs."""

    def _list_parameters(self, module: nn.Module) -> dict[str, Any]:
        return {}

    def _list_boundaries(self, module: nn.Module, axis: str) -> list[Inputs | Outputs]:
        return []

    def _list_plain(self) -> _Plain:
        return _Plain()

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        (axis,) = _names_of(device_mesh)
        plan: dict[str, Any] = {
            name: {axis: placement} for name, placement in self._list_parameters(module).items()
        }
        whole = find_root_mesh(device_mesh)
        parallelize(module, whole, {k: v for k, v in plan.items() if _has_attribute(module, k)})
        boundaries = self._list_boundaries(module, axis)
        if boundaries:
            parallelize(module, whole, {"": boundaries})
        if wire_of(whole).mesh.size(axis) > 1:
            self._list_plain().register_hooks(module)
        return module


@dataclass(frozen=True)
class _Plain:
    """The placements that torch assumes for plain tensors at the boundary of a module."""

    inputs: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[Any] = ()

    def register_hooks(self, module: nn.Module) -> None:
        """Registers hooks of `module` that raise for plain tensors that are pieces in torch."""
        if any(_is_piece(p) for p in (*self.inputs, *self.named.values())):
            module.register_forward_pre_hook(self.check_inputs, prepend=True, with_kwargs=True)
        if any(map(_is_piece, self.outputs)):
            module.register_forward_hook(self.check_outputs, prepend=True)

    def check_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [*zip(args, self.inputs, strict=False)]
        given += [(kwargs.get(name), placement) for name, placement in self.named.items()]
        _refuse_pieces(f"an input of {type(module).__name__}", given)

    def check_outputs(self, module: nn.Module, args: Any, out: Any) -> None:
        each = out if isinstance(out, (tuple, list)) else [out]
        given = [*zip(each, self.outputs, strict=False)]
        _refuse_pieces(f"a result of {type(module).__name__}", given)


def _is_piece(placement: Any) -> bool:
    return placement is not None and not placement.is_replicate()


def _refuse_pieces(what: str, given: Sequence[tuple[Any, Any]]) -> None:
    for x, placement in given:
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and _is_piece(placement):
            raise LayoutError(
                f"{what} is a plain tensor, where the style says {placement!r}",
                place=user_line(),
                operands=(f"plain tensor of shape {tuple(x.shape)}",),
                reason="torch takes it for each rank's piece; here a plain tensor is a whole value",
                fixes=(
                    Fix(
                        f"pt.DTensor.from_local(x, mesh, [{placement!r}])", "each rank's own piece"
                    ),
                    Fix(f"pt.distribute_tensor(x, mesh, [{placement!r}])", "one whole value"),
                ),
            )


class _Linear(_Layouts):
    """A style of nn.Linear and nn.Embedding.

    Args:
        input_layouts: a DTensor has its own layout. If this is a Shard, a plain tensor is an error.
        output_layouts: the placement of the result. None: the style's default.
        use_local_output: ignored; the result is always a DTensor.
    """

    weight_of_linear: Shard
    weight_of_embedding: Shard
    bias: Any
    output: Any

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
    ):
        self.input_layouts = own_placement(input_layouts)
        self.output_layouts = own_placement(output_layouts)
        self.use_local_output = use_local_output

    def _list_plain(self) -> _Plain:
        return _Plain([self.input_layouts])

    def _list_parameters(self, module: nn.Module) -> dict[str, Any]:
        if isinstance(module, nn.Linear):
            return {"weight": self.weight_of_linear, "bias": self.bias}
        if isinstance(module, nn.Embedding):
            return {"weight": self.weight_of_embedding}
        raise NotImplementedError(
            f"{type(self).__name__} is for nn.Linear and nn.Embedding, not for "
            f"{type(module).__name__}; pt.parallelize takes a placement for each parameter"
        )

    def _input(self, module: nn.Module) -> Any:
        raise NotImplementedError

    def _list_boundaries(self, module: nn.Module, axis: str) -> list[Inputs | Outputs]:
        output = self.output if self.output_layouts is None else self.output_layouts
        return [Inputs({axis: self._input(module)}), Outputs({axis: output})]


class ColwiseParallel(_Linear):
    """Shards the output features: the weight is `Shard(0)`, or `Shard(1)` for an nn.Embedding.

    The input is redistributed to Replicate, and the output to `output_layouts`, by default
    `Shard(-1)`.

    Args:
        input_layouts: the placement of a plain tensor. If it is a Shard, a plain tensor raises an
            error.
        output_layouts: the placement of the output.
        use_local_output: ignored; the output is always a DTensor.
    """

    weight_of_linear, weight_of_embedding, bias = Shard(0), Shard(1), Shard(0)
    output = Shard(-1)

    def _input(self, module: nn.Module) -> Any:
        return Replicate()


class RowwiseParallel(_Linear):
    """Shards the input features: the weight is `Shard(1)`, or `Shard(0)` for an nn.Embedding.

    The input is redistributed to `Shard(-1)`, or to Replicate for an nn.Embedding. The output is
    redistributed to `output_layouts`, by default Replicate.

    Args:
        input_layouts: the placement of a plain tensor. If it is a Shard, a plain tensor raises an
            error.
        output_layouts: the placement of the output.
        use_local_output: ignored; the output is always a DTensor.
    """

    weight_of_linear, weight_of_embedding, bias = Shard(1), Shard(0), Replicate()
    output = Replicate()

    def _input(self, module: nn.Module) -> Any:
        return Replicate() if isinstance(module, nn.Embedding) else Shard(-1)


class SequenceParallel(_Layouts):
    """Computes a norm or a dropout on shards of the sequence, with Replicate parameters.

    Args:
        sequence_dim: the dimension of the input that is sharded.
        use_local_output: ignored; the result is always a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def _list_plain(self) -> _Plain:
        return _Plain([Shard(self.sequence_dim)])

    def _list_boundaries(self, module: nn.Module, axis: str) -> list[Inputs | Outputs]:
        return [Inputs({axis: Shard(self.sequence_dim)})]


class PrepareModuleInput(_Layouts):
    """Redistributes the inputs of a module.

    Args:
        input_layouts: used only for plain tensors, because a DTensor has its own layout. For a
            Shard, a plain tensor raises an error.
        input_kwarg_layouts: `input_layouts` for keyword arguments, by name.
        desired_input_layouts: a placement for each positional argument. None leaves it unchanged.
        desired_input_kwarg_layouts: maps the name of each keyword argument to its placement.
        use_local_output: ignored; the inputs are always DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_output: bool = False,
    ):
        _check_lengths(input_layouts, desired_input_layouts)
        _check_lengths(input_kwarg_layouts or {}, desired_input_kwarg_layouts or {})
        self.plain = _Plain(_make_list(input_layouts), _make_dict(input_kwarg_layouts))
        self.wanted = _make_list(desired_input_layouts)
        self.named = _make_dict(desired_input_kwarg_layouts)
        self.use_local_output = use_local_output

    def _list_plain(self) -> _Plain:
        return self.plain

    def _list_boundaries(self, module: nn.Module, axis: str) -> list[Inputs | Outputs]:
        each = [None if p is None else {axis: p} for p in self.wanted]
        return [Inputs(*each, **{k: {axis: p} for k, p in self.named.items()})]


class PrepareModuleOutput(_Layouts):
    """Redistributes the outputs of a module.

    Args:
        output_layouts: used only for plain tensors, because a DTensor has its own layout. For a
            Shard, a plain tensor raises an error.
        desired_output_layouts: a placement for each output. None leaves it unchanged.
        use_local_output: ignored; the outputs are always DTensors.
    """

    def __init__(
        self, *, output_layouts: Any, desired_output_layouts: Any, use_local_output: bool = True
    ):
        _check_lengths(output_layouts, desired_output_layouts)
        self.plain = _Plain(outputs=_make_list(output_layouts))
        self.wanted, self.use_local_output = _make_list(desired_output_layouts), use_local_output

    def _list_plain(self) -> _Plain:
        return self.plain

    def _list_boundaries(self, module: nn.Module, axis: str) -> list[Inputs | Outputs]:
        return [Outputs(*[None if p is None else {axis: p} for p in self.wanted])]


class PrepareModuleInputOutput(_Layouts):
    """Redistributes the inputs and the outputs of a module.

    The arguments are those of `PrepareModuleInput` and of `PrepareModuleOutput`.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: Any,
        desired_output_layouts: Any,
        use_local_output: bool = True,
    ):
        self.before = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
        )
        self.after = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts
        )
        self.use_local_output = use_local_output

    def _list_plain(self) -> _Plain:
        return replace(self.before.plain, outputs=self.after.plain.outputs)

    def _list_boundaries(self, module: nn.Module, axis: str) -> list[Inputs | Outputs]:
        before = self.before._list_boundaries(module, axis)
        return before + self.after._list_boundaries(module, axis)


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: ParallelStyle | str | Mapping[str, ParallelStyle | str] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Applies styles to `module`, or to modules in it, in place. Returns `module`.

    Every parameter and buffer of `module` becomes a DTensor: Replicate, if no style names it.

    Args:
        device_mesh: a mesh of one dimension, such as `mesh["tp"]`. None: the mesh of `with mesh:`
            around the call, or all ranks.
        parallelize_plan: a style for `module`, or styles by the names of modules in it. In a name
            each part between dots is an `fnmatch` pattern. A style may also be one of the strings
            that Hugging Face transformers uses in `config.base_model_tp_plan`.
        src_data_rank: the rank, in mesh order, whose values are sent to all others. None sends
            nothing: the caller guarantees equal values on all ranks.

    Raises:
        LayoutError: a mesh of several dimensions, or a name that no module has.
        ValueError: a string that names no style.
        NotImplementedError: a style that does not support the class of a module.
    """
    mesh = find_context_mesh() if device_mesh is None else device_mesh
    mesh = init_mesh_of_all_ranks() if mesh is None else mesh
    axes = _names_of(mesh)
    if len(axes) > 1:
        raise LayoutError(
            f"parallelize_module: the mesh has {len(axes)} dimensions: {' '.join(axes)}",
            place=user_line(),
            fixes=(Fix(f"parallelize_module(module, mesh[{axes[-1]!r}], plan)", "one of them"),),
        )
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    # A module that matches two names of the plan gets the same style only once.
    once = {
        (inner, style if isinstance(style, str) else id(style)): style
        for pattern, style in plan.items()
        if style is not None
        for inner in _find_modules(module, pattern)
    }
    found = [(inner, _make_style(style)) for (inner, _), style in once.items()]
    parallelize(module, find_root_mesh(mesh), src_data_rank=src_data_rank)
    for inner, style in found:
        style._apply(inner, mesh)
    wants_local = any(getattr(style, "use_local_output", False) for _, style in found)
    if wants_local and wire_of(find_root_mesh(mesh)).rank == 0:
        warn_of_global_shapes()
    return module


@cache
def warn_of_global_shapes() -> None:
    """Warns, once in a process, that `parallelize_module` returns DTensors, not local tensors."""
    warnings.warn(
        "parallelize_module: results stay DTensors of the global shape, also where "
        "use_local_output=True; keep the global number of heads in views",
        stacklevel=3,
    )


@contextmanager
def loss_parallel() -> Iterator[None]:
    """No effect: `F.cross_entropy` takes DTensor logits that are sharded over the classes."""
    yield


_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda **o: ColwiseParallel(output_layouts=Replicate(), **o),
    "colwise_gather_output": lambda **o: ColwiseParallel(output_layouts=Replicate(), **o),
    "rowwise": RowwiseParallel,
    "rowwise_rep": RowwiseParallel,
    "rowwise_split_input": RowwiseParallel,
    "embedding_rowwise": RowwiseParallel,
    "embedding_colwise": lambda **o: ColwiseParallel(output_layouts=Replicate(), **o),
    "sequence_parallel": SequenceParallel,
    "replicate": lambda **_: None,
    "replicated_with_grad_allreduce": lambda **_: None,
}
"""Styles by the strings of Hugging Face transformers."""


def list_plan(module: nn.Module, styles: Mapping[str, str], axis: str) -> dict[str, Any] | None:
    """Returns a plan for `pt.parallelize` from a tensor-parallel plan of Hugging Face transformers.

    It has the placements of parameters, and of the inputs and outputs of modules. Returns None if
    `styles` has an unknown style, or names a module that `module` lacks or that is neither
    nn.Linear nor nn.Embedding.

    Args:
        styles: maps a pattern of module names to a style's name, such as "colwise".
        axis: the mesh axis.
    """
    found: dict[str, Any] = {}
    try:
        for pattern, style in styles.items():
            made = _make_style(style)
            for inner in _find_modules(module, pattern):
                for name, placement in made._list_parameters(inner).items():
                    if _has_attribute(inner, name):
                        found[f"{pattern}.{name}"] = {axis: placement}
                found[pattern] = made._list_boundaries(inner, axis)
    except (ValueError, NotImplementedError, LayoutError):
        return None
    return found


def _make_style(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    if given not in _STYLES:
        raise ValueError(
            f"parallelize_module: unknown style {given!r}; it is one of {', '.join(_STYLES)}"
        )
    return _STYLES[given](use_local_output=False) or _Layouts()


def _names_of(mesh: Any) -> tuple[str, ...]:
    return (*(sizes_of_mesh(mesh) or wire_of(mesh).mesh.names),)  # wire_of refuses other objects


def _find_modules(module: nn.Module, pattern: str) -> list[nn.Module]:
    parts = pattern.split(".") if pattern else []
    found = [
        inner
        # A module that has two names is found by either.
        for name, inner in module.named_modules(remove_duplicate=False)
        if len(own := name.split(".") if name else []) == len(parts)
        and all(map(fnmatchcase, own, parts))
    ]
    if not found:
        raise LayoutError(
            f"parallelize_module: no module of {type(module).__name__} is called {pattern!r}",
            place=user_line(),
            fixes=(Fix("a name of module.named_modules()", "`*` matches one part between dots"),),
        )
    return list(dict.fromkeys(found))


def _has_attribute(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None


def _make_list(given: Any) -> list[Any]:
    each = given if isinstance(given, Sequence) else [] if given is None else [given]
    return [own_placement(p) for p in each]


def _make_dict(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: own_placement(p) for name, p in (given or {}).items()}


def _check_lengths(given: Any, wanted: Any) -> None:
    theirs, ours = _count_layouts(given), _count_layouts(wanted)
    if theirs and theirs != ours:
        raise ValueError(f"{theirs} layouts and {ours} desired ones: give one of each for a value")


def _count_layouts(given: Any) -> int:
    return len(given) if isinstance(given, (Mapping, Sequence)) else int(given is not None)
