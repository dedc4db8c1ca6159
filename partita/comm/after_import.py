"""Import hooks: a function that is called once a module of torch has been imported.

Some modules of torch take seconds to import, and many programs never need them. What partita
replaces in such a module is replaced when the program imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["after_import"]


def after_import(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the module `name`: now if it is there, else once it has been imported."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _OnImport(name, act))


class _OnImport(importlib.abc.MetaPathFinder):
    """Finds one module, as the other finders do, and has it seen once it has run."""

    def __init__(self, name: str, act: Callable[[Any], None]):
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._act(module)

            loader.exec_module = exec_module
        return spec
