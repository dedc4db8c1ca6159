"""Does backward compute again what its kernels can compute while they read, and nothing else?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.graph.backend.codegen_memory import GeneratedGlobals
from partita.graph.graph_nodes import drop_unused, note_of, subgraphs_in
from partita.graph.passes import PASSES
from partita.graph.verify import verify
from partita.testing.allocated_bytes import counted
from tests.programs.graph_text import program_of, text_of

SILU = """
    x: argument f32[4, 8]
    w: argument f32[8, 8]
    gate = aten.mm.default(x, w)
    s = aten.silu.default(gate)
    m = aten.mul.Tensor(s, x)
    y = aten.mm.default(m, w)
    a = aten.mul.Tensor(y, s)  # phase='backward'
    b = aten.mul.Tensor(a, gate)  # phase='backward'
    return y, b
"""
"""Backward reads `s`, and `gate` beside it."""

GATHER = "kind='all_gather', reason='gather', op='B'"


def rewritten(text):
    program = program_of(text)
    PASSES["free_remat"](program)
    drop_unused(program.graph.graph)
    verify(program, "free_remat")
    return program


def repeated(text):
    """The names of the operators that backward computes again."""
    nodes = [n for n in rewritten(text).graph.graph.nodes if note_of(n).again]
    assert all(note_of(n).phase == "backward" for n in nodes)
    return [n.target._opname for n in nodes]


def changed(*lines):
    """The program `SILU` with lines replaced: each by the name that it assigns, or added."""
    kept = SILU.strip().splitlines()
    for line in lines:
        name = line.split(" = ")[0].split(":")[0].split(" ")[0]
        found = [i for i, one in enumerate(kept) if one.split()[0].rstrip(":") == name]
        kept[found[0] : found[0] + 1] = line.splitlines()
    return "\n".join(kept)


def test_what_a_kernel_of_backward_can_compute_is_made_again_where_it_is_read():
    program = rewritten(SILU)
    assert text_of(program).splitlines() == [
        "gate = aten.mm.default(x, w)",
        "s = aten.silu.default(gate)",
        "m = aten.mul.Tensor(s, x)",
        "y = aten.mm.default(m, w)",
        "n1 = aten.silu.default(gate)",
        "a = aten.mul.Tensor(y, n1)",
        "b = aten.mul.Tensor(a, gate)",
        "return y, b",
    ]


def test_views_and_casts_on_the_way_are_made_again_too():
    text = changed(
        "s = aten.silu.default(gate)\nv = aten.view.default(s, [32])",
        "a = aten.view.default(y, [32])  # phase='backward'\n"
        "c = aten.mul.Tensor(a, v)  # phase='backward'\n"
        "d = aten._to_copy.default(c, dtype=torch.float64)  # phase='backward'",
        "b = aten.mul.Tensor(d, 2.0)  # phase='backward'\n"
        "e = aten.mul.Tensor(a, 2.0)  # phase='backward'\n"
        "f = aten.mul.Tensor(gate, 2.0)  # phase='backward'",
        "return y, b, f",
    )
    assert repeated(text) == ["silu", "view"]


def test_a_chain_of_calls_goes_back_to_the_first_value_that_is_kept():
    text = changed("s = aten.silu.default(gate)\nt = aten.tanh.default(s)").replace(
        "y, s)", "y, t)"
    )
    assert repeated(text) == ["silu", "tanh"]
    chain = "s = aten.silu.default(gate)\n" + "\n".join(
        f"t{i} = aten.tanh.default({f't{i - 1}' if i else 's'})" for i in range(8)
    )
    assert repeated(changed(chain).replace("y, s)", "y, t6)")) == ["silu", *["tanh"] * 7]
    assert repeated(changed(chain).replace("y, s)", "y, t7)")) == []  # nine calls


CAST = """
    x: argument bf16[4, 8]
    w: argument bf16[8, 8]
    h = aten.mm.default(x, w)
    s = aten._to_copy.default(h, dtype=torch.float32)
    y = aten.mul.Tensor(s, s)
    a = aten.mul.Tensor(s, 2.0)  # phase='backward'
    return y, a
"""
"""Backward reads a cast, and nothing that it is made of."""


def test_of_a_cast_to_a_wider_type_the_operand_is_kept():
    assert repeated(CAST) == ["_to_copy"]
    viewed = CAST.replace("aten._to_copy.default(h", "aten._to_copy.default(v").replace(
        "    s =", "    v = aten.view.default(h, [32])\n    s ="
    )
    assert repeated(viewed) == ["view", "_to_copy"]


KEPT = {
    "it is a cast to a narrower type": CAST.replace("float32", "float16")
    .replace("x: argument bf16", "x: argument f32")
    .replace("w: argument bf16", "w: argument f32"),
    "it is a cast of an argument": CAST.replace("default(h,", "default(x,"),
    "it is a cast of a result": CAST.replace("return y, a", "return y, a, h"),
    "it is a cast of a piece of a large value": CAST.replace(
        "    s = aten._to_copy.default(h",
        "    v = aten.slice.Tensor(h, 0, 0, 1)\n    s = aten._to_copy.default(v",
    ),
    "nothing else keeps its source": changed("b = aten.mul.Tensor(a, y)  # phase='backward'"),
    "backward reads its source before it is made": changed(
        "s = aten.mul.Tensor(gate, 3.0)  # phase='backward'\nz = aten.silu.default(gate)",
        "m = aten.mul.Tensor(z, x)",
        "a = aten.mul.Tensor(y, z)  # phase='backward'",
        "b = aten.mul.Tensor(a, s)  # phase='backward'",
    ),
    "a product reads it": changed("a = aten.mm.default(s, w)  # phase='backward'"),
    "a product runs between its readers": changed(
        "b = aten.mm.default(a, w)  # phase='backward'\n"
        "c = aten.mul.Tensor(s, gate)  # phase='backward'\n"
        "d = aten.add.Tensor(b, c)  # phase='backward'",
        "return y, d",
    ),
    "it is a result": changed("return y, b, s"),
    "a view of it is a result": changed(
        "s = aten.silu.default(gate)\nv = aten.view.default(s, [32])", "return y, b, v"
    ),
    "a policy keeps it": changed("s = aten.silu.default(gate)  # region=1, kept=True"),
    "an update reads it": changed(
        "b = aten.mul.Tensor(a, gate)  # phase='backward'\n"
        "c = aten.mul.Tensor(s, 2.0)  # phase='update'",
        "return y, b, c",
    ),
    "a later forward reads it": changed(
        "b = aten.mul.Tensor(a, gate)  # phase='backward'\nc = aten.mul.Tensor(s, 2.0)",
        "return y, b, c",
    ),
    "it is drawn": changed("s = aten.rand_like.default(gate)"),
    "it is made of a number that is drawn": changed(
        "gate = aten.mm.default(x, w)\nr = aten.rand_like.default(gate)",
        "s = aten.mul.Tensor(gate, r)",
    ),
    "its sources, which backward reads elsewhere, have more bytes": changed(
        "gate = aten.mm.default(x, w)\nother = aten.mm.default(x, w)",
        "s = aten.mul.Tensor(gate, other)",
        "b = aten.mm.default(a, w)  # phase='backward'\n"
        "c = aten.mul.Tensor(gate, other)  # phase='backward'\n"
        "d = aten.mul.Tensor(b, c)  # phase='backward'",
        "return y, d",
    ),
    "its source is written before it is read": changed(
        "x: buffer f32[4, 8]",
        "s = aten.silu.default(x)",
        "a = aten.mul.Tensor(y, x)  # phase='backward'\n"
        "n = aten.add.Tensor(x, 1.0)\n"
        "c = aten.copy_.default(x, n)\n"
        "e = aten.mul.Tensor(a, s)  # phase='backward'",
        "b = aten.mul.Tensor(e, gate)  # phase='backward'",
    ),
    "its source is gathered": f"""
        x: argument f32[8]
        w: parameter f32[4]
        g = gather(w)  # {GATHER}
        h = wait(g)  # {GATHER}
        s = aten.silu.default(h)
        y = aten.mul.Tensor(s, x)
        a = aten.mul.Tensor(y, s)  # phase='backward'
        b = aten.mul.Tensor(a, h)  # phase='backward'
        return y, b
    """,
}


@pytest.mark.parametrize("why", KEPT)
def test_a_value_is_kept_if(why):
    assert repeated(KEPT[why]) == []


# -- in steps --------------------------------------------------------------------------------------

WIDTH, ROWS = 16, 64


class Block(nn.Module):
    """A norm and a SwiGLU."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))), torch.randn(ROWS, WIDTH)


def trained(mesh, **options):
    """Losses of two steps, and the compiled step."""
    model, x = make_model()
    pt.zero(model, mesh)
    x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = pt.compile(step, backend="graph", **options)
    return [step(x).item() for _ in range(2)], step


def gradients_of_step(**options):
    """The compiled step, and its gradients. Its predicted peak is the counted one."""
    model, x = make_model()

    def step(x):
        return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    step = pt.compile(step, **options)
    found = step(x)
    assert counted(lambda: step(x)) == step.memory.peak
    return step, found


def silus(step):
    graph = step.program.graph.graph
    graphs = [graph, *(s.graph.graph for s in subgraphs_in(graph))]
    return sum("silu.default" in str(n.target) for g in graphs for n in g.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("sections", [None, True])
def test_a_step_that_makes_values_again_has_the_same_bits_and_a_lower_peak(sections):
    def run(mesh, **options):
        losses, step = trained(mesh, sections=sections, **options)
        return losses, silus(step), step.memory.peak

    with pt.ranks(dp=2) as world:
        found = world.run(run)
        kept = world.run(run, without="free_remat")
    for (losses, again, peak), (wanted, once, most) in zip(found, kept, strict=True):
        assert losses == wanted
        assert again == 2 * once
        assert peak < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sections"),
    [
        ("graph", None),
        ("graph", True),
        pytest.param("inductor", None, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_the_predicted_peak_is_the_counted_one_and_is_no_higher(backend, sections):
    options = {"backend": backend, "sections": sections}
    step, found = gradients_of_step(**options)
    without, wanted = gradients_of_step(**options, without="free_remat")
    if backend == "graph" or sections:  # else Inductor fuses across the turn by itself
        assert step.memory.peak < without.memory.peak
    if backend == "graph":
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    else:
        torch.testing.assert_close(found, wanted)


def test_a_region_saves_less_for_backward():
    def run(without):
        torch.manual_seed(0)
        block = pt.compile(Block(), backend="graph", without=without)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.nbytes) or t, lambda t: t
        ):
            y = block(x)
        y.square().sum().backward()
        return [x.grad, *(p.grad for p in block.parameters())], sum(saved)

    (found, less), (wanted, more) = run(()), run("free_remat")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert less <= more - 4 * ROWS * 4 * WIDTH  # the result of silu


def test_a_result_of_a_region_may_be_written_before_backward():
    """Backward of `h.float().square()` reads the cast, which eager keeps."""

    def run(compiled):
        torch.manual_seed(0)
        w = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)

        def region(x):
            h = x @ w
            return h.detach(), h.float().square()

        x = torch.ones(4, 8, dtype=torch.bfloat16)
        region = pt.compile(region, backend="graph") if compiled else region
        h, y = region(x)
        h.zero_()
        y.sum().backward()
        return w.grad

    assert torch.equal(run(True), run(False))


def test_a_copy_of_a_misaligned_operand_takes_memory():
    copy = GeneratedGlobals()["copy_if_misaligned"]
    x = torch.zeros(9, dtype=torch.bfloat16)
    assert copy(x) is x and copy(x[8:]).data_ptr() == x[8:].data_ptr()
    assert copy(x[1:]).data_ptr() != x[1:].data_ptr()
