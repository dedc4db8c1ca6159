"""A process that captures training steps of a model with given depths, and prints their times."""

import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import partita as pt
from partita.app.models.llama import Llama
from partita.compile import pipeline

from .place import bench_device
from .rivals import training
from .zero import Shape

_DEVICE = bench_device().type
_CALLS = 10
_seconds: dict[str, float] = {}


def _timed(name: str) -> None:
    """Makes a function of `pipeline` add its CPU seconds to `_seconds`."""
    inner = getattr(pipeline, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return inner(*args, **kwargs)
        finally:
            _seconds[name] = _seconds.get(name, 0.0) + time.process_time() - start

    setattr(pipeline, name, timed)


def _model(name: str, shape: Shape) -> torch.nn.Module:
    if name == "gpt":
        return shape.model()
    torch.manual_seed(0)
    width, heads = shape.width, shape.heads
    return Llama(
        layers=shape.layers, width=width, heads=heads, groups=heads // 2, context=shape.context
    ).to(_DEVICE)


def _transformer(name: str, layers: int, width: int) -> torch.nn.Module:
    """Returns a model of transformers with `layers` layers."""
    import transformers

    torch.manual_seed(0)
    text = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "use_cache": name == "hf-llama-cache",
    }
    if name == "hf-gemma3":
        config = transformers.Gemma3TextConfig(**text, head_dim=width // 4, sliding_window=8)
        return transformers.Gemma3ForCausalLM(config)  # type: ignore[no-any-return]
    if name == "hf-swin":
        depths = [2, 2, max(2, layers - 6), 2]
        config = transformers.SwinConfig(
            **{"image_size": 64, "patch_size": 4, "embed_dim": 16, "num_labels": 10},
            **{"depths": depths, "num_heads": [2] * 4, "window_size": 2},
        )
        return transformers.SwinForImageClassification(config)  # type: ignore[no-any-return]
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(**text)
    )


def _training_of(name: str, shape: Shape, mesh: Any) -> tuple[Any, list[Any]]:
    """Returns a step of a sharded model, and its arguments."""
    if not name.startswith("hf-"):
        rows = [pt.DTensor.from_local(t, mesh, [pt.Shard(0)]) for t in shape.tokens(1)]
        return training(pt.zero(_model(name, shape), mesh, stage=3)), rows
    model = pt.zero(_transformer(name, shape.layers, shape.width).to(_DEVICE), mesh, stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    if name == "hf-swin":
        given = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 10, (2,))}
    else:
        given = {"input_ids": torch.randint(0, 64, (2, 16))}
        given["labels"] = given["input_ids"]
    rows = [pt.DTensor.from_local(t.to(_DEVICE), mesh, [pt.Shard(0)]) for t in given.values()]

    def step(*values: Any) -> Any:
        optimizer.zero_grad()
        loss = model(**dict(zip(given, values, strict=True))).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, rows


def _seconds_of_all() -> float:
    """Returns the CPU seconds of this process, and of its child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def _cold() -> Iterator[None]:
    """Uses empty caches of compiled code inside the `with` block."""
    import torch._inductor.config as inductor

    with tempfile.TemporaryDirectory() as folder, inductor.patch(compile_threads=1):
        os.environ["PARTITA_CACHE"] = f"{folder}/store"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        yield


def _first_step(name: str, layers: int, width: int, mesh: Any, backend: str) -> dict[str, float]:
    """Returns the seconds of the parts of a first call: capture, passes, and the rest."""
    shape = Shape(layers=layers, width=width, context=16, batch=2)
    train, rows = _training_of(name, shape, mesh)
    step = pt.compile(train, backend=backend, blocks=True)
    _seconds.clear()
    gc.collect()  # what the step before has left
    start = _seconds_of_all()
    if backend == "graph":
        step(*rows)
    else:
        with _cold():
            step(*rows)
    first = _seconds_of_all() - start
    calls = []
    for _ in range(_CALLS):
        start = time.process_time()
        step(*rows)
        calls.append(time.process_time() - start)
    capture, both = _seconds["capture_step"], _seconds["make_program"]
    return {
        "capture": capture,
        "passes": both - capture,
        "both": both,
        "first": first,
        "nodes": len(step.program.graph.graph.nodes),
        "call": statistics.median(calls),
    }


def main(name: str, width: int, backend: str, depths: Sequence[int]) -> None:
    """Captures a model's first step with each depth, and prints the times as lines of JSON.

    Args:
        name, width: the name of the model, and the width of a block.
        backend: the backend of `pt.compile`.
        depths: the numbers of blocks, one after the other.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = pt.init_device_mesh(_DEVICE, (2,), mesh_dim_names=("dp",))
    _timed("capture_step")
    _timed("make_program")
    _first_step(name, 1, width, mesh, backend)  # imports, and tables that are made once
    for layers in depths:
        print(json.dumps(_first_step(name, layers, width, mesh, backend)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], [*map(int, sys.argv[4:])])
