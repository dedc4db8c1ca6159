"""Captures a step of a model for GPUs that are not there, and tells as JSON what its graph is.

Run by `test_capture_for_cuda`, in a torch that believes in a GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

import partita as pt
from partita.app.models import GPT
from partita.capture.fakes import captured_for
from partita.testing.believed_gpu import believe_in_autocast

CONTEXT = 32
_ATEN = torch.ops.aten


def gpt() -> Any:
    model = GPT(layers=2, width=64, heads=4, context=CONTEXT).bfloat16()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())

    return model, loss


def cast() -> Any:
    """A model in float32, whose products autocast makes in bfloat16."""
    believe_in_autocast()
    model = GPT(layers=2, width=64, heads=4, context=CONTEXT)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    return model, loss


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=CONTEXT,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    return model, lambda x: model(input_ids=x, labels=x).loss


FOREACH = {"foreach": True}


def captured(name: str, device: str, how: dict[str, bool] = FOREACH, **options: Any) -> Any:
    """The program of a ZeRO-3 step on two ranks, and the compiled step that it is of.

    `how` AdamW steps, as it takes it itself."""
    mesh = pt.dry_mesh(dp=2, device_type="meta")
    with torch.device("meta"):
        model, loss_of = {"gpt": gpt, "cast": cast, "llama": llama}[name]()
        tokens = torch.zeros(2, CONTEXT, dtype=torch.long)
    pt.zero(model, mesh, "dp", stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **how)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss

    fast = pt.compile(step, backend="graph", **options)
    with captured_for(device):
        program = fast.capture(pt.DTensor.from_local(tokens, mesh, [pt.Shard(0)]))
    return program, fast


def told(name: str) -> dict[str, Any]:
    """What the tests look at."""
    program, fast = captured(name, "cuda:0")
    other, _ = captured(name, "cuda:1")
    _, without = captured(name, "cuda:0", without=("regather",))
    calls = [n for n in program.graph.graph.nodes if n.op == "call_function"]
    devices = Counter(
        n.meta["val"].device.type
        for n in calls
        if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].ndim
    )
    return {
        "calls": Counter(str(n.target) for n in calls),
        "devices": devices,
        "products": Counter(
            str(n.meta["val"].dtype)
            for n in calls
            if n.target in (_ATEN.mm.default, _ATEN.addmm.default)
        ),
        "keys": [program.key, other.key],
        "text": str(fast.graph),
        "peak": fast.memory.peak,
        "peak without regather": without.memory.peak,
    }


def told_of_optimizers() -> dict[str, Any]:
    """By how AdamW steps: the key, and what the graph takes from the host."""
    ways = {
        "foreach": FOREACH,
        "capturable": FOREACH | {"capturable": True},
        "fused": {"fused": True},
        "one by one": {"foreach": False},
    }
    found = {}
    for way, how in ways.items():
        program, _ = captured("gpt", "cuda:0", how)
        nodes = program.graph.graph.find_nodes(op="placeholder")
        of_host = {
            given.kind
            for given, node in zip(program.inputs, nodes, strict=True)
            if node.meta["val"].device.type == "cpu"
        }
        found[way] = {"key": program.key, "of the host": sorted(of_host)}
    return found


def told_of_recording(name: str) -> dict[str, Any]:
    """What of a step is recorded as a CUDA graph, and what is left to the host."""
    program, fast = captured(name, "cuda:0")
    whole, _ = captured(name, "cuda:0", cuda_graphs=False)
    split = program.call.split

    def devices(graph: Any) -> list[str]:
        values = [n.meta.get("val") for n in graph.nodes]
        return sorted({v.device.type for v in values if isinstance(v, torch.Tensor)})

    recorded = split.device.graph.graph
    calls = [n for n in recorded.nodes if n.op == "call_function"]
    crossing = recorded.find_nodes(op="placeholder")[len(split.device_inputs) :]
    meets = {
        str(read.meta["val"].dtype)
        for node in crossing
        for user in node.users
        for read in user.all_input_nodes
    }
    return {
        "on the host": devices(split.host.graph),
        "recorded": devices(recorded),
        "calls": len(calls),
        "calls of the whole": sum(n.op == "call_function" for n in whole.graph.graph.nodes),
        "attention": sum("scaled_dot_product_flash" in str(n.target) for n in calls),
        "collectives": sum("c10d" in str(n.target) for n in calls),
        "crossing": len(crossing),
        "meets": sorted(meets),
        "keys differ": program.key != whole.key,
        "why not": fast.why_not_recorded,
        "is recorded": fast.is_recorded,
        "kept": fast.memory.recorded - fast.memory.peak,
    }


if __name__ == "__main__":
    asked, *rest = sys.argv[1:]
    if asked == "optimizers":
        print(json.dumps(told_of_optimizers()))
    else:
        print(json.dumps(told_of_recording(asked) if rest == ["recorded"] else told(asked)))
