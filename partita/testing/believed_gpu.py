"""A simulated GPU: a torch built for CPUs captures and lowers programs for a GPU.

In a process with `fake_gpu_environment`, torch accepts tensors on `cuda` (`believed_gpu.cpp`), so
that steps can be captured for a GPU. With `lower_for` Inductor also generates code for a GPU, which
needs the package `triton`. That code cannot run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_OF_HOPPER: dict[str, Any] = {
    "name": "NVIDIA H100",
    "major": 9,
    "minor": 0,
    "gcnArchName": "",
    "uuid": "0",
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
}
_OF_AMPERE = {
    "name": "NVIDIA A100",
    "major": 8,
    "multi_processor_count": 108,
    "L2_cache_size": 40 << 20,
    "shared_memory_per_block_optin": 166912,
    "shared_memory_per_multiprocessor": 167936,
}
CHIPS = {"h100": _OF_HOPPER, "a100": _OF_HOPPER | _OF_AMPERE}
"""Maps a chip to its properties, which `torch.cuda.get_device_properties` returns."""


GPU = torch.device("cuda:0")
"""The simulated GPU."""


def fake_gpu_environment(folder: Path) -> dict[str, str]:
    """Builds a library in `folder` that simulates a GPU.

    Returns environment variables with which a process loads it.

    Raises:
        RuntimeError: it does not compile, because torch's headers have changed.
    """
    home, made = Path(torch.__file__).parent, folder / "believed_gpu.so"
    include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    libraries = [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
    source = str(Path(__file__).with_suffix(".cpp"))
    build = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *include, source, "-o", str(made)]
    done = subprocess.run([*build, *libraries], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source} does not compile:\n{done.stderr[-2000:]}")
    return {**os.environ, "LD_PRELOAD": str(made)}


def believe_in_autocast() -> None:
    """Makes autocast assume a GPU with bfloat16.

    Private torch: without a GPU, autocast warns and does nothing.
    """
    from torch.amp import autocast_mode

    autocast_mode.torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True


class _Kernel:
    """A Triton kernel that is not compiled."""

    def __getattr__(self, name: str) -> _Kernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Kernel:
        return self


@contextmanager
def lower_for(chip: str, ranks: int) -> Iterator[None]:
    """Makes Inductor generate code for a GPU inside the `with` block, without compiling it.

    Private torch: functions by which Inductor queries the driver are replaced.

    Args:
        chip: one of `CHIPS`.
        ranks: the size of each process group.
    """
    import torch._dynamo.repro.after_aot as after_aot
    import torch._inductor.codegen.triton as codegen_triton
    import torch._inductor.config as config
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._inductor.scheduler as scheduler
    import torch._inductor.utils as inductor_utils
    import torch.cuda as cuda
    import torch.distributed.distributed_c10d as c10d
    import torch.utils._triton as triton_utils
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    facts = CHIPS[chip]
    properties, major = SimpleNamespace(**facts), facts["major"]
    known = facts.keys() & set(DeviceProperties._fields)
    of_device = DeviceProperties("cuda", 0, cc=10 * major, **{name: facts[name] for name in known})
    target = GPUTarget("cuda", 10 * major, 32)
    believed = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: GPU,
    )
    answers: list[tuple[Any, dict[str, Any]]] = [
        (DeviceProperties, {"create": classmethod(lambda cls, device: of_device)}),
        (cuda, {"get_device_properties": properties, "get_device_capability": (major, 0)}),
        (cuda, {"is_available": True, "device_count": 1, "current_device": 0}),
        (cuda, dict.fromkeys(("synchronize", "init", "_lazy_init", "set_device", "set_rng_state"))),
        (cuda, {"_exchange_device": 0, "_maybe_exchange_device": 0}),
        (cuda, {"get_rng_state": torch.zeros(16, dtype=torch.uint8)}),
        (codegen_triton, {"triton_hash_with_backend": chip}),
        (triton_utils, {"triton_hash_with_backend": chip}),
        (AsyncCompile, {"triton": _Kernel(), "wait": None}),
        (joint_graph, {"lazy_init": None, "constant_fold_uniform_value": None}),
        (post_grad, {"lazy_init": None}),
        (PythonWrapperCodegen, {"generate_and_run_autotune_block": None}),
        (after_aot, {"_extract_distributed_info": {}}),
        (c10d, {"_get_group_size_by_name": ranks}),
    ]
    for name in ("has_triton", "has_triton_package", "has_triton_tma", "has_triton_tma_device"):
        for module in (triton_utils, inductor_utils, scheduler):
            answers.append((module, {name: "tma" not in name}))
    with ExitStack() as stack:
        stream = mock.patch.object(
            torch._C, "_cuda_getCurrentRawStream", _make_answer(0), create=True
        )
        stack.enter_context(stream)
        for owner, given in answers:
            for name, answer in given.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, _make_answer(answer)))
        options: dict[str, Any] = {
            "joint_graph_constant_folding": False,
            "triton.autotune_at_compile_time": False,
            "force_disable_caches": True,
        }
        stack.enter_context(config.patch(options))
        driver.set_active(believed)  # for good: there is no other
        yield


def _make_answer(answer: Any) -> Any:
    """Returns a function that gives an answer, whatever it is called with."""
    return answer if isinstance(answer, classmethod) else lambda *args, **kwargs: answer
