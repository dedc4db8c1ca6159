"""Constructors of torch that ask no tensor among their arguments: what they make of DTensors.

`torch.tensor` copies one. Old constructors, which take a tensor's memory, refuse a piece. A number
(a size, a bound, a value to fill with) is read on all ranks: see `scalar_reads`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import handle_torch_function
from torch.utils._device import _device_constructors

from .arguments import read_number
from .dtensor import DTensor
from .forms import form_of
from .gathered import run_gathered
from .tensor_overrides import OVERRIDES
from .torch_patches import holds_dtensor, put_in_place_of, refuse_piece

__all__: list[str] = []

_LEAVES = frozenset((int, float, bool, complex))


def _read_nested_values(data: Any) -> Any:
    """A list, with the value of each DTensor in it."""
    if isinstance(data, DTensor):
        return data.tolist()
    if isinstance(data, (list, tuple)) and not _LEAVES.issuperset(map(type, data)):
        return [_read_nested_values(d) for d in data]
    return data


def _make_tensor(data: Any, **options: Any) -> torch.Tensor:
    if _len_torch_function_stack():
        return handle_torch_function(_make_tensor, (), data, **options)  # type: ignore[no-any-return]
    if not isinstance(data, DTensor):
        return _plain_tensor(_read_nested_values(data), **options)
    requires_grad, pinned = options.pop("requires_grad", False), options.pop("pin_memory", False)
    copy = data.detach().clone().to(**options) if options else data.detach().clone()
    return (copy.pin_memory() if pinned else copy).requires_grad_(requires_grad)


def _as_tensor(data: Any, **options: Any) -> torch.Tensor:
    if _len_torch_function_stack():
        return handle_torch_function(_as_tensor, (), data, **options)  # type: ignore[no-any-return]
    if isinstance(data, DTensor):
        return data.to(**options) if options else data
    return _plain_as_tensor(_read_nested_values(data), **options)


def _convert_to_tensor(obj: Any, **options: Any) -> torch.Tensor:
    if _len_torch_function_stack():
        return handle_torch_function(_convert_to_tensor, (), obj, **options)  # type: ignore[no-any-return]
    if not isinstance(obj, DTensor):
        return _plain_asarray(_read_nested_values(obj), **options)
    copies, requires_grad = options.pop("copy", None), options.pop("requires_grad", None)
    made = obj.to(**options) if options else obj
    if made is obj and copies:
        made = obj.clone()
    return made if requires_grad is None else made.detach().requires_grad_(requires_grad)


_plain_tensor = put_in_place_of("tensor", _make_tensor, torch)
_plain_as_tensor = put_in_place_of("as_tensor", _as_tensor, torch)
_plain_asarray = put_in_place_of("asarray", _convert_to_tensor, torch)


def _read_one_element(value: Any) -> Any:
    if type(value) is DTensor and value._spec.shape.numel() == 1 and not value.requires_grad:
        return read_number(value)
    return value


# -- old constructors ------------------------------------------------------------------------------


def _legacy_arguments(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of `name(x)`, `name([1, 2])` or `name(2, 3)`: a tensor's memory, its values, or sizes."""
    if len(args) != 1:
        return tuple(map(_read_one_element, args))
    refuse_piece(f"{name}(x)", args[0])
    return args if isinstance(args[0], torch.Tensor) else (_read_nested_values(args[0]),)


class _LegacyType(type):
    """The class of what stands for `torch.FloatTensor` and its kin, which take no subclasses."""

    plain: Any  # what it stands for

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls.plain(*_legacy_arguments(cls.__name__, args), **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.plain)

    # Whoever had the type before it was exchanged compares it to what stands there now.

    def __eq__(cls, other: object) -> bool:
        return _plain_type(other) is cls.plain

    def __hash__(cls) -> int:
        return hash(cls.plain)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(_plain_type(subclass), cls.plain)

    def __dir__(cls) -> list[str]:
        return dir(cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __repr__(cls) -> str:
        return repr(cls.plain)

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        # `x.type(torch.FloatTensor)` goes by the name in C, which has the module's too.
        return cls.plain.__name__  # type: ignore[no-any-return]


def _plain_type(kind: Any) -> Any:
    return kind.plain if isinstance(kind, _LegacyType) else kind


_PLAIN_TYPE = type(torch.FloatTensor)
# Dynamo knows what `x.type(torch.FloatTensor)` is given by the name of its class.
_LegacyType.__module__, _LegacyType.__qualname__ = _PLAIN_TYPE.__module__, _PLAIN_TYPE.__name__


def _stand_for_legacy_types(home: Any) -> None:
    for name, plain in list(vars(home).items()):
        if isinstance(plain, _PLAIN_TYPE):
            space = {"plain": plain, "__module__": home.__name__, "__qualname__": name}
            setattr(home, name, _LegacyType(f"{home.__name__}.{name}", (), space))


_set_default_type = torch.set_default_tensor_type


def _set_default_tensor_type(t: Any) -> None:
    if isinstance(t, str):  # C asks torch for what is called so
        home, _, name = t.rpartition(".")
        t = getattr({"torch": torch, "torch.cuda": torch.cuda}.get(home), name, t)
    _set_default_type(_plain_type(t))


for _home in (torch.cuda, torch):
    _stand_for_legacy_types(_home)
put_in_place_of("set_default_tensor_type", _set_default_tensor_type, torch)


# -- methods of plain tensors ----------------------------------------------------------------------


def _look_at_arguments(
    name: str, arguments: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]
) -> None:
    """Let a method of plain tensors take `arguments`: it asks no DTensor among those given."""
    plain = getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def method(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(self, DTensor) and holds_dtensor((args, options)):
            if "data" in options:
                args, options = (options.pop("data"), *args), dict(options)
            args = arguments(f"x.{name}", args)
        return plain(self, *args, **options)

    setattr(torch.Tensor, name, method)
    OVERRIDES[method] = lambda *args, **options: run_gathered(plain, args, options, form_of(plain))


_look_at_arguments("new", _legacy_arguments)
_look_at_arguments("new_tensor", lambda name, args: (_read_nested_values(args[0]), *args[1:]))
torch.overrides.get_ignored_functions.cache_clear()
_device_constructors.cache_clear()  # what `torch.set_default_device` goes by
