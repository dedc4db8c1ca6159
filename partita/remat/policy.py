"""Policies: which results a region keeps, and the functions and modules that one may name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from partita.compile import CompiledStep
from partita.tensor.op_facts import form_of

from .watched_calls import Key, current_watcher, key_of_shape, line_of_site


class Wrapped:
    """Stands for `fn`; or for the forward of `module`, as its attribute `forward`.

    The module's forward is looked up in its class, so that a copied or pickled module calls its own
    again.
    """

    def __init__(self, fn: Callable[..., Any] | None, module: nn.Module | None = None):
        self._fn, self._module = fn, module

    @classmethod
    def in_place_of_forward(cls, module: nn.Module, *args: Any) -> Any:
        """Make one for `module`, and put it in the place of its forward."""
        made = cls(module.__dict__.get("forward"), module, *args)
        object.__setattr__(module, "forward", made)
        return made

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function that it stands for; `inspect.signature` follows this name."""
        if self._fn is not None:
            return self._fn
        assert self._module is not None
        return types.MethodType(type(self._module).forward, self._module)

    @property
    def module(self) -> nn.Module | None:
        """The module for whose forward it stands."""
        return self._module

    @property
    def __name__(self) -> str:
        if self._module is not None:
            return type(self._module).__name__
        return getattr(self._fn, "__name__", None) or type(self._fn).__name__

    @property
    def title(self) -> str:
        """Its name in errors and reports."""
        if self._module is not None:
            return type(self._module).__name__
        return getattr(self._fn, "__qualname__", None) or self.__name__

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return getattr(self._fn, "__doc__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method, where a function that stands in a class is wrapped."""
        return self if instance is None else partial(self, instance)


# -- what a policy may name ------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call within a region, as a policy function sees it.

    Attributes:
        op: the op's name, "matmul" for `torch.matmul`, `Tensor.matmul` and `@`; of a
            redistribution the kinds of its moves, "all_gather".
        function: what is called: a function of torch, an `autograd.Function`, what `one_call` made.
        inputs: shape and dtype of each tensor that goes in; of a DTensor the global shape.
        is_collective: it is a redistribution that sends something.
        name: what the program calls its result by `checkpoint_name`, if that is known.
    """

    op: str
    function: Any
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    is_collective: bool = False
    name: str | None = None
    _site: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """The line of the program, "model.py:12"."""
        return line_of_site(self._site)


def keep_collectives(call: Call) -> bool:
    """A policy, alone or in a list: what redistributions brought is kept, not carried again."""
    return call.is_collective


class OneCall(Wrapped):
    """A function that a region sees as one call, if its policy names it. Made by `one_call`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current_watcher()
        if run is None:
            return self.__wrapped__(*args, **kwargs)
        return run.run_one_call(self, args, kwargs)


def one_call(fn: Any) -> Any:
    """Let policies name `fn`: `pt.remat(block, policy=[attention])` keeps what its calls give.

    For functions of the user's own and for compiled ones, which torch announces to nobody; a
    policy that names an `nn.Module` does this by itself. A call that is kept is not made again, and
    what autograd saved inside is kept with it. Elsewhere it is the function that it was.

        @pt.one_call
        def attention(q, k, v): ...

    Returns:
        A function; of a module the module itself, whose `forward` is marked.
    """
    if isinstance(fn, OneCall):
        return fn
    if not isinstance(fn, nn.Module):
        return OneCall(fn)
    if not isinstance(fn.__dict__.get("forward"), OneCall):
        OneCall.in_place_of_forward(fn)
    return fn


# -- policies --------------------------------------------------------------------------------------


_NAMEABLE = (str, nn.Module, OneCall, CompiledStep)


class Policy:
    """A parsed policy.

    Attributes:
        ops: names of ops whose results are kept.
        functions: `autograd.Function`s, `OneCall`s and compiled regions whose results are kept.
        names: names of tensors (`checkpoint_name`) that are kept.
        collectives: keep the results of redistributions.
        test: the user's function of a `Call`, or None.
        budget: bytes, or None.
    """

    def __init__(self, policy: Any):
        self.ops: set[str] = set()
        self.functions: set[Any] = set()
        self.names: set[str] = set()
        self.collectives = False
        self.test: Callable[[Call], Any] | None = None
        self.budget: int | None = None
        if policy is None:
            return
        if isinstance(policy, int) and not isinstance(policy, bool):
            if policy < 0:
                raise ValueError(f"policy={policy}: a budget is a number of bytes")
            self.budget = policy
        elif isinstance(policy, (list, tuple, set, frozenset)):
            for item in policy:
                self._take(item)
        elif isinstance(policy, (*_NAMEABLE, type)) or _is_announced(policy):
            self._take(policy)
        elif callable(policy):
            self.test = policy
        else:
            raise ValueError(
                f"policy={policy!r}: takes a list of functions, modules and names, a function of a "
                "Call, or a budget in bytes"
            )

    def _take(self, item: Any) -> None:
        if isinstance(item, str):
            self.names.add(item)
        elif item is keep_collectives:
            self.collectives = True
        elif isinstance(item, nn.Module):
            self.functions.add(one_call(item).__dict__["forward"])
        elif isinstance(item, _NAMEABLE) or (
            isinstance(item, type) and issubclass(item, torch.autograd.Function)
        ):
            self.functions.add(item)
        elif isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            raise ValueError(
                f"policy names {item}, a kernel; name the function that the program calls, as "
                "torch.matmul or F.scaled_dot_product_attention"
            )
        elif _is_announced(item):
            self.ops.add(form_of(item).name)
        else:
            name = getattr(item, "__qualname__", repr(item))
            raise ValueError(
                f"policy names {name}, whose calls nobody can see; mark it first: "
                f"{getattr(item, '__name__', 'f')} = pt.one_call(...), and name that"
            )

    @property
    def wants_names(self) -> bool:
        return bool(self.names) or self.test is not None

    def keeps(self, op: str, function: Any, key: Key, name: str | None, moves: bool) -> bool:
        """Is this call's result kept?

        Args:
            moves: it is a redistribution that sends.
        """
        if self.test is not None:
            return bool(self.test(_make_call(op, function, key, name, moves)))
        if moves and self.collectives:
            return True
        return op in self.ops or function in self.functions or name in self.names

    def keeps_redistribution(self, plan: Any, x: torch.Tensor, site: tuple[int, ...]) -> bool:
        """Is what this plan makes of local `x` kept? Asked of the global shape, so that the answer
        is alike on every rank."""
        moves = [move for move in plan.moves if move.sends]
        if not moves:
            return False
        kinds = " ".join(move.kind for move in moves)
        key = key_of_shape(kinds, moves[0].before.shape, x.dtype, site)
        return self.keeps(kinds, plan, key, None, True)


def _make_call(op: str, function: Any, key: Key, name: str | None, moves: bool) -> Call:
    found: list[tuple[tuple[int, ...], torch.dtype]] = []
    _collect_inputs(key[2], found)
    return Call(op, function, tuple(found), moves, name, key[1])


def _collect_inputs(part: Any, found: list[Any]) -> None:
    if isinstance(part, tuple):
        if len(part) == 3 and isinstance(part[2], torch.dtype):
            shape = part[1] if isinstance(part[1], torch.Size) else part[1].shape
            found.append((tuple(shape), part[2]))
        else:
            for p in part:
                _collect_inputs(p, found)


@functools.cache
def _is_announced(item: Any) -> bool:
    """Does torch announce calls of this function to a `TorchFunctionMode`?"""
    if isinstance(item, type) or not callable(item):
        return False
    if item in torch.overrides.get_testing_overrides():
        return True
    # Methods of Tensor are there under their operators' names; builtins of torch all announce.
    return type(item).__name__ in ("method_descriptor", "wrapper_descriptor") or (
        type(item).__name__ == "builtin_function_or_method"
        and (getattr(item, "__module__", None) or "torch").startswith("torch")
    )
