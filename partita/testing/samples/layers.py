"""Sample calls for the prover: layers, losses and partita's own ops."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from partita.rules import decompositions
from partita.rules.table.attention import attention, product_by_rows
from partita.rules.table.conv import resized
from partita.rules.table.index import picked

from .values import Part, Sample, b, c, i, u, x


def nn() -> Part:
    def conv(n: int, transposed: bool) -> list[Sample]:
        size, k = (6, 5, 4)[:n], (3, 2, 1)[:n]
        w = (lambda i, o, g: x(i, o // g, *k)) if transposed else (lambda i, o, g: x(o, i // g, *k))
        return [
            c(x(4, 4, *size), w(4, 6, 1), x(6)),
            c(x(4, 4, *size), w(4, 6, 1), None, 2, 1),
            c(x(3, 4, *size), w(4, 6, 2), x(6), groups=2),
            c(x(2, 6, *size), w(6, 6, 6), x(6), 1, 0, *([0] if transposed else [1]), 6),
            c(x(4, *size), w(4, 6, 1), x(6)),
        ]

    scale = [c(x(4, 5, 6), (6,), x(6), x(6)), c(x(5, 6), (6,)), c(x(5, 3, 2), (3, 2), x(3, 2))]
    out: Part = [
        (torch.layer_norm, scale),
        (torch.rms_norm, [c(x(4, 5, 6), (6,), x(6)), c(x(5, 6), (6,)), c(x(5, 3, 2), (3, 2))]),
        (
            torch.group_norm,
            [c(x(5, 6, 3), 3, x(6), x(6)), c(x(4, 4, 2, 2), 1, x(4)), c(x(4, 6, 2), 6)],
        ),
        (
            F.batch_norm,
            [
                c(x(5, 4, 3), x(4), u(4), x(4), x(4)),
                c(x(5, 4), x(4), u(4)),
                c(x(5, 4, 2), None, None, x(4), x(4), True),
                c(x(5, 4), None, None, None, None, True),
            ],
        ),
        (F.instance_norm, [c(x(5, 4, 3), None, None, x(4), x(4)), c(x(4, 2, 3, 2))]),
        (
            F.scaled_dot_product_attention,
            [
                c(x(2, 4, 5, 3), x(2, 4, 7, 3), x(2, 4, 7, 2)),
                c(x(3, 4, 5, 3), x(3, 2, 5, 3), x(3, 2, 5, 3), is_causal=True, enable_gqa=True),
            ],
        ),
        (
            F.interpolate,
            [c(x(4, 2, 4, 5), (7, 6)), c(x(4, 2, 4, 5), scale_factor=2, mode="bilinear")],
        ),
        (F.grid_sample, [c(x(4, 2, 4, 5), x(4, 3, 2, 2), align_corners=False)]),
        (
            torch.batch_norm,
            [c(x(5, 4), x(4), x(4), None, None, True, 0.1, 1e-5, False)],
        ),
        (F.unfold, [c(x(4, 4, 5, 4), 2), c(x(2, 3, 5, 4), (2, 3), padding=1)]),
        (F.fold, [c(x(4, 8, 12), (4, 5), 2)]),
        (F.glu, [c(x(5, 4)), c(x(4, 5, 2), 0)]),
        (F.one_hot, [c(i(6, 5, 4), 6)]),
        (F.cosine_similarity, [c(x(5, 4), x(5, 4)), c(x(5, 4), x(5, 4), 0)]),
        (F.pairwise_distance, [c(x(5, 4), x(5, 4)), c(x(5, 4), x(5, 4), keepdim=True)]),
    ]
    for n in (1, 2, 3):
        out.append((getattr(torch, f"conv{n}d"), conv(n, False)))
        out.append((getattr(torch, f"conv_transpose{n}d"), conv(n, True)))
        shape = (5, 4, 4)[:n]
        pools = [c(x(4, 2, *shape), 2), c(x(2, *shape), 2)]
        for name in ("avg_pool", "adaptive_avg_pool", "max_pool", "adaptive_max_pool"):
            out.append((getattr(F, f"{name}{n}d"), pools))
        out.append((getattr(torch, f"max_pool{n}d"), pools))
        out.append((getattr(F, f"lp_pool{n}d"), [c(u(4, 2, *shape), 2.0, 2)]))
        out.append((getattr(F, f"max_pool{n}d_with_indices"), pools))
        out.append((getattr(F, f"adaptive_max_pool{n}d_with_indices"), pools))
    return out


def losses() -> Part:
    def each(*tensors: torch.Tensor, **more: Any) -> list[Sample]:
        return [c(*tensors, **more, reduction=k) for k in (1, 2, 0)]

    signs = torch.where(b(5, 4), 1.0, -1.0).double()
    sign = signs[:, 0].clone()
    classes = []
    for reduction in (0, 1, 2):
        target = i(4, 5)
        target[3] = -100
        classes += [
            c(x(5, 4), target, None, reduction, -100, 0.0),
            c(x(5, 4), i(4, 5), u(4), reduction, 1, 0.1),
            c(x(5, 4, 2), i(4, 5, 2), u(4), reduction, -100, 0.2),
            c(x(5, 4), u(5, 4), None, reduction, -100, 0.0),
            c(x(5, 4), u(5, 4), u(4), reduction, -100, 0.1),
        ]
    classes.append(c(x(4), i(4), None, 1, -100, 0.0))
    nll = [c(*args[:5]) for args, _ in classes if args[0].shape != args[1].shape]
    n = torch._C._nn
    return [
        (
            (n.mse_loss, n.l1_loss, n.smooth_l1_loss, n.huber_loss),
            each(x(5, 4), x(5, 4)),
        ),
        (n.soft_margin_loss, each(x(5, 4), signs)),
        (n.binary_cross_entropy, [*each(u(5, 4), u(5, 4)), *each(u(5, 4), u(5, 4), weight=u(4))]),
        (
            torch.binary_cross_entropy_with_logits,
            [*each(x(5, 4), u(5, 4)), *each(x(5, 4), u(5, 4), weight=u(4), pos_weight=u(4))],
        ),
        (torch.kl_div, each(x(5, 4), u(5, 4))),
        (torch.poisson_nll_loss, [c(x(5, 4), u(5, 4), True, False, 1e-8, k) for k in (0, 1, 2)]),
        (torch.margin_ranking_loss, each(x(5, 4), x(5, 4), signs)),
        (torch.hinge_embedding_loss, each(x(5, 4), signs)),
        (torch.cosine_embedding_loss, each(x(5, 4), x(5, 4), sign)),
        (torch.triplet_margin_loss, each(x(5, 4), x(5, 4), x(5, 4))),
        (n.multilabel_margin_loss, each(x(5, 4), i(4, 5, 4))),
        (n.multi_margin_loss, [*each(x(5, 4), i(4, 5)), *each(x(5, 4), i(4, 5), weight=u(4))]),
        (n.cross_entropy_loss, classes),
        (n.nll_loss_nd, nll),
    ]


def ours() -> Part:
    """Returns sample calls of partita's own small ops, which decomposed ops use."""

    def heads(
        q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, grouped: bool = False
    ) -> Sample:
        return c(q, k, v, mask, causal, None, grouped)

    q, kv, one = x(2, 4, 5, 3), x(2, 4, 7, 3), x(2, 1, 5, 3)
    mask = b(2, 1, 1, 7) | (torch.arange(7) == 0)
    numbers = i(99, 5, 4)
    return [
        (
            attention,
            [
                heads(q, kv, x(2, 4, 7, 2)),
                heads(q, x(2, 4, 5, 3), x(2, 4, 5, 3), None, True),
                heads(x(3, 4, 5, 3), x(3, 2, 5, 3), x(3, 2, 5, 3), None, False, True),
                heads(x(2, 6, 5, 3), one, x(2, 1, 5, 3), None, True, True),
                heads(q, kv, x(2, 4, 7, 3), x(5, 7)),
                heads(q, kv, x(2, 4, 7, 3), mask),
                heads(q, x(2, 2, 7, 3), x(2, 2, 7, 3), x(2, 1, 5, 7), False, True),
                heads(x(4, 5, 3), x(4, 5, 3), x(4, 5, 3), x(4, 5, 5)),
                heads(q, kv, x(2, 4, 7, 2), None, True),
                heads(x(5, 3), x(7, 3), x(7, 2), None, True),
            ],
        ),
        (product_by_rows, [c(x(2, 5, 3), x(2, 3, 4)), c(x(2, 3, 5, 3), x(3, 3, 4))]),
        (
            decompositions.partial_max,
            [c(x(5, 4), None, False), c(x(5, 4), 0, True, -1), c(numbers, 1, False)],
        ),
        (
            decompositions.first_index,
            [
                c(numbers, numbers.amax(0, True), 0),
                c(i(3, 5, 4), torch.full((5, 1), 2), 1),
                c(numbers, numbers.amax().view(1, 1), None),
            ],
        ),
        (decompositions.is_at_place, [c(x(5, 4), i(5, 1, 4), 0), c(numbers, i(4, 5, 1), -1)]),
        (decompositions.power_sum, [c(x(5, 4), 2, None, False), c(x(5, 4), 3.0, 0, True)]),
        (
            decompositions.target_weight,
            [c(i(4, 5, 2), u(4), 1), c(i(4, 5), None, -100)],
        ),
        (decompositions.reduced, [c(x(5, 4))]),
        (decompositions.subtract_reduced, [c(x(5, 4), x(5, 1))]),
        (
            resized,
            [
                c(x(4, 2, 4, 5), (7, 6), ((7, 6),), {}),
                c(x(4, 2, 4), (8,), (None, 2.0), {"mode": "linear"}),
            ],
        ),
        (
            picked,
            [
                c(x(5, 4), ("index",), i(5, 7)),
                c(x(5, 4), (slice(None), "index"), i(4, 3, 2)),
                c(x(5, 4, 3), (slice(None), "index", slice(0, 2)), i(4, 2)),
                c(x(5, 4, 3), (0, slice(None), "index"), i(3, 2)),
                c(x(5, 4, 3), ("index", "index"), i(5, 2), i(4, 2)),
                c(x(5, 4, 3), ("index", slice(None), "index"), i(5, 2), i(3, 2)),
                c(x(5, 4, 2), (Ellipsis, "index", None), torch.tensor(1)),
                c(x(5, 4, 3), ("index", "index"), i(5, 2), i(4, 1)),
            ],
        ),
    ]
