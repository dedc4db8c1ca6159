"""Does `pt.explain` say what a call will do, and do nothing itself?"""

from __future__ import annotations

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.app.models import GPT
from partita.cli import main
from partita.layout import LayoutError


def spread(mesh, *placements, shape=(8, 16)):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 100
    return pt.distribute_tensor(whole, mesh, placements)


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


PLAN = {"*up.*": {"tp": pt.Shard(0)}, "*down.weight": {"tp": pt.Shard(1)}}
S0, S1, R, P = pt.Shard(0), pt.Shard(1), pt.Replicate(), pt.Partial()


def test_a_call_is_told_with_its_rule_its_rows_and_why_not_the_next_best():
    mesh = pt.dry_mesh(dp=2, tp=4)
    x, w = spread(mesh, S0, S1), spread(mesh, R, S0, shape=(32, 16))
    (op,) = pt.explain(F.linear, x, w).ops
    assert op.op == "linear" and op.rule == "... i * o i + o -> ... o"
    assert list(map(str, op.operands)) == ["f32[8@dp, 16@tp]", "f32[32@tp, 16]"]
    assert list(map(str, op.results)) == ["f32[8@dp, 32@tp]"]
    assert op.work == 2 * 4 * 16 * 8 and op.repeated == () and "test_explain.py:" in op.source
    assert op.chosen("dp").row == "S(0), R, - -> S(0)" and op.chosen("dp").seconds < 1e-9
    chosen, second = op.chosen("tp"), op.runner_up("tp")
    assert chosen.row == "R, S(0), - -> S(1)" and chosen.needs == ("input all_gather 192 B",)
    assert second.row == "S(1), S(1), - -> P" and second.seconds > chosen.seconds
    assert second.nbytes == 384 and second.needs == ("weight all_to_all 384 B",)
    text = str(op)
    assert "the next best, S(1), S(1), - -> P, costs 40 us more: weight all_to_all 384 B" in text
    assert "all_gather over tp: 8@dp 16@tp -> 8@dp 16, 192 B" in text


CALLS = {
    "linear": lambda x, y: F.linear(x, y),
    "add": lambda x, y: x + y,
    "sum": lambda x, y: x.sum(),
    "softmax over what is split": lambda x, y: F.softmax(x, 0),
    "no rule": lambda x, y: torch.linalg.svdvals(x),
    "written as others": lambda x, y: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "redistributed": lambda x, y: x.redistribute(placements=[R, S1]),
    "several": lambda x, y: torch.relu(x @ y.T).square().mean() + y.sum(),
    "made inside": lambda x, y: x + pt.ones(x.shape, device_mesh=x.device_mesh, placements=[R, S1]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(8, 16), (7, 13)], ids=["even", "uneven"])
def test_the_bytes_and_moves_are_those_of_the_ledger(name, shape):
    def program(mesh):
        x, y = spread(mesh, S0, R, shape=shape), spread(mesh, S1, P, shape=shape)
        with pt.ledger() as nothing:
            told = pt.explain(CALLS[name], x, y)
        with pt.ledger() as log:
            CALLS[name](x, y)
        return told, log, nothing

    with pt.ranks(dp=2, tp=2) as world:
        for told, log, nothing in world.run(program):
            assert not nothing.moves
            assert told.nbytes == log.bytes
            assert [(m.kind, m.axes) for m in told.moves] == [(m.kind, m.axes) for m in log.moves]


def test_a_module_is_told_call_by_call_with_totals():
    def program(mesh):
        torch.manual_seed(0)
        model = pt.parallelize(nn.Sequential(Block(), Block()), mesh, PLAN)
        x = spread(mesh, S0, R)
        told = pt.explain(model, x)
        with pt.ledger() as log:
            loss = model(x).square().mean()
        with pt.ledger() as back:
            loss.backward()
        return told, pt.explain(lambda: model(x).square().mean().backward()), log, back

    with pt.ranks(dp=2, tp=2) as world:
        told, whole, log, back = world.run(program)[0]
    names = ["layer_norm", "linear", "gelu", "linear", "add"]
    assert [op.op for op in told.ops] == 2 * names
    assert [op.module for op in told.ops][:4] == [
        f"sequential.0{part}" for part in (".norm", ".up", "", ".down")
    ]
    assert told.work == 2 * 2 * 2 * 4 * 16 * 32
    lines = str(told).splitlines()
    assert lines[0] == "Sequential on dp=2 tp=2" and len(lines) == 2 + 10 + 1
    assert "sequential.1.down" in lines[-3]
    assert whole.goes_backward and whole.backward_nbytes == 0
    assert whole.nbytes == log.bytes + back.bytes


def test_what_a_backward_will_send_is_told_before_it_is_sent():
    def program(mesh):
        x, w = spread(mesh, S0, S1).requires_grad_(), spread(mesh, R, S0, shape=(32, 16))
        told = pt.explain(F.linear, x, w)
        y = F.linear(x, w)
        with pt.ledger() as log:
            y.to_local().sum().backward()
        return told, log

    with pt.ranks(dp=2, tp=2) as world:
        told, log = world.run(program)[0]
    assert told.backward_nbytes == log.bytes > 0
    assert told.moves[0].backward == log.moves[0].kind == "reduce_scatter"


@pytest.mark.slow
def test_the_gathers_of_zero_are_told_by_block():
    def program(mesh):
        model = pt.zero(nn.Sequential(Block(), Block()), mesh, axis="dp", stage=3)
        x = spread(mesh, S0)
        with pt.ledger() as nothing:
            told = pt.explain(model, x)
        shapes = [tuple(p.to_local().shape) for p in model.parameters()]
        return told, nothing, shapes, model(x).to_local()

    with pt.ranks(dp=2) as world:
        told, nothing, shapes, _ = world.run(program)[0]
    assert not nothing.moves and shapes[0] == (8,)
    gathers = [move for move in told.moves if move.reason == "gather"]
    assert len(gathers) == 2 * 6
    parameters = sum(p.numel() for p in Block().parameters())
    assert sum(m.nbytes for m in gathers) == 2 * 4 * parameters // 2
    assert told.backward_nbytes == told.nbytes  # each gather's transpose scatters as much


def test_nothing_is_computed_and_nothing_is_changed():
    mesh = pt.dry_mesh(dp=2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)
            self.seen = None

        def forward(self, x):
            self.seen = self.drop(self.norm(x))
            return self.seen

    model = pt.parallelize(Model(), mesh)
    mean, state = model.norm.running_mean, torch.get_rng_state()
    before = mean.to_local().clone()
    x = spread(mesh, S0).requires_grad_()
    pt.explain(lambda: model(x).sum().backward())
    assert model.seen is None and model.norm.running_mean is mean
    assert torch.equal(mean.to_local(), before) and model.norm.num_batches_tracked.item() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None and all(p.grad is None for p in model.parameters())


def test_plans_of_an_explanation_are_not_kept():
    mesh = pt.dry_mesh(dp=2)
    x = spread(mesh, S0)
    (x * 3).sum()
    before = pt.cache_info().size
    pt.explain(lambda x: (x * 3).sum(), x)
    assert pt.cache_info().size == before


def test_a_thousand_ranks_are_explained_without_memory():
    mesh = pt.dry_mesh(device_type="meta", dp=1024, tp=8)
    with torch.device("meta"):
        model = Block(8192)
    pt.parallelize(model, mesh, PLAN)
    pt.zero(model, mesh, axis="dp", stage=3)
    x = pt.zeros(1024, 8192, device_mesh=mesh, placements=[S0, R])
    told = pt.explain(model, x)
    (gather, *_) = (m for m in told.moves if m.before.shape == (32768, 8192))
    assert gather.nbytes == 1023 * 4 * 32768 * 8192 // (1024 * 8)
    assert told.work == 2 * 2 * 1 * 8192 * 32768 / 8


def test_remat_and_compiled_blocks_are_entered():
    mesh = pt.dry_mesh(dp=2)
    model = pt.parallelize(nn.Sequential(Block(), Block()), mesh)
    model[0] = pt.remat(model[0])
    step = pt.compile(lambda x: model(x).sum())
    told = pt.explain(step, spread(mesh, S0))
    assert [op.op for op in told.ops].count("linear") == 4


@pytest.mark.parametrize(("split", "share"), [(0, 0.5), (2, 1.0)])
def test_of_causal_attention_what_its_mask_hides_is_no_work(split, share):
    mesh = pt.dry_mesh(dp=2)
    x = spread(mesh, pt.Shard(split), shape=(2, 8, 16, 4))
    whole, causal = (
        pt.explain(F.scaled_dot_product_attention, x, x, x, is_causal=is_causal)
        for is_causal in (False, True)
    )
    # Of queries that are split each rank masks its own, and computes what it hides.
    assert whole.work == 2 * 2 * 8 * 16 * 16 * 4
    assert causal.work == whole.work * share


def test_work_is_what_a_simulation_counts():
    mesh = pt.dry_mesh(device_type="meta", dp=2)
    with torch.device("meta"):
        model = GPT(layers=1, width=32, heads=2, context=16)
        local = torch.randint(0, 256, (2, 16))
    pt.parallelize(model, mesh)
    x = pt.DTensor.from_local(local, mesh, [pt.Shard(0)])
    found = pt.simulate(lambda x: model(x).detach(), mesh, "h100", [x])
    assert pt.explain(model, x).work == found.flops > 0


@pytest.mark.parametrize("placements", [[S0, R], [R, S0], [S0, S0]])
@pytest.mark.parametrize("rows", [1, 5, 7])
def test_work_of_uneven_pieces_is_that_of_the_first_rank_which_has_most(rows, placements):
    mesh = pt.dry_mesh(device_type="meta", dp=2, tp=3)
    x = pt.zeros(rows, 4, device_mesh=mesh, placements=placements)
    weight = pt.zeros(8, 4, device_mesh=mesh, placements=[R, R])
    told = pt.explain(F.linear, x, weight)
    mine = pt.DTensor.to_local(x).shape[0]  # this is the first rank
    assert told.work == 2 * mine * 8 * 4
    found = pt.simulate(lambda x: F.linear(x, weight), mesh, "h100", [x])
    assert found.flops == told.work
    assert "operations on the first rank, which has the largest pieces" in str(told)
    even = pt.explain(F.linear, pt.zeros(6, 4, device_mesh=mesh, placements=placements), weight)
    assert "operations on a rank" in str(even)


def test_a_ledger_counts_the_work_of_the_largest_pieces():
    mesh = pt.dry_mesh(dp=3)
    x = pt.zeros(4, 4, device_mesh=mesh, placements=[S0])  # two rows on the first rank
    whole = pt.zeros(4, 4, device_mesh=mesh, placements=[R])
    with pt.ledger() as log:
        x @ whole
        whole @ whole
    (work,) = log.repeated
    assert work.share == 4 / (4 + 2)


def test_a_name_of_a_module_is_one_line_and_moves_no_cursor():
    class Evil(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"part\x1b[2J\nfree": nn.Linear(16, 16)})

        def forward(self, x):
            return F.relu(self.parts["part\x1b[2J\nfree"](x)) * 2

    mesh = pt.dry_mesh(dp=2)
    told = pt.explain(pt.parallelize(Evil(), mesh), spread(mesh, S0))
    for text in (str(told), str(told.ops[0])):
        assert r"part\x1b[2J\nfree" in text and "\x1b" not in text


def test_a_call_without_dtensors_plans_nothing():
    told = pt.explain(torch.add, torch.ones(3), 1)
    assert told.ops == () and "nothing is planned" in str(told)


class TestErrors:
    def test_a_value_that_is_asked_for_is_named_with_its_line(self):
        mesh = pt.dry_mesh(dp=2)

        def asks(x):
            if x.sum().item() > 0:
                return x
            return -x

        with pytest.raises(LayoutError, match=r"reads the value of a tensor \(at .*explain.py"):
            pt.explain(asks, spread(mesh, S0))
        with pytest.raises(LayoutError, match="reads the value"):
            pt.explain(torch.nonzero, spread(mesh, S0))
        assert (spread(mesh, S0) + 1).placements == (S0,)  # and what was there is put back

    def test_a_step_of_an_optimizer_is_refused_before_it_changes_anything(self):
        mesh = pt.dry_mesh(dp=2)
        model = pt.parallelize(nn.Linear(16, 16), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        x = spread(mesh, S0)

        def step():
            model(x).sum().backward()
            optimizer.step()

        with pytest.raises(LayoutError, match="steps an optimizer"):
            pt.explain(step)
        assert not optimizer.state and all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize("wrong", [None, "F.linear", 3, torch.zeros(2), [F.linear]])
    def test_what_cannot_be_called_is_named(self, wrong):
        with pytest.raises(
            LayoutError, match=r"fn is .*, which cannot be called \(at .*explain.py"
        ):
            pt.explain(wrong, spread(pt.dry_mesh(dp=2), S0))

    def test_an_iterator_among_the_arguments_is_named(self):
        x = spread(pt.dry_mesh(dp=2), S0)
        for given in ((t for t in [x]), iter([x]), {"rows": [map(torch.exp, [x])]}):
            with pytest.raises(LayoutError, match="which can be iterated only once"):
                pt.explain(list, given)

    def test_a_function_of_which_a_call_runs_nothing_is_named(self):
        def make_rows(x):
            yield x + 1

        async def fetch(x):
            return x + 1

        class Rows(nn.Module):
            def forward(self, x):
                yield x + 1

        class Called:
            def __call__(self, x):
                yield x + 1

        x = spread(pt.dry_mesh(dp=2), S0)
        for fn in (make_rows, fetch, Rows(), Called(), functools.partial(make_rows)):
            with pytest.raises(LayoutError, match="a generator or a coroutine function"):
                pt.explain(fn, x)

    def test_what_the_call_itself_would_raise_is_raised(self):
        mesh, other = pt.dry_mesh(dp=2), pt.dry_mesh(tp=2)
        with pytest.raises(LayoutError, match="two meshes"):
            pt.explain(torch.add, spread(mesh, S0), spread(other, S0))
        with pytest.raises(RuntimeError, match="same reduction dim"):
            pt.explain(torch.matmul, spread(mesh, S0), spread(mesh, S0))


class TestCommand:
    def run(self, capsys, *argv):
        code = main(["explain", *argv])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    def test_a_call_is_explained_from_its_text(self, capsys):
        call = "F.linear(f32[8@dp, 16], f32[32@tp, 16])"
        code, text = self.run(capsys, call, "--mesh", "dp=2,tp=4")
        assert code == 0 and "gives  f32[8@dp, 32@tp]" in text
        args = ("--args", "f32[8@dp, 16] f32[32@tp, 16]")
        assert self.run(capsys, "F.linear", "--mesh", "dp=2,tp=4", *args) == (0, text)

    def test_lists_names_and_numbers_are_read(self, capsys):
        call = "torch.cat([f32[8@dp, 16], f32[8@dp, 3]], dim=-1)"
        code, text = self.run(capsys, call, "--mesh", "dp=2")
        assert code == 0 and "gives  f32[8@dp, 19]" in text
        code, text = self.run(capsys, "Tensor.sum(bf16[8@dp] {sum tp}, 0)", "--mesh", "dp=2,tp=2")
        assert code == 0 and "bf16[] {sum dp, sum tp}" in text
        code, text = self.run(capsys, "torch.sum(f32[8, 4@dp], (0, 1), True)", "--mesh", "dp=2")
        assert code == 0 and "f32[1, 1] {sum dp}" in text

    @pytest.mark.parametrize(
        ("call", "mesh", "said"),
        [
            ("F.nothing(f32[8])", "dp=2", "no function 'F.nothing'"),
            ("linear", "dp=2", "no function 'linear'"),
            ("no_module:f(f32[8])", "dp=2", "No module named 'no_module'"),
            ("torch.exp(f32[8@tp])", "dp=2", "no axis 'tp' on mesh dp=2"),
            ("torch.exp(f32[8@dp, 4@dp])", "dp=2", "has two roles"),
            ("torch.exp(q9[8])", "dp=2", "cannot read the dtype 'q9'"),
            ("torch.exp(f32[8@])", "dp=2", "cannot read '8@'"),
            ("torch.exp(spam)", "dp=2", "cannot read 'spam'"),
            ("torch.exp([f32[8]", "dp=2", "cannot read"),
            ("torch.sum(f32[8@dp], dim=5)", "dp=2", "out of range"),
            ("torch.exp(f32[8])", "dp", "cannot read 'dp' in the mesh"),
            ("torch.exp(f32[8])", "dp=0", "at least one rank"),
            ("torch.exp(f32[8])", "dp=²", "cannot read 'dp=²' in the mesh"),
            ("torch.exp(f32[8])", "dp=٣", "cannot read 'dp=٣' in the mesh"),
            ("torch.exp(f32[8])", "dp=" + "9" * 5000, "cannot read 'dp=9999"),
            ("torch.exp(f32[8])", "dp=99999999999999999999", "is too large"),
            ("torch.exp(f32[8])", "dp=16777217", "at most 16,777,216 ranks"),
            ("torch.sum", "dp=2", "expected one of:\n * (Tensor input, *,"),
        ],
    )
    def test_what_cannot_be_read_is_one_clear_error(self, capsys, call, mesh, said):
        code, text = self.run(capsys, call, "--mesh", mesh)
        assert code == 2 and said in text and "Traceback" not in text

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("return {}['k']", "mine:f raised KeyError (at mine.py:2): 'k'"),
            ("return 1 / 0", "mine:f raised ZeroDivisionError (at mine.py:2): division by zero"),
            ("raise SystemExit(0)", "mine:f raised SystemExit (at mine.py:2): 0"),
            ("return f(x)", "mine:f raised RecursionError (at mine.py:2): maximum recursion"),
            ("return x.sum(dim=7)", "mine:f raised IndexError (at mine.py:2): Dimension out"),
            (
                "return (",
                "importing mine raised SyntaxError: '(' was never closed (mine.py, line 2)",
            ),
            ("pass\n1 / 0", "importing mine raised ZeroDivisionError (at mine.py:3): division by"),
            ("pass\nimport sys\nsys.exit(0)", "importing mine raised SystemExit (at mine.py:4): 0"),
        ],
    )
    def test_whatever_a_function_or_its_module_raises_is_one_error_with_its_line(
        self, capsys, tmp_path, monkeypatch, body, said
    ):
        (tmp_path / "mine.py").write_text(f"def f(x):\n    {body}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        code, text = self.run(capsys, "mine:f(f32[8@dp])", "--mesh", "dp=2")
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        assert code == 2 and said in text and "Traceback" not in text


@pytest.mark.parametrize("mesh", ["dp=²", "dp=0", "dp=99999999999999999999", "dp", ""])
def test_a_mesh_that_cannot_be_simulated_is_one_clear_error(mesh, capsys):
    assert main(["simulate", "--model", "gpt", "--mesh", mesh]) == 2
    assert "is not an axis of a named model" not in capsys.readouterr().err


def test_an_amount_of_memory_without_a_unit_is_refused(capsys):
    assert main(["plan", "--model", "gpt", "--ranks", "4", "--memory", "80"]) == 2
    assert "--memory 80 is without a unit: write 80GB or 80GiB" in capsys.readouterr().err


def test_moves_between_split_dimensions_are_told_on_every_mesh():
    """What they send to each rank is reckoned from layouts: nobody asks a tensor for its value."""
    mesh = pt.dry_mesh(dp=2, tp=3)
    x = spread(mesh, S0, R, shape=(6, 6))
    told = pt.explain(lambda x: x.redistribute(placements=[S1, S0]), x)
    assert told.nbytes > 0
    with pt.ranks(dp=2, tp=3) as world:

        def run(mesh):
            with pt.ledger() as log:
                spread(mesh, S0, R, shape=(6, 6)).redistribute(placements=[S1, S0])
            return log.bytes

        assert world.run(run)[0] == told.nbytes
