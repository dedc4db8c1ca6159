"""Rules of pointwise ops, with the operands in which they are linear, of casts, and of new
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import Arg, Decomposition, Kernel, KernelCall, LikeRule, decomposed
from ..rule import builtin_rule as rule

LINEAR_UNARY = """neg positive clone detach contiguous alias conj conj_physical resolve_conj
    resolve_neg real imag deg2rad rad2deg zero_ float double half bfloat16 cfloat cdouble chalf
    dropout cpu cuda"""

UNARY = """abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc
    erfinv exp exp2 expm1 floor frac i0 isfinite isinf isnan isneginf isposinf isreal lgamma log
    log10 log1p log2 logit logical_not mvlgamma nan_to_num reciprocal round rsqrt sgn sigmoid sign
    signbit sin sinc sinh sqrt square tan tanh trunc
    bool byte char short int long fill
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logsigmoid mish
    relu relu6 selu silu softplus softshrink softsign tanhshrink threshold"""

SPECIAL_UNARY = """airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 digamma entr erf erfc erfcx
    erfinv exp2 expit expm1 gammaln i0 i0e i1 i1e log1p log_ndtr logit modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtr ndtri psi round
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 sinc spherical_bessel_j0 multigammaln"""

BINARY = """atan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    clamp_min clamp_max copysign eq float_power floor_divide fmax fmin fmod gcd ge gt heaviside
    hypot igamma igammac isclose lcm le logaddexp logaddexp2 logical_and logical_or logical_xor lt
    maximum minimum ne nextafter polar pow remainder xlogy"""

SPECIAL_BINARY = """xlog1py xlogy zeta gammainc gammaincc logaddexp chebyshev_polynomial_t
    chebyshev_polynomial_u hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
    legendre_polynomial_p"""

HOMES = (torch, torch.Tensor, F, torch._C._nn)


def _register_sentence(text: str, names: str, *homes: Any) -> None:
    """Register `text` for the function of each name in the first of `homes` that has it."""
    for name in names.split():
        for home in homes or HOMES:
            if callable(f := getattr(home, name, None)):
                rule(text, f)
                break


_register_sentence("+ ... -> ...", LINEAR_UNARY)
_register_sentence("... -> ...", UNARY)
_register_sentence("... -> ...", SPECIAL_UNARY, torch.special)
_register_sentence("..., ... -> ...", BINARY)
_register_sentence("..., ... -> ...", SPECIAL_BINARY, torch.special)

rule("... + ... -> ...", torch.add, torch.sub, torch.rsub, torch.complex)
rule("... * ... -> ...", torch.mul)
rule("+ ..., ... -> ...", torch.ldexp)
rule("..., ..., ... -> ...", torch.clamp)
rule("... + [...] * ... -> ...", torch.masked_fill)
rule("... + ... * ... -> ...", torch.addcmul)
rule("... + ... * [...] -> ...", torch.addcdiv)
rule("... + ..., ... -> ...", torch.lerp)
rule("... -> ..., ...", torch.frexp)
rule("+ ... -> ... c=2!", torch.view_as_real)
rule("+ ... c! -> ...", torch.view_as_complex)


def _terms_of_operands(*operands: Any) -> list[str]:
    return ["..." for x in operands if isinstance(x, Arg)]


@rule(torch.div)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> str:
    linear = rounding_mode is None and isinstance(input, Arg)
    return f"{'+ ' * linear}{', '.join(_terms_of_operands(input, other))} -> ..."


@rule(torch.where)
def where(condition: Any, input: Any = None, other: Any = None) -> str | None:
    if input is None or other is None:
        return None  # where(condition) is nonzero: how much it returns depends on the values
    if isinstance(condition, Arg) and isinstance(input, Arg) and isinstance(other, Arg):
        return "..., ... + ... -> ..."
    return f"{', '.join(_terms_of_operands(condition, input, other))} -> ..."


@rule(torch.Tensor.where)
def where_method(input: Any, condition: Any, other: Any) -> str:
    if isinstance(other, Arg):
        return "... + [...] * ... -> ..."
    return f"{', '.join(_terms_of_operands(input, condition, other))} -> ..."


@rule(torch.polygamma, torch.special.polygamma)
def polygamma(n: Any, input: Any) -> str:
    return "... -> ..."  # torch.polygamma(n, x), but x.polygamma(n)


@rule(torch.prelu)
def prelu(input: Arg, weight: Arg) -> str:
    if weight.ndim == 0 or weight.shape[0] == 1:
        return f"{input.names}, {'1' * weight.ndim} -> {input.names}"
    return f"{input.names}, {input.names[1]} -> {input.names}"


@decomposed("input other", torch.equal)
def equal(x: Any, y: Any) -> bool:
    return x.shape == y.shape and bool((x == y).all())


@decomposed("input other", torch.allclose)
def allclose(x: Any, y: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(x, y, *args, **kwargs).all())


# -- casts -----------------------------------------------------------------------------------------


def is_linear_cast(dtype: Any) -> bool:
    """True if a cast to `dtype` may be applied to each addend of a Partial value.

    None means no cast.
    """
    return dtype is None or dtype.is_floating_point or dtype.is_complex


@rule(torch.Tensor.to)
def to(input: Arg, *args: Any, dtype: Any = None, other: Any = None) -> str | Decomposition:
    if isinstance(other, Arg) or any(isinstance(a, Arg) for a in args):
        return Decomposition(_to_other)
    dtypes = [a for a in (*args, dtype) if isinstance(a, torch.dtype)]
    return "+ ... -> ..." if all(map(is_linear_cast, dtypes)) else "... -> ..."


def _to_other(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    # Only the dtype of `other` is read, so it need not move.
    return input.to(other.dtype, *args, **kwargs)


@decomposed("input other", torch.Tensor.type_as)
def type_as(input: Any, other: Any) -> Any:
    return input.to(other.dtype)


@rule(torch.Tensor.type)
def cast(input: Arg, dtype: Any = None) -> str | None:
    if isinstance(dtype, torch.dtype) and is_linear_cast(dtype):
        return "+ ... -> ..."
    return "... -> ..." if isinstance(dtype, torch.dtype | str) else None


# -- new tensors in the layout of another ----------------------------------------------------------


def _register_like(*functions: Kernel, pending: bool = False) -> None:
    def derive(input: Arg) -> LikeRule:
        return LikeRule(input.shape, pending)

    rule(*functions)(derive)


_register_like(torch.zeros_like, torch.ones_like, torch.full_like)
_register_like(torch.empty_like, pending=True)


def _make_kernel_factory(rest: int) -> Callable[[KernelCall], Kernel]:
    """Returns a factory of kernels that call `run(input, local shape, ...)`.

    The arguments after the shape begin at index `rest`.
    """

    def local(call: KernelCall) -> Kernel:
        def allocate_local(input: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("size", None)
            # As a list, because torch takes an empty tuple for no size.
            return call.run(input, list(call.outputs[0]), *args[rest:], **kwargs)

        return allocate_local

    return local


def _register_new(*functions: Kernel, pending: bool = False) -> None:
    def derive(input: Arg, *sizes: Any, size: Any = None) -> LikeRule:
        size = sizes if size is None else (size,)
        one = len(size) >= 1 and isinstance(size[0], list | tuple)
        shape = tuple(size[0]) if one else tuple(n for n in size if type(n) is int)
        # Whether the sizes came one by one or as one tuple: nothing positional follows them.
        return LikeRule(shape, pending, _make_kernel_factory(len(shape) + 1))

    rule(*functions)(derive)


_register_new(torch.Tensor.new_zeros, torch.Tensor.new_ones)
_register_new(torch.Tensor.new_empty, pending=True)


@rule(torch.Tensor.new_full)
def new_full(input: Arg, size: Sequence[int]) -> LikeRule:
    return LikeRule(tuple(size), False, _make_kernel_factory(1))


@rule(torch.Tensor.new_empty_strided)
def new_empty_strided(input: Arg, size: Sequence[int]) -> LikeRule:
    def make_strided_kernel(call: KernelCall) -> Kernel:
        def new(input: Any, size: Any, stride: Sequence[int], **kwargs: Any) -> Any:
            # The order of the strides is kept; their sizes are those of this rank's piece.
            shape = call.outputs[0]
            if tuple(size) == tuple(shape):
                return input.new_empty_strided(shape, stride, **kwargs)
            order = sorted(range(len(shape)), key=lambda d: -stride[d])
            return torch.empty_permuted(
                shape, order, dtype=kwargs.get("dtype", input.dtype), device=input.device
            )

        return new

    return LikeRule(tuple(size), True, make_strided_kernel)
