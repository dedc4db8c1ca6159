"""Does attention in a captured step go without a mask that says what `is_causal` says?

It does where the mask is computed from constants alone; every other mask stays. Values are those of
the step as it runs in eager.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from tests.programs import stacks

B, H, T, D = 2, 4, 6, 8
INF = math.inf


def attention_of(step):
    """For each call of attention in its graph: is it causal, has it a mask?"""
    found = []
    for node in step.program.graph.graph.nodes:
        if "attention_for_cpu.default" in str(node.target):
            causal = len(node.args) > 4 and node.args[4]
            found.append((causal, node.kwargs.get("attn_mask") is not None))
    return found


CAUSAL, NONE, MASKED = (True, False), (False, False), (False, True)


def operands(queries=T, keys=T, groups=H, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, queries, D), (B, groups, keys, D), (B, groups, keys, D)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def run_both(attend, *given):
    """The compiled step, and its result and gradients beside those of eager."""

    def step(*given):
        leaves = [x.detach().requires_grad_() for x in given]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out.sin().sum(), leaves)

    compiled = pt.compile(step, backend="graph")
    torch.manual_seed(0)
    found = compiled(*given)
    torch.manual_seed(0)
    return compiled, found, step(*given)


def check_equal(found, wanted, near=1e-6):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


def places(n):
    return torch.arange(n)


def later(queries, keys=None):
    return places(queries)[:, None] < places(queries if keys is None else keys)


def written_in_place(t):
    mask = torch.full((t, t), -INF)
    mask = torch.triu(mask, diagonal=1)
    mask *= places(t) > torch.zeros(t, 1) - 1
    return torch.nan_to_num(mask, nan=0.0, neginf=-INF)


def as_the_tutorial_has_it(t):
    mask = (torch.triu(torch.ones(t, t)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, -INF).masked_fill(mask == 1, 0.0)


SAYS_CAUSAL = {
    "tril": lambda t: torch.ones(t, t, dtype=torch.bool).tril(),
    "comparison": lambda t: ~later(t),
    "of each batch and head": lambda t: (~later(t))[None, None].expand(B, H, t, t),
    "-inf": lambda t: torch.zeros(t, t).masked_fill(later(t), -INF),
    "least number": lambda t: torch.full((t, t), torch.finfo(torch.float32).min).triu(1),
    "written in place": written_in_place,
    "tutorial": as_the_tutorial_has_it,
    "nn.Transformer": nn.Transformer.generate_square_subsequent_mask,
    "list": lambda t: torch.tensor([[j <= i for j in range(t)] for i in range(t)]),
}


@pytest.mark.parametrize("name", SAYS_CAUSAL)
def test_a_mask_that_hides_later_keys_is_left_out(name):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, SAYS_CAUSAL[name](q.shape[-2]))

    step, found, wanted = run_both(attend, *operands())
    assert attention_of(step) == [CAUSAL]
    check_equal(found, wanted)
    _, _, causal = run_both(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *operands()
    )
    assert all(map(torch.equal, found, causal))


SAYS_NOTHING = {
    "ones": lambda t, s: torch.ones(1, 1, 1, s, dtype=torch.bool),
    "zeros": lambda t, s: torch.zeros(t, s),
    "comparison": lambda t, s: places(t)[:, None] >= places(s) - s,
}


@pytest.mark.parametrize("keys", [T, T - 2])
@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_a_mask_that_hides_nothing_is_left_out(name, keys):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, SAYS_NOTHING[name](T, keys))

    step, found, wanted = run_both(attend, *operands(keys=keys))
    assert attention_of(step) == [NONE]
    check_equal(found, wanted)


def written_through_a_view(t):
    mask = ~later(t)
    mask[0].fill_(True)
    return mask


def seen_before_it_was_written(t):
    mask = torch.ones(t, t, dtype=torch.bool).tril()
    seen = mask.view(1, 1, t, t)
    mask.fill_(True)
    return seen


def written_behind_its_name(t):
    mask = ~later(t)
    mask.data.logical_not_()
    return mask


OTHERS = {
    "window": lambda q, t: ~later(t) & (places(t)[:, None] - places(t) < 3),
    "one key less": lambda q, t: ~later(t) & ((places(t)[:, None] != t - 1) | (places(t) != 0)),
    "one key more": lambda q, t: ~later(t) | ((places(t)[:, None] == 0) & (places(t) == t - 1)),
    "one head differs": lambda q, t: ~later(t) | (places(H)[None, :, None, None] == 2),
    "two texts in a row": lambda q, t: ~later(t) & (places(t)[:, None] // 3 == places(t) // 3),
    "of an input": lambda q, t: ~later(t) & (q[..., :1] == q[..., :1]),
    "draws": lambda q, t: ~later(t) & (torch.rand(t, t) >= 0),
    "biases": lambda q, t: torch.zeros(t, t).masked_fill(later(t), -1e4),
    "positions": lambda q, t: -(places(t)[:, None] - places(t)).abs().float(),
    "written through a view": lambda q, t: written_through_a_view(t),
    "seen before it was written": lambda q, t: seen_before_it_was_written(t),
    "written behind its name": lambda q, t: written_behind_its_name(t) | ~later(t),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_mask_stays(name):
    def attend(q, k, v):
        mask = OTHERS[name](q.detach(), q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, mask)

    step, found, wanted = run_both(attend, *operands())
    assert attention_of(step) == [MASKED]
    check_equal(found, wanted)


@pytest.mark.parametrize(("queries", "keys"), [(4, 6), (6, 4), (1, 6)])
def test_with_other_numbers_of_queries_and_keys_it_is_the_first_queries_that_count(queries, keys):
    first = ~later(queries, keys)
    for mask, wanted_calls in ((first, CAUSAL), (first.flip(-2, -1), MASKED)):

        def attend(q, k, v, mask=mask):
            made = ~later(queries, keys)
            if mask is not first:
                made = made.flip(-2, -1)
            return F.scaled_dot_product_attention(q, k, v, made)

        step, found, wanted = run_both(attend, *operands(queries, keys))
        assert attention_of(step) == [wanted_calls]
        check_equal(found, wanted)


def test_with_dropout_the_mask_stays_with_its_kernel():
    """Which weights are dropped is the choice of the kernel that eager takes."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, ~later(T), dropout_p=0.3)

    step, found, wanted = run_both(attend, *operands())
    check_equal(found, wanted)
    assert "aten.lt.Tensor" in str(step.graph)


def test_in_half_precision_only_infinity_hides_a_key_for_sure():
    """A score may be larger than the largest number of float16 here: it is added up in float32."""
    q, k, v = operands(dtype=torch.float16)

    def attend(least):
        def run(q, k, v):
            mask = torch.full((T, T), least, dtype=torch.float16).triu(1)
            return F.scaled_dot_product_attention(q, k, v, mask)

        return run

    for least, calls in ((-INF, [CAUSAL]), (torch.finfo(torch.float16).min, [MASKED])):
        step = pt.compile(attend(least), backend="graph")
        check_equal([step(q, k, v)], [attend(least)(q, k, v)], 1e-3)
        assert attention_of(step) == calls


# -- what may change between calls -----------------------------------------------------------------


def test_a_mask_that_is_given_or_kept_in_a_buffer_is_that_of_each_call():
    kept = nn.Module()
    kept.register_buffer("mask", ~later(T))

    @pt.compile(backend="graph")
    def step(q, k, v, given):
        one = F.scaled_dot_product_attention(q, k, v, given)
        return one, F.scaled_dot_product_attention(q, k, v, kept.mask)

    q, k, v = operands()
    for mask in (~later(T), torch.ones(T, T, dtype=torch.bool), ~later(T) | (places(T) == 3)):
        kept.mask.copy_(mask)
        wanted = F.scaled_dot_product_attention(q, k, v, mask)
        check_equal(step(q, k, v, mask), [wanted, wanted])
    assert attention_of(step) == [MASKED, MASKED] and len(step.reasons) == 1


def test_a_mask_of_numbers_that_change_is_made_anew():
    settings = SimpleNamespace(
        hidden=-1e31, window=T, rows=[[j <= i for j in range(T)] for i in range(T)]
    )

    def attend(q, k, v):
        far = places(T)[:, None] - places(T) >= settings.window
        by_number = torch.full((T, T), settings.hidden).triu(1)
        return (
            F.scaled_dot_product_attention(q, k, v, ~later(T) & ~far),
            F.scaled_dot_product_attention(q, k, v, by_number),
            F.scaled_dot_product_attention(q, k, v, torch.tensor(settings.rows)),
        )

    step = pt.compile(attend, backend="graph")
    given = operands()
    changes = [{}, {"window": 2}, {"hidden": -1.0}, {"rows": [[True] * T] * T}, {"window": T}]
    for change in changes:
        vars(settings).update(change)
        check_equal(step(*given), attend(*given))


# -- blocks ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of attention, with the mask that `mask_of` makes of what it is given."""

    def __init__(self, number, mask_of):
        super().__init__()
        self.number, self.mask_of = number, mask_of
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x, mask):
        mask = self.mask_of(self.number, mask)
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self, mask_of, masks):
        super().__init__()
        self.first = nn.Linear(H * D, H * D)
        self.blocks = nn.ModuleList(Block(i, mask_of) for i in range(4))
        self.masks = masks

    def forward(self, x):
        x, masks = self.first(x), self.masks(x.shape[1])
        for i, block in enumerate(self.blocks):
            x = block(x, masks[i % len(masks)])
        return x


def shows(number, at):
    return at[:, None] >= at


def shows_after_more(number, at):
    return shows(number, at) & (at[:, None] >= 0) if number == 0 else shows(number, at)


def shows_by_another(number, at):
    one, other = shows(number, at), at <= at[:, None]
    return one if number == 0 else other


def in_turn(t):
    return [places(t), places(t), places(t) // 2]


BLOCKS = {  # the mask of a block, what blocks take, calls of attention, blocks of each structure
    "taken": (lambda i, m: m, lambda t: [~later(t)], [CAUSAL] * 4, [4]),
    "taken, and two in turn": (
        lambda i, m: m,
        lambda t: [~later(t), ~later(t) & (places(t)[:, None] - places(t) < 2)],
        [CAUSAL, MASKED] * 2,
        [2, 2],
    ),
    "cut from what is taken": (
        lambda i, m: m[:, :, :T, :T],
        lambda t: [~later(t + 1)[None, None], later(t + 1).T[None, None] | (places(t + 1) == 0)],
        [CAUSAL, MASKED] * 2,
        [2, 2],
    ),
    "made": (lambda i, m: ~later(T), lambda t: [None], [CAUSAL] * 4, [4]),
    "made, and another by number": (
        lambda i, m: ~later(T) if i % 2 else later(T).T | (places(T) == 0),
        lambda t: [None],
        [MASKED, CAUSAL] * 2,
        [2, 2],
    ),
    "made of what is taken": (shows, in_turn, [CAUSAL, CAUSAL, MASKED, CAUSAL], [3, 1]),
    "made after more": (shows_after_more, in_turn, [CAUSAL, CAUSAL, MASKED, CAUSAL], [3, 1]),
    "made of two": (shows_by_another, in_turn, [CAUSAL, CAUSAL, MASKED, CAUSAL], [3, 1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_each_its_own_mask(name):
    mask_of, masks, calls, structures = BLOCKS[name]
    torch.manual_seed(0)
    model = Layers(mask_of, masks)
    x = torch.randn(B, T, H * D)

    def step(x):
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss, *(p.grad.clone() for p in model.parameters())

    wanted = step(x)
    for blocks in (True, False):
        fast = pt.compile(step, backend="graph", blocks=blocks)
        check_equal(fast(x), wanted, 1e-5)
        assert attention_of(fast) == calls
        if blocks:
            traced = [n for kind, n in fast.program.blocks.structures if kind == "Block"]
            assert traced == structures


class WritesAfterwards(Block):
    """Its mask is another when the block has ended."""

    def forward(self, x):
        made = torch.ones(T, T, dtype=torch.bool).tril()
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, made)
        made.fill_(True)
        z = F.scaled_dot_product_attention(q, k, v, made)
        return x + self.out((y + z).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("blocks", [True, False])
def test_a_mask_that_a_block_writes_is_what_it_was_at_each_call(blocks):
    torch.manual_seed(0)
    model = stacks.Stack((WritesAfterwards(i, None) for i in range(3)), H * D)
    x = torch.randn(B, T, H * D)
    step = pt.compile(lambda x: model(x).detach(), backend="graph", blocks=blocks)
    check_equal([step(x)], [model(x)])
    assert attention_of(step)[:2] == [CAUSAL, NONE]


# -- layouts ---------------------------------------------------------------------------------------

LAYOUTS = {
    "samples": pt.Shard(0),
    "heads": pt.Shard(1),
    "queries and keys": pt.Shard(2),
    "whole": pt.Replicate(),
}


@pytest.mark.slow
@pytest.mark.parametrize("groups", [H, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_in_each_layout_it_is_one_devices_attention(name, groups):
    given = operands(7, 7, groups)
    masks = [
        lambda: ~later(7),
        lambda: torch.zeros(7, 7).masked_fill(later(7), -INF).expand(B, 1, 7, 7),
        lambda: ~later(7) & (places(7)[:, None] - places(7) < 3),
    ]

    def attend(q, k, v):
        return [
            F.scaled_dot_product_attention(q, k, v, mask(), enable_gqa=groups != H)
            for mask in masks
        ]

    def step(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        outs = attend(*leaves)
        loss = sum(out.sin().sum() for out in outs)
        return *outs, *torch.autograd.grad(loss, leaves)

    wanted = step(*given)

    def on_rank(mesh):
        spread = [pt.distribute_tensor(x, mesh, [LAYOUTS[name]]) for x in given]
        fast = pt.compile(step, backend="graph")
        found = [x.full_tensor() for x in fast(*spread)]
        return found, attention_of(fast), fast.key

    with pt.ranks(x=2) as world:
        results = world.run(on_rank)
    for found, calls, _ in results:
        check_equal(found, wanted)
        if name != "queries and keys":  # of which a rank's are not the first ones
            assert calls == [CAUSAL, CAUSAL, MASKED]
    assert len({key for _, _, key in results}) == 1


# -- transformers ----------------------------------------------------------------------------------


def llama(**more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            use_cache=False,
            **more,
        )
    )


def train(model, compiled, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(words):
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = pt.compile(step, backend="graph") if compiled else step
    losses = [run(words) for words in batches]
    losses = [x.full_tensor() if isinstance(x, pt.DTensor) else x for x in losses]
    return run, torch.stack(losses)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [4, 2])
def test_llama_of_transformers_attends_as_it_does_in_eager(groups):
    """In eager it makes no mask; where it is traced it cannot read positions, and makes one."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 37, (B, 8), generator=generator) for _ in range(3)]
    _, wanted = train(llama(num_key_value_heads=groups), False, batches)
    fast, found = train(llama(num_key_value_heads=groups), True, batches)
    assert attention_of(fast) == [CAUSAL] * 2
    check_equal([found], [wanted])

    def on_rank(mesh):
        model = llama(num_key_value_heads=groups)
        pt.zero(model, mesh, "dp", stage=3)
        spread = [pt.distribute_tensor(x, mesh, [pt.Shard(0)]) for x in batches]
        fast, losses = train(model, True, spread)
        return attention_of(fast), losses

    with pt.ranks(dp=2) as world:
        for calls, losses in world.run(on_rank):
            assert calls == [CAUSAL] * 2
            check_equal([losses], [wanted])
