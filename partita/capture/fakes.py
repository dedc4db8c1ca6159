"""Fakes: what replaces tensors, DTensors and Python numbers while a step is captured.

A FakeTensor has metadata and a device, but no memory. The local fake of a DTensor becomes a
`FakeDTensor`, like any other shard. That class is both: a DTensor to Python, so that rules and
redistributions run as usual, and a FakeTensor to the dispatcher. The dispatcher aborts if a tensor
has the dispatch keys of a fake, but a class that cannot handle its calls.

A symbolic number (torch's `SymFloat` and similar classes) replaces a float, int or bool whose value
is known only when the graph runs. The subclasses in this module behave like numbers in the user's
code: `isinstance(x, float)` is true. A comparison returns True or False according to a hint (a
known value), and becomes a condition. Arithmetic follows Python, also for signed zeros, division by
zero and powers of negative numbers. `Substitutes` makes `type`, `id` and `hash` return the values
for the replaced object.

A number without a hint, such as the result of `.item()`, has no value yet. If the step reads it,
`NumberEnv.answer` may supply one (`capture.number_env`, `guards.answers`).
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.overrides import handle_torch_function, has_torch_function_unary

from partita.comm import user_line
from partita.graph.fake_values import building_fakes, make_empty_meta, make_fake
from partita.tensor.dtensor import PLAIN, TYPED, DTensor
from partita.tensor.foreach import let_clip_use_foreach
from partita.tensor.op_facts import facts_of

# -- numbers ---------------------------------------------------------------------------------------


def is_symbolic(value: Any) -> bool:
    """True if `value` is a symbolic number, whose value is known only when the graph runs."""
    # Not by `isinstance`, which may run the user's code: it reads `value.__class__`.
    return issubclass(type(value), (torch.SymFloat, torch.SymInt, torch.SymBool))


_class = property(lambda self: self.kind)
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep)


class SymbolicFloat(torch.SymFloat):
    """Replaces a Python float during capture if another call may have another value.

    `isinstance(x, float)` is true for it.

    Attributes:
        kind: the type of the number that it replaces: float, or NumPy's.
    """

    kind: type = float
    __class__ = _class  # type: ignore[assignment]


class SymbolicInt(torch.SymInt):
    """Replaces an int of the step that is known only when the graph runs.

    Attributes:
        kind: the type of the number that it replaces.
    """

    kind: type = int
    __class__ = _class  # type: ignore[assignment]

    def __invert__(self) -> Any:
        return -self - 1

    def __hash__(self) -> int:
        """Reads the value, and returns its hash. Raises TypeError if a library calls it."""
        if sys._getframe(1).f_code.co_filename.startswith(_LIBRARIES):
            raise TypeError("unhashable type: a number that is known when the graph runs")
        return hash(int(self))


_OF_TORCH = {SymbolicFloat: torch.SymFloat, SymbolicInt: torch.SymInt}
_OURS = {torchs: ours for ours, torchs in _OF_TORCH.items()}


def as_number(value: Any) -> Any:
    """Converts a symbolic number of torch to a class that behaves more like a Python number.

    Returns other values unchanged.
    """
    ours = _OURS.get(type(value))
    return value if ours is None else ours(value.node)


def _class_of(fake: FakeTensor) -> type:
    """Returns the class of the tensor that a fake replaces."""
    if isinstance(fake, DTensor):
        return DTensor
    return torch.nn.Parameter if getattr(fake, "_is_param", False) else torch.Tensor


class _Type(type):
    """A replacement of `type` for which `type(x)` is the type of the object that x replaces."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        found = type(args[0])
        if found in _OF_TORCH:
            return args[0].kind
        if issubclass(found, FakeTensor):
            return _class_of(args[0])
        return cls if found is type else found  # so that `type(x) is type` holds

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)


def identity_of(x: Any) -> int:
    """Returns `id(x)`; for a fake tensor, the id of the input that the fake replaces.

    During a capture, `graph_inputs.TensorFacts` intercepts this call, and makes its result a
    condition of the program.
    """
    if isinstance(x, FakeTensor) and has_torch_function_unary(x):
        return int(handle_torch_function(identity_of, (x,), x))
    return id(x)


def _hash_of_value(x: Any, /) -> int:
    if type(x) is SymbolicInt:
        return hash(int(x))
    return identity_of(x) if isinstance(x, FakeTensor) else hash(x)


class Substitutes:
    """Functions that replace `type`, `id` and `hash` in the user's globals during capture.

    Called on a fake, they return the result for the tensor or number that the fake replaces. A
    class of fakes cannot do this itself, because Python's `type` and `id` call no method of it.
    """

    of_builtins: ClassVar[dict[str, Any]] = {
        "type": _Type("type", (type,), {}),
        "id": identity_of,
        "hash": _hash_of_value,
    }

    def __init__(self) -> None:
        self._put: list[tuple[dict[str, Any], str]] = []

    @classmethod
    def has(cls, value: Any) -> bool:
        """True if `value` is one of the functions that replace `type`, `id` and `hash`."""
        return any(value is ours for ours in cls.of_builtins.values())

    def put(self, variables: dict[str, Any], name: str) -> None:
        """Adds a replacement to a module's globals `variables`, unless they have the name.

        Args:
            name: "type", "id" or "hash".
        """
        if name not in variables:
            variables[name] = self.of_builtins[name]
            self._put.append((variables, name))

    def take_away(self) -> None:
        """Removes these functions from all globals in which `put` has put them."""
        for variables, name in self._put:
            if self.has(variables.get(name)):
                del variables[name]
        self._put.clear()


def _to_torch_symbol(value: Any) -> Any:
    """Returns torch's own class of a symbolic number, which torch's methods need."""
    torchs = _OF_TORCH.get(type(value))
    return value if torchs is None else torchs(value.node)


_ASKS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__float__")
_DIVIDE = ("__truediv__", "__floordiv__", "__mod__")
_DIVIDE_BY_SELF = ("__rtruediv__", "__rfloordiv__", "__rmod__")
_MAY_RAISE = ("__floordiv__", "__mod__", "__lshift__", "__rshift__")
_MAY_RAISE_BY_SELF = ("__rfloordiv__", "__rmod__", "__rlshift__", "__rrshift__")
_ZERO_WITH_ZERO = ("__mul__", "__rmul__", "__rtruediv__")

SCALAR_OPS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "neg", "pos")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "abs")},
    "pow": torch.pow,
    "sym_sqrt": torch.sqrt,
    "sym_float": lambda one: one,
    "sym_not": torch.logical_not,
    "sym_max": torch.maximum,
    "sym_min": torch.minimum,
}
"""Maps the name of an operation on Python numbers to the one on zero-dimensional tensors."""

SCALAR_OPS_OF_INTS: dict[str, Callable[..., Any]] = {
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    **{name: getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor")},
}
"""The same, for operations that tensors compute as Python does only if they are integers."""


def _is_read_first(name: str) -> bool:
    """True for a method of floats that reads the value, instead of being traced.

    Tensors do not compute it as Python does. Examples are rounding, remainders and `int(x)`.
    """
    computed = {f"__{r}{done}__" for done in SCALAR_OPS for r in ("", "r")}
    return name in vars(float) and name not in (*_ASKS, *computed)


def _has_value(number: Any) -> bool:
    """True for a number whose value is known during capture; False for the result of `.item()`."""
    return number.node.has_hint() if is_symbolic(number) else isinstance(number, (int, float))


def _raise_where_divided_by_zero(name: str, self: Any, others: tuple[Any, ...]) -> None:
    for divisor in (self,) if name in _DIVIDE_BY_SELF else others if name in _DIVIDE else ():
        if (
            is_symbolic(divisor)
            and _has_value(divisor)
            and not bool(_to_torch_symbol(divisor) != 0)
        ):
            raise ZeroDivisionError("float division by zero")


def _number_of(value: Any) -> Any:
    """Returns the value of a symbolic float, if it is known. The value becomes a condition."""
    return float(value) if type(value) is SymbolicFloat and _has_value(value) else value


def _read_where_it_may_raise(name: str, self: Any, others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns operands in which symbolic divisors and shifts are replaced by their values.

    Python may raise an error for some of these values, which a graph could not do.
    """
    by_self = name in _MAY_RAISE_BY_SELF
    if type(self) is not SymbolicInt or not (by_self or name in _MAY_RAISE):
        return self, *others
    return (read_unknown(self), *others) if by_self else (self, *map(read_unknown, others))


def read_unknown(value: Any) -> Any:
    """Returns the value of a symbolic number of unknown value, if the capture can compute it.

    Otherwise returns `value` unchanged.
    """
    is_unknown = type(value) in _OF_TORCH and not _has_value(value)
    found = value.node.shape_env.answer(value.node) if is_unknown else None
    return value if found is None else found


def _signed_zero(name: str, self: Any, others: tuple[Any, ...]) -> Any:
    """Returns the result of `x * 0` or `0 / x`: a zero with the sign of x; otherwise None."""
    if name not in _ZERO_WITH_ZERO or type(self) is not SymbolicFloat or not _has_value(self):
        return None
    if type(others[0]) not in (int, float) or others[0] != 0:
        return None
    return others[0] * (1.0 if self > 0 else -1.0 if self < 0 else float(self))


def _value_at_capture(number: Any) -> Any:
    """Returns the value that a symbolic number has at capture. It does not become a condition."""
    return number.node.hint if is_symbolic(number) else number


def _odd_power(name: str, self: Any, others: tuple[Any, ...]) -> Any:
    """Returns `x ** y` for an x that is not positive, which may be complex; otherwise None."""
    if name not in ("__pow__", "__rpow__") or len(others) != 1:
        return None
    base, exponent = (self, others[0]) if name == "__pow__" else (others[0], self)
    if not (_has_value(base) and _has_value(exponent)):
        return None
    if not is_symbolic(exponent) and exponent >= 0 and exponent == int(exponent):
        return None
    if not bool(base > 0):
        return float(base) ** float(exponent)
    # Raises OverflowError as Python does.
    float(_value_at_capture(base)) ** float(_value_at_capture(exponent))
    return None


def _make_symbolic_method(name: str) -> Callable[..., Any]:
    is_read_first = _is_read_first(name)

    def method(self: Any, *others: Any) -> Any:
        if name in _ASKS:
            for symbol in self.node.expr.free_symbols:
                self.node.shape_env.asked.setdefault(str(symbol), user_line())
        _raise_where_divided_by_zero(name, self, others)
        if type(self) is SymbolicInt and name in ("__floor__", "__ceil__", "__trunc__"):
            return self
        if len(others) == 2:  # pow(self, exponent, modulus)
            return pow(int(self), *map(int, others))
        if is_read_first and type(self) is SymbolicFloat:
            value, *operands = map(read_unknown, (self, *others))
            if all(map(_has_value, (value, *operands))):
                return getattr(float(value), name)(*map(_number_of, operands))
        for found in (_signed_zero(name, self, others), _odd_power(name, self, others)):
            if found is not None:
                return found
        read = _read_where_it_may_raise(name, self, others)
        found = getattr(_to_torch_symbol(read[0]), name)(*map(_to_torch_symbol, read[1:]))
        # A comparison returns True or False itself, for `is` and for text.
        return bool(found) if type(found) is torch.SymBool else as_number(found)

    return method


def _return_self(self: Any, *_: Any) -> Any:
    return self  # a copied number would lose its node in the graph


_DIVMOD = {
    "__divmod__": lambda self, by: (self // by, self % by),
    "__rdivmod__": lambda self, x: (x // self, x % self),
}
"""Operations that torch's numbers lack."""


def is_text_of_unknown(value: Any) -> bool:
    """True if `value` is a string that was printed from a fake tensor.

    In eager code the string would be different.
    """
    return issubclass(type(value), str) and "FakeTensor(" in value


def _value_of(number: Any) -> Any:
    """Returns the Python number, whose value becomes a condition; raises if it is unknown."""
    return _BUILTIN[type(number)](_to_torch_symbol(number))


def _make_text_method(name: str) -> Callable[..., Any]:
    return lambda self, *spec: getattr(_value_of(self), name)(*spec)


def _read_attribute(self: Any, name: str) -> Any:
    """Returns an attribute of the Python number that torch's symbolic numbers lack."""
    if hasattr(_BUILTIN[type(self)], name):
        return getattr(_value_of(self), name)
    raise AttributeError(f"'{self.kind.__name__}' object has no attribute '{name}'")


def _reduce_to_value(self: Any, protocol: Any) -> Any:
    return _BUILTIN[type(self)], (_value_of(self),)


def _make_array(self: Any, dtype: Any = None, copy: Any = None) -> Any:
    import numpy  # torch does not require numpy

    return numpy.array(_value_of(self), dtype)


def _is_true(self: Any) -> bool:
    """Returns `bool(x)`, computed by a comparison; torch's own would read the value of a float."""
    return bool(self != 0)


_BUILTIN = {SymbolicFloat: float, SymbolicInt: int}
_OWN = ("__init__", "__new__", "__hash__", "__class__")
for _ours, _torchs in _OF_TORCH.items():
    for _name, _found in list(vars(_torchs).items()):
        if _name.startswith("__") and callable(_found) and _name not in _OWN:
            setattr(_ours, _name, _make_symbolic_method(_name))
    for _name, _method in _DIVMOD.items():
        setattr(_ours, _name, _method)
    for _name in ("__str__", "__repr__", "__format__"):
        setattr(_ours, _name, _make_text_method(_name))
    _ours.__bool__ = _is_true  # type: ignore[attr-defined]
    _ours.__getattr__, _ours.__array__ = _read_attribute, _make_array  # type: ignore[attr-defined]
    _ours.__reduce_ex__ = _reduce_to_value  # type: ignore[method-assign]
    _ours.__copy__ = _ours.__deepcopy__ = _return_self  # type: ignore[attr-defined]


# -- tensors ---------------------------------------------------------------------------------------


class FakeDTensor(DTensor, FakeTensor):
    """The fake of a DTensor during capture. A FakeTensor gets it as its `__class__`."""

    __torch_dispatch__ = FakeTensor.__torch_dispatch__
    device = FakeTensor.device
    # Not the property of DTensors, whose reads a torch-function mode does not see.
    grad = torch.Tensor.grad  # type: ignore[assignment]


PLAIN.add(FakeTensor)
TYPED[FakeTensor] = TYPED[FakeDTensor] = FakeDTensor
let_clip_use_foreach(FakeDTensor)  # else it would send one all-reduce for each parameter


class FakeMaker:
    """Makes the fake tensors that replace local tensors during capture.

    Each fake comes with a snapshot: a second fake of the same storage, which no call changes. For
    dense tensors, a fake is made from shape, strides and storage, which is fast. Other tensors need
    `FakeTensorMode.from_tensor`, which is slow.

    Args:
        mode: the mode of the fakes.
        tensors: all tensors that may get fakes. If they share a storage, their fakes share one.
    """

    def __init__(self, mode: FakeTensorMode, tensors: Sequence[torch.Tensor]):
        self._mode = mode
        self._memory: dict[int, torch.UntypedStorage] = {}
        others = [t for t in tensors if not _is_dense(t) and t.layout is torch.strided]
        self._memory_of_others = {_storage_id(t) for t in others if not t.is_nested}

    def make(self, local: torch.Tensor) -> tuple[FakeTensor, FakeTensor]:
        """Returns a fake of the local tensor, and its snapshot (see the class).

        Fakes share storage as the tensors do.
        """
        if device_at_capture(local) != local.device:
            return self.make_empty(local)
        if not _is_dense(local) or _storage_id(local) in self._memory_of_others:
            fake = self._mode.from_tensor(local, static_shapes=True)
            return fake, fast_detach(self._mode, fake)
        with building_fakes():
            return self._make_pair(self._make_meta(local), local.device)

    def make_empty(
        self, local: torch.Tensor, shape: Sequence[int] | None = None
    ) -> tuple[FakeTensor, FakeTensor]:
        """Returns a fake like `local` that shares its storage with no other fake, and its snapshot.

        Args:
            shape: the shape of the fake; None for the shape of `local`.
        """
        with building_fakes():
            if shape is None:
                meta = make_empty_meta(local)
            else:
                meta = torch.empty(shape, dtype=local.dtype, device="meta")
            return self._make_pair(meta, device_at_capture(local))

    def _make_pair(self, meta: torch.Tensor, device: torch.device) -> tuple[FakeTensor, FakeTensor]:
        return make_fake(self._mode, meta, device), make_fake(self._mode, meta, device)

    def _make_meta(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a meta tensor like `local`; tensors that share a storage get one meta storage."""
        memory = self._memory.get(_storage_id(local))
        if memory is None:
            memory = torch.UntypedStorage(local.untyped_storage().nbytes(), device="meta")
            self._memory[_storage_id(local)] = memory
        meta = torch.empty(0, dtype=local.dtype, device="meta")
        return meta.set_(memory, local.storage_offset(), local.shape, local.stride())


def _storage_id(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_dense(x: torch.Tensor) -> bool:
    """True for a plain strided tensor: not quantized, nested, wrapped, inference, conjugated."""
    keys = torch._C._dispatch_keys(x)
    return type(x) is torch.Tensor and bool(keys == _dense_keys(x.device.type))


@lru_cache
def _dense_keys(device: str) -> Any:
    """Returns the dispatch keys of a dense tensor. Private torch: other kinds have other keys."""
    with torch.inference_mode(False), building_fakes():
        return torch._C._dispatch_keys(torch.empty(0, device=device))


_TARGET: ContextVar[torch.device | None] = ContextVar("captured_for", default=None)


@contextmanager
def captured_for(device: torch.device | str) -> Iterator[None]:
    """Makes a capture of meta tensors act as if they were on `device`, inside the `with` block.

    So the graph has the kernels of that device, which matters for attention. The graph is never
    run.
    """
    token = _TARGET.set(torch.device(device))
    try:
        yield
    finally:
        _TARGET.reset(token)


def device_at_capture(x: torch.Tensor) -> torch.device:
    """Returns the device that the fake of `x` has during capture (see `captured_for`)."""
    return (_TARGET.get() if x.is_meta else None) or x.device


def has_memory(x: Any) -> bool:
    """True if `x` is a real tensor; False for a fake tensor or another object."""
    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


def tensors_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lists: bool = False
) -> list[torch.Tensor]:
    """Returns the tensors that the call `func(*args, **kwargs)` of an op writes in place.

    Args:
        lists: True to return only tensors in list operands.
    """
    found: list[torch.Tensor] = []
    for operand in facts_of(func).writes:
        given = operand.find(args, kwargs)
        if operand.is_list:
            found += [t for t in given or () if t is not None]
        elif given is not None and not lists:
            found.append(given)
    return found


def count_writes_of_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Increments the `_version` of tensors in lists that an op over lists writes.

    Torch increments it only for a tensor that is an operand itself. For tensors in lists the kernel
    does it, but no kernel runs on fakes.
    """
    written = tensors_written(func, args, kwargs, lists=True)
    with local_ops():
        increment_version([t for t in written if not t.is_inference()])
