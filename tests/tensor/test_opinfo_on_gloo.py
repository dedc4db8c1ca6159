"""Are ops of every family right on real ranks, forward and backward, in every class of layouts?

A handful of `partita bench ops`, whose whole list runs in minutes.
"""

from __future__ import annotations

import pytest

import partita as pt
from partita.testing.op_case import Outcome, merge_outcomes, references, run_case
from partita.testing.op_layouts import CLASSES
from tests.programs.gloo_ranks import run_ranks

pytestmark = pytest.mark.slow

FAMILIES = {
    "elementwise": "add mul exp clamp nn.functional.gelu lerp where masked_fill pow",
    "reductions": "sum mean var std.unbiased amax argmax logsumexp cumsum norm prod all",
    "products": "matmul bmm addmm einsum nn.functional.linear nn.functional.bilinear linalg.norm",
    "shapes": "view reshape transpose permute expand cat stack split unbind roll tril diagonal",
    "places": "__getitem__ gather scatter index_select index_add index_put take nonzero",
    "norms": "softmax nn.functional.layer_norm nn.functional.rms_norm nn.functional.batch_norm",
    "losses": "nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss",
    "blocks": """nn.functional.scaled_dot_product_attention nn.functional.conv2d
        nn.functional.embedding nn.functional.max_pool2d nn.functional.pixel_shuffle""",
    "order": "sort topk median unique searchsorted kthvalue",
    "random": "nn.functional.dropout nn.functional.alpha_dropout bernoulli multinomial randn_like",
    "linear algebra": "linalg.inv linalg.svd linalg.solve cholesky",
}


def sweep(rank: int, names: list[str]) -> dict[str, dict[str, Outcome]]:
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found: dict[str, dict[str, Outcome]] = {}
    for name in names:
        refs, _ = references(name, 3)
        found[name] = {
            klass: run_case(mesh, name, i % len(refs), refs[i % len(refs)], klass)
            for i, klass in enumerate(CLASSES)
        }
    return found


@pytest.mark.parametrize("half", [0, 1])
def test_ops_of_each_family_give_what_one_device_gives_on_gloo_ranks(half: int) -> None:
    asked = " ".join(list(FAMILIES.values())[half::2]).split()
    ranks = run_ranks(sweep, 2, asked)
    for name in asked:
        for klass in CLASSES:
            outcome = merge_outcomes([found[name][klass] for found in ranks])
            assert outcome.kind == "right", f"{name} ({klass}): {outcome.detail}"
