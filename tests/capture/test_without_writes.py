"""A captured graph is rewritten into one without writes, as if it were traced once more."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

CHANNELS_LAST = torch.channels_last
functional = importlib.import_module("partita.capture.functionalize")


def flat_view(x, y):
    x = x * 2
    x.view(-1).add_(1)
    return x.sum(0) + x[0]


def transposed_first(x, y):
    x = x * 2
    before = x.t()
    x.mul_(y)
    return before @ x


def of_itself(x, y):
    x = x.clone()
    x.add_(x).mul_(x)
    return x


def narrower(x, y):
    counts = torch.zeros(3, 3, dtype=torch.int32)
    counts.add_(1).mul_(3)
    half = y.to(torch.bfloat16)
    half.add_(x).mul_(-0.0)
    return counts, half, 1 / half


def signs_of_zero(x, y):
    one, other = torch.zeros(2), torch.zeros(2)
    one.add_(0.0).mul_(0.0).copysign_(torch.tensor(-1.0))
    other.fill_(-0.0)
    third = torch.ones(2).fill_(0.0)
    return 1 / one, 1 / other, 1 / third


def lists(x, y):
    made = [x.clone(), y.clone(), (x + y)[0]]
    torch._foreach_mul_(made, 0.5)
    torch._foreach_add_(made[:2], made[1::-1], alpha=2)
    torch._foreach_addcmul_(made, made, made, 0.1)
    torch._foreach_clamp_min_(made, 0.2)
    return [*made, *torch._foreach_norm(made), *torch._foreach_pow(2.0, made)]


def lazily_conjugated(x, y):
    z = torch.complex(x, y)
    w = z.conj()
    w.mul_(2j)
    z.add_(1j)
    z.conj().t()[0].copy_(z[1])
    return z, w.resolve_conj()


def lazily_negative(x, y):
    x = x.clone()
    minus = torch._neg_view(x)
    minus[1].add_(y[1])
    x.add_(1)
    return x, minus.resolve_neg()


def by_indices(x, y):
    x = x.clone()
    x[torch.tensor([0, 2])] = 1.0
    x.masked_fill_(y > 0.5, 3.0).scatter_add_(0, torch.tensor([[1, 0, 2]]), y)
    return x.index_add_(0, torch.tensor([1]), y[:1])


def drawn(x, y):
    noise = torch.empty_like(x).normal_(0.0, 2.0)
    return noise, F.dropout(y, 0.5, inplace=False), torch.empty(3, 3).t().bernoulli_(0.5)


def argument(x, y):
    y.mul_(2)
    y.unsqueeze(0).squeeze(0).add_(1)
    return x + y


def other_strides(x, y):
    x = x.t().contiguous().t().mul_(y)
    x.add_(1)
    return x.view(-1) if x.is_contiguous() else x.t().reshape(-1)


def slice_of(x, y):
    x = x.clone()
    x[:, 0] = 3
    x[1:].mul_(2)
    return x


def by_its_transpose(x, y):
    x = x * 1
    x.t().mul_(y)
    return x


def shown_otherwise(x, y):
    z = (x * 2).t_().unsqueeze_(0)
    z[:, 1] += y[0]
    pooled = F.adaptive_avg_pool2d(torch.stack([x, y])[None].to(memory_format=CHANNELS_LAST), 1)
    x.add_((y * 3).transpose_(0, 1)).mul_(pooled.sum())
    return z.squeeze_(0), pooled


def a_part_of_a_part(x, y):
    x = x * 1
    row, part = x[1], x[1:].t()
    part[:, 0].add_(10)
    x.unsqueeze(0).permute(1, 2, 0)[2].mul_(y[:, :1])
    y[0, 1:] = row[1:]
    return row, part, x + y


def under_a_split(x, y):
    x = x * 1
    a, b = x.split([1, 2])
    x.add_(1)
    return a, b


def as_other_bits(x, y):
    x.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    z = y * -1
    z.view(torch.int32)[0].bitwise_and_(0x7FFFFFFF)
    return z, x.view(torch.int32)


def unsafe_pieces(x, y):
    z = x * 2
    torch.unsafe_chunk(z, 3)[0].add_(5)
    part = torch.unsafe_split(z, 1)[1]
    z.mul_(y.sum())
    torch.unsafe_split_with_sizes(z, [1, 2], 1)[1].add_(part[:, :2] * 2)
    return z, part


def normed_without_statistics(x, y):
    x.add_(F.batch_norm(x, None, None, training=True))
    return F.instance_norm(y[None])


REWRITTEN = (
    *(as_other_bits, normed_without_statistics),
    *(
        flat_view,
        transposed_first,
        of_itself,
        narrower,
        signs_of_zero,
        lists,
        lazily_conjugated,
        lazily_negative,
        by_indices,
    ),
    *(drawn, argument, other_strides, slice_of, by_its_transpose, a_part_of_a_part),
    *(shown_otherwise,),
)
TRACED = (under_a_split, unsafe_pieces)


@pytest.fixture
def ways(monkeypatch):
    """Which way each graph went."""
    taken = []
    rewrite, trace = functional.rewrite_without_writes, functional.trace_without_writes

    def rewritten(*given):
        found = rewrite(*given)
        taken.append("rewritten")
        return found

    def traced(*given):
        taken.append("traced")
        return trace(*given)

    monkeypatch.setattr(functional, "rewrite_without_writes", rewritten)
    monkeypatch.setattr(functional, "trace_without_writes", traced)
    return taken


def refuse(*given):
    raise functional.UnsureOfWrites


def run(step, *args):
    torch.manual_seed(3)
    args = [a.clone() for a in args]
    found = step(*args)
    return [*(found if isinstance(found, (list, tuple)) else (found,)), *args]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("step", (*REWRITTEN, *TRACED), ids=lambda step: step.__name__)
def test_a_step_that_writes_is_eager_s_bit_for_bit(step, ways, monkeypatch):
    x, y = torch.rand(3, 3), torch.rand(3, 3)
    wanted = run(step, x, y)
    assert_same(run(pt.compile(step, backend="graph"), x, y), wanted)
    assert ways == ["rewritten" if step in REWRITTEN else "traced"]
    monkeypatch.setattr(functional, "rewrite_without_writes", refuse)
    assert_same(run(pt.compile(step, backend="graph"), x, y), wanted)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(x).mean(-1)))


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, foreach=False, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step_is_rewritten_and_its_graph_is_no_larger(name, ways, monkeypatch):
    def trained():
        torch.manual_seed(0)
        model = Model()
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        compiled = pt.compile(step, backend="graph")
        x, y = torch.rand(4, 2, 8), torch.tensor([0, 1, 2, 0])
        losses = [compiled(x, y) for _ in range(3)]
        return [*losses, *model.state_dict().values()], compiled.program

    one, rewritten = trained()
    assert set(ways) == {"rewritten"}
    monkeypatch.setattr(functional, "rewrite_without_writes", refuse)
    other, traced = trained()
    assert set(ways) == {"rewritten", "traced"}
    assert_same(one, other)
    assert len(rewritten.graph.graph.nodes) <= len(traced.graph.graph.nodes)
