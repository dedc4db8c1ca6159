"""What of a compiled result does it take to run it?

Torch saves with a result what it would take to compile it again, and the code that it generates
imports the compiler for the sake of a few names. To import all that is most of the time of a load.
So it is left out of what is stored, and the names are found here. What a new torch writes in
another way is left as it is.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["align", "extern_kernels", "lighter", "without_compiler"]

_LINES = {
    "from torch._inductor.select_algorithm import extern_kernels\n": (
        "from partita.compile.light import extern_kernels\n"
    ),
    "from torch._inductor.codegen.memory_planning import _align as align\n": (
        "from partita.compile.light import align\n"
    ),
}
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

    def ready(code: Any, info: Any, constants: Any) -> Any:
        bundle = code._triton_bundle
        if bundle is not None and bundle.kernel_artifacts:
            found = whole(code, info, constants)
        else:
            code.after_deserialization(constants)
            found = code, info
        loaded(code)
        return found

    FxGraphCache.cache_hit_post_compile = staticmethod(ready)  # type: ignore[method-assign]
    try:
        yield
    finally:
        FxGraphCache.cache_hit_post_compile = staticmethod(whole)  # type: ignore[method-assign]


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
