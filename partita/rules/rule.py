"""Rules: how a sharding rule is registered for functions, and the local kernels that some rules
have.

A rule function gets only the arguments that it declares as parameters. The key under which its
plans are cached is computed from the same arguments, so a rule cannot depend on an argument that is
missing from the key. A `KernelRule` has its own kernel, for a rank that has a shard of a dimension,
or an empty one. Functions that many such kernels need are below.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from partita.layout import NEUTRAL_SHARE, Fix, LayoutError

from .sentence import Names, Sentence, SentenceError, parse

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Arg:
    """A tensor argument as a rule function gets it: its shape, and how it is sharded.

    Attributes:
        shape: the global shape, in elements.
        split: for each dimension the number of ranks over which it is split (1: whole).
        pending: True if the tensor is Partial on any mesh axis.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...] = ()
    pending: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def names(self) -> Names:
        """Names for the tensor's dimensions (`a b c ...`), to write the rule's sentence with."""
        return Names.of(len(self.shape))

    def is_split(self, dim: int | Sequence[int] | None = None) -> bool:
        """True if one of the dimensions `dim` is sharded over ranks; None means any dimension.

        False if the dimension has no elements: every rank then has the whole value, and torch's own
        kernel returns the right result for an empty input.
        """
        dims = self.names.dims(dim)
        if not self.split or any(self.shape[d] == 0 for d in dims):
            return False
        return any(self.split[d] > 1 for d in dims)


@dataclass(frozen=True)
class KernelCall:
    """A call for which a rule makes a local kernel: shapes, and this rank's shard.

    Attributes:
        run: the function that the user called.
        shapes: the global shape of each operand (None if absent or a number).
        outputs: this rank's local shape of each output; -1 for a size that only the kernel knows.
        pieces: for each dimension name that is split: `(offset, length, size)`, in elements, of
            this rank's piece in the whole dimension.
        share: `share(name, make)` returns the tensor that was stored under this name, if it is
            alive. Otherwise it calls `make`, and stores the result.
    """

    run: Kernel
    shapes: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[int, ...], ...]
    pieces: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    share: Callable[[tuple[Any, ...], Callable[[], Any]], Any] = lambda name, make: make()

    def is_split(self, *names: str) -> bool:
        """True if a dimension with one of these names is sharded in this call."""
        return any(n in self.pieces for n in names)


@dataclass(frozen=True)
class KernelRule:
    """A rule with its own local kernel, which a rank runs instead of the called function.

    Attributes:
        text: the sentence.
        local: a function of the `KernelCall`. It returns a kernel on plain local tensors, with the
            signature of the called function. None runs the function itself.
        keeps: the name of a dimension. If an axis splits it in the first operand, the chosen row
            (placements on that axis) splits it, too. This holds even if another row costs less.
        beyond: True if a captured step may run the kernel on padding, as if the padding were the
            next elements.
        work: the matrix products of an op whose sentence does not show them, in the notation of
            `work_of`.
    """

    text: str
    local: Callable[[KernelCall], Kernel | None] | None = None
    keeps: str = ""
    beyond: bool = False
    work: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decomposition:
    """A rule for an op that is written as calls of other ops.

    Attributes:
        run: a function of DTensors that is called with the op's arguments.
    """

    run: Kernel


@dataclass(frozen=True)
class LikeRule:
    """A rule for a new tensor whose values do not depend on the operand, such as `ones_like`.

    Attributes:
        shape: the global shape of the result. If it is the operand's, the result has the operand's
            layout, otherwise it is Replicate on all axes.
        pending: True if axes that are Partial in the operand stay Partial. This is for `new_empty`,
            whose memory is overwritten at once. With False they become Replicate, because a Partial
            tensor of ones would sum to the number of ranks.
        local: a function of the `KernelCall` that returns the local kernel. The call's `pieces` are
            named a, b, c, ... by dimension. None runs the function itself.
    """

    shape: tuple[int, ...]
    pending: bool = False
    local: Callable[[KernelCall], Kernel | None] | None = None


@dataclass(frozen=True)
class Rule:
    """The rule of a function: a sentence, or a function that returns one for given arguments.

    Attributes:
        name: the function's name.
        text: the sentence, if `derive` is None.
        derive: the rule function, and `params` its parameters.
        must_fit: True raises an error for a call that the rule does not fit. False gathers the
            call's operands.
    """

    name: str
    text: str = ""
    derive: Callable[..., str | KernelRule | Decomposition | LikeRule | None] | None = None
    params: tuple[inspect.Parameter, ...] = ()
    must_fit: bool = False

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rule for a call: calls the rule function with the arguments that it declares.

        Raises:
            LayoutError: see `check_given`.
        """
        assert self.derive is not None
        self.check_given(len(args), kwargs)
        return self.derive(*args, **kwargs)

    def check_given(self, count: int, names: Container[str]) -> None:
        """Raises LayoutError if a call lacks an argument that the rule function requires.

        Args:
            count: the number of declared arguments that the call passes by position.
            names: the names of the arguments that it passes by name.
        """
        for p in self.params[count:]:
            is_required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if is_required and p.name not in names:
                raise LayoutError(
                    f"{self.name}: its rule takes {p.name}, which this call does not pass",
                    reason="a rule has the parameters of its function, with their defaults",
                    fixes=(Fix(f"{p.name}=None", "or the function's own default, in the rule"),),
                )


RULES: dict[Callable[..., Any], Rule] = {}
"""Maps each function that has a rule to the rule.

Methods, in-place and foreach forms find their rule by name.
"""


ON_NEW_RULE: list[Callable[[], None]] = []
"""Functions to call after each new rule; they clear caches of rules."""


def store_rule(function: Callable[..., Any], rule: Rule) -> None:
    """Registers a rule for a function, and drops cached plans that were made without it."""
    RULES[function] = rule
    for forget in ON_NEW_RULE:
        forget()


def _name_of(function: Any) -> str:
    """Returns the name of a function; of a `torch.library.custom_op`, the name of its operator."""
    name = getattr(function, "__name__", None) or getattr(function, "_name", "")
    return str(name or function).removesuffix(".default")


def rule(*what: Any) -> Any:
    """Registers how an op computes with sharded operands.

    `pt.rule("... m k * ... k n -> ... m n", matmul)` gives one sentence to functions of torch, or
    to operators of `torch.library`. The terms of the sentence describe the first arguments, in
    order. An argument that is None or a number counts as absent.

    `@pt.rule(f)` decorates a function that returns the rule of `f` for given arguments. It may
    return a sentence, a `KernelRule`, a `Decomposition`, a `LikeRule`, or None. None means that
    there is no rule for these arguments; their operands are gathered. Its parameters have the same
    names and order as in `f`. It may omit any number of them at the end. A parameter that begins
    with an underscore is not read.

    If a sentence does not fit the number or shapes of the tensors in a call, the call raises
    `LayoutError`. To gather the operands of such calls instead, register a function that returns
    None.

    Raises:
        SentenceError: the sentence cannot be read. Or it does not fit an operator of
            `torch.library`: it has too many terms, lacks a term for a tensor that is always passed,
            or has a wrong number of results.
        LayoutError: an ordinary Python function: partita does not intercept calls of it.
    """
    for function in what:
        if isinstance(function, FunctionType):
            _refuse_python_function(function)
    return _register_rule(what, must_fit=True)


def _refuse_python_function(function: FunctionType) -> None:
    """Raise LayoutError if calls of a function do not reach partita, but only those within it."""
    own = inspect.unwrap(function)
    if own.__module__.split(".")[0] != "torch" and not _names_in(function) & _HANDLERS:
        name = function.__name__
        raise LayoutError(
            f"rule: {name} is an ordinary Python function",
            reason="partita uses the rules of the torch functions that it calls: a rule of its "
            "own would never be used",
            fixes=(
                Fix(f"torch.library.custom_op('mine::{name}', mutates_args=())", "around it"),
                Fix(f"pt.local_map({name}, ...)", "to run it on each rank's piece"),
            ),
        )


_HANDLERS = {"handle_torch_function", "has_torch_function", "has_torch_function_unary"}


def _names_in(function: FunctionType) -> set[str]:
    """Returns the names of globals that a function reads, and what it wraps."""
    found = set(function.__code__.co_names)
    inner = getattr(function, "__wrapped__", None)
    return found | (_names_in(inner) if isinstance(inner, FunctionType) else set())


def builtin_rule(*what: Any) -> Any:
    """Registers a rule of partita itself. It takes the same arguments as `rule`.

    If a call does not fit the sentence, there is no error: its operands are gathered.
    """
    return _register_rule(what, must_fit=False)


def read_signature(takes: str) -> inspect.Signature:
    """Makes a signature from a text such as `"input dim=-1"` or `"*tensors indexing=None"`."""
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for word in takes.split():
        name, given, default = word.partition("=")
        value = ast.literal_eval(default) if given else inspect.Parameter.empty
        own = inspect.Parameter.VAR_POSITIONAL if name.startswith("*") else kind
        parameters.append(inspect.Parameter(name.lstrip("*"), own, default=value))
        if name.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(parameters)


def rule_by_name(takes: str, *functions: Any) -> Callable[[Callable[..., Any]], None]:
    """Decorator: registers a rule function. It gets a call's arguments as one dict, by name.

    Use it for several functions whose sentences are similar, but whose parameters differ.

    Args:
        takes: the parameters, such as "input dim=-1".
        functions: the functions that get the rule.
    """
    signature = read_signature(takes)

    def register_derivation(derive: Callable[..., Any]) -> None:
        def derive_by_name(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return derive(given.arguments)

        derive_by_name.__signature__ = signature  # type: ignore[attr-defined]
        builtin_rule(*functions)(derive_by_name)

    return register_derivation


def decomposed(takes: str, *functions: Any) -> Callable[[Kernel], Kernel]:
    """Registers a decomposition: a function that replaces `functions`. A decorator.

    Args:
        takes: the parameters on which plans depend, such as "input dim=-1".
    """

    def register_decomposition(run: Kernel) -> Kernel:
        rule_by_name(takes, *functions)(lambda given: Decomposition(run))
        return run

    return register_decomposition


def dim_rule(takes: str, text: str, *functions: Any, split: Kernel | None = None) -> None:
    """Registers a sentence for functions that work along a dimension argument `dim` or `dims`.

        dim_rule("input dim=-1 keepdim=False", "{whole} -> {left}, {left}", torch.mode)

    Args:
        takes: the parameters, such as "input dim=-1".
        text: the sentence, with three placeholders:
            `{x}`: the names of the input's dimensions.
            `{whole}`: the same names, with `!` after the name of `dim`, which must not be sharded.
            `{left}`: the names of the result of a reduction over `dim` (`Names.without`).
        split: a function that replaces the given functions if dimension `dim` is sharded. The
            sentence is not used then.
    """

    @rule_by_name(takes, *functions)
    def derive_along_dim(given: dict[str, Any]) -> str | Decomposition:
        input, dim = given["input"], given.get("dim", given.get("dims"))
        if isinstance(dim, bool):  # `var(x, unbiased)`: in the position of `dim`
            dim = None
        if split is not None and input.is_split(dim):
            return Decomposition(split)
        names = input.names
        left = names.without(dim, given.get("keepdim", False))
        return text.format(x=names, whole=names.whole(dim), left=left)


def _register_rule(what: Sequence[Any], must_fit: bool) -> Any:
    if isinstance(what[0], str):
        text, functions = what[0], what[1:]
        for f in functions:
            if must_fit:
                _check_terms(parse(text), f)
            store_rule(f, Rule(_name_of(f), text, must_fit=must_fit))
        return None

    def register_derivation(derive: Callable[..., Any]) -> Callable[..., Any]:
        params = tuple(inspect.signature(derive).parameters.values())
        for f in what:
            store_rule(f, Rule(_name_of(f), derive=derive, params=params, must_fit=must_fit))
        return derive

    return register_derivation


def _check_terms(sentence: Sentence, function: Any) -> None:
    """Raise SentenceError if an operator of torch.library has other operands or results."""
    count, text = len(sentence.terms), sentence.text
    schema = getattr(getattr(function, "_opoverload", function), "_schema", None)
    if schema is None:
        return
    arguments = [f"{a.type} {a.name}" for a in schema.arguments]
    always = [i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"]
    if count > len(arguments) or (always and count <= always[-1]):
        terms = "1 term" if count == 1 else f"{count} terms"
        raise SentenceError(
            f"the rule {text!r} has {terms}, and {_name_of(function)} takes "
            f"({', '.join(arguments)}): a rule has a term for each argument up to its last tensor"
        )
    returns = [str(r.type) for r in schema.returns]
    if {*returns} == {"Tensor"} and len(returns) != len(sentence.outputs):
        raise SentenceError(
            f"the rule {text!r} has {len(sentence.outputs)} results, and {_name_of(function)} "
            f"gives {len(returns)}: a rule has a term for each, with a comma between two"
        )


# -- ops of our own --------------------------------------------------------------------------------


def own_op(run: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the function `run` an op with a rule of its own. A decorator."""

    @functools.wraps(run)
    def call_own_op(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(call_own_op, tensors, *args, **kwargs)
        return run(*args, **kwargs)

    return call_own_op


# -- kernels over pieces ---------------------------------------------------------------------------
# Kernels for a rank with a piece of a dimension, or an empty one. Indexing a split dimension is a
# contraction: each rank returns the elements that it has, and 0 for the others. Their sum is the
# value.


def index_in_piece(
    index: Any, piece: tuple[int, int, int], *, from_end: bool = False
) -> tuple[Any, Any]:
    """Converts indices into a whole dimension to indices into this rank's shard of it.

    An index that is out of range stays out of range, so that the kernel raises torch's error.

    Args:
        index: indices in the whole dimension: a number or a tensor.
        piece: `(offset, length, size)` of this rank's shard.
        from_end: True if negative indices count from the end.

    Returns:
        The index in the shard, and a mask of indices that are on other ranks.
    """
    offset, length, size = piece
    at = torch.where(index < 0, index + size, index) if from_end else index
    at = at - offset
    away = ((at < 0) | (at >= length)) & (at >= -offset) & (at < size - offset)
    return at.masked_fill(away, 0), away


def narrow_piece(x: Any, dim: int, offset: Any, length: int) -> Any:
    """Returns `length` elements of `x` along `dim`, beginning at `offset`.

    In a captured step `offset` is a tensor: ranks have different offsets, but the same graph. The
    elements are then selected by index.
    """
    if isinstance(offset, torch.Tensor):
        places = torch.arange(length, device=x.device) + offset.to(x.device)
        # In a capture, all pieces have the first one's length: a shorter one ends with padding.
        return x.index_select(dim, places.clamp(max=max(x.shape[dim] - 1, 0)))
    return x.narrow(dim, offset, length)


def make_connected_shares(input: Any, shape: Sequence[int]) -> Any:
    """Returns a share of zeros for a Partial sum, connected to `input` in autograd.

    So `input` gets a gradient of zeros, not None.

    Args:
        shape: the shape of the share.
    """
    out = input.new_full(shape, NEUTRAL_SHARE)
    return out - input.flatten()[:0].sum() if input.requires_grad else out


def empty_piece_kernel(name: str) -> Callable[[KernelCall], Kernel | None]:
    """Makes a rule's kernel function for an op that fails on an empty batch (first dimension).

    On a rank whose shard is empty, the kernel runs the op on one dummy row and drops the result.

    Args:
        name: the name of the first dimension in the sentence.
    """

    def make_empty_piece_kernel(call: KernelCall) -> Kernel | None:
        return (
            with_dummy_row(call.run) if call.is_split(name) and not call.pieces[name][1] else None
        )

    return make_empty_piece_kernel


def with_dummy_row(run: Kernel) -> Kernel:
    """Wraps a kernel for an input without rows: runs it on one dummy row, drops the result.

    Args:
        run: the kernel. Its first argument is the input.
    """

    def run_with_dummy_row(input: Any, *args: Any, **kwargs: Any) -> Any:
        one = torch.cat([input, input.new_zeros((1, *input.shape[1:]))])
        out = run(one, *args, **kwargs)
        return tuple(x[:0] for x in out) if isinstance(out, tuple) else out[:0]

    return run_with_dummy_row
