"""What does each pass make of a graph? Text in, text out."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from partita.comm.backends.backend import Backend
from partita.comm.backends.gloo import Gloo
from partita.graph.backend.section_cutter import sections_of_blocks
from partita.graph.graph_nodes import drop_unused
from partita.graph.passes import PASSES
from partita.graph.passes.remat import recompute
from tests.programs.graph_text import program_of, text_of


def rewritten(name: str, text: str, backend: Backend | None = None) -> str:
    """What the pass of this name, and what drops unused calls behind it, make of a graph."""
    program = program_of(text, backend)
    PASSES[name](program)
    drop_unused(program.graph.graph)
    program.graph.graph.lint()
    return text_of(program)


def said(text: str) -> str:
    return textwrap.dedent(text).strip()


GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
GATHERED = "kind='all_gather', reason='gather', before='8@dp', after='8'"


def test_a_graph_that_a_pass_leaves_alone_is_the_text_that_it_was():
    text = """
        x: argument f32[4, 8]
        y = aten.mul.Tensor(x, 2.0)
        z = aten.sum.dim_IntList(y, [0])
        return z
    """
    calls = said(text).split("\n", 1)[1]
    for name in PASSES:
        assert rewritten(name, text) == calls, name


def test_dedupe_carries_what_one_phase_gathers_twice_once():
    text = """
        w: parameter f32[4]
        a = gather(w)
        b = wait(a)
        c = gather(w)
        d = wait(c)
        e = aten.add.Tensor(b, d)
        return e
    """
    assert rewritten("dedupe", text) == said("""
        a = gather(w)
        b = wait(a)
        e = aten.add.Tensor(b, b)
        return e
    """)


def test_dedupe_lets_backward_gather_again():
    text = """
        w: parameter f32[4]
        a = gather(w)
        b = wait(a)
        c = gather(w)  # phase='backward'
        d = wait(c)  # phase='backward'
        e = aten.add.Tensor(b, d)
        return e
    """
    assert rewritten("dedupe", text).count("gather") == 2


@pytest.mark.parametrize("numbers", ["1.0, 1.0", "1, 1.0", "True, 1"])
def test_dedupe_tells_equal_numbers_of_other_types_apart(numbers):
    one, other = numbers.split(", ")
    text = f"""
        w: parameter f32[4]
        a = aten.view.default(w, [2, 2])
        b = aten.view.default(w, [2, 2])
        c = aten.mul.Tensor(a, {one})
        d = aten.mul.Tensor(b, {other})
        return c, d
    """
    found = rewritten("dedupe", text)
    assert found.count("view") == 1 and found.count("mul") == 2


def test_cancel_takes_out_a_move_that_is_followed_by_its_inverse():
    text = """
        x: argument f32[4]
        a = gather(x)  # move=1, kind='all_gather', before='8@dp', after='8'
        b = wait(a)  # move=1, kind='all_gather', before='8@dp', after='8'
        c = aten.slice.Tensor(b, 0, 0, 4)  # move=2, kind='slice', before='8', after='8@dp'
        d = aten.mul.Tensor(c, 2.0)
        return d
    """
    assert rewritten("cancel", text) == said("""
        d = aten.mul.Tensor(x, 2.0)
        return d
    """)


def test_cancel_keeps_the_first_move_where_others_read_what_it_gives():
    text = """
        x: argument f32[4]
        a = gather(x)  # move=1, kind='all_gather', before='8@dp', after='8'
        b = wait(a)  # move=1, kind='all_gather', before='8@dp', after='8'
        c = aten.slice.Tensor(b, 0, 0, 4)  # move=2, kind='slice', before='8', after='8@dp'
        return c, b
    """
    assert rewritten("cancel", text) == said("""
        a = gather(x)
        b = wait(a)
        return x, b
    """)


def test_cancel_keeps_a_reduction_and_what_follows_it():
    text = """
        x: argument f32[8]
        a = reduce(x)  # move=1, kind='all_reduce', before='8 {sum dp}', after='8'
        b = wait(a)  # move=1, kind='all_reduce', before='8 {sum dp}', after='8'
        c = aten.slice.Tensor(b, 0, 0, 4)  # move=2, kind='slice', before='8', after='8 {sum dp}'
        return c
    """
    assert rewritten("cancel", text) == said("""
        a = reduce(x)
        b = wait(a)
        c = aten.slice.Tensor(b, 0, 0, 4)
        return c
    """)


def test_cast_narrows_a_value_before_it_travels():
    text = """
        w: parameter f32[4]
        a = gather(w)  # kind='all_gather'
        b = wait(a)
        c = aten._to_copy.default(b, dtype=torch.bfloat16)
        return c
    """
    assert rewritten("cast", text) == said("""
        n1 = aten._to_copy.default(w, dtype=torch.bfloat16)
        a = gather(n1)
        b = wait(a)
        return b
    """)


def test_cast_leaves_what_somebody_reads_in_all_its_bits():
    text = """
        w: parameter f32[4]
        a = gather(w)  # kind='all_gather'
        b = wait(a)
        c = aten._to_copy.default(b, dtype=torch.bfloat16)
        d = aten.exp.default(b)
        return c, d
    """
    assert rewritten("cast", text).startswith("a = gather(w)")


def test_regather_lets_a_parameter_go_and_gathers_it_again_for_backward():
    text = f"""
        w: parameter f32[4]
        x: argument f32[8]
        a = gather(w)  # {GATHERED}, op='block 0'
        b = wait(a)
        c = aten.mul.Tensor(x, b)
        d = aten.exp.default(c)
        e = aten.mul.Tensor(d, b)  # phase='backward'
        return e
    """
    assert rewritten("regather", text) == said("""
        a = gather(w)
        b = wait(a)
        c = aten.mul.Tensor(x, b)
        d = aten.exp.default(c)
        n1 = gather(w)
        n2 = wait(n1)
        e = aten.mul.Tensor(d, n2)
        return e
    """)


def test_bucket_gathers_the_parameters_of_a_block_together():
    text = f"""
        v: parameter f32[2]
        w: parameter f32[4]
        a = gather(v)  # {GATHERED}, op='block 0'
        b = wait(a)
        c = gather(w)  # {GATHERED}, op='block 0'
        d = wait(c)
        e = aten.sum.default(b)
        f = aten.mul.Tensor(d, e)
        return f
    """
    found = rewritten("bucket", text)
    assert found.count("gather(") == 1 and "aten.cat.default([n1, n2])" in found


@pytest.mark.parametrize("n", [1, 3])
def test_bucket_gives_pieces_in_the_memory_format_of_the_gathers(n):
    program = program_of(f"""
        v: parameter f32[{n}]
        w: parameter f32[4]
        a = gather(v)  # {GATHERED}, op='block 0'
        b = wait(a)
        c = gather(w)  # {GATHERED}, op='block 0'
        d = wait(c)
        e = aten.add.Tensor(b, 1)
        f = aten.add.Tensor(d, 1)
        return e, f
    """)
    PASSES["bucket"](program)
    reads = [c.args[0] for c in program.graph.graph.nodes if c.target is torch.ops.aten.add.Tensor]
    assert all(read.meta["val"].is_contiguous() for read in reads) and len(reads) == 2


def test_bucket_leaves_other_blocks_apart():
    text = f"""
        v: parameter f32[2]
        w: parameter f32[4]
        a = gather(v)  # {GATHERED}, op='block 0'
        b = wait(a)
        e = aten.sum.default(b)
        c = gather(w)  # {GATHERED}, op='block 1'
        d = wait(c)
        f = aten.mul.Tensor(d, e)
        return f
    """
    assert rewritten("bucket", text).count("gather(") == 2


def test_bucket_leaves_a_reduction_alone_that_backward_goes_on_with():
    noted = "# phase='backward'"
    reduced = "# phase='backward', kind='reduce_scatter', reason='gradient', op='mlp(x)'"
    text = f"""
        x: argument f32[8, 4]
        y: argument f32[8, 4]
        w: parameter f32[4, 4]
        a = scatter(x)  {reduced}
        b = wait(a)  {reduced}
        c = aten.mm.default(b, w)  {noted}
        d = scatter(y)  {reduced}
        e = wait(d)  {reduced}
        f = aten.mm.default(e, w)  {noted}
        g = aten.add.Tensor(c, f)  {noted}
        return g
    """
    assert rewritten("bucket", text) == said(text).split("\n", 3)[3].replace(
        f"  {reduced}", ""
    ).replace(f"  {noted}", "")
    sums = text.replace("aten.mm.default(b, w)", "aten.mul.Tensor(b, 2.0)")
    assert rewritten("bucket", sums).count("scatter(") == 1


def test_views_of_views_are_one_view():
    text = """
        x: argument f32[4, 8]
        a = aten.view.default(x, [32])
        b = aten.reshape.default(a, [32])
        c = aten.view.default(b, [8, 4])
        d = aten.mul.Tensor(c, 2.0)
        e = aten.view.default(d, [8, 4])
        f = aten.sum.dim_IntList(e, [0])
        return f
    """
    assert rewritten("merge_views", text) == said("""
        a = aten.view.default(x, [8, 4])
        d = aten.mul.Tensor(a, 2.0)
        f = aten.sum.dim_IntList(d, [0])
        return f
    """)


def test_a_view_that_others_read_too_stays():
    text = """
        x: argument f32[4, 8]
        a = aten.view.default(x, [32])
        b = aten.view.default(a, [8, 4])
        c = aten.sum.default(a)
        d = aten.mul.Tensor(b, c)
        return d
    """
    assert rewritten("merge_views", text) == said(text).split("\n", 1)[1]


def test_what_a_reshape_copies_is_no_view_of_what_it_copied():
    text = """
        x: argument f32[4, 8]
        a = aten.slice.Tensor(x, 1, 0, 2)
        b = aten.reshape.default(a, [8])
        c = aten.view.default(b, [4, 2])
        d = aten.mul.Tensor(c, 2.0)
        return d
    """
    assert rewritten("merge_views", text) == said(text).split("\n", 1)[1]


def test_views_that_are_results_stay_themselves():
    text = """
        x: argument f32[4, 8]
        y = aten.mul.Tensor(x, 2.0)
        a = aten.view.default(y, [4, 8])
        b = aten.view.default(y, [32])
        c = aten.view.default(b, [8, 4])
        return a, b, c
    """
    assert rewritten("merge_views", text) == said(text).split("\n", 1)[1]


def test_lifetime_updates_a_parameter_as_soon_as_its_gradient_is_there():
    text = """
        v: parameter f32[8]
        w: parameter f32[8]
        x: argument f32[8]
        g = aten.exp.default(x)  # phase='backward'
        h = aten.sin.default(x)  # phase='backward'
        i = aten.sub.Tensor(v, g)  # phase='update'
        j = aten.sub.Tensor(w, h)  # phase='update'
        k = aten.copy_.default(v, i)  # phase='update'
        m = aten.copy_.default(w, j)  # phase='update'
        return k, m
    """
    assert rewritten("lifetime", text) == said("""
        g = aten.exp.default(x)
        i = aten.sub.Tensor(v, g)
        k = aten.copy_.default(v, i)
        h = aten.sin.default(x)
        j = aten.sub.Tensor(w, h)
        m = aten.copy_.default(w, j)
        return k, m
    """)


def test_lifetime_writes_an_input_behind_all_who_read_it():
    text = """
        v: parameter f32[8]
        x: argument f32[8]
        g = aten.exp.default(x)  # phase='backward'
        i = aten.sub.Tensor(v, g)  # phase='update'
        h = aten.mul.Tensor(v, x)  # phase='backward'
        k = aten.copy_.default(v, i)  # phase='update'
        return k, h
    """
    lines = rewritten("lifetime", text).splitlines()
    assert lines.index("h = aten.mul.Tensor(v, x)") < lines.index("k = aten.copy_.default(v, i)")


def test_overlap_begins_what_is_made_of_inputs_with_the_step():
    text = """
        x: argument f32[64, 64]
        n: argument f32[]
        c = aten.mm.default(x, x)
        s = aten.mul.Tensor(n, 2.0)
        a = reduce(s)  # reason='explicit'
        b = wait(a)  # reason='explicit'
        e = aten.mul.Tensor(c, b)
        return e
    """
    assert rewritten("overlap", text) == said("""
        s = aten.mul.Tensor(n, 2.0)
        a = reduce(s)
        c = aten.mm.default(x, x)
        b = wait(a)
        e = aten.mul.Tensor(c, b)
        return e
    """)


def test_overlap_begins_nothing_that_would_not_be_within_the_budget():
    text = """
        x: argument f32[64, 64]
        n: argument f32[]
        c = aten.mm.default(x, x)
        d = aten.mm.default(c, x)
        s = aten.sum.default(d)
        a = reduce(n)  # reason='explicit'
        b = wait(a)  # reason='explicit'
        e = aten.mul.Tensor(s, b)
        return e
    """
    least = 2 * 64 * 64 * 4  # c and d
    first = {}
    for budget in (None, least, least + 4):
        program = program_of(text)
        program.options = replace(program.options, budget=budget)
        PASSES["overlap"](program)
        first[budget] = text_of(program).splitlines()[0]
    begun = "a = reduce(n)"
    assert first[None].startswith(begun) and first[least + 4].startswith(begun)
    assert not first[least].startswith(begun)


def test_backend_ways_exchanges_shares_and_adds_them_in_rank_order():
    text = """
        x: argument f32[8]
        a = scatter(x)  # kind='reduce_scatter'
        b = wait(a)
        return b
    """
    assert rewritten("backend_ways", text, Gloo()) == said("""
        n1 = partita.all_to_all.default(x, 2, 'dp')
        n2 = wait(n1)
        n3 = aten.view.default(n2, [2, -1])
        n4 = aten.select.int(n3, 0, 0)
        n5 = aten.select.int(n3, 0, 1)
        n6 = aten.add.Tensor(n4, n5)
        return n6
    """)


def test_overlap_waits_for_what_is_read_late_where_it_is_read():
    text = """
        x: argument f32[4, 4]
        n: argument f32[]
        a = reduce(n)  # reason='explicit'
        b = wait(a)  # reason='explicit'
        c = aten.mm.default(x, x)
        d = aten.mm.default(c, x)
        e = aten.mul.Tensor(d, b)
        return e
    """
    lines = rewritten("overlap", text).splitlines()
    assert lines.index("b = wait(a)") == lines.index("e = aten.mul.Tensor(d, b)") - 1
    assert lines[0] == "a = reduce(n)"


@pytest.mark.slow
def test_a_recompute_goes_back_through_any_number_of_calls():
    depth = 2 * sys.getrecursionlimit()
    calls = "\n".join(
        f"x{i} = aten.sin.default(x{i - 1})  # phase='forward'" for i in range(1, depth)
    )
    program = program_of(f"""
x0: argument f32[4]
{calls}
g = aten.cos.default(x{depth - 1})  # phase='backward'
return g
""")
    graph = program.graph.graph
    made = recompute(graph, {n for n in graph.nodes if n.target is torch.ops.aten.sin.default})
    drop_unused(graph)
    assert len(made) == depth - 1
    *again, _ = (line.split("  #")[0] for line in text_of(program).splitlines()[:-1])
    assert len(again) == depth - 1 and all("sin" in line for line in again)


def test_what_packs_for_two_gathers_comes_before_both():
    program = program_of("""
        v: parameter f32[4]
        w: parameter f32[4]
        p = aten.neg.default(v)
        q = aten.neg.default(w)
        a = aten.add.Tensor(p, q)
        b = aten.sub.Tensor(q, p)
        g = gather(a)
        h = wait(g)
        k = gather(b)
        m = wait(k)
        e = aten.mul.Tensor(h, m)
        return e
    """)
    nodes = {n.name: n for n in program.graph.graph.nodes}
    packing = [{nodes[name] for name in names} for names in ("pqa", "pqb")]
    graph = sections_of_blocks(program, set(), packing, {}).graph
    graph.lint()  # nothing is read before it is made
    gathers = [n for n in graph.nodes if n.target is GATHER]
    assert len(gathers) == 2
    assert all(n.args[0].op == "call_function" for n in gathers)  # an item of a section
