"""Distinguishes the user's code, which a capture follows, from code of libraries, by file name."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

_TORCH_FILES = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PARTITA = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Our own models and training loop are recorded like a user's.
_RECORDED_OF_PARTITA = (
    os.path.join(_PARTITA, "app", "models", ""),
    os.path.join(_PARTITA, "app", "trainer.py"),
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# Libraries that torch itself runs while it traces.
_LIBRARIES_OF_TORCH = tuple(
    os.sep + name + os.sep
    for name in "filelock functorch mpmath networkx numpy optree sympy torchgen triton z3".split()
) + (os.sep + "typing_extensions.py",)
_LIBRARY_MODULES = (
    "torch partita builtins numpy sympy mpmath functorch torchgen typing_extensions".split()
)


@functools.cache
def is_recorded_file(filename: str) -> bool:
    """True if a capture follows the code in the file with this path.

    It does not follow code of torch and the libraries that torch needs, partita or Python itself.
    Partita's own models and training loop are followed.
    """
    if filename.startswith("<frozen"):
        return False
    path = os.path.abspath(filename)
    if path.startswith(_TORCH_FILES):
        return False
    if path.startswith(_PARTITA):
        return path.startswith(_RECORDED_OF_PARTITA)
    installed = any(part in path for part in _INSTALLED)
    if installed and any(part in path for part in _LIBRARIES_OF_TORCH):
        return False
    return installed or not path.startswith(_STDLIB)


def is_user_module(module: Any) -> bool:
    """True if a capture follows the code of the module with this name: not torch, not Python."""
    root = str(module).split(".")[0]
    return (
        root not in _LIBRARY_MODULES and root not in sys.stdlib_module_names
    ) or root == "__main__"


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """Yields a code object and, recursively, the code objects of functions that it defines."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_within(const)
