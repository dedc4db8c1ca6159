"""Wrapped functions: objects that stand for a function, or for one module's forward."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

__all__ = ["Wrapped"]


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
