"""A bench of kernels: how many a training step launches on a GPU, and the bytes that they access.

No GPU is needed. Each step is captured for a simulated GPU and lowered by Inductor. The kernels of
the generated code are counted, and not run. This needs the package `triton`: `pip install
partita[gpu-lowering]`.

The steps are torch.compile's on the plain model (model and loss compiled under autocast; the
optimizer steps eagerly) and partita's compiled steps (plain, data parallel and ZeRO-3, with AdamW).
Bytes are Inductor's: each operand and result of a kernel counts once. "a block" is the increase for
one more block. "peak" is the memory that a compiled step allocates at most, as `step.memory.peak`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import partita as pt
from partita.capture.fakes import captured_for
from partita.comm.collective import WAIT
from partita.graph.backend.codegen_memory import memory_of_code
from partita.graph.backend.cpp_kernels import KernelCompiler
from partita.graph.backend.inductor import cut_into_sections, lower_program
from partita.graph.graph_nodes import is_collective, subgraph_of
from partita.tensor.op_facts import facts_of
from partita.testing.believed_gpu import (
    CHIPS,
    GPU,
    believe_in_autocast,
    fake_gpu_environment,
    lower_for,
)

from .rivals import cross_entropy
from .steps import MIB, MODELS, StepShape

WAYS = {
    "torch": "torch.compile, model and loss",
    "plain": "pt.compile, one rank",
    "dp": "pt.compile, data parallel",
    "zero3": "pt.compile, ZeRO-3",
}
KINDS = (
    *("products", "attention", "pointwise", "reductions", "packing", "optimizer"),
    *("communication", "other"),
)
"""Kinds of kernels. Packing only moves or casts elements, next to a collective."""
RANKS = 8
_SUM_OF_PARTS = re.compile(r"= workspace_\d+\[.*\.sum\(dim=0\)")

Counts = Counter[tuple[str, str]]
"""Maps ("launches", kind) and ("bytes", kind) to a number, ("peak", "bytes") to the peak memory."""


# -- the kernels of generated code -----------------------------------------------------------------


@contextmanager
def counting_kernels(counts: Counts) -> Iterator[None]:
    """Counts the kernels that Inductor generates inside the `with` block, into `counts`.

    Private torch: Inductor's scheduler, and the method that writes the launch of a Triton kernel.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    launched: list[Any] = []
    write_call, generate = PythonWrapperCodegen.generate_kernel_call, GraphLowering.codegen

    def record_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(V.graph.scheduler.current_node)
        return write_call(self, *args, **kwargs)

    def count_graph(self: Any) -> Any:
        launched.clear()
        code = generate(self)
        counts.update(_count_kernels(self.scheduler, launched))
        # If a kernel returns partial sums, a call of torch adds them.
        counts["launches", "reductions"] += len(_SUM_OF_PARTS.findall(code[0].value))
        return code

    with (
        mock.patch.object(PythonWrapperCodegen, "generate_kernel_call", record_launch),
        mock.patch.object(GraphLowering, "codegen", count_graph),
    ):
        yield


def _count_kernels(scheduler: Any, launched: Sequence[Any]) -> Counts:
    counts: Counts = Counter()
    for node in filter(_runs_on_gpu, launched):
        counts["launches", _kind_of_triton(node)] += 1
    for node in filter(_runs_on_gpu, scheduler.nodes):
        kind, is_launch = _kind_of(node)
        counts["launches", kind] += is_launch
        counts["bytes", kind] += _count_bytes(node)
    return +counts


def _runs_on_gpu(node: Any) -> bool:
    """False if generated code computes a node on the host, such as an optimizer's step counts."""
    device = node.get_device()
    return device is None or device.type == GPU.type


def _kind_of(node: Any) -> tuple[str, bool]:
    """Returns the kind of a scheduler node, and True if it is a kernel of a library."""
    if not node.is_extern() and not node.is_template():
        return _kind_of_triton(node), False
    what = node.node
    if type(what).__name__ == "MultiOutput":  # an item of a call with several results
        name, is_launch = str(getattr(what.inputs[0], "op_overload", "")), False
    else:
        called = getattr(what, "op_overload", None) or getattr(what, "python_kernel_name", "")
        name, is_launch = str(called), "wait_tensor" not in str(called)
    if "c10d" in name or "partita.all_gather" in name:
        return "communication", is_launch
    if "scaled_dot_product" in name:
        return "attention", is_launch
    is_product = node.is_template() or any(part in name for part in ("mm", "convolution"))
    return "products" if is_product else "other", is_launch


def _kind_of_triton(node: Any) -> str:
    """Returns the kind of a generated kernel; the first that fits if it does several things."""
    inputs = _graph_inputs()
    if any(name in inputs for b in node.get_outputs() for name in b.get_mutations()):
        return "optimizer"
    if node.is_reduction():
        return "reductions"
    origins = [o for part in node.get_nodes() if part.node for o in part.node.get_origins()]
    calls = [o for o in origins if o.op == "call_function"]
    if calls and all(map(_only_moves, calls)) and any(map(_touches_collective, calls)):
        return "packing"
    return "pointwise"


def _graph_inputs() -> Any:
    from torch._inductor.virtualized import V

    return V.graph.graph_inputs


def _only_moves(node: torch.fx.Node) -> bool:
    facts = facts_of(node.target)
    casts = facts.casts or node.target is torch.ops.prims.convert_element_type.default
    return facts.moves or casts or facts.is_view or is_collective(node)


def _touches_collective(node: torch.fx.Node) -> bool:
    """True if the result of a node enters a collective, or its operand comes from one."""
    for around in (lambda n: n.all_input_nodes, lambda n: n.users):
        seen, waiting = set[torch.fx.Node](), [node]
        while waiting:
            for other in around(waiting.pop()):
                if is_collective(other) or other.target is WAIT:
                    return True
                if other not in seen and other.op == "call_function" and _only_moves(other):
                    seen.add(other)
                    waiting.append(other)
    return False


def _count_bytes(node: Any) -> int:
    """Returns the bytes that a scheduler node reads and writes.

    Each result of a call with several results is a node. For library kernels Inductor's own count
    is too large: it includes whole buffers of views, and buffers that are not read.
    """
    result = node.node
    if not node.is_extern():
        return int(node.get_read_write_buffers_sizes())
    if type(result).__name__ == "_WaitKernel":
        return 0
    operands = [] if type(result).__name__ == "MultiOutput" else result.inputs
    parts = {str(part): part for part in (*operands, result) if part.maybe_get_size() is not None}
    return sum(math.prod(map(int, p.get_size())) * p.get_dtype().itemsize for p in parts.values())


# -- ways ------------------------------------------------------------------------------------------


def count(
    shape: StepShape,
    way: str,
    chip: str,
    optimizer: dict[str, bool],
    without: Sequence[str] = (),
) -> Counts:
    """Returns the numbers of a step's GPU kernels. Needs a process with `fake_gpu_environment`.

    Args:
        shape: the sizes of the model and the batch.
        way: how to train, a key of `WAYS`.
        chip: the GPU for which kernels are generated, one of `CHIPS`.
        optimizer: options of AdamW, such as `{"foreach": True}`.
        without: names of the passes that are left out of a compiled step.
    """
    believe_in_autocast()
    if way == "torch":
        return _count_of_torch(shape, chip)
    step, batch = _make_step(shape, way, optimizer, without)
    with captured_for(GPU):
        program = step.capture(*batch)
    with lower_for(chip, RANKS):
        return _count_of_program(program)


def _meta_tokens(shape: StepShape) -> torch.Tensor:
    return torch.zeros(shape.batch, shape.context, dtype=torch.long, device="meta")


def _make_step(
    shape: StepShape, way: str, how: dict[str, bool], without: Sequence[str]
) -> tuple[Any, list[Any]]:
    model = shape.make("meta")
    batch: list[Any] = [_meta_tokens(shape)] * 2
    around: Any = partial(torch.autocast, GPU.type, dtype=torch.bfloat16)
    if way != "plain":
        mesh = pt.dry_mesh(dp=RANKS, device_type="meta")
        if way == "zero3":
            mixed = pt.MixedPrecision(
                torch.bfloat16, grad_dtype=torch.float32, reduce_dtype=torch.float32
            )
            pt.zero(model, mesh, stage=3, precision=mixed)
            around = nullcontext
        else:
            pt.zero(model, mesh, stage=0)
        batch = [pt.DTensor.from_local(x, mesh, [pt.Shard(0)]) for x in batch]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)  # type: ignore[arg-type]

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with around():
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return pt.compile(step, backend="graph", cuda_graphs=False, without=without), batch


def _count_of_program(program: Any) -> Counts:
    cut = cut_into_sections(program, None)
    parts = [program.flat()] if cut is None else cut.different
    whole: Any = parts[0] if cut is None else program
    of_part, code = {}, {}
    for part in parts:
        of_part[part], code[part] = _count_of_graph(part)
    counts: Counts = Counter()
    if cut is None:
        counts.update(of_part[whole])
    else:
        for node in cut.outer.graph.nodes:
            section = subgraph_of(node)
            if section is not None:
                counts.update(of_part[section])
            elif is_collective(node):
                counts["launches", "communication"] += 1
    counts["peak", "bytes"] = memory_of_code(code, whole, cut).peak
    return counts


def _count_of_graph(program: Any) -> tuple[Counts, Any]:
    """The kernels of a graph, and its generated code."""
    counts: Counts = Counter()
    with counting_kernels(counts), warnings.catch_warnings(), KernelCompiler() as kernels:
        warnings.simplefilter("ignore")  # it cannot be saved
        lowered = lower_program(program, kernels)
    return counts, lowered.code


def _count_of_torch(shape: StepShape, chip: str) -> Counts:
    """Counts the kernels of the plain model and of the loss, compiled by torch.compile.

    Dynamo traces tensors on `meta`. Its graphs are lowered for the chip, but run on `meta`.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    counts: Counts = Counter()

    def lower(graph: Any, examples: list[Any]) -> Any:
        mode = torch._guards.detect_fake_mode(examples)
        given = [_move_fake(mode, x) if isinstance(x, torch.Tensor) else x for x in examples]
        backward_too = functorch_config.patch(force_non_lazy_backward_lowering=True)
        with counting_kernels(counts), lower_for(chip, RANKS), backward_too:
            compile_fx(_copy_to_device(graph), given)
        return graph.forward

    compiled = torch.compile(shape.make("meta"), backend=lower, fullgraph=True)
    loss = torch.compile(cross_entropy, backend=lower, fullgraph=True)
    x = _meta_tokens(shape)
    with torch.autocast(GPU.type, dtype=torch.bfloat16):
        logits = compiled(x)
        loss(logits.bfloat16().detach().requires_grad_(), x)
    return counts


def _copy_to_device(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a copy of a graph of meta tensors whose new tensors are on the GPU."""
    moved = copy.deepcopy(graph)
    for node in moved.graph.nodes:
        if str(node.kwargs.get("device")) == "meta":
            node.kwargs = {**node.kwargs, "device": GPU}
    moved.recompile()
    return moved


def _move_fake(mode: Any, x: torch.Tensor) -> torch.Tensor:
    with mode:
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)
    return torch.nn.Parameter(moved) if x.requires_grad and x.is_leaf else moved


# -- the command -----------------------------------------------------------------------------------


def lower_in_process(
    environment: dict[str, str],
    model: str,
    way: str,
    blocks: int,
    without: Sequence[str] = (),
    **options: str,
) -> dict[str, Counts]:
    """Counts a step's GPU kernels in a new process.

    Args:
        environment: the environment variables of the process, from `fake_gpu_environment`.
        model: the name of the model, a key of `MODELS`.
        way: how to train, a key of `WAYS`.
        blocks: the number of blocks.
        without: names of passes that are left out.
        options: `chip`, and `optimizer`, "foreach" or "fused".

    Returns:
        "step": the counts of a step. "block": how many more it has with one more block.

    Raises:
        RuntimeError: the process failed. The message has the end of its stderr.
    """
    how = [word for name, value in options.items() for word in (f"--{name}", value)]
    how += ["--without", *without]
    run = [sys.executable, "-m", __spec__.name, "--model", model, "--blocks", str(blocks), *how]
    done = subprocess.run([*run, "--lower", way], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{WAYS[way]} was not lowered:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        name: Counter({tuple(key.split()): n for key, n in counts.items()})
        for name, counts in found.items()
    }


def _print_lowered(options: argparse.Namespace) -> None:
    shape = replace(MODELS[options.model], layers=options.blocks)
    how = options.lower, options.chip, {options.optimizer: True}, options.without
    less, more = (count(replace(shape, layers=shape.layers + n), *how) for n in (0, 1))
    more.subtract(less)
    found = {"step": less, "block": more}
    print(json.dumps({n: {" ".join(k): v for k, v in c.items()} for n, c in found.items()}))


def _print_table(found: dict[str, dict[str, Counts]], of: str) -> None:
    print(f"\n| kernels of {of}; MB read and written |" + "|".join(WAYS[w] for w in found) + "|")
    print("|---" * (len(found) + 1) + "|")
    part = "block" if of == "a block" else "step"
    for kind in KINDS:
        cells = [
            _format_cell(c[part]["launches", kind], c[part]["bytes", kind]) for c in found.values()
        ]
        if any(cells):
            print(f"| {kind} | " + " | ".join(cells) + " |")
    cells = [
        _format_cell(*(sum(c[part][what, k] for k in KINDS) for what in ("launches", "bytes")))
        for c in found.values()
    ]
    print("| all | " + " | ".join(cells) + " |")
    peaks = [c[part]["peak", "bytes"] for c in found.values()]
    print("| peak, MiB | " + " | ".join(f"{n / MIB:,.0f}" if n else "" for n in peaks) + " |")


def _format_cell(launches: int, nbytes: int) -> str:
    return f"{launches}; {nbytes / 1e6:,.0f}" if launches or nbytes else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `partita bench kernels`. Returns the exit code.

    Args:
        argv: the command line without the program's name; None for `sys.argv`.
    """
    parser = argparse.ArgumentParser(
        prog="partita bench kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--chip", choices=CHIPS, default="h100")
    parser.add_argument("--optimizer", choices=("foreach", "fused"), default="foreach")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="PASS", help="passes to leave out"
    )
    parser.add_argument("--lower", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if find_spec("triton") is None:
        parser.error("this bench needs the package triton: pip install triton")
    if options.lower:
        _print_lowered(options)
        return 0
    how = {"chip": options.chip, "optimizer": options.optimizer}
    with tempfile.TemporaryDirectory() as folder:
        environment = fake_gpu_environment(Path(folder))
        found = {
            way: lower_in_process(
                environment, options.model, way, options.blocks, options.without, **how
            )
            for way in options.ways
        }
    left_out = "".join(f", without {name}" for name in options.without)
    print(f"{options.model}, {options.blocks} blocks, {options.chip}, {RANKS} ranks{left_out}")
    _print_table(found, "a step")
    _print_table(found, "a block")
    return 0


if __name__ == "__main__":
    sys.exit(main())
