"""Functional calls: what replaces a single call in a graph that must not write in place.

Three kinds of calls are replaced: calls that write, calls over lists (`_foreach_*`, which become
one call for each tensor), and calls with a number that is known only when the graph runs. In the
graph such a number is a `Scalar`: a 0-d float64, int64 or bool tensor.

The replacement is traced once (`CallPattern`) and cached for calls with equal operator, numbers,
dtypes and number of dimensions (and shapes, if the pattern contains sizes). `functionalize` copies
it into the graph. The op of CTC loss, which has a result of unknown shape, is replaced while the
step is traced (`REPLACED`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from partita.comm.device import HOST, Device
from partita.graph.errors import UnsureOfWrites, not_captured
from partita.graph.fake_values import make_distinct
from partita.graph.graph_nodes import drop_unused, key_of_operands, lazy_graph_modules
from partita.layout import Fix
from partita.tensor.op_facts import facts_of

from .fakes import SCALAR_OPS, SCALAR_OPS_OF_INTS, is_symbolic

# -- scalars in the graph --------------------------------------------------------------------------

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Scalar:
    """A Python number that the graph computes, as a 0-d tensor: float64, int64 or bool."""

    tensor: torch.Tensor


# -- while a step is traced ------------------------------------------------------------------------


def replace_symbolic_numbers(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a call of `func`, with values for symbolic numbers if it needs them.

    Each value becomes a condition of the program. If a number has no value yet, an error is raised.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if not any(map(is_symbolic, leaves)) or _find_call(_base_op_name(func)):
        return args, kwargs
    found: tuple[Any, Any] = pytree.tree_unflatten(list(map(_value_of_number, leaves)), structure)
    return found


def with_exact_numbers(func: Any, args: Any, kwargs: Any, held: set[int]) -> tuple[Any, Any]:
    """Returns the arguments of an optimizer's call, with float64 in place of float32 scalars.

    A scalar tensor that the call makes becomes float64. A scalar that the optimizer keeps in
    float32 is converted to float64 when it is read, as `.item()` does. Values written into it are
    first rounded to float32.

    Args:
        func, args, kwargs: the ATen op of the call, and its arguments.
        held: the ids of the scalar tensors that the optimizer keeps as float32.
    """
    if func is _aten.scalar_tensor.default and kwargs["dtype"].is_floating_point:
        return args, dict(kwargs, dtype=torch.float64)
    if not any(id(t) in held for t in pytree.tree_leaves(args)):
        return args, kwargs

    def widen_held(t: Any) -> Any:
        return t.double() if id(t) in held else t

    def narrow_number(t: Any) -> Any:
        number = isinstance(t, torch.Tensor) and t.ndim == 0 and t.dtype is torch.float64
        return t.float() if number else t

    return pytree.tree_map(narrow_number if func._schema.is_mutable else widen_held, args), kwargs


def _value_of_number(leaf: Any) -> Any:
    if isinstance(leaf, torch.SymFloat):
        return float(leaf)
    if isinstance(leaf, torch.SymInt):
        return int(leaf)
    return bool(leaf) if isinstance(leaf, torch.SymBool) else leaf


def _base_op_name(func: Any) -> str:
    name: str = func._opname
    return name.removeprefix("_foreach_").removesuffix("_")


# -- arithmetic of Python --------------------------------------------------------------------------


_NAMES = {"_operator_abs": "abs", "_sym_sqrt": "sym_sqrt", "and_": "and", "or_": "or"}


def _name_of(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    return _NAMES.get(name, name)


def compute_scalar(target: Any, args: Sequence[Any], like: Any) -> Scalar:
    """Returns the result of Python arithmetic on numbers that are tensors in the graph.

    Args:
        target: the operation, such as `operator.add`.
        args: its operands: `Scalar`s and Python numbers.
        like: the value of the operation when it was traced.

    Raises:
        CaptureError: no tensor op gives Python's result.
    """
    name = _name_of(target)
    values = [*map(unwrap_scalar, args)]
    is_int = isinstance(like, (int, torch.SymInt))
    whole = all(isinstance(v, (int, torch.Tensor)) for v in values)
    compute = SCALAR_OPS.get(name)
    if compute is None and is_int and whole and _cannot_raise(name, values):
        compute = SCALAR_OPS_OF_INTS.get(name)
    if compute is None:
        raise not_captured(
            f"the step computes {name}(x) of a value that .item() returned",
            "the value is known only after the graph has run, and no tensor op gives Python's "
            "result",
            Fix("return x.item()", f"and take {name}(x) outside of the step"),
            place="",
        )
    exact = is_int or (whole and not any(map(_is_float, values)))
    dtype = torch.int64 if exact and name != "truediv" else torch.float64
    return Scalar(compute(*(_make_scalar_tensor(a, dtype) for a in args)))


def _cannot_raise(name: str, values: Sequence[Any]) -> bool:
    """True if Python does the operation on integers without an error, as tensors do."""
    if name in ("floordiv", "mod"):
        return isinstance(values[-1], int) and values[-1] != 0
    return "shift" not in name or (isinstance(values[-1], int) and 0 <= values[-1] < 63)


def unwrap_scalar(value: Any) -> Any:
    """Returns the 0-d tensor in `value` if it is a `Scalar`; other values unchanged."""
    return value.tensor if isinstance(value, Scalar) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _make_scalar_tensor(
    value: Any, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Returns a number or a `Scalar` as a 0-d tensor.

    Args:
        device: where to put it; None for the tensor's own device.
    """
    if isinstance(value, Scalar):
        return value.tensor.to(device=device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)


def has_scalars(args: Any, kwargs: Any) -> bool:
    """True if one of the arguments `args`, `kwargs` is a `Scalar`, or a list that contains one."""
    return any(
        isinstance(a, Scalar)
        or (isinstance(a, (list, tuple)) and any(type(v) is Scalar for v in a))
        for a in (*args, *kwargs.values())
    )


# -- calls -----------------------------------------------------------------------------------------


_SUMS = ("add", "sub", "rsub")


def takes_number_exactly(node: fx.Node) -> bool:
    """True if the call of `node` gives equal bits with a 0-d tensor in place of its number."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return _name_of(node.target) in ("add", "sub", "mul", "truediv", "neg", "pos")
    values: list[Any] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    if any(_is_reduced(v) and not v.dim() for v in values):  # the number is rounded to its dtype
        return False
    is_sum = _base_op_name(node.target) in _SUMS
    factor = (*node.args[2:3], node.kwargs.get("alpha", 1)) if is_sum else ()
    is_exact = facts_of(node.target).exact_in_numbers
    return is_exact and all(not isinstance(a, fx.Node) and a == 1 for a in factor)


def call_with_scalars(name: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """Returns the result of an ATen op whose arguments contain `Scalar`s (numbers as tensors).

    Args:
        name: the name of the op in `torch.ops.aten`.
        args, kwargs: the arguments.
        like: the value that the call had when it was traced.
    """
    base = name.removesuffix("_")
    run = _find_call(base)
    assert run is not None
    out = run(base, args, kwargs, like)
    if isinstance(out, Scalar):
        return out
    if name.endswith("_"):
        return args[0].copy_(out)
    if isinstance(like, torch.Tensor) and out.dtype != like.dtype:
        out = out.to(like.dtype)
    return out


def _promote_scalar(value: Any, *others: Any) -> Any:
    """Returns a `Scalar` as a tensor that promotes dtypes of `others` as a Python number does."""
    if not isinstance(value, Scalar):
        return value
    t = value.tensor
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    wide = [x for x in tensors if x.dim()]
    if any(x.dtype.is_floating_point or x.dtype.is_complex for x in wide) or not tensors:
        return t  # a zero-dimensional float tensor does not promote them
    kinds = {torch.float64: 1.0, torch.int64: 1, torch.bool: True}
    found = tensors[0]
    for x in tensors[1:]:
        if torch.promote_types(found.dtype, x.dtype) != found.dtype:
            found = x
    return t.to(torch.result_type(found, kinds[t.dtype]))


def _run_elementwise(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    return getattr(_aten, base)(*[_promote_scalar(a, *args) for a in args], **kwargs)


_REDUCED = (torch.bfloat16, torch.float16)


def _as_kernels(*values: Any) -> tuple[Any, ...]:
    """Returns operands of reduced precision as float32, as kernels do, which round at their end."""
    return tuple(v.float() if _is_reduced(v) else v for v in values)


def _is_reduced(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _REDUCED


def _run_add(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    x, y = args[:2]
    alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
    x, y = _promote_scalar(x, y), _promote_scalar(y, x)
    if base == "rsub":
        x, y = y, x
    if isinstance(alpha, Scalar) or alpha != 1:
        if isinstance(y, torch.Tensor):  # alpha * y has the dtype of the sum
            y = y.to(torch.result_type(x, y))
        if _is_reduced(y) and Device(y.device.type).rounds_factors and isinstance(alpha, Scalar):
            alpha = Scalar(alpha.tensor.to(y.dtype))  # that device's kernels round it
        x, y = _as_kernels(x, y)
        y = y * _promote_scalar(alpha, y)
    return _aten.add(x, y) if base == "add" else _aten.sub(x, y)


def _add_product(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    x, one, other = args[:3]
    value = args[3] if len(args) > 3 else kwargs["value"]
    one, other = (y.to(torch.promote_types(x.dtype, y.dtype)) for y in (one, other))
    x, one, other = _as_kernels(x, one, other)
    made = one * _promote_scalar(value, one)
    return x + (made * other if base == "addcmul" else made / other)


def _run_lerp(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    *given, weight = args
    x, end = _as_kernels(*given)
    return _aten.lerp(x, end, weight.tensor.to(x.device, x.dtype))


def _run_clamp(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    x, *bounds = args
    low = bounds[0] if bounds else kwargs.get("min")
    high = bounds[1] if len(bounds) > 1 else kwargs.get("max")
    if base == "clamp_max":
        low, high = None, low if bounds else kwargs["max"]
    for bound, call in ((low, _aten.clamp_min), (high, _aten.clamp_max)):
        if bound is not None:
            x = call(x, _promote_scalar(bound, x))
    return x


def _run_where(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    condition, *values = args
    made = [
        v if isinstance(v, torch.Tensor) else _make_scalar_tensor(v, like.dtype, condition.device)
        for v in values
    ]
    return _aten.where(condition, *made)


def _run_fill(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    *given, value = args
    return getattr(_aten, base)(*given, value.tensor.to(given[0].device, given[0].dtype))


def _run_full_like(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Any:
    value = next(a for a in (*args, *kwargs.values()) if isinstance(a, Scalar))
    made = _make_scalar_tensor(value, like.dtype, like.device)
    return made.expand(like.shape).clone(memory_format=torch.contiguous_format)


def _read_scalar(base: str, args: Sequence[Any], kwargs: dict[str, Any], like: Any) -> Scalar:
    (x,) = args
    if x.dtype.is_floating_point:
        dtype = torch.float64
    else:
        dtype = torch.bool if x.dtype is torch.bool else torch.int64
    return Scalar(x.reshape(()).to(HOST, dtype))


_RunCall = Callable[[str, Sequence[Any], dict[str, Any], Any], Any]

_CALLS: dict[str, _RunCall] = {
    **dict.fromkeys(_SUMS, _run_add),
    **dict.fromkeys(("addcmul", "addcdiv"), _add_product),
    "lerp": _run_lerp,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _run_clamp),
    "where": _run_where,
    **dict.fromkeys(("fill", "masked_fill", "index_fill"), _run_fill),
    **dict.fromkeys(("full", "full_like", "new_full", "scalar_tensor"), _run_full_like),
    "_local_scalar_dense": _read_scalar,
}
"""Maps an op that takes a tensor in place of a number to the call; others are elementwise."""


@lru_cache
def _find_call(base: str) -> _RunCall | None:
    """Returns the function that calls an op with a tensor in place of a number, or None."""
    packet = getattr(_aten, base, None)
    if base in _CALLS or packet is None:
        return _CALLS.get(base)
    is_able = facts_of(getattr(packet, packet.overloads()[0])).takes_number_as_tensor
    return _run_elementwise if is_able else None


@lru_cache(maxsize=4096)
def takes_number(name: str) -> bool:
    """True if a graph may call the torch function `name` with a 0-d tensor for a Python number.

    `name` may be that of a method, such as "__radd__".
    """
    base = name.strip("_")
    return any(
        _find_call(n) is not None for n in (base, base.removeprefix("r"), _WORDS.get(base, base))
    )


_WORDS = {"truediv": "div", "rtruediv": "div", "floordiv": "floor_divide", "mod": "remainder"}


# -- patterns --------------------------------------------------------------------------------------

_PATTERNS_KEPT = 4096


@dataclass(frozen=True, eq=False)
class CallPattern:
    """The calls without in-place writes that replace one kind of call; traced once and cached.

    Attributes:
        operands: the input nodes for the tensor operands of the original call, in order.
        calls: the nodes of the replacing calls.
        gives: the result of the original call: a tree of nodes, and of `Scalar`s that contain
            nodes.
        writes: maps the index of each operand that the original call writes to the node of its
            new value.
    """

    operands: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    gives: Any
    writes: dict[int, fx.Node]


_patterns: dict[Any, CallPattern] = {}


def pattern_of(
    call: Callable[..., Any], what: Any, args: Any, kwargs: Any, like: Any, mode: Any
) -> CallPattern:
    """Returns the calls without in-place writes that replace a call: from a cache, or newly traced.

    Args:
        call: runs the call without writes, over fake tensors.
        what: identifies `call` in the cache.
        args, kwargs: the arguments of the call.
        like: the value of the call during capture.
        mode: the mode of the fake tensors.

    Raises:
        UnsureOfWrites: a pattern cannot express the trace of the call.
    """
    shapes, kinds = ((what, key) for key in _keys_of_call((args, kwargs, like)))
    found = _patterns.get(kinds) or _patterns.get(shapes)
    if found is None:
        found = _trace_pattern(call, args, kwargs, like, mode)
        if len(_patterns) >= _PATTERNS_KEPT:
            _patterns.clear()
        _patterns[kinds if _is_general(found, args, kwargs) else shapes] = found
    return found


def _trace_pattern(
    call: Callable[..., Any], args: Any, kwargs: Any, like: Any, mode: Any
) -> CallPattern:
    leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_scalar)
    places = [i for i, leaf in enumerate(leaves) if isinstance(unwrap_scalar(leaf), torch.Tensor)]
    trees: list[Any] = []

    def run(*operands: torch.Tensor) -> list[torch.Tensor]:
        given = list(leaves)
        for i, operand in zip(places, operands, strict=True):
            given[i] = Scalar(operand) if _is_scalar(leaves[i]) else operand
        found = call(*pytree.tree_unflatten(given, structure), like)
        flat, tree = pytree.tree_flatten(found, is_leaf=_is_scalar)
        if not all(t is None or isinstance(unwrap_scalar(t), torch.Tensor) for t in flat):
            raise UnsureOfWrites
        trees[:] = [tree, [type(t) for t in flat]]
        return [unwrap_scalar(t) for t in flat if t is not None]

    with mode:
        operands = [_without_memory(unwrap_scalar(leaves[i])) for i in places]
        made = trace_functional(run, operands)
    return _pattern_of_graph(made.graph, *trees)


def trace_functional(run: Callable[..., Any], values: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Returns the graph of `run` over the fakes `values`, traced by torch's functionalization.

    The graph has an input for each value. The tracer identifies an input by its fake tensor. Equal
    calls share one fake, so a fake that occurs twice among the values is replaced by a copy.
    """
    known: set[int] = set()
    distinct = [make_distinct(t, known) for t in values]
    with torch.no_grad(), lazy_graph_modules():
        return make_fx(functionalize(run, remove="mutations"))(*distinct)


def _pattern_of_graph(graph: fx.Graph, tree: Any, kinds: list[type]) -> CallPattern:
    """Returns the pattern of a traced graph.

    Args:
        tree: the structure of the call's value.
        kinds: the type of each leaf: a tensor, `Scalar` or NoneType.
    """
    drop_unused(graph)
    operands = tuple(graph.find_nodes(op="placeholder"))
    writes: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        if node.args[0] in operands:
            writes[operands.index(node.args[0])] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    calls = tuple(n for n in graph.nodes if n.op not in ("placeholder", "output"))
    if any(n.op != "call_function" or facts_of(n.target).writes for n in calls):
        raise UnsureOfWrites
    for node in (*operands, *calls):
        node.meta.clear()  # a pattern outlives the fake tensors of its trace
    (end,) = graph.find_nodes(op="output")
    values = iter(end.args[0])
    flat: list[Any] = [None if kind is type(None) else next(values) for kind in kinds]
    flat = [Scalar(v) if kind is Scalar else v for v, kind in zip(flat, kinds, strict=True)]
    return CallPattern(operands, calls, pytree.tree_unflatten(flat, tree), writes)


def _is_general(pattern: CallPattern, args: Any, kwargs: Any) -> bool:
    """True if a pattern holds for other shapes.

    False if it draws random numbers, or contains numbers that may be sizes.
    """
    given = {(type(v), v) for v in pytree.tree_leaves((args, kwargs)) if _is_number(v)}
    for call in pattern.calls:
        if facts_of(call.target).draws:
            return False
        for part in pytree.tree_leaves((call.args, call.kwargs), is_leaf=_is_list_of_numbers):
            if isinstance(part, (list, tuple)):
                return False
            if _is_number(part) and (type(part), part) not in given:
                return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(map(_is_number, value))


def _is_scalar(value: Any) -> bool:
    return type(value) is Scalar


def _without_memory(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


# -- keys of patterns ------------------------------------------------------------------------------


def _keys_of_call(values: Any) -> tuple[Any, Any]:
    """Returns two keys of a call's arguments and value: with the shapes of tensors, and without."""
    leaves, structure = pytree.tree_flatten(values, is_leaf=_is_scalar)
    exact, rough = list[Any](), list[Any]()
    for leaf in leaves:
        value = unwrap_scalar(leaf)
        if isinstance(value, torch.Tensor):
            kind = type(leaf) is Scalar, value.dtype, value.device
            exact.append((kind, tuple(value.shape), value.stride()))
            rough.append((kind, value.dim()))
        else:  # 0.0 and -0.0 differ; a symbolic number has no value
            value = value if is_symbolic(value) else key_of_operands(value)
            key = type(value), type(leaf), None if is_symbolic(leaf) else value
            exact.append(key)
            rough.append(key)
    return (structure, *exact), (structure, *rough)


# -- single calls ----------------------------------------------------------------------------------


def changes_without_writes(target: Any, args: Any, kwargs: Any) -> bool:
    """True if a call must be replaced in a graph without in-place writes.

    For calls over lists see `calls_of_list`.
    """
    name = getattr(target, "_opname", "")
    if name == "_local_scalar_dense" or has_scalars(args, kwargs) or name.endswith("_"):
        return True
    return target is _aten.native_batch_norm.default and args[3] is not None and bool(args[5])


def call_without_writes(target: Any, args: Any, kwargs: Any, like: Any) -> Any:
    """Returns a traced call's result, run in a form that torch's functionalization can handle.

    Args:
        target, args, kwargs: the op or function of the call, and its arguments.
        like: the value that the call had when it was traced.
    """
    name = getattr(target, "_opname", "")
    if name == "_local_scalar_dense" or has_scalars(args, kwargs):
        if not name:
            return compute_scalar(target, args, like)
        return call_with_scalars(name, args, kwargs, like)
    if target is _aten.native_batch_norm.default:
        # Its schema does not declare that it writes the running statistics; this variant's does.
        return _aten._native_batch_norm_legit.default(*args, **kwargs)
    drawn = _draw_in_place(target, args, kwargs) if name.endswith("_") else None
    return target(*args, **kwargs) if drawn is None else drawn


CallInList = tuple[str, list[Any], dict[str, Any], Any]


def calls_of_list(target: Any, args: Any, kwargs: Any, made: Any) -> Iterator[CallInList]:
    """Splits a call over lists (`_foreach_*`) into one call for each position.

    Args:
        target, args, kwargs: the op of the call, and its arguments.
        made: the list that the call returned when it was traced.

    Yields:
        The arguments of `call_in_list`: name, args, kwargs, and the value when traced.
    """
    name = target._opname.removeprefix("_foreach_")
    if target._overloadname.startswith("Scalar"):  # for tensor operands these have other names
        name = name.replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    if name == "norm" and len(args) > 2:
        args, kwargs = args[:2], dict(kwargs, dtype=args[2])
    if name.startswith(("addcmul", "addcdiv")) and len(args) > 3:
        args, kwargs = args[:3], dict(kwargs, value=args[3])
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]

    def item_at(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    for i in range(len(lists[0])):
        yield (
            name,
            [item_at(a, i) for a in args],
            {k: item_at(v, i) for k, v in kwargs.items()},
            item_at(made, i),
        )


def call_in_list(name: str, args: list[Any], kwargs: dict[str, Any], like: Any) -> Any:
    """Makes one of the single calls that `calls_of_list` yields, and returns its result."""
    if has_scalars(args, kwargs):
        return call_with_scalars(name, args, kwargs, like)
    return _find_single_op(name)(*args, **kwargs)


def _find_single_op(name: str) -> Any:
    if name == "norm":
        return torch.ops.aten.linalg_vector_norm
    if hasattr(torch.ops.aten, name):
        return getattr(torch.ops.aten, name)
    made = getattr(torch.ops.aten, name.removesuffix("_"))  # some have no in-place form
    return lambda x, *args, **kwargs: x.copy_(made(x, *args, **kwargs))


# -- inputs ----------------------------------------------------------------------------------------


def value_of_input(value: Any) -> torch.Tensor:
    """Returns the fake tensor of an input; for a Python number a 0-d float64 tensor.

    With it a graph is traced without in-place writes.
    """
    if is_symbolic(value):
        return torch.empty((), dtype=torch.float64)
    found: torch.Tensor = value
    return found


# -- random numbers --------------------------------------------------------------------------------

_library = torch.library.Library("partita", "FRAGMENT")
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides)


def _without_gaps(like: torch.Tensor) -> torch.Tensor:
    """Returns an empty dense tensor with the same memory order of dimensions as `like`."""
    order = sorted(range(like.dim()), key=lambda d: -like.stride(d))  # type: ignore[operator]
    return torch.empty_permuted(like.shape, order, dtype=like.dtype, device=like.device)


def _make_empty_draw(like: torch.Tensor, p: float) -> torch.Tensor:
    return _without_gaps(like)


def _draw_bernoulli(like: torch.Tensor, p: float) -> torch.Tensor:
    """Returns ones with probability `p`, else zeros, in the memory order of `like`."""
    return _without_gaps(like).bernoulli_(p)


_library.define("bernoulli_like(Tensor like, float p) -> Tensor", tags=_TAGS)
_library.impl("bernoulli_like", _draw_bernoulli, "CompositeExplicitAutograd")
torch.library.register_fake("partita::bernoulli_like", _make_empty_draw, lib=_library)


def _draw_in_place(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Draws random numbers in place, in the order in which eager fills memory.

    Eager fills memory in storage order, torch's out-of-place forms in the order of elements. For
    memory with gaps, as of a slice, these forms also declare strides that Inductor does not use.

    Returns:
        The filled tensor; None if `func` draws nothing, or needs no special treatment.
    """
    if not facts_of(func).fills or args[0].is_contiguous():
        return None
    x, *rest = args
    if func is _aten.bernoulli_.float and not kwargs:
        drawn = torch.ops.partita.bernoulli_like(x, *(rest or (0.5,)))
    else:
        drawn = _without_gaps(x)
        if drawn.stride() == x.stride():
            return None
        func(drawn, *rest, **kwargs)
    found: torch.Tensor = x.copy_(drawn)
    return found


# -- CTC loss --------------------------------------------------------------------------------------

# torch's op returns a table for backward whose size depends on the longest target. Here backward
# computes it again, so that no node has it as its value.


def _compute_loss(log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns the loss of each sequence."""
    loss: torch.Tensor = _aten._ctc_loss(log_probs, *args)[0]
    return loss


def _compute_gradient(grad: torch.Tensor, log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    """Returns the gradient of `log_probs`, from the gradient of each sequence's loss (`grad`)."""
    *operands, blank, zero_infinity = args
    made = _aten._ctc_loss(log_probs, *args)
    given = (grad, log_probs, *operands, *made, blank, zero_infinity)
    found: torch.Tensor = _aten._ctc_loss_backward(*given)
    return found


def _shape_of_loss(log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _shape_of_gradient(grad: torch.Tensor, log_probs: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _define_operators(kind: str, overload: str) -> tuple[Any, Any]:
    operands = f"Tensor log_probs, Tensor targets, {kind} input_lengths, {kind} target_lengths"
    found = []
    for name, first, run, shape in (
        ("ctc_loss", "", _compute_loss, _shape_of_loss),
        ("ctc_gradient", "Tensor grad, ", _compute_gradient, _shape_of_gradient),
    ):
        full = f"{name}.{overload}"
        _library.define(f"{full}({first}{operands}, int blank, bool zero_infinity) -> Tensor")
        _library.impl(full, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"partita::{full}", shape, lib=_library)
        found.append(getattr(getattr(torch.ops.partita, name), overload))
    return found[0], found[1]


def _make_replacements(loss: Any, gradient: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns replacements of torch's loss op and of its backward op, with their signatures."""

    def forward(*args: Any, blank: int = 0, zero_infinity: bool = False) -> Any:
        given = (*args, *(blank, zero_infinity)[len(args) - 4 :])
        return loss(*given), args[0].new_empty(0)

    def backward(*args: Any, zero_infinity: bool = False) -> Any:
        grad, log_probs, targets, of_inputs, of_targets, _, _, blank, *last = args
        given = (log_probs, targets, of_inputs, of_targets, blank, *(last or [zero_infinity]))
        return gradient(grad, *given)

    return forward, backward


REPLACED: dict[Any, Callable[..., Any]] = {}
"""Maps an op to the function that is called in its place while a step is captured."""

for _kind, _overload in (("int[]", "default"), ("Tensor", "Tensor")):
    _name = "ints" if _overload == "default" else "tensors"
    _forward, _backward = _make_replacements(*_define_operators(_kind, _name))
    REPLACED[getattr(_aten._ctc_loss, _overload)] = _forward
    REPLACED[getattr(_aten._ctc_loss_backward, _overload)] = _backward
