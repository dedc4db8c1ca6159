"""Slim artifacts: what of a compiled result does it take to run it?

Torch saves with a result what it would take to compile it again, and the code that it generates
imports the compiler for the sake of a few names. To import all that is most of the time of a load.
So it is left out of what is stored, and the names are found here. What a new torch writes in
another way is left as it is.

A tiny step takes as long for what torch does around its kernels as for these. So code does not
look once more at inputs that a call's guards have looked at, and what torch puts around it, for
outputs that are views of inputs say, is left away where it has nothing to do.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "align",
    "extern_kernels",
    "is_whole",
    "lighter",
    "without_compiler",
    "without_input_checks",
]

_LINES = {
    "from torch._inductor.select_algorithm import extern_kernels\n": (
        "from partita.compile.backend.artifact_slimming import extern_kernels\n"
    ),
    "from torch._inductor.codegen.memory_planning import _align as align\n": (
        "from partita.compile.backend.artifact_slimming import align\n"
    ),
}
_CHECK_OF_INPUT = re.compile(r"^ +assert_size_stride\(\w+, .*, 'input'\)\n", re.MULTILINE)
_TEXTS = ("runnable_graph_str", "inductor_post_grad_graph_str")


def lighter(saved: bytes) -> bytes:
    """The same result, less what only a compiler reads. Private torch: how it is saved."""
    entry, *rest = pickle.loads(saved)
    code = entry.compiled_fw.result
    for line, ours in _LINES.items():
        code.source_code = code.source_code.replace(line, ours, 1)
    # By this name generated code is found in torch's own folder, where the heavier is too.
    code.cache_key = "c" + hashlib.sha256(code.source_code.encode()).hexdigest()[:51]
    code.fx_kwargs.pop("get_decomp_fn", None)
    for name in _TEXTS:
        if isinstance(getattr(code, name, None), str):
            setattr(code, name, "")
    entry.aot_forward_graph_str = None
    return pickle.dumps((entry, *rest))


def without_input_checks(saved: bytes) -> bytes:
    """The same result, whose code does not look at the shapes and strides of its inputs."""
    entry, *rest = pickle.loads(saved)
    code = entry.compiled_fw.result
    code.source_code = _CHECK_OF_INPUT.sub("", code.source_code)
    return pickle.dumps((entry, *rest))


def is_whole(saved: bytes) -> bool:
    """Is the code that was generated all of a result, so that it may be called by itself?

    Private torch: what its runtime does around the code. Nothing, where no output is an input or a
    view of one, and no write of an input is left to be done.
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
    """Within, a result is loaded without what torch does for its own tests of its cache.

    Args:
        loaded: is given Inductor's object of each.

    Private torch: for these it imports the compiler. With Triton's kernels that is imported anyway.
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
    """Kernels that are torch's own functions, and all others where the compiler has them."""

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
    """As the code for planned memory has it."""
    from torch._inductor.codegen.memory_planning import _align

    return _align(nbytes)
