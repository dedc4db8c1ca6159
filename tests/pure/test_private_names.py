"""Every private name of torch that the package uses is there: a newer torch fails here, by name.

What each must do is in tests/ranks/test_private_torch.py.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import partita

_PACKAGE = Path(partita.__file__).parent
_ONLY_GPU = ("torch._C._cuda", "torch.cuda._")


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _names_of(path: Path) -> set[str]:
    """The private names of torch that a file imports, or reads as `torch.a._b`."""
    tree = ast.parse(path.read_text())
    found, aliases = set(), {"torch": "torch", "nn": "torch.nn"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found.add(alias.name)
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full)
                aliases[alias.asname or alias.name] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and aliases.get(inner.id, "").startswith("torch"):
                found.add(".".join([aliases[inner.id], *chain]))
    return {name for name in found if _is_private(name)}


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not isinstance(found, ModuleType | type):
                return True  # of an object: what it has is known as it runs
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.slow
def test_private_names_of_torch_are_there():
    used: dict[str, list[str]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.parent.name != "bench":
            for name in _names_of(path):
                used.setdefault(name, []).append(str(path.relative_to(_PACKAGE)))
    assert len(used) > 80  # else they are looked for in another way than they are written
    gone = [
        f"{name}, which {' and '.join(files)} need"
        for name, files in sorted(used.items())
        if not name.startswith(_ONLY_GPU) and not _resolves(name)
    ]
    assert gone == [], f"torch {importlib.import_module('torch').__version__} has no more {gone}"


def test_a_name_that_is_gone_is_found():
    assert _resolves("torch._C._set_grad_enabled")
    assert not _resolves("torch._C._is_gone_for_good")
    assert not _resolves("torch._inductor.is_gone_for_good")
