"""Does a model on a mesh of processes train as on one device, sending what its plan says?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.app.models import GPT, Llama
from tests.programs.gloo_ranks import run_ranks

STEPS, ROWS, LENGTH = 10, 8, 8


def model(kind: str) -> nn.Module:
    sizes = {"layers": 2, "width": 32, "heads": 4, "context": LENGTH}
    return GPT(**sizes) if kind == "gpt" else Llama(**sizes, groups=2)


def losses(model: nn.Module, mesh: Any = None, parts: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, out = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        start = torch.randint(0, 40, (ROWS, 1), generator=generator)
        text = (start + 3 * torch.arange(LENGTH + 1)) % 97
        optimizer.zero_grad()
        total = 0.0
        for rows in text.chunk(parts):
            halves: Any = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            inputs, targets = halves if mesh is None else pt.distribute_batch(halves, mesh)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / parts
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        out.append(total)
    return out


def one_rank(rank: int, kind: str, sizes: tuple[int, int], sequence: bool, parts: int) -> Any:
    """From meta to trained; what its blocks sent, and what the last gradients cost."""
    mesh = pt.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        made = model(kind)
    plan = (pt.plans.gpt if kind == "gpt" else pt.plans.llama)(sequence=sequence)
    pt.parallelize(made, mesh, plan)
    torch.manual_seed(1)
    pt.materialize(made)
    with pt.ledger() as log:
        found = losses(made, mesh, parts)
    sent = {m.kind for m in log.moves if m.nbytes and m.op.startswith(("blocks", "result of b"))}
    settled = [m.op for m in log.moves if m.reason == "settle" and m.nbytes]
    return found, sent, settled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "sequence", "parts"),
    [
        ("gpt", (2, 1), False, 1),
        ("gpt", (1, 2), False, 1),
        ("llama", (1, 2), True, 1),
        ("llama", (2, 2), True, 2),
        ("gpt", (1, 3), True, 1),
    ],
)
def test_losses_are_those_of_one_process(kind: str, sizes: Any, sequence: bool, parts: int):
    torch.manual_seed(1)
    one = losses(model(kind), parts=parts)
    per_rank = run_ranks(one_rank, sizes[0] * sizes[1], kind, sizes, sequence, parts)
    assert one[-1] < one[0] - 1
    for found, sent, settled in per_rank:
        assert found == per_rank[0][0]
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, one, strict=True))
        assert worst <= (1e-6 if sizes[1] == 1 else 1e-5)
        if sizes[1] > 1:
            assert sent == ({"all_gather", "reduce_scatter"} if sequence else {"all_reduce"})
        # Per step: gradients pending on dp and tp, those pending on one of them, and the norms.
        assert len(settled) <= 3 * STEPS


def a_plan_that_does_not_fit(rank: int) -> str:
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(pt.LayoutError) as error:
        pt.parallelize(model("gpt"), mesh, {"*.qvk.weight": {"tp": pt.Shard(0)}})
    return str(error.value)


def test_a_plan_that_does_not_fit_is_refused_on_every_rank() -> None:
    errors = run_ranks(a_plan_that_does_not_fit, 2)
    assert errors[0] == errors[1]
    assert "'*.qvk.weight' matches no parameter; near: blocks.*.attention.qkv.weight" in errors[0]


def only_rank_0_knows_the_values(rank: int) -> Any:
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(rank)
    made = pt.parallelize(model("llama"), mesh, pt.plans.llama())
    return {name: p.full_tensor().detach() for name, p in made.named_parameters()}


@pytest.mark.slow
def test_the_values_are_rank_0s() -> None:
    torch.manual_seed(0)
    truth = dict(model("llama").named_parameters())
    for found in run_ranks(only_rank_0_knows_the_values, 2):
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], p) for name, p in truth.items())


def an_infinity_on_one_rank(rank: int) -> tuple[float, bool]:
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    made = pt.parallelize(nn.Linear(4, 4), mesh)
    before = made.weight.full_tensor().clone()
    optimizer = torch.optim.AdamW(made.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.ones(2, 4)
    x[1] = 3e38  # the second rank's row
    scaler.scale(made(pt.distribute_batch(x, mesh)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(made.weight.full_tensor(), before)


@pytest.mark.slow
def test_a_grad_scaler_leaves_a_step_out_on_every_rank() -> None:
    assert run_ranks(an_infinity_on_one_rank, 2) == [(4.0, True)] * 2
