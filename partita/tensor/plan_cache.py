"""The plan cache: the plans of each function, and the keys that they are found by.

An `Op` stands for one function that was called with DTensors: it has the function's key function
and its plans.

    torch.sum(x, dim=0)    key (spec of x, 0)    ->    CallPlan

**Keys.** The key of a call is exactly what the op's rule declares that it reads. The key function
is generated from the rule's parameters, so Python's own binding of positional and keyword arguments
normalises the call, and an argument that the rule does not declare has no way into the key. A
DTensor enters as its spec, a plain tensor as its shape, a float as nothing but its type, a number
in an operand's place not at all.

**Memory.** Each op keeps its plans in a dictionary of its own, which dispatch reads directly. A
second, older generation stands behind it: when the young generations of all ops together reach half
of the limit, they become the old ones, and the old ones are dropped. A hit costs no bookkeeping;
what is used survives (it is found among the old and moved back); what is not used is gone after at
most two turns. So this is LRU, with the age of an entry known to a generation.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from partita.rules import NUMBER, parse

from .dtensor import DTensor
from .forms import Form, form_of, parameter_names
from .hot_path import DECLARED, FLAG, KEYWORD, OPERAND, REST, UNREAD, make_key_in_c

__all__ = [
    "HASHABLE",
    "NUMBERS",
    "CacheInfo",
    "Op",
    "Run",
    "cache_clear",
    "cache_info",
    "declared_key",
    "freeze_value",
    "note_miss",
    "operand_key",
    "operand_kind",
    "set_cache_limit",
]


class Op:
    """One function and the plans of its calls.

    Attributes:
        func, form: the function, and the form of an op that it is.
        base: what runs on the pieces where a plan has no kernel.
        key: makes the key of a call from its arguments; raises TypeError where they do not fit.
        plans: the young generation of plans, by key; `find` gives one, or None.
        run: what is called in place of all plans, where the function is no op or has no rule.
    """

    __slots__ = ("base", "find", "form", "func", "key", "plans", "run")

    def __init__(self, func: Callable[..., Any]):
        self.func = func
        self.plans = Plans(getattr(func, "__name__", "?"))
        self.find = self.plans.get
        self.learn(form_of(func))

    def learn(self, form: Form) -> None:
        """Set the form, after a rule was given, and forget the plans that were made by another."""
        self.form = form
        self.base = form.local or self.func
        self.plans.name = form.name
        self.plans.forget()
        self.run: Run | None = None
        self.key: KeyFunction = _no_key
        rule = form.rule
        if rule is not None and not form.foreach:
            flagged = "inplace" in getattr(getattr(self.func, "__code__", None), "co_varnames", ())
            if rule.derive is None:
                names = parameter_names(self.func, len(parse(rule.text).terms))
                self.key = operand_key(names, flagged)
            else:
                self.key = declared_key(rule.params, flagged)


Run = Callable[[Callable[..., Any], Any, dict[str, Any], Op], Any]
"""`run(func, args, kwargs, op)`."""


def _no_key(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("a function without a rule has no key")


# -- keys ------------------------------------------------------------------------------------------

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
    """A call has no key: its arguments have to be normalised first, or nothing is known of it."""


def operand_kind(value: Any) -> Any:
    """The part of a key for an operand that is no DTensor."""
    if value is None:
        return None
    if type(value) in NUMBERS or issubclass(type(value), _SYMBOLIC):
        return NUMBER
    return freeze_value(value)


def freeze_value(value: Any) -> Any:
    """The part of a key for a declared argument: hashable, and without any float's value."""
    t = type(value)
    if t in HASHABLE or (t is tuple and HASHABLE.issuperset(map(type, value))):
        return value
    if t is bool:  # told from int: x[True] is not x[1], nor x.var(True) x.var(1)
        return (bool, value)
    if t is tuple or t is list:
        return (list, *[freeze_value(v) for v in value])
    if t is slice:
        return (slice, value.start, value.stop, value.step)
    if t is DTensor:
        return value._spec
    if isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)  # of a subclass
        return spec or ("plain", value.dtype is torch.bool, tuple(value.shape))
    if isinstance(value, tuple):
        return freeze_value(tuple(value))
    if t is dict:
        return (dict, *((k, freeze_value(v)) for k, v in value.items()))
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
    """Raise Unkeyed if an argument that the rule does not declare could matter: another name of a
    parameter, a tensor, or `inplace=True` of a function that is `flagged` to have it."""
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
    described = [(n, OPERAND, None if i else inspect.Parameter.empty) for i, n in enumerate(names)]
    return make_key_in_c(key, described, flagged)


def declared_key(params: Sequence[inspect.Parameter], flagged: bool = False) -> KeyFunction:
    """The key of a rule that derives its sentence: the arguments that it declares."""
    signature, parts, unread, variadic = [], [], [], False
    defaults: dict[str, Any] = {}
    described: list[tuple[str, int, Any]] = []
    for p in params:
        described.append((p.name, _classify_parameter(p), p.default))
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
    generated = ", ".join(signature), parts, variadic, flagged, defaults, "".join(unread)
    return make_key_in_c(_compile_key_function(*generated), described, flagged)


def _classify_parameter(p: inspect.Parameter) -> int:
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
        "freeze": freeze_value,
        "check": _check_rest,
        "harmless": set(),
        "flagged": flagged,
        **(defaults or {}),
    }
    exec(compile(source, __file__, "exec"), space)  # in a file of ours: it is no user's code
    return space["key"]  # type: ignore[return-value]


# -- the memory of plans ---------------------------------------------------------------------------


class CacheInfo(NamedTuple):
    """What the cache has done and holds. Counts are calls and entries.

    Attributes:
        by_op: for each op with entries, how many.
    """

    hits: int
    misses: int
    size: int
    maxsize: int
    by_op: dict[str, int]


class Plans(dict[Any, Any]):
    """One op's young plans by their keys, and behind them its old ones."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.old: dict[Any, Any] = {}
        _CACHE.ops.append(self)

    def recall(self, key: Any) -> Any | None:
        """A plan of the older generation, made young again; None if there is none."""
        plan = self.old.pop(key, None)
        if plan is not None:
            self.remember(key, plan)
        return plan

    def forget(self) -> None:
        """Drop every plan of this op."""
        with _CACHE.lock:
            _CACHE.young -= len(self)
            _CACHE.forgotten_hits += sum(p.hits for p in (*self.values(), *self.old.values()))
            self.clear()
            self.old = {}

    def remember(self, key: Any, plan: Any) -> None:
        """Keep `plan`, which has an integer attribute `hits`, under `key`."""
        with _CACHE.lock:
            if _CACHE.young >= max(_CACHE.limit // 2, 1):
                _CACHE.turn()
            if key not in self:
                _CACHE.young += 1
            self[key] = plan


class _Cache:
    def __init__(self) -> None:
        self.ops: list[Plans] = []
        self.limit = 8192
        self.young = 0
        self.misses = 0
        self.forgotten_hits = 0
        self.lock = threading.RLock()

    def turn(self) -> None:
        """The young become old, the old are dropped."""
        for plans in self.ops:
            self.forgotten_hits += sum(p.hits for p in plans.old.values())
            plans.old = dict(plans)
            plans.clear()
        self.young = 0

    def size(self) -> int:
        return sum(len(p) + len(p.old) for p in self.ops)


_CACHE = _Cache()


def note_miss() -> None:
    """Count a call for which there was no plan."""
    _CACHE.misses += 1


def cache_info() -> CacheInfo:
    """Hits, misses, entries, the limit, and entries by op, of the cache of plans."""
    with _CACHE.lock:
        live = [p for plans in _CACHE.ops for p in (*plans.values(), *plans.old.values())]
        by_op: dict[str, int] = {}
        for plans in _CACHE.ops:
            n = len(plans) + len(plans.old)
            if n:
                by_op[plans.name] = by_op.get(plans.name, 0) + n
        hits = _CACHE.forgotten_hits + sum(p.hits for p in live)
        return CacheInfo(hits, _CACHE.misses, len(live), _CACHE.limit, by_op)


def cache_clear() -> None:
    """Forget every plan and every count. Results do not change; the next calls plan anew."""
    with _CACHE.lock:
        for plans in _CACHE.ops:
            plans.clear()
            plans.old = {}
        _CACHE.young = _CACHE.misses = _CACHE.forgotten_hits = 0


def set_cache_limit(n: int) -> None:
    """Keep at most `n` plans (n >= 2), all ops and, in `ranks`, all ranks together.

    Raises:
        ValueError: n is less than 2.
    """
    if n < 2:
        raise ValueError(f"the cache holds at least 2 plans, not {n}")
    with _CACHE.lock:
        _CACHE.limit = n
        while _CACHE.size() > n:
            _CACHE.turn()
