"""Every private name of torch that the package uses is there: a newer torch fails here, by name.

Names are found in the package's sources, as `torch.a._b` and as attributes of torch's objects, so
that a new one needs an entry here before it passes. What each must do is in
tests/tensor/test_private_torch.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from sys import stdlib_module_names
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import partita

_PACKAGE = Path(partita.__file__).parent
_ONLY_GPU = ("torch._C._cuda", "torch.cuda._")


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _names_of(tree: ast.Module) -> set[str]:
    """The private names of torch that a file imports, or reads as `torch.a._b`."""
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
            with warnings.catch_warnings():  # torch's own modules warn of each other
                warnings.simplefilter("ignore", DeprecationWarning)
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


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.parent.name != "bench":
            yield path, ast.parse(path.read_text())


@pytest.mark.slow
def test_private_names_of_torch_are_there():
    used: dict[str, list[str]] = {}
    for path, tree in _modules():
        for name in _names_of(tree):
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


# -- attributes of torch's objects -----------------------------------------------------------------


_OURS = frozenset(
    """_input_specs _output_specs _saved_specs _layouts _from_verdict _partita_equal_calls
    _partita_own _partita_settings _partita_usual _zero""".split()
)
"""Which the package itself sets on objects of others."""
_OF_OTHERS = frozenset("_fields _init_weights _reset_parameters".split())
"""Of Python's named tuples, and of models that users write."""


def _make_function() -> type:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    return Double


def _make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(1))])


def _source_of(module: str) -> Callable[[], str]:
    return lambda: inspect.getsource(importlib.import_module(module))


HOLDERS: dict[str, Callable[[], Any]] = {
    "_allgather_base _reduce_scatter_base _device_types": lambda: dist.ProcessGroup,
    "_register_work _resolve_process_group": lambda: torch._C._distributed_c10d,
    "_assert_async _to_copy _local_scalar_dense _log_softmax _ctc_loss _ctc_loss_backward "
    "_native_batch_norm_legit _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda: torch.ops.aten,
    "_opname _overloadname _overloadpacket": lambda: torch.ops.aten.add.Tensor,
    "_allow_unsafe_data_ptr_access": FakeTensorMode,
    "_target_to_str": torch.fx.Graph,
    "_version _base _is_view": lambda: torch.ones(1),
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_is_param": _source_of("torch.nn.parameter"),
    "_backward_cls": _make_function,
    "_init_group": _make_optimizer,
    "_dynamo_static_input_type": _source_of("torch._dynamo.variables.builder"),
    "_is_accelerate_prepared _models": _source_of("accelerate.accelerator"),
    "_triton_bundle": _source_of("torch._inductor.output_code"),
    "_load_library": _source_of("torch._inductor.codecache"),
}
"""By the private attributes of torch's objects that the package reads, and that no test of
tests/tensor/test_private_torch.py names, what has them: an object, or torch's source."""


def _modules_of_python(tree: ast.Module) -> set[str]:
    """The names that a file gives to modules of Python, whose private names are not torch's."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(a.asname or a.name.split(".")[0], a.name) for a in node.names]
            found |= {name for name, module in names if module.split(".")[0] in stdlib_module_names}
    return found


def _aliases_of_torch(tree: ast.Module) -> set[str]:
    found = {"torch", "nn"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or "torch" for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {a.asname or a.name for a in node.names}
    return found


def _own_attributes(tree: ast.Module) -> Iterator[str]:
    """The attributes that classes of a file define, or set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield part.name
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield part.target.id
                elif isinstance(part, ast.Assign):
                    yield from (t.id for t in part.targets if isinstance(t, ast.Name))
                    texts = (n.value for n in ast.walk(part.value) if isinstance(n, ast.Constant))
                    yield from (word for text in texts for word in str(text).split())  # __slots__
        else:
            match node:
                case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                    yield name


def _attributes_of_objects(tree: ast.Module) -> Iterator[str]:
    """The private attributes that a file reads of objects, as `x._y`, `getattr(x, "_y")` or
    `vars(x)["_y"]`."""
    known = _modules_of_python(tree) | _aliases_of_torch(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(inner, name):
                while isinstance(inner, ast.Attribute):
                    inner = inner.value
                if not (isinstance(inner, ast.Name) and inner.id in known):
                    yield name
            case ast.Call(
                ast.Name("getattr" | "hasattr" | "setattr"), [_, ast.Constant(str(name)), *_]
            ):
                yield name
            case ast.Subscript(_, ast.Constant(str(name))):  # of an object's `__dict__`
                yield name
            case ast.Call(
                ast.Attribute(_, "get" | "pop" | "setdefault"), [ast.Constant(str(name)), *_]
            ):
                yield name


def _find_attributes_of_torch() -> dict[str, set[str]]:
    """By name the files that read a private attribute which no class of the package defines."""
    trees = dict(_modules())
    own = {name for tree in trees.values() for name in _own_attributes(tree)}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in _attributes_of_objects(tree):
            if _is_private(name) and name not in own | _OURS | _OF_OTHERS:
                found.setdefault(name, set()).add(str(path.relative_to(_PACKAGE)))
    return found


def _names_with_tests() -> set[str]:
    path = Path(__file__).parents[1] / "tensor" / "test_private_torch.py"
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    texts = {str(n.value) for n in nodes if isinstance(n, ast.Constant)}
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | texts


@pytest.mark.slow
def test_each_private_attribute_of_torchs_objects_has_a_test():
    used = _find_attributes_of_torch()
    held = {name for names in HOLDERS for name in names.split()}
    tested = _names_with_tests()
    without = {name: files for name, files in used.items() if name not in held | tested}
    assert without == {}, "a test in tests/tensor/test_private_torch.py, or an entry in HOLDERS"
    assert held - set(used) == set(), "these are used no more"
    assert held & tested == set(), "these have a test already"


@pytest.mark.parametrize("names", HOLDERS)
def test_private_attributes_of_torchs_objects_are_there(names):
    holder = HOLDERS[names]()
    gone = [
        name
        for name in names.split()
        if not (name in holder if isinstance(holder, str) else hasattr(holder, name))
    ]
    assert gone == [], f"torch {torch.__version__} has no more {gone}"
