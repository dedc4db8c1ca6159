"""Slim artifacts: saved results of Inductor, without what is not needed to run them.

Torch saves with a result what is needed to compile it again, and generated code imports the
compiler for a few names. Importing that is most of the time of a load, so it is removed from what
is stored, and the names are provided here. What a new torch writes in another way is left as it is.

A tiny step spends as long in what torch does around its kernels as in the kernels. So checks of
inputs that a call's guards have checked are removed, and torch's runtime around the code (for
outputs that are views of inputs, say) is skipped where it has nothing to do.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from partita.versions import INPUT_CHECK

__all__ = [
    "align",
    "extern_kernels",
    "remove_compiler_data",
    "remove_input_checks",
    "runs_by_itself",
    "without_compiler",
]

_LINES = {
    "from torch._inductor.select_algorithm import extern_kernels\n": (
        "from partita.compile.backend.artifact_slimming import extern_kernels\n"
    ),
    "from torch._inductor.codegen.memory_planning import _align as align\n": (
        "from partita.compile.backend.artifact_slimming import align\n"
    ),
}
_TEXTS = ("runnable_graph_str", "inductor_post_grad_graph_str")


def remove_compiler_data(saved: bytes) -> bytes:
    """A saved result without what only the compiler reads. Private torch: its format."""
    entry, *rest = pickle.loads(saved)
    code = entry.compiled_fw.result
    for line, ours in _LINES.items():
        code.source_code = code.source_code.replace(line, ours, 1)
    # Torch finds generated code in its cache folder by this name; the unchanged code is there, too.
    code.cache_key = "c" + hashlib.sha256(code.source_code.encode()).hexdigest()[:51]
    code.fx_kwargs.pop("get_decomp_fn", None)
    for name in _TEXTS:
        if isinstance(getattr(code, name, None), str):
            setattr(code, name, "")
    entry.aot_forward_graph_str = None
    return pickle.dumps((entry, *rest))


def remove_input_checks(saved: bytes) -> bytes:
    """A saved result whose code does not check the shapes and strides of its inputs."""
    entry, *rest = pickle.loads(saved)
    code = entry.compiled_fw.result
    code.source_code = INPUT_CHECK.sub("", code.source_code)
    return pickle.dumps((entry, *rest))


def runs_by_itself(saved: bytes) -> bool:
    """May generated code be called directly, without torch's runtime around it?

    So where no output is an input or a view of one, and no write of an input is left to the
    runtime. Private torch: the metadata of its runtime.
    """
    entry, *_ = pickle.loads(saved)
    known = entry.runtime_metadata
    try:
        return (
            entry.compiled_bw is None
            and entry.maybe_subclass_meta is None
            and not any(around.needs_post_compile for around in entry.dispatch_wrappers)
            and not (known.mutated_inp_runtime_indices or known.tokens or known.dynamic_outputs)
            and not (known.num_intermediate_bases or known.is_rng_op_functionalized)
            and known.grad_enabled_mutation is None
            and all(out.output_type.name == "non_alias" for out in known.output_info)
        )
    except AttributeError:  # of another torch
        return False


@contextmanager
def without_compiler(loaded: Callable[[Any], None] = lambda code: None) -> Iterator[None]:
    """Within, results are loaded without importing the compiler.

    Torch imports it when a cached result is loaded, for its own tests of the cache; with Triton's
    kernels it is needed anyway. Private torch: `FxGraphCache.cache_hit_post_compile`.

    Args:
        loaded: is given the `CompiledFxGraph` of each result.
    """
    import torch._inductor.debug  # noqa: F401  each call of a result asks it whether it is traced
    from torch._inductor.codecache import FxGraphCache

    whole = FxGraphCache.cache_hit_post_compile

    def load_ready_code(code: Any, info: Any, constants: Any) -> Any:
        bundle = code._triton_bundle
        if bundle is not None and bundle.kernel_artifacts:
            found = whole(code, info, constants)
        else:
            code.after_deserialization(constants)
            found = code, info
        loaded(code)
        return found

    FxGraphCache.cache_hit_post_compile = staticmethod(load_ready_code)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FxGraphCache.cache_hit_post_compile = staticmethod(whole)  # type: ignore[method-assign, assignment]


class _ExternKernels:
    """Torch's functions as kernels; others are looked up in the compiler, imported then."""

    def __getattr__(self, name: str) -> Any:
        if name in ("mm", "addmm", "bmm", "baddbmm", "convolution"):
            found = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as all_kernels

            found = getattr(all_kernels, name)
        setattr(self, name, found)
        return found


extern_kernels = _ExternKernels()


def align(nbytes: Any) -> Any:
    """The alignment function of code with planned memory."""
    from torch._inductor.codegen.memory_planning import _align

    return _align(nbytes)
