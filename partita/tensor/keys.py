"""Keys of plans.

Under which key is an op's plan remembered? Exactly what its rule declares that it reads.

The key function of an op is generated from its rule's parameters, so Python's own binding of
positional and keyword arguments normalises the call, and an argument that the rule does not
declare has no way into the key. A tensor enters as its spec, a plain tensor as its shape, a float
as nothing but its type, a number in an operand's place not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.rules import NUMBER

from .dtensor import DTensor
from .hot_path import DECLARED, FLAG, KEYWORD, OPERAND, REST, UNREAD, key_in_c

__all__ = ["HASHABLE", "NUMBERS", "KeyFunction", "Unkeyed", "declared_key", "frozen", "operand_key"]

KeyFunction = Callable[..., Any]

_PLAIN_VALUES = frozenset(
    (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
HASHABLE = _PLAIN_VALUES - {bool}
_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)  # numbers in a step that is captured
NUMBERS = frozenset((int, float, bool, complex))

RENAMED = frozenset(("axis", "keepdims", "input", "self", "x", "a", "x1", "x2", "out"))
"""Other names that torch accepts for an argument, and `out`: such calls are rewritten first."""


class Unkeyed(TypeError):
    """A call whose arguments have to be put in order before a key can be computed."""


def operand_kind(value: Any) -> Any:
    """What stands in the key for something in an operand's place that is no DTensor."""
    if value is None:
        return None
    if type(value) in NUMBERS or issubclass(type(value), _SYMBOLIC):
        return NUMBER
    return frozen(value)


def frozen(value: Any) -> Any:
    """What stands in the key for a declared argument: hashable, and without any float's value."""
    t = type(value)
    if t in HASHABLE or (t is tuple and HASHABLE.issuperset(map(type, value))):
        return value
    if t is bool:  # told from int: x[True] is not x[1], nor x.var(True) x.var(1)
        return (bool, value)
    if t is tuple or t is list:
        return (list, *[frozen(v) for v in value])
    if t is slice:
        return (slice, value.start, value.stop, value.step)
    if t is DTensor:
        return value._spec
    if isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)  # of a subclass
        return spec or ("plain", value.dtype is torch.bool, tuple(value.shape))
    if isinstance(value, tuple):
        return frozen(tuple(value))
    if t is dict:
        return (dict, *((k, frozen(v)) for k, v in value.items()))
    if t is float or t is complex:
        return t
    if issubclass(t, _SYMBOLIC):
        return float if issubclass(t, torch.SymFloat) else t
    if value is Ellipsis:
        return value
    index = getattr(value, "__index__", None)
    if index is not None:
        return index()
    return t


def _check_rest(
    more: tuple[Any, ...], named: dict[str, Any], harmless: set[str], flagged: bool
) -> None:
    """Let nothing pass unseen that could matter: unknown names, tensors in undeclared places, and
    `inplace=True` of a function that is `flagged` to have it."""
    for name, value in named.items():
        if name not in harmless:
            if name in RENAMED:
                raise Unkeyed(name)
            if name != "inplace":
                harmless.add(name)
            elif value:
                raise Unkeyed(name)
        if type(value) not in NUMBERS and _has_tensor(value):
            raise Unkeyed(name)
    for value in more:
        if (type(value) not in NUMBERS and _has_tensor(value)) or (flagged and value is True):
            raise Unkeyed("an undeclared tensor or flag")


def _has_tensor(value: Any) -> bool:
    if type(value) is tuple or type(value) is list:
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def operand_key(names: Sequence[str], flagged: bool = False) -> KeyFunction:
    """The key of a fixed sentence: the kinds of its operands, whose arguments are called `names`.

    `flagged` functions have an argument `inplace`; a call that sets it has no key.
    """
    params = ", ".join(n if i == 0 else f"{n}=None" for i, n in enumerate(names))
    parts = [f"{n}._spec if type({n}) is D else kind({n})" for n in names]
    key = _compile_key_function(params, parts, False, flagged)
    told = [(n, OPERAND, None if i else inspect.Parameter.empty) for i, n in enumerate(names)]
    return key_in_c(key, told, flagged)


def declared_key(params: Sequence[inspect.Parameter], flagged: bool = False) -> KeyFunction:
    """The key of a rule that derives its sentence: the arguments that it declares."""
    signature, parts, unread, variadic = [], [], [], False
    defaults: dict[str, Any] = {}
    told: list[tuple[str, int, Any]] = []
    for p in params:
        told.append((p.name, _to_key(p), p.default))
        if p.kind is inspect.Parameter.VAR_POSITIONAL:
            signature.append(f"*{p.name}")
            variadic = True
            parts.append(f"freeze({p.name})")
            continue
        if p.default is inspect.Parameter.empty:
            signature.append(p.name)
        else:
            defaults[f"default_{p.name}"] = p.default
            if p.kind is inspect.Parameter.KEYWORD_ONLY and not variadic:
                variadic = True
                signature.append("*more")
            signature.append(f"{p.name}=default_{p.name}")
        if not p.name.startswith("_"):
            n = p.name
            # Where a bool is expected, an int given in its stead means the same.
            plain = "V" if type(p.default) is bool else "H"
            kept = f"{n} if type({n}) in {plain} else freeze({n})"
            parts.append(f"{n}._spec if type({n}) is D else {kept}")
        else:
            unread.append(f"    if type({p.name}) not in N: check(({p.name},), {{}}, (), False)\n")
    made = ", ".join(signature), parts, variadic, flagged, defaults, "".join(unread)
    return key_in_c(_compile_key_function(*made), told, flagged)


def _to_key(p: inspect.Parameter) -> int:
    """What a derived rule's parameter is to the key."""
    if p.kind is inspect.Parameter.VAR_POSITIONAL:
        return REST
    by_name = KEYWORD if p.kind is inspect.Parameter.KEYWORD_ONLY else 0
    read = FLAG if type(p.default) is bool else DECLARED
    return by_name | (UNREAD if p.name.startswith("_") else read)


def _compile_key_function(
    params: str,
    parts: list[str],
    variadic: bool,
    flagged: bool,
    defaults: dict[str, Any] | None = None,
    unread: str = "",
) -> KeyFunction:
    more = "" if variadic else ", *more"
    rest = "()" if "*more" not in params + more else "more"
    body = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
    source = (
        f"def key({params}{more}, **named):\n"
        f"    if named or {rest}: check({rest}, named, harmless, flagged)\n"
        f"{unread}"
        f"    return {body}\n"
    )
    space = {
        "D": DTensor,
        "V": _PLAIN_VALUES,
        "H": HASHABLE,
        "N": NUMBERS,
        "kind": operand_kind,
        "freeze": frozen,
        "check": _check_rest,
        "harmless": set(),
        "flagged": flagged,
        **(defaults or {}),
    }
    exec(compile(source, __file__, "exec"), space)  # in a file of ours: it is no user's code
    return space["key"]  # type: ignore[return-value]
