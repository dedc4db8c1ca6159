"""Graphs from text and back: what a test of a pass gives it, and what it finds there afterwards.

A line is an input (`w: parameter f32[4]`), a call (`y = aten.mul.Tensor(x, 2.0)`) or the results
(`return y, w`); what is noted of a call stands behind it (`# phase='backward', move=1`). Of
collectives over the axis "dp" of two ranks, whose arguments are always the same, only the operand
is written: `g = gather(w)`, `s = scatter(x)`, `r = reduce(x)`, `v = wait(g)`.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import partita as pt
from partita.comm.backends.backend import Backend
from partita.graph.graph_nodes import NOTE, Note
from partita.graph.program import Input, Output, Program
from partita.tensor.dtensor import short_dtype

__all__ = ["program_of", "text_of"]

_functional = torch.ops._c10d_functional
_COLLECTIVES = {
    "gather": (_functional.all_gather_into_tensor.default, (2, "dp")),
    "scatter": (_functional.reduce_scatter_tensor.default, ("sum", 2, "dp")),
    "reduce": (_functional.all_reduce.default, ("sum", "dp")),
    "wait": (_functional.wait_tensor.default, ()),
}
_DTYPES = {short_dtype(d): d for d in (torch.float32, torch.bfloat16, torch.float64, torch.int64)}


def program_of(text: str, backend: Backend | None = None) -> Program:
    """The program whose graph the text is, on a mesh of two ranks that is not there.

    Args:
        backend: that carries between them; without one each collective is carried as it is.
    """
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[str, fx.Node] = {}
    inputs: list[Input] = []
    results: list[fx.Node] = []
    for line in filter(None, map(str.strip, text.strip().splitlines())):
        said, _, noted = line.partition("#")
        if declared := re.fullmatch(r"(\w+): (\w+) (\w+)\[([\d, ]*)\]", said.strip()):
            name, kind, dtype, sizes = declared.groups()
            node = graph.placeholder(name)
            with mode:
                shape = [int(n) for n in sizes.split(",") if n.strip()]
                node.meta["val"] = torch.empty(shape, dtype=_DTYPES[dtype])
            inputs.append(Input(name, kind, node.meta["val"], len(inputs)))
        elif said.startswith("return "):
            results = [nodes[name.strip()] for name in said.removeprefix("return ").split(",")]
            continue
        else:
            name, _, called = said.partition(" = ")
            node = _add_call(graph, mode, name, called.strip(), nodes)
        node.meta[NOTE] = Note(**_read_note(noted))
        nodes[name] = node
    graph.output(tuple(results))
    wire = pt.dry_mesh(dp=2).wire
    wire.backend = backend or wire.backend
    _, structure = pytree.tree_flatten([0] * len(results))
    outputs = [Output("result", None) for _ in results]
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Program(module, inputs, outputs, structure, [], [], {"dp": (wire, ("dp",))})


def text_of(program: Program) -> str:
    """The calls and results of a program's graph; what a pass has made is called n1, n2, ..."""
    names: dict[fx.Node, str] = {}
    lines, new = [], 0
    for node in program.graph.graph.nodes:
        names[node] = node.name
        if node.op == "output":
            lines.append("return " + ", ".join(names[n] for n in node.args[0]))
        elif node.op == "call_function":
            if node.meta.get("of text") != node.name:  # a copy has its meta
                new += 1
                names[node] = f"n{new}"
            lines.append(f"{names[node]} = {_format_call(node, names)}")
    return "\n".join(lines)


def _add_call(
    graph: fx.Graph, mode: FakeTensorMode, name: str, called: str, nodes: dict[str, fx.Node]
) -> fx.Node:
    call: Any = ast.parse(called, mode="eval").body
    target, more = _COLLECTIVES.get(ast.unparse(call.func), (None, ()))
    if target is None:
        target = torch.ops
        for part in ast.unparse(call.func).split("."):
            target = getattr(target, part)

    def read(value: ast.expr) -> Any:
        if isinstance(value, ast.Name):
            return nodes[value.id]
        if isinstance(value, ast.List):
            return [read(v) for v in value.elts]
        if isinstance(value, ast.Attribute):  # torch.bfloat16
            return getattr(torch, value.attr)
        return ast.literal_eval(value)

    args = (*map(read, call.args), *more)
    kwargs = {k.arg: read(k.value) for k in call.keywords}
    node = graph.create_node("call_function", target, args, kwargs, name)
    given = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*given[0], **given[1])
    node.meta["of text"] = name
    return node


def _read_note(text: str) -> dict[str, Any]:
    call: Any = ast.parse(f"f({text.strip()})", mode="eval").body
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords}


def _format_call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    for name, (target, more) in _COLLECTIVES.items():
        if node.target is target and node.args[1:] == more:
            return f"{name}({names[node.args[0]]})"  # type: ignore[index]

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(show, value)) + "]"
        return repr(value)

    named = [f"{k}={show(v)}" for k, v in node.kwargs.items()]
    return f"{node.target}({', '.join([*map(show, node.args), *named])})"
